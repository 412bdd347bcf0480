"""Exchanges the layers of a decoder for calls of the core, where they are Llama's.

    x += attention(norm(x))     11 modules and functions of transformers, each with Python of its own:
    x += mlp(norm(x))           together they take longer than the work of a decode step

A layer is exchanged if its code is that of Llama, Mistral, Qwen 2 or Qwen 3, instruction by instruction, and if it then
computes the same: in the self-test of a runner, both compute, and what differs stays as it was. The layer keeps its
class, its weights and its submodules. It computes by its own code when it has an adapter or a cache.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import CodeType, MethodType
from typing import Any

import torch
from torch import nn

from mainstem import _core
from mainstem.runtime.attention.few_rows import PageAttention, page_plan
from mainstem.runtime.attention.paged import BatchPlan, Paging
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.kernels.exchanges import is_exchanged, rounding_error, weights_of

# Of a linear layer's rounding: in bfloat16, a layer's own code rounds a dozen times where the kernel does not. A row
# whose numbers mostly cancel shows it most.
_ROUNDING = {torch.float32: 1.0, torch.bfloat16: 12.0}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


def exchange_layers(model: Any) -> int:
    """Prepares the layers of `model` that a kernel may compute, and returns their number; `settle` exchanges them.

    Until then a layer computes by its own code, and a forward compares.

    Args:
        model: whose linear layers and norms are exchanged where they can be.
    """
    found = 0
    for layer in getattr(model.get_decoder(), "layers", ()):
        if _is_known(layer) and (kernel := _Kernel.of(layer)) is not None:
            vars(layer).update(forward=MethodType(_compare, layer), kernel=kernel)
            found += 1
    return found


def settle(model: Any) -> tuple[int, int]:
    """Exchanges the layers that computed the same since `exchange_layers`. Returns their number, and that of others."""
    ours = refused = 0
    before: _Kernel | None = None
    for layer in getattr(model.get_decoder(), "layers", ()):
        kernel: _Kernel | None = vars(layer).get("kernel") if _computes_by(layer, _compare) else None
        if kernel is not None and kernel.is_proven:
            vars(layer).update(forward=MethodType(_layer, layer))
            ours += 1
        elif kernel is not None:
            del layer.forward, layer.kernel
            refused += 1
            kernel = None
        if before is not None:
            before.goes_on = kernel is not None
        before = kernel
    return ours, refused


def restore_layers(model: nn.Module) -> None:
    """Makes the layers of a model compute by their own code again."""
    for layer in model.modules():
        if _computes_by(layer, _compare) or _computes_by(layer, _layer):
            del layer.forward, layer.kernel


def _computes_by(module: nn.Module, forward: Callable[..., torch.Tensor]) -> bool:
    own = vars(module).get("forward")
    return isinstance(own, MethodType) and own.__func__ is forward


# ---- layers whose code is known


@cache
def _known_code() -> dict[str, set[object]]:
    """Returns the code of the forwards of layers, attention and MLP, and of the rotation, that the kernel computes."""
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.mistral import modeling_mistral as mistral
    from transformers.models.qwen2 import modeling_qwen2 as qwen2
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    attentions = (llama.LlamaAttention, mistral.MistralAttention, qwen2.Qwen2Attention, qwen3.Qwen3Attention)
    return {
        "layer": {_code(llama.LlamaDecoderLayer.forward)},
        "attention": {_code(attention.forward) for attention in attentions},
        "mlp": {_code(llama.LlamaMLP.forward)},
        "rotation": {_code(llama.apply_rotary_pos_emb)},
        "half": {_code(llama.rotate_half)},
    }


def _code(function: Callable[..., object]) -> object:
    """Returns what a function does, whatever its module and its annotations."""
    code = inspect.unwrap(function).__code__
    constants = tuple(each for each in code.co_consts[1:] if not isinstance(each, CodeType))  # the first is its text
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_argcount, code.co_kwonlyargcount


def _is_known(layer: nn.Module) -> bool:
    """Returns whether the code of a layer and of its parts is known."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None:
        return False
    module = sys.modules[type(attention).__module__]
    given = {
        "layer": type(layer).forward,
        "attention": type(attention).forward,
        "mlp": type(mlp).forward,
        "rotation": getattr(module, "apply_rotary_pos_emb", None),
        "half": getattr(module, "rotate_half", None),
    }
    known = _known_code()
    return all(function is not None and _code(function) in known[name] for name, function in given.items())


# ---- the kernel of a layer


