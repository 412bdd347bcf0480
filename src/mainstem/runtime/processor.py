"""What a request asks of its logits before a token is sampled: penalties, biases, tokens that are banned or required.

    penalties    tokens that have come before become less likely
    biases       are added
    bans         minus infinity: what is not allowed, what would end the answer too early, what completes a banned word

They apply in this order. Reported log-probabilities are those of the model, before all of this.

Penalties are those that open servers share: `presence` and `frequency` as in the OpenAI API reference, over the
answer; `repetition` as in CTRL (arXiv 1909.05858), over the prompt and the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

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
        self._params, self._ends = params, [*_ends(params, ends)]
        self._prompt, self._answer = prompt, list[int]()
        self._vectors: _Vectors | None = None  # from the first logits on

    def apply(self, logits: torch.Tensor) -> None:
        """Changes the logits of the next token, float32 [vocab], in place."""
        if self._vectors is None:
            self._vectors = self._begin(logits)
        params, known = self._params, self._vectors
        if params.repetition_penalty != 1:
            factor = params.repetition_penalty
            logits.copy_(torch.where(known.seen, torch.where(logits > 0, logits / factor, logits * factor), logits))
        if params.frequency_penalty or params.presence_penalty:
            logits -= params.frequency_penalty * known.counts + params.presence_penalty * (known.counts > 0)
        logits += known.added
        early = self._ends if len(self._answer) < params.min_tokens else []
        logits[[*early, *(word[-1] for word in params.bad_words if self._completes(word))]] = _BANNED

    def accept(self, token: int) -> None:
        """Notes the next token of the answer."""
        self._answer.append(token)
        if self._vectors is not None:
            self._vectors.counts[token] += 1
            self._vectors.seen[token] = True

    def _completes(self, word: Sequence[int]) -> bool:
        """Returns whether the last token of a word would complete it."""
        before = [*word[:-1]]
        return not before or self._answer[-len(before) :] == before

    def _begin(self, logits: torch.Tensor) -> _Vectors:
        """Makes the vectors, as long as the logits and on their device."""
        params = self._params
        counts, seen = torch.zeros_like(logits), torch.zeros_like(logits, dtype=torch.bool)
        for token in self._answer:
            counts[token] += 1
        seen[[*self._prompt.tolist(), *self._answer]] = True
        added = torch.zeros_like(logits)
        if params.allowed_token_ids is not None:
            added.fill_(_BANNED)[[*params.allowed_token_ids]] = 0
        for token, bias in params.logit_bias:
            added[token] += bias
        return _Vectors(counts, seen, added)


class _Vectors(NamedTuple):
    """What depends on the length of the logits, each [vocab].

    Args:
        counts: how often the answer has each token.
        seen: whether the prompt or the answer has it.
        added: biases, and minus infinity for what is not allowed.
    """

    counts: torch.Tensor
    seen: torch.Tensor
    added: torch.Tensor


def _ends(params: SamplingParams, ends: Collection[int]) -> set[int]:
    return {*(() if params.ignore_eos else ends), *params.stop_token_ids}
