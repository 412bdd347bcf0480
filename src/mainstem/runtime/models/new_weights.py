"""New weights for a model that runs: read and checked on a caller's thread, copied over the old ones between two steps.

    folder, state dict  -> read_new: names, shapes, dtype, digest ->  NewWeights  -> put, on every rank

The tensors stay where they are, since kernels and recorded steps know their addresses. Shapes and the configuration
stay, so what the self-tests of the start found stays true, too. This module does not know the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.models.loading import LoadedModel, load_other_weights
from mainstem.runtime.models.quantization import packed

_HASHED_AT_ONCE = 1 << 26  # bytes that are copied from a device together


@dataclass(frozen=True, slots=True, eq=False)
class NewWeights:
    """Weights that fit a model. Made by `read_new`.

    Args:
        digest: BLAKE2b over names, shapes, dtypes and numbers, in hex.
        folder: from which every rank of several reads its part.
        files: that it had when the digest was made: name, size and time.
        tensors: by the model's names, in its dtypes; for a single rank.
    """

    digest: str
    folder: str | None = None
    files: tuple[tuple[str, int, int], ...] = ()
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def put(self, loaded: LoadedModel) -> None:
        """Copies them over those of a model. All ranks call it together, between two steps.

        Raises:
            BadArgument: a rank cannot read the folder any more; no rank has changed anything.
        """
        given, problem = self.tensors, ""
        if self.folder is not None:
            try:
                given = load_other_weights(self.folder, loaded, divided=True).state_dict()
                problem = "" if _files(self.folder) == self.files else "it has changed since it was checked"
            except (BadArgument, OSError) as error:
                problem = str(error)
        (all_can,) = loaded.ranks.agree([int(not problem)])
        if not all_can:
            raise BadArgument("weights", self.folder, f"a folder that every rank can read {problem}")
        with torch.no_grad():
            own = loaded.model.state_dict()
            for name in {*_first_names(own).values()}:
                _local(own[name]).copy_(_local(given[name]))


def read_new(loaded: LoadedModel, weights: str | Path | Mapping[str, torch.Tensor]) -> NewWeights:
    """Reads and checks weights for a model that runs. Callable from any thread; a state dict must not change meanwhile.

    Args:
        loaded: the model.
        weights: a folder, or for a single rank a state dict.

    Raises:
        BadArgument: there is no such folder, or a tensor is missing, is not one of the model's or has another shape.
        UnsupportedModel: the model is quantized or takes images.
    """
    if any(packed(module) is not None for module in loaded.model.modules()):
        raise UnsupportedModel(f"{loaded.name}: quantized weights cannot be changed while the model runs")
    if loaded.processor is not None:
        raise UnsupportedModel(f"{loaded.name}: the weights of a model that takes images cannot be changed")
    folder = str(weights)
    files: tuple[tuple[str, int, int], ...] = ()
    if not isinstance(weights, (str, Path, Mapping)):
        raise BadArgument("weights", type(weights).__name__, "a folder or a state dict")
    if isinstance(weights, Mapping) and loaded.ranks.size > 1:
        raise BadArgument("weights", "a state dict", "a folder, which every rank reads")
    if isinstance(weights, (str, Path)):
        files = _files(folder)
        weights = load_other_weights(weights, loaded, divided=False).state_dict()
    tensors = _fitted(loaded.model.state_dict(), weights)
    digest = _digest(tensors)
    return NewWeights(digest, folder, files) if loaded.ranks.size > 1 else NewWeights(digest, None, (), tensors)


def _files(folder: str) -> tuple[tuple[str, int, int], ...]:
    """Returns what tells whether a folder has changed; nothing of one that is not there, which is refused elsewhere."""
    paths = Path(folder)
    found = ((each.name, each.stat()) for each in sorted(paths.iterdir())) if paths.is_dir() else ()
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _fitted(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns what is given for each tensor of a model, by the first of its names, in its dtype."""
    if unknown := sorted(given.keys() - own.keys()):
        raise BadArgument("weights", unknown[0], "a tensor of the model")
    first = _first_names(own)
    fitted: dict[str, torch.Tensor] = {}
    for name, tensor in given.items():
        ours, to = own[name], first[name]
        fits = isinstance(tensor, torch.Tensor) and tensor.shape == ours.shape
        if not fits or tensor.is_floating_point() != ours.is_floating_point():
            is_ = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise BadArgument("weights", f"{name}: {is_}", f"{tuple(ours.shape)} {ours.dtype}, as the model has it")
        if to in fitted and fitted[to].data_ptr() != tensor.data_ptr() and not torch.equal(fitted[to], tensor):
            raise BadArgument("weights", name, f"the same as {to}, which the model has as one tensor")
        fitted[to] = tensor.detach()
    if missing := sorted(set(first.values()) - fitted.keys()):
        raise BadArgument("weights", f"without {missing[0]}", "all tensors of the model")
    return {name: fitted[name].to(own[name].dtype) for name in sorted(fitted)}


def _first_names(own: Mapping[str, Any]) -> dict[str, str]:
    """Returns for each name of a tensor the first name of the same one: tensors that are tied lie in one place."""
    first: dict[object, str] = {}
    for name, tensor in own.items():
        first.setdefault((_local(tensor).data_ptr(), tensor.shape), name)
    return {name: first[_local(tensor).data_ptr(), tensor.shape] for name, tensor in own.items()}


def _local(tensor: Any) -> torch.Tensor:
    """Returns this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    def one(name: str) -> bytes:
        tensor = tensors[name]
        hasher = hashlib.blake2b(f"{name} {tuple(tensor.shape)} {tensor.dtype}\0".encode())
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        for begin in range(0, len(flat), _HASHED_AT_ONCE):
            part: Any = flat[begin : begin + _HASHED_AT_ONCE].cpu().numpy()
            hasher.update(part)
        return hasher.digest()

    with ThreadPoolExecutor() as pool:
        return hashlib.blake2b(b"".join(pool.map(one, sorted(tensors))), digest_size=32).hexdigest()
