"""Statistics of a trace: the best possible hit rate, how soon blocks are reused, and how they are shared.

Reuse distances are those of LRU over leaves (Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage
hierarchies", 1970). The blocks of a request count as used from the deepest to the first, so no block is evicted before
those below it. The distance of a use is the number of other blocks used since the previous use. LRU hits if it has room
for more blocks than that, so the cumulative distribution of distances is LRU's hit rate at every capacity.

For a large trace, distances and times come from a sample of its blocks, chosen by a hash of their names, and are scaled
(Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC construction with SHARDS", FAST 2015). The result says so.
Everything else is counted over the whole trace.

Knows traces; knows no policies, and drives no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import check_integer
from mainstem.replay.trace import Batch, Int64s, Seen, Trace, Uint64s, mix

SAMPLE = 1 << 20
"""Number of block uses to count distances over. A trace with more is sampled."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Mean and quantiles of one number over all requests."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Group:
    """The requests of one tenant, one kind or one turn.

    Args:
        name: the tenant, kind or turn.
        requests: number of requests.
        input_tokens: tokens of their prompts.
        output_tokens: tokens of their answers.
        blocks: blocks of their prompts.
        block_hit_rate: share of these blocks that an infinite cache, shared by all requests, would hit.
        token_hit_rate: the same share of their prompts' tokens.
    """

    name: str
    requests: int
    input_tokens: int
    output_tokens: int
    blocks: int
    block_hit_rate: float
    token_hit_rate: float


