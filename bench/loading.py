"""The time to the first token of stored prompts, in virtual time, beside loading everything and computing everything.

    Mainstem   computes from the front while it reads from the back, as its estimates say
    load       waits until storage has answered every call, and computes what it did not bring
    compute    asks no storage

The scheduler, the tiers and the store are the real ones. The model, the link to storage and the host's copies only
take time: each forward, call and copy moves a clock. So a run is a function of its settings, on any machine. Each cell
of the grid (bandwidth, length, fault) asks for one prompt again and again, with empty device and host.

Knows no tensors but the logits, which are zeros.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import quantiles
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np
import torch
from rich.table import Table
from rigs.ghost_memory import GhostMemory

from bench.report import Report
from bench.virtual import prefill_s
from mainstem.cache.identity import Identity
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.runtime.request import Delta, Request
from mainstem.runtime.schedule.scheduler import Scheduler
from mainstem.runtime.segments import Segment
from mainstem.settings.engine import Limits, PrefetchPolicy, SamplingParams, StorageConfig
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.host.tier import HostTier
from mainstem.tiers.host.transfer import Move
from mainstem.tiers.storage.sealer import Sealer
from mainstem.tiers.storage.store import Store

T = TypeVar("T")

PAGE = 16
GOAL, GOAL_S = 1.05, 0.005
"""The p99 is at most that many times the better of the other two, plus these seconds."""

Fault = Literal["none", "slow", "failing"]
Way = Literal["Mainstem", "load", "compute"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark. Compute and sizes are about those of a model of 8 billion parameters on one GPU.

    Args:
        bandwidths: bytes a second from storage.
        lengths: tokens of a prompt.
        faults: what storage suffers from.
        requests: counted requests of each cell.
        warm_ups: requests before them, which teach the estimates.
        token_s: seconds that a token takes to compute at the beginning of a prompt.
        doubled_at: position at which it takes twice as long.
        forward_s: seconds that a forward takes beside its tokens.
        token_bytes: bytes of a token's KV.
        call_s: latency of a call to storage.
        host_rate: bytes a second between host and device.
        slow_pages, slow_s: fraction of pages that take longer, and how much longer, on average; a call takes as long
            as its slowest page.
        lost_pages: fraction of the pages that are damaged when they are read.
    """

    bandwidths: tuple[float, ...] = (0.1e9, 0.5e9, 2e9, 8e9, 32e9)
    lengths: tuple[int, ...] = (512, 2048, 8192, 32768)
    faults: tuple[Fault, ...] = get_args(Fault)
    requests: int = 20
    warm_ups: int = 4
    token_s: float = 1e-4
    doubled_at: int = 32768
    forward_s: float = 1e-3
    token_bytes: int = 128 << 10
    call_s: float = 2e-3
    host_rate: float = 20e9
    slow_pages: float = 0.001
    slow_s: float = 0.3
    lost_pages: float = 0.005

    def seconds(self, tokens: int, context: int) -> float:
        """Returns what computing takes."""
        return prefill_s(tokens, context, self.token_s, self.doubled_at)


QUICK = Settings(bandwidths=(0.5e9, 2e9, 32e9), lengths=(512, 2048))


