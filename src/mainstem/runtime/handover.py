"""Handing prompts over: the end of an answer is held back until peers can read the pages of its prompt.

An engine that computes prompts for others (`--role prefill`) says that one is done when the one who generates may ask
for it. Until then a page is copied to the host, and sealed there. Each of the two begins when what was before it has
ended: so all that is under way has to end a few times, but nothing that begins later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mainstem.runtime.request import Delta, Progress
from mainstem.tiers.controller import Tiers
from mainstem.tiers.pending import Pending

_ROUNDS = 3  # what was touched is backed up, copied, written

Event = tuple[str, Delta | Progress]


@dataclass(eq=False)
class _Held:
    """The end of an answer.

    Args:
        event: to be delivered.
        until_s: when it is delivered at the latest.
        before: what has to end first.
        rounds: how often all of that has ended.
    """

    event: Event
    until_s: float
    before: frozenset[Pending]
    rounds: int = 0


class Handover:
    """Holds back the ends of answers.

    Args:
        tiers: which move the pages.
        limit_s: how long one is held back at most.
    """

    def __init__(self, tiers: Tiers, limit_s: float) -> None:
        self._tiers, self._limit_s = tiers, limit_s
        self._held: list[_Held] = []

    def pass_on(self, events: Sequence[Event], now_s: float, *, everything: bool = False) -> list[Event]:
        """Returns what may be delivered now, of these events and of those held back.

        Args:
            events: of a step.
            now_s: the time.
            everything: hold nothing back any more.
        """
        passed: list[Event] = []
        for event in events:
            if isinstance(event[1], Delta) and event[1].finish_reason is not None:
                self._held.append(_Held(event, now_s + self._limit_s, frozenset(self._tiers.pending)))
            else:
                passed.append(event)
        for held in self._held:
            self._advance(held)
        done = [held for held in self._held if everything or self._over(held, now_s)]
        self._held = [held for held in self._held if held not in done]
        return passed + [held.event for held in done]

    def _advance(self, held: _Held) -> None:
        left = _left(held.before, self._tiers.pending)
        if left:
            held.before = left
        else:
            held.rounds, held.before = held.rounds + 1, frozenset(self._tiers.pending)

    def _over(self, held: _Held, now_s: float) -> bool:
        return not self._tiers.busy or held.rounds > _ROUNDS or now_s >= held.until_s


def _left(before: frozenset[Pending], pending: Iterable[Pending]) -> frozenset[Pending]:
    return before.intersection(pending)
