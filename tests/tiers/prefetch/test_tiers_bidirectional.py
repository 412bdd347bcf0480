"""Reads from the back for a request that computes from the front, with completions and failures driven by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rigs.hand_driven import FaultyBackend, Rig, prompt, stored, stored_keys

from mainstem.cache.prefix_cache import Lease
from mainstem.tiers.prefetch.prefetch import Prefetch
from mainstem.tiers.prefetch.waits import ANY

TOKENS = prompt(8, *range(1, 9))  # 8 pages of 2 tokens, and one more token


class Leader:
    """A request that computes while its prompt is read. A page takes 20 s to compute."""

    def __init__(self, backend: FaultyBackend | None = None, tokens: Sequence[int] = TOKENS, **options: object) -> None:
        config = {"batch_pages": 1, "batches": 2, "call_timeout_s": 1000.0, **options}
        self.rig = rig = Rig(backend=backend or stored(TOKENS), **config)  # type: ignore[arg-type]
        for _ in range(4):
            rig.tiers.prefill.observe([(64, 0)], 640.0)
        self.tokens = tokens
        prefetch = rig.tiers.prefetch(tokens, bidirectional=True)
        assert prefetch is not None and prefetch.waiting
        self.prefetch: Prefetch = prefetch
        self.lease: Lease = rig.cache.lease(list(tokens))
        self.lease.reserve(self.lease.length)
        rig.compute(self.lease, tokens)
        self.leads = prefetch.lead(rig.cache.tree.keys.encode(tokens), 0)
        self.read()  # the answer

    def read(self, calls: int = 1) -> None:
        for _ in range(calls):
            self.rig.readers.run()
        self.rig.poll()

    def compute(self, pages: int) -> None:
        """Publishes what is computed up to here."""
        self.lease.publish(2 * pages)
        self.prefetch.reached(2 * pages)
        self.rig.poll()

    def back_up(self, *, fail: bool = False) -> None:
        """Ends the copies to the host."""
        while self.rig.copies:
            self.rig.end_copy(fail=fail)
            self.rig.poll()

    @property
    def on_host(self) -> int:
        return self.rig.on(1, self.tokens)

    def end(self) -> None:
        """Ends the request; then nothing may be held."""
        self.prefetch.stop_leading()
        self.prefetch.revoke()
        self.lease.abort()
        self.rig.close()


def test_what_is_read_from_the_back_joins_the_tree_when_the_front_meets_it() -> None:
    leader = Leader()
    leader.read(2)
    leader.read(2)
    assert leader.on_host == 0 and leader.rig.tiers.stats().host_private == 6, "four arrived, two are under way"
    leader.compute(3)
    leader.back_up()
    assert leader.on_host == 3
    leader.read(2)
    leader.rig.poll()
    assert leader.on_host == 8 and leader.prefetch.usable == 16
    assert leader.prefetch.ended and leader.prefetch.loaded == 10
    leader.lease.finish(6)
    assert leader.rig.serve(TOKENS, load=True) == 16
    assert leader.rig.tiers.counts["loaded"] == 5
    leader.end()


def test_a_request_computes_up_to_the_first_page_that_has_arrived() -> None:
    leader = Leader()
    assert leader.prefetch.ahead(0) == 0, "storage has just been asked"
    leader.read(2)
    leader.rig.clock.now_s += 900.0
    assert leader.prefetch.ahead(0) == 12
    assert leader.prefetch.ahead(3) == 9
    assert leader.prefetch.ahead(12) == 0, "it has arrived"
    leader.end()


def test_the_front_is_not_read() -> None:
    leader = Leader()
    leader.compute(5)
    leader.read(2)
    leader.read()
    assert not leader.rig.readers.waiting, "pages 5, 6 and 7"
    leader.back_up()
    assert leader.on_host == 8
    leader.end()


@pytest.mark.parametrize("how", ["lost", "altered"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_damaged_page_is_computed_and_what_follows_it_is_met(batch: int, how: str) -> None:
    backend = stored(TOKENS)
    key = stored_keys(TOKENS)[5]
    leader = Leader(backend, batch_pages=batch)
    if how == "lost":
        backend.delete([key])
    else:
        backend.set_value(key, bytes(len(backend.value(key))))
    leader.compute(2)
    for _ in range(8):
        if leader.rig.readers.waiting:
            leader.read()
        leader.back_up()
    assert leader.on_host == 5 and not leader.prefetch.ended
    assert leader.prefetch.ahead(10) == 2, "page 5 is lost, and page 6 has arrived"
    leader.compute(6)
    leader.back_up()
    assert leader.on_host == 8 and leader.prefetch.ended
    assert leader.rig.tiers.stats().late["fault"] == 1
    leader.end()


def test_a_call_that_fails_as_a_whole_is_not_repeated() -> None:
    backend = stored(TOKENS)
    leader = Leader(backend, batch_pages=4)
    backend.instead["get"] = OSError("on purpose")
    leader.read(2)
    assert not leader.rig.readers.waiting
    assert leader.rig.tiers.stats().late["fault"] == 8
    assert leader.prefetch.ahead(0) is None, "nothing more will arrive"
    leader.end()


def test_what_is_never_met_is_freed() -> None:
    leader = Leader()
    leader.read(2)
    leader.end()
    assert leader.rig.tiers.counts["prefetch_dropped"] == 4, "two that had arrived, and two under way"


def test_if_the_copy_of_the_front_fails_what_was_read_is_freed() -> None:
    leader = Leader()
    leader.read(2)
    leader.read(2)
    leader.compute(4)
    leader.back_up(fail=True)
    assert leader.on_host == 0
    leader.end()


def test_one_request_leads_and_only_if_its_prompt_begins_with_what_is_read() -> None:
    leader = Leader()
    encode = leader.rig.cache.tree.keys.encode
    assert leader.leads and not leader.prefetch.lead(encode(TOKENS), 0), "one does already"
    leader.prefetch.stop_leading()
    assert not leader.prefetch.lead(encode([*TOKENS[:14], 77, 77, 77]), 0)
    assert leader.prefetch.lead(encode([*TOKENS, 5, 5]), 0)
    leader.end()


def test_without_room_for_all_one_stretch_after_another_is_read() -> None:
    leader = Leader(host=8, prefetch_host_share=0.5)
    for _ in range(12):
        assert leader.rig.tiers.stats().host_private <= 4
        leader.back_up()
        if leader.rig.readers.waiting:
            leader.read()
    assert leader.on_host == 8, "nothing was computed: the stretches were read down to the front"
    leader.end()


def test_pages_computed_while_others_are_read_are_counted() -> None:
    leader = Leader()
    leader.compute(3)
    leader.end()
    late = leader.rig.tiers.stats().late
    assert {cause: pages for cause, pages in late.items() if pages} == {"meanwhile": 3}


@pytest.mark.parametrize("policy", ["wait_complete", "best_effort"])
def test_with_another_policy_no_request_computes_meanwhile(policy: str) -> None:
    rig = Rig(backend=stored(TOKENS), prefetch=policy)
    prefetch = rig.tiers.prefetch(TOKENS, bidirectional=True)
    assert prefetch is not None and not prefetch.lead(rig.cache.tree.keys.encode(TOKENS), 0)
    rig.settle()
    assert rig.on(1, TOKENS) == 8


def test_a_store_that_has_not_answered_by_the_end_is_marked_as_slow() -> None:
    rig = Rig(backend=stored(TOKENS))
    for _ in range(4):
        rig.tiers.prefill.observe([(64, 0)], 640.0)
    prefetch = rig.tiers.prefetch(TOKENS, bidirectional=True)
    assert prefetch is not None and prefetch.lead(rig.cache.tree.keys.encode(TOKENS), 0)
    assert rig.store is not None and not rig.store.slow
    rig.clock.now_s += 3.0
    prefetch.stop_leading()
    assert rig.store.slow
    assert prefetch.ahead(0) in (None, ANY), "nobody waits for it"
    prefetch.revoke()
    rig.settle()
