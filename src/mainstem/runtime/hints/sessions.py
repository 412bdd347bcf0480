"""Sessions: predicts when the next turn of a conversation comes, and brings its pages to the device before that.

    turn ends ---------------------- pause ----------------------> next turn
                          begin --storage, host: what the device lacks--> due        until
                                                                                      '-- in vain: evicted first

A client's hint of the next use always orders eviction (`mainstem.cache.expected`). If `share` is above 0, a session
that came back before, or whose client says when it comes, is also brought up: before it is due, by the time that
loading takes. It is due after the median of its latest pauses. A session has a name (`Hints.session`), or it is a
prompt that begins with an earlier one. Nothing is brought up while a request waits or could lack the pages, and unused
sessions that were brought up hold at most `share` of the device's pages. Beyond free pages, they take those that the
policy evicts next. A session that is late by as much as its pause was brought up in vain, and is evicted first.

Times are passed in, the same on all ranks, which all do the same.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.keys import Spliced, TokenLike
from mainstem.cache.namespaces import NamespaceLike
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.runtime.hints.promotion import Promotion
from mainstem.runtime.schedule.sequence import Sequence

Outcome = Literal["used", "late", "vain", "skipped"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""The outcomes of a session that was to be brought up.

    used      it came back, and the device had what was brought up
    late      it came back before that, and the host had more of it than the device
    vain      it did not come back in time, or the device did not have it any more
    skipped   there was no room, or it could not be loaded
"""

_PAUSES = 5  # the latest ones of a session, of which the median counts
_MOST_SESSIONS, _MOST_TOKENS = 1024, 1 << 24  # that are remembered
_MOST_UNDER_WAY = 8
_LOOK_AGAIN_S = 0.02  # before it is due; until then, where there is no room or nothing to do, it is looked again
_LEAST_LATE_S = 1.0  # before it is given up
_LONGEST_S = 43_200.0  # of a pause; what is said to come later is over
_UNKNOWN_S = 1e6  # what a step takes before there is an estimate
_POLL_S = 0.01


@dataclass(eq=False, slots=True)
class _Session:
    """A session, and its plan.

    Args:
        name: of the client, or a number.
        tokens: prompt and answer of its last turn.
        ended_s: when that turn ended; None: another one has begun.
        due_s: when the next one is expected; `until_s`: when it is not expected any more.
        pauses: seconds between its turns, the newest last.
        turn: grows with each, so that what was planned for earlier ones is not done.
        planned: whether it is to be brought up, and nothing has come of that yet.
        said: whether the client has said when it comes.
        before: positions that the device had before it was brought up.
        pages: of the device for what is brought up, or was and is not used yet.
        promotion: while it is under way.
    """

    name: object
    namespace: NamespaceLike
    tokens: TokenLike = ()
    prompt: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    ended_s: float | None = None
    due_s: float = 0.0
    until_s: float = 0.0
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=_PAUSES))
    turn: int = 0
    planned: bool = False
    said: bool = False
    before: int = 0
    pages: int = 0
    promotion: Promotion | None = None

    @property
    def length(self) -> int:
        return len(self.tokens.ids) if isinstance(self.tokens, Spliced) else len(self.tokens)


