"""Rules for which recurrent states are kept: ours on the real cache, and two others on an obvious tree.

All see prompts as paths of blocks. A state can be kept after each block. A prompt hits as far as the last state on its
path. There is memory for the KV of everything, and slots for few states; a request takes one slot to compute with.

    ours       `plan_checkpoints` and `PrefixCache`, as the scheduler uses them
    earlier    where prompts parted and ended; the last state of an answer; superseded states are evicted first, then
               GreedyDual by the blocks that a state saved when it was last used
    Marconi    Pan et al., "Marconi: prefix caching for the era of hybrid LLMs", MLSys 2025 (arXiv:2411.19379): a state
               where a prompt leaves the tree inside an edge, and one after the last decoded token. Of the states with
               at most one child it evicts that of the least recency + alpha * FLOPs saved per byte, both scaled to
               [0, 1]

The paper tunes alpha by replays of the first requests. Here it is the best of `ALPHAS` for each cell, in hindsight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from mainstem.cache.components import Component, Full, State
from mainstem.cache.keys import HashKeys
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.runtime.schedule.checkpoints import plan_checkpoints

ALPHAS = (0.0, 1.0, 2.0)
_STATE_TOKENS = 4096  # the state of a hybrid is about as large as the KV of this many tokens
_BLOCKS = 400_000


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Args:
        path: names of the whole blocks of prompt and answer.
        end: blocks of the prompt that a hit may have; one token is always left to compute.
        marks: blocks before the places where messages begin, ascending.
    """

    path: list[int]
    end: int
    marks: tuple[int, ...] = ()


class Rule(Protocol):
    """Serves requests one after another."""

    kept: int
    """States kept at positions of prompts."""

    def serve(self, ask: Ask) -> int:
        """Returns the blocks that a request hits."""


class Ours:
    """The real cache, with the planned checkpoints.

    Args:
        slots: slots for states.
        marks: whether marks are given with prompts.
    """

    def __init__(self, slots: int, *, marks: bool = True) -> None:
        rows: dict[Component, int] = {Full(): _BLOCKS, State(): slots}
        self._cache = PrefixCache(rows, 1, keys=HashKeys(8), copy_state=lambda source, target: None)
        self._marks = marks
        self.kept = 0

    def serve(self, ask: Ask) -> int:
        """See `Rule.serve`."""
        end, last = ask.end, len(ask.path)
        with self._cache.lease([*ask.path[:end], ask.path[end] if end < last else 0]) as lease:
            marks = ask.marks if self._marks else ()
            lease.reserve(end + 1 - lease.reserved)
            for position, reason in plan_checkpoints(lease.hit, lease.reach, end + 1, 1, marks=marks).items():
                self.kept += lease.checkpoint(position, mark=reason == "mark")
                lease.publish(position)
            lease.publish(end)
            lease.append(ask.path[end + 1 :])
            lease.reserve(max(0, last - lease.reserved))
            if last > end:
                lease.checkpoint(last)
            lease.finish(last)
            return lease.hit


class _Node:
    """The end of a block."""

    __slots__ = ("above", "base", "depth", "forked", "kept", "kids", "locked", "parent", "superseded", "used")

    def __init__(self, parent: _Node | None) -> None:
        self.parent = parent
        self.above: _Node = self  # the state above a state, or the root
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.kids: dict[int, _Node] = {}
        self.kept = self.superseded = self.forked = self.locked = False
        self.base = 0.0
        self.used = 0


class _Tree:
    """What both rules share: a tree of all blocks, and the states in it."""

    def __init__(self, slots: int) -> None:
        self.root = _Node(None)
        self.slots = slots
        self.states: set[_Node] = set()
        self.time = self.kept = 0

    def walk(self, path: Iterable[int]) -> list[_Node]:
        found, node = [], self.root
        for block in path:
            if block not in node.kids:
                break
            found.append(node := node.kids[block])
        return found

    def add(self, path: Iterable[int]) -> _Node:
        node = self.root
        for block in path:
            if block not in node.kids:
                node.kids[block] = _Node(node)
            node = node.kids[block]
        return node

    def keep(self, node: _Node) -> None:
        above = node.parent
        while above is not None and above.parent is not None and not above.kept:
            above = above.parent
        assert above is not None
        node.above, node.kept = above, True
        for other in self.states if node.kids else ():
            if other.above is above and other.depth > node.depth and _lies_below(other, node):
                other.above = node
        self.states.add(node)

    def free(self, node: _Node) -> None:
        node.kept = node.forked = node.superseded = False
        self.states.remove(node)
        for other in self.states:
            if other.above is node:
                other.above = node.above


