"""Tiny random models of many architectures, the same in every run: for the benchmark of models, and for tests."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mainstem.runtime.models.loading import LoadedModel

VOCAB = 97
INEXACT = {
    **dict.fromkeys(("bloom", "mpt", "falcon", "gptj", "codegen", "stablelm"), "attention of its own"),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), "its scan and convolution"),
    "minimax": "its scan",
    "recurrent_gemma": "its gates and convolution",
    "gemma3n_text": "a matrix for each token",
}
"""What PyTorch computes of a family in which a hit may change bits; tests hold all models to it."""
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
    "gpt_bigcode": {"num_key_value_heads": ..., "intermediate_size": ...},
}

# Models whose attention cannot be exchanged: one request a forward, by their own code.
GATHERED: dict[str, dict[str, Any]] = {
    "bloom": {"num_key_value_heads": ..., "intermediate_size": ...},
    "mpt": {"num_key_value_heads": ..., "intermediate_size": ...},
    "falcon": {"num_key_value_heads": ..., "intermediate_size": ..., "alibi": True},
    "gptj": {"num_key_value_heads": ..., "intermediate_size": ..., "rotary_dim": 8},
    "codegen": {"num_key_value_heads": ..., "intermediate_size": ..., "rotary_dim": 8},
    "stablelm": {},
}

_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

# The last three of six layers attend to the keys of layers 2, 2 and 1.
_SHARED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 16,
    "activation_sparsity_pattern": None,
}

# Models with windows shorter than the prompts of tests, in all layers or in some.
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "phi3": {"sliding_window": 20},
    "qwen2": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {
        **_MIXED,
        "sliding_window": 8,
        "head_dim": 16,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,  # scores are larger, so that a missing cap shows
    },
    "gemma3_text": {**_MIXED, "sliding_window": 20, "head_dim": 16},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 8,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gpt_oss": {**_MIXED, "sliding_window": 8, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {**_MIXED, "sliding_window": 20},
    "olmo3": {**_MIXED, "sliding_window": 8},
    "exaone4": {**_MIXED, "sliding_window": 8},
    "mimo_v2_flash": {  # values are smaller than keys, and sliding layers have twice as many heads
        **_MIXED,
        "sliding_window": 8,
        "head_dim": 24,
        "v_head_dim": 16,
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}

# Models with multi-head latent attention: only a latent and its rotary part are kept.
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_LATENT, **_EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **_LATENT,
        **_EXPERTS,
        "first_k_dense_replace": 1,
        "rope_parameters": {**_YARN, "original_max_position_embeddings": CONTEXT // 4},
    },
    "glm4_moe_lite": {**_LATENT, **_EXPERTS, "rope_interleave": False},
    "minicpm3": _LATENT,
    "longcat_flash": {
        **_LATENT,
        "head_dim": 8,
        "num_layers": 2,
        "num_hidden_layers": ...,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 3,
        "expert_ffn_hidden_size": 32,
    },
    "axk1": {**_LATENT, **_EXPERTS},
    "youtu": _LATENT,
}


# Models whose layers differ in more, by name: the family and its changes.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n_text": (
        "gemma3n_text",
        {**_SHARED, "sliding_window": 8, "head_dim": 16, "vocab_size_per_layer_input": VOCAB},
    ),
    "gemma4_text, shared": (
        "gemma4_text",
        {
            **_SHARED,
            "sliding_window": 20,
            "head_dim": 16,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": VOCAB,
            "use_double_wide_mlp": True,
        },
    ),
    "llama4_text": (
        "llama4_text",
        {
            "num_hidden_layers": 4,  # the last one sees all positions, by their temperature
            "head_dim": 16,
            "attention_chunk_size": 10,
            "floor_scale": 6,
            "attn_scale": 0.5,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
        },
    ),
    "llama, windows": (
        "llama",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "per_layer_config": {1: {"sliding_window": 20}, 2: {"sliding_window": None}},
        },
    ),
}


_NO_ATTENTION = {"num_attention_heads": ..., "num_key_value_heads": ...}

# Models that are refused: the family and its changes, by name.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("deepseek_v32", {**_LATENT, **_EXPERTS, "index_topk": 16, "index_n_heads": 2, "head_dim": 8}),
    "xlstm": ("xlstm", {**_NO_ATTENTION, "intermediate_size": ...}),
}

ZAMBA2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "num_key_value_heads": 4,
    "num_mem_blocks": 1,
    "mamba_d_state": 16,
    "mamba_headdim": 16,
    "mamba_ngroups": 2,
    "n_mamba_heads": 8,
    "chunk_size": 8,
    "adapter_rank": 8,
}


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    """Creates a random model of a family; a change to `...` leaves the argument out."""
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
        **copy.deepcopy(changes),  # a configuration may change a list that it is given
    }
    config: PreTrainedConfig = CONFIG_MAPPING[family](**{k: v for k, v in arguments.items() if v is not ...})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # the usual initialization is so near 0 that attention is uniform and hides errors
            torch.nn.init.normal_(parameter, std=0.15)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, mean=1.0)
    if "per_layer_config" in changes:
        for layer in model.base_model.layers:
            layer.register_forward_pre_hook(_with_its_own_mask, with_kwargs=True)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _with_its_own_mask(layer: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Masks a layer by its own window; transformers makes one mask for all layers of a kind."""
    config = layer.self_attn.config.per_layer_config[layer.self_attn.layer_idx]
    create = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
    mask = create(config=config, inputs_embeds=args[0], attention_mask=None, past_key_values=None)
    return args, {**inputs, "attention_mask": mask}


