"""The order of a batch: no other order of its prompts computes fewer tokens, with whatever eviction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mainstem import BadArgument, BadTokens, _core, order
from mainstem.batch.plan import plan
from mainstem.replay.simulate.sweep import replay
from mainstem.replay.trace import Batch, Trace

Prompts = Sequence[Sequence[int]]


def batches(seed: int, count: int, most: int, longest: int = 5, ids: int = 2) -> Iterator[Prompts]:
    """Yields small batches that share much."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        size = rng.integers(2, most + 1)
        yield [rng.integers(0, ids, rng.integers(1, longest + 1)).tolist() for _ in range(size)]


def computed_at_best(prompts: Prompts, found: Sequence[int], capacity: int) -> int:
    """Returns the tokens that are computed in an order with the eviction that knows the future."""
    core = _core.Optimum()
    ends = np.cumsum([0, *(len(prompts[at]) for at in found)])
    tokens = np.array(list(chain.from_iterable(prompts[at] for at in found)), np.uint64)
    core.add(ends.astype(np.int64), tokens)
    core.finish()
    hits, _ = core.run(capacity)
    return len(tokens) - int(hits.sum())


def computed_with_lru(prompts: Prompts, found: Sequence[int], capacity: int) -> int:
    """The same, as the real tree evicts."""
    name: dict[tuple[int, ...], int] = {}
    paths = [
        [name.setdefault(tuple(prompts[at][: end + 1]), len(name)) for end in range(len(prompts[at]))] for at in found
    ]
    row = replay(Trace.of(Batch.of(paths)), "lru", capacity)
    return sum(map(len, paths)) - row.block_hits


def together(found: Sequence[int], prompts: Prompts, depth: int) -> bool:
    """Whether prompts that begin with the same tokens are neighbours."""
    starts = [tuple(prompts[at][:depth]) for at in found if len(prompts[at]) >= depth]
    places = [tuple(prompts[at][:depth]) if len(prompts[at]) >= depth else None for at in found]
    return all(
        places.index(start) + starts.count(start) == len(places) - places[::-1].index(start) for start in set(starts)
    )


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_few_prompts_computes_less_whatever_the_capacity(seed: int) -> None:
    for prompts in batches(seed, 6, 6):
        orders = list(permutations(range(len(prompts))))
        for capacity in range(1, max(map(len, prompts)) + 2):
            least = min(computed_at_best(prompts, each, capacity) for each in orders)
            found = order(prompts, capacity)
            assert computed_at_best(prompts, found, capacity) == least, (prompts, capacity)
            assert computed_with_lru(prompts, found, capacity) == least, (prompts, capacity)


def test_other_orders_compute_more() -> None:
    prompts = [[1, 1, 1], [2, 2, 2], [1, 1, 3], [2, 2, 4]]
    assert computed_at_best(prompts, range(4), 3) == 9 > computed_at_best(prompts, order(prompts), 3) == 8


@pytest.mark.parametrize("with_lengths", [False, True])
def test_lru_finds_all_that_can_be_found_of_many_prompts(with_lengths: bool) -> None:
    for at, prompts in enumerate(batches(7, 40, 60, 12)):
        lengths = np.random.default_rng(at).integers(0, 9, len(prompts)).tolist() if with_lengths else None
        for capacity in (1, 3, 8, 12, 100):
            found = order(prompts, capacity, lengths=lengths)
            wanted = plan(prompts, capacity, lengths=lengths, page_size=1)
            assert computed_with_lru(prompts, found, capacity) == wanted.computed
            assert wanted.order.tolist() == found


@pytest.mark.parametrize("with_lengths", [False, True])
def test_prompts_that_begin_alike_are_neighbours(with_lengths: bool) -> None:
    for at, prompts in enumerate(batches(11, 60, 30, 8)):
        lengths = np.random.default_rng(at).integers(0, 5, len(prompts)).tolist() if with_lengths else None
        found = order(prompts, lengths=lengths)
        assert sorted(found) == list(range(len(prompts)))
        assert all(together(found, prompts, depth) for depth in range(1, 9))
        same = [tuple(prompts[each]) for each in found]
        assert all(same.index(each) + same.count(each) == len(same) - same[::-1].index(each) for each in set(same))


def test_ties_are_broken_by_the_index() -> None:
    prompts = [[5, 1], [3], [5, 2], [4], [3], [5, 1]]
    assert order(prompts) == [0, 5, 2, 1, 4, 3]
    assert order(prompts, lengths=[7] * 6) == [0, 5, 2, 1, 4, 3]


