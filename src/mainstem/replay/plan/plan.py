"""Plans what memory to buy: for a trace, a model and a device, computes the effect of each mix of memory.

    reach of a tier    write_through    device    max(device, host)    max(device, host, storage)    lower: copies
    in bytes           write_back       device    device + host        device + host + storage       lower: the rest

    a request           |<- device hits ->|<- host hits ->|<- storage hits ->|<- computed ------->|
                         0                 loaded          loaded             prefill              first token

One replay of the real tree at each reach gives the prefix of each request that is found within it. What only the next
reach finds belongs to the next tier. This is exact for lru, where a larger cache holds all that a smaller one does.

    time to first token = overhead + bytes loaded / bandwidth + max(FLOPs / (peak x mfu), weights / memory bandwidth)

The curve of FLOPs saved over memory bought has its knee where saved - price x memory is largest. No amount beyond it
saves more than the price per gigabyte, on average (a point of the upper hull, where the slope falls below the price).

Left out: decoding and its share of the device, batching of prompts, transfers that overlap with computing, networks
between replicas, KV of answers. Knows `ModelShape` and `Device`. Of the simulation, it knows only how many blocks each
request hits at a capacity.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument
from mainstem.replay.plan.costs import Floats, ModelShape
from mainstem.replay.plan.hardware import Device
from mainstem.replay.trace import Trace
from mainstem.settings.replay import MAX_GPUS, Assumptions, Memory
from mainstem.units import dtype_bytes

Int64s: TypeAlias = NDArray[np.int64]
Hits: TypeAlias = Callable[[int], Int64s]
"""Returns the blocks that each request of a trace hits in a cache with a capacity of this many blocks."""

_CURVE_POINTS = 24  # each larger by a factor of the square root of 2


@dataclass(frozen=True, slots=True)
class Engine:
    """A model on its devices, in the figures that the plan computes with. Rates are achieved rates.

    Args:
        gpus: devices per replica.
        kv_copies: devices of a replica that keep the same KV.
        cache_bytes: memory for KV on all devices together, counting each copy once.
        flops_per_s: FLOPs per second of a replica.
        weight_bytes: bytes per parameter.
        weights_bytes_per_s: read rate from device memory, all devices of a replica together.
        host_bytes_per_s: read rate from host memory, all devices of a replica together, counting each copy once.
        storage_bytes_per_s: read rate from storage; 0 without storage.
        token_bytes: bytes to load per cached token.
        end_bytes: bytes to load once per prompt, for windows and states.
        block_bytes: bytes of a cached block, including its share of windows and states.
    """

    gpus: int
    kv_copies: int
    cache_bytes: float
    flops_per_s: float
    weight_bytes: float
    weights_bytes_per_s: float
    host_bytes_per_s: float
    storage_bytes_per_s: float
    token_bytes: float
    end_bytes: float
    block_bytes: float

    def prefill(self, model: ModelShape, tokens: Int64s, known: Int64s) -> tuple[Floats, Floats]:
        """Returns the FLOPs and the seconds of each prefill. The last token is always computed, for its logits."""
        known = np.minimum(known, tokens - 1)
        flops = model.prefill_flops(tokens - known, known)
        weights = model.met_parameters(tokens - known) * self.weight_bytes / self.weights_bytes_per_s
        return flops, np.maximum(flops / self.flops_per_s, weights)

    def moved_bytes(self, above: Int64s, below: Int64s, deepest: Int64s) -> Floats:
        """Returns the bytes between two reaches; windows and states come from where the prompt's last hit is."""
        ends_here = (below > above) & (below == deepest)
        moved: Floats = (below - above) * self.token_bytes + ends_here * self.end_bytes
        return moved

    def storage_rate(self, network_bytes_per_s: float = math.inf) -> float:
        """Bytes per second from storage to the devices, through a network, if there is one, and host memory."""
        return min(self.storage_bytes_per_s or math.inf, network_bytes_per_s, self.host_bytes_per_s)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One mix of tiers. Rates and shares are from 0 to 1; hit rates are shares of the input tokens.

    Args:
        host_bytes: host memory bought.
        storage_bytes: storage bought.
        device_hit_rate: found on the device.
        host_hit_rate: found in host memory and not above.
        storage_hit_rate: found in storage and not above.
        token_hit_rate: sum of the three.
        block_hit_rate: share of block accesses, as in `mainstem replay`.
        ttft_mean_s: mean time to first token.
        ttft_p90_s: 90th percentile of the time to first token.
        slo_share: share of requests with the first token in time; None without a limit.
        slo_met: whether that share is as large as required.
        flops: FLOPs of all prefills.
        flops_saved_share: share saved relative to no cache.
        gpu_hours: GPU-hours of all prefills, at the achieved rate.
        gpu_hours_saved: GPU-hours saved relative to no cache.
        busy: fraction of the trace's span that a replica computes; above 1 it cannot keep up. None: the span is 0.
        replicas: replicas needed so that none is busier than allowed, at these hits.
        storage_busy: fraction of the span spent on reading storage; above 1 it cannot keep up.
        gain_per_gb: percent of all FLOPs saved per gigabyte bought, relative to the device alone; None: nothing bought.
    """

    host_bytes: int
    storage_bytes: int
    device_hit_rate: float
    host_hit_rate: float
    storage_hit_rate: float
    token_hit_rate: float
    block_hit_rate: float
    ttft_mean_s: float
    ttft_p90_s: float
    slo_share: float | None
    slo_met: bool | None
    flops: float
    flops_saved_share: float
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
class Planned:
    """What every plan has: its inputs, and what follows from them alone.

    Args:
        trace: name of the trace.
        requests, input_tokens, distinct_blocks, block_size, span_s: properties of the trace.
        model, device, memory, given, slo_ttft_s: the inputs.
        engine: the model on the devices of one replica, or of all.
    """

    trace: str
    requests: int
    input_tokens: int
    distinct_blocks: int
    block_size: int
    span_s: float
    model: ModelShape
    device: Device
    memory: Memory
    given: Assumptions
    slo_ttft_s: float | None
    engine: Engine

    def load_s(self, bytes_per_s: float) -> float:
        """Returns the seconds to load a token at this rate; 0: there is nothing to load from."""
        return self.engine.token_bytes / bytes_per_s if bytes_per_s else 0.0


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
    load, engine, facts = planned(trace, model, device, memory, given, slo_ttft_s)
    enough = everything(load.distinct_blocks, engine, given)
    reaches = _Reaches(hits or _replays(trace, given, model, engine), load, engine, given)
    mixes = [mix for mix in _mixes(memory, given.steps, enough) if reaches.pays(mix)]
    sizes = _curve_sizes(memory, mixes, given.write_policy, enough)
    reaches.replay([*mixes, *(Mix(size, 0) for size in sizes)], progress)
    study = _Study(load, model, engine, given, slo_ttft_s)
    bare = study.row(Mix(0, 0), (reaches.none,) * 3)
    alone = study.row(Mix(0, 0), reaches.of(Mix(0, 0)), bare)
    curve = tuple((size, study.saved(reaches.of(Mix(size, 0))[2], bare)) for size in sizes)
    knee = _knee(curve, memory, given, study.saved(reaches.endless, bare))
    mixes = sorted({*mixes, Mix(knee.host_bytes, knee.storage_bytes)})
    rows = tuple(study.row(mix, reaches.of(mix), bare, alone) for mix in mixes)
    return Plan(**facts, bare=bare, rows=rows, knee=knee, buy=_worth_most(rows, given.gain))


def planned(
    trace: Trace, model: ModelShape, device: Device, memory: Memory, given: Assumptions, slo_ttft_s: float | None
) -> tuple[Load, Engine, dict[str, Any]]:
    """Returns the columns of a trace, the model on its devices, and the fields of a `Planned`.

    Raises:
        BadArgument: the weights do not fit the devices, or the limit is not above 0.
    """
    if slo_ttft_s is not None and not 0 < slo_ttft_s < math.inf:
        raise BadArgument("slo_ttft", slo_ttft_s, "a time above 0, such as 500ms")
    load = Load.of(trace)
    engine = engine_of(load, model, device, memory, given)
    facts = {
        "trace": trace.name,
        "requests": len(trace),
        "input_tokens": int(load.tokens.sum()),
        "distinct_blocks": load.distinct_blocks,
        "block_size": load.block_size,
        "span_s": load.span_s,
        "model": model,
        "device": device,
        "memory": memory,
        "given": given,
        "slo_ttft_s": slo_ttft_s,
        "engine": engine,
    }
    return load, engine, facts


def everything(distinct_blocks: int, engine: Engine, given: Assumptions) -> float:
    """Returns the bytes that hold every block of a trace: once, or once per replica."""
    return distinct_blocks * engine.block_bytes * _parts(given)


def _parts(given: Assumptions) -> int:
    return 1 if given.routing == "shared" else given.replicas


def _replays(trace: Trace, given: Assumptions, model: ModelShape, engine: Engine) -> Hits:
    from mainstem.replay.simulate.sweep import ONE_CACHE, hit_blocks
    from mainstem.settings.replay import Setup

    if given.routing == "shared" or given.replicas == 1:
        setup = ONE_CACHE
    else:
        rate = engine.flops_per_s / (2 * model.active_parameters)
        load = engine.host_bytes_per_s / max(engine.token_bytes, 1.0)
        setup = Setup(replicas=given.replicas, routing=given.routing, prefill_rate=rate, load_rate=load)
    return lambda capacity_blocks: hit_blocks(trace, given.policy, capacity_blocks, setup=setup)


def _worth_most(rows: tuple[PlanRow, ...], gain: float) -> PlanRow:
    """Returns the row with the largest net worth; ties go to the one with earlier first tokens."""

    def worth(row: PlanRow) -> tuple[float, float]:
        return row.flops_saved_share - _price(row.host_bytes + row.storage_bytes, gain), -row.ttft_mean_s

    no_later = [row for row in rows if row.ttft_mean_s <= rows[0].ttft_mean_s]
    return max([row for row in no_later if row.slo_met] or no_later, key=worth)


def _price(size: int, gain: float) -> float:
    return gain / 100 * size / 1e9


# ---- the trace


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a trace as columns."""

    time_s: Floats
    tokens: Int64s
    blocks: Int64s
    block_size: int
    distinct_blocks: int

    @classmethod
    def of(cls, trace: Trace) -> Load:
        batches = list(trace.batches())
        return cls(
            np.concatenate([batch.time_s for batch in batches]),
            np.maximum(np.concatenate([batch.input_tokens for batch in batches]), 1),
            np.concatenate([np.diff(batch.offsets) for batch in batches]),
            trace.block_size,
            trace.distinct_blocks,
        )

    @property
    def span_s(self) -> float:
        """The time from the first request to the last."""
        return float(self.time_s[-1] - self.time_s[0])

    def tokens_of(self, blocks: Int64s) -> Int64s:
        """Returns the tokens of the first `blocks` blocks of each request; the last block may be partial."""
        return np.minimum(blocks * self.block_size, self.tokens)


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

    def __init__(self, hits: Hits, load: Load, engine: Engine, given: Assumptions) -> None:
        self._hits, self._engine = hits, engine
        self._copies = given.write_policy == "write_through"
        self._block_bytes = engine.block_bytes * _parts(given)
        self._distinct = load.distinct_blocks
        self._found: dict[int, Int64s] = {0: np.zeros(len(load.tokens), np.int64)}

    @property
    def none(self) -> Int64s:
        return self._found[0]

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
        device = self._engine.cache_bytes
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


