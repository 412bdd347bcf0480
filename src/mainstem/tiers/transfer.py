"""What moves page contents between the device and host memory, as the tiers see it.

    device page   [ layer 0 | layer 1 | ... ]           ids of `Pool`, wherever the engine keeps its KV
    host slot     [ header | payload ]                   one slot a host page; payload_bytes of a page's content

Knows page ids and bytes. The tiers decide what moves and when; memory does not know the tree. A transfer is a ticket:
it is done once, and until it is done the pages on both of its sides belong to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Move(NamedTuple):
    """Pages of one component: page source[i] goes to page target[i].

    Args:
        component: its row in the tree.
        source: int32 page ids on the side that is read.
        target: int32 page ids on the side that is written, as many.
    """

    component: int
    source: NDArray[np.int32]
    target: NDArray[np.int32]


class Ticket(Protocol):
    """One transfer under way."""

    def done(self) -> bool:
        """Whether it has ended, well or not: it touches no memory any more. Never goes back; does not block."""

    def wait(self) -> None:
        """Blocks until it is done."""

    @property
    def error(self) -> Exception | None:
        """What it failed with; None while under way, and when all went well."""


class LayerTicket(Ticket, Protocol):
    """A transfer to the device that arrives layer by layer, layer 0 first."""

    def wait_layer(self, layer: int) -> None:
        """Blocks the reader of a layer (its stream, on a GPU) until that layer has arrived, or the transfer failed."""


class HostMemory(Protocol):
    """Host pages, and the ways to them and back. One thread at a time.

    For pages that exist `down` and `up` never raise: what goes wrong is for the ticket to say.
    """

    @property
    def pages(self) -> int:
        """Host pages of component 0."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page's content, of component 0."""

    def down(self, moves: Sequence[Move]) -> Ticket:
        """Starts copying device pages to host pages."""

    def up(self, moves: Sequence[Move]) -> LayerTicket:
        """Starts copying host pages to device pages, one layer after the other."""

    def slots(self, pages: Sequence[int]) -> list[memoryview]:
        """Host slots of component 0 as storage sees them, header and payload, without a copy where the layout allows.

        Each is `HEADER_BYTES + payload_bytes` long; the header is the caller's to fill.
        """

    def regions(self) -> list[memoryview]:
        """The memory that slots lie in, for back ends that must know it beforehand."""
