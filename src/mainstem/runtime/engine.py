"""Engine: a model that serves many requests at once, for any thread.

Engine       checks what callers give, and names the weights and images that a request depends on
EngineLoop   a thread: commands in, streams out
EngineCore   model, cache, scheduler and tiers of one rank, which only that thread changes; any may ask for its counts
"""

from __future__ import annotations

import logging
import random as random_module
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mainstem.cache.components import State
from mainstem.cache.explain import Stretches
from mainstem.cache.keys import TokenLike
from mainstem.cache.namespaces import Namespace
from mainstem.cache.quotas import Quotas
from mainstem.cache.retention import Kept
from mainstem.cache.tree import Survey
from mainstem.errors import BadArgument, BadTokens, EngineFull, UnsupportedModel, UpdateUnderWay
from mainstem.runtime.engine_core import EngineCore, EngineStats, MakeRunner, OnStage
from mainstem.runtime.hints.advice import Action
from mainstem.runtime.loop import EngineLoop, OnProgress
from mainstem.runtime.memory.shares import OwnerUsage
from mainstem.runtime.models.adapters import Adapter, check_name, read_adapter
from mainstem.runtime.models.exactness import shown
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.new_weights import read_new
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.request import Completion, Request
from mainstem.runtime.sampling.grammars import Grammars
from mainstem.runtime.schedule.versions import check_mode
from mainstem.runtime.scoring import Score, requests_of, score_of
from mainstem.runtime.stream import Stream
from mainstem.runtime.text.escapes import begun_once
from mainstem.settings.engine import EngineConfig, SamplingParams
from mainstem.storage.base import Backend
from mainstem.storage.peer import Peering

