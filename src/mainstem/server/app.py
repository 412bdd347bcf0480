"""The HTTP application: routes, limits, errors, draining.

Knows HTTP and asyncio. Leaves JSON and field names to `requests` and `replies`, keys to `Access`, tokens to `Prompts`,
and the events of a generation to `Run`.
Nothing slow runs on the event loop: threads parse and tokenise bodies, and make the calls that wait for the engine's
thread.

    body limit -> JSON, types -> template, tokens -> submit -> events -> chunks or one body
                  '------- on a thread -----'                  '-- cancelled when the client disconnects
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Literal, TypeVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from mainstem.cache.namespaces import Namespace, encode_namespace
from mainstem.errors import BadArgument, EngineClosed, MainstemError
from mainstem.runtime.request import Delta, Request
from mainstem.server import errors, management
from mainstem.server.access.api_keys import Access, tenant_secret
from mainstem.server.access.envelope import HANDLERS, REQUEST_ID, Envelope, shown
from mainstem.server.access.origins import Guard, Reach, reach_of
from mainstem.server.access.public_prefixes import read_public_prefixes
from mainstem.server.access.tenants import Tenancy, show_owner
from mainstem.server.apis import message_reply, messages, replies, requests, tokenization
from mainstem.server.apis.embeddings import PATH as EMBEDDINGS
from mainstem.server.apis.embeddings import EmbeddingRequest, Embeddings
from mainstem.server.apis.replies import ChunkUsage, CompletionReply, Head
from mainstem.server.apis.requests import ChatRequest
from mainstem.server.apis.response_reply import ID_PREFIX
from mainstem.server.apis.responses import Responses, TokenCount
from mainstem.server.errors import ApiError
from mainstem.server.fields.rules import IGNORED_HEADER, UNKNOWN_HEADER, Unheeded
from mainstem.server.generation import NO_BUFFER, EventStream, Pings, Run, Task, Watcher, best, scored
from mainstem.server.kept.continuing import Answer, Begun, ContinuableStream, resumed, wish_of
from mainstem.server.kept.kept_routes import RESPONSES, KeptRoutes
from mainstem.server.kept.precompute import Precompute
from mainstem.server.kept.response_store import Kept, Owner, ResponseStore
from mainstem.server.kept.stored_chats import ID_PREFIX as CHAT_PREFIX
from mainstem.server.kept.stored_chats import StoredChats
from mainstem.server.parsing.output import PlainText
from mainstem.server.prefill import Prefiller, PrefillFirst, Prefills, PrefillServer
from mainstem.server.preparation import Ask, Preparation, Prepared, Tokens
from mainstem.server.watch import live
from mainstem.server.watch.about import About
from mainstem.server.watch.diagnosis import Earlier, Fingerprint
from mainstem.server.watch.explain import Explanations
from mainstem.server.watch.metrics import Metrics, Savings
from mainstem.server.watch.recording import Kind, Recorder
from mainstem.server.watch.tracing import Trace, Tracing
from mainstem.settings.server import RecordConfig, ServerConfig
from mainstem.settings.tenants import read_tenants
from mainstem.units import counted

if TYPE_CHECKING:
    from mainstem.runtime.engine import Engine
    from mainstem.runtime.stream import Stream

log = logging.getLogger(__name__)

_PARSING_THREADS = 4  # JSON, templates, tokenising; more would only contend for the interpreter lock
_IMAGE_THREADS = 8  # for requests with images, which may have to be fetched
_GRACE_S = 5  # for the ends of responses, after the engine is drained
_FINGERPRINT_BYTES = 16 << 20  # a byte for each token of a prompt, about


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
        config: the settings; only `serve` reads host, port, drain_timeout_s and record.
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
    service = _Service(engine, config, clock, now, secret or tenant_secret(known), recorder, tracing, prefills, pings)
    middleware = [
        *_cors(config.cors_origin),
        Middleware(Envelope),
        *([] if reach is None else [Middleware(Guard, reach)]),
        *_prefill(config, service, prefiller, prefills),
    ]
    app = Starlette(routes=service.routes(), middleware=middleware, exception_handlers=HANDLERS)
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
    config: ServerConfig, service: _Service, prefiller: Prefiller | None, counts: Prefills | None
) -> list[Middleware]:
    """Returns what has prompts computed elsewhere."""
    if prefiller is None:
        return []
    most, ahead, draining = config.max_body_bytes, service.ahead, lambda: service.draining
    return [Middleware(PrefillFirst, prefiller, most, ahead=ahead, draining=draining, counts=counts)]


def serve(engine: Engine, config: ServerConfig, listener: socket.socket) -> None:
    """Serves until a signal stops it, then returns.

    SIGTERM or SIGINT drains: new requests get 503, running ones have `drain_timeout_s` to finish, and those that still
    run then are cancelled. A second signal stops at once.

    Args:
        engine: the engine that generates; the caller closes it.
        config: the settings.
        listener: the socket from `opening.bind`; it is closed at the end.

    Raises:
        BadArgument: `config.record` names a file that is not a recording, or that another server writes to.
        EngineClosed: the engine failed; another process has to take over.
        OSError: another server started to listen on the port after `bind`, or the recording cannot be written.
    """
    with listener, _recorder(engine, config.record) as recorder, _tracing(engine, config) as tracing:
        reach = reach_of(config, config.host)
        app = create_app(engine, config, recorder=recorder, tracing=tracing, reach=reach)
        _serve(engine, config, listener, app)
    if engine.failure is not None:
        raise EngineClosed(f"the engine failed: {type(engine.failure).__name__}: {engine.failure}")


def _recorder(engine: Engine, config: RecordConfig) -> AbstractContextManager[Recorder | None]:
    if config.record is None:
        return nullcontext()
    return Recorder(config, engine.name, lambda tokens: str(engine.tokenizer.decode(list(tokens))))


def _tracing(engine: Engine, config: ServerConfig) -> AbstractContextManager[Tracing | None]:
    if config.otlp is None:
        return nullcontext()
    return closing(Tracing(config.otlp, next(iter(config.served_model_name), engine.name)))


def _serve(engine: Engine, config: ServerConfig, listener: socket.socket, app: Starlette) -> None:
    # Without a log configuration of its own, uvicorn logs where the program does.
    settings = uvicorn.Config(
        app, lifespan="off", log_config=None, server_header=False, timeout_graceful_shutdown=_GRACE_S
    )
    listener.listen()
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{listener.getsockname()[1]}/v1"
    log.info("%s is served at %s: %s", app.state.service.names[0], url, _described(engine))
    _DrainingServer(settings, engine, app.state.service, config.drain_timeout_s).run(sockets=[listener])


def _described(engine: Engine) -> str:
    import torch  # here, because `create_app` does not need it

    dtype, stats = str(engine.dtype).removeprefix("torch."), engine.stats()
    first, *others = _pools({name: pool.total for name, pool in stats.cache.pools.items()})
    device = ", ".join([f"{first} for {engine.pages * engine.config.page_size} tokens", *others])
    host = ""
    if stats.tiers is not None:
        totals = {name: pool.total for name, pool in stats.tiers.host_pools.items()}
        host = f", on the host {', '.join(_pools(totals))}"
    store = "" if engine.config.tiers.storage is None else ", with storage"
    return f"{dtype}, {counted(torch.get_num_threads(), 'thread')}, {device}{host}{store}"


def _pools(totals: Mapping[str, int]) -> list[str]:
    """Returns the size of each component's pool in words."""
    words = {"full": "KV pages", "state": "state slots"}
    return [f"{total} {words.get(name, f'{name} pages')}" for name, total in totals.items()]