# ---- the engine


def engine_of(load: Load, model: ModelShape, device: Device, memory: Memory, given: Assumptions) -> Engine:
    """Returns the model on its devices.

    Raises:
        BadArgument: the weights do not fit, or more devices have the same KV than a replica has.
    """
    weights = model.weights_bytes(given.weights_dtype)
    usable = (given.device_memory or device.memory_bytes) * given.memory_share
    gpus = given.gpus or _fewest(weights, usable, model.name, device.name)
    if gpus * usable <= weights:
        raise BadArgument("gpus", gpus, f"enough for {weights / 1e9:.0f} GB of weights: {usable / 1e9:.0f} GB fit each")
    dtype = given.weights_dtype or model.weights_dtype
    peak = given.flops or device.flops_per_s(dtype)
    copies = given.kv_copies or model.kv_copies(gpus)
    if copies > gpus:
        raise BadArgument("kv_copies", copies, f"at most the devices of a replica, which are {gpus}")
    token_bytes, end_bytes, block_bytes = _cached_bytes(load, model, given)
    return Engine(
        gpus=gpus,
        kv_copies=copies,
        cache_bytes=given.replicas * (gpus * usable - weights) / copies,
        flops_per_s=peak * given.mfu * gpus,
        weight_bytes=dtype_bytes("weights_dtype", dtype),
        weights_bytes_per_s=(given.bandwidth_device or device.memory_bytes_per_s) * gpus,
        host_bytes_per_s=(given.bandwidth_host or device.host_bytes_per_s * given.link_share) * gpus / copies,
        storage_bytes_per_s=memory.storage_bytes_per_s,
        token_bytes=token_bytes,
        end_bytes=end_bytes,
        block_bytes=block_bytes,
    )


