"""Compares rules for which recurrent states are kept, with few slots for them.

Replays sessions, generated workloads and given traces over the rules of `state_rules`. There is room for the KV of
everything, so a figure depends only on the states: it is the share of the prompts' blocks that hit, in percent, after
the first fifth of the requests. No model, no clock: the same seed gives the same figures everywhere.

Marks are where messages begin: after the system prompt, the tools or the document, and after each turn. Traces of files
tell nothing of that, so they have none; the answer of a request is what a later request adds to its prompt.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.table import Table

from bench.report import Report
from bench.state_rules import ALPHAS, Ask, Earlier, Marconi, Ours, Rule
from mainstem.replay.generate import Agents, BestOfN, Chat, Documents, Prompts, Tenants, generate
from mainstem.replay.generate import Workload as Generated
from mainstem.replay.readers.open import open_trace
from mainstem.replay.trace import Trace

PAGE = 16
MOST_BELOW = 0.5
"""Percentage points that a cell may be below another rule."""

Turn = tuple[list[int], list[int]]  # a prompt, and its answer
Workload = Callable[[random.Random, int], Iterator[Turn]]
Row = dict[str, Any]


class Tokens:
    """Generates new tokens."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def sessions(count: int, *, again: float = 0, edit: float = 0, system: int = 0, zipf: float = 0) -> Workload:
    """Chats that take turns at random; each ends after 30 turns.

    Args:
        count: concurrent chats.
        again: probability that the last answer is requested again.
        edit: probability that the last question is rephrased.
        system: tokens of a system prompt that all chats share.
        zipf: exponent of the popularity of chats; 0: all equal.
    """

    def run(rng: random.Random, requests: int) -> Iterator[Turn]:
        new = Tokens()
        beginning = new(system)
        chats = [[beginning] for _ in range(count)]
        asked = [beginning] * count
        weights = [1 / (rank + 1) ** zipf for rank in range(count)]
        for _ in range(requests):
            at = rng.choices(range(count), weights)[0]
            if len(chats[at]) > 30:
                chats[at] = [beginning]
            chat, roll = chats[at], rng.random()
            if len(chat) > 1 and roll < again:
                chat.pop()
                prompt = asked[at]
            else:
                if len(chat) > 2 and roll < again + edit:
                    chat.pop()
                prompt = chat[-1] + new(rng.randint(2 * PAGE, 13 * PAGE))
            answer = new(rng.randint(2 * PAGE, 9 * PAGE))
            asked[at] = prompt
            chat.append(prompt + answer)
            yield prompt, answer

    return run


def documents(count: int, *, zipf: float, max_pages: int, follow_up: float) -> Workload:
    """Questions about documents, some of them with follow-ups."""

    def run(rng: random.Random, requests: int) -> Iterator[Turn]:
        new = Tokens()
        texts = [new(PAGE * rng.randint(20, max_pages)) for _ in range(count)]
        weights = [1 / (rank + 1) ** zipf for rank in range(count)]
        recent: list[list[int]] = []
        for _ in range(requests):
            if recent and rng.random() < follow_up:
                text = recent.pop(rng.randrange(len(recent)))
            else:
                text = texts[rng.choices(range(count), weights)[0]]
            prompt, answer = text + new(rng.randint(PAGE, 4 * PAGE)), new(rng.randint(PAGE, 5 * PAGE))
            recent = [*recent, prompt + answer][-40:]
            yield prompt, answer

    return run


def agents(count: int, *, branches: float) -> Workload:
    """Agents of four kinds, each kind with its tools; sometimes an agent forks its history."""

    def run(rng: random.Random, requests: int) -> Iterator[Turn]:
        new = Tokens()
        tools = [new(64 * PAGE) for _ in range(4)]
        histories: list[list[int]] = []
        for _ in range(requests):
            while len(histories) < count:
                histories.append(rng.choice(tools))
            at = rng.randrange(len(histories))
            prompt, answer = histories[at] + new(rng.randint(PAGE, 20 * PAGE)), new(rng.randint(8, 4 * PAGE))
            histories[at] = prompt + answer
            if rng.random() < branches:
                histories.append(prompt)
            if rng.random() < 0.04:
                del histories[at]
            histories = histories[-2 * count :]
            yield prompt, answer

    return run


