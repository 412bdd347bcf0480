"""Streams that another engine goes on with, when the one that began them has ended.

Who asks an application in its own process, like the front of a fleet, can learn what each piece of a stream says, by a
`Wish` in the state of the request's scope. The answer's first message then has a `Begun`, each later one a `Said`. With
all that was said, the same request goes on elsewhere: the tokens are repeated, so that detokenizer, parsers, counts and
random numbers are where they were, and of what they would show again nothing is sent.

    scope["state"][WISH] = Wish(begun)      begun: what another engine has sent; None: nothing
    message[BEGUN], message[SAID]           of http.response.start and http.response.body
    message[LOST]                           this engine cannot end the stream

No client can set the state of a scope.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from mainstem.runtime.request import Delta, Request, TokenLogprob
from mainstem.server.apis.replies import Reply
from mainstem.server.errors import ApiError
from mainstem.server.run import EventStream, Pings, Run

WISH, BEGUN, SAID, LOST = "mainstem.wish", "mainstem.begun", "mainstem.said", "mainstem.lost"


@dataclass(frozen=True, slots=True)
class Said:
    """What an event of a stream says.

    Args:
        choice: whose it is.
        tokens: since the last event of this choice that was sent.
        logprobs: one for each of them, if requested.
        ended: whether the choice has ended with them.
    """

    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    ended: bool = False


@dataclass(slots=True)
class Answer:
    """What was said of one choice.

    Args:
        prompt: int32 [n], as it was computed.
        max_tokens: of the answer.
        tokens, logprobs, ended: as in `Said`, since the begin.
    """

    prompt: NDArray[np.int32]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: bool = False


@dataclass(slots=True)
class Begun:
    """A stream that can go on elsewhere.

    Args:
        id, created: of the response.
        answers: one for each choice.
        opened: whether the client has the begin of the stream.
    """

    id: str
    created: int
    answers: list[Answer]
    opened: bool = False

    def take(self, said: Said) -> None:
        """Takes into account what was said, and sent to the client."""
        answer = self.answers[said.choice]
        answer.tokens += said.tokens
        answer.logprobs += said.logprobs
        answer.ended = said.ended


@dataclass(frozen=True, slots=True)
class Wish:
    """That a stream says what it says.

    Args:
        begun: what another engine has sent of it; None: it begins here.
    """

    begun: Begun | None = None


def wish_of(scope: Scope) -> Wish | None:
    """Returns the wish of a request, if it has one."""
    found = scope.get("state", {}).get(WISH)
    return found if isinstance(found, Wish) else None


def resumed(requests: Sequence[Request], begun: Begun) -> list[Request]:
    """Returns the requests of a stream that another engine has begun.

    Args:
        requests: as they would begin here, one for each choice.
        begun: what was said.

    Raises:
        ApiError: they are not those of that stream.
    """
    if len(requests) != len(begun.answers):
        raise ApiError(409, "The stream cannot be continued: it has another number of choices.")
    return [_resumed(request, answer) for request, answer in zip(requests, begun.answers, strict=True)]


def _resumed(request: Request, answer: Answer) -> Request:
    params = replace(request.params, max_tokens=answer.max_tokens)
    said = np.asarray(answer.tokens, np.int32)
    if np.array_equal(request.tokens, answer.prompt):
        return replace(request, params=params, said=said)
    # An earlier answer in it has the tokens of the engine that generated it. What is known of places is of others.
    hints = replace(request.hints, prefixes=())
    return replace(request, tokens=answer.prompt, params=params, marks=(), hints=hints, said=said)


class ContinuableStream(EventStream):
    """A run as server-sent events that say what they say; what another engine has sent of them is left out.

    Args:
        run: the choices.
        reply: writes them.
        pings: see `EventStream`.
        begun: the stream, with what another engine has sent.
    """

    def __init__(self, run: Run, reply: Reply, pings: Pings, begun: Begun) -> None:
        super().__init__(run, reply, pings)
        self._begun, self._goes_on = begun, begun.opened
        self._known = deepcopy(begun.answers)  # what is sent from now on is added to those of `begun`, elsewhere
        self._repeated = [0] * len(begun.answers)
        self._unsent: list[list[Delta]] = [[] for _ in begun.answers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def telling(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message[BEGUN] = self._begun
            await send(message)

        await super().__call__(scope, receive, telling)

    def opening(self) -> bytes:
        """See `EventStream`."""
        opening = super().opening()
        return b"" if self._goes_on else opening

    def message(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """See `EventStream`."""
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
            message[SAID] = Said(index, tokens, logprobs, delta.finish_reason is not None)
        return message

    def failing(self, error: ApiError) -> dict[str, Any]:
        """See `EventStream`."""
        return {**super().failing(error), LOST: error.status == 503}
