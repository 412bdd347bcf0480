"""How far a prompt can go on from what the host and storage have, and what must be read for that.

    full     x x x x x x x x x .      every page from the root on
    window   . . . x x x x x x x      the last `tokens` before the end
    chunk    . . . . x x x x . .      from the last boundary before the end on
    state    . . . x . . . x . .      one, at the end
                           ^ the deepest end that all of them allow

A prefix of d pages can be used if each component has what it needs for that, be it on the host (`held`) or in storage
(`stored`). Back ends know nothing of this: they say which keys are there. The rule is the tree's own; see
docs/design.md, "Where a match may end".

Where each key that storage is asked for costs a request, `search` finds the deepest end with few of them: how far full
attention reaches, then what the deepest end needs beside it, then the next one.

This module knows components and arrays. It knows nothing of names, stores or trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.components import Component, Full, State

Marks = NDArray[np.bool_]

Ask: TypeAlias = Callable[[int, NDArray[np.int64]], Sequence[bool]]
"""Returns for pages of a row which of them storage has."""

_AT_ONCE = 16
"""Pages that a search asks for first, together."""


class Plan:
    """The pages of one prompt that the host and storage have.

    Args:
        components: the rows of the tree.
        contents: for each whether its pages have content; what has none need not be read.
        have: pages that need not be read, because the prompt can go on from there already.
        pages: whole pages of the prompt.

    Attributes:
        held: by row, the pages that the host has or is being given.
        stored: by row, the pages that storage is expected to have.
    """

    def __init__(
        self, components: Sequence[Component], contents: Sequence[bool], page_size: int, have: int, pages: int
    ) -> None:
        self._components, self._contents, self._page_size = tuple(components), tuple(contents), page_size
        self.have, self.pages = have, pages
        self.held: list[Marks] = [np.zeros(pages, np.bool_) for _ in components]
        self.stored: list[Marks] = [np.full(pages, not content) for content in contents]

    @property
    def any_end(self) -> bool:
        """Whether a prefix of what can be used can be used, wherever it ends."""
        return all(isinstance(component, Full) for component in self._components)

    def asked(self, row: int) -> NDArray[np.int64]:
        """Returns the pages of a component that storage is asked for: those that some end needs and the host lacks."""
        if not self._contents[row]:
            return np.empty(0, np.int64)
        first = self.have
        if not isinstance(self._components[row], State):
            first = min(first, int(self._needed_from(row, np.array([self.have + 1]))[0]))
        return np.flatnonzero(~self.held[row][first:]) + first

    def search(self, ask: Ask, every_end: bool) -> list[Marks]:
        """Asks storage for few pages, of those of `asked`. Changes nothing, so another thread may call it.

        A page of full attention is written after those before it, so one that is there stands for them. A window page
        that was not asked for may be there; a state that was not is not.

        Args:
            every_end: ask for what all ends need that full attention reaches, not the deepest alone.

        Returns:
            By row, the pages that storage is expected to have.
        """
        rows = [row for row, content in enumerate(self._contents) if content]
        full = [row for row in rows if isinstance(self._components[row], Full)]
        local = sorted(set(rows) - {*full}, key=lambda row: not isinstance(self._components[row], State))
        hoped = Plan(self._components, self._contents, self._page_size, self.have, self.pages)
        hoped.held = self.held
        most = self.pages
        for row in full:
            most = min(most, self._reach(row, ask))
            hoped.stored[row][:most] = True
        unknown = {row: (pages := self.asked(row))[pages < most] for row in local}
        for row, pages in unknown.items():
            hoped.stored[row][pages] = ask(row, pages) if every_end and len(pages) else True
        if not every_end:
            hoped.settle(ask, most, unknown)
        return hoped.stored

    def settle(self, ask: Ask, most: int, unknown: dict[int, NDArray[np.int64]]) -> None:
        """Asks for what the deepest end needs and is unknown, until all that it needs is stored; more each time.

        Args:
            most: the deepest end to try.
            unknown: pages by row that count as stored and may not be.
        """
        at_once = dict.fromkeys(unknown, _AT_ONCE)
        while (open_row := self._undecided(depth := self.deepest(most), unknown)) is not None:
            row, pages = open_row, unknown[open_row]
            needed, end = np.searchsorted(pages, [self._first(row, depth), depth]).tolist()
            begin = max(0, min(needed, end - at_once[row]))
            self.stored[row][pages[begin:end]] = ask(row, pages[begin:end])
            unknown[row] = np.delete(pages, slice(begin, end))
            at_once[row] *= 2
        for row, pages in unknown.items():
            self.stored[row][pages] = not isinstance(self._components[row], State)

    def _undecided(self, depth: int, unknown: Mapping[int, NDArray[np.int64]]) -> int | None:
        """Returns a row of which an end needs a page that is unknown; None: there is none, or no end."""
        if depth == self.have:
            return None
        for row, pages in unknown.items():
            if np.any((pages >= self._first(row, depth)) & (pages < depth)):
                return row
        return None

    def _reach(self, row: int, ask: Ask) -> int:
        """Returns how many pages of full attention are there from the first on, with no gap at those asked."""
        pages = self.asked(row)
        low, high = 0, len(pages)  # those before `low` are there, and the one at `high` is not
        while low < high:
            tried = np.unique(np.linspace(low, high - 1, min(_AT_ONCE, high - low)).astype(np.int64))
            there = np.asarray(ask(row, pages[tried]), np.bool_)
            if there.all():
                low = high
            else:
                at = int(np.argmin(there))
                low, high = int(tried[at - 1]) + 1 if at else low, int(tried[at])
        return int(pages[low]) if low < len(pages) else self.pages

    def deepest(self, most: int) -> int:
        """Returns the deepest end, in pages and of at most `most`, that can be used; `have` if there is none."""
        return self._deepest(range(len(self._components)), most)

    def in_the_way(self, depth: int) -> tuple[int, int]:
        """Returns how many pages further the first component alone would reach, and the row that does not.

        None further, if its pages have no content: then it would reach the end of every prompt, stored or not.
        """
        if len(self._components) == 1 or not self._contents[0]:
            return 0, 0
        reach = self._deepest([0], self.pages)
        if reach <= depth:
            return 0, 0
        ends = [self._deepest([row], reach) for row in range(1, len(self._components))]
        return reach - depth, 1 + int(np.argmin(ends))

    def missing(self, depth: int) -> Iterator[tuple[int, int, int]]:
        """Yields the runs of pages to read for an end: row, begin, end. Rows in order, each from its front."""
        for row in range(len(self._components)):
            first = self._first(row, depth)
            pages = np.flatnonzero(~self.held[row][first:depth]) + first
            for run in np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1) if len(pages) else ():
                yield row, int(run[0]), int(run[-1]) + 1

    def _deepest(self, rows: Sequence[int], most: int) -> int:
        ends = np.arange(self.have + 1, most + 1)
        allowed = np.ones(len(ends), np.bool_)
        for row in rows:
            there = self.held[row] | self.stored[row]
            if isinstance(self._components[row], State):
                allowed &= there[self.have : most]
                continue
            last_gap = np.maximum.accumulate(np.where(there[:most], -1, np.arange(most)))
            allowed &= last_gap[self.have :] < self._needed_from(row, ends)
        usable = np.flatnonzero(allowed)
        return int(ends[usable[-1]]) if len(usable) else self.have

    def _first(self, row: int, depth: int) -> int:
        if isinstance(self._components[row], State):
            return depth - 1
        return int(self._needed_from(row, np.array([depth]))[0])

    def _needed_from(self, row: int, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        component = self._components[row]
        assert not isinstance(component, State)
        return component.needed_from(ends * self._page_size) // self._page_size
