"""Why a prompt was computed, stretch by stretch: what the cache knows, and what the tiers did for one request.

    prompt   [ found on the device | found on the host | found in storage | computed: one cause a stretch ]
                                                                          '- storage, then the cache -'

What was found is known from the lease and the loads. For the rest, what storage has and did not bring counts before
what the cache knows, as it would have been found. The cache knows one namespace at a time, so nothing here says whether
another one has the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from mainstem.cache.explain import NEW, Cause, Stretch, Stretches, Tier, joined
from mainstem.cache.keys import Encoded, hash_blocks
from mainstem.cache.namespaces import NamespaceLike
from mainstem.tiers.prefetch.missed import Missed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mainstem.cache.prefix_cache import PrefixCache

_OF_STORAGE: dict[str, Cause] = {
    "timeout": "late", "slow": "late", "limit": "late", "meanwhile": "late", "breaker": "failed", "fault": "failed",
    "host_room": "no_room", "too_few": "too_short", "unasked": "too_short",
}  # fmt: skip
"""The cause of what storage has and did not bring, by that of `Missed`."""

_GONE = ("evicted", "over_quota", "forgotten", "removed")
"""Causes of what the cache lost and storage may still have, where it was not asked."""

_UNSTORED_PAGES, _MAX_SYMBOL = 1 << 16, 2**31 - 1


class TierHit(NamedTuple):
    """Positions that a request used from a tier."""

    begin: int
    end: int
    tier: Tier


def known_to(
    cache: PrefixCache, prompt: Encoded, namespace: NamespaceLike, *, distances: bool = False
) -> list[Stretch]:
    """Returns what a cache knows of a prompt; `distances`: also how much memory would have kept what was evicted."""
    whole = cache.explain(prompt, namespace, distances=distances)

    def of_request(known: Stretch) -> Stretch:
        if known.eviction is not None and known.eviction.why == "quota":
            return replace(known, cause="over_quota")
        return replace(known, since_s=whole.since_s) if known.cause in NEW else known

    return [of_request(each) for each in whole.stretches]


@dataclass(slots=True)
class Circumstances:
    """All that decides how one prompt is explained.

    Args:
        known: what the cache knew when it was admitted, covering its prompt.
        page_size: positions of a page.
        found: what it used, in order and disjoint.
        missed: what storage has, or may have, and did not bring.
        failed: positions whose copy to the device failed.
        unstored: positions that an earlier request asked not to store.
        scored_from: the first position that had to be computed, whatever the cache has; None: there was none.
        too_short: whether the host had too little to be loaded; else the device had no room for it.
    """

    known: Sequence[Stretch]
    page_size: int
    found: list[TierHit] = field(default_factory=list)
    missed: Sequence[Missed] = ()
    failed: tuple[int, int] = (0, 0)
    unstored: tuple[int, int] = (0, 0)
    scored_from: int | None = None
    too_short: bool = True

    def fail(self) -> None:
        """Notes that what was loaded last did not arrive."""
        begin = end = self.found[-1].end if self.found else 0
        while self.found and self.found[-1].tier != "device" and self.found[-1].end == begin:
            begin = self.found.pop().begin
        self.failed = begin, end

    def explain(self) -> Stretches:
        """Returns one stretch after the other for the whole prompt."""
        page, length = self.page_size, self.known[-1].end
        missed = [each._replace(begin=each.begin * page, end=each.end * page) for each in self.missed]
        last = (length - 1) // page * page
        edges = {0, last, length, *self.failed, *self.unstored, self.scored_from or 0}
        for parts in (self.known, self.found, missed):
            edges |= {edge for part in parts for edge in (part.begin, part.end)}
        edges |= {each.parted.at for each in self.known if each.parted is not None}
        bounds = sorted(edge for edge in edges if 0 <= edge <= length)
        stretches = joined(_explain(begin, end, missed, self, last) for begin, end in pairwise(bounds))
        return tuple(_without_place(each) for each in stretches)


def _explain(begin: int, end: int, missed: Sequence[Missed], about: Circumstances, last: int) -> Stretch:
    """Explains positions for which everything is the same."""

    def at(parts: Iterable[tuple[int, int]]) -> bool:
        return any(first <= begin and end <= after for first, after in parts)

    before = next(each for each in about.known if each.begin <= begin < each.end)
    for each in about.found:
        if at([(each.begin, each.end)]):
            return Stretch(begin, end, each.tier, idle_s=before.idle_s if before.tier == each.tier else None)
    if about.scored_from is not None and begin >= about.scored_from:
        return Stretch(begin, end, cause="scored")
    if at([about.failed]):
        return Stretch(begin, end, cause="failed", detail="load")
    loaded = [each.end for each in about.found if each.tier != "device"]
    if begin >= last and last in loaded:  # all that another tier could bring
        return Stretch(begin, end, cause="partial_page")
    if before.tier == "host" and any(begin < after for after in loaded):
        return Stretch(begin, end, cause="late", detail="meanwhile")
    if before.tier is not None:
        if begin >= last or before.tier != "host":
            return Stretch(begin, end, cause="partial_page")
        if about.too_short:
            return Stretch(begin, end, cause="too_short", detail="host")
        return Stretch(begin, end, cause="no_room", detail="device")
    storage = next((each for each in missed if at([(each.begin, each.end)])), None)
    if storage is not None and (storage.cause != "unasked" or before.cause in _GONE):
        if storage.cause == "component":
            return Stretch(begin, end, cause="state_missing" if storage.detail == "state" else "window_missing")
        return Stretch(begin, end, cause=_OF_STORAGE[storage.cause], detail=storage.detail or storage.cause)
    if before.cause in NEW and at([about.unstored]):
        return Stretch(begin, end, cause="not_stored")
    if before.parted is not None and end <= before.parted.at:  # they agree, but their page does not
        return Stretch(begin, end, cause="partial_page")
    return replace(before, begin=begin, end=end)


def _without_place(part: Stretch) -> Stretch:
    """Returns a stretch that does not begin where its prompt parts, because of another cause, as one that is new."""
    if part.parted is None or part.begin == part.parted.at:
        return part
    return replace(part, cause="never_seen", parted=None)


class Unstored:
    """Which pages requests computed and asked not to store: the newest of them, by hashes of their prefixes.

    Args:
        page_size: positions of a page.
        most: pages to remember.
    """

    def __init__(self, page_size: int, most: int = _UNSTORED_PAGES) -> None:
        self._page_size, self._most = page_size, most
        self._pages: dict[bytes, None] = {}  # oldest first

    def add(self, symbols: NDArray[np.int32], namespace: bytes, begin: int) -> None:
        """Notes the whole pages of a sequence from the one on that holds position `begin`."""
        for page in self._named(symbols, namespace)[begin // self._page_size :]:
            self._pages.pop(page, None)
            self._pages[page] = None
        while len(self._pages) > self._most:
            del self._pages[next(iter(self._pages))]

    def find(self, symbols: NDArray[np.int32], namespace: bytes) -> tuple[int, int]:
        """Returns the positions of a prompt that are noted, from the first on; (0, 0) if there is none."""
        if not self._pages:
            return 0, 0
        noted = [page in self._pages for page in self._named(symbols, namespace)]
        if True not in noted:
            return 0, 0
        begin = noted.index(True)
        end = begin + next((i for i, known in enumerate(noted[begin:]) if not known), len(noted) - begin)
        return begin * self._page_size, end * self._page_size

    def _named(self, symbols: NDArray[np.int32], namespace: bytes) -> list[bytes]:
        hashes = hash_blocks(symbols & _MAX_SYMBOL, self._page_size)  # those of images exceed it
        return [namespace + hashes[at : at + 16] for at in range(0, len(hashes), 16)]
