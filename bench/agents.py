"""Agents in virtual time: what hints of the next use are worth, and what wrong ones cost.

    lru, ...        without hints
    hints           each request says when its prefix is used next, as far as its client can know
    shuffled        the same times, each said by another request
    inverted        soon is said where it is late, and late where it is soon
    optimum         the offline optimum over the order in which `lru` served: it knows all, and locks nothing; but no
                    more than a cache with room for all found, which also waits for what is computed at the same time
    unlimited       a cache with room for all: no policy has shorter first tokens

The scheduler, the cache and the core are the real ones; the model only takes time. Tokens, pages and answers are blocks
of `block_tokens` tokens. A job asks again when its answers and its tools are there, so that hits make jobs shorter. A
client knows which tool it waits for, and how long that takes as a rule; how many steps of a workflow come before an
agent's next turn; that a job is over. A row is a function of the settings.

Two times to the first token are reported. `first` is measured, from a request's arrival to its first token, and has the
wait for others in it. `prefill` is computed, from the blocks that a request did not find, as if it were alone: the
optimum, which nothing serves, has only this one. The optimum has the most hits, not the shortest tail.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

import numpy as np
import torch
from rich.table import Table

from bench.report import Report
from bench.tables import goals_table
from bench.virtual import prefill_s
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.replay.readers.open import open_trace
from mainstem.replay.simulate.optimum import Optimum
from mainstem.replay.trace import Batch, Trace
from mainstem.runtime.request import Delta, Hints, Request
from mainstem.runtime.schedule.scheduler import Scheduler
from mainstem.runtime.segments import Segment
from mainstem.settings.engine import Limits, SamplingParams

MIN_GAP = 0.5
"""Percentage points of hits; a share of a smaller gap is meaningless."""
LEAST_CLOSED, MOST_LOST = 50.0, 0.3
LONGEST_TAIL = 75.0
"""Percent of the 90th percentile that `lru` has, of the first token as it is computed."""
WRONG = ("shuffled", "inverted")
BOUNDS = ("optimum", "unlimited")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_NEVER_S = 86_400.0
_NO_HINTS = Hints()

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark. Times are about those of a model of 8 billion parameters on one GPU.

    Args:
        percents: capacities in percent of the distinct blocks.
        jobs: of each generated workload; of those with many requests, half.
        workloads: names from `WORKLOADS`.
        policies: with hints and without.
        traces: files of recorded requests, see `mainstem.replay.readers.open`: each asks when it asked, with wrong
            hints or none.
        trace_requests: how many of each.
        block_tokens: tokens of a block.
        token_s: seconds that a token of a prompt takes at its beginning.
        doubled_at: position at which it takes twice as long.
        decode_s: seconds of a step that decodes.
        running: requests at once.
        seeds: of the workloads, and of wrong hints; a row is the mean of all. Of a trace, each begins later, by half
            the requests. One seed says little: who goes next depends on all that went before, so any change moves the
            hit rate by some tenths of a point, for better or worse.
    """

    percents: tuple[float, ...] = (1, 2, 5, 10)
    jobs: int = 240
    workloads: tuple[str, ...] = ("react", "workflow", "tree", "rag")
    policies: tuple[str, ...] = ("lru", "gittins", "tail")
    traces: tuple[str, ...] = ()
    trace_requests: int = 4000
    block_tokens: int = 32
    token_s: float = 1e-4
    doubled_at: int = 32768
    decode_s: float = 0.01
    running: int = 4
    seeds: tuple[int, ...] = (0, 1, 2, 3)

    def seconds(self, begin: int, end: int) -> float:
        """Returns what the blocks [begin, end) of a prompt take."""
        tokens, context = (end - begin) * self.block_tokens, begin * self.block_tokens
        return prefill_s(tokens, context, self.token_s, self.doubled_at)


QUICK = Settings(percents=(2, 10), jobs=40, trace_requests=400, seeds=(0,))


# ---------------------------------------------------------------- workloads


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A request of a job.

    Args:
        prompt: the blocks.
        answer: blocks that are generated; all of them are block 0.
        pause_s: between the end of the stage before and the request.
        next_s: what the client says after its end: in how many seconds its prefix is used next.
        next_steps: the same in steps of its workflow.
    """

    prompt: tuple[int, ...]
    answer: int
    pause_s: float = 0.0
    next_s: float | None = None
    next_steps: float | None = None

    @property
    def whole(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt + (0,) * self.answer


@dataclass(slots=True, eq=False)
class Job:
    """Stages of requests: those of a stage are sent at once, when all of the stage before have ended."""

    start_s: float
    stages: list[list[Call]] = field(default_factory=list)


class _Blocks:
    """Blocks that nobody had before."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def new(self, count: int) -> tuple[int, ...]:
        """Returns so many."""
        return tuple(itertools.islice(self._next, count))


