"""Samples tokens from logits, all requests of a batch together.

A request's `LogitsProcessor` comes first. Then temperature, top-k, top-p and min-p apply in this order, each to the
result of the one before, like the warpers of Hugging Face transformers. Top-p keeps the likeliest tokens up to the one
with which their sum reaches it. Top-k and top-p also keep tokens that are as likely as the last one kept, so the order
of equal tokens does not matter. A token is drawn by inverting the cumulative distribution at one uniform number, so a
request's draws depend on its seed and on the number of tokens it has generated, never on the batch, the device or the
filters.

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
from mainstem.runtime.sampling.processor import Ended, LogitsProcessor
from mainstem.settings.engine import SEEDS, SamplingParams

_FEW = (256, 4096)  # tokens among which those are looked for that reach top_p
_AT_ONCE = 1 << 17  # logits on a CPU: more of them take fresh memory, which takes longer than computing them

Choice: TypeAlias = tuple[int, TokenLogprob | None] | Ended | None
"""A token and its logprob if requested; why none can follow; None where the logits hold NaN or +inf."""


class Sampler:
    """The random state and the rules of one request.

    Args:
        params: the rules.
        random: the source of the seed, if `params.seed` is None.
        processor: changes the request's logits; None: nothing does.
    """

    def __init__(
        self, params: SamplingParams, random: random_module.Random, processor: LogitsProcessor | None = None
    ) -> None:
        self.params, self.processor = params, processor
        seed = random.getrandbits(64) if params.seed is None else params.seed % SEEDS
        self._random = random_module.Random(seed)  # of the seed it takes all bits, torch's generator 32

    @property
    def ended(self) -> Ended | None:
        """Why the rules let no token follow those that were sampled; None: they let one."""
        return None if self.processor is None else self.processor.ended

    @property
    def forced(self) -> tuple[int, ...]:
        """Tokens that the rules ask for next, one after another, as far as is known."""
        return () if self.processor is None else self.processor.forced

    def repeat(self, token: int) -> None:
        """Takes a token that was sampled elsewhere by these rules, and the random number that this took."""
        if self.params.temperature > 0:
            self.uniform()
        if self.processor is not None:
            self.processor.accept(token)

    def uniform(self) -> float:
        """Returns the next random number, in [0, 1)."""
        return self._random.random()


def probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Returns the distributions that tokens are drawn from.

    Args:
        logits: float32 [rows, vocab].
        params: one per row, with a temperature > 0. A row's result does not depend on the other rows.

    Returns:
        float64 [rows, vocab], rows with sum 1; tokens that a filter removed have 0.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    # Relative to the best and in float64, so that no temperature, however small, makes all scores infinite.
    scores = logits.double().sub_(logits.amax(-1, keepdim=True)).div_(column([p.temperature for p in params]))
    if any(0 < p.top_k < scores.shape[1] for p in params):
        _keep_top_k(scores, [p.top_k for p in params])
    chances = torch.softmax(scores, dim=-1)
    if any(p.top_p < 1 for p in params):
        _keep_top_p(chances, column([p.top_p for p in params]))
    if any(p.min_p > 0 for p in params):
        least = column([p.min_p for p in params]) * chances.amax(-1, keepdim=True)
        chances.masked_fill_(chances < least, 0)
    return chances.div_(chances.sum(-1, keepdim=True))


def sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Choice]:
    """Samples the next token of every request of a batch.

    Args:
        logits: float32 [rows, vocab].
        samplers: one per row.

    Returns:
        (token, its logprob if requested) for each row; why there is none, for a row whose rules allow none; None for a
        row that holds NaN or +inf.
    """
    assert logits.shape[0] == len(samplers)
    if not samplers:
        return []
    raw, logits = logits, _processed(logits, samplers)
    best = logits.max(dim=-1)
    peaks, tokens = best.values.tolist(), best.indices.tolist()
    drawn = [row for row, s in enumerate(samplers) if s.params.temperature > 0 and math.isfinite(peaks[row])]
    size = max(1, _AT_ONCE // logits.shape[1]) if logits.device.type == "cpu" else len(samplers)
    for part in (drawn[begin : begin + size] for begin in range(0, len(drawn), size)):
        rows = logits if len(part) == len(samplers) else logits[part]
        for row, token in zip(part, _draw(rows, [samplers[row] for row in part]), strict=True):
            tokens[row] = token
    choices: list[Choice] = []
    for row, sampler in enumerate(samplers):
        if sampler.ended is not None:
            choices.append(sampler.ended)
            continue
        if not math.isfinite(peaks[row]):
            choices.append(None)
            continue
        alternatives = sampler.params.logprobs
        choices.append((tokens[row], None if alternatives is None else _logprob(raw[row], tokens[row], alternatives)))
        if sampler.processor is not None:
            sampler.processor.accept(tokens[row])
    return choices


def _processed(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """Returns the logits as the rules of their requests change them; those given stay as they are."""
    rows = [(row, s.processor) for row, s in enumerate(samplers) if s.processor is not None]
    if not rows:
        return logits
    changed = logits.clone()
    for row, processor in rows:
        processor.apply(changed[row])
    return changed


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
        For each request its choices, at least one, see `sample`. Only the last may be no token.
    """
    first = np.cumsum([0, *(len(draft) + 1 for draft in drafts)])[:-1]
    chosen: list[list[Choice]] = [[] for _ in samplers]
    going = list(range(len(samplers)))
    for at in range(max((len(draft) + 1 for draft in drafts), default=0)):
        rows = logits if len(going) == len(logits) else logits[torch.from_numpy(first[going] + at).to(logits.device)]
        choices = sample(rows, [samplers[i] for i in going])
        for i, choice in zip(going, choices, strict=True):
            chosen[i].append(choice)
            if isinstance(choice, tuple) and (ended := samplers[i].ended) is not None:
                chosen[i].append(ended)
        going = [i for i in going if at < len(drafts[i]) and _token(chosen[i][at]) == drafts[i][at]]
        going = [i for i in going if samplers[i].ended is None]
        if not going:
            break
    return chosen


