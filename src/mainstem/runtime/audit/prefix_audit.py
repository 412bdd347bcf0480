"""`PrefixAudit`: computes one prefix again, chunk by chunk, and compares its pages with the copies of every tier.

    pages   [ compared: those of the device | chunk: pages of the audit's own ]
                       read by attention  ->  computed, then compared with device, host and storage

A chunk is computed from the pages before it. These were compared with what computing them gives, so they are those of
the whole prefix computed from its first token, and an audit needs no more pages of its own than a chunk. Windows and
states are its own, too, since a tree keeps few of them. Nobody else uses these pages, and an audit holds no locks: the
tree may change between two chunks, and is asked anew before each.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.cache.components import Component, Full, State
from mainstem.cache.keys import TokenLike
from mainstem.cache.namespaces import Namespace, encode_namespace
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.tree import DEVICE, HOST, Ids
from mainstem.runtime.audit.stored import Asked, StoredPages
from mainstem.runtime.memory.host import HostPool, Planes
from mainstem.runtime.segments import Segment
from mainstem.tiers.host.shelf import HostOnly
from mainstem.tiers.storage.store import Store

log = logging.getLogger(__name__)

Tier = Literal["device", "host", "storage"]
Outcome = Literal["equal", "different", "evicted", "failed", "dropped"]
_TIERS: tuple[Tier, ...] = ("device", "host")  # of the tree, by number


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that was hit.

    Args:
        tokens: int32, of whole pages, at least one.
        namespace: as in its request.
    """

    tokens: NDArray[np.int32]
    namespace: Namespace | str | None


@dataclass(frozen=True, slots=True)
class Means:
    """The cache and the model of an engine, as audits use them.

    Args:
        cache: whose pages are compared.
        forward: computes segments; see `Runner`.
        planes: what the ids of each row of the tree index.
        own: for each row, the ids of the pages or slots that audits alone use.
        chunk: pages that a forward computes.
    """

    cache: PrefixCache
    forward: Callable[[Sequence[Segment]], torch.Tensor]
    planes: Sequence[Planes]
    own: Sequence[range]
    chunk: int

    @property
    def store(self) -> Store | None:
        """The storage of the cache, unless it is only what peers read."""
        store = None if self.cache.tiers is None else self.cache.tiers.store
        return None if store is None or isinstance(store.backend, HostOnly) else store


@dataclass(frozen=True, slots=True)
class Difference:
    """The first byte of a copy that is not what computing its page gives."""

    tier: Tier
    page: int
    row: int
    offset: int


