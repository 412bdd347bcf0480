"""The routes that describe a server: its models, its version, its health, its API, and the page at /.

Knows the engine's models and keys. Models are listed as OpenAI's clients read them, and as Anthropic's do if a client
says which version of that API it speaks: https://docs.claude.com/en/api/models-list.
"""

from __future__ import annotations

import html
from datetime import UTC, datetime

import anyio.to_thread
import msgspec
from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from mainstem import __version__
from mainstem.server.apis import replies, tokenization
from mainstem.server.apis.messages import reply as message_reply
from mainstem.server.errors import ApiError
from mainstem.server.fields.openapi import Operation, document
from mainstem.server.kept import listing
from mainstem.server.management import Health
from mainstem.server.parts import Parts
from mainstem.server.transport import json_response

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Mainstem</title>
<h1>Mainstem {version}</h1>
<p>{model}Clients of OpenAI's API find it below <a href="/v1/models">/v1</a>, those of Anthropic's at this address.</p>
<ul>
<li><a href="/cache">/cache</a>: what is cached, live</li>
<li><a href="/openapi.json">/openapi.json</a>: every route and its bodies</li>
<li><a href="/metrics">/metrics</a>: metrics for Prometheus</li>
<li><a href="/health">/health</a>: whether it takes requests</li>
</ul>
"""


class ModelInfo(Struct):
    """A model or an adapter, in the form of Anthropic's API."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: str = "active"
    type: str = "model"


class ModelPage(Struct):
    """The response body of GET /v1/models, in the form of Anthropic's API."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class About:
    """The routes that describe a server.

    Args:
        parts: of the server, which began when this is made.
    """

    def __init__(self, parts: Parts) -> None:
        self._engine, self._access, self._preparation = parts.engine, parts.access, parts.preparation
        self._started, self._draining = int(parts.now()), parts.draining

    def routes(self) -> list[Operation]:
        """Returns the routes."""
        models = "List the model and its adapters; with the header anthropic-version as Anthropic does"
        model, health = "Describe the model or an adapter", "Whether the server takes requests"
        return [
            Operation("GET", "/", self._home, "A page for people that says where what is", None, str, open=True),
            Operation("GET", "/v1/models", self._models, models, None, replies.ModelList),
            Operation("GET", "/v1/models/{name:path}", self._model, model, None, replies.Model),
            Operation(
                "GET", "/version", self._version, "The version of Mainstem", None, tokenization.Version, open=True
            ),
            Operation("GET", "/openapi.json", self._openapi, "This description", open=True),
            Operation("GET", "/health", self._health, health, None, Health, open=True),
            Operation("GET", "/ping", self._health, "The same", None, Health, open=True),
            Operation("POST", "/ping", self._health, "The same", None, Health, open=True),
        ]

    def model(self, name: str) -> replies.Model:
        """Returns the entry of a model or an adapter."""
        names = self._preparation.names
        parent = None if name in names else names[0]
        return replies.Model(name, self._started, self._engine.max_context, self._engine.exact, parent)

    def _info(self, name: str) -> ModelInfo:
        created = datetime.fromtimestamp(self._started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        most = self._engine.max_context
        return ModelInfo(name, name, created, most, most)

    async def _models(self, http: HttpRequest) -> Response:
        self._access.tenant(http.headers)
        names = [*self._preparation.names, *self._engine.adapters]
        if not message_reply.speaks(http.url.path, http.headers):
            return json_response(replies.ModelList([self.model(name) for name in names]))
        shown, has_more = listing.between(names, http.query_params)
        first, last = (shown[0], shown[-1]) if shown else (None, None)
        return json_response(ModelPage([self._info(name) for name in shown], has_more, first, last))

    async def _model(self, http: HttpRequest) -> Response:
        self._access.tenant(http.headers)
        name = http.path_params["name"]
        self._preparation.check_model(name)
        anthropic = message_reply.speaks(http.url.path, http.headers)
        return json_response(self._info(name) if anthropic else self.model(name))

    async def _home(self, http: HttpRequest) -> Response:
        try:
            self._access.tenant(http.headers)
            model = f"{html.escape(self._preparation.names[0])} is served here. "
        except ApiError:
            model = ""  # for those with a key
        page = _PAGE.format(version=__version__, model=model)
        return HTMLResponse(page, headers={"Content-Security-Policy": "default-src 'none'"})

    async def _version(self, http: HttpRequest) -> Response:
        return json_response(tokenization.Version(__version__))

    async def _openapi(self, http: HttpRequest) -> Response:
        described = await anyio.to_thread.run_sync(document, http.app.routes)
        return json_response(msgspec.json.encode(described))

    async def _health(self, http: HttpRequest) -> Response:
        word = "failed" if self._engine.failure is not None else "draining" if self._draining() else "ok"
        return json_response(Health(word), 200 if word == "ok" else 503)
