"""Configurations as people publish them, as transformers writes them, and broken ones."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bench import tiny_models
from mainstem.errors import BadArgument
from mainstem.replay.plan import configs
from mainstem.replay.plan.configs import read_shape, well_known
from mainstem.replay.plan.costs import ModelShape
from mainstem.runtime.memory.kv import kv_shapes
from mainstem.runtime.memory.states import StateShape
from mainstem.runtime.models.layout import Layout

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 97,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAR = 1 << 20
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, changes) for name, changes in {**tiny_models.FAMILIES, **tiny_models.GATHERED}.items()},
    **{f"{name}, windowed": (name, changes) for name, changes in tiny_models.WINDOWED.items()},
    **{name: (name, changes) for name, changes in {**tiny_models.LATENT, **tiny_models.HYBRIDS}.items()},
    **{name: (name, changes) for name, changes in {**tiny_models.RESUMED, **tiny_models.STEPPED}.items()},
    **{name: (name, changes) for name, changes in tiny_models.ALONE.items()},
    **tiny_models.VARIANTS,
}
# Matrices that the planner leaves out: Gemma 3n's and Gemma 4's additions to a layer, and, in transformers only, those
# of LongCat's idle experts.
MORE_MATRICES = {"gemma3n_text", "gemma4_text, shared", "longcat_flash"}


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Rows of positions and of per-layer embeddings are looked up, and convolutions and decays are small."""
    others = ("wpe", "per_layer", "conv1d", "A_log")
    return parameter.dim() > 1 and not any(other in name for other in others)


def windows(shape: ModelShape) -> list[int | None]:
    return [layer.window for layer in shape.layers]


def test_a_model_is_a_name_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    given = [read_shape(source) for source in (SMALL, tmp_path, tmp_path / "config.json", str(tmp_path))]
    assert {shape.kv_bytes_per_token() for shape in given} == {2 * 2 * 2 * 16 * 2}
    assert read_shape("meta-llama/Llama-3.1-8B-Instruct") == read_shape("llama-3.1-8b")
    assert {"llama-3.1-405b", "deepseek-v3", "gpt-oss-120b", "qwen3-next-80b-a3b"} <= set(well_known())
    assert all(read_shape(name).parameters > 1e8 for name in well_known())


@pytest.mark.parametrize("name", TINY)
def test_the_planner_counts_the_bytes_that_the_runtime_allocates(name: str) -> None:
    family, changes = TINY[name]
    model = tiny_models.tiny(family, **changes).to(dtype=torch.bfloat16)
    layout, state = Layout.of(model.config, FAR), StateShape.of(model)
    shape = read_shape(json.loads(model.config.to_json_string(use_diff=False)))
    kept = kv_shapes(model, layout.kv_layers)
    pages = {name: size.bytes_per_page(1, torch.bfloat16) for name, size in kept.items()}
    assert shape.kv_bytes_per_token() == pages.get("full", 0)
    assert shape.window_bytes_per_token() == sum(pages[name] for name in layout.local)
    assert {window for window in windows(shape) if window} == {row.tokens for row in layout.local.values()}
    stateful = tuple(i for i, layer in enumerate(shape.layers) if layer.conv_numbers + layer.recurrent_numbers)
    assert stateful == layout.state_layers
    assert shape.state_bytes() == (0 if state is None else state.bytes_per_slot)
    if name not in MORE_MATRICES:
        matrices = sum(p.numel() for key, p in model.named_parameters() if is_matrix(key, p))
        assert shape.parameters == pytest.approx(matrices, rel=0.02)


def published(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text())[name]
    return found


@pytest.mark.parametrize("family", ["kimi_linear", "mimo_v2_flash"])
def test_what_was_published_before_transformers_knew_it_is_read_as_transformers_reads_it(family: str) -> None:
    """Kimi's `head_dim` is of nothing, and MiMo's `sliding_window_size` is without the query."""
    given = published(f"{family}, small")
    config, known = CONFIG_MAPPING[family](**given), CONFIG_MAPPING[family]()
    written = {key: value for key, value in config.to_dict().items() if hasattr(known, key)}
    assert read_shape(given).layers == read_shape(written).layers


def test_idle_experts_take_tokens_and_no_work() -> None:
    with_experts, without = read_shape(published("longcat_flash, small")).layers
    one, router = 3 * 64 * 32, 64 * 9
    assert with_experts.parameters - without.parameters == 6 * one + router
    assert with_experts.active_parameters - without.active_parameters == 2 * one + router


