"""The engine: one thread that steps the scheduler, and fills streams that any thread or event loop reads.

```
   any thread                  the engine's thread                    any thread, any event loop
   submit, cancel  -> commands -> run -> step -> deliver -> Stream -> for delta in stream
   flush, tree                     ^______________|                   async for delta in stream
```
Only the engine's thread uses the scheduler, the cache and the runner. It sleeps while there is nothing to do. When it
ends, by `close` or by a failure, every stream has ended and every call has returned or raised.

With several ranks, each has an engine. Rank 0 takes the requests and shares the commands of each step; the others run
the same commands and steps, and have no streams.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import random as random_module
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mainstem.cache.components import State
from mainstem.cache.explain import Stretches
from mainstem.cache.keys import MAX_TOKEN, Encoded, TokenLike
from mainstem.cache.namespaces import Namespace
from mainstem.cache.prefix_cache import CacheStats
from mainstem.cache.quotas import Quotas
from mainstem.cache.retention import Kept
from mainstem.cache.tree import Survey
from mainstem.errors import BadArgument, BadTokens, EngineClosed, EngineFull, RankFailed, UnsupportedModel
from mainstem.events.publisher import EventStats
from mainstem.events.source import AllBlocksCleared
from mainstem.runtime.assembly import EngineRunner, make_cache, make_publisher, make_scheduler
from mainstem.runtime.hints.advice import Action, Advice
from mainstem.runtime.hints.public import Publication, PublicPrefixes
from mainstem.runtime.memory.pools import counts_of, id_bytes, max_context, pool_sizes
from mainstem.runtime.memory.shares import OwnerUsage, TierMemory
from mainstem.runtime.memory.tiers import close_tiers
from mainstem.runtime.models.adapters import Adapter, AdapterFiles, check_name, read_adapter
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.parallel.ranks import require_equal
from mainstem.runtime.request import Completion, Delta, Progress, Request, Usage
from mainstem.runtime.sampling.grammars import Grammars
from mainstem.runtime.schedule.handoff import Handover
from mainstem.runtime.schedule.meter import Totals
from mainstem.runtime.stream import Stream, closed_by
from mainstem.runtime.text.escapes import begun_once
from mainstem.runtime.text.vision import VisionStats
from mainstem.settings.engine import EngineConfig, SamplingParams
from mainstem.storage.base import Backend
from mainstem.storage.peer import Peering
from mainstem.tiers.controller import TierStats

log = logging.getLogger(__name__)

T = TypeVar("T")
OnProgress = Callable[[int, int], None]
_DEFAULTS = SamplingParams()
_SHOWN_TOKENS = 12  # of a node, in `Engine.tree`
_REMEMBER_S = 30.0  # between two lists of the hottest prefixes, while there are requests
_PUBLISH_S = 0.001  # between two steps of a state that is published anew, while there is nothing else to do
_ADVICE_S = 0.01  # between two looks at prefetches that nobody waits for
_QUEUE_S = 0.1  # between two looks at what is queued, while there are requests
_DRAIN_S = 5.0  # for pending writes when the engine ends


@dataclass(frozen=True, slots=True)
class _Command:
    """A call of one of the engine's methods before a step, on every rank: by name, so that it can be shared."""

    method: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts after the last step.

    Args:
        running, waiting: requests.
        adapters: loaded adapters.
        totals: of the scheduler, since the start.
        cache: counts of the cache.
        compiled_grammars: since the start.
        tiers: of the host tier and storage.
        vision: of the embeddings of images, if the model takes images.
        events: of the publisher of events, if there is one.
    """

    running: int
    waiting: int
    adapters: int
    totals: Totals
    cache: CacheStats
    compiled_grammars: int
    tiers: TierStats | None = None
    vision: VisionStats | None = None
    events: EventStats | None = None


class Engine:
    """A model that serves many requests at once over one prefix cache. A context manager.

    Args:
        loaded: the model.
        config: sizes and limits.
        clock: monotonic, in seconds.
        random: the source of seeds for requests without one.
        runner: makes the runner from the model, the pages or slots of each component by its name, the page size,
            and further arguments of `ModelRunner`.
        progress: called as `progress(stage, done, total)`; stages "test", for memory and the self-test, "tiers", and
            "measure", for what computing a prompt takes.
        backend: the store of `config.tiers`, opened; the engine closes it. None: it is opened here.

    Attributes:
        name, tokenizer, dtype: of the model.
        config: as given.
        pages: pages of the first pool.
        max_context: positions that one request can have: the model's limit, or the pool's if it is smaller.
        vision: makes prompts of chats with images; None: the model takes none.
        has_states: the model has recurrent states, so the marks of requests count.

    Raises:
        BadArgument: `kv_bytes` holds no page, the policy does not exist, or `tp` is not the number of ranks that have
            loaded the model; `open_engine` starts them.
        UnsupportedModel: the model cannot run over pages.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig = EngineConfig(),
        *,
        clock: Callable[[], float] = time.monotonic,
        random: random_module.Random | None = None,
        runner: Callable[[LoadedModel, Mapping[str, int], int, str, bool], EngineRunner] = ModelRunner,
        progress: Callable[[str, int, int], None] | None = None,
        backend: Backend | None = None,
    ) -> None:
        report = progress or (lambda stage, done, total: None)
        if config.tp != loaded.ranks.size:
            raise BadArgument("tp", config.tp, f"{loaded.ranks.size}, the number of ranks that have loaded the model")
        self._ranks, self.config, self._clock = loaded.ranks, config, clock
        sizes = pool_sizes(loaded, config)
        self.pages = next(iter(sizes.values()))
        self.name, self.dtype, self._weights = loaded.name, loaded.dtype, loaded.model
        self.tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
        self.has_states = any(isinstance(component, State) for component in sizes)
        self.max_context = max_context(loaded, config, sizes)
        report("test", 0, 1)
        how = config.page_size, config.kv_cache_dtype, config.cuda_graphs
        self._model = model = runner(loaded, counts_of(sizes), *how)
        require_equal(self._ranks, lambda: model.computation, "scans")
        report("test", 1, 1)
        self.vision = model.vision
        if config.tiers.exist:
            report("tiers", 0, 1)
        # The second: whether there are more events, even if nothing happens.
        self._publisher, self._unpublished = make_publisher(loaded, config), False
        self._cache = make_cache(loaded, config, model, sizes, clock, self._publisher, backend)
        self._tiers = self._cache.tiers
        self._memory = TierMemory(self._cache, id_bytes(loaded, config, sizes))
        self._now_s = self._remembered_s = self._queued_s = clock()  # the time of this step, the same on all ranks
        if self._tiers is not None:
            report("tiers", 1, 1)
            self._tiers.enter_identity()
            if config.tiers.warm:
                self._tiers.warm()
        self._scheduler = make_scheduler(loaded, config, model, self._cache, clock, random or random_module.Random())
        if self._tiers is not None and self._tiers.store is not None:
            report("measure", 0, 1)
            self._scheduler.measure()
            report("measure", 1, 1)
        self._handover = Handover(self._tiers if config.role == "prefill" else None)
        self._advice = Advice(self._cache, config.max_retain_s)
        self._public, self._publication = PublicPrefixes(self._cache, model.copy_page), Publication(self)
        self._ids, self._commands = itertools.count(), queue.SimpleQueue[_Command]()
        # Guards the attributes up to the next comment; `drain` waits on it.
        self._changed = threading.Condition()
        self._closed: str | None = None  # why no more requests are accepted
        self._failure: BaseException | None = None
        self._over = False  # no more commands run
        self._undelivered: set[str] = set()  # requests on their way to the scheduler
        self._streams: dict[str, Stream] = {}
        self._on_progress: dict[str, OnProgress] = {}
        self._answers: dict[str, Future[Any]] = {}  # of questions
        # Only the engine's thread writes these.
        self._stopping, self._queued = False, 0
        self._stats = self._count()
        self._thread = threading.Thread(target=self._run, name="mainstem-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, *, on_progress: OnProgress | None = None) -> Stream:
        """Queues a request. Callable from any thread.

        Args:
            request: what to run.
            on_progress: called on the engine's thread as `on_progress(done, total)`, in prompt tokens; must be quick.

        Raises:
            RequestTooLong: it could never fit.
            BadTokens: a token is outside the vocabulary.
            BadArgument: its namespace names an adapter that is not loaded, or its grammar does not compile.
            UnsupportedModel: it has a grammar, which this model cannot follow.
            EngineFull: `max_waiting` requests wait already.
            EngineClosed: the engine is draining, is closed or has failed; the cause says why.
        """
        request = self._resolve(request)
        return self._submit(request, self._scheduler.check(request), on_progress)

    def _submit(self, request: Request, prompt: Encoded, on_progress: OnProgress | None = None) -> Stream:
        arrived_s = self._clock()
        with self._changed:
            self._require_open()
            waiting = self._scheduler.waiting + len(self._undelivered)
            if waiting >= self.config.max_waiting:
                raise EngineFull(f"as many requests wait as max_waiting allows: {self.config.max_waiting}")
            stream = Stream(f"request-{next(self._ids)}", self._cancel)
            self._streams[stream.id] = stream
            self._undelivered.add(stream.id)
            if on_progress is not None:
                self._on_progress[stream.id] = on_progress
            self._put(self._add, id=stream.id, request=request, prompt=prompt, arrived_s=arrived_s)
        return stream

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding: the model's hidden size."""
        return int(self._weights.config.get_text_config(decoder=True).hidden_size)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests may name in their namespace."""
        return self._model.adapters.names

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads a LoRA adapter under a name. Requests under way keep the weights that they started with.

        Raises:
            BadArgument: the name is invalid, or `path` holds no complete adapter.
            UnsupportedModel: the adapter does not fit the model, is of a kind that cannot be served, or there are
                several ranks.
            EngineClosed: see `submit`.
        """
        check_name(name)
        if self._ranks.size > 1:
            raise UnsupportedModel(
                f"adapter {name}: only a single process serves adapters, since PEFT's layers do not divide among ranks"
            )
        if name == self.name:
            raise BadArgument("name", name, "a name other than the model's own")
        files = read_adapter(path)
        self._ask(self._load, name=name, files=files)
        self._publication.compute_all([name])

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter. Requests that use it run to their end.

        Raises:
            BadArgument: no adapter has this name.
            EngineClosed: see `submit`.
        """
        self._ask(self._unload, name=name)

    def _name_weights(self, namespace: Namespace | str | None) -> tuple[Namespace | str | None, Adapter | None]:
        """Returns the adapter, and the namespace with the hash of the adapter's weights in place of its bare name."""
        if not isinstance(namespace, Namespace) or namespace.adapter is None:
            return namespace, None
        adapter = self._model.adapters.get(namespace.adapter)
        return replace(namespace, adapter=adapter.namespace), adapter

    def _resolve(self, request: Request) -> Request:
        """Returns the request with the weights of its adapter, and all that its images depend on, in its namespace."""
        namespace, adapter = self._name_weights(request.namespace)
        if self.vision is not None:
            namespace = self.vision.namespace_for(request.images, namespace)
        elif request.images:
            raise BadArgument("images", f"{len(request.images)} images", "none: the model takes text only")
        request = replace(request, namespace=namespace, adapter=adapter)
        if request.positions is not None and not (self.vision is not None and self.vision.m_rope):
            raise BadArgument("positions", "given", "None: the model counts positions itself")
        return request

    def generate(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams = _DEFAULTS) -> list[Completion]:
        """Completes many prompts, given as text or tokens, and waits for all. Keeps the order of the prompts.

        Prompts beyond `max_waiting` are submitted as others start to run.

        Raises:
            RequestTooLong, BadTokens: one of the prompts cannot run; then none is run.
            EngineFull: other callers fill the queue.
            EngineClosed: see `submit`.
        """
        requests = [self._resolve(Request(self._encode(prompt), params)) for prompt in prompts]
        encoded = [self._scheduler.check(request) for request in requests]
        streams: list[Stream] = []
        read = 0
        try:
            while len(streams) < len(requests):
                try:
                    at = len(streams)
                    streams.append(self._submit(requests[at], encoded[at]))
                except EngineFull:
                    if read == len(streams):
                        raise  # the queue is full of other callers' requests
                    streams[read].result()
                    read += 1
            return [stream.result() for stream in streams]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise

    @property
    def grammars(self) -> Grammars:
        """Those of requests, to compile one before `submit` does."""
        return self._scheduler.grammars

    @property
    def tier_bytes(self) -> tuple[int, ...]:
        """Memory of the device's pools and, where there is one, of the host's."""
        return self._memory.tier_bytes

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's thread; None if there was none. After a failure nothing runs."""
        return self._failure

    @property
    def event_endpoints(self) -> tuple[str, str | None] | None:
        """Where events and their replays are published, with the ports taken; None: nowhere."""
        return None if self._publisher is None else (self._publisher.endpoint, self._publisher.replay)

    @property
    def costs(self) -> dict[str, tuple[float, float] | None] | None:
        """What computing and loading take, as far as it is known: see `Costs.lines`. None: nothing measures it."""
        if self._tiers is None:
            return None
        lines = self._tiers.costs.lines(self._tiers.host.memory.payload_bytes(0) / self.config.page_size)
        return {**lines, "pull": lines["read"]} if self.reads_peers else lines  # which are read by the same calls

    @property
    def queued(self) -> int:
        """Prompt tokens that its requests have still to compute, about 0.1 s ago or after the last step."""
        return self._queued

    @property
    def reads_peers(self) -> bool:
        """Whether it reads the pages of other engines, now or once it knows their addresses."""
        return self.peering is not None and self.peering.follow is not None

    @property
    def peering(self) -> Peering | None:
        """Where peers read its pages, and whose it reads; None: it has no peers."""
        return None if self._tiers is None or self._tiers.store is None else self._tiers.store.peering

    def stats(self) -> EngineStats:
        """Returns counts after the last step. Callable from any thread; does not block."""
        return self._stats

    def flush(self) -> int:
        """Removes every prefix that no running request uses; returns the pages freed. Public ones are computed again.

        Raises:
            EngineClosed: the engine is closed or has failed.
        """
        freed = self._ask(self._flush)
        self._publication.compute_all([None, *self.adapters])
        return freed

    def remove(self, tokens: TokenLike, namespace: Namespace | str | None = None) -> int:
        """Removes the page of a prefix's last token and all pages after it; see `PrefixCache.remove`.

        Args:
            tokens: the prefix; empty: the whole namespace.
            namespace: as in a request; it may name an adapter.

        Raises:
            BadArgument: the namespace names an adapter that is not loaded.
            BadTokens: a token is out of range.
            EngineClosed: the engine is closed or has failed.
        """
        named = self._name_weights(namespace)[0]
        self._cache.tree.key_to_remove(tokens)  # here, because an error on the engine's thread may end it
        return self._ask(self._remove, tokens=tokens, namespace=named)

    def advise(
        self,
        action: Action,
        tokens: TokenLike,
        namespace: Namespace | str | None = None,
        *,
        ttl_s: float | None = None,
        next_use_s: float | None = None,
        next_use_steps: float | None = None,
    ) -> Kept:
        """Tells the cache what will become of a prefix: see `Advice.apply`.

        Args:
            action: what to do.
            tokens: the prefix, at least one token.
            namespace: as in a request; it may name an adapter.
            ttl_s: for "retain": how long.
            next_use_s, next_use_steps: for "expect": when it is used next, one of them.

        Raises:
            BadArgument: the namespace names an adapter that is not loaded, or a time is out of range or not for this
                action.
            BadTokens: a token is out of range, or there is none.
            EngineClosed: the engine is closed or has failed.
        """
        named = self._name_weights(namespace)[0]
        times = {"ttl_s": ttl_s, "next_use_s": next_use_s, "next_use_steps": next_use_steps}
        self._advice.check(action, **times)
        if not len(self._cache.tree.keys.encode(tokens)):
            raise BadTokens("the prefix is empty: must have at least one token")
        arguments = {"action": action, "tokens": np.asarray(tokens, np.int32), "namespace": named, **times}
        return self._ask(self._advise, **arguments)

    def publish_prefix(self, tokens: Sequence[int] | NDArray[np.int32]) -> int:
        """Declares a prefix public: computes it, pins it, and copies it for each tenant whose prompts begin with it.

        Args:
            tokens: the prefix. Whole pages of it are shared, the rest is computed for each tenant.

        Returns:
            The number of tokens that are shared.

        Raises:
            BadArgument: it does not fit into what may be retained; it is not public then.
            RequestTooLong, BadTokens, EngineClosed: see `submit`.
        """
        shared = self._publication.add(tokens)
        return self._ask(self._add_public, tokens=shared) if len(shared) else 0

    def set_quotas(self, quotas: Quotas) -> None:
        """Gives each tenant, salt or name its quota of each tier; see `Tenants.set_quotas`.

        Raises:
            BadArgument: more is guaranteed than there is beside running requests.
            EngineClosed: the engine is closed or has failed.
        """
        self._ask(self._share_out, quotas=quotas)

    def usage(self) -> dict[bytes, OwnerUsage]:
        """Returns what each owner has, by the names of `owner_of`; nothing before `set_quotas`.

        Raises:
            EngineClosed: the engine is closed or has failed.
        """
        return self._ask(self._usage)

    def tree(self) -> str:
        """Returns the cached prefixes as text, each node with the beginning of its text.

        Raises:
            EngineClosed: the engine is closed or has failed.
        """
        return self._ask(self._show)

    def survey(self, first: int, count: int) -> Survey:
        """Describes some of the tree, in time bounded by `count`: see `Tree.survey`.

        Raises:
            EngineClosed: the engine is closed or has failed.
        """
        return self._ask(self._survey, first=first, count=count)

    def explain(self, request: Request, *, distances: bool = False) -> Stretches:
        """Returns where the prompt of a request would be found now, and why the rest would be computed; runs nothing.

        Storage is not asked.

        Args:
            request: the request.
            distances: also say how much memory would have kept what was evicted, for which the whole tree is read.

        Raises:
            BadArgument: the engine does not explain, or see `submit`.
            RequestTooLong, BadTokens, UnsupportedModel: see `submit`.
            EngineClosed: the engine is closed or has failed.
        """
        if not self.config.explain:
            raise BadArgument("explain", self.config.explain, "set: the engine was started without it")
        request = self._resolve(request)
        prompt = self._scheduler.check(request)
        return self._ask(self._explain, request=request, prompt=prompt, distances=distances)

    def drain(self, timeout_s: float) -> bool:
        """Stops accepting requests, and waits until those under way have ended; returns whether all have."""
        with self._changed:
            self._closed = self._closed or "the engine is draining"
            return self._changed.wait_for(lambda: not self._streams, timeout_s)

    def close(self) -> None:
        """Cancels all requests and ends the thread; a second call does nothing."""
        with self._changed:
            self._closed = "the engine is closed"
            self._put(self._stop, ids=tuple(self._streams))
        self._thread.join()

    def wait(self) -> None:
        """Waits until the engine has ended, for ranks other than 0.

        Raises:
            BaseException: what ended it, if it failed.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def wake(self) -> None:
        """Makes the engine look whether every rank still runs."""
        self._put(self._nothing)

    def __enter__(self) -> Self:
        """The engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the engine."""
        self.close()

    def _cancel(self, id: str) -> None:
        self._put(self._cancel_one, id=id)

    def _put(self, method: Callable[..., object], **arguments: object) -> None:
        """Queues a call of one of its own methods."""
        self._commands.put(_Command(method.__name__, arguments))

    def _run_command(self, command: _Command) -> Any:
        return getattr(self, command.method)(**command.arguments)

    def _encode(self, prompt: str | Sequence[int]) -> NDArray[Any]:
        if not isinstance(prompt, str):
            return np.asarray(prompt)
        return np.asarray(begun_once(self.tokenizer, self.tokenizer.encode(prompt)))

    def _describe(self, key: bytes) -> str:
        symbols = np.frombuffer(key, dtype="<u4")[: _SHOWN_TOKENS + 1]
        more = " …" if len(symbols) > _SHOWN_TOKENS else ""
        text = symbols[:_SHOWN_TOKENS]
        image = " and of an image" if (text >= MAX_TOKEN).any() else ""
        return f"{self.tokenizer.decode(text[text < MAX_TOKEN].tolist())!r}{image}{more}"

    def _ask(self, method: Callable[..., T], **arguments: object) -> T:
        """Runs a method on the engine's thread, waits, and returns its result or raises its error in the caller."""
        answer: Future[T] = Future()
        with self._changed:
            if self._over:
                raise self._refusal()
            id = f"question-{next(self._ids)}"
            self._answers[id] = answer
            self._put(self._answer, id=id, question=_Command(method.__name__, arguments))
        try:
            return answer.result()
        finally:
            with self._changed:
                del self._answers[id]

    def _require_open(self) -> None:
        if self._closed is not None:
            raise self._refusal()

    def _refusal(self) -> EngineClosed:
        return EngineClosed(self._closed or "closed") if self._failure is None else closed_by(self._failure)

    # All below runs on the engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopping or self._scheduler.busy:
                self._now_s, commands = self._ranks.share(self._take_commands)
                for command in commands:
                    self._run_command(command)
                events = self._scheduler.step(self._now_s)
                self._advice.poll()
                self._publish()
                self._stats = self._count()
                self._look_at_queue()
                for id, what in self._handover.pass_on(events, self._now_s, everything=self._stopping):
                    self._deliver(id, what)
        except BaseException as error:
            cause = self._ranks.cause(error)
            if not isinstance(cause, RankFailed):  # that says all
                log.critical("the engine's loop failed; every request ends", exc_info=True)
            self._end(cause)
        else:
            self._end(None)
        finally:
            self.grammars.close()
            self._advice.close()
            self._scheduler.close()
            try:
                self._close_tiers()
            finally:
                self._close_publisher()

    def _publish(self) -> None:
        """Passes on what has come to a tier or left it, unless the publisher lags."""
        if self._publisher is not None and self._publisher.has_room:
            self._unpublished = self._cache.deliver_events()

    def _look_at_queue(self) -> None:
        """Counts what is queued, unless it was counted just now: it looks up every prompt that waits."""
        if not self._scheduler.busy or self._now_s >= self._queued_s + _QUEUE_S:
            self._queued, self._queued_s = self._scheduler.queued(), self._now_s

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.put(AllBlocksCleared())  # nothing outlives the engine but storage
            self._publisher.close()

    def _take_commands(self) -> tuple[float, list[_Command]]:
        """Returns the time and all queued commands; if the scheduler has nothing to do, waits for one. On rank 0."""
        idle_s = self._scheduler.idle_s
        if self._advice.busy:
            idle_s = min(idle_s, _ADVICE_S) if idle_s is not None else _ADVICE_S
        if self._unpublished:
            idle_s = min(idle_s, _PUBLISH_S) if idle_s is not None else _PUBLISH_S
        commands: list[_Command] = []
        with contextlib.suppress(queue.Empty):
            while True:
                commands.append(self._commands.get(block=idle_s != 0, timeout=idle_s))
                idle_s = 0.0
        now_s = self._clock()
        if self._tiers is not None and now_s - self._remembered_s >= _REMEMBER_S:
            self._remembered_s = now_s
            commands.append(_Command(self._remember.__name__, {}))
        return now_s, commands

    def _close_tiers(self) -> None:
        if self._tiers is None:
            return
        try:
            if self._failure is None or self._ranks.size == 1:  # else no rank answers
                self._tiers.remember()
                self._tiers.drain(_DRAIN_S)
        finally:
            self._tiers.close()  # the store, after pending writes
            close_tiers(self._tiers.host, None)

    def _remember(self) -> None:
        """Lists the hottest prefixes, and who wrote them, in storage, for a restart."""
        if self._tiers is not None:
            self._tiers.enter_identity()
            self._tiers.remember()

    def _nothing(self) -> None:
        """Ends a wait for commands."""

    def _flush(self) -> int:
        return self._cache.flush()

    def _remove(self, tokens: TokenLike, namespace: Namespace | str | None) -> int:
        return self._cache.remove(tokens, namespace)

    def _advise(
        self, action: Action, tokens: NDArray[np.int32], namespace: Namespace | str | None, **times: float | None
    ) -> Kept:
        return self._advice.apply(action, tokens, namespace, self._now_s, **times)

    def _add_public(self, tokens: NDArray[np.int32]) -> int:
        return self._public.add(tokens)

    def _share_out(self, quotas: Quotas) -> None:
        self._cache.tenants.set_quotas(quotas)

    def _usage(self) -> dict[bytes, OwnerUsage]:
        return self._memory.by_owner()

    def _show(self) -> str:
        return self._cache.tree.pretty(self._describe)

    def _survey(self, first: int, count: int) -> Survey:
        return self._cache.tree.survey(first, count)

    def _explain(self, request: Request, prompt: Encoded, distances: bool) -> Stretches:
        return self._scheduler.hits.look(request, prompt, distances=distances)

    def _load(self, name: str, files: AdapterFiles) -> None:
        self._model.adapters.add(name, files)

    def _unload(self, name: str) -> None:
        self._model.adapters.unload(name)

    def _cancel_one(self, id: str) -> None:
        self._scheduler.cancel(id)

    def _answer(self, id: str, question: _Command) -> None:
        answer = self._answers.get(id, Future())  # only the rank that was asked waits for it
        try:
            result = self._run_command(question)
            self._stats = self._count()
            answer.set_result(result)
        except (BadArgument, BadTokens, UnsupportedModel) as error:
            answer.set_exception(error)
        except Exception as error:
            answer.set_exception(error)
            raise

    def _add(self, id: str, request: Request, prompt: Encoded, arrived_s: float) -> None:
        with self._changed:
            self._undelivered.discard(id)
        try:
            self._public.adopt(prompt, request.namespace)
            self._scheduler.add(id, request, arrived_s, prompt)
        except Exception as error:  # e.g. the tokenizer cannot decode the prompt; other requests go on
            log.exception("request %s cannot start", id)
            nothing = Usage(len(request.tokens), 0, 0, 0.0, 0.0, 0.0)
            self._deliver(id, Delta("", (), (), "error", nothing, f"{type(error).__name__}: {error}"))

    def _stop(self, ids: Sequence[str]) -> None:
        self._stopping = True
        for id in ids:
            self._scheduler.cancel(id)

    def _deliver(self, id: str, what: Delta | Progress) -> None:
        if isinstance(what, Progress):
            self._report(id, what)
            return
        if self._ranks.rank > 0:
            return
        self._streams[id].put(what)
        if what.finish_reason is not None:
            self._on_progress.pop(id, None)
            with self._changed:
                del self._streams[id]
                self._changed.notify_all()

    def _report(self, id: str, progress: Progress) -> None:
        report = self._on_progress.get(id)
        if report is None:
            return
        try:
            report(progress.done, progress.total)
        except Exception:  # the caller's code: it must not end other requests
            log.exception("on_progress of %s failed; it is not called again", id)
            del self._on_progress[id]

    def _end(self, failure: BaseException | None) -> None:
        with self._changed:
            self._over, self._failure = True, failure
            self._closed = self._closed or "the engine is closed"
            for stream in self._streams.values():
                stream.fail(failure or EngineClosed(self._closed))
            self._streams.clear()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(self._refusal())
            self._changed.notify_all()

    def _count(self) -> EngineStats:
        return EngineStats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            adapters=len(self._model.adapters.names),
            totals=deepcopy(self._scheduler.totals),
            cache=self._cache.stats(),
            compiled_grammars=self.grammars.compiled,
            tiers=None if self._tiers is None else self._tiers.stats(),
            vision=None if self.vision is None else self.vision.stats(),
            events=None if self._publisher is None else self._publisher.stats(self._cache.events_dropped),
        )
