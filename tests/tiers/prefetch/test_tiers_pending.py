"""The list of everything under way: votes, what ranks agree on, and the order in which it settles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mainstem.tiers.pending import ARRIVED, FAILED, Pending, PendingList, Polled


class Step(Pending):
    """Votes what the test says; writes its name and outcome to a log."""

    def __init__(self, name: str, log: list[tuple[str, int]], then: Callable[[], object] | None = None) -> None:
        self.name, self.log, self.then, self.voted = name, log, then, 0

    def vote(self) -> int:
        return self.voted

    def settle(self, outcome: int) -> None:
        self.log.append((self.name, outcome))
        if self.then is not None:
            self.then()


class Other(Step):
    """Another kind."""


def three(pending: PendingList) -> tuple[list[Step], list[tuple[str, int]]]:
    log: list[tuple[str, int]] = []
    return [pending.add(Step(name, log)) for name in "abc"], log


def test_what_has_ended_is_settled_once_in_the_order_in_which_it_began() -> None:
    pending = PendingList()
    (a, b, c), log = three(pending)
    c.voted, a.voted = ARRIVED, FAILED
    pending.settle()
    assert log == [("a", FAILED), ("c", ARRIVED)] and list(pending) == [b]
    pending.settle()
    assert len(log) == 2
    b.voted = 7
    pending.settle()
    assert log[2:] == [("b", 7)] and len(pending) == 0


def test_what_ends_because_another_was_settled_is_settled_at_the_same_poll() -> None:
    pending, log = PendingList(), list[tuple[str, int]]()
    child = Step("child", log)
    parent = Step("parent", log, lambda: setattr(child, "voted", FAILED))
    pending.add(child)
    pending.add(parent)
    parent.voted = ARRIVED
    pending.settle()
    assert log == [("parent", ARRIVED), ("child", FAILED)]


def test_what_a_settlement_begins_waits_for_the_next_poll() -> None:
    pending, log = PendingList(), list[tuple[str, int]]()
    second = Step("second", log)
    second.voted = ARRIVED
    first = pending.add(Step("first", log, lambda: pending.add(second)))
    first.voted = ARRIVED
    pending.settle()
    assert log == [("first", ARRIVED)] and list(pending) == [second]
    pending.settle()
    assert log == [("first", ARRIVED), ("second", ARRIVED)]


def test_an_outcome_is_the_lowest_vote_of_all_ranks_and_nothing_ends_before_it_has_on_all() -> None:
    asked: list[list[int]] = []
    theirs = [1, 0, 1]

    def agree(votes: Sequence[int]) -> Sequence[int]:
        asked.append(list(votes))
        return [min(pair) for pair in zip(votes, theirs[-len(votes) :], strict=True)]

    pending = PendingList(agree)
    (a, b, _), log = three(pending)
    a.voted = b.voted = ARRIVED
    pending.settle()
    assert log == [("a", FAILED)], "b has not ended there, c has not ended here"
    assert asked == [[ARRIVED, ARRIVED, 0], [ARRIVED, 0]], "again, until nothing ends"


@pytest.mark.parametrize(("own", "theirs", "agreed"), [(5, 3, 3), (3, 5, 3), (0, 7, 0), (7, 0, 0), (4, 4, 4)])
def test_a_number_that_ranks_agree_on_is_the_lowest_of_all(own: int, theirs: int, agreed: int) -> None:
    asked: list[list[int]] = []

    def agree(votes: Sequence[int]) -> Sequence[int]:
        asked.append(list(votes))
        return [min(vote, theirs) for vote in votes]

    pending = PendingList(agree)
    assert (pending.agreed(own), asked, pending.alone) == (agreed, [[own]], False)
    assert (PendingList().agreed(own), PendingList().alone) == (own, True)


def test_ranks_with_nothing_under_way_do_not_ask_each_other() -> None:
    asked: list[Sequence[int]] = []
    PendingList(lambda votes: asked.append(votes) or votes).settle()
    assert asked == []


def test_some_may_be_settled_before_the_others() -> None:
    pending = PendingList()
    steps, log = three(pending)
    for step in steps:
        step.voted = ARRIVED
    pending.settle([steps[1]])
    assert log == [("b", ARRIVED)] and list(pending) == [steps[0], steps[2]]


def test_who_settles_meanwhile_settles_first_what_has_ended_before() -> None:
    pending, log = PendingList(), list[tuple[str, int]]()
    b, c, d = (Step(name, log) for name in "bcd")
    a = Step("a", log, lambda: pending.settle([d]))
    for step in (a, b, c, d):
        pending.add(step).voted = ARRIVED
    pending.settle([a, b, c])
    assert log == [(name, ARRIVED) for name in "abcd"], "b and c began before d"
    assert len(pending) == 0


def test_what_somebody_waits_for_meanwhile_is_settled_once() -> None:
    pending, log = PendingList(), list[tuple[str, int]]()
    b = Step("b", log)
    a = Step("a", log, lambda: pending.settle([b]))
    for step in (a, b):
        pending.add(step).voted = ARRIVED
    pending.settle()
    assert log == [("a", ARRIVED), ("b", ARRIVED)]


def test_what_has_ended_is_settled_later_where_another_settlement_fails() -> None:
    def fail() -> None:
        raise ValueError("a")

    pending, log = PendingList(), list[tuple[str, int]]()
    for step in (Step("a", log, fail), Step("b", log)):
        pending.add(step).voted = ARRIVED
    with pytest.raises(ValueError, match="a"):
        pending.settle()
    assert len(pending) == 1
    pending.settle()
    assert log == [("a", ARRIVED), ("b", ARRIVED)]


def test_what_is_under_way_is_found_by_its_kind() -> None:
    pending = PendingList()
    three(pending)
    other = pending.add(Other("d", []))
    assert pending.of(Other) == [other] and len(pending.of(Step)) == 4


def test_what_is_under_way_may_be_two_functions_and_its_vote_is_always_a_number() -> None:
    asked: list[Sequence[int]] = []
    outcomes: list[int] = []
    pending = PendingList(lambda votes: asked.append(votes) or votes)
    pending.add(Polled(lambda: True, outcomes.append))
    pending.settle()
    assert outcomes == [FAILED] and [type(vote) for (vote,) in asked] == [int]


def test_what_nothing_depends_on_stays_under_way_until_it_has_ended() -> None:
    pending, ended = PendingList(), list[bool]()
    pending.add(Polled(lambda: bool(ended)))
    pending.settle()
    assert len(pending) == 1
    ended.append(True)
    pending.settle()
    assert len(pending) == 0
