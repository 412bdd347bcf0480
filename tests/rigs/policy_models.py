"""ARC as its paper defines it, slow and obvious, and the reference's ranks as policies of one's own."""

from __future__ import annotations

from typing import Any

from rigs.reference import POLICIES


class InPython:
    """A policy of the reference as an object, so that the tree calls Python for each rank."""

    def __init__(self, name: str) -> None:
        self.name = f"my {name}"
        self._rule = POLICIES[name]

    def rank(self, node: Any) -> tuple[float, float]:
        return (*self._rule(node), 0)[:2]

    def __repr__(self) -> str:
        return self.name


class Arc:
    """Megiddo and Modha 2003, figure 4, of `capacity` independent blocks; lists start with the oldest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def access(self, block: int) -> int | None:
        """Uses a block; returns the block that is evicted for it, if any."""
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
