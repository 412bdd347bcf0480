"""How long the runtime waits, and what it keeps at most. Clocks, processes and pipes are the tests' own."""

from __future__ import annotations

import math
import random
import subprocess
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rigs.ghost import Ghost
from rigs.scheduler import Bench

from mainstem.errors import BadArgument, ModelNotFound, RankFailed
from mainstem.runtime.audit.auditor import Auditor, chunk_pages
from mainstem.runtime.engine_core import EngineCore
from mainstem.runtime.kernels.step_graphs import StepGraphs
from mainstem.runtime.memory.tiers import close_tiers, end_tiers
from mainstem.runtime.models import loading
from mainstem.runtime.parallel import launch
from mainstem.runtime.parallel.ranks import FirstRank, Peer
from mainstem.runtime.request import Request
from mainstem.runtime.sampling.grammars import Grammars
from mainstem.runtime.schedule.scheduler import Scheduler
from mainstem.settings.engine import Grammar

# ---------------------------------------------------------------- the engine's loop


def core(**parts: Any) -> Any:
    return SimpleNamespace(
        **{
            "_refused": [],
            "scheduler": SimpleNamespace(idle_s=None),
            "advice": SimpleNamespace(busy=False),
            "_unpublished": False,
            **parts,
        }
    )


@pytest.mark.parametrize(
    ("parts", "idle_s"),
    [
        ({}, None),
        ({"advice": SimpleNamespace(busy=True)}, 0.01),
        ({"_unpublished": True}, 0.001),
        ({"_unpublished": True, "_refused": [1]}, 0.0),
        ({"scheduler": SimpleNamespace(idle_s=5.0)}, 5.0),
        ({"scheduler": SimpleNamespace(idle_s=5.0), "advice": SimpleNamespace(busy=True)}, 0.01),
    ],
)
def test_an_idle_engine_looks_again_soon_where_something_is_under_way(
    parts: dict[str, Any], idle_s: float | None
) -> None:
    assert EngineCore.idle_s.fget(core(**parts)) == idle_s  # type: ignore[attr-defined]


def test_the_hottest_prefixes_are_listed_every_half_minute() -> None:
    listed: list[float] = []
    tiers = SimpleNamespace(enter_identity=lambda: None, remember=lambda: listed.append(made.now_s))
    made = core(_remembered_s=math.inf, tiers=tiers, now_s=0.0)
    for now_s in (100.0, 100.1, 129.9, 130.0, 130.1, 159.9, 160.0, 30_160.0, 30_160.0):
        made.now_s = now_s
        EngineCore.remember(made)
    assert listed == [130.0, 160.0, 30_160.0]


def test_a_busy_engine_counts_its_queue_ten_times_a_second() -> None:
    counted: list[float] = []
    scheduler = SimpleNamespace(
        idle_s=None, busy=True, step=lambda now_s: [], queued=lambda: counted.append(made.now_s) or 7
    )
    made = core(
        scheduler=scheduler,
        advice=SimpleNamespace(poll=lambda: None),
        publisher=None,
        _counted_s=0.0,
        _handoff=SimpleNamespace(pass_on=lambda events, now_s, everything: events),
        stopping=False,
    )
    for now_s in (0.05, 0.0999, 0.1, 0.15, 0.21, 0.3, 300.0, 300.0):
        made.now_s = now_s
        assert EngineCore.step(made) == []
    assert counted == [0.1, 0.21, 300.0]
    scheduler.busy = False
    made.now_s = 300.01
    EngineCore.step(made)
    assert counted[-1] == 300.01


# ---------------------------------------------------------------- ranks


