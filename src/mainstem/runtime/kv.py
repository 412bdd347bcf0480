"""The KV tensors that pages name: one tensor of keys and one of values, all layers of a component together.

    k, v:  [layers, pages, page_size, kv_heads, head_dim]

A page id means the same place in every layer. Consecutive page ids are consecutive memory within a layer, so a run of
pages is a view, and a page's positions can be written as slots (page * page_size + offset).

The pool does not know who owns a page, nor what a page holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from mainstem.errors import BadArgument, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class KVShape(NamedTuple):
    """What one position costs: `layers` times 2 (key and value) times `kv_heads` times `head_dim` numbers."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> KVShape:
        """Read the shape from a configuration whose layers are all alike.

        Raises:
            UnsupportedModel: it does not name layers, heads and hidden size, or its layers differ in them.
        """
        text = config.get_text_config(decoder=True)
        if getattr(text, "is_heterogeneous", False):
            raise UnsupportedModel(f"{text.model_type}: its layers have heads of different sizes")
        heads = getattr(text, "num_attention_heads", None)
        hidden = getattr(text, "hidden_size", None)
        layers = getattr(text, "num_hidden_layers", None)
        if not (isinstance(heads, int) and isinstance(hidden, int) and isinstance(layers, int)):
            raise UnsupportedModel(f"{text.model_type}: its configuration names no heads, layers or hidden size")
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or hidden // heads
        return cls(layers, int(kv_heads), int(head_dim))

    def bytes_per_page(self, page_size: int, dtype: torch.dtype) -> int:
        """Bytes that one page of `page_size` positions takes, keys and values of all layers."""
        return 2 * math.prod(self) * page_size * dtype.itemsize


class KVPool:
    """Keys and values of `pages` pages, not initialised: only positions that were written may be read.

    Args:
        shape: of what a position holds. Without layers the pages hold nothing, and only mark what their owner knows.
        pages: how many pages.
        page_size: positions a page.
        dtype: of the keys and values, the model's own.
        device: where the tensors lie.

    Raises:
        BadArgument: `pages` or `page_size` is less than 1, or there is no memory for so many.
    """

    def __init__(
        self,
        shape: KVShape,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("pages", pages), ("page_size", page_size)):
            if value < 1:
                raise BadArgument(name, value, "at least 1")
        self.shape = shape
        self.pages = pages
        self.page_size = page_size
        size = (shape.layers, pages, page_size, shape.kv_heads, shape.head_dim)
        try:
            self.k, self.v = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
        except RuntimeError as error:  # what PyTorch raises when there is no such memory
            needed = 2 * math.prod(size) * dtype.itemsize
            raise BadArgument("kv_bytes", needed, f"memory that can be had on {device}") from error
        self._layers = list(zip(self.k, self.v, strict=True))

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys and values."""
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.k.device

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, as views [pages, page_size, kv_heads, head_dim]."""
        return self._layers[index]

    def copy_page(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` positions of page `source` to page `target`, in every layer.

        Raises:
            BadArgument: a page id is not in [0, pages), or `positions` not in [0, page_size].
        """
        for name, page in (("source", source), ("target", target)):
            if not 0 <= page < self.pages:
                raise BadArgument(name, page, f"in [0, {self.pages})")
        if not 0 <= positions <= self.page_size:
            raise BadArgument("positions", positions, f"in [0, {self.page_size}]")
        for cache in (self.k, self.v):
            cache[:, target, :positions] = cache[:, source, :positions]
