"""The interface of the memory that moves page contents between device and host.

    device page   [ layer 0 | layer 1 | ... ]           ids of `Pool`, wherever the engine keeps its KV
    host slot     [ header | payload ]                   one slot per host page; its component's payload_bytes

The memory knows page ids and bytes, not the tree. The tiers decide what moves and when. A transfer is a ticket: it ends
once, and until then the pages on both of its sides belong to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Move(NamedTuple):
    """Pages of one component: page source[i] is copied to page target[i].

    Args:
        component: its row in the tree.
        source: int32 page ids on the side that is read.
        target: int32 page ids on the side that is written, as many as in `source`.
    """

    component: int
    source: NDArray[np.int32]
    target: NDArray[np.int32]


class Ticket(Protocol):
    """A transfer under way."""

    def done(self) -> bool:
        """Whether it has ended, well or not, and touches no memory any more. Stays true once true; does not block."""

    def wait(self) -> None:
        """Blocks until it is done."""

    @property
    def error(self) -> Exception | None:
        """The error that it failed with; None while it is under way and after success."""


class LayerTicket(Ticket, Protocol):
    """A transfer to the device that arrives layer by layer, layer 0 first."""

    @property
    def took_s(self) -> float | None:
        """Seconds that the copies took, once all have ended; None: nobody measured them."""

    def wait_layer(self, layer: int) -> None:
        """Blocks the reader of a layer (its stream, on a GPU) until that layer has arrived, or the transfer failed."""


class HostMemory(Protocol):
    """Host pages, and the copies to and from them. One thread at a time.

    For page ids that exist `down` and `up` never raise: the ticket reports what goes wrong.
    """

    @property
    def pages(self) -> int:
        """Number of host pages of component 0."""

    def payload_bytes(self, component: int) -> int:
        """Returns the bytes of a page's content.

        0: its pages have none, such as those of full attention in a model without attention; they are never stored.
        """

    def down(self, moves: Sequence[Move]) -> Ticket:
        """Starts copying device pages to host pages."""

    def up(self, moves: Sequence[Move]) -> LayerTicket:
        """Starts copying host pages to device pages, one layer after the other."""

    def slots(self, component: int, page_ids: Sequence[int]) -> list[memoryview]:
        """Returns host slots of a component as storage sees them, header and payload; no copy where the layout allows.

        Each is `HEADER_BYTES + payload_bytes(component)` long; the caller fills the header.
        """

    def regions(self) -> list[memoryview]:
        """Returns the memory that holds the slots of all components, for back ends that register it in advance."""
