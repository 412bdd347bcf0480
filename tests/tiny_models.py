"""Tiny random models of many architectures, the same at every run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mainstem.runtime.models import LoadedModel

VOCAB = 97
CONTEXT = 128

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": None},
    "phi3": {},
    "gemma": {"head_dim": 32},
    "olmo2": {},
    "granite": {},
    "mixtral": {},
    "gpt_neox": {"num_key_value_heads": ...},
    "gpt2": {"num_key_value_heads": ..., "intermediate_size": ...},
}


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    """A random model of a family; a change to `...` leaves the argument out."""
    arguments = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **changes,
    }
    config: PreTrainedConfig = CONFIG_MAPPING[family](**{k: v for k, v in arguments.items() if v is not ...})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # the usual start is so near 0 that attention is uniform and errors do not show
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def loaded(model: PreTrainedModel, name: str = "tiny") -> LoadedModel:
    context = model.config.max_position_embeddings
    return LoadedModel(model, None, name, torch.float32, context)  # type: ignore[arg-type]
