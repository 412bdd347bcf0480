"""All values of a store, batch by batch: copied to another store, or given to a function.

    scan -> batches of 16 MiB, or one larger value -> each on one of four threads, under a few tries

So the memory that a pass takes is bounded by the size of four batches, whatever the store holds. A pass asks for a
batch only when a thread is free for it. Whatever ends a pass early (an error, Ctrl-C), the batches that have begun are
finished, and no further one begins.

This module does not know what a value means. It moves bytes, and what may be moved a caller decides.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from mainstem.errors import StorageError
from mainstem.storage.base import ABSENT, Backend, Listed, read_fault

BATCH_BYTES = 16 << 20
"""Values of a batch together, unless it is a single one."""

BATCH_VALUES = 256
"""The most values of a batch: what every back end takes in one call."""

THREADS = 4

WAITS_S = (0.1, 0.5, 2.0, 5.0)
"""Before each further try of a batch for which a store raised."""

Check: TypeAlias = Callable[[bytes, memoryview], str | None]
"""Returns why the value under a key must not be used, or None."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called after each batch with the values and bytes that are done, from one thread."""


def show_nothing(values: int, size: int) -> None:
    """The `Progress` that nobody looks at."""


def each_batch(
    store: Backend,
    work: Callable[[Sequence[Listed]], None],
    *,
    progress: Progress = show_nothing,
    sleep: Callable[[float], object] | None = None,
) -> None:
    """Calls `work` with all values of a store, in batches, on several threads.

    A batch for which it raises `StorageError` is tried again, so it counts what it did as its last step.

    Args:
        store: can list its values.
        work: gets the values of a batch, as they are listed.
        progress: called after each batch, in the caller's thread.
        sleep: waits before a further try; None: until the pass ends, if that is sooner.

    Raises:
        StorageError: the store cannot list its values, or `work` raised it in each try. Later batches are not tried.
    """
    values = size = 0
    running: dict[Future[None], Sequence[Listed]] = {}
    with ThreadPoolExecutor(THREADS, "mainstem-moving") as threads:
        ended = threading.Event()
        try:
            for batch in _batches(store.scan()):
                running[threads.submit(_try, work, batch, ended, sleep or ended.wait)] = batch
                while len(running) >= THREADS:
                    values, size = _finish(running, values, size)
                    progress(values, size)
            while running:
                values, size = _finish(running, values, size)
                progress(values, size)
        finally:
            ended.set()  # those that wait for their next try give up


def _batches(listing: Iterator[Sequence[Listed]]) -> Iterator[list[Listed]]:
    batch: list[Listed] = []
    size = 0
    for found in listing:
        for value in found:
            if batch and (size + value.length > BATCH_BYTES or len(batch) == BATCH_VALUES):
                yield batch
                batch, size = [], 0
            batch.append(value)
            size += value.length
    if batch:
        yield batch


def _try(
    work: Callable[[Sequence[Listed]], None],
    batch: Sequence[Listed],
    ended: threading.Event,
    sleep: Callable[[float], object],
) -> None:
    for pause_s in (*WAITS_S, None):
        try:
            work(batch)
            break
        except StorageError as error:
            if pause_s is None or error.cause in ("refused", "closed"):
                raise
            sleep(pause_s)
            if ended.is_set():
                raise


def _finish(running: dict[Future[None], Sequence[Listed]], values: int, size: int) -> tuple[int, int]:
    """Waits for a batch to end. Returns the values and bytes that are done with it.

    Raises:
        StorageError: it failed.
    """
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        batch = running.pop(future)
        future.result()
        values, size = values + len(batch), size + sum(value.length for value in batch)
    return values, size


def read_batch(
    store: Backend, batch: Sequence[Listed], check: Check | None = None
) -> list[tuple[Listed, memoryview, str | None]]:
    """Reads values. Returns each as long as it is now, with its content, and why it was not read or must not be used.

    The reason is "absent", "length" (another one than was listed), or that of `check`; None: it is as it should be.
    """
    buffers = [memoryview(bytearray(value.length)) for value in batch]
    lengths = store.get([value.key for value in batch], buffers) if batch else []
    return [
        (
            value if length == ABSENT else replace(value, length=length),
            buffer,
            read_fault(value.length, length) or (check and check(value.key, buffer)),
        )
        for value, buffer, length in zip(batch, buffers, lengths, strict=True)
    ]


@dataclass(slots=True)
class Migration:
    """Copies to one store what another has and it lacks. Run again, it goes on where it ended.

    Values are copied as they are. A value that the target has under a key stays, whatever it is.

    Args:
        source: a store that can list its values.
        target: any store.
        check: says which values not to copy; None: all are copied.

    Attributes:
        copied, copied_bytes: values that the target took.
        there: values that the target had, or that it took in a call that failed.
        left: values that were listed and not copied, by cause: those of `check`; "absent" and "length" (the source
            did not give what it listed), "full" (the target had no room), "evicted" (it made room, so it has less than
            it took; by its own count).
    """

    source: Backend
    target: Backend
    check: Check | None = None
    copied: int = 0
    copied_bytes: int = 0
    there: int = 0
    left: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def run(self, *, progress: Progress = show_nothing, sleep: Callable[[float], object] | None = None) -> None:
        """Copies all values. The arguments are those of `each_batch`.

        Raises:
            StorageError: the source cannot list its values; or one of the stores failed several times, and then what
                was copied is in the attributes.
        """
        before = self.target.stats().evicted
        try:
            each_batch(self.source, self._copy, progress=progress, sleep=sleep)
        finally:
            if evicted := self._evicted() - before:
                self.left["evicted"] += evicted

    def _evicted(self) -> int:
        try:
            return self.target.stats().evicted
        except StorageError:  # it says so elsewhere
            return 0

    def _copy(self, batch: Sequence[Listed]) -> None:
        there = self.target.exists([value.key for value in batch])
        lacking = [value for value, known in zip(batch, there, strict=True) if not known]
        copied, left = self._transfer(lacking)
        if left:  # some stores answer so for a single request that failed
            again, left = self._transfer([value for value, _ in left])
            copied += again
        with self._lock:
            self.copied += len(copied)
            self.copied_bytes += sum(value.length for value in copied)
            self.there += len(batch) - len(lacking)
            self.left.update(cause for _, cause in left)

    def _transfer(self, values: Sequence[Listed]) -> tuple[list[Listed], list[tuple[Listed, str]]]:
        """Returns the values that the target took, and the others with the cause."""
        found = read_batch(self.source, values, self.check)
        good = [(value, buffer) for value, buffer, cause in found if cause is None]
        left = [(value, cause) for value, _, cause in found if cause is not None]
        taken = self.target.put([value.key for value, _ in good], [buffer for _, buffer in good]) if good else []
        left += [(value, "full") for (value, _), stored in zip(good, taken, strict=True) if not stored]
        return [value for (value, _), stored in zip(good, taken, strict=True) if stored], left
