"""The routes that show and change the cache and the adapters, most of them for the admin.

Knows HTTP. `management` has the bodies, `watch.live` the live page.
"""

from __future__ import annotations

from functools import partial

import anyio.to_thread
import msgspec
import numpy as np
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse

from mainstem.cache.namespaces import Namespace, encode_namespace
from mainstem.errors import BadArgument
from mainstem.server import errors, management
from mainstem.server.access.tenants import Tenancy, Usage
from mainstem.server.apis.bodies import decode
from mainstem.server.apis.chat.request import conversation
from mainstem.server.apis.replies import Model
from mainstem.server.errors import ApiError, client_names
from mainstem.server.fields.openapi import Operation
from mainstem.server.management import (
    Flushed,
    Hinted,
    HintRequest,
    LoadAdapter,
    RemoveRequest,
    UnloadAdapter,
    Unloaded,
    Updated,
    UpdateWeights,
)
from mainstem.server.parts import Parts
from mainstem.server.prompting import Tokens
from mainstem.server.transport import json_response
from mainstem.server.watch import live
from mainstem.server.watch.about import About

_LORA = {"name": "lora_name", "adapter": "lora_name", "path": "lora_path"}
"""The fields of bodies, by the engine's names."""


class CacheRoutes:
    """The routes.

    Args:
        parts: of the server.
        tenancy: the tenants, if there are any.
        about: describes adapters.
        page: the samples of the live page.
    """

    def __init__(self, parts: Parts, tenancy: Tenancy | None, about: About, page: live.Live) -> None:
        self._engine, self._access, self._preparation = parts.engine, parts.access, parts.preparation
        self._rewriting, self._updates = parts.rewriting, parts.config.allow_weight_updates
        self._bodies, self._draining = parts.bodies, parts.draining
        self._tenancy, self._about, self._live = tenancy, about, page

    def routes(self) -> list[Operation]:
        """Returns them."""
        flush, hint = "Forget every prefix that no request uses", "Say what will become of a prefix"
        events, sample = "What the live page shows, as a stream of samples", live.LiveSample
        return [
            Operation("POST", "/v1/load_lora_adapter", self._load_adapter, "Load an adapter", LoadAdapter, Model),
            Operation(
                "POST", "/v1/unload_lora_adapter", self._unload_adapter, "Unload an adapter", UnloadAdapter, Unloaded
            ),
            Operation("POST", "/v1/update_weights", self._update_weights, "Change the weights", UpdateWeights, Updated),
            Operation("POST", "/v1/cache/flush", self._flush, flush, None, Flushed),
            Operation("POST", "/v1/cache/remove", self._remove, "Forget a prefix", RemoveRequest, Flushed),
            Operation("POST", "/v1/cache/hints", self._hints, hint, HintRequest, Hinted),
            Operation("GET", "/v1/cache/stats", self._stats, "The cache in numbers"),
            Operation("GET", "/v1/cache/tenants", self._tenants, "What each tenant has, and may have", None, Usage),
            Operation("GET", "/v1/cache/tree", self._tree, "The tree of prefixes as text", None, str),
            Operation("GET", "/cache", self._live_page, "The live page, for a browser", None, str),
            Operation("GET", "/cache/events", self._live_events, events, None, sample, sample),
            Operation("GET", "/cache/sample", self._live_sample, "What the live page shows, once", None, sample),
        ]

    async def _load_adapter(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        request = await self._bodies.parsed(http, lambda body: decode(body, LoadAdapter))
        with client_names(_LORA):
            if request.lora_name in self._preparation.names:
                raise BadArgument("name", request.lora_name, "a name other than the model's own")
            await anyio.to_thread.run_sync(self._engine.load_adapter, request.lora_name, request.lora_path)
        return json_response(self._about.model(request.lora_name))

    async def _unload_adapter(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        request = await self._bodies.parsed(http, lambda body: decode(body, UnloadAdapter))
        if request.lora_name not in self._engine.adapters:
            message = f"The adapter {request.lora_name!r} is not loaded."
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        with client_names(_LORA):
            await anyio.to_thread.run_sync(self._engine.unload_adapter, request.lora_name)
        return json_response(Unloaded(request.lora_name))

    async def _update_weights(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        if not self._updates:
            message = "This server's weights do not change (option --allow-weight-updates)."
            raise ApiError(404, message, code="no_weight_updates")
        request = await self._bodies.parsed(http, lambda body: decode(body, UpdateWeights))
        update = partial(self._engine.update_weights, request.path, mode=request.mode, lag=request.lag)
        with client_names({"weights": "path"}):
            return json_response(Updated(await anyio.to_thread.run_sync(update)))

    async def _flush(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        pages = await anyio.to_thread.run_sync(self._engine.flush)
        return json_response(Flushed(pages, pages * self._engine.config.page_size))

    async def _remove(self, http: HttpRequest) -> Response:
        tenant, is_admin = self._access.remover(http.headers)
        prefixes, namespace = await self._bodies.parsed(
            http, lambda body: self._named(management.parse_remove(body), http.headers, tenant, is_admin)
        )
        self._preparation.answers.forget(encode_namespace(namespace))
        pages = 0
        for tokens in prefixes:
            pages += await anyio.to_thread.run_sync(self._engine.remove, tokens, namespace)
        return json_response(Flushed(pages, pages * self._engine.config.page_size))

    async def _hints(self, http: HttpRequest) -> Response:
        tenant, is_admin = self._access.client(http.headers)

        def parse(body: bytes) -> tuple[HintRequest, list[Tokens], Namespace | None]:
            ask = management.parse_hint(body)
            return ask, *self._named(ask, http.headers, tenant, is_admin)

        ask, prefixes, namespace = await self._bodies.parsed(http, parse)
        advised = []
        for tokens in prefixes:
            advise = partial(self._engine.advise, ask.action, tokens, namespace, **ask.times())
            advised.append(await anyio.to_thread.run_sync(advise))
        kept = max(advised, key=lambda each: (each.positions, each.cached))
        if kept.positions == 0:
            raise errors.no_advice(ask.action, kept.cached, "prompt" if ask.messages is None else "messages")
        return json_response(Hinted(ask.action, kept.positions, kept.cached))

    def _named(
        self, ask: management.Named, headers: Headers, tenant: bytes | None, is_admin: bool
    ) -> tuple[list[Tokens], Namespace | None]:
        """Returns the prefix that a body names, without tokens for a whole namespace, and its namespace.

        A chat may be cached with the tokens of its answers, and as it is tokenised without them; both a chat and a text
        as the rules of prompts leave it, and as it came.
        """
        self._preparation.check_model(ask.model)
        if is_admin and self._access.separates:
            tenant = self._access.tenant_of(ask.api_key)
            if tenant is None:
                raise errors.wrong("api_key", "must be one of the server's API keys")
        elif ask.api_key is not None:
            raise errors.wrong("api_key", "only the admin of a server with several API keys may set it")
        namespace = self._preparation.namespace(ask.model, ask.cache_salt, tenant)
        if ask.messages is not None:
            chat = conversation(ask.messages, ask.tools)
            ruled = self._rewriting.chat(chat, headers, tenant, ask.cache_salt, whole=False)
            named = [chat] if ruled is chat else [ruled, chat]
            return [prefix for each in named for prefix in self._preparation.prefixes(each, namespace)], namespace
        if ask.prompt is None:
            return [np.empty(0, np.int32)], namespace
        texts = [ask.prompt]
        if isinstance(ask.prompt, str) and (text := self._rewriting.text(ask.prompt, headers, tenant, ask.cache_salt)):
            texts = list({text: None, ask.prompt: None})
        return [self._preparation.tokens(each) for each in texts], namespace

    async def _stats(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        stats = await anyio.to_thread.run_sync(self._engine.stats)
        return json_response(msgspec.json.encode(stats, enc_hook=lambda counters: counters.as_dict()))  # of the core

    async def _tenants(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        if self._tenancy is None:
            raise ApiError(404, "This server has no tenants (option --tenants).", code="no_tenants")
        return json_response(await anyio.to_thread.run_sync(self._tenancy.usage))

    async def _tree(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        return PlainTextResponse(await anyio.to_thread.run_sync(self._engine.tree))

    async def _live_page(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers, browser=True)
        return HTMLResponse(
            live.page(), headers={"Content-Security-Policy": live.policy(), "Cache-Control": "no-store"}
        )

    async def _live_events(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers, browser=True)
        events = self._live.events(live.node_of(http.query_params), self._draining)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def _live_sample(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers, browser=True)
        body = await self._live.sample(live.node_of(http.query_params))
        return json_response(body, headers={"Cache-Control": "no-store"})
