"""Embeddings: the mean of the last hidden states of plain transformers, in chunks and batches, and when preempted."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from machine import DEVICE, patience
from rigs.ghost import embedding, prompt
from rigs.greedy import family_of_prompts
from rigs.letters import Letters
from rigs.scheduler import PAGE, Bench

from bench.tiny_models import FAMILIES, GATHERED, HYBRIDS, RESUMED, VOCAB, WINDOWED, loaded, tiny
from mainstem.cache.components import Full, State, Window
from mainstem.errors import BadArgument
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Completion, ImageInput, Request
from mainstem.runtime.sampling.pooling import Pooling
from mainstem.settings.engine import EngineConfig, SamplingParams

TOLERANCE = 2e-5  # of vectors of length 1, of models with float32

# The mean


@pytest.mark.parametrize("chunks", [[10], [1] * 10, [3, 7], [9, 1]])
def test_a_mean_does_not_depend_on_chunks(chunks: list[int]) -> None:
    rows = torch.from_numpy(np.random.default_rng(0).normal(1000, 1, (10, 6)).astype(np.float32))
    pooling, start = Pooling(), 0
    for part in torch.split(rows, chunks):
        pooling.add(start, part)
        start += len(part)
    mean = rows.double().mean(0).numpy()
    found = pooling.vector(10)
    assert found is not None and found.dtype == np.float32
    np.testing.assert_allclose(found, mean / np.linalg.norm(mean), rtol=1e-7)


def test_at_the_first_position_it_begins_anew() -> None:
    pooling = Pooling()
    pooling.add(0, torch.ones(4, 2))
    pooling.add(0, torch.tensor([[3.0, 0.0]]))
    pooling.add(1, torch.tensor([[0.0, 4.0]]))
    found = pooling.vector(2)
    assert found is not None and found.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_mean_that_is_none(value: float) -> None:
    pooling = Pooling()
    pooling.add(0, torch.tensor([[1.0, 2.0], [value, 1.0]]))
    assert pooling.vector(2) is None


def test_a_mean_of_zeros_is_zeros() -> None:
    pooling = Pooling()
    pooling.add(0, torch.zeros(2, 3))
    found = pooling.vector(2)
    assert found is not None and found.tolist() == [0, 0, 0]


def test_nothing_is_generated_beside_an_embedding() -> None:
    with pytest.raises(BadArgument, match="max_tokens"):
        SamplingParams(embedding=True, max_tokens=1)


# The scheduler


def embedded(bench: Bench, id: str) -> list[Any]:
    return [delta.embedding for delta in bench.deltas[id] if delta.embedding is not None]


POOLS: dict[str, Any] = {
    "full": 40,
    "window": {Full(): 40, Window(6): 24},
    "states": {Full(): 40, State(): 9},
}


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("seed", range(3))
def test_random_prompts_are_embedded_whatever_runs_beside_them(seed: int, pools: str) -> None:
    rng = random.Random(f"{seed} {pools}")
    bench = Bench(POOLS[pools], token_budget=rng.choice([3, 8, 64]), max_running=rng.choice([2, 6]))
    stems = [prompt(rng.random(), rng.randint(1, 30)) for _ in range(3)]
    asked = {}
    for _ in range(24):
        stem = rng.choice(stems)
        tokens = stem[: rng.randint(1, len(stem))] + prompt(rng.random(), rng.choice([0, 1, 5]))
        embeds = rng.random() < 0.6
        given = {"max_tokens": 0, "embedding": True} if embeds else {"max_tokens": rng.choice([0, 1, 25])}
        asked[bench.add(tokens, ignore_eos=True, **given)] = tokens, embeds
        bench.step(rng.choice([0, 1, 3]))
    bench.run_and_flush()
    bench.assert_complete()
    for id, (tokens, embeds) in asked.items():
        found = embedded(bench, id)
        assert len(found) == embeds
        if embeds:
            np.testing.assert_allclose(found[0], embedding(tokens), atol=1e-6)
            assert bench.hit(id) == 0


def test_a_prompt_is_embedded_after_it_was_cached_and_is_cached_after_it_was_embedded() -> None:
    bench = Bench()
    tokens = prompt(1, 5 * PAGE + 2)
    bench.one(tokens)
    again = bench.one(tokens, max_tokens=0, embedding=True)
    assert bench.hit(again) == 0
    np.testing.assert_allclose(embedded(bench, again)[0], embedding(tokens), atol=1e-6)
    assert bench.hit(bench.one(tokens)) == 5 * PAGE
    bench.cache.flush()
    bench.one(tokens, max_tokens=0, embedding=True)
    assert bench.hit(bench.one(tokens)) == 5 * PAGE


def test_one_that_was_preempted_begins_anew() -> None:
    bench = Bench(pages=8, token_budget=4)
    bench.add(prompt(1, 4), max_tokens=24, ignore_eos=True)
    bench.step(2)
    tokens = prompt(2, 23)
    second = bench.add(tokens, max_tokens=0, embedding=True)
    bench.run_and_flush()
    assert bench.scheduler.totals.preemptions >= 1
    bench.assert_complete()
    np.testing.assert_allclose(embedded(bench, second)[0], embedding(tokens), atol=1e-6)


def test_hidden_states_that_hold_nan_end_the_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(token_budget=8)
    broken = bench.add(prompt(1, 20), max_tokens=0, embedding=True)
    good = bench.add(prompt(2, 4), max_tokens=1, ignore_eos=True)
    add = Pooling.add

    def spoiled(self: Pooling, start: int, hidden: torch.Tensor) -> None:
        add(self, start, hidden * math.nan if start == 0 else hidden)

    monkeypatch.setattr(Pooling, "add", spoiled)
    bench.run()
    assert bench.last(broken).error == "the model's hidden states hold NaN or infinity"
    assert not embedded(bench, broken)
    bench.assert_complete(good)


def test_images_are_not_embedded() -> None:
    bench = Bench(images=True)
    image = ImageInput(1, 5, bytes(16), {})
    with pytest.raises(BadArgument, match="embedding"):
        bench.add(prompt(1, 8), (image,), max_tokens=0, embedding=True)
    assert not bench.scheduler.busy


# Models

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", FAMILIES["llama"]),
    "gpt2": ("gpt2", FAMILIES["gpt2"]),
    "gemma2": ("gemma2", WINDOWED["gemma2"]),
    "bloom": ("bloom", GATHERED["bloom"]),
    "qwen3_next": ("qwen3_next", HYBRIDS["qwen3_next"]),
    "mamba2": ("mamba2", HYBRIDS["mamba2"]),
    "jamba": ("jamba", RESUMED["jamba"]),
}
PROMPTS = family_of_prompts(VOCAB, 21, [1, 12, 12, 30], 5) + [[7]]


@functools.cache
def model_of(kind: str) -> tuple[LoadedModel, Any]:
    """A tiny model, and the mean of the last hidden states of each prompt by transformers, of length 1."""
    family, changes = KINDS[kind]
    model: Any = tiny(family, **changes).to(DEVICE)  # type: ignore[call-arg, arg-type]
    made, plain = loaded(model), copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    means = []
    with torch.inference_mode():
        for tokens in PROMPTS:
            given = torch.tensor([tokens], device=DEVICE)
            states = plain(input_ids=given, use_cache=False, output_hidden_states=True).hidden_states
            mean = states[-1][0].double().mean(0)
            means.append((mean / mean.norm()).cpu().numpy())
    return LoadedModel(made.model, Letters(), kind, made.dtype, made.max_context), means  # type: ignore[arg-type]


def embed_all(engine: Engine, at: Sequence[int]) -> list[Completion]:
    params = SamplingParams(max_tokens=0, embedding=True)
    streams = [engine.submit(Request(np.array(PROMPTS[i]), params)) for i in at]
    return [stream.result(timeout_s=patience(120)) for stream in streams]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [8, 512])
def test_embeddings_are_those_of_plain_transformers(kind: str, budget: int) -> None:
    model, means = model_of(kind)
    slots = {"state_slots": 60} if KINDS[kind][0] in {**HYBRIDS, **RESUMED} else {}
    config = EngineConfig(pages=400, page_size=4, token_budget=budget, **slots)
    with Engine(model, config, random=random.Random(0)) as engine:
        for at in ([0], [4], range(len(PROMPTS)), range(len(PROMPTS))):  # cold, beside others, after they were cached
            for i, completion in zip(at, embed_all(engine, at), strict=True):
                assert completion.usage.cached_tokens == 0 and completion.finish_reason == "length"
                assert completion.embedding is not None and completion.embedding.shape == (engine.embedding_size,)
                np.testing.assert_allclose(completion.embedding, means[i], atol=TOLERANCE)
        later = engine.submit(Request(np.array(PROMPTS[3]), SamplingParams(max_tokens=1)))
        assert later.result(timeout_s=patience(120)).usage.cached_tokens > 0
