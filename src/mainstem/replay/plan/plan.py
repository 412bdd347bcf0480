"""Plans what memory to buy: for a trace, a model and a device, computes the effect of each mix of memory.

    reach of a tier    write_through    device    max(device, host)    max(device, host, storage)    lower: copies
    in bytes           write_back       device    device + host        device + host + storage       lower: the rest

One replay of the real tree at each reach gives the prefix of each request that is found within it. What only the next
reach finds belongs to the next tier. This is exact for lru, where a larger cache holds all that a smaller one does.
`engine` has the times.

The curve of FLOPs saved over memory bought has its knee where saved - price x memory is largest. No amount beyond it
saves more than the price per gigabyte, on average (a point of the upper hull, where the slope falls below the price).

Left out: decoding and its share of the device, batching of prompts, transfers that overlap with computing, networks
between replicas (see `fleet`), KV of answers. Of the simulation, it knows only how many blocks each request hits at a
capacity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from mainstem.errors import BadArgument
from mainstem.replay.plan.costs import ModelShape
from mainstem.replay.plan.engine import Outcome, Planned, Study
from mainstem.replay.plan.hardware import Device
from mainstem.replay.trace import Int64s, Trace
from mainstem.settings.replay import Assumptions, Memory

Hits: TypeAlias = Callable[[int], Int64s]
"""Returns the blocks that each request of a trace hits in a cache with a capacity of this many blocks."""

_CURVE_POINTS = 24  # each larger by a factor of the square root of 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow(Outcome):
    """One mix of tiers.

    Args:
        host_bytes: host memory bought.
        storage_bytes: storage bought.
        storage_hit_rate: found in storage and not above.
        block_hit_rate: share of block accesses, as in `mainstem replay`.
        slo_met: whether that share is as large as required.
        gpu_hours: GPU-hours of all prefills, at the achieved rate.
        gpu_hours_saved: GPU-hours saved relative to no cache.
        busy: fraction of the trace's span that a replica computes; above 1 it cannot keep up. None: the span is 0.
        replicas: replicas needed so that none is busier than allowed, at these hits.
        storage_busy: fraction of the span spent on reading storage; above 1 it cannot keep up.
        gain_per_gb: percent of all FLOPs saved per gigabyte bought, relative to the device alone; None: nothing bought.
    """

    host_bytes: int
    storage_bytes: int
    storage_hit_rate: float
    block_hit_rate: float
    slo_met: bool | None
    gpu_hours: float
    gpu_hours_saved: float
    busy: float | None
    replicas: int | None
    storage_busy: float | None
    gain_per_gb: float | None


@dataclass(frozen=True, slots=True)
class Knee:
    """The point beyond which more memory is not worth its price.

    Args:
        memory_bytes: memory to buy below the device; 0: none is worth its price.
        host_bytes: the part that is host memory, which is bought first.
        storage_bytes: the part that is storage.
        saved_share: share of prefill FLOPs saved at the knee.
        most_saved_share: share saved with all memory on offer.
        endless_saved_share: share saved with memory for every block of the trace.
        curve: bytes bought and share saved, in rising order.
    """

    memory_bytes: int
    host_bytes: int
    storage_bytes: int
    saved_share: float
    most_saved_share: float
    endless_saved_share: float
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Plan(Planned):
    """The result of planning, with its inputs.

    Args:
        bare: the row without any cache.
        rows: the device alone first, then host memory and storage in rising order; includes the knee.
        knee: see `Knee`.
        buy: the row with the largest net worth, among those that meet the limit if any does; never one with later first
            tokens than the device alone.
    """

    bare: PlanRow
    rows: tuple[PlanRow, ...]
    knee: Knee
    buy: PlanRow


def plan(
    trace: Trace,
    model: ModelShape,
    device: Device,
    memory: Memory,
    given: Assumptions,
    *,
    slo_ttft_s: float | None = None,
    hits: Hits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Evaluates each mix of tiers up to `memory`.

    Args:
        trace: a trace of one or more requests.
        model: shape of the model.
        device: the device that computes.
        memory: maximum memory to buy.
        given: all other assumptions.
        slo_ttft_s: limit of the time to first token.
        hits: replays the trace; None: uses the real tree with the policy of `given`.
        progress: called after each replay with the replays done and their total.

    Raises:
        BadArgument: the trace is empty, the weights do not fit the devices, or the limit is not above 0.
    """
    if len(trace) == 0:
        raise BadArgument("trace", trace.name, "a trace with 1 request or more")
    study = Study.of(trace, model, device, memory, given, slo_ttft_s)
    enough = everything(study.facts)
    reaches = _Reaches(hits or _replays(study), study)
    mixes = [mix for mix in _mixes(memory, given.steps, enough) if reaches.pays(mix)]
    sizes = _curve_sizes(memory, mixes, given.write_policy, enough)
    reaches.replay([*mixes, *(Mix(size, 0) for size in sizes)], progress)
    bare = _row(study, Mix(0, 0), (reaches.none,) * 3)
    alone = _row(study, Mix(0, 0), reaches.of(Mix(0, 0)), bare)
    curve = tuple((size, _saved(study, reaches.of(Mix(size, 0))[2], bare)) for size in sizes)
    knee = _knee(curve, memory, given, _saved(study, reaches.endless, bare))
    mixes = sorted({*mixes, Mix(knee.host_bytes, knee.storage_bytes)})
    rows = tuple(_row(study, mix, reaches.of(mix), bare, alone) for mix in mixes)
    return Plan(**study.facts.shared, bare=bare, rows=rows, knee=knee, buy=_worth_most(rows, given.gain))


