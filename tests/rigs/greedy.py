"""Greedy answers of an engine, compared with those of plain transformers, computed without a cache of any kind."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from machine import DEVICE, patience
from rigs.letters import Letters

from bench.tiny_models import loaded, tiny
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Completion, Request
from mainstem.settings.engine import SamplingParams

LOGPROB_TOLERANCE = 1e-3

Greedy = list[tuple[int, float]]
"""Tokens, and their logprobs."""


def plain(model: Any) -> Callable[[Sequence[int], int], Greedy]:
    """Greedy decoding by whole forwards: nothing is ever reused."""
    model.set_attn_implementation("eager")

    @functools.cache
    def next_token(tokens: tuple[int, ...]) -> tuple[int, float]:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0, -1].float()
        best = int(logits.argmax())
        return best, float(torch.log_softmax(logits, dim=-1)[best])

    def greedy(prompt: Sequence[int], new: int) -> Greedy:
        tokens, made = tuple(prompt), []
        for _ in range(new):
            made.append(next_token(tokens))
            tokens += (made[-1][0],)
        return made

    return greedy


def ask(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> list[Completion]:
    """Runs all prompts at once."""
    params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=0)
    streams = [engine.submit(Request(np.array(prompt), params)) for prompt in prompts]
    return [stream.result(timeout_s=patience(120)) for stream in streams]


def same(completion: Completion, expected: Greedy) -> None:
    """Checks tokens, and logprobs within `LOGPROB_TOLERANCE`."""
    assert list(completion.tokens) == [token for token, _ in expected]
    for got, (_, logprob) in zip(completion.logprobs, expected, strict=True):
        assert abs(got.logprob - logprob) < LOGPROB_TOLERANCE


def pair_of(family: str, changes: dict[str, Any]) -> tuple[LoadedModel, Callable[[Sequence[int], int], Greedy]]:
    """Returns a tiny model of a family on the tests' device, and plain greedy decoding by a copy of it."""
    model: Any = tiny(family, **changes).to(DEVICE)  # type: ignore[call-arg, arg-type]
    made = loaded(model)
    return LoadedModel(made.model, Letters(), family, made.dtype, made.max_context), plain(copy.deepcopy(model))  # type: ignore[arg-type]


def family_of_prompts(vocab: int, shared: int, suffixes: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Draws prompts that share a prefix and part after it; their suffixes have these lengths."""
    rng = random.Random(seed)
    prefix = [rng.randrange(vocab) for _ in range(shared)]
    return [prefix + [rng.randrange(vocab) for _ in range(n)] for n in suffixes]
