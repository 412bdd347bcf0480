"""The HTTP application: its routes, and what they share.

Knows HTTP and asyncio. `apis` reads bodies and writes answers, `generating` runs them, `Access` knows the keys.
Nothing slow runs on the event loop: threads parse and tokenise bodies, and make the calls that wait for the engine's
thread.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mainstem.server.access.api_keys import Access, tenant_secret
from mainstem.server.access.envelope import HANDLERS, REQUEST_ID, Envelope
from mainstem.server.access.origins import Guard, Reach
from mainstem.server.access.public_prefixes import read_public_prefixes
from mainstem.server.access.tenants import Tenancy, show_owner
from mainstem.server.apis.rewriting import HEADER as REWRITES_HEADER
from mainstem.server.apis.rewriting import Rewriting
from mainstem.server.apis.tokenization import TokenRoutes
from mainstem.server.batches.routes import BatchRoutes
from mainstem.server.cache_routes import CacheRoutes
from mainstem.server.fields.openapi import Operation
from mainstem.server.fields.rules import IGNORED_HEADER, UNKNOWN_HEADER
from mainstem.server.generating import Generating
from mainstem.server.kept.kept_routes import KeptRoutes
from mainstem.server.kept.precompute import Precompute
from mainstem.server.kept.stored import StoredChats
from mainstem.server.parts import Parts
from mainstem.server.prefill import Prefiller, PrefillFirst, Prefills, PrefillServer
from mainstem.server.preparation import Preparation
from mainstem.server.run import Pings
from mainstem.server.transport import BodyReader
from mainstem.server.watch import live
from mainstem.server.watch.about import About
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

    `app.state.draining = True` makes it refuse new generations with 503 and fail its health check.

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
        prefiller: computes prompts elsewhere. None: the server that `config` names, if it names one.
        reach: which hosts and origins may use it. None: all, since the front of a fleet, say, has checked requests.

    Raises:
        BadArgument: an adapter has one of the names in `config.served_model_name`.
    """
    if prefiller is None and config.prefill.prefill_url is not None:
        prefiller = PrefillServer(config.prefill)
    prefills = None if prefiller is None else Prefills()
    app = Starlette(exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    app.state.draining = False

    def draining() -> bool:
        return bool(app.state.draining)

    tenants = None if config.tenants is None else read_tenants(config.tenants)
    keys = {} if tenants is None else tenants.keys
    made = (secret or tenant_secret(engine.config.tiers.storage_secret))(32)
    access = Access([*config.api_key, *keys.values()], config.admin_key, made, separates=bool(keys))
    tenancy = None if tenants is None else Tenancy(tenants, access, engine)
    preparation = Preparation(engine, config)
    if config.public_prefix is not None:
        for prefix in read_public_prefixes(config.public_prefix, preparation):
            engine.publish_prefix(prefix)
    precompute = None
    if share := config.precompute_turns:
        precompute = Precompute(engine, preparation.prompts, share, preparation.dialect.said, clock)
    savings = Savings(engine, config.savings) if config.savings.exist else None
    rewriting = Rewriting(config, access)
    counting = (engine, recorder, preparation.answers, precompute, tracing, savings, prefills)
    metrics = Metrics([*(part for part in counting if part is not None), rewriting], clock)
    parts = Parts(
        engine, config, access, preparation, BodyReader(config.max_body_bytes), metrics, recorder, tracing, precompute,
        rewriting, Pings(config.ping_interval_s, clock, sleep), clock, now, draining,
        show_owner if tenancy is None else tenancy.name,
    )  # fmt: skip
    generating = app.state.generating = Generating(parts)
    batching = BatchRoutes(parts, app)
    app.router.lifespan_context = batching.running
    app.router.routes.extend(_routes(parts, generating, tenancy, batching))
    app.user_middleware.extend(_middleware(config, reach))
    if prefiller is not None:
        most, ahead = config.max_body_bytes, generating.ahead
        app.user_middleware.append(
            Middleware(PrefillFirst, prefiller, most, ahead=ahead, draining=draining, counts=prefills)
        )
    return app


def _routes(
    parts: Parts, generating: Generating, tenancy: Tenancy | None, batching: BatchRoutes
) -> list[Operation]:  # fmt: skip
    about, page = About(parts), live.Live(parts, generating.explain)

    async def metrics(http: HttpRequest) -> Response:
        text = await anyio.to_thread.run_sync(parts.metrics.exposition)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return [
        *generating.routes(),
        *KeptRoutes(parts, generating.responses, StoredChats(generating.kept)).routes(),
        *batching.routes(),
        *about.routes(),
        *CacheRoutes(parts, tenancy, about, page).routes(),
        *generating.explain.routes(),
        *TokenRoutes(parts).routes(),
        Operation("GET", "/metrics", metrics, "Metrics for Prometheus", None, str, open=True),
    ]


def _middleware(config: ServerConfig, reach: Reach | None) -> Iterator[Middleware]:
    """Yields the middleware before every route, the outermost first."""
    if config.cors_origin:  # a preflight needs no key, since a page cannot send one with it
        yield Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origin,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("Retry-After", *REQUEST_ID, IGNORED_HEADER, UNKNOWN_HEADER, REWRITES_HEADER),
        )
    yield Middleware(Envelope)
    if reach is not None:
        yield Middleware(Guard, reach)
