"""The best hit rate that any policy could reach on a trace: Belady's rule, restricted to leaves.

Evicts the block whose next use is furthest in the future. This is exact for blocks of one size: no order of eviction
has more hits at the same capacity. It knows the future, so it is a bound for policies and not itself a policy. The loop
is in core/csrc/replay/optimum.cpp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mainstem import _core
from mainstem.errors import check_integer
from mainstem.replay.simulate.first_token import Flops
from mainstem.replay.simulate.rows import Row, Tally, TierCounts
from mainstem.replay.trace import Trace
from mainstem.settings.replay import ONE_CACHE, Setup

NAME = "opt"
"""Its name among the policies."""


class Optimum:
    """The offline optimum of a trace, at any number of capacities. `replay` may be called from several threads.

    Takes 8 bytes per block access besides the trace, because it stores when each block is used next.

    Args:
        trace: read once here, and once for each capacity.

    >>> from mainstem.replay.trace import Batch
    >>> trace = Trace.of(Batch.of([[1], [2], [3], [1], [2]]))
    >>> Optimum(trace).replay(capacity_blocks=2).block_hits
    2
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._core = _core.Optimum()
        for batch in trace.batches():
            self._core.add(batch.offsets, batch.blocks)
        self._core.finish()

    def hit_blocks(self, capacity_blocks: int) -> NDArray[np.int64]:
        """Returns [requests] blocks that each request hits.

        Raises:
            BadArgument: the capacity is below 1.
        """
        return self._run(capacity_blocks)[0].astype(np.int64)

    def replay(self, capacity_blocks: int, *, setup: Setup = ONE_CACHE, flops: Flops | None = None) -> Row:
        """Returns the row of this capacity. Of `setup`, it has the rate of prefill.

        Raises:
            BadArgument: the capacity is below 1.
        """
        hits, evicted = self._run(capacity_blocks)
        tally = Tally(self._trace, [("device", capacity_blocks)], setup, flops)
        at = 0
        for batch in self._trace.batches():
            tally.add(batch, hits[at : at + len(batch), None])
            at += len(batch)
        written = int(self._trace.whole.offsets[-1]) - int(hits.sum())
        return tally.row(NAME, [TierCounts(written=written, evicted=evicted)])

    def _run(self, capacity_blocks: int) -> tuple[NDArray[np.int32], int]:
        return self._core.run(check_integer("capacity_blocks", capacity_blocks, 1, 2**62))
