"""The pages of the host: what is evicted for others, and what never is; and its settings."""

from __future__ import annotations

from typing import Any

import pytest
from rigs.hand_driven import A, B, C, FaultyBackend, Rig, begin_load, only_on_host, prompt

from mainstem.errors import BadArgument
from mainstem.settings.engine import HostPolicy
from mainstem.storage.memory import MemoryBackend


def test_the_host_evicts_the_least_recently_used_prefix() -> None:
    rig = Rig(host=8)
    only_on_host(rig, A, B)
    with rig.cache.lease(A):
        pass  # used again
    only_on_host(rig, C)
    assert [rig.on(1, tokens) for tokens in (A, B, C)] == [4, 0, 4]


def test_the_host_evicts_no_more_than_it_needs_and_keeps_prefixes_connected() -> None:
    rig = Rig(host=8)
    only_on_host(rig, A, B, prompt(2, 3))
    assert [rig.on(1, tokens) for tokens in (A, B, prompt(2, 3))] == [2, 4, 2]


def test_the_host_never_evicts_pages_that_are_being_loaded() -> None:
    rig = Rig(host=8)
    only_on_host(rig, A, B)
    lease, load = begin_load(rig, A)
    rig.serve(C)
    rig.poll()
    assert (rig.on(1, A), rig.on(1, B)) == (4, 0)
    for ticket in rig.copies:
        ticket.wait()
    rig.poll()
    assert load.arrived and lease.hit == 8
    rig.compute(lease, A)
    lease.abort()


def test_the_host_never_evicts_pages_in_flight() -> None:
    rig = Rig(host=4)
    rig.serve(A)
    rig.poll()
    rig.serve(B)
    rig.poll()
    assert rig.tiers.stats().backup_skipped == 4
    rig.settle()
    assert (rig.on(1, A), rig.on(1, B)) == (4, 0)


def test_the_host_never_evicts_pages_that_are_being_written() -> None:
    rig = Rig(host=4, backend=MemoryBackend())
    rig.serve(A)
    rig.poll()
    rig.end_copy()
    rig.poll()
    rig.serve(B)
    rig.poll()
    assert (rig.on(1, A), rig.tiers.stats().backup_skipped) == (4, 4)
    assert rig.tiers.flush() == 0
    rig.settle()
    assert rig.tiers.flush() == 4


def test_nothing_is_evicted_for_a_copy_that_would_not_fit_even_then() -> None:
    rig = Rig(host=8)
    only_on_host(rig, A, B)
    lease, load = begin_load(rig, A)
    rig.serve(prompt(5, 3))
    rig.poll()
    assert rig.tiers.stats().backup_skipped == 5
    assert (rig.on(1, A), rig.on(1, B)) == (4, 4)
    assert load.wait()
    lease.abort()


def test_a_waiting_write_gives_way_to_a_copy_and_a_running_one_does_not() -> None:
    rig = Rig(host=8, backend=FaultyBackend(), writes=1)
    for tokens in (A, B):
        rig.serve(tokens)
        rig.poll()
        rig.end_copy()
        rig.poll()
    assert (rig.tiers.stats().queued, len(rig.writers.waiting)) == (8, 1)
    rig.serve(C)
    rig.poll()
    assert rig.tiers.stats().write_dropped == 4
    rig.settle()
    assert [rig.on(1, tokens) for tokens in (A, B, C)] == [4, 0, 4]
    assert rig.tiers.stats().stored == 8


def test_a_waiting_write_does_not_give_way_to_a_copy_that_would_not_fit_even_then() -> None:
    rig = Rig(host=8, backend=FaultyBackend(), writes=1)
    for tokens in (A, B):
        rig.serve(tokens)
        rig.poll()
        rig.end_copy()
        rig.poll()
    rig.serve(prompt(5, 3))
    rig.poll()
    assert (rig.tiers.stats().backup_skipped, rig.tiers.stats().write_dropped) == (5, 0)
    rig.settle()
    assert rig.tiers.stats().stored == 8


def test_the_host_may_evict_pages_that_the_device_has() -> None:
    rig = Rig(host=4)
    rig.serve(A)
    rig.settle()
    rig.serve(B)
    rig.settle()
    assert [(rig.on(0, tokens), rig.on(1, tokens)) for tokens in (A, B)] == [(4, 0), (4, 4)]
    assert rig.serve(A) == 8


def test_flush_does_not_change_storage() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.serve(A)
    rig.settle()
    assert rig.tiers.flush() == 4
    assert rig.tiers.flush() == 0
    assert (rig.on(0, A), rig.on(1, A)) == (4, 0)
    assert len(backend.stored_keys()) == 4
    rig.cache.flush()
    assert rig.tiers.prefetch(A) is not None
    rig.settle()
    assert rig.on(1, A) == 4


def test_a_stuck_store_does_not_occupy_the_host() -> None:
    """Waiting writes hold host pages; they are dropped, the oldest first, when a copy needs the room."""
    rig = Rig(device=64, host=16, backend=FaultyBackend(), queue_pages=64, writes=1)
    for mark in range(8):
        rig.serve(prompt(4, mark))
        rig.poll()
        rig.end_copy()
        rig.poll()
    stats = rig.tiers.stats()
    assert stats.backup_skipped == 0
    assert stats.backed_up == 32
    assert stats.write_dropped == 16, "of 32 pages 4 are being written and 12 wait"
    rig.settle()
    assert rig.tiers.stats().queued == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("write_policy", "sometimes"),
        ("write_hits", 0),
        ("write_hits", 1.0),
        ("load_min_tokens", 0),
        ("load_min_tokens", None),
    ],
)
def test_an_option_outside_its_range_is_rejected_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadArgument) as caught:
        HostPolicy(**{name: value})
    assert caught.value.name == name
