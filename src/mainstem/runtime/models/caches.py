"""Stands in for transformers' cache: pages keep what its layers give, not the cache.

    Passing     a layer gets back what it gave, that of the new tokens alone; its attention function reads the pages
    Gathering   a layer gets back the keys and values of all positions of one sequence, and attends by itself
    Rounding    transformers' own, with keys and values as pages of 8 bits hold them: what runners are tested against

This module knows transformers' caches. It does not know tokens, requests or the owners of pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache

from mainstem.errors import UnsupportedModel
from mainstem.runtime.memory.eight_bits import rounded
from mainstem.runtime.models.places import new_cache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from mainstem.runtime.attention.paged import Paging, Stored


class Passing(Cache):
    """The cache of one forward. Attention layers get back what they give, and positions are passed in, never counted.

    Args:
        config: of the model.
    """

    given: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """The output of each attention layer: key and value, or latent and rotary part; [rows, heads, tokens, numbers]."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(layers=new_cache(config).layers)
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


class Gathering(Cache):
    """The cache of one forward of one sequence, for models that attend by code of their own.

    To the model it is a cache of transformers that holds all positions before the new tokens.

    Args:
        config: of the model.
        paging: of one sequence, in full attention.
        start: position of the first new token.
    """

    def __init__(self, config: PreTrainedConfig, paging: Paging, start: int) -> None:
        super().__init__(layers=new_cache(config).layers)
        self._paging, self._start = paging, start
        (self._plan,) = paging.plans.values()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a layer's new keys and values to their slots, and returns those of all positions.

        Raises:
            UnsupportedModel: the layer has no keys by its configuration, or they do not fit the pool.
        """
        pool = self._plan.pool
        given = [(x.shape[1], x.shape[-1]) for x in (key_states, value_states)]
        if layer_idx not in self._paging.places or given != pool.shape.given or pool.shape.latent:
            raise UnsupportedModel(f"layer {layer_idx} keeps {given}, which its pool does not hold")
        for ticket in self._paging.arriving:
            ticket.wait_layer(layer_idx)
        _, layer = self._paging.places[layer_idx]
        keys, values = self._plan.write(layer, *(x[0].transpose(0, 1) for x in (key_states, value_states)))
        return self._all(keys), self._all(values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the position of the first new token."""
        return self._start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns the number of all keys, and the position of the first."""
        return self._start + query_length, 0

    def _all(self, stored: Stored) -> torch.Tensor:
        """Returns the keys or values of all positions, [1, heads, positions, numbers]."""
        rows = self._plan.spans[0].read(*stored)[: self._start + len(stored.new)]
        return rows.transpose(0, 1).unsqueeze(0)


class Rounding(Cache):
    """transformers' own cache, which gives layers back what they gave as 8 bits hold it.

    Args:
        config: of the model.
        kept: for layers that are kept in 8 bits: the dtype.
    """

    def __init__(self, config: PreTrainedConfig, kept: Mapping[int, torch.dtype]) -> None:
        super().__init__(layers=new_cache(config).layers)
        self._kept = kept

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps new keys and values, rounded; returns those of all positions."""
        given = key_states, value_states
        if (to := self._kept.get(layer_idx)) is not None:
            given = rounded(key_states, to), rounded(value_states, to)
        return super().update(*given, layer_idx, *args, **kwargs)
