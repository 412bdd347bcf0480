"""Plans of batches: what they say is what a cache does, in memory and in a file."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mainstem import BadArgument, BadTokens
from mainstem.batch.plan import Plan, plan, plan_lines

Line = tuple[int, list[int], int]


def lines(seed: int, count: int, first: int = 0) -> list[Line]:
    rng = np.random.default_rng(seed)
    return [
        (first + 3 * at, rng.integers(0, 2, rng.integers(0, 14)).tolist(), int(rng.integers(0, 9)))
        for at in range(count)
    ]


def counts(made: Plan) -> tuple[int, ...]:
    return made.tokens, made.computed, made.least, made.answers


def long_lines(count: int) -> Iterator[tuple[int, np.ndarray, int]]:
    """Yields prompts of 128 tokens, half of which are one of 50 beginnings; no two are equal."""
    starts = np.random.default_rng(0).integers(0, 1000, (50, 64), dtype=np.int32)
    for at in range(count):
        yield at, np.concatenate([starts[at * 7919 % 50], np.full(64, at, np.int32)]), 1


def test_a_plan_counts_tokens_by_hand() -> None:
    prompts = [[1, 2, 3, 4], [9], [1, 2, 3, 5], [1, 2, 3, 4]]
    whole = plan(prompts, lengths=[4, 1, 1, 2], page_size=1)
    assert whole.order.tolist() == [0, 3, 2, 1]
    assert counts(whole) == (13, 6, 6, 8)
    assert (plan(prompts, 2, page_size=1).computed, plan(prompts, 2, page_size=1).least) == (9, 6)
    assert (plan(prompts, 3, page_size=2).computed, plan(prompts, 1, page_size=2).computed) == (9, 13)
    assert plan(prompts, page_size=2).least == 7
    assert counts(plan([[5], [5 + 2**63]], page_size=1)) == (2, 2, 2, 0)
    assert counts(plan([])) == (0, 0, 0, 0)


def test_seconds_follow_from_rates() -> None:
    taken = plan([[1, 2], [1, 3]], lengths=[4, 6], page_size=1)
    assert taken.seconds(prefill_tokens_s=2, decode_tokens_s=5) == 3 / 2 + 10 / 5
    for rates in ((0, 1), (1, 0), (float("nan"), 1)):
        with pytest.raises(BadArgument, match="above 0"):
            taken.seconds(*rates)


@pytest.mark.parametrize("memory_bytes", [2**16, 2**20])
def test_a_file_of_lines_has_the_same_plan_as_prompts_in_memory(memory_bytes: int) -> None:
    given = lines(1, 3000, first=5)
    prompts = [prompt for _, prompt, _ in given]
    for capacity in (None, 1, 4, 5, 100):
        inside = plan(prompts, capacity, lengths=[answer for *_, answer in given], page_size=2)
        outside = plan_lines(given, capacity, page_size=2, memory_bytes=memory_bytes)
        assert counts(outside) == counts(inside)
        assert sorted(outside.order.tolist()) == [number for number, *_ in given]


def test_the_order_of_a_file_is_a_walk_of_the_tree_and_equal_prompts_keep_their_order() -> None:
    given = lines(2, 2000)
    found = [given[number // 3] for number in plan_lines(given, page_size=3, memory_bytes=2**16).order.tolist()]
    pages = [[tuple(prompt[at : at + 3]) for at in range(0, len(prompt) - 2, 3)] for _, prompt, _ in found]
    for depth in range(1, 5):
        starts = [tuple(each[:depth]) for each in pages if len(each) >= depth]
        assert len(set(starts)) == 1 + sum(one != other for one, other in pairwise(starts))
    same = [(own, number) for own, (number, *_) in zip(pages, found, strict=True)]
    assert all(one[1] < other[1] for one, other in pairwise(same) if one[0] == other[0])


def test_the_memory_of_a_plan_does_not_grow_with_its_lines() -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        made = plan_lines(long_lines(count), page_size=16, memory_bytes=2**20)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (made.tokens, made.least) == (128 * count, 64 * (count + 50))
        return most

    assert peak(24_000) < peak(6_000) + 2**17 < 2**21


def test_files_are_where_they_are_wanted_and_gone_afterwards(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        plan_lines(long_lines(10), folder=tmp_path / "missing")
    made = plan_lines(long_lines(10), folder=tmp_path)
    assert len(made.order) == 10
    assert not list(tmp_path.iterdir())
    assert plan_lines([]).order.tolist() == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"capacity": 0}, "capacity = 0"),
        ({"page_size": 0}, "page_size = 0"),
        ({"memory_bytes": 2**16 - 1}, "memory_bytes = 65535"),
        ({"lines": [(-1, [1], 1)]}, "number = -1"),
        ({"lines": [(2**63, [1], 1)]}, "number = "),
        ({"lines": [(1, [1], -1)]}, "answer = -1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(BadArgument, match=named):
        plan_lines(**{"lines": [(0, [1], 0)], **arguments})  # type: ignore[arg-type]


def test_what_is_no_prompt_is_named() -> None:
    with pytest.raises(BadTokens, match="prompt 7: "):
        plan_lines([(0, [1], 0), (7, [1, -1], 0)], page_size=1)
