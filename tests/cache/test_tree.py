"""The lower interface: match, insertion, split, locks, transfers and eviction, with one component on one tier."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mainstem.cache.components import Full, Window
from mainstem.cache.keys import BigramKeys, Image, TypedKeys
from mainstem.cache.namespaces import Namespace
from mainstem.cache.tree import Tree
from mainstem.errors import BadArgument, BadTokens, NotLocked, StaleHandle


def ids(*page_ids: int) -> np.ndarray:
    return np.array(page_ids, dtype=np.int32)


def single(policy: str = "lru") -> Tree:
    """Makes a tree whose pages hold one token."""
    return Tree(page_size=1, policy=policy)


# ---------------------------------------------------------------- match


def test_an_empty_tree_matches_nothing() -> None:
    found = single().match([1, 2, 3])
    assert (found.node, found.length, found.partial, found.pending) == (0, 0, 0, 0)
    assert found.page_ids.dtype == np.int32
    assert len(found.page_ids) == 0


def test_match_returns_the_pages_of_the_longest_prefix() -> None:
    tree = single()
    tree.insert([1, 2, 3, 4], ids(9, 8, 7, 6))
    found = tree.match([1, 2, 3, 5])
    assert (found.length, found.page_ids.tolist()) == (3, [9, 8, 7])
    assert tree.page_ids(found.node).tolist() == [9, 8, 7]
    assert tree.match([1, 2, 3, 4, 5]).page_ids.tolist() == [9, 8, 7, 6]
    assert tree.match([2, 2, 3, 4]).length == 0


def test_match_splits_where_the_keys_part() -> None:
    tree = single()
    tree.insert([1, 2, 3, 4], ids(0, 1, 2, 3))
    assert tree.stats().nodes == 1
    tree.match([1, 2, 9])
    assert tree.stats().nodes == 2
    assert tree.stats().splits == 1
    assert tree.match([1, 2, 3, 4]).page_ids.tolist() == [0, 1, 2, 3]
    tree.check()


def test_matching_whole_nodes_splits_nothing() -> None:
    tree = single()
    tree.lock(tree.insert([1, 2], ids(0, 1)).node)
    tree.insert([1, 2, 3], ids(0, 1, 2))
    for length in (2, 3):
        tree.match([1, 2, 3][:length])
    assert tree.stats().splits == 0


@pytest.mark.parametrize("size", [2, 3, 16])
def test_lengths_are_rounded_down_to_whole_pages(size: int) -> None:
    tree = Tree(page_size=size)
    tokens = list(range(3 * size + 1))
    assert tree.insert(tokens[: size - 1], ids()).length == 0
    assert tree.stats().namespaces == 0
    assert tree.insert(tokens, ids(5, 6, 7)).length == 3 * size
    assert tree.match(tokens[: 2 * size + 1]).length == 2 * size
    assert tree.match(tokens[: size - 1]).length == 0
    tree.check()


def test_a_page_matches_only_as_a_whole() -> None:
    tree = Tree(page_size=4)
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8], ids(0, 1))
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 9]).length == 4
    assert tree.match([1, 2, 3, 9, 5, 6, 7, 8]).length == 0
    tree.check()


def test_partial_is_the_longest_way_into_the_next_page() -> None:
    tree = Tree(page_size=4)
    tree.insert([1, 1, 1, 1, 2, 2, 2, 2], ids(0, 1))
    tree.insert([1, 1, 1, 1, 2, 2, 3, 3], ids(0, 2))
    tree.insert([1, 1, 1, 1, 4, 4, 4, 4], ids(0, 3))
    found = tree.match([1, 1, 1, 1, 2, 2, 3, 4], partial=True)
    assert (found.length, found.partial, found.partial_page) == (4, 3, 2)
    assert tree.page_ids(found.partial_node).tolist()[:2] == [0, 2]
    short = tree.match([1, 1, 1, 1, 4, 4], partial=True)
    assert (short.length, short.partial, short.partial_page) == (4, 2, 3)
    assert tree.match([1, 1, 1], partial=True).partial == 3


def test_partial_is_only_looked_for_when_asked() -> None:
    tree = Tree(page_size=4)
    tree.insert([1, 2, 3, 4], ids(0))
    assert tree.match([1, 2, 3, 5]).partial == 0
    assert tree.match([9, 2, 3, 4], partial=True).partial == 0


def test_peek_changes_nothing() -> None:
    tree = single()
    tree.insert([1, 2], ids(0, 1))
    tree.insert([3], ids(2))
    before = tree.stats()
    assert tree.peek([1, 5]) == 1
    assert tree.peek([1, 2, 3]) == 2
    assert tree.peek([1], "elsewhere") == 0
    assert tree.stats() == before
    assert tree.evict(1)[0].tolist() == [1]


def test_match_of_an_unknown_namespace_makes_none() -> None:
    tree = single()
    tree.insert([1], ids(0), "here")
    assert tree.match([1], "there").length == 0
    assert tree.stats().namespaces == 1


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_continuation_is_what_followed_in_some_sequence_that_begins_with_the_key(seed: int, page_size: int) -> None:
    rng, tree, known = random.Random(seed), Tree(page_size), []
    for at in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(24))]
        known.append(tokens[: len(tokens) // page_size * page_size])
        tree.insert(tokens, np.arange(at, at + len(tokens) // page_size, dtype=np.int32))
        key, most = [rng.randrange(2) for _ in range(rng.randrange(12))], rng.randrange(12)
        before = tree.stats()
        found = np.frombuffer(tree.continuation(key, most), np.int32).tolist()
        assert tree.stats() == before
        longer = [other for other in known if other[: len(key)] == key and len(other) > len(key)]
        assert bool(found) == bool(longer and most)
        ends = [other for other in longer if other[len(key) :][:most] == found]
        assert ends or not found
        assert len(found) == most or not found or any(len(other) == len(key) + len(found) for other in ends)


def test_a_continuation_is_of_the_sequence_used_last() -> None:
    tree = Tree(page_size=2)
    for last in (5, 7, 9):
        tree.insert([1, 2, 3, last, last, last], ids(last, last + 10, last + 20))

    def after(*key: int) -> list[int]:
        return np.frombuffer(tree.continuation(key, 3), np.int32).tolist()

    assert after(1, 2, 3) == [9, 9, 9]
    tree.match([1, 2, 3, 5, 5, 5])
    assert after(1, 2, 3) == [5, 5, 5]
    assert after(1, 2) == [3, 5, 5]
    assert after(1, 2, 3, 7) == [7, 7]
    assert after(1, 2, 3, 6) == after(2) == after(1, 2, 3, 5, 5, 5) == []


def test_a_continuation_stays_in_its_namespace_and_does_not_need_the_pages() -> None:
    tree = Tree(page_size=2)
    tree.insert([1, 2, 3, 4], ids(0, 1), Namespace(salt="a"))
    assert tree.continuation([1, 2], 9) == tree.continuation([1, 2], 9, Namespace(salt="b")) == b""
    assert len(tree.continuation([1, 2], 9, Namespace(salt="a"))) == 8
    tree.remove([1, 2, 3, 4], Namespace(salt="a"))
    assert tree.continuation([1, 2], 9, Namespace(salt="a")) == b""


def test_a_continuation_can_be_continued_as_it_is_returned() -> None:
    tree = Tree(1, keys=TypedKeys(100))
    tree.insert([1, Image(b"x" * 16, 6), 5, 6], range(9))  # type: ignore[list-item]
    found = tree.continuation([1], 6)
    key = np.array([1], "<u4").tobytes() + found
    assert np.frombuffer(tree.continuation(key, 9, encoded=True), "<u4").tolist() == [5, 6]
    assert tree.continuation(key, 9, Namespace(salt="b"), encoded=True) == b""
    with pytest.raises(BadArgument, match="most = -1"):
        tree.continuation(key, -1, encoded=True)


def test_a_continuation_refuses_what_is_out_of_range() -> None:
    with pytest.raises(BadTokens):
        single().continuation([-1], 3)
    with pytest.raises(BadArgument, match="most"):
        single().continuation([1], -1)


# ---------------------------------------------------------------- insert


def test_insert_reports_what_existed_before() -> None:
    tree = single()
    first = tree.insert([1, 2, 3], ids(0, 1, 2))
    assert (first.length, first.existing, first.page_ids.tolist()) == (3, 0, [0, 1, 2])
    second = tree.insert([1, 2, 4, 5], ids(10, 11, 12, 13))
    assert (second.length, second.existing, second.page_ids.tolist()) == (4, 2, [0, 1, 12, 13])
    assert tree.stats().cached_pages == 5


def test_insert_of_an_existing_prefix_adopts_nothing() -> None:
    tree = single()
    first = tree.insert([1, 2, 3], ids(0, 1, 2))
    again = tree.insert([1, 2, 3], ids(7, 8, 9))
    assert (again.node, again.existing, again.page_ids.tolist()) == (first.node, 3, [0, 1, 2])
    shorter = tree.insert([1, 2], ids(7, 8))
    assert (shorter.existing, tree.page_ids(shorter.node).tolist()) == (2, [0, 1])
    assert tree.stats().inserted_pages == 3
    tree.check()


def test_insert_resumes_at_a_handle() -> None:
    tree = single()
    node = tree.insert([1, 2], ids(0, 1)).node
    added = tree.insert([1, 2, 3, 4], ids(0, 1, 2, 3), after=node)
    assert (added.existing, added.length, added.page_ids.tolist()) == (2, 4, [2, 3])
    assert tree.page_ids(added.node).tolist() == [0, 1, 2, 3]
    tree.check()


def test_insert_resumes_before_an_existing_part() -> None:
    tree = single()
    tree.insert([1, 2, 3, 4], ids(0, 1, 2, 3))
    node = tree.match([1]).node
    added = tree.insert([1, 2, 3, 9], ids(10, 11, 12, 13), after=node)
    assert (added.existing, added.page_ids.tolist()) == (3, [1, 2, 13])


def test_insert_at_its_own_end_does_nothing() -> None:
    tree = single()
    node = tree.insert([1, 2], ids(0, 1)).node
    added = tree.insert([1, 2], ids(0, 1), after=node)
    assert (added.node, added.length, added.existing, len(added.page_ids)) == (node, 2, 2, 0)


def test_insert_refuses_a_handle_that_is_not_on_the_key() -> None:
    tree = single()
    node = tree.insert([1, 2], ids(0, 1)).node
    for tokens in ([1, 3, 4], [1]):
        with pytest.raises(BadArgument):
            tree.insert(tokens, ids(*range(5, 5 + len(tokens))), after=node)
    assert tree.stats().cached_pages == 2
    tree.check()


def test_insert_refuses_a_handle_of_another_namespace() -> None:
    tree = single()
    node = tree.insert([1, 2], ids(0, 1), "a").node
    with pytest.raises(BadArgument):
        tree.insert([1, 2, 3], ids(0, 1, 2), "b", after=node)
    assert tree.peek([1, 2, 3], "a") == 2


@pytest.mark.parametrize("page_ids", [[0], [0, 1, 2], [0, -1]])
def test_insert_refuses_page_ids_that_do_not_fit(page_ids: list[int]) -> None:
    tree = single()
    with pytest.raises(BadArgument):
        tree.insert([1, 2], ids(*page_ids))
    assert tree.stats().cached_pages == 0
    assert tree.stats().namespaces == 0


def test_siblings_are_distinguished_by_their_first_page() -> None:
    tree = Tree(page_size=2)
    for page, token in enumerate(range(100, 400)):
        tree.insert([7, token], ids(page))
    for page, token in enumerate(range(100, 400)):
        assert tree.match([7, token]).page_ids.tolist() == [page]
    assert tree.stats().nodes == 300
    tree.check()


def test_a_split_copies_what_policies_rank_by() -> None:
    tree = single()
    tree.insert([1, 2, 3], ids(0, 1, 2), priority=4)
    tree.match([1, 2, 3])
    whole = next(tree.nodes())
    tree.insert([1, 9], ids(0, 9))
    upper, lower, _ = tree.nodes()
    assert (upper.hits, upper.created, upper.priority) == (whole.hits, whole.created, whole.priority) == (1, 1, 4)
    assert (lower.hits, lower.created, lower.priority) == (1, 1, 4)
    assert (upper.last_access, lower.last_access) == (3, whole.last_access)


# ---------------------------------------------------------------- locks


def test_locked_pages_are_not_evicted() -> None:
    tree = single()
    tree.insert([1, 2, 3, 4], ids(0, 1, 2, 3))
    node = tree.match([1, 2]).node
    tree.lock(node)
    assert (tree.stats().locked_pages, tree.stats().evictable_pages) == (2, 2)
    assert sorted(tree.evict(9)[0].tolist()) == [2, 3]
    tree.unlock(node)
    assert sorted(tree.evict(9)[0].tolist()) == [0, 1]


def test_locks_are_counted() -> None:
    tree = single()
    node = tree.insert([1, 2], ids(0, 1)).node
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(9)[0].tolist() == []
    tree.unlock(node)
    assert len(tree.evict(9)[0]) == 2


def test_unlock_without_a_lock_changes_nothing() -> None:
    tree = single()
    node = tree.insert([1, 2], ids(0, 1)).node
    upper = tree.match([1]).node
    tree.lock(node)
    with pytest.raises(NotLocked):
        tree.unlock(upper)
    tree.check()
    assert tree.stats().locked_pages == 2
    tree.unlock(node)
    with pytest.raises(NotLocked):
        tree.unlock(node)
    tree.check()


def test_locks_of_two_branches_add_up_on_what_they_share() -> None:
    tree = single()
    left = tree.insert([1, 2], ids(0, 1)).node
    right = tree.insert([1, 3], ids(0, 2)).node
    tree.lock(left)
    tree.lock(right)
    tree.unlock(left)
    assert tree.evict(9)[0].tolist() == [1]
    tree.unlock(right)
    assert sorted(tree.evict(9)[0].tolist()) == [0, 2]


def test_a_split_keeps_locks_on_both_halves() -> None:
    tree = single()
    node = tree.insert([1, 2, 3, 4], ids(0, 1, 2, 3)).node
    tree.lock(node)
    upper = tree.match([1, 2]).node
    tree.lock(upper)
    tree.unlock(node)
    tree.check()
    assert sorted(tree.evict(9)[0].tolist()) == [2, 3]
    tree.unlock(upper)
    assert tree.stats().evictable_pages == 2


def test_the_root_may_be_locked_for_nothing() -> None:
    tree = single()
    tree.lock(0)
    tree.unlock(0)
    tree.unlock(0)
    assert tree.page_ids(0).tolist() == []


# ---------------------------------------------------------------- handles


def test_a_split_keeps_the_handle_of_the_end() -> None:
    tree = single()
    node = tree.insert([1, 2, 3, 4], ids(0, 1, 2, 3)).node
    upper = tree.match([1, 2]).node
    assert upper != node
    assert tree.page_ids(node).tolist() == [0, 1, 2, 3]
    assert tree.page_ids(upper).tolist() == [0, 1]


def test_a_handle_goes_stale_when_its_end_is_cut_off() -> None:
    tree = single()
    node = tree.insert([1, 2, 3], ids(0, 1, 2)).node
    assert tree.evict(1)[0].tolist() == [2]
    for call in (tree.lock, tree.unlock, tree.page_ids, tree.commit, tree.cancel):
        with pytest.raises(StaleHandle):
            call(node)
    with pytest.raises(StaleHandle):
        tree.insert([1, 2, 3, 4], ids(5, 6, 7, 8), after=node)
    assert tree.match([1, 2, 3]).length == 2
    tree.check()


def test_a_handle_stays_stale_when_its_place_is_used_again() -> None:
    tree = single()
    old = tree.insert([1, 2], ids(0, 1)).node
    tree.evict(2)
    new = [tree.insert([token], ids(token)).node for token in range(50)]
    assert old not in new
    with pytest.raises(StaleHandle):
        tree.lock(old)
    assert tree.stats().locked_pages == 0


def test_a_handle_stays_stale_when_the_same_prefix_comes_back() -> None:
    tree = single()
    old = tree.insert([1, 2, 3], ids(0, 1, 2)).node
    tree.evict(1)
    tree.insert([1, 2, 3], ids(0, 1, 2))
    with pytest.raises(StaleHandle):
        tree.page_ids(old)


@pytest.mark.parametrize("handle", [1, 2**31, 2**62, -1, (1 << 32) + 12345])
def test_a_made_up_handle_is_refused(handle: int) -> None:
    tree = single()
    with pytest.raises((StaleHandle, BadArgument)):
        tree.lock(handle)


# ---------------------------------------------------------------- in flight


def test_a_match_stops_before_pages_in_flight() -> None:
    tree = single()
    tree.insert([1, 2], ids(0, 1))
    in_flight = tree.insert([1, 2, 3, 4], ids(0, 1, 2, 3), ready=False)
    assert (in_flight.existing, in_flight.length) == (2, 4)
    found = tree.match([1, 2, 3, 4, 5])
    assert (found.length, found.pending) == (2, 2)
    assert tree.match([1, 2, 3, 9]).pending == 1
    assert tree.match([1, 2, 9]).pending == 0
    assert tree.peek([1, 2, 3, 4]) == 2
    stats = tree.stats()
    assert (stats.cached_pages, stats.in_flight_pages, stats.evictable_pages) == (2, 2, 0)


def test_commit_makes_pages_matchable() -> None:
    tree = single()
    in_flight = tree.insert([1, 2], ids(0, 1), ready=False)
    tree.commit(in_flight.node)
    assert tree.match([1, 2]).page_ids.tolist() == [0, 1]
    assert tree.stats().evictable_pages == 2
    with pytest.raises(BadArgument):
        tree.commit(in_flight.node)
    tree.check()


def test_cancel_returns_the_pages() -> None:
    tree = single()
    tree.insert([1], ids(0))
    in_flight = tree.insert([1, 2, 3], ids(0, 1, 2), ready=False)
    returned = tree.cancel(in_flight.node)
    assert np.concatenate([np.asarray(part, dtype=np.int32).ravel() for part in returned]).tolist() == [1, 2]
    assert tree.match([1, 2, 3]).length == 1
    with pytest.raises(StaleHandle):
        tree.commit(in_flight.node)
    assert tree.stats().in_flight_pages == 0
    tree.check()


def test_cancel_of_all_there_is_removes_the_namespace() -> None:
    tree = single()
    tree.cancel(tree.insert([1, 2], ids(0, 1), "ns", ready=False).node)
    assert (tree.stats().namespaces, tree.stats().nodes) == (0, 0)


def test_what_is_in_flight_and_its_ancestors_are_not_evicted() -> None:
    tree = single()
    tree.insert([1, 2, 9], ids(0, 1, 9))
    in_flight = tree.insert([1, 2, 3], ids(0, 1, 2), ready=False)
    assert tree.evict(9)[0].tolist() == [9]
    tree.commit(in_flight.node)
    assert sorted(tree.evict(9)[0].tolist()) == [0, 1, 2]


def test_an_insertion_after_pages_in_flight_is_found_once_they_are_committed() -> None:
    tree = single()
    first = tree.insert([1, 2, 3], ids(0, 1, 2), ready=False)
    second = tree.insert([1, 2, 4], ids(10, 11, 12), ready=False)
    assert (second.length, second.existing, second.page_ids.tolist()) == (3, 2, [0, 1, 12])
    tree.commit(second.node)
    assert (tree.peek([1, 2, 4]), tree.match([1, 2, 4]).pending) == (0, 2)
    tree.check()
    tree.commit(first.node)
    assert tree.match([1, 2, 4]).page_ids.tolist() == [0, 1, 12]
    assert tree.match([1, 2, 3]).page_ids.tolist() == [0, 1, 2]
    tree.check()


def test_insert_after_a_handle_in_flight() -> None:
    tree = single()
    in_flight = tree.insert([1, 2], ids(0, 1), ready=False)
    added = tree.insert([1, 2, 3], ids(0, 1, 2), after=in_flight.node)
    assert (added.length, added.existing, added.page_ids.tolist()) == (3, 2, [2])
    assert tree.peek([1, 2, 3]) == 0
    tree.commit(in_flight.node)
    assert tree.peek([1, 2, 3]) == 3
    tree.check()


def test_pages_that_only_a_lock_keeps_keep_their_use() -> None:
    """A lock on the host keeps a node whose device pages are evicted. Filled again, it is what it was."""
    tree = Tree(page_size=1, tiers=2)
    node = tree.insert([1, 2], ids(0, 1), priority=3).node
    tree.match([1, 2])
    tree.lock(node, tier=1)
    (before,) = tree.nodes()
    tree.evict(2)
    tree.insert([1, 2], ids(4, 5), priority=1)
    (after,) = tree.nodes()
    assert (after.node, after.priority, after.hits, after.created) == (node, 3, 1, before.created)
    tree.unlock(node, tier=1)
    tree.check()


def test_pages_after_a_cancelled_transfer_are_freed_when_their_own_transfer_ends() -> None:
    for end in ("commit", "cancel"):
        tree = single()
        first = tree.insert([1, 2, 3], ids(0, 1, 2), ready=False)
        second = tree.insert([1, 2, 4, 5], ids(10, 11, 12, 13), ready=False)
        assert tree.cancel(first.node)[0].tolist() == [0, 1, 2]
        assert tree.flush()[0].tolist() == []  # its pages are still being written
        tree.check()
        again = tree.insert([1, 2, 4], ids(20, 21, 22))
        assert (again.existing, tree.match([1, 2, 4, 5]).page_ids.tolist()) == (0, [20, 21, 22])
        if end == "commit":
            tree.commit(second.node)
            assert tree.match([1, 2, 4, 5]).length == 3
            assert tree.evict(2)[0].tolist() == [12, 13]
        else:
            assert tree.cancel(second.node)[0].tolist() == [12, 13]
        tree.check()
        assert sorted(tree.flush()[0].tolist()) == [20, 21, 22]
        assert tree.stats().nodes == tree.stats().namespaces == 0


def test_a_transfer_that_adds_nothing_has_nothing_in_flight() -> None:
    tree = single()
    first = tree.insert([1, 2], ids(0, 1), ready=False)
    again = tree.insert([1, 2], ids(5, 6), ready=False)
    assert (again.length, again.existing) == (2, 2)
    tree.commit(first.node)
    assert tree.stats().locked_pages == 0
    tree.check()


# ---------------------------------------------------------------- removal


def test_a_removed_prefix_is_not_found_and_its_pages_are_freed() -> None:
    tree = Tree(page_size=2)
    tree.insert([1, 2, 3, 4, 5, 6], ids(0, 1, 2))
    tree.insert([1, 2, 3, 9], ids(0, 3))
    tree.insert([1, 2, 7, 8], ids(0, 4))
    [[freed]] = tree.remove([1, 2, 3])
    assert sorted(freed.tolist()) == [1, 2, 3]
    assert [tree.peek(tokens) for tokens in ([1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 7, 8])] == [2, 2, 4]
    [[freed]] = tree.remove([1, 2, 7, 8])
    assert freed.tolist() == [4]
    assert tree.remove([1, 2, 7, 8])[0][0].tolist() == []
    assert tree.remove([9])[0][0].tolist() == []
    tree.check()


def test_a_removed_namespace_leaves_the_others() -> None:
    tree = single()
    for space in ("a", "b"):
        tree.insert([1, 2], ids(0, 1) if space == "a" else ids(2, 3), space)
    assert sorted(tree.remove([], "a")[0][0].tolist()) == [0, 1]
    assert (tree.peek([1, 2], "a"), tree.peek([1, 2], "b")) == (0, 2)
    assert tree.remove([], "unknown")[0][0].tolist() == []
    tree.check()


@pytest.mark.parametrize("policy", ["lru", "lfu", "gittins", "arc"])
def test_what_is_locked_outlives_its_removal_and_goes_first_then(policy: str) -> None:
    tree = Tree(page_size=1, policy=policy)
    tree.insert([7, 8], ids(7, 8))
    node = tree.insert([1, 2, 3], ids(0, 1, 2)).node
    tree.lock(node)
    assert tree.remove([1, 2])[0][0].tolist() == []
    assert tree.peek([1, 2, 3]) == 1
    other = tree.insert([1, 2, 3], ids(10, 11, 12))
    assert other.page_ids.tolist() == [0, 11, 12]
    assert tree.page_ids(node).tolist() == [0, 1, 2]
    tree.check()
    tree.unlock(node)
    assert [view.removed for view in tree.nodes() if 2 in view.cells["full", 0].ids] == [True]
    assert tree.evict(2)[0].tolist() in ([1, 2], [2, 1])
    assert tree.peek([1, 2, 3]) == 3
    tree.check()


def test_pages_before_a_removed_page_can_be_evicted_with_it() -> None:
    tree = single()
    node = tree.insert(range(12), range(12)).node
    tree.lock(node)
    tree.remove(range(12))
    tree.unlock(node)
    assert tree.stats().evictable_pages == 12
    assert tree.evict(12)[0].tolist()[0] == 11
    assert tree.stats().nodes == tree.stats().namespaces == 0
    tree.check()


def test_removed_nodes_are_shown_after_what_they_follow() -> None:
    tree = single()
    node = tree.insert(range(8), range(8)).node
    tree.lock(node)
    tree.remove(range(8))
    tree.remove(range(4))
    seen = [0]
    for view in tree.nodes():
        assert view.parent in seen
        seen.append(view.node)
    assert "8 tokens in 3 nodes" in tree.pretty()


def test_a_hole_that_others_have_in_flight_below_it_is_left_to_them() -> None:
    tree = Tree(page_size=1, components=(Window(2),))
    tree.insert([1, 2], ids(0, 1))
    first = tree.insert([1, 2, 3, 4, 5, 6], ids(0, 1, 2, 3, 4, 5), ready=False)
    assert sorted(tree.evict(2, "window")[0].tolist()) == [0, 1]
    second = tree.insert([1, 2, 3, 4, 5, 6], ids(20, 21, 22, 23, 24, 25), ready=False)
    assert (second.length, second.existing) == (0, 0)
    tree.commit(first.node)
    assert tree.match([1, 2]).length == 0, "its pages were never written"
    tree.check()


def test_a_transfer_that_a_removal_has_cut_can_be_cancelled() -> None:
    tree = single()
    first = tree.insert([1, 2, 3, 4], ids(0, 1, 2, 3), ready=False)
    tree.insert([1, 2, 9], ids(0, 1, 9))
    tree.remove([1, 2, 3])
    assert sorted(tree.cancel(first.node)[0].tolist()) == [0, 1, 2, 3]
    tree.check()
    assert tree.flush()[0].tolist() == [9]
    assert tree.stats().nodes == 0


def test_a_policy_that_fails_loses_nothing_of_what_was_removed() -> None:
    class Failing:
        name = "failing"
        fails = False

        def rank(self, node: Any) -> tuple[float, float]:
            if self.fails:
                raise ZeroDivisionError
            return 0, 0

    policy = Failing()
    tree = Tree(page_size=1, policy=policy)
    tree.insert([1, 2, 3, 4], ids(0, 1, 2, 3))
    policy.fails = True
    [[freed]] = tree.remove([1, 2, 3])
    policy.fails = False
    assert sorted([*freed.tolist(), *tree.flush()[0].tolist()]) == [0, 1, 2, 3]


def test_tokens_that_make_no_symbol_are_no_namespace() -> None:
    tree = Tree(page_size=1, keys=BigramKeys())
    tree.insert([1, 2, 3], ids(0, 1))
    with pytest.raises(BadTokens, match="no symbol"):
        tree.remove([5])
    assert tree.peek([1, 2, 3]) == 2
    assert len(tree.remove([])[0][0]) == 2


def test_a_node_whose_removed_child_is_locked_cannot_go_before_it() -> None:
    tree = single()
    node = tree.insert([1, 2, 3], ids(0, 1, 2)).node
    tree.lock(node)
    tree.remove([1, 2])
    tree.remove([1])
    with pytest.raises(NotLocked):
        tree.unlock(tree.insert([5], ids(5)).node)
    assert tree.flush()[0].tolist() == [5]
    tree.unlock(node)
    assert tree.evict_removed()[0].tolist() == [1, 2, 0]
    tree.check()
    assert tree.stats().namespaces == 0


def test_a_lock_on_what_is_in_flight_outlives_its_end() -> None:
    tree = single()
    for end in (tree.commit, tree.cancel):
        node = tree.insert([1, 2], ids(0, 1), ready=False).node
        tree.lock(node)
        end(node)
        tree.check()
        assert tree.flush()[0].tolist() == []
        tree.unlock(node)
        tree.flush()
        assert tree.stats().nodes == 0


def test_partial_never_names_a_page_in_flight() -> None:
    tree = Tree(page_size=4)
    tree.insert([1, 2, 3, 4], ids(0), ready=False)
    assert tree.match([1, 2, 3, 9], partial=True).partial == 0


@pytest.mark.parametrize(("younger", "symbols"), [(31, 3), (32, 0)])
def test_partial_looks_at_the_32_youngest_children(younger: int, symbols: int) -> None:
    tree = Tree(page_size=4)
    for first in range(younger + 1):
        tree.insert([first, first, first, 100], [first])
    assert tree.match([0, 0, 0, 9], partial=True).partial == symbols
    assert tree.match([younger] * 3, partial=True).partial == 3


def test_of_pages_that_agree_equally_partial_names_the_youngest() -> None:
    tree = Tree(page_size=4)
    for page, last in enumerate((7, 8, 9)):
        tree.insert([1, 2, last, last], [page])
    assert (tree.match([1, 2, 3], partial=True).partial, tree.match([1, 2, 3], partial=True).partial_page) == (2, 2)
    assert tree.match([1, 2, 8, 0], partial=True).partial_page == 1


def test_commit_of_what_is_not_in_flight_is_refused() -> None:
    tree = single()
    node = tree.insert([1], ids(0)).node
    for call in (tree.commit, tree.cancel):
        with pytest.raises(BadArgument):
            call(node)
    assert tree.match([1]).length == 1


# ---------------------------------------------------------------- evict


def test_evict_returns_exactly_as_many_pages_as_requested() -> None:
    tree = single()
    tree.insert(list(range(10)), np.arange(10, dtype=np.int32))
    assert tree.evict(0)[0].tolist() == []
    assert sorted(tree.evict(3)[0].tolist()) == [7, 8, 9]
    assert tree.match(list(range(10))).length == 7
    assert sorted(tree.evict(100)[0].tolist()) == list(range(7))
    assert tree.evict(1)[0].tolist() == []
    assert (tree.stats().nodes, tree.stats().namespaces) == (0, 0)
    tree.check()


def test_evict_takes_leaves_before_their_parents() -> None:
    tree = single()
    tree.insert([1, 2], ids(0, 1))
    tree.insert([1, 3], ids(0, 2))
    gone = [int(tree.evict(1)[0][0]) for _ in range(3)]
    assert gone[-1] == 0
    assert tree.stats().evicted_pages == 3


def test_evict_refuses_a_negative_number() -> None:
    with pytest.raises(BadArgument):
        single().evict(-1)


def test_flush_spares_what_is_locked_or_in_flight() -> None:
    tree = single()
    tree.insert([1, 2], ids(0, 1))
    tree.lock(tree.match([1]).node)
    tree.insert([3], ids(3), ready=False)
    tree.insert([4, 5], ids(4, 5), "other")
    assert sorted(tree.flush()[0].tolist()) == [1, 4, 5]
    assert tree.stats().namespaces == 1
    tree.check()


def test_match_protects_from_lru_eviction() -> None:
    tree = single()
    for token in (1, 2, 3):
        tree.insert([token], ids(token))
    tree.match([1])
    assert tree.evict(3)[0].tolist() == [2, 3, 1]


# ---------------------------------------------------------------- views


def test_statistics_add_up() -> None:
    tree = Tree(page_size=2)
    tree.insert([1, 2, 3, 4, 5, 6], ids(0, 1, 2))
    tree.lock(tree.match([1, 2, 9, 9]).node)
    tree.match([8, 8, 8])
    tree.evict(1)
    stats = tree.stats()
    assert stats.cached_pages == stats.evictable_pages + stats.locked_pages == 2
    assert (stats.match_calls, stats.queried_symbols, stats.hit_symbols) == (2, 7, 2)
    assert (stats.inserted_pages, stats.evicted_pages, stats.splits) == (3, 1, 1)
    assert len(tree.evict(100)[0]) == 1
    assert tree.stats().evicted_pages == 2, "what was freed, not what was requested"


def test_statistics_are_a_copy_that_nobody_changes() -> None:
    tree = Tree(page_size=2)
    before, same = tree.stats(), tree.stats()
    tree.match([1, 2])
    after = tree.stats()
    assert before == same != after and hash(before) == hash(same)
    assert (before.match_calls, after.match_calls) == (0, 1)
    with pytest.raises(AttributeError):
        after.match_calls = 7  # type: ignore[misc]
    counts = after.as_dict()
    assert counts.pop("match_calls") == 1 and counts.pop("queried_symbols") == 2 and not any(counts.values())
    assert repr(after).startswith("TreeStats(match_calls=1, queried_symbols=2, hit_symbols=0, ")


def test_nodes_are_listed_depth_first_and_add_up() -> None:
    tree = single()
    tree.insert([1, 2, 3], ids(0, 1, 2))
    tree.insert([1, 5], ids(0, 3))
    tree.insert([7], ids(4), "other")
    views = list(tree.nodes(None))
    assert [(view.start, view.length, view.children) for view in views] == [(0, 1, 2), (1, 2, 0), (1, 1, 0)]
    assert [view.parent for view in views] == [0, views[0].node, views[0].node]
    assert [view.cells["full", 0].ids.tolist() for view in views] == [[0], [1, 2], [3]]
    assert len(list(tree.nodes("other"))) == 1
    assert list(tree.nodes("none such")) == []
    assert len(list(tree.nodes())) == tree.stats().nodes == 4


def test_pretty_names_every_node_once() -> None:
    tree = single()
    tree.insert([1, 2, 3], ids(0, 1, 2))
    tree.insert([1, 5], ids(0, 3))
    assert len(tree.pretty().strip().splitlines()) >= 3


def test_a_chain_of_many_nodes_needs_no_recursion() -> None:
    tree = single()
    tokens = [token % 7 for token in range(5000)]
    page_ids = np.arange(5000, dtype=np.int32)
    node = 0
    for end in range(10, 5001, 10):
        node = tree.insert(tokens[:end], page_ids[:end], after=node).node
        tree.lock(node)  # else it is joined to the next
    assert tree.stats().nodes == 500
    tree.lock(node)
    assert tree.match(tokens).length == 5000
    tree.unlock(node)
    assert len(list(tree.nodes())) == 500
    for view in list(tree.nodes()):
        tree.unlock(view.node)
    assert sorted(tree.evict(5000)[0].tolist()) == list(range(5000))
    tree.check()


# ---------------------------------------------------------------- joining


def grow(tree: Tree, lengths: list[int], lock: bool = False) -> list[int]:
    """Inserts one sequence piece by piece; returns the handles of the insertions."""
    nodes = [0]
    for end in np.cumsum(lengths).tolist():
        nodes.append(tree.insert(list(range(end)), np.arange(end, dtype=np.int32), after=nodes[-1]).node)
        if lock:
            tree.lock(nodes[-1])
    return nodes[1:]


def test_what_comes_in_pieces_becomes_one_node() -> None:
    tree = single()
    *earlier, last = grow(tree, [5, 1, 1, 20])
    assert [(view.length, view.node) for view in tree.nodes()] == [(27, last)]
    for node in earlier:  # these ends no longer exist
        with pytest.raises(StaleHandle):
            tree.lock(node)
    assert tree.page_ids(last).tolist() == list(range(27))
    assert tree.match(list(range(6))).length == 6
    tree.check()


def test_a_lock_keeps_its_end_apart_until_it_goes() -> None:
    tree = single()
    first, second, third = grow(tree, [4, 4, 4], lock=True)
    assert [view.length for view in tree.nodes()] == [4, 4, 4]
    tree.unlock(second)
    assert [view.length for view in tree.nodes()] == [4, 8]
    tree.unlock(first)
    assert [(view.length, view.cells["full", 0].locks) for view in tree.nodes()] == [(12, 1)]
    tree.unlock(third)
    assert tree.stats().evictable_pages == 12
    tree.check()


def test_a_long_sequence_has_nodes_of_bounded_length() -> None:
    """A join never moves more than one node of maximal length."""
    tree = Tree(page_size=16)
    tokens, page_ids = list(range(40 * 512)), np.arange(40 * 32, dtype=np.int32)
    node = 0
    for end in range(512, len(tokens) + 1, 512):
        node = tree.insert(tokens[:end], page_ids[: end // 16], after=node).node
    assert [view.length for view in tree.nodes()] == [4096] * 5
    assert tree.held_bytes() < 5 * len(tokens) + 4096
    tree.check()


@pytest.mark.parametrize("reason", ["branch", "hit", "priority", "policy", "in flight", "tier", "component"])
def test_nodes_that_a_policy_or_a_caller_could_distinguish_are_not_joined(reason: str) -> None:
    tree = {
        "policy": lambda: Tree(page_size=1, policy="fifo"),
        "tier": lambda: Tree(page_size=1, tiers=2),
        "component": lambda: Tree(page_size=1, components=(Full(), Window(4))),
    }.get(reason, lambda: Tree(page_size=1))()
    page_ids = [0, 1, 2]
    node = tree.insert([1, 2], [page_ids[:2]] * 2 if reason == "component" else page_ids[:2]).node
    tree.lock(node)
    if reason == "branch":
        tree.insert([1, 2, 9], [0, 1, 9], after=node)
    elif reason == "hit":
        tree.match([1, 2])
    elif reason == "tier":
        tree.attach(node, [5, 6], tier=1)
        tree.commit(node, tier=1)
    options = {"priority": 1} if reason == "priority" else {"ready": False} if reason == "in flight" else {}
    tree.insert([1, 2, 3], [page_ids] * 2 if reason == "component" else page_ids, after=node, **options)
    tree.unlock(node)
    assert tree.length(node) == 2
    assert tree.stats().nodes == 2 + (reason == "branch")
    tree.check()


def test_the_memory_of_a_tree_shrinks_with_its_content() -> None:
    tree = single()
    length = 1 << 16
    tokens = np.arange(length, dtype=np.int32) % 1000
    tree.insert(tokens, np.arange(length, dtype=np.int32))
    tree.match(tokens[:1])
    full = tree.held_bytes()
    tree.evict(length - 1)
    assert tree.stats().cached_pages == 1
    assert tree.held_bytes() < full / 20


def test_the_same_calls_give_the_same_tree() -> None:
    def run() -> tuple[list[int], str]:
        tree, rng, gone = single(), random.Random(5), []
        for step in range(300):
            tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
            tree.insert(tokens, np.arange(step * 10, step * 10 + len(tokens), dtype=np.int32))
            gone += tree.evict(rng.randrange(4))[0].tolist()
        return gone, tree.pretty()

    assert run() == run()


@pytest.mark.parametrize("tier", [-1, 1, 3, 2**40, 0.5, None])
def test_a_tier_that_is_not_there_is_refused(tier: Any) -> None:
    tree = Tree(page_size=1)
    node = tree.insert([1, 2], ids(0, 1)).node
    calls = (tree.lock, tree.unlock, tree.commit, tree.cancel, lambda node, tier: tree.page_ids(node, tier=tier))
    for call in (*calls, lambda node, tier: tree.evict(1, tier=tier), lambda node, tier: tree.flush(tier)):
        with pytest.raises(BadArgument, match="tier"):
            call(node, tier)
    for read in (tree.core.counts, tree.core.waiting):
        with pytest.raises(BadArgument):
            read(0, 7)
        with pytest.raises(BadArgument):
            read(7, 0)
    tree.check()


def test_insert_refuses_a_handle_whose_path_differs_anywhere() -> None:
    tree = Tree(page_size=1)
    node = tree.insert([1, 2, 3, 4], ids(1, 2, 3, 4)).node
    tree.insert([1, 2, 7], ids(1, 2, 7))  # so that the path is two nodes
    with pytest.raises(BadArgument, match="path"):
        tree.insert([9, 9, 9, 4, 5], ids(90, 91, 92, 93, 94), after=node)
    with pytest.raises(BadArgument, match="path"):
        tree.insert([9, 2, 3, 4, 5], ids(90, 91, 92, 93, 94), after=node)
    assert tree.match([1, 2, 3, 4, 5]).length == 4
    tree.check()


def test_the_same_component_twice_is_refused() -> None:
    for components in ((), (Full(), Full()), (Full(), Window(2), Window(2))):
        with pytest.raises(BadArgument, match="components"):
            Tree(components=components)


def test_attach_refuses_ids_below_zero() -> None:
    tree = Tree(page_size=1, tiers=2)
    node = tree.insert([1, 2], ids(0, 1)).node
    with pytest.raises(BadArgument):
        tree.attach(node, [-1, -1])
    tree.check()


def test_a_chain_is_printed_in_lines_of_one_depth() -> None:
    tree = Tree(page_size=1)
    for end in range(1, 400):
        tree.insert(range(end), np.arange(end, dtype=np.int32))
    assert max(len(line) for line in tree.pretty().splitlines()) < 60


def test_a_namespace_is_printed_in_words() -> None:
    tree = Tree(page_size=1)
    tree.insert([1], ids(1), Namespace(adapter="french", salt="tenant"))
    assert "adapter='french', salt='tenant'" in tree.pretty()