class Clock:
    """Virtual time, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Call(Generic[T]):
    """A call that has a result at once, and reports it when its time has come."""

    def __init__(self, clock: Clock, function: Callable[[], T]) -> None:
        here_s, self._clock = clock.now_s, clock
        self._value = function()
        self._ends_s, clock.now_s = clock.now_s, here_s

    def done(self) -> bool:
        return self._clock.now_s >= self._ends_s

    def result(self) -> T:
        return self._value


class _Workers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def submit(self, function: Callable[[], T]) -> _Call[T]:
        return _Call(self._clock, function)

    def close(self, timeout_s: float) -> bool:
        return True


class Remote(MemoryBackend):
    """Storage at the end of one link, which all reads share; their latencies pass at the same time."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        super().__init__()
        self._settings, self._clock = settings, clock
        self.bandwidth, self.fault = settings.bandwidths[0], "none"
        self._free_s = 0.0  # when the link is
        self._random = random.Random(0)
        self._lost: set[bytes] = set()
        self._slow: dict[bytes, float] = {}

    def begin(self, number: int, keys: Sequence[bytes]) -> None:
        """Draws the faults of a request."""
        self._random = random.Random(f"{self.fault} {number}")
        draw, settings = self._random, self._settings
        lost = settings.lost_pages if self.fault == "failing" else 0.0
        slow = settings.slow_pages if self.fault == "slow" else 0.0
        self._lost = {key for key in keys if draw.random() < lost}
        self._slow = {key: draw.expovariate(1 / settings.slow_s) for key in keys if draw.random() < slow}
        self._free_s = 0.0

    @property
    def keys(self) -> list[bytes]:
        """The keys of all values."""
        return list(self._values)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._clock.now_s += self._settings.call_s * self._random.uniform(0.8, 1.2)
        return super().exists(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        chance, settings = self._random, self._settings
        begun_s = max(self._clock.now_s + settings.call_s * chance.uniform(0.8, 1.2), self._free_s)
        self._free_s = begun_s + len(keys) * PAGE * settings.token_bytes / self.bandwidth
        self._clock.now_s = self._free_s + max(self._slow.get(key, 0.0) for key in keys)
        lengths = super().get(keys, buffers)
        for key, buffer in zip(keys, buffers, strict=True):
            if key in self._lost:
                buffer[-1] ^= 1
        return lengths

    def delete(self, keys: Sequence[bytes]) -> None:
        """Does nothing: the next request finds the page again."""


class _Ticket:
    error: Exception | None = None

    def __init__(self, clock: Clock, took_s: float) -> None:
        self._clock, self.took_s, self.ends_s = clock, took_s, clock.now_s + took_s

    def done(self) -> bool:
        return self._clock.now_s >= self.ends_s

    def wait(self) -> None:
        self._clock.now_s = max(self._clock.now_s, self.ends_s)

    def wait_layer(self, layer: int) -> None:
        self.wait()


class _Memory(GhostMemory):
    """Host pages whose copies take time."""

    def __init__(self, settings: Settings, clock: Clock, pages: int) -> None:
        super().__init__([pages], [pages], layers=1)
        self._settings, self._clock = settings, clock

    def down(self, moves: Sequence[Move]) -> Any:
        super().down(moves)
        return self._ticket(moves)

    def up(self, moves: Sequence[Move]) -> Any:
        super().up(moves)
        return self._ticket(moves)

    def _ticket(self, moves: Sequence[Move]) -> _Ticket:
        size = sum(len(move.source) for move in moves) * PAGE * self._settings.token_bytes
        return _Ticket(self._clock, size / self._settings.host_rate)


class _Model:
    """A runner that only takes time."""

    vocab_size = 8

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        self._clock.now_s += self._settings.forward_s
        for segment in segments:
            if segment.arriving is not None:
                segment.arriving.wait_layer(0)
            self._clock.now_s += self._settings.seconds(len(segment.tokens), segment.start)
        return torch.zeros(sum(segment.logits for segment in segments), 8)

    def embed(self, segment: Segment) -> None:
        """Does nothing: there are no images."""


class _Text:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: object) -> str:
        return "x" * len(token_ids)


