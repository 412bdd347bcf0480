"""Decode steps of a GPU, whose launches are recorded once and then repeated as one (CUDA graphs).

A step of one token a request launches hundreds of short kernels, and the CPU takes longer to launch them than the GPU
to compute them. A recorded step is launched at once:

    first     computed as any other, over memory that has room for other requests; then recorded
    second    repeated, and compared with what is computed as any other
    further   tables, tokens and positions are copied to that memory, and the step is repeated

A recorded step is of some number of rows, and computes fewer requests, too: the rows that are left write no keys. A
model whose steps cannot be recorded, or whose repeated step differs, computes as before; the log says so once.

CUDA C++ Programming Guide, "CUDA Graphs"; https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.runtime.attention.paged import Attention, BatchPlan, spread_error

Plans: TypeAlias = Mapping[str, BatchPlan]
"""Of one forward, by pool."""
Forward: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Plans], torch.Tensor]
"""Computes the logits [rows, vocab] of token ids and positions, int64 [1, rows]."""
Recorder: TypeAlias = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], object], torch.Tensor]]
"""Records what is launched by a function, which it calls: returns what repeats it, and the tensor of its results."""

MOST_ROWS = 256
# Recorded steps that are kept. Each holds its logits and its tables; what it computes between shares memory.
MOST_STEPS = 48
# Recordings without enough memory, after which no more is tried.
MOST_FAILURES = 3

log = logging.getLogger(__name__)


def padded_rows(requests: int) -> int:
    """Returns the rows of the recorded step for so many requests: 1, 2, 4, 8, 16, 24, 32, ..."""
    return 1 << (requests - 1).bit_length() if requests <= 8 else -(-requests // 8) * 8


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collects no garbage inside the `with` block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CudaRecorder:
    """Records CUDA graphs, which share their memory: only one of them may be under way.

    Args:
        device: on which they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._random = torch.cuda.default_generators[self._stream.device.index]
        self._pool: Any = None
        self._first: torch.cuda.CUDAGraph | None = None  # keeps the memory that they share
        self._failed: list[torch.cuda.CUDAGraph] = []

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        """Records on a stream of its own. Nothing is computed; the copies of other threads go on."""
        graph, random = torch.cuda.CUDAGraph(), self._random.clone_state()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            with torch.cuda.stream(self._stream), _no_collection():  # which may call the device
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    results = work()
                finally:
                    graph.capture_end()
        except BaseException:
            self._leave(graph, random)
            raise
        self._first = self._first or graph
        return graph.replay, results

    def _leave(self, failed: torch.cuda.CUDAGraph, random: torch.Generator) -> None:
        """Undoes what PyTorch leaves of a recording that failed (2.11: it ends the capture, and then raises).

        The device's generator would refuse random numbers to everybody, and its allocator would take the recording for
        one that goes on: it would free no cached memory any more.
        """
        self._random.graphsafe_set_state(random)
        with contextlib.suppress(Exception):  # the capture had not begun, or PyTorch has ended it
            torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)
            torch._C._cuda_releasePool(self._stream.device.index, self._pool)
        self._failed.append(failed)  # what allocates pinned memory may still ask it
        self._pool = self._first = None


