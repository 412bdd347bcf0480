"""The phases of one request, for traces: when it waited, was looked up, was loaded, computed and stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

Stage: TypeAlias = Literal["queue", "match", "prefetch", "load", "prefill", "decode", "store"]
"""The stages of a request.

queue: it waits to be admitted. match: the longest prefix is found, and pages for the rest, evictions included.
prefetch: storage is read for it. load: pages of the host are copied to the device. prefill: its prompt is computed.
decode: tokens are generated. store: what it computed goes into the tree. Copies to host and storage come later, for
several requests at once: they are no part of one.
"""

_MOST = 64  # phases of one request; one that is preempted again and again has the first ones


class Phase(NamedTuple):
    """A part of a request's time, in seconds after its arrival."""

    stage: Stage
    begin_s: float
    end_s: float


class Timeline:
    """Notes the phases of one request.

    Args:
        clock: monotonic, in seconds.
        arrived_s: when the request arrived, by this clock; it queues from then on.
    """

    def __init__(self, clock: Callable[[], float], arrived_s: float) -> None:
        self._clock, self._arrived_s = clock, arrived_s
        self._begun: dict[Stage, float] = {"queue": 0.0}
        self._phases: list[Phase] = []
        self._match_s = 0.0

    def begin(self, stage: Stage) -> None:
        """Begins a phase."""
        self._begun[stage] = self._now()

    def match(self) -> None:
        """Begins to match. Unless `admitted` follows, there were no pages, and it never was."""
        self._match_s = self._now()

    def end(self, *stages: Stage) -> None:
        """Ends the phases of these stages that have begun."""
        now_s = self._now()
        for stage in stages:
            self._end(stage, now_s)

    def admitted(self, loads: bool) -> None:
        """Ends the match and, where that began, the queue; begins the prefill."""
        now_s = self._now()
        self._end("queue", self._match_s)
        self._begun["match"] = self._match_s
        self._end("match", now_s)
        self._begun["prefill"] = now_s
        if loads:
            self._begun["load"] = now_s

    def generates(self) -> None:
        """Ends the prefill, if it goes on, and begins to decode."""
        if "prefill" in self._begun:
            now_s = self._now()
            self._end("prefill", now_s)
            self._begun["decode"] = now_s

    def phases(self) -> tuple[Phase, ...]:
        """Returns all phases by their begin; those that go on end now."""
        now_s = self._now()
        going = [Phase(stage, begin_s, max(now_s, begin_s)) for stage, begin_s in self._begun.items()]
        return tuple(sorted([*self._phases, *going], key=lambda phase: phase.begin_s))

    def _now(self) -> float:
        return self._clock() - self._arrived_s

    def _end(self, stage: Stage, now_s: float) -> None:
        begin_s = self._begun.pop(stage, None)
        if begin_s is not None and len(self._phases) < _MOST:
            self._phases.append(Phase(stage, begin_s, max(now_s, begin_s)))
