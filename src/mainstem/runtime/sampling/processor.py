"""Changes of a request's logits before a token is sampled: penalties, biases, tokens that are banned or required.

    penalties    tokens that have come before become less likely
    biases       are added
    grammar      minus infinity: what does not go on with it, and what ends the answer where it is not complete
    bans         minus infinity: what is not allowed, what would end the answer too early, what completes a banned word

They apply in this order. A ban gives way to a grammar that lets nothing else follow. Reported log-probabilities
are those of the model, before all of this.

Penalties are those that open servers share: `presence` and `frequency` as in the OpenAI API reference, over the
answer; `repetition` as in CTRL (arXiv 1909.05858), over the prompt and the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.errors import BadArgument
from mainstem.runtime.sampling.grammars import CompiledGrammar, NextTokens
from mainstem.settings.engine import SamplingParams

log = logging.getLogger(__name__)

_BANNED = float("-inf")


Ended = Literal["stop", "length"]
"""Why an answer ends after its last token."""


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
        grammar: that of `params`, compiled; None: there is none, or `apply` is never called.

    Attributes:
        ended: why no token can follow: "stop" where the grammar is complete, "length" where it cannot be followed any
            further. None: one can.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: NDArray[np.int32],
        ends: Collection[int],
        grammar: CompiledGrammar | None = None,
    ) -> None:
        self._params, self._ends, self._model_ends = params, [*_ends(params, ends)], [*ends]
        self._prompt, self._answer = prompt, list[int]()
        self._vectors: _Vectors | None = None  # from the first logits on
        self._matcher = None if grammar is None else grammar.matcher()
        self.ended: Ended | None = None

    @property
    def forced(self) -> tuple[int, ...]:
        """Tokens that the grammar, if there is one, asks for next; see `Matcher.forced`."""
        return () if self._matcher is None else self._matcher.forced

    def apply(self, logits: torch.Tensor) -> None:
        """Changes the logits of the next token, float32 [vocab], in place."""
        if self._params.weighs_logits:
            self._weigh(logits)
        params = self._params
        early = self._ends if len(self._answer) < params.min_tokens else []
        banned = [*early, *(word[-1] for word in params.bad_words if self._completes(word))]
        if self._matcher is not None:
            allowed = self._allowed(self._matcher.following(), len(logits), early)
            _ban(logits, ~allowed)
            allowed[banned] = False
            banned = banned if allowed.any() else []
        if banned:
            logits[banned] = _BANNED

    def _weigh(self, logits: torch.Tensor) -> None:
        """Applies penalties, biases and what is not allowed."""
        if self._vectors is None:
            self._vectors = self._begin(logits)
        params, known = self._params, self._vectors
        if params.repetition_penalty != 1:
            factor = params.repetition_penalty
            logits.copy_(torch.where(known.seen, torch.where(logits > 0, logits / factor, logits * factor), logits))
        if params.frequency_penalty or params.presence_penalty:
            logits -= params.frequency_penalty * known.counts + params.presence_penalty * (known.counts > 0)
        logits += known.added

    def accept(self, token: int) -> None:
        """Notes the next token of the answer."""
        self._answer.append(token)
        if self._vectors is not None:
            self._vectors.counts[token] += 1
            self._vectors.seen[token] = True
        if self._matcher is not None and token not in self._ends and not self._matcher.accept(token):
            self._end(self._matcher.following())

    def _allowed(self, following: NextTokens, vocab_size: int, early: Collection[int]) -> NDArray[np.bool_]:
        """Returns which tokens a grammar allows, bool [vocab_size]; ends the answer if it allows none."""
        allowed = np.zeros(vocab_size, np.bool_)  # more tokens than the tokenizer knows may have logits
        known = following.tokens[:vocab_size]
        allowed[: len(known)] = known
        allowed[self._model_ends] = False
        if following.may_end and not early:
            allowed[self._ends] = True
        if not allowed.any():
            self._end(following)
        return allowed

    def _end(self, following: NextTokens) -> None:
        self.ended = "stop" if following.may_end else "length"
        if not following.may_end:
            log.warning("an answer cannot follow its grammar any further: %s", following.problem or "no token fits")

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
    """Tensors that depend on the length of the logits, each [vocab].

    Args:
        counts: how often the answer has each token.
        seen: whether the prompt or the answer has it.
        added: biases, and minus infinity for what is not allowed.
    """

    counts: torch.Tensor
    seen: torch.Tensor
    added: torch.Tensor


def _ban(logits: torch.Tensor, tokens: NDArray[np.bool_]) -> None:
    """Bans tokens, bool [vocab]. On a CPU by NumPy: threads of PyTorch take longer to meet than the work takes."""
    if logits.device.type == "cpu":
        logits.numpy()[tokens] = _BANNED
    else:
        logits.masked_fill_(torch.from_numpy(tokens).to(logits.device), _BANNED)


def _ends(params: SamplingParams, ends: Collection[int]) -> set[int]:
    return {*(() if params.ignore_eos else ends), *params.stop_token_ids}
