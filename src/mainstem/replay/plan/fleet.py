"""Plans a fleet: for a trace, a model and a device, computes what n machines with a network and a shared store give.

    a request     |<- device ->|<- host ->|<- another machine ->|<- shared store ->|<- computed ->|
                  0                      its own               over the network     over the network

A machine is a replica: its devices, its host memory, its link. Real trees of all machines serve the trace, behind a
router with one of its rules; a peer is whichever machine holds most of the prompt, as the router knows it, and is asked
where that is sooner than to compute. The store gets every block of every prompt, once, so one replay of its size says
what it has. The times are those of `mainstem.replay.plan.engine`, with two more terms for the ways over the network.

Tried are numbers of machines, then host memory, network and store at the smallest number that carries the load. Bytes
that cross the network and the store are counted in intervals, so that a peak is seen. Money and energy are for a month
of the trace's load. All that is assumed is in `Assumptions` and `Fleet`.

Left out, besides what a plan leaves out: transfers that wait for each other, failures, and what peers do not tell at
once (`router_lag`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument
from mainstem.replay.plan.costs import Floats, ModelShape
from mainstem.replay.plan.engine import Engine, Int64s, Outcome, Planned, outcome, planned
from mainstem.replay.plan.hardware import Device
from mainstem.replay.simulate.caches import Caches, RouterCosts
from mainstem.replay.simulate.sweep import hit_blocks, tiers_of
from mainstem.replay.trace import Batch, Trace
from mainstem.settings.replay import Assumptions, Fleet, Memory, Routing, Setup

HOURS_A_MONTH = 730.0
_EVEN = 1e-9  # load is divided evenly enough


class Size(NamedTuple):
    """One fleet. Sizes in bytes; host memory is that of one machine, the store is one for all."""

    machines: int
    host_bytes: int
    store_bytes: int
    network: bool


@dataclass(frozen=True, slots=True)
class Flow:
    """What crosses a link or a store, in bytes per second: over the trace's span, and in the busiest interval."""

    mean_bytes_per_s: float
    peak_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRow(Outcome):
    """One fleet; the device and the host are those of the machine that serves.

    Args:
        size: what it has.
        peer_hit_rate: fetched from another machine.
        store_hit_rate: fetched from the shared store.
        busy: fraction of the span that a machine computes prefill, on average; above 1 it cannot keep up.
        busiest: that of the busiest machine.
        needed: machines so that the average one is not busier than allowed, at these hits.
        network: what machines read from each other.
        inbound, outbound: of the one machine that reads most, and of the one that others read most from.
        store_read, store_written: what machines read from the store, and what is written to it.
        money: dollars a month, of devices, memory, store and energy.
        energy_kwh: kilowatt-hours a month.
    """

    size: Size
    peer_hit_rate: float
    store_hit_rate: float
    busy: float
    busiest: float
    needed: int
    network: Flow
    inbound: Flow
    outbound: Flow
    store_read: Flow
    store_written: Flow
    money: float
    energy_kwh: float


@dataclass(frozen=True, slots=True)
class FleetPlan(Planned):
    """The result of planning a fleet, with its inputs; `memory` is the shared store on offer, `engine` one machine.

    Args:
        fleet: the input.
        routing: the rule in use.
        bare: machines without any cache, as many as they need.
        rows: numbers of machines in rising order, all with all memory on offer.
        enough: the smallest fleet of `rows` that carries the load; None: none does.
        memories: fleets of the size of `enough` (or of the largest) with less host memory, without network or store.
        knee: the row after which another machine saves less than its price.
        host_knee: the host memory after which a gigabyte saves less than its price, among `memories`.
    """

    fleet: Fleet
    routing: Routing
    bare: FleetRow
    rows: tuple[FleetRow, ...]
    enough: FleetRow | None
    memories: tuple[FleetRow, ...]
    knee: FleetRow
    host_knee: FleetRow


