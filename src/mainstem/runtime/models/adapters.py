"""LoRA adapters: small changes to a model's weights that are switched on for one forward at a time.

An adapter's layers are made once, around the model's own, and are put in place while the adapter is selected:

    decoder.layers[0].self_attn.q_proj  ->  plain layer                      no adapter: the original module
                                        ->  B A x + plain layer              inside `select(adapter)`

So the base model computes the same as without this module, bit for bit, and adapters are independent of each other. A
hash of the adapter's weights is part of its name in the cache: a request computes with what its namespace names.

Supported are adapters whose KV depends only on the tokens before it, as the cache requires: low-rank changes of the
decoder's linear layers and embeddings. This module knows PEFT and the model's layers. It does not know requests, pages
or the cache. PEFT: https://huggingface.co/docs/peft.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.imports import needs

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"[!-~]{1,256}")
_PEFT_NAME = "mainstem"  # PEFT's name of each adapter; PEFT never has two at once, so one name serves all

# Settings of PEFT's LoraConfig that are honoured as given.
_HONOURED = (
    "r", "target_modules", "exclude_modules", "lora_alpha", "fan_in_fan_out", "use_rslora", "layers_to_transform",
    "layers_pattern", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias",
)  # fmt: skip

# Settings that do not affect what a loaded adapter computes.
_HARMLESS = frozenset({
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "runtime_config", "qalora_group_size", "eva_config",
})  # fmt: skip

# Other settings are accepted only if they are off; these values also mean off.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    # How training began; the other values change the base model's weights.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}

# More than any adapter has: PEFT allocates memory by the settings before it reads the weights.
_MAX_RANK = 1024

_PLAIN = re.compile(r"[\w.\-]+")
_LORA_A_KEY = re.compile(r"\.lora_(embedding_)?A(\.|$)")
_LORA_KEY = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.|$)")


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFiles:
    """An adapter read from disk: its kind can be served, but it is not fitted to a model. Made by `read_adapter`.

    Args:
        digest: SHA-256 over configuration and weights, in hex.
        settings: the arguments of PEFT's `LoraConfig`.
        tensors: its weights by their names in the file.
    """

    digest: str
    settings: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, torch.Tensor] = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One layer of the model, and the adapter's layer that replaces it."""

    parent: torch.nn.Module
    name: str
    plain: torch.nn.Module
    adapted: torch.nn.Module


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter that is ready to be selected. It stays usable while it is referenced, even if its name is reassigned.

    Args:
        name: the name that clients use.
        digest: SHA-256 over configuration and weights, in hex.
        places: where its layers take the place of the model's.
        inexact: why bits may depend on what is computed together, with it; None: they do not.
    """

    name: str
    digest: str
    places: tuple[_Place, ...] = field(repr=False)
    inexact: str | None = None

    @property
    def namespace(self) -> str:
        """The value of `Namespace.adapter`: different weights under one name never share; equal weights do."""
        return f"{self.name}@{self.digest}"


def name_of(namespace: str) -> str:
    """Returns the name of an adapter from `Adapter.namespace`."""
    return namespace.rpartition("@")[0]


class Adapters:
    """The adapters of one model. Only `names` and `get` may be called outside the thread that runs the model.

    Args:
        model: unchanged outside of `select`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._by_name: Mapping[str, Adapter] = {}  # replaced, never changed: others read it
        self._selected: Adapter | None = None
        self.watch: Callable[[Adapter], str | None] = lambda _: None

    @property
    def inexact(self) -> str | None:
        """Why bits may depend on what is computed together, with one of the adapters; None: with none of them."""
        found = (f"adapter {name}: {each.inexact}" for name, each in self._by_name.items() if each.inexact is not None)
        return next(found, None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the loaded adapters, in loading order. Callable from any thread."""
        return tuple(self._by_name)

    def get(self, name: str) -> Adapter:
        """Returns the adapter that a name means now. Callable from any thread.

        Raises:
            BadArgument: no adapter has this name.
        """
        known = self._by_name
        if name not in known:
            raise BadArgument("adapter", name, f"one of {', '.join(known) or '(none is loaded)'}")
        return known[name]

    def load(self, name: str, path: str | Path) -> Adapter:
        """Reads an adapter and adds it: `read_adapter`, then `add`."""
        check_name(name)
        return self.add(name, read_adapter(path))

    def add(self, name: str, files: AdapterFiles) -> Adapter:
        """Fits an adapter to the model, and registers it under a name, in place of the former adapter of that name.

        Raises:
            BadArgument: the name is invalid.
            UnsupportedModel: the adapter does not fit the model, or changes what it must not; nothing has changed.
        """
        check_name(name)
        former = self._by_name.get(name)
        if former is not None and former.digest == files.digest:
            return former
        try:
            adapter = Adapter(name, files.digest, self._fit(files))
            adapter = replace(adapter, inexact=self.watch(adapter))
        except Exception as error:  # PEFT raises all kinds; `_fit` has restored the model
            raise UnsupportedModel(f"adapter {name}: it does not fit the model: {_shortened(error)}") from error
        self._by_name = {**self._by_name, name: adapter}
        return adapter

    def unload(self, name: str) -> None:
        """Removes a name. The weights are freed once nothing references the adapter.

        Raises:
            BadArgument: no adapter has this name.
        """
        self.get(name)
        self._by_name = {other: adapter for other, adapter in self._by_name.items() if other != name}

    @contextmanager
    def select(self, adapter: Adapter | None) -> Iterator[None]:
        """Applies an adapter to the model inside the `with` block; None is the base model. Blocks do not nest."""
        assert self._selected is None, "an adapter is selected already"
        places = () if adapter is None else adapter.places
        self._selected = adapter
        try:
            for place in places:
                setattr(place.parent, place.name, place.adapted)
            yield
        finally:
            for place in places:
                setattr(place.parent, place.name, place.plain)
            self._selected = None

    def _fit(self, files: AdapterFiles) -> tuple[_Place, ...]:
        """Makes the adapter's layers around the model's, and leaves the model as it was."""
        from peft import LoraConfig, inject_adapter_in_model

        from mainstem.runtime.kernels.exchanges import exchange_linear, is_exchanged

        if hasattr(self._model, "peft_config"):
            raise UnsupportedModel("the model was loaded with an adapter of its own: load it without one")
        before = [(parent, name, layer) for parent in self._model.modules() for name, layer in parent.named_children()]
        trainable = [(weight, weight.requires_grad) for weight in self._model.parameters()]
        config = LoraConfig(**files.settings, inference_mode=True, lora_dropout=0.0, init_lora_weights=False)
        allowed = {id(module) for module in self._adaptable()}
        try:
            inject_adapter_in_model(config, self._model, _PEFT_NAME, low_cpu_mem_usage=True)
            places = tuple(_Place(*old, new) for old in before if (new := getattr(old[0], old[1])) is not old[2])
            _check_layers(places, allowed, self._model.dtype)
            self._fill(files)
        finally:
            for parent, name, layer in before:
                setattr(parent, name, layer)
            vars(self._model).pop("peft_config", None)
            for weight, wanted in trainable:
                weight.requires_grad_(wanted)
        for place in places:
            place.adapted.eval()
            for layer in place.adapted.modules() if is_exchanged(place.plain) else ():
                exchange_linear(layer, place.plain)
        return places

    def _adaptable(self) -> Iterator[torch.nn.Module]:
        """Yields the modules of the text model. Image encoders stay as they are: all adapters share their results."""
        model: Any = self._model  # the two methods below have no types
        yield from model.get_decoder().modules()
        head = model.get_output_embeddings()
        if head is not None:
            yield head

    def _fill(self, files: AdapterFiles) -> None:
        """Loads the adapter's weights into its layers: all of them, and nothing else."""
        from peft import set_peft_model_state_dict

        result: Any = set_peft_model_state_dict(self._model, dict(files.tensors), _PEFT_NAME, low_cpu_mem_usage=True)
        ours = {name for name, _ in self._model.named_parameters() if _LORA_KEY.search(name)}
        for fault, keys in (("lacks", ours & set(result.missing_keys)), ("has no layer for", result.unexpected_keys)):
            if keys:
                raise ValueError(f"it {fault} {min(keys)}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else ""))


def check_name(name: str) -> None:
    """Raises BadArgument for an invalid adapter name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadArgument("name", name, "1 to 256 printable ASCII characters without spaces")


def read_adapter(path: str | Path) -> AdapterFiles:
    """Reads a folder that PEFT saved. Callable from any thread. Downloads nothing, and reads no pickle.

    Raises:
        BadArgument: `path` holds no complete adapter.
        UnsupportedModel: this kind of adapter cannot be served over a prefix cache, or PEFT is not installed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    _require_peft()
    folder = Path(path).expanduser()
    config = _read(folder, _CONFIG)
    settings = _parsed(folder, config)
    if reasons := list(_refusals(settings)):
        raise UnsupportedModel(f"the adapter in {folder} cannot be served: {'; '.join(reasons)}")
    weights = _read(folder, _WEIGHTS)
    try:
        tensors: dict[str, torch.Tensor] = load(weights)
    except SafetensorError as error:
        raise BadArgument("path", str(folder), f"a folder with undamaged weights: {error}") from error
    if foreign := sorted(key for key in tensors if not _LORA_KEY.search(key)):
        raise UnsupportedModel(f"the adapter in {folder} cannot be served: it replaces weights, such as {foreign[0]}")
    honoured = {key: settings[key] for key in _HONOURED if settings.get(key) is not None}
    _targets(honoured, tensors)
    if reasons := [*_bad_patterns(honoured), *_bad_numbers(honoured, tensors)]:
        raise UnsupportedModel(f"the adapter in {folder} cannot be served: {'; '.join(reasons)}")
    return AdapterFiles(_digest(config, weights), honoured, tensors)


def _require_peft() -> None:
    with needs("peft", "adapters need peft: pip install 'mainstem[lora]'", UnsupportedModel):
        import peft  # noqa: F401  # slow, so it is done here and not on the thread that runs the model


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        allowed = f"a folder with {_CONFIG} and {_WEIGHTS} ({name}: {getattr(error, 'strerror', None) or error})"
        if name == _WEIGHTS and (folder / "adapter_model.bin").exists():
            allowed += "; adapter_model.bin is a pickle, which could run any code, and is not read"
        raise BadArgument("path", str(folder), allowed) from error


def _parsed(folder: Path, config: bytes) -> dict[str, Any]:
    try:
        settings = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise BadArgument("path", str(folder), f"a folder with a {_CONFIG} in JSON: {error}") from error
    if not isinstance(settings, dict):
        raise BadArgument("path", str(folder), f"a folder with a {_CONFIG} that is an object")
    return settings


def _refusals(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields the reasons why an adapter with these settings cannot be served; none if it can."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        yield f"its kind is {kind}, and only LORA is supported: others may add tokens of their own"
        return
    for name, value in sorted(settings.items()):
        is_on = value not in _NEUTRAL.get(name, ()) and value not in (None, False, 0, "", [], {})
        if is_on and name not in _HARMLESS and name not in _HONOURED:
            yield f"{name} = {json.dumps(value)} is not supported"


def _bad_patterns(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields regular expressions: PEFT would match them against layer names, and one may never end."""
    for name in ("rank_pattern", "alpha_pattern", "layers_pattern", "exclude_modules"):
        given = settings.get(name, ())
        for pattern in [given] if isinstance(given, str) else given:
            if not isinstance(pattern, str) or not _PLAIN.fullmatch(pattern):
                yield f"{name} holds {pattern!r}, which is not a plain name of a layer"


def _targets(settings: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Lists the layers that have weights, in place of a regular expression that describes them."""
    if isinstance(settings.get("target_modules"), str):
        names = {_LORA_KEY.split(key)[0].removeprefix("base_model.model.") for key in tensors}
        settings["target_modules"] = sorted(names)


def _bad_numbers(settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yields numbers that would take the memory of a much larger adapter, or make NaN of other requests' answers."""
    import torch

    limit = max([_MAX_RANK, *(tensor.shape[0] for key, tensor in tensors.items() if _LORA_A_KEY.search(key))])
    ranks = _all_of(settings, "r", "rank_pattern")
    if any(type(rank) is not int or not 1 <= rank <= limit for rank in ranks):
        yield f"its ranks are {ranks}: must be integers from 1 to {limit}"
    scales = _all_of(settings, "lora_alpha", "alpha_pattern")
    if not all(isinstance(scale, (int, float)) and math.isfinite(scale) for scale in scales):
        yield f"its lora_alpha is {scales}: must be a finite number"
    if wrong := next((key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor.float()).all())), None):
        yield f"its weights hold NaN or infinity, in {wrong}"


def _all_of(settings: Mapping[str, Any], name: str, pattern: str) -> list[object]:
    """Returns a setting and its exceptions by layer."""
    exceptions = settings.get(pattern, {})
    return [settings.get(name, 8), *(exceptions.values() if isinstance(exceptions, dict) else [exceptions])]


def _digest(config: bytes, weights: bytes) -> str:
    digest = hashlib.sha256(len(config).to_bytes(8, "little"))
    digest.update(config)
    digest.update(weights)
    return digest.hexdigest()


def _check_layers(places: tuple[_Place, ...], allowed: set[int], dtype: torch.dtype) -> None:
    """Allows only layers that are called: weights that other code reads directly would not be adapted everywhere."""
    from peft.tuners.lora import Embedding, Linear

    for place in places:
        if not isinstance(place.adapted, (Linear, Embedding)) or not _returns_a_tensor(place.plain, dtype):
            raise ValueError(f"only linear layers and embeddings can be adapted, not {place.name}")
        if id(place.plain) not in allowed:
            raise ValueError(f"only layers of the text model can be adapted, not {place.name}")


def _returns_a_tensor(layer: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Returns False for a linear layer that also chooses, such as Llama 4's router: PEFT cannot add to its results."""
    import torch

    if not isinstance(layer, torch.nn.Linear) or type(layer).forward is torch.nn.Linear.forward:
        return True
    with torch.inference_mode():
        result = layer(torch.zeros(1, layer.in_features, dtype=dtype, device=layer.weight.device))
    return isinstance(result, torch.Tensor)


def _shortened(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
