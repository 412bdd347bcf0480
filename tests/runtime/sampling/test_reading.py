"""Requests that read a whole prompt, for the log-probabilities of its tokens or for its embedding.

Both are those of plain transformers: in chunks and batches, after hits, and when preempted.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from machine import DEVICE, patience
from rigs.ghost import VOCAB as LETTERS
from rigs.ghost import embedding, prompt
from rigs.ghost import scores as expected
from rigs.greedy import LOGPROB_TOLERANCE, family_of_prompts
from rigs.letters import Letters
from rigs.scheduler import PAGE, Bench
from rigs.slow import slow_but

from bench.tiny_models import FAMILIES, GATHERED, HYBRIDS, RESUMED, VOCAB, WINDOWED, loaded, tiny
from mainstem.cache.components import Full, State, Window
from mainstem.errors import BadArgument
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Completion, ImageInput, Request, TokenLogprob
from mainstem.runtime.sampling import scores
from mainstem.runtime.sampling.pooling import Pooling
from mainstem.runtime.sampling.scores import score
from mainstem.runtime.schedule import scheduler
from mainstem.settings.engine import EngineConfig, SamplingParams

TOLERANCE = 2e-5  # of embeddings, which have length 1, of models with float32

# Rows of logits


@given(
    rows=arrays.arrays(np.float32, (5, 7), elements=st.integers(-80, 80).map(lambda n: n / 4)),
    tokens=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    alternatives=st.integers(0, 9),
    at_once=st.integers(1, 50),
)
def test_scores_are_those_of_each_row_alone(
    rows: np.ndarray, tokens: list[int], alternatives: int, at_once: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "_AT_ONCE", at_once)
        found = score(torch.from_numpy(rows), np.array(tokens, np.int32), alternatives)
    assert found is not None and len(found) == len(tokens)
    for row, token, made in zip(rows.astype(float).tolist(), tokens, found, strict=False):
        total = math.log(sum(math.exp(value) for value in row))
        assert (made.token, made.rank) == (token, 1 + sum(value > row[token] for value in row))
        assert made.logprob == pytest.approx(row[token] - total, abs=1e-4)
        assert [value for _, value in made.top] == pytest.approx(
            [value - total for value in sorted(row, reverse=True)[:alternatives]], abs=1e-4
        )
        assert all(value == pytest.approx(row[other] - total, abs=1e-4) for other, value in made.top)
        assert dict(made.top).get(token, made.logprob) == made.logprob, "a client compares them exactly"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_none_have_no_scores(value: float) -> None:
    rows = torch.zeros(4, 5)
    rows[2, 3] = value
    assert score(rows, np.zeros(4, np.int32), 1) is None
    assert score(rows[:2], np.zeros(2, np.int32), 1) is not None


def test_a_token_that_is_impossible_has_a_score() -> None:
    (made,) = score(torch.tensor([[0.0, -math.inf]]), np.array([1], np.int32), 2) or ()
    assert (made.logprob, made.rank, made.top) == (-math.inf, 2, ((0, 0.0), (1, -math.inf)))


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

READINGS: dict[str, dict[str, Any]] = {
    "scores": {"max_tokens": 1, "prompt_logprobs": 1},
    "embedding": {"max_tokens": 0, "embedding": True},
}
reading = pytest.mark.parametrize("params", READINGS.values(), ids=READINGS)


def scored(bench: Bench, id: str) -> list[TokenLogprob]:
    return [score for delta in bench.deltas[id] for score in delta.prompt_logprobs]


def embedded(bench: Bench, id: str) -> list[Any]:
    return [delta.embedding for delta in bench.deltas[id] if delta.embedding is not None]


def check(bench: Bench, id: str) -> None:
    """Checks what a request has read of its prompt: all that it asked for, with a hit on no more than before it."""
    tokens, params = bench.requests[id].tokens.tolist(), bench.requests[id].params
    wanted, before = params.prompt_logprobs, max(params.logprob_start - 1, 0)
    assert scored(bench, id) == ([] if wanted is None else expected(tokens, wanted)[before:])
    vectors = embedded(bench, id)
    assert len(vectors) == params.embedding
    for vector in vectors:
        np.testing.assert_allclose(vector, embedding(tokens), atol=1e-6)
    assert bench.hit(id) <= (0 if params.embedding else len(tokens) if wanted is None else before)


POOLS: dict[str, Any] = {
    "full": 40,
    "window": {Full(): 40, Window(6): 24},
    "states": {Full(): 40, State(): 9},
}


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("seed", range(4))
def test_random_prompts_are_read_whatever_runs_beside_them(
    seed: int, pools: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{seed} {pools}")
    monkeypatch.setattr(scheduler, "_MOST_LOGITS", rng.choice([1, 5, 1000]) * LETTERS)
    bench = Bench(
        POOLS[pools],
        token_budget=rng.choice([3, 8, 64]),
        max_running=rng.choice([2, 6]),
        draft_tokens=rng.choice([0, 7]),
        age_limit_s=rng.choice([0.0, 1e9]),
    )
    stems = [prompt(rng.random(), rng.randint(1, 30)) for _ in range(3)]
    for _ in range(30):
        stem = rng.choice(stems)
        tokens = stem[: rng.randint(1, len(stem))] + prompt(rng.random(), rng.choice([0, 1, 5]))
        asked = {"max_tokens": rng.choice([0, 1, 25]), "prompt_logprobs": rng.choice([None, 0, 2])}
        asked["logprob_start"] = rng.choice([0, 1, rng.randint(0, len(tokens))])
        bench.add(tokens, ignore_eos=True, **(READINGS["embedding"] if rng.random() < 0.3 else asked))
        bench.step(rng.choice([0, 1, 3]))
    bench.run_and_flush()
    for id in bench.requests:
        check(bench, id)


@reading
def test_a_prompt_is_read_after_it_was_cached_and_is_cached_after_it_was_read(params: dict[str, Any]) -> None:
    bench = Bench()
    tokens = prompt(1, 5 * PAGE + 2)
    bench.one(tokens)
    check(bench, bench.one(tokens, **params))
    assert bench.hit(bench.one(tokens)) == 5 * PAGE
    bench.cache.flush()
    bench.one(tokens, **params)
    assert bench.hit(bench.one(tokens)) == 5 * PAGE


@reading
def test_a_request_that_was_preempted_while_it_read_begins_anew(params: dict[str, Any]) -> None:
    bench = Bench(pages=8, token_budget=4)
    bench.add(prompt(1, 4), max_tokens=24, ignore_eos=True)
    bench.step(2)
    second = bench.add(prompt(2, 23), ignore_eos=True, **params)
    bench.run_and_flush()
    assert bench.scheduler.totals.preemptions >= 1
    bench.assert_complete()
    check(bench, second)


@reading
def test_images_are_not_read(params: dict[str, Any]) -> None:
    bench = Bench(images=True)
    with pytest.raises(BadArgument, match=[*params][1]):
        bench.add(prompt(1, 8), (ImageInput(1, 5, bytes(16), {}),), **params)
    assert not bench.scheduler.busy


@pytest.mark.parametrize(("asked", "computed"), [(None, [6]), (0, [6, 2])])
def test_it_waits_for_nobody_who_computes_the_same(asked: int | None, computed: list[int]) -> None:
    bench = Bench(token_budget=8)
    tokens = prompt(1, 14)
    for alternatives in (None, asked):
        bench.add(tokens, max_tokens=1, prompt_logprobs=alternatives)
        bench.step()
    assert bench.ghost.forwards == [[8], computed]
    bench.run_and_flush()


def test_what_is_computed_for_scores_is_not_said_to_lack_a_state() -> None:
    bench = Bench({Full(): 40, State(): 9})
    tokens = prompt(1, 20)
    bench.one(tokens)
    bench.one(tokens, prompt_logprobs=0)
    assert bench.scheduler.totals.stateless_tokens == 0


def test_scores_come_once_and_before_the_first_token() -> None:
    bench = Bench(token_budget=4)
    id = bench.one(prompt(1, 11), max_tokens=3, prompt_logprobs=0)
    first, *rest = bench.deltas[id]
    assert len(first.prompt_logprobs) == 10 and not first.tokens
    assert not any(delta.prompt_logprobs for delta in rest)


@pytest.mark.parametrize("pools", POOLS)
def test_what_is_before_the_first_score_is_found_like_any_prompt(pools: str) -> None:
    bench = Bench(POOLS[pools])
    tokens = prompt(1, 6 * PAGE + 2)
    bench.one(tokens, logprob_start=len(tokens))  # says nothing without prompt_logprobs
    ends = {start: bench.one(tokens, prompt_logprobs=1, logprob_start=start) for start in range(len(tokens) + 1)}
    for start, id in ends.items():
        check(bench, id)
        before = max(start - 1, 0)
        hits = {"full": min(before, 6 * PAGE), "window": before // PAGE * PAGE, "states": bench.hit(id)}
        assert bench.hit(id) == hits[pools]
    assert len(scored(bench, ends[len(tokens)])) == 0 and len(scored(bench, ends[len(tokens) - 1])) == 1


@pytest.mark.parametrize("start", [0, 1, 2 * PAGE + 1, 3 * PAGE])
def test_an_explanation_says_from_where_on_scores_are_computed(start: int) -> None:
    bench = Bench()
    tokens = prompt(1, 4 * PAGE + 2)
    bench.one(tokens)
    request = Request(np.array(tokens), SamplingParams(max_tokens=1, prompt_logprobs=0, logprob_start=start))
    encoded = bench.scheduler.intake.check(request)
    found = bench.scheduler.hits.look(request, encoded, distances=False)
    before = max(start - 1, 0)
    assert sum(each.end - each.begin for each in found if each.tier) == min(before, 4 * PAGE)
    assert {each.cause for each in found if each.begin >= before} == {"scored"}


def test_what_is_before_the_first_score_is_found_after_a_mark() -> None:
    bench = Bench(POOLS["states"])
    context = prompt(1, 4 * PAGE)
    for seed in range(2, 5):
        id = bench.one(context + prompt(seed, 3), prompt_logprobs=0, logprob_start=4 * PAGE + 1, marks=[4 * PAGE])
        check(bench, id)
        assert bench.hit(id) == (4 * PAGE if seed > 2 else 0)


def test_it_waits_for_one_who_computes_what_is_before_the_first_score() -> None:
    bench = Bench(token_budget=8)
    tokens = prompt(1, 20)
    bench.add(tokens, max_tokens=1)
    second = bench.add(tokens, max_tokens=1, prompt_logprobs=0, logprob_start=18)
    bench.run_and_flush()
    check(bench, second)
    assert bench.hit(second) == 17 // PAGE * PAGE


def test_the_first_score_is_inside_the_prompt() -> None:
    tokens = prompt(1, 5)
    params = {"prompt_logprobs": 0, "logprob_start": 6}
    with pytest.raises(BadArgument, match=r"logprob_start.*at most 5, the tokens of the prompt"):
        Bench().add(tokens, **params)
    with pytest.raises(BadArgument, match="logprob_start"):
        SamplingParams(logprob_start=-1)


def test_positions_before_the_first_score_take_none_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_MOST_LOGITS", 6 * LETTERS)
    bench = Bench(token_budget=20)
    id = bench.add(prompt(1, 30), max_tokens=1, prompt_logprobs=0, logprob_start=13)
    bench.run_and_flush()
    check(bench, id)
    assert bench.ghost.forwards == [[18], [6], [6]]


def test_rows_of_a_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_MOST_LOGITS", 6 * LETTERS)
    bench = Bench(token_budget=20)
    for seed in range(3):
        bench.add(prompt(seed, 9), max_tokens=1, prompt_logprobs=0)
    bench.add(prompt(9, 30), max_tokens=1)
    bench.run_and_flush()
    assert bench.ghost.forwards[0] == [6, 14]
    bench.assert_complete()


def test_logits_that_hold_nan_end_the_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(token_budget=8)
    broken = bench.add(prompt(1, 20), max_tokens=1, prompt_logprobs=0)
    bench.add(prompt(2, 4), max_tokens=1, ignore_eos=True)
    forward = bench.ghost.forward

    def spoiled(segments: Any) -> torch.Tensor:
        rows = forward(segments)
        rows[0] = math.nan
        return rows

    monkeypatch.setattr(bench.ghost, "forward", spoiled)
    bench.step()
    monkeypatch.undo()
    assert bench.last(broken).error == "the model's logits hold NaN or infinity"
    bench.run_and_flush(broken)


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


# Models

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", FAMILIES["llama"]),
    "gpt2": ("gpt2", FAMILIES["gpt2"]),
    "gemma2": ("gemma2", WINDOWED["gemma2"]),
    "mistral": ("mistral", WINDOWED["mistral"]),
    "bloom": ("bloom", GATHERED["bloom"]),
    "qwen3_next": ("qwen3_next", HYBRIDS["qwen3_next"]),
    "mamba2": ("mamba2", HYBRIDS["mamba2"]),
    "jamba": ("jamba", RESUMED["jamba"]),
}
PROMPTS = family_of_prompts(VOCAB, 21, [1, 12, 12, 30], 5) + [[7]]


def model_of(kind: str) -> tuple[LoadedModel, list[torch.Tensor], list[np.ndarray]]:
    """A tiny model, and of each prompt by plain transformers logprobs [tokens - 1, vocab] and the embedding."""
    family, changes = KINDS[kind]
    model: Any = tiny(family, **changes).to(DEVICE)  # type: ignore[call-arg, arg-type]
    made, plain = loaded(model), copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    logprobs, means = [], []
    with torch.inference_mode():
        for tokens in PROMPTS:
            ids = torch.tensor([tokens], device=DEVICE)
            output = plain(input_ids=ids, use_cache=False, output_hidden_states=True)
            logprobs.append(torch.log_softmax(output.logits[0, :-1].float(), dim=-1).cpu())
            mean = output.hidden_states[-1][0].double().mean(0)
            means.append((mean / mean.norm()).cpu().numpy())
    return LoadedModel(made.model, Letters(), kind, made.dtype, made.max_context), logprobs, means  # type: ignore[arg-type]


def ask(engine: Engine, at: Sequence[int], **params: Any) -> list[Completion]:
    wanted = SamplingParams(ignore_eos=True, **params)
    streams = [engine.submit(Request(np.array(PROMPTS[i]), wanted)) for i in at]
    return [stream.result(timeout_s=patience(120)) for stream in streams]


def check_scores(completion: Completion, plain: torch.Tensor, tokens: list[int]) -> None:
    assert completion.usage.cached_tokens == 0
    for made, row, token in zip(completion.prompt_logprobs, plain, tokens[1:], strict=True):
        assert made.token == token
        assert abs(made.logprob - float(row[token])) < LOGPROB_TOLERANCE
        ties = int(((row - row[token]).abs() < LOGPROB_TOLERANCE).sum())
        assert abs(made.rank - 1 - int((row > row[token]).sum())) <= ties
        best = torch.topk(row, 2).values.tolist()
        assert [value for _, value in made.top] == pytest.approx(best, abs=LOGPROB_TOLERANCE)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", slow_but(KINDS, "llama", "gemma2", "bloom", "mamba2"))
@pytest.mark.parametrize("budget", [16, pytest.param(512, marks=pytest.mark.slow)])
def test_what_is_read_is_that_of_plain_transformers(kind: str, budget: int) -> None:
    model, logprobs, means = model_of(kind)
    slots = {"state_slots": 60} if KINDS[kind][0] in {**HYBRIDS, **RESUMED} else {}
    config = EngineConfig(pages=400, page_size=4, token_budget=budget, draft_tokens=7, **slots)
    every = range(len(PROMPTS))
    with Engine(model, config, random=random.Random(0)) as engine:
        (unread,) = ask(engine, [3], max_tokens=8)
        for at in ([0], [1], every, every):  # cold, beside others, after they were cached
            for i, completion in zip(at, ask(engine, at, max_tokens=8, prompt_logprobs=2), strict=True):
                check_scores(completion, logprobs[i], PROMPTS[i])
        for at in ([4], every):
            for i, completion in zip(at, ask(engine, at, max_tokens=0, embedding=True), strict=True):
                assert completion.usage.cached_tokens == 0 and completion.finish_reason == "length"
                assert completion.embedding is not None and completion.embedding.shape == (engine.embedding_size,)
                np.testing.assert_allclose(completion.embedding, means[i], atol=TOLERANCE)
        (again,) = ask(engine, [3], max_tokens=8)
        assert again.tokens == unread.tokens
        assert again.usage.cached_tokens > 0 and not again.prompt_logprobs
        assert engine.stats().totals.accepted_tokens > 0 or slots
