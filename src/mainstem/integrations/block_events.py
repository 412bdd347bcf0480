"""Holds back what an engine announces of its saves until every worker has confirmed them.

    hold      a save is planned: what to announce of it
    confirm   a worker has ended saves, well or not
    take      what may be announced now

Routers send requests to the engine that announced their prefix, so what is announced must be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

E = TypeVar("E")


@dataclass(slots=True)
class _HeldEvents(Generic[E]):
    events: Sequence[E]
    lacking: int  # workers that have not confirmed it


class Announcements(Generic[E]):
    """Events of saves. One thread.

    Args:
        workers: how many carry out each save.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._held: dict[int, _HeldEvents[E]] = {}
        self._ready: list[E] = []

    def hold(self, save: int, events: Sequence[E]) -> None:
        """Adds the events of a save, by its number."""
        self._held[save] = _HeldEvents(events, self._workers)

    def confirm(self, saved: Iterable[tuple[int, bool]]) -> None:
        """Takes in the reports of workers: the number of a save, and whether storage has all its blocks.

        The events of a save that failed are dropped. Saves that are not held any more are ignored.
        """
        for save, whole in saved:
            held = self._held.get(save)
            if held is None:
                continue
            held.lacking -= 1
            if not whole or not held.lacking:
                del self._held[save]
                self._ready += held.events if whole else ()

    def take(self) -> list[E]:
        """Returns the events that may be announced, in the order of their confirmation; each once."""
        ready, self._ready = self._ready, []
        return ready

    def clear(self) -> None:
        """Drops all events: what they are about cannot be found any more."""
        self._held.clear()
        self._ready.clear()