def plan_fleet(
    trace: Trace,
    model: ModelShape,
    device: Device,
    memory: Memory,
    given: Assumptions,
    fleet: Fleet,
    *,
    slo_ttft_s: float | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FleetPlan:
    """Evaluates fleets of up to `fleet.machines` machines.

    Args:
        trace: a trace with a span above 0.
        model: shape of the model.
        device: the device that computes.
        memory: the shared store; without host memory, which `fleet` gives for each machine.
        given: assumptions about the engine; its replicas are not read.
        fleet: machines, their memory and network, prices and power.
        slo_ttft_s: limit of the time to first token.
        workers: threads; None: one per CPU core.
        progress: called after each replay with the replays done and about how many there will be.

    Raises:
        BadArgument: the trace has no span, the weights do not fit, or sizes contradict each other.
    """
    if len(trace) == 0 or not trace.whole.time_s[-1] > 0:
        raise BadArgument("trace", trace.name, "a trace whose requests come at different times")
    _, _, facts = planned(trace, model, device, memory, replace(given, replicas=1), slo_ttft_s)
    facts["given"] = given
    routing: Routing = "cost" if given.routing == "shared" else given.routing
    study = _Study(trace, Planned(**facts), fleet, routing, workers or os.cpu_count() or 1, {})
    sizes = _Sizes(study, progress)
    rows = sizes.machines()
    enough = next((row for row in rows if row.needed <= row.size.machines), None)
    memories = sizes.memories(enough or rows[-1])
    return FleetPlan(
        **facts,
        fleet=fleet,
        routing=routing,
        bare=sizes.bare,
        rows=rows,
        enough=enough,
        memories=memories,
        knee=max(rows, key=lambda row: (_net(row, fleet.machine_gain * row.size.machines), -row.size.machines)),
        host_knee=max(
            (row for row in memories if row.size[2:] == memories[-1].size[2:]),
            key=lambda row: (
                _net(row, given.gain * row.size.machines * row.size.host_bytes / 1e9),
                -row.size.host_bytes,
            ),
        ),
    )


def _net(row: FleetRow, price_percent: float) -> float:
    return row.flops_saved_share - price_percent / 100


# ---- which fleets


class _Sizes:
    """The fleets that are tried, each once."""

    def __init__(self, study: _Study, progress: Callable[[int, int], None] | None) -> None:
        self._study, self._progress = study, progress
        self._rows: dict[Size, FleetRow] = {}
        self.bare = study.without_cache()
        steps = study.facts.given.steps
        self._expected = 2 * steps + 4

    def machines(self) -> tuple[FleetRow, ...]:
        """Returns rows for halves of the most machines, and for the fewest that carry the load."""
        most, steps = self._study.fleet.machines, self._study.facts.given.steps
        tried = sorted({-(-most // 2**i) for i in range(steps + 1)})
        rows = {n: self._row(self._study.full(n)) for n in tried}
        enough = [n for n in tried if rows[n].needed <= n]
        if enough and enough[0] > 1:
            high = enough[0]
            low = max((n for n in tried if n < high), default=0)  # too few
            while high - low > max(1, high // 50):  # to within 2 %
                middle = (low + high) // 2
                rows[middle] = self._row(self._study.full(middle))
                low, high = (low, middle) if rows[middle].needed <= middle else (middle, high)
        return tuple(rows[n] for n in sorted(rows))

    def memories(self, row: FleetRow) -> tuple[FleetRow, ...]:
        """Returns rows with less than `row` has: host memory in halves, then no network, and no store."""
        size = row.size
        steps = self._study.facts.given.steps
        hosts = sorted({0, *(size.host_bytes >> i for i in range(steps))})
        less = [size._replace(host_bytes=host) for host in hosts]
        without = [size._replace(network=False), size._replace(store_bytes=0)]
        without.append(size._replace(network=False, store_bytes=0))
        ordered = [*(each for each in dict.fromkeys(without) if each != size), *less]
        return tuple(self._row(each) for each in dict.fromkeys(ordered))

    def _row(self, size: Size) -> FleetRow:
        if size not in self._rows:
            self._rows[size] = self._study.row(size, self.bare)
            if self._progress is not None:
                done = len(self._rows)
                self._progress(done, max(self._expected, done))
        return self._rows[size]


# ---- one fleet


@dataclass(frozen=True, slots=True)
class _Study:
    """A trace on machines: computes the row of a fleet."""

    trace: Trace
    facts: Planned
    fleet: Fleet
    routing: Routing
    workers: int
    stored: dict[int, Int64s]

    @property
    def engine(self) -> Engine:
        return self.facts.engine

    def full(self, machines: int) -> Size:
        """Returns a fleet with all that is on offer."""
        network = machines > 1 and self.fleet.network is not None
        return Size(machines, self.fleet.machine_memory, self.facts.memory.storage_bytes, network)

    def without_cache(self) -> FleetRow:
        """Returns the row of machines without any cache, as many as they need, with requests in turn."""
        sums = _Sums(self, Size(1, 0, 0, False), queue=False)
        for batch in self.trace.batches():
            none = np.zeros(len(batch), np.int64)
            sums.add(batch, (none, none, none, none), none.astype(np.int32), none.astype(np.int32))
        needed = max(1, math.ceil(sums.computing_s / self.facts.span_s / self.facts.given.most_busy - _EVEN))
        return sums.row(Size(needed, 0, 0, False), None)

    def row(self, size: Size, bare: FleetRow) -> FleetRow:
        """Returns the row of a fleet."""
        sums = _Sums(self, size, queue=self.facts.given.queue)
        stored, at = self._stored(size.store_bytes), 0
        setup = Setup(
            host_blocks=self._host_blocks(size),
            replicas=size.machines,
            routing=self.routing,
            router_lag=self.fleet.router_lag,
        )
        tiers = tiers_of(setup, self._blocks(self.engine.cache_bytes))
        with Caches(
            self.facts.given.policy,
            tiers,
            setup,
            self.trace.block_size,
            costs=self._costs(size),
            workers=self.workers,
        ) as caches:
            for batch in self.trace.batches():
                here = stored[at : at + len(batch)]
                served = caches.feed(batch, here)
                device = served.hits[:, 0].astype(np.int64)
                host = served.hits.sum(axis=1, dtype=np.int64)
                peer = np.maximum(host, served.peer_reach)
                store = np.maximum(peer, here)
                sums.add(batch, (device, host, peer, store), served.replica, served.peer)
                at += len(batch)
        return sums.row(size, bare)

    def _stored(self, store_bytes: int) -> Int64s:
        """Returns [requests] blocks that a store of this size has when each comes."""
        if store_bytes not in self.stored:
            blocks = int(store_bytes // self.engine.block_bytes)
            found = (
                hit_blocks(self.trace, self.facts.given.policy, blocks)
                if blocks
                else np.zeros(len(self.trace), np.int64)
            )
            self.stored[store_bytes] = found
        return self.stored[store_bytes]

    def _blocks(self, size: float) -> int:
        return max(1, min(int(size // self.engine.block_bytes), self.trace.distinct_blocks))

    def _host_blocks(self, size: Size) -> int | None:
        """Returns the capacity of the host tier; None: it would hold no more than the device."""
        device, copies = self.engine.cache_bytes, self.facts.given.write_policy == "write_through"
        host = size.host_bytes if copies else device + size.host_bytes
        return self._blocks(host) if size.host_bytes and host > device else None

    def _costs(self, size: Size) -> RouterCosts:
        """Returns the router's costs: the plan's own, where layers with a window count their window for each token."""
        layers, rate = self.facts.model.layers, self.engine.flops_per_s
        windowed = sum(layer.pair_flops * layer.window for layer in layers if layer.window is not None)
        token = sum(2 * layer.active_parameters + layer.token_flops for layer in layers) + windowed
        pair = sum(layer.pair_flops for layer in layers if layer.window is None)
        kept, network = self.engine.token_bytes, self.fleet.network or math.inf
        store = min(self.engine.storage_bytes_per_s or math.inf, network)
        return RouterCosts(
            token_s=token / rate,
            attended_s=pair / rate,
            host_s=kept / self.engine.host_bytes_per_s,
            store_s=kept / store,
            peer_s=kept / network if size.network else None,
        )


class _Sums:
    """Adds up the requests of a fleet, batch by batch."""

    def __init__(self, study: _Study, size: Size, *, queue: bool) -> None:
        self._study, self._size, self._queue = study, size, queue
        self._hits = np.zeros(4)
        self._flops = 0.0
        self.computing_s = 0.0
        self._busy_s = np.zeros(size.machines)
        self._free_s = [0.0] * size.machines
        self._ttft_s: list[NDArray[np.float32]] = []
        intervals = math.floor(study.facts.span_s / study.fleet.interval) + 1
        self._moved = np.zeros((3, intervals))  # over the network, from the store, to the store
        self._inbound = np.zeros((size.machines, intervals))
        self._outbound = np.zeros((size.machines, intervals))

    def add(
        self,
        batch: Batch,
        found: tuple[Int64s, Int64s, Int64s, Int64s],
        machine: NDArray[np.int32],
        peer: NDArray[np.int32],
    ) -> None:
        """Adds requests with the blocks found within each reach, who served them, and who was asked."""
        study, engine = self._study, self._study.engine
        tokens = np.maximum(batch.input_tokens, 1)
        device, host, peers, store = (np.minimum(blocks * study.trace.block_size, tokens) for blocks in found)
        self._hits += [each.sum() for each in (device, host - device, peers - host, store - peers)]
        flops, computing = engine.prefill(study.facts.model, tokens, store)
        reaches = (device, host), (host, peers), (peers, store)
        loaded, pulled, read = (engine.moved_bytes(above, below, store) for above, below in reaches)
        # What comes over the network passes through host memory, at the slower of the two rates.
        link, network = engine.host_bytes_per_s, study.fleet.network or math.inf
        loading = loaded / link + pulled / min(network, link) + read / engine.storage_rate(network)
        service = study.facts.given.overhead + computing + loading
        self._flops += float(flops.sum())
        self.computing_s += float(computing.sum())
        self._busy_s += np.bincount(machine, weights=computing, minlength=len(self._busy_s))
        waited = self._waits(batch.time_s, service, machine) if self._queue else 0.0
        self._ttft_s.append((service + waited).astype(np.float32))
        written = (tokens - store) * engine.token_bytes if self._size.store_bytes else np.zeros(len(tokens))
        self._move(batch.time_s, machine, peer, pulled, read, written)

    def _waits(self, time_s: Floats, service_s: Floats, machine: NDArray[np.int32]) -> Floats:
        """Returns how long each request waits until its machine is free, first come first served."""
        free, waited = self._free_s, np.empty(len(time_s))
        for i, (at_s, service, own) in enumerate(
            zip(time_s.tolist(), service_s.tolist(), machine.tolist(), strict=True)
        ):
            start = max(at_s, free[own])
            free[own] = start + service
            waited[i] = start - at_s
        return waited

    def _move(
        self,
        time_s: Floats,
        machine: NDArray[np.int32],
        peer: NDArray[np.int32],
        pulled: Floats,
        read: Floats,
        written: Floats,
    ) -> None:
        """Counts bytes by interval. What the store gives and gets crosses a machine's link, too."""
        at = (time_s // self._study.fleet.interval).astype(np.int64)
        for row, moved in zip(self._moved, (pulled, read, written), strict=True):
            row += np.bincount(at, weights=moved, minlength=len(row))
        np.add.at(self._inbound, (machine, at), pulled + read)
        np.add.at(self._outbound, (machine, at), written)
        np.add.at(self._outbound, (peer, at), pulled)

    def row(self, size: Size, bare: FleetRow | None) -> FleetRow:
        """Returns the row; `size` may have more machines, if they share evenly what one was given."""
        study, tokens = self._study, float(self._study.facts.input_tokens)
        ttft = np.concatenate(self._ttft_s)
        load = self.computing_s / study.facts.span_s
        busy = load / size.machines
        network, read, written = (self._flow(row) for row in self._moved)
        money, energy = _bill(study, size, busy)
        return FleetRow(
            size=size,
            **outcome(self._hits, tokens, ttft, self._flops, limit_s=study.facts.slo_ttft_s, bare=bare),
            peer_hit_rate=float(self._hits[2] / tokens),
            store_hit_rate=float(self._hits[3] / tokens),
            busy=busy,
            busiest=float(self._busy_s.max()) / study.facts.span_s if bare is not None else busy,
            needed=max(1, math.ceil(load / study.facts.given.most_busy - _EVEN)),
            network=network,
            inbound=self._busiest(self._inbound),
            outbound=self._busiest(self._outbound),
            store_read=read,
            store_written=written,
            money=money,
            energy_kwh=energy,
        )

    def _flow(self, moved: Floats) -> Flow:
        return Flow(float(moved.sum()) / self._study.facts.span_s, float(moved.max()) / self._study.fleet.interval)

    def _busiest(self, moved: Floats) -> Flow:
        """Returns the largest mean and the largest peak of any machine."""
        mean, peak = moved.sum(axis=1).max() / self._study.facts.span_s, moved.max() / self._study.fleet.interval
        return Flow(float(mean), float(peak))


def _bill(study: _Study, size: Size, busy: float) -> tuple[float, float]:
    """Returns the dollars and the kilowatt-hours of a month. A device that does not prefill draws its idle share."""
    fleet, gpus = study.fleet, study.engine.gpus * size.machines
    watts = study.facts.device.watts if fleet.device_power is None else fleet.device_power
    drawn = watts * (fleet.idle_power + (1 - fleet.idle_power) * min(busy, 1.0)) + fleet.machine_power
    total_w = fleet.pue * (gpus * drawn + size.store_bytes / 1e12 * fleet.store_power)
    energy_kwh = total_w * HOURS_A_MONTH / 1000
    rent = study.facts.device.dollars_per_h if fleet.device_price is None else fleet.device_price
    memory_gb, store_gb = size.machines * size.host_bytes / 1e9, size.store_bytes / 1e9
    money = gpus * rent * HOURS_A_MONTH + memory_gb * fleet.memory_price + store_gb * fleet.store_price
    return money + energy_kwh * fleet.energy_price, energy_kwh
