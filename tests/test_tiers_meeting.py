"""Reads from the back for a request that computes from the front, with completions and failures driven by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rigs.hand_driven import FaultyBackend, Rig, prompt, stored, stored_keys

from mainstem.cache.prefix_cache import Lease
from mainstem.tiers.prefetch.prefetch import Prefetch
from mainstem.tiers.prefetch.waits import ANY

TOKENS = prompt(8, *range(1, 9))  # 8 pages of 2 tokens, and one more token


class Meeting:
    """A request that computes while its prompt is read. A page takes 20 s to compute."""

    def __init__(self, backend: FaultyBackend | None = None, tokens: Sequence[int] = TOKENS, **options: object) -> None:
        config = {"batch_pages": 1, "batches": 2, "call_timeout_s": 1000.0, **options}
        self.rig = rig = Rig(backend=backend or stored(TOKENS), **config)  # type: ignore[arg-type]
        for _ in range(4):
            rig.tiers.prefill.observe([(64, 0)], 640.0)
        self.tokens = tokens
        prefetch = rig.tiers.prefetch(tokens, meets=True)
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
        self.rig.close_all()


def test_what_is_read_from_the_back_joins_the_tree_when_the_front_meets_it() -> None:
    meeting = Meeting()
    meeting.read(2)
    meeting.read(2)
    assert meeting.on_host == 0 and meeting.rig.tiers.stats().host_private == 6, "four arrived, two are under way"
    meeting.compute(3)
    meeting.back_up()
    assert meeting.on_host == 3
    meeting.read(2)
    meeting.rig.poll()
    assert meeting.on_host == 8 and meeting.prefetch.usable == 16
    assert meeting.prefetch.ended and meeting.prefetch.loaded == 10
    meeting.lease.finish(6)
    assert meeting.rig.serve(TOKENS, load=True) == 16
    assert meeting.rig.tiers.counts["loaded"] == 5
    meeting.end()


def test_a_request_computes_up_to_the_first_page_that_has_arrived() -> None:
    meeting = Meeting()
    assert meeting.prefetch.ahead(0) == 0, "storage has just been asked"
    meeting.read(2)
    meeting.rig.clock.now_s += 900.0
    assert meeting.prefetch.ahead(0) == 12
    assert meeting.prefetch.ahead(3) == 9
    assert meeting.prefetch.ahead(12) == 0, "it has arrived"
    meeting.end()


def test_the_front_is_not_read() -> None:
    meeting = Meeting()
    meeting.compute(5)
    meeting.read(2)
    meeting.read()
    assert not meeting.rig.readers.waiting, "pages 5, 6 and 7"
    meeting.back_up()
    assert meeting.on_host == 8
    meeting.end()


@pytest.mark.parametrize("how", ["lost", "altered"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_damaged_page_is_computed_and_what_follows_it_is_met(batch: int, how: str) -> None:
    backend = stored(TOKENS)
    key = stored_keys(TOKENS)[5]
    meeting = Meeting(backend, batch_pages=batch)
    if how == "lost":
        backend.delete([key])
    else:
        backend.set_value(key, bytes(len(backend.value(key))))
    meeting.compute(2)
    for _ in range(8):
        if meeting.rig.readers.waiting:
            meeting.read()
        meeting.back_up()
    assert meeting.on_host == 5 and not meeting.prefetch.ended
    assert meeting.prefetch.ahead(10) == 2, "page 5 is lost, and page 6 has arrived"
    meeting.compute(6)
    meeting.back_up()
    assert meeting.on_host == 8 and meeting.prefetch.ended
    assert meeting.rig.tiers.stats().late["fault"] == 1
    meeting.end()


def test_a_call_that_fails_as_a_whole_is_not_repeated() -> None:
    backend = stored(TOKENS)
    meeting = Meeting(backend, batch_pages=4)
    backend.instead["get"] = OSError("on purpose")
    meeting.read(2)
    assert not meeting.rig.readers.waiting
    assert meeting.rig.tiers.stats().late["fault"] == 8
    assert meeting.prefetch.ahead(0) is None, "nothing more will arrive"
    meeting.end()


def test_what_is_never_met_is_freed() -> None:
    meeting = Meeting()
    meeting.read(2)
    meeting.end()
    assert meeting.rig.tiers.counts["prefetch_dropped"] == 4, "two that had arrived, and two under way"


def test_if_the_copy_of_the_front_fails_what_was_read_is_freed() -> None:
    meeting = Meeting()
    meeting.read(2)
    meeting.read(2)
    meeting.compute(4)
    meeting.back_up(fail=True)
    assert meeting.on_host == 0
    meeting.end()


def test_one_request_leads_and_only_if_its_prompt_begins_with_what_is_read() -> None:
    meeting = Meeting()
    encode = meeting.rig.cache.tree.keys.encode
    assert meeting.leads and not meeting.prefetch.lead(encode(TOKENS), 0), "one does already"
    meeting.prefetch.stop_leading()
    assert not meeting.prefetch.lead(encode([*TOKENS[:14], 77, 77, 77]), 0)
    assert meeting.prefetch.lead(encode([*TOKENS, 5, 5]), 0)
    meeting.end()


def test_without_room_for_all_one_stretch_after_another_is_read() -> None:
    meeting = Meeting(host=8, prefetch_host_share=0.5)
    for _ in range(12):
        assert meeting.rig.tiers.stats().host_private <= 4
        meeting.back_up()
        if meeting.rig.readers.waiting:
            meeting.read()
    assert meeting.on_host == 8, "nothing was computed: the stretches were read down to the front"
    meeting.end()


def test_pages_computed_while_others_are_read_are_counted() -> None:
    meeting = Meeting()
    meeting.compute(3)
    meeting.end()
    late = meeting.rig.tiers.stats().late
    assert {cause: pages for cause, pages in late.items() if pages} == {"meanwhile": 3}


@pytest.mark.parametrize("policy", ["wait_complete", "best_effort"])
def test_with_another_policy_no_request_computes_meanwhile(policy: str) -> None:
    rig = Rig(backend=stored(TOKENS), prefetch=policy)
    prefetch = rig.tiers.prefetch(TOKENS, meets=True)
    assert prefetch is not None and not prefetch.lead(rig.cache.tree.keys.encode(TOKENS), 0)
    rig.settle()
    assert rig.on(1, TOKENS) == 8
    rig.close_all()


def test_a_store_that_has_not_answered_by_the_end_is_marked_as_slow() -> None:
    rig = Rig(backend=stored(TOKENS))
    for _ in range(4):
        rig.tiers.prefill.observe([(64, 0)], 640.0)
    prefetch = rig.tiers.prefetch(TOKENS, meets=True)
    assert prefetch is not None and prefetch.lead(rig.cache.tree.keys.encode(TOKENS), 0)
    assert rig.store is not None and not rig.store.slow
    rig.clock.now_s += 3.0
    prefetch.stop_leading()
    assert rig.store.slow
    assert prefetch.ahead(0) in (None, ANY), "nobody waits for it"
    prefetch.revoke()
    rig.settle()
