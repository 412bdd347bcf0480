"""Backups, with completions and failures driven by hand, in any order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from rigs.hand_driven import A, B, C, Rig, prompt

from mainstem.errors import OutOfPages, StaleHandle
from mainstem.storage.memory import MemoryBackend


def test_write_through_backs_up_published_pages() -> None:
    rig = Rig()
    rig.serve(A)
    assert rig.copies == [] and rig.tiers.busy, "only at a poll, which is due"
    rig.poll()
    assert len(rig.copies) == 1 and rig.tiers.busy
    assert rig.on(1, A) == 0
    assert rig.tiers.stats().host_private == 4
    rig.end_copy()
    assert rig.on(1, A) == 0, "only at a poll"
    rig.poll()
    assert rig.on(1, A) == 4 and not rig.tiers.busy
    assert rig.tiers.counts == {"backed_up": 4}


def test_pages_on_the_host_are_not_copied_again() -> None:
    rig = Rig()
    rig.serve(A)
    rig.settle()
    for _ in range(3):
        rig.serve(A)
        rig.settle()
    rig.serve(prompt(6, 1, 1, 1, 1, 2))
    rig.settle()
    assert rig.tiers.counts == {"backed_up": 6}


@pytest.mark.parametrize("hits", [1, 2, 3])
def test_selective_backs_up_prefixes_with_enough_hits(hits: int) -> None:
    rig = Rig(host_options={"write_policy": "write_through_selective", "write_hits": hits})
    for served in range(5):
        rig.serve(A)
        rig.settle()
        assert rig.on(1, A) == (4 if served >= hits else 0)


def test_selective_backs_up_the_shared_part() -> None:
    rig = Rig(host_options={"write_policy": "write_through_selective", "write_hits": 2})
    one, two, three = (prompt(4, 7, 7, mark) for mark in (1, 2, 3))
    for tokens in (one, two, three):
        rig.serve(tokens)
        rig.settle()
    assert [rig.on(1, tokens) for tokens in (one, two, three)] == [2, 2, 2]


def test_write_back_backs_up_when_the_device_is_full() -> None:
    rig = Rig(device=10, host_options={"write_policy": "write_back"})
    rig.serve(A)
    rig.serve(B)
    rig.poll()
    assert rig.copies == [] and (rig.on(1, A), rig.on(1, B)) == (0, 0)
    rig.serve(C)
    assert (rig.on(0, A), rig.on(1, A), rig.on(1, B), rig.on(1, C)) == (1, 4, 0, 0)
    assert rig.on(0, C) == 4
    assert rig.serve(A, load=True) == 8


def test_write_back_frees_device_pages_when_the_host_has_no_room() -> None:
    rig = Rig(device=5, host=3, host_options={"write_policy": "write_back"})
    for tokens in (A, B, C):
        rig.serve(tokens)
    assert rig.tiers.stats().backup_skipped > 0


def test_write_back_frees_device_pages_when_the_copy_fails() -> None:
    rig = Rig(device=5, host_options={"write_policy": "write_back"})
    down = rig.memory.down

    def failing(moves: Any) -> Any:
        ticket = down(moves)
        ticket.fail(RuntimeError("on purpose"))
        return ticket

    rig.memory.down = failing  # type: ignore[method-assign]
    for tokens in (A, B, C):
        assert rig.serve(tokens) == 0
    assert rig.tiers.stats().backup_failed > 0
    assert rig.on(1, A) == 0


def test_write_back_moves_many_prompts_through_a_small_device() -> None:
    rig = Rig(device=6, host=64, host_options={"write_policy": "write_back"})
    prompts = [prompt(4, mark // 3, mark) for mark in range(12)]
    for tokens in prompts:
        rig.serve(tokens)
    assert [rig.serve(tokens, load=True) for tokens in prompts] == [8] * 12


def test_back_up_returns_whether_everything_is_under_way() -> None:
    rig = Rig(host=5)
    rig.serve(A)
    rig.serve(B)
    one, two = (rig.cache.tree.match(tokens).node for tokens in (A, B))
    assert rig.tiers.back_up(one) and rig.tiers.back_up(one)
    assert len(rig.copies) == 1
    assert not rig.tiers.back_up(two), "the host is full of pages in flight"
    assert rig.tiers.counts == {"backup_skipped": 4}
    rig.end_copy()
    rig.poll()
    rig.settle()
    rig.verify()
    rig.close()
    with pytest.raises(StaleHandle):
        rig.tiers.back_up(one)


def test_pages_that_are_being_copied_are_not_evicted_from_the_device() -> None:
    rig = Rig(device=6)
    rig.serve(A)
    rig.poll()
    with rig.cache.lease(B) as lease:
        with pytest.raises(OutOfPages):
            lease.reserve(9)
        rig.settle()
        lease.reserve(9)


def test_a_failed_copy_is_made_again_when_the_prefix_is_used() -> None:
    rig = Rig()
    rig.serve(A)
    rig.poll()
    rig.end_copy(fail=True)
    rig.poll()
    assert rig.on(1, A) == 0 and not rig.tiers.busy
    assert rig.tiers.stats().host_free == 32
    rig.poll()
    assert rig.copies == []
    rig.serve(A)
    rig.settle()
    assert rig.on(1, A) == 4
    assert rig.tiers.counts == {"backup_failed": 4, "backed_up": 4}


def test_a_node_may_be_split_while_it_is_copied() -> None:
    for fail in (False, True):
        rig = Rig(backend=MemoryBackend())
        rig.serve(prompt(4, 1, 1, 2, 2))
        rig.poll()
        rig.serve(prompt(4, 1, 1, 3, 3))
        rig.serve(prompt(4, 1, 4, 4, 4))
        rig.poll()
        assert len(rig.copies) >= 2
        rig.end_copy(fail=fail)
        rig.poll()
        rig.settle()
        expected = [0, 0, 0] if fail else [4, 4, 4]
        assert [rig.on(1, prompt(4, *marks)) for marks in ((1, 1, 2), (1, 1, 3), (1, 4))] == expected
        rig.settle()
        assert rig.tiers.stats().stored == (0 if fail else 9)
        assert rig.writers.submitted == (0 if fail else 3), "one call per copy"
        rig.close()


# A tree of four nodes, each copied by its own transfer:  A - B - C
#                                                          \ D
BRANCHES = {"a": prompt(1, 1), "b": prompt(2, 1, 2), "c": prompt(3, 1, 2, 3), "d": prompt(2, 1, 9)}


ABOVE = {"a": "a", "b": "ab", "c": "abc", "d": "ad"}


def four_copies(**options: Any) -> Rig:
    rig = Rig(**options)
    for tokens in BRANCHES.values():
        rig.serve(tokens)
        rig.poll()
    assert len(rig.copies) == 4
    return rig


def present(rig: Rig) -> dict[str, bool]:
    return {name: rig.on(1, tokens) == len(tokens) // 2 for name, tokens in BRANCHES.items()}


@pytest.mark.parametrize("order", list(itertools.permutations("abcd")), ids="".join)
def test_copies_may_end_in_any_order_and_fail_with_their_parents(order: tuple[str, ...]) -> None:
    for failing in itertools.product([False, True], repeat=4):
        rig = four_copies()
        tickets = dict(zip("abcd", rig.copies, strict=True))
        good: dict[str, bool] = {}
        for name, fails in zip(order, failing, strict=True):
            if fails:
                tickets[name].fail(RuntimeError("on purpose"))
            tickets[name].wait()
            good[name] = not fails
            rig.poll()
            assert present(rig) == {at: all(good.get(above, False) for above in ABOVE[at]) for at in "abcd"}
        assert not rig.tiers.busy
        arrived = sum(present(rig).values())
        assert rig.tiers.stats().host_private == 0
        assert rig.tiers.counts == {
            name: n for name, n in (("backed_up", arrived), ("backup_failed", 4 - arrived)) if n
        }


@pytest.mark.parametrize("failing", list(itertools.product([False, True], repeat=4)))
def test_copies_that_all_ended_are_settled_at_one_poll(failing: tuple[bool, ...]) -> None:
    rig = four_copies()
    for fails in failing:
        rig.end_copy(fail=fails)
    rig.poll()
    fails = dict(zip("abcd", failing, strict=True))  # type: ignore[assignment]
    assert present(rig) == {at: not any(fails[above] for above in ABOVE[at]) for at in "abcd"}  # type: ignore[index]
    assert not rig.tiers.busy


@pytest.mark.parametrize("fail", [False, True])
def test_a_copy_below_a_failed_copy_that_is_not_undone_yet_fails_with_it(fail: bool) -> None:
    rig = Rig()
    rig.serve(prompt(1, 1))
    rig.poll()
    rig.serve(prompt(2, 1, 2))
    rig.poll()
    rig.end_copy(fail=True)  # of the parent, while that of the child is under way
    rig.poll()
    rig.serve(prompt(3, 1, 2, 3))
    rig.serve(prompt(2, 1, 8))
    rig.poll()
    while rig.copies:
        rig.end_copy(-1, fail=fail)
        rig.poll()
    assert [rig.on(1, tokens) for tokens in BRANCHES.values()] == [0, 0, 0, 0]
    assert rig.tiers.stats().host_free == 32
