"""What a model keeps of a prompt, in bytes, and what computing a prompt costs, in FLOPs: from shapes alone.

    kept of a prefix of n tokens                               cost of n tokens behind m that are cached
      full attention     n x kv                                  2 x active parameters x n
      sliding window     min(n, window) x kv                     + pair FLOPs x positions that the n see
      recurrent, conv    one checkpoint, whatever n              + one row of logits

A multiplication and an addition are two FLOPs. 2 FLOPs a parameter and token, and attention beside it: Kaplan et al.
2020, "Scaling Laws for Neural Language Models", section 2.1; Chowdhery et al. 2022, "PaLM", appendix B. Other than
there, attention is counted for the positions that a causal mask or a window leaves, as kernels compute it.

Knows no configuration files (`configs` reads them), no hardware, no traces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mainstem.errors import BadArgument

Floats: TypeAlias = NDArray[np.float64]

DTYPE_BYTES: Mapping[str, float] = MappingProxyType(
    {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5, "mxfp4": 17 / 32}
)
"""Bytes a number. mxfp4 has one byte of scale for 32 numbers of half a byte (OCP Microscaling Formats 1.0)."""


def dtype_bytes(name: str, dtype: str) -> float:
    """Bytes a number of that type.

    Args:
        name: of the argument, for the message.
        dtype: see `DTYPE_BYTES`.

    Raises:
        BadArgument: there is no such type.
    """
    if dtype not in DTYPE_BYTES:
        raise BadArgument(name, dtype, f"one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps and costs.

    Args:
        kv_numbers: kept of each position: key and value of all KV heads, or the latent of MLA.
        kv_parts: that devices can share it by: its KV heads; the latent of MLA is one.
        window: positions that it sees and keeps, a query's own among them; None: all.
        conv_numbers: of the convolution's part of a recurrent state.
        recurrent_numbers: of the rest of that state.
        parameters: of its matrices.
        active_parameters: those that one token meets.
        routed: part of the experts that a token is sent to; 0: there are none.
        pair_flops: of a query with one position that it sees.
        token_flops: of a token beside matrices and pairs: what a recurrence does.
        past_flops: of each cached position, once a prefill: MLA makes keys and values from the latent again.
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
    """The layers of a model, and what lies around them.

    Args:
        name: what messages call it.
        layers: in order.
        hidden_size: numbers of a token between layers.
        vocab_size: rows of logits.
        tied: the same matrix embeds tokens and makes logits.
        weights_dtype: how its weights are published; see `DTYPE_BYTES`.
    """

    name: str
    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    tied: bool
    weights_dtype: str = "bf16"

    # ---- what is kept

    def kv_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Bytes that the layers without a window keep of a position."""
        return self._bytes(sum(layer.kv_numbers for layer in self.layers if layer.window is None), dtype)

    def window_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Bytes that the layers with a window keep of a position inside it."""
        return self._bytes(sum(layer.kv_numbers for layer in self.layers if layer.window is not None), dtype)

    def window_bytes(self, tokens: int, dtype: str = "bf16") -> int:
        """Bytes that the layers with a window keep of a prefix of so many tokens."""
        kept = (layer.kv_numbers * min(tokens, layer.window) for layer in self.layers if layer.window is not None)
        return self._bytes(sum(kept), dtype)

    def state_bytes(self, dtype: str = "bf16", state_dtype: str = "fp32") -> int:
        """Bytes of one checkpoint of all recurrent states.

        Args:
            dtype: of the convolutions' part.
            state_dtype: of the rest.
        """
        conv = self._bytes(sum(layer.conv_numbers for layer in self.layers), dtype)
        recurrent = sum(layer.recurrent_numbers for layer in self.layers)
        return conv + int(recurrent * dtype_bytes("state_dtype", state_dtype))

    def prefix_bytes(self, tokens: int, dtype: str = "bf16", state_dtype: str = "fp32") -> int:
        """Bytes that one prefix of so many tokens needs to be continued."""
        kept = tokens * self.kv_bytes_per_token(dtype) + self.window_bytes(tokens, dtype)
        return kept + self.state_bytes(dtype, state_dtype)

    @staticmethod
    def _bytes(numbers: int, dtype: str) -> int:
        return int(numbers * dtype_bytes("dtype", dtype))

    # ---- what it weighs

    @property
    def parameters(self) -> int:
        """Of all matrices; norms and biases, below a thousandth, are left out."""
        around = self.hidden_size * self.vocab_size * (1 if self.tied else 2)
        return around + sum(layer.parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Those that one token meets, logits included."""
        return self.hidden_size * self.vocab_size + sum(layer.active_parameters for layer in self.layers)

    def met_parameters(self, tokens: ArrayLike) -> Floats:
        """Those that so many tokens meet together, logits included; element by element.

        Of experts, those that one token or another is sent to, as if each drew its own: all but (1 - routed) ** tokens.

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
        """How often tensor parallelism over so many devices keeps the same KV: more than they have parts, repeat.

        Args:
            devices: 1 or more.
        """
        parts = min((layer.kv_parts for layer in self.layers if layer.kv_parts), default=devices)
        return -(-devices // parts)

    def weights_bytes(self, dtype: str | None = None) -> int:
        """Bytes of all weights.

        Args:
            dtype: None: as published.
        """
        return int(self.parameters * dtype_bytes("weights_dtype", dtype or self.weights_dtype))

    # ---- what computing costs

    def prefill_flops(self, tokens: ArrayLike, past: ArrayLike = 0) -> Floats:
        """FLOPs of computing `tokens` tokens behind `past` cached ones; element by element.

        Args:
            tokens: 1 or more of each prompt.
            past: positions before them, already known.
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
    """Positions that the first `tokens` queries see together: the j-th sees j, or the window."""
    inside = tokens if window is None else np.minimum(tokens, window)
    seen: Floats = inside * (inside + 1) / 2 + (tokens - inside) * (window or 0)
    return seen