def everything(facts: Planned) -> float:
    """Returns the bytes that hold every block of a trace: once, or once per replica."""
    return facts.distinct_blocks * facts.engine.block_bytes * _parts(facts.given)


def _parts(given: Assumptions) -> int:
    return 1 if given.routing == "shared" else given.replicas


def _replays(study: Study) -> Hits:
    from mainstem.replay.simulate.sweep import hit_blocks
    from mainstem.settings.replay import ONE_CACHE, Setup

    given, engine = study.facts.given, study.facts.engine
    if given.routing == "shared" or given.replicas == 1:
        setup = ONE_CACHE
    else:
        rate = engine.flops_per_s / (2 * study.facts.model.active_parameters)
        load = engine.host_bytes_per_s / max(engine.token_bytes, 1.0)
        setup = Setup(replicas=given.replicas, routing=given.routing, prefill_rate=rate, load_rate=load)
    return lambda capacity_blocks: hit_blocks(study.trace, given.policy, capacity_blocks, setup=setup)


def _worth_most(rows: tuple[PlanRow, ...], gain: float) -> PlanRow:
    """Returns the row with the largest net worth; ties go to the one with earlier first tokens."""

    def worth(row: PlanRow) -> tuple[float, float]:
        return row.flops_saved_share - _price(row.host_bytes + row.storage_bytes, gain), -row.ttft_mean_s

    no_later = [row for row in rows if row.ttft_mean_s <= rows[0].ttft_mean_s]
    return max([row for row in no_later if row.slo_met] or no_later, key=worth)


def _price(size: int, gain: float) -> float:
    return gain / 100 * size / 1e9


# ---- memory


class Mix(NamedTuple):
    """Bytes bought below the device."""

    host_bytes: int
    storage_bytes: int


def _halves(limit: int, steps: int, enough: float) -> list[int]:
    """Returns 0 and `limit` halved repeatedly, starting at the smallest half that holds the whole trace."""
    while limit / 2 >= enough:
        limit //= 2
    return sorted({0, *(limit >> i for i in range(steps))})


def _mixes(memory: Memory, steps: int, enough: float) -> list[Mix]:
    """Returns all mixes, the empty one first."""
    return [
        Mix(host, storage)
        for host in _halves(memory.host_bytes, steps, enough)
        for storage in _halves(memory.storage_bytes, steps, enough)
    ]


def _curve_sizes(memory: Memory, mixes: list[Mix], write_policy: str, enough: float) -> list[int]:
    """Returns sizes of all memory bought as one tier, the mixes included. Of copies, only the largest counts."""
    whole = max if write_policy == "write_through" else sum
    cap = min(whole((memory.host_bytes, memory.storage_bytes)), math.ceil(enough))
    return sorted({whole(mix) for mix in mixes} | {math.ceil(cap * 2 ** (-i / 2)) for i in range(_CURVE_POINTS)} | {0})


