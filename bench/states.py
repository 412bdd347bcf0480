"""Measures hit rates with few slots for recurrent states.

    python -m bench.states [--requests N]

Runs sessions, documents and agents over a `PrefixCache` with room for all pages and few states. Keeps states at the end
of each prompt, at the end of each answer, and where prompts fork. A figure is the share of the prompts' tokens that
hit, after the first fifth of the requests. It depends on which state is evicted first: docs/decisions.md compares the
rules. No model, no clock: the same seed gives the same figures everywhere.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table

from mainstem.cache import PrefixCache
from mainstem.components import Full, State

PAGE = 16
PAGES = 400_000

Turn = tuple[list[int], list[int]]  # a prompt, and its answer
Workload = Callable[[random.Random, int], Iterator[Turn]]


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


WORKLOADS: dict[str, Workload] = {
    "50 chats": sessions(50),
    "50 chats, 20 % ask again": sessions(50, again=0.2),
    "50 chats, 20 % edit": sessions(50, edit=0.2),
    "200 chats, one system prompt": sessions(200, system=64 * PAGE, zipf=1.0),
    "100 documents": documents(100, zipf=0.8, max_pages=200, follow_up=0.3),
    "30 documents, follow-ups": documents(30, zipf=0.6, max_pages=100, follow_up=0.7),
    "20 agents": agents(20, branches=0.2),
    "20 agents, many branches": agents(20, branches=0.5),
}
SLOTS = (50, 100, 200, 400)


def found(workload: Workload, slots: int, *, weigh: bool = True, requests: int = 1500, seed: int = 1) -> float:
    """Returns the share of the prompts' tokens that hit, from 0 to 1."""
    rows = {Full(): PAGES, State(weigh_flops=weigh): slots}
    cache = PrefixCache(rows, PAGE, copy_state=lambda source, target: None)
    hit = asked = 0
    for at, (prompt, answer) in enumerate(workload(random.Random(seed), requests)):
        with cache.lease(prompt) as lease:
            boundary = _boundary(len(prompt))
            if at > requests // 5:
                hit, asked = hit + lease.hit, asked + boundary
            planned = sorted({min(_boundary(lease.reach + 1), boundary), boundary})
            lease.reserve(len(prompt) - lease.reserved)
            for position in (position for position in planned if position > lease.hit):
                lease.checkpoint(position)
                lease.publish(position)
            lease.publish(len(prompt))
            lease.append(answer)
            lease.reserve(len(answer))
            end = len(prompt) + len(answer) - 1
            if _boundary(end + 1) > lease.published:
                lease.checkpoint(_boundary(end + 1))
            lease.finish(end)
    return hit / asked


def _boundary(length: int) -> int:
    """Returns the last page boundary that leaves a token to compute."""
    return (length - 1) // PAGE * PAGE


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500)
    requests = parser.parse_args().requests
    table = Table("workload", "states", *(f"{slots} slots" for slots in SLOTS), title="share of the prompts that hit")
    for name, workload in WORKLOADS.items():
        for weigh in (True, False):
            shares = [found(workload, slots, weigh=weigh, requests=requests) for slots in SLOTS]
            table.add_row(name, "by FLOPs" if weigh else "by recency", *(f"{share:.3f}" for share in shares))
    Console().print(table)


if __name__ == "__main__":
    main()
