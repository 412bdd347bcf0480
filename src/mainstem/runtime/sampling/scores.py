"""How likely the tokens of prompts were: their log-probabilities, from the logits of every position.

It does not know how prompts are scheduled, nor who asks.
"""

from __future__ import annotations

from collections import abc
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.runtime.parallel.ranks import Ranks
from mainstem.runtime.request import TokenLogprob
from mainstem.runtime.sampling.sampler import log_probabilities
from mainstem.runtime.schedule.sequence import Sequence

_AT_ONCE = 1 << 20  # logits on a CPU that are normalised together


def score(logits: torch.Tensor, tokens: NDArray[np.int32], alternatives: int) -> list[TokenLogprob] | None:
    """Returns how likely given tokens were, as the model sees it.

    Only some rows are normalised at a time, so the memory is that of the logits and of the result.

    Args:
        logits: float32 [n, vocab].
        tokens: int32 [n], the token that came after each row.
        alternatives: how many of the likeliest tokens of each row to return, too.

    Returns:
        One for each row, with its rank; None if a row holds NaN or +inf.
    """
    size = max(1, _AT_ONCE // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(tokens))
    scores: list[TokenLogprob] = []
    for begin in range(0, len(tokens), size):
        logprobs = log_probabilities(logits[begin : begin + size][: len(tokens) - begin])
        column = torch.from_numpy(tokens[begin : begin + size].astype(np.int64)).to(logits.device).unsqueeze(1)
        own = logprobs.gather(1, column)
        if bool(logprobs.isnan().any()):  # +inf becomes NaN, too
            return None
        ranks = (logprobs > own).sum(-1) + 1
        best = torch.topk(logprobs, min(alternatives, logprobs.shape[1]))
        rows = zip(column.flatten().tolist(), own.flatten().tolist(), ranks.tolist(), strict=True)
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        scores += [
            TokenLogprob(token, logprob, tuple(zip(*top, strict=True)), rank)
            for (token, logprob, rank), top in zip(rows, tops, strict=True)
        ]
    return scores


def keep_scores(
    scheduled: abc.Sequence[tuple[Sequence, int]], logits: torch.Tensor, ranks: Ranks, best: int = 0
) -> tuple[torch.Tensor, list[Sequence]]:
    """Takes the log-probabilities of prompts from the logits of a forward, for the sequences that need them.

    Args:
        scheduled: the sequences of the forward, before they advance, each with its number of tokens.
        logits: float32 [rows, vocab], those of each sequence in order.
        ranks: rank 0 computes for all.
        best: how many of the likeliest tokens each has at least, whatever its request asks for.

    Returns:
        The logits to sample from, and the sequences whose logits hold NaN or infinity.
    """
    if not any(sequence.scoring for sequence, _ in scheduled):
        return logits, []
    kept: list[torch.Tensor] = []
    unscored: list[Sequence] = []
    parts = torch.split(logits, [sequence.rows(n) for sequence, n in scheduled])
    for (sequence, n), rows in zip(scheduled, parts, strict=True):
        alternatives = sequence.request.params.prompt_logprobs
        if not sequence.scoring or alternatives is None:
            kept.append(rows)
            continue
        scores = ranks.share(partial(score, rows, sequence.scored(n), max(alternatives, best)))
        kept.append(rows[-1:] if n == sequence.uncomputed else rows[:0])
        if scores is None:
            unscored.append(sequence)
        else:
            sequence.keep(scores)
    return torch.cat(kept), unscored
