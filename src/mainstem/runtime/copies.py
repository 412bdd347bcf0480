"""Copies of rows of bytes between host and device, a layer of the model at a time.

    Transfer   | layer 0: copies | layer 1: copies | ...      whoever advances it begins one layer
    mark                         0                 1          stands for all copies begun up to there

On the CPU the thread that advances a transfer copies, so a mark says nothing. On a GPU it only begins the copies, on a
stream of their own, and a mark is an event: a reader's stream waits for it, its thread does not.

Knows rows and ids; knows no layouts, no components, and not who owns a page.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem._core import copy_rows
from mainstem.errors import BadArgument, MainstemError

ERRORS = (MainstemError, RuntimeError, ValueError, LookupError, OSError, MemoryError)  # the world's, not our bugs


class Copy(NamedTuple):
    """Row sources[i] of `source` goes to row targets[i] of `target`; all four as the copier made them."""

    target: Any
    targets: Any
    source: Any
    sources: Any


class Copier(Protocol):
    """Copies rows between one kind of device and the host."""

    def table(self, memory: NDArray[np.uint8]) -> torch.Tensor:
        """Host memory as a flat tensor of bytes that rows can be views of; keeps it alive.

        Raises:
            BadArgument: the device cannot be given so much of it.
        """

    def rows(self, rows: torch.Tensor) -> Any:
        """Rows [n, bytes] of a table, or of the device, for `Copy`."""

    def ids(self, rows: NDArray[np.int32]) -> Any:
        """Numbers of rows, for `Copy`."""

    def fence(self) -> Any:
        """Stands for what the caller has begun on the device."""

    def copy(self, copies: Sequence[Copy], fence: Any) -> Any:
        """Begins copies, behind a fence; returns their mark. When it raises, none of them goes on."""

    def passed(self, mark: Any) -> bool:
        """Whether the copies up to a mark have ended; does not block."""

    def hold(self, mark: Any) -> None:
        """What the caller begins on the device from now on comes behind a mark."""

    def finish(self, mark: Any) -> None:
        """Blocks until the copies up to a mark have ended."""

    def drain(self) -> None:
        """Blocks until all copies that were begun have ended."""


class CpuCopier:
    """Copies at once, without the GIL. Its fences and marks are None."""

    def table(self, memory: NDArray[np.uint8]) -> torch.Tensor:
        """See `Copier.table`."""
        return torch.from_numpy(memory)

    def rows(self, rows: torch.Tensor) -> Any:
        """An array of NumPy."""
        return rows.numpy()

    def ids(self, rows: NDArray[np.int32]) -> Any:
        """A copy: the caller may go on to use its own."""
        return np.array(rows, dtype=np.int32)

    def fence(self) -> None:
        """Nothing is under way when a call returns."""

    def copy(self, copies: Sequence[Copy], fence: Any) -> None:
        """See `Copier.copy`."""
        for copy in copies:
            copy_rows(*copy)

    def passed(self, mark: Any) -> bool:
        """Always."""
        return True

    def hold(self, mark: Any) -> None:
        """They have ended."""

    def finish(self, mark: Any) -> None:
        """They have ended."""

    def drain(self) -> None:
        """They have ended."""


class CudaCopier:
    """Begins copies on a stream of its own; fences and marks are events.

    The device itself gathers from pinned host memory and scatters to it, so that scattered pages cost no copy on the
    host and no call a page.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def table(self, memory: NDArray[np.uint8]) -> torch.Tensor:
        """The memory pinned, as a tensor of the device."""
        return torch.as_tensor(_Mapped(memory, self._device), device=self._device)

    def rows(self, rows: torch.Tensor) -> Any:
        """In words of 8 bytes where they fit: a GPU moves a word a thread."""
        fits = not any(n % 8 for n in (rows.shape[1], rows.stride(0), rows.storage_offset(), rows.data_ptr()))
        return rows.view(torch.int64) if fits else rows

    def ids(self, rows: NDArray[np.int32]) -> Any:
        """A tensor of the device. It is pinned on the way, since a copy of other memory waits for the whole stream."""
        pinned = torch.from_numpy(rows.astype(np.int64)).pin_memory()
        with torch.cuda.stream(self._stream):  # so its memory is used again only behind this stream's copies
            return pinned.to(self._device, non_blocking=True)

    def fence(self) -> Any:
        """An event of the caller's stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, copies: Sequence[Copy], fence: Any) -> Any:
        """See `Copier.copy`."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(fence)
            try:
                for target, targets, source, sources in copies:
                    target.index_copy_(0, targets, source.index_select(0, sources))
            except RuntimeError:
                self.drain()
                raise
            return self._stream.record_event()

    def passed(self, mark: Any) -> bool:
        """See `Copier.passed`."""
        return bool(mark.query())

    def hold(self, mark: Any) -> None:
        """The caller's stream waits, the caller does not."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: Any) -> None:
        """See `Copier.finish`."""
        mark.synchronize()

    def drain(self) -> None:
        """See `Copier.drain`."""
        self._stream.synchronize()


class _Mapped:
    """Host memory that is pinned while this lives, as the device sees it: at the same address.

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


class Step(NamedTuple):
    """What of a transfer belongs to one layer of the model."""

    layer: int
    copies: list[Copy]


class Transfer:
    """See `mainstem.tiers.transfer.LayerTicket`. One thread at a time advances it; any may ask and wait.

    Args:
        steps: by rising layers.
        copier: that made their copies.
    """

    def __init__(self, steps: Sequence[Step], copier: Copier) -> None:
        self._steps = steps
        self._copier = copier
        self._fence = copier.fence()
        self._layers = [step.layer for step in steps]
        self._marks: list[Any] = []  # one for each step that was begun
        self._ended = not steps
        self._error: Exception | None = None
        self._changed = threading.Condition()

    @property
    def error(self) -> Exception | None:
        """See `Ticket.error`."""
        return self._error

    @property
    def ended(self) -> bool:
        """Whether nothing more will be begun; what was begun may still be under way on the device."""
        return self._ended

    def done(self) -> bool:
        """See `Ticket.done`."""
        return self._ended and self._passed_marks(self._copier.passed)

    def wait(self) -> None:
        """See `Ticket.wait`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
        self._passed_marks(self._copier.finish)

    def wait_layer(self, layer: int) -> None:
        """See `LayerTicket.wait_layer`."""
        due = bisect_right(self._layers, layer)
        if len(self._marks) < due:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or len(self._marks) >= due)
        if 0 < due <= len(self._marks):
            self._copier.hold(self._marks[due - 1])

    def advance(self) -> None:
        """Begins the copies of the next layer. Copies that fail end the transfer."""
        try:
            mark = self._copier.copy(self._steps[len(self._marks)].copies, self._fence)
        except ERRORS as error:
            self.end(error)
        except BaseException:
            self.end(RuntimeError("a copy was broken off; whoever advanced it knows why"))
            raise
        else:
            with self._changed:
                self._marks.append(mark)
                self._ended = len(self._marks) == len(self._steps)
                self._changed.notify_all()

    def end(self, error: Exception) -> None:
        """Fails it, and lets go whoever waits."""
        with self._changed:
            self._error = error
            self._ended = True
            self._changed.notify_all()

    def _passed_marks(self, look: Callable[[Any], bool | None]) -> bool:
        """Looks at the last mark. A device that fails there touches memory no more, and has failed the transfer."""
        try:
            return not self._marks or look(self._marks[-1]) is not False
        except RuntimeError as error:
            self._error = self._error or error
            return True
