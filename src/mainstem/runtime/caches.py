"""What a model gets for transformers' cache: pages keep what its layers give, not the cache.

    Passing     a layer gets back what it gave, that of the new tokens alone; its attention function reads the pages

This module knows transformers' caches. It does not know tokens, requests or the owners of pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, DynamicCache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Passing(Cache):
    """The cache of one forward. Attention layers get back what they give, and positions are passed in, never counted.

    Args:
        config: of the model.
    """

    given: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """What each attention layer gave: key and value, or latent and rotary part; [rows, heads, tokens, numbers]."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(layers=DynamicCache(config=config).layers)
        self.given = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Remembers what a layer gave, and returns it."""
        self.given[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0: positions are passed in, never counted."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns the size and offset of the new keys, which begin at 0."""
        return query_length, 0