log = logging.getLogger(__name__)
_DEFAULTS = SamplingParams()


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
        runner: MakeRunner = ModelRunner,
        progress: OnStage | None = None,
        backend: Backend | None = None,
    ) -> None:
        if config.tp != loaded.ranks.size:
            raise BadArgument("tp", config.tp, f"{loaded.ranks.size}, the number of ranks that have loaded the model")
        report, seeds = progress or (lambda stage, done, total: None), random or random_module.Random()
        self._core = core = EngineCore(loaded, config, clock, seeds, runner, report, backend)
        self.config = config
        self.name, self.dtype = loaded.name, loaded.dtype
        self.tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
        self.pages, self.max_context, self.vision = next(iter(core.sizes.values())), core.max_context, core.model.vision
        self.has_states = any(isinstance(component, State) for component in core.sizes)
        self._publication, self._updating = _Publication(self), threading.Lock()
        self._loaded = loaded
        self._loop = EngineLoop(core, clock, config.max_waiting)

    # ---------------------------------------------------------------- requests

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
        return self._loop.submit(request, self._core.scheduler.intake.check(request), on_progress)

    def generate(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams = _DEFAULTS) -> list[Completion]:
        """Completes many prompts, given as text or tokens, and waits for all. Keeps the order of the prompts.

        Prompts beyond `max_waiting` are submitted as others start to run.

        Raises:
            RequestTooLong, BadTokens: one of the prompts cannot run; then none is run.
            EngineFull: other callers fill the queue.
            EngineClosed: see `submit`.
        """
        return self._complete([Request(self._encode(prompt), params) for prompt in prompts])

    def score(
        self,
        context: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        namespace: Namespace | str | None = None,
        *,
        keep: bool = False,
    ) -> list[Score]:
        """Returns how likely the model finds each of several texts after one context, which is computed once.

        Args:
            context: text or tokens, at least one token.
            continuations: text or tokens, at least one token each. Text is divided into tokens by itself.
            namespace: as in a request; it may name an adapter.
            keep: the KV of continuations stays in the cache, too, for contexts that go on from them.

        Raises:
            BadArgument: `continuations` is one text.
            BadTokens: the context or a continuation is empty.
            RequestTooLong, BadTokens, EngineFull, EngineClosed: see `generate`.
        """
        if isinstance(continuations, str):
            raise BadArgument("continuations", continuations, "a list of texts, or of lists of tokens")
        texts = [self._encode(each, begins=False) for each in continuations]
        before = self._encode(context)
        completions = self._complete(requests_of(before, texts, namespace, keep=keep))
        return [score_of(each) for each in completions[len(completions) - len(texts) :]]

    def _complete(self, asked: Sequence[Request]) -> list[Completion]:
        """Runs requests, as many at a time as may wait, and returns what came of each, in order."""
        requests = [self._resolve(request) for request in asked]
        encoded = [self._core.scheduler.intake.check(request) for request in requests]
        streams: list[Stream] = []
        read = 0
        try:
            while len(streams) < len(requests):
                try:
                    at = len(streams)
                    streams.append(self._loop.submit(requests[at], encoded[at]))
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

    def _name_weights(self, namespace: Namespace | str | None) -> tuple[Namespace | str | None, Adapter | None]:
        """Returns the adapter, and the namespace with the hash of the adapter's weights in place of its bare name."""
        if not isinstance(namespace, Namespace) or namespace.adapter is None:
            return namespace, None
        adapter = self._core.model.adapters.get(namespace.adapter)
        return replace(namespace, adapter=adapter.namespace), adapter

    def _encode(self, prompt: str | Sequence[int], *, begins: bool = True) -> NDArray[Any]:
        if not isinstance(prompt, str):
            return np.asarray(prompt)
        if not begins:
            return np.asarray(self.tokenizer.encode(prompt, add_special_tokens=False), np.int32)
        return np.asarray(begun_once(self.tokenizer, self.tokenizer.encode(prompt)))

    @property
    def exact(self) -> str:
        """Whether a hit changes no bit: "yes, ...", or "no: ..." with the reason, the model's or an adapter's."""
        return shown(self._core.model.inexact, self._core.model.arithmetic)

    # ---------------------------------------------------------------- adapters

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests may name in their namespace."""
        return self._core.model.adapters.names

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads a LoRA adapter under a name. Requests under way keep the weights that they started with.

        Raises:
            BadArgument: the name is invalid, or `path` holds no complete adapter.
            UnsupportedModel: the adapter does not fit the model, is of a kind that cannot be served, or there are
                several ranks.
            EngineClosed: see `submit`.
        """
        check_name(name)
        if self._core.ranks.size > 1:
            raise UnsupportedModel(
                f"adapter {name}: only a single process serves adapters, since PEFT's layers do not divide among ranks"
            )
        if name == self.name:
            raise BadArgument("name", name, "a name other than the model's own")
        files = read_adapter(path)
        self._loop.ask(EngineCore.load_adapter, name, files)
        self._publication.compute_all([name])

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter. Requests that use it run to their end.

        Raises:
            BadArgument: no adapter has this name.
            EngineClosed: see `submit`.
        """
        self._loop.ask(EngineCore.unload_adapter, name)

    # ---------------------------------------------------------------- weights

    def update_weights(
        self, weights: str | Path | Mapping[str, torch.Tensor], *, mode: str = "strict", lag: int = 0
    ) -> int:
        """Puts other weights in place of the model's, between two steps, and returns the number of their version.

        Requests under way go on with them. The self-tests of the start are not repeated: they depend on shapes only.

        Args:
            weights: a folder with a model of the same configuration, which every rank reads, or for a single rank a
                state dict with the model's names. They are rounded to the dtype of the model, as at its start.
            mode: what may be found of what older weights have computed. "strict": nothing, and running requests are
                computed anew from their prompts and the tokens that they have; "group": a group that has begun
                (`Hints.group`) finds what the version with which it began has computed; "lag": requests find what the
                last `lag` versions have. See `docs/training.md`.
            lag: with mode "lag": 1 to 64 versions.

        Raises:
            BadArgument: `mode` or `lag` is none of the above; or there is no such folder, or a tensor is missing, is
                not one of the model's or has another shape. Nothing has changed.
            UnsupportedModel: the model is quantized, takes images or has adapters. Nothing has changed.
            UpdateUnderWay: another update has not ended.
            EngineClosed: the engine is closed or has failed.
        """
        check_mode(mode, lag)
        if not self._updating.acquire(blocking=False):
            raise UpdateUnderWay("another update of the weights is under way")
        try:
            version = self._loop.ask(EngineCore.update_weights, read_new(self._loaded, weights), mode, lag)
            self._publication.compute_all([None])
        finally:
            self._updating.release()
        return version

    @property
    def weight_version(self) -> int:
        """The number of updates so far."""
        return self._core.scheduler.versions.number

    # ---------------------------------------------------------------- the cache

    def flush(self) -> int:
        """Removes every prefix that no running request uses; returns the pages freed. Public ones are computed again.

        Raises:
            EngineClosed: the engine is closed or has failed.
        """
        freed = self._loop.ask(EngineCore.flush)
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
        self._core.cache.tree.key_to_remove(tokens)  # here, because an error on the engine's thread may end it
        return self._loop.ask(EngineCore.remove, tokens, named)

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
        times = ttl_s, next_use_s, next_use_steps
        self._core.advice.check(action, *times)
        if not len(self._core.cache.tree.keys.encode(tokens)):
            raise BadTokens("the prefix is empty: must have at least one token")
        return self._loop.ask(EngineCore.advise, action, np.asarray(tokens, np.int32), named, *times)

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
        return self._loop.ask(EngineCore.add_public, shared) if len(shared) else 0

    def set_quotas(self, quotas: Quotas) -> None:
        """Gives each tenant, salt or name its quota of each tier; see `Tenants.set_quotas`.

        Raises:
            BadArgument: more is guaranteed than there is beside running requests.
            EngineClosed: the engine is closed or has failed.
        """
        self._loop.ask(EngineCore.set_quotas, quotas)

    def usage(self) -> dict[bytes, OwnerUsage]:
        """Returns what each owner has, by the names of `owner_of`; nothing before `set_quotas`.

        Raises:
            EngineClosed: the engine is closed or has failed.
        """
        return self._loop.ask(EngineCore.usage)

    def tree(self) -> str:
        """Returns the cached prefixes as text, each node with the beginning of its text.

        Raises:
            EngineClosed: the engine is closed or has failed.
        """
        return self._loop.ask(EngineCore.show)

    def survey(self, first: int, count: int) -> Survey:
        """Describes some of the tree, in time bounded by `count`: see `Tree.survey`.

        Raises:
            EngineClosed: the engine is closed or has failed.
        """
        return self._loop.ask(EngineCore.survey, first, count)

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
        prompt = self._core.scheduler.intake.check(request)
        return self._loop.ask(EngineCore.explain, request, prompt, distances)

    # ---------------------------------------------------------------- what there is

    def stats(self) -> EngineStats:
        """Returns the counts as they are now, also during a step. Callable from any thread; does not block."""
        return self._core.stats()

    @property
    def queued(self) -> int:
        """Prompt tokens that its requests have still to compute, about 0.1 s ago or after the last step."""
        return self._core.queued

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding: the model's hidden size."""
        return int(self._loaded.model.config.get_text_config(decoder=True).hidden_size)

    @property
    def grammars(self) -> Grammars:
        """The compiler of requests' grammars, to compile one before `submit` does."""
        return self._core.scheduler.intake.grammars

    @property
    def tier_bytes(self) -> tuple[int, ...]:
        """Memory of the device's pools and, where there is one, of the host's."""
        return self._core.memory.tier_bytes

    @property
    def event_endpoints(self) -> tuple[str, str | None] | None:
        """The addresses at which events and their replays are published, with their ports; None: they are not."""
        publisher = self._core.publisher
        return None if publisher is None else (publisher.endpoint, publisher.replay)

    @property
    def costs(self) -> dict[str, tuple[float, float] | None] | None:
        """The measured times of computing and loading: see `Costs.lines`. None: nothing measures them."""
        tiers = self._core.tiers
        if tiers is None:
            return None
        lines = tiers.costs.lines(tiers.host.memory.payload_bytes(0) / self.config.page_size)
        return {**lines, "pull": lines["read"]} if self.reads_peers else lines  # which are read by the same calls

    @property
    def reads_peers(self) -> bool:
        """Whether it reads the pages of other engines, now or once it knows their addresses."""
        return self.peering is not None and self.peering.follow is not None

    @property
    def peering(self) -> Peering | None:
        """The address at which peers read its pages, and the peers whose pages it reads; None: it has no peers."""
        tiers = self._core.tiers
        return None if tiers is None or tiers.store is None else tiers.store.peering

    # ---------------------------------------------------------------- its end

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's thread; None if there was none. After a failure nothing runs."""
        return self._loop.failure

    def drain(self, timeout_s: float) -> bool:
        """Stops accepting requests, and waits until those under way have ended; returns whether all have."""
        return self._loop.drain(timeout_s)

    def close(self) -> None:
        """Cancels all requests and ends the thread; a second call does nothing."""
        self._loop.close()

    def wait(self) -> None:
        """Waits until the engine has ended, for ranks other than 0.

        Raises:
            BaseException: what ended it, if it failed.
        """
        self._loop.join()
        if self._loop.failure is not None:
            raise self._loop.failure

    def wake(self) -> None:
        """Makes the engine look whether every rank still runs."""
        self._loop.wake()

    def __enter__(self) -> Self:
        """The engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the engine."""
        self.close()


