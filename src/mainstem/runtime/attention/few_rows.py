"""Attention by the core's kernel, which reads pages where they lie, and those that requests share once.

    few new tokens: a decode step, or a verified draft      what requests share is computed once for all of them
    more                                                    each request reads its own keys

All of a batch is one call a layer. Nothing is gathered, padded or masked: a query has a range of keys in each part. A
result is the same bits whatever is computed beside it, and however a prompt is cut (`kernels/spans.h`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mainstem import _core
from mainstem.runtime.attention.folding import seen_keys
from mainstem.runtime.attention.latent import Latents
from mainstem.runtime.attention.paged import BatchPlan, Given, SdpaAttention, Stored
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.memory.kv import Plane, run_of

_FEW = 16  # new tokens of an extent whose keys are shared with others
_STORED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
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
        seen = seen_keys(plan, members, _FEW, SHARE_BYTES)
        ends = np.cumsum([extent.tokens for extent in plan.extents])
        rows = np.concatenate([np.arange(ends[i] - plan.extents[i].tokens, ends[i]) for i in members])
        own = [part._replace(rows=np.searchsorted(rows, part.rows).astype(np.int32)) for part in seen]
        plan.derived[name] = PagePlan(_core.AttentionPlan(own, len(rows)), run_of(rows, plan.pool.device))
    made: PagePlan = plan.derived[name]
    return made


class PageAttention(SdpaAttention):
    """Computes by the core's kernel, on a CPU. What that cannot read, as float16, is left to PyTorch."""

    def attend_latent(
        self, layer: int, query: torch.Tensor, latents: Latents, scale: float, plan: BatchPlan
    ) -> torch.Tensor:
        """See `Attention.attend_latent`. All queries are absorbed, if the layer's projection allows it."""
        if query.dtype not in kernels.DTYPES or not latents.can_absorb:
            return super().attend_latent(layer, query, latents, scale, plan)
        (keys,) = plan.write(layer, latents.kept)
        values = Stored(Plane(keys.plane.numbers[..., : latents.rank]), keys.new[..., : latents.rank])
        out = query.new_empty(*query.shape[:2], latents.rank)
        self._attend(plan, range(len(plan.extents)), Given(latents.absorb(query), keys, values, scale), out)
        return latents.project(out)

    def _attend(self, plan: BatchPlan, members: Sequence[int], given: Given, out: torch.Tensor) -> None:
        """See `SdpaAttention._attend`."""
        query, keys, values, scale, sinks, softcap = given
        if not (_reads(query, keys.plane) and _reads(query, values.plane)):
            super()._attend(plan, members, given, out)
            return
        paged = page_plan(plan, members)
        k, v = keys.plane.numbers, values.plane.numbers
        own = query[paged.rows].contiguous()
        results = out.new_empty(*own.shape[:2], v.shape[-1])
        sinks_of = None if sinks is None else sinks.to(query.dtype).contiguous()
        paged.core.attend(
            own.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            results.data_ptr(),
            (own.shape[1], k.shape[2], k.shape[3], v.shape[3]),
            (k.stride(1), v.stride(1)),
            (_address(keys.plane.scales), _address(values.plane.scales)),
            _STORED.get(k.dtype, "auto"),
            k.shape[0] * k.shape[1],
            scale,
            softcap or 0.0,
            _address(sinks_of),
            query.dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
        out[paged.rows] = results


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _reads(query: torch.Tensor, plane: Plane) -> bool:
    """Returns whether the kernel can read keys or values where they are."""
    numbers, scales = plane.numbers, plane.scales
    _, page_size, kv_heads, count = numbers.shape
    page, position, head, number = numbers.stride()
    return (
        query.dtype in kernels.DTYPES
        and (numbers.dtype is query.dtype if scales is None else numbers.dtype in _STORED and scales.is_contiguous())
        and number == 1
        and page == page_size * position
        and (kv_heads == 1 or head == count)
    )
