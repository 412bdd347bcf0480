"""PrefixCache and Lease: the owner of each page, the length of a hit, and errors that change nothing."""

from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rigs.cache import owners, prefill

from mainstem import _core
from mainstem.cache.components import Chunked, Component, Full, State, Window
from mainstem.cache.keys import BigramKeys, Image, TokenKeys, TypedKeys
from mainstem.cache.namespaces import Namespace
from mainstem.cache.prefix_cache import Lease, PrefixCache
from mainstem.errors import BadArgument, BadTokens, CorruptTree, LeaseClosed, OutOfPages


def serve(cache: PrefixCache, tokens: Any, namespace: Any = None) -> int:
    """Runs a prompt from lease to finish; returns its hit."""
    lease = prefill(cache, tokens, namespace)
    lease.finish()
    return lease.hit


# ---------------------------------------------------------------- the hit


def test_a_first_request_hits_nothing() -> None:
    cache = PrefixCache(8, 4)
    lease = cache.lease([1, 2, 3, 4, 5])
    assert (lease.hit, lease.hit_tokens, lease.length, lease.reserved, lease.published) == (0, 0, 5, 0, 0)
    assert lease.page_table.dtype == np.int32
    assert lease.page_table.tolist() == []
    lease.abort()


def test_a_second_request_hits_the_pages_of_the_first() -> None:
    cache = PrefixCache(8, 4)
    first = prefill(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = cache.lease([1, 2, 3, 4, 5, 6, 7, 8, 0])
    assert (second.hit, second.reserved, second.published) == (8, 8, 8)
    assert second.page_table.tolist() == first.page_table.tolist()[:2]
    first.finish()
    second.abort()
    assert owners(cache) == (6, 2, 0)


@pytest.mark.parametrize(("size", "hit"), [(1, 7), (2, 6), (4, 4), (8, 0), (16, 0)])
def test_the_last_position_is_always_left_to_compute(size: int, hit: int) -> None:
    cache = PrefixCache(32, size)
    prompt = list(range(8))
    assert serve(cache, prompt) == 0
    assert cache.peek(prompt) == hit
    assert serve(cache, prompt) == hit
    assert cache.peek([*prompt, 9]) == (hit if size == 16 else 8)
    owners(cache)


def test_a_prompt_of_one_token_never_hits() -> None:
    cache = PrefixCache(4, 1)
    assert [serve(cache, [1]) for _ in range(3)] == [0, 0, 0]
    assert owners(cache) == (3, 1, 0)


def test_an_empty_prompt_is_refused() -> None:
    cache = PrefixCache(4, 1)
    with pytest.raises((BadTokens, BadArgument)):
        cache.lease([])
    assert owners(cache) == (4, 0, 0)


def test_bad_tokens_leave_the_cache_as_it_was() -> None:
    cache = PrefixCache(4, 1, keys=TokenKeys(vocab_size=10))
    lease = cache.lease([1, 2])
    for call in (lambda: cache.lease([1, 10]), lambda: cache.peek([-1]), lambda: lease.append([3, 11])):
        with pytest.raises(BadTokens):
            call()
    assert lease.length == 2
    lease.abort()
    assert owners(cache) == (4, 0, 0)


def test_peek_is_what_a_lease_would_hit_and_changes_nothing() -> None:
    cache = PrefixCache(8, 2)
    serve(cache, [1, 2, 3, 4])
    before = cache.stats()
    assert [cache.peek(prompt) for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 9], [9])] == [4, 2, 2, 0]
    assert cache.stats() == before


def test_a_continuation_is_a_draft_in_token_ids() -> None:
    cache = PrefixCache(8, 2)
    serve(cache, [1, 2, 3, 4, 5, 6])
    assert cache.continuation(np.array([1, 2, 3], np.int32), 2).tolist() == [4, 5]
    assert cache.continuation(np.array([2], np.int32), 2).tolist() == []
    with pytest.raises(BadArgument, match="most"):
        cache.continuation(np.array([1], np.int32), -1)
    with pytest.raises(BadArgument, match="keys"):
        PrefixCache(8, 2, keys=BigramKeys()).continuation(np.array([1], np.int32), 2)


def test_a_continuation_ends_before_an_image() -> None:
    cache = PrefixCache(16, 2, keys=TypedKeys(100))
    serve(cache, [1, 2, 3, Image(b"x" * 16, 6), 4, 5])
    assert cache.continuation(np.array([1], np.int32), 9).tolist() == [2, 3]


def test_namespaces_share_nothing() -> None:
    cache = PrefixCache(16, 1)
    serve(cache, [1, 2, 3], Namespace(adapter="a"))
    assert serve(cache, [1, 2, 3], Namespace(salt="a")) == 0
    assert serve(cache, [1, 2, 3]) == 0
    assert serve(cache, [1, 2, 3], Namespace(adapter="a")) == 2
    assert owners(cache) == (7, 9, 0)


# ---------------------------------------------------------------- inside a page


