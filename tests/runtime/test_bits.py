"""A hit changes no bit: parts of prompts, computed beside others, leave what whole prompts leave that are alone.

Logits, keys and values, and states are compared bit by bit, by model and dtype, wherever a model says that it is exact.
"""

from __future__ import annotations

import itertools
import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from machine import patience
from rigs.bits import Bits, Part, Tokens, chunks, differing, interleaved
from rigs.letters import Letters
from rigs.slow import slow_but

from bench.tiny_models import ALL, INEXACT, VOCAB, loaded, tiny
from mainstem import _core
from mainstem.errors import UnsupportedModel
from mainstem.runtime.engine import Engine
from mainstem.runtime.kernels import exchanges
from mainstem.runtime.models import self_test
from mainstem.runtime.models.exactness import arithmetic
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.request import Request
from mainstem.settings.engine import EngineConfig, HostSize, SamplingParams, TierConfig

PAGE_SIZE = 4
LENGTHS = (75, 68, 41, 1)
CONTEXT = 640  # more than two spans of keys
PAGES = 900

pytestmark = pytest.mark.usefixtures("one_thread")


WHOLE: dict[str, dict[str, object]] = {"llama": {"head_dim": 32}, "qwen3": {"head_dim": 32}}
"""Models whose layers are one call of the core each, with these changes."""
MOST_UNLIKE = (
    "llama", "gpt_neox", "mistral windowed", "gpt_oss windowed", "mimo_v2_flash windowed", "deepseek_v3", "olmo_hybrid",
    "mamba2", "lfm2", "rwkv", "bloom", "recurrent_gemma",
)  # fmt: skip


def model_of(name: str, dtype: torch.dtype, **others: object) -> LoadedModel:
    family, changes = ALL[name]
    changes = {"max_position_embeddings": CONTEXT, **changes, **WHOLE.get(name, {}), **others}
    model = tiny(family, **changes).to(dtype)  # type: ignore[call-arg,arg-type]
    return replace(loaded(model, name), dtype=dtype, tokenizer=Letters())  # type: ignore[arg-type]


def runner_of(name: str, dtype: torch.dtype) -> ModelRunner:
    model = model_of(name, dtype)
    names = Layout.of(model.model.config, model.max_context).names
    return ModelRunner(model, {each: 8 if each == "state" else PAGES for each in names}, PAGE_SIZE)


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[Tokens]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def same_bits(bits: Bits, seed: int) -> None:
    """Computes prompts in parts of random sizes, some together, and one that begins with pages of another's."""
    draw = random.Random(seed)
    prompts = prompts_of(LENGTHS, seed)
    hit = 0 if bits.has_states else draw.randrange(1, 16) * PAGE_SIZE
    prompts[1][:hit] = prompts[0][:hit]
    alone = [bits.alone(prompt) for prompt in prompts]
    sizes = [itertools.repeat(1), iter(lambda: draw.choice((1, 2, 3, 5, 16, 17, 33)), 0), itertools.repeat(75)]
    begins = (0, hit, 0, 0)
    queues = [chunks(i, begins[i], len(prompt), draw.choice(sizes)) for i, prompt in enumerate(prompts)]
    before, after = [queues[0]], queues[1:]  # the pages that are hit are there
    forwards = interleaved(before, draw) + interleaved(after, draw) if hit else interleaved(queues, draw)
    for ours, expected in zip(bits.compute(prompts, forwards, (0, hit, 0, 0)), alone, strict=True):
        assert differing(ours, expected) == {}


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.slow, id="float32"), pytest.param(torch.bfloat16, id="bfloat16")],
)
@pytest.mark.parametrize("name", slow_but(ALL, *MOST_UNLIKE))
@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_beside_others_have_the_bits_of_prompts_alone(seeds: int, name: str, dtype: torch.dtype) -> None:
    try:
        runner = runner_of(name, dtype)
    except UnsupportedModel:  # random experts are chosen anew by the rounding of bfloat16
        assert dtype is torch.bfloat16
        return
    assert (runner.inexact is None) == (ALL[name][0] not in INEXACT), runner.inexact
    assert runner.exchanged.layers == 3 or name not in WHOLE
    for seed in range(seeds) if runner.inexact is None else ():
        same_bits(Bits(runner), seed)


