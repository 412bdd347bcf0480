"""Who shares which pages, against a slow model that looks at every page of every table."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mainstem.runtime.attention.sharing import Run, shared_runs

Tables = list[NDArray[np.int32]]
Parts = list[tuple[int, int]]


@st.composite
def trees(draw: st.DrawFn) -> Tables:
    """Page tables of a random tree: each begins with some pages of an earlier one, and goes on with its own."""
    tables: Tables = []
    fresh = iter(draw(st.permutations(range(200))))
    for _ in range(draw(st.integers(0, 7))):
        parent = draw(st.sampled_from(tables)) if tables else np.empty(0, dtype=np.int32)
        kept = parent[: draw(st.integers(0, len(parent)))]
        own = [next(fresh) for _ in range(draw(st.integers(0, 12)))]
        tables.append(np.concatenate([kept, np.array(own, dtype=np.int32)]).astype(np.int32))
    return tables


@st.composite
def parts_of(draw: st.DrawFn, tables: Tables) -> Parts:
    parts = []
    for table in tables:
        begin = draw(st.integers(0, len(table)))
        parts.append((begin, draw(st.integers(begin, len(table)))))
    return parts


def slow_runs(tables: Tables, parts: Parts, least: int, step: int) -> set[Run]:
    """Looks at each page apart: those who share it are a group, and pages after another of one group are a run."""
    begins = [-(-begin // step) * step for begin, _ in parts]
    groups: dict[tuple[int, ...], list[int]] = {}
    for page in range(max((len(table) for table in tables), default=0)):
        holders: dict[int, list[int]] = {}
        for index, (table, begin, (_, end)) in enumerate(zip(tables, begins, parts, strict=True)):
            if begin <= page < end:
                holders.setdefault(int(table[page]), []).append(index)
        for found in holders.values():
            groups.setdefault(tuple(found), []).append(page)
    runs = set()
    for members, pages in groups.items():
        for _, numbered in groupby(enumerate(pages), lambda pair: pair[1] - pair[0]):
            run = [page for _, page in numbered]
            if len(run) * (len(members) - 1) >= max(1, least):
                runs.add(Run(members, run[0], run[-1] + 1))
    return runs


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_runs_are_those_of_a_model_that_looks_at_every_page(data: st.DataObject) -> None:
    tables = data.draw(trees())
    parts = data.draw(st.one_of(st.just([(0, len(table)) for table in tables]), parts_of(tables)))
    least, step = data.draw(st.sampled_from([1, 3, 8])), data.draw(st.sampled_from([1, 4]))
    runs = shared_runs(tables, parts, least, step)
    assert len(set(runs)) == len(runs)
    assert {run._replace(members=tuple(sorted(run.members))) for run in runs} == slow_runs(tables, parts, least, step)


def table(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def test_levels_of_a_tree_are_runs_of_smaller_and_smaller_groups() -> None:
    tables = [table(7, 8, 9, 3, 4, 1), table(7, 8, 9, 3, 4, 2), table(7, 8, 9, 5, 6), table(0)]
    runs = shared_runs(tables, [(0, len(ids)) for ids in tables])
    assert {run: run.spared for run in runs} == {Run((0, 1, 2), 0, 3): 6, Run((0, 1), 3, 5): 2}


def test_the_same_page_at_another_index_is_not_shared() -> None:
    assert shared_runs([table(5, 6), table(6, 5)], [(0, 2), (0, 2)]) == []


def test_pages_outside_the_parts_are_never_looked_at() -> None:
    """Tables have anything there, such as -1 before a window."""
    tables = [table(-1, -1, 5, 6), table(-1, 4, 5, 6)]
    assert shared_runs(tables, [(2, 4), (1, 4)]) == [Run((0, 1), 2, 4)]


def test_a_run_that_spares_little_is_left_out_but_not_what_follows_it() -> None:
    tables = [table(1, 2, 3, 4), table(1, 2, 3, 5), table(1, 9, 8, 7)]
    assert shared_runs(tables, [(0, 4)] * 3, least=2) == [Run((0, 1, 2), 0, 1), Run((0, 1), 1, 3)]
    assert shared_runs([table(1, 2), table(1, 3)], [(0, 2)] * 2, least=2) == []
