"""Ranks with different stores and completion orders have equal trees at every poll. The simulator does it at random.

Each rank is a thread with its own cache. All run the same requests, and meet where they agree on votes; there the test
compares their states. A rank that would wait forever fails the test instead.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from machine import patience
from rigs.hand_driven import FaultyBackend, Rig, prompt

from mainstem.errors import StorageError
from mainstem.events.replica import Replica
from mainstem.events.source import Source

pytestmark = pytest.mark.deadline
PATIENCE_S = patience(30)


class Ranks:
    """The meeting point of the threads: returns the lowest votes, if all voted on the same list."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.values: list[Any] = [None] * size
        self.errors: list[BaseException] = []

    def meet(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        everyone = list(self.values)
        self.barrier.wait()
        return everyone

    def agree(self, rank: int, votes: Sequence[int], state: Any) -> list[int]:
        everyone = self.meet(rank, (list(votes), state))
        lengths, states = {len(votes) for votes, _ in everyone}, [state for _, state in everyone]
        assert len(lengths) == 1, f"ranks vote on different things: {[votes for votes, _ in everyone]}"
        assert all(state == states[0] for state in states), "ranks differ"
        return [min(column) for column in zip(*(votes for votes, _ in everyone), strict=True)]

    def run(self, body: Callable[[int], None]) -> None:
        def guarded(rank: int) -> None:
            try:
                body(rank)
            except BaseException as error:  # noqa: BLE001  # raised in the test; the others must not wait
                self.errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        first = [error for error in self.errors if not isinstance(error, threading.BrokenBarrierError)]
        if self.errors:
            raise (first or self.errors)[0]
        assert not any(thread.is_alive() for thread in threads), "a rank is stuck"


class Rank(Rig):
    """One rank. Operations are the same on each; when transfers end differs."""

    def __init__(
        self, ranks: Ranks, rank: int, backend: FaultyBackend, seed: object, *, guesses: bool = True, **options: Any
    ) -> None:
        self.ranks, self.rank, self.backend = ranks, rank, backend
        host_options = {"agree": self.agree, "load_min_tokens": 2, **options.pop("host_options", {})}
        identity = {"tp_rank": rank, "tp_size": ranks.size}
        super().__init__(backend=backend, identity=identity, host_options=host_options, **options)
        own = random.Random(f"{seed} {rank}")
        for _ in range(own.choice([0, 4]) if guesses else 0):  # every rank has its own estimate, too
            self.tiers.prefill.observe([(64, 0)], own.choice([0.001, 1.0, 100.0]))

    def agree(self, votes: Sequence[int]) -> list[int]:
        return self.ranks.agree(self.rank, votes, self.state())

    def state(self) -> Any:
        """Returns what must be equal on every rank."""
        tree, stats = self.cache.tree, self.tiers.stats()
        nodes = [(view, {name: (c.ids.tolist(), c.locks) for name, c in view.cells.items()}) for view in tree.nodes()]
        shown = [(v.node, v.key, v.hits, v.last_access, v.namespace, cells) for v, cells in nodes]
        counts = (stats.host_free, stats.host_cached, stats.host_private, stats.under_way, stats.queued)
        return tree.pretty(), shown, counts, self.cache.stats()

    def close(self) -> None:
        """Nothing: other ranks, which have ended, would have to vote."""

    def meet(self) -> None:
        everyone = self.ranks.meet(self.rank, self.state())
        assert all(state == everyone[0] for state in everyone), "ranks differ"

    def rest(self) -> None:
        """Ends everything; `busy` must be the same on each rank, or the votes would not match."""
        for _ in range(100):
            for ticket in self.copies:
                ticket.wait()
            self.readers.run_all()
            self.writers.run_all()
            self.poll()
            if not self.tiers.busy:
                break
        assert not self.tiers.busy
        self.meet()


def parts_of_a_store(
    size: int, prompts: Sequence[Sequence[int]], kept: float, seed: object, pages: int = 64
) -> list[FaultyBackend]:
    """Returns a store for each rank that an earlier run has filled and that has lost some pages since."""
    backends = [FaultyBackend() for _ in range(size)]
    for rank, backend in enumerate(backends):
        own = random.Random(f"{seed} {rank}")
        rig = Rig(device=pages, host=pages, backend=backend, identity={"tp_rank": rank, "tp_size": size})
        for tokens in prompts:
            rig.serve(tokens)
            rig.settle()
        backend.delete([key for key in backend.stored_keys() if own.random() > kept])
    return backends


def test_only_what_every_rank_has_is_prefetched() -> None:
    ranks = Ranks(3)
    tokens = prompt(6, 1)
    backends = parts_of_a_store(3, [tokens], 1.0, "all")
    for at, kept in enumerate((6, 4, 5)):
        backends[at].delete(backends[at].stored_keys()[kept:])

    def body(at: int) -> None:
        rank = Rank(ranks, at, backends[at], "prefetch")
        prefetch = rank.tiers.prefetch(tokens)
        rank.rest()
        assert prefetch is not None and prefetch.ended and prefetch.loaded == 8
        assert rank.on(1, tokens) == 4

    ranks.run(body)


def test_a_page_that_one_rank_cannot_read_is_read_by_none() -> None:
    ranks = Ranks(3)
    tokens = prompt(6, 1)
    backends = parts_of_a_store(3, [tokens], 1.0, "all")
    damaged = backends[1].stored_keys()[3]
    backends[1].set_value(damaged, bytes(len(backends[1].value(damaged))))

    def body(at: int) -> None:
        rank = Rank(ranks, at, backends[at], "read", batch_pages=2)
        prefetch = rank.tiers.prefetch(tokens)
        rank.rest()
        assert prefetch is not None and prefetch.loaded == 6
        assert rank.tiers.stats().faults == ({"altered": 1} if at == 1 else {})

    ranks.run(body)


def test_a_gap_in_the_store_of_one_rank_heals_on_all() -> None:
    ranks = Ranks(2)
    backends = [FaultyBackend() for _ in range(2)]

    def body(at: int) -> None:
        rank = Rank(ranks, at, backends[at], "gap")
        rank.serve(prompt(4, 1))
        rank.rest()
        if at == 1:
            backends[at].clear()
        rank.serve(prompt(6, 1, 1, 1, 1, 2))
        rank.rest()
        assert len(backends[at].stored_keys()) == 6

    ranks.run(body)


@pytest.mark.parametrize("full", [None, 0, 1, 2])
def test_pages_are_announced_as_stored_once_every_rank_has_stored_them(full: int | None) -> None:
    """The store of one rank has no room; routers follow the events of the first one alone."""
    ranks, tokens = Ranks(3), prompt(4, 1)
    announced = [0] * 3

    def body(at: int) -> None:
        backend = FaultyBackend()
        if at == full:
            backend.instead["put"] = lambda keys, buffers: [False for _ in keys]
        rank, replica = Rank(ranks, at, backend, "full"), Replica()
        source = Source(rank.cache.tree, [64, 64], b"a secret of sixteen")
        rank.serve(tokens)
        rank.rest()
        replica.apply(source.take())
        announced[at] = sum("STORAGE" in block.media for block in replica.blocks.values())
        assert len(backend.stored_keys()) == (0 if at == full else 4)

    ranks.run(body)
    assert announced == [4 if full is None else 0] * 3


@pytest.mark.parametrize("notes", ["equal", "lost", "older"])
def test_ranks_warm_the_same_prefixes_or_none(notes: str) -> None:
    ranks = Ranks(3)
    prompts = [prompt(4, mark) for mark in range(3)]
    backends = parts_of_a_store(3, prompts, 1.0, "warm")

    def remember(at: int) -> None:
        rank = Rank(ranks, at, backends[at], "warm")
        for tokens in prompts:
            rank.serve(tokens)
            rank.rest()
            if notes == "older":
                rank.tiers.remember()
                rank.rest()
                if at == 1:
                    backends[at].instead["put"] = StorageError("io", "on purpose")
        rank.tiers.remember()
        rank.rest()
        if notes == "lost" and at == 1:
            backends[at].delete(backends[at].stored_keys()[-1:])

    ranks.run(remember)
    backends[1].instead.clear()
    ranks = Ranks(3)
    warmed: list[list[int]] = [[] for _ in range(3)]

    def warm(at: int) -> None:
        rank = Rank(ranks, at, backends[at], "warm")
        rank.tiers.warm()
        rank.rest()
        warmed[at] = [rank.on(1, tokens) for tokens in prompts]

    ranks.run(warm)
    assert warmed == [[4, 4, 4] if notes == "equal" else [0, 0, 0]] * 3


def test_all_ranks_wait_for_a_slow_one() -> None:
    ranks = Ranks(2)

    def body(at: int) -> None:
        rank = Rank(ranks, at, FaultyBackend(), "slow")
        rank.serve(prompt(4, 1))
        rank.poll()
        if at == 0:
            rank.end_copy()
        rank.poll()
        assert rank.on(1, prompt(4, 1)) == 0
        if at == 1:
            rank.end_copy()
        rank.poll()
        assert rank.on(1, prompt(4, 1)) == 4
        rank.rest()

    ranks.run(body)


LATENCIES_S = (0.05, 0.004, 0.02)
"""Seconds until each of three ranks has the first byte of a load, of a read and of an answer."""


def estimate(rank: Rank, latency_s: float, move_s: float = 0.004) -> None:
    """Gives a rank its own estimates. It computes a page in 0.01 s, and moves one in `move_s` after the latency."""
    costs, page_bytes = rank.tiers.costs, rank.memory.payload_bytes(0)
    for _ in range(12):
        rank.tiers.prefill.observe([(64, 0)], 64 * 0.01 / rank.size)
        costs.look_up.observe(1, latency_s)
        for cost, pages in itertools.product((costs.load, costs.read), (1, 4)):
            cost.observe(pages * page_bytes, latency_s + move_s * pages)


@pytest.mark.parametrize("lowest", range(3))
def test_what_each_rank_would_load_or_look_up_otherwise_is_decided_by_the_lowest(lowest: int) -> None:
    """Whichever rank that is, and though no two of them would decide the same."""
    latencies_s = LATENCIES_S[1 - lowest :] + LATENCIES_S[: 1 - lowest]
    ranks, alone, together = Ranks(3), [(0, 0)] * 3, [(0, 0)] * 3

    def body(at: int) -> None:
        rank = Rank(ranks, at, FaultyBackend(), "estimates", guesses=False, prefetch_min_tokens=64)
        estimate(rank, latencies_s[at])
        page_bytes, costs = rank.memory.payload_bytes(0), rank.tiers.costs
        pages, tokens = costs.load_min_pages(page_bytes, rank.size), costs.prefetch_min_tokens(page_bytes, 1 << 12)
        assert pages is not None and tokens is not None
        alone[at] = (pages * rank.size, tokens)
        asked = []
        for length in range(1, 24):
            if rank.tiers.prefetch([*range(length)]) is not None:
                asked.append(length)
            rank.rest()
        together[at] = (rank.tiers.load_min_tokens(), asked[0])

    ranks.run(body)
    assert len({load for load, _ in alone}) == len({look_up for _, look_up in alone}) == 3, "the ranks differ"
    load, look_up = alone[lowest]
    assert (load, look_up) == (min(load for load, _ in alone), min(look_up for _, look_up in alone))
    whole = -(-look_up // 2) * 2
    assert together == [(load, whole + 1)] * 3, "of a prompt, one token is always computed"


@pytest.mark.parametrize("latencies_s", [(0.3, 0.001, 0.002), (0.25, 0.2, 0.3)])
def test_all_ranks_turn_around_or_none_and_compute_equally_far_meanwhile(latencies_s: tuple[float, ...]) -> None:
    """A rank whose store is slow would gain by computing meanwhile, and the slower it is the further it would."""
    ranks, tokens, leads = Ranks(3), prompt(80, *range(1, 81)), min(latencies_s) > 0.1
    backends = parts_of_a_store(3, [tokens], 1.0, "turn", pages=128)
    gains, alone, together = [False] * 3, [0] * 3, list[Any]([None] * 3)

    def body(at: int) -> None:
        rank = Rank(ranks, at, backends[at], "turn", guesses=False, device=128, host=128, batch_pages=8)
        estimate(rank, latencies_s[at], 0.0001)
        prefetch = rank.tiers.prefetch(tokens, bidirectional=True)
        assert prefetch is not None
        gains[at] = prefetch._wait.gains(80)
        if leads:
            assert prefetch.lead(rank.cache.tree.keys.encode(tokens), 0)
        rank.readers.run()
        rank.poll()
        if leads:
            alone[at] = prefetch._worth_computing(0)
        together[at] = prefetch.ahead(0)
        rank.rest()

    ranks.run(body)
    assert gains == [latency_s > 0.1 for latency_s in latencies_s]
    if leads:
        assert len({*alone}) == 3 and together == [min(alone) // 2 * 2] * 3
    else:
        assert together == [None] * 3, "none computes while pages are read"


def test_the_test_detects_ranks_that_differ() -> None:
    ranks = Ranks(2)

    def body(at: int) -> None:
        rank = Rank(ranks, at, FaultyBackend(), "differ")
        rank.serve(prompt(4, at))
        rank.poll()
        rank.poll()

    with pytest.raises(AssertionError, match="ranks differ"):
        ranks.run(body)
