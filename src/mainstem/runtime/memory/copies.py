"""Copies of rows of bytes between host and device, one layer of the model at a time.

    Transfer   | layer 0: copies | layer 1: copies | ...      `advance` begins the next layer
    mark                         0                 1          covers all copies begun up to there

On the CPU, the thread that advances a transfer copies, and marks are empty. On a GPU, it only begins the copies, on a
stream of their own, and a mark is an event: the reader's stream waits for it, the reader's thread does not.

This module knows rows and ids. It does not know layouts, components or the owners of pages.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem._core import copy_rows
from mainstem.errors import BadArgument, MainstemError

log = logging.getLogger(__name__)
ERRORS = (MainstemError, RuntimeError, ValueError, LookupError, OSError, MemoryError)  # from outside, not our bugs


class Copy(NamedTuple):
    """Copies row sources[i] of `source` to row targets[i] of `target`; the copier made all four."""

    target: Any
    targets: Any
    source: Any
    sources: Any


class Copier:
    """Copies rows between a kind of device and the host: here on the CPU, before the call returns, without the GIL."""

    def table(self, memory: NDArray[np.uint8]) -> torch.Tensor:
        """Returns host memory as a flat tensor of bytes, for views of rows; the tensor keeps the memory alive.

        Raises:
            BadArgument: the memory cannot be made accessible to the device.
        """
        return torch.from_numpy(memory)

    def rows(self, rows: torch.Tensor) -> Any:
        """Returns rows [n, bytes] of a table, or of the device, for `Copy`."""
        return rows.numpy()

    def ids(self, rows: NDArray[np.int32]) -> Any:
        """Returns row indices, for `Copy`; the caller may change its array."""
        return np.array(rows, dtype=np.int32)

    def fence(self) -> Any:
        """Returns a fence: it covers the work that the caller has begun on the device."""

    def copy(self, copies: Sequence[Copy], fence: Any) -> Any:
        """Begins copies after a fence, and returns their mark. If it raises, none of them is under way."""
        for copy in copies:
            copy_rows(*copy)

    def passed(self, mark: Any) -> bool:
        """Returns whether the copies up to a mark have ended; does not block."""
        return True

    def hold(self, mark: Any) -> None:
        """Orders the caller's later work on the device after a mark; does not block."""

    def finish(self, mark: Any) -> None:
        """Blocks until the copies up to a mark have ended."""

    def drain(self) -> None:
        """Blocks until all copies that were begun have ended."""


