"""Compares a step's attention, folded over the tree of the batch, with attention request by request.

Random queries, keys and values of SmolLM2's shape: 30 layers of 9 heads and 3 KV heads of 64 numbers. A step plans its
batch and attends in all layers; the two kernels take turns over the same pages. Own pages are where requests that
decode together have them: one page of each in turn.

Measures the processor time of one thread, so other load on the machine matters little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table

from bench.report import Report
from mainstem.runtime.attention.few_rows import PageAttention
from mainstem.runtime.attention.paged import Attention, Extent, SdpaAttention, plan_batch
from mainstem.runtime.memory.kv import KVPool, KVShape

Clock = Callable[[], float]


class Shape(NamedTuple):
    """Requests of a step: each has shared and own positions with KV, and new tokens."""

    requests: int
    shared: int
    own: int
    new: int = 1

    @property
    def label(self) -> str:
        """The row in tables."""
        parts = [f"{self.requests} behind {self.shared:,}" if self.shared else f"{self.requests} sharing nothing"]
        parts += [f"{self.own:,} own"] * bool(self.own)
        return ", ".join([*parts, "decode" if self.new == 1 else f"{self.new} new tokens"])


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        shapes: requests of a step.
        page_sizes: positions per page.
        dtypes: of keys and values.
        layers, heads, kv_heads, head_dim: of the model.
        rounds: rounds in which the kernels take turns; the median of each counts.
    """

    shapes: tuple[Shape, ...] = (
        *(Shape(8, 800, own) for own in (16, 64, 128)),
        Shape(16, 4096, 128),
        Shape(2, 800, 64),
        Shape(8, 0, 800),
        Shape(8, 0, 100),
        Shape(1, 0, 800),
        Shape(1, 0, 100),
        Shape(8, 800, 0, 20),
        Shape(1, 800, 0, 300),
        Shape(1, 0, 0, 800),
    )
    page_sizes: tuple[int, ...] = (1, 16)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    rounds: int = 7


QUICK = Settings(shapes=(Shape(8, 800, 64), Shape(1, 0, 100)), page_sizes=(16,), layers=4, rounds=3)

_KERNELS: dict[str, Attention] = {"folded": PageAttention(), "by_request": SdpaAttention()}


def run(settings: Settings, report: Report, clock: Clock = time.process_time) -> None:
    """Measures all shapes, and adds rows and a table to the report."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    report.settings.update(asdict(settings), shapes=[shape._asdict() for shape in settings.shapes])
    try:
        for shape in settings.shapes:
            report.progress(f"attention: {shape.label}")
            for dtype in settings.dtypes:
                report.rows += [_row(settings, shape, size, dtype, clock) for size in settings.page_sizes]
    finally:
        torch.set_num_threads(threads)
    report.tables.append(_table(report.rows))


def _row(settings: Settings, shape: Shape, page_size: int, dtype: str, clock: Clock) -> dict[str, Any]:
    extents = extents_of(shape, page_size)
    pages = 1 + max(int(extent.page_table.max()) for extent in extents)
    kv = KVShape(settings.layers, settings.kv_heads, settings.head_dim, settings.head_dim)
    pool = KVPool(kv, pages, page_size, getattr(torch, dtype))
    for plane in pool.planes:
        plane.normal_()
    sizes = [settings.heads, settings.kv_heads, settings.kv_heads]
    new = [torch.randn(shape.requests * shape.new, size, settings.head_dim, dtype=pool.dtype) for size in sizes]
    taken_s: dict[str, list[float]] = {name: [] for name in _KERNELS}
    with torch.inference_mode():
        for kernel in _KERNELS.values():
            step_s(kernel, extents, pool, new, clock)  # the first is slower
        for _ in range(settings.rounds):
            for name, kernel in _KERNELS.items():
                taken_s[name].append(step_s(kernel, extents, pool, new, clock))
    middle = {f"{name}_s": median(taken) for name, taken in taken_s.items()}
    ratios = sorted(slow / fast for slow, fast in zip(taken_s["by_request"], taken_s["folded"], strict=True))
    facts = {"shape": shape.label, "page_size": page_size, "dtype": dtype}
    return {**facts, **middle, "ratio": median(ratios), "lowest": ratios[0], "highest": ratios[-1]}


def extents_of(shape: Shape, page_size: int) -> list[Extent]:
    """Returns the requests of a step: they share whole pages, and own one page each in turn."""
    shared, end = shape.shared // page_size, shape.shared + shape.own + shape.new
    own = -(-end // page_size) - shared
    prefix, turns = np.arange(shared), shared + np.arange(own) * shape.requests
    tables = [np.concatenate([prefix, turns + at]).astype(np.int32) for at in range(shape.requests)]
    return [Extent(shape.new, end - shape.new, table) for table in tables]


def step_s(
    kernel: Attention, extents: Sequence[Extent], pool: KVPool, new: Sequence[torch.Tensor], clock: Clock
) -> float:
    """Returns the seconds of a step's attention, its plan included."""
    query, key, value = new
    began_s = clock()
    plan = plan_batch(extents, pool)
    for layer in range(pool.shape.layers):
        kernel.attend(layer, query, key, value, query.shape[2] ** -0.5, plan)
    return clock() - began_s


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = ("requests", "page size", "type", "folded", "by request", "ratio", "lowest", "highest")
    shown = Table(*columns, title="a step's attention")
    for row in rows:
        times = (f"{1000 * row[key]:.1f} ms" for key in ("folded_s", "by_request_s"))
        ratios = (f"{row[key]:.2f}" for key in ("ratio", "lowest", "highest"))
        shown.add_row(row["shape"], str(row["page_size"]), row["dtype"], *times, *ratios)
    return shown
