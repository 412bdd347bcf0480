"""Wrappers around back ends: two stores at once, and read-only access.

    tee+file:/a,redis://10.0.0.1:6379/0      readonly+redis://10.0.0.1:6379/0

A wrapper works with any back end. It does not know what a value means, and it does not verify that a value is intact:
the reader does. It owns the back end that it wraps: `close` closes both.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast

from mainstem.errors import BadArgument, StorageError
from mainstem.storage.base import ABSENT, Backend, BackendStats, Capabilities, Listed, ReadOnlyBackend

_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


class Wrapper(Backend):
    """Forwards every call to one other back end.

    Args:
        inner: the wrapped back end.
    """

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.longest = inner.longest

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Those of the inner back end."""
        return self._inner.capabilities

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Registers the memory with the inner back end."""
        self._inner.register(buffers)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._inner.exists(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        return self._inner.get(keys, buffers)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return self._inner.put(keys, buffers)

    def scan(self) -> Iterator[Sequence[Listed]]:
        return self._inner.scan()

    def delete(self, keys: Sequence[bytes]) -> None:
        self._inner.delete(keys)

    def clear(self) -> None:
        self._inner.clear()

    def stats(self) -> BackendStats:
        return self._inner.stats()

    def close(self) -> None:
        """Closes the inner back end."""
        self._inner.close()


class ReadOnly(ReadOnlyBackend, Wrapper):
    """A read-only view of a store that others fill.

    Args:
        inner: the wrapped back end.
    """

    refusal = "the store is read-only"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._closed = False

    def close(self) -> None:
        self._closed = True
        super().close()

    def check_open(self) -> None:
        if self._closed:
            raise StorageError("closed", "the read-only store is closed")


class Tee(Backend):
    """Two stores: writes go to both, reads try the first one first. A read moves values that only the second one has.

    - `put` returns True if either store has the value. `get` reads from the second store what the first one lacks or
      has with another length, and puts into the first one what it lacks. `exists` asks the second store about the keys
      that the first one lacks.
    - A value is put into the first store before `get` returns, since the buffer is the caller's afterwards. A `put` or
      `delete` through this object takes precedence over it. One by another process at that moment may be undone in the
      first store, for the one value: pages under one key are the same, notes may be older by one write.
    - If one store fails, the other continues. The failure is counted, and logged once until that store answers again. A
      call raises if both stores fail. `delete` and `clear` raise if either store fails, after the other one is done: a
      value that is left in one store still exists.

    Args:
        stores: the first and the second store.

    Raises:
        BadArgument: there are not exactly two stores.
    """

    def __init__(self, *stores: Backend) -> None:
        if len(stores) != 2:
            raise BadArgument("tee", len(stores), "two specs with a comma between")
        self._stores = stores
        limits = [store.longest for store in self._stores]
        self.longest = max((limit for limit in limits if limit), key=lambda limit: limit.size) if all(limits) else None
        self.failures = [0, 0]
        """Failed calls of the first and of the second store."""
        self.moved = 0
        """Values that were read from the second store and put into the first."""
        self._failing = [False, False]
        self._lock = threading.Lock()
        self._readings: list[set[bytes]] = []
        self._changing: Counter[bytes] = Counter()
        self._clearing = 0
        self._moving = threading.Lock()  # held while values are moved, and when a change begins

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """persistent, shared and evicts: if either is; zero_copy and batched: if both are; overwrites: as the first."""
        first, second = (store.capabilities for store in self._stores)
        return Capabilities(
            persistent=first.persistent or second.persistent,
            shared=first.shared or second.shared,
            zero_copy=first.zero_copy and second.zero_copy,
            evicts=first.evicts or second.evicts,
            overwrites=first.overwrites,
            batched=first.batched and second.batched,
        )

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Registers the memory with both stores."""
        self._either([partial(store.register, buffers) for store in self._stores])

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Asks the first store about all keys, then the second about those that the first one lacks."""
        errors: list[StorageError] = []
        there = list(self._try(0, partial(self._stores[0].exists, keys), errors) or [False] * len(keys))
        rest = [at for at, found in enumerate(there) if not found]
        if rest:
            call = partial(self._stores[1].exists, [keys[at] for at in rest])
            for at, found in zip(rest, self._try(1, call, errors) or [False] * len(rest), strict=True):
                there[at] = found
        self._raise_if_all(errors)
        return there

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads from the first store, then from the second what is missing or has another length.

        A value that the first store lacks is put into it.
        """
        errors: list[StorageError] = []
        wanted = [len(buffer) for _, buffer in zip(keys, buffers, strict=True)]
        lengths = list(self._try(0, partial(self._stores[0].get, keys, buffers), errors) or [ABSENT] * len(wanted))
        rest = [at for at, length in enumerate(lengths) if length != wanted[at]]
        lacking = [at for at in rest if lengths[at] == ABSENT and not errors]
        if rest:
            with self._reading(keys[at] for at in lacking) as untouched:
                call = partial(self._stores[1].get, [keys[at] for at in rest], [buffers[at] for at in rest])
                for at, length in zip(rest, self._try(1, call, errors) or [lengths[at] for at in rest], strict=True):
                    lengths[at] = lengths[at] if length == ABSENT else length
                found = {keys[at]: buffers[at] for at in lacking if lengths[at] == wanted[at]}
                self._move(found, untouched)
        self._raise_if_all(errors)
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Puts values into both stores."""
        with self._writing(keys):
            answers = self._either([partial(store.put, keys, buffers) for store in self._stores])
        return [any(stored) for stored in zip(*answers, strict=True)]

    def scan(self) -> Iterator[Sequence[Listed]]:
        """Lists what the second store has and the first lacks, then the first: values move to that one."""
        first, second = self._stores
        next(iter(first.scan()), ())  # it may refuse
        for batch in second.scan():
            there = first.exists([found.key for found in batch])
            yield [found for found, known in zip(batch, there, strict=True) if not known]
        yield from first.scan()

    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes from both stores."""
        with self._writing(keys):
            self._both([partial(store.delete, keys) for store in self._stores])

    def clear(self) -> None:
        """Clears both stores."""
        with self._writing((), clear=True):
            self._both([store.clear for store in self._stores])

    def stats(self) -> BackendStats:
        """Returns the sums, without entries: the number of keys that are in both stores is unknown."""
        parts = self._either([store.stats for store in self._stores])
        used = _sum(part.used_bytes for part in parts)
        capacity = _sum(part.capacity_bytes for part in parts)
        return BackendStats(None, used, capacity, sum(part.evicted for part in parts))

    def close(self) -> None:
        """Closes both stores."""
        try:
            self._stores[0].close()
        finally:
            self._stores[1].close()

    @contextmanager
    def _reading(self, keys: Iterable[bytes]) -> Iterator[set[bytes]]:
        """Yields those of these keys that nobody changes; a change that begins meanwhile takes its keys out."""
        with self._lock:
            untouched = set() if self._clearing else {key for key in keys if not self._changing[key]}
            self._readings.append(untouched)
        try:
            yield untouched
        finally:
            with self._lock:
                self._readings = [other for other in self._readings if other is not untouched]

    @contextmanager
    def _writing(self, keys: Sequence[bytes], *, clear: bool = False) -> Iterator[None]:
        """Surrounds a change of these keys, or of all. A value that is being moved arrives before it, or never."""
        with self._moving, self._lock:
            for reading in self._readings:
                reading.difference_update(list(reading) if clear else keys)
            self._changing.update(keys)
            self._clearing += clear
        try:
            yield
        finally:
            with self._lock:
                self._changing.subtract(keys)
                self._changing = +self._changing
                self._clearing -= clear

    def _move(self, found: Mapping[bytes, memoryview], untouched: set[bytes]) -> None:
        """Puts values of the second store into the first, except those that were changed since."""
        with self._moving:
            values = {key: value for key, value in found.items() if key in untouched}
            if values:
                stored = self._try(0, partial(self._stores[0].put, list(values), list(values.values())), [])
                with self._lock:
                    self.moved += sum(stored or ())

    def _either(self, calls: Sequence[Callable[[], _Answer]]) -> list[_Answer]:
        errors: list[StorageError] = []
        answers = []
        for number, call in enumerate(calls):
            failed = len(errors)
            answer = self._try(number, call, errors)
            if len(errors) == failed:
                answers.append(cast("_Answer", answer))
        self._raise_if_all(errors)
        return answers

    def _both(self, calls: Sequence[Callable[[], None]]) -> None:
        errors: list[StorageError] = []
        for number, call in enumerate(calls):
            self._try(number, call, errors)
        if errors:
            raise errors[0]

    def _try(self, number: int, call: Callable[[], _Answer], errors: list[StorageError]) -> _Answer | None:
        """Returns the answer, or None after adding the error to the list."""
        try:
            answer = call()
        except StorageError as error:
            errors.append(error)
            if self._note(number, failed=True):
                _log.warning("store %d of a tee fails, the other goes on: %s", number + 1, error)
            return None
        if self._note(number, failed=False):
            _log.info("store %d of a tee answers again", number + 1)
        return answer

    def _note(self, number: int, *, failed: bool) -> bool:
        """Returns whether the state of the store changed."""
        with self._lock:
            self.failures[number] += failed
            changed = self._failing[number] != failed
            self._failing[number] = failed
            return changed

    def _raise_if_all(self, errors: Sequence[StorageError]) -> None:
        if len(errors) == len(self._stores):
            raise errors[0]


def _sum(parts: Iterable[int | None]) -> int | None:
    known = list(parts)
    return None if None in known else sum(part or 0 for part in known)
