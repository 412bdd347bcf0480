"""Answers that clients may come back to: by id, for their owner only, for a bounded time and within a bounded memory.

Knows bytes and owners, not their meaning. Usable from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

Owner: TypeAlias = bytes | None
"""The digest of a client's API key; None on a server without keys."""

ENTRY_BYTES = 512
"""Bytes that an entry counts in addition to its content."""


class Entry(Protocol):
    """A value with a size."""

    @property
    def size(self) -> int:
        """Its size in bytes."""


Kind = TypeVar("Kind", bound=Entry)


@dataclass(frozen=True, slots=True)
class Kept:
    """The JSON of an answer, and of its conversation: of a response including the answer, of a chat without it."""

    body: bytes
    conversation: bytes

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return len(self.body) + len(self.conversation) + ENTRY_BYTES


class ResponseStore(Generic[Kind]):
    """Values by owner and id.

    If there is no room, the owner that holds the most loses its oldest value, so that one owner's values do not push
    out those of all others.

    Args:
        max_bytes: the limit of all sizes together; a response that is larger is not kept.
        ttl_s: seconds after which a response expires.
        clock: returns seconds, monotonic.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._owners: dict[Owner, dict[str, tuple[float, Kind]]] = {}  # oldest first, with the time at which it expires
        self._sizes: dict[Owner, int] = {}
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """The sizes of all that has not expired, in bytes."""
        with self._lock:
            self._expire()
            return sum(self._sizes.values())

    def put(self, owner: Owner, id: str, kept: Kind) -> None:
        """Keeps a response under a new id, in place of older ones where there is no room."""
        with self._lock:
            self._expire()
            if kept.size > self._max_bytes:
                return
            entries = self._owners.setdefault(owner, {})
            assert id not in entries
            entries[id] = (self._clock() + self._ttl_s, kept)
            self._sizes[owner] = self._sizes.get(owner, 0) + kept.size
            self._shrink()

    def get(self, owner: Owner, id: str) -> Kind | None:
        """Returns a response; None if its owner never kept it, or it is gone."""
        with self._lock:
            self._expire()
            entry = self._owners.get(owner, {}).get(id)
            return None if entry is None else entry[1]

    def entries(self, owner: Owner) -> list[tuple[str, Kind]]:
        """Returns all responses of an owner with their ids, the oldest first."""
        with self._lock:
            self._expire()
            return [(id, kept) for id, (_, kept) in self._owners.get(owner, {}).items()]

    def replace(self, owner: Owner, id: str, kept: Kind) -> None:
        """Puts another one in the place of a response that is there, for the rest of its time."""
        with self._lock:
            self._expire()
            entries = self._owners.get(owner, {})
            if id in entries:
                expires, before = entries[id]
                entries[id] = (expires, kept)
                self._sizes[owner] += kept.size - before.size
                self._shrink()

    def find(self, id: str) -> Kind | None:
        """Returns a response, whoever its owner is."""
        with self._lock:
            self._expire()
            return next((entries[id][1] for entries in self._owners.values() if id in entries), None)

    def delete(self, owner: Owner, id: str) -> bool:
        """Deletes a response, and returns whether it was there."""
        with self._lock:
            self._expire()
            is_there = id in self._owners.get(owner, {})
            if is_there:
                self._drop(owner, id)
            return is_there

    def _shrink(self) -> None:
        while sum(self._sizes.values()) > self._max_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(largest, next(iter(self._owners[largest])))

    def check(self) -> None:
        """Checks that the sizes are those of the entries, within the limit, and that no owner without entries is kept.

        Raises:
            AssertionError: a rule is broken.
        """
        with self._lock:
            sizes = {owner: sum(kept.size for _, kept in each.values()) for owner, each in self._owners.items()}
            assert sizes == self._sizes, "the sizes of owners are those of their entries"
            assert all(self._owners.values()), "an owner without entries is kept"
            assert sum(sizes.values()) <= self._max_bytes, "more bytes than the limit"
            times = [[expires for expires, _ in each.values()] for each in self._owners.values()]
            assert all(each == sorted(each) for each in times), "the oldest comes first"

    def _expire(self) -> None:
        now = self._clock()
        for owner, entries in list(self._owners.items()):
            while entries and next(iter(entries.values()))[0] <= now:
                self._drop(owner, next(iter(entries)))

    def _drop(self, owner: Owner, id: str) -> None:
        entries = self._owners[owner]
        self._sizes[owner] -= entries.pop(id)[1].size
        if not entries:
            del self._owners[owner], self._sizes[owner]
