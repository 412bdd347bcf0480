"""EngineCore: the model, the cache and the scheduler of one rank, and what callers ask of them. One thread.

Every rank has one, and all run the same calls and the same steps at the same times, which rank 0 chooses. It knows no
threads and no streams: see `loop`.
"""

from __future__ import annotations

import logging
import math
import random as random_module
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.explain import Stretches
from mainstem.cache.keys import MAX_TOKEN, Encoded, TokenLike
from mainstem.cache.namespaces import Namespace, of_weights
from mainstem.cache.prefix_cache import CacheStats
from mainstem.cache.quotas import Quotas
from mainstem.cache.retention import Kept
from mainstem.cache.tree import Survey
from mainstem.errors import UnsupportedModel
from mainstem.events.publisher import EventStats
from mainstem.events.source import AllBlocksCleared
from mainstem.metric import Metric, gauge
from mainstem.runtime.assembly import audit_pages, make_auditor, make_cache, make_publisher, make_scheduler
from mainstem.runtime.audit.auditor import AuditStats
from mainstem.runtime.hints.advice import Action, Advice
from mainstem.runtime.hints.public import PublicPrefixes
from mainstem.runtime.memory.pools import counts_of, id_bytes, max_context, pool_sizes
from mainstem.runtime.memory.shares import OwnerUsage, TierMemory
from mainstem.runtime.memory.tiers import end_tiers
from mainstem.runtime.models.adapters import AdapterFiles
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.new_weights import NewWeights
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.parallel.ranks import require_equal
from mainstem.runtime.request import Delta, Progress, Request, Usage
from mainstem.runtime.schedule.handoff import PrefillHandoff
from mainstem.runtime.schedule.meter import Totals
from mainstem.runtime.text.vision import VisionStats
from mainstem.settings.engine import EngineConfig
from mainstem.storage.base import Backend
from mainstem.tiers.controller import TierStats

log = logging.getLogger(__name__)

