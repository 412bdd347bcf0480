"""What the pages of other processes save: time to the first token, and prefill and decode apart.

    first   one server computes a prompt. Others then get it from that peer, from the store of both, or compute it
    apart   prompts arrive while answers are made: by one server, by two that do both, by one for each

Servers are processes that talk over loopback, and the client measures what one of its users waits for. The model is
real, prompts are random tokens. Ways take turns, in another order each round; ratios are of one round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
from rich.table import Table

from bench.client import Answer, Prompt
from bench.report import Report

PEER, STORE, COMPUTING = "a peer", "the store", "computing"
ONE, BOTH, APART = "one server", "two servers that do both", "prefill and decode apart"
PAGE = 16
_READ_SHARE = 0.9  # of a prompt, that must have been read where it is said to be
_VOCABULARY = 40_000  # ids below are ordinary tokens of the model

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of both parts. Lengths are in tokens.

    Args:
        lengths: of prompts that travel.
        rounds: prompts of each length, after one that is not counted.
        threads: of each server whose prompts travel, and of all servers together that divide the work.
        prompt, answer: of a request that arrives while others are answered.
        requests: how many arrive.
        gap: mean time between two of them, over the time that one thread takes for a prompt.
        dtype: type of the weights.
        seed: of prompts and arrivals.
    """

    lengths: tuple[int, ...] = (512, 2048, 4096)
    rounds: int = 5
    threads: int = 2
    prompt: int = 512
    answer: int = 48
    requests: int = 20
    gap: float = 1.6
    dtype: str = "bfloat16"
    seed: int = 0


QUICK = Settings(lengths=(512,), rounds=2, prompt=256, answer=16, requests=4)


class Server(Protocol):
    """A server under measurement; see `hosted.Hosted`."""

    url: str

    def ask(self, prompts: Sequence[Prompt], tokens: int, after_s: Sequence[float] = ()) -> list[Answer]:
        """Sends prompts, each after so many seconds, and waits for all answers."""

    def settle(self) -> Mapping[str, Any]:
        """Waits until nothing moves between tiers, and returns the counts of the tiers."""


Start = Callable[[str, str], AbstractContextManager[Server]]
"""Starts a server with a name and the flags of `mainstem serve`."""


class Prompts:
    """Prompts that share nothing."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def draw(self, length: int) -> list[int]:
        """Returns a new one."""
        return [int(token) for token in self.random.integers(1000, _VOCABULARY, length)]


# ---------------------------------------------------------------- the first token


def first(settings: Settings, report: Report, start: Start, listen: str, store: str) -> None:
    """Measures how long the first token of a prompt takes that another server has computed; adds `first` and a table.

    Args:
        settings: of the benchmark.
        report: gets rows; a way that did not read what it should have is a failure.
        start: starts servers.
        listen: HOST:PORT where the one that computes gives its pages.
        store: that it has in common with the others.
    """
    common = f"--threads {settings.threads} --dtype {settings.dtype} --kv-bytes 512MiB"
    reads = f"{common} --host-bytes 512MiB --prefetch wait_complete --prefetch-min-tokens {PAGE}"
    flags = {PEER: f"{reads} --peers {listen} --peer-timeout-s 30", STORE: f"{reads} --storage {store}"}
    rows: list[Row] = []
    with ExitStack() as stack:
        gives = f"{common} --host-bytes 512MiB --peer-listen {listen} --peer-share 1 --storage {store}"
        giver = stack.enter_context(start("giver", gives))
        ways = {way: stack.enter_context(start(way, each)) for way, each in {**flags, COMPUTING: common}.items()}
        prompts = Prompts(settings.seed)
        for length in settings.lengths:
            rounds: list[dict[str, float]] = []
            for number in range(settings.rounds + 1):
                report.progress(f"fleet: first token, {length} tokens, round {number} of {settings.rounds}")
                tokens = prompts.draw(length)
                giver.ask([tokens], 1)
                giver.settle()
                order = [*ways][number % 3 :] + [*ways][: number % 3]
                rounds.append({way: _first_s(way, ways[way], tokens, report) for way in order})
            rows += [_first_row(length, way, rounds[1:]) for way in ways]
    report.more["first"] = rows
    report.tables.append(first_table(rows))


def _first_s(way: str, server: Server, tokens: list[int], report: Report) -> float:
    before = 0 if way == COMPUTING else server.settle()["prefetched"]
    (answer,) = server.ask([tokens], 1)
    if way != COMPUTING:
        read = PAGE * (server.settle()["prefetched"] - before)
        if read < _READ_SHARE * len(tokens):
            report.failures.append(f"{way}: {read} of {len(tokens)} tokens were read")
    return answer.first_s - answer.sent_s


def _first_row(length: int, way: str, rounds: Sequence[Mapping[str, float]]) -> Row:
    times = [each[way] for each in rounds]
    ratio = median(each[COMPUTING] / each[way] for each in rounds)
    return {
        "tokens": length, "way": way, "p50_s": median(times), "least_s": min(times), "most_s": max(times),
        "sooner": ratio, "repeats": len(times),
    }  # fmt: skip


def first_table(rows: Sequence[Row]) -> Table:
    """Builds a table with one line for each length and way."""
    title = "first token of a prompt that another server has computed, s"
    shown = Table("tokens", "by", "median", "least to most", "times sooner than computing", title=title)
    for row in rows:
        spread = f"{row['least_s']:.3f} to {row['most_s']:.3f}"
        shown.add_row(f"{row['tokens']:,}", row["way"], f"{row['p50_s']:.3f}", spread, f"{row['sooner']:.1f}")
    return shown


# ---------------------------------------------------------------- prefill and decode


def apart(settings: Settings, report: Report, start: Start, listen: str) -> None:
    """Measures requests that arrive while others are answered, by servers that divide them in three ways; adds `apart`
    and a table.

    Args:
        settings: of the benchmark.
        report: gets rows.
        start: starts servers.
        listen: HOST:PORT where the one that computes prompts gives their pages.
    """
    common = f"--dtype {settings.dtype} --kv-bytes 512MiB --threads"
    each, prompts = max(1, settings.threads // 2), Prompts(settings.seed + 1)
    rows: list[Row] = []

    def note(way: str, servers: Sequence[Server], gap_s: float) -> None:
        report.progress(f"fleet: {way}, {settings.requests} requests, one each {gap_s:.1f} s")
        for server in servers:
            server.ask([prompts.draw(settings.prompt)], 2)  # the first one is slower
        rows.append(_apart_row(way, _arrive(settings, servers, prompts, gap_s), gap_s))

    with start("a", f"{common} {each}") as one:
        alone = [one.ask([prompts.draw(settings.prompt)], 1)[0] for _ in range(3)]
        gap_s = settings.gap * median(answer.first_s - answer.sent_s for answer in alone[1:])
        with start("b", f"{common} {each}") as other:
            note(BOTH, [one, other], gap_s)
    with start("prefill", f"{common} {each} --role prefill --peer-listen {listen} --peer-share 1") as prefill:
        reads = f"--peers {listen} --peer-timeout-s 30 --prefetch wait_complete --prefetch-min-tokens {PAGE}"
        decode = f"{common} {each} --role decode {reads} --prefill-url {prefill.url} --prefill-min-bytes 0"
        with start("decode", decode) as server:
            note(APART, [server], gap_s)
    with start("whole", f"{common} {settings.threads}") as server:
        note(ONE, [server], gap_s)
    report.more["apart"] = rows
    report.tables.append(apart_table(rows))


def _arrive(settings: Settings, servers: Sequence[Server], prompts: Prompts, gap_s: float) -> list[Answer]:
    """Lets requests arrive, each server's in turn; at the same moments for every way."""
    count = settings.requests
    after_s = np.cumsum(np.random.default_rng(settings.seed).exponential(gap_s, count)).tolist()
    given = [prompts.draw(settings.prompt) for _ in range(count)]
    every = len(servers)
    with ThreadPoolExecutor(every) as pool:
        asked = [
            pool.submit(server.ask, given[at::every], settings.answer, after_s[at::every])
            for at, server in enumerate(servers)
        ]
        return [answer for one in asked for answer in one.result()]


