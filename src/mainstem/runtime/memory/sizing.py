"""The size of each pool: divides an amount of memory among full pages, window pages and state slots.

    memory = full pages x their bytes + window pages x theirs + slots x theirs
    window pages = window_ratio x full pages;  slots x bytes = state_share x memory

Of several windows or chunks, the longest has this ratio, and the others fewer pages as they are shorter: then all of
them hold the ends of equally many prefixes.

The best ratio depends on the use: short chats need a window page for each full page, long prompts almost none.

This module only computes numbers. It allocates no memory for pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mainstem.cache.components import Attended, Component, Full, Local, State, by_name
from mainstem.errors import BadArgument
from mainstem.settings.engine import Shares

# Full pages of a model without attention take memory only in the tree, so there are as many as its states can need.
_MAX_MARKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Need:
    """The least sizes with which the oldest request can always go on.

    Args:
        local_pages: of each window and chunk, see `window_pages`.
        context_pages: pages of the longest sequence.
        running: requests at once.
    """

    local_pages: Mapping[Component, int]
    context_pages: int
    running: int


def window_pages(window: int, chunk: int, page_size: int, *, states: bool = False) -> int:
    """Returns how many window pages let one request always proceed: for its window and one chunk, at any alignment.

    With states, an answer is published at its end, and the window of its prompt stays locked until then.
    """
    windows = 2 if states else 1
    return windows * -(-window // page_size) + -(-chunk // page_size) + 2


def share_out(
    components: tuple[Component, ...], page_bytes: Mapping[str, int], slot_bytes: int, shares: Shares, need: Need
) -> dict[Component, int]:
    """Returns the pages or slots of each component.

    Args:
        components: of the model, in order.
        page_bytes: bytes of a page, by the name of the component.
        slot_bytes: bytes of a state; 0 if the model has none.

    Raises:
        BadArgument: the memory does not hold a page of each, or the windows of one request.
    """
    slots = _slots(components, page_bytes, slot_bytes, shares, need)
    memory = shares.kv_bytes - (slots * slot_bytes if shares.pages is None else 0)
    paged = {name: row for name, row in by_name(components).items() if not isinstance(row, State)}
    least = {row: need.local_pages[row] if isinstance(row, Local) else 1 for row in paged.values()}
    ratios = _ratios(paged.values(), shares.window_ratio)
    costs = {row: page_bytes[name] for name, row in paged.items()}
    if shares.pages is not None:
        first, enough = shares.pages, next(iter(least.values()))
        if first < enough:
            raise BadArgument("pages", first, f"at least {enough}: the window and a chunk of one request")
    elif any(costs.values()):
        first = _first_pages(memory, costs, ratios, least, shares.kv_bytes)
    else:
        first = min(slots * need.context_pages, max(_MAX_MARKS, need.running * need.context_pages))
    sizes = {row: max(int(first * ratio), least[row]) for row, ratio in ratios.items()}
    return {row: slots if isinstance(row, State) else sizes[row] for row in components}


def _ratios(paged: Iterable[Attended], window_ratio: float) -> dict[Attended, float]:
    """Returns the pages of each component for each page of the first one."""
    rows = list(paged)
    longest = max((row.tokens for row in rows if isinstance(row, Local)), default=0)
    unit = window_ratio if Full() in rows else 1.0
    return {row: unit * row.tokens / longest if isinstance(row, Local) else 1.0 for row in rows}


def _first_pages(
    memory: int,
    costs: Mapping[Attended, int],
    ratios: Mapping[Attended, float],
    least: Mapping[Attended, int],
    kv_bytes: int,
) -> int:
    """Returns the pages of the first component for which all fit the memory: each by its ratio, or its least."""
    needed = sum(cost * least[row] for row, cost in costs.items())
    if memory < needed:
        states = f" plus {kv_bytes - memory} for states" if kv_bytes > memory else ""
        raise BadArgument("kv_bytes", kv_bytes, f"{needed} or more{states}")
    free = {row: cost for row, cost in costs.items() if cost}  # those that may have more than their least
    while True:
        rest = memory - sum(cost * least[row] for row, cost in costs.items() if row not in free)
        pages = rest / sum(cost * ratios[row] for row, cost in free.items())
        short = [row for row in free if pages * ratios[row] < least[row]]
        if not short or len(short) == len(free):  # all only by rounding
            return int(pages)
        for row in short:
            del free[row]


def _slots(
    components: tuple[Component, ...], page_bytes: Mapping[str, int], slot_bytes: int, shares: Shares, need: Need
) -> int:
    if not any(isinstance(component, State) for component in components):
        return 0
    if shares.state_slots is not None:
        slots = shares.state_slots
    elif shares.pages is not None:
        slots = 4 * need.running
    else:
        part = shares.state_share if any(page_bytes.values()) else 1.0
        slots = int(shares.kv_bytes * part) // slot_bytes
    # One to compute with, one checkpoint of the lease, one that the tree keeps.
    if slots < 3 and shares.state_slots is not None:
        raise BadArgument("state_slots", slots, "at least 3")
    if slots < 3 or (shares.pages is None and slots * slot_bytes > shares.kv_bytes):
        raise BadArgument(
            "kv_bytes", shares.kv_bytes, f"enough for {max(slots, 3)} recurrent states of {slot_bytes} bytes"
        )
    return slots