class StepGraphs:
    """The recorded steps of a model. One thread at a time.

    Args:
        forward: of the model.
        attention: its kernel, which replans.
        recorder: of launches.
        device: of the model.
        limit: how far the logits of a repeated step may be from those of the same step computed as any other, relative
            to their spread.
    """

    def __init__(
        self, forward: Forward, attention: Attention, recorder: Recorder, device: torch.device, limit: float
    ) -> None:
        assert attention.repeats
        self._forward, self._attention, self._recorder = forward, attention, recorder
        self._device, self._limit = device, limit
        self._steps: OrderedDict[_Step, None] = OrderedDict()  # the one that was used last is last
        self._out_of_memory = 0
        self.refused: str | None = None
        """Why steps are no longer recorded."""

    def takes(self, requests: int) -> bool:
        """Whether `compute` takes a step of so many requests."""
        return self.refused is None and requests <= MOST_ROWS

    def compute(self, tokens: NDArray[np.int32], positions: NDArray[np.int64], plans: Plans) -> torch.Tensor:
        """Computes one step, and writes its keys and values.

        Args:
            tokens: [requests], one of each.
            positions: of the tokens.
            plans: with `repeated` rows; see `padded_rows`.

        Returns:
            [requests, vocab_size], which the next call overwrites.
        """
        rows = padded_rows(len(tokens))
        for step in reversed(self._steps):
            if step.rows == rows and step.fill(tokens, positions, plans):
                self._steps.move_to_end(step)
                return (step.repeat() if step.is_checked else self._check(step, len(tokens)))[: len(tokens)]
        step = _Step(rows, plans, self._attention, self._device)
        step.put(tokens, positions)
        logits = step.compute(self._forward)
        self._record(step)
        return logits[: len(tokens)]

    def _record(self, step: _Step) -> None:
        try:
            step.record(self._forward, self._recorder)
        except torch.OutOfMemoryError as error:
            self._out_of_memory += 1
            if self._out_of_memory >= MOST_FAILURES:
                self._refuse(f"there is no memory to record them: {error}")
        except Exception as error:  # noqa: BLE001  # models and drivers raise all kinds
            self._refuse(f"its launches cannot be recorded: {type(error).__name__}: {error}")
        else:
            self._steps[step] = None
            if len(self._steps) > MOST_STEPS:
                self._steps.popitem(last=False)

    def _check(self, step: _Step, requests: int) -> torch.Tensor:
        """Returns the logits of a step that was recorded with other requests, and whose keys are those computed."""
        repeated = step.repeat().clone()
        logits = step.compute(self._forward)  # after it, so that these keys and values are kept
        wanted, found = logits[:requests].float(), repeated[:requests].float()
        error = spread_error(found, wanted, wanted)
        if error <= self._limit:
            step.is_checked = True
        else:
            self._refuse(f"repeated, its logits differ by {error:.2g} of their spread")
        return logits

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._steps.clear()
        log.warning("decode steps are not CUDA graphs: %s", why)


class _Step:
    """A step of some rows, over memory of its own for tokens, positions and tables.

    Args:
        rows: at most so many requests.
        plans: of the step for which it is made.
        attention: see `StepGraphs`.
        device: likewise.

    Attributes:
        is_checked: whether it has been repeated for other requests, and gave the logits that it should.
    """

    def __init__(self, rows: int, plans: Plans, attention: Attention, device: torch.device) -> None:
        self.rows, self.is_checked = rows, False
        self._plans, self._attention = plans, attention
        self._inputs = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._replay: Callable[[], object] | None = None
        self._logits: torch.Tensor | Any = None

    def fill(self, tokens: NDArray[np.int32], positions: NDArray[np.int64], plans: Plans) -> bool:
        """Takes other requests; returns False if they do not fit."""
        if not all(self._attention.replan(own, plans[name]) for name, own in self._plans.items()):
            return False
        self.put(tokens, positions)
        return True

    def put(self, tokens: NDArray[np.int32], positions: NDArray[np.int64]) -> None:
        """Copies tokens and positions to the device; rows that are left have token 0 at position 0."""
        given = torch.zeros(2, self.rows, dtype=torch.int64, pin_memory=self._inputs.is_cuda)
        given.numpy()[:, : len(tokens)] = tokens, positions
        self._inputs.copy_(given, non_blocking=True)

    def compute(self, forward: Forward) -> torch.Tensor:
        """Computes the step as any other forward."""
        return forward(self._inputs[:1], self._inputs[1:], self._plans)

    def record(self, forward: Forward, recorder: Recorder) -> None:
        """Records the step."""
        self._replay, self._logits = recorder(lambda: self.compute(forward))

    def repeat(self) -> torch.Tensor:
        """Repeats the recorded step, and returns its logits."""
        assert self._replay is not None
        self._replay()
        logits: torch.Tensor = self._logits
        return logits
