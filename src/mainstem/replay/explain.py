"""Explains a request of a trace: the requests before it go through a cache of a given size, then it is asked why.

A block of the trace is a page of the cache, so positions are those of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mainstem.cache import PrefixCache
from mainstem.errors import BadArgument, OutOfPages
from mainstem.explain import Stretch
from mainstem.keys import HashKeys
from mainstem.replay.trace import Batch, Trace

_MEMORY = 4  # capacities of evictions that are remembered


@dataclass(frozen=True, slots=True)
class RequestExplained:
    """Why one request of a trace would have missed.

    Args:
        number: of the request, from 1; of those after the trace, its length plus 1.
        tokens: of its prompt.
        stretches: in tokens.
    """

    number: int
    tokens: int
    stretches: tuple[Stretch, ...]


def explain_request(
    trace: Trace, number: int | None, capacity_blocks: int, policy: str = "lru", request: Trace | None = None
) -> RequestExplained:
    """Explains one request.

    Args:
        trace: the requests before it, and itself, unless `request` is given.
        number: which one, from 1; None: it comes after all others.
        capacity_blocks: of the cache.
        policy: of eviction.
        request: a trace whose first request is explained, in place of one of `trace`.

    Raises:
        BadArgument: there is no such request, or the two traces have blocks of different sizes.
    """
    if request is not None and request.block_size != trace.block_size:
        raise BadArgument("request", f"blocks of {request.block_size}", f"in blocks of {trace.block_size} tokens")
    last = len(trace) if number is None else number - 1
    if not 0 <= last <= len(trace) or (request is None and last == len(trace)):
        raise BadArgument("request", number, f"a number from 1 to {len(trace)}, the requests of the trace")
    keys = HashKeys(8, trace.block_size)
    cache = PrefixCache(capacity_blocks, 1, keys=keys, policy=policy, explain_pages=_MEMORY * capacity_blocks)
    at = 0
    for batch in trace.batches():
        for i in range(min(len(batch), last - at)):
            cache.tell_time(float(batch.time_s[i]))
            _serve(cache, batch, i)
        at += len(batch)
        if at >= last:
            break
    batch, i = (request.whole, 0) if request is not None else (trace.whole, last)
    if request is None:
        cache.tell_time(float(batch.time_s[i]))
    size, tokens = trace.block_size, int(batch.input_tokens[i])
    found = cache.explain(_blocks(batch, i), distances=True).stretches
    return RequestExplained(last + 1, tokens, tuple(_in_tokens(each, size, tokens) for each in found))


def _blocks(batch: Batch, number: int) -> NDArray[np.uint64]:
    return batch.blocks[batch.offsets[number] : batch.offsets[number + 1]]


def _serve(cache: PrefixCache, batch: Batch, number: int) -> None:
    """Computes what a prompt lacks, as far as the cache has room."""
    blocks = _blocks(batch, number)[: cache.pool.total]
    if not len(blocks):
        return
    with cache.lease(blocks) as lease:
        try:
            lease.reserve(len(blocks) - lease.reserved)
        except OutOfPages:
            return
        lease.finish()


def _in_tokens(stretch: Stretch, size: int, tokens: int) -> Stretch:
    parted = stretch.parted and replace(stretch.parted, at=stretch.parted.at * size)
    return replace(stretch, begin=stretch.begin * size, end=min(stretch.end * size, tokens), parted=parted)
