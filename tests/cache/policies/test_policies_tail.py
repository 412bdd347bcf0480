"""The policy that cuts the ends of sessions: shorter tails at no fewer hits, where lru loses whole sessions."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.policies import Settings, workloads
from mainstem.cache.tree import Tree
from mainstem.replay.simulate.sweep import hit_blocks, replay

POLICY = "tail"
MAY_LOSE = 0.4
"""Percentage points of block hit rate by which it may be below lru; 0.35 was measured over the workloads below."""
SHAPES_LOSE = 1.4
"""The same where requests have nothing to do with each other, in caches of some hundred pages; 1.27 was measured."""

NAMED = dict(workloads(Settings(accesses=60_000)))


def served(policy: str, prompts: Sequence[Sequence[int]], capacity: int) -> NDArray[np.int64]:
    """Serves each prompt as a replay does, one page a token; returns the pages that each found."""
    tree, page, found = Tree(page_size=1, policy=policy), 0, []
    for prompt in prompts:
        found.append(tree.match(prompt).length)
        tree.insert(prompt, np.arange(page, page := page + len(prompt), dtype=np.int32))
        tree.evict(max(0, tree.stats().cached_pages - capacity))
    tree.check()
    return np.array(found)


def in_turns(sessions: int, pages: int, rounds: int) -> list[list[int]]:
    """Sessions that ask one after the other, again and again."""
    return [[1000 * at + page for page in range(pages)] for _ in range(rounds) for at in range(sessions)]


def test_of_sessions_in_turns_each_loses_its_end_where_lru_loses_all() -> None:
    prompts = in_turns(sessions=20, pages=50, rounds=60)
    by_lru, found = served("lru", prompts, 900), served(POLICY, prompts, 900)
    assert by_lru.sum() == 0, "the least recently used session is the next one"
    late = found[len(found) // 2 :]
    assert late.mean() > 36, "of 50 pages, there is room for 45"
    assert np.quantile(50 - late, 0.9) <= 25, "few wait for more than half of it"


def test_where_sessions_return_at_once_or_never_it_evicts_what_lru_evicts() -> None:
    rng = random.Random("soon")
    prompts: list[list[int]] = []
    for session in range(400):
        pages = [1000 * session + page for page in range(rng.randrange(5, 40))]
        prompts += [pages[: len(pages) * turn // 4] for turn in range(1, 5)]
    assert served(POLICY, prompts, 300).tolist() == served("lru", prompts, 300).tolist()


@pytest.mark.parametrize("name", NAMED)
def test_it_is_never_far_below_lru(name: str) -> None:
    trace = NAMED[name]()
    for percent in (2, 5, 10, 25):
        capacity = max(1, trace.distinct_blocks * percent // 100)
        by_lru, rate = (100 * replay(trace, policy, capacity).block_hit_rate for policy in ("lru", POLICY))
        assert rate > by_lru - (SHAPES_LOSE if name.startswith("popular") else MAY_LOSE), f"{percent} %"


@pytest.mark.parametrize(
    ("name", "percent", "more", "tail"), [("chat, all think alike", 10, 5.0, 0.9), ("mix", 10, 2.0, 0.85)]
)
def test_tails_are_shorter_and_hits_more(name: str, percent: int, more: float, tail: float) -> None:
    """`more`: points of hits; `tail`: the most of lru's 90th percentile."""
    trace = NAMED[name]()
    capacity = trace.distinct_blocks * percent // 100
    lengths = np.diff(trace.whole.offsets)
    by_lru, found = (hit_blocks(trace, policy, capacity) for policy in ("lru", POLICY))
    assert 100 * (found.sum() - by_lru.sum()) / lengths.sum() > more
    assert np.quantile(lengths - found, 0.9) < tail * np.quantile(lengths - by_lru, 0.9)


def test_an_ending_is_no_longer_than_what_was_asked_for_and_memory_is_bounded() -> None:
    tree, page, sizes = Tree(page_size=1, policy=POLICY), 0, []
    for number in range(6000):
        prompt = [number % 40] * 3 + [number]
        tree.match(prompt)
        tree.insert(prompt, np.arange(page, page := page + 4, dtype=np.int32))
        tree.evict(max(0, tree.stats().cached_pages - 100))
        if number in (2_000, 5_999):
            sizes.append(tree.held_bytes())
    tree.check()
    assert sizes[0] == sizes[1]
