import math
import random

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mainstem.runtime.sampling.sampler import Sampler, probabilities, sample, verify
from mainstem.settings.engine import SamplingParams

VOCAB = 50


def _logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def _probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return probabilities(logits.unsqueeze(0), [params])[0]


def _draw(sampler: Sampler, logits: torch.Tensor) -> int:
    ((token, _),) = sample(logits.unsqueeze(0), [sampler])
    return token


def _samplers(count: int, **params: object) -> list[Sampler]:
    return [Sampler(SamplingParams(**params), random.Random(i)) for i in range(count)]


def _reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The same filters, by transformers."""
    warpers = [TemperatureLogitsWarper(params.temperature)]
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    scores = logits.unsqueeze(0)
    for warper in warpers:
        scores = warper(None, scores)
    return torch.softmax(scores, dim=-1)[0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (5, 1.0, 0.0),
        (0, 0.7, 0.0),
        (0, 1.0, 0.1),
        (8, 0.8, 0.0),
        (8, 0.9, 0.2),
        (1, 0.5, 1.0),
        (VOCAB - 1, 1.0, 0.0),
        (99, 1e-6, 0.0),
    ],
)
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for seed in range(20):
        logits = _logits(seed)[0]
        ours, theirs = _probabilities(logits, params).float(), _reference(logits, params)
        assert torch.equal(ours > 0, theirs > 0)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("vocab", [255, 256, 257, 5000])
def test_top_p_of_a_large_vocabulary_is_that_of_transformers(spread: float, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=generator) * spread + torch.arange(vocab) * 1e-3
    for top_p in (0.01, 0.5, 0.9, 0.999):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        ours, theirs = _probabilities(logits, params).float(), _reference(logits, params)
        different = int(((ours > 0) != (theirs > 0)).sum())
        assert different <= 1, "sums of thousands of float32 may round to the other side of the threshold"
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-2)


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert (_probabilities(logits, SamplingParams(temperature=1, top_k=2, top_p=0.55)) > 0).tolist() == [1, 0, 0, 0]
    assert (_probabilities(logits, SamplingParams(temperature=1, top_p=0.55)) > 0).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.5, [1, 0, 0, 0]),
        (math.nextafter(0.5, 1), [1, 1, 0, 0]),
        (0.75, [1, 1, 0, 0]),
        (math.nextafter(0.75, 1), [1, 1, 1, 1]),  # the last two are equally likely
        (0.875, [1, 1, 1, 1]),
    ],
)
def test_top_p_ends_with_the_token_that_reaches_it(top_p: float, kept: list[int]) -> None:
    halving = 1 / math.log(2)  # the temperature at which a logit less by 1 is half as likely
    logits = torch.tensor([0.0, -1.0, -2.0, -2.0])
    exact = _probabilities(logits, SamplingParams(temperature=halving))
    assert exact.tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 8], "or there is no exact tie to test"
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        chances = _probabilities(logits[order], SamplingParams(temperature=halving, top_p=top_p))
        assert (chances > 0).tolist() == [kept[token] for token in order]
        assert float(chances.sum()) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.7}])
@pytest.mark.parametrize("equals", [4, 300])
def test_of_equally_likely_tokens_top_k_and_top_p_keep_all_or_none(filters: dict[str, float], equals: int) -> None:
    logits = torch.zeros(equals + 2)
    logits[equals // 2], logits[equals] = -20.0, 1.0
    kept = _probabilities(logits, SamplingParams(temperature=1.0, **filters)) > 0
    assert kept.tolist() == [token != equals // 2 for token in range(equals + 2)]


def test_draws_follow_the_probabilities() -> None:
    logits = _logits(1)[0]
    params = SamplingParams(temperature=1.5, top_k=6, seed=11)
    sampler = Sampler(params, random.Random(0))
    draws = 10_000
    counts = torch.bincount(torch.tensor([_draw(sampler, logits) for _ in range(draws)]), minlength=VOCAB)
    expected = _probabilities(logits, params).float()
    assert not counts[expected == 0].any()
    kept = expected > 0
    chi_square = float(((counts - draws * expected)[kept] ** 2 / (draws * expected)[kept]).sum())
    assert chi_square < 20.5  # 99.9 % of 5 degrees of freedom


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[VOCAB // 2] = 0.0
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0), random.Random(0))
    assert {_draw(sampler, logits) for _ in range(200)} == {VOCAB // 2}


@pytest.mark.parametrize("uniform", [0.0, math.nextafter(1, 0)])
def test_no_random_number_draws_a_token_of_probability_zero(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([-math.inf, -math.inf, 0.0, 1.0, -math.inf])
    sampler = Sampler(SamplingParams(temperature=1.0), random.Random(0))
    monkeypatch.setattr(sampler, "uniform", lambda: uniform)
    assert _draw(sampler, logits) == (2 if uniform == 0 else 3)


def test_the_same_seed_gives_the_same_tokens_in_any_batch() -> None:
    steps = [_logits(step, rows=1)[0] for step in range(30)]

    def tokens(neighbours: int, place: int) -> list[int]:
        samplers = _samplers(neighbours, temperature=0.9)
        samplers.insert(place, Sampler(SamplingParams(temperature=1.0, top_p=0.95, seed=42), random.Random()))
        out = []
        for step, row in enumerate(steps):
            batch = _logits(1000 + step, rows=neighbours + 1)
            batch[place] = row
            out.append(sample(batch, samplers)[place][0])
        return out

    alone = tokens(0, 0)
    assert tokens(5, 3) == alone
    assert tokens(7, 7) == alone
    assert len(set(alone)) > 3


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_no_row_of_the_probabilities_depends_on_the_other_rows(spread: float) -> None:
    filters = [{}, {"top_k": 3}, {"top_k": 700}, {"top_p": 0.3}, {"top_p": 0.99}, {"min_p": 0.2}]
    filters += [{"top_k": 40, "top_p": 0.9, "min_p": 0.1}]
    params = [SamplingParams(temperature=0.5 + i / 4, **given) for i, given in enumerate(filters)]
    logits = torch.randn(len(params), 5000, generator=torch.Generator().manual_seed(0)) * spread
    together = probabilities(logits, params)
    for row, own in enumerate(params):
        assert torch.equal(together[row], _probabilities(logits[row], own))


def test_without_a_seed_one_is_drawn_from_the_random_source() -> None:
    def tokens(source: random.Random) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0), source)
        return [_draw(sampler, _logits(step)[0]) for step in range(20)]

    assert tokens(random.Random(3)) == tokens(random.Random(3))
    assert tokens(random.Random(3)) != tokens(random.Random(4))
    source = random.Random(3)
    assert tokens(source) != tokens(source)


def test_greedy_takes_the_best_of_every_row_and_draws_nothing() -> None:
    batch = _logits(5, rows=8)
    greedy = _samplers(8, seed=1)
    assert [token for token, _ in sample(batch, greedy)] == batch.argmax(dim=-1).tolist()
    fresh = Sampler(SamplingParams(temperature=1.0, seed=1), random.Random(0))
    greedy[0].params = SamplingParams(temperature=1.0, seed=1)
    assert [_draw(greedy[0], row) for row in batch] == [_draw(fresh, row) for row in batch]


def test_logprobs_are_of_the_raw_logits() -> None:
    batch = _logits(6, rows=3)
    samplers = [
        Sampler(SamplingParams(temperature=0.01, top_k=1, logprobs=4), random.Random(0)),
        Sampler(SamplingParams(logprobs=0), random.Random(0)),
        Sampler(SamplingParams(), random.Random(0)),
    ]
    (token, full), (other, bare), (_, none) = sample(batch, samplers)
    expected = torch.log_softmax(batch, dim=-1)
    assert full is not None and bare is not None and none is None
    assert (full.token, bare.token) == (token, other)
    assert full.logprob == pytest.approx(float(expected[0, token]))
    order = expected[0].argsort(descending=True)[:4].tolist()
    assert full.top == tuple((i, pytest.approx(float(expected[0, i]))) for i in order)
    assert bare.logprob == pytest.approx(float(expected[1].max())) and bare.top == ()


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    ((_, logprob),) = sample(torch.randn(1, 3), _samplers(1, logprobs=20))
    assert logprob is not None and len(logprob.top) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_gets_no_token_and_other_rows_get_theirs(value: float) -> None:
    batch = _logits(7, rows=3)
    broken = batch.clone()
    broken[1, 3] = value
    whole = sample(batch, _samplers(3, temperature=1.0, seed=5))
    assert sample(broken, _samplers(3, temperature=1.0, seed=5)) == [whole[0], None, whole[2]]


def test_an_empty_batch_gives_nothing() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-40},
        {"temperature": 1e-320},
        {"temperature": 1e300},
        {"temperature": 1.0, "top_p": 1e-50},
        {"temperature": 1e-38, "top_p": 1e-320, "top_k": 3, "min_p": 1.0},
    ],
)
def test_extreme_settings_give_a_token_of_the_vocabulary(params: dict[str, float]) -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * 10
    ((token, _),) = sample(logits, _samplers(1, **params))
    assert 0 <= token < 5000
    if params["temperature"] < 1 or "top_p" in params:
        assert token == int(logits.argmax())


# Drafts


def _one_by_one(logits: torch.Tensor, sampler: Sampler) -> list[int]:
    """The tokens that a request draws from these rows, each after the one before it."""
    return [sample(row.unsqueeze(0), [sampler])[0][0] for row in logits]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}])
def test_a_draft_is_accepted_as_far_as_it_is_what_would_have_been_drawn(params: dict[str, float]) -> None:
    rng = random.Random(0)
    for seed in range(30):
        drafts, rows, expected = [], [], []
        for i in range(3):
            n = rng.randint(0, 5)
            own = _logits(10 * seed + i, n + 1)
            drawn = _one_by_one(own, Sampler(SamplingParams(**params), random.Random(i)))
            right = rng.randint(0, n)
            wrong = [(token + 1) % VOCAB for token in drawn[right:n]]
            drafts.append(np.array(drawn[:right] + wrong, np.int32))
            rows.append(own)
            expected.append(drawn[: right + 1])
        chosen = verify(torch.cat(rows), _samplers(3, **params), drafts)
        assert [[token for token, _ in choices] for choices in chosen] == expected


def test_random_numbers_go_on_where_a_draft_was_rejected() -> None:
    logits = _logits(3, 4)
    drawn = _one_by_one(logits, _samplers(1, temperature=1.0, seed=5)[0])
    (sampler,) = _samplers(1, temperature=1.0, seed=5)
    wrong = np.array([drawn[0], (drawn[1] + 1) % VOCAB, drawn[2]], np.int32)
    (first,) = verify(logits, [sampler], [wrong])
    (second,) = verify(logits[2:3], [sampler], [wrong[:0]])
    assert [token for token, _ in first + second] == drawn[:3]


def test_a_draft_leaves_the_distribution_as_it_is() -> None:
    logits, count = _logits(1, 2), 3000
    likely = int(logits[0].argmax())
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), random.Random(0))
    drawn = [verify(logits, [sampler], [np.array([likely], np.int32)])[0] for _ in range(count)]
    for row, tokens in ((0, [c[0][0] for c in drawn]), (1, [c[1][0] for c in drawn if len(c) == 2])):
        seen = torch.bincount(torch.tensor(tokens), minlength=VOCAB) / len(tokens)
        assert (seen - torch.softmax(logits[row], -1)).abs().sum() < 0.14
    assert all((len(choices) == 2) == (choices[0][0] == likely) for choices in drawn)


def test_logits_that_are_not_finite_end_a_draft() -> None:
    logits = _logits(0, 3)
    logits[1] = math.nan
    draft = np.array([int(logits[0].argmax()), 0], np.int32)
    (choices,) = verify(logits, _samplers(1), [draft])
    assert choices[0] is not None and choices[1:] == [None]


def test_all_bits_of_a_seed_count() -> None:
    def drawn(seed: int) -> list[float]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), random.Random(0))
        return [sampler.uniform() for _ in range(3)]

    for seed in (0, 12345, 2**64 - 1):
        assert drawn(seed) == drawn(seed)
        assert drawn(seed) not in [drawn(seed ^ (1 << bit)) for bit in range(64)]
    assert drawn(-1) == drawn(2**64 - 1) != drawn(1)
    assert drawn(-(2**63)) == drawn(2**63)