class Copies:
    """Records what a cache asks to copy, and checks the owner of each page at that time."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int, int]] = []
        self.cache: PrefixCache | None = None

    def __call__(self, source: int, target: int, positions: int) -> None:
        assert self.cache is not None
        assert (self.cache.pool.owner(source), self.cache.pool.owner(target)) == ("cached", "private")
        assert source != target
        self.done.append((source, target, positions))


def copying(pages: int, size: int, **options: Any) -> tuple[PrefixCache, Copies]:
    copies = Copies()
    copies.cache = PrefixCache(pages, size, copy_page=copies, **options)
    return copies.cache, copies


def test_a_hit_inside_a_page_copies_its_tail_into_a_private_page() -> None:
    cache, copies = copying(8, 4)
    first = prefill(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    second = cache.lease([1, 2, 3, 4, 5, 6, 9])
    assert (second.hit, second.reserved, second.published) == (6, 6, 4)
    shared, own = second.page_table.tolist()
    assert shared == first.page_table[0]
    assert copies.done == [(int(first.page_table[1]), own, 2)]
    assert owners(cache) == (5, 2, 1)
    second.reserve(1)
    assert len(second.page_table) == 2
    second.abort()
    first.finish()
    assert owners(cache) == (6, 2, 0)


def test_backing_off_by_one_copies_the_rest_of_the_last_page() -> None:
    cache, copies = copying(8, 4)
    serve(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.peek([1, 2, 3, 4, 5, 6, 7, 8]) == 7
    lease = cache.lease([1, 2, 3, 4, 5, 6, 7, 8])
    assert lease.hit == 7
    assert [positions for *_, positions in copies.done] == [3]
    lease.reserve(1)
    lease.publish(8)
    assert owners(cache) == (6, 2, 0)
    lease.finish()
    assert owners(cache) == (6, 2, 0)


def test_a_hit_at_a_page_boundary_copies_nothing() -> None:
    cache, copies = copying(8, 4)
    serve(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.lease([1, 2, 3, 4, 9, 9]).hit == 4
    assert copies.done == []


def test_without_a_page_for_the_tail_the_hit_ends_at_the_page_boundary() -> None:
    cache, copies = copying(2, 4)
    first = prefill(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    second = cache.lease([1, 2, 3, 4, 5, 6, 9])
    assert (second.hit, len(second.page_table)) == (4, 1)
    assert copies.done == []
    first.finish()
    second.abort()
    assert owners(cache) == (0, 2, 0)
    assert (cache.stats().leases.partial_missed, cache.stats().pool.locked) == (1, 0)


def test_the_page_that_is_copied_is_not_evicted_for_its_copy() -> None:
    cache, copies = copying(1, 4)
    serve(cache, [1, 2, 3, 4])
    lease = cache.lease([1, 2, 3, 9])
    assert (lease.hit, copies.done) == (0, [])
    lease.abort()
    assert owners(cache) == (0, 1, 0)
    assert cache.stats().pool.locked == 0


def test_another_page_is_evicted_for_the_copy() -> None:
    cache, copies = copying(2, 4)
    serve(cache, [1, 2, 3, 4])
    serve(cache, [5, 6, 7, 8])
    lease = cache.lease([1, 2, 3, 9])
    assert (lease.hit, len(copies.done)) == (3, 1)
    assert owners(cache) == (0, 1, 1)
    lease.abort()


def test_a_lease_without_a_page_for_its_copy_counts_as_one_match() -> None:
    cache, _ = copying(1, 4)
    serve(cache, [1, 2, 3, 4])
    before = cache.tree.stats().match_calls
    cache.lease([1, 2, 3, 9]).abort()
    assert cache.tree.stats().match_calls == before + 1


def test_an_error_while_copying_leaves_no_lease_behind() -> None:
    def fail(source: int, target: int, positions: int) -> None:
        raise ZeroDivisionError

    cache = PrefixCache(4, 4, copy_page=fail)
    serve(cache, [1, 2, 3, 4])
    with pytest.raises(ZeroDivisionError):
        cache.lease([1, 2, 3, 9])
    assert owners(cache) == (3, 1, 0)
    assert cache.flush() == 1


# ---------------------------------------------------------------- tokens that are not positions


def image(number: int, length: int = 8) -> Image:
    return Image(number.to_bytes(16, "big"), length)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_a_hit_never_cuts_an_image(size: int, copies: bool) -> None:
    options = {"copy_page": lambda *_: None} if copies else {}
    cache = PrefixCache(200, size, keys=TypedKeys(), **options)
    prompt = [1, 2, image(1, 40), 3, image(2, 10), 4]
    serve(cache, prompt)
    for asked in (prompt, prompt[:3], prompt[:5], [*prompt[:4], image(3, 10)], [1, 2, image(4, 40), 3]):
        ends_of_tokens = {0, 1, 2, 42, 43, 53, 54}
        lease = cache.lease(asked)
        assert lease.hit in ends_of_tokens
        assert lease.hit < lease.length
        sequence = cache.tree.keys.sequence()
        sequence.append(asked)
        assert lease.hit == sequence.floor(lease.hit)
        assert copies or lease.hit % size == 0
        assert cache.peek(asked) == lease.hit
        lease.abort()
    owners(cache)


def test_hit_tokens_count_an_image_once() -> None:
    cache = PrefixCache(100, 1, keys=TypedKeys())
    serve(cache, [1, image(1), 2, 3])
    lease = cache.lease([1, image(1), 2, 9])
    assert (lease.hit, lease.hit_tokens, lease.length) == (10, 3, 11)
    lease.abort()
    alone = cache.lease([1, image(1)])
    assert (alone.hit, alone.hit_tokens) == (1, 1)


def test_bigrams_have_one_position_less_than_tokens() -> None:
    cache = PrefixCache(16, 1, keys=BigramKeys())
    serve(cache, [1, 2, 3, 4])
    lease = cache.lease([1, 2, 3, 9])
    assert (lease.hit, lease.length) == (2, 3)
    lease.append([5])
    assert lease.length == 4


# ---------------------------------------------------------------- reserve and publish


def test_reserve_counts_positions_and_takes_pages() -> None:
    cache = PrefixCache(4, 4)
    lease = cache.lease(list(range(5)))
    lease.reserve(5)
    assert (lease.reserved, len(lease.page_table)) == (5, 2)
    lease.reserve(3)
    assert (lease.reserved, len(lease.page_table)) == (8, 2)
    lease.reserve(1)
    assert (lease.reserved, len(lease.page_table)) == (9, 3)
    lease.reserve(0)
    assert owners(cache) == (1, 0, 3)
    with pytest.raises(BadArgument):
        lease.reserve(-1)
    lease.abort()


def test_reserve_evicts_what_nobody_holds() -> None:
    cache = PrefixCache(4, 1)
    serve(cache, [1, 2, 3])
    lease = cache.lease([1, 7, 8, 9])
    lease.reserve(3)
    assert (lease.hit, owners(cache)) == (1, (0, 1, 3))
    lease.abort()


def test_out_of_pages_changes_nothing() -> None:
    cache = PrefixCache(6, 1)
    held = prefill(cache, [1, 2])
    serve(cache, [3, 4])
    lease = cache.lease([5, 6, 7, 8, 9])
    table, before = lease.page_table.tolist(), owners(cache)
    with pytest.raises(OutOfPages) as refused:
        lease.reserve(5)
    error = refused.value
    assert (error.needed, error.free, error.evictable, error.total) == (5, 2, 2, 6)
    assert (owners(cache), lease.page_table.tolist(), lease.reserved) == (before, table, 0)
    assert cache.peek([3, 4, 5]) == 2
    lease.reserve(4)
    assert owners(cache) == (0, 2, 4)
    lease.abort()
    held.finish()


def test_publish_makes_whole_pages_visible_at_once() -> None:
    cache = PrefixCache(8, 4)
    prompt = list(range(10))
    lease = cache.lease(prompt)
    lease.reserve(10)
    assert cache.peek(prompt) == 0
    lease.publish(7)
    assert (lease.published, cache.peek(prompt), owners(cache)) == (4, 4, (5, 1, 2))
    lease.publish(8)
    lease.publish(3)
    assert (lease.published, cache.peek(prompt), owners(cache)) == (8, 8, (5, 2, 1))
    lease.finish(8)
    assert owners(cache) == (6, 2, 0)


@pytest.mark.parametrize("upto", [-1, 5, 7, 100])
def test_publish_beyond_what_is_reserved_or_known_is_refused(upto: int) -> None:
    cache = PrefixCache(8, 2)
    lease = cache.lease([1, 2, 3, 4, 5, 6])
    lease.reserve(4)
    with pytest.raises(BadArgument):
        lease.publish(upto)
    with pytest.raises(BadArgument):
        lease.finish(upto)
    assert (lease.published, owners(cache)) == (0, (6, 0, 2))
    lease.reserve(8)
    with pytest.raises(BadArgument):
        lease.publish(7)
    lease.abort()


def test_a_duplicate_is_freed_and_the_page_table_shows_the_tree() -> None:
    cache = PrefixCache(8, 1)
    first, second = cache.lease([1, 2, 3]), cache.lease([1, 2, 4])
    for lease in (first, second):
        lease.reserve(3)
    assert owners(cache) == (2, 0, 6)
    first.publish(3)
    second.publish(3)
    assert owners(cache) == (4, 4, 0)
    assert second.page_table.tolist()[:2] == first.page_table.tolist()[:2]
    assert second.page_table[2] != first.page_table[2]
    first.finish()
    assert cache.flush() == 1
    second.finish()
    assert cache.flush() == 3


def test_what_a_lease_holds_is_not_evicted() -> None:
    cache = PrefixCache(4, 1)
    first = prefill(cache, [1, 2, 3])
    assert cache.flush() == 0
    page_ids = first.page_table.tolist()
    first.abort()
    second = cache.lease([1, 2, 9])
    assert cache.flush() == 1
    assert second.page_table.tolist() == page_ids[:2]
    second.abort()


def test_leases_share_a_lock_and_the_last_gives_it_up() -> None:
    cache = PrefixCache(8, 1)
    first = prefill(cache, [1, 2, 3])
    second = cache.lease([1, 2, 3, 4])
    first.finish()
    assert cache.flush() == 0
    second.abort()
    assert cache.flush() == 3


# ---------------------------------------------------------------- append, finish, abort


def test_appended_tokens_are_published_less_the_last() -> None:
    cache = PrefixCache(16, 1)
    lease = prefill(cache, [1, 2, 3])
    for token in (4, 5, 6):
        lease.append([token])
        lease.reserve(1)
    assert lease.length == 6
    lease.finish()
    assert owners(cache) == (11, 5, 0)
    assert cache.peek([1, 2, 3, 4, 5, 6, 7]) == 5


def test_finish_publishes_a_prompt_whole() -> None:
    cache = PrefixCache(8, 2)
    lease = cache.lease([1, 2, 3, 4, 5])
    lease.reserve(5)
    lease.finish()
    assert owners(cache) == (6, 2, 0)


def test_finish_upto_publishes_so_far_and_not_less_than_was() -> None:
    cache = PrefixCache(8, 1)
    lease = cache.lease([1, 2, 3, 4, 5])
    lease.reserve(5)
    lease.publish(3)
    lease.finish(2)
    assert (cache.peek([1, 2, 3, 4, 5]), owners(cache)) == (3, (5, 3, 0))


def test_abort_publishes_nothing_more() -> None:
    cache = PrefixCache(8, 1)
    lease = cache.lease([1, 2, 3, 4])
    lease.reserve(4)
    lease.publish(2)
    lease.abort()
    assert (cache.peek([1, 2, 3, 4]), owners(cache)) == (2, (6, 2, 0))


def test_a_second_end_does_nothing_and_other_calls_are_refused() -> None:
    cache = PrefixCache(8, 1)
    for end in ("finish", "abort"):
        lease = prefill(cache, [1, 2, 3])
        getattr(lease, end)()
        before = owners(cache)
        lease.finish()
        lease.abort()
        for call in (lambda: lease.reserve(1), lambda: lease.publish(1), lambda: lease.append([1])):  # noqa: B023
            with pytest.raises(LeaseClosed):
                call()
        assert owners(cache) == before


def test_a_lease_left_by_an_exception_aborts() -> None:
    cache = PrefixCache(8, 1)
    with pytest.raises(BadArgument), cache.lease([1, 2, 3]) as lease:  # noqa: PT012
        lease.reserve(3)
        lease.publish(4)
    assert owners(cache) == (8, 0, 0)


@pytest.mark.usefixtures("little_garbage")
def test_a_lease_that_was_forgotten_is_named_and_taken_back() -> None:
    cache = PrefixCache(8, 1)
    lease = prefill(cache, [1, 2, 3])
    lease.append([4])
    lease.reserve(1)
    with pytest.warns(ResourceWarning, match="lease"):  # noqa: PT031
        del lease
        gc.collect()
    cache.lease([9]).abort()
    assert owners(cache) == (5, 3, 0)
    assert cache.flush() == 3


def test_a_lease_left_quietly_leaves_nothing_private_or_locked() -> None:
    cache = PrefixCache(8, 1)
    with cache.lease([1, 2, 3]) as lease:
        lease.reserve(3)
        lease.publish(3)
    assert owners(cache) == (5, 3, 0)
    assert cache.flush() == 3


# ---------------------------------------------------------------- the cache switched off


def test_a_disabled_cache_forgets() -> None:
    cache = PrefixCache(8, 2, enabled=False)
    first = prefill(cache, [1, 2, 3, 4])
    assert owners(cache) == (6, 0, 2)
    assert cache.peek([1, 2, 3, 4, 5]) == 0
    second = cache.lease([1, 2, 3, 4])
    assert second.hit == 0
    with pytest.raises(BadArgument):
        second.publish(1)
    first.append([5])
    first.finish()
    second.abort()
    assert owners(cache) == (8, 0, 0)


# ---------------------------------------------------------------- statistics and arguments


def test_flush_returns_how_many_pages_it_freed() -> None:
    cache = PrefixCache(8, 1)
    serve(cache, [1, 2, 3])
    held = prefill(cache, [1, 5])
    assert cache.flush() == 2
    assert owners(cache) == (6, 2, 0)
    held.abort()
    assert cache.flush() == 2
    assert cache.flush() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"pages": 0},
        {"pages": -1},
        {"page_size": 0},
        {"page_size": -4},
        {"policy": "best"},
    ],
)
def test_a_cache_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadArgument):
        PrefixCache(**{"pages": 8, **options})


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "mru", "filo", "slru", "priority"])
def test_every_policy_serves(policy: str) -> None:
    cache = PrefixCache(6, 2, policy=policy)
    for prompt in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9, 0], [1, 2, 3, 4, 5, 6], [0] * 12):
        serve(cache, prompt)
        owners(cache)
    assert cache.flush() > 0


def test_a_priority_of_a_lease_reaches_the_policy() -> None:
    cache = PrefixCache(4, 1, policy="priority")
    for tokens, priority in (([1, 2], 5), ([3, 4], 0)):
        with cache.lease(tokens, priority=priority) as lease:
            lease.reserve(2)
            lease.publish(2)
    lease = cache.lease([9, 9])
    lease.reserve(2)
    assert (cache.peek([1, 2, 0]), cache.peek([3, 4, 0])) == (2, 0)
    lease.abort()


def test_the_page_table_is_for_reading_and_keeps_what_it_showed() -> None:
    cache = PrefixCache(8, 1)
    first, second = cache.lease([1, 2]), cache.lease([1, 2])
    for lease in (first, second):
        lease.reserve(2)
    shown = second.page_table
    before = shown.tolist()
    with pytest.raises(ValueError, match="read-only"):
        shown[0] = 7
    first.publish(2)
    second.publish(2)
    assert shown.tolist() == before
    assert second.page_table.tolist() == first.page_table.tolist()
    second.finish()
    with pytest.raises(LeaseClosed):
        second.page_table  # noqa: B018


@pytest.mark.parametrize("value", [-1, 1.0, float("nan"), float("inf"), "3", None, True, 2**100])
def test_numbers_are_checked(value: Any) -> None:
    cache = PrefixCache(8, 1)
    with cache.lease([1, 2, 3]) as lease:
        for call in (lease.reserve, lease.publish):
            with pytest.raises(BadArgument):
                call(value)
        lease.reserve(np.uint8(3))
        assert lease.reserved == 3
    with pytest.raises(BadArgument):
        cache.lease([1], priority=value if value is not None and value != -1 else 2**31)
    with pytest.raises(BadArgument):
        PrefixCache(8, copy_page=value if value is not None else 5)
    assert cache.pool.free == 8


def test_a_dropped_lease_is_reclaimed_when_pages_are_short() -> None:
    cache = PrefixCache(4, 4)
    dropped, waiting = cache.lease([1] * 8), cache.lease([2] * 16)
    dropped.reserve(8)
    with pytest.warns(ResourceWarning):
        del dropped
    waiting.reserve(16)
    assert cache.stats().pool.private == 4
    waiting.abort()


def test_a_policy_that_fails_while_a_page_is_copied_leaves_no_lock() -> None:
    class Broken:
        name = "broken"
        good = True

        def rank(self, node: Any) -> tuple[float, float]:
            return (0, 0) if self.good else (float("nan"), 0)

    policy = Broken()
    cache = PrefixCache(4, 4, policy=policy, copy_page=lambda *_: None)
    for prompt in (range(8), range(100, 108)):
        with cache.lease(prompt) as lease:
            lease.reserve(8)
            lease.finish()
    policy.good = False
    with pytest.raises(BadArgument):
        cache.lease([0, 1, 2, 3, 4, 5, 99, 98])
    policy.good = True
    assert cache.stats().pool.locked == 0
    assert cache.flush() == 4


def test_an_error_of_the_copy_itself_is_never_taken_for_a_want_of_pages() -> None:
    def copy_page(source: int, target: int, positions: int) -> None:
        raise OutOfPages(1, 0, 0, 0)

    cache = PrefixCache(4, 4, copy_page=copy_page)
    with cache.lease(range(8)) as lease:
        lease.reserve(8)
        lease.finish()
    with pytest.raises(OutOfPages):
        cache.lease([0, 1, 2, 3, 4, 9, 9])
    assert (cache.stats().leases.partial_missed, cache.stats().pool.locked, cache.pool.private) == (0, 0, 0)


def test_the_source_of_a_copy_stays_while_it_is_copied() -> None:
    owners = []

    def copy_page(source: int, target: int, positions: int) -> None:
        cache.flush()
        owners.append((cache.pool.owner(source), cache.pool.owner(target)))

    cache = PrefixCache(4, 4, copy_page=copy_page)
    with cache.lease(range(8)) as lease:
        lease.reserve(8)
        lease.finish()
    cache.lease([0, 1, 2, 3, 4, 9, 9]).abort()
    assert owners == [("cached", "private")]


# ---------------------------------------------------------------- what a caller must not be able to break


def test_ids_out_of_range_are_refused_wherever_they_come_in() -> None:
    cache = PrefixCache(20, 4, keys=TokenKeys(vocab_size=100))
    serve(cache, list(range(12)))
    for bad in (np.array([7, 100], np.int32), np.array([7, -1]), [7, 100], np.array([7, 100], "<u4").tobytes()):
        lease = cache.lease([1, 2])
        with pytest.raises(BadTokens, match="position 1"):
            lease.append(bad)
        assert lease.length == 2
        lease.abort()
        with pytest.raises(BadTokens, match="position 1"):
            cache.lease(bad)
    with pytest.raises(BadTokens, match="position 13"):  # after a prefix that matches and is not read again
        cache.lease(np.array([*range(13), 100], np.int32))
    owners(cache)


def test_a_copy_that_was_not_begun_cannot_be_ended() -> None:
    cache = PrefixCache(20, 4)
    lease = cache.lease(list(range(8)))
    lease.reserve(8)
    for copied in (False, True):
        lease.end_copy(copied)
        assert (lease.hit, lease.reserved, len(lease.page_table)) == (0, 8, 2)
    lease.abort()
    with pytest.raises(LeaseClosed):
        lease.begin_copy()
    owners(cache)


def test_a_copy_can_be_begun_once_and_ends_with_the_lease() -> None:
    cache = PrefixCache(20, 4, copy_page=lambda *_: None)
    serve(cache, list(range(12)))
    prompt = [*range(6), 90, 91, 92]
    lease = Lease(cache._core, b"", prompt, 0, None, True)
    source, target, positions = lease.begin_copy() or (-1, -1, -1)
    assert (positions, cache.pool.owner(source), cache.pool.owner(target)) == (2, "cached", "private")
    assert lease.begin_copy() is None
    lease.abort()
    assert cache.stats().pool.locked == cache.stats().pool.private == 0
    failed = Lease(cache._core, b"", prompt, 0, None, True)
    assert failed.begin_copy() is not None
    failed.end_copy(False)
    assert (failed.hit, len(failed.page_table), failed.begin_copy()) == (4, 1, None)
    failed.abort()
    dropped = Lease(cache._core, b"", prompt, 0, None, True)
    assert dropped.begin_copy() is not None
    with pytest.warns(ResourceWarning):
        del dropped
    assert cache.stats().pool.locked == cache.stats().pool.private == 0
    owners(cache)


def test_a_hit_never_reaches_the_end_whatever_is_asked_of_the_core() -> None:
    cache = PrefixCache(20, 4)
    serve(cache, list(range(20)))
    with Lease(cache._core, b"", list(range(12)), 0, 1000) as lease:
        assert lease.hit == 8


def test_a_policy_that_raises_while_a_page_is_made_for_a_copy_leaves_no_lease() -> None:
    class Fails:
        name = "fails"

        def rank(self, node: Any) -> tuple[float, float]:
            raise OSError("no rank today")

    cache = PrefixCache(6, 4, policy=Fails(), copy_page=lambda *_: None)
    serve(cache, list(range(12)))
    serve(cache, list(range(50, 62)))
    with pytest.raises(BadArgument, match=r"Fails\.rank raised OSError: no rank today") as kept:
        cache.lease([*range(6), 90, 91, 92])
    assert kept.value and cache.stats().leases.open == cache.stats().pool.locked == 0


@pytest.mark.usefixtures("little_garbage")
def test_a_policy_may_refer_to_its_cache_and_both_are_collected() -> None:
    class Refers:
        name = "refers"

        def rank(self, node: Any) -> tuple[float, float]:
            return (node.last_access, 0)

    policy: Any = Refers()
    policy.cache = PrefixCache(8, 4, policy=policy)
    gone = weakref.ref(policy)
    del policy
    gc.collect()
    assert gone() is None


def test_an_evict_that_frees_nothing_is_no_room() -> None:
    cache = PrefixCache(3, 4)
    serve(cache, list(range(12)))
    cache._core.evict_with(lambda component, pages, namespace: None)
    with cache.lease([7] * 8) as lease, pytest.raises(OutOfPages):
        lease.reserve(8)


def test_duplicate_pages_are_counted() -> None:
    cache = PrefixCache(20, 4)
    first, second = cache.lease(list(range(12))), cache.lease(list(range(12)))
    for lease in (first, second):
        lease.reserve(12)
        lease.publish(12)
        lease.finish()
    assert cache.stats().leases.duplicate_pages == 3
    owners(cache)


def test_pages_that_were_never_made_show_nothing() -> None:
    with pytest.raises(BufferError):
        memoryview(_core._Pages.__new__(_core._Pages))


@pytest.mark.parametrize(
    "pages",
    [
        {},
        {State(): 4},
        {Full: 3},
        {"full": 3},
        {None: 3},
        {Full(): 3, State(): 3, State(2): 3},
        {Full(): 0},
        {Full(): 3.5},
    ],
    ids=str,
)
def test_pools_that_cannot_be_are_refused(pages: Any) -> None:
    with pytest.raises(BadArgument, match="pages"):
        PrefixCache(pages, 4, copy_state=lambda source, target: None)


def test_components_come_in_the_order_of_the_tree_however_they_are_given() -> None:
    cache = PrefixCache({State(): 3, Window(6): 10, Full(): 20}, 4, copy_state=lambda source, target: None)
    assert list(cache.pools) == ["full", "window", "state"]
    several = PrefixCache({Chunked(6): 7, Window(4): 8, Full(): 20, Window(6): 9, Chunked(4): 6}, 4)
    assert {name: pool.total for name, pool in several.pools.items()} == {
        "full": 20, "window-4": 8, "window-6": 9, "chunked-6": 7, "chunked-4": 6
    }  # fmt: skip
    assert list(several.stats().pools) == list(several.pools) == list(several.tree.names)
    with pytest.raises(BadArgument, match="copy_state"):
        PrefixCache({Full(): 20, State(): 3})


# ---------------------------------------------------------------- what counts as a use


def test_the_end_of_a_lease_is_a_use_but_not_a_hit() -> None:
    cache = PrefixCache(pages=4, page_size=1)
    for tokens in ([1, 2], [3, 4]):
        serve(cache, tokens)
    held = cache.lease([1, 2, 9])
    hits = [view.hits for view in cache.tree.nodes()]
    assert cache.tree.match([3, 4]).length == 2
    held.abort()
    assert sum(view.hits for view in cache.tree.nodes()) == sum(hits) + 1
    with cache.lease([5, 6]) as lease:
        lease.reserve(2)
    assert (cache.peek([1, 2, 9]), cache.peek([3, 4, 9])) == (2, 0)
    cache.check()


@pytest.mark.parametrize("policy", ["arc", "gittins"])
def test_policies_that_remember_are_notified_of_no_use_when_a_lease_ends(policy: str) -> None:
    def order(end_late: bool) -> list[list[int]]:
        cache = PrefixCache(pages=40, page_size=1, policy=policy)
        for first in range(0, 40, 4):
            serve(cache, range(first, first + 4))
        held = cache.lease([0, 1, 2, 3, 99])
        if not end_late:
            held.abort()
        for first in (4, 8):
            cache.lease([*range(first, first + 4), 99]).abort()
        held.abort()
        return [cache.tree.evict(4)[0].tolist() for _ in range(10)]

    assert order(end_late=True) == order(end_late=False)


def test_a_lease_that_may_match_nothing_finds_nothing_and_publishes() -> None:
    cache = copying(pages=8, size=2)[0]
    serve(cache, [1, 2, 3, 4, 5])
    with cache.lease([1, 2, 3, 4, 5, 6, 7], most=0) as lease:
        assert (lease.hit, len(lease.page_table)) == (0, 0)
        lease.reserve(7)
        own = lease.page_table.tolist()
        lease.publish(6)
        assert lease.page_table.tolist()[:2] != own[:2], "the tree's pages replace the duplicates"
    assert cache.peek([1, 2, 3, 4, 5, 6, 7]) == 6
    assert (cache.stats().leases.hit, cache.stats().leases.duplicate_pages) == (0, 2)
    cache.check()


@pytest.mark.parametrize("most", range(9))
def test_a_lease_matches_as_many_positions_as_it_may(most: int) -> None:
    for cache, page in ((PrefixCache(8, 2), 2), (copying(pages=8, size=2)[0], 1)):
        serve(cache, [1, 2, 3, 4, 5, 6, 7])
        with cache.lease([1, 2, 3, 4, 5, 6, 9], most=most) as lease:
            assert lease.hit == min(most, 6) // page * page
            lease.reserve(7 - lease.reserved)
            lease.publish(6)
        cache.check()


def test_a_lease_of_images_matches_none_in_part() -> None:
    cache = PrefixCache(pages=40, page_size=2, keys=TypedKeys())
    tokens = [1, image(1), 2, 3, 4]
    serve(cache, tokens)
    end = cache.peek(tokens)
    for most, hit in ((0, 0), (1, 0), (2, 0), (end - 1, 0), (end, end), (end + 9, end)):
        with cache.lease(tokens, most=most) as lease:
            assert lease.hit == hit, most


def test_a_lease_that_may_match_less_than_nothing_is_refused() -> None:
    cache = PrefixCache(8, 2)
    with pytest.raises(BadArgument, match="most"):
        cache.lease([1, 2], most=-1)
    assert cache.stats().leases.open == 0


def test_a_removed_prefix_is_computed_again_and_a_running_lease_keeps_its_pages() -> None:
    cache = PrefixCache(pages=12, page_size=2)
    serve(cache, [1, 2, 3, 4, 5, 6, 0])
    running = cache.lease([1, 2, 3, 4, 9])
    assert running.hit == 4
    table = running.page_table.tolist()
    assert cache.remove([1, 2, 3, 4]) == 1, "the page after it, which no lease uses"
    cache.check()
    assert cache.peek([1, 2, 3, 4, 5]) == 2
    assert serve(cache, [1, 2, 3, 4, 5]) == 2
    assert running.page_table.tolist() == table
    running.reserve(1)
    running.publish(5)
    running.finish()
    assert cache.peek([1, 2, 3, 4, 9]) == 4
    cache.check()
    assert cache.flush() == cache.pool.total - cache.pool.free or cache.pool.free == cache.pool.total
    assert cache.pool.free == cache.pool.total


def test_a_removed_namespace_leaves_the_others() -> None:
    cache = PrefixCache(pages=8, page_size=1)
    serve(cache, [1, 2, 3], "a")
    serve(cache, [1, 2, 3], "b")
    assert cache.remove([], "a") == 3
    assert (cache.peek([1, 2, 3], "a"), cache.peek([1, 2, 3], "b")) == (0, 2)
    with pytest.raises(BadTokens):
        cache.remove([-1], "b")
    assert cache.peek([1, 2, 3], "b") == 2


@pytest.mark.parametrize(
    "made",
    [
        list,
        tuple,
        lambda tokens: array("i", tokens),
        lambda tokens: memoryview(array("l", tokens)),
        lambda tokens: np.array(tokens, np.uint8),
        lambda tokens: np.array(tokens, np.int32),
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: np.repeat(np.array(tokens, np.int64), 2)[::2],
        lambda tokens: torch.tensor(tokens, dtype=torch.int32),
        lambda tokens: torch.tensor(tokens, dtype=torch.int64),
    ],
    ids=["list", "tuple", "array", "memoryview", "uint8", "int32", "int64", "strided", "tensor32", "tensor64"],
)
def test_a_prefix_is_removed_whatever_holds_its_tokens(made: Callable[[list[int]], Any]) -> None:
    cache = PrefixCache(pages=8, page_size=1, keys=TokenKeys(100))
    serve(cache, [1, 2, 3, 4])
    assert cache.remove(made([1, 2, 3])) == 2
    with pytest.raises(BadTokens, match="100"):
        cache.remove(made([100]))
    assert cache.peek([1, 2, 3, 4]) == 2
    assert cache.remove(made([])) == 2
    assert cache.peek([1, 2, 3, 4]) == 0
    cache.check()


@pytest.mark.parametrize("tokens", [np.arange(4), np.empty(0, np.int64), [], [0, 1, 2, 3]], ids=len)
def test_a_prefix_of_typed_tokens_is_removed_too(tokens: Any) -> None:
    cache = PrefixCache(pages=8, page_size=1, keys=TypedKeys(100))
    serve(cache, range(4))
    assert cache.remove(tokens) == (1 if len(tokens) else 4)


def test_a_removed_namespace_with_states_is_sound_while_it_is_in_use() -> None:
    cache = PrefixCache({Full(): 20, State(): 6}, 1, copy_state=lambda source, target: None)
    lease = cache.lease([1, 2, 3])
    lease.reserve(3)
    lease.checkpoint(2)
    lease.publish(2)
    cache.remove([])
    cache.check()
    lease.finish()
    cache.check()
    assert cache.peek([1, 2, 9]) == 0


def test_pages_of_a_removed_prefix_serve_others_after_the_lease() -> None:
    cache = PrefixCache(pages=16, page_size=1)
    with cache.lease(range(12)) as lease:
        lease.reserve(12)
        lease.publish(12)
        cache.remove(range(12))
        lease.finish(12)
    with cache.lease(range(100, 116)) as lease:
        lease.reserve(16)
    cache.check()


@pytest.mark.usefixtures("little_garbage")
def test_the_pages_of_a_dropped_lease_are_removed_with_its_prefix() -> None:
    cache = PrefixCache(pages=8, page_size=1)
    lease = prefill(cache, [1, 2, 3])
    del lease
    gc.collect()
    assert cache.remove([2]) == 0
    lease = prefill(cache, [1, 2, 3])
    del lease
    gc.collect()
    assert cache.remove([1]) == 3


# ---------------------------------------------------------------- flush


class FailsAfter:
    """A policy that ranks some nodes and then fails."""

    name = "fails"

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def rank(self, node: Any) -> tuple[float, float]:
        self.ranks -= 1
        if self.ranks < 0:
            raise ZeroDivisionError
        return 0, 0


@pytest.mark.parametrize("sizes", [{Full(): 8}, {Full(): 8, Window(2): 8}], ids=["full", "full window"])
def test_a_flush_whose_policy_fails_says_so_and_loses_nothing(sizes: dict[Component, int]) -> None:
    policy = FailsAfter(10)
    cache = PrefixCache(sizes, 1, policy=policy)
    for tokens in ([1, 2, 3], [1, 2, 4]):
        with cache.lease(tokens) as lease:
            lease.reserve(lease.length - lease.reserved)
            for at in range(lease.hit, 3):
                lease.slide(at, at + 1)
            lease.finish(3)
    policy.ranks = 2
    with pytest.raises(BadArgument, match=r"FailsAfter\.rank raised ZeroDivisionError"):
        cache.flush()
    cache.check()
    assert cache.pool.free == 6, "the two leaves"
    policy.ranks = 10
    assert cache.flush() == 2
    assert all(pool.free == pool.total for pool in cache.pools.values())


def test_locked_pages_are_counted_for_each_component() -> None:
    cache = PrefixCache({Full(): 8, Window(2): 8}, 1)
    with cache.lease([1, 2, 3, 4, 5]) as lease:
        lease.reserve(5)
        for at in range(5):
            lease.slide(at, at + 1)
        lease.finish(5)
    with cache.lease([1, 2, 3, 4, 9]):
        assert {name: pool.locked for name, pool in cache.stats().pools.items()} == {"full": 4, "window": 2}


# ---------------------------------------------------------------- check


def test_a_tree_with_a_page_that_the_pool_does_not_count_as_cached_is_corrupt() -> None:
    cache = PrefixCache(8, 1)
    cache.tree.insert([1, 2], [3, 4])
    with pytest.raises(CorruptTree, match=r"ids \[3, 4\] of full are in the tree, but not cached in the pool"):
        cache.check()


def test_a_page_that_neither_the_tree_nor_a_lease_has_is_corrupt() -> None:
    cache = PrefixCache(8, 1)
    serve(cache, [1, 2])
    cache.tree.flush()
    with pytest.raises(CorruptTree, match="the tree holds 0 of full, but the pool has 2 cached"):
        cache.check()
