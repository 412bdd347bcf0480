"""Answers that clients come back to, by the OpenAI API reference: responses, and chats with `store: true`.

Both are in one store, within the same bounds, each for its owner only. The ids of a response's items contain the id of
the response, so that a reference to an item is found in the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import msgspec
from msgspec import Struct

from mainstem.server.apis.bodies import decode_known
from mainstem.server.apis.chat import reply as chat_reply
from mainstem.server.apis.generation import Generation, Linked
from mainstem.server.apis.responses.reply import ID_PREFIX
from mainstem.server.errors import ApiError
from mainstem.server.kept.listing import Deleted, Page, page
from mainstem.server.kept.response_store import Kept, Owner, ResponseStore


class _Stored:
    """The answers of one API.

    Args:
        store: keeps them.
    """

    _prefix: ClassVar[str]  # of their ids
    _missing: ClassVar[tuple[str, str]]  # the code and the message of the error for an id that is not there
    _deleted: ClassVar[str]  # the type of the object that a deletion returns

    def __init__(self, store: ResponseStore[Kept]) -> None:
        self._store = store

    def get(self, owner: Owner, id: str) -> bytes:
        """Returns the JSON of an answer.

        Raises:
            ApiError: 404; it is not there.
        """
        return self._kept(owner, id).body

    def delete(self, owner: Owner, id: str) -> Deleted:
        """Deletes an answer.

        Raises:
            ApiError: 404; it is not there.
        """
        self._kept(owner, id)
        self._store.delete(owner, id)
        return Deleted(id=id, object=self._deleted)

    def _kept(self, owner: Owner, id: str, param: str | None = None) -> Kept:
        kept = self._store.get(owner, id) if id.startswith(self._prefix) else None
        if kept is None:
            code, message = self._missing
            raise ApiError(404, message.format(id), param=param, code=code)
        return kept


class MetadataUpdate(Struct):
    """The body of POST /v1/chat/completions/{id}: the client's new metadata."""

    metadata: dict[str, str] | None


class StoredChats(_Stored):
    """The API over kept chats."""

    _prefix = chat_reply.ID_PREFIX
    _missing = (
        "completion_not_found",
        "The chat completion {!r} was not found: only those with store = true are kept, none forever.",
    )
    _deleted = "chat.completion.deleted"

    def listed(self, owner: Owner, query: Mapping[str, str]) -> Page:
        """Returns a page of the kept chats, the oldest first by default.

        Args:
            owner: the client.
            query: the filters `model` and `metadata[name]`; and see `listing.page`.

        Raises:
            ApiError: 400; a parameter is wrong.
        """
        kept = [(id, msgspec.json.decode(each.body)) for id, each in self._store.entries(owner)]
        chats = [(id, each) for id, each in kept if id.startswith(self._prefix) and _matches(each, query)]
        return page(chats, query, "asc")

    def messages(self, owner: Owner, id: str, query: Mapping[str, str]) -> Page:
        """Returns a page of the messages that a chat answers; raises as `listed` and `get` do."""
        messages: list[dict[str, Any]] = msgspec.json.decode(self._kept(owner, id).conversation)
        return page([(f"{id}-{i}", _message(f"{id}-{i}", each)) for i, each in enumerate(messages)], query, "asc")

    def update(self, owner: Owner, id: str, body: bytes) -> bytes:
        """Replaces the client's metadata of a chat, and returns its JSON.

        Raises:
            ApiError: 400; the body is wrong. 404; the chat is not there.
        """
        metadata = decode_known(body, MetadataUpdate).metadata or {}
        kept = self._kept(owner, id)
        changed = msgspec.json.encode({**msgspec.json.decode(kept.body), "metadata": metadata})
        self._store.replace(owner, id, Kept(changed, kept.conversation))
        return changed


def _matches(body: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    wanted = {name[9:-1]: value for name, value in query.items() if name.startswith("metadata[") and name[-1] == "]"}
    named = all(body["metadata"].get(name) == value for name, value in wanted.items())
    return named and query.get("model", body["model"]) == body["model"]


def _message(id: str, message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message as lists show it: with an id, and a list of parts apart from a text."""
    content = message.get("content")
    parts = {"content": None, "content_parts": content} if isinstance(content, list) else {"content": content}
    return {**message, "id": id, **parts}


class StoredResponses(_Stored):
    """The API over kept responses."""

    _prefix = ID_PREFIX
    _missing = ("response_not_found", "The response {!r} was not found: not every response is kept, and none forever.")
    _deleted = "response"

    def join(self, request: Generation | Linked, owner: Owner) -> Generation:
        """Joins a request to the conversation that it continues, if it does.

        Raises:
            ApiError: 404; the response or the item that it refers to is not there. 400; what `read` raises.
        """
        if isinstance(request, Generation):
            return request
        items = self._items(owner, request.references)
        earlier: list[dict[str, Any]] = []
        if request.previous is not None:
            earlier = msgspec.json.decode(self._kept(owner, request.previous, "previous_response_id").conversation)
        return request.join(earlier, items)

    def input_items(self, owner: Owner, id: str, query: Mapping[str, str]) -> Page:
        """Returns a page of the items that a response answers.

        Args:
            owner, id: of the response.
            query: see `listing.page`.

        Raises:
            ApiError: 404; the response is not there. 400; a parameter is wrong.
        """
        kept = self._kept(owner, id)
        items = _numbered(id, kept)
        inputs = items[: len(items) - len(msgspec.json.decode(kept.body)["output"])]
        return page([(item["id"], item) for item in inputs], query, "desc")

    def cancel(self, owner: Owner, id: str) -> NoReturn:
        """Refuses to cancel: a kept response has ended, since none is made in the background.

        Raises:
            ApiError: 400, or 404; the response is not there.
        """
        self._kept(owner, id)
        message = "Only responses that are made in the background can be cancelled: close the connection of any other."
        raise ApiError(400, message, param="id", code="not_cancellable")

    def _items(self, owner: Owner, references: Mapping[int, str]) -> dict[int, dict[str, Any]]:
        """Returns the items that references stand for; each at most once, so that a body cannot grow by them."""
        known: dict[str, dict[str, Any]] = {}  # by the id of a response: its items and those that it answers, by id
        items = {}
        for i, id in references.items():
            response = ID_PREFIX + id.split("_")[1] if id.count("_") == 2 else ""
            if response not in known:
                kept = self._store.get(owner, response)
                known[response] = {} if kept is None else {each["id"]: each for each in _numbered(response, kept)}
            if id not in known[response]:
                at = f"input[{i}].id"
                message = (
                    f"{at}: the item {id!r} was not found, or it was referred to before; no answer is kept forever"
                )
                raise ApiError(404, message, param=at, code="item_not_found")
            items[i] = known[response].pop(id)
        return items


def _numbered(id: str, kept: Kept) -> list[dict[str, Any]]:
    """Returns the items of a conversation, each with an id, and messages with parts."""
    items: list[dict[str, Any]] = msgspec.json.decode(kept.conversation)
    for i, item in enumerate(items):
        kind = item.setdefault("type", "message")
        prefix = "msg" if kind == "message" else "item"
        item["id"] = item.get("id") or f"{prefix}_{id.removeprefix(ID_PREFIX)}_i{i}"
        if kind == "message" and isinstance(item.get("content"), str):
            part = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": part, "text": item["content"]}]
    return items