def _fewest(weights: float, usable: float, model: str, device: str) -> int:
    """Returns the fewest devices that hold the weights and leave a tenth as much for KV."""
    gpus = 1
    while gpus * usable < 1.1 * weights:
        gpus *= 2
    if gpus > MAX_GPUS:
        raise BadArgument("model", model, f"one whose weights fit {MAX_GPUS} of {device}")
    return gpus


def _cached_bytes(load: Load, model: ModelShape, given: Assumptions) -> tuple[float, float, float]:
    """Returns the bytes of a token, of a prompt's end, and of a block with its share of ends.

    The end of each request keeps its windows and a checkpoint of the states. A block has as many ends as the trace has
    requests per distinct block, at most one.
    """
    if given.bytes_per_token is not None:
        return given.bytes_per_token, 0.0, given.bytes_per_token * load.block_size
    token = model.kv_bytes_per_token(given.kv_dtype)
    windows = model.window_bytes(int(load.tokens.mean()), given.kv_dtype)
    states = model.state_bytes(given.kv_dtype, given.state_dtype)
    ends = min(1.0, len(load.tokens) / max(load.distinct_blocks, 1))
    window_share = min(ends * windows, load.block_size * model.window_bytes_per_token(given.kv_dtype))
    return token, windows + states, max(load.block_size * token + window_share + ends * states, 1.0)


