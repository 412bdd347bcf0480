"""Samples tokens from logits, one request at a time; greedy requests of a batch together.

Temperature, top-k, top-p and min-p apply in this order, each to the result of the one before, like the warpers of
Hugging Face transformers. Top-p keeps the likeliest tokens up to the one with which their sum reaches it. Top-k and
top-p also keep tokens that are as likely as the last one kept, so the order of equal tokens does not matter. A token is
drawn by inverting the cumulative distribution at one uniform number, so a request's draws depend on its seed and on the
number of tokens it has generated, never on the batch, the device or the filters.

This module does not know requests, pages or text.
"""

from __future__ import annotations

import math
import random as random_module
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.runtime.request import TokenLogprob
from mainstem.settings.engine import SamplingParams

_FEW = 256

Choice: TypeAlias = tuple[int, TokenLogprob | None] | None
"""A token and its logprob if requested; None where the logits hold NaN or +inf."""


class Sampler:
    """The random state and the rules of one request.

    Args:
        params: the rules.
        random: the source of the seed, if `params.seed` is None.
    """

    def __init__(self, params: SamplingParams, random: random_module.Random) -> None:
        self.params = params
        seed = random.getrandbits(63) if params.seed is None else params.seed
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def draw(self, logits: torch.Tensor) -> int:
        """Draws a token from float32 logits [vocab]; consumes one random number."""
        cumulative = torch.cumsum(probabilities(logits, self.params), dim=-1)
        total = float(cumulative[-1])
        assert math.isfinite(total) and total > 0
        uniform = float(torch.rand((), generator=self._generator, dtype=torch.float64))
        # Strictly below the total, whatever the rounding, so that a token of probability zero is never drawn.
        level = min(uniform * total, math.nextafter(total, 0.0))
        return int(torch.searchsorted(cumulative, cumulative.new_tensor(level), right=True))


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Returns the distribution that a token is drawn from.

    Args:
        logits: float32 [vocab].
        params: temperature > 0.

    Returns:
        float64 [vocab], with sum 1; tokens that a filter removed have 0.
    """
    # Relative to the best and in float64, so that no temperature, however small, makes all scores infinite.
    scores = (logits - logits.max()).double() / params.temperature
    if 0 < params.top_k < scores.numel():
        kth_best = torch.topk(scores, params.top_k).values[-1]
        scores = scores.masked_fill(scores < kth_best, -math.inf)
    if params.top_p < 1:
        scores = _keep_top_p(scores, params.top_p)
    chances = torch.softmax(scores, dim=-1)
    if params.min_p > 0:
        chances = chances.masked_fill(chances < params.min_p * chances.max(), 0)
        chances = chances / chances.sum()
    return chances


def sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Choice]:
    """Samples the next token of every request of a batch.

    Args:
        logits: float32 [rows, vocab].
        samplers: one per row.

    Returns:
        (token, its logprob if requested) for each row; None for a row that holds NaN or +inf.
    """
    assert logits.shape[0] == len(samplers)
    if not samplers:
        return []
    best = logits.max(dim=-1)
    peaks, greedy = best.values.tolist(), best.indices.tolist()
    choices: list[Choice] = []
    for row, sampler in enumerate(samplers):
        if not math.isfinite(peaks[row]):
            choices.append(None)
            continue
        token = greedy[row] if sampler.params.temperature == 0 else sampler.draw(logits[row])
        alternatives = sampler.params.logprobs
        choices.append((token, None if alternatives is None else _logprob(logits[row], token, alternatives)))
    return choices


def verify(
    logits: torch.Tensor, samplers: Sequence[Sampler], drafts: Sequence[NDArray[np.int32]]
) -> list[list[Choice]]:
    """Samples the next tokens of every request of a batch: one, and one more for each drafted token that is right.

    A draft changes no result. Each token is drawn from the logits after all tokens before it, as it would be one by
    one, and with the same random numbers. With a draft that is certain of its tokens, this accepts as often as the rule
    of speculative sampling (Leviathan et al. 2023, Chen et al. 2023).

    Args:
        logits: float32 [rows, vocab]: for each request, those after its last token and after each of its draft's.
        samplers: one per request.
        drafts: one per request, int32 [any number].

    Returns:
        For each request its choices, at least one, see `sample`. Only the last may be None.
    """
    first = np.cumsum([0, *(len(draft) + 1 for draft in drafts)])[:-1]
    chosen: list[list[Choice]] = [[] for _ in samplers]
    going = list(range(len(samplers)))
    for at in range(max((len(draft) + 1 for draft in drafts), default=0)):
        rows = logits if len(going) == len(logits) else logits[torch.from_numpy(first[going] + at).to(logits.device)]
        choices = sample(rows, [samplers[i] for i in going])
        for i, choice in zip(going, choices, strict=True):
            chosen[i].append(choice)
        going = [i for i in going if at < len(drafts[i]) and _token(chosen[i][at]) == drafts[i][at]]
        if not going:
            break
    return chosen


def _token(choice: Choice) -> int | None:
    return None if choice is None else choice[0]


def _keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    chances = torch.softmax(scores, dim=-1)
    # Nearly always a few tokens reach top_p, and finding them is much faster than sorting a whole vocabulary.
    best = torch.topk(chances, min(_FEW, chances.numel())).values
    if float(best.sum()) < top_p:
        best = torch.sort(chances, descending=True).values
    more_likely = torch.cumsum(best, dim=-1) - best
    least = best[more_likely < top_p][-1]
    return scores.masked_fill(chances < least, -math.inf)


def _logprob(logits: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    logprobs = torch.log_softmax(logits, dim=-1)
    top = torch.topk(logprobs, min(alternatives, logprobs.numel()))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(pairs))
