"""The state of sessions, change by change: when each is looked at, what is counted, and that `check` sees faults.

Cache, tiers and promotions are the tests' own."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mainstem.cache.keys import Image, Spliced
from mainstem.runtime.hints import sessions as module
from mainstem.runtime.hints.sessions import Sessions
from mainstem.runtime.request import Hints

PAGE = 4


class Promotion:
    """One that the test moves on."""

    def __init__(self, made: list[Promotion]) -> None:
        self.goes_on, self.closed = True, 0
        made.append(self)

    def go_on(self) -> bool:
        return self.goes_on

    def close(self) -> None:
        self.closed += 1


class Talks:
    """Sessions of a cache in which the test says how many positions the device and all tiers have of a prompt."""

    def __init__(self, share: float = 1.0, total: int = 100) -> None:
        self.on_device, self.anywhere = 0, 1 << 20
        self.load_s: float | None = None
        self.store_s: tuple[float | None, float | None] = None, None
        self.sizes: list[int] = []
        self.observed: list[float] = []
        self.expected: list[tuple[int, float]] = []
        self.demoted = 0
        self.tiers: Any = SimpleNamespace(
            costs=SimpleNamespace(
                load=SimpleNamespace(seconds=self._load),
                look_up=SimpleNamespace(seconds=lambda keys: self.store_s[0]),
                read=SimpleNamespace(seconds=lambda size: self.store_s[1]),
            ),
            host=SimpleNamespace(memory=SimpleNamespace(payload_bytes=lambda component: 10)),
            store=None,
            pending=SimpleNamespace(agreed=lambda number: number),
            can_prefetch=False,
        )
        expected = SimpleNamespace(
            observe=self.observed.append,
            wait=lambda s, steps: s,
            expect=lambda tokens, at_s, namespace: self.expected.append((len(tokens), at_s)),
        )
        cache: Any = SimpleNamespace(
            tiers=self.tiers,
            enabled=True,
            pool=SimpleNamespace(total=total),
            page_size=PAGE,
            tree=SimpleNamespace(peek=lambda *_: self.on_device),
            peek=lambda *_: self.anywhere,
            expected=expected,
            demote=self._demote,
        )
        self.sessions = Sessions(cache, share)

    def _load(self, size: int) -> float | None:
        self.sizes.append(size)
        return self.load_s

    def _demote(self, *_: Any) -> None:
        self.demoted += 1

    def arrive(self, name: str | None, at_s: float, tokens: Any = range(40), prompt: int = 30) -> Any:
        symbols = np.array(tokens, np.int32)
        request = SimpleNamespace(
            hints=Hints(session=name),
            namespace=None,
            params=SimpleNamespace(max_tokens=1),
            tokens=symbols[:prompt],
        )
        whole = SimpleNamespace(known=symbols, key=lambda: symbols, symbols=symbols)
        sequence = SimpleNamespace(request=request, tokens=whole, arrived_s=at_s)
        self.sessions.arrived(sequence)  # type: ignore[arg-type]
        return sequence

    def end(self, sequence: Any, now_s: float, next_s: float | None = None) -> None:
        sequence.request.hints = Hints(session=sequence.request.hints.session, next_use_s=next_s)
        self.sessions.ended(sequence, now_s)

    def turn(self, name: str | None, at_s: float, next_s: float | None = None, **more: Any) -> None:
        self.end(self.arrive(name, at_s, **more), at_s, next_s)

    def poll(self, now_s: float, room: int = 1000) -> None:
        self.sessions.poll(now_s, lambda: room)
        self.sessions.check()

    @property
    def counts(self) -> dict[str, int]:
        return {outcome: n for outcome, n in self.sessions.counts.items() if n}


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Promotion]:
    all_of_them: list[Promotion] = []
    monkeypatch.setattr(module, "Promotion", lambda *_: Promotion(all_of_them))
    return all_of_them


def test_it_is_looked_at_as_long_before_as_all_steps_take_and_at_half_of_its_pause_at_most() -> None:
    for load_s, store_s, wait_s in (
        (2.5, None, 7.5),
        (4.999, None, 5.001),
        (5.5, None, 5.0),
        (None, None, 5.0),
        (1.0, (0.25, 0.5), 8.25),
        (1.0, (None, 0.5), 5.0),
    ):
        talks = Talks()
        talks.load_s = load_s
        if store_s is not None:
            talks.tiers.store, talks.store_s = object(), store_s
        talks.turn("a", 0.0, next_s=10.0)
        assert talks.sessions.idle_s(0.0) == pytest.approx(wait_s, abs=1e-9), (load_s, store_s)
        assert talks.sizes == [40 // PAGE * 10]


def test_what_is_overdue_is_looked_at_at_once() -> None:
    talks = Talks()
    talks.turn("a", 0.0, next_s=10.0)
    for now_s in (5.0, 5.1, 5000.0):
        assert talks.sessions.idle_s(now_s) == 0.0, "the loop waits for as long as this says, and no time is negative"


def test_a_request_that_meets_another_one_of_its_session_begins_no_pause() -> None:
    talks = Talks()
    talks.turn("a", 0.0)
    one, other = talks.arrive("a", 4.0), talks.arrive("a", 6.0)
    known = talks.sessions._known[None, "a"]
    assert list(known.pauses) == [4.0]
    known.ended_s = 6.5  # another one of this session had ended when `other` had waited for a while
    talks.sessions.arrived(other)
    assert list(known.pauses) == [4.0]
    talks.end(one, 7.0, next_s=20.0)
    assert talks.sessions.idle_s(7.0) == 10.0
    talks.end(other, 8.0, next_s=100.0)
    assert talks.sessions.idle_s(8.0) == 50.0, "what the one before said holds no longer"
    assert talks.observed == [0.0, 3.0, 2.0]
    assert talks.expected == [(40, 27.0), (40, 108.0)]


def test_one_without_a_plan_is_never_late() -> None:
    talks = Talks()
    talks.turn("a", 0.0)
    talks.arrive("a", 1e6)
    assert talks.counts == {}


def test_a_session_is_found_by_all_of_its_last_prompt() -> None:
    talks = Talks()
    talks.turn(None, 0.0, tokens=range(40), prompt=30)
    other = [*range(29), 99, *range(30, 50)]  # the last token of the prompt differs
    talks.turn(None, 1.0, tokens=other)
    assert len(talks.sessions._known) == 2
    talks.turn(None, 2.0, tokens=[*range(30), 77, 78], prompt=32)
    assert len(talks.sessions._known) == 2
    assert sorted(len(each.prompt) for each in talks.sessions._known.values()) == [30, 32]


def test_the_images_of_a_session_stay_with_it() -> None:
    talks = Talks()
    sequence = talks.arrive("a", 0.0)
    image = (3, Image(b"i" * 16, 5))
    sequence.tokens.key = lambda: Spliced(sequence.tokens.known, (image,))
    talks.end(sequence, 0.0)
    tokens = talks.sessions._known[None, "a"].tokens
    assert isinstance(tokens, Spliced) and tokens.images == (image,) and list(tokens.ids) == list(range(40))


@pytest.mark.parametrize(("anywhere", "late"), [(23, False), (24, True), (1 << 20, True)])
def test_it_is_late_if_another_tier_has_a_page_that_the_device_lacks(anywhere: int, late: bool) -> None:
    talks = Talks()
    talks.turn("a", 0.0, next_s=10.0)
    talks.on_device, talks.anywhere = 20, anywhere
    talks.poll(5.0, room=0)  # not now
    talks.arrive("a", 8.0)
    assert talks.counts == ({"late": 1} if late else {})


@pytest.mark.parametrize(("lacking", "brought"), [(8, True), (9, True), (10, False)])
def test_all_of_the_share_may_be_used(lacking: int, brought: bool, made: list[Promotion]) -> None:
    for share, room in ((0.09, 1000), (1.0, 9)):
        talks = Talks(share, total=100)
        talks.turn("a", 0.0, next_s=10.0, tokens=range(lacking * PAGE + 1))
        before = len(made)
        talks.poll(5.0, room)
        assert (len(made) > before) == brought


def test_one_that_could_not_be_loaded_is_not_looked_at_again(made: list[Promotion]) -> None:
    talks = Talks()
    talks.turn("a", 0.0, next_s=10.0)
    talks.poll(5.0)
    made[0].goes_on = False
    talks.poll(6.0)
    assert talks.counts == {"skipped": 1}
    assert talks.sessions.idle_s(6.0) is None
    talks.poll(20.0)
    assert len(made) == 1 and talks.demoted == 0 and talks.counts == {"skipped": 1}


@pytest.mark.parametrize("ends", [False, True])
def test_what_was_brought_up_for_one_that_is_forgotten_was_in_vain(ends: bool, made: list[Promotion]) -> None:
    talks = Talks()
    talks.turn("a", 0.0, next_s=10.0)
    talks.poll(5.0)
    if ends:
        talks.on_device, made[0].goes_on = 36, False
        talks.poll(6.0)
        assert talks.expected[-1] == (40, 10.0), "the load was a use, and what was said holds still"
    for number in range(1024):
        talks.turn(f"{number}", 7.0)
        talks.sessions.check()
    assert talks.counts == {"vain": 1}
    assert made[0].closed == (not ends)
    assert talks.sessions.idle_s(7.0) is None


def test_what_is_under_way_ends_with_all_sessions(made: list[Promotion]) -> None:
    talks = Talks()
    for name in "abc":
        talks.turn(name, 0.0, next_s=10.0)
    talks.poll(5.0)
    talks.sessions.close()
    assert [each.closed for each in made] == [1, 1, 1]


def test_plans_are_in_order_however_many_turns_are_over() -> None:
    talks, rng = Talks(), random.Random(5)
    for turn in range(6000):
        talks.turn(f"{rng.randrange(200)}", float(turn), next_s=rng.uniform(10_000, 40_000))
        plans = talks.sessions._plans
        if turn % 97 == 0:
            assert all(plans[(at - 1) // 2] <= plans[at] for at in range(1, len(plans))), "the next one is the first"
    talks.sessions.check()


# ---------------------------------------------------------------- what check sees


def _old_plan(sessions: Sessions, one: Any) -> None:
    sessions._plans[:] = [(at_s, number, turn - 1, session) for at_s, number, turn, session in sessions._plans]


def _other_name(sessions: Sessions, one: Any) -> None:
    one.name = "another"


def _lost(sessions: Sessions, one: Any) -> None:
    sessions._moving.clear()


def _more(sessions: Sessions, one: Any) -> None:
    one.pages = 101


def _tokens(sessions: Sessions, one: Any) -> None:
    sessions._tokens += 1


def _unplanned(sessions: Sessions, one: Any) -> None:
    one.planned = False


def _below_zero(sessions: Sessions, one: Any) -> None:
    sessions.counts["late"] = -1


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_old_plan, "has an end"),
        (_other_name, "."),
        (_lost, "under way"),
        (_more, "more is brought up than the share"),
        (_tokens, "the tokens are those"),
        (_unplanned, "nothing has come"),
        (_below_zero, "below 0"),
    ],
)
def test_check_sees_what_is_wrong(spoil: Callable[[Sessions, Any], None], said: str) -> None:
    talks = Talks()
    talks.turn("a", 0.0, next_s=10.0)
    talks.poll(5.0)
    talks.sessions.check()
    spoil(talks.sessions, talks.sessions._known[None, "a"])
    with pytest.raises((AssertionError, KeyError), match=said):
        talks.sessions.check()
