"""Host memory without tensors: the content of a page is a few numbers, and the test drives every copy.

device   [components][layers, pages] uint64         the engine writes and reads it
host     slots of HEADER_BYTES + payload            8 bytes more for each component before it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mainstem.tiers.host.transfer import Move
from mainstem.tiers.storage.sealer import HEADER_BYTES


class GhostTicket:
    """A copy that advances by one layer per `step`."""

    def __init__(self, layers: int, copy: Callable[[int], None]) -> None:
        self.error: Exception | None = None
        self.took_s: float | None = None
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
        empty: a component whose pages have no content.
    """

    def __init__(
        self,
        device_pages: Sequence[int],
        host_pages: Sequence[int],
        layers: int = 2,
        *,
        instant: bool = True,
        empty: int | None = None,
    ) -> None:
        self.layers, self.instant, self.empty = layers, instant, empty
        self.device = [np.zeros((layers, pages), np.uint64) for pages in device_pages]
        self._bytes = [
            np.zeros((pages, HEADER_BYTES + 8 * layers + 8 * row), np.uint8) for row, pages in enumerate(host_pages)
        ]
        self.host: list[NDArray[np.uint64]] = [
            slots[:, HEADER_BYTES : HEADER_BYTES + 8 * layers].view(np.uint64).T for slots in self._bytes
        ]
        self.pages = host_pages[0]
        self.tickets: list[GhostTicket] = []

    def down(self, moves: Sequence[Move]) -> GhostTicket:
        return self._begin(moves, self.device, self.host)

    def up(self, moves: Sequence[Move]) -> GhostTicket:
        return self._begin(moves, self.host, self.device)

    def payload_bytes(self, component: int) -> int:
        return 0 if component == self.empty else 8 * self.layers + 8 * component

    def slots(self, component: int, page_ids: Sequence[int]) -> list[memoryview]:
        assert component != self.empty and all(page >= 0 for page in page_ids)
        return [memoryview(self._bytes[component][page]) for page in page_ids]

    def regions(self) -> list[memoryview]:
        return [memoryview(slots.reshape(-1)) for slots in self._bytes]

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
