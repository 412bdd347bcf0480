"""Whether a hit changes no bit on a GPU: which operations PyTorch's library there computes for each number by itself.

On a GPU nothing is exact that has no rule. Kernels in Triton compute products, attention and norms by row
(docs/arithmetic.md). PyTorch's elementwise functions compute each number by the same code, wherever it lies, and what
copies numbers changes none. Its sums choose their order by all sizes of a tensor, and so are no part of an exact model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mainstem.runtime.models.exactness import Found, Watch, rounds

# Operations that move numbers, or take one of those that they are given.
_MOVES = frozenset({
    "cat", "stack", "embedding", "index", "index_select", "index_put", "gather", "scatter", "slice_scatter", "copy",
    "set", "_to_copy", "contiguous", "repeat", "constant_pad_nd", "fill", "zero", "new_empty", "empty_like",
    "zeros_like", "empty", "zeros", "ones", "full", "new_zeros", "new_ones", "full_like", "arange", "roll", "flip",
    "amax", "amin", "_local_scalar_dense", "empty_strided", "lift_fresh", "detach", "tril", "triu",
    "split_with_sizes_copy",
    "dropout",  # models are in eval mode, where it returns what it is given
})  # fmt: skip
_NO_RULE = "no rule"


@contextmanager
def watching() -> Iterator[Found]:
    """Notes within the block what PyTorch computes that has no rule."""
    watch = Watch(_on_a_gpu)
    with watch:
        yield watch.found


def reason(found: Found) -> str | None:
    """Says why a model is not exact in which `watching` has found this; None: it is."""
    names = sorted(found.kinds.get(_NO_RULE, ()))
    return f"PyTorch computes {', '.join(names)}, which have no rule on a GPU" if names else None


def _on_a_gpu(func: Any, args: object, named: object, result: Any) -> tuple[str, str] | None:
    """See `Watch`."""
    name = func.overloadpacket.__name__
    moves = func.is_view or name in _MOVES or name.removesuffix("_") in _MOVES
    return None if moves or torch.Tag.pointwise in func.tags or not rounds(result) else (_NO_RULE, name)