SESSIONS: dict[str, Workload] = {
    "50 chats": sessions(50),
    "50 chats, 20 % ask again": sessions(50, again=0.2),
    "50 chats, 20 % edit": sessions(50, edit=0.2),
    "200 chats, one system prompt": sessions(200, system=64 * PAGE, zipf=1.0),
    "100 documents": documents(100, zipf=0.8, max_pages=200, follow_up=0.3),
    "30 documents, follow-ups": documents(30, zipf=0.6, max_pages=100, follow_up=0.7),
    "20 agents": agents(20, branches=0.2),
    "20 agents, many branches": agents(20, branches=0.5),
}
GENERATED: dict[str, tuple[Generated, int]] = {
    "chat": (Chat(), 128),
    "chat, slow": (Chat(turns=4.0, think_s=600.0, think_sigma=1.5), 128),
    "agents": (Agents(), 512),
    "documents": (Documents(), 512),
    "documents, drifting": (Documents(drift_s=600.0, zipf=1.1), 512),
    "prompts": (Prompts(prompts=300, zipf=0.9), 256),
    "best of n": (BestOfN(), 128),
    "tenants": (Tenants(), 256),
}
"""Workloads of the replay by name, each with a block size that suits its lengths."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        sessions: names from `SESSIONS`.
        generated: names from `GENERATED`.
        traces: files, see `mainstem.replay.readers.open`.
        requests: of each workload; at most, of a file.
        percents: slots in percent of the requests.
        seed: seed of all workloads.
    """

    sessions: tuple[str, ...] = tuple(SESSIONS)
    generated: tuple[str, ...] = tuple(GENERATED)
    traces: tuple[str, ...] = ()
    requests: int = 1500
    percents: tuple[float, ...] = (3, 10)
    seed: int = 1


QUICK = Settings(requests=300)


def run(settings: Settings, report: Report) -> None:
    """Replays everything; adds a row for each cell, the goals and the table to the report.

    Raises:
        OSError, TraceError: a file cannot be read, or is not a trace.
    """
    report.settings.update(asdict(settings) | {"traces": [_stem(path) for path in settings.traces]})
    for name, block_tokens, asks in workloads(settings):
        report.progress(f"states: {name}")
        for percent in settings.percents:
            slots = max(4, int(len(asks) * percent / 100))
            report.rows.append({"workload": name, "slots": slots, **measure(asks, slots, block_tokens)})
    report.more["goals"] = judge(report.rows)
    report.tables.append(table(report.rows))


def workloads(settings: Settings) -> Iterator[tuple[str, int, list[Ask]]]:
    """Yields names, tokens of a block, and requests."""
    for name in settings.sessions:
        rng = random.Random(settings.seed)
        yield name, PAGE, [ask_of(*turn) for turn in SESSIONS[name](rng, settings.requests)]
    for name in settings.generated:
        workload, block = GENERATED[name]
        trace = generate(workload, settings.requests, seed=settings.seed, block_size=block)
        lengths = workload.requests(np.random.SeedSequence(settings.seed), settings.requests).lengths
        yield f"generated: {name}", block, asks_of(trace, [np.cumsum(row)[:-1].tolist() for row in lengths])
    for path in settings.traces:
        trace = open_trace(path)
        yield f"trace: {_stem(path)}", trace.block_size, asks_of(trace)[: 3 * settings.requests]


def _stem(path: str) -> str:
    return Path(path).name.partition(".")[0]


def measure(asks: Sequence[Ask], slots: int, block_tokens: int) -> Row:
    """Returns the hits of each rule in percent, what our rule keeps for a request, and the best alpha of Marconi."""
    rules: Mapping[str, Callable[[], Rule]] = {
        "marks": partial(Ours, slots),
        "unmarked": partial(Ours, slots, marks=False),
        "earlier": partial(Earlier, slots),
    }
    made = {name: rule() for name, rule in rules.items()}
    row: Row = {name: found(rule, asks) for name, rule in made.items()}
    row["kept"] = {name: rule.kept / len(asks) for name, rule in made.items()}
    tried = {alpha: found(Marconi(slots, alpha, block_tokens), asks) for alpha in ALPHAS}
    row["alpha"] = max(tried, key=tried.__getitem__)
    return row | {"marconi": tried[row["alpha"]]}