class _Kernel:
    """The arguments of the core for a layer.

    Args:
        layer: the layer.
        core: the core's own.

    Attributes:
        goes_on: whether a kernel computes the next layer, too. It is then given float32, which nothing has rounded.
    """

    def __init__(self, layer: Any, core: _core.DecoderLayer) -> None:
        attention = layer.self_attn
        self._core, self._index = core, int(attention.layer_idx)
        self._weights = [weight.data for weight in layer.parameters()]  # at the addresses that the core has
        self._dtype = self._weights[0].dtype
        self._numbers = int(attention.head_dim)
        self._differs = self._compared = self.goes_on = False

    @classmethod
    def of(cls, layer: Any) -> _Kernel | None:
        """Returns the kernel of a layer whose code is known; None if the core has none for its modules."""
        attention, mlp = layer.self_attn, layer.mlp
        linears = [getattr(attention, name) for name in _PROJECTIONS] + [getattr(mlp, name) for name in _MLP]
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        modules = [*linears, *(norm for norm in norms if norm is not None)]
        activation = _activation(mlp.act_fn)
        hooks = ("_forward_hooks", "_forward_pre_hooks")
        parts = [attention, mlp, mlp.act_fn, *modules]
        if activation is None or not all(is_exchanged(module) for module in modules):
            return None
        if any(getattr(module, name) for module in parts for name in hooks):
            return None  # they want to see what the kernel does not show
        heads, kv_heads = (len(linear.weight) // attention.head_dim for linear in linears[:2])
        sizes = (linears[0].in_features, len(linears[4].weight), heads, kv_heads, attention.head_dim)
        if (
            any(size % kernels.STEP for size in (*sizes[:2], attention.head_dim))
            or linears[2].out_features != linears[1].out_features
        ):
            return None
        core = _core.DecoderLayer(
            sizes,
            [_norm_of(norm) for norm in norms],
            [weights_of(linear).addresses for linear in linears],
            attention.scaling,
            activation,
            linears[0].weight.dtype is torch.bfloat16,
        )
        return cls(layer, core)

    def __deepcopy__(self, memo: object) -> None:
        """The copy of a layer computes by its own code: its weights are not at the addresses that the core has."""

    @property
    def is_proven(self) -> bool:
        """Whether it has computed, and never anything else than the layer's own code."""
        return self._compared and not self._differs

    def takes(self, x: torch.Tensor, given: Mapping[str, Any]) -> bool:
        """Returns whether it computes a layer that is given x [1, rows, hidden] and these arguments."""
        paging: Paging | None = given.get("paging")
        return (
            paging is not None
            and not paging.adapted
            and isinstance(paging.attention, PageAttention)
            and x.shape[0] == 1
            and x.dtype in (self._dtype, torch.float32)
            and given.get("attention_mask") is None
            and given.get("past_key_values") is None
            and not torch.is_grad_enabled()
        )

    def compute(self, x: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
        """Computes the layer, for what it `takes`."""
        plan, layer, (cosines, sines) = self._begin(x, given)
        keys, values = (plane.numbers for plane in plan.pool.layer(layer))
        out = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._core.run(
            out.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            page_plan(plan, range(len(plan.extents))).core,
            keys.data_ptr(),
            values.data_ptr(),
            plan.slot_ids,
            keys.shape[0] * keys.shape[1],
            torch.get_num_threads(),
        )
        return out if self.goes_on else out.to(self._dtype)

    def _begin(
        self, x: torch.Tensor, given: Mapping[str, Any]
    ) -> tuple[BatchPlan, int, tuple[torch.Tensor, torch.Tensor]]:
        """Waits for the layer's keys. Returns the plan, the layer's index in its pool, and the angles of the rows."""
        paging: Paging = given["paging"]
        for ticket in paging.arriving:
            ticket.wait_layer(self._index)
        name, layer = paging.places[self._index]
        cosines, sines = (part.contiguous() for part in given["position_embeddings"])
        assert cosines.shape == sines.shape == (1, x.shape[1], self._numbers) and cosines.dtype is self._dtype
        return paging.plans[name], layer, (cosines, sines)

    def compare(self, x: torch.Tensor, given: Mapping[str, Any], own: torch.Tensor) -> None:
        """Compares with what the layer's own code has just computed, its keys and values included."""
        paging: Paging = given["paging"]
        name, layer = paging.places[self._index]
        before = _written(paging.plans[name], layer)
        pairs = zip([self.compute(x, given), *_written(paging.plans[name], layer)], [own, *before], strict=True)
        self._differs |= not all(rounding_error(a, b) <= _ROUNDING[self._dtype] for a, b in pairs)
        self._compared = True


def _written(plan: BatchPlan, layer: int) -> list[torch.Tensor]:
    """Returns copies of the new keys and values of a layer."""
    return [plane.numbers.flatten(0, 1)[torch.from_numpy(plan.slot_ids)].flatten(1) for plane in plan.pool.layer(layer)]


def _norm_of(norm: Any) -> tuple[int, float, float]:
    if norm is None:
        return 0, 0.0, 0.0
    return norm.weight.data_ptr(), norm.kernel.epsilon, norm.kernel.offset


def _activation(module: nn.Module) -> str | None:
    """Returns which activation a module is."""
    x = torch.linspace(-20, 20, 2001)
    with torch.inference_mode():
        found = module(x)
        return next((name for name, known in _ACTIVATIONS.items() if torch.equal(found, known(x))), None)


def _layer(layer: Any, hidden_states: torch.Tensor, *others: Any, **given: Any) -> torch.Tensor:
    """The `forward` of an exchanged layer."""
    kernel: _Kernel | None = vars(layer)["kernel"]
    if kernel is not None and not others and kernel.takes(hidden_states, given):
        return kernel.compute(hidden_states, given)
    own: torch.Tensor = type(layer).forward(layer, hidden_states, *others, **given)
    return own


def _compare(layer: Any, hidden_states: torch.Tensor, *others: Any, **given: Any) -> torch.Tensor:
    """The `forward` of a layer that is not proven yet."""
    kernel: _Kernel | None = vars(layer)["kernel"]
    own: torch.Tensor = type(layer).forward(layer, hidden_states, *others, **given)
    if kernel is not None and not others and kernel.takes(hidden_states, given):
        kernel.compare(hidden_states, given, own)
    return own
