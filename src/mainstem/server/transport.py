"""Bodies of requests and responses, for the server and the front of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio import CancelScope
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from mainstem.server.errors import ApiError

Parsed = TypeVar("Parsed")

FILES = "/v1/files"
"""The route that takes files: the only one whose bodies are no JSON."""

BATCH = "mainstem.batch"
"""In the state of a request's scope, if it belongs to a batch of this server: nobody waits for its answer."""

_PARSING_THREADS = 4  # JSON, templates, tokenising; more would only contend for the interpreter lock


class BodyReader:
    """Reads the bodies of requests, and parses them on threads.

    Args:
        most_bytes: of a body.

    Attributes:
        limiter: of the threads.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.limiter = anyio.CapacityLimiter(_PARSING_THREADS)

    async def read(self, http: Request) -> bytes:
        """Returns the body of a request; see `read_body`."""
        return await read_body(http.scope, http.receive, self._most_bytes)

    async def parsed(self, http: Request, parse: Callable[[bytes], Parsed]) -> Parsed:
        """Reads the body of a request, and parses it on a thread; raises what `read_body` and `parse` raise."""
        body = await self.read(http)
        return await anyio.to_thread.run_sync(parse, body, limiter=self.limiter)


def json_response(
    body: bytes | msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a response of JSON."""
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(content, status, headers, media_type="application/json")


async def read_body(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """Reads the body of a request, with never more than the limit in memory.

    A body of up to twice the limit is read to its end and discarded: most clients read no response before they have
    sent all, and would see a broken connection instead of the error.

    Raises:
        ApiError: 413; the body is longer than `most_bytes`.
        ClientDisconnect: the client has gone.
    """
    declared = Headers(scope=scope).get("content-length", "")
    size, pieces, more = int(declared) if declared.isdecimal() else 0, list[bytes](), True
    if size <= 2 * most_bytes:
        size = 0
        while more and size <= 2 * most_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            pieces.append(message.get("body", b""))
            if size > most_bytes:
                pieces.clear()
    if size > most_bytes:
        message_ = f"The request body is too large: the limit is {most_bytes} bytes."
        raise ApiError(413, message_, code="body_too_large", headers={"Connection": "close"})
    return b"".join(pieces)


async def cancel_when_gone(receive: Receive, scope: CancelScope) -> None:
    """Cancels a scope when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
