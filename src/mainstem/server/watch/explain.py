"""Explanations for clients: why a prompt was found in part only, stretch by stretch; and who may know what of it.

    "explain": true                  in the body of a request: the response has it
    GET  /v1/cache/explain/{id}      of an earlier request, by the id of its answer
    POST /v1/cache/explain           of a body as it would be found now; nothing is run. Rules of prompts apply as for
                                     the user agent `client` of the query, else of this request
    GET  /v1/cache/explain           for the admin: misses by cause and tenant, and the latest requests

A client sees positions and its own text. The earlier prompt that it parted from has the same key and salt, as the cache
looks at no other namespace; where prefixes are public, only the admin sees it. The age of the oldest known prompt and
the memory that would have kept an evicted page reveal the use of others, so these are for the admin, too. The latter
needs "?distances=true" after POST: the engine reads the whole tree for it (0.4 s with 200,000 pages), and does nothing
else meanwhile.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread
import numpy as np
from msgspec import convert
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mainstem.cache.explain import Stretch, Stretches, as_json, count_found, count_missed
from mainstem.cache.namespaces import encode_namespace, owner_of
from mainstem.prompt_rules.rules import Rewrite
from mainstem.runtime.request import Delta, Request, Usage
from mainstem.server.apis.generation import Generation
from mainstem.server.errors import ApiError, client_names, wrong
from mainstem.server.fields.openapi import Operation
from mainstem.server.kept.response_store import ENTRY_BYTES, Owner, ResponseStore
from mainstem.server.parts import Parts
from mainstem.server.preparation import Prepared
from mainstem.server.run import Watcher
from mainstem.server.transport import json_response
from mainstem.server.watch.explained import (
    Explanation,
    Misses,
    PromptExplained,
    RecentMiss,
    StretchBody,
    TenantMisses,
    rewrites_body,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

PATH = "/v1/cache/explain"
_KEPT_BYTES = 16 << 20
_TTL_S = 3600.0
_RECENT = 50
_MOST_TENANTS = 256
_TOKENS_AFTER = 16  # of a text that is shown
_REWRITE_BYTES = 200  # of one change by a rule, about
_PROMPT_BYTES = 2000  # of what is kept of a prompt besides its tokens, about


@dataclass(slots=True)
class _Prompt:
    """A prompt that was explained; of its request only the tokens are kept, and no images."""

    tokens: NDArray[np.int32]
    stretches: Stretches

    @property
    def cached(self) -> int:
        return count_found(self.stretches)

    @property
    def missed(self) -> Counter[str]:
        return count_missed(self.stretches)


@dataclass(slots=True)
class Account:
    """The explained prompts of one HTTP request: of several choices, the one that found the fewest tokens.

    Args:
        id: of the answer.
        size: in the store, in bytes.
        rewrites: what rules changed in the prompts.
        kept: whether it is in the store.
    """

    id: str
    size: int
    prompts: dict[int, _Prompt] = field(default_factory=dict)
    rewrites: tuple[Rewrite, ...] = ()
    kept: bool = False

    def add(self, prompt: int, request: Request, stretches: Stretches) -> None:
        """Adds the explanation of a choice."""
        made = _Prompt(request.tokens, stretches)
        if prompt not in self.prompts or made.cached < self.prompts[prompt].cached:
            self.prompts[prompt] = made


class Explanations:
    """The latest explanations of one server, and the routes that show them.

    Args:
        parts: of the server, whose engine explains if it was started to.
        parse: reads a body, by the path of the route that it is for, for an owner of a key, from a user agent.
    """

    def __init__(self, parts: Parts, parse: Callable[[str, bytes, Owner, str], Generation]) -> None:
        self.on = parts.engine.config.explain
        self._engine, self._access, self._preparation = parts.engine, parts.access, parts.preparation
        self._bodies, self._name_of, self._parse = parts.bodies, parts.name_of, parse
        self._hides = parts.config.public_prefix is not None  # or a client could see prompts of others
        self._kept = ResponseStore[Account](_KEPT_BYTES, _TTL_S, parts.clock)
        self._recent: deque[tuple[str, Owner]] = deque(maxlen=_RECENT)
        self._tenants: dict[bytes, tuple[Counter[str], Counter[str]]] = {}  # hits and length; misses
        self._lock = threading.Lock()

    def routes(self) -> list[Operation]:
        """Returns the routes."""
        body, latest = "Why a body's prompts would be found in part only", "Misses by tenant, and the latest requests"
        earlier, live = "Why an earlier request was found in part only", "The same for the live page"
        return [
            Operation("POST", PATH, self._of_body, body, dict, Explanation),
            Operation("GET", PATH, self._of_all, latest, None, Misses),
            Operation("GET", f"{PATH}/{{id}}", self._of_id, earlier, None, Explanation),
            Operation("GET", "/cache/explain/{id}", self._of_id_in_browser, live, None, Explanation),
        ]

    def check(self, asked: bool | None) -> None:
        """Checks that the server explains, if a request asks for it.

        Raises:
            ApiError: 400; it does not.
        """
        if asked and not self.on:
            raise _off("explain")

    def follow(self, id: str, headers: Headers, owner: Owner, made: Prepared) -> tuple[Prepared, list[list[Watcher]]]:
        """Returns a request whose reply can explain it, and the watchers of each choice.

        Args:
            id: of the answer.
            headers: of the request.
            owner: the client.
            made: the request.
        """
        if not self.on:
            return made, [[] for _ in made.requests]
        ask, admin = made.generation, self._access.is_admin(headers)
        size = sum(request.tokens.nbytes + _PROMPT_BYTES for request in made.requests[:: ask.choices])
        size += _REWRITE_BYTES * len(ask.rewrites)
        account = Account(id, ENTRY_BYTES + size, rewrites=ask.rewrites)
        extras = replace(made.extras, explained=lambda: self.shown(account, admin=admin))

        def ended(prompt: int, request: Request, finish: str, usage: Usage | None, deltas: Sequence[Delta]) -> None:
            if usage is not None and usage.explanation is not None:
                account.add(prompt, request, usage.explanation)
                self._count(account, owner, request, usage.explanation)

        watchers = [Watcher(partial(ended, i // ask.choices, request)) for i, request in enumerate(made.requests)]
        return replace(made, extras=extras), [[watcher] for watcher in watchers]

    def _count(self, account: Account, owner: Owner, request: Request, stretches: Stretches) -> None:
        """Keeps a request that has ended, and counts what it found."""
        prompt = _Prompt(request.tokens, stretches)
        tenant = owner_of(encode_namespace(request.namespace))
        with self._lock:
            if tenant not in self._tenants and len(self._tenants) >= _MOST_TENANTS:
                del self._tenants[next(iter(self._tenants))]
            sizes, missed = self._tenants.setdefault(tenant, (Counter(), Counter()))
            sizes.update(prompt_tokens=len(request.tokens), cached_tokens=prompt.cached)
            missed.update(prompt.missed)
            if not account.kept:
                account.kept = True
                self._recent.append((account.id, owner))
                self._kept.put(owner, account.id, account)

    def shown(self, account: Account, *, admin: bool) -> list[PromptExplained]:
        """Returns the part of a request's explanation that a client may see."""
        return [self._shown(each, admin) for _, each in sorted(account.prompts.items())]

    def recent(self) -> list[RecentMiss]:
        """Returns the latest requests, the newest last; for the admin."""
        with self._lock:
            latest = [(id, self._kept.get(owner, id)) for id, owner in self._recent]
        return [_recent(account) for _, account in latest if account is not None]

    def tenants(self) -> list[TenantMisses]:
        """Returns the misses of each tenant, the newest tenants last; for the admin."""
        with self._lock:
            counted = [(tenant, dict(sizes), dict(missed)) for tenant, (sizes, missed) in self._tenants.items()]
        return [TenantMisses(self._name_of(tenant), **sizes, missed_tokens=missed) for tenant, sizes, missed in counted]

    # --- routes

    async def _of_body(self, http: HttpRequest) -> Response:
        tenant, admin = self._access.asker(http.headers)
        if not self.on:
            raise _off()
        route, measured = http.query_params.get("route", ""), http.query_params.get("distances", "false")
        client = http.query_params.get("client", http.headers.get("user-agent", ""))
        if measured not in ("true", "false"):
            raise wrong("distances", f"must be true or false, not {measured!r}")

        def explain(body: bytes) -> Explanation:
            return self._explain(self._parse(route, body, tenant, client), tenant, admin, admin and measured == "true")

        return _json(await self._bodies.parsed(http, explain))

    def _explain(self, asked: Generation, tenant: Owner, admin: bool, distances: bool) -> Explanation:
        made = self._preparation.prepare(asked, tenant if self._access.separates else None)
        account = Account("", 0, rewrites=asked.rewrites)
        with client_names(asked.paths):
            for i, request in enumerate(made.requests[:: asked.choices]):
                account.add(i, request, self._engine.explain(request, distances=distances))
        return Explanation(None, self.shown(account, admin=admin), rewrites_body(account.rewrites))

    async def _of_id(self, http: HttpRequest) -> Response:
        admin = self._access.is_admin(http.headers)
        owner = None if admin else self._access.tenant(http.headers)
        return await self._answer(http, owner, admin)

    async def _of_id_in_browser(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers, browser=True)
        return await self._answer(http, None, True)

    async def _answer(self, http: HttpRequest, owner: Owner, admin: bool) -> Response:
        if not self.on:
            raise _off()
        id = http.path_params["id"]
        account = self._kept.find(id) if admin else self._kept.get(owner, id)
        if account is None:
            message = f"No explanation of {id!r}: the newest requests are kept, by the ids of their answers."
            raise ApiError(404, message, param="id", code="explanation_not_found")
        shown = await anyio.to_thread.run_sync(lambda: self.shown(account, admin=admin))
        return _json(Explanation(id, shown, rewrites_body(account.rewrites)))

    async def _of_all(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        if not self.on:
            raise _off()
        return _json(Misses(self.tenants(), self.recent()))

    # --- bodies

    def _shown(self, prompt: _Prompt, admin: bool) -> PromptExplained:
        stretches = [self._stretch(each, prompt.tokens, admin) for each in prompt.stretches]
        return PromptExplained(len(prompt.tokens), prompt.cached, dict(prompt.missed), stretches)

    def _stretch(self, stretch: Stretch, tokens: NDArray[np.int32], admin: bool) -> StretchBody:
        body = as_json(stretch, self._engine.config.page_size, admin=admin)
        if stretch.cause is not None:
            body["text"] = self._text(tokens[stretch.begin : min(stretch.end, stretch.begin + _TOKENS_AFTER)])
        if stretch.parted is not None and (admin or not self._hides):
            body["parted"]["instead"] = self._text(np.frombuffer(stretch.parted.other, np.int32)[:_TOKENS_AFTER])
        return convert(body, StretchBody)

    def _text(self, tokens: NDArray[np.int32]) -> str:
        """Returns the text of tokens; images have none."""
        known = tokens[(tokens >= 0) & (tokens < len(self._engine.tokenizer))]
        return self._preparation.prompts.read(known.tolist())


def _recent(account: Account) -> RecentMiss:
    missed: Counter[str] = sum((each.missed for each in account.prompts.values()), Counter())
    tokens = sum(len(each.tokens) for each in account.prompts.values())
    cached = sum(each.cached for each in account.prompts.values())
    return RecentMiss(account.id, tokens, cached, missed.most_common(1)[0][0] if missed else None)


def _off(param: str | None = None) -> ApiError:
    message = "explain: this server does not explain (start it with --explain)"
    return ApiError(400 if param else 404, message, param=param, code="explain_off")


def _json(body: Explanation | Misses) -> Response:
    return json_response(body, headers={"Cache-Control": "no-store"})