class Earlier(_Tree):
    """The rule before marks."""

    _inflation = 0.0

    def serve(self, ask: Ask) -> int:
        """See `Rule.serve`."""
        self.time += 1
        walked = self.walk(ask.path[: ask.end])
        hit = next((node for node in reversed(walked) if node.kept), None)
        if hit is not None:
            hit.forked |= len(walked) < ask.end and bool(walked[-1].kids)
            self._credit(hit)
            hit.locked = True
        held, self.slots = self.slots, self.slots - 1  # one to compute with
        self._make_room(0)
        start = 0 if hit is None else hit.depth
        planned = sorted({position for position in (len(walked), ask.end) if position > start})
        self.kept += len(planned)
        for position in [*planned, *([len(ask.path)] if len(ask.path) > ask.end else [])]:
            self._make_room(1)
            node = self.add(ask.path[:position])
            self._keep(node)
            if hit is not None:
                hit.locked = False
            node.locked, hit = True, node
        if hit is not None:
            hit.locked = False
        self.slots = held
        return start

    def _credit(self, node: _Node) -> None:
        node.used, node.superseded = self.time, False
        node.base = self._inflation + node.depth - node.above.depth

    def _keep(self, node: _Node) -> None:
        if node.kept:
            return
        self.keep(node)
        self._credit(node)
        above = node.parent
        while above is not None and above.parent is not None and len(above.kids) == 1 and not above.kept:
            above = above.parent
        if above is not None and above.kept and len(above.kids) == 1 and not above.forked:
            above.superseded = True

    def _make_room(self, count: int) -> None:
        while len(self.states) + count > self.slots:
            victim = min((node for node in self.states if not node.locked), key=self._rank)
            if not victim.superseded:
                self._inflation = max(self._inflation, victim.base)
            self.free(victim)

    @staticmethod
    def _rank(node: _Node) -> tuple[bool, float, int]:
        return not node.superseded, 0 if node.superseded else node.base, node.used


class Marconi(_Tree):
    """The rule of the paper.

    Args:
        slots: slots for states.
        alpha: how much FLOPs saved per byte count beside recency.
        block_tokens: tokens of a block.
    """

    def __init__(self, slots: int, alpha: float, block_tokens: int) -> None:
        super().__init__(slots - 1)  # one to compute with
        self._alpha = alpha
        self._state_blocks = _STATE_TOKENS / block_tokens

    def serve(self, ask: Ask) -> int:
        """See `Rule.serve`."""
        self.time += 1
        walked = self.walk(ask.path[: ask.end])
        hit = next((node for node in reversed(walked) if node.kept), None)
        if hit is not None:
            hit.used, hit.locked = self.time, True
        if walked and len(walked) < ask.end and walked[-1].kids:
            self.kept += not walked[-1].kept
            self._keep(walked[-1])
        if ask.path:
            self._keep(self.add(ask.path))
        if hit is not None:
            hit.locked = False
        return 0 if hit is None else hit.depth

    def _keep(self, node: _Node) -> None:
        if not node.kept:
            if len(self.states) == self.slots:
                self.free(self._victim())
            self.keep(node)
        node.used = self.time

    def _victim(self) -> _Node:
        children = Counter(node.above for node in self.states)
        free = [node for node in self.states if not node.locked]
        candidates = [node for node in free if children[node] <= 1] or free
        saved = [node.depth - node.above.depth for node in candidates]
        efficiency = _scaled([blocks / (self._state_blocks + blocks) for blocks in saved])
        recency = _scaled([float(node.used) for node in candidates])
        return min(zip(candidates, recency, efficiency, strict=True), key=self._score)[0]

    def _score(self, candidate: tuple[_Node, float, float]) -> tuple[float, int]:
        node, recency, efficiency = candidate
        return recency + self._alpha * efficiency, node.used


def _scaled(values: list[float]) -> list[float]:
    least, most = min(values), max(values)
    return [(value - least) / (most - least or 1) for value in values]


def _lies_below(node: _Node, above: _Node) -> bool:
    at: _Node | None = node
    while at is not None and at.depth > above.depth:
        at = at.parent
    return at is above
