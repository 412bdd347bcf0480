"""The routes of the APIs that generate: from a request to the events or the body of its answer.

key -> body -> Generation -> the engine's requests -> submit -> events -> chunks or one body
            '----- on a thread -----------------------'                    '-- cancelled when the client has gone
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.to_thread
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mainstem.cache.namespaces import Namespace
from mainstem.errors import MainstemError
from mainstem.runtime.request import LOWEST_PRIORITY, Delta, Request
from mainstem.server import errors
from mainstem.server.access.envelope import shown
from mainstem.server.apis.embeddings import PATH as EMBEDDINGS
from mainstem.server.apis.embeddings import EmbeddingList, EmbeddingRequest, Embeddings
from mainstem.server.apis.generation import Generation
from mainstem.server.apis.replies import ChunkUsage, Extras, Head, Reply
from mainstem.server.apis.rewriting import header
from mainstem.server.apis.scores import Answer, Scores
from mainstem.server.apis.table import APIS, Api, Count
from mainstem.server.errors import ApiError, client_names
from mainstem.server.fields.openapi import Operation
from mainstem.server.fields.rules import Unheeded
from mainstem.server.fields.sampling import Common
from mainstem.server.kept.continuing import RESUME, ChoiceProgress, ContinuableStream, StreamProgress, resumed
from mainstem.server.kept.response_store import Kept, Owner, ResponseStore
from mainstem.server.kept.stored import StoredResponses
from mainstem.server.parsing.output import PlainText
from mainstem.server.parts import Parts
from mainstem.server.preparation import Prepared
from mainstem.server.run import NO_BUFFER, EventStream, Run, Watcher, best, scored
from mainstem.server.transport import BATCH, json_response
from mainstem.server.watch.diagnosis import Fingerprint
from mainstem.server.watch.explain import Explanations
from mainstem.server.watch.recording import Kind
from mainstem.server.watch.tracing import Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mainstem.batch.lines import Line
    from mainstem.runtime.stream import Stream

_COUNTS = "Count the tokens of a prompt"
_AT_ONCE = 64  # prompts of a request that generate nothing, which are in the engine together
_IMAGE_THREADS = 8  # for requests with images, which may have to be fetched
_FINGERPRINT_BYTES = 16 << 20  # a byte for each token of a prompt, about


class Generating:
    """The routes.

    Args:
        parts: of the server.

    Attributes:
        kept: the answers that clients may come back to.
        responses: those of them that are responses.
        explain: the explanations of requests.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, config = parts, parts.config
        self._engine, self._access, self._preparation = parts.engine, parts.access, parts.preparation
        self._tolerant = config.unknown_fields == "warn"
        self.kept = ResponseStore[Kept](config.response_bytes, config.response_ttl_s, parts.clock)
        self.responses = StoredResponses(self.kept)
        self._fingerprints = ResponseStore[Fingerprint](_FINGERPRINT_BYTES, config.response_ttl_s, parts.clock)
        self._parsing_images = anyio.CapacityLimiter(_IMAGE_THREADS)
        self._embeddings, self._scores = Embeddings(parts, self._computed), Scores(parts, self._computed)
        self.explain = Explanations(parts, self.read)

    def routes(self) -> list[Operation]:
        """Returns them."""
        counts = [api.count for api in APIS.values() if api.count is not None]
        return [
            *(
                Operation("POST", api.path, self._generate, api.summary, api.request, api.response, api.event)
                for api in APIS.values()
            ),
            *(
                Operation("POST", each.path, partial(self._counted, each), _COUNTS, each.request, each.response)
                for each in counts
            ),
            Operation(
                "POST",
                EMBEDDINGS,
                partial(self._answered, self._embeddings.answer),
                "Return the embeddings of texts",
                EmbeddingRequest,
                EmbeddingList,
            ),
            *(
                Operation("POST", path, partial(self._answered, answer), summary, request, response)
                for path, answer, summary, request, response in self._scores.routes()
            ),
        ]

    def read(self, route: str, body: bytes, owner: Owner, client: str) -> Generation:
        """Reads the body of a request to one of the routes that generate, as from a user agent.

        Raises:
            ApiError: it is wrong, or there is no such route.
        """
        if route not in APIS:
            raise errors.wrong("route", f"must be one of {', '.join(APIS)}")
        return self._read(APIS[route], body, Unheeded(self._tolerant), owner, client, remember=False)

    def ahead(self, path: str, headers: Headers, body: bytes) -> Callable[[], object]:
        """Returns a function that reads pages of a request's first prompt before it is submitted; see `PrefillFirst`.

        Raises:
            ApiError, MainstemError: it cannot be answered.
        """
        tenant = self._access.tenant(headers)
        client = headers.get("user-agent", "")
        generation = self._read(APIS[path], body, Unheeded(tolerant=True), tenant, client, remember=False)
        tokens, namespace = self._preparation.addressed(generation, tenant if self._access.separates else None)
        return partial(self._engine.advise, "prefetch", tokens, namespace)

    def prompt(self, line: Line, owner: Owner = None) -> NDArray[np.int32]:
        """Returns the tokens of the first prompt of a batch's request; where it has none, about those of its texts."""
        with contextlib.suppress(ApiError, MainstemError):  # it will be refused
            if line.url in APIS:
                generation = self.read(line.url, bytes(line.body), owner, "")
                return self._preparation.addressed(generation, owner if self._access.separates else None)[0]
        return self._preparation.text(bytes(line.body).decode(), special_tokens=False, parse_special=False)

    def give_way(self) -> None:
        """Stops what is computed ahead, because a request comes, or the engine is to drain."""
        if self._parts.precompute is not None:
            self._parts.precompute.give_way()

    def _read(
        self, api: Api, body: bytes, unheeded: Unheeded, owner: Owner, client: str, *, remember: bool = True
    ) -> Generation:
        generation = self.responses.join(api.read(body, unheeded), owner)
        return self._parts.rewriting.applied(generation, api.path, client, owner, remember=remember)

    # ---- one request

    async def _generate(self, http: HttpRequest) -> Response:
        api, unheeded, state = APIS[http.url.path], Unheeded(self._tolerant), http.scope.get("state", {})
        trace = self._trace(http, api)
        before: StreamProgress | None = state.get(RESUME)
        id = f"{api.id_prefix}{uuid.uuid4().hex}" if before is None else before.id
        generation = None
        try:
            tenant = self._access.tenant(http.headers)  # the cheapest checks come first
            if self._parts.draining():
                raise errors.draining()
            client = http.headers.get("user-agent", "")
            parsed = self._parts.bodies.parsed(http, lambda body: self._read(api, body, unheeded, tenant, client))
            generation = await parsed
            made, run = await self._admit(http, api, generation, tenant, id, trace, before)
        except ClientDisconnect:
            raise
        except Exception as error:
            refusal = shown(error) if isinstance(error, ApiError | MainstemError) else errors.internal_error()
            self._parts.metrics.refused(refusal.status)
            if trace is not None:
                trace.refused(refusal.status)
            streams = generation is not None and generation.request.stream
            if generation is not None and api.late and streams and refusal.detail.code == errors.TOO_LONG:
                return self._annotated(self._refused_in_stream(api, generation, id, refusal), unheeded)
            raise
        unheeded.ignored += self._preparation.ignored(generation)
        self._parts.rewriting.count(generation.rewrites)
        choices = [ChoiceProgress(each.tokens, each.params.max_tokens) for each in made.requests]
        progress = before or StreamProgress(id, int(self._parts.now()), choices)
        reply = self._reply(api, progress, made, run, tenant)
        if trace is not None:
            trace.answers(id, self._model_of(generation.request))
        if generation.request.stream:
            resumable = RESUME in state and made.requests[0].params.prompt_logprobs is None
            parts = run, reply, self._parts.pings
            response: Response = ContinuableStream(*parts, progress) if resumable else EventStream(*parts)
        else:
            response = await self._whole(http, generation, run, reply)
        response.headers.update(header(generation.rewrites))
        return self._annotated(response, unheeded)

    async def _whole(self, http: HttpRequest, generation: Generation, run: Run, reply: Reply) -> Response:
        with run:
            await run.finish(http.receive)
        answers = scored(run.answers, generation.choices)
        if generation.choices > generation.kept:
            answers = best(answers, generation.choices, generation.kept)
        return await anyio.to_thread.run_sync(lambda: json_response(reply.whole(answers, run.usage)))

    def _reply(self, api: Api, progress: StreamProgress, made: Prepared, run: Run, owner: Owner) -> Reply:
        """Returns the writer of the answer, which also keeps it and compares the request with an earlier one."""
        generation, extras, id = made.generation, made.extras, progress.id
        if generation.comparison is not None and made.fingerprint is not None:
            finding = generation.comparison.of(id, made.fingerprint, self._fingerprints, owner)
            extras = replace(extras, finding=finding)
        if (kept := generation.keep) is not None:
            extras = replace(extras, keep=lambda body: self.kept.put(owner, id, kept(body)))
        extras = replace(extras, now=self._parts.now)
        usage = ChunkUsage(generation.include_usage, run.prompt_tokens if generation.counts_chunks else None)
        names = (f"{id} {choice}" for choice in itertools.count())
        head = Head(id, progress.created, self._model_of(generation.request))
        return api.reply(head, self._preparation.prompts.spell, usage, extras, lambda: made.parser(next(names)))

    def _refused_in_stream(self, api: Api, generation: Generation, id: str, error: ApiError) -> Response:
        head = Head(id, int(self._parts.now()), self._model_of(generation.request))
        reply = api.reply(head, self._preparation.prompts.spell, ChunkUsage(False), Extras(generation), PlainText)
        return Response(reply.opening() + reply.failing(error), headers=NO_BUFFER, media_type=EventStream.media_type)

    def _model_of(self, request: Common) -> str:
        """Returns the name of the model, or of the adapter, that answers."""
        return self._preparation.adapter(request.model) or self._preparation.names[0]

    def _trace(self, http: HttpRequest, api: Api) -> Trace | None:
        operation: Literal["chat", "text_completion"] = "chat" if api.kind == "chat" else "text_completion"
        return None if self._parts.tracing is None else self._parts.tracing.begin(http.headers, operation)

    async def _admit(
        self,
        http: HttpRequest,
        api: Api,
        generation: Generation,
        tenant: Owner,
        id: str,
        trace: Trace | None,
        before: StreamProgress | None,
    ) -> tuple[Prepared, Run]:
        """Prepares and submits a request."""
        limiter = self._parsing_images if generation.has_images else self._parts.bodies.limiter
        sharing = tenant if self._access.separates else None
        made = await anyio.to_thread.run_sync(self._preparation.prepare, generation, sharing, limiter=limiter)
        if before is not None:
            made = replace(made, requests=resumed(made.requests, before))
        batched = BATCH in http.scope.get("state", {})
        if batched:
            made = replace(made, requests=_lowest(made.requests))
        asked, choices = generation.request, generation.choices
        self.explain.check(asked.explain)
        made, watchers = self.explain.follow(id, http.headers, tenant, made)
        for watching, request in zip(watchers, made.requests, strict=True):
            watching.extend(self._watchers(asked, generation.session, request, api.kind, tenant))
        prompt_tokens = sum(len(request.tokens) for request in made.requests[::choices])
        hints = made.requests[0].hints
        # else nothing is kept that only a next turn would use
        continues = not (hints.no_store or hints.one_shot or batched)
        for watching in watchers if continues else ():
            watching.extend(made.turn.watchers())
        self.give_way()
        precompute = self._parts.precompute
        if precompute is not None and continues and choices == 1 and generation.truncate is None:
            watchers[0] += precompute.watchers(made.turn, made.requests[0], partial(made.parser, f"{id} 0"))
        if trace is not None:
            traced = trace.submitted(made.requests, asked.model, choices, bool(asked.stream))
            watchers = [[*watching, watch] for watching, watch in zip(watchers, traced, strict=True)]
        with client_names(generation.paths):
            streams = self._submit(made.requests)
        return made, Run(streams, choices, watchers, prompt_tokens, generation.rewrites)

    def _watchers(
        self, asked: Any, session: str | None, request: Request, kind: Kind, tenant: Owner
    ) -> list[Watcher]:  # fmt: skip
        meter = self._parts.metrics.meter()
        if self._parts.recorder is None:
            return [meter]
        vision = self._engine.vision
        shaping = request.images if vision is not None and vision.first_token_sees_image else ()
        adapter, identities = self._preparation.adapter(asked.model), tuple(image.identity.hex() for image in shaping)
        scope = Namespace(adapter, asked.cache_salt, identities)
        key = self._access.api_key(tenant)
        return [meter, self._parts.recorder.note(request, kind, scope, key, session)]

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

    def _annotated(self, response: Response, unheeded: Unheeded) -> Response:
        """Returns a response with headers that name the fields of its request that do nothing, and counts these."""
        self._parts.metrics.ignored(unheeded.kinds)
        response.headers.update(unheeded.headers)
        return response

    # ---- tokens that are counted, embeddings, and scores

    async def _counted(self, count: Count, http: HttpRequest) -> Response:
        """Answers with the number of tokens of a prompt."""
        owner, unheeded = self._access.tenant(http.headers), Unheeded(self._tolerant)
        client = http.headers.get("user-agent", "")

        def counted(body: bytes) -> int:
            request = count.read(body, unheeded, self._preparation.names[0])
            generation = self.responses.join(request, owner)
            generation = self._parts.rewriting.applied(generation, count.api, client, owner, remember=False)
            unheeded.ignored += self._preparation.ignored(generation)
            return self._preparation.count(generation)

        return self._annotated(json_response(count.response(await self._parts.bodies.parsed(http, counted))), unheeded)

    async def _answered(self, answer: Answer, http: HttpRequest) -> Response:
        """Answers a request that generates nothing."""
        unheeded = Unheeded(self._tolerant)
        return self._annotated(await answer(http, unheeded), unheeded)

    async def _computed(
        self, http: HttpRequest, asked: Any, prompts: Sequence[Request], tenant: bytes | None
    ) -> list[list[Delta]]:
        """Runs prompts that generate nothing, a part of them at a time; returns the events of each."""
        most, answers = min(_AT_ONCE, self._engine.config.max_waiting), list[list[Delta]]()
        if BATCH in http.scope.get("state", {}):
            prompts = _lowest(prompts)
        for i in range(0, len(prompts), most):
            part = prompts[i : i + most]
            self.give_way()
            watchers = [self._watchers(asked, asked.prompt_cache_key, each, "completion", tenant) for each in part]
            with Run(self._submit(part), 1, watchers, sum(len(prompt.tokens) for prompt in part)) as run:
                await run.finish(http.receive)
            answers += run.answers
        return answers


def _lowest(requests: Sequence[Request]) -> list[Request]:
    """Returns requests of a batch; one that stands for several choices still does."""
    lowest = {id(each): replace(each, priority=LOWEST_PRIORITY) for each in requests}
    return [lowest[id(each)] for each in requests]