TOOLS = (
    ("read a file", 1.0, 0.55),
    ("search", 6.0, 0.25),
    ("run the tests", 45.0, 0.15),
    ("ask a person", 300.0, 0.05),
)
"""Tools of an agent: the median of how long each takes, in seconds, and how often it is called."""


def react(draw: random.Random, jobs: int) -> Iterator[Job]:
    """Agents that think and call a tool, step by step: the context grows, and pauses depend on the tool.

    Three kinds of agents with a system prompt each; 12 steps on average. The client knows which tool runs, and its
    median time, of which the real one differs by a factor of 1.6 (one sigma).
    """
    blocks = _Blocks()
    kinds = [blocks.new(90) for _ in range(3)]
    for start_s in _starts(draw, jobs, every_s=8.0):
        job, context = Job(start_s), draw.choice(kinds) + blocks.new(draw.randint(4, 20))
        steps, pause_s = 1 + min(24, int(draw.expovariate(1 / 11))), 0.0
        for step in range(steps):
            _, median_s, _ = draw.choices(TOOLS, [share for *_, share in TOOLS])[0]
            last = step == steps - 1
            call = Call(context, draw.randint(1, 5), pause_s, next_s=_NEVER_S if last else median_s)
            job.stages.append([call])
            pause_s = draw.lognormvariate(0, 0.5) * median_s
            context = call.whole + blocks.new(_length(draw, 8, 60))
        yield job


def workflow(draw: random.Random, jobs: int) -> Iterator[Job]:
    """Workflows of five agents that take turns, four rounds each, as in KVFlow (arXiv 2507.07400).

    An agent has instructions that all workflows share, and a history of its own: it reads what the others have said
    since its last turn. The client knows after how many steps it runs again.
    """
    blocks = _Blocks()
    agents = [blocks.new(60) for _ in range(5)]
    for start_s in _starts(draw, jobs, every_s=11.0):
        job, task = Job(start_s), blocks.new(draw.randint(6, 24))
        contexts = [instructions + task for instructions in agents]
        rounds = 4
        for turn in range(rounds * len(agents)):
            at, last = turn % len(agents), turn >= (rounds - 1) * len(agents)
            steps = None if last else float(len(agents))
            call = Call(contexts[at], draw.randint(2, 8), 0.2, _NEVER_S if last else None, steps)
            job.stages.append([call])
            said = blocks.new(draw.randint(2, 8))
            contexts = [context + said if other != at else call.whole for other, context in enumerate(contexts)]
        yield job