def test_the_longest_answer_of_a_subtree_decides_between_subtrees() -> None:
    prompts = [[1, 1], [2, 1], [1, 2], [2, 2], [3]]
    assert order(prompts, lengths=[1, 2, 9, 3, 8]) == [2, 0, 4, 3, 1]
    assert order(prompts, lengths=[9, 2, 1, 3, 2]) == [0, 2, 3, 1, 4]


def test_what_ends_within_another_prompt_is_its_neighbour() -> None:
    assert order([[1, 2, 3], [9], [1, 2], [1, 2, 3, 4], [1, 2]]) == [0, 3, 2, 4, 1]


def test_answers_decide_between_prompts_that_share_more_than_fits() -> None:
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [1, 9, 9, 9]]
    lengths = [5, 4, 3, 9]
    assert order(prompts, 4, lengths=lengths) == order(prompts, lengths=lengths) == [3, 0, 2, 1]
    assert order(prompts, 3, lengths=lengths) == [3, 0, 1, 2]
    assert order(prompts, 3) == order(prompts) == [0, 2, 1, 3]
    assert order(prompts, 5, lengths=lengths, page_size=2) == [3, 0, 2, 1]
    assert order(prompts, 3, lengths=lengths, page_size=2) == [3, 0, 1, 2]
    assert order([[1, 2, 3, 4], [1, 2, 9, 9], [1, 2, 3, 4]], 3, lengths=[5, 4, 3], page_size=2) == [0, 1, 2]


def test_prompts_share_whole_pages() -> None:
    prompts = [[1, 2, 3, 4], [7, 7, 7, 7], [1, 2, 3, 5]]
    assert order(prompts, lengths=[1, 5, 9], page_size=4) == [2, 1, 0]
    assert order(prompts, lengths=[1, 5, 9], page_size=3) == [2, 0, 1]


@pytest.mark.parametrize("shift", [0, 40, 100])
def test_ids_may_be_tokens_arrays_or_hashes_of_blocks(shift: int) -> None:
    prompts = [[1 << shift, 5], [3 << shift], [1 << shift, 7]]
    assert order(prompts) == [0, 2, 1]
    if shift < 64:
        assert order([np.array(each, np.uint64) for each in prompts]) == [0, 2, 1]
    if not shift:
        assert order([np.array(each, np.int32) for each in prompts]) == [0, 2, 1]


def test_a_chain_of_prompts_is_as_deep_as_it_is_long() -> None:
    whole = list(range(3000))
    prompts = [whole[:end] for end in range(1, 3000)]
    assert order(prompts, lengths=range(1, 3000)) == list(range(2998, -1, -1))


def test_few_or_empty_prompts() -> None:
    assert order([]) == []
    assert order([[4, 2]]) == [0]
    assert order([[], [1], []]) == [0, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"capacity": 0}, "capacity = 0"),
        ({"capacity": 1.5}, "capacity = 1.5"),
        ({"lengths": [1]}, "lengths = '1 of them': must be one for each of the 2 prompts"),
        ({"lengths": [1, -1]}, r"lengths\[1\] = -1"),
        ({"page_size": 0}, "page_size = 0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(BadArgument, match=named):
        order([[1], [2]], **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["text", [1, -1], [0.5], 3])
def test_what_is_no_prompt_is_named(prompt: object) -> None:
    with pytest.raises(BadTokens, match="prompt 1: "):
        order([[1], prompt])


class Engine:
    """An engine that answers in the order in which it is asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def get_tokenizer(self) -> Engine:
        return self

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def generate(self, prompts: Sequence[dict[str, list[int]]], sampling_params: object) -> list[str]:
        self.asked = [prompt["prompt_token_ids"] for prompt in prompts]
        return [bytes(tokens).decode().upper() for tokens in self.asked]


def test_the_page_s_example_asks_in_the_order_and_answers_in_that_of_the_prompts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "batch.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "mainstem.order" in block)
    names: dict[str, Any] = {}
    exec(compile(code, "batch.md", "exec"), names)
    engine, prompts = Engine(), ["abc", "x", "abd", "y", "abc"]
    assert names["generate"](engine, prompts, None) == ["ABC", "X", "ABD", "Y", "ABC"]
    assert [bytes(tokens).decode() for tokens in engine.asked] == ["abc", "abc", "abd", "x", "y"]
