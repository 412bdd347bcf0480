"""The pool: every page is free, cached or private, and each transition checks the owner."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mainstem.cache.pool import Pool
from mainstem.errors import BadArgument, OutOfPages, WrongOwner


def counts(pool: Pool) -> tuple[int, int, int]:
    assert pool.free + pool.cached + pool.private == pool.total
    return pool.free, pool.cached, pool.private


def test_a_new_pool_is_free() -> None:
    pool = Pool(4)
    assert counts(pool) == (4, 0, 0)
    assert {pool.owner(page) for page in range(4)} == {"free"}


def test_pages_go_round() -> None:
    pool = Pool(4)
    page_ids = pool.allocate(3)
    assert page_ids.dtype == np.int32
    assert len(set(page_ids.tolist())) == 3
    assert counts(pool) == (1, 0, 3)
    pool.publish(page_ids[:2])
    assert counts(pool) == (1, 2, 1)
    assert pool.owner(int(page_ids[0])) == "cached"
    pool.release(page_ids[2:])
    pool.reclaim(page_ids[:2])
    assert counts(pool) == (4, 0, 0)
    assert sorted(pool.allocate(4).tolist()) == [0, 1, 2, 3]


def test_allocating_nothing_is_nothing() -> None:
    assert Pool(1).allocate(0).tolist() == []


def test_out_of_pages_says_how_many_there_are_and_takes_none() -> None:
    pool = Pool(3)
    pool.allocate(1)
    with pytest.raises(OutOfPages) as refused:
        pool.allocate(3)
    assert (refused.value.needed, refused.value.free, refused.value.total) == (3, 2, 3)
    assert counts(pool) == (2, 0, 1)


@pytest.mark.parametrize("way", ["publish", "release", "reclaim"])
def test_a_page_of_another_owner_is_refused_and_nothing_moves(way: str) -> None:
    pool = Pool(4)
    private = pool.allocate(2)
    cached = pool.allocate(1)
    pool.publish(cached)
    free = np.array(list({0, 1, 2, 3} - set(private.tolist()) - set(cached.tolist())), dtype=np.int32)
    good, others = (cached, [private, free]) if way == "reclaim" else (private, [cached, free])
    for wrong in others:
        with pytest.raises(WrongOwner, match=str(wrong[-1])):
            getattr(pool, way)(np.concatenate([good, wrong[-1:]]))
        assert counts(pool) == (1, 1, 2)
    getattr(pool, way)(good)


def test_the_same_page_twice_is_refused() -> None:
    pool = Pool(2)
    page = pool.allocate(1)
    with pytest.raises(WrongOwner):
        pool.release(np.concatenate([page, page]))
    assert counts(pool) == (1, 0, 1)
    pool.release(page)
    with pytest.raises(WrongOwner):
        pool.release(page)
    assert counts(pool) == (2, 0, 0)


@pytest.mark.parametrize("page", [-1, 2, 2**31 - 1])
def test_a_page_outside_the_pool_is_refused(page: int) -> None:
    pool = Pool(2)
    with pytest.raises(WrongOwner):
        pool.release(np.array([page], dtype=np.int32))
    with pytest.raises(WrongOwner):
        pool.owner(page)


@pytest.mark.parametrize("pages", [0, -1, 2**31])
def test_a_pool_has_a_size(pages: int) -> None:
    with pytest.raises(BadArgument):
        Pool(pages)


def test_a_negative_number_of_pages_is_refused() -> None:
    pool = Pool(2)
    with pytest.raises(BadArgument):
        pool.allocate(-1)
    assert counts(pool) == (2, 0, 0)


def test_no_page_is_allocated_twice_however_pages_go_round() -> None:
    pool, rng = Pool(20), random.Random(0)
    private: set[int] = set()
    cached: set[int] = set()
    for _ in range(2000):
        taken = pool.allocate(rng.randrange(pool.free + 1)).tolist()
        assert not (private | cached) & set(taken)
        private |= set(taken)
        gone: set[int] = set()
        ways = ((private, pool.publish, cached), (private, pool.release, gone), (cached, pool.reclaim, gone))
        for source, way, target in ways:
            some = rng.sample(sorted(source), rng.randrange(len(source) + 1))
            way(np.array(some, dtype=np.int32))
            source.difference_update(some)
            target.update(some)
        assert counts(pool) == (20 - len(private) - len(cached), len(cached), len(private))


@pytest.mark.parametrize("wrong", [99, -1, 2**31 - 1])
def test_a_page_outside_the_pool_changes_nothing(wrong: int) -> None:
    pool = Pool(8)
    mine = pool.allocate(3)
    for move in (pool.release, pool.publish, pool.reclaim):
        with pytest.raises(WrongOwner):
            move(np.array([mine[0], wrong], np.int32))
        with pytest.raises(WrongOwner):
            move(np.array([mine[0], mine[0]], np.int32))
    assert pool.private == 3
    pool.check()
    pool.release(mine)
    assert pool.free == 8
