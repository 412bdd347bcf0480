"""Multi-head latent attention (MLA): what a layer keeps, once for all heads, and the two ways to attend to it.

    kept        [positions, 1, latent | rotary part]
    expanded    keys [positions, heads, own part | rotary part] and values [positions, heads, numbers]
    absorbed    queries [tokens, heads, latent | rotary part], for scores with what is kept; results are latents

Both compute the same: a linear projection makes keys and values of a latent, so it can be applied to queries and
results instead. Expanding costs work for each position, absorbing for each pair of a token and a position. So on a GPU
few tokens are absorbed, and many expand what they attend to. On a CPU all are absorbed where they can be: the two ways
round differently, and a result must not depend on the tokens beside it.

This module knows transformers' layers that have `expand_kv` and `kv_b_proj`. It does not know pages or requests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mainstem.runtime.kernels import linear as kernels


class Latents:
    """The latents that a layer keeps of the new tokens of a batch, and its projection.

    Args:
        module: the layer's attention.
        given: what it gave to its cache: the latent [rows, 1, tokens, numbers], and its rotary part.
        key: [positions, heads, numbers], what it made of them.
        value: likewise.
    """

    def __init__(
        self, module: Any, given: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self._module = module
        self.key, self.value = key, value
        self.kept = torch.cat(given, -1).transpose(1, 2).flatten(0, 1)
        """[tokens, 1, latent | rotary part]."""
        self.rank = given[0].shape[-1]
        """Numbers of a latent."""
        self._own = key.shape[-1] - given[1].shape[-1]

    @property
    def can_absorb(self) -> bool:
        """Whether the projection is a plain one. If adapted or quantized, only the layer knows what it computes."""
        return type(self._module.kv_b_proj) is torch.nn.Linear and self._module.kv_b_proj.bias is None

    def absorbs(self, tokens: int) -> bool:
        """Returns whether `tokens` queries attend to a prefix with less work absorbed than expanded."""
        if not self.can_absorb:
            return False
        expanded = self.key.shape[-1] + self.value.shape[-1]
        absorbed = self.kept.shape[-1] + self.rank
        return tokens * (absorbed - expanded) < self.rank * (self._own + self.value.shape[-1])

    def expand(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of what is kept of some positions."""
        row = kept.transpose(0, 1).unsqueeze(0)
        keys, values = self._module.expand_kv(row[..., : self.rank], row[..., self.rank :])
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Returns queries [tokens, heads, numbers] as absorbed ones."""
        latent = _by_head(query[..., : self._own], self._of_keys())
        return torch.cat([latent, query[..., self._own :]], -1)

    def project(self, latents: torch.Tensor) -> torch.Tensor:
        """Returns the results of absorbed queries, [tokens, heads, latent], as [tokens, heads, numbers of a value]."""
        return _by_head(latents, self._projection()[:, self._own :])

    def _of_keys(self) -> torch.Tensor:
        """Returns the weights of keys, turned: [heads, latent, own part of a key]. A CPU keeps them with the layer."""
        projection = self._projection()
        turned = projection[:, : self._own].transpose(1, 2)
        if not projection.is_cpu:
            return turned
        source = projection.data_ptr()
        kept = vars(self._module).get("turned_weights")
        if kept is None or kept[0] != source:
            kept = vars(self._module)["turned_weights"] = source, turned.contiguous()
        weights: torch.Tensor = kept[1]
        return weights

    def _projection(self) -> torch.Tensor:
        """Returns the weights of this rank's heads: [heads, own part of a key | value, latent]."""
        weight = self._module.kv_b_proj.weight
        own: torch.Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
        return own.view(self.key.shape[1], -1, self.rank)


def _by_head(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the products of x [tokens, heads, inputs] and weights [heads, outputs, inputs]."""
    if not x.is_cpu or x.dtype not in kernels.DTYPES:
        return torch.einsum("thi,hoi->tho", x, weights)
    rows = x.transpose(0, 1).contiguous()
    heads = [kernels.product(own, kernels.Weights(weight, None)) for own, weight in zip(rows, weights, strict=True)]
    return torch.stack(heads, 1)
