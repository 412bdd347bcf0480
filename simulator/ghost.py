"""Pages without tensors: the content of each is known, so every read can be checked.

    device   [components][layers, pages, page_size] uint64
    host     slots of header and payload [layers, page_size] uint64; with odd pages, each component has another size

A number is a function of the identity and the namespace (a salt), of all tokens up to its position, of its component
and its layer. A copy runs layer by layer, each at its own time, and may fail between two layers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mainstem.tiers.host.transfer import Move
from mainstem.tiers.storage.sealer import HEADER_BYTES
from simulator.world import World, require

Numbers = NDArray[np.uint64]

POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
_MAX_TOKENS = 4096
_ODD = np.uint64(0x9E37_79B9_7F4A_7C15)
_POWERS = np.cumprod(np.full(_MAX_TOKENS, _ODD, np.uint64))
_SHIFT = np.uint64(29)
_LAYERS = np.cumprod(np.full(64, 0xBF58_476D_1CE4_E5B9, np.uint64))
_COMPONENTS = np.cumprod(np.full(8, 0x94D0_49BB_1331_11EB, np.uint64))
_DEVICE, _HOST = 0, 1


@functools.lru_cache(65536)
def salt(*parts: bytes) -> np.uint64:
    """Returns a number for an identity and a namespace."""
    joined = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return np.uint64(int.from_bytes(blake2b(joined, digest_size=8).digest(), "little"))


def fingerprints(origin: np.uint64, tokens: ArrayLike) -> Numbers:
    """Returns a number for each position: a function of the origin and of all tokens up to it."""
    numbers = np.asarray(tokens).astype(np.uint64)
    mixed: Numbers = np.cumsum((numbers + np.uint64(1)) * _POWERS[: len(numbers)], dtype=np.uint64) + origin
    mixed = (mixed ^ (mixed >> _SHIFT)) * _ODD
    return mixed ^ (mixed >> _SHIFT)


def state_of(numbers: Numbers, page_size: int) -> Numbers:
    """Returns the content of a state slot after a sequence with these numbers."""
    return np.repeat(numbers[-1:], page_size)


class SimTicket:
    """A copy under way. It may run twice, be late, or fail."""

    def __init__(self, memory: SimMemory, moves: Sequence[Move], source: int) -> None:
        self.error: Exception | None = None
        self.took_s: float | None = None
        self._memory, self._source, self._began_s = memory, source, memory.world.now_s
        self._moves = [Move(move.component, move.source.copy(), move.target.copy()) for move in moves]
        self._layer, self._done = 0, False
        self._fails_at = memory.layers
        memory.hold(self._touched(source), self._touched(1 - source))
        world = memory.world
        kind = world.fault("copy: fails", "copy: fails", "copy: late", "copy: twice")
        if kind == "copy: fails":
            self._fails_at = world.random.randrange(memory.layers)
        self._twice = kind == "copy: twice"
        world.at(world.delay_s(memory.latency_s) + (1.0 if kind == "copy: late" else 0.0), self._step)

    def done(self) -> bool:
        return self._done

    def wait(self) -> None:
        self._memory.world.wait_for(self.done)

    def wait_layer(self, layer: int) -> None:
        self._memory.world.wait_for(lambda: self._done or self._layer > layer)

    def _step(self) -> None:
        memory = self._memory
        if self._layer == self._fails_at:
            memory.spoil(self._moves, 1 - self._source, self._layer)
            self.error = RuntimeError("the copy failed")
        else:
            memory.copy(self._moves, self._source, self._layer)
            self._layer += not self._twice
            self._twice = False
        if self.error is not None or self._layer == memory.layers:
            self._done, self.took_s = True, memory.world.now_s - self._began_s
            memory.release(self._touched(self._source), self._touched(1 - self._source))
        else:
            memory.world.at(memory.world.delay_s(memory.latency_s), self._step)

    def _touched(self, side: int) -> list[tuple[int, int, int]]:
        return [
            (side, move.component, page)
            for move in self._moves
            for page in (move.source if side == self._source else move.target).tolist()
        ]


class SimMemory:
    """`HostMemory` over arrays. It detects conflicting uses of a page.

    Args:
        world: the clock and random choices of copies.
        device_pages, host_pages: number of pages of each component.
        page_size: numbers per page and layer.
        layers: number of layers.
        empty: a component whose pages have no content.
    """

    def __init__(
        self,
        world: World,
        device_pages: Sequence[int],
        host_pages: Sequence[int],
        page_size: int,
        layers: int,
        empty: int | None = None,
    ) -> None:
        self.world, self.layers, self.page_size = world, layers, page_size
        self.latency_s = world.random.choice((0.0005, 0.003, 0.02))
        self.pages = host_pages[0]
        self.empty = empty
        sizes = [(pages, HEADER_BYTES + self._size(row)) for row, pages in enumerate(host_pages)]
        self._bytes = [np.zeros(size, np.uint8) for size in sizes]
        host = [
            slots[:, HEADER_BYTES : HEADER_BYTES + 8 * layers * page_size]
            .view(np.uint64)
            .reshape(len(slots), layers, page_size)
            .transpose(1, 0, 2)
            for slots in self._bytes
        ]
        device = [np.full((layers, pages, page_size), POISON) for pages in device_pages]
        self._sides: tuple[list[Numbers], list[Numbers]] = (device, host)
        self._reading: Counter[tuple[int, int, int]] = Counter()
        self._writing: set[tuple[int, int, int]] = set()

    # ---------------------------------------------------------------- for the tiers

    def down(self, moves: Sequence[Move]) -> SimTicket:
        return self._begin("down", moves, _DEVICE)

    def up(self, moves: Sequence[Move]) -> SimTicket:
        return self._begin("up", moves, _HOST)

    def payload_bytes(self, component: int) -> int:
        return 0 if component == self.empty else self._size(component)

    def slots(self, component: int, page_ids: Sequence[int]) -> list[memoryview]:
        require(component != self.empty, "pages without content are stored", component)
        require(all(page >= 0 for page in page_ids), "a page that the host does not have is stored", page_ids)
        return [memoryview(self._bytes[component][page]) for page in page_ids]

    def regions(self) -> list[memoryview]:
        return [memoryview(slots.reshape(-1)) for slots in self._bytes]  # type: ignore[arg-type]

    def _size(self, component: int) -> int:
        return 8 * self.layers * self.page_size + (8 * component if self.page_size % 2 else 0)

    def _begin(self, what: str, moves: Sequence[Move], source: int) -> SimTicket:
        self.world.did(what, [(m.component, m.source.tolist(), m.target.tolist()) for m in moves])
        return SimTicket(self, moves, source)

    # ---------------------------------------------------------------- for tickets

    def copy(self, moves: Sequence[Move], source: int, layer: int) -> None:
        for component, origin, target in moves:
            self._sides[1 - source][component][layer, target] = self._sides[source][component][layer, origin]

    def spoil(self, moves: Sequence[Move], side: int, layer: int) -> None:
        for component, _, target in moves:
            self._sides[side][component][layer, target] = POISON

    def hold(self, sources: Iterable[tuple[int, int, int]], targets: Iterable[tuple[int, int, int]]) -> None:
        for page in sources:
            require(page not in self._writing, "a page is copied while it is written (side, component, page)", page)
            self._reading[page] += 1
        for page in targets:
            require(page not in self._writing and not self._reading[page], "a page in use is overwritten", page)
            self._writing.add(page)

    def release(self, sources: Iterable[tuple[int, int, int]], targets: Iterable[tuple[int, int, int]]) -> None:
        self._reading.subtract(sources)
        self._writing.difference_update(targets)

    # ---------------------------------------------------------------- for the engine and the checks

    def write(self, page_ids: NDArray[np.int32], begin: int, numbers: Numbers, component: int = 0) -> None:
        """Writes what was computed for positions [begin, begin + n) of a sequence to its pages, in all layers."""
        positions = np.arange(begin, begin + len(numbers))
        at = page_ids[positions // self.page_size]
        for page in dict.fromkeys(at.tolist()):
            busy = (_DEVICE, component, page)
            require(busy not in self._writing and not self._reading[busy], "a forward writes a page in use", page)
        content = numbers[None] ^ _COMPONENTS[component] ^ _LAYERS[: self.layers, None]
        self._sides[_DEVICE][component][:, at, positions % self.page_size] = content

    def copy_page(self, source: int, target: int, positions: int) -> None:
        """Copies the first positions of a device page."""
        require((_DEVICE, 0, source) not in self._writing, "a page is copied from while it is written", source)
        device = self._sides[_DEVICE][0]
        device[:, target, :positions] = device[:, source, :positions]
        device[:, target, positions:] = POISON

    def copy_state(self, component: int, source: int, target: int) -> None:
        """Copies a device slot at once."""
        require((_DEVICE, component, source) not in self._writing, "a state is copied while it is written", source)
        busy = (_DEVICE, component, target)
        require(busy not in self._writing and not self._reading[busy], "a state in use is overwritten", target)
        device = self._sides[_DEVICE][component]
        device[:, target] = device[:, source]

    def expect(
        self, what: str, page_ids: NDArray[np.int32], numbers: Numbers, *, side: int = 0, component: int = 0,
        layers: slice = slice(None),
    ) -> None:  # fmt: skip
        """Reads pages, the last one perhaps in part, and compares every number.

        Raises:
            WrongError: a number differs.
        """
        if component == self.empty:
            return
        stored = self._sides[side][component][layers, page_ids]
        self.world.reads += stored.shape[0] * stored.shape[1]
        found = stored.reshape(stored.shape[0], -1)[:, : len(numbers)]
        require(found.shape[1] == len(numbers), "WRONG READ: too few pages", what, found.shape, len(numbers))
        wrong = found != (numbers[None] ^ _COMPONENTS[component] ^ _LAYERS[: self.layers, None][layers])
        if wrong.any():
            layer, position = np.argwhere(wrong)[0].tolist()
            where = f"side {side}, component {component}, layer {layer}, position {position} of {len(numbers)}"
            page, number = page_ids[position // self.page_size], hex(found[layer, position])
            require(False, "WRONG READ", what, where, f"page {page} holds {number}")

    def poison(self, side: int, component: int, free: Sequence[int]) -> None:
        """Overwrites free pages, so that a read of one is detected."""
        for page in free:
            busy = (side, component, page)
            require(busy not in self._writing and not self._reading[busy], "a free page is still in use", busy)
        self._sides[side][component][:, free] = POISON