# ---- cost of requests


@dataclass(frozen=True, slots=True)
class _Study:
    """A trace on an engine: computes the value of hits."""

    load: Load
    model: ModelShape
    engine: Engine
    given: Assumptions
    slo_ttft_s: float | None

    def row(
        self, mix: Mix, found: tuple[Int64s, Int64s, Int64s], bare: PlanRow | None = None, alone: PlanRow | None = None
    ) -> PlanRow:
        """Returns the row of one mix.

        Args:
            found: blocks within the reach of each tier.
            bare: the row without a cache; None: this is that row.
            alone: the row of the device alone; None: this is that row.
        """
        device, host, storage = (self.load.tokens_of(blocks) for blocks in found)
        engine = self.engine
        flops, computing = engine.prefill(self.model, self.load.tokens, storage)
        loaded, stored = engine.moved_bytes(device, host, storage), engine.moved_bytes(host, storage, storage)
        loading = loaded / engine.host_bytes_per_s + stored / engine.storage_rate()
        ttft = self.given.overhead + loading + computing
        if self.given.queue:
            ttft = ttft + waits(self.load.time_s, ttft, self.given.replicas)
        total, tokens = float(flops.sum()), float(self.load.tokens.sum())
        hours = float(computing.sum()) * self.engine.gpus / 3600
        saved = 0.0 if bare is None else 1 - total / bare.flops
        span = self.load.span_s
        bought = (mix.host_bytes + mix.storage_bytes) / 1e9
        busy = float(computing.sum()) / span if span > 0 else None
        in_time = None if self.slo_ttft_s is None else float((ttft <= self.slo_ttft_s).mean())
        rate = self.engine.storage_bytes_per_s
        return PlanRow(
            host_bytes=mix.host_bytes,
            storage_bytes=mix.storage_bytes,
            device_hit_rate=float(device.sum()) / tokens,
            host_hit_rate=float((host - device).sum()) / tokens,
            storage_hit_rate=float((storage - host).sum()) / tokens,
            token_hit_rate=float(storage.sum()) / tokens,
            block_hit_rate=float(found[2].sum()) / max(float(self.load.blocks.sum()), 1.0),
            ttft_mean_s=float(ttft.mean()),
            ttft_p90_s=float(np.quantile(ttft, 0.9)),
            slo_share=in_time,
            slo_met=None if in_time is None else in_time >= self.given.slo_share,
            flops=total,
            flops_saved_share=saved,
            gpu_hours=hours,
            gpu_hours_saved=0.0 if bare is None else bare.gpu_hours - hours,
            busy=None if busy is None else busy / self.given.replicas,
            replicas=None if busy is None else max(math.ceil(busy / self.given.most_busy), 1),
            storage_busy=float(stored.sum()) / rate / span if rate and span > 0 else None,
            gain_per_gb=100 * (saved - alone.flops_saved_share) / bought if alone is not None and bought else None,
        )

    def saved(self, blocks: Int64s, bare: PlanRow) -> float:
        """Returns the share of prefill FLOPs saved by hits on this many blocks of each request."""
        return (
            1
            - float(self.engine.prefill(self.model, self.load.tokens, self.load.tokens_of(blocks))[0].sum())
            / bare.flops
        )


