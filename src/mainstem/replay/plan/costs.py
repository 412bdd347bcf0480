"""The bytes that a model keeps of a prompt, and the FLOPs that computing a prompt costs, from shapes alone.

    kept of a prefix of n tokens                               cost of n tokens after m cached ones
      full attention     n x kv                                  2 x active parameters x n
      sliding window     min(n, window) x kv                     + pair FLOPs x positions that the n attend to
      recurrent, conv    one checkpoint, whatever n              + one row of logits

A multiplication and an addition are two FLOPs. 2 FLOPs per parameter and token, plus attention: Kaplan et al. 2020,
"Scaling Laws for Neural Language Models", section 2.1; Chowdhery et al. 2022, "PaLM", appendix B. Unlike these,
attention counts only the positions inside the causal mask or the window, which is what kernels compute.

Knows no configuration files (`configs` reads them), no hardware, no traces.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mainstem.units import dtype_bytes

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps, in numbers, and what it costs.

    Args:
        kv_numbers: numbers kept per position: key and value of all KV heads, or the latent of MLA.
        kv_parts: parts into which devices can split the KV: its KV heads; 1 for the latent of MLA.
        window: positions that a query sees and the layer keeps, including the query's own; None: all.
        conv_numbers: numbers in the convolution's part of a recurrent state, and all others in the model's type.
        recurrent_numbers: numbers in the rest of that state.
        parameters: parameters of its matrices.
        active_parameters: parameters that one token uses.
        routed: fraction of the experts to which a token is routed; 0: there are none.
        pair_flops: FLOPs of a query with one position that it sees.
        token_flops: FLOPs per token besides matrices and pairs: those of a recurrence.
        past_flops: FLOPs per cached position, once per prefill: MLA rebuilds keys and values from the latent.
    """

    kv_numbers: int = 0
    kv_parts: int = 0
    window: int | None = None
    conv_numbers: int = 0
    recurrent_numbers: int = 0
    parameters: int = 0
    active_parameters: int = 0
    routed: float = 0
    pair_flops: int = 0
    token_flops: int = 0
    past_flops: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The layers of a model, its embedding and its logits.

    Args:
        name: its name in messages.
        layers: the layers in order.
        hidden_size: numbers per token between layers.
        vocab_size: logits per token.
        tied: whether the same matrix embeds tokens and produces logits.
        weights_dtype: type of the published weights; see `DTYPE_BYTES`.
    """

    name: str
    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    tied: bool
    weights_dtype: str = "bf16"

    # ---- what is kept

    def kv_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Returns the bytes that the layers without a window keep of a position."""
        return self._bytes(sum(layer.kv_numbers for layer in self.layers if layer.window is None), dtype)

    def window_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Returns the bytes that the layers with a window keep of a position inside it."""
        return self._bytes(sum(layer.kv_numbers for layer in self.layers if layer.window is not None), dtype)

    def window_bytes(self, tokens: int, dtype: str = "bf16") -> int:
        """Returns the bytes that the layers with a window keep of a prefix of this many tokens."""
        kept = (layer.kv_numbers * min(tokens, layer.window) for layer in self.layers if layer.window is not None)
        return self._bytes(sum(kept), dtype)

    def state_bytes(self, dtype: str = "bf16", state_dtype: str = "fp32") -> int:
        """Returns the bytes of one checkpoint of all recurrent states.

        Args:
            dtype: of the model, and so of the convolutions' part.
            state_dtype: type of the rest.
        """
        conv = self._bytes(sum(layer.conv_numbers for layer in self.layers), dtype)
        recurrent = sum(layer.recurrent_numbers for layer in self.layers)
        return conv + int(recurrent * dtype_bytes("state_dtype", state_dtype))

    def prefix_bytes(self, tokens: int, dtype: str = "bf16", state_dtype: str = "fp32") -> int:
        """Returns the bytes that are needed to continue one prefix of this many tokens."""
        kept = tokens * self.kv_bytes_per_token(dtype) + self.window_bytes(tokens, dtype)
        return kept + self.state_bytes(dtype, state_dtype)

    @staticmethod
    def _bytes(numbers: int, dtype: str) -> int:
        return int(numbers * dtype_bytes("dtype", dtype))

    # ---- weights

    @property
    def parameters(self) -> int:
        """Parameters of all matrices; norms and biases, below a thousandth, are left out."""
        around = self.hidden_size * self.vocab_size * (1 if self.tied else 2)
        return around + sum(layer.parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, logits included."""
        return self.hidden_size * self.vocab_size + sum(layer.active_parameters for layer in self.layers)

    def met_parameters(self, tokens: ArrayLike) -> Floats:
        """Returns the parameters that this many tokens use together, logits included; element-wise.

        An expert counts if any token is routed to it; tokens draw independently: all but (1 - routed) ** tokens.

        Args:
            tokens: 1 or more of each prompt.
        """
        n = np.asarray(tokens, np.float64)
        met = np.full(n.shape, float(self.active_parameters))
        idle = Counter[float]()
        for layer in self.layers:
            idle[layer.routed] += layer.parameters - layer.active_parameters
        for routed, parameters in idle.items():
            met += parameters * (1 - (1 - routed) ** (n - 1))
        return met

    def kv_copies(self, devices: int) -> int:
        """Returns how many copies of the same KV tensor parallelism keeps: devices beyond the KV parts repeat them.

        Args:
            devices: 1 or more.
        """
        parts = min((layer.kv_parts for layer in self.layers if layer.kv_parts), default=devices)
        return -(-devices // parts)

    def weights_bytes(self, dtype: str | None = None) -> int:
        """Returns the bytes of all weights.

        Args:
            dtype: type of the weights; None: as published.
        """
        return int(self.parameters * dtype_bytes("weights_dtype", dtype or self.weights_dtype))

    # ---- cost of computing

    def prefill_flops(self, tokens: ArrayLike, past: ArrayLike = 0) -> Floats:
        """Returns the FLOPs of computing `tokens` tokens after `past` cached ones; element-wise.

        Args:
            tokens: 1 or more of each prompt.
            past: cached positions before them.
        """
        n, m = np.asarray(tokens, np.float64), np.asarray(past, np.float64)
        each_token = sum(2 * layer.active_parameters + layer.token_flops for layer in self.layers)
        flops = each_token * n + sum(layer.past_flops for layer in self.layers) * m
        reach = Counter[int | None]()
        for layer in self.layers:
            reach[layer.window] += layer.pair_flops
        for window, pair_flops in reach.items():
            flops = flops + pair_flops * (_seen(m + n, window) - _seen(m, window))
        return np.asarray(flops + 2 * self.hidden_size * self.vocab_size, np.float64)


def _seen(tokens: Floats, window: int | None) -> Floats:
    """Returns the positions that the first `tokens` queries see in total: the j-th sees j, or the window."""
    inside = tokens if window is None else np.minimum(tokens, window)
    seen: Floats = inside * (inside + 1) / 2 + (tokens - inside) * (window or 0)
    return seen
