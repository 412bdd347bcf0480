"""Moves blocks between an engine's memory and a store, as a plan says, through host memory of its own.

    save    blocks -> slots, within the step        slots -> storage, sealed, by workers
    load    storage -> slots, verified, by workers  slots -> blocks, when the engine polls

A slot holds one block with its header. Blocks are copied within the step that computed them, so an engine may free or
overwrite them at once after it. A save for which no slot is free is dropped and counted. A load that fails says from
which block on; the engine computes those.

This module knows jobs, slots and results. `Blocks` is the engine's memory; decisions are in `block_plan`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument
from mainstem.integrations.block_plan import GroupBlocks, Job
from mainstem.tiers.storage import store as stores
from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.sealer import HEADER_BYTES
from mainstem.tiers.storage.slots import Slots
from mainstem.tiers.storage.store import Store, Written

log = logging.getLogger(__name__)

_SAVES_SHARE = 0.5  # of the slots at most, so that a slow store does not keep loads waiting for room
_POLL_S = 0.001


class Blocks(Protocol):
    """The engine's memory. A block of a row has the same number of bytes on each of its layers, layer after layer."""

    def rows(self) -> Sequence[Row]:
        """The rows that have blocks."""

    def layers(self, row: Row) -> Sequence[str]:
        """The layers of a row, in the order of their bytes."""

    def block_bytes(self, row: Row) -> int:
        """The bytes of a block of a row, all layers together."""

    def gather(self, row: Row, layer: str, blocks: Sequence[int], slots: NDArray[np.uint8]) -> None:
        """Copies a layer of blocks to its place in the rows of `slots`: [blocks, block_bytes]."""

    def scatter(self, row: Row, blocks: Sequence[int], slots: NDArray[np.uint8]) -> None:
        """Copies blocks from the rows of `slots`: [blocks, block_bytes]."""


@dataclass(slots=True)
class Results:
    """The jobs that have ended since the last poll.

    Args:
        loaded: requests whose load has ended, well or not.
        failed: those of them of which something could not be loaded.
        failed_blocks: the blocks that were not loaded.
        saved: the saves that have ended, by number, and whether storage has all their blocks.
    """

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    saved: dict[int, bool] = field(default_factory=dict)


@dataclass(slots=True)
class _BlockCopy:
    """A part on its way to slots, within the step."""

    part: GroupBlocks
    slots: list[int]
    content: NDArray[np.uint8]
    layers: set[str]  # that are not copied yet


@dataclass(slots=True)
class _Save:
    """A job within its step. `whole`: there was room for all of it."""

    number: int
    whole: bool
    copies: list[_BlockCopy]


@dataclass(slots=True)
class _QueuedSave:
    """A job after its step."""

    number: int
    whole: bool
    slots: list[int]
    call: StoreCall[Written]


@dataclass(slots=True)
class _BlockRead:
    part: GroupBlocks
    slots: list[int]
    call: StoreCall[int]


@dataclass(slots=True)
class _Load:
    request: str
    waiting: deque[GroupBlocks]
    reads: deque[_BlockRead] = field(default_factory=deque)
    no_room_since_s: float | None = None