class CudaCopier(Copier):
    """Begins copies on a stream of its own; fences and marks are events.

    The device gathers from pinned host memory and scatters to it, so scattered pages need no extra copy on the host and
    no call per page: by a kernel in Triton, which leaves the device to others, or by PyTorch's without Triton.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copy_rows = _device_copy(device)

    def table(self, memory: NDArray[np.uint8]) -> torch.Tensor:
        if not memory.nbytes:  # of pages without content; nothing can be pinned
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.as_tensor(_Mapped(memory, self._device), device=self._device)

    def rows(self, rows: torch.Tensor) -> Any:
        """Returns rows of 8-byte words if alignment permits: each GPU thread moves one word."""
        fits = not any(n % 8 for n in (rows.shape[1], rows.stride(0), rows.storage_offset(), rows.data_ptr()))
        return rows.view(torch.int64) if fits else rows

    def ids(self, rows: NDArray[np.int32]) -> Any:
        """Returns a tensor of the device, copied from pinned memory: other copies would wait for the whole stream."""
        pinned = torch.from_numpy(rows.astype(np.int64)).pin_memory()
        with torch.cuda.stream(self._stream):  # so that its memory is reused only after this stream's copies
            return pinned.to(self._device, non_blocking=True)

    def fence(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, copies: Sequence[Copy], fence: Any) -> Any:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(fence)
            try:
                for copy in copies:
                    self._copy_rows(*copy)
            except Exception:
                self.drain()
                raise
            return self._stream.record_event()

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def hold(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: Any) -> None:
        mark.synchronize()

    def drain(self) -> None:
        self._stream.synchronize()


def _device_copy(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Returns what copies rows on a device, tried with one row; its arguments are those of `Copy`."""
    try:
        from mainstem.runtime.kernels import triton_copies

        row, first = (
            torch.ones(2, 8, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        triton_copies.copy_rows(row[:1], first, row[1:], first)
    except Exception as error:  # noqa: BLE001  # Triton may be absent, or its compiler
        log.warning("pages are copied by PyTorch, and layers wait for them: %s: %s", type(error).__name__, error)
        return _copy_by_torch
    return triton_copies.copy_rows


def _copy_by_torch(target: torch.Tensor, targets: torch.Tensor, source: torch.Tensor, sources: torch.Tensor) -> None:
    target.index_copy_(0, targets, source.index_select(0, sources))


class _Mapped:
    """Host memory, pinned while this object lives. The device sees it at the same address.

    The CUDA Array Interface, version 3: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html.
    Unified addressing: CUDA C++ Programming Guide, "Unified Virtual Address Space".
    """

    _PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped

    def __init__(self, memory: NDArray[np.uint8], device: torch.device) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = memory.ctypes.data
        with torch.cuda.device(device):
            code = int(cudart.cudaHostRegister(address, memory.nbytes, self._PORTABLE_AND_MAPPED))
        if code:
            raise BadArgument("host_bytes", memory.nbytes, f"memory that can be pinned (CUDA error {code})")
        weakref.finalize(self, lambda pinned: cudart.cudaHostUnregister(pinned.ctypes.data), memory)
        shape, data = memory.shape, (address, False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": data, "version": 3}


class LayerCopies(NamedTuple):
    """The part of a transfer that belongs to one layer of the model."""

    layer: int
    copies: list[Copy]


class Transfer:
    """A `mainstem.tiers.host.transfer.LayerTicket`. One thread at a time advances it; any thread may query and wait.

    Args:
        steps: in ascending order of layers.
        copier: made the copies of the steps.
        clock: in seconds.

    Attributes:
        took_s: see `LayerTicket.took_s`; None where copies go on after the call that begins them.
    """

    def __init__(
        self, steps: Sequence[LayerCopies], copier: Copier, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.took_s: float | None = None
        self._clock, self._began_s = clock, 0.0
        self._steps = steps
        self._copier = copier
        self._fence = copier.fence()
        self._layers = [step.layer for step in steps]
        self._marks: list[Any] = []  # one for each step that has begun
        self._ended = not steps
        self._error: Exception | None = None
        self._changed = threading.Condition()

    @property
    def error(self) -> Exception | None:
        return self._error

    @property
    def ended(self) -> bool:
        """Whether no more copies will begin; earlier ones may still be under way on the device."""
        return self._ended

    def done(self) -> bool:
        return self._ended and self._passed_marks(self._copier.passed)

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
        self._passed_marks(self._copier.finish)

    def wait_layer(self, layer: int) -> None:
        due = bisect_right(self._layers, layer)
        if len(self._marks) < due:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or len(self._marks) >= due)
        if 0 < due <= len(self._marks):
            self._copier.hold(self._marks[due - 1])

    def advance(self) -> None:
        """Begins the copies of the next layer. A failure ends the transfer."""
        self._began_s = self._began_s if self._marks else self._clock()
        try:
            mark = self._copier.copy(self._steps[len(self._marks)].copies, self._fence)
        except ERRORS as error:
            self.end(error)
        except BaseException:
            self.end(RuntimeError("a copy was interrupted; its thread has the reason"))
            raise
        else:
            with self._changed:
                self._marks.append(mark)
                self.took_s = self._clock() - self._began_s if mark is None else None
                self._ended = len(self._marks) == len(self._steps)
                self._changed.notify_all()

    def end(self, error: Exception) -> None:
        """Fails the transfer, and wakes all threads that wait for it."""
        with self._changed:
            self._error = error
            self._ended = True
            self._changed.notify_all()

    def _passed_marks(self, check: Callable[[Any], bool | None]) -> bool:
        """Checks the last mark. A device that fails there no longer accesses memory, and the transfer has failed."""
        try:
            return not self._marks or check(self._marks[-1]) is not False
        except RuntimeError as error:
            self._error = self._error or error
            return True
