"""Batches in several orders: prompt tokens that are computed over the least, which a cache with room for all computes.

    arrival              as they come: generated ones shuffled, those of a trace by time
    first tokens         by a hash of their first tokens, a system prompt's, then as they come
    longest match, 128   of the next 128 the one of which the cache has most: SGLang does so while no more are waiting
    longest match        the same, of all that are left
    sorted               by their tokens, as sorted texts are
    tree                 `mainstem.order`, with the lengths of the answers

The cache is the real one, with `lru`; a model would add nothing but time. A request holds its prompt and its answer
from its beginning to its end and stays in the cache until it is evicted, answer included. As many run as fit, up to
`running`; who is next in the order waits until there is room. Of a prompt at least the last token is computed. A prompt
that does not fit alone is computed, but for what the cache has of it, and is not kept. The time is counted in steps:
each gives all that run a token. An answer that would not fit alone is cut in the cache, not in its steps.

Apart from that, short batches with room for everything show how they end: their steps over the least, which is that of
the longest answer, or of all answers with no place empty.

Everything follows from the seed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from bench.report import Report
from bench.tables import goals_table
from mainstem import Lease, OutOfPages, PrefixCache, order
from mainstem.batch.plan import plan
from mainstem.replay.readers.open import open_trace

GOALS = {1: 1.05, 5: 1.01}
"""The most that is computed over the least, by percent of the distinct tokens that the cache holds."""
OURS = "tree"
_WINDOW = 128
_FIRST_TOKENS = 256
_ANSWERS = 2**30
"""Tokens of answers begin here: they are like no other."""

Row = dict[str, Any]
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts, the lengths of their answers, and tokens of a page.

    Args:
        unit: tokens that a token of this batch stands for: those of a block, in a trace.
    """

    name: str
    prompts: Sequence[Tokens]
    answers: Sequence[int]
    page_size: int = 16
    unit: int = 1


# ---------------------------------------------------------------- batches


def evaluation(rng: np.random.Generator, size: float) -> Batch:
    """Questions of 57 subjects with 5 examples each; each of 4 options is a prompt, and its answer one token."""
    prompts = []
    for _ in range(57):
        examples = _text(rng, sum(_lengths(rng, 110, 0.3, 5)))
        for words in _lengths(rng, 90, 0.4, max(1, round(40 * size))):
            question = np.concatenate([examples, _text(rng, words)])
            prompts += [np.concatenate([question, _text(rng, own)]) for own in _lengths(rng, 12, 0.5, 4)]
    return _shuffled(rng, "evaluation", prompts, np.ones(len(prompts), int))


def extraction(rng: np.random.Generator, size: float) -> Batch:
    """Twelve fields of each of 400 documents, after instructions that all share."""
    instructions = _text(rng, 200)
    fields = [_text(rng, length) for length in _lengths(rng, 40, 0.3, 12)]
    documents = [_text(rng, length) for length in _lengths(rng, 3000, 0.5, max(20, round(400 * size)))]
    prompts = [np.concatenate([instructions, document, own]) for document in documents for own in fields]
    return _shuffled(rng, "extraction", prompts, _lengths(rng, 80, 0.8, len(prompts)))


def samples(rng: np.random.Generator, size: float) -> Batch:
    """Eight samples of each of 2,000 prompts, with long answers."""
    tasks = [_text(rng, length) for length in _lengths(rng, 400, 0.5, max(100, round(2000 * size)))]
    prompts = [task for task in tasks for _ in range(8)]
    return _shuffled(rng, "samples", prompts, _lengths(rng, 400, 0.8, len(prompts)))


def tree(rng: np.random.Generator, size: float) -> Batch:
    """Each of 6,000 prompts goes on from any place in any earlier one."""
    prompts = [_text(rng, 200)]
    for own in _lengths(rng, 150, 0.7, max(300, round(6000 * size))):
        above = prompts[rng.integers(len(prompts))]
        prompts.append(np.concatenate([above[: rng.integers(len(above))], _text(rng, own)]))
    return _shuffled(rng, "random tree", prompts, _lengths(rng, 80, 0.8, len(prompts)))


