"""A tree in few rows: against sums over all its nodes, and against what was evicted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.tree import Tree
from mainstem.watch.outline import Nodes, left_device, read

PAGE = 2


def insert(tree: Tree, tokens: list[int], ids: Iterator[int], namespace: str | None = None) -> None:
    pages = len(tokens) // PAGE
    tree.insert(tokens, [next(ids) for _ in range(pages)], namespace)


def random_tree(seed: int, prompts: int = 200) -> Tree:
    """Prompts that share beginnings, in three namespaces; some are evicted, some removed."""
    chance, tree, ids = random.Random(seed), Tree(PAGE, tiers=2), iter(range(10**6))
    kept: list[list[int]] = [[]]
    for _ in range(prompts):
        begin = chance.choice(kept)
        tokens = begin[: chance.randrange(len(begin) + 1)] + [
            chance.randrange(5) for _ in range(2 * chance.randrange(1, 9))
        ]
        kept.append(tokens)
        insert(tree, tokens, ids, chance.choice([None, "one", "two"]))
        if chance.random() < 0.1:
            tree.evict(chance.randrange(8))
        if chance.random() < 0.02:
            tree.remove(chance.choice(kept[1:]), "one")
    return tree


@pytest.mark.parametrize("seed", range(10))
def test_sums_are_those_of_all_nodes(seed: int) -> None:
    tree = random_tree(seed)
    nodes, views = read(tree.survey), {view.node: view for view in tree.nodes() if not view.removed}
    real = nodes.column("pages") > 0
    alive = real & (nodes.reached[0] < len(nodes.rows))
    assert set(nodes.column("node")[alive].tolist()) == set(views)
    expected = dict.fromkeys(views, 0)
    for view in views.values():
        at = view.node
        while at:
            expected[at] += view.length // PAGE
            at = views[at].parent
    found = dict(zip(nodes.column("node")[alive].tolist(), nodes.below["pages"][alive].tolist(), strict=True))
    assert found == expected
    roots = nodes.column("parent") == 0
    assert nodes.below["nodes"][roots & ~real].sum() == len(views)
    assert sorted(nodes.names.values()) == sorted(tree.core.namespaces())


@pytest.mark.parametrize("count", [1, 7, 100])
def test_slices_make_the_whole(count: int) -> None:
    tree = random_tree(3)
    asked: list[int] = []

    def survey(first: int, most: int):
        found = tree.survey(first, most)
        asked.append(len(found.rows))
        return found

    assert np.array_equal(read(survey, count).rows, read(tree.survey).rows)
    assert max(asked) <= count


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("most", [1, 5, 40, 10**6])
def test_the_largest_have_their_parents_with_them_and_the_rest_adds_up(seed: int, most: int) -> None:
    nodes = read(random_tree(seed).survey)
    chosen = nodes.largest(most)
    assert len(chosen) <= most
    assert set(nodes.above[chosen]) <= set(chosen)
    alive = nodes.reached[0] < len(nodes.rows)
    smallest = nodes.below["pages"][chosen].min()
    assert (nodes.below["pages"][np.setdiff1d(np.flatnonzero(alive), chosen)] <= smallest).all()
    rest = nodes.rest(chosen)
    real = nodes.column("pages") > 0
    alive &= np.isin(nodes.reached[0], chosen)  # of a namespace that is drawn at all
    assert rest["pages"].sum() + nodes.column("pages")[chosen].sum() == nodes.column("pages")[alive].sum()
    assert rest["nodes"].sum() + real[chosen].sum() == (real & alive).sum()
    assert (rest["pages"] >= 0).all()


def test_a_subtree_alone() -> None:
    tree, ids = Tree(PAGE), iter(range(100))
    for tail in ([1, 1], [2, 2], [3, 3]):
        insert(tree, [0, 0, *tail], ids)
    insert(tree, [9, 9], ids)
    nodes = read(tree.survey)
    shared = int(nodes.column("place")[nodes.largest(2)[1]])
    assert len(nodes.largest(100, shared)) == 4
    assert len(nodes.largest(100)) == 6  # and the root, and the other
    assert len(nodes.largest(100, 10**6)) == 0


def test_an_empty_tree() -> None:
    nodes = read(Tree(PAGE).survey)
    assert len(nodes.largest(10)) == 0
    ticks, pages = left_device(nodes, nodes)
    assert len(ticks) == len(pages) == 0


def test_a_parent_that_changed_between_two_slices_leaves_its_children_out() -> None:
    tree, ids = Tree(PAGE), iter(range(100))
    insert(tree, [0, 0, 1, 1], ids)
    insert(tree, [0, 0, 2, 2], ids)
    nodes = read(tree.survey)
    rows = nodes.rows.copy()
    shared = rows[:, 0] == int(nodes.column("place")[nodes.largest(2)[1]])
    rows[shared, 4] += 1  # it became longer after its children were read
    assert len(Nodes(rows, nodes.names).largest(100)) == 2


def test_what_left_is_what_was_evicted() -> None:
    for seed in range(20):
        tree = random_tree(seed)
        before = read(tree.survey)
        evicted = sum(len(ids) for ids in tree.evict(17))
        ticks, pages = left_device(before, read(tree.survey))
        assert pages.sum() == evicted
        assert len(ticks) == len(pages)
        assert (ticks > 0).all()


def test_splits_and_joins_leave_nothing() -> None:
    tree, ids = Tree(PAGE), iter(range(1000))
    insert(tree, list(range(20)), ids)
    looks = [read(tree.survey)]
    insert(tree, [*range(10), 90, 91], ids)  # which splits it
    looks.append(read(tree.survey))
    assert left_device(*looks)[1].sum() == 0
    found = tree.match([*range(10), 90, 91])
    tree.remove([*range(10), 90, 91])  # which joins it again
    assert found.length == 12
    looks.append(read(tree.survey))
    assert left_device(looks[1], looks[2])[1].sum() == 1


def test_a_join_leaves_nothing() -> None:
    tree, ids = Tree(PAGE), iter(range(1000))
    insert(tree, list(range(20)), ids)
    upper = tree.core.locate(b"", np.arange(20, dtype=np.int32).tobytes(), 5)  # splits it
    before = read(tree.survey)
    tree.lock(upper)
    tree.unlock(upper)
    now = read(tree.survey)
    assert (before.column("pages") > 0).sum() == 2
    assert (now.column("pages") > 0).sum() == 1, "it was not joined"
    assert left_device(before, now)[1].sum() == 0


def test_a_root_comes_before_its_only_child_wherever_they_lie() -> None:
    tree, ids = Tree(PAGE), iter(range(1000))
    for tail in range(5):
        insert(tree, [0, 0, tail, tail], ids, "one")
    tree.evict(100)  # which frees the places in some order
    for name in ("two", "three", "four"):
        insert(tree, [1, 1], ids, name)
    nodes = read(tree.survey)
    places = dict(zip(nodes.column("place").tolist(), nodes.column("parent").tolist(), strict=True))
    assert any(parent > 0 and place < parent for place, parent in places.items()), "no child lies before its root"
    for most in range(1, 6):
        chosen = nodes.largest(most)
        assert set(nodes.above[chosen]) <= set(chosen)


def test_a_prompt_that_is_published_in_pieces_leaves_nothing() -> None:
    cache = PrefixCache(pages=64, page_size=PAGE)
    with cache.lease(list(range(40))) as lease:
        lease.reserve(40)
        looks = []
        for end in (4, 8, 12, 30):
            lease.publish(end)
            looks.append(read(cache.tree.survey))
        lease.finish()
    assert len({int(look.column("node").max()) for look in looks}) == 4, "its node has the same handle all along"
    for before, now in itertools.pairwise(looks):
        assert left_device(before, now)[1].sum() == 0
