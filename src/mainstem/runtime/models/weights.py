"""Tells whether a model's weights have changed since a cache was made over it.

This module knows PyTorch's parameters and PEFT's layers. It does not know the cache.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from mainstem.cache.namespaces import Namespace

_PROBED = 4  # numbers of each weight that are compared


class Weights:
    """Tells whether a model has the weights that it had, without reading all of them.

    Compared are where each weight is, how often PyTorch has changed it in place, and its first numbers, for changes
    that PyTorch does not count. Adapters that are active are weights of their own.

    Args:
        model: with the weights that prefixes in a plain namespace belong to.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._salt = secrets.token_bytes(16)  # addresses mean nothing to other processes
        self._first = self._read()

    def name_in(self, namespace: Namespace) -> Namespace | None:
        """Returns the namespace of the weights as they are now; None: rows of a batch have different adapters."""
        now = self._read()
        if now == self._first:
            return namespace
        return None if now is None else replace(namespace, extra=(*namespace.extra, f"weights {now}"))

    def _read(self) -> str | None:
        adapters = _adapters(self._model)
        if any(layer._forward_pre_hooks for layer in adapters):
            return None
        unused: set[int] = set()
        settings: list[list[tuple[str, float | None]]] = []
        for layer in adapters:
            plain = {id(weight) for weight in _wrapped(layer).parameters()}
            active = set() if layer.disable_adapters else {*layer.active_adapters}
            own = ((id(weight), name) for name, weight in layer.named_parameters() if id(weight) not in plain)
            unused |= {weight for weight, name in own if not active & {*name.split(".")}}
            scaling = getattr(layer, "scaling", {})
            settings.append([(name, scaling.get(name)) for name in sorted(active)])
        weights = [weight for weight in self._model.parameters() if id(weight) not in unused]
        places = [(weight.data_ptr(), -1 if weight.is_inference() else weight._version) for weight in weights]
        first: dict[torch.dtype, list[torch.Tensor]] = {}
        for weight in weights:
            if type(weight.data) is torch.Tensor and weight.numel():  # others may lie elsewhere
                part = weight.detach().as_strided((min(_PROBED, weight.numel()),), (1,))
                first.setdefault(weight.dtype, []).append(part)
        probes = [torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes() for parts in first.values()]
        given = repr(([part for part in settings if part], places, probes)).encode()
        return hashlib.blake2b(given, key=self._salt, digest_size=16).hexdigest()


def _adapters(model: PreTrainedModel) -> list[Any]:
    """Returns the layers that PEFT has put around layers of a model."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


def _wrapped(layer: Any) -> torch.nn.Module:
    """Returns the layer that one of PEFT's is around."""
    inner: torch.nn.Module = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.original_module
    return inner
