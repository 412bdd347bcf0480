"""Why a model cannot run over pages, read from its class and its configuration; the self-test finds what they hide."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mainstem.cache.components import Full
from mainstem.errors import UnsupportedModel
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.loading import LoadedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def layout_of(loaded: LoadedModel) -> Layout:
    """Returns the layout of a model that can run over pages, by its class and configuration.

    Raises:
        UnsupportedModel: it cannot run over pages; the message says why.
    """
    try:
        layout = Layout.of(loaded.model.config, loaded.max_context, loaded.ranks.size)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{loaded.name} cannot run over pages: {error}") from error
    if reasons := list(_refusals(loaded.model, layout)):
        raise UnsupportedModel(f"{loaded.name} cannot run over pages: {'; '.join(reasons)}")
    return layout


def prefix_refusals(model: PreTrainedModel, layout: Layout) -> Iterator[str]:
    """Yields the reasons why what `layout` keeps of a prefix is not all that `model` needs of it; none if it is."""
    if model.config.is_encoder_decoder:
        yield "encoder-decoder models keep KV of two kinds"
    if getattr(model, "_is_stateful", False) and not layout.state_layers:
        yield "it keeps a state that its configuration does not mention"
    yield from _rope_refusals(model.config.get_text_config(decoder=True))


def _refusals(model: PreTrainedModel, layout: Layout) -> Iterator[str]:
    """Yields the reasons why `model` cannot run over pages; none if it can."""
    yield from prefix_refusals(model, layout)
    tuned = getattr(model.config.get_text_config(decoder=True), "attn_temperature_tuning", None)
    if tuned and not any(hasattr(module, "floor_scale") for module in model.modules()):
        yield "the temperature of its attention follows no known rule"
    arguments = inspect.signature(model.forward).parameters
    needed = {"logits_to_keep"}
    if layout.places and not gathers(model, layout) and (reason := own_attention(model)) is not None:
        yield reason
    if missing := needed - set(arguments):
        yield f"its forward takes no {' and no '.join(sorted(missing))}"


def own_attention(model: PreTrainedModel) -> str | None:
    """Returns why `model` cannot attend through pages, many requests in a forward; None if it can."""
    arguments = inspect.signature(model.forward).parameters
    if not model._can_set_attn_implementation():
        return "its attention cannot be exchanged"
    if all(argument.kind is not inspect.Parameter.VAR_KEYWORD for argument in arguments.values()):
        return "its forward does not pass arguments on to attention"
    return None if "position_ids" in arguments else "its forward takes no position_ids"


def gathers(model: PreTrainedModel, layout: Layout) -> bool:
    """Returns whether `model` can attend by its own code to keys and values that are gathered from pages for it."""
    return layout.components == (Full(),) and "past_key_values" in inspect.signature(model.forward).parameters


def _rope_refusals(config: PreTrainedConfig) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    for kind in sorted(_rope_types(parameters) & {"dynamic", "longrope"}):
        yield f"its {kind} position embedding depends on the length of the whole sequence"


def _rope_types(parameters: Mapping[str, Any]) -> set[str]:
    """Returns the types of all layers, whose parameters may differ by kind of layer."""
    kinds = [parameters, *(given for given in parameters.values() if isinstance(given, dict))]
    return {str(given["rope_type"]) for given in kinds if "rope_type" in given}