class Sessions:
    """The sessions of a cache. One thread, that of the scheduler.

    Args:
        share: part of the device's pages for what is brought up and not used yet; 0: nothing is.

    Attributes:
        counts: sessions by what came of them.
    """

    def __init__(self, cache: PrefixCache, share: float = 0.0) -> None:
        self.counts: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._cache, self._tiers = cache, cache.tiers
        self._most = int(share * cache.pool.total) if cache.tiers is not None and cache.enabled else 0
        self._known: dict[tuple[NamespaceLike, object], _Session] = {}  # the one used longest ago first
        self._moving: list[_Session] = []  # that are being brought up
        self._plans: list[tuple[float, int, int, _Session]] = []  # when to look at one: time, number, its turn
        self._numbers = itertools.count()
        self._tokens = 0

    # ---------------------------------------------------------------- turns

    def arrived(self, sequence: Sequence) -> None:
        """Notes that a request has arrived: perhaps the next turn of a session."""
        session = self._find(sequence) if self._follows(sequence) else None
        if session is None or session.ended_s is None:
            return
        if sequence.arrived_s >= session.ended_s:
            session.pauses.append(sequence.arrived_s - session.ended_s)
        if session.pages and session.promotion is None:
            on_device = self._cache.tree.peek(sequence.tokens.key(), session.namespace)
            self._count(session, "used" if on_device > session.before else "vain")
        elif session.promotion is not None or (session.planned and self._below(session)):
            self._count(session, "late")
        session.ended_s = None
        session.turn += 1

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """Notes the end of a request: when its prompt and answer are used next, as far as that is known."""
        hints, expected = sequence.request.hints, self._cache.expected
        expected.observe(now_s - sequence.arrived_s)  # alike on all ranks
        wait_s = expected.wait(hints.next_use_s, hints.next_use_steps)
        if wait_s is not None:
            expected.expect(sequence.tokens.key(), now_s + wait_s, sequence.request.namespace)
        if self._follows(sequence):
            self._remember(sequence, now_s, wait_s)

    def _follows(self, sequence: Sequence) -> bool:
        """Whether a request may be a turn: its answer stays, and it is not computed ahead."""
        request = sequence.request
        once = request.hints.no_store or request.hints.one_shot or not request.params.max_tokens
        return self._most > 0 and not once

    def _find(self, sequence: Sequence) -> _Session | None:
        """Returns the session of a request: that with its name, or with the longest prompt that its own begins with."""
        namespace, name = sequence.request.namespace, sequence.request.hints.session
        if name is not None:
            return self._known.get((namespace, name))
        symbols, best = sequence.tokens.symbols, None
        for session in self._known.values():
            length = len(session.prompt)
            if isinstance(session.name, str) or session.namespace != namespace or length > len(symbols):
                continue
            longer = best is None or length > len(best.prompt)
            if longer and symbols[length - 1] == session.prompt[-1] and (symbols[:length] == session.prompt).all():
                best = session
        return best

    def _remember(self, sequence: Sequence, now_s: float, wait_s: float | None) -> None:
        request = sequence.request
        session = self._find(sequence)
        if session is None:
            name = request.hints.session if request.hints.session is not None else next(self._numbers)
            session = _Session(name, request.namespace)
        else:
            self._forget(session)
        tokens, key = sequence.tokens.known.copy(), sequence.tokens.key()
        session.tokens = Spliced(tokens, key.images) if isinstance(key, Spliced) else tokens
        session.prompt = sequence.tokens.symbols[: len(request.tokens)].copy()
        session.turn += 1
        self._known[session.namespace, session.name] = session
        self._tokens += len(tokens)
        while len(self._known) > _MOST_SESSIONS or (self._tokens > _MOST_TOKENS and len(self._known) > 1):
            self._forget(next(iter(self._known.values())))
        self._plan(session, now_s, wait_s)

    def _forget(self, session: _Session) -> None:
        del self._known[session.namespace, session.name]
        self._tokens -= session.length
        if session.pages:
            self._count(session, "vain")
        session.ended_s = None
        session.turn += 1

    def _plan(self, session: _Session, now_s: float, wait_s: float | None) -> None:
        """Schedules the prefetch of a session whose turn has just ended, if its next turn can be predicted."""
        session.ended_s, session.planned, session.said = now_s, False, wait_s is not None
        pause_s = wait_s if wait_s is not None else median(session.pauses) if session.pauses else None
        if pause_s is not None and pause_s <= _LONGEST_S:
            session.planned, session.due_s = True, now_s + pause_s
            session.until_s = session.due_s + max(pause_s, _LEAST_LATE_S)
            self._look_at(session.due_s - min(self._load_s(session), pause_s / 2), session)

    def _load_s(self, session: _Session) -> float:
        """Estimates what it takes to bring up all of a session, the same on all ranks."""
        assert self._tiers is not None
        costs = self._tiers.costs
        size = session.length // self._cache.page_size * self._tiers.host.memory.payload_bytes(0)
        steps = [costs.load.seconds(size)]
        if self._tiers.store is not None:
            steps += [costs.look_up.seconds(1), costs.read.seconds(size)]
        milliseconds = 1000 * sum(_UNKNOWN_S if seconds is None else seconds for seconds in steps)
        return self._tiers.pending.agreed(int(milliseconds)) / 1000

    # ---------------------------------------------------------------- bringing up

    def idle_s(self, now_s: float) -> float | None:
        """Returns the seconds until `poll` may have something to do; None: not before a request ends."""
        if self._moving:
            return _POLL_S
        while self._plans and self._plans[0][2] != self._plans[0][3].turn:
            heapq.heappop(self._plans)
        return max(0.0, self._plans[0][0] - now_s) if self._plans else None

    def poll(self, now_s: float, room: Callable[[], int]) -> None:
        """Begins what is due, and moves on what is under way. Call it once a step, after the tiers were polled.

        Args:
            now_s: the time, the same on all ranks.
            room: returns the device pages that no request needs: free, or evicted next.
        """
        for session in list(self._moving):
            if session.promotion is not None and not session.promotion.go_on():
                self._brought(session)
        while self._plans and self._plans[0][0] <= now_s:
            _, _, turn, session = heapq.heappop(self._plans)
            if turn != session.turn:
                continue
            if session.pages:
                self._count(session, "vain")
                self._cache.demote(session.tokens, session.namespace)
            else:
                self._look(session, now_s, room)

    def close(self) -> None:
        for session in self._moving:
            if session.promotion is not None:
                session.promotion.close()
                session.promotion = None
        self._moving.clear()

    def check(self) -> None:
        """Checks the bounds, and that what is brought up is counted, planned and ends.

        Raises:
            AssertionError: a rule is broken.
        """
        known = self._known.values()
        assert self._tokens == sum(session.length for session in known), "the tokens are those of the sessions"
        assert len(known) <= _MOST_SESSIONS and (self._tokens <= _MOST_TOKENS or len(known) == 1), "too many sessions"
        assert all(self._known[each.namespace, each.name] is each for each in known), "a session has its name"
        moving = [session for session in known if session.promotion is not None]
        assert len(moving) == len(self._moving) <= _MOST_UNDER_WAY, "what is under way is known"
        assert all(session in self._moving for session in moving), "what is under way is known"
        assert sum(session.pages for session in known) <= self._most, "more is brought up than the share"
        planned = {id(session) for _, _, turn, session in self._plans if turn == session.turn}
        assert all(id(session) in planned for session in known if session.pages), "what is brought up has an end"
        assert all(session.planned for session in known if session.pages), "nothing has come of what is brought up"
        assert min(self.counts.values()) >= 0, "a count is below 0"

    def _look(self, session: _Session, now_s: float, room: Callable[[], int]) -> None:
        """Begins to bring up what the device lacks of a session; where there is no room yet, looks again later."""
        assert self._tiers is not None
        on_device = self._cache.tree.peek(session.tokens, session.namespace)
        lacking = (session.length - 1 - on_device) // self._cache.page_size
        reachable = self._below(session) or self._tiers.can_prefetch
        most = min(self._most - sum(each.pages for each in self._known.values()), room())
        if reachable and 0 < lacking <= most and len(self._moving) < _MOST_UNDER_WAY:
            session.promotion = Promotion(self._cache, session.tokens, session.namespace)
            session.before, session.pages = on_device, lacking
            self._moving.append(session)
            self._look_at(session.until_s, session)
        elif session.due_s - now_s > _LOOK_AGAIN_S:
            self._look_at((now_s + session.due_s) / 2, session)
        elif reachable and lacking > 0:
            self._count(session, "skipped")

    def _brought(self, session: _Session) -> None:
        """Notes that no more of a session will come."""
        self._moving.remove(session)
        session.promotion = None
        if self._cache.tree.peek(session.tokens, session.namespace) <= session.before:
            self._count(session, "skipped")
            session.turn += 1
        elif session.said:  # the lease of the load was a use, which has ended what was said
            self._cache.expected.expect(session.tokens, session.due_s, session.namespace)

    def _count(self, session: _Session, outcome: Outcome) -> None:
        """Counts what came of a session; nothing of it is under way or held for it then."""
        self.counts[outcome] += 1
        if session.promotion is not None:
            session.promotion.close()
            self._moving.remove(session)
        session.promotion, session.pages, session.planned = None, 0, False

    def _below(self, session: _Session) -> bool:
        size, prompt = self._cache.page_size, (session.tokens, session.namespace)
        return self._cache.peek(*prompt) // size > self._cache.tree.peek(*prompt) // size

    def _look_at(self, at_s: float, session: _Session) -> None:
        heapq.heappush(self._plans, (at_s, next(self._numbers), session.turn, session))
        if len(self._plans) > 2 * _MOST_SESSIONS:
            self._plans = [plan for plan in self._plans if plan[2] == plan[3].turn]
            heapq.heapify(self._plans)
