"""How far a prompt can go on from what host and storage have: compared with a rule written page by page."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from mainstem.cache.components import Chunked, Component, Full, State, Window
from mainstem.tiers.prefetch.plan import Plan

ROWS: dict[str, tuple[Component, ...]] = {
    "full": (Full(),),
    "window": (Window(5),),
    "full window": (Full(), Window(5)),
    "full state": (Full(), State()),
    "full chunked": (Full(), Chunked(6)),
    "full window chunked state": (Full(), Window(3), Chunked(4), State()),
    "window state": (Window(1), State()),
}


def needed(component: Component, end: int, size: int) -> set[int]:
    """Returns the pages that a prefix of `end` pages needs, position by position."""
    if isinstance(component, State):
        return {end - 1}
    positions = range(end * size)
    if isinstance(component, Window):
        positions = positions[-component.tokens :]
    if isinstance(component, Chunked):
        positions = range(end * size // component.tokens * component.tokens, end * size)
    return {position // size for position in positions}


def usable(plan: Plan, rows: Sequence[Component], end: int, size: int) -> bool:
    there = [plan.held[row] | plan.stored[row] for row in range(len(rows))]
    return all(there[row][page] for row, component in enumerate(rows) for page in needed(component, end, size))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ROWS)
def test_the_deepest_end_and_what_it_needs_are_those_of_the_rule(kind: str, size: int) -> None:
    rng, rows = random.Random(f"{kind} {size}"), ROWS[kind]
    for _ in range(300):
        pages = rng.randint(1, 12)
        have = rng.randint(0, pages)
        plan = Plan(rows, [True] * len(rows), size, have, pages)
        for marks in (*plan.held, *plan.stored):
            marks[:] = [rng.random() < rng.choice((0.5, 0.9)) for _ in range(pages)]
        most = rng.randint(have, pages)
        ends = [end for end in range(have + 1, most + 1) if usable(plan, rows, end, size)]
        depth = plan.deepest(most)
        assert depth == max(ends, default=have)
        if depth > have:
            missing = {(row, page) for row, begin, end in plan.missing(depth) for page in range(begin, end)}
            assert missing == {
                (row, page)
                for row, component in enumerate(rows)
                for page in needed(component, depth, size)
                if not plan.held[row][page]
            }
        for row, component in enumerate(rows):
            useful = set[int]().union(*(needed(component, end, size) for end in range(have + 1, pages + 1)))
            lacking = {page for page in useful if not plan.held[row][page]}
            assert lacking <= set(plan.asked(row).tolist()), "every page that some end needs is asked for"


def test_what_has_no_content_is_neither_asked_for_nor_in_the_way() -> None:
    plan = Plan((Full(), State()), (False, True), 2, 0, 6)
    assert plan.asked(0).tolist() == [] and plan.asked(1).tolist() == [0, 1, 2, 3, 4, 5]
    assert plan.in_the_way(plan.deepest(6)) == (0, 0), "nothing is stored that a state could stand in the way of"
    plan.stored[1][3] = True
    assert plan.in_the_way(plan.deepest(6)) == (0, 0)
    assert plan.deepest(6) == 4 and plan.deepest(3) == 0
    assert list(plan.missing(4)) == [(0, 0, 4), (1, 3, 4)], "pages are allocated, though nothing is read into them"


def test_what_stands_in_the_way_of_the_first_component_is_named() -> None:
    plan = Plan((Full(), Window(4), State()), (True,) * 3, 2, 0, 6)
    for row in range(3):
        plan.stored[row][:] = True
    assert plan.in_the_way(plan.deepest(6)) == (0, 0)
    plan.stored[2][4:] = False
    assert plan.in_the_way(plan.deepest(6)) == (2, 2)
    plan.stored[1][2:] = False
    assert plan.in_the_way(plan.deepest(6)) == (4, 1)
    plan.stored[0][3:] = False
    assert plan.in_the_way(plan.deepest(6)) == (1, 1)


def test_runs_are_read_row_by_row_and_from_the_front() -> None:
    plan = Plan((Full(), Window(8), State()), (True,) * 3, 1, 2, 12)
    for row in range(3):
        plan.stored[row][:] = True
    plan.held[0][:5] = True
    plan.held[1][np.array([5, 8])] = True
    assert list(plan.missing(11)) == [(0, 5, 11), (1, 3, 5), (1, 6, 8), (1, 9, 11), (2, 10, 11)]


# ---------------------------------------------------------------- few requests


class Counting:
    """What storage has, by row, and the pages that it was asked for."""

    def __init__(self, there: Sequence[NDArray[np.bool_]]) -> None:
        self.there, self.rounds = there, list[list[tuple[int, int]]]()

    def ask(self, row: int, pages: NDArray[np.int64]) -> list[bool]:
        self.rounds.append([(row, page) for page in pages.tolist()])
        found: list[bool] = self.there[row][pages].tolist()
        return found

    @property
    def asked(self) -> int:
        return sum(map(len, self.rounds))


def plans(rows: Sequence[Component], size: int, have: int, pages: int) -> tuple[Plan, Plan]:
    one, other = (Plan(rows, [True] * len(rows), size, have, pages) for _ in range(2))
    return one, other


@pytest.mark.parametrize("every_end", [False, True])
@pytest.mark.parametrize("kind", ROWS)
def test_a_search_finds_the_end_that_asking_for_everything_finds(kind: str, every_end: bool) -> None:
    rng, rows = random.Random(f"{kind} {every_end}"), ROWS[kind]
    for _ in range(300):
        pages = rng.randint(1, 90)
        have, reach = rng.randint(0, pages), rng.randint(0, pages)
        whole, few = plans(rows, 2, have, pages)
        there = [np.array([rng.random() < rng.choice((0.2, 0.9, 1)) for _ in range(pages)]) for _ in rows]
        for row, component in enumerate(rows):
            if isinstance(component, Full):
                there[row] = np.arange(pages) < reach
                whole.held[row][:have] = few.held[row][:have] = True
            whole.stored[row] = there[row]
        store = Counting(there)
        few.stored = few.search(store.ask, every_end)
        depth = few.deepest(pages)
        assert depth == whole.deepest(pages)
        for row, begin, end in few.missing(depth) if depth > have else ():
            assert there[row][begin:end].all()
        asked = [one for pages_asked in store.rounds for one in pages_asked]
        assert len(asked) == len(set(asked)), "no page twice"
        assert set(asked) <= {(row, page) for row in range(len(rows)) for page in whole.asked(row).tolist()}
        for row, component in enumerate(rows):  # what was asked for is there if storage says so; of the rest:
            pages_asked = [page for at, page in asked if at == row]
            assert (few.stored[row][pages_asked] == there[row][pages_asked]).all() or isinstance(component, Full)
            others = np.setdiff1d(np.flatnonzero(few.stored[row]), pages_asked)
            if isinstance(component, Full):  # one that is there stands for those before it
                assert there[row][few.stored[row] & ~few.held[row]].all()
            elif isinstance(component, State) or every_end:
                assert not len(others), "a state that was not asked for is not there"
        if every_end:
            for most in range(have, depth + 1):
                assert few.deepest(most) == whole.deepest(most), "other ranks may reach less"


def test_a_search_asks_for_few_pages_of_a_long_prompt() -> None:
    rows, pages = (Full(), Window(512), State()), 8192  # 128k tokens, of 16 a page
    for reach, asked, rounds in ((0, 16, 1), (8192, 16 + 16 + 32, 3), (5000, 16 * 4 + 16 + 32, 6)):
        plan, _ = plans(rows, 16, 0, pages)
        store = Counting([np.arange(pages) < reach] * 3)
        plan.stored = plan.search(store.ask, False)
        assert plan.deepest(pages) == reach
        assert store.asked <= asked and len(store.rounds) <= rounds
    assert sum(len(plan.asked(row)) for row in range(3)) == 3 * pages, "all at once"


def test_a_search_goes_back_to_the_last_state_in_growing_steps() -> None:
    plan, _ = plans((Full(), State()), 16, 0, 8192)
    state = np.arange(8192) == 8000
    store = Counting([np.ones(8192, np.bool_), state])
    plan.stored = plan.search(store.ask, False)
    assert plan.deepest(8192) == 8001
    assert [len(pages) for pages in store.rounds] == [16, 16, 32, 64, 128]
    assert plan.in_the_way(8001) == (191, 1)