class _Publication:
    """Computes and pins public prefixes (`hints.public`) for each adapter. For any thread but the engine's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._prefixes: list[NDArray[np.int32]] = []

    def add(self, tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        """Computes and pins the whole pages of a prefix; returns their tokens.

        Raises:
            BadArgument: it does not fit into what may be retained.
        """
        size = self._engine.config.page_size
        whole = np.asarray(tokens, np.int32)[: len(tokens) // size * size]
        if len(whole):
            for adapter in (None, *self._engine.adapters):
                self._compute(whole, adapter)
            self._prefixes.append(whole)
        return whole

    def compute_all(self, adapters: Sequence[str | None]) -> None:
        """Computes and pins all prefixes with these adapters; None: with the model's own weights.

        A prefix that does not fit any more is computed for each tenant, and the log says so.
        """
        for tokens in self._prefixes:
            for adapter in adapters:
                try:
                    self._compute(tokens, adapter)
                except BadArgument as error:
                    log.warning("a public prefix is computed for each tenant: %s", error)

    def _compute(self, tokens: NDArray[np.int32], adapter: str | None) -> None:
        engine, namespace = self._engine, Namespace(adapter=adapter)
        engine.submit(Request(tokens, SamplingParams(max_tokens=0), namespace=namespace)).result()
        if engine.advise("pin", tokens, namespace).positions < len(tokens):
            engine.advise("unpin", tokens, namespace)
            raise BadArgument("public prefix", f"{len(tokens)} tokens", "as long as may be retained, see retain_share")
