"""Sessions: what the host and storage have of them is on the device when they come back, and nobody waits for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from rigs.scheduler import PAGE
from rigs.tiered import TieredBench

from mainstem.errors import BadArgument
from mainstem.runtime.request import Hints
from mainstem.settings.engine import EngineConfig, Limits

PAUSE_S = 10.0


class Talks(TieredBench):
    """A bench whose sessions ask again after a while: each turn goes on from the last one and its answer."""

    def __init__(self, pages: int = 40, share: float = 0.5, store: bool = False, host_pages: int = 64) -> None:
        super().__init__(pages, host_pages, store, limits=Limits(prefetch_sessions=share))
        self.said: dict[int, list[int]] = {}
        self.names: dict[int, str] = {}

    def turn(self, number: int, **hints: Any) -> str:
        """Asks and waits for the answer; returns the id of the request."""
        known = self.said.get(number, [3 + number % 20, 3 + number // 20, *range(8, 8 + 2 * PAGE)])
        prompt = [*known, 30 + number % 10, 41, 42]
        given = Hints(session=self.names.get(number), **hints)
        id = self.add(prompt, hints=given, max_tokens=3, ignore_eos=True)
        self.run()
        self.assert_complete(id)
        self.said[number] = [*prompt, *self.output(id)[0]]
        return id

    def wait(self, seconds: float) -> None:
        """Lets time pass, in 100 steps; nobody asks."""
        for _ in range(100):
            self.now_s += seconds / 100 - self.step_s
            self.step()

    def push_out(self) -> None:
        """Leaves on the host what the device had."""
        self.wait(0.1)
        self.forget_device()

    def on_device(self, number: int) -> int:
        return int(self.cache.tree.peek(self.said[number]))

    def came(self) -> dict[str, int]:
        """Returns what came of sessions, without zeros."""
        return {outcome: n for outcome, n in self.scheduler.totals.session_prefetches.items() if n}

    def regular(self, number: int, turns: int = 3) -> None:
        """Has a session come back after the same pause each time, the last time from the host."""
        for _ in range(turns):
            self.turn(number)
            self.wait(PAUSE_S)
        self.turn(number)
        self.push_out()


@pytest.mark.parametrize("theirs_ms", [None, 1000, 60_000])
def test_ranks_bring_a_session_up_when_the_fastest_of_them_would(theirs_ms: int | None) -> None:
    """This one takes 4 s or more to load it, and the other one says how long, in ms. All other votes are smaller."""

    class Ranked(Talks):
        agree = None if theirs_ms is None else staticmethod(lambda votes: [min(vote, theirs_ms) for vote in votes])

    bench = Ranked()
    bench.regular(1, turns=2)
    size = len(bench.said[1]) // PAGE * bench.tiers.host.memory.payload_bytes(0)
    for _ in range(32):
        bench.tiers.costs.load.observe(size, 4.0)
    bench.turn(1)
    bench.push_out()
    bench.wait(PAUSE_S - 5.5)
    assert bench.on_device(1) == 0
    bench.wait(2.5)
    assert (bench.on_device(1) > 0) == (theirs_ms != 1000)
    bench.wait(2.5)
    assert bench.on_device(1) > 0


def test_a_session_that_came_back_is_brought_up_before_it_is_due() -> None:
    bench = Talks()
    bench.regular(1)
    whole = len(bench.said[1]) // PAGE * PAGE
    assert bench.on_device(1) == 0
    bench.wait(PAUSE_S / 2 - 1)
    assert bench.on_device(1) == 0  # not yet
    bench.wait(PAUSE_S / 2)
    assert bench.on_device(1) >= whole - PAGE
    assert bench.usage(bench.turn(1)).host_tokens == 0
    assert bench.came() == {"used": 1}
    bench.run_and_flush()


def test_it_is_brought_up_as_late_as_loading_allows() -> None:
    bench = Talks()
    for pages in (1, 2, 4):  # a page takes an eighth of a second
        bench.tiers.costs.load.observe(pages * bench.host.payload_bytes(0), pages / 8)
    bench.regular(1)
    takes_s = len(bench.said[1]) // PAGE / 8
    bench.wait(PAUSE_S - takes_s - 0.5)
    assert bench.on_device(1) == 0
    bench.wait(1.0)
    assert bench.on_device(1) > 0


def test_nothing_is_brought_up_by_default() -> None:
    bench = Talks(share=0.0)
    bench.regular(1)
    bench.wait(3 * PAUSE_S)
    assert bench.on_device(1) == 0 and bench.scheduler.idle_s is None
    assert bench.usage(bench.turn(1)).host_tokens > 0
    assert bench.came() == {}


def test_a_session_that_never_came_back_is_not_expected() -> None:
    bench = Talks()
    bench.turn(1)
    bench.push_out()
    bench.wait(5 * PAUSE_S)
    assert bench.on_device(1) == 0 and bench.came() == {} and bench.scheduler.idle_s is None


def test_the_same_text_in_another_namespace_is_another_session() -> None:
    bench = Talks()
    prompt, expected = [3, *range(8, 8 + 2 * PAGE)], list[bool]()
    for namespace in ("a", "b", "b"):
        id = bench.add(prompt, namespace=namespace, max_tokens=3, ignore_eos=True)
        bench.run()
        prompt = [*prompt, *bench.output(id)[0], 41]
        bench.push_out()
        expected.append(bench.scheduler.idle_s is not None)
        bench.wait(PAUSE_S)
    assert expected == [False, False, True]


def test_what_a_client_says_counts_more_than_what_was_seen() -> None:
    bench = Talks()
    bench.turn(1, next_use_s=20.0)  # its first turn
    bench.push_out()
    bench.wait(21.0)
    assert bench.on_device(1) > 0
    bench.turn(1, next_use_s=100.0)
    bench.push_out()
    bench.wait(40.0)
    assert bench.on_device(1) == 0
    bench.wait(61.0)
    assert bench.on_device(1) > 0 and bench.came() == {"used": 1}


def test_a_session_that_is_over_is_not_brought_up() -> None:
    bench = Talks()
    bench.regular(1)
    bench.turn(1, next_use_s=86_400.0)
    bench.push_out()
    bench.wait(3 * PAUSE_S)
    assert bench.on_device(1) == 0 and bench.scheduler.idle_s is None


@pytest.mark.parametrize("hints", [{"one_shot": True}, {"no_store": True}])
def test_requests_whose_answers_do_not_stay_are_no_turns(hints: dict[str, bool]) -> None:
    bench = Talks()
    for _ in range(3):
        bench.turn(1, **hints)
        bench.wait(PAUSE_S)
    bench.turn(1, **hints)
    bench.push_out()
    bench.wait(PAUSE_S)
    assert bench.on_device(1) == 0 and bench.came() == {}


def test_a_session_is_known_by_its_name_whatever_its_prompt_is() -> None:
    bench = Talks()
    bench.names[1] = "a"
    bench.turn(1)
    bench.wait(PAUSE_S)
    bench.said[1] = [*range(5, 5 + 3 * PAGE)]  # its history was written anew
    bench.turn(1)
    bench.push_out()
    bench.wait(PAUSE_S)
    assert bench.on_device(1) > 0
    bench = Talks()
    bench.turn(1)
    bench.wait(PAUSE_S)
    bench.said[1] = [*range(5, 5 + 3 * PAGE)]
    bench.turn(1)  # without a name, it is another one
    bench.push_out()
    bench.wait(PAUSE_S)
    assert bench.on_device(1) == 0


def test_the_median_of_the_latest_pauses_counts() -> None:
    bench = Talks()
    for pause_s in (10.0, 10.0, 300.0, 10.0):
        bench.turn(1)
        bench.wait(pause_s)
    bench.turn(1)
    bench.push_out()
    bench.wait(11.0)
    assert bench.on_device(1) > 0


def test_storage_is_read_for_it() -> None:
    bench = Talks(store=True)
    bench.regular(1)
    bench.tiers.drain(1.0)
    bench.tiers.flush()
    bench.wait(PAUSE_S)
    assert bench.on_device(1) > 0
    usage = bench.usage(bench.turn(1))
    assert (usage.host_tokens, usage.storage_tokens) == (0, 0) and bench.came() == {"used": 1}


def test_it_is_late_if_it_comes_before_it_is_expected() -> None:
    bench = Talks()
    bench.regular(1)
    bench.wait(1.0)
    bench.turn(1)
    assert bench.came() == {"late": 1}
    bench.run_and_flush()


def test_it_is_late_if_it_comes_while_it_is_being_brought_up() -> None:
    bench = Talks()
    bench.regular(1)
    while not bench.cache.stats().leases.open:
        bench.step()
    bench.turn(1)
    assert bench.came() == {"late": 1}
    bench.run_and_flush()


def test_what_is_being_brought_up_ends_with_the_scheduler() -> None:
    bench = Talks()
    bench.regular(1)
    while not bench.cache.stats().leases.open:
        bench.step()
    bench.scheduler.close()
    bench.scheduler.check()
    bench.wait(0.1)
    assert not bench.cache.stats().leases.open


def test_a_session_that_does_not_come_goes_first() -> None:
    bench = Talks(pages=10, share=0.6)
    bench.regular(1, turns=1)
    bench.turn(2)
    bench.wait(PAUSE_S)
    held = bench.on_device(1)
    assert held > 0 and bench.came() == {}
    bench.wait(PAUSE_S + 1)
    assert bench.came() == {"vain": 1} and bench.on_device(1) == held  # it is not deleted
    bench.turn(3)
    assert bench.on_device(1) < held and bench.on_device(2) > 0  # which was used longer ago


def test_what_was_said_holds_after_it_was_brought_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """To load it is a use, which ends what was said before."""
    bench = Talks()
    expect, said = bench.cache.expected.expect, []

    def listening(tokens: Any, due: float, namespace: Any = None) -> int:
        said.append((bench.now_s, due))
        return expect(tokens, due, namespace)

    monkeypatch.setattr(bench.cache.expected, "expect", listening)
    bench.turn(1, next_use_s=20.0)
    bench.push_out()
    bench.wait(20.0)
    assert bench.on_device(1) > 0
    (first_s, due), (again_s, same) = said
    assert first_s < again_s < due == same


def test_nothing_is_brought_up_beyond_the_share() -> None:
    bench = Talks(pages=40, share=0.2)
    for number in range(1, 9):
        bench.turn(number, next_use_s=20.0)
    bench.push_out()
    bench.wait(20.0)
    there = sum(bench.on_device(number) > 0 for number in range(1, 9))
    assert bench.cache.pool.cached <= 8 and 0 < there < 8
    assert bench.came()["skipped"] == 8 - there
    bench.run_and_flush()


def test_nothing_is_brought_up_where_a_request_may_need_the_pages() -> None:
    bench = Talks(pages=16, share=1.0)
    bench.turn(1, next_use_s=2.0)
    bench.push_out()
    id = bench.add([*range(8, 20)], max_tokens=48, ignore_eos=True)  # 15 pages at its end
    while not bench.ended(id):
        bench.step()
        assert bench.on_device(1) == 0
        bench.now_s += 0.05
    bench.assert_complete(id)
    assert bench.scheduler.totals.preemptions == 0 and bench.came() == {"skipped": 1}


def test_a_failed_load_changes_no_answer() -> None:
    bench = Talks()
    bench.regular(1)
    bench.host.fail_up = OSError("no copy")
    bench.wait(PAUSE_S)
    assert bench.came() == {"skipped": 1}
    bench.host.fail_up = None
    bench.turn(1)
    bench.run_and_flush()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_random_sessions_are_answered_as_without_a_cache(seed: int) -> None:
    draw = random.Random(seed)
    bench = Talks(pages=40, share=draw.choice((0.4, 1.0)), store=draw.random() < 0.5, host_pages=80)
    names = {number: f"s{number}" if draw.random() < 0.5 else None for number in range(6)}
    bench.names = {number: name for number, name in names.items() if name}
    for at in range(60):
        number = draw.randrange(6) if draw.random() < 0.2 else at % 6
        if len(bench.said.get(number, ())) > 20 * PAGE:
            del bench.said[number]
        bench.turn(number, next_use_s=draw.choice((None, None, None, 0.0, 0.5, 5.0)))
        most = int(bench.scheduler.totals.preemptions)
        bench.wait(draw.choice((0.0, 1.0, 1.2, 4.0)))
        assert bench.scheduler.totals.preemptions == most  # nothing that was brought up is in the way
        if draw.random() < 0.3:
            bench.forget_device()
    assert bench.came().get("used", 0), bench.came()
    bench.run_and_flush()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_the_share_is_a_part(share: float) -> None:
    with pytest.raises(BadArgument, match="prefetch_sessions"):
        Limits(prefetch_sessions=share)


def test_without_tiers_there_is_nothing_to_bring_up() -> None:
    with pytest.raises(BadArgument, match=r"prefetch_sessions = 0\.2: must be 0 without a host tier"):
        EngineConfig(prefetch_sessions=0.2)
