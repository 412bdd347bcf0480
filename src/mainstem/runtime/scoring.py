"""Scores of continuations: how likely a model finds each of several texts after one context, which is computed once.

    context           ------------------------> computed, and stays in the cache
    continuation 1                             ---->  computed together in one forward, and not kept
    continuation 2                             -->

Evaluations, rerankers and judges ask in this way. The numbers are those that each text has alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mainstem.cache.namespaces import Namespace
from mainstem.errors import BadTokens, MainstemError
from mainstem.runtime.request import Completion, Hints, Request
from mainstem.settings.engine import SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CONTEXT = SamplingParams(max_tokens=0)


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is.

    Args:
        logprobs: the natural log-probability of each of its tokens, given the context and those before.
        greedy: whether each of its tokens is the likeliest one, so that a greedy answer would begin with it.
        cached_tokens: tokens of the context that were not computed for it.
    """

    logprobs: tuple[float, ...]
    greedy: bool
    cached_tokens: int

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation."""
        return sum(self.logprobs)


def score_of(completion: Completion) -> Score:
    """Returns the score that a request of `requests_of` gives.

    Raises:
        MainstemError: it has failed, or was cancelled.
    """
    if completion.finish_reason not in ("stop", "length"):
        raise MainstemError(f"a continuation has no score: its request ended with {completion.finish_reason!r}")
    scores = completion.prompt_logprobs
    greedy = all(each.rank == 1 for each in scores)
    return Score(tuple(each.logprob for each in scores), greedy, completion.usage.cached_tokens)


def requests_of(
    context: NDArray[Any],
    continuations: Sequence[NDArray[Any]],
    namespace: Namespace | str | None = None,
    *,
    keep: bool = False,
) -> list[Request]:
    """Returns the requests that score continuations: the context's own, unless `keep`, then one for each of them.

    Args:
        context: int [n], n >= 1.
        continuations: int [m], m >= 1 each.
        namespace: prefixes are shared only within it.
        keep: the KV of continuations stays in the cache, too.

    Raises:
        BadTokens: the context or a continuation is empty, or holds anything but integers >= 0.
    """
    for name, part in (("context", context), *((f"continuation {i}", each) for i, each in enumerate(continuations))):
        if len(part) == 0:
            raise BadTokens(f"the {name} is empty: must have at least one token")
    params = replace(_CONTEXT, prompt_logprobs=0, logprob_start=len(context))
    hints = Hints() if keep else Hints(no_store=True)
    scored = [Request(np.concatenate([context, each]), params, namespace, hints=hints) for each in continuations]
    return scored if keep else [Request(context, _CONTEXT, namespace), *scored]
