"""The floating-point operations of a model for a token, from its weights and its configuration."""

from __future__ import annotations

from transformers import PreTrainedModel

from mainstem.runtime.schedule.meter import Flops

_SLIDES = ("sliding_attention", "chunked_attention", "linear_attention", "mamba", "recurrent")


def flops_of(model: PreTrainedModel) -> Flops:
    """Returns the operations of a prefill: two for each weight that a token uses, and attention.

    Embeddings and the head count nothing: they are looked up, or used for the last token alone. Of experts, as many
    count as a token uses. Layers with a window, or with a state, count no attention.
    """
    config = model.config.get_text_config(decoder=True)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    used = getattr(config, "num_experts_per_tok", None) or experts
    share = used / experts if experts else 1.0
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    looked_up = {id(part.weight) for part in (model.get_input_embeddings(), head) if part is not None}
    token = sum(
        2.0 * weight.numel() * (share if ".experts." in name else 1.0)
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and id(weight) not in looked_up
    )
    layers = int(getattr(config, "num_hidden_layers", 0))
    kinds = getattr(config, "layer_types", None) or []
    whole = layers - sum(kind in _SLIDES for kind in kinds)
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    width = int(getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0))
    return Flops(token, 4.0 * whole * heads * width)
