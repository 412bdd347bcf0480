"""Policies: one ranking rule each, the same whether it is built in or written in Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mainstem.cache import PrefixCache
from mainstem.core.reference import POLICIES, ReferenceTree
from mainstem.errors import BadArgument
from mainstem.tree import Tree


class Ranked:
    """A policy in Python."""

    def __init__(self, name: str, rank: Callable[[Any], tuple[float, float]]) -> None:
        self.name = name
        self.rank = rank


COPIES = {
    "lru": lambda node: (node.last_access, 0),
    "lfu": lambda node: (node.hits, node.last_access),
    "fifo": lambda node: (node.created, 0),
    "mru": lambda node: (-node.last_access, 0),
    "filo": lambda node: (-node.created, 0),
    "slru": lambda node: (node.hits >= 2, node.last_access),
    "priority": lambda node: (node.priority, node.last_access),
}


def leaves(policy: Any) -> Tree:
    """Leaves 1 to 5, made in this order; 1 was matched twice, 2 once and 4 has a priority."""
    tree = Tree(page_size=1, policy=policy)
    for token in range(1, 6):
        tree.insert([token], np.array([token], dtype=np.int32), priority=int(token == 4))
    for token in (1, 2, 1):
        tree.match([token])
    return tree


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [3, 4, 5, 2, 1]),
        ("lfu", [3, 4, 5, 2, 1]),
        ("fifo", [1, 2, 3, 4, 5]),
        ("mru", [1, 2, 5, 4, 3]),
        ("filo", [5, 4, 3, 2, 1]),
        ("slru", [3, 4, 5, 2, 1]),
        ("priority", [3, 5, 2, 1, 4]),
    ],
)
def test_each_policy_has_its_own_order(policy: str, order: list[int]) -> None:
    assert leaves(policy).evict(5)[0].tolist() == order
    assert leaves(Ranked(f"my {policy}", COPIES[policy])).evict(5)[0].tolist() == order


def test_lfu_and_slru_differ_from_lru_once_hits_are_old() -> None:
    def last(policy: str) -> list[int]:
        tree = leaves(policy)
        for token in (3, 4, 5, 2):
            tree.match([token])
        return tree.evict(5)[0].tolist()

    assert last("lru") == [1, 3, 4, 5, 2]
    assert last("lfu") == [3, 4, 5, 1, 2]
    assert last("slru") == [3, 4, 5, 1, 2]


def test_a_priority_is_raised_and_never_lowered_by_an_insertion() -> None:
    tree = Tree(page_size=1, policy="priority")
    for token in (1, 2, 3):
        tree.insert([token], np.array([token], dtype=np.int32), priority=1)
    tree.insert([1], np.array([1], dtype=np.int32), priority=5)
    tree.insert([1], np.array([1], dtype=np.int32), priority=0)
    assert tree.evict(3)[0].tolist() == [2, 3, 1]


def test_who_adds_behind_a_prefix_uses_the_prefix() -> None:
    tree = Tree(page_size=1)
    node = tree.insert([1], np.array([1], dtype=np.int32)).node
    tree.insert([2], np.array([2], dtype=np.int32))
    added = tree.insert([1, 3], np.array([1, 3], dtype=np.int32), after=node)
    tree.lock(added.node)
    assert tree.evict(1)[0].tolist() == [2]
    tree.unlock(added.node)
    tree.insert([4], np.array([4], dtype=np.int32))
    assert [tree.evict(1)[0].tolist() for _ in range(3)] == [[3], [1], [4]]


def test_a_python_policy_sees_the_node() -> None:
    seen = []

    def rank(node: Any) -> tuple[float, float]:
        seen.append((node.pages, node.depth_pages, node.hits, node.priority, node.created <= node.last_access))
        return -node.pages, node.last_access

    tree = Tree(page_size=1, policy=Ranked("largest", rank))
    tree.insert([1, 2, 3], np.array([1, 2, 3], dtype=np.int32), priority=2)
    tree.insert([4], np.array([4], dtype=np.int32))
    assert tree.evict(1)[0].tolist() == [3]
    assert {pages for pages, *_ in seen} <= {1, 3}
    assert {priority for *_, priority, _ in seen} == {0, 2}
    assert all(ordered for *_, ordered in seen)


@pytest.mark.parametrize("policy", ["", "LRU", "random", "external", 3, None, object()])
def test_an_unknown_policy_is_refused_with_the_names_that_are_known(policy: Any) -> None:
    with pytest.raises(BadArgument, match=r"lru.*priority|rank"):
        Tree(policy=policy)


def test_an_exception_in_a_python_policy_evicts_nothing() -> None:
    def rank(node: Any) -> tuple[float, float]:
        raise ZeroDivisionError

    tree = Tree(page_size=1, policy=Ranked("broken", rank))
    tree.insert([1, 2], np.array([1, 2], dtype=np.int32))
    with pytest.raises(ZeroDivisionError):
        tree.evict(1)
    assert tree.peek([1, 2]) == 2
    tree.check()


def test_an_exception_in_a_python_policy_loses_no_page() -> None:
    def rank(node: Any) -> tuple[float, float]:
        if node.pages == 1:
            raise ZeroDivisionError
        return node.last_access, 0

    cache = PrefixCache(4, 1, policy=Ranked("broken at times", rank))
    for prompt in ([1], [1, 2, 3]):
        with cache.lease(prompt) as lease:
            lease.reserve(lease.length - lease.reserved)
            lease.publish(lease.length)
    with pytest.raises(ZeroDivisionError):
        cache.flush()
    cache.check()


@pytest.mark.parametrize("builtin", [True, False])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_evicts_the_pages_of_the_reference(policy: str, builtin: bool) -> None:
    rng = random.Random(policy)
    tree = Tree(page_size=2, policy=policy if builtin else Ranked(policy, COPIES[policy]))
    model = ReferenceTree(2, policy)
    page = 0
    for _ in range(150):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(12))]
        pages = np.arange(page, page + len(tokens) // 2, dtype=np.int32)
        page += len(pages)
        tree.insert(tokens, pages, priority=page % 3)
        model.insert(tokens, pages.tolist(), priority=page % 3)
        probe = [rng.randrange(2) for _ in range(rng.randrange(12))]
        assert tree.match(probe).pages.tolist() == model.match(probe).pages
        if rng.random() < 0.4:
            count = rng.randrange(5)
            assert sorted(tree.evict(count)[0].tolist()) == sorted(model.evict(count))
    tree.check()


def test_a_policy_is_asked_again_when_a_split_or_a_cut_changed_the_leaf() -> None:
    tree = Tree(page_size=1, policy=Ranked("deepest first", lambda node: (-node.depth_pages, 0)))
    tree.insert(range(10), np.arange(10, dtype=np.int32))
    tree.insert([100, 101, 102], np.array([20, 21, 22], np.int32))
    tree.insert([100, 101, 109], np.array([20, 21, 29], np.int32))
    assert tree.evict(1)[0].tolist() in ([22], [29])  # depth 2 goes before depth 0
    tree.match(range(8))  # leaves [8, 10), at depth 8
    assert tree.evict(1)[0].tolist() == [9]
