"""Log-probabilities of prompts: those of plain transformers, in chunks and batches, after hits, and when preempted."""

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
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from machine import DEVICE, patience
from rigs.ghost import VOCAB as LETTERS
from rigs.ghost import prompt
from rigs.ghost import scores as expected
from rigs.greedy import LOGPROB_TOLERANCE, family_of_prompts
from rigs.letters import Letters
from rigs.scheduler import PAGE, Bench

from bench.tiny_models import FAMILIES, GATHERED, HYBRIDS, RESUMED, VOCAB, WINDOWED, loaded, tiny
from mainstem.cache.components import Full, State, Window
from mainstem.errors import BadArgument
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Completion, ImageInput, Request, TokenLogprob
from mainstem.runtime.sampling import scores
from mainstem.runtime.schedule import scheduler
from mainstem.settings.engine import EngineConfig, SamplingParams

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
        found = scores.score(torch.from_numpy(rows), np.array(tokens, np.int32), alternatives)
    assert found is not None and len(found) == len(tokens)
    for row, token, score in zip(rows.astype(float).tolist(), tokens, found, strict=False):
        total = math.log(sum(math.exp(value) for value in row))
        assert (score.token, score.rank) == (token, 1 + sum(value > row[token] for value in row))
        assert score.logprob == pytest.approx(row[token] - total, abs=1e-4)
        assert [value for _, value in score.top] == pytest.approx(
            [value - total for value in sorted(row, reverse=True)[:alternatives]], abs=1e-4
        )
        assert all(value == pytest.approx(row[other] - total, abs=1e-4) for other, value in score.top)
        assert dict(score.top).get(token, score.logprob) == score.logprob, "a client compares them exactly"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_none_have_no_scores(value: float) -> None:
    rows = torch.zeros(4, 5)
    rows[2, 3] = value
    assert scores.score(rows, np.zeros(4, np.int32), 1) is None
    assert scores.score(rows[:2], np.zeros(2, np.int32), 1) is not None


def test_a_token_that_is_impossible_has_a_score() -> None:
    (score,) = scores.score(torch.tensor([[0.0, -math.inf]]), np.array([1], np.int32), 2) or ()
    assert (score.logprob, score.rank, score.top) == (-math.inf, 2, ((0, 0.0), (1, -math.inf)))


# The scheduler


def scored(bench: Bench, id: str) -> list[TokenLogprob]:
    return [score for delta in bench.deltas[id] for score in delta.prompt_logprobs]


