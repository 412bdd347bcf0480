"""The kernel that copies rows on a GPU, interpreted on a CPU: it copies what is asked for, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import DEVICE

triton_copies = pytest.importorskip("mainstem.runtime.kernels.triton_copies", reason="Triton is not installed")

ROWS = 9


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, ROWS),
    st.sampled_from([torch.uint8, torch.int64]),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    st.integers(1, 5),
    st.integers(0, 2**20),
)
def test_it_copies_the_rows_that_are_asked_for(
    words: int, count: int, dtype: torch.dtype, gaps: tuple[int, int], programs: int, seed: int
) -> None:
    """Rows have gaps between them, as pages have that hold all layers; a row is longer than what is copied at once."""
    chance = np.random.default_rng(seed)
    source, target = (
        torch.from_numpy(chance.integers(0, 100, (ROWS, words + gap))).to(dtype).to(DEVICE) for gap in gaps
    )
    targets = torch.from_numpy(chance.permutation(ROWS)[:count])
    sources = torch.from_numpy(chance.integers(0, ROWS, count))
    expected = target.clone()
    expected[targets, :words] = source[sources, :words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_copies, "PROGRAMS", programs)
        patch.setattr(triton_copies, "WORDS", 16)
        triton_copies.copy_rows(target[:, :words], targets.to(DEVICE), source[:, :words], sources.to(DEVICE))
    assert torch.equal(target, expected)
