"""Growth: a trace of many times as many users, from one that was recorded.

    a request of the recorded trace   | shared prompt      | private                    |
    in each of N populations          | the same, or new   | its own, by session        |   and shifted in time

A block is *shared* where it, or a block after it, is followed by at least `shared_by` different blocks: many go on from
there, as from a system prompt. The rest of a prompt is private. Requests of one conversation are a session, and where
conversations are not numbered, those with the same first private block. Each population has all sessions once, under
names of its own, each shifted in time by up to `shift`, alike for all requests of a session. The first block of a
shared prompt is its root; a population has a root in common with the recorded trace, or, with the probability
`new_prompts`, has prompts of its own in its place.

Kept exactly: the number of requests, times N; each prompt's length; which requests of a session share which blocks; the
time between them; tenants, kinds, turns. Kept to within the shift: how many requests come when. Not kept: what no
session of the recorded trace has. So populations neither ask new things nor ask more than before, and users are
independent: no crowds beyond those that were recorded. The span is that of the recorded trace, and sessions that it
cuts off at its ends stay so.

Memory grows with the recorded trace, and with the requests of the grown one (about 100 bytes each), not with their
blocks, which pass through in pieces. Equal seeds give equal traces: draws are hashes of names. Knows no caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument, check_integer
from mainstem.replay.trace import GOLDEN, Batch, Int64s, Seen, Trace, Uint64s, mix
from mainstem.settings.replay import Growth

Floats = NDArray[np.float64]

MAX_TIMES = 10**6
_WINDOW_REQUESTS = 1 << 18  # of the grown trace, whose times are in memory at once
_PIECE_BLOCKS = 1 << 20
_TIMES_AT_ONCE = 1 << 21


def grow(trace: Trace, times: int, growth: Growth = Growth()) -> Trace:
    """Grows a trace.

    Args:
        trace: the recorded trace; at least one request.
        times: populations; the result has as many times the requests and block accesses.
        growth: seed, shift, new prompts, and what counts as shared.

    Raises:
        BadArgument: an argument is outside its range.
    """
    check_integer("times", times, 1, MAX_TIMES)
    if len(trace) == 0:
        raise BadArgument("trace", trace.name, "a trace with 1 request or more")
    source = _Source.of(trace, growth)
    model = _Populations(times, growth.seed, growth.new_prompts)
    return Trace.of(
        _grown(source, model),
        block_size=trace.block_size,
        name=f"{trace.name} x {times}",
        tenants=trace.tenants,
        kinds=trace.kinds,
        notes=(
            *trace.notes,
            f"Grown, not recorded: {times:,} populations of {trace.name}, with {growth.stated}.",
        ),
        distinct_blocks=model.distinct_blocks(source),
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """A recorded trace, taken apart.

    Args:
        trace: the trace.
        shared: [shared blocks], sorted.
        shared_roots: [shared blocks] the root of each.
        public: [n] the leading blocks of each request that are shared.
        session: [n] a name of each request's session.
        lowest_s, highest_s: [n] by how much the session of each request may be shifted.
    """

    trace: Trace
    shared: Uint64s
    shared_roots: Uint64s
    public: Int64s
    session: Uint64s
    lowest_s: Floats
    highest_s: Floats

    @classmethod
    def of(cls, trace: Trace, growth: Growth) -> _Source:
        shared, roots = _shared(trace, growth.shared_by)
        batches = list(trace.batches())
        public = np.concatenate([_leading(batch, shared) for batch in batches])
        batch = trace.whole
        begins = batch.offsets[:-1] + public
        session = mix(np.arange(len(batch), dtype=np.uint64) + np.uint64(2**63))  # of a prompt without private blocks
        private = public < batch.lengths
        session[private] = batch.blocks[begins[private]]
        session = np.where(batch.chat >= 0, mix(batch.chat.astype(np.uint64) * GOLDEN), session)
        _, of = np.unique(session, return_inverse=True)
        first = np.full(of.max() + 1, np.inf)
        last = np.zeros(of.max() + 1)
        np.minimum.at(first, of, batch.time_s)
        np.maximum.at(last, of, batch.time_s)
        span = float(batch.time_s[-1])
        return cls(
            trace,
            shared,
            roots,
            public,
            mix(session),
            np.maximum(-growth.shift, -first)[of],
            np.minimum(growth.shift, span - last)[of],
        )


def _shared(trace: Trace, shared_by: int) -> tuple[Uint64s, Uint64s]:
    """Returns the shared blocks, sorted, and the root of each."""
    seen = Seen()
    parents = [np.empty(0, np.uint64)]
    for batch in trace.batches():
        inner = seen.add(batch.blocks) & (batch.depths > 0)
        parents.append(batch.blocks[np.flatnonzero(inner) - 1])
    blocks, children = np.unique(np.concatenate(parents), return_counts=True)
    forks = blocks[children >= shared_by]
    found = [np.empty((0, 2), np.uint64)]
    for batch in trace.batches():
        ends = np.zeros(len(batch), np.int64)  # after the last fork of each request
        at_fork = np.flatnonzero(_member(batch.blocks, forks))
        np.maximum.at(ends, batch.owners[at_fork], batch.depths[at_fork] + 1)
        above = np.flatnonzero(batch.depths < ends[batch.owners])
        roots = batch.blocks[batch.offsets[:-1][batch.owners[above]]]
        found.append(np.unique(np.stack([batch.blocks[above], roots], axis=1), axis=0))
    pairs = np.unique(np.concatenate(found), axis=0)
    return pairs[:, 0], pairs[:, 1]


def _member(values: Uint64s, among: Uint64s) -> NDArray[np.bool_]:
    """Returns [values] whether each is among these, which are sorted."""
    if not len(among):
        return np.zeros(len(values), dtype=bool)
    found: NDArray[np.bool_] = among[np.minimum(np.searchsorted(among, values), len(among) - 1)] == values
    return found


def _leading(batch: Batch, shared: Uint64s) -> Int64s:
    """Returns [requests] the leading blocks that are shared. The blocks before a shared one are shared."""
    return np.bincount(batch.owners[_member(batch.blocks, shared)], minlength=len(batch)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Populations:
    """What differs between populations, as hashes: a population is a number below `times`."""

    times: int
    seed: int
    new_prompts: float

    def salt(self, population: Int64s, purpose: int) -> Uint64s:
        """Returns [populations] independent numbers for a purpose."""
        base = mix(np.array([self.seed], np.uint64) * np.uint64(4) + np.uint64(purpose))
        return mix(base + (population.astype(np.uint64) + np.uint64(1)) * GOLDEN)

    def brings(self, roots: Uint64s, population: Int64s) -> NDArray[np.bool_]:
        """Returns, element-wise, whether a population has prompts of its own in place of those of a root."""
        return _uniform(roots ^ self.salt(population, 1)) < self.new_prompts

    def times_s(self, source: _Source, request: Int64s, population: Int64s) -> Floats:
        """Returns, element-wise, when a request comes in a population."""
        low, high = source.lowest_s[request], source.highest_s[request]
        share = _uniform(source.session[request] ^ self.salt(population, 2))
        found: Floats = source.trace.whole.time_s[request] + (low + (high - low) * share)
        return found

    def distinct_blocks(self, source: _Source) -> int:
        """Returns the distinct blocks of all populations: private blocks N times, and what each shared root has."""
        private = source.trace.distinct_blocks - len(source.shared)
        roots, sizes = np.unique(source.shared_roots, return_counts=True)
        total = private * self.times
        for root, size in zip(roots, sizes.tolist(), strict=True):
            own = int(self.brings(np.full(self.times, root), np.arange(self.times)).sum())
            total += size * (own + (own < self.times))
        return total


def _uniform(numbers: Uint64s) -> Floats:
    """Returns [n] numbers in [0, 1), from hashes of these."""
    found: Floats = (mix(numbers) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def _grown(source: _Source, model: _Populations) -> Iterator[Batch]:
    """Yields all populations in order of time."""
    span = float(source.trace.whole.time_s[-1])
    windows = min(math.ceil(len(source.trace) * model.times / _WINDOW_REQUESTS), 1 << 20) if span else 1
    edges = np.linspace(0, span, windows + 1)
    edges[-1] = np.inf
    for begin, end in pairwise(edges):
        request, population, time_s = _window(source, model, float(begin), float(end))
        order = np.lexsort((request, population, time_s))
        request, population, time_s = request[order], population[order], time_s[order]
        ends = np.cumsum(source.trace.whole.lengths[request])
        cuts = np.flatnonzero(np.diff(ends // _PIECE_BLOCKS)) + 1
        for piece in np.split(np.arange(len(request)), cuts):
            yield _piece(source, model, request[piece], population[piece], time_s[piece])


def _window(source: _Source, model: _Populations, begin: float, end: float) -> tuple[Int64s, Int64s, Floats]:
    """Returns the requests, populations and times in [begin, end)."""
    recorded = source.trace.whole.time_s
    near = np.flatnonzero((recorded + source.lowest_s < end) & (recorded + source.highest_s >= begin))
    many = max(1, _TIMES_AT_ONCE // max(1, len(near)))
    found = [(near[:0], near[:0], recorded[:0])]
    for first in range(0, model.times, many):
        population = np.arange(first, min(first + many, model.times))
        request, each = (grid.ravel() for grid in np.meshgrid(near, population))
        time_s = model.times_s(source, request, each)
        inside = (time_s >= begin) & (time_s < end)
        found.append((request[inside], each[inside], time_s[inside]))
    request, each, time_s = (np.concatenate(column) for column in zip(*found, strict=True))
    return request, each, time_s


def _piece(source: _Source, model: _Populations, request: Int64s, population: Int64s, time_s: Floats) -> Batch:
    """Returns these requests as a batch, with the names of their populations."""
    recorded = source.trace.whole.take(request)
    owner = recorded.owners
    private = recorded.depths >= source.public[request][owner]
    blocks = recorded.blocks
    own = private.copy()
    has = np.flatnonzero(source.public[request] > 0)
    own[~private] = np.isin(owner[~private], has[model.brings(blocks[recorded.offsets[:-1][has]], population[has])])
    names = blocks.copy()
    names[own] = mix(blocks[own] ^ model.salt(population, 3)[owner[own]])
    chat = np.where(recorded.chat >= 0, recorded.chat * model.times + population, -1)
    return replace(recorded, time_s=time_s, blocks=names, chat=chat)