class _Reaches:
    """The blocks of each request that are found within the reach of each tier. Replays each capacity once."""

    def __init__(self, hits: Hits, study: Study) -> None:
        facts = study.facts
        self._hits, self._device_bytes = hits, facts.engine.cache_bytes
        self._copies = facts.given.write_policy == "write_through"
        self._block_bytes = facts.engine.block_bytes * _parts(facts.given)
        self._distinct = facts.distinct_blocks
        self.none: Int64s = np.zeros(facts.requests, np.int64)
        self._found = {0: self.none}

    @property
    def endless(self) -> Int64s:
        return self._at(self._distinct)

    def replay(self, mixes: Iterable[Mix], progress: Callable[[int, int], None] | None) -> None:
        """Replays every capacity that will be needed, so that progress can be reported."""
        capacities = {size for mix in mixes for size in self._capacities(mix)} | {self._distinct}
        todo = sorted(capacities - set(self._found))
        for done, capacity in enumerate(todo, 1):
            self._at(capacity)
            if progress is not None:
                progress(done, len(todo))

    def pays(self, mix: Mix) -> bool:
        """Returns whether the storage of a mix, if any, reaches further than its host memory."""
        *_, host, storage = self._capacities(mix)
        return storage > host or not mix.storage_bytes

    def of(self, mix: Mix) -> tuple[Int64s, Int64s, Int64s]:
        """Returns the blocks found within the reach of the device, of host memory and of storage, non-decreasing."""
        device, host, storage = (self._at(capacity) for capacity in self._capacities(mix))
        host = np.maximum(device, host)
        return device, host, np.maximum(host, storage)

    def _capacities(self, mix: Mix) -> tuple[int, int, int]:
        """Returns the blocks of each reach, per replica if replicas share nothing; at most all distinct blocks."""
        device = self._device_bytes
        host = max(device, mix.host_bytes) if self._copies else device + mix.host_bytes
        storage = max(host, mix.storage_bytes) if self._copies else host + mix.storage_bytes
        device, host, storage = (
            min(int(size // self._block_bytes), self._distinct) for size in (device, host, storage)
        )
        return device, host, storage

    def _at(self, capacity: int) -> Int64s:
        if capacity not in self._found:
            self._found[capacity] = self._hits(capacity)
        return self._found[capacity]


# ---- rows


def _row(
    study: Study,
    mix: Mix,
    found: tuple[Int64s, Int64s, Int64s],
    bare: PlanRow | None = None,
    alone: PlanRow | None = None,
) -> PlanRow:
    """Returns the row of one mix.

    Args:
        found: [requests] blocks within the reach of each tier.
        bare: the row without a cache; None: this is that row.
        alone: the row of the device alone; None: this is that row.
    """
    facts, given, (device, host, storage) = study.facts, study.facts.given, found
    served = study.serve((device, host, host, storage), bare, machines=given.replicas if given.queue else 0)
    computing_s = float(served.computing_s.sum())
    span, rate, hours = facts.span_s, facts.engine.storage_bytes_per_s, computing_s * facts.engine.gpus / 3600
    load = computing_s / span if span > 0 else None
    bought, in_time = (mix.host_bytes + mix.storage_bytes) / 1e9, served.outcome["slo_share"]
    gain = None if alone is None else served.outcome["flops_saved_share"] - alone.flops_saved_share
    return PlanRow(
        **served.outcome,
        host_bytes=mix.host_bytes,
        storage_bytes=mix.storage_bytes,
        storage_hit_rate=served.hits[3],
        block_hit_rate=float(storage.sum()) / max(len(study.trace.whole.blocks), 1),
        slo_met=None if in_time is None else in_time >= given.slo_share,
        gpu_hours=hours,
        gpu_hours_saved=0.0 if bare is None else bare.gpu_hours - hours,
        busy=None if load is None else load / given.replicas,
        replicas=None if load is None else facts.needed(load),
        storage_busy=float(served.read.sum()) / rate / span if rate and span > 0 else None,
        gain_per_gb=100 * gain / bought if gain is not None and bought else None,
    )


def _saved(study: Study, blocks: Int64s, bare: PlanRow) -> float:
    """Returns the share of prefill FLOPs saved by hits on this many blocks of each request."""
    flops, _ = study.facts.engine.prefill(study.facts.model, study.tokens, study.known(blocks))
    return 1 - float(flops.sum()) / bare.flops


def _knee(curve: tuple[tuple[int, float], ...], memory: Memory, given: Assumptions, endless: float) -> Knee:
    """Returns the knee; of equals the smallest."""
    size, saved = max(curve, key=lambda point: point[1] - _price(point[0], given.gain))
    return Knee(size, *_purchase(size, memory, given.write_policy), saved, curve[-1][1], endless, curve)


def _purchase(size: int, memory: Memory, write_policy: str) -> Mix:
    """Splits memory into tiers, host memory first. Where storage holds copies, buys only one of the two."""
    if size <= memory.host_bytes:
        return Mix(size, 0)
    host = 0 if write_policy == "write_through" else memory.host_bytes
    return Mix(host, size - host)
