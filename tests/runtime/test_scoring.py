"""Scores of continuations: those of each text alone, after a context that is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rigs.letters import Letters

from bench.tiny_models import VOCAB, loaded, tiny
from mainstem.cache.namespaces import Namespace
from mainstem.errors import BadArgument, BadTokens, MainstemError, RequestTooLong
from mainstem.runtime.engine import Engine
from mainstem.runtime.request import Completion, Usage
from mainstem.runtime.scoring import score_of
from mainstem.settings.engine import EngineConfig, SamplingParams

PAGE = 4
CONTEXT = np.random.default_rng(1).integers(2, VOCAB, 5 * PAGE + 2).tolist()
TEXTS = [[5], [5, 6, 7], [7, 5, 6, 9, 8, 11], [90]]
FEW = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture
def engine() -> Iterator[Engine]:
    letters: Any = Letters()
    with Engine(replace(loaded(tiny("llama")), tokenizer=letters), EngineConfig(pages=60, page_size=PAGE)) as engine:
        yield engine


def alone(model: Any, text: list[int]) -> tuple[list[float], bool]:
    """The log-probabilities of a text after the context by plain transformers, and whether it is the likeliest."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([CONTEXT + text]), use_cache=False).logits[0]
    rows = torch.log_softmax(logits[len(CONTEXT) - 1 : -1].double(), dim=-1)
    wanted = torch.tensor(text)
    return rows.gather(1, wanted.unsqueeze(1)).flatten().tolist(), bool((rows.argmax(-1) == wanted).all())


def test_scores_are_those_of_each_text_alone(engine: Engine, model: Any) -> None:
    likeliest = engine.generate([CONTEXT], FEW)[0].tokens[:3]
    for text, score in zip([*TEXTS, list(likeliest)], engine.score(CONTEXT, [*TEXTS, likeliest]), strict=True):
        logprobs, greedy = alone(model, text)
        assert score.logprobs == pytest.approx(logprobs, abs=1e-5) and score.greedy == greedy
        assert score.logprob == pytest.approx(sum(logprobs), abs=1e-4)
    assert score.greedy and not engine.score(CONTEXT, [[*likeliest, (likeliest[0] + 1) % VOCAB]])[0].greedy
    assert not engine.score(CONTEXT, [[*likeliest[:1], (likeliest[1] + 1) % VOCAB, likeliest[2]]])[0].greedy


def test_one_text_is_no_list_of_continuations(engine: Engine) -> None:
    with pytest.raises(BadArgument, match="continuations"):
        engine.score(CONTEXT, "bc")


def test_the_context_is_computed_once_and_stays_and_continuations_do_not(engine: Engine) -> None:
    found = engine.score(CONTEXT, TEXTS)
    assert [score.cached_tokens for score in found] == [5 * PAGE] * len(TEXTS)
    totals = engine.stats().totals
    assert totals.prompt_tokens - totals.cached_tokens == len(CONTEXT) + sum(2 + len(text) for text in TEXTS)
    long = CONTEXT + list(range(10, 30))
    engine.score(CONTEXT, [long[len(CONTEXT) :]])
    assert engine.generate([long], FEW)[0].usage.cached_tokens == 5 * PAGE


def test_continuations_stay_where_that_is_asked_for(engine: Engine) -> None:
    text = list(range(10, 30))
    engine.score(CONTEXT, [text, [3]], keep=True)
    assert engine.generate([CONTEXT + text], FEW)[0].usage.cached_tokens >= 10 * PAGE


def test_namespaces_share_nothing(engine: Engine) -> None:
    (first,) = engine.score(CONTEXT, [[5]], Namespace(salt="a"))
    (other,) = engine.score(CONTEXT, [[5]], Namespace(salt="b"))
    assert first.logprobs == other.logprobs
    totals = engine.stats().totals
    assert totals.prompt_tokens - totals.cached_tokens == 2 * (len(CONTEXT) + 3)


@pytest.mark.parametrize(
    ("context", "texts", "error", "message"),
    [
        ([], [[1]], BadTokens, "the context is empty"),
        (CONTEXT, [[1], []], BadTokens, "the continuation 1 is empty"),
        (CONTEXT, [[1] * 200], RequestTooLong, "prompt"),
        (CONTEXT, [[VOCAB]], BadTokens, "from 0 to 96"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_nothing_runs(
    engine: Engine, context: list[int], texts: list[list[int]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine.score(context, texts)
    assert engine.stats().totals.requests == 0


def test_nothing_is_scored_without_continuations(engine: Engine) -> None:
    assert engine.score(CONTEXT, []) == []


def test_a_request_that_failed_is_no_score() -> None:
    usage = Usage(1, 0, 0, 0.0, 0.0, 0.0)
    with pytest.raises(MainstemError, match="cancelled"):
        score_of(Completion("", (), (), "cancelled", usage))
