"""Makes events of sampled tokens: the text and scores of each token, and the end of a request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, replace

from mainstem.runtime.request import Delta, Progress, TokenLogprob, Usage
from mainstem.runtime.sampling.processor import Ended
from mainstem.runtime.sampling.sampler import Choice
from mainstem.runtime.schedule.meter import Totals
from mainstem.runtime.schedule.sequence import Sequence

log = logging.getLogger(__name__)

Event = tuple[str, Delta | Progress]
"""The id of a request, and what happened to it."""

NO_LOGITS = "the model's logits hold NaN or infinity"
_NOTHING = Delta("")


@dataclass(frozen=True, slots=True)
class End:
    """How a request ends.

    Args:
        reason: "stop", "length", "cancelled" or "error".
        last: its last token, if that belongs to the answer.
        error: what went wrong.
    """

    reason: str
    last: Delta = _NOTHING
    error: str | None = None


class Outputs:
    """The events of a scheduler.

    Args:
        totals: counted up.
        eos: tokens that end a request, unless it ignores them.
        clock: monotonic, in seconds.

    Attributes:
        events: that have not been taken, in order.
    """

    def __init__(self, totals: Totals, eos: frozenset[int], clock: Callable[[], float]) -> None:
        self._totals, self._eos, self._clock = totals, eos, clock
        self.events: list[Event] = []

    def take(self) -> list[Event]:
        """Returns all events since the last call."""
        events, self.events = self.events, []
        return events

    def progress(self, sequence: Sequence) -> None:
        """Tells how much of a prompt is computed."""
        if not sequence.generated:
            self.events.append((sequence.id, Progress(sequence.computed, sequence.length)))

    def process(self, sequence: Sequence, choices: AnySequence[Choice]) -> End | None:
        """Processes the next token, and those of the draft that were right; returns how that ends the request."""
        if sequence.scores and not sequence.generated:
            most = sequence.request.params.prompt_logprobs
            scores = tuple(replace(each, top=each.top[:most]) for each in sequence.scores)
            self.events.append((sequence.id, Delta("", prompt_logprobs=scores)))
        if sequence.pooling is not None:
            vector = sequence.pooling.vector(sequence.length)
            if vector is None:
                return End("error", error="the model's hidden states hold NaN or infinity")
            self.events.append((sequence.id, Delta("", embedding=vector)))
        if not sequence.request.params.max_tokens:
            return End("length")
        last = choices[-1]
        ended = last if isinstance(last, str) else None
        sampled = [choice for choice in choices if not isinstance(choice, str)]
        drafted, kept = sequence.take_draft(), max(len(sampled) - 1, 0)
        if drafted:
            sequence.pace.observe(drafted, kept)
            self._totals.drafted_tokens += drafted
            self._totals.accepted_tokens += kept
        for at, choice in enumerate(sampled):
            if choice is None:
                return End("error", error=NO_LOGITS)
            if at:
                sequence.advance(1)
            token, logprob = choice
            self._totals.generated_tokens += 1
            if sequence.first_token_s is None:
                sequence.first_token_s = self._clock()
            sequence.append(token)
            final = ended if at == len(sampled) - 1 else None
            if (end := self.token(sequence, token, () if logprob is None else (logprob,), final)) is not None:
                return end
        return None if ended is None else End(ended)  # no token at all

    def token(
        self, sequence: Sequence, token: int, scores: tuple[TokenLogprob, ...], ended: Ended | None
    ) -> End | None:
        """Reports the newest token of a sequence, or returns how it ends the request."""
        params = sequence.request.params
        if (token in self._eos and not params.ignore_eos) or token in params.stop_token_ids:
            shown = sequence.text.push(token) if params.include_stop_str_in_output else ""
            return End("stop", Delta(shown, (token,), scores))
        delta = Delta(sequence.text.push(token), (token,), scores)
        if sequence.text.stop is not None:
            return End("stop", delta)
        if ended is not None:
            return End(ended, delta)
        if sequence.generated == params.max_tokens:
            return End("length", delta)
        self.events.append((sequence.id, delta))
        return None

    def end(self, sequence: Sequence, end: End, usage: Usage) -> None:
        """Reports the last event of a request: the text that was held back, unless the tokenizer fails."""
        reason, last = end.reason, end.last
        try:
            text = sequence.text.flush(reason == "length")
        except Exception:
            log.exception("the last text of request %s cannot be decoded", sequence.id)
            text = ""
        if (stop := sequence.text.stop) is not None and reason == "length":
            reason = "stop"
        delta = Delta(last.text + text, last.tokens, last.logprobs, reason, usage, end.error, stop)
        self.events.append((sequence.id, delta))