def _apart_row(way: str, answers: Sequence[Answer], gap_s: float) -> Row:
    first_s = sorted(answer.first_s - answer.sent_s for answer in answers)
    token_s = sorted((answer.last_s - answer.first_s) / max(1, answer.tokens - 1) for answer in answers)
    return {
        "way": way, "requests": len(answers), "gap_s": gap_s,
        "first_p50_s": median(first_s), "first_most_s": first_s[-1],
        "token_p50_s": median(token_s), "token_most_s": token_s[-1],
    }  # fmt: skip


def apart_table(rows: Sequence[Row]) -> Table:
    """Builds a table with one line for each way to divide the work."""
    title = "requests that arrive while others are answered; the cores are the same"
    shown = Table("", "first token, s", "most", "each token, ms", "most", title=title)
    for row in rows:
        shown.add_row(
            row["way"], f"{row['first_p50_s']:.2f}", f"{row['first_most_s']:.2f}", f"{1000 * row['token_p50_s']:.0f}",
            f"{1000 * row['token_most_s']:.0f}",
        )  # fmt: skip
    return shown


# ---------------------------------------------------------------- processes


def run(settings: Settings, report: Report, parts: Sequence[str]) -> None:
    """Measures the parts, `first` and `apart`, with servers over loopback."""
    from rigs.servers import free_port

    from bench.hosted import SYSTEMS, Hosted, System
    from mainstem.runtime.models.loading import load_model

    loaded = load_model(dtype=settings.dtype)
    model = Path(str(loaded.model.config.name_or_path))
    del loaded  # its memory is for the servers

    with TemporaryDirectory() as folder:

        def start(name: str, flags: str) -> AbstractContextManager[Server]:
            command = f"-m mainstem.cli serve {{model}} --port {{port}} {flags}"
            system = System(name, ("mainstem",), Path(sys.executable), command, SYSTEMS[0].body)
            return Hosted(system, model, Path(folder, name.replace(" ", "-")), stopped=False)

        if "first" in parts:
            store = f"shared+file:{Path(folder, 'store')}?capacity=4GiB"
            first(settings, report, start, f"127.0.0.1:{free_port()}", store)
        if "apart" in parts:
            apart(settings, report, start, f"127.0.0.1:{free_port()}")
