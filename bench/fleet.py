"""Replays traces over many caches with a router before them, in virtual time, and times a decision.

    hits      tokens found, in percent of those that one cache finds that has all their memory
    balance   tokens that the busiest replica computed over the whole trace, over the mean
    first     virtual seconds until the first token: mean, and the 95th percentile

Each replica has a real `PrefixCache` of its own and serves one request after another: it leases, computes what is
missing at a given speed, publishes. The events of the caches reach the router `EVENTS_S` later. A block of the trace is
a page of one token to the caches, and `block_tokens` tokens to the clock. The speed follows from the trace: with the
hits of the one cache, the fleet would be busy for `busy` of the time.

Parts: `routers`, the above; `decision`; `first` and `apart`, with servers as processes (`travel`).

A decision: `order` of `CostRouter` for a prompt of which two workers have a part, while its index holds the given
number of blocks, by CPU time.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import numpy as np
from rich.table import Table

from bench import dynamo, travel
from bench.report import Report
from bench.routers import Blocks, CacheAware, ConsistentHash, Ours, PowerOfTwo, RoundRobin, Router
from bench.tables import goals_table
from mainstem import PrefixCache
from mainstem.events.source import BlockStored, Event
from mainstem.fleet.front.asking import Prompt
from mainstem.fleet.front.routing import CostRouter
from mainstem.replay.generate import Chat, Documents, generate
from mainstem.replay.readers.open import open_trace
from mainstem.replay.trace import Trace

EVENTS_S = 0.01
GOAL_REPLICAS = 16
"""The goals hold up to here."""
ATTENDED = 50_000
"""Positions that a token attends to at which attention costs as much as the rest."""

_TRAVEL = travel.Settings()

Row = dict[str, Any]
ROUTERS = ("ours", "cache_aware", "dynamo", "consistent hash", "power of two", "round robin")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        traces: files, see `mainstem.replay.readers.open`; without any, two are generated.
        replicas: numbers of caches.
        percent: memory of all caches together, in percent of the distinct blocks.
        busy: see the module.
        requests: of a generated trace.
        blocks, workers, tokens, page_size, decisions: of the decision.
        seed: of everything.
        travel: of the parts with processes.
        parts: what is measured.
    """

    traces: tuple[str, ...] = ()
    replicas: tuple[int, ...] = (2, 4, 8, 16, 64)
    percent: float = 25.0
    busy: float = 0.6
    requests: int = 6000
    blocks: int = 1_000_000
    workers: int = 64
    tokens: int = 8192
    page_size: int = 16
    decisions: int = 2000
    seed: int = 0
    travel: travel.Settings = _TRAVEL
    parts: tuple[str, ...] = ("routers", "decision", "first", "apart")


QUICK = Settings(replicas=(2, 4), requests=600, blocks=20_000, workers=8, decisions=200, travel=travel.QUICK)


