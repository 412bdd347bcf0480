"""`Store`: a back end made safe. Every failure is a miss, counted by its cause, and none is waited for.

    look   which pages of a prompt are there         -> their keys
    read   pages into host slots, each verified      -> how many are whole, from the first
    write  host slots, sealed                        -> how many are stored now

Each call runs on a worker and has a deadline. A call that is over it counts as failed at once, and keeps its slots
until it really returns. After repeated failures the breaker opens: calls end as misses without being made, until a
single one is tried again after a while.

Knows keys, symbols and slots; knows no tree and no pool.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from mainstem.errors import BadArgument, StorageError, check_integer
from mainstem.storage.base import ABSENT, Backend
from mainstem.tiers.codecs import CODECS, Codec
from mainstem.tiers.pages import HEADER_BYTES, Sealer
from mainstem.tiers.workers import Call, Workers

log = logging.getLogger(__name__)

_LEAST_S = 0.1  # for idle workers to end
_MARK_BYTES = 32  # that a hidden note is longer

T = TypeVar("T")

PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """How a store is used.

    Args:
        prefetch: what a request waits for: "best_effort": nothing; "wait_complete": all that was found; "timeout":
            that, but for no longer than computing it would take.
        prefetch_min_tokens: fewer are computed rather than read.
        timeout_s, timeout_per_page_s: for "timeout", as long as nobody knows what computing takes: a prefetch, and
            each page that was found.
        max_prefetches: at once; more are left out.
        batch_pages: pages a call.
        batches: calls of one prefetch at once.
        host_fraction: of the host's pages that prefetches under way may hold.
        call_timeout_s: after which a call has failed, the time that it waits for a worker counted in; above 0.
        queue_pages: pages that wait to be written; what comes when it is full is left out, but not if it waits alone.
        writes: calls that write at once.
        breaker_failures: failed calls, one after another, that open the breaker.
        breaker_cooldown_s: after which one call is tried again.

    Raises:
        BadArgument: names the field and its range.
    """

    prefetch: PrefetchPolicy = "timeout"
    prefetch_min_tokens: int = 256
    timeout_s: float = 0.1
    timeout_per_page_s: float = 0.01
    max_prefetches: int = 64
    batch_pages: int = 32
    batches: int = 4
    host_fraction: float = 0.5
    call_timeout_s: float = 5.0
    queue_pages: int = 1024
    writes: int = 2
    breaker_failures: int = 3
    breaker_cooldown_s: float = 5.0

    def __post_init__(self) -> None:
        """Checks every field."""
        if self.prefetch not in get_args(PrefetchPolicy):
            raise BadArgument("prefetch", self.prefetch, "one of " + ", ".join(get_args(PrefetchPolicy)))
        for name in ("max_prefetches", "batch_pages", "batches", "queue_pages", "writes", "breaker_failures"):
            check_integer(name, getattr(self, name), 1, 2**31 - 1)
        check_integer("prefetch_min_tokens", self.prefetch_min_tokens, 0, 2**31 - 1)
        for name in ("timeout_s", "timeout_per_page_s", "call_timeout_s", "breaker_cooldown_s"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < 1e9:
                raise BadArgument(name, value, "seconds, 0 or more")
        if self.call_timeout_s == 0:
            raise BadArgument("call_timeout_s", self.call_timeout_s, "above 0")
        if type(self.host_fraction) not in (int, float) or not 0 < self.host_fraction <= 1:
            raise BadArgument("host_fraction", self.host_fraction, "above 0, up to 1")


class Breaker:
    """Stops calls to what fails again and again.

    closed --failures--> open --cool-down--> one call is tried --well--> closed
                           ^-----------------------failed---+
    """

    def __init__(self, failures: int, cooldown_s: float, clock: Callable[[], float]) -> None:
        self._most, self._cooldown_s, self._clock = failures, cooldown_s, clock
        self._failures = 0
        self._closed_until_s = 0.0  # while open: when the next call may be tried
        self._trying = False
        self.openings = 0

    @property
    def open(self) -> bool:
        """Whether calls are stopped."""
        return self._failures >= self._most

    def allow(self) -> bool:
        """Whether a call may be made now; it must then be told how it went."""
        if not self.open:
            return True
        if self._trying or self._clock() < self._closed_until_s:
            return False
        self._trying = True
        return True

    def succeed(self) -> None:
        """A call went well."""
        self._failures, self._trying = 0, False

    def fail(self) -> None:
        """A call failed."""
        was_open = self.open
        self._failures += 1
        self._trying = False
        if self.open:
            self._closed_until_s = self._clock() + self._cooldown_s
            self.openings += not was_open


@dataclass(slots=True)
class _Answer(Generic[T]):
    """What a worker brings back: a value, and what went wrong on the way, by cause."""

    value: T
    causes: Counter[str]
    took_s: float
    failed: bool = False  # the call as a whole


class StoreCall(Generic[T]):
    """One call to a store. Its value is always there once it is done; at worst it says that nothing was found."""

    def __init__(self, store: Store, call: Call[_Answer[T]] | None, nothing: T, deadline_s: float) -> None:
        self._store, self._call, self._deadline_s = store, call, deadline_s
        self._overdue = False
        self._reported = call is None
        self.value = nothing
        self.took_s = math.inf  # once it has come back

    def done(self) -> bool:
        """Whether it has ended, and its slots are free."""
        if self._call is None:
            return True
        if self._call.done():
            self._tell(self._call)
            return True
        self.overdue()
        return False

    @property
    def refused(self) -> bool:
        """Whether it was never made: the breaker is open, or the store is closed."""
        return self._call is None

    def overdue(self) -> bool:
        """Whether it has failed for its time, though it may come back late."""
        if not self._overdue and self._call is not None and not self._call.done():
            if self._store.clock() < self._deadline_s:
                return False
            self._overdue = True
            self._store.gave_up(self._store.config.call_timeout_s)
            self._store.count("timeout")
            self._store.breaker.fail()
        return self._overdue

    def _tell(self, call: Call[_Answer[T]]) -> None:
        if self._reported:
            return
        self._reported = True
        answer = call.result()
        self.value = answer.value
        for cause, count in answer.causes.items():
            self._store.count(cause, count)
        self.took_s = answer.took_s
        self._store.took(self.took_s)
        if self._overdue:
            return  # it has counted as failed
        if answer.failed:
            self._store.breaker.fail()
        else:
            self._store.breaker.succeed()


class Store:
    """A back end with verified pages, deadlines, a breaker and counters. One thread at a time.

    Args:
        backend: where the bytes go.
        sealer: makes and verifies pages.
        config: limits.
        readers, writers: run the calls; apart, so that neither waits for the other.
        clock: seconds, never going back.
        codec: how the numbers of a page are stored; its name belongs into the sealer's identity.
        dtype: of the numbers, for a codec other than "none".
    """

    def __init__(
        self,
        backend: Backend,
        sealer: Sealer,
        config: StorageConfig = StorageConfig(),
        *,
        readers: Workers,
        writers: Workers,
        clock: Callable[[], float],
        codec: Codec = CODECS["none"],
        dtype: str = "",
    ) -> None:
        self._codec, self._dtype = codec, dtype
        self.backend, self.sealer, self.config, self.clock = backend, sealer, config, clock
        self.breaker = Breaker(config.breaker_failures, config.breaker_cooldown_s, clock)
        self.faults: Counter[str] = Counter()
        self._closed = False
        self.slow = False  # somebody waited in vain, and no call was quicker since
        self._vain_s = 0.0
        self._readers, self._writers = readers, writers

    def register(self, regions: Sequence[memoryview]) -> None:
        """Announces the memory that slots lie in.

        Raises:
            StorageError: the client refuses it.
        """
        self.backend.register(regions)

    def look_up(self, parent: bytes, symbols: bytes | memoryview, page_bytes: int) -> StoreCall[list[bytes]]:
        """Keys of pages that are stored, up to the first gap, of those of `symbols` behind the page of key `parent`."""

        def look_up(causes: Counter[str]) -> list[bytes]:
            keys = self.sealer.keys(parent, symbols, page_bytes)
            return keys[: max(0, min(self.backend.exists(keys), len(keys)))]

        return self._submit(self._readers, look_up, [])

    def read(self, keys: Sequence[bytes], slots: Sequence[memoryview]) -> StoreCall[int]:
        """How many pages, from the first on, are in their slots now, whole and verified."""

        def read(causes: Counter[str]) -> int:
            packed = self._room(slots)
            lengths = self.backend.get(keys, packed)
            for good, (key, slot, length) in enumerate(zip(keys, packed, lengths, strict=True)):
                if (cause := self._cause(key, slot, length)) is not None:
                    causes[cause] += 1
                    if cause != "absent":
                        with _caught(causes):
                            self.backend.delete([key])  # or it would stand in the way of a good one
                    return good
                self._unpack(slot, slots[good])
            return len(keys)

        return self._submit(self._readers, read, 0)

    def write(self, parent: bytes | None, keys: Sequence[bytes], slots: Sequence[memoryview]) -> StoreCall[Written]:
        """Seals and stores pages that follow the page of key `parent` (None: the first ones of a prompt).

        Those that are stored already are left alone.
        """

        def write(causes: Counter[str]) -> Written:
            # What hangs behind a gap would never be found.
            if parent is not None and not self.backend.exists([parent]):
                return Written(0, gap=True)
            there = max(0, min(self.backend.exists(keys), len(slots)))
            stored = 0
            for at in range(there, len(slots), self.config.batch_pages):
                batch = slice(at, min(at + self.config.batch_pages, len(slots)))
                try:
                    packed = self._pack(slots[batch])
                except BadArgument:  # infinite numbers, or none
                    causes["codec"] += 1
                    break
                for key, slot in zip(keys[batch], packed, strict=True):
                    self.sealer.seal(slot, key)
                results = self.backend.put(keys[batch], packed)
                whole = [good for _, good in zip(packed, results, strict=True) if good]
                stored += len(whole)
                if len(whole) < len(results):
                    causes["full"] += 1
                    break
            return Written(stored, gap=False)

        return self._submit(self._writers, write, Written(0, gap=False))

    def delete(self, keys: Sequence[bytes]) -> StoreCall[bool]:
        """Deletes pages; whether the back end did."""

        def delete(causes: Counter[str]) -> bool:
            self.backend.delete(keys)
            return True

        return self._submit(self._writers, delete, False)

    def keep_note(self, name: str, content: bytes, room_bytes: int) -> StoreCall[bool]:
        """Stores something that is no page, in the place of what had this name; whether it did."""
        slot = memoryview(bytearray(HEADER_BYTES + _MARK_BYTES + room_bytes))
        slot[HEADER_BYTES:] = self.sealer.hide(content.ljust(room_bytes, b"\0"))

        def keep(causes: Counter[str]) -> bool:
            key = self.sealer.record(name)
            self.sealer.seal(slot, key)
            if not self.backend.capabilities.overwrites:
                self.backend.delete([key])
            return self.backend.put([key], [slot])[0]

        return self._submit(self._writers, keep, False)

    def find_note(self, name: str, room_bytes: int) -> StoreCall[bytes]:
        """What was kept under this name in so much room, with zeros behind; empty: nothing."""
        slot = memoryview(bytearray(HEADER_BYTES + _MARK_BYTES + room_bytes))

        def find(causes: Counter[str]) -> bytes:
            key = self.sealer.record(name)
            cause = self._cause(key, slot, self.backend.get([key], [slot])[0])
            if cause is not None:
                causes[cause] += 1
                return b""
            return self.sealer.reveal(bytes(slot[HEADER_BYTES:]))

        return self._submit(self._readers, find, b"")

    def gave_up(self, waited_s: float) -> None:
        """Somebody has waited for so long in vain: the store is slow, until a call is quicker than that."""
        self._vain_s = min(waited_s, self._vain_s) if self.slow else waited_s
        self.slow = True

    def took(self, seconds: float) -> None:
        """A call has come back after so long."""
        self.slow = self.slow and seconds > self._vain_s

    def count(self, cause: str, times: int = 1) -> None:
        """Counts a fault; the first of each cause is logged."""
        if cause not in self.faults and cause not in ("absent", "breaker"):
            log.warning("storage: %s; further ones are counted only", cause)
        self.faults[cause] += times

    def close(self, timeout_s: float) -> None:
        """Ends the workers and the back end; calls that hang are left behind, and the back end with them.

        Calls after it are misses.
        """
        self._closed = True
        end_s = self.clock() + timeout_s
        ended = [workers.close(max(_LEAST_S, end_s - self.clock())) for workers in (self._writers, self._readers)]
        if all(ended):
            self.backend.close()
        else:
            log.warning("storage: calls still hang after %s s; the back end is not closed", timeout_s)

    def _room(self, slots: Sequence[memoryview]) -> Sequence[memoryview]:
        """Where stored pages are read to: the slots themselves, if pages are stored as they are."""
        if self._codec.name == "none":
            return slots
        sizes = [self._codec.encoded_bytes(len(slot) - HEADER_BYTES, self._dtype) for slot in slots]
        return [memoryview(bytearray(HEADER_BYTES + size)) for size in sizes]

    def _pack(self, slots: Sequence[memoryview]) -> Sequence[memoryview]:
        packed = self._room(slots)
        for slot, room in zip(slots, packed, strict=True):
            if room is not slot:
                self._codec.encode(slot[HEADER_BYTES:], room[HEADER_BYTES:], self._dtype)
        return packed

    def _unpack(self, packed: memoryview, slot: memoryview) -> None:
        if packed is not slot:
            self._codec.decode(packed[HEADER_BYTES:], slot[HEADER_BYTES:], self._dtype)

    def _cause(self, key: bytes, slot: memoryview, length: int) -> str | None:
        if length != len(slot):
            return "absent" if length == ABSENT else "length"
        return self.sealer.verify(slot, key)

    def _submit(self, workers: Workers, work: Callable[[Counter[str]], T], nothing: T) -> StoreCall[T]:
        if self._closed or not self.breaker.allow():
            self.count("closed" if self._closed else "breaker")
            return StoreCall(self, None, nothing, 0.0)

        def run() -> _Answer[T]:
            causes: Counter[str] = Counter()
            began_s = self.clock()
            with _caught(causes):
                return _Answer(work(causes), causes, self.clock() - began_s)
            return _Answer(nothing, causes, self.clock() - began_s, failed=True)

        return StoreCall(self, workers.submit(run), nothing, self.clock() + self.config.call_timeout_s)


@contextmanager
def _caught(causes: Counter[str]) -> Iterator[None]:
    """Whatever a back end raises is a fault, and is counted."""
    try:
        yield
    except StorageError as error:
        causes[error.cause] += 1
        log.debug("storage: %s", error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # anybody's code; a client in Rust panics with what is no `Exception`
        causes["crashed"] += 1
        log.debug("storage: the back end raised", exc_info=True)


@dataclass(frozen=True, slots=True)
class Written:
    """What a write did.

    Args:
        pages: stored by it.
        gap: nothing was stored, since the page before is not there.
    """

    pages: int
    gap: bool
