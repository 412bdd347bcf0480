"""Anchors: what several sessions begin with is kept before what only one of them has.

    session A   [ system | tools | instructions | question, answer, ... ]
    session B   [ system | tools | instructions | another question, ... ]
                                                ^ they part here: all before it is an anchor

Where a session parts from what is cached, a prefix ends that another one has computed. So that a prefix is found that
was evicted between two sessions, the beginnings of their first prompts are known, too: at the marks of a prompt, and at
lengths that grow by factors. Anchors are found by counting the sessions that begin with them. They are retained
(`mainstem.cache.retention`) within `share` of each pool for all owners together, and of what their owner may have. They
give way to what anybody asks to be retained. Beyond the share, one of more than twice as many sessions takes the place
of its owner's of the fewest; a session of an hour ago counts half. An anchor ends when no request has begun with it for
an hour.

A session is a prompt that does not begin with an earlier one. Where a client names its sessions (`Hints.session`), such
a prompt of a known name may be a retry, or the history that a summary has replaced: it counts once the session goes on
from it. So a subagent that goes on from the history of its session counts, and an answer that is made anew does not.

Prompts are known by digests, in bounded numbers for each owner. Times are passed in, the same on all ranks, which all
do the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.namespaces import owner_of
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.runtime.schedule.sequence import Sequence

_LIFE_S = 3600.0  # after which a count is worth half, and an anchor ends that nobody came to
_MOST_OWNERS = 64
_MOST_PROMPTS = 1024  # the latest ones of an owner's sessions, and as many names
_MOST_PARTINGS = 256  # of an owner
_MOST_BEGINNINGS = 8192  # of an owner: those of some 300 sessions
_MARKS = 8  # the first ones of a prompt
_GROWTH = math.sqrt(2)
_DIGEST_BYTES = 16

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class _Owner:
    """One owner's prompts, as far as they are known.

    Args:
        prompts: the latest one of each session, by digest, the one used longest ago first: its length, and where it
            parted from others if that is not counted yet, else 0.
        names: of sessions, the one used longest ago first.
        partings: where sessions parted, by digest: the length in tokens, and the count on a scale of its own: see
            `_later`.
        beginnings: of the first prompts of sessions, by digest, the one found longest ago first.
    """

    prompts: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    names: dict[tuple[bytes, str], None] = field(default_factory=dict)
    partings: dict[bytes, tuple[int, float]] = field(default_factory=dict)
    beginnings: dict[bytes, None] = field(default_factory=dict)


class Anchors:
    """The anchors of a cache. One thread, that of the scheduler.

    Args:
        share: part of what an owner may have of each pool for its anchors, beside what it retains; 0: there are none.

    Attributes:
        counts: `found`: prefixes that sessions were seen to share; `counted`: sessions that came to one.
    """

    def __init__(self, cache: PrefixCache, share: float) -> None:
        self.counts = {"found": 0, "counted": 0}
        self._cache, self._share = cache, share if cache.enabled else 0.0
        self._owners: dict[bytes, _Owner] = {}  # the one that asked longest ago first

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """Counts a request that has ended and is closed, and keeps what it shares with other sessions."""
        hints, size = sequence.request.hints, self._cache.page_size
        if not self._share or hints.no_store or not sequence.request.params.max_tokens:
            return
        owner = self._owner(owner_of(sequence.namespace))
        symbols = sequence.tokens.symbols[: len(sequence.request.tokens)]
        found = min(sequence.cached_tokens, len(symbols)) // size * size  # of `said` it has some, too
        lengths = {n for pair in owner.prompts.values() for n in pair} | {n for n, _ in owner.partings.values()}
        begins = _beginnings(len(symbols), sequence.request.marks, size)
        digests = _digests(sequence.namespace, symbols, {*lengths, *begins, found, len(symbols)})
        before = max((n for n, digest in digests.items() if digest in owner.prompts), default=0)
        shared = (n for n, digest in digests.items() if digest in owner.partings or digest in owner.beginnings)
        parted = max([found, *shared])  # what is not found any more was evicted
        for length in () if before else begins:
            _remember(owner.beginnings, digests[length], None, _MOST_BEGINNINGS)
        to_count, later = self._to_count(owner, sequence, digests[before] if before else b"", parted)
        _remember(owner.prompts, digests[len(symbols)], (len(symbols), later), _MOST_PROMPTS)
        if to_count:
            self._count(owner, sequence, {n: each for n, each in digests.items() if n <= to_count}, to_count, now_s)

    def check(self) -> None:
        """Checks the bounds, and that what is known has a length.

        Raises:
            AssertionError: a rule is broken.
        """
        assert len(self._owners) <= _MOST_OWNERS, "too many owners"
        size = self._cache.page_size
        for owner in self._owners.values():
            assert max(len(owner.prompts), len(owner.names)) <= _MOST_PROMPTS, "too many sessions"
            assert len(owner.partings) <= _MOST_PARTINGS, "too many partings"
            assert len(owner.beginnings) <= _MOST_BEGINNINGS, "too many beginnings"
            assert all(0 <= parted <= length for length, parted in owner.prompts.values()), "a prompt parts inside"
            assert all(n > 0 and n % size == 0 for n, _ in owner.partings.values()), "sessions part between pages"
        assert 0 <= self.counts["found"] <= self.counts["counted"], "what is found is counted"

    def _owner(self, name: bytes) -> _Owner:
        owner = self._owners.get(name, _Owner())
        _remember(self._owners, name, owner, _MOST_OWNERS)
        return owner

    def _to_count(self, owner: _Owner, sequence: Sequence, before: bytes, parted: int) -> tuple[int, int]:
        """Returns up to where a request counts as a session's, and up to where its next turn will; 0: nowhere.

        Args:
            before: the digest of the session's earlier prompt; empty: there is none.
            parted: where it left what was cached, or was known to be shared.
        """
        name = sequence.request.hints.session
        known = name is not None and (sequence.namespace, name) in owner.names
        if name is not None:
            _remember(owner.names, (sequence.namespace, name), None, _MOST_PROMPTS)
        if before:
            length, waiting = owner.prompts.pop(before)
            again = length == len(sequence.request.tokens)  # the same prompt: it has not gone on
            return (0, waiting) if again else (waiting, 0)
        return (0, parted) if known else (parted, 0)

    def _count(self, owner: _Owner, sequence: Sequence, digests: dict[int, bytes], parted: int, now_s: float) -> None:
        """Counts a session at each prefix that it came to, and retains those: the shortest first, which most share."""
        self.counts["counted"] += 1
        if digests[parted] not in owner.partings:
            self.counts["found"] += 1
            owner.partings[digests[parted]] = (parted, -math.inf)
        for length, digest in sorted(digests.items()):
            if digest not in owner.partings:
                continue
            worth = _later(owner.partings[digest][1], now_s)
            owner.partings[digest] = (length, worth)
            self._cache.retention.keep(
                sequence.tokens.key(length), now_s + _LIFE_S, sequence.request.namespace,
                renew_s=_LIFE_S, share=self._share, worth=worth,
            )  # fmt: skip
        if len(owner.partings) > _MOST_PARTINGS:
            del owner.partings[min(owner.partings, key=lambda digest: owner.partings[digest][1])]


def _later(count: float, now_s: float) -> float:
    """Adds 1 to a count that halves each `_LIFE_S`.

    Counts are logarithms, to base 2, of what they would be at time 0, so that they are compared as they are.
    """
    one = now_s / _LIFE_S
    return one if count == -math.inf else max(count, one) + math.log2(1 + 2 ** -abs(count - one))


def _beginnings(length: int, marks: Iterable[int], page_size: int) -> list[int]:
    """Returns at which lengths, in whole pages, the beginnings of a prompt are known."""
    found = {mark // page_size * page_size for mark in tuple(marks)[:_MARKS]}
    pages = 1.0
    while round(pages) * page_size <= length:
        found.add(round(pages) * page_size)
        pages *= _GROWTH
    return sorted(found - {0})


def _digests(namespace: bytes, symbols: NDArray[np.int32], lengths: Iterable[int]) -> dict[int, bytes]:
    """Returns digests of the beginnings of a prompt, by length; lengths beyond it have none."""
    made = blake2b(len(namespace).to_bytes(8, "little") + namespace, digest_size=_DIGEST_BYTES)
    data, at, digests = memoryview(symbols.tobytes()), 0, dict[int, bytes]()
    for length in sorted({*lengths}):
        if length > len(symbols):
            break
        made.update(data[at * 4 : length * 4])
        at, digests[length] = length, made.copy().digest()
    return digests


def _remember(kept: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Puts an entry last; beyond `most`, the first one goes."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]
