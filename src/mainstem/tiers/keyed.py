"""Pages under keys of an engine that has a tree and host memory of its own, and whose threads wait for storage.

    exist   which of these pages are stored?
    read    pages into the engine's memory, each verified     -> how many are intact, from the first
    write   pages from the engine's memory, sealed            -> how many storage has, from the first

Every page passes through a slot, and is copied once between it and the engine's memory. No back end gets the engine's
own memory: a call that has exceeded its deadline may still write to its buffers, when the engine has long given that
memory to another page. The slots are registered with the back end, which reads and writes them directly where it can.

It knows no engine: what the engine's memory is, and how a page is copied, is the caller's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from mainstem.settings.engine import StorageConfig
from mainstem.storage.base import Backend
from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.sealer import HEADER_BYTES, Sealer
from mainstem.tiers.storage.slots import Slots
from mainstem.tiers.storage.store import Part, Store, Written
from mainstem.tiers.storage.workers import ThreadWorkers

_LOOKUP_THREADS = 2  # in addition to those that read
_RECHECK_S = 0.05  # how long a call may exceed its deadline unnoticed
_BATCH_BYTES = 16 << 20  # of the slots of a batch, unless one page is larger

T = TypeVar("T")
Views: TypeAlias = Sequence[memoryview]
Copy = Callable[[int, memoryview], object]
"""Copies the content of a page between the engine's memory and a slot, given the page's place in the call."""


@dataclass(frozen=True, eq=False)
class Kind:
    """Pages of one size and one meaning.

    Args:
        row: the row of the store.
        payload_bytes: size of a page's content.
        batch_pages: pages of a call.
        reading, writing: the slots that they pass through.
    """

    row: Row
    payload_bytes: int
    batch_pages: int
    reading: Slots
    writing: Slots


@dataclass(eq=False)
class _Flight:
    """A call and the slots that it has."""

    slots: list[int]
    call: StoreCall[Any] | None = None


class KeyedPages:
    """A store for pages under keys of an engine. Any number of threads.

    Args:
        backend: stores the bytes; it belongs to this object from now on.
        sealer: seals and verifies pages; its identity is part of every key.
        config: deadlines, sizes of batches, the breaker.
    """

    def __init__(
        self,
        backend: Backend,
        sealer: Sealer,
        config: StorageConfig = StorageConfig(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turn = threading.Condition()  # held by the thread that uses the store; woken by calls that have ended
        self._sealer, self._root = sealer, sealer.root(b"")
        readers = ThreadWorkers(config.batches + _LOOKUP_THREADS, "mainstem-read", self._wake)
        writers = ThreadWorkers(config.writes, "mainstem-write", self._wake)
        self._store = Store(backend, sealer, config, readers=readers, writers=writers, clock=clock)

    def add(self, name: str, payload_bytes: int) -> Kind:
        """Allocates slots for pages of one kind and registers them with the back end.

        Args:
            name: part of every key: what their content depends on, apart from the identity.

        Raises:
            StorageError: the memory cannot be registered.
        """
        config, row = self._store.config, Row(0, name, exact=True)
        self._store.check_length(row, payload_bytes)
        pages = max(1, min(config.batch_pages, _BATCH_BYTES // (HEADER_BYTES + payload_bytes)))
        reading, writing = (Slots(calls * pages, payload_bytes) for calls in (config.batches, config.writes))
        with self._turn:
            self._store.register([reading.memory, writing.memory])
        return Kind(row, payload_bytes, pages, reading, writing)

    def exist(self, asked: Sequence[tuple[Kind, Sequence[str]]]) -> list[list[bool]]:
        """Returns, for each kind that is asked for, whether storage has each page. False where it does not answer."""
        named = [(kind.row, self._names(keys)) for kind, keys in asked]
        return self._wait(self._begin(lambda: self._store.find(named)))

    def read(self, kind: Kind, keys: Sequence[str], take: Copy) -> int:
        """Reads pages, in order, up to the first that is not intact.

        Args:
            take: copies the content of a page out of its slot; called for intact pages only.

        Returns:
            How many pages were taken.
        """

        def begin(at: int, names: Sequence[bytes], slots: Views) -> StoreCall[int]:
            return self._begin(lambda: self._store.read(kind.row, names, slots))

        def end(at: int, slots: Views, intact: int) -> int:
            for page in range(intact):
                take(at + page, slots[page][HEADER_BYTES:])
            return intact

        return self._run(kind, kind.reading, self._names(keys), begin, end)

    def write(self, kind: Kind, keys: Sequence[str], fill: Copy) -> int:
        """Writes pages, in order, up to the first that storage does not take. Those that it has stay as they are.

        Args:
            fill: copies the content of a page into its slot.

        Returns:
            How many pages storage has, from the first, as far as is known.
        """

        def begin(at: int, names: Sequence[bytes], slots: Views) -> StoreCall[Written]:
            for page, slot in enumerate(slots):
                fill(at + page, slot[HEADER_BYTES:])
            return self._begin(lambda: self._store.write([Part(kind.row, names, slots)]))

        def end(at: int, slots: Views, written: Written) -> int:
            return len(slots) if written.whole else 0

        return self._run(kind, kind.writing, self._names(keys), begin, end)

    def clear(self) -> bool:
        """Deletes everything in the store, of all who use it. Returns whether the back end did."""
        return self._wait(self._begin(self._store.clear))

    def enter_identity(self) -> None:
        """Enters the identity in the list of the store, and logs why pages of others with the same model differ."""
        listed = self._wait(self._begin(self._store.enter_identity))
        self._store.explain(listed)

    def count(self, cause: str) -> None:
        """Counts a fault, and logs the first of each cause."""
        with self._turn:
            self._store.calls.count(cause)

    @property
    def faults(self) -> dict[str, int]:
        """Counts of faults by cause; "busy" counts calls that found all slots in use by calls that are late."""
        with self._turn:
            return dict(self._store.faults)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the workers and the back end; calls that do not return within `timeout_s` are abandoned."""
        self._store.close(timeout_s)  # not in turn: calls that end now wait for theirs

    def _run(
        self,
        kind: Kind,
        slots: Slots,
        names: Sequence[bytes],
        begin: Callable[[int, Sequence[bytes], Views], StoreCall[T]],
        end: Callable[[int, Views, T], int],
    ) -> int:
        """Makes a call for each batch, several at once; returns how many pages went well, from the first.

        Args:
            slots: those that they pass through.
            begin: begins the call for the pages from a place on.
            end: takes its result; returns how many of its pages went well.
        """
        begun = done = 0
        flights: deque[_Flight] = deque()
        try:
            while done < len(names):
                while begun < len(names) and (taken := self._take(slots, kind.batch_pages)):
                    flights.append(_Flight(taken))
                    here = names[begun : begun + len(taken)]
                    flights[-1].call = begin(begun, here, slots.views(taken[: len(here)], kind.payload_bytes))
                    begun += len(here)
                if not flights:
                    self.count("busy")
                    break
                views, call = slots.views(flights[0].slots[: len(names) - done], kind.payload_bytes), flights[0].call
                assert call is not None
                good = end(done, views, self._wait(call))
                done += good
                if good < len(views):
                    break
                self._give(slots, flights.popleft())
        finally:
            for flight in flights:
                self._give(slots, flight)
        return done

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        encoded = [key.encode() for key in keys]
        return [self._sealer.names(self._root, key, len(key))[0] for key in encoded]

    def _take(self, slots: Slots, count: int) -> list[int]:
        with self._turn:
            return slots.take(count)

    def _give(self, slots: Slots, flight: _Flight) -> None:
        with self._turn:
            slots.give(flight.slots, flight.call)

    def _begin(self, call: Callable[[], StoreCall[T]]) -> StoreCall[T]:
        with self._turn:
            return call()

    def _wait(self, call: StoreCall[T]) -> T:
        with self._turn:
            while not call.over():
                self._turn.wait(_RECHECK_S)
            return call.value

    def _wake(self) -> None:
        with self._turn:
            self._turn.notify_all()