def waits(arrivals_s: Floats, services_s: Floats, servers: int) -> Floats:
    """Returns how long each request waits for a free server, first come first served.

    Args:
        arrivals_s: arrival times, non-decreasing.
        services_s: service time of each request.
        servers: number of servers, 1 or more.
    """
    free = [float(arrivals_s[0])] * servers
    waited = np.empty(len(arrivals_s))
    for i, (arrival, service) in enumerate(zip(arrivals_s.tolist(), services_s.tolist(), strict=True)):
        start = max(arrival, free[0])
        heapq.heapreplace(free, start + service)
        waited[i] = start - arrival
    return waited


def _knee(curve: tuple[tuple[int, float], ...], memory: Memory, given: Assumptions, endless: float) -> Knee:
    """Returns the knee; of equals the smallest."""
    net = [saved - _price(size, given.gain) for size, saved in curve]
    best = max(range(len(net)), key=net.__getitem__)
    size, saved = curve[best]
    return Knee(size, *_purchase(size, memory, given.write_policy), saved, curve[-1][1], endless, curve)


def _purchase(size: int, memory: Memory, write_policy: str) -> Mix:
    """Splits memory into tiers, host memory first. Where storage holds copies, buys only one of the two."""
    if size <= memory.host_bytes:
        return Mix(size, 0)
    host = 0 if write_policy == "write_through" else memory.host_bytes
    return Mix(host, size - host)
