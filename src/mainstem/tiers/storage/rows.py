"""The rows of the tree as storage sees them: which components have content, what is kept exact, what a codec packs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mainstem.cache.components import State
from mainstem.cache.tree import Tree
from mainstem.tiers.host.transfer import HostMemory
from mainstem.tiers.storage.codecs import Codec, Page
from mainstem.tiers.storage.sealer import HEADER_BYTES


class Row(NamedTuple):
    """A component whose pages are stored.

    Args:
        number: its row in the tree.
        name: its name in the tree, unlike any other row's, part of each stored value's key.
        exact: no codec may change its content. A state is: an error would be carried along by all that is computed
            from it.
    """

    number: int
    name: str
    exact: bool


def stored_rows(tree: Tree, memory: HostMemory) -> tuple[Row, ...]:
    """Returns the components whose pages have content."""
    return tuple(
        Row(row, name, isinstance(tree.components[row], State))
        for row, name in enumerate(tree.names)
        if memory.payload_bytes(row) > 0
    )


class Packing:
    """Packs rows that are not exact by a codec. Leaves room for the header before each value.

    Args:
        dtype: of the numbers, for a codec other than "none".
    """

    def __init__(self, codec: Codec, dtype: str) -> None:
        self._codec, self._dtype = codec, dtype

    def plain(self, row: Row) -> bool:
        """Whether values of the row are stored as they are."""
        return row.exact or self._codec.name == "none"

    def size(self, row: Row, slot_bytes: int) -> int:
        """Returns the bytes of a packed slot."""
        if self.plain(row):
            return slot_bytes
        return HEADER_BYTES + self._codec.encoded_bytes(slot_bytes - HEADER_BYTES, self._dtype)

    def room(self, row: Row, slots: Sequence[memoryview]) -> Sequence[memoryview]:
        """Returns buffers for packed slots: the slots themselves if nothing is to be encoded."""
        if self.plain(row):
            return slots
        return [memoryview(bytearray(self.size(row, len(slot)))) for slot in slots]

    def pack(self, row: Row, slots: Sequence[memoryview], numbers: Sequence[int]) -> Sequence[memoryview]:
        """Packs slots with the numbers of their pages.

        Raises:
            BadArgument: the codec takes no such values.
        """
        packed = self.room(row, slots)
        for slot, room, number in zip(slots, packed, numbers, strict=True):
            if room is not slot:
                self._codec.encode(slot[HEADER_BYTES:], room[HEADER_BYTES:], self._dtype, Page(row.name, number))
        return packed

    def unpack(self, packed: memoryview, slot: memoryview) -> None:
        """Unpacks a value into its slot, if it is not there already.

        Raises:
            BadArgument: it is no value of the codec.
        """
        if packed is not slot:
            self._codec.decode(packed[HEADER_BYTES:], slot[HEADER_BYTES:], self._dtype)
