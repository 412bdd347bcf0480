"""What a request asks of its logits before a token is sampled: penalties, biases, tokens that are banned or required.

    penalties    tokens that have come before become less likely
    biases       are added
    bans         minus infinity: what is not allowed, what would end the answer too early, what completes a banned word

They apply in this order. Reported log-probabilities are those of the model, before all of this.

Penalties are those that open servers share: `presence` and `frequency` as in the OpenAI API reference, over the
answer; `repetition` as in CTRL (arXiv 1909.05858), over the prompt and the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.errors import BadArgument
from mainstem.settings.engine import SamplingParams

_BANNED = float("-inf")


def check_rules(params: SamplingParams, ends: Collection[int], vocab_size: int) -> None:
    """Checks that the rules name tokens of the vocabulary, and always leave one.

    Args:
        params: the rules.
        ends: the tokens that end an answer, besides those of `params`.
        vocab_size: tokens that have logits.

    Raises:
        BadArgument: names the rule.
    """
    named = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
        "bad_words": [token for word in params.bad_words for token in word],
    }
    for name, tokens in named.items():
        wrong = [token for token in tokens if token >= vocab_size]
        if wrong:
            raise BadArgument(name, f"token {wrong[0]}", f"tokens from 0 to {vocab_size - 1}")
    banned = {word[-1] for word in params.bad_words}
    if params.min_tokens:
        banned |= _ends(params, ends)
    allowed = params.allowed_token_ids
    if len(banned) >= vocab_size or (allowed is not None and banned.issuperset(allowed)):
        raise BadArgument("allowed_token_ids", allowed, "at least one token that no other rule bans")


class LogitsProcessor:
    """The rules of one request, which `check_rules` has checked, and what they depend on: the tokens so far.

    Args:
        params: the rules.
        prompt: int32 [n].
        ends: the tokens that end an answer, besides those of `params`.
    """

    def __init__(self, params: SamplingParams, prompt: NDArray[np.int32], ends: Collection[int]) -> None:
        self._params, self._ends = params, _index(_ends(params, ends))
        self._prompt = torch.from_numpy(np.unique(prompt).astype(np.int64))
        self._answer: list[int] = []
        self._counts: Counter[int] = Counter()
        self._biased = _index([token for token, _ in params.logit_bias])
        self._biases = torch.tensor([bias for _, bias in params.logit_bias])
        self._barred: torch.Tensor | None = None  # [vocab], the tokens that are never allowed

    def apply(self, logits: torch.Tensor) -> None:
        """Changes the logits of the next token, float32 [vocab], in place."""
        params = self._params
        if params.repetition_penalty != 1:
            tokens = torch.unique(torch.cat([self._prompt, _index(self._counts)])).to(logits.device)
            before = logits[tokens]
            factor = params.repetition_penalty
            logits[tokens] = torch.where(before > 0, before / factor, before * factor)
        if self._counts and (params.frequency_penalty or params.presence_penalty):
            counts = torch.tensor([*self._counts.values()], device=logits.device)
            logits[_index(self._counts)] -= params.frequency_penalty * counts + params.presence_penalty
        if len(self._biased):
            logits[self._biased] += self._biases.to(logits.device)
        if params.allowed_token_ids is not None:
            logits.masked_fill_(self._bars(logits), _BANNED)
        logits[self._banned()] = _BANNED

    def accept(self, token: int) -> None:
        """Notes the next token of the answer."""
        self._answer.append(token)
        self._counts[token] += 1

    def _banned(self) -> torch.Tensor:
        early = len(self._answer) < self._params.min_tokens
        words = [word[-1] for word in self._params.bad_words if self._completes(word)]
        return torch.cat([self._ends, _index(words)]) if early else _index(words)

    def _completes(self, word: Sequence[int]) -> bool:
        """Returns whether the last token of a word would complete it."""
        before = [*word[:-1]]
        return not before or self._answer[-len(before) :] == before

    def _bars(self, logits: torch.Tensor) -> torch.Tensor:
        if self._barred is None:
            self._barred = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            self._barred[_index(self._params.allowed_token_ids or ())] = False
        return self._barred


def _ends(params: SamplingParams, ends: Collection[int]) -> set[int]:
    return {*(() if params.ignore_eos else ends), *params.stop_token_ids}


def _index(tokens: Collection[int]) -> torch.Tensor:
    return torch.tensor([*tokens], dtype=torch.int64)
