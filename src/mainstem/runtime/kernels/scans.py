"""Scans that go on from a state, for layers whose own start from zeros.

transformers computes several tokens of a Mamba 1 layer by a function without an argument for the state before them. So
only one token at a time may follow a state. `resume` gives such a layer a forward that is transformers' own code, but
calls the scan of this module, from the state in the cache. Nothing else changes, and a forward without a state is as
before. Whether the result is right, `states.prove` tests for each model.

This module knows neither pools nor prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import silu, softplus

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

# Tokens whose states are in memory at once.
_BLOCK = 64


def selective_scan(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    D: torch.Tensor | None = None,  # noqa: N803  transformers gives it by this name
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the selective scan of Mamba 1: h = exp(dt a) h + dt b x, y = c h + D x, gated by z.

    Args:
        state: h before the first token, [rows, channels, n]; it is not changed.
        x: [rows, channels, tokens].
        dt: like `x`, before its bias and softplus.
        a: [channels, n].
        b: [rows, n, tokens].
        c: like `b`.
        D: [channels].
        z: like `x`.
        delta_bias: of `dt`, [channels].
        delta_softplus: whether `dt` is the softplus of what is given.
        return_last_state: whether to return h after the last token, too, in float32.

    Returns:
        y, like `x`; with `return_last_state`, y and h.
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[:, None]
    if delta_softplus:
        dt = softplus(dt)
    # Tokens first, so that the state after each is contiguous.
    steps, inputs, keys, queries = (part.permute(2, 0, 1) for part in (dt.float(), x.float(), b.float(), c))
    state = state.float()
    parts = []
    for begin in range(0, len(steps), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        decays = torch.exp(steps[block, :, :, None] * a)
        states = (steps[block] * inputs[block])[..., None] * keys[block, :, None, :]
        for after, decay in zip(states, decays, strict=True):
            state = torch.addcmul(after, decay, state, out=after)
        parts.append((states.to(c.dtype) @ queries[block, :, :, None]).squeeze(-1))
    y = torch.cat(parts).permute(1, 2, 0)
    if D is not None:
        y = y + x * D[:, None]
    if z is not None:
        y = y * silu(z)
    return (y, state) if return_last_state else y


_SCANS: Mapping[str, Callable[..., Any]] = {"mamba_selective_scan": selective_scan}
"""By the name of transformers' function; ours takes the state as well, first."""


def resume(model: PreTrainedModel) -> Callable[[], None] | None:
    """Makes the layers of `model` go on from the states in their cache, where transformers' scans start from zeros.

    Returns:
        A function that undoes it; None, and `model` is unchanged, if no layer calls such a scan.
    """
    own = (module for module in model.modules() if "forward" not in vars(module) or _is_ours(module))
    found = [(module, name) for module in own if (name := _scan_of(module)) is not None]
    for module, name in found:
        module.forward = _resumed(module, name)

    def undo() -> None:
        for module, _ in found:
            del module.forward

    return undo if found else None


def is_resumed(model: PreTrainedModel) -> bool:
    """Returns whether layers of `model` call scans of this module, by an earlier `resume`."""
    return any(_is_ours(module) for module in model.modules())


def _is_ours(module: torch.nn.Module) -> bool:
    """Returns whether `resume` has exchanged a layer's forward, as others may have, too."""
    return getattr(vars(module).get("forward"), "__module__", None) == __name__


def _scan_of(module: torch.nn.Module) -> str | None:
    """Returns the name of the scan that a layer's own code calls, if it is one of `_SCANS`."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return None if code is None else next((name for name in _SCANS if name in code.co_names), None)


def _resumed(module: Any, name: str) -> Callable[..., torch.Tensor]:
    """Returns a layer's own forward, with our scan in place of the function `name` if there is a state."""
    own = inspect.unwrap(type(module).forward)

    def forward(hidden_states: torch.Tensor, cache_params: Cache | None = None, **others: Any) -> torch.Tensor:
        state = None if cache_params is None else cache_params.get_recurrent_state(module.layer_idx)
        if state is None:
            fresh: torch.Tensor = type(module).forward(module, hidden_states, cache_params, **others)
            return fresh
        names = {**own.__globals__, name: partial(_SCANS[name], state)}
        with_ours = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        resumed: torch.Tensor = with_ours(module, hidden_states, cache_params, **others)
        return resumed

    return forward