def _token(choice: Choice) -> int | None:
    return choice[0] if isinstance(choice, tuple) else None


def _draw(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Draws a token for each row; consumes one random number of each sampler."""
    cumulative = probabilities(logits, [sampler.params for sampler in samplers]).cumsum_(dim=-1)
    totals = cumulative[:, -1].tolist()
    assert all(math.isfinite(total) and total > 0 for total in totals)
    # Strictly below the total, whatever the rounding, so that a token of probability zero is never drawn.
    levels = [min(s.uniform() * total, math.nextafter(total, 0.0)) for s, total in zip(samplers, totals, strict=True)]
    tokens: list[int] = (
        torch.searchsorted(cumulative, cumulative.new_tensor(levels).unsqueeze(1), right=True).squeeze(1).tolist()
    )
    return tokens


def _keep_top_k(scores: torch.Tensor, top_k: Sequence[int]) -> None:
    """Removes what is worse than the k-th best of a row; a row whose k is 0 or too large keeps all."""
    kept = [k if 0 < k < scores.shape[1] else 0 for k in top_k]
    best = torch.topk(scores, max(kept)).values
    least = [best[row, k - 1].item() if k else -math.inf for row, k in enumerate(kept)]
    scores.masked_fill_(scores < scores.new_tensor(least).unsqueeze(1), -math.inf)


def _keep_top_p(chances: torch.Tensor, top_p: torch.Tensor) -> None:
    """Removes what a row's likeliest tokens do not need to reach top_p, [rows, 1]; a row whose top_p is 1 keeps all."""
    # Nearly always a few tokens reach top_p, and finding them is much faster than sorting a whole vocabulary.
    for few in (*_FEW, chances.shape[1]):
        best = torch.topk(chances, min(few, chances.shape[1])).values
        sums = torch.cumsum(best, dim=-1)
        if bool(((sums[:, -1:] >= top_p) | (top_p == 1)).all()):
            break
    last = (sums - best < top_p).sum(-1, keepdim=True) - 1
    chances.masked_fill_(chances < best.gather(1, last).where(top_p < 1, 0.0), 0)


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Normalises logits, float32 [..., vocab]. The bits of a row do not depend on where it lies among others.

    On a GPU, PyTorch adds up a row in an order that depends on its address modulo 16 bytes, so all are made alike.
    """
    vocab = logits.shape[-1]
    more = 0 if logits.is_cpu else -vocab % 4
    if not more:
        return torch.log_softmax(logits, dim=-1)
    return torch.log_softmax(torch.nn.functional.pad(logits, (0, more), value=-math.inf), dim=-1)[..., :vocab]


def _logprob(logits: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    logprobs = log_probabilities(logits)
    top = torch.topk(logprobs, min(alternatives, logprobs.numel()))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(pairs))
