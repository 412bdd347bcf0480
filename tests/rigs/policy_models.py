"""Policies as their papers define them, slow and obvious, for caches of independent blocks.

Each `access` returns the block that is evicted to make room (None: no block; the block may be cached already). Lists
start with the oldest.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from mainstem.core.reference import POLICIES

Evicted = int | None


class InPython:
    """A policy of the reference as an object, so that the tree calls Python for each rank."""

    def __init__(self, name: str) -> None:
        self.name = f"my {name}"
        self._rule = POLICIES[name]

    def rank(self, node: Any) -> tuple[float, float]:
        return (*self._rule(node), 0)[:2]

    def __repr__(self) -> str:
        return self.name


def forget(ghost: list[int], limit: int) -> None:
    """Drops the oldest until at most `limit` are left."""
    del ghost[: max(0, len(ghost) - limit)]


class Model:
    """A cache of `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.time = 0

    def access(self, block: int) -> Evicted:
        """Uses a block; returns the block that is evicted for it, if any."""
        raise NotImplementedError


class Lru2(Model):
    """O'Neil et al. 1993: evicts the largest backward 2-distance; if several are infinite, the least recently used."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.uses: dict[int, tuple[int, int]] = {}  # last but one, last
        self.history: OrderedDict[int, int] = OrderedDict()

    def access(self, block: int) -> Evicted:
        self.time += 1
        if block in self.uses:
            self.uses[block] = (self.uses[block][1], self.time)
            return None
        others = dict(self.uses)
        self.uses[block] = (self.history.pop(block, 0), self.time)
        if len(self.uses) <= self.capacity:
            return None
        victim = min(others, key=lambda other: others[other])
        self.history[victim] = self.uses.pop(victim)[1]
        while len(self.history) > 4 * self.capacity:
            self.history.popitem(last=False)
        return victim


class Arc(Model):
    """Megiddo and Modha 2003, figure 4."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def access(self, block: int) -> Evicted:
        victim = None
        if block in self.t1 or block in self.t2:  # case I
            (self.t1 if block in self.t1 else self.t2).remove(block)
            self.t2.append(block)
            return None
        if block in self.b1:  # case II
            self.p = min(self.capacity, self.p + max(1, len(self.b2) / len(self.b1)))
            victim = self.replace(block)
            self.b1.remove(block)
            self.t2.append(block)
            return victim
        if block in self.b2:  # case III
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            victim = self.replace(block)
            self.b2.remove(block)
            self.t2.append(block)
            return victim
        if len(self.t1) + len(self.b1) == self.capacity:  # case IV
            if len(self.t1) < self.capacity:
                self.b1.pop(0)
                victim = self.replace(block)
            else:
                victim = self.t1.pop(0)
        else:
            total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if total >= self.capacity:
                if total == 2 * self.capacity:
                    self.b2.pop(0)
                victim = self.replace(block)
        self.t1.append(block)
        return victim

    def replace(self, block: int) -> int:
        """Runs REPLACE of the paper."""
        if self.t1 and ((block in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.append(self.t1.pop(0))
            return self.b1[-1]
        self.b2.append(self.t2.pop(0))
        return self.b2[-1]


class TwoQueues(Model):
    """Johnson and Shasha 1994, the full version; A1out is searched for a block before room is made for it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.in_: list[int] = []
        self.out: list[int] = []
        self.main: list[int] = []

    def access(self, block: int) -> Evicted:
        if block in self.main:
            self.main.remove(block)
            self.main.append(block)
            return None
        if block in self.in_:
            return None
        returns = block in self.out
        if returns:
            self.out.remove(block)
        victim = self.reclaim() if len(self.in_) + len(self.main) == self.capacity else None
        (self.main if returns else self.in_).append(block)
        return victim

    def reclaim(self) -> int:
        """Evicts from A1in if it is above its share, otherwise from Am."""
        if len(self.in_) > self.capacity // 4 or not self.main:
            self.out.append(self.in_.pop(0))
            victim = self.out[-1]
            forget(self.out, self.capacity // 2)
            return victim
        return self.main.pop(0)


class S3Fifo(Model):
    """Yang et al. 2023, algorithm 1, except that a block is inserted before another is evicted, and that the queue of
    the victim is chosen again after each block that moves.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.uses: dict[int, int] = {}

    def access(self, block: int) -> Evicted:
        if block in self.uses:
            self.uses[block] = min(3, self.uses[block] + 1)
            return None
        returns = block in self.ghost
        if returns:
            self.ghost.remove(block)
        (self.main if returns else self.small).append(block)
        self.uses[block] = 0
        return self.evict(block) if len(self.uses) > self.capacity else None

    def evict(self, fresh: int) -> int:
        """Evicts the first block without uses to save it, other than the new one."""
        while True:
            old = [block for block in self.small if block != fresh]
            main = [block for block in self.main if block != fresh]
            small = bool(old) and (len(old) >= 0.1 * self.capacity or not main)
            block = (old if small else main)[0]
            (self.small if small else self.main).remove(block)
            if small and self.uses[block] > 1:
                self.uses[block] = 0
                self.main.append(block)
            elif not small and self.uses[block] > 0:
                self.uses[block] -= 1
                self.main.append(block)
            else:
                del self.uses[block]
                if small:
                    self.ghost.append(block)
                    forget(self.ghost, self.capacity)
                return block


class Sieve(Model):
    """Zhang et al. 2024, algorithm 1."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.blocks: list[int] = []
        self.visited: set[int] = set()
        self.hand = 0

    def access(self, block: int) -> Evicted:
        if block in self.blocks:
            self.visited.add(block)
            return None
        victim = self.evict() if len(self.blocks) == self.capacity else None
        self.blocks.append(block)
        return victim

    def evict(self) -> int:
        """Moves the hand to the first block that was not visited, and evicts it."""
        while True:
            block = self.blocks[self.hand]
            if block in self.visited:
                self.visited.remove(block)
                self.hand = (self.hand + 1) % len(self.blocks)
            else:
                self.blocks.remove(block)
                self.hand %= len(self.blocks)  # after the newest comes the oldest, not the block being inserted
                return block


class Gdsf(Model):
    """Cherkasova 1998, with blocks of one size and one cost."""

    cost = 1 + 0.5 / 24576  # of one token at the beginning of a prompt

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.worth: dict[int, tuple[float, int]] = {}
        self.uses: dict[int, int] = {}
        self.clock = 0.0

    def access(self, block: int) -> Evicted:
        self.time += 1
        victim = None
        if block not in self.worth and len(self.worth) == self.capacity:
            victim = min(self.worth, key=lambda each: self.worth[each])
            self.clock = max(self.clock, self.worth.pop(victim)[0])
            del self.uses[victim]
        self.uses[block] = self.uses.get(block, 0) + 1
        self.worth[block] = (self.clock + self.uses[block] * self.cost, self.time)
        return victim


class FlopAware(Model):
    """All blocks save equally much; each use adds the idle time of the last victim to the score."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.score: dict[int, tuple[float, int]] = {}
        self.age = 0

    def access(self, block: int) -> Evicted:
        self.time += 1 + (block not in self.score)  # a match, and an insertion
        victim = None
        others = dict(self.score)
        hit = block in self.score
        self.score[block] = (self.time + self.age, self.time)
        if not hit and len(self.score) > self.capacity:
            victim = min(others, key=lambda each: others[each])
            self.age = self.time - self.score.pop(victim)[1]
        return victim


class Sketch:
    """Four rows of counters, with the hash of core/csrc/eviction/policies/sketch.h."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(4)]
        self.added = 0

    def widen(self, blocks: int) -> None:
        """Doubles the rows until there are two counters per block."""
        while 2 * blocks > len(self.rows[0]):
            self.rows = [row * 2 or [0] * 64 for row in self.rows]

    def add(self, block: int) -> None:
        """Counts one use."""
        for row, at in enumerate(self.places(block)):
            self.rows[row][at] = min(15, self.rows[row][at] + 1)
        self.added += 1
        if self.added >= 5 * len(self.rows[0]):
            self.added //= 2
            self.rows = [[count // 2 for count in row] for row in self.rows]

    def count(self, block: int) -> int:
        """Returns the lowest counter of a block."""
        return min(self.rows[row][at] for row, at in enumerate(self.places(block)))

    def places(self, block: int) -> list[int]:
        """Returns the index of a block's counter in each row."""
        name = identity(block)
        return [fold(name, 0x9E3779B97F4A7C15 + 2 * row) % len(self.rows[0]) for row in range(4)]


def fold(a: int, b: int) -> int:
    """Multiplies to 128 bits and combines both halves."""
    return (a * b ^ a * b >> 64) & (2**64 - 1)


def identity(token: int) -> int:
    """Returns the name of a page of one token in the default namespace; see core/csrc/eviction/page_name.h."""

    def mix(data: bytes) -> int:
        odd = 0x9E3779B97F4A7C15
        mixed = fold(odd ^ int.from_bytes(data, "little"), odd ^ len(data)) if data else odd
        mixed = (mixed ^ mixed >> 31) * 0xBF58476D1CE4E5B9 % 2**64
        return mixed ^ mixed >> 29

    return (mix(b"") * 0xD1342543DE82EF95 + mix(token.to_bytes(4, "little"))) % 2**64


class WTinyLfu(Model):
    """Einziger et al. 2017; blocks beyond the limit of the protected segment are demoted when room is needed."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.parts: tuple[list[int], list[int], list[int]] = ([], [], [])  # window, probation, protected
        self.sketch = Sketch()

    def access(self, block: int) -> Evicted:
        part = next((part for part in self.parts if block in part), None)
        if part is None:
            self.parts[0].append(block)
        else:
            part.remove(block)
            (self.parts[0] if part is self.parts[0] else self.parts[2]).append(block)
        size = sum(map(len, self.parts))
        self.sketch.widen(size)
        self.sketch.add(block)
        return self.evict(block) if size > self.capacity else None

    def evict(self, fresh: int) -> int:
        """Moves blocks until one loses and is evicted; the new block stays."""
        window, probation, protected = self.parts
        window_limit = max(1, self.capacity // 100)
        main = self.capacity - window_limit
        while True:
            candidates = [block for block in window if block != fresh]
            loser = probation or protected
            if len(protected) > main * 4 // 5:
                probation.append(protected.pop(0))
            elif len(window) > window_limit and candidates:
                wins = len(probation) + len(protected) < main
                wins = wins or bool(loser and self.sketch.count(candidates[0]) > self.sketch.count(loser[0]))
                window.remove(candidates[0])
                if not wins:
                    return candidates[0]
                probation.append(candidates[0])
            else:
                return loser.pop(0)


MODELS: dict[str, type[Model]] = {
    "lru-2": Lru2,
    "arc": Arc,
    "2q": TwoQueues,
    "s3-fifo": S3Fifo,
    "sieve": Sieve,
    "gdsf": Gdsf,
    "w-tinylfu": WTinyLfu,
    "flop-aware": FlopAware,
}
