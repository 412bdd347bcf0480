"""The size of each pool: divides an amount of memory among full pages, window pages and state slots.

    memory = full pages x their bytes + window pages x theirs + slots x theirs
    window pages = window_ratio x full pages;  slots x bytes = state_share x memory

Of several windows or chunks, the longest has this ratio, and the others fewer pages as they are shorter: then all of
them hold the ends of equally many prefixes.

The best ratio depends on the use: short chats need a window page for each full page, long prompts almost none.
`best_window_ratio` finds it from a trace.

This module only computes numbers. It allocates no memory for pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.components import Attended, Component, Full, Local, State, by_name
from mainstem.cache.keys import MAX_TOKEN, TokenLike
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.errors import BadArgument, OutOfPages, check_integer
from mainstem.settings.engine import Shares
from mainstem.settings.window_trace import Use

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


# ---- from a trace of use

RATIOS = (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one ratio: the pages of each component, and the fraction of the trace's tokens that were cached."""

    window_ratio: float
    pages: Mapping[Component, int]
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Trials:
    """The results of all ratios in the given order, and the best: of equals the lowest, with the most full pages."""

    best: Trial
    all: tuple[Trial, ...]


def best_window_ratio(
    trace: Iterable[TokenLike | Use],
    *,
    components: Sequence[Attended],
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
        components: Full() and the windows and chunks of the model.
        page_bytes: bytes of a page, by the name of the component.
        memory: bytes for all pools.
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
    for name, row in by_name(components).items():
        least = 0 if isinstance(row, Full) else 1  # a model whose layers all see chunks only marks what is known
        check_integer(f"page_bytes of {name}", page_bytes.get(name), least, 2**63 - 1)
    if not ratios:
        raise BadArgument("ratios", ratios, "at least one number above 0")
    sequences = _sequences(trace)
    candidates = [Shares(memory, window_ratio=ratio) for ratio in ratios]
    sizes = [share_out(tuple(components), page_bytes, 0, shares, need) for shares in candidates]
    rates = [_replay(PrefixCache(counts, page_size), sequences, token_budget) for counts in sizes]
    trials = tuple(
        Trial(shares.window_ratio, counts, rate) for shares, counts, rate in zip(candidates, sizes, rates, strict=True)
    )
    return Trials(max(trials, key=lambda trial: (trial.hit_rate, -trial.window_ratio)), trials)


def _sequences(trace: Iterable[TokenLike | Use]) -> list[TokenLike]:
    """Returns the trace as tokens; tokens that it does not give are all different."""
    sequences: list[TokenLike] = []
    fresh = 0
    for at, use in enumerate(trace):
        if isinstance(use, Use):
            sequences.append(_tokens_of(use, sequences, fresh))
            fresh += use.length
        elif len(use) == 0:
            raise BadArgument(f"trace[{at}]", use, "at least one token")
        else:
            sequences.append(use)
    if not sequences:
        raise BadArgument("trace", trace, "at least one sequence")
    return sequences


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
    hit = total = 0
    for tokens in sequences:
        total += len(tokens)
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
    return hit / total
