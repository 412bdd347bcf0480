"""Random batches of requests that share prefixes, for tests of attention."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from mainstem.cache.components import Attended, Chunked, Window
from mainstem.runtime.attention.paged import FULL, Extent
from mainstem.runtime.memory.kv import KVPool, KVShape

COMPONENTS: tuple[Attended, ...] = (FULL, FULL, FULL, Window(3), Window(7), Window(19), Chunked(5), Chunked(16))
PAGES = 160


@dataclass(frozen=True)
class Batch:
    """New tokens of some requests, in a pool that is nan wherever none of them has written."""

    pool: KVPool
    extents: list[Extent]
    component: Attended
    fold_pages: int  # shared pages that are worth folding
    span_positions: int  # that are worth a program of a GPU
    tile_rows: int

    @property
    def tokens(self) -> int:
        """All new tokens."""
        return sum(extent.tokens for extent in self.extents)

    def written(self, extent: Extent) -> Extent:
        """The extent, whose pages before all that its queries see were freed."""
        gone = self.component.seen_from(extent.start) // self.pool.page_size
        table = extent.page_table.copy()
        table[:gone] = -1
        return extent._replace(page_table=table)

    def on(self, device: str, dtype: torch.dtype | None = None) -> Batch:
        """The batch over a copy of the pool on a device, of its own dtype or another one."""
        pool = self.pool
        copy = KVPool(pool.shape, pool.pages, pool.page_size, dtype or pool.dtype, device)
        for plane, given in zip(copy.planes, pool.planes, strict=True):
            plane.copy_(given)
        return replace(self, pool=copy)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Makes small things as worth it as large ones are."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mainstem.runtime.attention.folding.SPAN", self.fold_pages * self.pool.page_size)
            patch.setattr("mainstem.runtime.attention.few_rows.SHARE_BYTES", 1)
            patch.setattr("mainstem.runtime.attention.paged.TILE_ROWS", self.tile_rows)
            if "mainstem.runtime.attention.triton_attention" in sys.modules:  # where Triton is installed
                worth = {"FOLD_POSITIONS": self.fold_pages * self.pool.page_size, "BEGIN_STEP": self.fold_pages}
                worth["WHOLE_PROMPT"] = self.fold_pages * 3
                parts = {"LEAST_SPAN": self.span_positions, "PROGRAMS": 8, "BLOCK_BYTES": 256}
                for name, size in (worth | parts).items():
                    patch.setattr(f"mainstem.runtime.attention.triton_attention.{name}", size)
            yield


@st.composite
def batches(draw: st.DrawFn, shape: KVShape, dtype: torch.dtype = torch.float32, regions: bool = True) -> Batch:
    """A batch of up to seven requests: each begins with whole pages of an earlier one, and has at least one new token.

    Args:
        draw: of hypothesis.
        shape: of the pool.
        dtype: of the pool.
        regions: whether requests may have regions that are attended both ways.
    """
    size = draw(st.sampled_from([1, 2, 4]))
    pool = KVPool(shape, PAGES, size, dtype)
    scattered = draw(st.booleans())
    ids = np.random.default_rng(draw(st.integers(0, 2**20))).permutation(PAGES) if scattered else np.arange(PAGES)
    extents: list[Extent] = []
    taken = 0
    for _ in range(draw(st.integers(1, 7))):
        before = draw(st.sampled_from(extents)) if extents else None
        shared = draw(st.integers(0, before.start // size)) if before is not None else 0
        start = shared * size + draw(st.one_of(st.just(0), st.integers(0, 12)))
        tokens = draw(st.one_of(st.just(1), st.integers(1, 14)))
        own = -(-(start + tokens) // size) - shared
        kept = before.page_table[:shared] if before is not None else np.empty(0, dtype=np.int32)
        table = np.concatenate([kept, ids[taken : taken + own]]).astype(np.int32)
        taken += own
        inside = _regions(draw, start + tokens) if regions and draw(st.booleans()) else ()
        extents.append(Extent(tokens, start, table, inside))
    _write(pool, extents)
    component = draw(st.sampled_from(COMPONENTS))
    worth = draw(st.sampled_from([(1, 1), (1, 6), (3, 4), (2, 1000), (1000, 3)]))
    return Batch(pool, draw(st.permutations(extents)), component, *worth, draw(st.sampled_from([2, 5, 128])))


def _regions(draw: st.DrawFn, end: int) -> tuple[tuple[int, int], ...]:
    bounds = sorted(draw(st.sets(st.integers(0, end + 3), max_size=6)))
    return tuple((low, high) for low, high in zip(bounds[::2], bounds[1::2], strict=False))


def _write(pool: KVPool, extents: list[Extent]) -> None:
    """Fills what the requests have written, and makes the rest nan."""
    for plane in pool.planes:
        known: NDArray[np.int64] = np.unique(np.concatenate([pool.slots(e.page_table, 0, e.end) for e in extents]))
        flat = plane.flatten(1, 2)
        drawn = torch.randn(flat[:, : len(known)].shape, generator=torch.Generator().manual_seed(len(known)))
        plane.fill_(math.nan)
        flat[:, torch.from_numpy(known)] = drawn.to(plane.dtype)