MakeRunner = Callable[[LoadedModel, Mapping[str, int], int, str, bool, bool, int | None], ModelRunner]
OnStage = Callable[[str, int, int], None]
_SHOWN_TOKENS = 12  # of a node, in `show`
_REMEMBER_S = 30.0  # between two lists of the hottest prefixes, while there are requests
_PUBLISH_S = 0.001  # between two steps of a state that is published anew, while there is nothing else to do
_ADVICE_S = 0.01  # between two looks at prefetches that nobody waits for
_QUEUE_S = 0.1  # between two looks at what is queued, while there are requests


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of an engine.

    Args:
        running, waiting: requests.
        adapters: loaded adapters.
        totals: of the scheduler, since the start.
        cache: counts of the cache.
        compiled_grammars: since the start.
        exact: whether a hit changes no bit.
        tiers: of the host tier and storage.
        vision: of the embeddings of images, if the model takes images.
        audits: of the audits of the cache, if there are any.
        events: of the publisher of events, if there is one.
    """

    running: int
    waiting: int
    adapters: int
    totals: Totals
    cache: CacheStats
    compiled_grammars: int
    exact: bool
    tiers: TierStats | None = None
    vision: VisionStats | None = None
    audits: AuditStats | None = None
    events: EventStats | None = None

    METRICS: ClassVar = (
        Metric("mainstem_compiled_grammars", "Grammars compiled; the others were cached", "compiled_grammars"),
        gauge("mainstem_requests_running", "Running requests", "running"),
        gauge("mainstem_requests_waiting", "Waiting requests", "waiting"),
        gauge("mainstem_adapters", "Loaded LoRA adapters", "adapters"),
        gauge("mainstem_exact", "1 if a hit changes no bit; GET /v1/models says why it is 0", "exact"),
    )  # fmt: skip


class EngineCore:
    """The parts of one rank's engine.

    Args:
        loaded: the model.
        config: sizes and limits.
        clock: monotonic, in seconds.
        random: the source of seeds for requests without one.
        make_runner, on_stage: see `Engine`.
        backend: the store of `config.tiers`, opened; None: it is opened here.

    Attributes:
        now_s: the time of this step, the same on all ranks.
        stopping: nothing new is begun: the loop ends with the requests.
        queued: prompt tokens that its requests have still to compute, about 0.1 s ago or after the last step.

    Raises:
        BadArgument, UnsupportedModel: see `Engine`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        clock: Callable[[], float],
        random: random_module.Random,
        make_runner: MakeRunner,
        on_stage: OnStage,
        backend: Backend | None,
    ) -> None:
        self.loaded, self.config, self.ranks = loaded, config, loaded.ranks
        self.sizes = sizes = pool_sizes(loaded, config)
        self.max_context = max_context(loaded, config, sizes)
        on_stage("test", 0, 1)
        how = config.page_size, config.kv_cache_dtype, config.cuda_graphs, config.exact, config.keep_scores
        own = audit_pages(config, sizes)
        counts = {name: count + own[name] for name, count in counts_of(sizes).items()}
        self.model = model = make_runner(loaded, counts, *how)
        require_equal(self.ranks, lambda: model.computation, "scans")
        on_stage("test", 1, 1)
        if config.tiers.exist:
            on_stage("tiers", 0, 1)
        self.publisher = make_publisher(loaded, config)
        self.cache = cache = make_cache(loaded, config, model, sizes, clock, self.publisher, backend)
        self.tiers = tiers = cache.tiers
        self.memory = TierMemory(cache, id_bytes(loaded, config, sizes))
        self.now_s = self._counted_s = clock()
        self._remembered_s = math.inf  # until the first step, whose time is the same on all ranks
        if tiers is not None:
            on_stage("tiers", 1, 1)
            tiers.enter_identity()
            if config.tiers.warm:
                tiers.warm()
        self.auditor = make_auditor(config, model, cache, random)
        self.scheduler = make_scheduler(loaded, config, model, cache, clock, random, self.auditor)
        if tiers is not None and tiers.store is not None:
            on_stage("measure", 0, 1)
            self.scheduler.measure()
            on_stage("measure", 1, 1)
        self.advice = Advice(cache, config.max_retain_s)
        self._handoff = PrefillHandoff(tiers if config.role == "prefill" else None)
        self._public = PublicPrefixes(cache, model.memory.copy_page)
        self._refused: list[tuple[str, Delta | Progress]] = []  # requests that could not be added
        self._unpublished = False  # there are more events, even if nothing happens
        self.stopping, self.queued = False, 0

    # ---------------------------------------------------------------- steps

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do or to report."""
        return bool(self.scheduler.busy or self._refused)

    @property
    def idle_s(self) -> float | None:
        """Seconds until a step may find something to do, if nobody asks for anything; None: never."""
        waits_s = (
            0.0 if self._refused else self.scheduler.idle_s,
            _ADVICE_S if self.advice.busy else None,
            _PUBLISH_S if self._unpublished else None,
        )
        first_s = min((each for each in waits_s if each is not None), default=math.inf)
        return None if first_s == math.inf else first_s

    def step(self) -> list[tuple[str, Delta | Progress]]:
        """Runs one step; returns what it has to tell of requests, by their ids."""
        refused, self._refused = self._refused, []
        events = refused + self.scheduler.step(self.now_s)
        self.advice.poll()
        if self.publisher is not None:
            self._unpublished = self.cache.deliver_events() if self.publisher.has_room else self.publisher.lags
        if not self.scheduler.busy or self.now_s >= self._counted_s + _QUEUE_S:  # it looks up every prompt that waits
            self.queued, self._counted_s = self.scheduler.queued(), self.now_s
        return self._handoff.pass_on(events, self.now_s, everything=self.stopping)

    def remember(self) -> None:
        """Lists the hottest prefixes, and who wrote them, in storage, for a restart; not more often than needed."""
        if self._remembered_s == math.inf:
            self._remembered_s = self.now_s
        elif self.tiers is not None and self.now_s >= self._remembered_s + _REMEMBER_S:
            self._remembered_s = self.now_s
            self.tiers.enter_identity()
            self.tiers.remember()

    def stats(self) -> EngineStats:
        """Returns the counts as they are now. Callable from any thread; it changes nothing and waits for nothing."""
        waiting = self.scheduler.waiting  # first: a request that is admitted meanwhile is counted twice, not never
        return EngineStats(
            running=self.scheduler.running,
            waiting=waiting,
            adapters=len(self.model.adapters.names),
            totals=self.scheduler.totals.copy(),
            cache=self.cache.stats(settle=False),
            compiled_grammars=self.scheduler.intake.grammars.compiled,
            exact=self.model.inexact is None,
            tiers=None if self.tiers is None else self.tiers.stats(),
            vision=None if self.model.vision is None else self.model.vision.stats(),
            audits=None if self.auditor is None else self.auditor.stats(),
            events=None if self.publisher is None else self.publisher.stats(self.cache.events_dropped),
        )

    def close(self, failed: bool) -> None:
        """Ends all parts, the store after its pending writes; after a failure no other rank answers any more."""
        self.scheduler.intake.grammars.close()
        self.advice.close()
        self.scheduler.close()
        try:
            if self.tiers is not None:
                end_tiers(self.tiers, drains=not failed or self.ranks.size == 1)
        finally:
            if self.publisher is not None:
                self.publisher.put(AllBlocksCleared())  # nothing outlives the engine but storage
                self.publisher.close()

    # ---------------------------------------------------------------- what `Engine` asks for, between two steps

    def add(self, id: str, request: Request, prompt: Encoded, arrived_s: float) -> None:
        """Adds a request. One that cannot start, e.g. since its tokens cannot be decoded, ends with an error."""
        try:
            self._public.adopt(prompt, self._named(request.namespace))
            self.scheduler.add(id, request, arrived_s, prompt)
        except Exception as error:
            log.exception("request %s cannot start", id)
            nothing = Usage(len(request.tokens), 0, 0, 0.0, 0.0, 0.0)
            self._refused.append((id, Delta("", (), (), "error", nothing, f"{type(error).__name__}: {error}")))

    def cancel(self, *ids: str) -> None:
        """Ends requests; without any, a step is made for its own sake."""
        for id in ids:
            self.scheduler.cancel(id)

    def stop(self, *ids: str) -> None:
        """Ends these requests, which are all, and then the loop."""
        self.stopping = True
        self.cancel(*ids)

    def flush(self) -> int:
        return self.cache.flush()

    def remove(self, tokens: TokenLike, namespace: Namespace | str | None) -> int:
        names = self.scheduler.versions.names
        return sum(self.cache.remove(tokens, of_weights(namespace, name)) for name in names)

    def advise(
        self, action: Action, tokens: NDArray[np.int32], namespace: Namespace | str | None, *times: float | None
    ) -> Kept:
        return self.advice.apply(action, tokens, self._named(namespace), self.now_s, *times)

    def add_public(self, tokens: Sequence[int] | NDArray[np.int32]) -> int:
        return self._public.add(tokens)

    def set_quotas(self, quotas: Quotas) -> None:
        self.cache.tenants.set_quotas(quotas)

    def usage(self) -> dict[bytes, OwnerUsage]:
        return self.memory.by_owner()

    def show(self) -> str:
        return self.cache.tree.pretty(self._describe)

    def survey(self, first: int, count: int) -> Survey:
        return self.cache.tree.survey(first, count)

    def explain(self, request: Request, prompt: Encoded, distances: bool) -> Stretches:
        named = request.in_namespace(self._named(request.namespace))
        return self.scheduler.hits.look(named, prompt, distances=distances)

    def load_adapter(self, name: str, files: AdapterFiles) -> None:
        self.model.adapters.add(name, files)

    def unload_adapter(self, name: str) -> None:
        self.model.adapters.unload(name)

    def update_weights(self, new: NewWeights, mode: str, lag: int) -> int:
        if names := self.model.adapters.names:
            raise UnsupportedModel(f"the weights of the model are changed without adapters: unload {', '.join(names)}")
        new.put(self.loaded)
        return self.scheduler.renew(new.digest, mode, lag)

    def _named(self, namespace: Namespace | str | None) -> Namespace | str | None:
        """Returns the namespace with the version of the weights that computes now."""
        return of_weights(namespace, self.scheduler.versions.name)

    def _describe(self, key: bytes) -> str:
        symbols = np.frombuffer(key, dtype="<u4")[: _SHOWN_TOKENS + 1]
        more = " …" if len(symbols) > _SHOWN_TOKENS else ""
        text = symbols[:_SHOWN_TOKENS]
        image = " and of an image" if (text >= MAX_TOKEN).any() else ""
        return f"{self.loaded.tokenizer.decode(text[text < MAX_TOKEN].tolist())!r}{image}{more}"
