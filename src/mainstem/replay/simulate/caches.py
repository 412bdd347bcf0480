"""The caches of one setup, and the loop that feeds them: one tree for each replica, and a router before them.

    not by contents   a batch is routed, then all replicas serve their requests of it
    by contents       a window is routed, all replicas serve, the router learns what came and left; the next window

A window is as long as the router's lag, since events reach a router late. With no lag a request is a window, and one
thread serves. Else replicas are divided among threads, which changes no result. The loop is in core/csrc/replay.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mainstem import _core
from mainstem.cache.keys import HashKeys
from mainstem.cache.policies import Policy
from mainstem.cache.tree import Tree
from mainstem.replay.simulate.rows import TierCounts
from mainstem.replay.trace import Batch, Int64s, Trace
from mainstem.settings.replay import Setup

_LOOKS = ("prefix", "cost")  # rules that look at what replicas hold
_FEW = 16  # requests that are not worth waking threads for

Int32s = NDArray[np.int32]


class RouterCosts(NamedTuple):
    """What the router expects of a replica, in seconds for each token.

    Attributes:
        token_s: computing it.
        attended_s: attending to one position before it.
        host_s: loading it from a lower tier.
        store_s: reading it from a store that all replicas share.
        peer_s: reading it from another replica; None: replicas read nothing from each other.
    """

    token_s: float
    attended_s: float
    host_s: float
    store_s: float = 0.0
    peer_s: float | None = None


class Served(NamedTuple):
    """What became of some requests.

    Attributes:
        hits: [requests, tiers] blocks found on each tier of the replica, and on none above.
        replica: [requests] who served it.
        peer: [requests] whom it asks for more.
        peer_reach: [requests] blocks, from the first, that the peer holds; 0: nobody is asked.
    """

    hits: Int32s
    replica: Int32s
    peer: Int32s
    peer_reach: Int32s


class Caches:
    """Replicas of equal capacities. To be closed, or used as a context.

    Args:
        policy: as in `mainstem.replay.simulate.sweep.replay`; each replica has a copy.
        tiers: names and capacities in blocks of one replica, from the device down.
        setup: replicas, routing, lag, time to live.
        block_size: tokens per block.
        costs: what the router expects; None: from the rates of `setup`.
        workers: threads.
    """

    def __init__(
        self,
        policy: str | Policy,
        tiers: list[tuple[str, int]],
        setup: Setup,
        block_size: int,
        *,
        costs: RouterCosts | None = None,
        workers: int = 1,
    ) -> None:
        self.tiers = tiers
        self._setup = setup
        costs = RouterCosts(1 / setup.prefill_rate, 0.0, 1 / setup.load_rate) if costs is None else costs
        self._looks = costs.peer_s is not None or setup.routing in _LOOKS
        trees = [
            Tree(1, HashKeys(8), tiers=len(tiers), policy=copy.deepcopy(policy) if number else policy)
            for number in range(setup.replicas)
        ]
        self.policy = trees[0].policy.name
        self._parts = min(workers, setup.replicas)
        self._core = _core.Replay(
            [tree.core for tree in trees],
            [capacity for _, capacity in tiers],
            math.inf if setup.ttl is None else setup.ttl,
            setup.routing,
            [_evictor(tree) if tree.ranks_outside else None for tree in trees],
            block_size,
            costs,
            self._parts,
        )
        self._pool = ThreadPoolExecutor(self._parts - 1, "replica") if self._parts > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def feed(self, batch: Batch, stored: Int64s | None = None) -> Served:
        """Serves a batch. A store that all replicas share has the first `stored` [requests] blocks of each request."""
        if self._setup.replicas == 1 or (self._looks and self._setup.router_lag == 0):
            hits, *others = self._core.feed(batch.time_s, batch.input_tokens, batch.offsets, batch.blocks, stored)
        else:
            windows = [self._serve(batch, stored, start, stop) for start, stop in self._windows(batch.time_s)]
            hits, *others = (np.concatenate(column) for column in zip(*windows, strict=True))
        return Served(hits.reshape(len(batch), len(self.tiers)), *others)

    def run(self, trace: Trace, stored: Int64s | None = None) -> Served:
        """Serves a whole trace, batch by batch; see `feed`."""
        parts, at = [], 0
        for batch in [*trace.batches()] or [trace.whole]:
            parts.append(self.feed(batch, None if stored is None else stored[at : at + len(batch)]))
            at += len(batch)
        return Served(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def counts(self) -> list[TierCounts]:
        """Returns the counts of each tier, over all replicas."""
        replicas = range(self._setup.replicas)
        return [_sum([self._core.totals(r, tier) for r in replicas]) for tier in range(len(self.tiers))]

    @property
    def bytes(self) -> int:
        """Memory besides the trees."""
        return self._core.bytes()

    def _windows(self, time_s: NDArray[np.float64]) -> Iterator[tuple[int, int]]:
        """Yields where windows begin and end. An empty batch has one."""
        if not self._looks or not len(time_s):
            yield 0, len(time_s)
            return
        start = 0
        while start < len(time_s):
            end_s = float(time_s[start]) + self._setup.router_lag
            stop = max(start + 1, int(np.searchsorted(time_s, end_s)))
            yield start, stop
            start = stop

    def _serve(
        self, batch: Batch, stored: Int64s | None, start: int, stop: int
    ) -> tuple[Int32s, Int32s, Int32s, Int32s]:
        offsets = batch.offsets[start : stop + 1]
        columns = self._core.route(
            batch.time_s[start:stop],
            batch.input_tokens[start:stop],
            offsets - offsets[0],
            batch.blocks[offsets[0] : offsets[-1]],
            None if stored is None else stored[start:stop],
        )
        for work in (self._core.serve, self._core.learn) if self._looks else (self._core.serve,):
            self._all_parts(work, stop - start)
        return columns

    def _all_parts(self, work: Callable[[int], None], requests: int) -> None:
        others = range(1, self._parts)
        if self._pool is None or requests < _FEW:
            for part in (0, *others):
                work(part)
            return
        running = [self._pool.submit(work, part) for part in others]
        try:
            work(0)
        finally:
            for each in running:
                each.result()


def _evictor(tree: Tree) -> Callable[[int, int], list[NDArray[np.int32]]]:
    return lambda pages, tier: tree.evict(pages, tier=tier)


_Totals: TypeAlias = tuple[int, int, int, int, int, list[int], list[int], list[int], list[int]]


def _sum(totals: Sequence[_Totals]) -> TierCounts:
    _, loaded, written, evicted, expired = (sum(column) for column in zip(*(one[:5] for one in totals), strict=True))
    histograms = map(_sum_histograms, zip(*(one[5:] for one in totals), strict=True))
    return TierCounts(loaded, written, evicted, expired, tuple(histograms))


def _sum_histograms(histograms: Sequence[Sequence[int]]) -> tuple[int, ...]:
    longest = max(map(len, histograms))
    return tuple(sum(one[i] for one in histograms if i < len(one)) for i in range(longest))