class Process:
    """A process of another rank, that ends when it is joined, or never."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.exitcode = log, 3

    def start(self) -> None:
        self.log.append("start")

    def join(self, timeout_s: float | None = None) -> None:
        self.log.append(timeout_s)

    def kill(self) -> None:
        self.log.append("kill")


def test_a_rank_has_five_minutes_to_answer_and_two_seconds_to_end() -> None:
    log: list[Any] = []
    pipe: Any = SimpleNamespace(poll=lambda timeout_s=0.0: bool(log.append(timeout_s)))
    first = FirstRank([Peer(1, Process(log), pipe)])  # type: ignore[arg-type]
    with pytest.raises(RankFailed, match="rank 1 of 2 does not answer: 300 s"):
        first.agree([1])
    assert log == [300.0]
    assert "exit code is 3" in str(first._failure(first._peers[0]))
    assert log == [300.0, 2.0, 0.0]


def test_a_rank_that_does_not_end_is_killed_after_ten_seconds() -> None:
    from contextlib import ExitStack

    log: list[Any] = []
    end: Any = SimpleNamespace(close=lambda: log.append("close"))
    context: Any = SimpleNamespace(Pipe=lambda: (end, end), Process=lambda **_: Process(log))
    with ExitStack() as stack:
        launch._start(1, SimpleNamespace(), context, stack)  # type: ignore[arg-type]
        assert log == ["start", "close"]
    assert log[2:] == ["close", 10.0, "kill", None]


# ---------------------------------------------------------------- tiers, models


def test_an_engine_that_ends_drains_for_five_seconds_and_closes_its_store_in_five() -> None:
    log: list[Any] = []
    tiers: Any = SimpleNamespace(
        remember=lambda: log.append("remember"),
        drain=lambda timeout_s: log.append(("drain", timeout_s)),
        close=lambda: log.append("close"),
        host=SimpleNamespace(memory=None),
    )
    end_tiers(tiers)
    end_tiers(tiers, drains=False)
    close_tiers(tiers.host, SimpleNamespace(close=log.append))  # type: ignore[arg-type]
    assert log == ["remember", ("drain", 5.0), "close", "close", 5.0]


def test_a_download_has_a_quarter_of_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(command: list[str], *, timeout: float, **_: Any) -> None:
        assert timeout == 900.0
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", runs)
    with pytest.raises(ModelNotFound, match="in 900 s"):
        loading._downloaded_gguf(tmp_path, lambda *_: None)


# ---------------------------------------------------------------- audits, grammars


def test_64_prefixes_wait_for_an_audit_and_the_oldest_is_dropped() -> None:
    means: Any = SimpleNamespace(cache=SimpleNamespace(page_size=1))
    auditor = Auditor(means, 1.0, random.Random(1))
    for number in range(66):
        auditor.note(Request([number]), np.array([number], np.int32))
        assert auditor._prefixes["dropped"] == max(0, number - 63)
    assert [int(each.tokens[0]) for each in auditor._waiting] == [*range(2, 66)]
    assert auditor.idle_s == 0.0
    auditor._audit = SimpleNamespace(reading=True)  # type: ignore[assignment]
    assert auditor.idle_s == 0.01


@pytest.mark.parametrize(("budget", "pages"), [(64, 4), (255, 15), (256, 16), (257, 16), (10**6, 16), (1, 1)])
def test_an_audit_computes_256_tokens_at_once(budget: int, pages: int) -> None:
    assert chunk_pages(budget, 16) == pages


def test_64_compiled_grammars_are_kept_and_the_one_used_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grammars, "_compile", lambda self, grammar, name: object())
    grammars = Grammars(None, 10)
    made = [grammars.compile(Grammar("regex", f"{number}")) for number in range(64)]
    assert grammars.compile(Grammar("regex", "0")) is made[0] and grammars.compiled == 64
    grammars.compile(Grammar("regex", "new"))
    assert [grammars.compile(Grammar("regex", f"{n}")) is made[n] for n in (0, 2, 63)] == [True] * 3
    assert grammars.compile(Grammar("regex", "1")) is not made[1] and grammars.compiled == 66
    assert len(grammars._cache) == 64


class Taken(Exception):
    """A text was not too long."""


@pytest.mark.parametrize(("size", "taken"), [((1 << 18) - 1, True), (1 << 18, True), ((1 << 18) + 1, False)])
@pytest.mark.parametrize("letter", ["a", "é"])
def test_a_grammar_has_256_kibibytes_at_most(
    size: int, taken: bool, letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(self: Grammars) -> None:
        raise Taken

    monkeypatch.setattr(Grammars, "_known_vocabulary", known)
    text = "b" * (size % 2) + letter * (size // len(letter.encode())) if letter == "é" else letter * size
    with pytest.raises(Taken if taken else BadArgument, match=None if taken else "at most 262144 bytes"):
        Grammars(None, 10).compile(Grammar("regex", text))


# ---------------------------------------------------------------- recorded steps, the scheduler


@pytest.mark.parametrize(("requests", "taken"), [(1, True), (255, True), (256, True), (257, False), (10**6, False)])
def test_a_step_of_256_requests_is_recorded(requests: int, taken: bool) -> None:
    graphs: Any = SimpleNamespace(refused=None)
    assert StepGraphs.takes(graphs, requests) == taken
    assert not StepGraphs.takes(SimpleNamespace(refused="why"), requests)  # type: ignore[arg-type]


def test_48_recorded_steps_are_kept_and_the_third_lack_of_memory_ends_it() -> None:
    graphs: Any = object.__new__(StepGraphs)
    graphs._steps, graphs._out_of_memory, graphs.refused = OrderedDict(), 0, None
    graphs._forward = graphs._recorder = None
    graphs._refuse = lambda why: setattr(graphs, "refused", why)
    steps = [SimpleStep() for _ in range(51)]
    for number, step in enumerate(steps):
        graphs._record(step)
        assert [*graphs._steps] == steps[max(0, number - 47) : number + 1]
    for failures in range(1, 4):
        graphs._record(SimpleStep(torch.OutOfMemoryError("no room")))
        assert (graphs.refused is not None) == (failures == 3)


class SimpleStep:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def record(self, *_: Any) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("running", "busy", "idle_s"),
    [(True, False, 0.001), (True, True, 0.001), (False, True, 0.01), (False, False, None)],
)
def test_transfers_are_looked_at_every_millisecond_where_requests_wait_for_them(
    running: bool, busy: bool, idle_s: float | None
) -> None:
    scheduler: Any = SimpleNamespace(
        _outputs=SimpleNamespace(events=[]),
        _idle=True,
        _running={1: 1} if running else {},
        _queue=SimpleNamespace(sequences={}),
        _tiers=SimpleNamespace(busy=busy),
        _sessions=SimpleNamespace(idle_s=lambda now_s: None),
        _auditor=None,
        _now_s=0.0,
    )
    assert Scheduler.idle_s.fget(scheduler) == idle_s  # type: ignore[attr-defined]


@pytest.mark.parametrize(("vocabulary", "rows"), [(1 << 17, 512), ((1 << 17) + 1, 511), (1 << 26, 1), (1 << 30, 1)])
def test_a_step_has_logits_of_67_million_numbers_at_most(
    vocabulary: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ghost, "vocab_size", vocabulary)
    assert Bench(pages=8).scheduler._most_rows == rows


def test_three_forwards_of_48_tokens_are_measured() -> None:
    bench, forwards = Bench(pages=64), list[int]()
    plain = bench.ghost.forward

    def forward(segments: Any) -> Any:
        forwards.extend(len(each.tokens) for each in segments)
        return plain(segments)

    bench.ghost.forward = forward  # type: ignore[method-assign]
    bench.scheduler.measure()
    assert forwards == [48] * 3
