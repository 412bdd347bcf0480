"""The HTTP application: its routes, and what they share.

Knows HTTP and asyncio. `apis` reads bodies and writes answers, `generating` runs them, `Access` knows the keys.
Nothing slow runs on the event loop: threads parse and tokenise bodies, and make the calls that wait for the engine's
thread.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from mainstem.server.access.api_keys import Access, tenant_secret
from mainstem.server.access.envelope import HANDLERS, REQUEST_ID, Envelope
from mainstem.server.access.origins import Guard, Reach
from mainstem.server.access.public_prefixes import read_public_prefixes
from mainstem.server.access.tenants import Tenancy, show_owner
from mainstem.server.apis.tokenization import TokenRoutes
from mainstem.server.cache_routes import CacheRoutes
from mainstem.server.fields.rules import IGNORED_HEADER, UNKNOWN_HEADER
from mainstem.server.generating import Generating, Parts
from mainstem.server.kept.kept_routes import KeptRoutes
from mainstem.server.kept.precompute import Precompute
from mainstem.server.kept.response_store import Kept, ResponseStore
from mainstem.server.kept.stored_chats import StoredChats
from mainstem.server.prefill import Prefiller, PrefillFirst, Prefills, PrefillServer
from mainstem.server.preparation import Preparation
from mainstem.server.run import Pings
from mainstem.server.transport import BodyReader
from mainstem.server.watch import live
from mainstem.server.watch.about import About
from mainstem.server.watch.explain import Explanations
from mainstem.server.watch.metrics import Metrics, Savings
from mainstem.server.watch.recording import Recorder
from mainstem.server.watch.tracing import Tracing
from mainstem.settings.server import ServerConfig
from mainstem.settings.tenants import read_tenants

if TYPE_CHECKING:
    from mainstem.runtime.engine import Engine


def create_app(
    engine: Engine,
    config: ServerConfig = ServerConfig(),
    *,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
    secret: Callable[[int], bytes] | None = None,
    recorder: Recorder | None = None,
    tracing: Tracing | None = None,
    prefiller: Prefiller | None = None,
    reach: Reach | None = None,
) -> Starlette:
    """Creates the ASGI application over one engine.

    `app.state.service.draining = True` makes it refuse new generations with 503 and fail its health check.

    Args:
        engine: the engine that generates; the caller closes it.
        config: the settings; only `serving.serve` reads host, port, drain_timeout_s and record.
        clock: returns seconds, monotonic; for latencies and pings.
        now: returns seconds since the epoch; for the `created` fields.
        sleep: waits for a number of seconds, by `clock`.
        secret: returns n random bytes, and is called once. API keys are identified by digests under this secret. None:
            derived from the engine's storage secret if it has one, so that tenants find their prefixes after a restart.
        recorder: records every request that the engine accepts; the caller closes it.
        tracing: sends the traces of requests; the caller closes it.
        prefiller: computes the prompts. None: the server that `config` names, if it names one.
        reach: from where it may be asked. None: from everywhere; whoever passes requests on has looked, as in a fleet.

    Raises:
        BadArgument: an adapter has one of the names in `config.served_model_name`.
    """
    known = engine.config.tiers.storage_secret
    if prefiller is None and config.prefill.prefill_url is not None:
        prefiller = PrefillServer(config.prefill)
    prefills = None if prefiller is None else Prefills()
    pings = Pings(config.ping_interval_s, clock, sleep)
    service = Service(engine, config, clock, now, secret or tenant_secret(known), recorder, tracing, prefills, pings)
    middleware = [
        *_cors(config.cors_origin),
        Middleware(Envelope),
        *([] if reach is None else [Middleware(Guard, reach)]),
        *_prefill(config, service, prefiller, prefills),
    ]
    app = Starlette(routes=service.routes, middleware=middleware, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Returns what lets scripts of web pages use the server; a preflight needs no key, since it cannot send one."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("Retry-After", *REQUEST_ID, IGNORED_HEADER, UNKNOWN_HEADER),
        )
    ]


def _prefill(
    config: ServerConfig, service: Service, prefiller: Prefiller | None, counts: Prefills | None
) -> list[Middleware]:
    """Returns what has prompts computed elsewhere."""
    if prefiller is None:
        return []
    most, ahead, draining = config.max_body_bytes, service.generating.ahead, lambda: service.draining
    return [Middleware(PrefillFirst, prefiller, most, ahead=ahead, draining=draining, counts=counts)]


class Service:
    """The routes of one server, and what they share.

    Args:
        engine, config, clock, now, secret, recorder, tracing: see `create_app`.
        prefills: counts prompts that are computed elsewhere; None: none are.
        pings: of streams.

    Attributes:
        draining: whether new generations are refused.
        names: of the model; the first one is shown.
        routes: all of them.
        generating: those that generate.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        clock: Callable[[], float],
        now: Callable[[], float],
        secret: Callable[[int], bytes],
        recorder: Recorder | None,
        tracing: Tracing | None,
        prefills: Prefills | None,
        pings: Pings,
    ) -> None:
        self.draining = False
        tenants = None if config.tenants is None else read_tenants(config.tenants)
        keys = {} if tenants is None else tenants.keys
        access = Access([*config.api_key, *keys.values()], config.admin_key, secret(32), separates=bool(keys))
        tenancy = None if tenants is None else Tenancy(tenants, access, engine)
        preparation = Preparation(engine, config)
        self.names = preparation.names
        if config.public_prefix is not None:
            for prefix in read_public_prefixes(config.public_prefix, preparation):
                engine.publish_prefix(prefix)
        bodies = BodyReader(config.max_body_bytes)
        precompute = Precompute(engine, preparation.prompts) if config.precompute_turns else None
        savings = Savings(engine, config.savings) if config.savings.exist else None
        counting = (engine, recorder, preparation.answers, precompute, tracing, savings, prefills)
        self._metrics = Metrics([part for part in counting if part is not None], clock)

        def draining() -> bool:
            return self.draining

        parts = Parts(
            engine, config, access, preparation, bodies, self._metrics, recorder, tracing, precompute, pings,
            clock, now, draining,
        )  # fmt: skip
        kept = ResponseStore[Kept](config.response_bytes, config.response_ttl_s, clock)
        self.generating = Generating(parts, kept)
        name_of = show_owner if tenancy is None else tenancy.name
        explain = self.generating.explain = Explanations(
            engine, access, preparation, name_of, self.generating.read, bodies.parsed, clock,
            hides=config.public_prefix is not None,
        )  # fmt: skip
        about = About(engine, access, preparation, int(now()), draining)
        page = live.Live(engine, self._metrics.reuse, self.names[0], name_of, clock, now, explain)
        self.routes = [
            *self.generating.routes(),
            *KeptRoutes(self.generating.responses, StoredChats(kept), access, bodies.read).routes(),
            *about.routes(),
            *CacheRoutes(engine, access, preparation, bodies, tenancy, about, page, draining).routes(),
            *explain.routes(),
            *TokenRoutes(engine, access, preparation, bodies).routes(),
            Route("/metrics", self._scrape, methods=["GET"]),
        ]

    async def _scrape(self, http: HttpRequest) -> Response:
        text = await anyio.to_thread.run_sync(self._metrics.exposition)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})
