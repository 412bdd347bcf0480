"""Scores that are kept beside pages: a prompt that was scored is scored again without being computed."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machine import patience
from rigs.ghost import prompt
from rigs.ghost import scores as expected
from rigs.letters import Letters
from rigs.scheduler import PAGE, Bench

from bench.tiny_models import FAMILIES, GATHERED, HYBRIDS, LATENT, WINDOWED, loaded, tiny
from mainstem.cache.components import Full, State, Window
from mainstem.errors import BadArgument
from mainstem.runtime.engine import Engine
from mainstem.runtime.memory.scores import KeptScores, row_bytes
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Completion, Request, TokenLogprob
from mainstem.settings.engine import EngineConfig, HostSize, SamplingParams, StorageConfig, TierConfig

# Rows

_FLOATS = st.floats(width=32, allow_nan=False, max_value=0)


@given(
    best=st.integers(0, 3),
    begin=st.integers(0, 6),
    numbers=st.lists(st.tuples(st.integers(0, 300_000), _FLOATS, st.integers(1, 300_000)), max_size=9),
    others=st.lists(st.tuples(st.integers(0, 300_000), _FLOATS), min_size=5, max_size=5),
)
def test_what_was_kept_is_read_bit_for_bit(
    best: int, begin: int, numbers: list[tuple[int, float, int]], others: list[tuple[int, float]]
) -> None:
    kept, table = KeptScores(8, 4, best), np.array([5, 2, 7, 0], np.int32)
    written = [TokenLogprob(token, logprob, tuple(others), rank) for token, logprob, rank in numbers]
    kept.write(table, begin, written)
    tokens = np.array([*(token for token, _, _ in numbers), 1], np.int32)
    assert kept.read(table, begin, tokens) == [
        TokenLogprob(each.token, each.logprob, each.top[:best], each.rank) for each in written
    ]
    assert int(kept.plane.isfinite().any(-1).sum()) == sum(map(math.isfinite, [1.0] * len(written)))


def test_scores_are_known_up_to_the_first_that_is_not() -> None:
    kept, table = KeptScores(4, 4, 1), np.array([3, 1], np.int32)
    score = TokenLogprob(9, -1.0, ((2, -0.5),), 3)
    kept.write(table, 1, [score] * 7)
    assert kept.read(table, 0, np.full(8, 9, np.int32)) == []
    assert kept.read(table, 1, np.full(7, 9, np.int32)) == [score] * 7
    for column in range(4):  # part of a row is as good as none: it was copied while it was written
        kept.plane[0, 1, 1, column] = torch.nan
        assert kept.read(table, 1, np.full(7, 9, np.int32)) == [score] * 4
        kept.write(table, 5, [score])
    kept.forget(np.array([3], np.int32))
    assert kept.read(table, 1, np.full(7, 9, np.int32)) == []
    assert kept.read(table, 4, np.full(4, 9, np.int32)) == [score] * 4


@pytest.mark.parametrize(("best", "size"), [(None, 0), (0, 8), (1, 16), (5, 48)])
def test_a_position_takes_eight_bytes_and_eight_for_each_of_the_best(best: int | None, size: int) -> None:
    assert row_bytes(best) == size
    if best is not None:
        assert KeptScores(3, 4, best).plane.nbytes == 3 * 4 * size


# The scheduler

POOLS: dict[str, Any] = {
    "full": 60,
    "window": {Full(): 60, Window(6): 40},
    "states": {Full(): 60, State(): 20},
}


def scored(bench: Bench, id: str) -> list[TokenLogprob]:
    return [score for delta in bench.deltas[id] for score in delta.prompt_logprobs]


def check(bench: Bench, id: str) -> None:
    tokens, params = bench.requests[id].tokens.tolist(), bench.requests[id].params
    wanted, before = params.prompt_logprobs, max(params.logprob_start - 1, 0)
    assert scored(bench, id) == ([] if wanted is None else expected(tokens, wanted)[before:])


def one(bench: Bench, tokens: list[int], **params: Any) -> int:
    """Scores a prompt, checks the scores, and returns how many tokens were found."""
    id = bench.one(tokens, **{"prompt_logprobs": 1, "max_tokens": 1, **params})
    check(bench, id)
    return bench.hit(id)


def test_a_prompt_that_was_scored_is_found_with_its_scores() -> None:
    bench, tokens = Bench(best=1), prompt(1, 5 * PAGE + 2)
    assert one(bench, tokens) == 0
    assert one(bench, tokens) == 5 * PAGE - 1  # the logits of the last of them give the next score
    assert one(bench, tokens[: 3 * PAGE] + prompt(2, 7)) == 3 * PAGE - 1
    assert one(bench, tokens[: 3 * PAGE] + prompt(2, 7)) == 4 * PAGE - 1
    assert bench.hit(bench.one(tokens)) == 5 * PAGE, "without scores nothing is different"


def test_a_page_whose_beginning_was_copied_has_all_its_scores() -> None:
    bench, shots = Bench(best=1), prompt(1, 3 * PAGE + 1)
    one(bench, shots + prompt(2, 9))
    for seed in range(3, 6):
        question = shots + prompt(seed, 2 * PAGE)
        assert one(bench, [*question, 1]) in range(3 * PAGE, 3 * PAGE + 3)
        assert one(bench, [*question, 2, 3]) == 5 * PAGE - 1


@pytest.mark.parametrize("budget", [64, PAGE - 1])
@pytest.mark.parametrize("pools", POOLS)
def test_a_prompt_that_was_computed_without_scores_is_computed_once_more(pools: str, budget: int) -> None:
    bench, tokens = Bench(POOLS[pools], best=0, token_budget=budget), prompt(1, 4 * PAGE + 1)
    bench.one(tokens)
    assert one(bench, tokens, prompt_logprobs=0) == 0
    hit = one(bench, tokens, prompt_logprobs=0)
    assert hit == {"full": 4 * PAGE - 1, "window": 3 * PAGE, "states": hit}[pools]


@pytest.mark.parametrize(("asked", "hit"), [(0, 11), (2, 11), (3, 0)])
def test_more_of_the_likeliest_than_are_kept_are_computed(asked: int, hit: int) -> None:
    bench, tokens = Bench(best=2), prompt(1, 3 * PAGE + 1)
    one(bench, tokens, prompt_logprobs=0)
    assert one(bench, tokens, prompt_logprobs=asked) == hit


@pytest.mark.parametrize(("start", "hit"), [(0, 0), (1, 0), (2, 0), (6, 0), (9, 11), (10, 11), (12, 11), (13, 12)])
def test_scores_that_begin_later_are_kept_from_there_on(start: int, hit: int) -> None:
    bench, tokens = Bench(best=1), prompt(1, 3 * PAGE + 2)
    assert one(bench, tokens, logprob_start=9) == 0
    assert one(bench, tokens, logprob_start=start) == (max(start - 1, 0) if start < 9 else hit)


def test_scores_are_forgotten_with_their_pages() -> None:
    bench = Bench(best=1, pages=12)
    tokens = prompt(1, 3 * PAGE + 1)
    one(bench, tokens)
    bench.cache.flush()
    bench.one(tokens)  # in the same pages
    assert one(bench, tokens) == 0


def test_options_of_one_question_wait_for_its_scores() -> None:
    bench, context = Bench(best=1, token_budget=8), prompt(1, 6 * PAGE)
    ids = [bench.add(context + [seed, 5], max_tokens=1, prompt_logprobs=1) for seed in range(1, 5)]
    bench.run_and_flush()
    for id in ids:
        check(bench, id)
    assert [bench.hit(id) for id in ids] == [0, *[6 * PAGE - 1] * 3]


def test_a_hit_says_what_was_computed_for_its_scores() -> None:
    bench, tokens = Bench(best=0, explain=True), prompt(1, 3 * PAGE + 1)
    bench.one(tokens)
    one(bench, tokens, prompt_logprobs=0)
    id = bench.one(tokens, prompt_logprobs=0)
    found = bench.usage(id).explanation
    assert found is not None
    assert [(each.begin, each.end, each.tier or each.cause) for each in found] == [
        (0, 11, "device"),
        (11, 13, "scored"),
    ]


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("seed", range(6))
def test_random_prompts_have_their_scores_whatever_runs_beside_them(seed: int, pools: str) -> None:
    rng = random.Random(f"{seed} {pools}")
    bench = Bench(
        POOLS[pools],
        best=rng.choice([0, 1, 2]),
        token_budget=rng.choice([3, 8, 64]),
        max_running=rng.choice([2, 6]),
        draft_tokens=rng.choice([0, 7]),
        explain=rng.random() < 0.5,
        partial=rng.random() < 0.7,
    )
    stems = [prompt(rng.random(), rng.randint(1, 40)) for _ in range(3)]
    for _ in range(50):
        stem = rng.choice(stems)
        tokens = stem[: rng.randint(1, len(stem))] + prompt(rng.random(), rng.choice([0, 1, 5]))
        asked = {"max_tokens": rng.choice([0, 1, 25]), "prompt_logprobs": rng.choice([None, 0, 0, 1, 2])}
        asked["logprob_start"] = rng.choice([0, 0, 1, rng.randint(0, len(tokens))])
        bench.add(tokens, ignore_eos=True, **asked)
        bench.step(rng.choice([0, 1, 3]))
        if rng.random() < 0.05:
            bench.cache.flush()
    bench.run_and_flush()
    for id in bench.requests:
        check(bench, id)


def test_a_request_that_was_preempted_while_it_scored_goes_on_from_what_was_kept() -> None:
    bench = Bench(pages=10, token_budget=4, best=0)
    bench.add(prompt(1, 4), max_tokens=28, ignore_eos=True)
    bench.step(2)
    second = bench.add(prompt(2, 29), ignore_eos=True, max_tokens=1, prompt_logprobs=0)
    bench.run_and_flush()
    assert bench.scheduler.totals.preemptions >= 1
    check(bench, second)


# Models

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", FAMILIES["llama"]),
    "gemma2": ("gemma2", WINDOWED["gemma2"]),
    "bloom": ("bloom", GATHERED["bloom"]),
    "deepseek_v3": ("deepseek_v3", LATENT["deepseek_v3"]),
    "mamba2": ("mamba2", HYBRIDS["mamba2"]),
}
TOKENS = [int(token) for token in np.random.default_rng(7).integers(1, 60, 41)]


def engine_of(kind: str, **config: Any) -> Engine:
    family, changes = KINDS[kind]
    made = loaded(tiny(family, **changes))  # type: ignore[call-arg, arg-type]
    model = LoadedModel(made.model, Letters(), kind, made.dtype, made.max_context)  # type: ignore[arg-type]
    slots = {"state_slots": 20} if family in HYBRIDS else {}
    return Engine(model, EngineConfig(**{"pages": 60, "page_size": 4, **slots, **config}), random=random.Random(0))


def ask(engine: Engine, tokens: list[int], most: int = 1, **params: Any) -> Completion:
    wanted = SamplingParams(ignore_eos=True, **{"max_tokens": 1, "prompt_logprobs": most, **params})
    return engine.submit(Request(np.array(tokens), wanted)).result(timeout_s=patience(60))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gives_the_same_scores_from_its_pages(kind: str) -> None:
    with engine_of(kind) as plain, engine_of(kind, keep_scores=1) as engine:
        right = ask(plain, TOKENS).prompt_logprobs
        first, again = ask(engine, TOKENS), ask(engine, TOKENS)
        assert first.usage.cached_tokens == 0
        exact = engine.stats().exact
    for made in (first, again):
        assert [each.token for each in made.prompt_logprobs] == TOKENS[1:]
        np.testing.assert_allclose(
            [each.logprob for each in made.prompt_logprobs], [each.logprob for each in right], atol=1e-4
        )
        assert not exact or made.prompt_logprobs == right
    assert kind != "llama" or again.usage.cached_tokens == 39
    assert kind != "gemma2" or again.usage.cached_tokens == 36


def test_a_model_forgets_scores_with_their_pages() -> None:
    other = [int(token) for token in np.random.default_rng(8).integers(1, 60, len(TOKENS))]
    with engine_of("llama") as plain:
        right = ask(plain, other).prompt_logprobs
    with engine_of("llama", pages=14, keep_scores=1) as engine:
        ask(engine, TOKENS)
        engine.flush()
        engine.submit(Request(np.array(other), SamplingParams(max_tokens=1))).result(timeout_s=patience(60))
        made = ask(engine, other)
        assert made.usage.cached_tokens == 0 and made.prompt_logprobs == right


@pytest.mark.parametrize("layout", ["host", "file"])
def test_scores_follow_their_pages_through_the_tiers(layout: str, tmp_path: Path) -> None:
    spec = f"file:{tmp_path}" if layout == "file" else None
    limits = StorageConfig() if spec is None else StorageConfig(prefetch="wait_complete", prefetch_min_tokens=4)
    tiers = TierConfig(size=HostSize(host_ratio=4.0), storage=spec, limits=limits)
    with engine_of("llama", pages=14, keep_scores=1, tiers=tiers) as engine:
        first = ask(engine, TOKENS)
        for seed in range(4):  # the device is full of others
            ask(engine, [int(token) for token in np.random.default_rng(seed).integers(1, 60, 45)])
        again = ask(engine, TOKENS)
        assert again.prompt_logprobs == first.prompt_logprobs
        assert again.usage.cached_tokens == 39 and 0 < again.usage.host_tokens <= 39
    if spec is not None:
        with engine_of("llama", keep_scores=1, tiers=tiers) as engine:
            stored = ask(engine, TOKENS)
            assert stored.prompt_logprobs == first.prompt_logprobs and stored.usage.cached_tokens == 39
        with engine_of("llama", keep_scores=0, tiers=tiers) as engine:  # pages of another form
            assert ask(engine, TOKENS, 0).usage.cached_tokens == 0


def test_pages_have_less_room_by_what_scores_take() -> None:
    with engine_of("llama", pages=None, kv_bytes=1 << 20) as plain:
        without = plain.stats().cache.pools["full"].total
    with engine_of("llama", pages=None, kv_bytes=1 << 20, keep_scores=5) as engine:
        total = engine.stats().cache.pools["full"].total
    size = (1 << 20) / without
    assert total == pytest.approx((1 << 20) / (size + 4 * 48), rel=0.01) and total < without


def test_codecs_that_lose_precision_keep_no_scores() -> None:
    tiers = TierConfig(storage="file:/nowhere", storage_codec="int8")
    with pytest.raises(BadArgument, match=r"storage_codec.*none with keep_scores"):
        EngineConfig(keep_scores=0, tiers=tiers)
    with pytest.raises(BadArgument, match="keep_scores"):
        EngineConfig(keep_scores=21)
