"""A streaming client for any server of /v1/completions: what one of its users waits for.

    sent        first text                 last token
     |---------------|-----|-----|-----|-----|
      prefill, queue   the other tokens

Events are parsed after the stream has ended, so that the client takes little of the machine that it measures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

Clock = Callable[[], float]
Prompt = str | Sequence[int]
"""A text, or token ids."""


class ServerFailed(Exception):
    """A server did not answer as it was asked to; the message says what it did."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. Times are in seconds on the client's clock, numbers of tokens are the server's count.

    Args:
        sent_s: when the request was sent.
        first_s: when the first text came.
        last_s: when the last token came.
    """

    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    tokens: int
    text: str


class Client:
    """Sends requests to one server.

    Args:
        url: of the server, without a path.
        body: fields of a request that this server needs besides those that all have.
        clock: seconds.
        transport: what carries the requests; None: the network.
    """

    def __init__(
        self,
        url: str,
        body: Mapping[str, Any],
        clock: Clock = time.perf_counter,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url, self._body, self._clock, self._transport = url, body, clock, transport

    def ask(self, prompts: Sequence[Prompt], tokens: int, after_s: Sequence[float] = ()) -> list[Answer]:
        """Sends all prompts at once, over new connections, and waits for all answers.

        Args:
            prompts: what to send.
            tokens: of each answer.
            after_s: when each prompt is sent, in seconds from now; empty: at once.

        Raises:
            ServerFailed: any request failed, or has an answer of another length.
        """
        return asyncio.run(self._ask(prompts, tokens, after_s or [0.0] * len(prompts)))

    async def _ask(self, prompts: Sequence[Prompt], tokens: int, after_s: Sequence[float]) -> list[Answer]:
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=None, limits=unlimited, transport=self._transport
        ) as http:
            due = zip(prompts, after_s, strict=True)
            return await asyncio.gather(*(self._ask_one(http, prompt, tokens, seconds) for prompt, seconds in due))

    async def _ask_one(self, http: httpx.AsyncClient, prompt: Prompt, tokens: int, after_s: float) -> Answer:
        await asyncio.sleep(after_s)
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **self._body}
        sent_s = self._clock()
        try:
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    raise ServerFailed(f"status {reply.status_code}: {(await reply.aread()).decode()[:200]}")
                pieces = [(self._clock(), piece) async for piece in reply.aiter_raw()]
        except httpx.HTTPError as error:
            raise ServerFailed(f"{type(error).__name__}: {error}") from error
        answer = _answer(sent_s, pieces)
        if answer.tokens != tokens:
            raise ServerFailed(f"an answer of {answer.tokens} tokens instead of {tokens}")
        return answer


def _answer(sent_s: float, pieces: Iterable[tuple[float, bytes]]) -> Answer:
    """Reads a stream. A token without text of its own, such as part of a character, comes with the next text."""
    first_s = last_s = usage = None
    finished, text = False, ""
    for at_s, event in _events(pieces):
        if "error" in event:
            raise ServerFailed(f"error in the stream: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["text"]
            finished = finished or bool(choice.get("finish_reason"))
            if choice["text"] or finished:
                last_s = at_s
                first_s = at_s if first_s is None else first_s
    if not finished or usage is None or first_s is None or last_s is None:
        raise ServerFailed("the stream ended before the answer")
    return Answer(sent_s, first_s, last_s, usage["prompt_tokens"], usage["completion_tokens"], text)


def _events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yields each event with the time when it was complete: an event may come in pieces, a piece may have several."""
    rest = b""
    for at_s, piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data: ")
            if data != event and data != b"[DONE]":
                yield at_s, json.loads(data)