POOLS: dict[str, Any] = {
    "full": 40,
    "window": {Full(): 40, Window(6): 24},
    "states": {Full(): 40, State(): 9},
}


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("seed", range(4))
def test_random_prompts_are_scored_whatever_runs_beside_them(
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
    asked = {}
    for _ in range(24):
        stem = rng.choice(stems)
        tokens = stem[: rng.randint(1, len(stem))] + prompt(rng.random(), rng.choice([0, 1, 5]))
        alternatives = rng.choice([None, 0, 2])
        given = {"max_tokens": rng.choice([0, 1, 25]), "prompt_logprobs": alternatives}
        asked[bench.add(tokens, ignore_eos=True, **given)] = tokens, alternatives
        bench.step(rng.choice([0, 1, 3]))
    bench.run_and_flush()
    bench.assert_complete()
    for id, (tokens, alternatives) in asked.items():
        assert scored(bench, id) == ([] if alternatives is None else expected(tokens, alternatives))
        assert alternatives is None or bench.hit(id) == 0
    assert bench.scheduler.totals.stateless_tokens >= 0


def test_a_prompt_is_scored_after_it_was_cached_and_is_cached_after_it_was_scored() -> None:
    bench = Bench()
    tokens = prompt(1, 5 * PAGE + 2)
    bench.one(tokens)
    again = bench.one(tokens, prompt_logprobs=1)
    assert (bench.hit(again), scored(bench, again)) == (0, expected(tokens, 1))
    assert bench.hit(bench.one(tokens)) == 5 * PAGE
    bench.cache.flush()
    bench.one(tokens, prompt_logprobs=1)
    assert bench.hit(bench.one(tokens)) == 5 * PAGE


@pytest.mark.parametrize(("asked", "computed"), [(None, [6]), (0, [6, 2])])
def test_it_waits_for_nobody_who_computes_the_same(asked: int | None, computed: list[int]) -> None:
    bench = Bench(token_budget=8)
    tokens = prompt(1, 14)
    for alternatives in (None, asked):
        bench.add(tokens, max_tokens=1, prompt_logprobs=alternatives)
        bench.step()
    assert bench.ghost.forwards == [[8], computed]
    bench.run_and_flush()
    bench.assert_complete()


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


def test_a_request_that_was_preempted_while_it_was_scored_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(pages=8, token_budget=4)
    first = bench.add(prompt(1, 4), max_tokens=24, ignore_eos=True)
    bench.step(2)
    tokens = prompt(2, 23)
    second = bench.add(tokens, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    bench.run_and_flush()
    assert bench.scheduler.totals.preemptions >= 1
    bench.assert_complete(first, second)
    assert scored(bench, second) == expected(tokens, 1)


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
    good = bench.add(prompt(2, 4), max_tokens=1, ignore_eos=True)
    forward = bench.ghost.forward

    def spoiled(segments: Any) -> torch.Tensor:
        rows = forward(segments)
        rows[0] = math.nan
        return rows

    monkeypatch.setattr(bench.ghost, "forward", spoiled)
    bench.step()
    monkeypatch.undo()
    assert bench.last(broken).error == "the model's logits hold NaN or infinity"
    bench.run_and_flush()
    bench.assert_complete(good)


def test_how_likely_images_are_is_not_asked() -> None:
    bench = Bench(images=True)
    image = ImageInput(1, 5, bytes(16), {})
    with pytest.raises(BadArgument, match="prompt_logprobs"):
        bench.add(prompt(1, 8), (image,), prompt_logprobs=0)
    assert not bench.scheduler.busy


# Models

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", FAMILIES["llama"]),
    "gemma2": ("gemma2", WINDOWED["gemma2"]),
    "mistral": ("mistral", WINDOWED["mistral"]),
    "bloom": ("bloom", GATHERED["bloom"]),
    "qwen3_next": ("qwen3_next", HYBRIDS["qwen3_next"]),
    "mamba2": ("mamba2", HYBRIDS["mamba2"]),
    "jamba": ("jamba", RESUMED["jamba"]),
}
PROMPTS = family_of_prompts(VOCAB, 21, [1, 12, 12, 30], 5)


@functools.cache
def model_of(kind: str) -> tuple[LoadedModel, Any]:
    """A tiny model, and plain logprobs of each prompt's tokens by a copy of it, [tokens - 1, vocab]."""
    family, changes = KINDS[kind]
    model: Any = tiny(family, **changes).to(DEVICE)  # type: ignore[call-arg, arg-type]
    made, plain = loaded(model), copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    with torch.inference_mode():
        rows = [plain(input_ids=torch.tensor([tokens], device=DEVICE), use_cache=False).logits[0] for tokens in PROMPTS]
    probabilities = [torch.log_softmax(row[:-1].float(), dim=-1).cpu() for row in rows]
    return LoadedModel(made.model, Letters(), kind, made.dtype, made.max_context), probabilities  # type: ignore[arg-type]


def score_all(engine: Engine, at: Sequence[int], **params: Any) -> list[Completion]:
    given = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "prompt_logprobs": 2, **params})
    streams = [engine.submit(Request(np.array(PROMPTS[i]), given)) for i in at]
    return [stream.result(timeout_s=patience(120)) for stream in streams]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_plain_transformers(kind: str) -> None:
    model, plain = model_of(kind)
    config = EngineConfig(pages=400, page_size=4, token_budget=16, draft_tokens=7, state_slots=60)
    if KINDS[kind][0] not in {**HYBRIDS, **RESUMED}:
        config = EngineConfig(pages=400, page_size=4, token_budget=16, draft_tokens=7)
    with Engine(model, config, random=random.Random(0)) as engine:
        (unscored,) = score_all(engine, [3], prompt_logprobs=None)
        for at in ([0], [1], range(len(PROMPTS)), range(len(PROMPTS))):  # cold, beside others, after they were cached
            for i, completion in zip(at, score_all(engine, at), strict=True):
                assert completion.usage.cached_tokens == 0
                assert len(completion.prompt_logprobs) == len(PROMPTS[i]) - 1
                for score, row, token in zip(completion.prompt_logprobs, plain[i], PROMPTS[i][1:], strict=True):
                    assert score.token == token
                    assert abs(score.logprob - float(row[token])) < LOGPROB_TOLERANCE
                    assert abs(score.rank - 1 - int((row > row[token]).sum())) <= int(
                        ((row - row[token]).abs() < LOGPROB_TOLERANCE).sum()
                    )
                    best = torch.topk(row, 2)
                    assert [value for _, value in score.top] == pytest.approx(
                        best.values.tolist(), abs=LOGPROB_TOLERANCE
                    )
        (again,) = score_all(engine, [3], prompt_logprobs=None)
        assert again.tokens == unscored.tokens == completion.tokens
        assert again.usage.cached_tokens > 0 and not again.prompt_logprobs
        assert engine.stats().totals.accepted_tokens > 0 or config.state_slots
