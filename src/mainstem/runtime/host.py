"""Host memory for pages, and the copies between it and the device's tensors.

    device        planes, each [layers, pages, ...]                       where the model reads and writes
    page_first    [ header | payload | gap ] [ header | payload | gap ]   a slot a page: what storage reads and writes
    layer_first   plane after plane, each [layers, pages, ...]            as on the device

    payload       plane after plane, and of each the page's part of layer 0, of layer 1, ...

One layer is copied at a time, layer 0 first, and what goes up goes before what goes down.

Knows tensors and page ids; knows no tree, no store, not who owns a page, and not how a device copies (copies.py does).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.errors import BadArgument, StorageError
from mainstem.runtime.copies import ERRORS, Copier, Copy, CpuCopier, CudaCopier, Step, Transfer
from mainstem.tiers.pages import HEADER_BYTES
from mainstem.tiers.transfer import LayerTicket, Move, Ticket

log = logging.getLogger(__name__)

Layout = Literal["auto", "page_first", "layer_first"]
Run = Callable[[Callable[[], None]], object]

SLOT_ALIGNMENT = 64
"""Slots begin at multiples of it, in bytes."""

_OPTIONS = {"capacity_bytes": "host_bytes", "ratio": "host_ratio", "free_fraction": "host_fraction"}
_MEMORY_PAGE = 4096
_TRIAL_BYTES = 16 << 20  # of each layout, when the faster one is looked for


# ---------------------------------------------------------------- what pages are


@dataclass(frozen=True, slots=True)
class Planes:
    """The tensors that the page ids of one component name.

    Keys and values are two planes, a compressed latent is one; a recurrent layer's convolution and state are two, with
    one page a state. Planes may differ in shape and dtype behind the first two dimensions.

    Args:
        tensors: each [layers, pages, ...], contiguous, on one device, all with as many layers and pages.
        layers: of the model, one for each of the tensors' layers, rising; None: 0, 1, 2, ...

    Raises:
        BadArgument: they are not so.
    """

    tensors: tuple[torch.Tensor, ...]
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.tensors:
            raise BadArgument("tensors", self.tensors, "at least one tensor")
        for tensor in self.tensors:
            if tensor.dim() < 2 or not tensor.numel() or not tensor.is_contiguous():
                raise BadArgument("tensors", tuple(tensor.shape), "contiguous, [layers, pages, ...], and not empty")
            if tensor.shape[:2] != self.tensors[0].shape[:2] or tensor.device != self.device:
                raise BadArgument("tensors", tuple(tensor.shape), "of as many layers and pages, on one device")
        if list(self.model_layers) != sorted({*self.model_layers}) or len(self.model_layers) != len(self.tensors[0]):
            raise BadArgument("layers", self.layers, f"{len(self.tensors[0])} rising numbers")

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.tensors[0].device

    @property
    def pages(self) -> int:
        """Device pages."""
        return self.tensors[0].shape[1]

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page's content."""
        return sum(tensor.nbytes for tensor in self.tensors) // self.pages

    @property
    def slot_bytes(self) -> int:
        """Bytes that a page takes on the host, with its header and the gap behind it."""
        return -(-(HEADER_BYTES + self.payload_bytes) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def content(self) -> str:
        """Name of the payload's format: what stored pages must have in common to be each other's."""
        parts = (f"{str(t.dtype).removeprefix('torch.')}{[len(t), *t.shape[2:]]}" for t in self.tensors)
        return f"page_first/v1 {' '.join(parts)}"

    @property
    def model_layers(self) -> Sequence[int]:
        """The model's layer of each of the tensors' layers."""
        return range(len(self.tensors[0])) if self.layers is None else self.layers


@dataclass(frozen=True, slots=True)
class HostSize:
    """How large host memory is; exactly one is given.

    Args:
        capacity_bytes: of all components together, headers included; at least 1.
        ratio: host pages for each page on the device; above 0.
        free_fraction: of the memory that is free now; above 0, at most 1.

    Raises:
        BadArgument: none or several are given, or one is out of its range.
    """

    capacity_bytes: int | None = None
    ratio: float | None = None
    free_fraction: float | None = None

    def __post_init__(self) -> None:
        given = [n for n in ("capacity_bytes", "ratio", "free_fraction") if getattr(self, n) is not None]
        if len(given) != 1:
            raise BadArgument("host size", " and ".join(given) or None, "one of capacity_bytes, ratio, free_fraction")
        if self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise BadArgument("capacity_bytes", self.capacity_bytes, "at least 1")
        if self.ratio is not None and not 0 < self.ratio < float("inf"):
            raise BadArgument("ratio", self.ratio, "above 0, and finite")
        if self.free_fraction is not None and not 0 < self.free_fraction <= 1:
            raise BadArgument("free_fraction", self.free_fraction, "above 0, at most 1")


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can be had without swapping, within the limit of this process's control group.

    Args:
        root: what /proc and /sys are looked for in.

    Raises:
        OSError: the system does not tell.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not available:
        raise OSError("/proc/meminfo names no MemAvailable")
    group = root / "sys/fs/cgroup"
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        available.append(max(int(most) - int(used.read_text()), 0))
    return min(available)


def host_pages(
    size: HostSize, components: Sequence[Planes], free_bytes: Callable[[], int] = free_memory_bytes
) -> list[int]:
    """Host pages of each component: of all the same number for each page on the device, up to rounding.

    Raises:
        BadArgument: it is not even one page of each, or the system does not tell its free memory.
    """
    ratio = size.ratio
    if ratio is None:
        capacity = size.capacity_bytes if size.capacity_bytes is not None else _free_part(size, free_bytes)
        ratio = capacity / sum(planes.pages * planes.slot_bytes for planes in components)
    pages = [int(ratio * planes.pages) for planes in components]
    if min(pages) < 1:
        given = next(field.name for field in fields(size) if getattr(size, field.name) is not None)
        raise BadArgument(_OPTIONS[given], getattr(size, given), "room for a page of each component")
    return pages


def _free_part(size: HostSize, free_bytes: Callable[[], int]) -> int:
    assert size.free_fraction is not None
    try:
        return int(free_bytes() * size.free_fraction)
    except OSError as error:
        allowed = f"capacity_bytes or ratio instead: free memory is not known here ({error})"
        raise BadArgument("free_fraction", size.free_fraction, allowed) from error


# ---------------------------------------------------------------- where they lie


class _Area:
    """Host memory of one component, in one of the two layouts.

    Raises:
        BadArgument: there is no memory for so many pages.
    """

    def __init__(self, planes: Planes, pages: int, layout: Layout) -> None:
        self._planes = planes
        self._pages = pages
        self._page_first = layout == "page_first"
        self.memory = _aligned(pages * planes.slot_bytes)

    def slot(self, page: int) -> memoryview:
        """Header and payload of a page."""
        begin = page * self._planes.slot_bytes
        return self.memory.data[begin : begin + HEADER_BYTES + self._planes.payload_bytes]

    def rows(self, copier: Copier) -> list[Any]:
        """For each plane and layer its pages' bytes."""
        flat, at, rows = copier.table(self.memory), 0, []
        for tensor in self._planes.tensors:
            size = tensor.nbytes // tensor.shape[0] // tensor.shape[1]
            for _ in range(len(tensor)):
                first, stride = self._place(at, size)
                rows.append(copier.rows(flat.as_strided((self._pages, size), (stride, 1), first)))
                at += size
        return rows

    def _place(self, at: int, size: int) -> tuple[int, int]:
        """Where the first page's bytes [at, at + size) of the payload lie, and how far behind it the next page's."""
        return (HEADER_BYTES + at, self._planes.slot_bytes) if self._page_first else (self._pages * at, size)


def _aligned(size: int) -> NDArray[np.uint8]:
    """Memory that begins at a page of the system, as pinning and direct IO want it."""
    try:
        memory = np.empty(size + _MEMORY_PAGE, np.uint8)
    except (MemoryError, ValueError) as error:
        raise BadArgument("host_bytes", size, "memory that can be had") from error
    begin = -memory.ctypes.data % _MEMORY_PAGE
    return memory[begin : begin + size]


def _device_rows(planes: Planes, copier: Copier) -> list[Any]:
    """For each plane and layer its pages' bytes."""
    layers = (layer for tensor in planes.tensors for layer in tensor.detach())
    return [copier.rows(layer.reshape(planes.pages, -1).view(torch.uint8)) for layer in layers]


# ---------------------------------------------------------------- the pool


class HostPool:
    """Host pages of all components, and the copies to and from the device's. See `HostMemory`. One thread at a time.

    Args:
        components: in the order of the tree's rows, on one device.
        pages: host pages of each; see `host_pages`.
        layout: `page_first` (what storage needs), `layer_first`, or `auto`: page_first with storage, otherwise the one
            that copies faster in a short trial.
        storage: whether `slots` will be asked for.
        run: what runs the copies: given a function that copies one layer and then asks for its next turn, to be called
            once, from any thread, such as an executor's `submit`. None: a thread of its own.
        clock: of the trial, in seconds.

    Raises:
        BadArgument: components and pages do not fit each other or the layout, or there is no memory for so many.
    """

    def __init__(
        self,
        components: Sequence[Planes],
        pages: Sequence[int],
        layout: Layout = "auto",
        storage: bool = False,
        run: Run | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _check(components, pages, layout, storage)
        self._components = tuple(components)
        self._pages = tuple(pages)
        device = self._components[0].device
        self._copier: Copier = CudaCopier(device) if device.type == "cuda" else CpuCopier()
        if layout == "auto":
            layout = "page_first" if storage else _faster_layout(self._components[0], self._copier, clock)
        self.layout: Layout = layout
        self._areas = [_Area(planes, count, layout) for planes, count in zip(components, pages, strict=True)]
        self._device_rows = [_device_rows(planes, self._copier) for planes in self._components]
        self._host_rows = [area.rows(self._copier) for area in self._areas]
        self._ups: deque[Transfer] = deque()
        self._downs: deque[Transfer] = deque()
        self._working = self._closed = False
        self._lock = threading.Lock()  # of the four above
        self._turn = threading.RLock()  # while a layer is copied; a `run` that calls at once comes back to it
        self._executor = None
        self._work = self._work_once
        if run is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="mainstem-copy")
            run, self._work = self._executor.submit, self._work_on
        self._run = run

    @property
    def pages(self) -> int:
        """Host pages of component 0."""
        return self._pages[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Host pages of each component."""
        return self._pages

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page's content, of component 0."""
        return self._components[0].payload_bytes

    @property
    def content(self) -> str:
        """Name of the payload's format of component 0, part of what stored pages are known by."""
        return self._components[0].content

    def down(self, moves: Sequence[Move]) -> Ticket:
        """Starts copying device pages to host pages, behind what the caller's stream has computed so far.

        Raises:
            BadArgument: a component or page that does not exist; nothing is copied.
        """
        self._check_moves(moves, [planes.pages for planes in self._components], self._pages)
        return self._start(self._downs, moves, self._host_rows, self._device_rows)

    def up(self, moves: Sequence[Move]) -> LayerTicket:
        """Starts copying host pages to device pages, one layer after the other, before all that goes down.

        Raises:
            BadArgument: a component or page that does not exist; nothing is copied.
        """
        self._check_moves(moves, self._pages, [planes.pages for planes in self._components])
        return self._start(self._ups, moves, self._device_rows, self._host_rows)

    def slots(self, pages: Sequence[int]) -> list[memoryview]:
        """Slots of component 0, header and payload, where they lie: what is written there is in the pool.

        Raises:
            BadArgument: the layout has no slots, or a page that does not exist.
        """
        self._require_slots()
        for page in pages:
            if not 0 <= page < self.pages:
                raise BadArgument("page", page, f"in [0, {self.pages})")
        return [self._areas[0].slot(page) for page in pages]

    def regions(self) -> list[memoryview]:
        """The memory that the slots lie in.

        Raises:
            BadArgument: the layout has no slots.
        """
        self._require_slots()
        return [self._areas[0].memory.data]

    def close(self) -> None:
        """Fails what is under way, as soon as the layer that is being copied is there; a second call does nothing."""
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
            raise BadArgument("layout", self.layout, "page_first, for storage to see slots")

    def _check_moves(self, moves: Sequence[Move], sources: Sequence[int], targets: Sequence[int]) -> None:
        for component, source, target in moves:
            if not 0 <= component < len(self._components):
                raise BadArgument("component", component, f"in [0, {len(self._components)})")
            if len(source) != len(target):
                raise BadArgument("target", len(target), f"a page for each of the {len(source)} of source")
            for name, ids, count in (("source", source, sources), ("target", target, targets)):
                if len(ids) and not 0 <= ids.min() <= ids.max() < count[component]:
                    raise BadArgument(name, ids, f"pages in [0, {count[component]})")

    def _steps(self, moves: Sequence[Move], to: list[list[Any]], from_: list[list[Any]]) -> list[Step]:
        by_layer: dict[int, list[Copy]] = {}
        for component, source, target in moves:
            if not len(source):
                continue
            planes = self._components[component]
            sources, targets = self._copier.ids(source), self._copier.ids(target)
            layers = list(planes.model_layers) * len(planes.tensors)
            for layer, written, read in zip(layers, to[component], from_[component], strict=True):
                by_layer.setdefault(layer, []).append(Copy(written, targets, read, sources))
        return [Step(layer, by_layer[layer]) for layer in sorted(by_layer)]

    def _start(
        self, queue: deque[Transfer], moves: Sequence[Move], to: list[list[Any]], from_: list[list[Any]]
    ) -> Transfer:
        try:
            steps = self._steps(moves, to, from_)
            transfer = Transfer(steps, self._copier)
        except ERRORS as error:  # such as no memory for the ids on a device
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
        """The turn of a thread of its own: all there is to do."""
        while self._copy_layer():
            pass

    def _work_once(self) -> None:
        """A turn of a `run` that was given: one layer, and another turn asked for while there is more to do."""
        if self._copy_layer():
            self._run(self._work_once)

    def _copy_layer(self) -> bool:
        """Copies one layer of the most urgent transfer; whether there is more to do."""
        with self._turn:
            if self._closed:
                return False
            with self._lock:
                queue = self._ups or self._downs
            try:
                queue[0].advance()
            except BaseException:
                log.exception("a copy was broken off")
                if self._settle(queue):
                    self._run(self._work)  # this turn ends here, the other transfers do not
                raise
            return self._settle(queue)

    def _settle(self, queue: deque[Transfer]) -> bool:
        with self._lock:
            if queue[0].ended:
                queue.popleft()
            self._working = bool(self._ups or self._downs)
            return self._working


def _check(components: Sequence[Planes], pages: Sequence[int], layout: Layout, storage: bool) -> None:
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


def _faster_layout(planes: Planes, copier: Copier, clock: Callable[[], float]) -> Layout:
    """Copies scattered pages down, not up: a trial must not write to the device. The same bytes move either way."""
    count = min(planes.pages, max(_TRIAL_BYTES // planes.slot_bytes, 1))
    ids = np.concatenate([np.arange(0, count, 2), np.arange(1, count, 2)]).astype(np.int32)
    pages = copier.ids(ids)
    seconds: dict[Layout, float] = {}
    layouts: tuple[Layout, ...] = ("page_first", "layer_first")
    for layout in layouts:
        area = _Area(planes, count, layout)
        rows = zip(area.rows(copier), _device_rows(planes, copier), strict=True)
        copies = [Copy(host, pages, device, pages) for host, device in rows]
        copier.finish(copier.copy(copies, copier.fence()))  # the first touch of new memory is slow
        begin = clock()
        copier.finish(copier.copy(copies, copier.fence()))
        seconds[layout] = clock() - begin
    return min(layouts, key=lambda layout: seconds[layout])
