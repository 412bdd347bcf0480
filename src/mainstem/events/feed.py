"""`Feed` and `Follower`: the two ends of a stream of batches that may lose some, without sockets or threads.

    Feed       numbers batches, keeps the last ones for replays, and replays the whole state in place of older ones
    Follower   notices a gap, skips a batch that comes again, and says what must be replayed

The first number follows from the time: a server that restarts goes on far above its last number. Its followers then
find a gap, however much was lost in between, ask for batches that no longer exist, and get the whole state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from mainstem.events.replica import Replica
from mainstem.events.source import AllBlocksCleared, BlockStored, Event
from mainstem.events.wire import Batch, decode, encode

KEPT_BYTES = 64 << 20  # of batches, for replays
_BATCH_BYTES = 128  # what keeping a batch takes besides
_NUMBERS = 1024  # a millisecond
_STEP_PAGES = 256  # of the whole state


class Feed:
    """The sender's end. Its first batch clears all, since a listener may have followed an earlier server.

    Args:
        now_s: seconds since 1970.
        kept_bytes: of the last batches.
        rank: the data-parallel rank of the server.
    """

    def __init__(self, now_s: float, kept_bytes: int = KEPT_BYTES, rank: int = 0) -> None:
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes, self._most_bytes = 0, kept_bytes
        self._rank = rank
        self._next = int(now_s * 1000) * _NUMBERS
        self._first = self._next
        self._before: list[Event] = [AllBlocksCleared()]  # the first batch begins with it

    def publish(self, events: Sequence[Event], now_s: float) -> tuple[int, bytes]:
        """Returns the number and the content of a batch with these events.

        Args:
            events: since the last batch.
            now_s: seconds since 1970.
        """
        events, self._before = [*self._before, *events], []
        batch = self._next, self._encode(events, now_s)
        self._next += 1
        self._kept.append(batch)
        self._kept_bytes += len(batch[1]) + _BATCH_BYTES
        while self._kept_bytes > self._most_bytes:
            self._kept_bytes -= len(self._kept.popleft()[1]) + _BATCH_BYTES
        return batch

    def replay(
        self,
        first: int,
        now_s: float,
        state: Iterable[Event] | None = None,
        give_way: Callable[[], None] = lambda: None,
    ) -> list[tuple[int, bytes]]:
        """Returns the batches from a number on. If they are not kept any more: one that clears all and stores all.

        Args:
            first: the number.
            now_s: seconds since 1970.
            state: events that clear all and store all, of now: `Source.state`. Default: all batches if they are kept
                since the beginning, else nothing is known.
            give_way: called between the steps of making that batch, each of which takes about a millisecond.
        """
        if first >= self._next:
            return []
        oldest = self._kept[0][0] if self._kept else self._next
        if oldest <= first or (state is None and oldest == self._first):
            return [batch for batch in self._kept if batch[0] >= first]
        events = [AllBlocksCleared()] if state is None else state
        return [(self._next - 1, self._encode(_in_steps(events, give_way), now_s))]

    def check(self) -> None:
        """Checks that the last batches are kept, without a gap, within the bytes.

        Raises:
            AssertionError: a rule is broken.
        """
        numbers = [number for number, _ in self._kept]
        assert numbers == list(range(self._next - len(numbers), self._next)), "the last batches are kept"
        kept = sum(len(payload) + _BATCH_BYTES for _, payload in self._kept)
        assert kept == self._kept_bytes <= self._most_bytes, "the bytes are those of the batches, within the limit"

    def _encode(self, events: Iterable[Event], now_s: float) -> bytes:
        return encode(Batch(now_s, events, self._rank))


def _in_steps(events: Iterable[Event], give_way: Callable[[], None]) -> Iterator[Event]:
    """Calls `give_way` after every few events."""
    pages = 0
    for event in events:
        yield event
        pages += len(event.block_hashes) if isinstance(event, BlockStored) else 0
        if pages >= _STEP_PAGES:
            give_way()
            pages = 0


class Follower:
    """The receiver's end.

    Args:
        apply: takes the events; default: `replica` does.

    Attributes:
        replica: a copy of the server's index, from the events so far.
    """

    def __init__(self, apply: Callable[[Iterable[Event]], None] | None = None) -> None:
        self.replica = Replica()
        self._apply = apply or self.replica.apply
        self._last = -1

    def missing(self, number: int) -> int | None:
        """Returns the number of the first batch that must be replayed before this one; None: it is the next, or old."""
        return self._last + 1 if number > self._last + 1 else None

    def follow(self, number: int, payload: bytes) -> None:
        """Applies a batch, live or replayed, unless it was applied before.

        Raises:
            ValueError: it is no batch of events.
        """
        if number <= self._last:
            return
        self._apply(decode(payload).events)
        self._last = number
