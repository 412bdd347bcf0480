"""The routes of kept answers: responses, and chats that were stored. Knows HTTP; `stored` knows the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from mainstem.server.errors import ApiError
from mainstem.server.kept.response_store import Owner
from mainstem.server.kept.stored import StoredChats, StoredResponses
from mainstem.server.parts import Parts
from mainstem.server.transport import json_response

CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"


class KeptRoutes:
    """The routes.

    Args:
        parts: of the server.
        responses, chats: the kept answers.
    """

    def __init__(self, parts: Parts, responses: StoredResponses, chats: StoredChats) -> None:
        self._access, self._read = parts.access, parts.bodies.read
        self._responses, self._chats = responses, chats
        self._looking = anyio.CapacityLimiter(1)  # a list reads all that an owner has, in several times its memory

    def routes(self) -> list[Route]:
        """Returns them."""
        responses, chats = self._responses, self._chats
        return [
            Route(f"{RESPONSES}/{{id}}", self._response, methods=["GET"]),
            self._of_id(f"{RESPONSES}/{{id}}", "DELETE", lambda owner, id, _: responses.delete(owner, id)),
            self._of_id(f"{RESPONSES}/{{id}}/cancel", "POST", lambda owner, id, _: responses.cancel(owner, id)),
            self._of_id(f"{RESPONSES}/{{id}}/input_items", "GET", responses.input_items),
            self._of_id(CHATS, "GET", lambda owner, _, query: chats.listed(owner, query)),
            self._of_id(f"{CHATS}/{{id}}", "GET", lambda owner, id, _: chats.get(owner, id)),
            self._of_id(f"{CHATS}/{{id}}", "DELETE", lambda owner, id, _: chats.delete(owner, id)),
            self._of_id(f"{CHATS}/{{id}}/messages", "GET", chats.messages),
            Route(f"{CHATS}/{{id}}", self._update, methods=["POST"]),
        ]

    def _of_id(self, path: str, method: str, answer: Callable[[Owner, str, Any], bytes | msgspec.Struct]) -> Route:
        """Returns a route that answers by the owner, the id in its path and its query."""

        async def endpoint(http: HttpRequest) -> Response:
            given = self._access.tenant(http.headers), http.path_params.get("id", ""), http.query_params
            return await anyio.to_thread.run_sync(lambda: json_response(answer(*given)), limiter=self._looking)

        return Route(path, endpoint, methods=[method])

    async def _response(self, http: HttpRequest) -> Response:
        owner = self._access.tenant(http.headers)
        if http.query_params.get("stream", "false") not in ("false", "0"):
            raise ApiError(400, "stream: not supported here; omit it", param="stream", code="unsupported_parameter")
        return json_response(self._responses.get(owner, http.path_params["id"]))

    async def _update(self, http: HttpRequest) -> Response:
        owner = self._access.tenant(http.headers)
        return json_response(self._chats.update(owner, http.path_params["id"], await self._read(http)))
