"""Attention over the tree of a batch: what requests share is attended to once.

    q0 q1 q2 x [ shared run ]   one call       each query has a result, and its log-sum-exp, of each call ...
    q0       x [ own ]
    q1       x [ own ]          one call       ... which are merged
    q2       x [ own ]

The softmax over all keys of a query is the mean of the softmaxes over parts of them, weighted by the exponentials of
their log-sum-exps. So the queries of all requests that share a run of pages are rows of one product with its keys,
whatever else each of them sees. Hydragen (arXiv:2402.05099) and ChunkAttention (arXiv:2402.15220) do this for one
prefix and for a tree of chunks, FlashInfer's cascade (arXiv:2501.01005) level by level. `folding` decides what is one
call.

This module knows scores and results. It does not know pages or positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.nn.functional import scaled_dot_product_attention

from mainstem.runtime.attention.folding import Call, Fold, fold
from mainstem.runtime.attention.paged import BatchPlan, Given, SdpaAttention, Stored
from mainstem.runtime.memory.eight_bits import dequantize
from mainstem.runtime.memory.kv import Plane

# Scores that are computed by hand take at most this much memory at once, in float32.
_SCORES_BYTES = 64 << 20


class TreeAttention(SdpaAttention):
    """Folds what requests share into one product, and merges partial results in float32.

    A result that is whole comes from PyTorch's scaled dot product attention. A partial one, or one with a soft cap, is
    computed by hand: PyTorch returns no log-sum-exps.
    """

    def _attend(self, plan: BatchPlan, members: Sequence[int], given: Given, out: torch.Tensor) -> None:
        """See `SdpaAttention._attend`."""
        query, keys, values, scale, sinks, softcap = given
        if len(members) == 1 and sinks is None:
            span = plan.spans[members[0]]
            if span.tokens == 1 and isinstance(span.page_index, slice):  # there is nothing to fold or to gather
                super()._attend(plan, members, given, out)
                return
        numbers = values.plane.numbers.shape[-1]
        kv_heads = keys.plane.numbers.shape[2]
        if plan.pool.shape.latent:
            values = keys  # a latent's values are the first numbers of its keys, and the kernel wants one size
        causal = softcap is None
        name = tuple(members), sinks is not None, causal
        if name not in plan.derived:
            group = query.shape[1] // kv_heads
            folded = fold(plan, members, group, sinks is not None, causal)
            plan.derived[name] = folded, _Room(), _Partial.of(folded, query, values.plane.numbers)
        folded, room, partial = plan.derived[name]
        products = _Products(query, keys, values, scale, softcap, room)
        by_group = out.view(len(out), kv_heads, -1, numbers)
        for call in folded.calls:
            result, lse = products.compute(call)
            if partial is None or call.places is None:
                _put(by_group, call.rows, result if result.shape[-1] == numbers else result[..., :numbers])
            else:
                _put(partial.results, call.places, result)
                _put(partial.lse, call.places, lse)
        if partial is not None:
            _put(by_group, folded.merged, partial.merge(folded.levels, sinks)[..., :numbers])


class _Room:
    """Memory that is used again by the calls and layers of a forward: the first touch of fresh memory is slow."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def of(self, purpose: str, size: Sequence[int], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of this size, not initialised: what the purpose had before is overwritten."""
        count = prod(size)
        kept = self._kept.get((purpose, dtype))
        if kept is None or len(kept) < count:
            kept = self._kept[purpose, dtype] = torch.empty(count, dtype=dtype, device=like.device)
        return kept[:count].view(size)


