"""How large each pool is: one amount of memory, shared out among full pages, window pages and state slots.

    memory = full pages x their bytes + window pages x theirs + slots x theirs
    window pages = window_ratio x full pages;  slots x bytes = state_share x memory

Knows bytes and layouts; allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mainstem.components import Component, Full, State, Window
from mainstem.errors import BadArgument

# Full pages of a model without attention take no memory but the tree's: they are as many as its states can need.
_MOST_MARKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Shares:
    """What is asked for.

    Args:
        memory: bytes for all pools together.
        pages: pages of the first component instead; the others follow from the ratio and the slots.
        window_ratio: window pages for each full page.
        state_share: part of the memory that states have, of a model that has KV as well.
        state_slots: how many slots instead.

    Raises:
        BadArgument: names the field and its range.
    """

    memory: int
    pages: int | None = None
    window_ratio: float = 0.5
    state_share: float = 0.5
    state_slots: int | None = None

    def __post_init__(self) -> None:
        """Checks the shares; the integers are checked where they are set."""
        for name, most in (("window_ratio", math.inf), ("state_share", 1.0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < most:
                raise BadArgument(name, value, "a number above 0" + ("" if most == math.inf else f" and below {most}"))


@dataclass(frozen=True, slots=True)
class Need:
    """What one request needs, so that the oldest can always go on.

    Args:
        window_pages: see `mainstem.runtime.scheduler.window_pages`.
        context_pages: pages of the longest sequence.
        running: requests at once.
    """

    window_pages: int
    context_pages: int
    running: int


def share_out(
    components: tuple[Component, ...], page_bytes: Mapping[str, int], slot_bytes: int, shares: Shares, need: Need
) -> dict[Component, int]:
    """Pages or slots of each component.

    Args:
        components: of the model, in order.
        page_bytes: bytes of a page, by component of pages.
        slot_bytes: bytes of a state; 0 without one.

    Raises:
        BadArgument: the memory does not hold a page of each, or the window of one request.
    """
    slots = _slots(components, page_bytes, slot_bytes, shares, need)
    memory = shares.memory - (slots * slot_bytes if shares.pages is None else 0)
    sizes: dict[Component, int] = {}
    for component in components:
        if isinstance(component, State):
            sizes[component] = slots
        elif isinstance(component, Full):
            sizes[component] = _full_pages(components, page_bytes, memory, shares, slots, need)
        else:
            first = sizes.get(Full())
            sizes[component] = _window_pages(first, page_bytes["window"], memory, shares, need)
    return sizes


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
        slots = int(shares.memory * part) // slot_bytes
    # One to compute with, one aside, one that the tree keeps.
    if slots < 3:
        raise BadArgument("kv_bytes", shares.memory, f"enough for 3 recurrent states of {slot_bytes} bytes")
    return slots


def _full_pages(
    components: tuple[Component, ...],
    page_bytes: Mapping[str, int],
    memory: int,
    shares: Shares,
    slots: int,
    need: Need,
) -> int:
    if shares.pages is not None:
        return shares.pages
    slides = any(isinstance(component, Window) for component in components)
    cost = page_bytes["full"] + (shares.window_ratio * page_bytes["window"] if slides else 0)
    if cost == 0:
        return min(slots * need.context_pages, max(_MOST_MARKS, need.running * need.context_pages))
    pages = int(memory / cost)
    if slides:  # the window's least comes first
        least = need.window_pages
        pages = min(pages, (memory - least * page_bytes["window"]) // page_bytes["full"])
    if pages < 1:
        raise BadArgument("kv_bytes", shares.memory, f"more: a page of each kind takes {math.ceil(cost)} bytes")
    return pages


def _window_pages(full: int | None, page_bytes: int, memory: int, shares: Shares, need: Need) -> int:
    if full is not None:
        return max(int(full * shares.window_ratio), need.window_pages)
    pages = shares.pages if shares.pages is not None else memory // page_bytes
    if pages < need.window_pages:
        raise BadArgument("kv_bytes", shares.memory, f"enough for {need.window_pages} window pages of {page_bytes} bytes")
    return pages
