"""Plans a fleet: for a trace, a model and a device, computes what n machines with a network and a shared store give.

A machine is a replica: its devices, its host memory, its link. Real trees of all machines serve the trace, behind a
router with one of its rules; a peer is whichever machine holds most of the prompt, as the router knows it, and is asked
where that is sooner than to compute. The store gets every block of every prompt, once, so one replay of its size says
what it has. `engine` has the times, and prices a fleet as it does one machine.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument
from mainstem.replay.plan.costs import ModelShape
from mainstem.replay.plan.engine import Outcome, Planned, Served, Study
from mainstem.replay.plan.hardware import Device
from mainstem.replay.simulate.caches import Caches, Int32s, RouterCosts
from mainstem.replay.simulate.sweep import hit_blocks, tiers_of
from mainstem.replay.trace import Int64s, Trace
from mainstem.settings.replay import Assumptions, Fleet, Memory, Routing, Setup

HOURS_A_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Size:
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
    if len(trace) == 0 or not trace.whole.time_s[-1] > trace.whole.time_s[0]:
        raise BadArgument("trace", trace.name, "a trace whose requests come at different times")
    study = Study.of(trace, model, device, memory, replace(given, replicas=1), slo_ttft_s)
    routing: Routing = "cost" if given.routing == "shared" else given.routing
    fleets = _Fleets(study, fleet, routing, workers or os.cpu_count() or 1, progress)
    rows = fleets.machines()
    enough = next((row for row in rows if row.needed <= row.size.machines), None)
    memories = fleets.memories(enough or rows[-1])
    whole = [row for row in memories if replace(row.size, host_bytes=0) == replace(memories[-1].size, host_bytes=0)]

    def net(row: FleetRow, price: float, bought: float) -> tuple[float, float]:
        return row.flops_saved_share - price * bought / 100, -bought

    return FleetPlan(
        **study.facts.shared,
        fleet=fleet,
        routing=routing,
        bare=fleets.bare,
        rows=rows,
        enough=enough,
        memories=memories,
        knee=max(rows, key=lambda row: net(row, fleet.machine_gain, row.size.machines)),
        host_knee=max(whole, key=lambda row: net(row, given.gain, row.size.machines * row.size.host_bytes / 1e9)),
    )


class _Fleets:
    """The fleets that are tried, each once."""

    def __init__(
        self,
        study: Study,
        fleet: Fleet,
        routing: Routing,
        workers: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._study, self._facts, self._engine, self._given = study, study.facts, study.facts.engine, study.facts.given
        self._fleet, self._routing, self._workers, self._progress = fleet, routing, workers, progress
        self._rows: dict[Size, FleetRow] = {}
        self._none = np.zeros(len(study.trace), np.int64)
        self._stored = {0: self._none}
        self.bare = self._without_cache()

    def machines(self) -> tuple[FleetRow, ...]:
        """Returns rows for halves of the most machines, and for the fewest that carry the load."""
        most, steps = self._fleet.machines, self._given.steps
        tried = sorted({-(-most // 2**i) for i in range(steps + 1)})
        rows = {n: self._row(self._full(n)) for n in tried}
        enough = [n for n in tried if rows[n].needed <= n]
        if enough and enough[0] > 1:
            high = enough[0]
            low = max((n for n in tried if n < high), default=0)  # too few
            while high - low > max(1, high // 50):  # to within 2 %
                middle = (low + high) // 2
                rows[middle] = self._row(self._full(middle))
                low, high = (low, middle) if rows[middle].needed <= middle else (middle, high)
        return tuple(rows[n] for n in sorted(rows))

    def memories(self, row: FleetRow) -> tuple[FleetRow, ...]:
        """Returns rows with less than `row` has: without network, and without store; then host memory in halves."""
        size = row.size
        without = [replace(size, network=False), replace(size, store_bytes=0)]
        without.append(replace(size, network=False, store_bytes=0))
        hosts = sorted({0, *(size.host_bytes >> i for i in range(self._given.steps))})
        ordered = [*(each for each in without if each != size), *(replace(size, host_bytes=host) for host in hosts)]
        return tuple(self._row(each) for each in dict.fromkeys(ordered))

    def _full(self, machines: int) -> Size:
        """Returns a fleet with all that is on offer."""
        network = machines > 1 and self._fleet.network is not None
        return Size(machines, self._fleet.machine_memory, self._facts.memory.storage_bytes, network)

    def _row(self, size: Size) -> FleetRow:
        if size not in self._rows:
            found, replica, peer = self._found(size)
            served = self._study.serve(
                found,
                self.bare,
                machines=size.machines if self._given.queue else 0,
                machine=replica,
                network=self._fleet.network or math.inf,
            )
            self._rows[size] = self._counted(size, served, replica, peer)
            if self._progress is not None:
                done = len(self._rows)
                self._progress(done, max(2 * self._given.steps + 4, done))
        return self._rows[size]

    # ---- what a fleet finds

    def _found(self, size: Size) -> tuple[tuple[Int64s, Int64s, Int64s, Int64s], Int32s, Int32s]:
        """Returns [requests] blocks within each reach, who served each request, and whom it asked for more."""
        stored = self._in_store(size.store_bytes)
        setup = Setup(
            host_blocks=self._host_blocks(size),
            replicas=size.machines,
            routing=self._routing,
            router_lag=self._fleet.router_lag,
        )
        tiers, trace = tiers_of(setup, self._blocks(self._engine.cache_bytes)), self._study.trace
        with Caches(
            self._given.policy, tiers, setup, trace.block_size, costs=self._costs(size), workers=self._workers
        ) as caches:
            served = caches.run(trace, stored)
        host = served.hits.sum(axis=1, dtype=np.int64)
        peer = np.maximum(host, served.peer_reach)
        found = served.hits[:, 0].astype(np.int64), host, peer, np.maximum(peer, stored)
        return found, served.replica, served.peer

    def _in_store(self, store_bytes: int) -> Int64s:
        """Returns [requests] blocks that a store of this size has when each comes."""
        if store_bytes not in self._stored:
            blocks = int(store_bytes // self._engine.block_bytes)
            found = hit_blocks(self._study.trace, self._given.policy, blocks) if blocks else self._none
            self._stored[store_bytes] = found
        return self._stored[store_bytes]

    def _blocks(self, size: float) -> int:
        return max(1, min(int(size // self._engine.block_bytes), self._facts.distinct_blocks))

    def _host_blocks(self, size: Size) -> int | None:
        """Returns the capacity of the host tier; None: it would hold no more than the device."""
        device, copies = self._engine.cache_bytes, self._given.write_policy == "write_through"
        host = size.host_bytes if copies else device + size.host_bytes
        return self._blocks(host) if size.host_bytes and host > device else None

    def _costs(self, size: Size) -> RouterCosts:
        """Returns the router's costs: the plan's own, where layers with a window count their window for each token."""
        layers, rate = self._facts.model.layers, self._engine.flops_per_s
        windowed = sum(layer.pair_flops * layer.window for layer in layers if layer.window is not None)
        token = sum(2 * layer.active_parameters + layer.token_flops for layer in layers) + windowed
        pair = sum(layer.pair_flops for layer in layers if layer.window is None)
        kept, network = self._engine.token_bytes, self._fleet.network or math.inf
        store = min(self._engine.storage_bytes_per_s or math.inf, network)
        return RouterCosts(
            token_s=token / rate,
            attended_s=pair / rate,
            host_s=kept / self._engine.host_bytes_per_s,
            store_s=kept / store,
            peer_s=kept / network if size.network else None,
        )

    # ---- what it takes

    def _without_cache(self) -> FleetRow:
        """Returns the row of machines without any cache, as many as they need, which share the load evenly."""
        served = self._study.serve((self._none,) * 4, None)
        needed = self._facts.needed(float(served.computing_s.sum()) / self._facts.span_s)
        return self._counted(Size(needed, 0, 0, False), served, None, None)

    def _counted(self, size: Size, served: Served, machine: Int32s | None, peer: Int32s | None) -> FleetRow:
        """Returns the row of a fleet. Reads from the store and writes to it cross a machine's link, too.

        Args:
            machine: [requests] who served it; None: machines are alike, and the first one counts for all.
            peer: [requests] who was asked; None: nobody.
        """
        facts, trace, interval = self._facts, self._study.trace, self._fleet.interval
        first = np.zeros(len(trace), np.int32)
        owner, asked = (first if each is None else each for each in (machine, peer))
        intervals = math.floor(facts.span_s / interval) + 1
        at = ((trace.whole.time_s - trace.whole.time_s[0]) // interval).astype(np.int64)

        def flow(*moves: tuple[Int32s, NDArray[Any]]) -> Flow:
            """Returns the largest mean and the largest peak of any machine, given whose link each of these crosses."""
            links, moved = (np.concatenate(column) for column in zip(*moves, strict=True))
            cells = links.astype(np.int64) * intervals + np.tile(at, len(moves))
            sums = np.bincount(cells, moved, (int(links.max()) + 1) * intervals).reshape(-1, intervals)
            return Flow(float(sums.sum(axis=1).max()) / facts.span_s, float(sums.max()) / interval)

        pulled, read = served.pulled, served.read
        new = (self._study.tokens - served.known) * (size.store_bytes > 0)
        written = new * self._engine.token_bytes
        busy_s = np.bincount(owner, served.computing_s)
        load = float(served.computing_s.sum()) / facts.span_s
        busy = load / size.machines
        money, energy = _bill(facts, self._fleet, size, busy)
        return FleetRow(
            size=size,
            **served.outcome,
            peer_hit_rate=served.hits[2],
            store_hit_rate=served.hits[3],
            busy=busy,
            busiest=busy if machine is None else float(busy_s.max()) / facts.span_s,
            needed=facts.needed(load),
            network=flow((first, pulled)),
            inbound=flow((owner, pulled + read)),
            outbound=flow((owner, written), (asked, pulled)),
            store_read=flow((first, read)),
            store_written=flow((first, written)),
            money=money,
            energy_kwh=energy,
        )


def _bill(facts: Planned, fleet: Fleet, size: Size, busy: float) -> tuple[float, float]:
    """Returns the dollars and the kilowatt-hours of a month. A device that does not prefill draws its idle share."""
    gpus = facts.engine.gpus * size.machines
    watts = facts.device.watts if fleet.device_power is None else fleet.device_power
    drawn = watts * (fleet.idle_power + (1 - fleet.idle_power) * min(busy, 1.0)) + fleet.machine_power
    total_w = fleet.pue * (gpus * drawn + size.store_bytes / 1e12 * fleet.store_power)
    energy_kwh = total_w * HOURS_A_MONTH / 1000
    rent = facts.device.dollars_per_h if fleet.device_price is None else fleet.device_price
    memory_gb, store_gb = size.machines * size.host_bytes / 1e9, size.store_bytes / 1e9
    money = gpus * rent * HOURS_A_MONTH + memory_gb * fleet.memory_price + store_gb * fleet.store_price
    return money + energy_kwh * fleet.energy_price, energy_kwh