@dataclass(frozen=True, slots=True)
class _Partial:
    """Partial results of a layer, in memory that all layers of a forward use.

    Args:
        results: float32 [levels * rows, kv_heads, group, numbers], 0 where a query has fewer than others.
        lse: their log-sum-exps, without the last size; -inf where a query has fewer.
    """

    results: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(cls, folded: Fold, query: torch.Tensor, values: torch.Tensor) -> _Partial | None:
        """Returns room for the results of a fold's calls; None if all results are whole."""
        if not folded.levels:
            return None
        kv_heads, numbers = values.shape[2:]
        size = (folded.levels * folded.rows, kv_heads, query.shape[1] // kv_heads)
        results = torch.zeros(*size, numbers, dtype=torch.float32, device=query.device)
        return cls(results, torch.full(size, float("-inf"), dtype=torch.float32, device=query.device))

    def merge(self, levels: int, sinks: torch.Tensor | None) -> torch.Tensor:
        """Returns the whole results, [rows, kv_heads, group, numbers]. A sink is one more part, without a value."""
        results, lse = (part.view(levels, -1, *part.shape[1:]) for part in (self.results, self.lse))
        if sinks is not None:
            lse = torch.cat([lse, sinks.float().view(lse.shape[2:]).expand(1, *lse.shape[1:])])
        weights = lse.softmax(0)  # which subtracts the maximum
        return results.mul_(weights[:levels].unsqueeze(-1)).sum(0)


class _Products:
    """Results of calls, from one layer's queries, keys and values.

    Args:
        query: [tokens, heads, numbers].
        keys, values: as of `SdpaAttention`.
        scale: factor of the scores.
        softcap: bound of the scores.
        room: for copies.
    """

    def __init__(
        self,
        query: torch.Tensor,
        keys: Stored,
        values: Stored,
        scale: float,
        softcap: float | None,
        room: _Room,
    ) -> None:
        self._query = query
        self._keys = keys.plane.rows()
        self._values = self._keys if values is keys else values.plane.rows()
        self._new = keys.new, values.new
        self._scale, self._softcap, self._room = scale, softcap, room

    def compute(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns results [groups, rows, kv_heads, group, numbers], and their log-sum-exps if they are partial."""
        query = _take(self._query, call.rows)
        kv_heads, numbers = self._keys.numbers.shape[1:]
        split = query.view(call.groups, -1, kv_heads, query.shape[1] // kv_heads, numbers)
        if call.slots is None:  # KV heads are a batch, so that a group of heads has the same keys without a copy
            q = split[0].permute(1, 2, 0, 3)
            pairs = zip(("keys", "values"), self._new, strict=True)
            new = (self._read(name, Plane(x), call.rows) for name, x in pairs)
            k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in new)
            result, lse = self._attend(q, k, v, call)
            return result.permute(2, 0, 1, 3).unsqueeze(0), lse.permute(2, 0, 1).unsqueeze(0)
        by_head = split.transpose(1, 2)
        size = by_head.shape
        q = by_head.reshape(call.groups, kv_heads, -1, numbers)  # a group of heads are rows
        k = self._read("keys", self._keys, call.slots).view(call.groups, -1, kv_heads, numbers).transpose(1, 2)
        v = k
        if self._values is not self._keys:
            seen = self._read("values", self._values, call.slots)
            v = seen.view(call.groups, -1, *seen.shape[1:]).transpose(1, 2)
        result, lse = self._attend(q, k, v, call)
        result = result.view(*size[:4], -1).transpose(1, 2)
        return result, lse if call.places is None else lse.view(size[:4]).transpose(1, 2)

    def _read(self, purpose: str, rows: Plane, index: slice | torch.Tensor) -> torch.Tensor:
        """Returns some of the rows: a view, or a copy that lasts until the next of this purpose."""
        if isinstance(index, slice):
            seen = rows.numbers[index]
        else:
            copy = self._room.of(purpose, (len(index), *rows.numbers.shape[1:]), rows.numbers, rows.numbers.dtype)
            seen = torch.index_select(rows.numbers, 0, index, out=copy)
        dtype = self._query.dtype
        if seen.dtype is dtype:
            return seen
        copy = self._room.of(purpose, seen.shape, seen, dtype)
        return copy.copy_(seen) if rows.scales is None else dequantize(seen, _take(rows.scales, index), dtype, copy)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns results and log-sum-exps of [batch, heads, rows, numbers]; the latter only if partial."""
        causal, mask = call.slots is None, call.mask
        if call.places is None and self._softcap is None:
            result = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=self._scale)
            return result, result[..., 0]
        assert not causal
        rows = max(1, _SCORES_BYTES // (4 * q.shape[0] * q.shape[1] * k.shape[2]))
        done = []
        for begin in range(0, q.shape[2], rows):
            some = slice(begin, begin + rows)
            own = mask if mask is None or mask.shape[2] == 1 else mask[:, :, some]
            done.append(self._by_hand(q[:, :, some], k, v, own))
        return torch.cat([result for result, _ in done], 2), torch.cat([lse for _, lse in done], 2)

    def _by_hand(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes scores and weights in float32. A cap comes before the mask: a key that is not seen has no score."""
        scores = (q @ k.transpose(-1, -2)).float() * self._scale
        if self._softcap is not None:
            scores = (scores / self._softcap).tanh_() * self._softcap
        if mask is not None:
            scores += mask
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp_()
        return weights.to(v.dtype) @ v, lse


def _take(rows: torch.Tensor, index: slice | torch.Tensor) -> torch.Tensor:
    return rows[index] if isinstance(index, slice) else rows.index_select(0, index)


def _put(rows: torch.Tensor, index: slice | torch.Tensor, given: torch.Tensor) -> None:
    """Writes given rows, which may be in groups."""
    if isinstance(index, slice):
        rows[index].view(given.shape).copy_(given)
    else:
        rows.index_copy_(0, index, given.reshape(-1, *rows.shape[1:]).to(rows.dtype))
