"""The routes of kept answers: responses, and chats that were stored. Knows HTTP; `stored` knows the answers."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread
import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mainstem.server.apis.chat.reply import ChatBody
from mainstem.server.apis.responses.reply import ResponseBody
from mainstem.server.errors import wrong
from mainstem.server.fields.openapi import Operation
from mainstem.server.kept.listing import Deleted, Page
from mainstem.server.kept.stored import MetadataUpdate, StoredChats, StoredResponses
from mainstem.server.parts import Parts
from mainstem.server.transport import json_response

CHATS = "/v1/chat/completions"
CHAT, RESPONSE = f"{CHATS}/{{id}}", "/v1/responses/{id}"


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

    def routes(self) -> list[Operation]:
        """Returns them."""
        responses, chats, route = self._responses, self._chats, self._route
        return [
            Operation("GET", RESPONSE, self._response, "Return a response that was kept", None, ResponseBody),
            route("DELETE", RESPONSE, responses.delete, "Forget a response", Deleted),
            route("POST", f"{RESPONSE}/cancel", responses.cancel, "Refuse: nothing is made in the background"),
            route("GET", f"{RESPONSE}/input_items", responses.input_items, "List what a response answers", Page),
            route("GET", CHATS, chats.listed, "List the chats that were stored", Page),
            route("GET", CHAT, chats.get, "Return a chat that was stored", ChatBody),
            route("DELETE", CHAT, chats.delete, "Forget a chat", Deleted),
            route("GET", f"{CHAT}/messages", chats.messages, "List what a chat answers", Page),
            Operation("POST", CHAT, self._update, "Replace the notes on a chat", MetadataUpdate, ChatBody),
        ]

    def _route(
        self,
        method: str,
        path: str,
        answer: Callable[..., bytes | msgspec.Struct],
        summary: str,
        response: type | None = None,
    ) -> Operation:
        """Returns a route that answers by the owner, the id in its path, and for a page by its query."""

        async def endpoint(http: HttpRequest) -> Response:
            query = [http.query_params] if response is Page else []
            given = (self._access.tenant(http.headers), *http.path_params.values(), *query)
            return await anyio.to_thread.run_sync(lambda: json_response(answer(*given)), limiter=self._looking)

        return Operation(method, path, endpoint, summary, None, response)

    async def _response(self, http: HttpRequest) -> Response:
        owner = self._access.tenant(http.headers)
        if http.query_params.get("stream", "false") not in ("false", "0"):
            raise wrong("stream", "not supported here; omit it", "unsupported_parameter")
        return json_response(self._responses.get(owner, http.path_params["id"]))

    async def _update(self, http: HttpRequest) -> Response:
        owner = self._access.tenant(http.headers)
        return json_response(self._chats.update(owner, http.path_params["id"], await self._read(http)))
