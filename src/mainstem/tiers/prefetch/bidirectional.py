"""Reads from the back, for a request that computes from the front, until both meet.

    prompt   [ on the host | computed ... front |  not read yet  | run |  lost page  | run ]
               up to the attach point      computing -->    <-- reading

Pages that arrive before those in front of them belong to the prefetch, as runs: the host has no page without the page
before it. When the front meets a run, what was computed is backed up. Then the run is added to the tree, and the
request goes on after it. A page that did not arrive is computed; the run after it is met next.

Where the host has no room for all, one stretch after another is read, each from its back.
"""

from __future__ import annotations

from collections.abc import Iterable

from mainstem.cache.tree import Ids
from mainstem.tiers.host.backup import Backups
from mainstem.tiers.host.tier import HostPages
from mainstem.tiers.prefetch.attach_point import AttachPoint


class BidirectionalLoad:
    """The runs of one prefetch, and where they are met.

    Args:
        point: where the prefetch's pages join the tree.
        backups: copies what was computed.

    Attributes:
        led: whether a request computes now.
        front: pages of the prompt that are computed, or need not be.
        positions: how many the leader computes before it looks again.
        meanwhile: pages that it computed, as long as they are not counted as late.
        broken: whether the host lost, or has no room for, what is before the runs: they are of no use.
    """

    def __init__(self, point: AttachPoint, host: HostPages, backups: Backups) -> None:
        self._point, self._host, self._backups = point, host, backups
        self.front = point.pages
        self.positions = self.meanwhile = 0
        self.led = self.broken = False
        self._runs: list[tuple[int, Ids]] = []  # first page, and the host pages; ascending
        self._top = 0  # the end of the stretch that is being read

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def private_pages(self) -> int:
        """Returns the number of host pages of its runs."""
        return sum(len(page_ids) for _, page_ids in self._runs)

    def add(self, begin: int, page_ids: Ids) -> None:
        """Takes over pages that have arrived."""
        self._runs.append((begin, page_ids))
        self._runs.sort(key=lambda run: run[0])

    def ahead(self, page: int) -> int | None:
        """Returns the pages from a page that is computed next to the first that has arrived; None: none has."""
        ends = ((begin, begin + len(page_ids)) for begin, page_ids in self._runs)
        return next((max(0, begin - page) for begin, end in ends if page < end), None)

    def next_read(self, left: Iterable[tuple[int, int, int]], floor: int, depth: int, room: int) -> tuple[int, int]:
        """Returns the pages to read next, from the end: those are the last of a stretch, after `floor`; or none.

        Args:
            left: runs of pages that are left to read: row, begin, end; ascending.
            floor: pages that are computed, or will be soon.
            depth: pages up to which the prompt is read.
            room: pages that the host has room for.
        """
        runs = [(max(begin, floor), end) for _, begin, end in left if floor < end]
        below = [(begin, min(end, self._top)) for begin, end in runs if begin < self._top]
        if not below and runs and room > self.private_pages:
            self._top = min(depth, max(floor, self._top) + room)
            below = [(begin, min(end, self._top)) for begin, end in runs if begin < self._top]
        return below[-1] if below else (0, 0)

    def join(self) -> int:
        """Adds the runs that were met to the tree, once the host has what is before them. Returns the pages added."""
        ours = 0
        while self._runs and not self.broken and self._reaches():
            begin, page_ids = self._runs.pop(0)
            known = min(max(self._point.pages - begin, 0), len(page_ids))
            self._host.pools[0].release(page_ids[:known])
            kept, added = self._point.place(0, begin + known, page_ids[known:]) if known < len(page_ids) else (0, 0)
            ours += added
            self.broken = kept < len(page_ids) - known
        return ours

    def release(self) -> int:
        """Frees the runs; returns the number of their pages."""
        pages = self.private_pages
        for _, page_ids in self._runs:
            self._host.pools[0].release(page_ids)
        self._runs = []
        return pages

    def _reaches(self) -> bool:
        """Whether the host has everything before the first run. Begins to back up what was computed."""
        point = self._point
        if self.front > point.pages and not point.in_flight:
            self.broken = not (point.follow(self.front) and self._backups.begin(point.node))
        return self._runs[0][0] <= point.pages and not (self.broken or point.in_flight)