class Transfers:
    """Carries out the jobs of one worker. One thread.

    Args:
        store: reads and writes; closed by `close`.
        blocks: the engine's memory.
        buffer_bytes: the size of the slots, all together.
        sleep: waits in `drain` and `pause`.

    Raises:
        BadArgument: `buffer_bytes` is less than two blocks.
    """

    def __init__(
        self, store: Store, blocks: Blocks, buffer_bytes: int, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        longest = max(blocks.block_bytes(row) for row in blocks.rows())
        count = buffer_bytes // (HEADER_BYTES + longest)
        if count < 2:
            raise BadArgument("buffer_bytes", buffer_bytes, f"at least {2 * (HEADER_BYTES + longest)}, two blocks")
        self._store, self._blocks, self._sleep = store, blocks, sleep
        self._slots = Slots(count, longest)
        store.register([self._slots.memory])
        self._saves: list[_Save] = []
        self._writes: deque[_QueuedSave] = deque()
        self._saved: dict[int, bool] = {}  # as in `Results`
        self._loads: deque[_Load] = deque()
        self._saving = 0  # slots that saves hold
        self.counts: Counter[str] = Counter()
        """Blocks by what became of them: "saved", "loaded", "not loaded", "no room" (to save)."""

    # ---------------------------------------------------------------- saves

    def begin(self, jobs: Sequence[Job]) -> None:
        """Takes slots for the saves of a step; their blocks are copied by `copy` and `flush`."""
        self._reap()
        for job in jobs:
            copies = [copy for part in job.parts if (copy := self._room_for(part)) is not None]
            whole = sum(len(copy.slots) for copy in copies) == sum(len(part.blocks) for part in job.parts)
            if copies:
                self._saves.append(_Save(job.number, whole, copies))
            else:
                self._saved[job.number] = False

    def copy(self, layer: str) -> None:
        """Copies a layer, which the step has just computed."""
        for save in self._saves:
            for copy in save.copies:
                if layer in copy.layers:
                    self._blocks.gather(copy.part.row, layer, copy.part.blocks, copy.content)
                    copy.layers.remove(layer)

    def flush(self) -> None:
        """Copies what is left, and queues the writes."""
        for save in self._saves:
            parts, slots = [], []
            for copy in save.copies:
                for layer in sorted(copy.layers):
                    self._blocks.gather(copy.part.row, layer, copy.part.blocks, copy.content)
                end = HEADER_BYTES + copy.content.shape[1]
                self._slots.rows[copy.slots, HEADER_BYTES:end] = copy.content
                views = self._slots.views(copy.slots, copy.content.shape[1])
                parts.append(stores.Part(copy.part.row, copy.part.names, views))
                slots += copy.slots
            self._writes.append(_QueuedSave(save.number, save.whole, slots, self._store.write(parts, queued=True)))
        self._saves.clear()

    def _room_for(self, part: GroupBlocks) -> _BlockCopy | None:
        limit = int(self._slots.count * _SAVES_SHARE)
        count = min(len(part.blocks), self._slots.free, limit - self._saving)
        if count < len(part.blocks):
            if not self.counts["no room"]:
                log.warning("storage is slower than the engine: blocks are not saved; further ones are only counted")
            self.counts["no room"] += len(part.blocks) - max(0, count)
        if count <= 0:
            return None
        self._saving += count
        content = np.empty((count, self._blocks.block_bytes(part.row)), dtype=np.uint8)
        return _BlockCopy(part.cut(0, count), self._slots.take(count), content, set(self._blocks.layers(part.row)))

    def _reap(self) -> None:
        """Takes in the writes that have returned."""
        kept: deque[_QueuedSave] = deque()
        for write in self._writes:
            if write.call.done():
                self.counts["saved"] += write.call.value.pages
                self._saving -= len(write.slots)
                self._slots.give(write.slots)
                self._saved[write.number] = write.whole and write.call.value.whole
            else:
                kept.append(write)
        self._writes = kept

    # ---------------------------------------------------------------- loads

    def load(self, jobs: Sequence[Job]) -> None:
        """Starts loads. The blocks belong to them until `poll` reports the request."""
        for job in jobs:
            parts: deque[GroupBlocks] = deque()
            size = self._store.config.batch_pages
            for part in job.parts:
                for at in range(0, len(part.blocks), size):
                    parts.append(part.cut(at, at + size))
            self._loads.append(_Load(job.request, parts))
        self._advance()

    def poll(self) -> Results:
        """Copies what has been read to its blocks, and returns what has ended. Does not wait."""
        self._reap()
        results = Results(saved=self._saved)
        self._saved = {}
        for load in self._loads:
            self._take_in(load, results)
        self._loads = deque(load for load in self._loads if load.request not in results.loaded)
        self._advance()
        return results

    def pause(self) -> None:
        """Gives the interpreter to other threads for a millisecond."""
        self._sleep(_POLL_S)

    def check(self) -> None:
        """Checks that each slot is free, or held by one save, load or late call.

        Raises:
            AssertionError: a rule is broken.
        """
        saving = [slot for save in self._saves for copy in save.copies for slot in copy.slots]
        saving += [slot for write in self._writes for slot in write.slots]
        reading = [slot for load in self._loads for read in load.reads for slot in read.slots]
        assert self._saving == len(saving), "the slots of saves are counted"
        self._slots.check([*saving, *reading])
        stuck = [load for load in self._loads if load.no_room_since_s is not None]
        assert all(load.waiting for load in stuck), "who waits for room has more to read"
        assert min([0, *self.counts.values()]) == 0, "a count is below 0"

    def drain(self, timeout_s: float) -> bool:
        """Waits until the writes that are queued have ended; returns whether they have."""
        end_s = self._store.clock() + timeout_s
        while self._writes and self._store.clock() < end_s:
            self._reap()
            self._sleep(_POLL_S)
        return not self._writes

    def close(self, timeout_s: float) -> None:
        """Ends the store, after the writes that are queued or when the time is over."""
        self._store.close(timeout_s)
        self._reap()

    def _advance(self) -> None:
        """Starts reads for the oldest loads, as far as there are slots."""
        active = sum(len(load.reads) for load in self._loads)
        for load in self._loads:
            while load.waiting and active < self._store.config.batches:
                part = load.waiting[0]
                count = min(len(part.blocks), max(1, self._slots.count // 2))
                if not (slots := self._slots.take(count)):
                    load.no_room_since_s = load.no_room_since_s or self._store.clock()
                    return
                load.waiting.popleft()
                load.no_room_since_s = None
                if count < len(part.blocks):
                    load.waiting.appendleft(part.cut(count))
                    part = part.cut(0, count)
                views = self._slots.views(slots, self._blocks.block_bytes(part.row))
                load.reads.append(_BlockRead(part, slots, self._store.read(part.row, part.names, views)))
                active += 1

    def _take_in(self, load: _Load, results: Results) -> None:
        """Takes the reads of a load that have ended, in order."""
        while load.reads and load.reads[0].call.over():
            read = load.reads.popleft()
            good = read.call.value if read.call.done() else 0
            if good:
                end = HEADER_BYTES + self._blocks.block_bytes(read.part.row)
                content = self._slots.rows[read.slots[:good], HEADER_BYTES:end]
                self._blocks.scatter(read.part.row, read.part.blocks[:good], content)
                self.counts["loaded"] += good
            self._slots.give(read.slots, read.call)
            if good < len(read.part.blocks):
                self._fail(load, read.part.blocks[good:], results)
                return
        if self._is_stuck(load):
            self._store.calls.count("host_room")
            self._fail(load, [], results)
        elif not load.reads and not load.waiting:
            results.loaded.add(load.request)

    def _is_stuck(self, load: _Load) -> bool:
        since_s = load.no_room_since_s
        return since_s is not None and self._store.clock() >= since_s + self._store.config.call_timeout_s

    def _fail(self, load: _Load, blocks: Sequence[int], results: Results) -> None:
        rest = [
            *blocks,
            *(block for part in (*(read.part for read in load.reads), *load.waiting) for block in part.blocks),
        ]
        self.counts["not loaded"] += len(rest)
        for read in load.reads:
            self._slots.give(read.slots, read.call)
        load.reads.clear()
        load.waiting.clear()
        results.failed_blocks.update(rest)
        results.failed.add(load.request)
        results.loaded.add(load.request)