def tree(draw: random.Random, jobs: int) -> Iterator[Job]:
    """Trees of thoughts: from each of the two best thoughts five are tried at once, three levels deep, then scored.

    The client scores thoughts by short requests, whose answers are used once, and goes on from the two best. It knows
    then that the others are over, and that a stage lasts as long as three of its requests.
    """
    blocks = _Blocks()
    shared = blocks.new(40)
    for start_s in _starts(draw, max(1, jobs // 2), every_s=22.0):
        job = Job(start_s)
        best = [shared + blocks.new(draw.randint(30, 90))]
        for level in range(3):
            tried = [
                Call(thought + blocks.new(1), draw.randint(4, 10), next_steps=3) for thought in best for _ in range(5)
            ]
            job.stages.append(tried)
            kept = set(draw.sample(range(len(tried)), min(2, len(tried))))
            ends = [level < 2 and at in kept for at in range(len(tried))]
            scored = [
                Call(call.whole + blocks.new(2), 1, 0.0, None if goes_on else _NEVER_S, 3 if goes_on else None)
                for call, goes_on in zip(tried, ends, strict=True)
            ]
            job.stages.append(scored)
            best = [call.whole for call, goes_on in zip(tried, ends, strict=True) if goes_on]
        yield job


def rag(draw: random.Random, jobs: int) -> Iterator[Job]:
    """Agents that look up documents until they can answer: of 400 by Zipf's law, one more in each of about eight turns.

    A look-up takes about 15 seconds, of which the real time differs by a factor of 1.5 (one sigma). The client knows
    when a job is over.
    """
    blocks = _Blocks()
    instructions = blocks.new(24)
    documents = [blocks.new(draw.randint(10, 40)) for _ in range(400)]
    popular = [1 / (rank + 1) ** 0.9 for rank in range(len(documents))]
    for start_s in _starts(draw, jobs, every_s=6.0):
        job, context = Job(start_s), instructions + blocks.new(draw.randint(1, 4))
        turns = 1 + min(12, int(draw.expovariate(1 / 7)))
        for turn in range(turns):
            pause_s = draw.lognormvariate(0, 0.4) * 15.0 if turn else 0.0
            last = turn == turns - 1
            call = Call(context, draw.randint(3, 12) if last else 2, pause_s, _NEVER_S if last else 15.0)
            job.stages.append([call])
            context = call.whole + draw.choices(documents, popular)[0]
        yield job


WORKLOADS: dict[str, Callable[[random.Random, int], Iterator[Job]]] = {
    "react": react, "workflow": workflow, "tree": tree, "rag": rag,
}  # fmt: skip


def recorded(path: str, requests: int, seed: int) -> list[Job]:
    """Returns requests of a trace as jobs of one request; hints are times of no meaning. See `Settings.seeds`."""
    draw = random.Random(seed)
    jobs: list[Job] = []
    names: dict[int, int] = {}
    before = seed * (requests // 2)
    for batch in open_trace(path).batches():
        first = min(before, len(batch))
        before -= first
        for at in range(first, min(len(batch), first + requests - len(jobs))):
            blocks = batch.blocks[batch.offsets[at] : batch.offsets[at + 1]].tolist()
            prompt = tuple(names.setdefault(block, len(names) + 1) for block in blocks)
            call = Call(prompt, 0, next_s=draw.lognormvariate(3, 2))
            jobs.append(Job(float(batch.time_s[at]), [[call]]))
    return jobs


def _starts(draw: random.Random, jobs: int, every_s: float) -> Iterator[float]:
    at_s = 0.0
    for _ in range(jobs):
        yield at_s
        at_s += draw.expovariate(1 / every_s)


def _length(draw: random.Random, median: float, most: int) -> int:
    return max(1, min(most, round(draw.lognormvariate(0, 1) * median)))


# ---------------------------------------------------------------- a server in virtual time


class _Model:
    """A runner that only takes time."""

    vocab_size = 8

    def __init__(self, settings: Settings) -> None:
        self._settings, self.now_s = settings, 0.0

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        settings = self._settings
        decodes = [segment for segment in segments if len(segment.tokens) == 1 and segment.logits]
        for segment in segments:
            self.now_s += settings.seconds(segment.start, segment.start + len(segment.tokens))
        self.now_s += settings.decode_s * (settings.block_tokens if decodes else 1)
        return torch.zeros(sum(segment.logits for segment in segments), self.vocab_size)

    def embed(self, segment: Segment) -> None:
        """Does nothing: there are no images."""


class _Text:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: object) -> str:
        return "x" * len(token_ids)


@dataclass(slots=True)
class Served:
    """What a run has served.

    Args:
        calls: in the order in which they were admitted, with the blocks of each prompt that were cached.
        first_s: [calls] from the arrival of each to its first token.
        jobs_s: from the start of each job to its end.
        won, lost: blocks found and missed because hints were followed.
    """

    calls: list[tuple[Call, int]]
    first_s: list[float]
    jobs_s: list[float]
    won: int
    lost: int

    @property
    def hit_rate(self) -> float:
        """Blocks of prompts that were cached, in percent."""
        return 100 * sum(hit for _, hit in self.calls) / sum(len(call.prompt) for call, _ in self.calls)

    def saved(self, settings: Settings) -> float:
        """Returns the work of prefills that hits saved, in percent."""
        whole = sum(settings.seconds(0, len(call.prompt)) for call, _ in self.calls)
        return 100 * sum(settings.seconds(0, hit) for _, hit in self.calls) / whole

    def tails(self, settings: Settings) -> Row:
        """Returns quantiles of the time to the first token: of the measured one, if any, and of the computed one."""
        alone = [settings.seconds(hit, len(call.prompt)) for call, hit in self.calls]
        return {
            f"{name}_{quantile}_s": float(np.quantile(seconds, share))
            for name, seconds in (("first", self.first_s), ("prefill", alone)) if seconds
            for quantile, share in QUANTILES.items()
        }  # fmt: skip


def serve(settings: Settings, jobs: Sequence[Job], blocks: int, policy: str, says: dict[Call, Hints]) -> Served:
    """Serves all jobs by one server.

    Args:
        settings: the settings.
        jobs: in order of their starts.
        blocks: the capacity of the cache.
        policy: its policy.
        says: the hints of requests.
    """
    torch.set_num_threads(1)  # its tensors have few numbers
    model = _Model(settings)
    cache = PrefixCache(blocks, 1, policy=policy)
    longest = max(len(call.whole) for job in jobs for stage in job.stages for call in stage)
    scheduler = Scheduler(
        cache,
        model,
        _Text(),
        Limits(draft_tokens=0, max_running=settings.running, token_budget=128),
        max_context=longest + 1,
        clock=lambda: model.now_s,
        random=random.Random(0),
    )
    numbers = itertools.count()
    due: list[tuple[float, int, Call, int]] = []  # when, a number, the request, its job
    stage, left, ended = [0] * len(jobs), [0] * len(jobs), [0.0] * len(jobs)
    under_way: dict[str, tuple[Call, int]] = {}
    arrived: dict[str, float] = {}  # of those without a first token
    waited: dict[str, float] = {}
    calls: list[tuple[Call, int]] = []
    first_s: list[float] = []

    def begin(at: int, now_s: float) -> None:
        now = jobs[at].stages[stage[at]]
        left[at] = len(now)
        for call in now:
            heapq.heappush(due, (now_s + call.pause_s, next(numbers), call, at))

    for at, job in enumerate(jobs):
        begin(at, job.start_s)
    while due or scheduler.busy:
        if not scheduler.busy:
            model.now_s = max(model.now_s, due[0][0])
        while due and due[0][0] <= model.now_s:
            when_s, number, call, at = heapq.heappop(due)
            under_way[str(number)], arrived[str(number)] = (call, at), when_s
            params = SamplingParams(max_tokens=call.answer, ignore_eos=True)
            request = Request(np.array(call.prompt, np.int32), params, hints=says.get(call, _NO_HINTS))
            scheduler.add(str(number), request, when_s)
        for id, what in scheduler.step():
            if isinstance(what, Delta) and id in arrived:
                waited[id] = model.now_s - arrived.pop(id)
            if not isinstance(what, Delta) or what.finish_reason is None:
                continue
            assert what.error is None and what.usage is not None, what.error
            call, at = under_way.pop(id)
            calls.append((call, what.usage.cached_tokens))
            first_s.append(waited.pop(id))
            left[at] -= 1
            if left[at]:
                continue
            stage[at] += 1
            if stage[at] < len(jobs[at].stages):
                begin(at, model.now_s)
            else:
                ended[at] = model.now_s - jobs[at].start_s
    stats = cache.stats().tree
    return Served(calls, first_s, ended, stats.advice_won, stats.advice_lost)


# ---------------------------------------------------------------- hints


def hinted(calls: Sequence[Call]) -> dict[Call, Hints]:
    """Returns what each client says."""
    return {call: Hints(next_use_s=call.next_s, next_use_steps=call.next_steps) for call in calls}


def shuffled(calls: Sequence[Call], seed: int) -> dict[Call, Hints]:
    """Returns what clients say, each for another request."""
    said = list(hinted(calls).values())
    random.Random(seed).shuffle(said)
    return dict(zip(calls, said, strict=True))


def inverted(calls: Sequence[Call]) -> dict[Call, Hints]:
    """Returns the worst: the sooner it is, the later it is said to be."""
    return {
        call: Hints(next_use_s=min(_NEVER_S, 600 / max(call.next_s, 0.1) if call.next_s is not None else _NEVER_S))
        for call in calls
    }


# ---------------------------------------------------------------- the run


def measure(settings: Settings, name: str, jobs: Sequence[Job], seed: int, *, true: bool = True) -> Iterator[Row]:
    """Yields the rows of a workload of one seed. `true`: its hints mean something."""
    calls = [call for job in jobs for stage in job.stages for call in stage]
    longest = max(len(call.whole) for call in calls)
    distinct = _trace(calls).distinct_blocks
    unlimited = serve(settings, jobs, distinct + longest, "lru", {})
    ways: dict[str, dict[Call, Hints]] = {"": {}}
    if true:
        ways |= {"hints": hinted(calls), "shuffled": shuffled(calls, seed), "inverted": inverted(calls)}
    else:
        ways |= {"shuffled": hinted(calls)}
    for percent in settings.percents:
        blocks = int(distinct * percent / 100)
        if blocks < 2 * longest:  # running requests lock most of it
            continue
        cell = {"workload": name, "percent": percent, "blocks": blocks, "requests": len(calls)}
        order = list(calls)
        for policy, (way, says) in itertools.product(settings.policies, ways.items()):
            served = serve(settings, jobs, blocks, policy, says)
            if policy == settings.policies[0] and not way:
                order = [call for call, _ in served.calls]
            yield {
                **cell, "policy": policy, "way": way, **_figures(settings, served),
                "job_s": mean(served.jobs_s), "job_p95_s": quantiles(served.jobs_s, n=20, method="inclusive")[-1],
                "won": served.won, "lost": served.lost,
            }  # fmt: skip
        best = Optimum(_trace(order)).hit_blocks(blocks)
        known = Served(
            [(call, min(int(hit), len(call.prompt) - 1)) for call, hit in zip(order, best, strict=True)], [], [], 0, 0
        )
        bound = _figures(settings, known)
        bound["hit_rate"] = min(unlimited.hit_rate, known.hit_rate)
        yield {**cell, "policy": "optimum", "way": "", **bound}
        yield {**cell, "policy": "unlimited", "way": "", **_figures(settings, unlimited)}


def _figures(settings: Settings, served: Served) -> Row:
    return {"hit_rate": served.hit_rate, "saved": served.saved(settings), **served.tails(settings)}


def _trace(calls: Sequence[Call]) -> Trace:
    """Returns the requests in this order, each with its answer; a name covers all blocks before."""
    names: dict[tuple[int, int], int] = {}
    paths = []
    for call in calls:
        path, above = [], 0
        for block in call.whole:
            above = names.setdefault((above, block), len(names) + 1)
            path.append(above)
        paths.append(path)
    return Trace.of(Batch.of(paths))


def judge(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Returns a cell for each workload and capacity, and the goals: what, goal, unit, measured, met.

    A cell has, for each policy, the share of the gap between `lru` and the optimum that hints close (None: it is
    smaller than `MIN_GAP`), and the points that wrong ones cost. `tail`: the 90th percentile of the computed time to
    the first token in percent of that of `lru`, where hits are not fewer by more than `MOST_LOST`; left out where a
    cache with room for all would not come below `LONGEST_TAIL`.
    """
    found = {(row["workload"], row["percent"], row["policy"], row["way"]): row for row in rows}
    cells = []
    for workload, percent in dict.fromkeys((row["workload"], row["percent"]) for row in rows):
        rate = {key[2:]: row["hit_rate"] for key, row in found.items() if key[:2] == (workload, percent)}
        gap = rate["optimum", ""] - rate["lru", ""]
        p90 = {key[2:]: row["prefill_p90_s"] for key, row in found.items() if key[:2] == (workload, percent)}
        shortest = 100 * p90["unlimited", ""] / p90["lru", ""]
        policies = dict.fromkeys(policy for policy, _ in rate if policy not in BOUNDS)
        cells.append({
            "workload": workload, "percent": percent, "gap": gap,
            "closed": {
                policy: min(100.0, 100 * (rate[policy, "hints"] - rate["lru", ""]) / gap)
                for policy in policies if gap >= MIN_GAP and (policy, "hints") in rate
            },
            "cost": {
                policy: max(rate[policy, ""] - rate[policy, way] for way in WRONG if (policy, way) in rate)
                for policy in policies
            },
            "tail": {
                f"{policy} with hints" if way else policy: 100 * p90[policy, way] / p90["lru", ""]
                for policy in policies for way in ("", "hints")
                if (policy, way) in rate and (policy, way) != ("lru", "") and shortest <= LONGEST_TAIL
                and rate[policy, way] >= rate["lru", ""] - MOST_LOST
            },
        })  # fmt: skip
    goals = []
    for policy in dict.fromkeys(policy for cell in cells for policy in cell["closed"]):
        left = [100 - cell["closed"][policy] for cell in cells if policy in cell["closed"]]
        for what, value in (("mean", mean(left)), ("worst", max(left))):
            goals.append(
                _goal(
                    f"{policy} with hints: the gap to the optimum that is left, {what}", 100 - LEAST_CLOSED, "%", value
                )
            )
    for policy in dict.fromkeys(policy for cell in cells for policy in cell["cost"]):
        worst = max(cell["cost"][policy] for cell in cells)
        goals.append(_goal(f"{policy} with wrong hints: what they cost at most", MOST_LOST, "points", worst))
    for name in dict.fromkeys(name for cell in cells for name in cell["tail"]):
        tails = [cell["tail"][name] for cell in cells if name in cell["tail"]]
        for what, value in (("mean", mean(tails)), ("worst", max(tails)), ("best", min(tails))):
            goals.append(
                _goal(f"{name}: P90 of first tokens over lru's at equal hits, {what}", LONGEST_TAIL, "%", value)
            )
    return cells, goals


def _goal(what: str, goal: float, unit: str, measured: float) -> Row:
    return {"what": what, "goal": goal, "unit": unit, "measured": measured, "met": measured <= goal}


def run(settings: Settings, report: Report) -> None:
    """Serves everything, and adds the rows, the cells and the goals to the report.

    Raises:
        OSError, TraceError: a file cannot be read, or is not a trace.
    """
    names = [Path(path).name.partition(".")[0] for path in settings.traces]
    report.settings.update(asdict(settings), traces=names)
    workloads = [(name, partial(_generated, settings, name), True) for name in settings.workloads]
    for name, path in zip(names, settings.traces, strict=True):
        workloads.append((name, partial(recorded, path, settings.trace_requests), False))
    tasks = [(settings, *workload, seed) for workload in workloads for seed in settings.seeds]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = []
        for task, rows in zip(tasks, pool.map(_measure, *zip(*tasks, strict=True)), strict=True):
            found.append(rows)
            report.progress(f"agents: {task[1]} {task[-1]}, {len(rows)} rows")
    for name, *_ in workloads:
        report.rows += _averaged_by_cell([rows for (_, of, *_), rows in zip(tasks, found, strict=True) if of == name])
    cells, goals = judge(report.rows)
    report.more |= {"cells": cells, "goals": goals}
    report.tables += [table(report.rows), goals_table(goals)]


def _generated(settings: Settings, name: str, seed: int) -> list[Job]:
    return list(WORKLOADS[name](random.Random(f"{seed} {name}"), settings.jobs))


def _measure(settings: Settings, name: str, jobs: Callable[[int], list[Job]], true: bool, seed: int) -> list[Row]:
    return list(measure(settings, name, jobs(seed), seed, true=true))


def _averaged_by_cell(by_seed: Sequence[Sequence[Row]]) -> list[Row]:
    """Returns a row for each cell that all seeds have."""
    found: dict[tuple[float, str, str], list[Row]] = {}
    for row in chain.from_iterable(by_seed):
        found.setdefault((row["percent"], row["policy"], row["way"]), []).append(row)
    return [averaged(rows) for rows in found.values() if len(rows) == len(by_seed)]


def averaged(rows: Sequence[Row]) -> Row:
    """Returns the mean of rows of the same cell, of which each has another seed."""
    return {
        name: value if len(rows) == 1 or isinstance(value, str) else mean(row[name] for row in rows)
        for name, value in rows[0].items()
    }


def quantiles_of(row: Row, name: str) -> str:
    """Returns the quantiles of "first" or "prefill" in seconds; a dash: the row has none."""
    names = [f"{name}_{quantile}_s" for quantile in QUANTILES]
    return " / ".join(f"{row[each]:.3g}" for each in names) if names[0] in row else "–"


def table(rows: Sequence[Row]) -> Table:
    """Builds a table of all rows for the terminal."""
    shown = Table(
        "workload", "%", "policy", "hints", "hits, %", "work saved, %", "first token p50 / p90 / p99, s", "computed, s",
        "job, s", "p95, s", "won", "lost",
    )  # fmt: skip
    for row in rows:
        times = [f"{row[name]:,.1f}" if name in row else "–" for name in ("job_s", "job_p95_s")]
        counts = [f"{row[name]:,}" if name in row else "–" for name in ("won", "lost")]
        rates = [f"{row[name]:.2f}" for name in ("hit_rate", "saved")]
        tails = [quantiles_of(row, name) for name in ("first", "prefill")]
        shown.add_row(
            row["workload"], f"{row['percent']:g}", row["policy"], row["way"], *rates, *tails, *times, *counts
        )
    return shown
