"""Writes a Llama-like model of Hugging Face's format as a GGUF file of bfloat16, which llama.cpp reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(folder: Path, path: Path) -> None:
    """Writes config, tokenizer and weights: matrices in bfloat16, norms in float32."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer, config)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    for name, weight in load_file(folder / "model.safetensors").items():
        _add_weight(writer, name, weight, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    model = tokenizer["model"]
    texts = {number: text for text, number in model["vocab"].items()}
    special = {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    texts |= special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([texts[number] for number in range(config["vocab_size"])])
    kinds = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([kinds[number not in special] for number in range(config["vocab_size"])])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _add_weight(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor, config: dict[str, Any]) -> None:
    if name in _WHOLE:
        own = _WHOLE[name]
    else:
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        own = f"blk.{layer}.{_NAMES[part.removesuffix('.weight')]}.weight"
    if own.endswith(("attn_q.weight", "attn_k.weight")):
        # llama.cpp turns neighbours by an angle, Hugging Face's code a dimension and the one half a head further.
        heads = config["num_attention_heads" if "attn_q" in own else "num_key_value_heads"]
        weight = weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
    if weight.dim() == 1:
        writer.add_tensor(own, weight.float().numpy())
    else:
        data = weight.bfloat16().contiguous().view(torch.uint8).numpy()
        writer.add_tensor(own, data, raw_dtype=GGMLQuantizationType.BF16)
