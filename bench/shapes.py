"""Streams of requests with one pure shape each: the patterns that distinguish policies, and that no service has alone.

    loop       1 2 3 4 1 2 3 4        `lru` has no hits if the loop is larger than the cache
    popular    1 1 3 1 2 1 4 1        only frequency matters
    recent     1 1 2 1 2 2 3 2        recent items are more likely: no policy is better than `lru`
    twice      1 2 3 1 4 2 5 3        each item repeats once after a fixed gap, and never again
    flooded    1 7 1 8 9 3 1 6        mixed with other items that occur once, one by one
    scanned    1 1 3 6 7 8 9 1        the same, in a row
    renewed    1 1 2 1 5 5 6 5        all items are replaced, so past statistics become useless
    in turns   1 2 3 1 5 5 6 5        changes to another shape, once or repeatedly

A function returns the requested items as numbers; functions that change a stream take its items. `as_trace` turns each
item into a prompt that shares nothing with others. `mainstem.replay.generate` has realistic workloads, including drifts
of popularity and pauses without variation. Equal seeds give equal streams with equal versions of NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mainstem.replay.trace import Batch, Trace, mix

Items: TypeAlias = NDArray[np.int64]
"""[requests] the item of each request."""

_MAX_BLOCKS = 1 << 20  # of an item


def loop(requests: int, items: int) -> Items:
    """Requests all items in turn, repeatedly."""
    return np.arange(requests, dtype=np.int64) % items


def popular(rng: np.random.Generator, requests: int, items: int, zipf: float) -> Items:
    """Requests item k in proportion to 1 / (k + 1) ** zipf."""
    chances = np.cumsum(np.arange(1, items + 1, dtype=np.float64) ** -zipf)
    wanted: Items = np.searchsorted(chances, rng.random(requests) * chances[-1], side="right").astype(np.int64)
    return wanted


def recent(rng: np.random.Generator, requests: int, new: float) -> Items:
    """Requests the item used a log-uniform number of other items ago; or, with probability `new`, a new item."""
    seen: list[int] = []  # by last use
    fresh, place = rng.random(requests) < new, rng.random(requests)
    wanted = np.empty(requests, np.int64)
    made = 0
    for at in range(requests):
        if fresh[at] or not seen:
            item, made = made, made + 1
        else:
            item = seen.pop(-min(int(len(seen) ** place[at]), len(seen)))
        seen.append(item)
        wanted[at] = item
    return wanted


def twice(requests: int, gap: int) -> Items:
    """Requests each item a second time, `gap` new items later."""
    turn = np.arange(requests, dtype=np.int64) - gap
    return np.where(turn < 0, turn + gap, np.where(turn % 2, turn // 2, gap + turn // 2))


def flooded(rng: np.random.Generator, wanted: Items, share: float) -> Items:
    """Replaces this share of the requests with new items, at random."""
    return _with_new(wanted, rng.random(len(wanted)) < share)


def scanned(wanted: Items, every: int, length: int) -> Items:
    """Replaces the last `length` of each `every` requests with new items."""
    return _with_new(wanted, np.arange(len(wanted)) % every >= every - length)


def renewed(wanted: Items, every: int) -> Items:
    """Replaces all items after each `every` requests."""
    return wanted + np.arange(len(wanted)) // every * (int(wanted.max()) + 1)


def in_turns(left: Items, right: Items, every: int) -> Items:
    """Alternates `every` requests of the one with `every` of the other; each continues where it stopped."""
    right = right + int(left.max()) + 1
    parts = [part for start in range(0, len(left), every) for part in (left[start:][:every], right[start:][:every])]
    return np.concatenate(parts)


def _with_new(wanted: Items, new: NDArray[np.bool_]) -> Items:
    return np.where(new, int(wanted.max()) + np.cumsum(new), wanted)


SHAPES: dict[str, Callable[[np.random.Generator, int], Items]] = {
    "loop": lambda rng, n: loop(n, n // 20),
    "loop, flooded": lambda rng, n: flooded(rng, loop(n, n // 25), 0.3),
    "popular": lambda rng, n: popular(rng, n, n // 8, 0.9),
    "popular, flooded": lambda rng, n: flooded(rng, popular(rng, n, n // 40, 0.6), 0.5),
    "popular, scanned": lambda rng, n: scanned(popular(rng, n, n // 10, 0.8), n // 25, n // 100),
    "popular, renewed": lambda rng, n: renewed(popular(rng, n, n // 50, 0.7), n // 10),
    "recent": lambda rng, n: recent(rng, n, 0.2),
    "twice, soon": lambda rng, n: twice(n, n // 100),
    "twice, late": lambda rng, n: twice(n, n // 12),
    "loop, then recent": lambda rng, n: in_turns(loop(n // 2, n // 30), recent(rng, n // 2, 0.3), n // 2),
    "popular, then renewed": lambda rng, n: in_turns(
        popular(rng, n // 2, n // 10, 0.9), renewed(popular(rng, n // 2, n // 60, 0.6), n // 50), n // 2
    ),
    "loop and recent": lambda rng, n: in_turns(loop(n // 2, n // 40), recent(rng, n // 2, 0.3), n // 8),
    "loop and recent, fast": lambda rng, n: in_turns(loop(n // 2, n // 40), recent(rng, n // 2, 0.3), n // 40),
}
"""Streams by name; each takes a generator and the number of requests."""


def as_trace(wanted: Items, *, name: str = "", mean_blocks: float = 5.0, seed: int = 0) -> Trace:
    """Returns a trace of these requests, one per second.

    Args:
        wanted: numbers of items, from 0.
        name: name of the trace.
        mean_blocks: mean blocks of an item; geometric.
        seed: seed of the lengths.
    """
    lengths = np.random.default_rng(seed).geometric(1 / mean_blocks, int(wanted.max()) + 1)[wanted]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    depth = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    n, none = len(wanted), np.zeros(len(wanted), np.int32)
    batch = Batch(
        time_s=np.arange(n, dtype=np.float64),
        input_tokens=lengths,
        output_tokens=np.zeros(n, np.int64),
        offsets=offsets,
        blocks=mix((np.repeat(wanted, lengths) * _MAX_BLOCKS + depth).astype(np.uint64)),
        tenant=none,
        kind=none,
        chat=np.full(n, -1, np.int64),
        turn=none,
    )
    return Trace.of(batch, name=name)


def shape(name: str, requests: int, *, seed: int = 0) -> Trace:
    """Returns the stream of this name as a trace."""
    rng = np.random.default_rng([seed, *name.encode()])
    return as_trace(SHAPES[name](rng, requests), name=name, seed=seed)
