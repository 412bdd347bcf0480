"""The prompts of a batch's requests, and the order in which they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from mainstem.batch.lines import Line, Requests
from mainstem.batch.plan import Plan, plan, plan_lines
from mainstem.watch.prompts import END, BadRequestBody, prompts

TEXT_PAGE = 64
"""Bytes of text that prompts share, or do not, where tokens are not known."""

Prompt = Callable[[Line], NDArray[np.int32]]
"""Returns what a request's prompt is made of, int32 [n]: requests that begin with the same find each other's KV."""


def text_prompt(line: Line) -> NDArray[np.int32]:
    """Returns the bytes of a request's conversation as text, before a template. Model and salt come first."""
    try:
        first = prompts(msgspec.json.decode(line.body))[0]
        text = END.join((line.url, first.model, first.salt, first.text))
    except (BadRequestBody, msgspec.DecodeError):  # it scores or embeds texts; or the server will refuse it
        text = END.join((line.url, bytes(line.body).decode()))
    return np.frombuffer(text.encode(errors="surrogatepass"), np.uint8).astype(np.int32)


def planned(
    requests: Requests,
    indices: Sequence[int],
    prompt: Prompt,
    *,
    page_size: int,
    capacity: int | None = None,
    most_in_memory: int = 1 << 24,
    read: Callable[[int], object] = lambda count: None,
) -> Plan:
    """Plans requests. Those of a large file are sorted on the disk, and not by their answers.

    Args:
        requests: of the batch.
        indices: those that are to be sent.
        prompt: returns the prompt of one.
        page_size: items of a prompt that are found together.
        capacity: items that the cache holds; None: all.
        most_in_memory: bytes of the requests whose prompts are held in memory.
        read: is called with the number of prompts that were read so far.

    Returns:
        The plan; its order has indices of `requests`.

    Raises:
        OSError: a temporary file cannot be written.
    """

    def lines() -> Iterator[tuple[int, NDArray[np.int32], int]]:
        for number, index in enumerate(indices):
            read(number)
            yield index, prompt(requests[index]), int(requests.answer_tokens[index])

    if requests.size > most_in_memory:
        return plan_lines(lines(), capacity, page_size=page_size)
    known = list(lines())
    made = plan([key for _, key, _ in known], capacity, lengths=[most for *_, most in known], page_size=page_size)
    order = np.asarray(indices, np.int64)[made.order]
    return Plan(order, made.tokens, made.computed, made.least, made.answers)