def found(rule: Rule, asks: Sequence[Ask]) -> float:
    """Serves the requests; returns the blocks of their prompts that hit, in percent, without the first fifth."""
    hits = [rule.serve(ask) for ask in asks]
    counted = slice(len(asks) // 5, None)
    return 100 * sum(hits[counted]) / max(1, sum(ask.end for ask in asks[counted]))


def judge(rows: Sequence[Row]) -> list[Row]:
    """Returns the goals: with marks, how far below the other rules at worst, and how far above in the mean."""
    goals = []
    for other in ("earlier", "marconi"):
        ahead = [row["marks"] - row[other] for row in rows]
        for what, goal, value in (
            ("below {} at worst", MOST_BELOW, -min(ahead)),
            ("below {} in the mean", 0, -mean(ahead)),
        ):
            goals.append({
                "what": f"states: hits {what.format(other)}", "goal": goal, "unit": "points", "measured": value,
                "met": value <= goal,
            })  # fmt: skip
    return goals


# ---------------------------------------------------------------- requests


def ask_of(prompt: Sequence[int], answer: Sequence[int]) -> Ask:
    """Returns a turn in blocks. Texts are runs of new tokens: a message begins where a run does."""
    tokens = [*prompt, *answer]
    last = (len(tokens) - 1) // PAGE
    begins = {at // PAGE for at, (one, next_) in enumerate(pairwise(prompt), 1) if next_ != one + 1}
    return Ask([tokens[at * PAGE] for at in range(last)], (len(prompt) - 1) // PAGE, tuple(sorted(begins)))


def asks_of(trace: Trace, boundaries: Sequence[Sequence[int]] | None = None) -> list[Ask]:
    """Returns the requests of a trace.

    Args:
        trace: requests of a chat follow each other; where chats are unknown, a request goes on with the first later one
            that begins with all its whole blocks and is long enough.
        boundaries: tokens before each message of each request, besides the turns of its chat; None: there are no marks.
    """
    batches = list(trace.batches())
    given = [int(tokens) for batch in batches for tokens in batch.input_tokens]
    ends = [
        a + int(tokens) for a, tokens in zip(given, (t for batch in batches for t in batch.output_tokens), strict=True)
    ]
    chats = [int(chat) for batch in batches for chat in batch.chat]
    paths = [batch.blocks[begin:end].tolist() for batch in batches for begin, end in pairwise(batch.offsets.tolist())]
    size = trace.block_size
    next_of = _next_turns(chats, paths, given, ends, size) if boundaries is None else _next_in_chat(chats)
    turns: defaultdict[int, list[int]] = defaultdict(list)
    asks = []
    for at, path in enumerate(paths):
        last = (ends[at] - 1) // size
        whole = path[: given[at] // size]
        if (following := next_of.get(at)) is not None:
            whole += paths[following][len(whole) : last]
        whole += [(at << 32) + i for i in range(last - len(whole))]
        marks = [] if boundaries is None else [*boundaries[at], *turns[chats[at]]]
        if chats[at] >= 0:
            turns[chats[at]] += [given[at], ends[at]]
        asks.append(Ask(whole[:last], (given[at] - 1) // size, tuple(sorted({mark // size for mark in marks}))))
    return asks


def _next_in_chat(chats: Sequence[int]) -> dict[int, int]:
    """Returns the next request of each request's chat."""
    found, latest = {}, dict[int, int]()
    for at, chat in enumerate(chats):
        if chat >= 0 and chat in latest:
            found[latest[chat]] = at
        latest[chat] = at
    return found


def _next_turns(
    chats: Sequence[int], paths: Sequence[Sequence[int]], given: Sequence[int], ends: Sequence[int], size: int
) -> dict[int, int]:
    """Returns the same where chats are unknown, by the names of blocks, which cover all before them."""
    if any(chat >= 0 for chat in chats):
        return _next_in_chat(chats)
    found: dict[int, int] = {}
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    for at, path in enumerate(paths):
        for block in path:
            left = [one for one in waiting.get(block, ()) if ends[one] > given[at]]
            found |= dict.fromkeys(set(waiting.pop(block, ())) - set(left), at)
            if left:
                waiting[block] = left
        if whole := given[at] // size:
            waiting[path[whole - 1]].append(at)
    return found


# ---------------------------------------------------------------- the table


def table(rows: Sequence[Row]) -> Table:
    """All cells, for the terminal."""
    shown = Table("workload", "slots", "with marks", "without", "earlier rule", "Marconi", "alpha", title="hits, %")
    for row in rows:
        shares = (f"{row[name]:.1f}" for name in ("marks", "unmarked", "earlier", "marconi"))
        shown.add_row(row["workload"], f"{row['slots']:,}", *shares, f"{row['alpha']:g}")
    return shown
