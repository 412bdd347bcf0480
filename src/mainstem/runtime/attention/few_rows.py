"""Attention of few queries by the core's kernel, which reads pages where they lie and shared ones once.

    few new tokens: a decode step, or a verified draft      the kernel, all of them in one call a layer
    more                                                    `TreeAttention`

Shared pages are found as for `TreeAttention` (`folding`), but nothing is gathered, padded or masked: a query has
a range of keys in each part. So it pays to share short runs, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mainstem import _core
from mainstem.runtime.attention.folding import seen_keys
from mainstem.runtime.attention.paged import BatchPlan, Given
from mainstem.runtime.attention.tree import TreeAttention
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.memory.kv import Plane, run_of

_FEW = 16  # new tokens of an extent, at most
SHARE_BYTES = 64 << 10  # of keys and values in a layer; see `seen_keys`


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The arguments of the kernel for some extents of a batch, for all layers of a pool.

    Args:
        core: the core's own.
        rows: of the batch that it computes.
    """

    core: _core.AttentionPlan
    rows: slice | torch.Tensor


def page_plan(plan: BatchPlan, members: Sequence[int]) -> PagePlan:
    """Returns the plan for some extents of a batch, made at the first call."""
    name = "pages", tuple(members)
    if name not in plan.derived:
        seen = seen_keys(plan, members, SHARE_BYTES)
        ends = np.cumsum([extent.tokens for extent in plan.extents])
        rows = np.concatenate([np.arange(ends[i] - plan.extents[i].tokens, ends[i]) for i in members])
        own = [(part.slots, np.searchsorted(rows, part.rows).astype(np.int32), *part[2:]) for part in seen]
        plan.derived[name] = PagePlan(_core.AttentionPlan(own, len(rows)), run_of(rows, plan.pool.device))
    made: PagePlan = plan.derived[name]
    return made


class PageAttention(TreeAttention):
    """Computes few queries by the core's kernel, on a CPU."""

    def _attend(self, plan: BatchPlan, members: Sequence[int], given: Given, out: torch.Tensor) -> None:
        """See `SdpaAttention._attend`."""
        query, keys, values, scale, sinks, softcap = given
        few: list[int] = []
        if _reads(query, keys.plane) and _reads(query, values.plane):
            few = [index for index in members if plan.extents[index].tokens <= _FEW]
        if few:
            paged = page_plan(plan, few)
            k, v = keys.plane.numbers, values.plane.numbers
            own = query[paged.rows].contiguous()
            found = out.new_empty(*own.shape[:2], v.shape[-1])
            sinks_of = None if sinks is None else sinks.to(query.dtype).contiguous()
            paged.core.attend(
                own.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                found.data_ptr(),
                (own.shape[1], k.shape[2], k.shape[3], v.shape[3]),
                (k.stride(1), v.stride(1)),
                k.shape[0] * k.shape[1],
                scale,
                softcap or 0.0,
                0 if sinks_of is None else sinks_of.data_ptr(),
                query.dtype is torch.bfloat16,
                torch.get_num_threads(),
            )
            out[paged.rows] = found
        if len(few) < len(members):
            others = [index for index in members if plan.extents[index].tokens > _FEW] if few else members
            super()._attend(plan, others, given, out)


def _reads(query: torch.Tensor, plane: Plane) -> bool:
    """Returns whether the kernel can read keys or values where they are."""
    stored = plane.numbers
    _, page_size, kv_heads, numbers = stored.shape
    page, position, head, number = stored.stride()
    return (
        query.dtype in kernels.DTYPES
        and stored.dtype is query.dtype
        and numbers % kernels.STEP == 0
        and number == 1
        and page == page_size * position
        and (kv_heads == 1 or head == numbers)
    )