class PrefixAudit:
    """The audit of one prefix.

    Args:
        means: what it works with.
        prefix: what is computed again.

    Attributes:
        tokens: tokens of the pages that were compared so far, by tier.
        mismatches: copies that differ, by tier: the first one on each.
    """

    def __init__(self, means: Means, prefix: Prefix) -> None:
        self._means, self._prefix = means, prefix
        self._tree, self._size = means.cache.tree, means.cache.page_size
        self._namespace = encode_namespace(prefix.namespace)
        self._key = self._tree.keys.encode(prefix.tokens)
        self._pages = len(prefix.tokens) // self._size
        self._compared = 0  # pages
        self._end: int | None = None  # of the chunk that storage is asked for
        self._stored: StoredPages | None = None
        self._names: list[bytes] = []
        if means.store is not None:
            root = means.store.sealer.root(self._namespace)
            self._names = means.store.sealer.names(root, self._key, self._tree.page_bytes)
        self.tokens: Counter[Tier] = Counter()
        self.mismatches: Counter[Tier] = Counter()

    @property
    def reading(self) -> bool:
        """Whether storage is being asked."""
        return self._stored is not None

    def go_on(self) -> Outcome | None:
        """Asks storage for the next chunk, or computes and compares it; None: there is more to do."""
        held = [self._held(tier) for tier in range(self._tree.tiers)]
        begin = self._compared
        if begin >= len(held[DEVICE][0]) or not self._can_compute(begin, held[DEVICE]):
            return "evicted"
        if self._end is None:
            self._end = self._chunk_end(begin, held)
            self._stored = self._ask(begin, self._end)
        if self._stored is not None and not self._stored.over():
            return None
        end, stored = min(self._end, len(held[DEVICE][0])), self._stored
        self._end = self._stored = None
        self._compute(begin, end, held[DEVICE])
        differences = self._compare(begin, end, held, stored)
        if differences:
            self._remove(differences)
            return "different"
        self._compared = end
        return "equal" if end == self._pages else None

    def _held(self, tier: int) -> list[Ids]:
        """Returns for each row the ids that the tier has of the pages that are in the tree, or of the states at their
        ends; -1 where it has none."""
        core = self._tree.core
        pages = min(self._pages, core.extent(self._namespace, self._key))
        held = [np.full(pages, -1, np.int32) for _ in self._tree.components]
        node = core.locate(self._namespace, self._key[: pages * self._tree.page_bytes], pages) if pages else 0
        while node:
            for row, ids in enumerate(held):
                own, end = core.own_ids(node, row, tier), core.end(node)
                ids[end - len(own) : end] = own
            node = core.parent(node)
        return held

    def _is_read(self, row: int) -> bool:
        """Whether a chunk reads the device's pages of a row before it."""
        return isinstance(self._tree.components[row], Full) and self._means.planes[row].payload_bytes > 0

    def _can_compute(self, begin: int, device: Sequence[Ids]) -> bool:
        return all(bool((ids[:begin] >= 0).all()) for row, ids in enumerate(device) if self._is_read(row))

    def _chunk_end(self, begin: int, held: Sequence[Sequence[Ids]]) -> int:
        """Returns where the next chunk ends: where a state is kept, at most."""
        end = min(begin + self._means.chunk, len(held[DEVICE][0]))
        for row, component in enumerate(self._tree.components):
            if isinstance(component, State):
                kept = np.maximum.reduce([tier[row][begin:end] for tier in held])
                end = begin + 1 + int((kept >= 0).argmax()) if (kept >= 0).any() else end
        return end

    def _ask(self, begin: int, end: int) -> StoredPages | None:
        tiers, store = self._means.cache.tiers, self._means.store
        if tiers is None or tiers.writes is None or store is None:
            return None
        asked = []
        for row in tiers.writes.rows:
            names = {page: self._names[page] for page in self._places(row.number, begin, end)}
            asked.append(Asked(row, self._means.planes[row.number].payload_bytes, names))
        return StoredPages(store, asked)

    def _places(self, row: int, begin: int, end: int) -> range:
        """Returns the pages of a chunk at which a row has something: of states, the last."""
        return range(end - 1 if isinstance(self._tree.components[row], State) else begin, end)

    def _own(self, row: int, page: int) -> int:
        own = self._means.own[row]
        return own[page % len(own)]

    def _compute(self, begin: int, end: int, device: Sequence[Ids]) -> None:
        tables, state = [], -1
        for row, component in enumerate(self._tree.components):
            if isinstance(component, State):
                state = self._own(row, 0)
                continue
            table = np.array([self._own(row, page) for page in range(end)], np.int32)
            if self._is_read(row):
                table[:begin] = device[row][:begin]
            tables.append(table)
        tokens = self._prefix.tokens[begin * self._size : end * self._size]
        self._means.forward([Segment(tokens, begin * self._size, tuple(tables), 0, state=state)])

    def _compare(
        self, begin: int, end: int, held: Sequence[Sequence[Ids]], stored: StoredPages | None
    ) -> list[Difference]:
        """Compares what was computed with all copies, and counts it."""
        compared: set[tuple[Tier, int]] = set()
        differences: list[Difference] = []
        for row, planes in enumerate(self._means.planes):
            for page in self._places(row, begin, end) if planes.payload_bytes else ():
                right = planes.computed(self._own(row, page))
                for tier, whole in self._copies(row, page, held, stored):
                    compared.add((tier, page))
                    copy = whole[: len(right)]
                    if not np.array_equal(copy, right):
                        differences.append(Difference(tier, page, row, int((copy != right).argmax())))
        self.tokens.update({tier: self._size * count for tier, count in Counter(tier for tier, _ in compared).items()})
        return differences

    def _copies(
        self, row: int, page: int, held: Sequence[Sequence[Ids]], stored: StoredPages | None
    ) -> Iterator[tuple[Tier, NDArray[np.uint8]]]:
        """Yields the copies of a page that the tiers have."""
        for number, tier in enumerate(_TIERS[: len(held)]):
            if (id := int(held[number][row][page])) < 0:
                continue
            if number == HOST:
                assert self._means.cache.tiers is not None
                memory = self._means.cache.tiers.host.memory
                assert isinstance(memory, HostPool)
                yield tier, memory.payload(row, id)
            else:
                yield tier, self._means.planes[row].computed(id)
        if stored is not None and (content := stored.payload(row, page)) is not None:
            yield "storage", content

    def _remove(self, differences: Sequence[Difference]) -> None:
        """Counts and logs the first difference on each tier; removes the first of their pages, and all below it."""
        for tier in sorted({each.tier for each in differences}):
            first = min((each for each in differences if each.tier == tier), key=lambda each: each.page)
            self.mismatches[tier] += 1
            self._log(first)
        page = min(each.page for each in differences)
        key: TokenLike = self._prefix.tokens[: (page + 1) * self._size]
        freed = self._means.cache.remove(key, self._prefix.namespace)
        tiers, store = self._means.cache.tiers, self._means.store
        if tiers is not None and tiers.writes is not None and store is not None:
            store.delete(tiers.writes.rows, self._names[page:])  # what the tree does not know to be there, too
        log.error("audit: page %d and all that follow it are removed from every tier: %d device pages", page, freed)

    def _log(self, difference: Difference) -> None:
        row = difference.row
        component: Component = self._tree.components[row]
        layer, inside = self._means.planes[row].place(difference.offset)
        begin = difference.page * self._size
        where = (
            f"after position {begin + self._size - 1}"
            if isinstance(component, State)
            else (f"layer {layer}, position {begin + inside}")
        )
        log.error(
            "audit: the %s copy of page %d of a prefix is not what computing it gives: %s, %s, byte %d of its content",
            difference.tier, difference.page, self._tree.names[row], where, difference.offset,
        )  # fmt: skip
