"""Plans what an engine with blocks and block hashes loads from a store and saves there, without any content.

    hit         how many tokens of this request can be loaded?      None: the store has not answered yet
    allocated   the engine has blocks for them                      -> a load
    scheduled   the engine computes up to here in this step         -> a save of what is whole then
    take        the loads and saves of this step

An engine hashes every `hash_tokens` tokens of a prompt; each hash covers the whole prefix. Mainstem chains its own
names over these hashes, so a name also depends on the identity and the secret. A block belongs to a group, which is a
component of the model. Its name is that of its last hash, its row that of its group.

This module knows tokens, block ids and names. It knows no tensors and no engine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.components import Component, State
from mainstem.errors import BadArgument
from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.store import Found, Store

NULL_BLOCK = 0
"""The block id in place of blocks that the engine does not keep, such as those before a window."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a model that share their block ids.

    Args:
        row: how storage names it; `row.number` is its index among the engine's groups.
        component: which positions a request needs of it.
        block_tokens: positions per block.
        offered: its blocks are handed over one by one (`Planner.state`), not found in the block table.
    """

    row: Row
    component: Component
    block_tokens: int
    offered: bool = False


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one group.

    Args:
        row: the group's row.
        names: the names of the blocks in storage.
        blocks: their block ids.
        ends: how many tokens of the request there are up to the end of each block.
    """

    row: Row
    names: list[bytes]
    blocks: list[int]
    ends: list[int]

    def cut(self, first: int, last: int | None = None) -> GroupBlocks:
        """Returns blocks [first, last) of it."""
        return GroupBlocks(self.row, self.names[first:last], self.blocks[first:last], self.ends[first:last])


