"""The size of each pool: divides an amount of memory among full pages, window pages and state slots.

    memory = full pages x their bytes + window pages x theirs + slots x theirs
    window pages = window_ratio x full pages;  slots x bytes = state_share x memory

The best ratio depends on the use: short chats need a window page for each full page, long prompts almost none.
`best_window_ratio` finds it from a trace.

This module only computes numbers. It allocates no memory for pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mainstem.cache import PrefixCache
from mainstem.components import Component, Full, State, Window
from mainstem.errors import BadArgument, OutOfPages, check_integer
from mainstem.keys import MAX_TOKEN, TokenLike
from mainstem.settings.engine import Shares
from mainstem.settings.window_trace import Use

# Full pages of a model without attention take memory only in the tree, so there are as many as its states can need.
_MAX_MARKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Need:
    """The least sizes with which the oldest request can always go on.

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
    """Returns the pages or slots of each component.

    Args:
        components: of the model, in order.
        page_bytes: bytes of a page, by component of pages.
        slot_bytes: bytes of a state; 0 if the model has none.

    Raises:
        BadArgument: the memory does not hold a page of each, or the window of one request.
    """
    slots = _slots(components, page_bytes, slot_bytes, shares, need)
    memory = shares.kv_bytes - (slots * slot_bytes if shares.pages is None else 0)
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
        slots = int(shares.kv_bytes * part) // slot_bytes
    # One to compute with, one checkpoint of the lease, one that the tree keeps.
    if slots < 3 and shares.state_slots is not None:
        raise BadArgument("state_slots", slots, "at least 3")
    if slots < 3 or (shares.pages is None and slots * slot_bytes > shares.kv_bytes):
        raise BadArgument(
            "kv_bytes", shares.kv_bytes, f"enough for {max(slots, 3)} recurrent states of {slot_bytes} bytes"
        )
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
        return min(slots * need.context_pages, max(_MAX_MARKS, need.running * need.context_pages))
    least = need.window_pages * page_bytes["window"] if slides else 0  # has precedence
    pages = min(int(memory / cost), (memory - least) // page_bytes["full"])
    if pages < 1:
        one, states = max(math.ceil(cost), page_bytes["full"] + least), shares.kv_bytes - memory
        raise BadArgument("kv_bytes", shares.kv_bytes, f"{one} or more" + f" plus {states} for states" * (states > 0))
    return pages


def _window_pages(full: int | None, page_bytes: int, memory: int, shares: Shares, need: Need) -> int:
    if full is not None:
        return max(int(full * shares.window_ratio), need.window_pages)
    pages = shares.pages if shares.pages is not None else memory // page_bytes
    if pages < need.window_pages and shares.pages is not None:
        raise BadArgument("pages", pages, f"at least {need.window_pages}: the window and a chunk of one request")
    if pages < need.window_pages:
        least = f"enough for {need.window_pages} window pages of {page_bytes} bytes"
        raise BadArgument("kv_bytes", shares.kv_bytes, least)
    return pages


# ---- from a trace of use

RATIOS = (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one ratio: the pages, and the fraction of the trace's tokens that were cached."""

    window_ratio: float
    full_pages: int
    window_pages: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Trials:
    """The results of all ratios in the given order, and the best: of equals the lowest, with the most full pages."""

    best: Trial
    all: tuple[Trial, ...]


def best_window_ratio(
    trace: Iterable[TokenLike | Use],
    *,
    window: int,
    page_bytes: Mapping[str, int],
    memory: int,
    page_size: int,
    need: Need,
    token_budget: int = 512,
    ratios: Sequence[float] = RATIOS,
) -> Trials:
    """Replays a trace through a cache without tensors, once for each ratio. The result is deterministic.

    One sequence runs at a time: a trace without times does not say which run at once and so compete for pages. A
    sequence that does not fit hits nothing.

    Args:
        trace: sequences in order, prompt and answer: their tokens, or what they share.
        window: positions that the sliding layers see.
        page_bytes: bytes of a "full" and a "window" page.
        memory: bytes for both pools.
        page_size: positions per page.
        need: as for `share_out`.
        token_budget: positions that are computed at once.
        ratios: to try; each above 0.

    Raises:
        BadArgument: an argument is out of range, the trace is empty, or the memory is too small for a ratio.
        BadTokens: the trace holds an invalid token.
    """
    check_integer("token_budget", token_budget, 1, MAX_TOKEN)
    check_integer("memory", memory, 1, 2**63 - 1)
    for name in (Full.name, Window.name):
        check_integer(f"page_bytes of {name}", page_bytes.get(name), 1, 2**63 - 1)
    if not ratios:
        raise BadArgument("ratios", ratios, "at least one number above 0")
    sequences = _sequences(trace)
    full, slides = Full(), Window(window)
    candidates = [Shares(memory, window_ratio=ratio) for ratio in ratios]
    sizes = [share_out((full, slides), page_bytes, 0, shares, need) for shares in candidates]
    rates = [_replay(PrefixCache(counts, page_size), sequences, token_budget) for counts in sizes]
    trials = tuple(
        Trial(shares.window_ratio, counts[full], counts[slides], rate)
        for shares, counts, rate in zip(candidates, sizes, rates, strict=True)
    )
    return Trials(max(trials, key=lambda trial: (trial.hit_rate, -trial.window_ratio)), trials)


def _sequences(trace: Iterable[TokenLike | Use]) -> list[TokenLike]:
    """Returns the trace as tokens; tokens that it does not give are all different."""
    found: list[TokenLike] = []
    fresh = 0
    for at, use in enumerate(trace):
        if isinstance(use, Use):
            found.append(_tokens_of(use, found, fresh))
            fresh += use.length
        elif len(use) == 0:
            raise BadArgument(f"trace[{at}]", use, "at least one token")
        else:
            found.append(use)
    if not found:
        raise BadArgument("trace", trace, "at least one sequence")
    return found


def _tokens_of(use: Use, earlier: list[TokenLike], fresh: int) -> NDArray[np.int32]:
    name = f"trace[{len(earlier)}]"
    check_integer(f"{name}.length", use.length, 1, MAX_TOKEN)
    check_integer(f"{name}.like", use.like, 0, max(len(earlier) - 1, 0))
    known = np.asarray(earlier[use.like], np.int32) if earlier else np.empty(0, np.int32)
    check_integer(f"{name}.shared", use.shared, 0, min(use.length, len(known)))
    new = (fresh + np.arange(use.length - use.shared)) % MAX_TOKEN
    return np.concatenate([known[: use.shared], new.astype(np.int32)])


def _replay(cache: PrefixCache, sequences: list[TokenLike], token_budget: int) -> float:
    """Returns the fraction of tokens that were cached."""
    hit = asked = 0
    for tokens in sequences:
        asked += len(tokens)
        with cache.lease(tokens) as lease:
            try:
                lease.reserve(len(tokens) - lease.reserved)
                for begin in range(lease.hit, len(tokens), token_budget):
                    end = min(begin + token_budget, len(tokens))
                    lease.slide(begin, end)
                    lease.publish(end)
            except OutOfPages:
                continue
            hit += lease.hit
    return hit / asked