class Machine:
    """A server in virtual time whose storage has one prompt.

    Args:
        settings: the settings.
        way: how it serves stored prompts.
        bandwidth: of storage.
        length: tokens of the prompt.
        fault: what storage suffers from.
    """

    def __init__(self, settings: Settings, way: Way, bandwidth: float, length: int, fault: Fault) -> None:
        self.clock = Clock()
        self.storage = Remote(settings, self.clock)
        self._settings = settings
        self._prompt = np.arange(1, length + 2, dtype=np.int32)
        self._serve("load")
        self.first_token_s(0)  # storage has it now
        self._idle()
        self.storage.bandwidth, self.storage.fault = bandwidth, fault
        self._serve(way)
        self.scheduler.measure()

    def first_token_s(self, number: int) -> float:
        """Returns the time to the first token of a request, with empty device and host."""
        self._idle()
        self.cache.flush()
        self.storage.begin(number, self.storage.keys)
        began_s = self.clock.now_s
        self.scheduler.add(str(number), Request(self._prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
        while True:
            for _, what in self.scheduler.step():
                if isinstance(what, Delta):
                    assert what.error is None, what.error
                    return self.clock.now_s - began_s
            self.clock.now_s += self.scheduler.idle_s or 0.0

    def _idle(self) -> None:
        while self.tiers.busy:
            self.clock.now_s += 0.01
            self.tiers.poll()

    def _serve(self, way: Way) -> None:
        policy: PrefetchPolicy = "wait_complete" if way == "load" else "timeout"
        pages = 2 * (len(self._prompt) // PAGE + 2)
        identity = Identity("m", "w", "f32", "none", "l", "s", "gqa", "r", "t", "TokenKeys/4", PAGE)
        store = Store(
            self.storage,
            Sealer(identity),
            StorageConfig(prefetch=policy),
            readers=_Workers(self.clock),
            writers=_Workers(self.clock),
            clock=self.clock,
            wall_clock=self.clock,
        )
        host = HostTier(_Memory(self._settings, self.clock, pages))
        self.cache = PrefixCache(pages, PAGE, host=host, store=None if way == "compute" else store)
        assert self.cache.tiers is not None
        self.tiers = self.cache.tiers
        self.scheduler = Scheduler(
            self.cache,
            _Model(self._settings, self.clock),
            _Text(),
            Limits(draft_tokens=0),
            max_context=len(self._prompt) + 1,
            clock=self.clock,
            random=random.Random(0),
        )


def cells(settings: Settings) -> Iterator[tuple[float, int, Fault]]:
    """Yields the cells of the grid: bandwidth, length, fault."""
    yield from product(settings.bandwidths, settings.lengths, settings.faults)


def measure(settings: Settings, bandwidth: float, length: int, fault: Fault) -> dict[str, Any]:
    """Returns the row of a cell: for each way the median and the p99 of the seconds to the first token."""
    row: dict[str, Any] = {"bandwidth": bandwidth, "length": length, "fault": fault}
    for way in get_args(Way):
        machine = Machine(settings, way, bandwidth, length, fault)
        count = settings.requests if way != "compute" else 3  # which do not differ
        times = [machine.first_token_s(number) for number in range(1 + settings.warm_ups + count)][-count:]
        cuts = quantiles(times, n=100, method="inclusive")
        row[way] = {"p50_s": cuts[49], "p99_s": cuts[98]}
    better_s = min(row["load"]["p99_s"], row["compute"]["p99_s"])
    row["of_better"] = row["Mainstem"]["p99_s"] / better_s
    row["met"] = row["Mainstem"]["p99_s"] <= GOAL * better_s + GOAL_S
    return row


def run(settings: Settings, report: Report) -> None:
    """Measures every cell, and adds rows to the report."""
    report.settings.update(asdict(settings), goal=GOAL, goal_s=GOAL_S)
    for cell in cells(settings):
        report.progress(f"loading: {cell[0] / 1e9:g} GB/s, {cell[1]} tokens, {cell[2]}")
        report.rows.append(row := measure(settings, *cell))
        if not row["met"]:
            report.failures.append(f"{cell[0] / 1e9:g} GB/s, {cell[1]} tokens, {cell[2]}: {row['of_better']:.2f} times")
    report.tables.append(table(report.rows))


def table(rows: list[dict[str, Any]]) -> Table:
    """Builds a table of all rows for the terminal."""
    title = "time to the first token of a stored prompt, ms, p50 and p99, and the p99 over the better of the other two"
    shown = Table("GB/s", "tokens", "fault", "Mainstem", "p99", "load", "p99", "compute", "p99", "ratio", title=title)
    for row in rows:
        times = [row[way][name] for way in get_args(Way) for name in ("p50_s", "p99_s")]
        shown.add_row(
            f"{row['bandwidth'] / 1e9:g}", str(row["length"]), row["fault"],
            *(f"{seconds * 1000:,.1f}" for seconds in times), f"{row['of_better']:.2f}" + ("" if row["met"] else " !"),
        )  # fmt: skip
    return shown
