"""Proves that ranks together compute what their model computes undivided.

transformers divides a model by a plan of its family. If the plan is wrong, nothing fails: the numbers differ. So the
ranks run short prompts through their parts, and then each through a twin of the whole model. The twin has no weights of
its own. Those of a layer are put together from all ranks before the layer runs, and dropped after it.

This module knows PyTorch's distributed tensors. It does not know pages or requests.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from mainstem.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROMPTS, _TOKENS = 2, 12


def prove_division(model: PreTrainedModel, name: str, limit: float) -> None:
    """Compares the logits of short prompts with those of the undivided model. All ranks call it together.

    Args:
        model: a rank's part, with its own attention.
        name: of the model.
        limit: the largest difference of logits to take for rounding, as a fraction of their spread.

    Raises:
        UnsupportedModel: they differ by more, or the model cannot be compared.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(vocab_size, (_PROMPTS, _TOKENS), generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            divided, undivided = (_logits(each, tokens) for each in (model, _twin(model)))
    except Exception as error:  # models raise all kinds
        raise UnsupportedModel(f"{name} cannot be compared with its parts on several ranks: {error}") from error
    difference = float((divided - undivided).abs().max() / (undivided.max() - undivided.min()))
    if not difference <= limit:  # nor if it is not a number
        dtype = str(model.dtype).removeprefix("torch.")
        help_ = "" if dtype == "float32" else ": --dtype float32 rounds less, and --tp 1 divides nothing"
        raise UnsupportedModel(
            f"{name}: divided among several ranks by its plan, its logits in {dtype} differ by {difference:.2g} of "
            f"their spread; {limit:g} is allowed{help_}"
        )


def whole(weight: Any) -> Any:
    """Returns a weight, put together where several ranks have a part of it."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens.to(model.device), use_cache=False).logits.float()
    return logits


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the undivided model, whose weights are there only while the layer runs that they belong to."""
    with torch.device("meta"):
        twin: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    twin.eval()  # type: ignore[no-untyped-call]
    parts = dict(model.named_parameters(remove_duplicate=False))
    own: dict[str, dict[str, torch.Tensor]] = {}
    for path, module in twin.named_modules():
        for name, _ in [*module.named_buffers(recurse=False)]:
            setattr(module, name, getattr(model.get_submodule(path), name))
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            own.setdefault(_layer(path), {})[f"{path}.{name}"] = parts[f"{path}.{name}".lstrip(".")]
    for path, weights in own.items():
        _lend(twin, twin.get_submodule(path), weights)
    return twin


def _layer(path: str) -> str:
    """Returns the path of the layer that a module is in, up to its number; of the module itself if it is in none."""
    match = re.match(r".*?\.\d+(?=\.|$)", path)
    return path if match is None else match[0]


def _lend(twin: PreTrainedModel, layer: torch.nn.Module, parts: Mapping[str, torch.Tensor]) -> None:
    """Gives a layer its weights while it runs; else they are numbers of the same shape that take no memory."""

    def put(path: str, weight: torch.Tensor) -> None:
        owner, _, name = path.rpartition(".")
        setattr(twin.get_submodule(owner), name, torch.nn.Parameter(weight, requires_grad=False))

    def give(*_: object) -> None:
        for path, part in parts.items():
            put(path, whole(part.detach()))

    def take(*_: object) -> None:
        for path, part in parts.items():
            put(path, torch.zeros((), dtype=part.dtype, device=part.device).expand(part.shape))

    take()
    layer.register_forward_pre_hook(give)
    layer.register_forward_hook(take)
