"""A store below host memory that an engine manages: chunks are looked up, stored and loaded in jobs.

    look_up   is a chunk stored?          None: the store has not answered yet
    store     chunks of host memory -> copies -> storage, sealed
    load      storage -> slots, verified -> chunks of host memory
    finished  jobs that have ended

No call waits: copies and calls to the store run on workers. A chunk is touched only between the begin and the end of
its job, and by copies alone, so a store that hangs never holds it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mainstem.tiers.storage import store as stores
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.sealer import HEADER_BYTES
from mainstem.tiers.storage.store import Found, Store, StoreCall, Written
from mainstem.tiers.storage.workers import Call, Workers

CHUNK = Row(0, "chunk", exact=False)
_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended.

    Args:
        job: its number.
        good: how many of its chunks were stored or loaded; of a load, the first ones.
        whole: whether all were.
        seconds: how long it took.
        bytes: the content of the good chunks.
    """

    job: int
    good: int
    whole: bool
    seconds: float
    bytes: int


@dataclass(slots=True)
class _Job:
    number: int
    names: list[bytes]
    chunks: list[int]
    loads: bool
    began_s: float
    slots: list[memoryview] = field(default_factory=list)
    copy: Call[None] | None = None
    call: StoreCall[Written] | StoreCall[int] | None = None
    good: int = 0


class ChunkTier:
    """Carries out jobs. One thread, but the memory may be used by others outside of the chunks of a job.

    Args:
        store: keeps the chunks; closed by `close`.
        memory: [chunks, bytes of a chunk], of bytes.
        copiers: run the copies.
        buffer_bytes: the most bytes of chunks on their way; jobs beyond it end without effect.
        sleep: waits in `drain`.
    """

    def __init__(
        self,
        store: Store,
        memory: NDArray[np.uint8],
        copiers: Workers,
        buffer_bytes: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._memory, self._copiers, self._sleep = store, memory, copiers, sleep
        self._chunk_bytes = memory.shape[1]
        self._limit = max(1, buffer_bytes // (HEADER_BYTES + self._chunk_bytes))
        self._root = store.sealer.root(b"")
        self._lookups: dict[bytes, StoreCall[Found]] = {}
        self._jobs: list[_Job] = []
        self._ended: list[Ended] = []
        self.counts: Counter[str] = Counter()
        """Chunks by what became of them: "saved", "loaded", "not loaded", "no room"."""

    @property
    def busy(self) -> bool:
        """Whether a job is under way or its end was not returned yet."""
        return bool(self._jobs or self._ended)

    def look_up(self, key: bytes) -> bool | None:
        """Returns whether a chunk is stored, or None: ask again. Each answer is given once."""
        call = self._lookups.get(key)
        if call is None:
            call = self._store.look_up(self._root, key, len(key), [(CHUNK, [0])])
            self._lookups[key] = call
        if not call.done() and not call.overdue() and not self._store.slow:
            return None
        del self._lookups[key]
        return bool(call.value.there and call.value.there[0][0])

    def store(self, job: int, keys: Sequence[bytes], chunks: Sequence[int]) -> None:
        """Begins a job that stores chunks."""
        if (entry := self._begin(job, keys, chunks, loads=False)) is not None:
            entry.copy = self._copiers.submit(lambda: self._copy_out(entry))

    def load(self, job: int, keys: Sequence[bytes], chunks: Sequence[int]) -> None:
        """Begins a job that loads chunks. It ends at the first that is not there or not intact."""
        if (entry := self._begin(job, keys, chunks, loads=True)) is not None:
            entry.call = self._store.read(CHUNK, entry.names, entry.slots)

    def finished(self) -> list[Ended]:
        """Returns the jobs that have ended since the last call."""
        self._jobs = [job for job in self._jobs if not self._advance(job)]
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Waits until every job has ended, at the latest by the deadlines of their calls."""
        while True:
            self._jobs = [job for job in self._jobs if not self._advance(job)]
            if not self._jobs:
                return
            self._sleep(_POLL_S)

    def close(self, timeout_s: float) -> None:
        """Ends the copies and the store."""
        self._copiers.close(timeout_s)
        self._store.close(timeout_s)

    def _begin(self, number: int, keys: Sequence[bytes], chunks: Sequence[int], *, loads: bool) -> _Job | None:
        names = [self._store.sealer.names(self._root, key, len(key))[0] for key in keys]
        job = _Job(number, names, [int(chunk) for chunk in chunks], loads, self._store.clock())
        if sum(len(each.chunks) for each in self._jobs) + len(chunks) > self._limit:
            self.counts["no room"] += len(chunks)
            self._end(job)
            return None
        job.slots = [np.empty(HEADER_BYTES + self._chunk_bytes, np.uint8).data for _ in chunks]
        self._jobs.append(job)
        return job

    def _advance(self, job: _Job) -> bool:
        """Takes a job as far as it goes without waiting; whether it has ended."""
        if job.copy is not None:
            if not job.copy.done():
                return False
            job.copy = None
            if job.loads:
                self.counts["loaded"] += job.good
                return self._end(job)
            job.call = self._store.write([stores.Part(CHUNK, job.names, job.slots)])
        assert job.call is not None
        if not job.call.done():
            return self._end(job) if job.call.overdue() else False
        value = job.call.value
        if isinstance(value, Written):
            self.counts["saved"] += value.pages
            job.good = len(job.chunks) if value.whole else value.pages
        elif value:
            job.good = value
            job.copy = self._copiers.submit(lambda: self._copy_in(job))
            return self._advance(job)
        return self._end(job)

    def _end(self, job: _Job) -> bool:
        whole = job.good == len(job.chunks)
        if job.loads and not whole:
            self.counts["not loaded"] += len(job.chunks) - job.good
        seconds = self._store.clock() - job.began_s
        self._ended.append(Ended(job.number, job.good, whole, seconds, job.good * self._chunk_bytes))
        return True

    def _copy_out(self, job: _Job) -> None:
        for slot, chunk in zip(job.slots, job.chunks, strict=True):
            slot[HEADER_BYTES:] = self._memory[chunk].data

    def _copy_in(self, job: _Job) -> None:
        for slot, chunk in zip(job.slots[: job.good], job.chunks, strict=False):
            self._memory[chunk] = np.frombuffer(slot[HEADER_BYTES:], np.uint8)
