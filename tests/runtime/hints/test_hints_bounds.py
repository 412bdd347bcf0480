"""What is remembered of sessions, how long they are expected, and how much is brought up at a time.

Cache, tiers and promotions are the tests' own: what a session is planned for is seen by when it is looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mainstem.runtime.hints import advice, sessions
from mainstem.runtime.hints.advice import Advice
from mainstem.runtime.hints.sessions import Sessions
from mainstem.runtime.request import Hints


class Promotion:
    """One that the test moves on."""

    made: list[Promotion]
    goes_on = True
    reading = False

    def __init__(self, *_: Any) -> None:
        Promotion.made.append(self)

    def go_on(self) -> bool:
        return Promotion.goes_on

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def promotions(monkeypatch: pytest.MonkeyPatch) -> list[Promotion]:
    Promotion.made, Promotion.goes_on = [], True
    for module in (sessions, advice):
        monkeypatch.setattr(module, "Promotion", Promotion)
    return Promotion.made


class Long:
    """The tokens of a prompt, of which only the number counts."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def copy(self) -> Long:
        return self

    def __getitem__(self, _: Any) -> Long:
        return self


class Talks:
    """Sessions of a cache that has all of them on the host, and `on_device` positions on the device."""

    def __init__(self) -> None:
        self.on_device, self.demoted = 0, 0
        unknown = SimpleNamespace(seconds=lambda size: None)
        tiers = SimpleNamespace(
            costs=SimpleNamespace(load=unknown),
            host=SimpleNamespace(memory=SimpleNamespace(payload_bytes=lambda component: 1)),
            store=None,
            pending=SimpleNamespace(agreed=lambda number: number),
            can_prefetch=False,
        )
        cache: Any = SimpleNamespace(
            tiers=tiers,
            enabled=True,
            pool=SimpleNamespace(total=1 << 40),
            page_size=1,
            tree=SimpleNamespace(peek=lambda *_: self.on_device),
            peek=lambda *_: 1 << 30,
            expected=SimpleNamespace(observe=lambda s: None, wait=lambda s, steps: s, expect=lambda *_: 0),
            demote=self._demote,
        )
        self.sessions = Sessions(cache, 1.0)

    def _demote(self, *_: Any) -> None:
        self.demoted += 1

    def turn(self, name: str, begin_s: float, end_s: float, next_s: float | None = None, length: int = 10) -> None:
        tokens = Long(length)
        request = SimpleNamespace(
            hints=Hints(session=name, next_use_s=next_s),
            namespace=None,
            params=SimpleNamespace(max_tokens=1),
            tokens=[],
        )
        whole = SimpleNamespace(known=tokens, key=lambda: tokens, symbols=tokens)
        sequence: Any = SimpleNamespace(request=request, tokens=whole, arrived_s=begin_s)
        self.sessions.arrived(sequence)
        self.sessions.ended(sequence, end_s)

    def knows(self, name: str) -> bool:
        return (None, name) in self.sessions._known


def test_the_median_of_the_latest_five_pauses_counts_and_what_was_before_is_forgotten() -> None:
    talks, now_s = Talks(), 0.0
    for _ in range(1000):
        talks.turn("a", now_s, now_s)
        now_s += 100.0
    for short in range(1, 8):
        talks.turn("a", now_s, now_s)
        # While nothing is known of loading, it is looked at after half of the pause.
        assert talks.sessions.idle_s(now_s) == (50.0 if short <= 3 else 5.0), short
        now_s += 10.0


@pytest.mark.parametrize(("pause_s", "planned"), [(43_200.0, True), (43_200.1, False), (43_200_000.0, False)])
def test_who_comes_back_after_half_a_day_is_expected_and_later_nobody(pause_s: float, planned: bool) -> None:
    talks = Talks()
    talks.turn("a", 0.0, 1.0, next_s=pause_s)
    assert (talks.sessions.idle_s(1.0) is not None) == planned
    talks.turn("b", 0.0, 0.0)
    talks.turn("b", pause_s, pause_s)  # it was seen, not said
    assert (talks.sessions.idle_s(pause_s) is not None) == planned


