"""Turns a model's config.json into its shape: the kind and the sizes of each layer.

    full, sliding, chunked    attention over all positions, or the last ones        GQA, MHA, or MLA by kv_lora_rank
    delta, kda, lightning,    a recurrent state of fixed size                       conv: a short convolution alone
    mamba2, mamba1, rglru, rwkv
    both                      attention and mamba2 side by side (Falcon-H1)         mlp, moe: no memory (Nemotron-H)

Fields are looked up by name. Where only the family says what they mean, a line here or a row of families.json does:

    defaults             fields that published files omit
    tied, ungated        the embedding gives the logits, too; MLPs have no gate
    gated_queries        a gate beside each query
    recurrence           what "linear" layers compute where no field says it; all others are Mamba 2
    no_attention         all layers are recurrent
    one_block_a_layer    a mixer or an MLP, not both
    listed               layers are of several kinds, by a list that must be there

Formulas of states: Dao & Gu 2024, "Transformers are SSMs" (Mamba 2); Yang et al. 2024, "Gated Delta Networks"; Kimi
Team 2025, "Kimi Linear"; MiniMax 2025, "MiniMax-01" (lightning); Gu & Dao 2023, "Mamba"; De et al. 2024, "Griffin"
(RG-LRU); Peng et al. 2023, "RWKV". MLA: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1. A convolution keeps as many
positions as its kernel is wide, as in this runtime; some engines keep one fewer, and so does RecurrentGemma.

Reads JSON; needs neither torch nor transformers. A missing field is an error, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from mainstem.errors import BadArgument
from mainstem.replay.plan.costs import Layer, ModelShape

_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "*": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "recurrent": "linear",
    "mamba": "linear",
    "mamba2": "linear",
    "M": "linear",
    "hybrid": "both",
    "conv": "conv",
    "mlp": "mlp",
    "-": "mlp",
    "moe": "moe",
    "E": "moe",
}
# Parts of a configuration whose fields are the model's, and what they are called there.
_PARTS: dict[str, dict[str, str]] = {
    "attn_config": {},  # MPT and DBRX
    "ffn_config": {},
    "linear_attn_config": {  # Kimi Linear
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    },
}
_BITS = {4: "int4", 8: "int8"}
_MAX_LAYERS, _MAX = 10_000, 1 << 32


def well_known() -> tuple[str, ...]:
    """Returns the names that `read_shape` knows without a file."""
    return tuple(_table("models"))


def read_shape(model: str | Path | Mapping[str, Any]) -> ModelShape:
    """Returns the shape of a model.

    Args:
        model: a config.json, its folder or its contents, or a well-known name such as llama-3.1-8b.

    Raises:
        BadArgument: there is no such file or name, the configuration lacks a field, or it has layers of an unknown
            kind; the message says which.
    """
    if isinstance(model, Mapping):
        return _shape(_Fields(str(model.get("_name_or_path") or model.get("model_type") or "configuration"), model))
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return _shape(_Fields(str(model), _read(path)))
    name = str(model).rpartition("/")[2].lower()
    known = _table("models")
    found = next((each for each in (name, name.removesuffix("-instruct")) if each in known), None)
    if found is None:
        raise BadArgument(
            "model", str(model), f"a folder with a config.json, such a file, or one of {', '.join(known)}"
        )
    return _shape(_Fields(found, known[found]))


@cache
def _table(name: str) -> dict[str, dict[str, Any]]:
    """Returns the configurations of well-known `models`, or the rules of `families`, by their names."""
    known: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name(f"{name}.json").read_text("utf-8"))
    return known


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadArgument("model", str(path), f"a readable file of JSON ({error})") from None
    if not isinstance(config, dict):
        raise BadArgument("model", str(path), "a configuration: a JSON object")
    return config


class _Fields:
    """A configuration, looked up by any of the names that model families use for the same field."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        text = next((config[key] for key in ("text_config", "llm_config", "language_config") if key in config), None)
        inner = {**config, **text} if isinstance(text, Mapping) else dict(config)
        for part, names in _PARTS.items():
            if isinstance(own := inner.get(part), Mapping):
                inner = {**{names.get(key, key): value for key, value in own.items()}, **inner}
        self.name = name
        self.family = str(inner.get("model_type", ""))
        self.rules = _table("families").get(self.family, {})
        given = {name: value for name, value in inner.items() if value is not None}
        self._config = {**self.rules.get("defaults", {}), **given}

    def get(self, *names: str) -> Any:
        """Returns the first of these fields that is set, or None."""
        return next((self._config[name] for name in names if name in self._config), None)

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """Returns the first of these that is set, as a whole number; without a default one must be set."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if type(value) is not int or not minimum <= value < _MAX:
            what = "without" if value is None else f"with {value!r} as"
            field = next((name for name in names if name in self._config), names[0])
            whole = "a configuration whose sizes are whole numbers"
            raise BadArgument("model", f"{self.name}, {what} {field}", whole)
        return value

    def layers(self, *names: str) -> list[int] | None:
        """Returns the first of these that is set, as whole numbers: indices of layers, or a flag for each."""
        value = self.get(*names)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, int) for each in value)):
            raise self.unknown(f"with {value!r} as {names[0]}")
        return value

    def flag(self, layer: int, *names: str) -> bool | None:
        """Returns what the first of these that is set says of a layer, a flag for each; None if none is set."""
        flags = self.layers(*names)
        if flags is not None and layer >= len(flags):
            raise self.unknown(f"with {flags!r} as {names[0]}", "a flag for each layer")
        return None if flags is None else bool(flags[layer])

    def share(self, *names: str, default: int = 0) -> int:
        """Returns a number that may be 0, such as that of dense layers at the start or of shared experts."""
        return self.integer(*names, default=default, minimum=0)

    def at(self, layer: int) -> _Fields:
        """Returns the configuration of one layer, where that differs."""
        own = (self.get("per_layer_config") or {}).get(str(layer), {})
        widths = self.get("intermediate_size")
        if isinstance(widths, list) and layer < len(widths):  # Gemma 3n
            own = {"intermediate_size": widths[layer], **own}
        return _Fields(self.name, {**self._config, **own}) if own else self

    def unknown(self, what: str, known: str = "layers of known kinds") -> BadArgument:
        return BadArgument("model", f"{self.name}, {what}", f"a configuration with {known}")


def _shape(c: _Fields) -> ModelShape:
    if not c.family:
        raise BadArgument("model", f"{c.name}, without model_type", "a configuration that names its model type")
    kinds = _kinds(c)
    shared = c.share("num_kv_shared_layers")  # the last layers read the KV of earlier ones
    layers = []
    for i, kind in enumerate(kinds):
        layer = _layer(c.at(i), kind, i)
        layers.append(replace(layer, kv_numbers=0) if i >= len(kinds) - shared else layer)
    tied = c.get("tie_word_embeddings", "tie_embedding")
    return ModelShape(
        name=c.name,
        layers=tuple(layers),
        hidden_size=_hidden(c),
        vocab_size=c.integer("vocab_size"),
        tied=bool(c.rules.get("tied") if tied is None else tied),
        weights_dtype=_weights_dtype(c),
    )


def _weights_dtype(c: _Fields) -> str:
    quantised = c.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return "fp32" if c.get("dtype", "torch_dtype") == "float32" else "bf16"
    method = str(quantised.get("quant_method", "")).lower()
    if method in ("fp8", "mxfp4", "fbgemm_fp8"):
        return method.removeprefix("fbgemm_")
    if dtype := _BITS.get(_bits(quantised)):
        return "fp8" if dtype == "int8" and "float" in str(quantised) else dtype
    if "fp8" in str(quantised).lower():
        return "fp8"
    raise c.unknown(f"quantised by {method or 'no method'} to an unknown width", "weights of known types")


def _bits(quantised: Mapping[str, Any]) -> Any:
    """Returns the bits of a weight, from the fields of GPTQ, AWQ, bitsandbytes or compressed-tensors."""
    groups = quantised.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            return group["weights"].get("num_bits")
    named = 4 if quantised.get("load_in_4bit") else 8 if quantised.get("load_in_8bit") else None
    return quantised.get("bits", quantised.get("w_bit", named))


def _hidden(c: _Fields) -> int:
    return c.integer("hidden_size", "n_embd", "d_model")


# ---- kinds of layers


def _kinds(c: _Fields) -> list[str]:
    """Returns the kind of each layer, one of those in the module docstring."""
    named = c.get("layer_types", "layers_block_type", "hybrid_override_pattern")
    twice = c.family == "longcat_flash"  # a layer attends twice
    names = ("num_layers",) if twice else ("num_hidden_layers", "n_layer", "n_layers")
    count = c.integer(*names, default=None if named is None else 1)
    if count > _MAX_LAYERS:
        raise c.unknown(f"with {count} layers", f"{_MAX_LAYERS} layers at most")
    if twice:
        return ["full"] * (2 * count)
    if isinstance(blocks := c.get("block_types"), list) and blocks:  # RecurrentGemma
        named = [blocks[i % len(blocks)] for i in range(count)]
    if named is None:
        return [_kind_by_rule(c.at(i), i) for i in range(count)]
    if not isinstance(named, list | tuple | str) or not named:
        raise c.unknown(f"with {named!r} as layers")
    if unknown := sorted({str(kind) for kind in named} - set(_KINDS)):
        raise c.unknown(f"with layers of kind {unknown[0]}")
    kinds = [_KINDS[kind] for kind in named]
    if c.family == "falcon_h1":
        return ["both"] * len(kinds)
    rows = {"linear": _recurrent_kind(c), **({"full": "sliding"} if c.family == "recurrent_gemma" else {})}
    return [rows.get(kind, kind) for kind in kinds]


def _kind_by_rule(c: _Fields, i: int) -> str:
    """Returns the kind of layer i where the configuration gives a rule instead of a list."""
    if c.family == "falcon_h1":
        return "both"
    if c.rules.get("no_attention"):
        return _recurrent_kind(c)
    if c.family == "llama4_text":
        return _chunked_kind(c, i)
    attends = _attends(c, i)
    if attends is None:
        return _window_kind(c, i)
    return "full" if attends else "conv" if c.family.startswith("lfm2") else _recurrent_kind(c)


def _attends(c: _Fields, i: int) -> bool | None:
    """Returns whether layer i of a hybrid model has attention, or None if the model is not hybrid."""
    if c.get("full_attention_interval", "layer_group_size") is not None:
        return (i + 1) % c.integer("full_attention_interval", "layer_group_size") == 0
    if c.get("attn_layer_period") is not None:
        return i % c.integer("attn_layer_period") == c.integer("attn_layer_offset", minimum=0)
    if (indices := c.layers("attn_layer_indices", "full_attn_idxs")) is not None:
        return i in indices
    if (numbers := c.layers("full_attn_layers")) is not None:  # from 1
        return i + 1 in numbers
    return c.flag(i, "attn_type_list")


def _chunked_kind(c: _Fields, i: int) -> str:
    """Returns the kind of a Llama 4 layer: with rotary positions it sees a chunk, without them everything."""
    flags = c.layers("no_rope_layers")
    rotated = flags[i] if flags and i < len(flags) else (i + 1) % c.integer("no_rope_layer_interval")
    return "chunked" if rotated and c.get("attention_chunk_size") else "full"


def _window_kind(c: _Fields, i: int) -> str:
    if (slides := c.flag(i, "hybrid_layer_pattern")) is not None:
        return "sliding" if slides else "full"
    if c.rules.get("listed"):
        raise c.unknown("without layer_types")
    if not c.get("sliding_window") or c.get("use_sliding_window") is False:
        return "full"
    if (pattern := c.get("sliding_window_pattern", "_sliding_window_pattern")) is not None:
        if isinstance(pattern, str):  # such as LLLG
            return "sliding" if pattern[i % len(pattern)] == "L" else "full"
        return "sliding" if (i + 1) % c.integer("sliding_window_pattern", "_sliding_window_pattern") else "full"
    return "sliding" if i >= c.share("max_window_layers") else "full"


def _recurrent_kind(c: _Fields) -> str:
    if c.get("linear_key_head_dim") is not None:
        return "delta"
    return str(c.rules.get("recurrence", "mamba2"))


# ---- sizes of layers


def _layer(c: _Fields, kind: str, i: int) -> Layer:
    mixers = {"full": ("full",), "both": ("full", "mamba2"), "mlp": (), "moe": ()}.get(kind, (kind,))
    parts = [_MIXERS[mixer](c) if mixer in _MIXERS else _attention(c, mixer) for mixer in mixers]
    if c.family == "longcat_flash":  # experts beside every second MLP
        parts += [_dense(c), *([_experts(c)] if i % 2 == 0 else [])]
    elif kind in ("mlp", "moe") or not c.rules.get("one_block_a_layer"):
        parts.append(_experts(c) if kind == "moe" or (kind != "mlp" and _is_sparse(c, i)) else _dense(c))
    return _together(parts)


def _together(parts: list[Layer]) -> Layer:
    names = [name for name in Layer.__slots__ if name != "window"]
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
    return Layer(**sums, window=next((part.window for part in parts if part.window is not None), None))


def _matrices(parameters: int, active: int | None = None, **rest: Any) -> Layer:
    return Layer(parameters=parameters, active_parameters=parameters if active is None else active, **rest)


def _attention(c: _Fields, kind: str) -> Layer:
    if c.get("kv_lora_rank") is not None:
        return _latent(c)
    hidden, heads = _hidden(c), c.integer("num_attention_heads", "n_head", "n_heads")
    wide = kind == "full"  # some families have larger heads in layers without a window
    size = c.integer("global_head_dim" if wide else "swa_head_dim", "head_dim", default=hidden // max(heads, 1))
    value = c.integer(*["swa_v_head_dim"] * (not wide), "v_head_dim", default=size)
    queries = heads * size * (2 if c.rules.get("gated_queries") or c.get("attn_output_gate") else 1)
    kv_heads = _kv_heads(c, heads, wide)
    return _matrices(
        hidden * (queries + heads * value + kv_heads * (size + value)),
        kv_numbers=kv_heads * (size + value),
        kv_parts=kv_heads,
        window=_window(c, kind),
        pair_flops=2 * heads * (size + value),
    )


def _window(c: _Fields, kind: str) -> int | None:
    """Returns the positions that a query sees, its own included."""
    if kind == "sliding":
        before = c.share("sliding_window_size") if c.family == "mimo_v2_flash" else 0
        return before + 1 if before else c.integer("sliding_window", "attention_window_size")
    return c.integer("attention_chunk_size") if kind == "chunked" else None


def _kv_heads(c: _Fields, heads: int, wide: bool) -> int:
    if c.family == "mimo_v2_flash" and not wide:  # transformers leaves the field out and doubles the other
        return c.integer("swa_num_key_value_heads", default=2 * c.integer("num_key_value_heads"))
    if c.get("multi_query") is True and not c.get("new_decoder_architecture"):
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num")
    return c.integer(*["num_global_key_value_heads"] * wide, *names, default=heads)


def _latent(c: _Fields) -> Layer:
    """Multi-head latent attention: keeps the latent and one rotated key for all heads."""
    hidden, heads, rank = _hidden(c), c.integer("num_attention_heads"), c.integer("kv_lora_rank")
    rope, nope, value = c.integer("qk_rope_head_dim"), c.integer("qk_nope_head_dim"), c.integer("v_head_dim")
    queries = heads * (nope + rope)
    query_rank = c.share("q_lora_rank")
    query_matrices = query_rank * (hidden + queries) if query_rank else hidden * queries
    expand = rank * heads * (nope + value)
    return _matrices(
        query_matrices + hidden * (rank + rope) + expand + heads * value * hidden,
        kv_numbers=rank + rope,
        kv_parts=1,
        pair_flops=2 * heads * (nope + rope + value),
        past_flops=2 * expand,
    )


def _delta(c: _Fields) -> Layer:
    hidden, key_heads, heads = _hidden(c), c.integer("linear_num_key_heads"), c.integer("linear_num_value_heads")
    key, value = c.integer("linear_key_head_dim"), c.integer("linear_value_head_dim")
    channels, kernel = 2 * key_heads * key + heads * value, c.integer("linear_conv_kernel_dim")
    return _matrices(
        hidden * (channels + 2 * heads * value + 2 * heads),  # queries, keys, values; gate and output; beta and decay
        **_recurrence(heads * key * value, channels, kernel, 7),  # decay 1, read 2, write 2, answer 2
    )


def _recurrence(state: int, channels: int, kernel: int, flops: int) -> dict[str, Any]:
    """Returns what a layer keeps that computes `flops` FLOPs for each number of its state, after a convolution."""
    return {
        "conv_numbers": channels * kernel,
        "recurrent_numbers": state,
        "token_flops": flops * state + 2 * channels * kernel,
    }


def _kda(c: _Fields) -> Layer:
    """Kimi delta attention: a gated delta net with a decay for each channel."""
    hidden, own = _hidden(c), c.family == "kimi_linear"  # Bailing: heads of both kinds of layers are the same
    heads = c.integer("linear_num_heads", *["num_attention_heads"] * (not own))
    size = c.integer("linear_head_dim", *["head_dim"] * (not own))
    kernel = c.integer("linear_conv_kernel_dim", "short_conv_kernel_size")
    inner = heads * size
    gate = size * (hidden + inner) if own else hidden * inner
    return _matrices(
        hidden * (4 * inner + heads) + 2 * gate,  # queries, keys, values, output; beta; decay and gate
        **_recurrence(inner * size, 3 * inner, kernel, 7),
    )


def _lightning(c: _Fields) -> Layer:
    hidden, heads = _hidden(c), c.integer("num_attention_heads")
    size = c.integer("head_dim", default=hidden // max(heads, 1))
    state = heads * size * size
    return _matrices(
        5 * hidden * heads * size,  # queries, keys, values, gate, output
        conv_numbers=state,  # in the model's type
        token_flops=5 * state,  # decay 1, write 2, answer 2
    )


def _mamba2(c: _Fields) -> Layer:
    hidden, heads = _hidden(c), c.integer("mamba_n_heads", "mamba_num_heads", "num_heads")
    groups, size = c.integer("mamba_n_groups", "n_groups"), c.integer("mamba_d_state", "ssm_state_size", "state_size")
    kernel, inner = c.integer("mamba_d_conv", "conv_kernel"), heads * _mamba2_head(c, heads)
    channels, state = inner + 2 * groups * size, inner * size
    return _matrices(
        hidden * (inner + channels + heads) + inner * hidden,
        **_recurrence(state, channels, kernel, 5),  # decay 1, write 2, answer 2
    )


def _mamba2_head(c: _Fields, heads: int) -> int:
    if c.get("mamba_d_head") == "auto":
        return c.integer("mamba_d_ssm", default=c.integer("mamba_expand", default=2) * _hidden(c)) // heads
    return c.integer("mamba_d_head", "mamba_head_dim", "head_dim")


def _mamba1(c: _Fields) -> Layer:
    hidden, size = _hidden(c), c.integer("mamba_d_state", "state_size")
    inner = hidden * c.integer("mamba_expand", "expand", default=2)
    if c.family == "falcon_mamba":
        inner = c.integer("intermediate_size")
    rank = c.get("mamba_dt_rank", "time_step_rank")
    rank = rank if isinstance(rank, int) else -(-hidden // 16)
    kernel, state = c.integer("mamba_d_conv", "conv_kernel"), inner * size
    return _matrices(
        3 * hidden * inner + inner * (rank + 2 * size) + rank * inner,
        **_recurrence(state, inner, kernel, 6),  # decay and its product 2, write 2, answer 2
    )


def _rglru(c: _Fields) -> Layer:
    """The gated recurrence of RecurrentGemma; its two gates are block-diagonal, a block for each head."""
    hidden, heads = _hidden(c), c.integer("num_attention_heads")
    width = c.integer("lru_width", default=hidden)
    return _matrices(
        3 * hidden * width + 2 * width * (width // heads),
        **_recurrence(width, width, c.integer("conv1d_width") - 1, 3),  # decay 1, write 2
    )


def _rwkv(c: _Fields) -> Layer:
    """RWKV 4: the token before, which attention and MLP each mix in, and three numbers for each channel."""
    hidden = _hidden(c)
    inner = c.integer("attention_hidden_size", default=hidden)
    matrices = 4 * hidden * inner + hidden * hidden  # of attention; the gate of the MLP
    return _matrices(matrices, **_recurrence(3 * inner, 2 * hidden, 1, 4))  # decays, writes, answer


def _short_convolution(c: _Fields) -> Layer:
    hidden, kernel = _hidden(c), c.integer("conv_L_cache")
    return _matrices(4 * hidden * hidden, conv_numbers=hidden * kernel, token_flops=2 * hidden * kernel)


_MIXERS = {
    "delta": _delta,
    "kda": _kda,
    "lightning": _lightning,
    "mamba2": _mamba2,
    "mamba1": _mamba1,
    "rglru": _rglru,
    "rwkv": _rwkv,
    "conv": _short_convolution,
}


def _mlp(c: _Fields, inner: int) -> int:
    return _hidden(c) * inner * (2 if c.rules.get("ungated") else 3)


def _dense(c: _Fields) -> Layer:
    wide = 4 * _hidden(c) if c.rules.get("ungated") else None
    inner = c.integer("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_hidden_size", default=wide)
    if c.get("block_auto_adjust_ff_dim"):  # LFM2: two thirds, in whole multiples
        multiple, factor = c.integer("block_multiple_of"), c.get("block_ffn_dim_multiplier") or 1
        inner = -(-int(factor * (2 * inner // 3)) // multiple) * multiple
    if c.family == "recurrent_gemma":  # the width of the two matrices before it together
        inner //= 2
    return _matrices(_mlp(c, c.share("shared_intermediate_size", default=inner)))


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("top_k_experts", "moe_top_k", "moe_topk")


def _is_sparse(c: _Fields, i: int) -> bool:
    """Returns whether the MLP of layer i is a mixture of experts."""
    if not c.get(*_EXPERTS) and c.get("moe_intermediate_size") is None:
        return False
    if (kinds := c.get("mlp_layer_types")) is not None:
        if not isinstance(kinds, list) or i >= len(kinds) or kinds[i] not in ("dense", "sparse"):
            raise c.unknown(f"with {kinds!r} as mlp_layer_types", "dense or sparse for each layer")
        return bool(kinds[i] == "sparse")
    if isinstance(c.get("moe_layer_freq"), list):  # MiMo; a number elsewhere
        return bool(c.flag(i, "moe_layer_freq"))
    if i < c.share("first_k_dense_replace") or i in (c.layers("mlp_only_layers") or ()):
        return False
    if c.get("expert_layer_period") is not None:
        return i % c.integer("expert_layer_period") == c.integer("expert_layer_offset", minimum=0)
    return (i + 1) % c.integer("decoder_sparse_step", "interleave_moe_layer_step", default=1) == 0


def _experts(c: _Fields) -> Layer:
    count, idle = c.integer(*_EXPERTS), c.share("zero_expert_num")  # LongCat: idle ones return what they are given
    used = c.integer("num_experts_per_tok", "num_experts_per_token", "experts_per_token", *_TOP_K)
    inner = c.integer("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
    shared_inner = c.integer(
        *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
        default=0,
        minimum=0,
    )
    shared = _mlp(c, shared_inner or inner * c.share("n_shared_experts", "num_shared_experts"))
    router, one = _hidden(c) * (count + idle), _mlp(c, inner)
    if used > count + idle:
        raise c.unknown(f"with {used} of {count} experts per token", "at least as many experts as a token uses")
    met = used * count * one // (count + idle)
    return _matrices(count * one + router + shared, met + router + shared, routed=used / (count + idle))