@dataclass(frozen=True, slots=True)
class Job:
    """The blocks that are loaded, or saved, for one request in one step.

    Args:
        request: its id.
        parts: the blocks of each group, without empty parts.
        number: of a save, which no other save has.
    """

    request: str
    parts: tuple[GroupBlocks, ...]
    number: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The jobs of one step, in order; picklable."""

    loads: tuple[Job, ...] = ()
    saves: tuple[Job, ...] = ()


@dataclass(slots=True)
class _Lookup:
    """Questions about blocks from `first` on, one for each rank. `life` counts how often the request was preempted."""

    life: int
    first: int
    last: int
    calls: list[StoreCall[Found]]
    there: list[NDArray[np.bool_]] | None = None  # by group, once it is answered
    used: bool = False


@dataclass(slots=True)
class _Request:
    hashes: Sequence[bytes]  # the engine appends to it
    names: list[bytes]  # the name before the first page, then one for each hash
    saved: list[int]  # by group: blocks that need not be saved any more
    computed: int = 0  # tokens that the engine has itself
    lookup: _Lookup | None = None


@dataclass(slots=True)
class _Step:
    loads: list[Job] = field(default_factory=list)
    saves: dict[str, list[GroupBlocks]] = field(default_factory=dict)


class Planner:
    """Plans loads and saves. One thread.

    Args:
        stores: one for each rank whose blocks are different, all over one back end. They are only asked.
        groups: the groups that are stored; together they are what a request needs.
        hash_tokens: positions per hash.

    Raises:
        BadArgument: there is no group, or a block is not a whole number of hashes.
    """

    def __init__(self, stores: Sequence[Store], groups: Sequence[LayerGroup], hash_tokens: int) -> None:
        if not groups:
            raise BadArgument("groups", groups, "at least one group of layers with a prefix cache")
        for group in groups:
            if group.block_tokens % hash_tokens:
                raise BadArgument(
                    "block size", group.block_tokens, f"a multiple of {hash_tokens}, the tokens of a hash"
                )
        self._stores, self._groups, self._hash_tokens = stores, groups, hash_tokens
        self._sealer = stores[0].sealer
        self._unit = math.lcm(*(group.block_tokens for group in groups))
        self._requests: dict[str, _Request] = {}
        self._step = _Step()
        self._saves = itertools.count()
        self._epoch = b""

    def begin(self, request: str, hashes: Sequence[bytes], namespace: bytes = b"") -> None:
        """Adds a request.

        Args:
            request: its id.
            hashes: the hashes of its whole blocks so far; the engine appends to it.
            namespace: what else its content depends on; requests of different namespaces share nothing.
        """
        root = self._sealer.root(len(self._epoch).to_bytes(8, "little") + self._epoch + namespace)
        self._requests[request] = _Request(hashes, [root], [-1] * len(self._groups))

    def end(self, request: str) -> None:
        """Removes a request. What it planned for this step stays planned."""
        self._requests.pop(request, None)

    def forget(self, epoch: bytes) -> None:
        """Removes all requests, and makes everything that was stored before unfindable for those that begin later.

        A request that runs on has blocks from before, so it must not be begun again until it starts anew.

        Args:
            epoch: at least 16 random bytes.
        """
        self._epoch = epoch
        self._requests.clear()

    def hit(self, request: str, computed: int, tokens: int, life: int = 0) -> int | None:
        """Returns how many tokens after `computed` can be loaded, or None: ask again in the next step.

        Args:
            request: its id.
            computed: tokens that the engine has itself, a multiple of the block size of every group.
            tokens: all tokens of the request. The last one is always computed.
            life: a different number each time that the request starts anew. Each time, one hit at most is used.
        """
        entry = self._requests[request]
        entry.computed = computed
        last = min((tokens - 1) // self._unit, len(entry.hashes) * self._hash_tokens // self._unit)
        lookup = entry.lookup
        if lookup is None or lookup.life != life or computed < lookup.first * self._unit:
            if last * self._unit <= computed:
                return 0
            lookup = entry.lookup = self._look_up(entry, life, computed // self._unit, last)
        if lookup.used:
            return 0
        if lookup.there is None and not self._answered(lookup):
            return None
        return max(0, self._longest(lookup, computed) - computed)

    def allocated(self, request: str, tokens: int, blocks: Sequence[Sequence[int]]) -> None:
        """Plans the load of a hit.

        Args:
            request: its id.
            tokens: tokens after `computed` of the last call of `hit`; 0 loads nothing.
            blocks: by index of the group, the block ids from the first token on.
        """
        if tokens == 0:
            return
        entry = self._requests[request]
        if entry.lookup is not None:
            entry.lookup.used = True
        end = entry.computed + tokens
        parts = []
        for at, group in enumerate(self._groups):
            first, last = entry.computed // group.block_tokens, end // group.block_tokens
            parts.append(self._part(entry, group, blocks[group.row.number], first, last))
            entry.saved[at] = last
        self._step.loads.append(Job(request, tuple(part for part in parts if part.blocks)))

    def scheduled(self, request: str, computed: int, end: int, blocks: Sequence[Sequence[int]]) -> None:
        """Plans the save of blocks that are whole after this step.

        Args:
            request: its id.
            computed: tokens that are there before this step.
            end: tokens that are there after it, as far as the engine knows.
            blocks: by index of the group, the block ids from the first token on.
        """
        entry = self._requests[request]
        whole = min(end, len(entry.hashes) * self._hash_tokens)
        for at, group in enumerate(self._groups):
            if group.offered:
                continue
            before, last = computed // group.block_tokens, whole // group.block_tokens
            first = before if entry.saved[at] < 0 else min(entry.saved[at], before)  # fewer: computed again
            self._save(request, self._part(entry, group, blocks[group.row.number], first, last))
            entry.saved[at] = max(first, last)

    def state(self, request: str, group_number: int, block: int, end: int) -> None:
        """Plans the save of a state that the engine hands over, that of the tokens before `end`."""
        entry = self._requests.get(request)
        group = next((each for each in self._groups if each.row.number == group_number), None)
        if entry is None or group is None or not group.offered or block == NULL_BLOCK or end % group.block_tokens:
            return
        if end <= len(entry.hashes) * self._hash_tokens:
            name = self._names(entry, end)[end // self._hash_tokens]
            self._save(request, GroupBlocks(group.row, [name], [block], [end]))

    def take(self) -> StepPlan:
        """Returns what was planned since the last call."""
        step, self._step = self._step, _Step()
        saves = (Job(request, tuple(parts), next(self._saves)) for request, parts in step.saves.items())
        return StepPlan(tuple(step.loads), tuple(saves))

    def _save(self, request: str, part: GroupBlocks) -> None:
        if part.blocks:
            self._step.saves.setdefault(request, []).append(part)

    def _part(self, entry: _Request, group: LayerGroup, blocks: Sequence[int], first: int, last: int) -> GroupBlocks:
        """Returns blocks [first, last) of a group, without those that the engine does not keep."""
        names = self._names(entry, last * group.block_tokens)
        kept = [at for at in range(first, min(last, len(blocks))) if blocks[at] != NULL_BLOCK]
        ends = [(at + 1) * group.block_tokens for at in kept]
        return GroupBlocks(
            group.row, [names[end // self._hash_tokens] for end in ends], [blocks[at] for at in kept], ends
        )

    def _names(self, entry: _Request, end: int) -> list[bytes]:
        """Returns the names of a request, up to `end` at least."""
        have, need = len(entry.names) - 1, end // self._hash_tokens
        if need > have:
            hashes = entry.hashes[have:need]
            entry.names += self._sealer.names(entry.names[-1], b"".join(hashes), len(hashes[0]))
        return entry.names

    def _look_up(self, entry: _Request, life: int, first: int, last: int) -> _Lookup:
        at, end = (units * self._unit // self._hash_tokens for units in (first, last))
        parent, symbols = self._names(entry, first * self._unit)[at], b"".join(entry.hashes[at:end])
        groups = [
            (group.row, range(stride - 1, end - at, stride))
            for group in self._groups
            for stride in [group.block_tokens // self._hash_tokens]
        ]
        calls = [store.look_up(parent, symbols, len(entry.hashes[0]), groups) for store in self._stores]
        return _Lookup(life, first, last, calls)

    def _answered(self, lookup: _Lookup) -> bool:
        """Whether a lookup has ended, by an answer or by its deadline. A store that is slow is not waited for."""
        if not all(call.over(patient=False) for call in lookup.calls):
            return False
        span = (lookup.last - lookup.first) * self._unit
        answers = [call.value.there for call in lookup.calls]
        lookup.there = []
        for at, group in enumerate(self._groups):
            there = np.full(span // group.block_tokens, fill_value=True)
            for answer in answers:
                there &= np.array(answer[at], dtype=np.bool_) if answer else False
            lookup.there.append(there)
        return True

    def _longest(self, lookup: _Lookup, computed: int) -> int:
        """Returns the last position that a request can start from, or `computed`."""
        assert lookup.there is not None
        base = lookup.first * self._unit
        ends = np.arange(computed // self._unit + 1, lookup.last + 1, dtype=np.int64) * self._unit
        good = np.ones(len(ends), dtype=np.bool_)
        for group, there in zip(self._groups, lookup.there, strict=True):
            size, component = group.block_tokens, group.component
            starts = ends - size if isinstance(component, State) else component.needed_from(ends)
            missing = np.concatenate(([0], np.cumsum(~there)))
            first, last = (np.maximum(starts, computed) - base) // size, (ends - base) // size
            good &= missing[last] == missing[np.minimum(first, last)]
        return int(ends[good][-1]) if good.any() else computed
