"""The scheduler over tiers: it finds, loads and waits for pages of host and storage, and no answer changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rigs.ghost import VOCAB, prompt, scores
from rigs.scheduler import PAGE
from rigs.tiered import TieredBench

from mainstem.cache.keys import TokenKeys, TokenLike, TypedKeys
from mainstem.cache.namespaces import NamespaceLike
from mainstem.errors import StorageError
from mainstem.runtime.request import Usage
from mainstem.runtime.segments import Segment
from mainstem.tiers.prefetch.prefetch import Prefetch


def tiers_of(usage: Usage) -> tuple[int, int, int]:
    below = usage.host_tokens + usage.storage_tokens
    return usage.cached_tokens - below, usage.host_tokens, usage.storage_tokens


def test_each_tier_is_found_and_named() -> None:
    bench = TieredBench()
    tokens = prompt(1, 22)
    assert tiers_of(*bench.serve(tokens)) == (0, 0, 0)
    assert tiers_of(*bench.serve(tokens)) == (21, 0, 0)  # on the device, the last page by copying its beginning
    bench.forget_device()
    assert tiers_of(*bench.serve(tokens)) == (0, 20, 0)
    bench.forget_device()
    bench.restart()
    assert tiers_of(*bench.serve(tokens)) == (0, 0, 20)
    totals = bench.scheduler.totals
    assert (totals.cached_tokens, totals.host_tokens, totals.storage_tokens) == (20, 0, 20)


@pytest.mark.parametrize("where", ["on the host", "in storage"])
def test_a_load_that_fails_is_computed_and_does_not_count(where: str) -> None:
    bench = TieredBench()
    tokens = prompt(2, 22)
    bench.serve(tokens)
    bench.forget_device()
    if where == "in storage":
        bench.restart()
    bench.host.fail_up = RuntimeError("the copy engine is gone")
    assert tiers_of(*bench.serve(tokens)) == (0, 0, 0)
    assert bench.tiers.stats().load_failed == 5
    totals = bench.scheduler.totals
    assert (totals.cached_tokens, totals.host_tokens, totals.storage_tokens) == (0, 0, 0)
    bench.host.fail_up = None
    assert tiers_of(*bench.serve(tokens)) == (21, 0, 0)


def test_what_the_device_has_still_counts_when_a_load_fails() -> None:
    bench = TieredBench(pages=40)
    tokens = prompt(12, 22)
    bench.serve(tokens)
    bench.forget_device()
    bench.restart(40)
    bench.serve(tokens[:10])  # the device has its two pages now, and storage all five
    assert bench.scheduler.totals.storage_tokens == 8
    bench.host.fail_up = RuntimeError("the copy engine is gone")
    assert tiers_of(*bench.serve(tokens)) == (8, 0, 0)
    totals = bench.scheduler.totals
    assert (totals.cached_tokens, totals.host_tokens, totals.storage_tokens) == (16, 0, 8)


def test_a_failed_load_affects_no_other_request() -> None:
    bench = TieredBench(pages=40)
    first, second = prompt(3, 22), prompt(4, 18)
    bench.serve(first)
    bench.forget_device()
    bench.host.fail_up = RuntimeError("gone")
    usages = bench.serve(first, second)
    assert [tiers_of(usage) for usage in usages] == [(0, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("where", ["on the host", "in storage"])
def test_a_prompt_that_is_scored_is_not_loaded_but_others_beside_it_are(where: str, fails: bool) -> None:
    bench = TieredBench(pages=40)
    tokens, other = prompt(15, 22), prompt(16, 22)
    bench.serve(tokens)
    bench.serve(other)
    bench.forget_device()
    if where == "in storage":
        bench.restart(40)
    bench.host.fail_up = RuntimeError("the copy engine is gone") if fails else None
    ids = [bench.add(other, max_tokens=4), bench.add(tokens, max_tokens=4, prompt_logprobs=1)]
    bench.run()
    bench.assert_complete(*ids)
    assert [score for delta in bench.deltas[ids[1]] for score in delta.prompt_logprobs] == scores(tokens, 1)
    assert tiers_of(bench.usage(ids[1])) == (0, 0, 0)
    assert bench.usage(ids[0]).cached_tokens == (0 if fails else 20)
    assert bench.host.ups == 1 and bench.tiers.stats().prefetched == (5 if where == "in storage" else 0)


def test_two_that_want_the_same_host_pages_load_them_once() -> None:
    bench = TieredBench(pages=40)
    shared = prompt(5, 20)
    bench.serve(shared + [1, 2])
    bench.forget_device()
    first, second = bench.serve(shared + [3, 4], shared + [5, 6])
    assert bench.host.ups == 1
    assert (tiers_of(first), tiers_of(second)) == ((0, 20, 0), (20, 0, 0))


@pytest.mark.parametrize("when", ["waiting for storage", "loading"])
def test_a_request_is_cancelled_on_its_way_up(when: str) -> None:
    bench = TieredBench()
    tokens = prompt(6, 22)
    bench.serve(tokens)
    bench.forget_device()
    if when == "waiting for storage":
        bench.restart()
        bench.workers.instant = False
    gone = bench.add(tokens, max_tokens=4)
    if when == "loading":
        bench.ghost.fail_next = RuntimeError("the forward fails while a load is under way")
    bench.step()
    bench.scheduler.cancel(gone)
    bench.workers.instant = True
    bench.workers.run_all()
    bench.step(8)
    assert not bench.scheduler.busy
    assert bench.cache.pool.private == 0
    assert bench.serve(tokens)[0].cached_tokens >= 20
    bench.tiers.drain(1.0)
    bench.cache.flush()
    assert bench.cache.pool.free == bench.cache.pool.total


def test_storage_is_not_asked_for_the_rest_of_a_prompt_whose_request_was_cancelled() -> None:
    bench = TieredBench(batch_pages=1, batches=1)
    tokens = prompt(13, 22)
    bench.serve(tokens)
    bench.forget_device()
    bench.restart()
    bench.workers.instant = False
    gone = bench.add(tokens, max_tokens=4)
    bench.workers.run_all()
    bench.step()  # all five pages were found, and the first one is asked for
    bench.scheduler.cancel(gone)
    bench.workers.instant = True
    bench.workers.run_all()
    bench.step(8)
    assert not bench.tiers.busy
    assert bench.tiers.stats().prefetched == 1


def test_a_cancelled_request_leaves_the_prefetch_to_others_that_share_it() -> None:
    bench = TieredBench(batch_pages=1, batches=1)
    tokens = prompt(14, 22)
    bench.serve(tokens)
    bench.forget_device()
    bench.restart()
    bench.workers.instant = False
    gone, stays = (bench.add(tokens, max_tokens=4) for _ in range(2))
    bench.workers.run_all()
    bench.step()
    bench.scheduler.cancel(gone)
    bench.workers.instant = True
    bench.workers.run_all()
    bench.step(40)
    assert bench.last(gone).finish_reason == "cancelled"
    assert tiers_of(bench.usage(stays)) == (0, 0, 20)


def test_a_store_that_does_not_answer_is_waited_for_once_and_not_longer_than_configured() -> None:
    bench = TieredBench(prefetch_timeout_s=0.1, prefetch_timeout_per_page_s=0.0)
    bench.workers.instant = False
    began_s = bench.now_s
    [usage] = bench.serve(prompt(7, 20))
    assert 0.1 <= usage.queue_s <= 0.13
    assert bench.serve(prompt(8, 20))[0].queue_s <= 0.02  # the store is known to be slow
    assert bench.now_s - began_s < 0.5


def test_best_effort_waits_for_nothing() -> None:
    bench = TieredBench(prefetch="best_effort")
    tokens = prompt(9, 20)
    bench.serve(tokens)
    bench.forget_device()
    bench.restart()
    bench.workers.instant = False
    assert bench.serve(tokens)[0].cached_tokens == 0


def test_it_polls_soon_while_a_request_waits_for_storage() -> None:
    bench = TieredBench()
    bench.workers.instant = False
    bench.add(prompt(15, 22), max_tokens=4)
    assert bench.scheduler.idle_s == 0.0, "it has not scheduled the request yet"
    bench.step()
    assert bench.scheduler.idle_s is not None
    assert 0 < bench.scheduler.idle_s <= 0.01
    bench.add([3], max_tokens=4)
    assert bench.scheduler.idle_s == 0.0


def test_it_polls_until_transfers_after_the_last_request_have_ended() -> None:
    bench = TieredBench()
    bench.workers.instant = False
    bench.add(prompt(16, 22), max_tokens=4)
    bench.workers.run_all()
    bench.run()
    assert bench.tiers.busy, "pages are being written to storage"
    assert bench.scheduler.idle_s is not None
    assert 0 < bench.scheduler.idle_s <= 0.1
    bench.workers.instant = True
    bench.workers.run_all()
    bench.step(5)
    assert not bench.tiers.busy
    assert bench.scheduler.idle_s is None, "only a new request can bring work"


def test_without_a_cache_storage_is_not_asked() -> None:
    bench = TieredBench(enabled=False)
    bench.serve(prompt(17, 22))
    assert bench.tiers.stats().prefetches == 0


def test_storage_is_queried_a_few_times_for_one_request_however_long_it_waits() -> None:
    bench = TieredBench(pages=8, prefetch_min_tokens=64)  # so each time there is too little to find
    asked: list[object] = []
    prefetch = bench.tiers.prefetch

    def counted(tokens: TokenLike, namespace: NamespaceLike = None, *, bidirectional: bool = False) -> Prefetch | None:
        asked.append(tokens)
        return prefetch(tokens, namespace, bidirectional=bidirectional)

    bench.tiers.prefetch = counted  # type: ignore[method-assign]
    bench.add(prompt(18, 20), max_tokens=12, ignore_eos=True)
    bench.step(3)
    assert bench.scheduler.running == 1
    bench.add(prompt(19, 18), max_tokens=2)
    asked.clear()
    bench.step(8)
    assert bench.scheduler.waiting == 1, "there are no pages for it"
    assert 1 < len(asked) <= 4


def test_a_request_that_came_during_too_many_lookups_is_looked_up_later() -> None:
    bench = TieredBench(max_prefetches=1)
    first, second = prompt(22, 22), prompt(23, 22)
    for tokens in (first, second):
        bench.serve(tokens)
        bench.forget_device()
    bench.restart()
    bench.add(prompt(24, 28), max_tokens=12, ignore_eos=True)
    bench.step(3)
    assert bench.scheduler.running == 1
    ids = [bench.add(tokens, max_tokens=4) for tokens in (first, second)]
    assert bench.tiers.stats().prefetch_skipped == 1
    bench.step(60)
    for id in ids:
        assert tiers_of(bench.usage(id)) == (0, 0, 20)


def test_what_two_prefetches_loaded_for_one_request_adds_up() -> None:
    """The first was begun for a prompt that parts from this one, and whose request has ended."""
    bench = TieredBench(pages=16)
    shared = prompt(25, 12)
    first, second = shared + prompt(26, 10), shared + prompt(27, 10)
    for tokens in (first, second):
        bench.serve(tokens)
        bench.forget_device()
    bench.restart(16)
    bench.workers.instant = False
    gone, stays = (bench.add(tokens, max_tokens=4) for tokens in (first, second))
    bench.workers.run_all()
    bench.step()
    bench.scheduler.cancel(gone)
    bench.workers.instant = True
    bench.workers.run_all()
    bench.step(40)
    assert bench.tiers.stats().prefetches == 2
    assert tiers_of(bench.usage(stays)) == (0, 0, 20)


def test_a_prefetch_for_two_that_found_nothing_is_not_begun_again() -> None:
    bench = TieredBench(pages=40)
    shared = prompt(21, 20)
    bench.serve(shared + [1], shared + [2])
    assert bench.tiers.stats().prefetches == 1


def test_a_broken_store_changes_no_answer() -> None:
    bench = TieredBench()

    def broken(*_: object) -> list[bool]:
        raise StorageError("unreachable", "nobody there")

    bench.backend.exists = broken  # type: ignore[method-assign,assignment]
    for seed in range(12):
        bench.serve(prompt(20 + seed % 4, 20))
    stats = bench.tiers.stats()
    assert stats.breaker_open
    assert stats.faults["unreachable"] >= 3
    assert stats.faults["breaker"] > 0


def test_a_workload_larger_than_the_device_is_answered_as_without_a_cache() -> None:
    bench = TieredBench(pages=12, host_pages=20)
    rng = random.Random(3)
    documents = [prompt(40 + n, rng.randrange(8, 24)) for n in range(12)]
    for _ in range(25):
        bench.serve(*([*rng.choice(documents), rng.randrange(VOCAB)] for _ in range(rng.randrange(1, 4))))
    totals, stats = bench.scheduler.totals, bench.tiers.stats()
    assert totals.storage_tokens > 0 and totals.host_tokens > 0
    assert stats.loaded > 0 and stats.prefetched > 0 and stats.stored > 0


class CountingTokens(TokenKeys):
    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.encoded: list[int] = []

    def encode(self, tokens: object) -> bytes:
        self.encoded.append(len(tokens))  # type: ignore[arg-type]
        return super().encode(tokens)


class CountingTyped(TypedKeys):
    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.encoded: list[int] = []

    def parse(self, tokens: Any) -> Any:
        self.encoded.append(len(tokens))
        return super().parse(tokens)


@pytest.mark.parametrize(("kind", "leased"), [(CountingTokens, 0), (CountingTyped, 1)])
def test_a_prompt_is_encoded_once_however_long_it_waits(
    kind: type[CountingTokens | CountingTyped], leased: int
) -> None:
    """A lease on keys that are not plain ids encodes the prompt itself, and continues that encoding."""
    bench = TieredBench(prefetch_timeout_s=1.0)
    bench.keys = keys = kind()
    bench.restart()
    bench.workers.instant = False
    bench.add(prompt(1, 22), max_tokens=4)
    assert keys.encoded == [22], "checked, looked for in storage"
    bench.step(20)
    assert keys.encoded == [22], "looked for in the cache at every step"
    bench.workers.instant = True
    bench.workers.run_all()
    bench.step(20)
    assert not bench.scheduler.busy
    assert keys.encoded[: 1 + leased] == [22] * (1 + leased)
    assert set(keys.encoded[1 + leased :]) <= {1}, "what was generated"


# ---------------------------------------------------------------- in virtual time


class Machine(TieredBench):
    """A machine on which computing and storage take virtual time; storage runs one call after another."""

    def __init__(self, token_s: float, look_s: float = 0.0, batch_s: float = 0.0, **config: object) -> None:
        super().__init__(300, 300, **config)
        self.context = 4000
        self.token_s, self.look_s, self.batch_s = 0.0, 0.0, 0.0
        self._free_s = 0.0
        forward, self.workers = self.ghost.forward, self
        exists, get = self.backend.exists, self.backend.get

        def slow_forward(segments: Sequence[Segment]) -> torch.Tensor:
            self.now_s += self.token_s * sum(len(segment.tokens) for segment in segments)
            return forward(segments)

        def slow_exists(keys: Sequence[bytes]) -> list[bool]:
            self.now_s += self.look_s
            return exists(keys)

        def slow_get(keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
            self.now_s += self.batch_s
            return get(keys, buffers)

        self.ghost.forward = slow_forward  # type: ignore[method-assign]
        self.backend.exists, self.backend.get = slow_exists, slow_get  # type: ignore[method-assign]
        self.restart(300)
        self.prompt = prompt(1, 1001)
        self.serve(self.prompt)
        self.forget_device()
        self.token_s, self.look_s, self.batch_s = token_s, look_s, batch_s
        self.restart(300)

    def submit(self, function: Callable[[], object]) -> TimedCall:
        """The call runs now, and reports its result when its time has come."""
        here_s = self.now_s
        self.now_s = max(here_s, self._free_s)
        call = TimedCall(self, function())
        call.ends_s = self._free_s = self.now_s
        self.now_s = here_s
        return call

    def close(self, timeout_s: float) -> bool:
        return True

    def forget(self) -> None:
        """Lets everything end; then only storage has the prompts."""
        while self.tiers.busy:
            self.now_s += 1.0
            self.tiers.poll()
        self.cache.flush()

    @property
    def late(self) -> dict[str, int]:
        return {cause: pages for cause, pages in self.tiers.stats().late.items() if pages}


class TimedCall:
    def __init__(self, machine: Machine, value: object) -> None:
        self.machine, self.value, self.ends_s = machine, value, 0.0

    def done(self) -> bool:
        return self.machine.now_s >= self.ends_s

    def result(self) -> object:
        return self.value


# The defaults assume a hundredth of a second per page. 250 pages take 25 s on this machine.
SLOW_S = 10 * 0.01 / PAGE


def test_a_restarted_server_computes_while_it_finds_out_what_storage_takes() -> None:
    """Storage takes 9 s for everything, computing 25 s, and the first request does not know the former."""
    machine = Machine(SLOW_S, look_s=1.0, batch_s=1.0)
    machine.scheduler.measure()
    [usage] = machine.serve(machine.prompt)
    assert usage.ttft_s < 16.0
    assert machine.late == {"meanwhile": 250 - usage.storage_tokens // PAGE}


def test_once_both_are_known_a_request_takes_less_than_loading_and_less_than_computing() -> None:
    machine = Machine(SLOW_S, look_s=0.5, batch_s=2.0, prefetch_host_share=1.0, call_timeout_s=100.0)
    machine.scheduler.measure()
    for _ in range(2):
        machine.serve(machine.prompt)
        machine.forget()
    [usage] = machine.serve(machine.prompt)
    assert 0 < usage.storage_tokens < 1000
    assert usage.ttft_s < 0.8 * 16.5, "loading takes 0.5 + 8 * 2 s, computing 25 s"
    assert usage.cached_tokens == usage.storage_tokens


def test_what_storage_brings_in_next_to_no_time_is_only_waited_for() -> None:
    machine = Machine(SLOW_S, look_s=0.01, batch_s=0.01)
    machine.scheduler.measure()
    for _ in range(3):
        machine.forget()
        [usage] = machine.serve(machine.prompt)
    assert usage.storage_tokens == 1000
    assert machine.late == {}


def test_without_a_measurement_the_limits_of_the_configuration_apply() -> None:
    machine = Machine(SLOW_S, look_s=1.0, batch_s=1.0, prefetch_timeout_s=0.1, prefetch_timeout_per_page_s=0.01)
    [usage] = machine.serve(machine.prompt)
    assert usage.storage_tokens == 0
    assert usage.queue_s == pytest.approx(0.1, abs=0.03)
    assert machine.late == {"timeout": 250}


def test_a_store_that_is_slower_than_computing_saves_some_of_it() -> None:
    machine = Machine(SLOW_S, look_s=1.0, batch_s=1.2, batch_pages=8)
    machine.scheduler.measure()
    [usage] = machine.serve(machine.prompt)
    assert usage.ttft_s < 25.0
    assert usage.storage_tokens > 200
    assert machine.late == {"meanwhile": 250 - usage.storage_tokens // PAGE}


def test_on_a_fast_machine_a_slow_store_is_hardly_waited_for() -> None:
    machine = Machine(1e-5, look_s=0.09, batch_s=0.09)
    machine.scheduler.measure()
    [usage] = machine.serve(machine.prompt)
    assert usage.storage_tokens == 0
    assert usage.queue_s <= 0.03
    assert machine.late == {"timeout": 250}


def test_a_store_that_never_answers_delays_one_request_only_however_slow_the_machine_is() -> None:
    machine = Machine(SLOW_S, look_s=1000.0, call_timeout_s=5.0)
    machine.scheduler.measure()
    [usage] = machine.serve(machine.prompt)
    assert usage.queue_s <= 1.0, "a forward of 32 tokens"
    assert usage.ttft_s == pytest.approx(25.0, abs=1.0)
    [usage] = machine.serve(prompt(2, 1001))
    assert usage.queue_s <= 0.03
    assert sum(machine.late.values()) > 400


def test_a_store_that_was_too_slow_for_an_assumed_machine_is_used_on_the_real_one() -> None:
    machine = Machine(SLOW_S, look_s=1.0, batch_s=0.1)
    for seed in range(4):
        machine.serve(prompt(seed + 5, 401))
        machine.step(200)  # it answers
        assert machine.store.slow == (seed < 2), "three forwards measure what computing takes"
    [usage] = machine.serve(machine.prompt)
    assert usage.storage_tokens > 800 and usage.ttft_s < 6.0


def test_the_scheduler_says_what_forwards_take_if_they_hold_prefills_and_wait_for_nothing() -> None:
    machine = Machine(SLOW_S)
    assert machine.tiers.prefill.seconds(100, 0) is None
    for seed in range(3):
        machine.serve(prompt(seed + 5, 401))
    assert machine.tiers.prefill.seconds(100, 0) == pytest.approx(100 * SLOW_S, rel=0.01)
    seen = []
    machine.tiers.prefill.observe = lambda parts, seconds: seen.append((parts, seconds))  # type: ignore[method-assign]
    machine.forget_device()
    machine.serve(prompt(5, 401))
    assert machine.host.ups == 1
    assert all(not parts for parts, _ in seen), "one forward waited for the host, the others were decodes"
