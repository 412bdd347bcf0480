"""`Store`: a safe wrapper of a back end. Every failure is a miss and is counted by its cause; no caller blocks on one.

    look_up   which pages of a prompt are stored?       -> their names, and which parts of them are there
    read      pages into host slots, each verified      -> how many are intact, from the first
    write     host slots, sealed                        -> how many were stored

Each call runs on a worker and has a deadline, which includes the wait for a worker unless the call is a write that is
`queued`. A call that exceeds it counts as failed at once, but keeps its slots until it returns. After repeated failures
the breaker opens: calls end as misses without being made. After a cool-down one call is tried.

Each component of a page is a value of its own. Which of them a prefix needs is not decided here: the store knows
names, rows, symbols and slots. It knows nothing of trees or pools.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from mainstem.errors import BadArgument, StorageError
from mainstem.settings.engine import StorageConfig
from mainstem.storage.base import Backend
from mainstem.storage.breaker import Breaker
from mainstem.storage.peer import Beside, Peering
from mainstem.tiers.host.shelf import Shelf
from mainstem.tiers.storage import identities, sealed
from mainstem.tiers.storage.calls import Calls, StoreCall, caught
from mainstem.tiers.storage.codecs import CODECS, UNPLACED, Codec
from mainstem.tiers.storage.rows import Packing, Row
from mainstem.tiers.storage.sealer import HEADER_BYTES, Label, Sealer
from mainstem.tiers.storage.workers import Workers

log = logging.getLogger(__name__)

_MIN_CLOSE_S = 0.1  # enough for idle workers to end

Find: TypeAlias = Callable[[Row, Sequence[int]], list[bool]]
"""Asks storage which pages of a row it has."""

Search: TypeAlias = Callable[[Find], list[list[bool]]]
"""Returns, for each row of a lookup, which of its pages storage seems to have. Runs on a worker."""


class Store:
    """A back end with verified pages, deadlines, a breaker and counters. One thread at a time.

    Args:
        backend: stores the bytes.
        sealer: seals and verifies pages.
        config: limits and policies.
        readers, writers: run the calls; separate, so that reads do not wait for writes.
        wall_clock: seconds since the epoch, for the headers of pages.
        codec: encodes the numbers of a page, of rows that are not exact; the sealer's identity must include its name.
        dtype: the dtype of the numbers, for a codec other than "none".
        peers: read for what the back end lacks; nothing is written to them.
        shelf: notes which slots hold sealed values, for peers of this one.

    Attributes:
        calls: under way, late or failed.
        peering: where peers read, and whose pages are read; whoever made them sets it.
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
        wall_clock: Callable[[], float] = time.time,
        codec: Codec = CODECS["none"],
        dtype: str = "",
        peers: Backend | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self._packing = Packing(codec, dtype)
        self._peers, self._reads = peers, backend if peers is None else Beside(backend, peers)
        self.shelf = shelf
        self.peering: Peering | None = None
        self.backend, self.sealer, self.config = backend, sealer, config
        self.clock, self.calls = clock, Calls(config, clock)
        self._label = (
            b"" if sealer.identity is None else identities.id_of(identities.summarize(sealer.identity), sealer)
        )
        self._wall_clock = wall_clock
        self._explained = ""  # what was logged about pages that are not found
        self._readers, self._writers = readers, writers

    @property
    def breaker(self) -> Breaker:
        """Stops calls after repeated failures."""
        return self.calls.breaker

    @property
    def slow(self) -> bool:
        """Whether a request has waited in vain, and no call has been quicker since then."""
        return self.calls.slow

    @property
    def faults(self) -> Counter[str]:
        """How many faults there were so far, by cause."""
        return self.calls.faults

    @property
    def peer_faults(self) -> dict[str, int]:
        """How often peers did not give what was asked, by cause."""
        return dict(getattr(self._peers, "counts", {}))

    def register(self, regions: Sequence[memoryview]) -> None:
        """Registers the memory that holds the slots.

        Raises:
            StorageError: the client rejects it.
        """
        self.backend.register(regions)

    def check_length(self, row: Row, payload_bytes: int) -> None:
        """Logs a warning if the back end takes no value as long as those of a row: it refuses each."""
        size = self._packing.size(row, HEADER_BYTES + payload_bytes)
        limit = self.backend.longest
        if limit is not None and size > limit.size:
            taken = f"a value has {size} bytes, and the store takes up to {limit.size}"
            log.warning("storage: %s is never stored: %s: %s", row.name, taken, limit.remedy)

    def look_up(
        self,
        parent: bytes,
        symbols: bytes | memoryview,
        page_bytes: int,
        asked: Sequence[tuple[Row, Sequence[int]]],
        search: Search | None = None,
    ) -> StoreCall[Found]:
        """Looks up pages of `symbols`, which follow the page with name `parent`, in one call.

        Args:
            parent, symbols, page_bytes: see `Sealer.names`.
            asked: rows, and for each the pages to look up, counted from the first of `symbols`.
            search: where each key is a request, it is called to find the same by asking for fewer pages.
        """

        def look_up(causes: Counter[str]) -> Found:
            names = self.sealer.names(parent, symbols, page_bytes)

            def find(row: Row, places: Sequence[int]) -> list[bool]:
                return self._find([(row, [names[place] for place in places])], self._reads)[0]

            if search is not None and not self.backend.capabilities.batched:
                return Found(names, search(find))
            rows = [(row, [names[page] for page in pages]) for row, pages in asked]
            return Found(names, self._find(rows, self._reads))

        return self.calls.submit(self._readers, look_up, Found())

    def find(self, asked: Sequence[tuple[Row, Sequence[bytes]]], *, alone: bool = False) -> StoreCall[list[list[bool]]]:
        """Looks up pages by their names, in one call. The value is, for each row, whether each page is there.

        Args:
            asked: rows, and for each the names of the pages to look up.
            alone: peers are not asked.
        """
        backend = self.backend if alone else self._reads
        return self.calls.submit(
            self._readers, lambda causes: self._find(asked, backend), [[False] * len(names) for _, names in asked]
        )

    def read(
        self, row: Row, names: Sequence[bytes], slots: Sequence[memoryview], *, alone: bool = False
    ) -> StoreCall[int]:
        """Reads one row of pages into slots. The value counts those that are intact and verified, from the first.

        Args:
            alone: peers are not asked, nor given what the slots then hold: these are no host pages.
        """
        backend, shelf = (self.backend, None) if alone else (self._reads, self.shelf)

        def read(causes: Counter[str]) -> int:
            keys = self.sealer.keys(names, row.name)
            packed = self._packing.room(row, slots)
            lengths = backend.get(keys, packed)
            for good, (key, slot, length) in enumerate(zip(keys, packed, lengths, strict=True)):
                if (cause := sealed.fault(self.sealer, key, slot, length)) is not None:
                    causes[cause] += 1
                    if cause != "absent":
                        with caught(causes):
                            self.backend.delete([key])  # so that it does not block an intact one
                    return good
                try:
                    self._packing.unpack(slot, slots[good])
                except BadArgument:  # sealed, but no value of this codec
                    causes["codec"] += 1
                    return good
                if shelf is not None and slot is slots[good]:
                    shelf.place([(key, slot)])
            return len(keys)

        return self.calls.submit(self._readers, read, 0)

    def write(
        self, parts: Sequence[Part], after: tuple[Row, bytes] | None = None, *, queued: bool = False
    ) -> StoreCall[Written]:
        """Seals and stores pages. Skips those that are stored already.

        Args:
            parts: the pages of each row.
            after: the row and name of a page without which these would never be found: if it is not stored, neither
                are they. None: there is none.
            queued: its time runs only once a worker begins it, because others may be queued before it.
        """

        def write(causes: Counter[str]) -> Written:
            needed = [] if after is None else self.sealer.keys([after[1]], after[0].name)
            keys = [self.sealer.keys(part.names, part.row.name) for part in parts]
            there = iter(self._exist([*needed, *chain(*keys)], self.backend))
            if needed and not next(there):
                return Written(0, gap=True, whole=False)
            stored = 0
            for part, keys_of_part in zip(parts, keys, strict=True):
                numbers = part.numbers or [UNPLACED.number] * len(keys_of_part)
                held = zip(keys_of_part, part.slots, numbers, strict=True)
                stored_already = [(each, next(there)) for each in held]
                lacking = [each for each, is_there in stored_already if not is_there]
                self._shelve(part, [each for each, is_there in stored_already if is_there])
                for at in range(0, len(lacking), self.config.batch_pages):
                    batch = lacking[at : at + self.config.batch_pages]
                    whole = self._put(part, batch, causes)
                    stored += whole
                    if whole < len(batch):
                        return Written(stored, gap=False, whole=False)
            return Written(stored, gap=False)

        return self.calls.submit(self._writers, write, Written(0, gap=False, whole=False), queued=queued)

    def delete(self, rows: Sequence[Row], names: Sequence[bytes]) -> StoreCall[bool]:
        """Deletes these rows of pages. The value is whether the back end did."""

        def delete(causes: Counter[str]) -> bool:
            self.backend.delete(list(chain(*(self.sealer.keys(names, row.name) for row in rows))))
            return True

        return self.calls.submit(self._writers, delete, False)

    def clear(self) -> StoreCall[bool]:
        """Deletes everything in the back end. The value is whether it did."""

        def clear(causes: Counter[str]) -> bool:
            self.backend.clear()
            return True

        return self.calls.submit(self._writers, clear, False)

    def keep_note(self, name: str, content: bytes, room_bytes: int) -> StoreCall[bool]:
        """Stores a note, replacing the one with the same name. The value is whether the back end did."""

        def keep(causes: Counter[str]) -> bool:
            return sealed.keep_note(self.backend, self.sealer, self.sealer.record(name), content, room_bytes)

        return self.calls.submit(self._writers, keep, False)

    def find_note(self, name: str, room_bytes: int) -> StoreCall[bytes]:
        """Reads a note of size `room_bytes`, padded with zeros; empty if there is none."""

        def find(causes: Counter[str]) -> bytes:
            content, cause = sealed.find_note(self.backend, self.sealer, self.sealer.record(name), room_bytes)
            if cause is not None:
                causes[cause] += 1
            return content

        return self.calls.submit(self._readers, find, b"")

    def enter_identity(self) -> StoreCall[list[identities.Summary]]:
        """Enters the identity of the pages in the list of the store. The value is the list before that."""
        return self.calls.submit(self._writers, lambda causes: identities.enter(self.backend, self.sealer, causes), [])

    def explain(self, listed: Sequence[identities.Summary]) -> None:
        """Logs why the store has no pages of this identity, if that list says so; the same once."""
        identity = self.sealer.identity
        why = None if identity is None else identities.explain(identities.summarize(identity), listed)
        if why is not None and why != self._explained:
            self._explained = why
            log.warning("storage: %s", why)

    def close(self, timeout_s: float) -> None:
        """Ends the workers and the back end. If a call does not return in time, the back end stays open.

        Later calls are misses.
        """
        self.calls.closed = True
        end_s = self.calls.clock() + timeout_s
        ended = [
            workers.close(max(_MIN_CLOSE_S, end_s - self.calls.clock())) for workers in (self._writers, self._readers)
        ]
        if self.shelf is not None:
            self.shelf.close()
        if all(ended):
            self._reads.close()
        else:
            log.warning("storage: calls have not returned after %s s; the back end is not closed", timeout_s)

    def _find(self, asked: Sequence[tuple[Row, Sequence[bytes]]], backend: Backend) -> list[list[bool]]:
        keys = [self.sealer.keys(names, row.name) for row, names in asked]
        there = iter(self._exist(list(chain(*keys)), backend))
        return [[next(there) for _ in part] for part in keys]

    def _exist(self, keys: Sequence[bytes], backend: Backend) -> list[bool]:
        """Asks which keys are stored.

        Raises:
            StorageError: the back end did not answer once for each key.
        """
        there = backend.exists(keys) if keys else []
        if not isinstance(there, list) or len(there) != len(keys):
            raise StorageError("protocol", f"not an answer for each of {len(keys)} keys: {there!r:.100}")
        return there

    def _put(self, part: Part, batch: Sequence[tuple[bytes, memoryview, int]], causes: Counter[str]) -> int:
        """Seals and puts a few pages of a part; returns how many were stored."""
        keys = [key for key, *_ in batch]
        try:
            packed = self._packing.pack(part.row, [slot for _, slot, _ in batch], [number for *_, number in batch])
        except BadArgument:  # numbers that are infinite or NaN, or that its calibration does not expect
            causes["codec"] += 1
            return 0
        self._seal(part, keys, packed)
        if self.shelf is not None:
            self.shelf.place((key, room) for (key, slot, _), room in zip(batch, packed, strict=True) if room is slot)
        results = self.backend.put(keys, packed)
        whole = sum(1 for _, good in zip(packed, results, strict=True) if good)
        if whole < len(batch):
            causes["full"] += 1
        return whole

    def _shelve(self, part: Part, held: Sequence[tuple[bytes, memoryview, int]]) -> None:
        """Seals pages that are stored already, so that peers can be given them, too."""
        if self.shelf is None or not self._packing.plain(part.row):
            return
        values = [(key, slot) for key, slot, _ in held if key not in self.shelf]
        self._seal(part, [key for key, _ in values], [slot for _, slot in values])
        self.shelf.place(values)

    def _seal(self, part: Part, keys: Sequence[bytes], slots: Sequence[memoryview]) -> None:
        label = Label(self._label, self.sealer.id_of(part.namespace), part.row.name)
        for key, slot in zip(keys, slots, strict=True):
            self.sealer.seal(slot, key, label, self._wall_clock())


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a lookup; empty if it failed.

    Args:
        names: the names of all pages of the symbols.
        there: for each row that was asked for, whether storage has each of its pages.
    """

    names: list[bytes] = field(default_factory=list)
    there: list[list[bool]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Part:
    """Pages of one row to be written.

    Args:
        slots: their host slots.
        namespace: the encoded namespace of the pages, for their labels.
        numbers: of the pages, counted from the beginning of their prompt, for a codec; none: not known.
    """

    row: Row
    names: Sequence[bytes]
    slots: Sequence[memoryview]
    namespace: bytes = b""
    numbers: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a write.

    Args:
        pages: pages that it stored.
        gap: whether nothing was stored because the page before is not stored.
        whole: whether storage has all of them now, as far as this call knows.
    """

    pages: int
    gap: bool
    whole: bool = True
