"""`HeldValues`: an owner keeps values in its arena, above a back end, for all of its clients.

    exists    in the arena, or else in the back end
    get       pins values in the arena; what is not there is read from the back end into it
    reserve   private memory for values that a client writes    commit   they become visible, and are queued
    write     queued values to the back end, in the order of their commits

If the back end fails, the arena goes on as a store of its own: its values are there, all others are absent. Failures
are counted, and logged once until the back end answers again. A breaker limits the calls to one that fails repeatedly.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple, TypeVar

from mainstem.errors import StorageError
from mainstem.owner.arena import Arena, Value
from mainstem.storage.base import ABSENT, SCANNED, Backend, BackendStats, Listed
from mainstem.storage.breaker import Breaker
from mainstem.storage.file.space import rounded

log = logging.getLogger(__name__)

T = TypeVar("T")

ROOM_S = 1.0
"""How long a call waits for others to end their leases, or for values to be written."""

_BATCH_VALUES, _BATCH_BYTES = 64, 64 << 20
_FAILURES, _COOLDOWN_S = 3, 5.0
_COUNTED = ("host_hits", "store_hits", "misses", "puts", "unwritten", "no_room")


class Found(NamedTuple):
    """What `get` found for a key: the length of its value, or `ABSENT`; and the value, pinned, if the length fits."""

    length: int
    value: Value | None


@dataclass(slots=True, eq=False)
class _Fill:
    """A value that is read from the back end: the length asked for, its room, and its places in the batch."""

    key: bytes
    length: int
    buffer: memoryview
    room: Value | None
    places: list[int] = field(default_factory=list)


class HeldValues:
    """The values of one store in shared memory. Any number of threads.

    Args:
        backend: the store; `close` closes it.
        clock: monotonic time in seconds, for the breaker.
        room_s: see `ROOM_S`.
    """

    def __init__(
        self, backend: Backend, memory: memoryview, *, clock: Callable[[], float], room_s: float = ROOM_S
    ) -> None:
        self._backend, self._memory, self._room_s = backend, memory, room_s
        self._arena = Arena(len(memory))
        self._changed = threading.Condition()  # guards everything below; notified when room or work may have come
        self._counts: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._failing = self._full = False  # logged already
        self._breaker = Breaker(_FAILURES, _COOLDOWN_S, clock)
        self._filling: dict[bytes, _Fill] = {}  # reads of the back end that may still become visible
        self._queue: deque[Value] = deque()
        self._unwritten: set[Value] = set()  # reserved, queued, or being written
        self._unwritten_bytes = 0
        self._leases = 0  # values that clients copy now
        self._closing = False
        self._writing = threading.Lock()  # one change of the back end at a time; taken before `_changed`

    # ------------------------------------------------------------ reading

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        with self._changed:
            self._arena.touch(keys)
            there = [self._arena.find(key) is not None for key in keys]
        lacking = [key for key, held in zip(keys, there, strict=True) if not held]
        stored = self._ask(lambda: _whole(self._backend.exists(lacking), lacking)) if lacking else None
        answers = iter(stored or [False] * len(lacking))
        return [held or next(answers) for held in there]

    def get(self, keys: Sequence[bytes], lengths: Sequence[int]) -> list[Found]:
        """Pins values, and reads those that are not in the arena.

        Args:
            keys: of one chain, parents first.
            lengths: of the buffers; a value of another length is not read.

        Returns:
            For each key what was found; for as many keys, from the first, as there is room at once (at least one).
            The caller releases the values.
        """
        answers: list[Found] = []
        fills: dict[tuple[bytes, int], _Fill] = {}
        with self._changed:
            if self._filling:  # another client reads one of these values: that read serves both
                self._changed.wait_for(lambda: self._filling.keys().isdisjoint(keys), self._room_s)
            self._arena.touch(keys)
            for at, (key, length) in enumerate(zip(keys, lengths, strict=True)):
                value = self._arena.find(key)
                fill = fills.get((key, length))
                if value is not None:
                    self._counts["host_hits"] += 1
                    answers.append(self._hit(value, length))
                    continue
                if fill is None:
                    room = self._allocate(length, wait=at == 0) if length else None
                    if length and room is None and at:
                        break
                    fill = fills[key, length] = _Fill(key, length, self._view(room), room)
                    self._filling[key] = fill
                elif fill.room is not None:
                    self._arena.pin(fill.room)
                fill.places.append(at)
                answers.append(Found(ABSENT, fill.room))
        if fills:
            self._fill(list(fills.values()), answers)
        with self._changed:
            self._leases += sum(value is not None for _, value in answers)
        return answers

    def release(self, values: Sequence[Value]) -> None:
        """Ends the pins of a `get`."""
        with self._changed:
            self._leases -= len(values)
            self._arena.unpin(values)
            self._changed.notify_all()

    def _hit(self, value: Value, length: int) -> Found:
        if value.length != length:
            return Found(value.length, None)
        self._arena.pin(value)
        return Found(length, value)

    def _fill(self, fills: Sequence[_Fill], answers: list[Found]) -> None:
        """Reads values, and publishes those that no put or delete has overtaken."""
        keys, buffers = [fill.key for fill in fills], [fill.buffer for fill in fills]
        lengths = self._ask(lambda: _whole(self._backend.get(keys, buffers), keys)) or [ABSENT] * len(keys)
        with self._changed:
            for fill, length in zip(fills, lengths, strict=True):
                whole = fill.room is not None and length == fill.length
                if length == fill.length and not whole and length:
                    length = ABSENT  # there was no room to read it
                if self._filling.get(fill.key) is fill:
                    del self._filling[fill.key]
                    if whole and fill.room is not None and self._arena.find(fill.key) is None:
                        self._arena.publish(fill.key, fill.room)
                self._counts["store_hits" if length != ABSENT else "misses"] += len(fill.places)
                for at in fill.places:
                    answers[at] = Found(length, fill.room if whole else None)
                    if fill.room is not None and not whole:
                        self._arena.unpin([fill.room])
            self._changed.notify_all()

    # ------------------------------------------------------------ writing

    def reserve(self, keys: Sequence[bytes], lengths: Sequence[int]) -> list[Value | bool]:
        """Allocates private memory for values, which nobody sees before `commit`.

        Args:
            keys: of one chain, parents first.
            lengths: of the values, at least 1.

        Returns:
            For each key the memory; True: the back end keeps the first value, and has one; False: no room. For as many
            keys, from the first, as there is room at once (at least one). The caller commits or aborts.
        """
        there = [False] * len(keys) if self._backend.capabilities.overwrites else self.exists(keys)
        rooms: list[Value | bool] = []
        with self._changed:
            for at, (length, kept) in enumerate(zip(lengths, there, strict=True)):
                room = None if kept else self._allocate(length, wait=at == 0, limit=self._arena.total // 2)
                if room is None and not kept and at:
                    break
                if room is not None:
                    self._unwritten.add(room)
                    self._unwritten_bytes += rounded(length)
                rooms.append(kept if room is None else room)
        return rooms

    def commit(self, written: Sequence[tuple[bytes, Value]]) -> None:
        """Makes values visible, and queues them for the back end."""
        with self._changed:
            for key, value in written:
                if self._arena.find(key) is not None and not self._backend.capabilities.overwrites:
                    self._wrote([value])
                    continue
                self._arena.publish(key, value)
                self._filling.pop(key, None)
                self._queue.append(value)
            self._counts["puts"] += len(written)
            self._changed.notify_all()

    def abort(self, values: Sequence[Value]) -> None:
        """Frees memory that was reserved."""
        with self._changed:
            self._wrote(values)
            self._changed.notify_all()

    def write(self) -> bool:
        """Waits for queued values and writes some of them. Returns False once it is closing and the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return False
        with self._writing:
            with self._changed:
                batch = self._take_batch()
                keys = [value.key or b"" for value in batch]  # now: another thread may replace one at any time
            buffers = [self._view(value) for value in batch]
            stored = self._ask(lambda: _whole(self._backend.put(keys, buffers), keys)) if batch else []
            with self._changed:
                lost = len(batch) - sum(stored or [])
                if lost and stored is not None and not self._full:
                    self._full = True
                    log.warning("owner: the store has no room; what it does not take stays on the host until evicted")
                self._counts["unwritten"] += lost
                self._wrote(batch)
                self._changed.notify_all()
        return True

    def _take_batch(self) -> list[Value]:
        """Takes the next values from the queue. Those that were dropped or replaced meanwhile are not written."""
        batch: list[Value] = []
        size = 0
        while (
            self._queue and len(batch) < _BATCH_VALUES and (not batch or size + self._queue[0].length <= _BATCH_BYTES)
        ):
            value = self._queue.popleft()
            if value.key is None:
                self._wrote([value])
                continue
            batch.append(value)
            size += value.length
        return batch

    def _wrote(self, values: Sequence[Value]) -> None:
        self._unwritten.difference_update(values)
        self._unwritten_bytes -= sum(rounded(value.length) for value in values)
        self._arena.unpin(values)

    # ------------------------------------------------------------ the rest

    def scan(self) -> Iterator[Sequence[Listed]]:
        """Lists what the arena holds, then what only the back end has, then what came to the arena meanwhile.

        Raises:
            StorageError: the back end cannot list its values, or cannot go on.
        """
        first = self._lengths()
        with _own_errors():
            stored = iter(self._backend.scan())
            begin = next(stored, ())  # before anything is listed, because it may refuse
            yield from _listed(first)
            for batch in chain([begin], stored):
                yield [value for value in batch if value.key not in first]
        yield from _listed({key: length for key, length in self._lengths().items() if key not in first})

    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes values.

        Raises:
            StorageError: the back end may still have some.
        """
        self._remove(keys, lambda: self._backend.delete(keys))

    def clear(self) -> None:
        """Deletes every value.

        Raises:
            StorageError: the back end may still have some.
        """
        self._remove(None, self._backend.clear)

    def stats(self) -> BackendStats:
        """Returns what the back end holds, with what is not written yet.

        Raises:
            StorageError: the back end cannot determine it.
        """
        with self._changed:  # first: what is written meanwhile counts twice rather than not at all
            queued = [rounded(value.length) for value in self._unwritten if value.key is not None]
        with _own_errors():
            stored = self._backend.stats()
        return BackendStats(
            None if stored.entries is None else stored.entries + len(queued),
            None if stored.used_bytes is None else stored.used_bytes + sum(queued),
            None if stored.capacity_bytes is None else stored.capacity_bytes + self._arena.total,
            stored.evicted,
        )

    def status(self) -> dict[str, int | dict[str, int]]:
        """Returns counts of values since the start, and what the arena holds."""
        with self._changed:
            return {
                "host_bytes": self._arena.total,
                "used_bytes": self._arena.used,
                "values": len(self._arena),
                "pinned": self._arena.pinned,
                "leases": self._leases,
                "evicted": self._arena.evicted,
                "queued": len(self._unwritten),
                "queued_bytes": self._unwritten_bytes,
                **{name: self._counts[name] for name in _COUNTED},
                "faults": dict(self._faults),
            }

    def close(self) -> None:
        """Lets `write` end once the queue is empty. Call `finish` after that."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def finish(self) -> None:
        self._backend.close()

    def check(self) -> None:
        """Checks the arena, and that what waits to be written, or is copied by clients, is counted and pinned.

        Raises:
            AssertionError: a rule is broken.
        """
        with self._changed:
            self._arena.check()
            unwritten = sum(rounded(value.length) for value in self._unwritten)
            assert unwritten == self._unwritten_bytes, "the bytes that are not written are counted"
            assert self._unwritten.issuperset(self._queue), "what is queued is not written"
            assert len(set(self._queue)) == len(self._queue), "a value is queued once"
            assert all(value.pins for value in self._unwritten), "what is not written is pinned"
            assert 0 <= self._leases <= self._arena.pins, "clients copy what is pinned"
            assert self._counts["unwritten"] <= self._counts["puts"], "what was not written was put"
            assert min([0, *self._counts.values(), *self._faults.values()]) == 0, "a count is below 0"

    def _lengths(self) -> dict[bytes, int]:
        with self._changed:
            return self._arena.lengths()

    def _remove(self, keys: Sequence[bytes] | None, call: Callable[[], None]) -> None:
        """Forgets values, removes them from the back end, and forgets what was read from it meanwhile."""
        self._forget(keys)
        with self._writing, _own_errors():
            call()
        self._forget(keys)

    def _forget(self, keys: Sequence[bytes] | None) -> None:
        with self._changed:
            if keys is None:
                self._arena.clear()
                self._filling.clear()
            for key in keys or ():
                self._arena.drop(key)
                self._filling.pop(key, None)
            self._changed.notify_all()

    def _allocate(self, length: int, *, wait: bool, limit: int | None = None) -> Value | None:
        """Allocates memory; waits for room if nothing else of the call could go on without.

        Args:
            limit: bytes that may wait to be written, so that reads keep room; a single value may be larger.
        """
        rooms: list[Value] = []

        def try_it() -> bool:
            if limit is None or not self._unwritten or self._unwritten_bytes + rounded(length) <= limit:
                rooms.extend(filter(None, [self._arena.allocate(length)]))
            return bool(rooms)

        if rounded(length) <= self._arena.total and not try_it() and wait:
            self._changed.wait_for(try_it, self._room_s)
        if not rooms and wait:
            if not self._counts["no_room"]:
                log.warning("owner: no room for %s bytes in a host tier of %s", length, self._arena.total)
            self._counts["no_room"] += 1
        return rooms[0] if rooms else None

    def _view(self, value: Value | None) -> memoryview:
        return memoryview(bytearray()) if value is None else self._memory[value.offset : value.offset + value.length]

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Calls the back end. Returns None if it fails, or failed repeatedly before."""
        with self._changed:
            if not self._breaker.allow():
                self._faults["breaker"] += 1
                return None
        try:
            with _own_errors():
                answer = call()
        except StorageError as error:
            self._fail(error)
            return None
        with self._changed:
            self._breaker.succeed()
            self._failing = False
        return answer

    def _fail(self, error: StorageError) -> None:
        with self._changed:
            self._breaker.fail()
            self._faults[error.cause] += 1
            if not self._failing:
                log.warning("owner: the store failed: %s; the host tier goes on alone", error)
            self._failing = True


@contextmanager
def _own_errors() -> Iterator[None]:
    """Turns any other error into a `StorageError`: a back end of the user's must not end a thread of the owner."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        raise StorageError("protocol", f"{type(error).__name__}: {error}") from error


def _listed(lengths: Mapping[bytes, int]) -> Iterator[Sequence[Listed]]:
    values = (Listed(key, length) for key, length in lengths.items())
    while batch := list(islice(values, SCANNED)):
        yield batch


def _whole(answers: list[T], keys: Sequence[bytes]) -> list[T]:
    """Returns the answers of a back end.

    Raises:
        StorageError: there is not one for each key.
    """
    if len(answers) != len(keys):
        raise StorageError("protocol", f"{len(answers)} answers for {len(keys)} keys")
    return answers
