"""The KV tensors that page ids index: one tensor of keys and one of values, with all layers of a component.

    k, v:  [layers, pages, page_size, kv_heads, head_dim]

A page id is the same index in every layer. Consecutive ids are consecutive memory within a layer, so a run of pages is
a view, and a position of a page has the flat index page * page_size + offset.

The pool does not know the owner of a page, nor what it holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from mainstem.errors import BadArgument, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class KVShape(NamedTuple):
    """The size of one position: 2 (key and value) times `layers` times `kv_heads` times `head_dim` numbers."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> KVShape:
        """Reads the shape from a configuration whose layers are all alike.

        Raises:
            UnsupportedModel: the number of layers, heads or the hidden size is missing, or layers differ in them.
        """
        text = config.get_text_config(decoder=True)
        if getattr(text, "is_heterogeneous", False):
            raise UnsupportedModel(f"{text.model_type}: its layers have heads of different sizes")
        heads = getattr(text, "num_attention_heads", None)
        hidden = getattr(text, "hidden_size", None)
        layers = getattr(text, "num_hidden_layers", None)
        if not (isinstance(heads, int) and isinstance(hidden, int) and isinstance(layers, int)):
            raise UnsupportedModel(f"{text.model_type}: its configuration lacks heads, layers or the hidden size")
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or hidden // heads
        return cls(layers, int(kv_heads), int(head_dim))

    def bytes_per_page(self, page_size: int, dtype: torch.dtype) -> int:
        """Returns the bytes of a page of `page_size` positions, keys and values of all layers."""
        return 2 * math.prod(self) * page_size * dtype.itemsize


class KVPool:
    """Keys and values of `pages` pages, not initialised: only positions that were written may be read.

    Args:
        shape: of a position. Without layers, pages hold nothing, and only mark which prefixes are known.
        pages: the number of pages.
        page_size: positions per page.
        dtype: of the keys and values, the same as the model's.
        device: of the tensors.

    Raises:
        BadArgument: `pages` or `page_size` is less than 1, or the memory cannot be allocated.
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
        except RuntimeError as error:  # PyTorch's error for a failed allocation
            needed = 2 * math.prod(size) * dtype.itemsize
            raise BadArgument("kv_bytes", needed, f"memory that can be allocated on {device}") from error
        self._layers = list(zip(self.k, self.v, strict=True))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.k.device

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of one layer, as views [pages, page_size, kv_heads, head_dim]."""
        return self._layers[index]

    def copy_page(self, source: int, target: int, positions: int) -> None:
        """Copies the first `positions` positions of page `source` to page `target`, in every layer.

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
