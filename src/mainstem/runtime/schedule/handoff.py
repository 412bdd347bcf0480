"""Prefill handoff: the end of an answer is held back until peers can read the pages of its prompt.

An engine that computes prompts for others (`--role prefill`) ends an answer when the decoding engine can read its
pages. Before that, each page is copied to the host, then sealed there. Either begins only after earlier transfers have
ended. So the handoff waits until all that was under way has ended a few times, and for nothing that begins later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.runtime.request import Delta
from mainstem.runtime.schedule.outputs import Event
from mainstem.tiers.controller import Tiers
from mainstem.tiers.pending import Pending

_LIMIT_S = 2.0  # how long one is held back at most
_ROUNDS = 3  # what was touched is backed up, copied, written


@dataclass(eq=False)
class _HeldEnd:
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


class PrefillHandoff:
    """Holds back the ends of answers.

    Args:
        tiers: which move the pages; None: nothing is held back.
    """

    def __init__(self, tiers: Tiers | None) -> None:
        self._tiers = tiers
        self._held: list[_HeldEnd] = []

    def pass_on(self, events: Sequence[Event], now_s: float, *, everything: bool = False) -> list[Event]:
        """Returns what may be delivered now, of these events and of those held back.

        Args:
            events: of a step.
            now_s: the time.
            everything: hold nothing back any more.
        """
        if self._tiers is None:
            return list(events)
        passed: list[Event] = []
        pending = frozenset(self._tiers.pending)
        for event in events:
            if isinstance(event[1], Delta) and event[1].finish_reason is not None:
                self._held.append(_HeldEnd(event, now_s + _LIMIT_S, pending))
            else:
                passed.append(event)
        for held in self._held:
            held.before &= pending
            if not held.before:
                held.rounds, held.before = held.rounds + 1, pending
        idle = everything or not self._tiers.busy
        done = [held for held in self._held if idle or held.rounds > _ROUNDS or now_s >= held.until_s]
        self._held = [held for held in self._held if held not in done]
        return passed + [held.event for held in done]