def test_each_layer_may_have_a_width_of_its_own() -> None:
    assert read_shape({**SMALL, "intermediate_size": [96, 96]}) == read_shape(SMALL)
    narrower = read_shape({**SMALL, "intermediate_size": [96, 32]})
    assert read_shape(SMALL).parameters - narrower.parameters == 3 * 64 * 64
    with pytest.raises(BadArgument, match=r"\[96\] as intermediate_size"):
        read_shape({**SMALL, "intermediate_size": [96]})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 8}, [8, 8]),
        ({"sliding_window": None}, [None, None]),
        ({"sliding_window": 8, "use_sliding_window": False}, [None, None]),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}, [None, None]),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True}, [None, 8]),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, [8, None]),
        ({"sliding_window": 8, "sliding_window_pattern": "LG"}, [8, None]),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, [None, 8]),
        ({"layer_types": ["full_attention", "chunked_attention"], "attention_chunk_size": 16}, [None, 16]),
    ],
)
def test_windows_by_list_and_by_rule(changes: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(read_shape({**SMALL, **changes})) == expected


def test_experts_that_a_token_does_not_meet_are_parameters_but_not_work() -> None:
    dense, sparse = read_shape(SMALL), read_shape({**SMALL, **MOE})
    one = 3 * 64 * 32
    attention = dense.layers[0].parameters - 3 * 64 * 96
    assert sparse.layers[0].parameters == attention + 4 * one + 64 * 4
    assert sparse.layers[0].active_parameters == attention + 2 * one + 64 * 4
    first_dense = read_shape({**SMALL, **MOE, "first_k_dense_replace": 1, "n_shared_experts": 1})
    assert first_dense.layers[0] == dense.layers[0]
    assert first_dense.layers[1].active_parameters == attention + 3 * one + 64 * 4


def test_layers_that_share_keys_keep_none() -> None:
    shape = read_shape({**SMALL, "num_kv_shared_layers": 1})
    assert [layer.kv_numbers for layer in shape.layers] == [64, 0]
    assert shape.layers[1].pair_flops == shape.layers[0].pair_flops


def test_what_is_inside_a_vision_model_is_its_text_model() -> None:
    nested = {"model_type": "llava", "vision_config": {"hidden_size": 9}, "text_config": SMALL}
    assert read_shape(nested).layers == read_shape(SMALL).layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**SMALL, "hidden_size": None}, "without hidden_size"),
        ({**SMALL, "vocab_size": "many"}, "with 'many' as vocab_size"),
        ({**SMALL, "layer_types": ["full_attention", "retention"]}, "layers of kind retention"),
        ({**SMALL, "layer_types": ["sliding_attention"] * 2}, "without sliding_window"),
        ({}, "without model_type"),
        ({**SMALL, "model_type": "mimo_v2_flash", "sliding_window": 8}, "without layer_types"),
        ({**SMALL, "model_type": "recurrent_gemma"}, "without layer_types"),
        ({**SMALL, "model_type": "recurrent_gemma", "block_types": ["local"]}, "layers of kind local"),
        ({**SMALL, "model_type": "minimax"}, "without layer_types"),
        ({**SMALL, "model_type": "minimax", "attn_type_list": [1]}, r"\[1\] as attn_type_list"),
        ({**SMALL, "model_type": "kimi_linear", "layer_types": ["linear_attention"] * 2}, "without linear_num_heads"),
        ({**SMALL, **MOE, "mlp_layer_types": ["dense"]}, "dense or sparse for each layer"),
        ({"model_type": "llama"}, "without num_hidden_layers"),
        ({**SMALL, "intermediate_size": None}, "without intermediate_size"),
        ({**SMALL, "hidden_size": 0}, "with 0 as hidden_size"),
        ({**SMALL, "num_hidden_layers": 10**9}, "with 1000000000 layers"),
        ({**SMALL, "moe_intermediate_size": 32}, "without num_experts"),
        ({**SMALL, **MOE, "num_experts_per_tok": 5}, "5 of 4 experts"),
        ({**SMALL, "sliding_window": 8, "sliding_window_pattern": 0}, "with 0 as sliding_window_pattern"),
        ({**SMALL, "full_attention_interval": 0}, "with 0 as full_attention_interval"),
        ({**SMALL, "hybrid_override_pattern": 3}, "with 3 as layers"),
        ({**SMALL, "quantization_config": {"quant_method": "magic"}}, "quantised by magic"),
    ],
)
def test_what_is_missing_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        read_shape(config)


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma-3-27b", "nemotron-h-8b", "qwen3-next-80b-a3b", "gpt-oss-20b"])
def test_a_damaged_configuration_is_refused_or_has_sizes(name: str) -> None:
    whole = json.loads((Path(configs.__file__).with_name("models.json")).read_text("utf-8"))[name]
    for field in whole:
        for damage in (None, 0, -1, "x", 1.5, True, [], [None], {}, {"a": 1}):
            with suppress(BadArgument):
                shape = read_shape({**whole, field: damage})
                assert shape.parameters > 0 and shape.prefix_bytes(100) > 0, (field, damage)


@pytest.mark.parametrize(
    ("quantised", "dtype"),
    [
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}, "int4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    ],
)
def test_quantised_weights_are_as_narrow_as_they_are_published(quantised: dict[str, Any], dtype: str) -> None:
    assert read_shape({**SMALL, "quantization_config": quantised}).weights_dtype == dtype


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"one of .*llama-3\.1-8b"):
        read_shape("llama-9")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadArgument, match="a readable file of JSON"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BadArgument, match="a JSON object"):
        read_shape(tmp_path)
