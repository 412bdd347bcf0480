"""How large each pool is: one amount of memory, shared out among full pages, window pages and state slots.

    memory = full pages x their bytes + window pages x theirs + slots x theirs
    window pages = window_ratio x full pages;  slots x bytes = state_share x memory

Which ratio serves best depends on the use: short chats want a window page for each full one, long prompts next to none.
`best_window_ratio` finds it in a trace.

Knows bytes and ids; allocates no memory for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mainstem.cache import PrefixCache
from mainstem.components import Component, Full, State, Window
from mainstem.errors import BadArgument, OutOfPages, check_integer
from mainstem.keys import MAX_TOKEN, TokenLike

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
    if slots < 3 and shares.state_slots is not None:
        raise BadArgument("state_slots", slots, "at least 3")
    if slots < 3 or (shares.pages is None and slots * slot_bytes > shares.memory):
        raise BadArgument(
            "kv_bytes", shares.memory, f"enough for {max(slots, 3)} recurrent states of {slot_bytes} bytes"
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
        return min(slots * need.context_pages, max(_MOST_MARKS, need.running * need.context_pages))
    least = need.window_pages * page_bytes["window"] if slides else 0  # comes first
    pages = min(int(memory / cost), (memory - least) // page_bytes["full"])
    if pages < 1:
        one, states = max(math.ceil(cost), page_bytes["full"] + least), shares.memory - memory
        raise BadArgument("kv_bytes", shares.memory, f"{one} or more" + f" beside {states} for states" * (states > 0))
    return pages


def _window_pages(full: int | None, page_bytes: int, memory: int, shares: Shares, need: Need) -> int:
    if full is not None:
        return max(int(full * shares.window_ratio), need.window_pages)
    pages = shares.pages if shares.pages is not None else memory // page_bytes
    if pages < need.window_pages and shares.pages is not None:
        raise BadArgument("pages", pages, f"at least {need.window_pages}: the window and a chunk of one request")
    if pages < need.window_pages:
        least = f"enough for {need.window_pages} window pages of {page_bytes} bytes"
        raise BadArgument("kv_bytes", shares.memory, least)
    return pages


# ---- from a trace of use

RATIOS = (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Use:
    """A sequence of a trace that has no tokens.

    Args:
        length: positions, of prompt and answer.
        like: index of an earlier sequence of the trace.
        shared: positions from the beginning that are the same in both.
    """

    length: int
    like: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """What one ratio gave: how many pages, and the cached tokens a token of the trace."""

    window_ratio: float
    full_pages: int
    window_pages: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Trials:
    """What each ratio gave, in the order asked for, and the best: of equals the lowest, which has most full pages."""

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
    """Replay a trace through a cache without tensors, once for each ratio: the same trace gives the same answer.

    One sequence at a time: what runs at once shares the pages, which a trace without times cannot say. A sequence that
    does not fit hits nothing.

    Args:
        trace: sequences in the order of their use, prompt and answer: their tokens, or what they share.
        window: positions that the sliding layers see.
        page_bytes: bytes of a "full" and a "window" page.
        memory: bytes for both pools.
        page_size: positions a page.
        need: as for `share_out`.
        token_budget: positions that are computed at once.
        ratios: to try; each above 0.

    Raises:
        BadArgument: an argument is out of range, the trace is empty, or the memory holds no pages for a ratio.
        BadTokens: of the trace.
    """
    check_integer("token_budget", token_budget, 1, MAX_TOKEN)
    check_integer("memory", memory, 1, 2**63 - 1)
    for name in (Full.name, Window.name):
        check_integer(f"page_bytes of {name}", page_bytes.get(name), 1, 2**63 - 1)
    if not ratios:
        raise BadArgument("ratios", ratios, "at least one number above 0")
    sequences = _sequences(trace)
    full, slides = Full(), Window(window)
    asked = [Shares(memory, window_ratio=ratio) for ratio in ratios]
    sizes = [share_out((full, slides), page_bytes, 0, shares, need) for shares in asked]
    rates = [_replay(PrefixCache(pages, page_size), sequences, token_budget) for pages in sizes]
    trials = tuple(
        Trial(shares.window_ratio, pages[full], pages[slides], rate)
        for shares, pages, rate in zip(asked, sizes, rates, strict=True)
    )
    return Trials(max(trials, key=lambda trial: (trial.hit_rate, -trial.window_ratio)), trials)


def read_trace(path: Path) -> tuple[TokenLike | Use, ...]:
    """A trace of use from a file: a line of JSON for each sequence, as `best_window_ratio` takes them.

        {"tokens": [1, 2, 3, ...]}
        {"length": 1200, "like": 0, "shared": 800}

    Raises:
        BadArgument: the file cannot be read, or a line is neither; names the line.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            return tuple(_parsed(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument("window_trace", str(path), f"a file of lines of JSON ({error})") from error


def _parsed(line: str, place: str) -> TokenLike | Use:
    allowed = 'either {"tokens": [...]} or {"length": ..., "like": ..., "shared": ...}'
    try:
        found = json.loads(line)
    except ValueError as error:
        raise BadArgument(place, line[:80], f"{allowed}: {error}") from error
    if isinstance(found, dict) and isinstance(found.get("tokens"), list):
        return found["tokens"]
    if not isinstance(found, dict) or "length" not in found or not found.keys() <= {"length", "like", "shared"}:
        raise BadArgument(place, line[:80], allowed)
    return Use(**found)


def _sequences(trace: Iterable[TokenLike | Use]) -> list[TokenLike]:
    """The trace as tokens: of those that it does not know, no two are the same."""
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
    """Cached tokens a token."""
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
