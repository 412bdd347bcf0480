"""Ranks with different stores and completion orders have equal trees at every poll. The simulator does it at random.

Each rank is a thread with its own cache. All run the same requests, and meet where they agree on votes; there the test
compares their states. A rank that would wait forever fails the test instead.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from machine import patience
from rigs.hand_driven import FaultyBackend, Rig, prompt

from mainstem.errors import StorageError

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

    def __init__(self, ranks: Ranks, rank: int, backend: FaultyBackend, seed: object, **options: Any) -> None:
        self.ranks, self.rank, self.backend = ranks, rank, backend
        host_options = {"agree": self.agree, "load_min_tokens": 2, **options.pop("host_options", {})}
        identity = {"tp_rank": rank, "tp_size": ranks.size}
        super().__init__(backend=backend, identity=identity, host_options=host_options, **options)
        own = random.Random(f"{seed} {rank}")
        for _ in range(own.choice([0, 4])):  # every rank has its own estimate, too
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


def parts_of_a_store(size: int, prompts: Sequence[Sequence[int]], kept: float, seed: object) -> list[FaultyBackend]:
    """Returns a store for each rank that an earlier run has filled and that has lost some pages since."""
    backends = [FaultyBackend() for _ in range(size)]
    for rank, backend in enumerate(backends):
        own = random.Random(f"{seed} {rank}")
        rig = Rig(device=64, host=64, backend=backend, identity={"tp_rank": rank, "tp_size": size})
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


def test_the_test_detects_ranks_that_differ() -> None:
    ranks = Ranks(2)

    def body(at: int) -> None:
        rank = Rank(ranks, at, FaultyBackend(), "differ")
        rank.serve(prompt(4, at))
        rank.poll()
        rank.poll()

    with pytest.raises(AssertionError, match="ranks differ"):
        ranks.run(body)