@dataclass(frozen=True, slots=True)
class Requests:
    """A trace, with blocks as numbers from 0."""

    name: str
    time_s: list[float]
    blocks: list[Blocks]
    tokens: list[int]
    block_tokens: int
    distinct: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds to compute a block, and for each block that it attends to."""

    block_s: float
    attended_s: float

    def seconds(self, blocks: int, before: int) -> float:
        """Returns the time to compute blocks after others."""
        return blocks * (self.block_s + self.attended_s * (before + blocks / 2))


def run(settings: Settings, report: Report) -> None:
    """Measures the parts, and adds rows, goals and tables to the report.

    Raises:
        OSError, TraceError: a file cannot be read, or is not a trace.
    """
    report.settings.update(asdict(settings) | {"traces": [Path(trace).name for trace in settings.traces]})
    if "routers" in settings.parts:
        _replay_all(settings, report)
        report.tables.append(table(report.rows))
    decided = decision(settings) if "decision" in settings.parts else None
    report.more |= {"decision": [] if decided is None else [decided], "goals": judge(report.rows, decided)}
    if report.more["goals"]:
        report.tables.append(goals_table(report.more["goals"]))
    if {"first", "apart"} & set(settings.parts):
        travel.run(settings.travel, report, settings.parts)


def _replay_all(settings: Settings, report: Report) -> None:
    """Replays every trace with every router."""
    names = _routers(report)
    for make in _traces(settings):
        requests = read(make())
        capacity = int(requests.distinct * settings.percent / 100)
        one = found_by_one(requests, capacity)
        for replicas in settings.replicas:
            speed = speed_of(requests, one, replicas, settings.busy)
            for name in names:
                row = replay(requests, name, replicas, capacity // replicas, speed, settings.seed)
                row["share"] = 100 * row["hit_tokens"] / max(1, sum(one))
                report.rows.append(row)
                report.progress(f"fleet: {requests.name}, {replicas} replicas, {name}: {row['share']:.1f} %")


def _routers(report: Report) -> list[str]:
    """Returns the routers that are there, and notes which one is not."""
    found = dynamo.version()
    if found is None:
        report.notes.append(dynamo.MISSING)
        return [name for name in ROUTERS if name != "dynamo"]
    report.versions["ai-dynamo-runtime"] = found
    return list(ROUTERS)


def _traces(settings: Settings) -> list[Callable[[], Trace]]:
    if settings.traces:
        return [partial(open_trace, path) for path in settings.traces]
    chat = Chat(turns=8.0, think_s=30.0, question_tokens=400.0, answer_tokens=600.0)
    return [
        partial(generate, chat, settings.requests, seed=settings.seed, block_size=512),
        partial(generate, Documents(), settings.requests, seed=settings.seed, block_size=512),
    ]


def read(trace: Trace) -> Requests:
    """Reads a trace. The names of blocks become numbers in the order in which they appear."""
    times: list[float] = []
    blocks: list[Blocks] = []
    tokens: list[int] = []
    numbers: dict[int, int] = {}
    for batch in trace.batches():
        times += batch.time_s.tolist()
        tokens += batch.input_tokens.tolist()
        for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            named = (numbers.setdefault(name, len(numbers)) for name in batch.blocks[begin:end].tolist())
            blocks.append(np.fromiter(named, np.int32, int(end - begin)))
    some = [i for i, one in enumerate(blocks) if len(one)]
    return Requests(
        trace.name, [times[i] for i in some], [blocks[i] for i in some], [tokens[i] for i in some], trace.block_size,
        len(numbers),
    )  # fmt: skip


def found_by_one(requests: Requests, capacity: int) -> list[int]:
    """Returns the tokens that each request finds in one cache that serves all of them at once, one after another."""
    cache = PrefixCache(pages=capacity, page_size=1)
    found = []
    for number, blocks in enumerate(requests.blocks):
        with cache.lease(blocks) as lease:
            lease.reserve(len(blocks) - lease.hit)
            found.append(_tokens(requests, number, lease.hit))
            lease.finish(len(blocks))
    return found


def _tokens(requests: Requests, number: int, blocks: int) -> int:
    return min(requests.tokens[number], blocks * requests.block_tokens)


def speed_of(requests: Requests, found: Sequence[int], replicas: int, busy: float) -> Speed:
    """Returns the speed at which so many replicas would be busy for this share of the time, with these hits."""
    unit, work = Speed(1.0, requests.block_tokens / ATTENDED), 0.0
    for number, blocks in enumerate(requests.blocks):
        hit = found[number] // requests.block_tokens
        work += unit.seconds(len(blocks) - hit, hit)
    scale = busy * replicas * max(1.0, requests.time_s[-1]) / work
    return Speed(scale, scale * requests.block_tokens / ATTENDED)


# ---------------------------------------------------------------- the replay


class Server:
    """A replica: a cache, and a queue before one processor."""

    def __init__(self, number: int, pages: int, speed: Speed) -> None:
        self.events: list[Event] = []
        self.cache = PrefixCache(pages=pages, page_size=1, on_event=self.events.append)
        self.number, self._speed, self._pages = number, speed, pages
        self.waiting: deque[tuple[int, Blocks]] = deque()
        self.busy = False

    def serve(self, blocks: Blocks) -> tuple[int, float]:
        """Serves a request. Returns the blocks found, and the seconds that it took."""
        length = min(len(blocks), self._pages)  # of one that does not fit, only the beginning is cached
        with self.cache.lease(blocks[:length]) as lease:
            lease.reserve(length - lease.hit)
            hit = lease.hit
            lease.finish(length)
        self.cache.deliver_events()
        return hit, self._speed.seconds(len(blocks) - hit, hit)

    def take_events(self) -> list[Event]:
        """Returns the events since the last call."""
        events, self.events[:] = list(self.events), []
        return events


def replay(requests: Requests, name: str, replicas: int, pages: int, speed: Speed, seed: int) -> Row:
    """Replays a trace with one router. Returns a row."""
    now_s, order = 0.0, count()
    servers = [Server(number, pages, speed) for number in range(replicas)]
    router = _router(name, replicas, lambda: now_s, speed, requests.block_tokens, seed)
    found, computed, first_s = 0, [0] * replicas, [0.0] * len(requests.blocks)
    due: list[tuple[float, int, Callable[[], None]]] = []

    def after(seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(due, (now_s + seconds, next(order), what))

    def begin(server: Server) -> None:
        nonlocal found
        if server.busy or not server.waiting:
            return
        number, blocks = server.waiting.popleft()
        server.busy = True
        hit, seconds = server.serve(blocks)
        tokens = _tokens(requests, number, hit)
        found += tokens
        computed[server.number] += requests.tokens[number] - tokens
        after(seconds, partial(end, server, number, server.take_events()))

    def end(server: Server, number: int, events: list[Event]) -> None:
        first_s[number] = now_s - requests.time_s[number]
        server.busy = False
        router.ended(server.number)
        after(EVENTS_S, partial(router.apply, server.number, events))
        begin(server)

    for number, blocks in enumerate(requests.blocks):
        while due and due[0][0] <= requests.time_s[number]:
            now_s, _, what = heapq.heappop(due)
            what()
        now_s = requests.time_s[number]
        server = servers[router.choose(blocks)]
        server.waiting.append((number, blocks))
        begin(server)
    while due:
        now_s, _, what = heapq.heappop(due)
        what()
    router.close()
    return {
        "trace": requests.name, "replicas": replicas, "router": name, "pages": pages, "hit_tokens": found,
        "balance": max(computed) / max(1.0, mean(computed)), "first_s": mean(first_s),
        "first_p95_s": quantiles(first_s, n=20)[-1],
    }  # fmt: skip


def _router(name: str, replicas: int, clock: Callable[[], float], speed: Speed, block_tokens: int, seed: int) -> Router:
    match name:
        case "ours":
            return Ours(replicas, clock, (speed.block_s, speed.attended_s))
        case "cache_aware":
            return CacheAware(replicas, clock, block_tokens)
        case "dynamo":
            return dynamo.Dynamo(replicas)
        case "consistent hash":
            return ConsistentHash(replicas)
        case "power of two":
            return PowerOfTwo(replicas, seed)
    return RoundRobin(replicas)


# ---------------------------------------------------------------- the decision


def decision(settings: Settings) -> Row:
    """Times `order` by CPU time, of one thread."""
    names = [f"{worker:04}" for worker in range(settings.workers)]
    router = CostRouter(time.monotonic, page_size=settings.page_size, capacity=4 * settings.blocks)
    router.follow({name: {} for name in names})
    draw = np.random.default_rng(settings.seed)
    size, pages = settings.page_size, settings.tokens // settings.page_size
    held, prompts, hash_ = 0, [], 0
    while held < settings.blocks:
        tokens = draw.integers(0, 1 << 17, settings.tokens, dtype=np.int32)
        hashes = tuple(range(hash_, hash_ + pages))
        hash_ += pages
        for name in draw.choice(names, 2, replace=False):
            until = int(draw.integers(1, pages + 1))
            event = BlockStored(hashes[:until], None, tuple(tokens[: until * size].tolist()), size, "GPU")
            router.apply(name, [event])
        prompts.append(tokens)
        held = router.stats()["blocks"]
    asked = [Prompt(prompts[i]) for i in draw.integers(0, len(prompts), settings.decisions)]
    times = []
    for prompt in asked:
        began_s = time.thread_time_ns()
        router.order(prompt, names)
        times.append((time.thread_time_ns() - began_s) / 1000)
    return {
        "blocks": held, "workers": settings.workers, "tokens": settings.tokens, "page_size": size,
        "p50_us": median(times), "p99_us": quantiles(times, n=100)[-1], "bytes": router.stats()["bytes"],
    }  # fmt: skip


# ---------------------------------------------------------------- results


def judge(rows: Sequence[Row], decided: Row | None) -> list[Row]:
    """Returns a row for each goal of what was measured: what, goal, unit, measured, met."""
    goals: list[Row] = []
    own = [row for row in rows if row["router"] == "ours" and row["replicas"] <= GOAL_REPLICAS]
    if own:
        least, most = min(row["share"] for row in own), max(row["balance"] for row in own)
        goals = [
            {"what": "hits of one cache, least", "goal": 95, "unit": "%", "measured": least, "met": least >= 95},
            {"what": "computed, most over mean", "goal": 1.3, "unit": "ratio", "measured": most, "met": most <= 1.3},
        ]
    if decided is not None:
        sizes = f"{decided['tokens']:,} tokens, {decided['blocks']:,} blocks, {decided['workers']} workers"
        p50_us = decided["p50_us"]
        what = f"decision, {sizes}, p50"
        goals.append({"what": what, "goal": 50, "unit": "µs", "measured": p50_us, "met": p50_us <= 50})
    return goals


def table(rows: Sequence[Row]) -> Table:
    """Builds a table with one line per replay."""
    heads = ("trace", "replicas", "router", "hits of one cache, %", "most computed over mean", "first token, s", "p95")
    shown = Table(*heads, title="routers before real caches, in virtual time")
    for row in rows:
        shown.add_row(
            row["trace"], str(row["replicas"]), row["router"], f"{row['share']:.1f}", f"{row['balance']:.2f}",
            f"{row['first_s']:.1f}", f"{row['first_p95_s']:.1f}",
        )  # fmt: skip
    return shown
