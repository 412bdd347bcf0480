"""Host memory without tensors: the content of a page is a few numbers, and the test drives every copy.

device   [components][layers, pages] uint64         the engine writes and reads it
host     slots of HEADER_BYTES + payload            component 0; others are arrays
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mainstem.tiers.pages import HEADER_BYTES
from mainstem.tiers.transfer import Move


class GhostTicket:
    """A copy that advances by one layer per `step`."""

    def __init__(self, layers: int, copy: Callable[[int], None]) -> None:
        self.error: Exception | None = None
        self._layers, self._copy = layers, copy
        self._at = 0
        self._done = False

    def step(self) -> None:
        """Copies one more layer."""
        if not self._done:
            self._copy(self._at)
            self._at += 1
            self._done = self._at == self._layers

    def fail(self, error: Exception) -> None:
        if not self._done:
            self.error, self._done = error, True

    def done(self) -> bool:
        return self._done

    def wait(self) -> None:
        while not self._done:
            self.step()

    def wait_layer(self, layer: int) -> None:
        while not self._done and self._at <= layer:
            self.step()


class GhostMemory:
    """`HostMemory` over arrays.

    Args:
        device_pages, host_pages: number of pages of each component.
        layers: layers of every page.
        instant: whether a copy is done as soon as it begins; otherwise `tickets` has those under way.
    """

    def __init__(
        self, device_pages: Sequence[int], host_pages: Sequence[int], layers: int = 2, *, instant: bool = True
    ) -> None:
        self.layers, self.instant = layers, instant
        self.device = [np.zeros((layers, pages), np.uint64) for pages in device_pages]
        self.payload_bytes = 8 * layers
        self._bytes = np.zeros((host_pages[0], HEADER_BYTES + self.payload_bytes), np.uint8)
        first = self._bytes[:, HEADER_BYTES:].view(np.uint64).T
        self.host: list[NDArray[np.uint64]] = [first]
        self.host += [np.zeros((layers, pages), np.uint64) for pages in host_pages[1:]]
        self.pages = host_pages[0]
        self.tickets: list[GhostTicket] = []

    def down(self, moves: Sequence[Move]) -> GhostTicket:
        return self._begin(moves, self.device, self.host)

    def up(self, moves: Sequence[Move]) -> GhostTicket:
        return self._begin(moves, self.host, self.device)

    def slots(self, page_ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self._bytes[page]) for page in page_ids]

    def regions(self) -> list[memoryview]:
        return [memoryview(self._bytes.reshape(-1))]

    def _begin(
        self, moves: Sequence[Move], source: list[NDArray[np.uint64]], target: list[NDArray[np.uint64]]
    ) -> GhostTicket:
        kept = [Move(move.component, move.source.copy(), move.target.copy()) for move in moves]

        def copy(layer: int) -> None:
            for move in kept:
                target[move.component][layer, move.target] = source[move.component][layer, move.source]

        ticket = GhostTicket(self.layers, copy)
        if self.instant:
            ticket.wait()
        else:
            self.tickets.append(ticket)
        return ticket