def loaded(model: PreTrainedModel, name: str = "tiny") -> LoadedModel:
    context = model.config.max_position_embeddings
    return LoadedModel(model, None, name, torch.float32, context)  # type: ignore[arg-type]


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

# Models with recurrent or convolutional layers; scans take 8 tokens at a time where that can be set, otherwise 64.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_DELTA,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {**_DELTA, "num_hidden_layers": 4},
    "mamba2": {**_NO_ATTENTION, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 8},
    "bamba": {**_MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**_MAMBA, "head_dim": 16, "mamba_d_ssm": 128},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 8,
        "time_step_min": 1e-6,  # not the default, 0.001: transformers respects it in scans, but not in single steps
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "granitemoehybrid": {
        **_MAMBA,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "olmo_hybrid": {"num_hidden_layers": 4},
    "kimi_linear": {
        **_LATENT,
        **_EXPERTS,
        "n_routed_experts": ...,
        "num_local_experts": 4,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "bailing_hybrid": {
        **_LATENT,
        **_EXPERTS,
        "n_routed_experts": ...,
        "num_experts": 4,
        "q_lora_rank": ...,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "head_dim": 16,
    },
    "minimax": {"num_local_experts": 2, "block_size": 8},
}

# Models that take several tokens after a state with our own scan only: transformers' starts from zeros.
RESUMED: dict[str, dict[str, Any]] = {
    "mamba": {**_NO_ATTENTION, "state_size": 8, "intermediate_size": 128},
    "falcon_mamba": {**_NO_ATTENTION, "state_size": 8, "intermediate_size": 128},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
}

# Models that can take only one token at a time after a state.
STEPPED: dict[str, dict[str, Any]] = {"recurrent_gemma": {"num_key_value_heads": 1}}

# Models whose rows are not independent after a state: each sequence goes on by itself.
ALONE: dict[str, dict[str, Any]] = {"rwkv": {**_NO_ATTENTION, "attention_hidden_size": 64}}

ALL: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        family: (family, changes)
        for family, changes in {
            **FAMILIES, **LATENT, **GATHERED, **HYBRIDS, **RESUMED, **STEPPED, **ALONE
        }.items()
    },
    **{f"{family} windowed": (family, changes) for family, changes in WINDOWED.items()},
    **VARIANTS,
}  # fmt: skip
"""Every model that runs, by name: its family and the changes."""
