"""Explains a request of a trace: the requests before it go through a cache of a given size, then it is asked why.

A block of the trace is a page of the cache, so positions are those of blocks. The cache remembers all that it evicted.
What an earlier request had is never called new, not even where its prompt was longer than the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from json import loads
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.explain import Stretch
from mainstem.cache.keys import HashKeys
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.errors import BadArgument, OutOfPages
from mainstem.replay.readers.formats import BYTES_NOTE, FORMATS
from mainstem.replay.readers.lines import Source
from mainstem.replay.trace import MAGIC, Batch, Trace

_UNSURE = ("never_seen", "parted", "forgotten")  # where the cache remembers no eviction
_TEXT, _IDS = "text", "token ids"
_KINDS = {"recording": "keyed hashes", "bailian": "hash ids", "mooncake": "hash ids", "tokens": _IDS}  # by format
_FIRST_LINES = 16  # which say what a file is


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
    keys = HashKeys(8)
    every = max(len(trace.whole.blocks), 1)  # so that no eviction is forgotten
    cache = PrefixCache(capacity_blocks, 1, keys=keys, policy=policy, explain_pages=every)
    batch, i = (request.whole, 0) if request is not None else (trace.whole, last)
    asked = _blocks(batch, i)
    seen = np.zeros(len(asked), bool)
    for earlier in _before(trace, last):
        seen |= np.isin(asked, earlier.blocks)
        for each in range(len(earlier)):
            cache.poll(float(earlier.time_s[each]))
            _serve(cache, earlier, each)
    if request is None:
        cache.poll(float(batch.time_s[i]))
    size, tokens = trace.block_size, int(batch.input_tokens[i])
    found = _corrected(cache.explain(asked, distances=True).stretches, int(np.logical_and.accumulate(seen).sum()))
    return RequestExplained(last + 1, tokens, tuple(_in_tokens(each, size, tokens) for each in found))


def _before(trace: Trace, number: int) -> Iterator[Batch]:
    """Yields the first requests of a trace."""
    for batch in trace.batches():
        yield batch.slice(0, min(len(batch), number))
        number -= len(batch)
        if number <= 0:
            return


def _corrected(stretches: Iterable[Stretch], seen: int) -> Iterator[Stretch]:
    """Corrects what the cache cannot know: earlier requests had the first `seen` blocks, and none had the others.

    Such a block that was not evicted was never kept: the prompt of that request was longer than the cache.
    """
    for unsure, parts in groupby(stretches, lambda each: each.cause in _UNSURE):
        first, *rest = parts
        if not unsure:
            yield from (first, *rest)
            continue
        end = rest[-1].end if rest else first.end
        known = min(max(first.begin, seen), end)
        if first.begin < known:
            yield Stretch(first.begin, known, cause="forgotten")
        if known < end:
            parted = first.parted if known == first.begin else None  # the cache has nothing below what it forgot
            yield Stretch(known, end, cause="parted" if parted else "never_seen", parted=parted)


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


# --- what is compared


def check_comparable(path: str, trace: Trace, own_path: str, own: Trace) -> None:
    """Checks that blocks of a request can be equal to those of a trace.

    A converted trace says only whether it was text, as does one that cannot be read again.

    Args:
        path: of the trace's file.
        trace: what was read of it.
        own_path: of the request's file.
        own: what was read of that.

    Raises:
        BadArgument: they cannot: blocks of one are named by its text, those of the other by hashes, say.
    """
    kind = _kind(path)
    kinds = {_TEXT, _IDS} if BYTES_NOTE in trace.notes else {kind} if kind else {*_KINDS.values()}
    own_kind = _kind(own_path) or (_TEXT if BYTES_NOTE in own.notes else None)
    if own_kind is not None and own_kind not in kinds:
        number = f"the number of a request of {path}, 1 to {len(trace)}"
        why = f"{own_kind} cannot be compared with {' or '.join(sorted(kinds))}"
        raise BadArgument("request", own_path, f"{number}, or of the same kind as those: {why}")


def _kind(path: str) -> str | None:
    """Returns what names the blocks of a file; None: it cannot be read again, or was converted."""
    if not Path(path).is_file():
        return None
    with Source(path) as source:
        if source.head == MAGIC:
            return None
        for _, line in islice(source.lines(), _FIRST_LINES):
            with suppress(ValueError, RecursionError):
                found = loads(line)
                if isinstance(found, dict) and (format := next((each for each in FORMATS if each.fits(found)), None)):
                    body = found["body"] if isinstance(found.get("body"), dict) else found
                    return _KINDS.get(format.name) or (_IDS if isinstance(body.get("prompt"), list) else _TEXT)
    return None
