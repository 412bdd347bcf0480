"""Copies of rows between a GPU's memory and pinned memory of the host, by a kernel in Triton of few programs.

A copy waits for the link most of the time. A kernel with a program for each row takes every multiprocessor meanwhile,
and layers that could compute wait for it; a few programs keep the link just as busy.

Importing this module imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Programs, and words that each has under way: together more than the link moves while a word is on its way.
PROGRAMS = 128
WORDS = 1024


def copy_rows(target: torch.Tensor, targets: torch.Tensor, source: torch.Tensor, sources: torch.Tensor) -> None:
    """Copies row sources[i] of `source` to row targets[i] of `target`.

    Args:
        target, source: [rows, words], with words one after another; pinned memory is seen by the device.
        targets, sources: int64 [n]; no target is twice among them.
    """
    words = source.shape[1]
    assert target.shape[1] == words and target.stride(1) == source.stride(1) == 1 and target.dtype == source.dtype
    steps = len(sources) * -(-words // WORDS)
    if steps:
        _copy[(min(PROGRAMS, steps),)](
            target, targets, source, sources, steps, words, target.stride(0), source.stride(0), WORDS=WORDS
        )


@triton.jit
def _copy(target, targets, source, sources, steps, words, target_stride, source_stride, WORDS: tl.constexpr):
    """Copies some words of a row in each step; programs take turns."""
    of_row = tl.cdiv(words, WORDS)
    for step in range(tl.program_id(0), steps, tl.num_programs(0)):
        row, word = step // of_row, step % of_row * WORDS + tl.arange(0, WORDS)
        begin, end = tl.load(sources + row) * source_stride, tl.load(targets + row) * target_stride
        exists = word < words
        tl.store(target + end + word, tl.load(source + begin + word, mask=exists), mask=exists)