@pytest.mark.parametrize(("pause_s", "until_s"), [(0.2, 1.2), (1.0, 2.0), (3.0, 6.0)])
def test_a_late_session_is_given_up_after_as_long_as_its_pause_and_a_second_at_least(
    pause_s: float, until_s: float
) -> None:
    talks = Talks()
    talks.turn("a", 0.0, 0.0, next_s=pause_s)
    talks.sessions.poll(pause_s / 2, lambda: 100)
    assert talks.sessions.idle_s(pause_s / 2) == 0.01  # it is under way
    talks.on_device, Promotion.goes_on = 9, False
    talks.sessions.poll(pause_s, lambda: 100)
    assert talks.sessions.idle_s(pause_s) == pytest.approx(until_s - pause_s)
    talks.sessions.poll(until_s - 0.001, lambda: 100)
    assert talks.sessions.counts["vain"] == talks.demoted == 0
    for _ in range(2):
        talks.sessions.poll(until_s, lambda: 100)
        assert talks.sessions.counts["vain"] == talks.demoted == 1
    assert talks.sessions.idle_s(until_s) is None


def test_where_there_is_no_room_it_is_looked_again_until_20_ms_before() -> None:
    talks, looks = Talks(), []
    talks.turn("a", 0.0, 0.0, next_s=10.0)
    now_s = 0.0
    while (wait_s := talks.sessions.idle_s(now_s)) is not None:
        now_s += wait_s
        looks.append(10.0 - now_s)
        talks.sessions.poll(now_s, lambda: 0)
    assert looks == pytest.approx([10.0 / 2**n for n in range(1, 10)])
    assert looks[-1] < 0.02 < looks[-2]
    assert talks.sessions.counts["skipped"] == 1 and not Promotion.made


def test_eight_are_brought_up_at_a_time(promotions: list[Promotion]) -> None:
    talks = Talks()
    for number in range(12):
        talks.turn(f"{number}", 0.0, 0.0, next_s=10.0)
    for _ in range(2):
        talks.sessions.poll(5.0, lambda: 1000)
        assert len(promotions) == 8
    talks.on_device, Promotion.goes_on = 1, False
    talks.sessions.poll(5.1, lambda: 1000)  # these have ended
    talks.on_device = 0
    talks.sessions.poll(7.5, lambda: 1000)
    assert len(promotions) == 12


def test_1024_sessions_are_remembered_and_the_one_used_longest_ago_is_forgotten() -> None:
    talks = Talks()
    for number in range(1024):
        talks.turn(f"{number}", 0.0, 0.0)
    assert talks.knows("0")
    talks.turn("0", 1.0, 1.0)  # a use
    talks.turn("new", 1.0, 1.0)
    assert [talks.knows(name) for name in ("0", "1", "2", "new")] == [True, False, True, True]
    for number in range(5000):
        talks.turn(f"more {number}", 2.0, 2.0)
    assert len(talks.sessions._known) == 1024 and talks.sessions._tokens == 1024 * 10


def test_sixteen_million_tokens_are_remembered() -> None:
    talks, quarter = Talks(), 1 << 22
    for name in "abcd":
        talks.turn(name, 0.0, 0.0, length=quarter)
    assert talks.knows("a")
    talks.turn("e", 0.0, 0.0, length=1)
    assert [talks.knows(name) for name in "abcde"] == [False, True, True, True, True]
    assert talks.sessions._tokens == 3 * quarter + 1
    talks.turn("whole", 0.0, 0.0, length=1 << 30)  # the newest stays, however long it is
    assert [*talks.sessions._known] == [(None, "whole")]
    talks.turn("a", 0.0, 0.0, length=5)
    assert [*talks.sessions._known] == [(None, "a")] and talks.sessions._tokens == 5


def test_plans_of_turns_that_are_over_take_no_room() -> None:
    talks = Talks()
    for turn in range(4_000):
        talks.turn("a", float(turn), float(turn), next_s=1000.0)
        assert len(talks.sessions._plans) <= 2 * 1024


def test_sixteen_prefetches_of_advice_are_under_way_at_most(promotions: list[Promotion]) -> None:
    cache: Any = SimpleNamespace(tiers=object(), page_size=1, peek=lambda *_: 0)
    given = Advice(cache, 10.0)
    for _ in range(20):
        given.apply("prefetch", np.arange(4, dtype=np.int32), None, 0.0)
    assert len(promotions) == 16 and given.busy
    Promotion.goes_on = False
    given.poll()
    assert not given.busy
    Promotion.goes_on = True
    given.apply("prefetch", np.arange(4, dtype=np.int32), None, 0.0)
    assert len(promotions) == 17 and given.busy
