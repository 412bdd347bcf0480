"""Bytes and FLOPs against figures computed by hand, and against a count of one query and one key at a time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mainstem.errors import BadArgument
from mainstem.replay.plan.configs import read_shape
from mainstem.replay.plan.costs import Layer, ModelShape
from mainstem.units import dtype_bytes

# Bytes in bf16: per token in layers without a window, and in layers with one; full windows; one checkpoint.
BY_HAND = {
    # key and value x layers x KV heads x head size x 2 bytes
    "llama-2-7b": (2 * 32 * 32 * 128 * 2, 0, 0, 0),  # MHA: 524,288
    "smollm2-135m": (2 * 30 * 3 * 64 * 2, 0, 0, 0),  # GQA: 23,040
    "llama-3.1-8b": (131_072, 0, 0, 0),  # 2 x 32 x 8 x 128 x 2
    "llama-3.1-70b": (327_680, 0, 0, 0),  # 2 x 80 x 8 x 128 x 2
    "llama-3.1-405b": (516_096, 0, 0, 0),  # 2 x 126 x 8 x 128 x 2
    "qwen2.5-7b": (57_344, 0, 0, 0),  # 2 x 28 x 4 x 128 x 2; its window is switched off
    "qwen3-8b": (147_456, 0, 0, 0),  # 2 x 36 x 8 x 128 x 2
    "qwen3-32b": (262_144, 0, 0, 0),  # 2 x 64 x 8 x 128 x 2; heads of 128, not 5120 / 64
    "qwen3-235b-a22b": (192_512, 0, 0, 0),  # 2 x 94 x 4 x 128 x 2
    "mixtral-8x7b": (131_072, 0, 0, 0),  # 2 x 32 x 8 x 128 x 2
    "mistral-7b": (0, 131_072, 4096 * 131_072, 0),  # all 32 layers slide over 4,096
    # the latent of 512 and the rotated key of 64, once a layer: MLA
    "deepseek-v3": (61 * (512 + 64) * 2, 0, 0, 0),  # 70,272
    "kimi-k2": (70_272, 0, 0, 0),
    # every sixth of 62 layers sees everything: 10; 52 slide over 1,024
    "gemma-3-27b": (10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2, 1024 * 425_984, 0),
    # every other of 36 layers slides over 128
    "gpt-oss-120b": (18 * 2 * 8 * 64 * 2, 18 * 2 * 8 * 64 * 2, 128 * 36_864, 0),
    # every fourth of 48 layers attends, with 2 heads of 256; 36 keep 32 x 128 x 128 numbers in fp32, and of a
    # convolution 4 positions of 2 x 16 x 128 + 32 x 128 channels
    "qwen3-next-80b-a3b": (12 * 2 * 2 * 256 * 2, 0, 0, 36 * (32 * 128 * 128 * 4 + 4 * 8192 * 2)),
    # all 44 layers do both: 24 heads of 128 x 256 numbers, 4 positions of 3072 + 2 x 256 channels
    "falcon-h1-7b": (44 * 2 * 2 * 128 * 2, 0, 0, 44 * (24 * 128 * 256 * 4 + 4 * 3584 * 2)),
    # 4 of 52 layers attend, 24 are Mamba 2: 128 heads of 64 x 128 numbers, 4 positions of 8192 + 2 x 8 x 128 channels
    "nemotron-h-8b": (4 * 2 * 8 * 128 * 2, 0, 0, 24 * (128 * 64 * 128 * 4 + 4 * 10240 * 2)),
}
# As their makers publish them, in billions: all parameters, and for mixtures of experts those that a token uses.
PARAMETERS = {
    "llama-2-7b": (6.74, None),
    "llama-3.1-8b": (8.03, None),
    "llama-3.1-70b": (70.6, None),
    "llama-3.1-405b": (405.9, None),
    "qwen3-235b-a22b": (235, 22),
    "qwen3-30b-a3b": (30.5, 3.3),
    "mixtral-8x7b": (46.7, 12.9),
    "deepseek-v3": (671, 37),
    "kimi-k2": (1026, 32),
    "gemma-3-27b": (27.0, None),
    "gpt-oss-120b": (116.8, 5.13),
    "gpt-oss-20b": (20.9, 3.61),
    "falcon-h1-7b": (7.59, None),
    "nemotron-h-8b": (8.1, None),
    "phi-4": (14.7, None),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_kept_bytes_of_well_known_models_are_those_worked_out_by_hand(name: str) -> None:
    shape = read_shape(name)
    token, window_token, windows, state = BY_HAND[name]
    assert shape.kv_bytes_per_token() == token
    assert shape.window_bytes_per_token() == window_token
    assert shape.window_bytes(1 << 20) == windows
    assert shape.state_bytes() == state
    assert shape.prefix_bytes(1 << 20) == token * (1 << 20) + windows + state


# Of configurations in published.json: bytes computed by hand as above, and parameters in billions.
PUBLISHED: dict[str, tuple[tuple[int, int, int], float]] = {
    # one of eight layers attends; 28 are Mamba: 8192 x 16 numbers, 4 positions of 8192 channels
    "jamba-1.5-mini": ((4 * 2 * 8 * 128 * 2, 0, 28 * (8192 * 16 * 4 + 4 * 8192 * 2)), 51.6),
    # every other of 46 layers slides over 4,096
    "gemma-2-27b": ((23 * 2 * 16 * 128 * 2, 4096 * 23 * 2 * 16 * 128 * 2, 0), 27.2),
    # MLA without a rank of queries
    "deepseek-v2-lite": ((27 * (512 + 64) * 2, 0, 0), 15.7),
    # every fourth of 48 layers sees everything, 36 a chunk of 8,192; one expert for all tokens
    "llama-4-scout": ((12 * 2 * 8 * 128 * 2, 8192 * 36 * 2 * 8 * 128 * 2, 0), 107.8),
    # MQA: one head of 64
    "falcon-7b": ((32 * 2 * 1 * 64 * 2, 0, 0), 6.92),
    "falcon-40b": ((60 * 2 * 8 * 64 * 2, 0, 0), 41.3),
    "dbrx": ((40 * 2 * 8 * 128 * 2, 0, 0), 131.6),
    # four of 40 layers attend; 36 are Mamba 2: 128 x 64 x 128 numbers
    "granite-4.0-h-small": ((4 * 2 * 8 * 128 * 2, 0, 36 * (128 * 64 * 128 * 4 + 4 * (8192 + 2 * 128) * 2)), 32.2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_of_other_kinds_give_the_bytes_worked_out_by_hand(name: str) -> None:
    kept, parameters = PUBLISHED[name]
    shape = read_shape(json.loads(Path(__file__).with_name("published.json").read_text())[name])
    assert (shape.kv_bytes_per_token(), shape.window_bytes(1 << 20), shape.state_bytes()) == kept
    assert shape.parameters / 1e9 == pytest.approx(parameters, rel=0.01)


def test_more_tokens_meet_more_experts() -> None:
    shape = read_shape("mixtral-8x7b")  # two experts of eight
    expert = 32 * 3 * 4096 * 14336
    around = 32000 * 4096 + sum(layer.parameters for layer in shape.layers) - 8 * expert
    met = shape.met_parameters([1, 2, 1000])
    assert met[0] == shape.active_parameters == around + 2 * expert
    assert met[1] == pytest.approx(around + 8 * expert * (1 - (6 / 8) ** 2))
    assert met[2] == pytest.approx(shape.parameters - 32000 * 4096), "the other matrix only looks up embeddings"
    dense = read_shape("llama-3.1-8b")
    assert dense.met_parameters([1, 1000]).tolist() == [dense.active_parameters] * 2


def test_tensor_parallelism_repeats_kv_beyond_the_number_of_its_heads() -> None:
    for name, devices, copies in (
        ("llama-3.1-70b", 8, 1),
        ("llama-3.1-70b", 12, 2),  # eight KV heads, four of them twice
        ("llama-3.1-70b", 16, 2),
        ("qwen3-235b-a22b", 8, 2),  # four KV heads
        ("deepseek-v3", 8, 8),  # one latent
        ("falcon-h1-7b", 2, 1),
        ("qwen3-next-80b-a3b", 4, 2),  # two KV heads, in a quarter of its layers
    ):
        assert read_shape(name).kv_copies(devices) == copies, name


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_published(name: str) -> None:
    shape, (total, active) = read_shape(name), PARAMETERS[name]
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.01)
    met = total - (0 if shape.tied else shape.hidden_size * shape.vocab_size / 1e9) if active is None else active
    assert shape.active_parameters / 1e9 == pytest.approx(met, rel=0.09 if active else 0.01)  # some count embeddings


def test_a_window_keeps_no_more_than_there_is() -> None:
    shape = read_shape("mistral-7b")
    assert shape.window_bytes(100) == 100 * 131_072
    assert shape.prefix_bytes(100) == 100 * 131_072


def test_types_change_bytes_as_they_should() -> None:
    shape = read_shape("qwen3-next-80b-a3b")
    assert (
        shape.kv_bytes_per_token("fp32") == 2 * shape.kv_bytes_per_token("bf16") == 4 * shape.kv_bytes_per_token("fp8")
    )
    assert shape.kv_bytes_per_token("int8") == shape.kv_bytes_per_token("fp8")
    assert (
        shape.kv_bytes_per_token("fp16") == 2 * shape.kv_bytes_per_token("int8") == 4 * shape.kv_bytes_per_token("int4")
    )
    assert shape.state_bytes("bf16", "bf16") == 36 * (32 * 128 * 128 * 2 + 4 * 8192 * 2)
    assert read_shape("gpt-oss-120b").weights_bytes() == pytest.approx(116.8e9 * 17 / 32, rel=0.01)
    with pytest.raises(BadArgument, match="kv_dtype = 'fp7'"):
        dtype_bytes("kv_dtype", "fp7")


def slow_flops(shape: ModelShape, tokens: int, past: int) -> float:
    """Counts one query and one position at a time."""
    flops = 2.0 * shape.hidden_size * shape.vocab_size
    for layer in shape.layers:
        for query in range(past, past + tokens):
            seen = [at for at in range(query + 1) if layer.window is None or at > query - layer.window]
            flops += layer.pair_flops * len(seen) + 2 * layer.active_parameters + layer.token_flops
        flops += layer.past_flops * past
    return flops


@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (1, 9), (7, 0), (5, 3), (12, 30), (40, 1)])
def test_prefill_flops_are_those_of_counting_one_by_one(tokens: int, past: int) -> None:
    layers = (
        Layer(kv_numbers=8, parameters=100, active_parameters=90, pair_flops=16),
        Layer(kv_numbers=8, window=6, parameters=100, active_parameters=90, pair_flops=20),
        Layer(recurrent_numbers=64, parameters=50, active_parameters=50, token_flops=448),
        Layer(kv_numbers=4, parameters=70, active_parameters=70, pair_flops=12, past_flops=33),
    )
    shape = ModelShape("made up", layers, hidden_size=8, vocab_size=97, tied=False)
    assert float(shape.prefill_flops(tokens, past)) == slow_flops(shape, tokens, past)
    assert shape.prefill_flops([tokens, 1], [past, 0]).tolist() == [
        slow_flops(shape, tokens, past),
        slow_flops(shape, 1, 0),
    ]


def test_attention_of_llama_is_the_textbook_figure() -> None:
    shape, n = read_shape("llama-3.1-8b"), 8192
    matrices = 2 * (shape.active_parameters - 4096 * 128256) * n + 2 * 4096 * 128256
    attention = 32 * 4 * 4096 * n * (n + 1) / 2  # layers x 4 x width x pairs under the causal mask
    assert float(shape.prefill_flops(n)) == matrices + attention


def test_what_is_cached_is_saved() -> None:
    shape = read_shape("gemma-3-27b")
    whole, first, rest = (float(shape.prefill_flops(*pair)) for pair in ((5000, 0), (3000, 0), (2000, 3000)))
    logits = 2 * shape.hidden_size * shape.vocab_size
    assert first + rest - logits == pytest.approx(whole, rel=1e-12)
    assert np.all(np.diff(shape.prefill_flops(1000, np.arange(0, 9000, 500))) >= 0)