@dataclass(frozen=True, slots=True)
class Reuse:
    """Reuses of blocks at a distance in [low, high), counted in distinct blocks.

    Args:
        low: minimum distance.
        high: upper bound of the distance, exclusive.
        uses: number of such uses; scaled if sampled.
        lru_hit_rate: share of all uses with a distance below `high`: the hit rate of LRU with room for `high` blocks.
    """

    low: int
    high: int
    uses: int
    lru_hit_rate: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Reuses of blocks after a time in [low_s, high_s); scaled if sampled."""

    low_s: float
    high_s: float
    uses: int


@dataclass(frozen=True, slots=True)
class Depth:
    """Blocks with [low, high) blocks above them.

    Args:
        low: minimum depth; 0 is the first block of a prompt.
        high: upper bound of the depth, exclusive.
        uses: uses of blocks at this depth.
        distinct_blocks: distinct blocks among them.
        sharing: mean number of requests that use one of them.
    """

    low: int
    high: int
    uses: int
    distinct_blocks: int
    sharing: float


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """Statistics of a trace. Lists are empty where the trace has no such data.

    Args:
        trace: name of the trace.
        block_size: tokens per block.
        requests: number of requests.
        span_s: seconds from the first request to the last.
        input_tokens: tokens of all prompts.
        output_tokens: tokens of all answers.
        blocks: uses of blocks.
        distinct_blocks: distinct blocks.
        block_hit_rate: share of these uses that an infinite cache would hit.
        token_hit_rate: the same share of the prompts' tokens.
        prompt_tokens: prompt tokens per request.
        answer_tokens: answer tokens per request.
        sampled: share of the blocks over which `reuses` and `waits` are counted; 1.0 is exact.
        reuses: reuses by distance.
        waits: reuses by time.
        depths: uses by depth.
        tenants: one group per tenant, those with the most blocks first.
        kinds: one group per kind, in the same order.
        turns: one group per turn, by turn.
        chats: number of conversations.
        chat_requests: requests per conversation; None without conversations.
        notes: notes about how the trace was read.
    """

    trace: str
    block_size: int
    requests: int
    span_s: float
    input_tokens: int
    output_tokens: int
    blocks: int
    distinct_blocks: int
    block_hit_rate: float
    token_hit_rate: float
    prompt_tokens: Quantiles
    answer_tokens: Quantiles
    sampled: float
    reuses: tuple[Reuse, ...]
    waits: tuple[Wait, ...]
    depths: tuple[Depth, ...]
    tenants: tuple[Group, ...]
    kinds: tuple[Group, ...]
    turns: tuple[Group, ...]
    chats: int
    chat_requests: Quantiles | None
    notes: tuple[str, ...]


def info(trace: Trace, *, sample: int = SAMPLE) -> TraceInfo:
    """Reads a trace twice and returns its statistics.

    Args:
        trace: any trace.
        sample: approximate number of block uses to count distances and times over. Both are exact for a trace with no
            more uses than that. Takes about 128 bytes per use while it runs.

    Raises:
        BadArgument: sample is below 1.
    """
    check_integer("sample", sample, 1, 2**40)
    whole, sums = trace.whole, _Sums(trace)
    for batch in trace.batches():
        sums.add(batch)
    uses, share = _uses(trace, sample)
    total = sums.total()
    chats = np.unique(whole.chat[whole.chat >= 0], return_counts=True)[1]
    return TraceInfo(
        trace=trace.name,
        block_size=trace.block_size,
        requests=len(trace),
        span_s=float(whole.time_s[-1]) if len(trace) else 0.0,
        input_tokens=total.input_tokens,
        output_tokens=total.output_tokens,
        blocks=total.blocks,
        distinct_blocks=sums.distinct,
        block_hit_rate=total.block_hit_rate,
        token_hit_rate=total.token_hit_rate,
        prompt_tokens=_quantiles(whole.input_tokens),
        answer_tokens=_quantiles(whole.output_tokens),
        sampled=share,
        reuses=_reuses(uses.distances() / share, len(uses), share),
        waits=_waits(uses.waits(whole.time_s), share),
        depths=sums.depths(),
        tenants=sums.groups("tenant", trace.tenants),
        kinds=sums.groups("kind", trace.kinds),
        turns=sums.groups("turn", _TURNS),
        chats=len(chats),
        chat_requests=_quantiles(chats) if len(chats) else None,
        notes=trace.notes,
    )


# --- sums over the whole trace ------------------------------------------------------------------------------------

_TURNS = ("", *map(str, range(1, 16)), "16 and later")
_COUNTED = 6  # requests, input tokens, output tokens, blocks, block hits, token hits
_POWERS = 2 ** np.arange(62)


class _Sums:
    """Adds up batches. An infinite cache hits on every use of a block but the first."""

    def __init__(self, trace: Trace) -> None:
        self._block_size = trace.block_size
        self._seen = Seen()
        sizes = {"tenant": len(trace.tenants), "kind": len(trace.kinds), "turn": len(_TURNS)}
        self._groups = {name: np.zeros((_COUNTED, size), np.int64) for name, size in sizes.items()}
        self._depths = np.zeros((2, len(_POWERS) + 1), np.int64)  # uses, first uses

    def add(self, batch: Batch) -> None:
        first = self._seen.add(batch.blocks)
        hits = np.flatnonzero(~first)
        owners, tokens, n = batch.owners[hits], batch.tokens(self._block_size)[hits], len(batch)
        counted = (
            np.ones(n, np.int64),
            batch.input_tokens,
            batch.output_tokens,
            batch.lengths,
            np.bincount(owners, minlength=n),
            np.bincount(owners, tokens, minlength=n),
        )
        for name, table in self._groups.items():
            index = np.minimum(getattr(batch, name), table.shape[1] - 1)
            for row, column in zip(table, counted, strict=True):
                row += np.bincount(index, column, minlength=len(row)).astype(np.int64)
        bins = _bins(batch.depths)
        for row, chosen in zip(self._depths, (bins, bins[first]), strict=True):
            row += np.bincount(chosen, minlength=len(row))

    @property
    def distinct(self) -> int:
        return len(self._seen)

    def total(self) -> Group:
        return _group("", self._groups["kind"].sum(axis=1))

    def groups(self, column: str, names: Sequence[str]) -> tuple[Group, ...]:
        """Returns a group for each name with requests; none if no request has a name."""
        table = self._groups[column]
        if not table[0, 1:].any():
            return ()
        found = [_group(name, table[:, at]) for at, name in enumerate(names) if table[0, at]]
        return tuple(found if column == "turn" else sorted(found, key=lambda group: -group.blocks))

    def depths(self) -> tuple[Depth, ...]:
        return tuple(
            Depth(*_edges(at), int(uses), int(distinct), float(uses / max(distinct, 1)))
            for at, (uses, distinct) in enumerate(self._depths.T)
            if uses
        )


def _group(name: str, counted: Int64s) -> Group:
    requests, input_tokens, output_tokens, blocks, block_hits, token_hits = map(int, counted)
    rates = block_hits / max(1, blocks), token_hits / max(1, input_tokens)
    return Group(name, requests, input_tokens, output_tokens, blocks, *rates)


def _quantiles(column: NDArray[Any]) -> Quantiles:
    if not len(column):
        return Quantiles(0.0, 0.0, 0.0, 0.0, 0.0)
    return Quantiles(float(column.mean()), *map(float, np.quantile(column, (0.5, 0.9, 0.99, 1.0))))


def _bins(numbers: NDArray[Any]) -> Int64s:
    """Returns the bin of each number: bin 0 is [0, 1), bin b is [2**(b - 1), 2**b)."""
    return np.searchsorted(_POWERS, numbers, side="right").astype(np.int64)


def _edges(at: int) -> tuple[int, int]:
    return (0, 1) if at == 0 else (1 << (at - 1), 1 << at)


# --- reuse --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Uses:
    """Uses of blocks, those of one request from the deepest to the first.

    Args:
        blocks: [n] the block.
        owners: [n] the request that uses it, non-decreasing.
        last: [n] index of the previous use of the same block; -1: none.
    """

    blocks: Uint64s
    owners: Int64s
    last: Int64s

    def __len__(self) -> int:
        return len(self.blocks)

    def distances(self) -> Int64s:
        """Returns, for each reuse, the blocks used since the previous use, up to the request of this one.

        Among the uses j before use i, last[j] <= last[i] holds for all up to last[i], once for each block used since,
        and for the deeper blocks of the same request, because their last request used this block too. This counts them.
        """
        again = np.flatnonzero(self.last >= 0)
        starts = np.searchsorted(self.owners, self.owners[again], side="left")
        since = _not_above_before(self.last)[again] - (self.last[again] + 1) - (again - starts)
        return np.maximum(since, 0)

    def waits(self, time_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns, for the same reuses, the seconds since the previous use."""
        again = np.flatnonzero(self.last >= 0)
        return time_s[self.owners[again]] - time_s[self.owners[self.last[again]]]


