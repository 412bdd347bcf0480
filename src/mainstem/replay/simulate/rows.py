"""The counts of a replay: one `Row` per policy and capacity, which a `Tally` sums up as batches are served.

Knows traces and numbers of blocks; no trees, no policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mainstem.replay.simulate.first_token import QUANTILES, Flops, Prefill
from mainstem.replay.trace import Batch, Trace
from mainstem.settings.replay import ONE_CACHE, Setup

_MAX_SPANS = 256  # of a timeline; a trace that is long enough has at least half as many


@dataclass(frozen=True, slots=True)
class Share:
    """The requests of one tenant, or of one kind."""

    name: str
    requests: int
    block_accesses: int
    block_hits: int
    input_tokens: int
    token_hits: int


@dataclass(frozen=True, slots=True)
class TierRow:
    """One tier of a row, summed over all replicas.

    Attributes:
        name: device, host or storage.
        capacity_blocks: capacity of one replica.
        block_hits: blocks found here and on no tier above.
        token_hits: tokens of these blocks.
        loaded_blocks: blocks loaded from a tier below.
        written_blocks: blocks written to it that were computed or found above.
        evicted_blocks: blocks evicted to make room.
        expired_blocks: blocks unused for longer than the time to live.
        loaded_bytes, written_bytes: the same in bytes; None: the bytes of a token are unknown.
        age_accesses: histogram of the age of evicted blocks, in block accesses since they arrived: [0] counts zeros,
            [i] the numbers in [2**(i-1), 2**i).
        idle_accesses: the same since their last use.
        age_s, idle_s: the same two in whole seconds.
    """

    name: str
    capacity_blocks: int
    block_hits: int
    token_hits: int
    loaded_blocks: int
    written_blocks: int
    evicted_blocks: int
    expired_blocks: int
    loaded_bytes: int | None
    written_bytes: int | None
    age_accesses: tuple[int, ...]
    idle_accesses: tuple[int, ...]
    age_s: tuple[int, ...]
    idle_s: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Hits over time: entry i counts the requests of [i * width_s, (i + 1) * width_s)."""

    width_s: float
    block_accesses: tuple[int, ...]
    block_hits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one capacity.

    Attributes:
        trace: name of the trace.
        policy: name of the policy; "opt" is the offline optimum.
        capacity_blocks: capacity of the device, or of each replica's device.
        block_hits: blocks that were not computed again, from any tier.
        evicted_blocks: blocks evicted from the device to make room.
        ttl_s: the time to live; None: forever.
        tiers: the tiers from the device down.
        tenants, kinds: those with requests, if the trace has any.
        ttft_p50_s, ttft_p90_s, ttft_p99_s: quantiles of the time to the first token of a request for which nobody else
            waits, see `first_token`; 0.0: no prompt has a token.
        prefill_flops, saved_flops: FLOPs of all prompts without a cache, and those saved by it; None: not counted.
    """

    trace: str
    policy: str
    capacity_blocks: int
    replicas: int
    routing: str
    ttl_s: float | None
    requests: int
    block_accesses: int
    input_tokens: int
    block_hits: int
    token_hits: int
    block_hit_rate: float
    token_hit_rate: float
    evicted_blocks: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    prefill_flops: float | None
    saved_flops: float | None
    tiers: tuple[TierRow, ...]
    tenants: tuple[Share, ...]
    kinds: tuple[Share, ...]
    replica_requests: tuple[int, ...]
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts kept by a tier itself, over all replicas; see `TierRow`."""

    loaded: int = 0
    written: int = 0
    evicted: int = 0
    expired: int = 0
    histograms: tuple[tuple[int, ...], ...] = ((), (), (), ())


