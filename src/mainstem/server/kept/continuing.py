"""Streams that another engine resumes, when the engine that began them has ended.

A caller in the application's own process, such as the front of a fleet, puts `RESUME` into the state of a request's
scope. The stream then carries, beside its bytes, what a resumption needs: a `StreamProgress` with its first message,
the `SentTokens` of an event with each later one. To resume, the same request goes to another engine with all that was
sent. That engine repeats the tokens, so that detokenizer, parsers, counts and random numbers are where they were, and
sends only what follows.

    scope["state"][RESUME] = progress        what another engine has sent; None: nothing
    message[PROGRESS], message[SENT]         of http.response.start and http.response.body
    message[LOST]                            this engine cannot end the stream

No client can set the state of a scope.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mainstem.runtime.request import Delta, Request, TokenLogprob
from mainstem.server.apis.replies import Reply
from mainstem.server.errors import ApiError
from mainstem.server.run import EventStream, Pings, Run

RESUME, PROGRESS, SENT, LOST = "mainstem.resume", "mainstem.progress", "mainstem.sent", "mainstem.lost"


@dataclass(frozen=True, slots=True)
class SentTokens:
    """The tokens that one event of a stream shows.

    Args:
        choice: whose they are.
        tokens: since the last event of this choice that was sent.
        logprobs: one for each of them, if requested.
        ended: whether the choice ends with them.
    """

    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    ended: bool = False


@dataclass(slots=True)
class ChoiceProgress:
    """The part of one choice that the client has.

    Args:
        prompt: int32 [n], as it was computed.
        max_tokens: of the answer.
        tokens, logprobs, ended: as in `SentTokens`, since the beginning.
    """

    prompt: NDArray[np.int32]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: bool = False


@dataclass(slots=True)
class StreamProgress:
    """The state of a stream from which another engine can resume it.

    Args:
        id, created: of the response.
        choices: one entry for each.
        opened: whether the client has the beginning of the stream.
    """

    id: str
    created: int
    choices: list[ChoiceProgress]
    opened: bool = False

    def add(self, sent: SentTokens) -> None:
        """Adds tokens that were sent to the client."""
        choice = self.choices[sent.choice]
        choice.tokens += sent.tokens
        choice.logprobs += sent.logprobs
        choice.ended = sent.ended


def resumed(requests: Sequence[Request], progress: StreamProgress) -> list[Request]:
    """Returns the requests that resume a stream.

    Args:
        requests: as they would begin here, one for each choice.
        progress: what another engine has sent.

    Raises:
        ApiError: they are not those of that stream.
    """
    if len(requests) != len(progress.choices):
        raise ApiError(409, "The stream cannot be continued: it has another number of choices.")
    return [_resumed(request, choice) for request, choice in zip(requests, progress.choices, strict=True)]


def _resumed(request: Request, choice: ChoiceProgress) -> Request:
    params = replace(request.params, max_tokens=choice.max_tokens)
    said = np.asarray(choice.tokens, np.int32)
    if np.array_equal(request.tokens, choice.prompt):
        return replace(request, params=params, said=said)
    if request.images:
        raise ApiError(409, "The stream cannot be continued: its images are at other places of the prompt here.")
    # The other engine's prompt has the tokens that it generated for earlier answers, and the notes of rules that it
    # remembered; marks and prefixes made here are places in another text.
    hints = replace(request.hints, prefixes=())
    return replace(request, tokens=choice.prompt, params=params, marks=(), hints=hints, said=said)


class ContinuableStream(EventStream):
    """A run as server-sent events that another engine can resume; it leaves out what another engine has sent.

    Args:
        run: the choices.
        reply: writes them.
        pings: see `EventStream`.
        progress: of the stream; empty if it begins here.
    """

    def __init__(self, run: Run, reply: Reply, pings: Pings, progress: StreamProgress) -> None:
        super().__init__(run, reply, pings)
        self._progress, self._is_resumed = progress, progress.opened
        self._known = deepcopy(progress.choices)  # the receiver of `progress` goes on adding to its own
        self._repeated = [0] * len(self._known)
        self._unsent: list[list[Delta]] = [[] for _ in self._known]

    def start(self) -> dict[str, Any]:
        return {**super().start(), PROGRESS: self._progress}

    def opening(self) -> bytes:
        opening = super().opening()
        return b"" if self._is_resumed else opening

    def message(self, index: int, delta: Delta) -> dict[str, Any] | None:
        known, at = self._known[index], self._repeated[index]
        if at < len(known.tokens) or known.ended:
            self._repeated[index] += len(delta.tokens)
            logprobs = tuple(known.logprobs[at : at + len(delta.tokens)])
            super().message(index, replace(delta, logprobs=logprobs))
            return None
        self._unsent[index].append(delta)
        message = super().message(index, delta)
        if message is not None:
            deltas, self._unsent[index] = self._unsent[index], []
            tokens = tuple(token for each in deltas for token in each.tokens)
            logprobs = tuple(entry for each in deltas for entry in each.logprobs)
            message[SENT] = SentTokens(index, tokens, logprobs, delta.finish_reason is not None)
        return message

    def failing(self, error: ApiError) -> dict[str, Any]:
        return {**super().failing(error), LOST: error.status == 503}
