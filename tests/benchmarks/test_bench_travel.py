"""The benchmark of prompts that travel: who is asked what, what is counted, what a failure is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from bench import figures, travel
from bench.client import Answer, Prompt
from bench.report import Report

SMALL = replace(travel.QUICK, lengths=(32, 64), rounds=3, requests=6, prompt=16, answer=5)
FIRST_S = {"giver": 9.0, travel.PEER: 0.25, travel.STORE: 0.5, travel.COMPUTING: 2.0}


class Double:
    """A server whose first token takes as long as its name says."""

    def __init__(self, name: str, flags: str, read: float = 1.0) -> None:
        self.name, self.flags, self.url, self._read = name, flags, f"http://{name}", read
        self.asked: list[tuple[int, int, float]] = []
        self._pages = 0

    def ask(self, prompts: Sequence[Prompt], tokens: int, after_s: Sequence[float] = ()) -> list[Answer]:
        due = after_s or [0.0] * len(prompts)
        self.asked += [(len(prompt), tokens, at_s) for prompt, at_s in zip(prompts, due, strict=True)]
        self._pages += int(self._read * sum(map(len, prompts))) // travel.PAGE
        first_s = FIRST_S.get(self.name, 1.0)
        return [Answer(at_s, at_s + first_s, at_s + first_s + tokens - 1, 1, tokens, "") for at_s in due]

    def settle(self) -> dict[str, Any]:
        return {"prefetched": self._pages}


@pytest.fixture
def report() -> Report:
    return Report("fleet", "2026-01-01", True, progress=lambda line: None)


@pytest.fixture
def started() -> list[Double]:
    return []


def starting(started: list[Double], read: float = 1.0) -> travel.Start:
    @contextmanager
    def start(name: str, flags: str) -> Iterator[Double]:
        started.append(Double(name, flags, read))
        yield started[-1]

    return start


def test_each_prompt_is_computed_once_then_asked_of_every_way(report: Report, started: list[Double]) -> None:
    travel.first(SMALL, report, starting(started), "127.0.0.1:1", "file:/kv")
    assert [server.name for server in started] == ["giver", travel.PEER, travel.STORE, travel.COMPUTING]
    assert all(server.asked == [(n, 1, 0.0) for n in (32, 64) for _ in range(4)] for server in started)
    giver, peer, store, computing = (server.flags for server in started)
    assert "--peer-listen 127.0.0.1:1" in giver and "--storage file:/kv" in giver
    assert "--peers 127.0.0.1:1" in peer and "--storage" not in peer
    assert "--storage file:/kv" in store and "--peers" not in store
    assert "--peers" not in computing and "--storage" not in computing
    rows = report.more["first"]
    assert [(row["tokens"], row["way"], row["p50_s"], row["sooner"]) for row in rows] == [
        (length, way, FIRST_S[way], 2.0 / FIRST_S[way])
        for length in (32, 64)
        for way in (travel.PEER, travel.STORE, travel.COMPUTING)
    ]
    assert not report.failures
    assert "| 32 | a peer | 0.25 | 0.25 to 0.25 | 8.00 |" in figures.TABLES["fleet first"]({"fleet": report.more})


def test_a_way_that_did_not_read_its_prompt_is_a_failure(report: Report, started: list[Double]) -> None:
    travel.first(SMALL, report, starting(started, read=0.5), "127.0.0.1:1", "file:/kv")
    assert len(report.failures) == 2 * 2 * 4  # ways, lengths, rounds
    assert report.failures[0] == "a peer: 16 of 32 tokens were read"


def test_every_way_to_divide_the_work_gets_the_same_arrivals(report: Report, started: list[Double]) -> None:
    travel.apart(SMALL, report, starting(started), "127.0.0.1:1")
    one, other, prefill, decode, whole = started
    assert "--role prefill" in prefill.flags and f"--prefill-url {prefill.url}" in decode.flags and not prefill.asked
    both = sorted([*one.asked[4:], *other.asked[1:]])
    assert len(one.asked[4:]) == len(other.asked[1:]) == 3
    assert both == sorted(decode.asked[1:]) == sorted(whole.asked[1:])
    assert len({at_s for _, _, at_s in both}) == 6
    rows = {row["way"]: row for row in report.more["apart"]}
    assert set(rows) == {travel.BOTH, travel.APART, travel.ONE}
    assert all((row["first_p50_s"], row["token_p50_s"], row["requests"]) == (1.0, 1.0, 6) for row in rows.values())
    assert rows[travel.ONE]["gap_s"] == SMALL.gap
    assert "| one server | 1.00 | 1.00 | 1,000 | 1,000 |" in figures.TABLES["fleet apart"]({"fleet": report.more})
