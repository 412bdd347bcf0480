"""The reference model does what the design says, on cases small enough to check by eye."""

from __future__ import annotations

import pytest
from rigs.reference import POLICIES, ReferenceCache, ReferenceTree

from mainstem.errors import BadArgument, LeaseClosed, NotLocked, OutOfPages, StaleHandle


def test_match_is_the_longest_present_prefix_of_whole_pages() -> None:
    tree = ReferenceTree(page_size=2)
    tree.insert("abcdef", [7, 8, 9])
    found = tree.match("abcdxf")
    assert (found.length, found.page_ids, found.partial) == (4, [7, 8], 0)
    assert tree.match("abc").length == 2
    assert tree.peek("abcdef", "other") == 0


def test_insert_reports_what_existed_before() -> None:
    tree = ReferenceTree(page_size=1)
    tree.insert("abc", [0, 1, 2])
    added = tree.insert("abxy", [10, 11, 12, 13])
    assert (added.existing, added.length, added.page_ids) == (2, 4, [0, 1, 12, 13])


def test_partial_is_the_longest_way_into_the_next_page() -> None:
    tree = ReferenceTree(page_size=4)
    tree.insert("aaaabbxx", [0, 1])
    tree.insert("aaaabxxx", [0, 2])
    found = tree.match("aaaabbyy")
    assert found.donor is not None
    assert (found.length, found.partial, found.donor.id) == (4, 2, 1)


def test_in_flight_pages_are_pending_until_they_are_committed() -> None:
    tree = ReferenceTree(page_size=1)
    tree.insert("ab", [0, 1])
    added = tree.insert("abcd", [0, 1, 2, 3], ready=False)
    assert (tree.match("abcde").length, tree.match("abcde").pending) == (2, 2)
    assert tree.evict(9) == []
    tree.commit(added.added)
    assert tree.match("abcde").length == 4


def test_cancel_returns_the_pages() -> None:
    tree = ReferenceTree(page_size=1)
    tree.insert("a", [0])
    added = tree.insert("abc", [0, 1, 2], ready=False)
    assert tree.cancel(added.added) == [1, 2]
    assert tree.evict(9) == [0]


def test_what_follows_a_cancelled_transfer_is_removed_and_stays_until_its_own_has_ended() -> None:
    tree = ReferenceTree(page_size=1)
    first = tree.insert("ab", [0, 1], ready=False)
    second = tree.insert("abcd", [5, 6, 2, 3], ready=False)
    assert (second.existing, second.page_ids) == (2, [0, 1, 2, 3])
    assert tree.cancel(first.added) == [0, 1]
    tree.insert("ab", [7, 8])
    tree.commit(second.added)
    assert (tree.match("abcd").length, tree.match("abcd").pending) == (2, 0)
    assert tree.evict(1) == [3]


def test_a_removed_prefix_goes_first_and_is_not_found() -> None:
    tree = ReferenceTree(page_size=2)
    tree.insert("abcdef", [0, 1, 2])
    tree.insert("abxy", [0, 3])
    end = tree.match("abcdef").end
    tree.lock(end)
    tree.remove("abc")
    assert (tree.match("abcdef").length, tree.match("abxy").length) == (2, 4)
    assert tree.evict(9, only_removed=True) == []
    tree.unlock(end)
    assert tree.evict(9, only_removed=True) == [2, 1]
    tree.remove("")
    assert tree.evict(1) == [3]


def test_the_end_of_a_lease_is_a_use_of_its_prefix() -> None:
    cache = ReferenceCache(4, ReferenceTree(page_size=1))
    for symbols in ("ab", "cd"):
        lease = cache.lease(symbols)
        cache.reserve(lease, 2)
        cache.finish(lease)
    old = cache.lease("abx")
    cache.tree.match("cd")
    cache.abort(old)
    assert cache.tree.evict(1) == [3]


def test_a_lease_without_reuse_computes_all_and_publishes() -> None:
    cache = ReferenceCache(4, ReferenceTree(page_size=1))
    first = cache.lease("ab")
    cache.reserve(first, 2)
    cache.finish(first)
    again = cache.lease("abc", reuse=False)
    assert again.hit == 0
    cache.reserve(again, 3)
    cache.finish(again)
    assert cache.lease("abcd").hit == 3


def test_only_unlocked_leaves_are_evicted() -> None:
    tree = ReferenceTree(page_size=1)
    tree.insert("abc", [0, 1, 2])
    end = tree.match("ab").end
    tree.lock(end)
    assert tree.evict(9) == [2]
    tree.unlock(end)
    with pytest.raises(NotLocked):
        tree.unlock(end)
    assert tree.evict(1) == [1]
    with pytest.raises(StaleHandle):
        tree.lock(end)


@pytest.mark.parametrize(
    ("policy", "gone"),
    [("lru", "bca"), ("lfu", "bca"), ("fifo", "abc"), ("mru", "acb"), ("filo", "cba"), ("slru", "bca"),
     ("priority", "bac")],
)  # fmt: skip
def test_each_policy_has_its_own_order(policy: str, gone: str) -> None:
    tree = ReferenceTree(page_size=1, policy=policy)
    for page, symbol in enumerate("abc"):
        tree.insert(symbol, [page], priority=3 * (symbol == "c"))
    tree.match("a")
    tree.match("a")
    assert [("abc")[page] for page in tree.evict(3)] == list(gone)


def test_every_policy_is_covered() -> None:
    assert set(POLICIES) == {"lru", "lfu", "fifo", "mru", "filo", "slru", "slru:1", "slru:4", "priority"}


def test_a_lease_leaves_the_last_position_and_frees_duplicates() -> None:
    cache = ReferenceCache(8, ReferenceTree(page_size=2))
    first, second = cache.lease("abcd"), cache.lease("abcd")
    for lease in (first, second):
        cache.reserve(lease, 4)
        cache.publish(lease, 4)
    assert first.table == second.table == [0, 1]
    assert cache.free == set(range(2, 8))
    cache.finish(first)
    cache.abort(second)
    again = cache.lease("abcd")
    assert (again.hit, again.table) == (2, [0])
    assert cache.flush() == 1
    cache.finish(again, 2)
    assert cache.flush() == 1


def test_a_hit_inside_a_page_takes_one_private_page() -> None:
    cache = ReferenceCache(2, ReferenceTree(page_size=4), copies=True)
    first = cache.lease("abcd")
    cache.reserve(first, 4)
    cache.finish(first)
    second = cache.lease("abcxy")
    assert (second.hit, cache.private(second)) == (3, [1])
    assert cache.lease("abcyy").hit == 0
    assert cache.flush() == 1


def test_lease_errors_change_nothing() -> None:
    cache = ReferenceCache(2, ReferenceTree(page_size=1))
    lease = cache.lease("abc")
    with pytest.raises(OutOfPages):
        cache.reserve(lease, 3)
    cache.reserve(lease, 2)
    with pytest.raises(BadArgument):
        cache.publish(lease, 3)
    cache.abort(lease)
    with pytest.raises(LeaseClosed):
        cache.reserve(lease, 1)
    assert cache.free == {0, 1}
