"""The routes of files and batches. Knows HTTP; `shelf` keeps both, and `batches` runs the latter."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from mainstem.batch.lines import URLS
from mainstem.batch.runner import Send, to_app
from mainstem.server.apis.bodies import decode_known
from mainstem.server.batches.batches import Batches
from mainstem.server.batches.shelf import BatchObject, FileObject, Shelf, sync
from mainstem.server.batches.upload import Form, read_upload
from mainstem.server.errors import ApiError, wrong
from mainstem.server.fields.openapi import Operation
from mainstem.server.kept.listing import Deleted, Page, page
from mainstem.server.kept.response_store import ENTRY_BYTES
from mainstem.server.parts import Parts
from mainstem.server.transport import BATCH, FILES, json_response

BATCHES = "/v1/batches"
FILE, ONE = f"{FILES}/{{id}}", f"{BATCHES}/{{id}}"

_WINDOW_S = {"24h": 86400}
_MOST_NOTES, _LONGEST_NAME, _LONGEST_NOTE = 16, 64, 512  # of metadata, as at OpenAI

Object = TypeVar("Object", FileObject, BatchObject)


class BatchRequest(Struct):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class BatchRoutes:
    """The routes.

    Args:
        parts: of the server.
        app: the server's application, which answers the requests of batches.

    Raises:
        BadArgument: the folder cannot be used.
    """

    def __init__(self, parts: Parts, app: Any) -> None:
        self._parts, config = parts, parts.config.batch
        self._shelf: Shelf | None = None
        if config.batch_folder is not None:
            self._shelf = Shelf(config.batch_folder, config.batch_bytes, config.batch_age_s, parts.now)
            self._owners = parts.access.names(self._shelf.secret)
            self._names = {tenant: name for name, tenant in self._owners.items()}
            most = parts.config.max_body_bytes
            self.batches = Batches(self._shelf, lambda owner: self._sender(app, owner), parts.now, parts.draining, most)

    def routes(self) -> list[Operation]:
        """Returns them."""
        route = self._route
        return [
            Operation("POST", FILES, self._upload, "Keep a file of requests", None, FileObject),
            route("GET", FILES, self._files, "List files", Page),
            route("GET", FILE, lambda shelf, owner, id: self._file(shelf, owner, id), "Describe a file", FileObject),
            route("GET", f"{FILE}/content", self._content, "Return a file", str),
            route("DELETE", FILE, self._delete, "Delete a file", Deleted),
            Operation("POST", BATCHES, self._create, "Answer a file of requests", BatchRequest, BatchObject),
            route("GET", BATCHES, self._list, "List batches", Page),
            route("GET", ONE, self._batch, "Describe a batch", BatchObject),
            route("POST", f"{ONE}/cancel", self._cancel, "End a batch", BatchObject),
        ]

    @asynccontextmanager
    async def running(self, app: object) -> AsyncIterator[None]:
        """Runs batches while the server does."""
        if self._shelf is None:
            yield
            return
        async with anyio.create_task_group() as group:
            group.start_soon(self.batches.run)
            yield
            group.cancel_scope.cancel()
        self._shelf.close()

    def _sender(self, app: Any, owner: str) -> Send | None:
        """Returns what sends the requests of an owner, in the name of its key."""
        if owner not in self._owners:
            return None
        key = self._parts.access.api_key(self._owners[owner])
        return to_app(app, {} if key is None else {"authorization": f"Bearer {key}"}, {BATCH: True})

    def _asked(self, http: HttpRequest) -> tuple[Shelf, str]:
        tenant = self._parts.access.tenant(http.headers)
        if self._shelf is None:
            message = f"This server has no {FILES} and no {BATCHES}: start it with --batch-folder FOLDER."
            raise ApiError(404, message, code="no_batches")
        return self._shelf, self._names[tenant]

    def _route(
        self, method: str, path: str, answer: Callable[..., Struct | Response], summary: str, response: type
    ) -> Operation:
        """Returns a route that answers by the owner, the id in its path, and for a page by its query."""

        async def endpoint(http: HttpRequest) -> Response:
            query = [http.query_params] if response is Page else []
            given = (*self._asked(http), *http.path_params.values(), *query)
            made = await anyio.to_thread.run_sync(lambda: answer(*given))
            return made if isinstance(made, Response) else json_response(made)

        return Operation(method, path, endpoint, summary, None, response)

    # ---- files

    async def _upload(self, http: HttpRequest) -> Response:
        shelf, owner = self._asked(http)
        id = f"file-{secrets.token_hex(16)}"
        part = shelf.path(id).with_suffix(".part")
        made = None

        def forget() -> None:
            part.unlink(missing_ok=True)
            shelf.forget(owner, id)

        try:
            with open(part, "xb", opener=_private) as file:
                form = await read_upload(http, file, lambda size: shelf.reserve(owner, id, size))
            made = await anyio.to_thread.run_sync(self._keep, shelf, owner, id, form)
            return json_response(made)
        except OSError as error:
            raise ApiError(507, shelf.said(error), code="no_space") from None
        finally:
            if made is None:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(forget)

    def _keep(self, shelf: Shelf, owner: str, id: str, form: Form) -> FileObject:
        fields, part = form.fields, shelf.path(id).with_suffix(".part")
        if fields.pop("purpose", None) != "batch":
            raise wrong("purpose", "must be 'batch'")
        if fields:
            raise wrong(next(iter(fields)), "unknown field; this route has file and purpose")
        size, now = part.stat().st_size, int(self._parts.now())
        made = FileObject(
            id=id, bytes=size, created_at=now, expires_at=shelf.expires(now), filename=form.filename or "",
            purpose="batch",
        )  # fmt: skip
        sync(part)
        part.rename(shelf.path(id))
        shelf.put(owner, made)
        return made

    def _file(self, shelf: Shelf, owner: str, id: str) -> FileObject:
        return _found(shelf.get(owner, id, FileObject), id)

    def _files(self, shelf: Shelf, owner: str, query: Any) -> Page:
        wanted = query.get("purpose")
        return _page([each for each in shelf.objects(owner, FileObject) if wanted in (None, each.purpose)], query)

    def _content(self, shelf: Shelf, owner: str, id: str) -> Response:
        file = self._file(shelf, owner, id)
        path = shelf.path(file.id)
        try:
            return FileResponse(path, media_type="application/jsonl", stat_result=path.stat())
        except FileNotFoundError:  # it was deleted meanwhile
            raise _gone(id) from None

    def _delete(self, shelf: Shelf, owner: str, id: str) -> Deleted:
        self._file(shelf, owner, id)
        if shelf.in_use(id):
            raise ApiError(409, f"A batch that has not ended needs the file {id!r}.", code="file_in_use")
        shelf.delete(id)
        return Deleted(id=id, object="file")

    # ---- batches

    async def _create(self, http: HttpRequest) -> Response:
        shelf, owner = self._asked(http)
        made = await self._parts.bodies.parsed(http, lambda body: self._made(shelf, owner, body))
        return json_response(made)

    def _made(self, shelf: Shelf, owner: str, body: bytes) -> BatchObject:
        asked = decode_known(body, BatchRequest)
        if asked.endpoint not in URLS:
            raise wrong("endpoint", f"must be one of {', '.join(URLS)}")
        if asked.completion_window not in _WINDOW_S:
            raise wrong("completion_window", f"must be {' or '.join(_WINDOW_S)}")
        _check_notes(asked.metadata or {})
        file = shelf.get(owner, asked.input_file_id, FileObject)
        if file is None:
            raise ApiError(404, f"The file {asked.input_file_id!r} was not found.", param="input_file_id")
        if file.purpose != "batch":
            raise wrong("input_file_id", f"must be a file of the purpose 'batch', and it has {file.purpose!r}")
        now = int(self._parts.now())
        made = BatchObject(
            id=f"batch_{secrets.token_hex(16)}", endpoint=asked.endpoint, input_file_id=file.id,
            completion_window=asked.completion_window, created_at=now,
            expires_at=now + _WINDOW_S[asked.completion_window], metadata=asked.metadata,
        )  # fmt: skip
        if not shelf.reserve(owner, made.id, 4 * ENTRY_BYTES + len(body)):
            message = "The files and batches of this key are as large as they may be: delete a file."
            raise ApiError(413, message, code="no_room")
        shelf.put(owner, made)
        return made

    def _list(self, shelf: Shelf, owner: str, query: Any) -> Page:
        return _page([self.batches.counted(each) for each in shelf.objects(owner, BatchObject)], query)

    def _batch(self, shelf: Shelf, owner: str, id: str) -> BatchObject:
        return self.batches.counted(_found(shelf.get(owner, id, BatchObject), id))

    def _cancel(self, shelf: Shelf, owner: str, id: str) -> BatchObject:
        batch = self._batch(shelf, owner, id)
        if batch.ended_at is not None:
            raise ApiError(409, f"The batch {id!r} is {batch.status}.", code="batch_ended")
        return self.batches.cancel(owner, batch)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _check_notes(notes: dict[str, str]) -> None:
    if len(notes) > _MOST_NOTES:
        raise wrong("metadata", f"at most {_MOST_NOTES} entries")
    for name, note in notes.items():
        if len(name) > _LONGEST_NAME or len(note) > _LONGEST_NOTE:
            raise wrong("metadata", f"names of at most {_LONGEST_NAME} characters, values of {_LONGEST_NOTE}")


def _found(object: Object | None, id: str) -> Object:
    if object is None:
        raise _gone(id)
    return object


def _gone(id: str) -> ApiError:
    kind = "batch" if id.startswith("batch_") else "file"
    return ApiError(404, f"The {kind} {id!r} was not found: none is kept forever.", code=f"{kind}_not_found")


def _page(objects: list[Any], query: Any) -> Page:
    return page([(each.id, msgspec.to_builtins(each)) for each in objects], query, "desc")
