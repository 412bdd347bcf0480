"""What rules make of logits, compared with an obvious model over lists, and what the rules may be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.errors import BadArgument
from mainstem.runtime.sampling.processor import LogitsProcessor, check_rules
from mainstem.settings.engine import SamplingParams

VOCAB = 12
EOS = 1
TOKENS = st.integers(0, VOCAB - 1)


def prompt(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def expected(
    params: SamplingParams, prompt: list[int], answer: list[int], logits: list[float], ends: set[int]
) -> list[float]:
    """The slow way, token by token."""
    made = []
    ends = {*(() if params.ignore_eos else ends), *params.stop_token_ids}
    for token, value in enumerate(logits):
        if token in prompt or token in answer:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        if token in answer:
            value -= params.presence_penalty + params.frequency_penalty * answer.count(token)
        value += dict(params.logit_bias).get(token, 0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = -math.inf
        if token in ends and len(answer) < params.min_tokens:
            value = -math.inf
        for word in params.bad_words:
            before = list(word[:-1])
            if token == word[-1] and (not before or answer[-len(before) :] == before):
                value = -math.inf
        made.append(value)
    return made


RULES = st.builds(
    SamplingParams,
    max_tokens=st.just(20),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(TOKENS, max_size=2).map(tuple),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-3.0, 2.0]), max_size=3).map(lambda of: tuple(of.items())),
    allowed_token_ids=st.none() | st.lists(TOKENS, min_size=1, max_size=6).map(tuple),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)


@given(
    params=RULES,
    prompt_tokens=st.lists(TOKENS, min_size=1, max_size=5),
    answer=st.lists(TOKENS, max_size=6),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_rules_change_logits_as_an_obvious_model_does(
    params: SamplingParams, prompt_tokens: list[int], answer: list[int], seed: int
) -> None:
    processor = LogitsProcessor(params, prompt(*prompt_tokens), {EOS})
    for at in range(len(answer) + 1):
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed + at))
        wanted = expected(params, prompt_tokens, answer[:at], logits.tolist(), {EOS})
        processor.apply(logits)
        torch.testing.assert_close(logits, torch.tensor(wanted), atol=1e-5, rtol=1e-5)
        if at < len(answer):
            processor.accept(answer[at])


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"allowed_token_ids": (3, VOCAB)}, "allowed_token_ids"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"bad_words": ((1, VOCAB),)}, "bad_words"),
        ({"allowed_token_ids": (3,), "bad_words": ((3,),)}, "allowed_token_ids"),
        ({"allowed_token_ids": (EOS,), "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": (4,), "stop_token_ids": (4,), "min_tokens": 1}, "allowed_token_ids"),
        ({"bad_words": tuple((token,) for token in range(VOCAB))}, "allowed_token_ids"),
    ],
)
def test_rules_that_name_no_token_or_leave_none_are_refused(rules: dict[str, Any], name: str) -> None:
    with pytest.raises(BadArgument, match=name) as caught:
        check_rules(SamplingParams(**rules), {EOS}, VOCAB)
    assert caught.value.name == name


@given(params=RULES, answer=st.lists(TOKENS, max_size=4))
@settings(max_examples=100, deadline=None)
def test_rules_that_are_accepted_always_leave_a_token(params: SamplingParams, answer: list[int]) -> None:
    try:
        check_rules(params, {EOS}, VOCAB)
    except BadArgument:
        return
    processor = LogitsProcessor(params, prompt(1), {EOS})
    for token in answer:
        processor.accept(token)
    logits = torch.zeros(VOCAB)
    processor.apply(logits)
    assert logits.isfinite().any()
