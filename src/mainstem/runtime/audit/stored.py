"""`StoredPages`: the copies of some pages that storage has, read and verified as a prefetch does, into memory apart.

Peers are not asked: they audit their own pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.sealer import HEADER_BYTES
from mainstem.tiers.storage.store import Store


class Asked(NamedTuple):
    """Pages of one row.

    Args:
        payload_bytes: of a page.
        names: by page.
    """

    row: Row
    payload_bytes: int
    names: Mapping[int, bytes]


class _Read(NamedTuple):
    """The pages of a row that storage says to have."""

    row: int
    pages: list[int]
    slots: list[memoryview]
    call: StoreCall[int]


class StoredPages:
    """Asks at once which of the pages are there, and reads these once the answer has come."""

    def __init__(self, store: Store, asked: Sequence[Asked]) -> None:
        self._store, self._asked = store, asked
        self._found = store.find([(each.row, [*each.names.values()]) for each in asked], alone=True)
        self._reads: list[_Read] | None = None

    def over(self) -> bool:
        """Whether all that will come has come. Does not block."""
        if not self._found.over():
            return False
        if self._reads is None:
            there = self._found.value if self._found.done() else [[] for _ in self._asked]
            found = [
                (each, [page for page, is_there in zip(each.names, row, strict=False) if is_there])
                for each, row in zip(self._asked, there, strict=True)
            ]
            self._reads = [self._read(each, pages) for each, pages in found if pages]
        return all(read.call.over() for read in self._reads)

    def payload(self, row: int, page: int) -> NDArray[np.uint8] | None:
        """Returns the content of a page of a row, by its number; None: it did not come, or not intact."""
        for read in self._reads or ():
            if read.row == row and page in read.pages and read.call.done():
                at = read.pages.index(page)
                if at < read.call.value:
                    return np.frombuffer(read.slots[at][HEADER_BYTES:], np.uint8)
        return None

    def _read(self, asked: Asked, pages: list[int]) -> _Read:
        slots = [memoryview(bytearray(HEADER_BYTES + asked.payload_bytes)) for _ in pages]
        names = [asked.names[page] for page in pages]
        return _Read(asked.row.number, pages, slots, self._store.read(asked.row, names, slots, alone=True))
