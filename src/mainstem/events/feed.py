"""`Feed` and `Follower`: the two ends of a stream of batches that may lose some, without sockets or threads.

    Feed       numbers batches from 0, keeps the last ones for a replay, and the whole state for who asks for older ones
    Follower   notices a gap, a batch that comes again, and a server that began anew, and says what must be replayed

A replay is a part of the stream, so a follower may get a batch twice: its number says so. A server that began anew
counts from 0 again, which a follower tells from a repeated batch by the time of sending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mainstem.events.replica import Replica
from mainstem.events.source import AllBlocksCleared, Event
from mainstem.events.wire import Batch, decode, encode

_KEPT_BYTES = 64 << 20  # of batches, for replays
_TICK_S = 1e-6


class Feed:
    """The sender's end. It begins with a batch that clears all, since who listens may have followed a server before.

    Args:
        kept_bytes: of the last batches.
        rank: the data-parallel rank of the server.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES, rank: int = 0) -> None:
        self._replica = Replica()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes, self._most_bytes = 0, kept_bytes
        self._rank = rank
        self._next = 0
        self._sent_s = 0.0

    def publish(self, events: Sequence[Event], now_s: float) -> tuple[int, bytes]:
        """Returns the number and the content of a batch with these events.

        Args:
            events: what happened since the last batch.
            now_s: seconds since 1970.
        """
        if self._next == 0:
            events = [AllBlocksCleared(), *events]
        self._replica.apply(events)
        batch = self._next, self._encode(events, now_s)
        self._next += 1
        self._kept.append(batch)
        self._kept_bytes += len(batch[1])
        while self._kept_bytes > self._most_bytes:
            self._kept_bytes -= len(self._kept.popleft()[1])
        return batch

    def replay(self, first: int, now_s: float) -> list[tuple[int, bytes]]:
        """Returns the batches from a number on. If they are not kept any more: one that clears all and stores all."""
        if self._next == 0 or first >= self._next:
            return []
        if self._kept and self._kept[0][0] <= first:
            return [batch for batch in self._kept if batch[0] >= first]
        return [(self._next - 1, self._encode(self._replica.state(), now_s))]

    def _encode(self, events: Sequence[Event], now_s: float) -> bytes:
        self._sent_s = max(now_s, self._sent_s + _TICK_S)
        return encode(Batch(self._sent_s, list(events), self._rank))


class Follower:
    """The receiver's end.

    Attributes:
        replica: what the server holds, as far as it is known.
    """

    def __init__(self) -> None:
        self.replica = Replica()
        self._last = -1
        self._sent_s = 0.0

    def missing(self, number: int, payload: bytes) -> int | None:
        """Returns the number of the first batch that must be replayed before this one; None: it is the next, or old.

        Raises:
            ValueError: it is no batch of events.
        """
        sent_s = decode(payload).sent_s
        if number <= self._last and sent_s > self._sent_s:
            self._last, self._sent_s = -1, sent_s - _TICK_S  # a server that began anew
        return self._last + 1 if number > self._last + 1 else None

    def follow(self, number: int, payload: bytes) -> None:
        """Applies a batch, live or replayed, unless it was applied before.

        Raises:
            ValueError: it is no batch of events.
        """
        if number <= self._last:
            return
        batch = decode(payload)
        self.replica.apply(batch.events)
        self._last, self._sent_s = number, max(batch.sent_s, self._sent_s)
