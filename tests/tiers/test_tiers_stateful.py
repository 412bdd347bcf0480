"""Random operations on a cache with all its tiers, completions and faults in any order: no wrong or lost page.

The model is the content of a page: a number that is a function of its namespace and all tokens up to its end. Each step
is followed by `check()`, and by a check of every page in the tree and every page that a lease has computed or hit.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
from rigs.hand_driven import FaultyBackend, Rig
from rigs.policy_models import InPython

from mainstem.cache.prefix_cache import Lease
from mainstem.errors import OutOfPages, StorageError
from mainstem.tiers.host.load import Load
from mainstem.tiers.prefetch.prefetch import Prefetch

SPACES = [None, None, "a"]


POLICIES: list[Any] = ["lru", "lru", "fifo", "slru", "lfu", "mru", InPython("lru")]
WRITE_POLICIES = ("write_through", "write_through", "write_through_selective", "write_back")
FAULTS: list[Any] = [None, None, RuntimeError("a bug"), *(StorageError(cause, "") for cause in StorageError.CAUSES)]


@dataclass(eq=False)
class Run:
    """One sequence: its lease, and the pages after the hit that it has computed."""

    lease: Lease
    tokens: list[int]
    space: str | None
    load: Load | None = None
    computed: set[int] = field(default_factory=set)
    hit: int = field(init=False)  # before anything was loaded

    def __post_init__(self) -> None:
        self.hit = self.lease.hit


class TiersWorld:
    """A cache with its tiers, its requests and its faults."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.choose = rng, rng.randrange
        self.backend = FaultyBackend() if self.choose(4) else None
        self.options: dict[str, Any] = {
            "device": 3 + self.choose(8),
            "host": 2 + self.choose(10),
            "size": 1 + self.choose(2),
            "copies": self.choose(3) == 0,
            "policy": POLICIES[self.choose(len(POLICIES))],
            "host_options": {
                "write_policy": WRITE_POLICIES[self.choose(len(WRITE_POLICIES))],
                "load_min_tokens": 1 + self.choose(2),
            },
        }
        if self.backend is not None:
            self.options |= {
                "prefetch": ["best_effort", "wait_complete", "timeout"][self.choose(3)],
                "batch_pages": 1 + self.choose(3),
                "batches": 1 + self.choose(2),
                "max_prefetches": 1 + self.choose(3),
                "queue_pages": 1 + self.choose(8),
                "writes": 1 + self.choose(2),
                "prefetch_host_share": [0.5, 1.0][self.choose(2)],
                "call_timeout_s": 1.0,
                "breaker_cooldown_s": 1.0,
            }
        self.known: set[tuple[str | None, tuple[int, ...]]] = set()  # all prefixes computed so far
        self.begin()

    def begin(self) -> None:
        self.rig = Rig(backend=self.backend, **self.options)
        self.runs: list[Run] = []
        self.prefetches: list[Prefetch] = []

    # operations

    def lease(self) -> None:
        tokens, space = self.some_tokens(), SPACES[self.choose(len(SPACES))]
        if len(self.runs) < 4:
            self.runs.append(Run(self.rig.cache.lease(tokens, space), tokens, space))

    def serve(self) -> None:
        """Runs a prompt from lease to finish, as far as there is room."""
        tokens, space = self.some_tokens(), SPACES[self.choose(len(SPACES))]
        run = Run(self.rig.cache.lease(tokens, space), tokens, space)
        if self.choose(2) and (load := self.rig.tiers.load(run.lease)) is not None:
            run.load = load
            load.wait()
        self.runs.append(run)
        self.fill(run)
        self.verify()
        run.lease.finish(self.whole(run) * self.rig.size)
        self.runs.remove(run)

    def load(self) -> None:
        run = self.some_run()
        if run is not None and run.load is None and not run.computed and run.lease.reserved == run.lease.published:
            run.load = self.rig.tiers.load(run.lease)

    def wait(self) -> None:
        run = self.some_run()
        if run is not None and run.load is not None:
            if self.choose(3) == 0:
                run.load.ticket.fail(RuntimeError("on purpose"))  # type: ignore[attr-defined]
            assert run.load.wait() == run.load.arrived

    def reserve(self) -> None:
        run = self.some_run()
        if run is not None:
            self.fill(run)

    def fill(self, run: Run) -> None:
        try:
            run.lease.reserve(max(0, len(run.tokens) - run.lease.reserved))
        except OutOfPages:
            return
        self.compute(run)

    def compute(self, run: Run) -> None:
        """Writes all private pages of the lease, except those being loaded."""
        size = self.rig.size
        loading = run.load.pages if run.load is not None and run.load.arrived is None else 0
        for page in range(run.lease.hit // size + loading, min(len(run.tokens), run.lease.reserved) // size):
            if page >= run.lease.published // size and page not in run.computed:
                held = int(run.lease.page_table[page])
                assert self.rig.cache.pool.owner(held) == "private"
                prefix = run.tokens[: (page + 1) * size]
                self.rig.memory.device[0][:, held] = self.rig.layers(run.space, prefix)
                self.known.add((run.space, tuple(prefix)))
                run.computed.add(page)

    def publish(self) -> None:
        run = self.some_run()
        if run is not None and (run.load is None or run.load.arrived is not None):
            run.lease.publish(self.whole(run) * self.rig.size)

    def whole(self, run: Run) -> int:
        """Returns how many pages are computed, from the first."""
        page = run.lease.hit // self.rig.size
        while page in run.computed:
            page += 1
        return page

    def end(self) -> None:
        run, how = self.some_run(), self.choose(4)
        if run is None:
            return
        self.runs.remove(run)
        if how == 0:
            run.lease.abort()
        elif how == 1 or (run.load is not None and run.load.arrived is None):
            run.lease.finish(0 if run.load is not None and run.load.arrived is None else None if self.full(run) else 0)
        elif how == 2:
            run.lease.finish(self.whole(run) * self.rig.size)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                del run.lease, run.load  # dropped; a load under way still refers to it

    def full(self, run: Run) -> bool:
        return (
            self.whole(run) * self.rig.size >= min(run.lease.reserved, len(run.tokens)) // self.rig.size * self.rig.size
        )

    def prefetch(self) -> None:
        prefetch = self.rig.tiers.prefetch(self.some_tokens(), SPACES[self.choose(len(SPACES))])
        if prefetch is not None:
            self.prefetches.append(prefetch)

    def revoke(self) -> None:
        if self.prefetches:
            self.prefetches.pop(self.choose(len(self.prefetches))).revoke()

    def end_copy(self) -> None:
        if self.rig.copies:
            at = self.choose(len(self.rig.copies))
            ticket = self.rig.copies[at]
            if self.choose(4) == 0:
                ticket.step()
            else:
                self.rig.end_copy(at, fail=self.choose(5) == 0)

    def call(self) -> None:
        workers = [self.rig.readers, self.rig.writers][self.choose(2)]
        if workers.waiting:
            workers.run(self.choose(len(workers.waiting)))

    def poll(self) -> None:
        self.rig.tiers.poll()

    def work(self) -> None:
        """Advances much of what is under way."""
        for workers in (self.rig.readers, self.rig.writers):
            for _ in range(self.choose(4)):
                if workers.waiting:
                    workers.run()
        for ticket in self.rig.copies[: self.choose(4)]:
            ticket.wait()
        self.rig.tiers.poll()

    def tick(self) -> None:
        self.rig.clock.now_s += [0.05, 0.5, 2.0][self.choose(3)]

    def fault(self) -> None:
        """Makes the store fail or recover, or damages or drops a page."""
        if self.backend is None:
            return
        how, keys = self.choose(6), self.backend.stored_keys()
        if how < 3:
            self.backend.always = None
        elif how == 3:
            self.backend.always = FAULTS[self.choose(len(FAULTS))]
        elif keys and how == 4:
            self.backend._drop(keys[self.choose(len(keys))])
        elif keys:
            value = bytearray(self.backend.value(keys[self.choose(len(keys))]))
            value[self.choose(len(value))] ^= 1 << self.choose(8)
            self.backend.set_value(keys[self.choose(len(keys))], bytes(value))

    def flush(self) -> None:
        if self.choose(2):
            self.rig.tiers.flush()
        else:
            self.rig.cache.flush()

    def evict(self) -> None:
        """Evicts by an allocation."""
        lease = self.rig.cache.lease([9])
        with contextlib.suppress(OutOfPages):
            lease.reserve(self.choose(self.rig.cache.pool.total + 1) * self.rig.size)
        lease.abort()

    def remember(self) -> None:
        if self.choose(2):
            self.rig.tiers.remember()
        else:
            self.rig.tiers.warm()

    def restart(self) -> None:
        if self.choose(4) == 0:
            for run in self.runs:
                run.lease.abort()
            self.begin()

    OFTEN = ("serve", "prefetch", "work", "work")
    ALSO = ("lease", "load", "wait", "reserve", "publish", "end", "end_copy", "end_copy", "call", "poll", "evict")
    SELDOM = ("revoke", "tick", "fault", "flush", "remember", "restart")
    OPERATIONS = (*OFTEN * 6, *ALSO * 2, *SELDOM)

    def step(self) -> None:
        getattr(self, self.rng.choice(self.OPERATIONS))()
        self.verify()

    # checks

    def verify(self) -> None:
        rig = self.rig
        rig.verify()
        for run in self.runs:
            table, size = run.lease.page_table, rig.size
            assert run.lease.hit == run.hit + (run.load.pages * size if run.load and run.load.arrived else 0)
            for page in range(self.whole(run)):
                prefix = run.tokens[: (page + 1) * size]
                assert rig.memory.device[0][:, table[page]].tolist() == rig.layers(run.space, prefix)
                assert (run.space, tuple(prefix)) in self.known, "a hit on a prefix that was never computed"
        private = [
            page for run in self.runs for page in run.lease.page_table[run.lease.published // rig.size :].tolist()
        ]
        assert len(set(private)) == len(private), "two leases own a page"

    def finish(self) -> None:
        """Ends everything: all pages are then free or cached, and free after a flush."""
        if self.backend is not None:
            self.backend.always = None
        for run in self.runs:
            run.lease.abort()
        self.runs.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            self.rig.settle()
            self.rig.clock.now_s += 10
            self.rig.settle()
            self.rig.close_all()
        assert all(prefetch.ended for prefetch in self.prefetches)

    # helpers

    def some_run(self) -> Run | None:
        return self.runs[self.choose(len(self.runs))] if self.runs else None

    def some_tokens(self) -> list[int]:
        """Draws a prompt of few kinds of pages, so that prompts share prefixes, perhaps with one more token."""
        marks = [self.choose(2) if at else 0 for at in range(1 + self.choose(5))]
        tokens = [mark for mark in marks for _ in range(self.rig.size)]
        return tokens + [9] * self.choose(2)


@pytest.mark.parametrize("seed", range(24))
def test_no_step_corrupts_or_loses_a_page(seed: int) -> None:
    world = TiersWorld(random.Random(seed))
    for _ in range(800):
        world.step()
    world.finish()
