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

from bench.tiny_models import ALL, VOCAB, loaded, tiny
from mainstem import _core
from mainstem.errors import UnsupportedModel
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.exactness import arithmetic, watching
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.request import Request
from mainstem.settings.engine import EngineConfig, HostSize, SamplingParams, TierConfig

PAGE_SIZE = 4
LENGTHS = (75, 68, 41, 1)
CONTEXT = 640  # more than two spans of keys
PAGES = 900

EXACT = {
    *("bamba", "cohere2 windowed", "exaone4 windowed", "gemma", "gpt2", "gpt_bigcode"),
    *(
        "gpt_oss windowed",
        "granite",
        "granitemoehybrid",
        "lfm2",
        "llama",
        "llama, windows",
        "mamba2",
        "minicpm3",
        "mistral",
    ),
    *("mistral windowed", "mixtral", "olmo2", "olmo3 windowed", "phi3", "phi3 windowed", "qwen2", "qwen2 windowed"),
    *("qwen3", "rwkv", "youtu"),
}
EXACT_BY_DTYPE = {
    torch.float32: EXACT | {"gemma2 windowed", "gemma3_text windowed", "gemma4_text windowed", "gpt_neox"},
    torch.bfloat16: EXACT | {"falcon_h1"},
}

pytestmark = pytest.mark.usefixtures("one_thread")


def model_of(name: str, dtype: torch.dtype) -> LoadedModel:
    family, changes = ALL[name]
    model = tiny(family, **{"max_position_embeddings": CONTEXT, **changes}).to(dtype)  # type: ignore[call-arg,arg-type]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_beside_others_have_the_bits_of_prompts_alone(seeds: int, name: str, dtype: torch.dtype) -> None:
    try:
        runner = runner_of(name, dtype)
    except UnsupportedModel:  # random experts are chosen anew by the rounding of bfloat16
        assert dtype is torch.bfloat16
        return
    assert (runner.inexact is None) == (name in EXACT_BY_DTYPE[dtype]), runner.inexact
    for seed in range(seeds) if runner.inexact is None else ():
        same_bits(Bits(runner), seed)


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


@pytest.mark.parametrize(
    ("name", "function", "dtype"),
    [
        ("exp2", torch.exp2, torch.float32),
        ("sinh", torch.sinh, torch.float32),
        ("cosh", torch.cosh, torch.float32),
        ("celu", torch.celu, torch.float32),
        ("glu", lambda x: torch.nn.functional.glu(torch.cat([x, x], -1)), torch.float32),
        ("atan2", lambda x: torch.atan2(x, x.flip(-1)), torch.float32),
        ("logaddexp", lambda x: torch.logaddexp(x, x.flip(-1)), torch.float32),
        ("pow", lambda x: x.abs() ** (1 / 3), torch.float32),
        ("pow", lambda x: x.abs() ** -0.5, torch.bfloat16),
        ("sinh", torch.sinh, torch.bfloat16),
        ("cosh", torch.cosh, torch.bfloat16),
        ("mul", lambda x: torch.complex(x, x) * torch.complex(x, x), torch.float32),
    ],
)
def test_functions_with_other_bits_in_a_rest_are_noticed(
    name: str, function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    with watching() as found:
        function(torch.ones(3, 25, dtype=dtype))
        torch.ones(3, 25).pow(2).mean(-1).pow(-0.5)  # as norms do: the same bits for any rows
    assert found == {"elementwise functions with a scalar tail": {name}}


@pytest.mark.parametrize(
    ("function", "width"),
    [(torch.sigmoid, 64), (torch.nn.functional.silu, 64), (lambda x: torch.complex(x, -x) * torch.complex(x, x), 32)],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_functions_of_whole_vectors_have_one_result_however_many_rows_are_computed(
    function: Callable[[torch.Tensor], torch.Tensor], width: int, threads: int
) -> None:
    """Half as wide rows have a rest in the middle, where a second thread begins after half of an odd number of them."""
    x = torch.randn(5125, width, generator=torch.Generator().manual_seed(0))
    alone = function(x)  # on one thread
    torch.set_num_threads(threads)
    try:
        with watching() as found:
            assert torch.equal(function(x), alone)
            assert torch.equal(torch.cat([function(part) for part in x.split(7)]), alone)
        assert found == {}
        with watching() as found:
            function(x[:, : width // 2])
        assert bool(found) == (threads > 1)
    finally:
        torch.set_num_threads(1)


def test_sums_over_the_rows_are_noticed_and_those_of_few_numbers_and_of_a_row_are_not() -> None:
    with watching() as found:
        torch.ones(4, 3, 8).mean(0)
        torch.ones(9, 3, 8).sum(1)
        torch.ones(9, 3, 8).sum(-1)
        torch.ones(9, 3, dtype=torch.int64).sum(0)
    assert found == {}
    with watching() as found:
        torch.ones(9, 3, 8).mean(0)
        torch.ones(9, 3, 8).sum()
    assert found == {"sums over the first axis": {"mean", "sum"}}


def test_pages_of_another_arithmetic_have_another_identity() -> None:
    runner = runner_of("llama", torch.float32)
    named = [each for each in runner.computation if each.startswith("arithmetic ")]
    assert named == ([f"arithmetic {arithmetic()}"] if runner.inexact is None else [])


@pytest.mark.usefixtures("instructions")
def test_the_plain_path_names_the_machine_whose_compiler_made_it() -> None:
    name = _core.instructions()
    assert arithmetic() == (f"2 plain {platform.machine()}" if name == "plain" else f"2 {name}")
