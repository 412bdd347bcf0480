"""Host memory for pages, and the copies between it and the device's tensors.

    device        planes, each [layers, pages, ...]                       where the model reads and writes
    page_first    [ header | payload | gap ] [ header | payload | gap ]   one slot per page: storage reads and writes it
    layer_first   plane after plane, each [layers, pages, ...]            as on the device

    payload       plane after plane; in each, the page's part of layer 0, of layer 1, ...

One layer is copied at a time, layer 0 first. Copies to the device go before copies to the host.

This module knows tensors and page ids. It does not know the tree, the store, the owners of pages, or how devices copy
(see copies.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.errors import BadArgument, StorageError
from mainstem.here import Memory, machine_memory
from mainstem.runtime.memory.copies import ERRORS, Copier, Copy, CudaCopier, LayerCopies, Transfer
from mainstem.runtime.readiness import too_large
from mainstem.settings.engine import HostSize
from mainstem.tiers.host.transfer import LayerTicket, Move, Ticket
from mainstem.tiers.storage.sealer import HEADER_BYTES

log = logging.getLogger(__name__)

HostLayout = Literal["auto", "page_first", "layer_first"]
Run = Callable[[Callable[[], None]], object]

SLOT_ALIGNMENT = 64
"""Slots begin at multiples of this many bytes."""

_MEMORY_PAGE = 4096
_TRIAL_BYTES = 16 << 20  # copied in each layout, to find the faster one


# ---------------------------------------------------------------- what pages are


@dataclass(frozen=True, slots=True)
class Planes:
    """The tensors that the page ids of one component index.

    Keys and values are two planes, a compressed latent is one. A recurrent layer's convolution and state are two, with
    one page per state. Planes may differ in dtype, and in shape after the first two dimensions. Without layers, pages
    have no content: they take no memory, and nothing is copied.

    Args:
        tensors: each [layers, pages, ...], contiguous, on one device, with equal numbers of layers and pages. Those of
            `beside` are [1, pages, ...], and are copied with the first layer.
        layers: the model's layer of each of the tensors' layers, ascending; None: 0, 1, 2, ...
        beside: so many of the last tensors hold what no forward writes.

    Raises:
        BadArgument: the tensors or layers do not fit this.
    """

    tensors: tuple[torch.Tensor, ...]
    layers: tuple[int, ...] | None = None
    beside: int = 0

    def __post_init__(self) -> None:
        if not self.tensors:
            raise BadArgument("tensors", self.tensors, "at least one tensor")
        for tensor in self.tensors:
            if tensor.dim() < 2 or not tensor.shape[1] or not tensor.is_contiguous():
                raise BadArgument("tensors", tuple(tensor.shape), "contiguous, [layers, pages, ...], at least one page")
            if len(tensor) and not tensor.numel():
                raise BadArgument("tensors", tuple(tensor.shape), "not empty in any dimension but the layers")
            if tensor.shape[1] != self.pages or tensor.device != self.device:
                raise BadArgument("tensors", tuple(tensor.shape), "equal in pages, on one device")
        for at, tensor in enumerate(self.tensors):
            count = len(self.tensors[0]) if at < len(self.tensors) - self.beside else 1
            if len(tensor) != count:
                raise BadArgument("tensors", tuple(tensor.shape), f"[{count}, pages, ...]: as many layers as the first")
        if list(self.model_layers) != sorted({*self.model_layers}) or len(self.model_layers) != len(self.tensors[0]):
            raise BadArgument("layers", self.layers, f"{len(self.tensors[0])} ascending numbers")

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.tensors[0].device

    @property
    def pages(self) -> int:
        """The number of device pages."""
        return self.tensors[0].shape[1]

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page's content."""
        return sum(tensor.nbytes for tensor in self.tensors) // self.pages

    @property
    def slot_bytes(self) -> int:
        """Bytes that a page takes on the host, with its header and the gap after it; 0 for a page without content."""
        if not self.payload_bytes:
            return 0
        return -(-(HEADER_BYTES + self.payload_bytes) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def content(self) -> str:
        """The name of the payload's format: stored pages are interchangeable only if it is equal."""
        parts = (f"{str(t.dtype).removeprefix('torch.')}{[len(t), *t.shape[2:]]}" for t in self.tensors)
        return f"page_first/v1 {' '.join(parts)}"

    @property
    def model_layers(self) -> Sequence[int]:
        """The model's layer of each of the tensors' layers."""
        return range(len(self.tensors[0])) if self.layers is None else self.layers

    def computed(self, page: int) -> NDArray[np.uint8]:
        """Returns a copy of what forwards write of a device page: its payload, up to what is `beside`."""
        tensors = self.tensors[: len(self.tensors) - self.beside]
        parts = [tensor.detach()[:, page].contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        content: NDArray[np.uint8] = torch.cat(parts).cpu().numpy()
        return content

    def place(self, offset: int) -> tuple[int, int]:
        """Returns of a byte of a payload the layer, and the index in the dimension after the pages: the position."""
        for tensor in self.tensors:
            size = math.prod(tensor.shape[2:]) * tensor.itemsize
            if offset < len(tensor) * size:
                return self.model_layers[offset // size], offset % size * tensor.shape[2] // size
            offset -= len(tensor) * size
        raise BadArgument("offset", offset, f"below {self.payload_bytes}")


def host_pages(size: HostSize, components: Sequence[Planes], there: Callable[[], Memory] = machine_memory) -> list[int]:
    """Returns the host pages of each component: the same ratio to its device pages for all, up to rounding.

    Raises:
        BadArgument: there is no room for a page of each, or the system does not report its free memory.
    """
    capacity = size.host_bytes if size.host_fraction is None else _free_part(size.host_fraction, there)
    if capacity is not None:
        ratio = capacity / sum(planes.pages * planes.slot_bytes for planes in components)
    else:
        ratio = 1.0 if size.host_ratio is None else size.host_ratio
    pages = [int(ratio * planes.pages) for planes in components]
    if min(pages) < 1:
        name = next(field.name for field in fields(size) if getattr(size, field.name) is not None)
        raise BadArgument(name, getattr(size, name), "room for a page of each component")
    return pages


def _free_part(fraction: float, there: Callable[[], Memory]) -> int:
    try:
        return int(there().free * fraction)
    except OSError as error:
        allowed = f"host_bytes or host_ratio instead: the free memory is unknown ({error})"
        raise BadArgument("host_fraction", fraction, allowed) from error


# ---------------------------------------------------------------- where pages are


class _Area:
    """Host memory of one component, in one of the two layouts.

    Raises:
        BadArgument: the memory cannot be allocated.
    """

    def __init__(self, planes: Planes, pages: int, layout: HostLayout) -> None:
        self._planes = planes
        self._pages = pages
        self._page_first = layout == "page_first"
        self.memory = _aligned(pages * planes.slot_bytes)

    def slot(self, page: int) -> memoryview:
        """Returns header and payload of a page."""
        begin = page * self._planes.slot_bytes
        return self.memory.data[begin : begin + HEADER_BYTES + self._planes.payload_bytes]

    def payload(self, page: int) -> NDArray[np.uint8]:
        """Returns a copy of a page's content."""
        begins = ((first + page * stride, size) for first, stride, size in self._parts())
        return np.concatenate([self.memory[begin : begin + size] for begin, size in begins])

    def clear(self, page_ids: NDArray[np.int32]) -> None:
        """Overwrites pages with zeros."""
        if self._page_first:  # headers, too
            self.memory.reshape(self._pages, -1)[page_ids] = 0
            return
        for first, stride, size in self._parts():
            self.memory[first : first + self._pages * stride].reshape(self._pages, size)[page_ids] = 0

    def rows(self, copier: Copier) -> list[Any]:
        """Returns the bytes of the pages, for each plane and layer."""
        flat = copier.table(self.memory)
        parts = (flat.as_strided((self._pages, size), (stride, 1), first) for first, stride, size in self._parts())
        return [copier.rows(part) for part in parts]

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        """Yields where the first page's part of each plane and layer begins, the stride of pages, and its size."""
        at = 0
        for tensor in self._planes.tensors:
            size = math.prod(tensor.shape[2:]) * tensor.itemsize
            for _ in range(len(tensor)):
                if self._page_first:
                    yield HEADER_BYTES + at, self._planes.slot_bytes, size
                else:
                    yield self._pages * at, size, size
                at += size


def _aligned(size: int) -> NDArray[np.uint8]:
    """Allocates memory at a page boundary of the system, as pinning and direct IO require."""
    try:
        memory = np.empty(size + _MEMORY_PAGE, np.uint8)
    except (MemoryError, ValueError) as error:
        raise too_large("host_bytes", size, "cpu") from error
    begin = -memory.ctypes.data % _MEMORY_PAGE
    return memory[begin : begin + size]


def _device_rows(planes: Planes, copier: Copier) -> list[Any]:
    """Returns the bytes of the pages, for each plane and layer."""
    layers = (layer for tensor in planes.tensors for layer in tensor.detach())
    return [copier.rows(layer.reshape(planes.pages, -1).view(torch.uint8)) for layer in layers]


# ---------------------------------------------------------------- the pool


class HostPool:
    """Host pages of all components, and the copies to and from device pages. See `HostMemory`. One thread at a time.

    Args:
        components: in the order of the tree's rows, on one device.
        pages: host pages of each component; see `host_pages`.
        layout: `page_first` (which storage needs), `layer_first`, or `auto`: page_first with storage, otherwise the one
            that copies faster in a short trial.
        storage: whether `slots` will be called.
        run: runs the copies. It gets a function to call once, from any thread; the function copies one layer, then
            calls `run` for the next one. Example: an executor's `submit`. None: a thread of its own.
        clock: of the trial and of copies, in seconds.

    Raises:
        BadArgument: components and pages do not fit each other or the layout, or the memory cannot be allocated.
    """

    def __init__(
        self,
        components: Sequence[Planes],
        pages: Sequence[int],
        layout: HostLayout = "auto",
        storage: bool = False,
        run: Run | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _check(components, pages, layout, storage)
        self._components, self._clock = tuple(components), clock
        self._pages = tuple(pages)
        device = self._components[0].device
        self._copier = CudaCopier(device) if device.type == "cuda" else Copier()
        if layout == "auto":
            layout = "page_first" if storage else _faster_layout(self._components, self._copier, clock)
        self.layout: HostLayout = layout
        self._areas = [_Area(planes, count, layout) for planes, count in zip(components, pages, strict=True)]
        self._device_rows = [_device_rows(planes, self._copier) for planes in self._components]
        self._host_rows = [area.rows(self._copier) for area in self._areas]
        self._ups: deque[Transfer] = deque()
        self._downs: deque[Transfer] = deque()
        self._working = self._closed = False
        self._lock = threading.Lock()  # guards the four attributes above
        self._turn = threading.RLock()  # held while a layer is copied; re-entered by a `run` that calls synchronously
        self._executor = None
        self._work = self._work_once
        if run is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="mainstem-copy")
            run, self._work = self._executor.submit, self._work_on
        self._run = run

    @property
    def pages(self) -> int:
        """The number of host pages of component 0."""
        return self._pages[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of host pages of each component."""
        return self._pages

    @property
    def content(self) -> str:
        """The name of the format of the payloads of all components, which is part of the identity of stored pages."""
        return " + ".join(planes.content for planes in self._components)

    def payload_bytes(self, component: int) -> int:
        """Returns the bytes of a page's content in a component; 0: its pages have none."""
        return self._components[component].payload_bytes

    def down(self, moves: Sequence[Move]) -> Ticket:
        """Starts copying device pages to host pages, after the work that the caller's stream has queued so far.

        Raises:
            BadArgument: a component or page does not exist; nothing is copied.
        """
        self._check_moves(moves, [planes.pages for planes in self._components], self._pages)
        return self._start(self._downs, moves, self._host_rows, self._device_rows)

    def up(self, moves: Sequence[Move]) -> LayerTicket:
        """Starts copying host pages to device pages, layer by layer, before all copies to the host.

        Raises:
            BadArgument: a component or page does not exist; nothing is copied.
        """
        self._check_moves(moves, self._pages, [planes.pages for planes in self._components])
        return self._start(self._ups, moves, self._device_rows, self._host_rows)

    def clear(self, component: int, page_ids: NDArray[np.int32]) -> None:
        """Overwrites pages of a component, which nobody reads or writes, with zeros."""
        self._areas[component].clear(page_ids)

    def payload(self, component: int, page: int) -> NDArray[np.uint8]:
        """Returns a copy of the content of a component's page, in the order of a payload whatever the layout."""
        return self._areas[component].payload(page)

    def slots(self, component: int, page_ids: Sequence[int]) -> list[memoryview]:
        """Returns slots of a component, header and payload, as views: writing to them writes to the pool.

        Raises:
            BadArgument: the layout has no slots, the component's pages have no content, or a page does not exist.
        """
        self._require_slots()
        if not self.payload_bytes(component):
            raise BadArgument("component", component, "a component whose pages have content")
        for page in page_ids:
            if not 0 <= page < self._pages[component]:
                raise BadArgument("page", page, f"in [0, {self._pages[component]})")
        return [self._areas[component].slot(page) for page in page_ids]

    def regions(self) -> list[memoryview]:
        """Returns the memory that holds the slots: one region for each component whose pages have content.

        Raises:
            BadArgument: the layout has no slots.
        """
        self._require_slots()
        return [area.memory.data for area in self._areas if len(area.memory)]

    def close(self) -> None:
        """Fails the transfers under way once the current layer is copied; a second call does nothing."""
        with self._turn, self._lock:
            self._closed = True
            left = [*self._ups, *self._downs]
            self._ups.clear()
            self._downs.clear()
        self._copier.drain()
        for transfer in left:
            transfer.end(StorageError("closed", "the host pool is closed"))
        if self._executor is not None:
            self._executor.shutdown()

    def _require_slots(self) -> None:
        if self.layout != "page_first":
            raise BadArgument("layout", self.layout, "page_first: other layouts have no slots")

    def _check_moves(self, moves: Sequence[Move], sources: Sequence[int], targets: Sequence[int]) -> None:
        for component, source, target in moves:
            if not 0 <= component < len(self._components):
                raise BadArgument("component", component, f"in [0, {len(self._components)})")
            if len(source) != len(target):
                raise BadArgument("target", len(target), f"a page for each of the {len(source)} of source")
            for name, ids, count in (("source", source, sources), ("target", target, targets)):
                if len(ids) and not 0 <= ids.min() <= ids.max() < count[component]:
                    raise BadArgument(name, ids, f"page ids in [0, {count[component]})")

    def _steps(self, moves: Sequence[Move], to: list[list[Any]], from_: list[list[Any]]) -> list[LayerCopies]:
        by_layer: dict[int, list[Copy]] = {}
        for component, source, target in moves:
            if not len(source):
                continue
            planes = self._components[component]
            sources, targets = self._copier.ids(source), self._copier.ids(target)
            layers = [layer for tensor in planes.tensors for layer in planes.model_layers[: len(tensor)]]
            for layer, written, read in zip(layers, to[component], from_[component], strict=True):
                by_layer.setdefault(layer, []).append(Copy(written, targets, read, sources))
        return [LayerCopies(layer, by_layer[layer]) for layer in sorted(by_layer)]

    def _start(
        self, queue: deque[Transfer], moves: Sequence[Move], to: list[list[Any]], from_: list[list[Any]]
    ) -> Transfer:
        try:
            steps = self._steps(moves, to, from_)
            transfer = Transfer(steps, self._copier, self._clock)
        except ERRORS as error:  # e.g. no memory for the ids on a device
            transfer = Transfer([], self._copier)
            transfer.end(error)
            return transfer
        if not steps:
            return transfer
        with self._lock:
            assert not self._closed, "a transfer after close"
            queue.append(transfer)
            idle, self._working = not self._working, True
        if idle:
            self._run(self._work)
        return transfer

    def _work_on(self) -> None:
        """Copies until nothing is left, on the pool's own thread."""
        while self._copy_layer():
            pass

    def _work_once(self) -> None:
        """Copies one layer, and calls the given `run` again if more is left."""
        if self._copy_layer():
            self._run(self._work_once)

    def _copy_layer(self) -> bool:
        """Copies one layer of the most urgent transfer; returns whether more is left."""
        with self._turn:
            if self._closed:
                return False
            with self._lock:
                queue = self._ups or self._downs
            try:
                queue[0].advance()
            except BaseException:
                log.exception("a copy was interrupted")
                if self._settle(queue):
                    self._run(self._work)  # this call ends here; the other transfers go on
                raise
            return self._settle(queue)

    def _settle(self, queue: deque[Transfer]) -> bool:
        with self._lock:
            if queue[0].ended:
                queue.popleft()
            self._working = bool(self._ups or self._downs)
            return self._working


def _check(components: Sequence[Planes], pages: Sequence[int], layout: HostLayout, storage: bool) -> None:
    if not components or len(components) != len(pages):
        raise BadArgument("pages", list(pages), f"one number for each of {len(components)} components, at least one")
    if min(pages) < 1:
        raise BadArgument("pages", list(pages), "at least 1 of each component")
    if len({planes.device for planes in components}) > 1:
        raise BadArgument("components", [str(planes.device) for planes in components], "on one device")
    if layout not in ("auto", "page_first", "layer_first"):
        raise BadArgument("layout", layout, "auto, page_first or layer_first")
    if storage and layout == "layer_first":
        raise BadArgument("layout", layout, "page_first or auto, with storage")


def _faster_layout(components: Sequence[Planes], copier: Copier, clock: Callable[[], float]) -> HostLayout:
    """Times copies of scattered pages to the host: a trial must not write to the device. Both ways copy the same."""
    planes = max(components, key=lambda planes: planes.pages * planes.payload_bytes)
    count = min(planes.pages, max(_TRIAL_BYTES // max(planes.slot_bytes, 1), 1))
    ids = np.concatenate([np.arange(0, count, 2), np.arange(1, count, 2)]).astype(np.int32)
    page_ids = copier.ids(ids)
    seconds: dict[HostLayout, float] = {}
    layouts: tuple[HostLayout, ...] = ("page_first", "layer_first")
    for layout in layouts:
        area = _Area(planes, count, layout)
        rows = zip(area.rows(copier), _device_rows(planes, copier), strict=True)
        copies = [Copy(host, page_ids, device, page_ids) for host, device in rows]
        copier.finish(copier.copy(copies, copier.fence()))  # the first touch of new memory is slow
        begin = clock()
        copier.finish(copier.copy(copies, copier.fence()))
        seconds[layout] = clock() - begin
    return min(layouts, key=lambda layout: seconds[layout])
