"""Exchanges the scans and convolutions of recurrent layers for code that computes token by token, in one order.

transformers has two functions for each scan: one for a single token, and one that computes chunks of the new tokens by
products. Their bits differ, and those of a chunk depend on where the forward begins. Here both are one scan of the core
(docs/arithmetic.md). A layer runs its own forward, which finds our functions by the names of transformers' own:

    gated delta rule, by head or by key number     Qwen3-Next, Qwen3.5, OLMo Hybrid; Kimi Linear, Ling 3
    Mamba 2                                        and Bamba, Falcon-H1, Nemotron-H, Granite 4
    causal convolutions                            these, and LFM2

This module knows neither pools nor prompts. `states` proves that a model goes on from its states with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from mainstem import _core
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.kernels.functions import silu, softplus

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EPSILON = 1e-6  # of the norms of queries and keys
_Limit = tuple[float, float]


def exchange_scans(model: PreTrainedModel) -> Callable[[], None] | None:
    """Makes the recurrent layers of a model on a CPU compute by the functions of this module.

    Returns:
        A function that undoes it; None, and `model` is unchanged, if no layer's code is known.
    """
    found = [module for module in model.modules() if "forward" not in vars(module) and _is_known(module)]
    if model.device.type != "cpu" or not kernels.instructions():
        return None
    for module in found:
        module.forward = MethodType(_with_ours(type(module)), module)

    def undo() -> None:
        for module in found:
            del module.forward

    return undo if found else None


def _is_known(module: torch.nn.Module) -> bool:
    """Returns whether our functions are all that a layer's own code needs."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = set() if code is None else {*code.co_names}
    return not names.isdisjoint(_OURS) and names.isdisjoint(_OTHERS)


def _with_ours(kind: type[torch.nn.Module]) -> Callable[..., Any]:
    own: Any = inspect.unwrap(kind.forward)
    names = {**own.__globals__, **_OURS}
    made = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


# ---------------------------------------------------------------- convolutions


def convolve(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """Computes a causal convolution of each channel, [rows, channels, tokens], from zeros.

    Args:
        hidden_states: as above.
        weight: [channels, width].
        bias: [channels].
        activation: of the results: None, or "silu".
    """
    return _convolved(pad(hidden_states, (weight.shape[-1] - 1, 0)), weight, bias, activation)


def convolve_next(
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Computes the same after the tokens that `conv_state` [rows, channels, n] holds, and keeps the last n there."""
    seen = torch.cat([conv_state, hidden_states.to(conv_state.dtype)], dim=-1)
    conv_state.copy_(seen[:, :, -conv_state.shape[-1] :])
    needed = hidden_states.shape[-1] + weight.shape[-1] - 1
    return _convolved(seen[:, :, -needed:].to(hidden_states.dtype), weight, bias, activation)


def _convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Adds up products from the earliest token on, in float32, and rounds the sum; then the activation, likewise."""
    width, factors, numbers = weight.shape[-1], weight.float(), x.float()
    tokens = x.shape[-1] - width + 1
    total = numbers[..., :tokens] * factors[:, :1]
    product = torch.empty_like(total)
    for at in range(1, width):
        total += torch.mul(numbers[..., at : at + tokens], factors[:, at : at + 1], out=product)
    if bias is not None:
        total += bias.float()[:, None]
    out = total.to(x.dtype)
    if activation is None:
        return out
    assert activation in ("silu", "swish"), activation
    return silu(out)


# ---------------------------------------------------------------- scans


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the gated delta rule for one token or many.

    Args:
        query, key: [rows, tokens, heads, numbers], of as many heads as `value`, or of a divisor of them.
        value: [rows, tokens, heads, numbers].
        g: the logarithm of the decays, [rows, tokens, heads], or [rows, tokens, heads, numbers of a key].
        beta: [rows, tokens, heads].
        initial_state: [rows, heads, numbers of a key, numbers of a value]; None: zeros. It is not changed.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: whether queries and keys are divided by their norms.

    Returns:
        Like `value`, of the dtype of `query`; and the state in float32.
    """
    q, k, v, decays, betas = (x.float().contiguous() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + _EPSILON) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    group = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k)) if group > 1 else (q, k)
    out, state = _scanned(q, k, v, torch.exp(decays), betas, initial_state)
    return out.to(query.dtype), state if output_final_state else None


def mamba2_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803  transformers gives them by these names
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int = 0,
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: _Limit = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the scan of Mamba 2 for many tokens.

    Args:
        hidden_states: [rows, tokens, heads, numbers].
        dt: [rows, tokens, heads], before its bias and softplus.
        A: [heads].
        B, C: [rows, tokens, groups, n].
        chunk_size: of transformers' scan; it has no effect.
        D: [heads].
        z: like `hidden_states`, gates the result.
        dt_bias: [heads].
        initial_states: [rows, heads, numbers, n]; None: zeros. It is not changed.
        dt_softplus: whether `dt` is the softplus of what is given.
        dt_limit: of `dt`.
        return_final_states: whether to return the state after the last token, too.

    Returns:
        Like `hidden_states`, and with `return_final_states` the state; both in float32.
    """
    x, heads = hidden_states.float(), hidden_states.shape[2]
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    steps = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    k, q = (each.float().repeat_interleave(heads // each.shape[2], 2).contiguous() for each in (B, C))
    state = None if initial_states is None else initial_states.transpose(-1, -2)
    decays = torch.exp(A.float() * steps).contiguous()
    out, after = _scanned(q, k, (x * steps[..., None]).contiguous(), decays, None, state)
    if D is not None:
        out = out + D.float()[:, None] * x
    if z is not None:
        out = out * silu(z)
    return (out, after.transpose(-1, -2).contiguous()) if return_final_states else out


def mamba2_step(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """Computes the same for one token of each row, and overwrites `state`; what is the same for a head is expanded."""
    out, after = mamba2_scan(
        hidden_states[:, None],
        dt[:, None, :, 0],
        A[:, 0, 0],
        B[:, None],
        C[:, None],
        D=None if D is None else D[:, 0],
        z=None if z is None else z[:, None],
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        initial_states=state,
        dt_softplus=dt_softplus,
        return_final_states=True,
    )
    state.copy_(after)
    return out[:, 0]


def _scanned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor | None,
    before: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the core's scan. Returns its results, and the state after the last token, [rows, heads, keys, values]."""
    rows, tokens, heads, values = v.shape
    state = v.new_zeros(rows, heads, k.shape[-1], values)
    if before is not None:
        state.copy_(before)
    out = torch.empty_like(v)
    _core.scan(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        decays.data_ptr(),
        0 if betas is None else betas.data_ptr(),
        state.data_ptr(),
        out.data_ptr(),
        (rows, tokens, heads, k.shape[-1], values),
        decays.dim() == 4,
        torch.get_num_threads(),
    )
    return out, state


_OURS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve,
    "causal_conv1d_update": convolve_next,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "recurrent_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
    "mamba2_selective_state_update": mamba2_step,
}
"""By the names of transformers' functions."""

_OTHERS = frozenset({"mamba_selective_scan", "mamba_selective_state_update"})
"""Scans of layers that stay as they are (`scans`)."""
