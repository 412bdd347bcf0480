"""The systems of the index benchmark behind one face, so that each is driven alike.

One request is: match, lock, make room, allocate, insert, unlock, on a pool of `capacity_tokens` slots. Each system is
given its prompts in the type it likes best, by `prepare`. Peers of other projects are in peers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import numpy as np

Parts = Mapping[str, tuple[Any, str]]
"""For each part of a request, "match", "insert" and "evict", the object and its method that do it."""


class System(Protocol):
    """An index with a pool.

    Attributes:
        versions: of the packages that were measured.
        parts: what is timed alone; the methods are looked up at each call, so that a clock can be put around them.
        lists: what a prompt as a list of int is to it: its "own" type, "accepted" by `serve` too, or "converted".
    """

    versions: Mapping[str, str]
    parts: Parts
    lists: Literal["own", "accepted", "converted"]

    def prepare(self, prompt: list[int]) -> Any:
        """The prompt in the system's own type."""

    def serve(self, key: Any) -> int:
        """One whole request; the tokens that were found."""


Make = Callable[[int, int], System]
"""make(page_size, capacity_tokens); raises ImportError where the system is not installed."""


class MainstemLease:
    """Mainstem as an engine uses it: PrefixCache and Lease."""

    lists: Literal["accepted"] = "accepted"

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        from mainstem import PrefixCache, __version__

        self.versions = {"mainstem": __version__}
        self.cache = PrefixCache(capacity_tokens // page_size, page_size)
        self.parts = {"match": (self.cache, "lease"), "insert": (self, "finish"), "evict": (self.cache.tree, "evict")}

    def prepare(self, prompt: list[int]) -> Any:
        """An int32 array."""
        return np.array(prompt, np.int32)

    def serve(self, key: Any) -> int:
        """Lease, reserve, publish, finish."""
        lease = self.cache.lease(key)
        lease.reserve(len(key) - lease.hit)
        self.finish(lease, len(key))
        return int(lease.hit)

    def finish(self, lease: Any, length: int) -> None:
        """Publishes the prompt and ends the lease."""
        lease.publish(length)
        lease.finish(length)


class MainstemTree:
    """Mainstem's lower interface: Tree and Pool, for engines with an allocator of their own."""

    lists: Literal["accepted"] = "accepted"

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        from mainstem import Pool, Tree, __version__

        self.versions = {"mainstem": __version__}
        self.page_size = page_size
        self.pool = Pool(capacity_tokens // page_size)
        self.tree = Tree(page_size)
        self.parts = {call: (self.tree, call) for call in ("match", "insert", "evict")}

    def prepare(self, prompt: list[int]) -> Any:
        """An int32 array."""
        return np.array(prompt, np.int32)

    def serve(self, key: Any) -> int:
        """Insertion goes on where the match ended."""
        tree, pool = self.tree, self.pool
        match = tree.match(key)
        tree.lock(match.node)
        missing = len(key) // self.page_size - len(match.pages)
        if missing > pool.free:
            pool.reclaim(tree.evict(missing - pool.free)[0])
        pages = pool.allocate(missing)
        tree.insert(key, np.concatenate([match.pages, pages]), after=match.node)
        pool.publish(pages)
        tree.unlock(match.node)
        return match.length


class PythonRadix:
    """The radix cache of python_radix.py, with a stack of free slots."""

    lists: Literal["converted"] = "converted"

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        from bench.python_radix import RadixCache

        self.versions = {"numpy": np.__version__}
        self.page_size = page_size
        self.tree = RadixCache(page_size)
        self.free = np.arange(capacity_tokens // page_size * page_size, dtype=np.int32)
        self.n_free = len(self.free)
        self.parts = {call: (self.tree, call) for call in ("match", "insert", "evict")}

    def prepare(self, prompt: list[int]) -> Any:
        """An int32 array."""
        return np.array(prompt, np.int32)

    def serve(self, key: Any) -> int:
        """Slots are taken from the top of the stack and given back to it."""
        slots, node = self.tree.match(key)
        self.tree.lock(node)
        missing = len(key) // self.page_size * self.page_size - len(slots)
        if missing > self.n_free:
            for freed in self.tree.evict(missing - self.n_free):
                self.free[self.n_free : self.n_free + len(freed)] = freed
                self.n_free += len(freed)
        self.n_free -= missing
        self.tree.insert(key, np.concatenate([slots, self.free[self.n_free : self.n_free + missing]]))
        self.tree.unlock(node)
        return len(slots)
