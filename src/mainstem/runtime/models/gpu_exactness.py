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
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that move numbers, or take one of those that they are given.
_MOVES = frozenset(
    {
        "cat",
        "stack",
        "embedding",
        "index",
        "index_select",
        "index_put",
        "gather",
        "scatter",
        "slice_scatter",
        "copy",
        "set",
    }
    | {"_to_copy", "contiguous", "repeat", "constant_pad_nd", "fill", "zero", "new_empty", "empty_like", "zeros_like"}
    | {"empty", "zeros", "ones", "full", "new_zeros", "new_ones", "full_like", "arange", "roll", "flip", "amax", "amin"}
    | {"_local_scalar_dense", "empty_strided", "lift_fresh", "detach", "tril", "triu", "split_with_sizes_copy"}
    | {"dropout"}  # models are in eval mode, where it returns what it is given
)


@contextmanager
def watching() -> Iterator[set[str]]:
    """Notes within the block what PyTorch computes that has no rule."""
    watch = _Watch()
    with watch:
        yield watch.found


def reason(found: set[str]) -> str | None:
    """Says why a model is not exact in which `watching` has found this; None: it is."""
    return f"PyTorch computes {', '.join(sorted(found))}, which have no rule on a GPU" if found else None


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations as they are called, and calls them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        moves = func.is_view or name in _MOVES or name.removesuffix("_") in _MOVES
        if not moves and torch.Tag.pointwise not in func.tags and _rounds(result):
            self.found.add(name)
        return result


def _rounds(result: Any) -> bool:
    """Returns whether a result has numbers that may have been rounded."""
    several = result if isinstance(result, (list, tuple)) else [result]
    return any(isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex()) for each in several)