ADAPTERS: dict[str, dict[str, object]] = {
    "linear layers": {"target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "rank-stabilized": {"target_modules": ["o_proj", "up_proj"], "use_rslora": True},
}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("name", ADAPTERS)
def test_with_an_adapter_parts_have_the_bits_of_prompts_alone(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Rows of 100 numbers of the MLP end in a rest; the layers compute by their own code."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    changes = {"intermediate_size": 100}
    config = peft.LoraConfig(r=3, task_type="CAUSAL_LM", init_lora_weights=False, **ADAPTERS[name])
    peft.get_peft_model(tiny("llama", **changes), config).save_pretrained(str(tmp_path), save_embedding_layers=False)
    model = tiny("llama", max_position_embeddings=CONTEXT, **changes).to(dtype)  # type: ignore[call-arg,arg-type]
    runner = ModelRunner(replace(loaded(model), dtype=dtype), PAGES, PAGE_SIZE)
    adapter = runner.adapters.load("a", tmp_path)
    assert (runner.inexact, adapter.inexact) == (None, None)
    base = Bits(runner).alone(prompts_of([20])[0])
    same_bits(Bits(runner, adapter), 0)
    assert differing(Bits(runner, adapter).alone(prompts_of([20])[0]), base), "the adapter changes something"


def test_an_adapter_whose_products_are_pytorchs_makes_the_model_inexact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=3, task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj"])
    name = "mistral windowed"  # whose layers compute part by part
    model = peft.get_peft_model(model_of(name, torch.float32).model, config)
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    runner = runner_of(name, torch.float32)
    identity = runner.computation
    monkeypatch.setattr(exchanges, "exchange_linear", lambda layer, beside: None)
    monkeypatch.setattr(self_test, "compute_by_row", lambda module: False)
    runner.adapters.load("a", tmp_path)
    assert runner.inexact == "adapter a: PyTorch computes products (linear)"
    assert runner.computation == identity, "pages of the model alone are as they were"
    runner.adapters.unload("a")
    assert runner.inexact is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss windowed", "mistral windowed"])
def test_spans_of_keys_begin_where_they_begin_in_the_whole_prompt(name: str, dtype: torch.dtype) -> None:
    bits, (prompt,) = Bits(runner_of(name, dtype)), prompts_of([600])
    alone = bits.alone(prompt)
    for cut in (1, 255, 256, 257, 511, 512, 580):
        (ours,) = bits.compute([prompt], [[Part(0, 0, cut)], [Part(0, cut, 599)], [Part(0, 599, 600)]])
        assert differing(ours, alone) == {}


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    bits, (prompt,) = Bits(runner_of("llama", torch.float32)), prompts_of([300])
    alone = bits.alone(prompt)
    torch.set_num_threads(threads)
    try:
        assert differing(bits.alone(prompt), alone) == {}
    finally:
        torch.set_num_threads(1)


# ---------------------------------------------------------------- an engine


def scores(engine: Engine, prompts: Sequence[Tokens], new: int = 12) -> list[list[tuple[int, float]]]:
    """Answers prompts at once; returns the tokens and their log-probabilities."""
    params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=0)
    streams = [engine.submit(Request(prompt, params)) for prompt in prompts]
    answers = [stream.result(timeout_s=patience(120)) for stream in streams]
    return [
        [(token, each.logprob) for token, each in zip(answer.tokens, answer.logprobs, strict=True)]
        for answer in answers
    ]


CONFIGS: dict[str, EngineConfig] = {
    "whole": EngineConfig(pages=200, page_size=16),
    "chunks": EngineConfig(pages=200, page_size=8, token_budget=7),
    "single positions": EngineConfig(pages=900, page_size=1, token_budget=40),
    "preempted": EngineConfig(pages=21, page_size=5, token_budget=16),
    "drafts": EngineConfig(pages=100, page_size=8, draft_tokens=7),
    "host": EngineConfig(pages=24, page_size=4, tiers=TierConfig(size=HostSize(host_ratio=8.0))),
}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def alone(request: pytest.FixtureRequest) -> tuple[Callable[[], LoadedModel], list[Tokens], list[object]]:
    """A model, prompts that share a prefix, and what each is answered that is alone in an empty cache."""
    dtype: torch.dtype = request.param
    shared, *rest = prompts_of([43, 1, 6, 20, 9])
    prompts = [np.concatenate([shared, each]) for each in rest]
    with Engine(model_of("llama", dtype), EngineConfig(pages=200, cache=False)) as engine:
        expected: list[object] = [scores(engine, [prompt])[0] for prompt in prompts]
    return lambda: model_of("llama", dtype), prompts, expected


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_have_the_same_log_probabilities_however_they_come(
    name: str, alone: tuple[Callable[[], LoadedModel], list[Tokens], list[object]]
) -> None:
    make, prompts, expected = alone
    with Engine(make(), CONFIGS[name]) as engine:
        if engine.exact.startswith("no"):
            return
        assert [scores(engine, [prompt])[0] for prompt in prompts] == expected  # cold, then warm
        assert scores(engine, prompts) == expected  # all at once, warm
        engine.flush()
        assert scores(engine, prompts) == expected  # all at once, cold


def test_an_answer_that_is_scored_as_a_prompt_has_the_same_log_probabilities(
    alone: tuple[Callable[[], LoadedModel], list[Tokens], list[object]],
) -> None:
    """Who trains on answers needs that, and computes them in chunks of any size."""
    make, (prompt, *_), _ = alone
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    for budget in (7, 64):
        with Engine(make(), EngineConfig(pages=200, page_size=8, token_budget=budget)) as engine:
            answer = scores(engine, [prompt], 30)[0]
            whole = np.concatenate([prompt, np.array([token for token, _ in answer])])
            scored = engine.submit(Request(whole, params)).result(timeout_s=patience(120)).prompt_logprobs
        assert [(each.token, each.logprob) for each in scored[len(prompt) - 1 :]] == answer


def test_a_restart_from_storage_changes_no_bit(
    alone: tuple[Callable[[], LoadedModel], list[Tokens], list[object]], tmp_path: Path
) -> None:
    make, prompts, expected = alone
    tiers = TierConfig(size=HostSize(host_ratio=4.0), storage=f"file:{tmp_path}/kv?capacity=64MiB")
    config = EngineConfig(pages=100, page_size=4, tiers=tiers)
    for _ in range(2):
        with Engine(make(), config) as engine:
            if engine.exact.startswith("no"):
                return
            assert [scores(engine, [prompt])[0] for prompt in prompts] == expected
            restored = engine.stats().tiers
    assert restored is not None


def test_pages_of_another_arithmetic_have_another_identity() -> None:
    runner = runner_of("llama", torch.float32)
    named = [each for each in runner.computation if each.startswith("arithmetic ")]
    assert named == ([f"arithmetic {arithmetic()}"] if runner.inexact is None else [])
    assert ("whole layers 3" in runner.computation) == (runner.inexact is None)
    assert not any("whole" in each for each in runner_of("phi3", torch.float32).computation)


@pytest.mark.usefixtures("instructions")
def test_the_plain_path_names_the_machine_whose_compiler_made_it() -> None:
    name = _core.instructions()
    assert arithmetic() == (f"3 plain {platform.machine()}" if name == "plain" else f"3 {name}")