GENERATED = (evaluation, extraction, samples, tree)


def recorded(path: str) -> Batch:
    """Reads a trace, whose requests come at once; a token is a block of the trace."""
    trace = open_trace(path)
    whole = trace.whole
    ids = np.unique(whole.blocks, return_inverse=True)[1].astype(np.int32)
    prompts = np.split(ids, whole.offsets[1:-1])
    answers = -(-whole.output_tokens // trace.block_size)
    there = [at for at, prompt in enumerate(prompts) if len(prompt)]
    return Batch(_name(path), [prompts[at] for at in there], [int(answers[at]) for at in there], 1, trace.block_size)


def _name(path: str) -> str:
    return Path(path).name.split(".")[0]


def _shuffled(rng: np.random.Generator, name: str, prompts: Sequence[Tokens], answers: NDArray[Any]) -> Batch:
    mixed = rng.permutation(len(prompts))
    return Batch(name, [prompts[at] for at in mixed], [int(answers[at]) for at in mixed])


def _text(rng: np.random.Generator, length: int) -> Tokens:
    return rng.integers(0, 100_000, length, dtype=np.int32)


def _lengths(rng: np.random.Generator, median: float, sigma: float, count: int) -> NDArray[np.int64]:
    return np.maximum(1, median * np.exp(sigma * rng.standard_normal(count))).astype(np.int64)


# ---------------------------------------------------------------- orders


Order = Callable[[Batch, PrefixCache], Iterator[int]]
"""Returns the prompts one by one, each once the one before it has begun."""


def _arrival(batch: Batch, cache: PrefixCache) -> Iterator[int]:
    return iter(range(len(batch.prompts)))


def _by_first_tokens(batch: Batch, cache: PrefixCache) -> Iterator[int]:
    first = [prompt[: _FIRST_TOKENS // batch.unit or 1].tobytes() for prompt in batch.prompts]
    groups = {start: crc32(start) for start in first}
    return iter(sorted(range(len(first)), key=lambda at: (groups[first[at]], first[at])))


def _sorted(batch: Batch, cache: PrefixCache) -> Iterator[int]:
    return iter(_ranked(batch))


def _tree(batch: Batch, cache: PrefixCache) -> Iterator[int]:
    return iter(order(batch.prompts, lengths=batch.answers))


def _longest_match(batch: Batch, cache: PrefixCache, window: int | None = None) -> Iterator[int]:
    """Yields of the waiting prompts the one of which the cache has most; of those alike any.

    Only neighbours of what was computed, in sorted order, can have become the longest match. What the cache had of a
    prompt when it was looked at is no less than what it has now, unless a neighbour was computed since: so the heap has
    upper bounds.

    Args:
        window: how many are waiting at once; None: all.
    """
    ranked = _ranked(batch)
    ranks = {at: rank for rank, at in enumerate(ranked)}
    coming = iter(range(len(ranked)))
    waiting: list[int] = []  # ranks, sorted
    bounds: list[tuple[int, int]] = []

    def push(at: int) -> None:
        heapq.heappush(bounds, (-cache.peek(batch.prompts[at]), at))

    while True:
        while len(waiting) < (window or len(ranked)) and (at := next(coming, -1)) >= 0:
            insort(waiting, ranks[at])
            push(at)
        if not bounds:
            return
        bound, at = heapq.heappop(bounds)
        place = bisect_left(waiting, ranks[at])
        if place == len(waiting) or waiting[place] != ranks[at]:
            continue  # it has gone already
        if cache.peek(batch.prompts[at]) < -bound:
            push(at)
            continue
        del waiting[place]
        yield at
        for beside in waiting[max(0, place - 1) : place + 1]:
            push(ranked[beside])


def _ranked(batch: Batch) -> list[int]:
    return sorted(range(len(batch.prompts)), key=lambda at: batch.prompts[at].tolist())


ORDERS: Mapping[str, Order] = {
    "arrival": _arrival,
    "first tokens": _by_first_tokens,
    f"longest match, {_WINDOW}": partial(_longest_match, window=_WINDOW),
    "longest match": _longest_match,
    "sorted": _sorted,
    OURS: _tree,
}


# ---------------------------------------------------------------- serving


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        percents: capacities in percent of the distinct tokens.
        running: requests at once.
        size: of generated batches, relative to those that are published.
        traces: files, see `mainstem.replay.readers.open`; their blocks are what is shared.
        orders: names from `ORDERS`.
        seed: of the generated batches.
        end_size, end_running, end_seeds: size, requests at once and number of the short batches.
    """

    percents: tuple[float, ...] = (1, 2, 5, 10)
    running: tuple[int, ...] = (1, 8)
    size: float = 1.0
    traces: tuple[str, ...] = ()
    orders: tuple[str, ...] = tuple(ORDERS)
    seed: int = 0
    end_size: float = 0.05
    end_running: int = 32
    end_seeds: int = 4


QUICK = Settings(percents=(5, 10), size=0.05, end_seeds=1)


def run(settings: Settings, report: Report) -> None:
    """Serves all batches in all orders, and adds rows, goals and tables to the report.

    Raises:
        OSError, TraceError: a file cannot be read, or is not a trace.
    """
    report.settings.update(asdict(settings) | {"traces": [_name(path) for path in settings.traces]})
    make = [partial(each, np.random.default_rng(settings.seed), settings.size) for each in GENERATED]
    for each in (*make, *(partial(recorded, path) for path in settings.traces)):
        batch = each()
        report.progress(f"batch: {batch.name}, {len(batch.prompts):,} prompts")
        report.rows += measure(batch, settings)
    ended = [end(make, settings) for make in GENERATED]
    goals = judge(report.rows)
    report.more |= {"ends": ended, "goals": goals}
    report.tables += [table(report.rows), ends_table(ended), goals_table(goals)]


def measure(batch: Batch, settings: Settings) -> Iterator[Row]:
    """Yields a row for each capacity, number of requests at once, and order."""
    tokens = sum(map(len, batch.prompts))
    least = served(batch, OURS, _ample(batch), 1)["computed"]
    distinct = plan(batch.prompts, page_size=1).least
    longest = max(map(len, batch.prompts))
    for percent, running in product(settings.percents, settings.running):
        pages = max(1, int(distinct * percent / 100) // batch.page_size)
        own = {"batch": batch.name, "prompts": len(batch.prompts), "percent": percent, "running": running}
        sizes = {"capacity": pages * batch.page_size * batch.unit, "longest": longest * batch.unit}
        for name in settings.orders:
            row = served(batch, name, pages, running)
            yield (
                own | sizes | {"order": name, "ratio": row["computed"] / least, "tokens": tokens, "least": least} | row
            )


def end(make: Callable[[np.random.Generator, float], Batch], settings: Settings) -> Row:
    """Returns by order the steps of short batches over the least, the mean of several."""
    found: dict[str, list[float]] = {name: [] for name in settings.orders}
    for seed in range(settings.seed, settings.seed + settings.end_seeds):
        batch = make(np.random.default_rng(seed), settings.end_size)
        least = max(*batch.answers, sum(batch.answers) / settings.end_running)
        for name, ratios in found.items():
            ratios.append(served(batch, name, _ample(batch), settings.end_running)["steps"] / least)
    ratios_by_order = {name: mean(ratios) for name, ratios in found.items()}
    return {"batch": batch.name, "prompts": len(batch.prompts), "running": settings.end_running, **ratios_by_order}


def _ample(batch: Batch) -> int:
    """Returns the pages that a cache with room for everything has."""
    return -(-(sum(map(len, batch.prompts)) + sum(batch.answers)) // batch.page_size) + 2 * len(batch.prompts)


def served(batch: Batch, name: str, pages: int, running: int) -> Row:
    """Serves a batch in one order.

    Returns:
        Tokens computed, steps, prompts that did not fit alone, and how many ran at once in the mean.
    """
    cache = PrefixCache(pages, batch.page_size)
    ends: list[tuple[int, int, Lease, int]] = []  # when it ends, whose it is, and the tokens of its answer
    now = computed = alone = busy = 0
    answered = _ANSWERS
    for index in ORDERS[name](batch, cache):
        prompt, answer = batch.prompts[index], batch.answers[index]
        while True:
            said = answer if ends else min(answer, max(0, pages * batch.page_size - len(prompt)))
            lease = _begun(cache, prompt, said) if len(ends) < running else None
            if lease is not None or not ends:
                break
            now, _, ended, told = heapq.heappop(ends)
            answered = _end(ended, told, answered)
        if lease is None:
            alone += 1
            computed += len(prompt) - cache.peek(prompt)
            now += answer
            continue
        computed += len(prompt) - lease.hit
        busy += answer
        heapq.heappush(ends, (now + answer, index, lease, said))
    steps = max([now, *(end for end, *_ in ends)])
    for _, _, lease, _ in ends:
        lease.abort()
    return {"computed": computed, "steps": steps, "alone": alone, "at_once": busy / max(1, steps)}


def _begun(cache: PrefixCache, prompt: Tokens, answer: int) -> Lease | None:
    """Computes a prompt, with room for its answer; None: there is none."""
    lease = cache.lease(prompt)
    try:
        lease.reserve(len(prompt) - lease.hit + answer)
    except OutOfPages:
        lease.abort()
        return None
    lease.publish(len(prompt))
    return lease


def _end(lease: Lease, answer: int, first: int) -> int:
    """Ends a request with an answer that nobody else has; returns the first token of the next one's."""
    lease.append(np.arange(first, first + answer, dtype=np.int32))
    lease.finish()
    return first + answer


def judge(rows: Sequence[Row]) -> list[Row]:
    """Returns a row for each batch with a goal: what, goal, unit, measured, met."""
    return [
        {
            "what": f"{row['batch']}, {row['running']} at once, in {row['percent']:g} %"
            + (f"; {row['alone']} prompts do not fit" if row["alone"] else ""),
            "goal": GOALS[row["percent"]],
            "unit": "computed over the least",
            "measured": row["ratio"],
            "met": row["ratio"] <= GOALS[row["percent"]],
        }
        for row in rows
        if row["order"] == OURS and row["percent"] in GOALS
    ]


def table(rows: Sequence[Row]) -> Table:
    """Builds a table with a line for each capacity, and a column for each order."""
    orders = list(dict.fromkeys(row["order"] for row in rows))
    shown = Table(
        "batch", "%", "running", "capacity", "longest", *orders, title="prompt tokens computed over the least"
    )
    places: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        place = tuple(row[key] for key in ("batch", "percent", "running", "capacity", "longest"))
        places.setdefault(place, {})[row["order"]] = row
    for (batch, percent, running, *sizes), found in places.items():
        ratios = (f"{found[name]['ratio']:.3f}" for name in orders)
        shown.add_row(batch, f"{percent:g}", str(running), *(f"{size:,}" for size in sizes), *ratios)
    return shown


def ends_table(rows: Sequence[Row]) -> Table:
    """Builds a table with a line for each short batch."""
    orders = [key for key in rows[0] if key not in ("batch", "prompts", "running")]
    shown = Table("batch", "prompts", "running", *orders, title="steps of short batches over the least")
    for row in rows:
        ratios = (f"{row[name]:.2f}" for name in orders)
        shown.add_row(row["batch"], str(row["prompts"]), str(row["running"]), *ratios)
    return shown