class _DrainingServer(uvicorn.Server):
    """A uvicorn server that stops when the engine fails, and drains the engine on a signal.

    The socket stays open while the engine drains, so that clients receive 503.
    """

    def __init__(self, settings: uvicorn.Config, engine: Engine, service: _Service, timeout_s: float) -> None:
        super().__init__(settings)
        self._engine = engine
        self._service = service
        self._timeout_s = timeout_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The base class would raise the signal again at the end, but a drained server exits with 0.
        if self._service.draining:
            self.should_exit = self.force_exit = True
            return
        self._service.draining = True
        threading.Thread(target=self._drain, name="mainstem-drain", daemon=True).start()

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to stop; uvicorn calls this ten times a second."""
        return await super().on_tick(counter) or self._engine.failure is not None

    def _drain(self) -> None:
        log.info("draining: running requests have %g s to finish", self._timeout_s)
        try:
            if not self._engine.drain(self._timeout_s):
                log.warning("cancelling the requests that still run after %g s", self._timeout_s)
                self._engine.close()
        finally:
            self.should_exit = True


# --- one request --------------------------------------------------------------------------------------------------

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class _Kind:
    """What differs between the APIs that generate.

    Args:
        parse: takes a body, what notes its fields, and the client.
        id_prefix: of a response.
        name: in recordings.
        late: a prompt that is too long is refused within the stream, if there is one: there clients of this API look.
    """

    parse: Callable[[bytes, Unheeded, Owner], Task]
    id_prefix: str
    name: Kind
    late: bool = False


def _parse_completion(body: bytes, unheeded: Unheeded, owner: Owner) -> Task:
    return Task(requests.parse_completion(body, unheeded), CompletionReply)


class _Service:
    """The endpoints."""

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
        self._pings = pings
        self._engine = engine
        self._max_body_bytes, self._tolerant = config.max_body_bytes, config.unknown_fields == "warn"
        tenants = None if config.tenants is None else read_tenants(config.tenants)
        keys = {} if tenants is None else tenants.keys
        self._access = Access([*config.api_key, *keys.values()], config.admin_key, secret(32), separates=bool(keys))
        self._tenancy = None if tenants is None else Tenancy(tenants, self._access, engine)
        self._now = now
        self._preparation = Preparation(engine, config)
        self._prompts, self._answers = self._preparation.prompts, self._preparation.answers
        self.names = self._preparation.names
        self._about = About(engine, self._access, self._preparation, int(now()), lambda: self.draining)
        if config.public_prefix is not None:
            for prefix in read_public_prefixes(config.public_prefix, self._preparation):
                engine.publish_prefix(prefix)
        self._precompute = Precompute(engine, self._prompts) if config.precompute_turns else None
        savings = Savings(engine, config.savings) if config.savings.exist else None
        parts = (engine, recorder, self._answers, self._precompute, tracing, savings, prefills)
        self._metrics = Metrics([part for part in parts if part is not None], clock)
        self._recorder, self._tracing = recorder, tracing
        name_of = show_owner if self._tenancy is None else self._tenancy.name
        self._explain = Explanations(
            engine, self._access, self._preparation, name_of, self._parse, self._parsed, clock,
            hides=config.public_prefix is not None,
        )  # fmt: skip
        self._live = live.Live(engine, self._metrics.reuse, self.names[0], name_of, clock, now, self._explain)
        self._fingerprints = ResponseStore[Fingerprint](_FINGERPRINT_BYTES, config.response_ttl_s, clock)
        kept = ResponseStore[Kept](config.response_bytes, config.response_ttl_s, clock)
        self._responses, self._chats = Responses(kept, now, self._fingerprints), StoredChats(kept)
        self._kept = KeptRoutes(self._responses, self._chats, self._access, self._body)
        self._kinds = {
            "/v1/completions": _Kind(_parse_completion, "cmpl-", "completion"),
            "/v1/chat/completions": _Kind(self._parse_chat, CHAT_PREFIX, "chat"),
            "/v1/responses": _Kind(self._responses.parse, ID_PREFIX, "chat", late=True),
            message_reply.PATH: _Kind(self._parse_message, message_reply.ID_PREFIX, "chat"),
        }
        self._embeddings = Embeddings(
            engine, self._access, self._preparation, self._parsed, self._begin_embeddings, lambda: self.draining,
            serves=config.embeddings,
        )  # fmt: skip
        self._parsing = anyio.CapacityLimiter(_PARSING_THREADS)
        self._parsing_images = anyio.CapacityLimiter(_IMAGE_THREADS)

    def routes(self) -> list[Route]:
        """Returns all routes."""
        return [
            *(Route(path, self._generate, methods=["POST"]) for path in self._kinds),
            Route(f"{RESPONSES}/input_tokens", self._count_input, methods=["POST"]),
            *self._kept.routes(),
            Route(EMBEDDINGS, self._embed, methods=["POST"]),
            Route(f"{message_reply.PATH}/count_tokens", self._count_tokens, methods=["POST"]),
            *self._about.routes(),
            Route("/v1/load_lora_adapter", self._load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload_adapter, methods=["POST"]),
            Route("/v1/cache/flush", self._flush, methods=["POST"]),
            Route("/v1/cache/remove", self._remove, methods=["POST"]),
            Route("/v1/cache/hints", self._hints, methods=["POST"]),
            Route("/v1/cache/stats", self._stats, methods=["GET"]),
            Route("/v1/cache/tenants", self._tenants, methods=["GET"]),
            Route("/v1/cache/tree", self._tree, methods=["GET"]),
            *self._explain.routes(),
            Route("/cache", self._live_page, methods=["GET"]),
            Route("/cache/events", self._live_events, methods=["GET"]),
            Route("/cache/sample", self._live_sample, methods=["GET"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/tokenizer_info", self._tokenizer_info, methods=["GET"]),
            Route("/metrics", self._scrape, methods=["GET"]),
        ]

    def ahead(self, path: str, headers: Headers, body: bytes) -> Callable[[], object]:
        """Returns what reads pages of a request's first prompt before it is submitted; see `PrefillFirst`.

        Raises:
            ApiError, MainstemError: it cannot be answered.
        """
        tenant = self._access.tenant(headers)
        task = self._kinds[path].parse(body, Unheeded(tolerant=True), tenant)
        tokens, namespace = self._preparation.addressed(task, tenant if self._access.separates else None)
        return partial(self._engine.advise, "prefetch", tokens, namespace)

    def _parse(self, route: str, body: bytes, owner: Owner) -> Task:
        """Parses the body of a request to one of the routes that generate."""
        if route not in self._kinds:
            raise ApiError(400, f"route: must be one of {', '.join(self._kinds)}", param="route")
        return self._kinds[route].parse(body, Unheeded(self._tolerant), owner)

    async def _generate(self, http: HttpRequest) -> Response:
        kind = self._kinds[http.url.path]
        trace = self._trace(http, kind)
        unheeded = Unheeded(self._tolerant)
        wish = wish_of(http.scope)
        before = None if wish is None else wish.begun
        id = f"{kind.id_prefix}{uuid.uuid4().hex}" if before is None else before.id
        task = None
        try:
            tenant, task = await self._asked(http, kind, unheeded)
            made, run = await self._admit(http, kind, task, tenant, id, trace, before)
        except (ApiError, MainstemError) as error:
            refusal = shown(error)
            self._metrics.refused(refusal.status)
            if trace is not None:
                trace.refused(refusal.status)
            if kind.late and task is not None and task.request.stream and refusal.detail.code == errors.TOO_LONG:
                return self._annotated(self._refused_in_stream(task, id, refusal), unheeded)
            raise
        unheeded.ignored += self._preparation.ignored(task)
        ask = task.request
        model = self._model_of(ask)
        prompts = [Answer(each.tokens, each.params.max_tokens) for each in made.requests]
        begun = Begun(id, int(self._now()), prompts) if before is None else before
        head = Head(begun.id, begun.created, model)
        if trace is not None:
            trace.answers(head.id, model)
        counted = ChunkUsage(ask.include_usage, run.prompt_tokens if ask.counts_chunks else None)
        names = (f"{head.id} {choice}" for choice in itertools.count())
        reply = made.task.reply(head, self._prompts.spell, counted, made.extras, lambda: made.parser(next(names)))
        if ask.stream:
            tells = wish is not None and made.requests[0].params.prompt_logprobs is None
            parts = run, reply, self._pings
            return self._annotated(ContinuableStream(*parts, begun) if tells else EventStream(*parts), unheeded)
        with run:
            if not await run.follow(http.receive, _nothing_to_send):
                raise run.failure or ClientDisconnect()
        answers = scored(run.answers, ask.choices)
        if ask.choices > ask.kept:
            answers = best(answers, ask.choices, ask.kept)
        body = await anyio.to_thread.run_sync(lambda: _json(reply.whole(answers, run.usage)))
        return self._annotated(body, unheeded)

    def _model_of(self, ask: Ask) -> str:
        """Returns the name of the model, or of the adapter, that answers."""
        return self._preparation.adapter(ask.model) or self.names[0]

    def _refused_in_stream(self, task: Task, id: str, error: ApiError) -> Response:
        head = Head(id, int(self._now()), self._model_of(task.request))
        reply = task.reply(head, self._prompts.spell, ChunkUsage(False), replies.NO_EXTRAS, PlainText)
        return Response(reply.opening() + reply.failing(error), headers=NO_BUFFER, media_type=EventStream.media_type)

    def _parse_chat(self, body: bytes, unheeded: Unheeded, owner: Owner) -> Task:
        return self._chats.task(requests.parse_chat(body, unheeded), body, owner)

    def _parse_message(self, body: bytes, unheeded: Unheeded, owner: Owner) -> Task:
        return messages.parse(body, unheeded, Earlier(self._fingerprints, owner))

    def _trace(self, http: HttpRequest, kind: _Kind) -> Trace | None:
        operation: Literal["chat", "text_completion"] = "chat" if kind.name == "chat" else "text_completion"
        return None if self._tracing is None else self._tracing.begin(http.headers, operation)

    async def _asked(self, http: HttpRequest, kind: _Kind, unheeded: Unheeded) -> tuple[Owner, Task]:
        """Reads who asks what, with the cheapest checks first; adds the fields that do nothing."""
        tenant = self._access.tenant(http.headers)
        if self.draining:
            raise errors.draining()
        return tenant, await self._parsed(http, lambda body: kind.parse(body, unheeded, tenant))

    async def _admit(
        self,
        http: HttpRequest,
        kind: _Kind,
        task: Task,
        tenant: Owner,
        id: str,
        trace: Trace | None,
        begun: Begun | None,
    ) -> tuple[Prepared, Run]:
        """Prepares and submits a request."""
        has_images = isinstance(task.request, ChatRequest) and task.request.has_images
        limiter = self._parsing_images if has_images else self._parsing
        sharing = tenant if self._access.separates else None
        made = await anyio.to_thread.run_sync(self._preparation.prepare, task, sharing, limiter=limiter)
        if begun is not None:
            made = replace(made, requests=resumed(made.requests, begun))
        ask = made.task.request
        with errors.renamed(made.task.names):
            self._explain.check(ask.explain)
        made, watchers = self._explain.follow(id, http.headers, tenant, made)
        for watching, request in zip(watchers, made.requests, strict=True):
            watching.extend(self._watchers(ask, request, kind.name, tenant))
        prompt_tokens = sum(len(request.tokens) for request in made.requests[:: ask.choices])
        hints = made.requests[0].hints
        continues = not (hints.no_store or hints.one_shot)  # else nothing is kept that only a next turn would use
        for watching in watchers if continues else ():
            watching.extend(made.turn.watchers())
        if self._precompute is not None:
            self._precompute.give_way()
            if continues and ask.choices == 1 and ask.truncate_prompt_tokens is None:
                watchers[0] += self._precompute.watchers(made.turn, made.requests[0], made.parser)
        if trace is not None:
            traced = trace.submitted(made.requests, ask.model, ask.choices, bool(ask.stream))
            watchers = [[*watching, watch] for watching, watch in zip(watchers, traced, strict=True)]
        with errors.renamed(made.task.names):
            streams = self._submit(made.requests)
        return made, Run(streams, ask.choices, watchers, prompt_tokens)

    async def _embed(self, http: HttpRequest) -> Response:
        unheeded = Unheeded(self._tolerant)
        return self._annotated(await self._embeddings.answer(http, unheeded), unheeded)

    def _begin_embeddings(self, ask: EmbeddingRequest, prompts: Sequence[Request], tenant: bytes | None) -> Run:
        """See `embeddings.Begin`."""
        if self._precompute is not None:
            self._precompute.give_way()
        watchers = [self._watchers(ask, prompt, "completion", tenant) for prompt in prompts]
        return Run(self._submit(prompts), 1, watchers, sum(len(prompt.tokens) for prompt in prompts))

    def _annotated(self, response: Response, unheeded: Unheeded) -> Response:
        """Returns a response with headers that name the fields of its request that do nothing, and counts these."""
        self._metrics.ignored(unheeded.kinds)
        response.headers.update(unheeded.headers)
        return response

    def _watchers(
        self, ask: Ask | EmbeddingRequest, request: Request, kind: Kind, tenant: bytes | None
    ) -> list[Watcher]:
        meter = self._metrics.meter()
        if self._recorder is None:
            return [meter]
        vision = self._engine.vision
        shaping = request.images if vision is not None and vision.first_token_sees_image else ()
        adapter, identities = self._preparation.adapter(ask.model), tuple(image.identity.hex() for image in shaping)
        scope = Namespace(adapter, ask.cache_salt, identities)
        key = self._access.api_key(tenant)
        return [meter, self._recorder.note(request, kind, scope, key, ask.prompt_cache_key)]

    async def _body(self, http: HttpRequest) -> bytes:
        """Reads the body, with never more than the limit in memory.

        A body of up to twice the limit is read to its end and discarded: most clients read no response before they have
        sent all, and would see a broken connection instead of the error.
        """
        chunks: list[bytes] = []
        size = _declared_bytes(http)
        if size <= 2 * self._max_body_bytes:
            size = 0
            async for chunk in http.stream():
                size += len(chunk)
                chunks.append(chunk)
                if size > self._max_body_bytes:
                    chunks.clear()
                if size > 2 * self._max_body_bytes:
                    break
        if size > self._max_body_bytes:
            message = f"The request body is too large: the limit is {self._max_body_bytes} bytes."
            raise ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
        return b"".join(chunks)

    async def _parsed(self, http: HttpRequest, parse: Callable[[bytes], Parsed]) -> Parsed:
        """Reads the body, and parses it on a thread."""
        body = await self._body(http)
        return await anyio.to_thread.run_sync(parse, body, limiter=self._parsing)

    def _submit(self, asked: Sequence[Request]) -> list[Stream]:
        """Submits all requests or none."""
        streams: list[Stream] = []
        with ExitStack() as undo:
            for request in asked:
                stream = self._engine.submit(request)
                undo.callback(stream.cancel)
                streams.append(stream)
            undo.pop_all()
        return streams

    async def _count_tokens(self, http: HttpRequest) -> Response:
        return await self._counted(
            http, lambda body, unheeded, _: messages.parse_count(body, unheeded), message_reply.TokenCount
        )

    async def _count_input(self, http: HttpRequest) -> Response:
        return await self._counted(http, partial(self._responses.parse_count, model=self.names[0]), TokenCount)

    async def _counted(
        self,
        http: HttpRequest,
        parse: Callable[[bytes, Unheeded, Owner], Task],
        made: Callable[[int], msgspec.Struct],
    ) -> Response:
        """Answers with the number of tokens of a prompt."""
        owner, unheeded = self._access.tenant(http.headers), Unheeded(self._tolerant)

        def count(body: bytes) -> int:
            task = parse(body, unheeded, owner)
            unheeded.ignored += self._preparation.ignored(task)
            return self._preparation.count(task)

        return self._annotated(_json(made(await self._parsed(http, count))), unheeded)

    async def _load_adapter(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        ask = await self._parsed(http, management.parse_load_adapter)
        with _lora_fields():
            if ask.lora_name in self.names:
                raise BadArgument("name", ask.lora_name, "a name other than the model's own")
            await anyio.to_thread.run_sync(self._engine.load_adapter, ask.lora_name, ask.lora_path)
        return _json(self._about.model(ask.lora_name))

    async def _unload_adapter(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        ask = await self._parsed(http, management.parse_unload_adapter)
        if ask.lora_name not in self._engine.adapters:
            message = f"The adapter {ask.lora_name!r} is not loaded."
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        with _lora_fields():
            await anyio.to_thread.run_sync(self._engine.unload_adapter, ask.lora_name)
        return _json(management.Unloaded(ask.lora_name))

    async def _flush(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        pages = await anyio.to_thread.run_sync(self._engine.flush)
        return _json(management.Flushed(pages, pages * self._engine.config.page_size))

    async def _remove(self, http: HttpRequest) -> Response:
        tenant, is_admin = self._access.remover(http.headers)
        prefixes, namespace = await self._parsed(
            http, lambda body: self._named(management.parse_remove(body), tenant, is_admin)
        )
        self._answers.forget(encode_namespace(namespace))
        pages = 0
        for tokens in prefixes:
            pages += await anyio.to_thread.run_sync(self._engine.remove, tokens, namespace)
        return _json(management.Flushed(pages, pages * self._engine.config.page_size))

    async def _hints(self, http: HttpRequest) -> Response:
        tenant, is_admin = self._access.client(http.headers)

        def parse(body: bytes) -> tuple[management.HintRequest, list[Tokens], Namespace | None]:
            ask = management.parse_hint(body)
            return ask, *self._named(ask, tenant, is_admin)

        ask, prefixes, namespace = await self._parsed(http, parse)
        advised = []
        for tokens in prefixes:
            advise = partial(self._engine.advise, ask.action, tokens, namespace, **ask.times())
            advised.append(await anyio.to_thread.run_sync(advise))
        kept = max(advised, key=lambda each: (each.positions, each.cached))
        if kept.positions == 0:
            raise errors.no_advice(ask.action, kept.cached, "prompt" if ask.messages is None else "messages")
        return _json(management.Hinted(ask.action, kept.positions, kept.cached))

    def _named(
        self, ask: management.Named, tenant: bytes | None, is_admin: bool
    ) -> tuple[list[Tokens], Namespace | None]:
        """Returns the prefix that a body names, without tokens for a whole namespace, and its namespace.

        A chat may be cached with the tokens of its answers, and as it is tokenised without them.
        """
        self._preparation.check_model(ask.model)
        if is_admin and self._access.separates:
            tenant = self._access.tenant_of(ask.api_key)
            if tenant is None:
                raise ApiError(400, "api_key: must be one of the server's API keys", param="api_key")
        elif ask.api_key is not None:
            raise ApiError(400, "api_key: only the admin of a server with several API keys may set it", param="api_key")
        namespace = self._preparation.namespace(ask.model, ask.cache_salt, tenant)
        if ask.messages is not None:
            return self._preparation.prefixes(ask.messages, ask.tools, namespace), namespace
        return [self._preparation.tokens(ask.prompt) if ask.prompt is not None else np.empty(0, np.int32)], namespace

    async def _stats(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        stats = await anyio.to_thread.run_sync(self._engine.stats)
        body = msgspec.json.encode(stats, enc_hook=lambda counters: counters.as_dict())  # those of the core
        return Response(body, media_type="application/json")

    async def _tenants(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers)
        if self._tenancy is None:
            raise ApiError(404, "This server has no tenants (option --tenants).", code="no_tenants")
        return _json(await anyio.to_thread.run_sync(self._tenancy.usage))

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
        events = self._live.events(live.node_of(http.query_params), lambda: self.draining)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def _live_sample(self, http: HttpRequest) -> Response:
        self._access.require_admin(http.headers, browser=True)
        body = await self._live.sample(live.node_of(http.query_params))
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def _tokenize(self, http: HttpRequest) -> Response:
        return await self._answer(http, lambda body: self._tokenized(tokenization.parse_tokenize(body)))

    def _tokenized(self, ask: tokenization.TokenizeRequest) -> tokenization.Tokenized:
        self._preparation.check_model(ask.model)
        if ask.messages is not None:
            made = self._preparation.chat(ask.messages, ask.tools, ask.template())
        else:
            adds, parses = ask.add_special_tokens is not False, ask.parse_special is not False
            made = self._preparation.text(ask.prompt or "", special_tokens=adds, parse_special=parses)
        spelled = [self._prompts.spell(int(token)).text for token in made] if ask.return_token_strs else msgspec.UNSET
        return tokenization.Tokenized(len(made), self._engine.max_context, made.tolist(), spelled)

    async def _detokenize(self, http: HttpRequest) -> Response:
        return await self._answer(http, lambda body: self._detokenized(tokenization.parse_detokenize(body)))

    def _detokenized(self, ask: tokenization.DetokenizeRequest) -> tokenization.Detokenized:
        self._preparation.check_model(ask.model)
        self._prompts.check_length(len(ask.tokens), "tokens")
        with errors.renamed({"prompt": "tokens"}):
            return tokenization.Detokenized(self._prompts.read(ask.tokens))

    async def _answer(self, http: HttpRequest, answer: Callable[[bytes], msgspec.Struct]) -> Response:
        """Answers a client's body on a thread."""
        self._access.tenant(http.headers)
        return _json(await self._parsed(http, answer))

    async def _tokenizer_info(self, http: HttpRequest) -> Response:
        self._access.tenant(http.headers)
        return _json(tokenization.describe(self._engine.tokenizer))

    async def _scrape(self, http: HttpRequest) -> Response:
        text = await anyio.to_thread.run_sync(self._metrics.exposition)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _declared_bytes(http: HttpRequest) -> int:
    """Returns the size of the body that the client declares, or 0 without a declaration."""
    declared = http.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


async def _nothing_to_send(index: int, delta: Delta) -> None:
    """Handles events of a response that is sent as a whole."""


@contextmanager
def _lora_fields() -> Iterator[None]:
    """Makes errors name the fields of the request body."""
    try:
        yield
    except BadArgument as error:
        field = {"name": "lora_name", "adapter": "lora_name", "path": "lora_path"}.get(error.name, error.name)
        raise BadArgument(field, error.value, error.allowed) from error


def _json(body: msgspec.Struct) -> Response:
    return Response(replies.encode(body), media_type="application/json")