def _uses(trace: Trace, limit: int) -> tuple[_Uses, float]:
    """Returns the uses of all blocks, or of a share of the blocks, and that share: a power of two."""
    bits = max(0, -(-len(trace.whole.blocks) // limit) - 1).bit_length()
    blocks, owners, requests = [], [], 0
    for batch in trace.batches():
        kept = np.flatnonzero(mix(batch.blocks) >> np.uint64(64 - bits) == 0) if bits else slice(None)
        blocks.append(batch.blocks[kept])
        owners.append(batch.owners[kept] + requests)
        requests += len(batch)
    owner = np.concatenate([np.zeros(0, np.int64), *owners])[::-1]
    order = np.argsort(owner, kind="stable")
    block = np.concatenate([np.zeros(0, np.uint64), *blocks])[::-1][order]
    return _Uses(block, owner[order], _last(block)), 0.5**bits


def _last(blocks: Uint64s) -> Int64s:
    order = np.argsort(blocks, kind="stable")
    same = np.flatnonzero(blocks[order[1:]] == blocks[order[:-1]])
    last = np.full(len(blocks), -1, np.int64)
    last[order[same + 1]] = order[same]
    return last


def _not_above_before(values: Int64s) -> Int64s:
    """Returns, for each value from 0 up, how many values before it are not above it; these values are distinct.

    Merge sort: where two sorted runs become one, each value of the right run counts those of the left run that are not
    above it. O(n log(n) ** 2), in whole arrays.
    """
    n = len(values)
    size = 1 << max(n - 1, 0).bit_length()
    runs = np.full(size, n, np.int64)
    runs[:n] = values
    counts = np.zeros(n + 2, np.int64)  # by value; n and -1, which are never read, come last
    width = 1
    while width < size:
        pairs = runs.reshape(-1, 2, width)
        at = np.arange(len(pairs))[:, np.newaxis]
        left, right = (pairs[:, side] + at * (n + 2) for side in (0, 1))  # offset, so that all form one sorted array
        found = np.searchsorted(left.ravel(), right.ravel(), side="right").reshape(right.shape) - at * width
        counts[pairs[:, 1]] += found
        width *= 2
        runs = np.sort(runs.reshape(-1, width), axis=1).ravel()
    return counts[values]


def _reuses(distances: NDArray[Any], uses: int, share: float) -> tuple[Reuse, ...]:
    counts = np.bincount(_bins(distances))
    rates = np.cumsum(counts) / max(uses, 1)
    return tuple(
        Reuse(*_edges(at), round(count / share), float(rate))
        for at, (count, rate) in enumerate(zip(counts, rates, strict=True))
    )


def _waits(waits_s: NDArray[np.float64], share: float) -> tuple[Wait, ...]:
    counts = np.bincount(_bins(waits_s))
    edges = (map(float, _edges(at)) for at in range(len(counts)))
    return tuple(Wait(low, high, round(count / share)) for (low, high), count in zip(edges, counts, strict=True))
