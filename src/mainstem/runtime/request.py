"""What a request is, and what comes back of it: plain values, checked when they are made.

Knows nothing of schedulers, models or text: every layer of the runtime and the server speaks in these types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument, BadTokens
from mainstem.namespaces import Namespace, encode_namespace

MAX_LOGPROBS = 20
_INT32_MAX = 2**31 - 1
# What torch.Generator.manual_seed accepts.
_SEED_MIN, _SEED_END = -(2**63), 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when they end.

    Args:
        max_tokens: tokens to make at most, >= 1.
        temperature: 0 takes the most likely token; otherwise logits are divided by it. 0 .. finite.
        top_p: only the smallest set of most likely tokens whose probabilities reach it. (0, 1].
        top_k: only the k most likely tokens; 0 = off.
        min_p: only tokens at least this likely relative to the most likely one. [0, 1].
        seed: the same seed gives the same tokens, in any batch; None draws one.
        stop: texts that end the request; none of their text is given out.
        ignore_eos: go on after the model's end-of-sequence tokens.
        logprobs: None = none; k = each token's log-probability and the k best alternatives, 0 .. 20.

    Raises:
        BadArgument: names the field and its range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        _require_integer("max_tokens", self.max_tokens, 1, _INT32_MAX)
        _require_integer("top_k", self.top_k, 0, _INT32_MAX)
        _require("temperature", self.temperature, _is_real(self.temperature) and self.temperature >= 0, "a number >= 0")
        _require("top_p", self.top_p, _is_real(self.top_p) and 0 < self.top_p <= 1, "a number > 0 and <= 1")
        _require("min_p", self.min_p, _is_real(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1")
        if self.seed is not None:
            _require_integer("seed", self.seed, _SEED_MIN, _SEED_END - 1)
        if self.logprobs is not None:
            _require_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        stops = isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop)
        _require("stop", self.stop, stops, "a tuple of non-empty strings")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and what to make of it.

    Args:
        tokens: int32 [n], n >= 1: the prompt. Any integer sequence is taken; it is copied, unless it is a
            read-only int32 array.
        params: how to sample, and when to end.
        namespace: what must be equal before any prefix may be shared.
        priority: higher goes first; an int32.

    Raises:
        BadArgument: the namespace or the priority.
        BadTokens: the prompt is empty, has more than one dimension, or holds something else than int32 integers >= 0.
    """

    tokens: NDArray[np.int32]
    params: SamplingParams = field(default_factory=SamplingParams)
    namespace: Namespace | str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        """Copies the prompt, so that nobody can change it while it runs."""
        encode_namespace(self.namespace)
        _require_integer("priority", self.priority, -_INT32_MAX, _INT32_MAX)
        given = np.asarray(self.tokens)
        if given.ndim != 1 or given.size == 0:
            raise BadTokens(f"a prompt of shape {given.shape}: must be one dimension of at least one token")
        if given.dtype.kind not in "iu":
            raise BadTokens(f"a prompt of type {given.dtype}: must hold integers")
        wrong = np.flatnonzero((given < 0) | (given > _INT32_MAX))
        if wrong.size:
            raise BadTokens(f"token {given[wrong[0]]} at position {wrong[0]}: must be from 0 to {_INT32_MAX}")
        if given.dtype == np.int32 and not given.flags.writeable:
            return  # nobody can change it: it may be shared by many requests
        tokens = given.astype(np.int32)
        tokens.flags.writeable = False
        object.__setattr__(self, "tokens", tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One chosen token's natural log-probability before temperature, and the best alternatives, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request took.

    Args:
        prompt_tokens: tokens of the prompt.
        cached_tokens: of them, those found in the cache when the request was first admitted.
        host_tokens, storage_tokens: of the cached ones, those that lay on the host, and in storage, when the request
            came. The rest lay on the device.
        completion_tokens: tokens made, the end-of-sequence token included.
        queue_s: from arrival to the first admission (or to the end, if it never was admitted).
        ttft_s: from arrival to the first token; 0 if there was none.
        duration_s: from arrival to the end.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    ttft_s: float
    duration_s: float
    host_tokens: int = 0
    storage_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """One event of a stream.

    Args:
        text: text that is safe to show: never half a character, never what may be the start of a stop string.
        tokens: tokens made since the last event.
        logprobs: one for each of the tokens, if asked for.
        finish_reason: None until the last; then "stop", "length", "cancelled" or "error".
        usage: on the last event.
        error: what went wrong, if the reason is "error".
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """All of one request's output."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens whose KV stands in the pages, found or computed, of all the prompt's."""

    done: int
    total: int


def _require(name: str, value: object, allowed: bool, range_: str) -> None:
    if not allowed:
        raise BadArgument(name, value, range_)


def _require_integer(name: str, value: object, low: int, high: int) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _require(name, value, fits, f"an integer from {low} to {high}")


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