class Tally:
    """The running sums of a row.

    Args:
        trace: the trace, all of whose batches are added.
        tiers: names and capacities in blocks, from the device down.
        setup: the number of replicas, and their rates.
        flops: computes prefill FLOPs; None: not counted.
    """

    def __init__(
        self, trace: Trace, tiers: Sequence[tuple[str, int]], setup: Setup = ONE_CACHE, flops: Flops | None = None
    ) -> None:
        self._trace, self._tiers, self._flops = trace, tiers, flops
        self._engine = Prefill(setup.prefill_rate, setup.load_rate, flops)
        self._ttft_s: list[NDArray[np.float32]] = []
        self._prefill = self._saved = 0.0
        self._hits, self._token_hits = np.zeros((2, len(tiers)), np.int64)
        self._tenants = np.zeros((len(trace.tenants), 5), np.int64)
        self._kinds = np.zeros((len(trace.kinds), 5), np.int64)
        self._served = np.zeros(setup.replicas, np.int64)
        self._time = _Spans()

    def add(self, batch: Batch, hits: NDArray[np.int32], replica: NDArray[np.int32] | None = None) -> None:
        """Counts a batch.

        Args:
            batch: the requests.
            hits: [requests, tiers] blocks that each request found on each tier.
            replica: [requests] the replica that served each request; None: there is only one.
        """
        blocks = batch.lengths
        found = np.cumsum(hits, axis=1, dtype=np.int64)
        upto = np.minimum(found * self._trace.block_size, batch.input_tokens[:, None])
        columns = np.stack([np.ones_like(blocks), blocks, found[:, -1], batch.input_tokens, upto[:, -1]], axis=1)
        self._hits += hits.sum(axis=0, dtype=np.int64)
        self._token_hits += np.diff(upto, axis=1, prepend=0).sum(axis=0)
        np.add.at(self._tenants, batch.tenant, columns)
        np.add.at(self._kinds, batch.kind, columns)
        served = np.zeros_like(batch.kind) if replica is None else replica
        self._served += np.bincount(served, minlength=len(self._served))
        self._time.add(batch.time_s, blocks, found[:, -1])
        asked = batch.input_tokens > 0
        tokens, upto = batch.input_tokens[asked], upto[asked]
        self._ttft_s.append(self._engine.seconds(tokens, upto[:, 0], upto[:, -1]).astype(np.float32))
        if self._flops is not None:
            self._count_flops(self._flops, tokens, upto[:, -1])

    def _count_flops(self, flops: Flops, tokens: NDArray[np.int64], hits: NDArray[np.int64]) -> None:
        """Counts FLOPs. The last token of a prompt is always computed, because its logits are needed."""
        past = np.minimum(hits, tokens - 1)
        whole = float(flops(tokens, np.zeros_like(past)).sum())
        self._prefill += whole
        self._saved += whole - float(flops(tokens - past, past).sum())

    def row(
        self,
        policy: str,
        counts: Sequence[TierCounts],
        *,
        routing: str = "",
        ttl_s: float | None = None,
        block_bytes: float | None = None,
    ) -> Row:
        """Returns the row of these sums and of the tiers' own counts."""
        whole, hits, token_hits = self._trace.whole, int(self._hits.sum()), int(self._token_hits.sum())
        blocks, tokens = len(whole.blocks), int(whole.input_tokens.sum())
        ttft_s = np.concatenate(self._ttft_s) if self._ttft_s else np.zeros(0, np.float32)
        p50, p90, p99 = map(float, np.quantile(ttft_s, QUANTILES)) if len(ttft_s) else (0.0, 0.0, 0.0)
        return Row(
            trace=self._trace.name,
            policy=policy,
            capacity_blocks=self._tiers[0][1],
            replicas=len(self._served),
            routing=routing,
            ttl_s=ttl_s,
            requests=len(whole),
            block_accesses=blocks,
            input_tokens=tokens,
            block_hits=hits,
            token_hits=token_hits,
            block_hit_rate=hits / max(1, blocks),
            token_hit_rate=token_hits / max(1, tokens),
            evicted_blocks=counts[0].evicted,
            ttft_p50_s=p50,
            ttft_p90_s=p90,
            ttft_p99_s=p99,
            prefill_flops=None if self._flops is None else self._prefill,
            saved_flops=None if self._flops is None else self._saved,
            tiers=tuple(self._tier(tier, count, block_bytes) for tier, count in enumerate(counts)),
            tenants=_shares(self._trace.tenants, self._tenants),
            kinds=_shares(self._trace.kinds, self._kinds),
            replica_requests=tuple(self._served.tolist()),
            timeline=self._time.timeline(),
        )

    def _tier(self, tier: int, counts: TierCounts, block_bytes: float | None) -> TierRow:
        name, capacity = self._tiers[tier]
        return TierRow(
            name,
            capacity,
            int(self._hits[tier]),
            int(self._token_hits[tier]),
            counts.loaded,
            counts.written,
            counts.evicted,
            counts.expired,
            None if block_bytes is None else round(counts.loaded * block_bytes),
            None if block_bytes is None else round(counts.written * block_bytes),
            *counts.histograms,
        )


class _Spans:
    """Counts over time, in spans of equal width. The width doubles when there are too many spans."""

    def __init__(self) -> None:
        self._width_s = 1.0
        self._counts = np.zeros((2, _MAX_SPANS), np.int64)
        self._used = 0

    def add(self, time_s: NDArray[np.float64], blocks: NDArray[np.int64], hits: NDArray[np.int64]) -> None:
        if not len(time_s):
            return
        while time_s[-1] >= _MAX_SPANS * self._width_s:
            self._width_s *= 2
            halves = self._counts.reshape(2, _MAX_SPANS // 2, 2).sum(axis=2)
            self._counts = np.concatenate([halves, np.zeros_like(halves)], axis=1)
        at = (time_s // self._width_s).astype(np.int64)
        np.add.at(self._counts[0], at, blocks)
        np.add.at(self._counts[1], at, hits)
        self._used = int(at[-1]) + 1

    def timeline(self) -> Timeline:
        blocks, hits = self._counts[:, : self._used].tolist()
        return Timeline(self._width_s, tuple(blocks), tuple(hits))


def median_below(histogram: Sequence[int]) -> int | None:
    """Returns the smallest power of two above half of the counts in a histogram of `TierRow`; None: it is empty."""
    half, seen = sum(histogram) / 2, 0
    for power, count in enumerate(histogram):
        seen += count
        if seen and seen >= half:
            return int(2**power)
    return None


def _shares(names: Sequence[str], counts: NDArray[np.int64]) -> tuple[Share, ...]:
    """Returns one share per name with requests; none if there are no names."""
    if len(names) < 2:
        return ()
    return tuple(Share(name, *row) for name, row in zip(names, counts.tolist(), strict=True) if row[0])
