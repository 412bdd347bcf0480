"""Prefetches, and the pages that come too late, with completions and failures driven by hand, in any order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from rigs.hand_driven import A, B, C, Rig, begin_load, only_on_host, prompt, stored, stored_keys

from mainstem.errors import BadTokens, StorageError
from mainstem.tiers.prefetch.missed import LATE
from mainstem.tiers.prefetch.prefetch import Prefetch


def late(rig: Rig) -> dict[str, int]:
    """Returns the pages that were computed although storage has them, by cause, without zeros."""
    return {cause: pages for cause, pages in rig.tiers.stats().late.items() if pages}


def test_stored_pages_are_prefetched_to_the_host_and_loaded_to_the_device() -> None:
    rig = Rig(backend=stored(A))
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None and prefetch.waiting and not prefetch.ended
    rig.settle()
    assert prefetch.ended and not prefetch.waiting and prefetch.loaded == 8
    assert rig.on(1, A) == 4
    assert rig.serve(A, load=True) == 8
    assert rig.tiers.counts == {"prefetches": 1, "prefetched": 4, "loaded": 4}
    after(rig, 100.0)
    assert late(rig) == {} and set(rig.tiers.stats().late) == set(LATE), "they arrived in time"


def test_the_last_token_is_left_to_compute() -> None:
    rig = Rig(backend=stored(A))
    prefetch = rig.tiers.prefetch(A[:8])
    assert prefetch is not None
    rig.settle()
    assert prefetch.loaded == 6


def test_namespaces_and_identities_share_nothing_in_storage() -> None:
    backend = stored(A)
    rig = Rig(backend=backend)
    assert rig.tiers.prefetch(A, "a") is not None
    rig.settle()
    assert rig.on(1, A, "a") == 0
    other = Rig(backend=backend, identity={"weights": "others"})
    assert other.tiers.prefetch(A) is not None
    other.settle()
    assert other.on(1, A) == 0


def test_without_a_store_or_with_too_little_missing_there_is_no_prefetch() -> None:
    assert Rig().tiers.prefetch(A) is None
    rig = Rig(backend=stored(A), prefetch_min_tokens=8)
    assert rig.tiers.prefetch(A[:8]) is None
    assert rig.tiers.prefetch([5]) is None
    assert rig.tiers.prefetch(A) is not None
    rig.settle()
    assert rig.tiers.prefetch(A) is None, "the host has it"
    with pytest.raises(BadTokens):
        rig.tiers.prefetch([-1] * 20)


@pytest.mark.parametrize(("minimum", "found"), [(6, 6), (8, 0)])
def test_a_prefix_of_which_storage_has_too_little_is_not_read(minimum: int, found: int) -> None:
    rig = Rig(backend=stored(prompt(3, 1)), prefetch_min_tokens=minimum)
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None
    rig.settle()
    assert prefetch.ended and prefetch.loaded == found


@pytest.mark.parametrize(("policy", "begins"), [("timeout", False), ("best_effort", False), ("wait_complete", True)])
def test_what_is_quicker_to_compute_is_read_only_by_who_waits_for_everything(policy: str, begins: bool) -> None:
    rig = Rig(backend=stored(A), prefetch=policy, prefetch_min_tokens=8)
    for _ in range(4):
        rig.tiers.prefill.observe([(64, 0)], 64e-6)
        rig.tiers.costs.look_up.observe(1, 1.0)
        rig.tiers.costs.read.observe(4096, 1.0)
    assert (rig.tiers.prefetch(A) is not None) == begins
    rig.settle()
    assert (rig.on(1, A) > 0) == begins


def test_best_effort_waits_for_nothing() -> None:
    rig = Rig(backend=stored(A), prefetch="best_effort")
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None and not prefetch.waiting
    rig.settle()
    assert prefetch.loaded == 8


def test_wait_complete_waits_for_everything_that_was_found() -> None:
    rig = Rig(backend=stored(A), prefetch="wait_complete", batch_pages=1, batches=2, call_timeout_s=5.0)
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None
    rig.clock.now_s += 4.9
    rig.readers.run()
    rig.poll()
    for _ in range(4):
        assert prefetch.waiting
        rig.clock.now_s += 4.9  # slow, but each within its deadline
        rig.readers.run()
        rig.poll()
    assert prefetch.ended and prefetch.loaded == 8
    assert rig.tiers.stats().faults == {}


def test_wait_complete_does_not_wait_for_a_stuck_call() -> None:
    rig = Rig(backend=stored(A), prefetch="wait_complete", call_timeout_s=5.0)
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None
    rig.readers.run()
    rig.poll()
    rig.clock.now_s += 5.0
    assert prefetch.waiting
    rig.poll()
    assert not prefetch.waiting and not prefetch.ended
    assert rig.tiers.stats().faults == {"timeout": 1}
    rig.settle()
    assert prefetch.ended and prefetch.loaded == 8, "late pages are kept"


def test_timeout_waits_longer_for_more_pages() -> None:
    rig = Rig(
        backend=stored(A), prefetch="timeout", prefetch_timeout_s=1.0, prefetch_timeout_per_page_s=0.5, batch_pages=1
    )
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None
    rig.clock.now_s += 0.9
    rig.poll()
    assert prefetch.waiting
    rig.readers.run()
    rig.poll()
    rig.clock.now_s += 2.0
    rig.poll()
    assert prefetch.waiting, "1 s and 4 pages of 0.5 s"
    rig.clock.now_s += 0.2
    rig.poll()
    assert not prefetch.waiting and not prefetch.ended
    rig.settle()
    assert prefetch.loaded == 8, "late pages are kept"


def test_timeout_waits_as_long_as_computing_takes_once_that_is_known() -> None:
    rig = Rig(backend=stored(A), prefetch_timeout_s=1.0, prefetch_timeout_per_page_s=0.0, call_timeout_s=1000.0)
    for _ in range(4):
        rig.tiers.prefill.observe([(64, 0)], 640.0)
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None
    rig.clock.now_s += 79.0
    rig.poll()
    assert prefetch.waiting, "8 tokens of 10 s"
    rig.clock.now_s += 2.0
    rig.poll()
    assert not prefetch.waiting
    rig.settle()


def test_after_an_unanswered_lookup_no_request_waits_until_storage_answers() -> None:
    rig = Rig(backend=stored(A, B, C), prefetch="timeout", prefetch_timeout_s=1.0, prefetch_timeout_per_page_s=0.0)
    first = rig.tiers.prefetch(A)
    after(rig, 1.0)
    assert first is not None and not first.waiting
    assert late(rig) == {"timeout": 4}, "all pages of the lookup"
    second = rig.tiers.prefetch(B)
    rig.poll()
    assert second is not None and not second.waiting, "no time has passed"
    assert late(rig) == {"timeout": 4, "slow": 4}
    rig.settle()
    assert (first.loaded, second.loaded) == (8, 8)
    third = rig.tiers.prefetch(C)
    rig.poll()
    assert third is not None and third.waiting
    rig.settle()
    assert late(rig) == {"timeout": 4, "slow": 4}


def test_a_prompt_that_takes_too_long_to_read_does_not_mark_the_store_as_slow() -> None:
    """Storage has answered the lookup; only an unanswered one marks it as slow."""
    rig = Rig(backend=stored(A, B), prefetch_timeout_s=0.1, prefetch_timeout_per_page_s=0.01)
    one = rig.tiers.prefetch(A)
    rig.readers.run()
    rig.poll()
    rig.clock.now_s += 1.0
    rig.poll()
    two = rig.tiers.prefetch(B)
    rig.poll()
    assert one is not None and two is not None
    assert (one.waiting, two.waiting) == (False, True)
    rig.settle()


def test_an_open_breaker_is_not_waited_for() -> None:
    backend = stored(A)
    rig = Rig(backend=backend, breaker_failures=1, prefetch="wait_complete", breaker_cooldown_s=5.0)
    backend.always = StorageError("unreachable", "on purpose")
    first = rig.tiers.prefetch(A)
    rig.settle()
    assert first is not None and first.ended and first.loaded == 0
    assert rig.tiers.stats().breaker_open and rig.tiers.stats().breaker_openings == 1
    assert late(rig) == {}, "storage reported that it has nothing"
    second = rig.tiers.prefetch(A)
    rig.poll()
    assert second is not None and not second.waiting
    assert late(rig) == {"breaker": 4}
    assert rig.readers.waiting == []
    backend.always = None
    rig.clock.now_s += 5.0
    third = rig.tiers.prefetch(A)
    rig.settle()
    assert third is not None and third.loaded == 8
    assert not rig.tiers.stats().breaker_open


def test_a_breaker_that_opens_ends_the_wait() -> None:
    backend = stored(A)
    rig = Rig(backend=backend, breaker_failures=1, prefetch="wait_complete")
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None and prefetch.waiting
    rig.serve(B)
    rig.poll()
    rig.end_copy()
    rig.poll()
    backend.always = StorageError("full", "on purpose")
    rig.writers.run_all()
    rig.poll()
    assert rig.tiers.stats().breaker_open
    rig.poll()
    assert not prefetch.waiting and not prefetch.ended, "its lookup has not returned"
    rig.settle()


def test_the_number_of_prefetches_is_limited() -> None:
    rig = Rig(backend=stored(A, B, C), max_prefetches=2)
    prefetches = [rig.tiers.prefetch(tokens) for tokens in (A, B, C)]
    assert [prefetch is not None for prefetch in prefetches] == [True, True, False]
    assert rig.tiers.counts == {"prefetches": 2, "prefetch_skipped": 1}
    assert late(rig) == {"limit": 4}
    rig.settle()
    assert rig.tiers.prefetch(C) is not None
    rig.settle()
    assert [rig.on(1, tokens) for tokens in (A, B, C)] == [4, 4, 4]


def test_prefetches_hold_only_a_part_of_the_host() -> None:
    rig = Rig(host=8, backend=stored(prompt(8, 1), B), prefetch_host_share=0.5, batch_pages=1)
    prefetches = [rig.tiers.prefetch(tokens) for tokens in (prompt(8, 1), B)]
    peak = 0
    for _ in range(20):
        peak = max(peak, rig.tiers.stats().host_private)
        if rig.readers.waiting:
            rig.readers.run()
        rig.poll()
    assert peak == 4
    assert all(prefetch is not None and prefetch.ended for prefetch in prefetches)


@pytest.mark.parametrize("batch_pages", [1, 2, 32])
def test_a_prompt_longer_than_a_prefetch_may_hold_at_once_is_read_in_parts(batch_pages: int) -> None:
    """Pages being read when the room ends are kept, and make room for more; they were dropped once."""
    rig = Rig(host=8, backend=stored(prompt(6, 1)), prefetch_host_share=0.5, batch_pages=batch_pages)
    prefetch = rig.tiers.prefetch(prompt(6, 1))
    assert prefetch is not None
    for _ in range(10):
        if rig.readers.waiting:
            rig.readers.run()
        rig.poll()
    assert prefetch.ended and rig.on(1, prompt(6, 1)) == 6


def test_the_number_of_calls_of_one_prefetch_is_limited() -> None:
    rig = Rig(backend=stored(prompt(8, 1)), batch_pages=2, batches=3)
    prefetch = rig.tiers.prefetch(prompt(8, 1))
    rig.readers.run()
    rig.poll()
    assert len(rig.readers.waiting) == 3
    rig.readers.run(2)
    rig.poll()
    assert len(rig.readers.waiting) == 2, "in order"
    rig.readers.run()
    rig.poll()
    assert len(rig.readers.waiting) == 2
    rig.settle()
    assert prefetch is not None and prefetch.loaded == 16


def test_reads_may_return_in_any_order() -> None:
    for order in itertools.permutations(range(3)):
        rig = Rig(backend=stored(prompt(6, 1)), batch_pages=2, batches=3)
        prefetch = rig.tiers.prefetch(prompt(6, 1))
        rig.readers.run()
        rig.poll()
        calls = list(rig.readers.waiting)
        arrived: set[int] = set()
        for at in order:
            calls[at].run()
            rig.readers.waiting.remove(calls[at])
            arrived.add(at)
            rig.poll()
            whole = next((n for n in range(3) if n not in arrived), 3)
            assert rig.on(1, prompt(6, 1)) == 2 * whole
        assert prefetch is not None and prefetch.ended and prefetch.loaded == 12
        rig.close()


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("how", ["absent", "altered", "short"])
@pytest.mark.parametrize("batches", [1, 4])
def test_no_page_from_the_first_damaged_one_on_is_added_to_the_tree(
    how: str, at: int, batch: int, batches: int
) -> None:
    backend = stored(A)
    assert stored_keys(A) == backend.stored_keys()
    rig = Rig(backend=backend, batch_pages=batch, batches=batches)
    prefetch = rig.tiers.prefetch(A)
    rig.readers.run()
    key = backend.stored_keys()[at]
    if how == "absent":  # lost after it was found
        backend.delete([key])
    else:
        backend.set_value(key, bytes(len(backend.value(key))) if how == "altered" else b"short")
    calls = len(backend.calls)
    rig.settle()
    assert prefetch is not None and prefetch.ended
    assert prefetch.loaded == 2 * at and rig.on(1, A) == at
    assert late(rig) == {"fault": 4 - at}
    assert batches > 1 or backend.calls[calls:].count("get") == at // batch + 1, "nothing is read after it"
    cause = {"absent": "absent", "altered": "altered", "short": "length"}[how]
    assert rig.tiers.stats().faults == {cause: 1}
    assert rig.serve(A, load=True) == 2 * at


def test_a_revoked_prefetch_begins_no_more_reads_and_keeps_pages_being_read() -> None:
    rig = Rig(backend=stored(prompt(8, 1)), batch_pages=1, batches=2)
    prefetch = rig.tiers.prefetch(prompt(8, 1))
    assert prefetch is not None
    rig.readers.run()
    rig.poll()
    prefetch.revoke()
    rig.settle()
    assert prefetch.ended and prefetch.loaded == 4
    assert rig.on(1, prompt(8, 1)) == 2


def test_a_prefetch_revoked_before_storage_answers_reads_nothing() -> None:
    backend = stored(A)
    rig = Rig(backend=backend)
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None
    prefetch.revoke()
    calls = len(backend.calls)
    rig.settle()
    assert prefetch.ended and prefetch.loaded == 0
    assert backend.calls[calls:] == ["exists"]


def test_two_requests_share_one_prefetch_and_one_may_revoke_it() -> None:
    rig = Rig(backend=stored(A))
    one, two = rig.tiers.prefetch(A), rig.tiers.prefetch(A)
    assert one is not None and one is two and one.users == 2 and one.shared
    assert rig.tiers.counts == {"prefetches": 1}
    one.revoke()
    rig.settle()
    assert one.loaded == 8


def test_a_revoked_prefetch_continues_for_a_request_that_comes_in_time() -> None:
    rig = Rig(backend=stored(prompt(8, 1)), batch_pages=1, batches=1)
    one = rig.tiers.prefetch(prompt(8, 1))
    assert one is not None
    rig.readers.run()
    one.revoke()
    two = rig.tiers.prefetch(prompt(8, 1))
    assert two is one
    rig.settle()
    assert rig.on(1, prompt(8, 1)) == 8


def test_prefetches_of_two_prompts_with_a_common_prefix() -> None:
    one, two = prompt(4, 1, 1, 2), prompt(4, 1, 1, 3)
    rig = Rig(backend=stored(one, two), batch_pages=1)
    first = rig.tiers.prefetch(one)
    rig.readers.run()
    rig.poll()
    rig.readers.run()
    rig.poll()
    second = rig.tiers.prefetch(two)
    assert second is not None and second is not first
    rig.settle()
    assert [rig.on(1, tokens) for tokens in (one, two)] == [4, 4]


def test_pages_computed_while_they_are_read_are_kept_once() -> None:
    rig = Rig(backend=stored(A))
    prefetch = rig.tiers.prefetch(A)
    rig.readers.run()
    rig.poll()
    rig.serve(A)
    rig.poll()
    while rig.copies:
        rig.end_copy()
    rig.poll()
    assert rig.on(1, A) == 4
    rig.settle()
    assert prefetch is not None and prefetch.ended and prefetch.loaded == 0
    assert rig.tiers.counts["prefetch_dropped"] == 4


def extended() -> tuple[Rig, Prefetch, Sequence[int]]:
    """Returns a prompt whose first pages are only on the device, and whose rest is being read."""
    whole = prompt(6, 1, 1, 2)
    rig = Rig(backend=stored(whole))
    rig.serve(prompt(2, 1))
    prefetch = rig.tiers.prefetch(whole)
    assert prefetch is not None
    rig.readers.run()
    rig.poll()
    rig.readers.run()
    rig.poll()
    assert not prefetch.ended and len(rig.copies) == 1, "the first pages are in flight to the host"
    return rig, prefetch, whole


def test_pages_that_arrive_wait_for_the_pages_before_them_to_be_on_the_host() -> None:
    rig, prefetch, whole = extended()
    assert rig.on(1, whole) == 0
    rig.end_copy()
    rig.poll()
    assert prefetch.ended and prefetch.loaded == 8 and rig.on(1, whole) == 6
    assert rig.serve(whole, load=True) == 12


def test_pages_that_arrive_after_pages_whose_copy_failed_are_dropped() -> None:
    rig, prefetch, whole = extended()
    rig.end_copy(fail=True)
    rig.poll()
    assert prefetch.ended and prefetch.loaded == 0
    assert rig.tiers.counts["prefetch_dropped"] == 4
    assert rig.on(1, whole) == 0 and rig.tiers.stats().host_free == 32


@pytest.mark.parametrize("write", ["write_through_selective", "write_back"])
def test_a_prefetch_backs_up_the_pages_before_it_whatever_the_policy(write: str) -> None:
    whole = prompt(6, 1, 1, 2)
    rig = Rig(backend=stored(whole), host_options={"write_policy": write, "write_hits": 9})
    rig.serve(prompt(2, 1))
    rig.settle()
    assert rig.on(1, whole) == 0
    prefetch = rig.tiers.prefetch(whole)
    rig.settle()
    assert prefetch is not None and prefetch.loaded == 8
    assert rig.on(1, whole) == 6


def test_pages_being_read_do_not_end_in_the_wrong_place_after_a_flush() -> None:
    rig, prefetch, whole = extended()
    rig.cache.flush()
    rig.end_copy()
    rig.poll()
    rig.cache.flush()
    rig.settle()
    assert prefetch.ended
    rig.close()
    assert rig.on(1, whole) == 0


def test_a_host_full_of_locked_pages_takes_no_prefetch() -> None:
    rig = Rig(host=4, backend=stored(B))
    only_on_host(rig, A)
    lease, load = begin_load(rig, A)
    prefetch = rig.tiers.prefetch(B)
    rig.readers.run_all()
    rig.poll()
    assert prefetch is not None and prefetch.ended and prefetch.loaded == 0
    load.wait()
    lease.abort()


# ---------------------------------------------------------------- late pages


def after(rig: Rig, seconds: float) -> None:
    rig.clock.now_s += seconds
    rig.poll()


def test_pages_that_have_not_arrived_when_the_wait_ends_are_late_once() -> None:
    rig = Rig(
        backend=stored(prompt(8, 1)), batch_pages=2, batches=1, prefetch_timeout_s=1.0, prefetch_timeout_per_page_s=0.0
    )
    prefetch = rig.tiers.prefetch(prompt(8, 1))
    for _ in range(2):  # the lookup, and two pages
        rig.readers.run()
        rig.poll()
    after(rig, 1.0)
    assert late(rig) == {"timeout": 6}
    rig.settle()
    assert prefetch is not None and prefetch.loaded == 16
    assert late(rig) == {"timeout": 6}


def test_pages_without_room_on_the_host_are_late_because_of_it() -> None:
    rig = Rig(host=4, backend=stored(prompt(8, 1)))
    rig.serve(B)
    rig.poll()  # in flight to every page of the host
    rig.tiers.prefetch(prompt(8, 1))
    rig.readers.run()
    rig.poll()
    assert late(rig) == {"host_room": 8}
    rig.settle()
    assert late(rig) == {"host_room": 8}


@pytest.mark.parametrize("how", ["revoked", "warm"])
def test_pages_that_no_request_waits_for_are_not_late(how: str) -> None:
    backend = stored(A)
    if how == "warm":
        before = Rig(backend=backend)
        before.serve(A)
        before.settle()
        before.tiers.remember()
        before.settle()
    rig = Rig(backend=backend, prefetch_timeout_s=1.0)
    if how == "warm":
        rig.tiers.warm()
        rig.readers.run()
        rig.poll()
        rig.poll()
    elif (prefetch := rig.tiers.prefetch(A)) is not None:
        prefetch.revoke()
    assert rig.tiers.stats().prefetches == 1
    after(rig, 1.0)
    assert late(rig) == {}
    assert rig.store is not None and rig.store.slow == (how == "revoked")
    rig.settle()
