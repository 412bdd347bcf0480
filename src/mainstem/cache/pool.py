"""The page pool, and the counts of one. Knows page ids and their owners, not the tree or tensors."""

from __future__ import annotations

from dataclasses import dataclass

from mainstem._core import Pool

__all__ = ["Pool", "PoolStats"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of one component's pages or slots on one tier.

    free + cached + private = total; locked is a part of cached; private ones are being computed or written to.
    """

    total: int
    free: int
    cached: int
    private: int
    locked: int

    @classmethod
    def of(cls, pool: Pool, locked: int) -> PoolStats:
        """Reads a pool; the tree knows how many of it are `locked`."""
        return cls(pool.total, pool.free, pool.cached, pool.private, locked)
