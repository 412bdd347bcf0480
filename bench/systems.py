"""Our own systems of the index benchmark, and the interface that drives every system alike.

A request is: match, lock, make room, allocate, insert, unlock, on a pool of `capacity_tokens` slots. `prepare` converts
prompts into the type that suits a system best. A lookup is the call by which an engine learns how much of a prompt is
cached; it reads the pages or slots found. Peers from other projects are in peers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

Prompt = list[int] | Ints
"""Token ids, before conversion to a system's own type."""

Parts = Mapping[str, tuple[Any, str]]
"""For each part of a request, "match", "insert" and "evict": the object and the name of its method."""

NO_NODES = "it has entries for blocks, and no nodes"
HASH_EACH = "a hash for each token: not how it is used"


class Growth(Protocol):
    """A sequence that is computed piece by piece; each piece is published at once. Lengths are whole pages."""

    def publish(self, upto: int) -> None:
        """Allocates and publishes the prompt's tokens up to a position, and reads what a step needs."""

    def append(self, tokens: Any) -> None:
        """Appends prepared decoded tokens to the sequence, and publishes them."""

    def finish(self) -> None:
        """Unlocks the sequence; published tokens stay cached."""


class System(Protocol):
    """An index with a pool.

    Attributes:
        parts: calls to time separately. The methods are looked up at each call, so that a clock can wrap them.
        lists: how it takes a prompt as a list of int: as its "own" type, "accepted" by `serve` too, or "converted".
        lacks: scenarios that it does not support, or "nodes" for long prompts in several nodes, with the reason.
    """

    parts: Parts
    lists: Literal["own", "accepted", "converted"]
    lacks: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def load(cls) -> dict[str, str]:
        """Imports the packages to measure, and returns their versions. Raises ImportError."""

    def prepare(self, prompt: Prompt) -> Any:
        """Converts a prompt to the system's own type."""

    def prepare_in(self, prompt: Prompt, namespace: str) -> Any:
        """Converts a prompt for a namespace."""
        return self.prepare(prompt)

    def serve(self, key: Any, namespace: str | None = None) -> int:
        """Serves one whole request; returns the hit tokens."""

    def look_up(self, key: Any) -> int:
        """Looks up an arriving request like an engine, and reads the pages. Returns the hit tokens; locks nothing."""

    def hold(self, key: Any) -> None:
        """Looks up a prompt, and protects its hit from eviction for good."""

    def evict(self, pages: int) -> int:
        """Frees that many pages; returns how many it freed."""

    def grow(self, key: Any) -> Growth:
        """Starts to compute a prompt of which nothing is cached."""

    def held_bytes(self) -> int | None:
        """Returns the bytes that the index reports to hold; None: it does not report them."""
        return None


Make = Callable[[int, int], System]
"""make(page_size, capacity_tokens); raises ImportError if the system is not installed."""


class MainstemLease(System):
    """Mainstem as an engine uses it: PrefixCache and Lease.

    Args:
        policy: eviction policy.
    """

    lists: Literal["accepted"] = "accepted"

    def __init__(self, page_size: int, capacity_tokens: int, policy: str = "lru") -> None:
        from mainstem import Lease, PrefixCache

        self.cache = PrefixCache(capacity_tokens // page_size, page_size, policy=policy)
        self.lease, self.reserve = self.cache.lease, Lease.reserve
        self.parts = {"match": (self, "lease"), "insert": (self, "finish"), "evict": (self, "reserve")}
        self.held: list[Any] = []
        self.table: Any = None

    @classmethod
    def load(cls) -> dict[str, str]:
        """Returns the version."""
        from mainstem import __version__

        return {"mainstem": __version__}

    def prepare(self, prompt: Prompt) -> Any:
        """Returns an int32 array."""
        return np.array(prompt, np.int32)

    def serve(self, key: Any, namespace: str | None = None) -> int:
        """Leases, reserves, reads the page table, publishes and finishes."""
        lease = self.lease(key, namespace)
        hit = lease.hit
        self.reserve(lease, len(key) - hit)
        self.table = lease.page_table
        self.finish(lease, len(key))
        return hit

    def finish(self, lease: Any, length: int) -> None:
        """Publishes the prompt and ends the lease."""
        lease.publish(length)
        lease.finish(length)

    def look_up(self, key: Any) -> int:
        """Takes a lease, reads its pages, and ends it."""
        lease = self.lease(key)
        self.table = lease.page_table
        lease.abort()
        return lease.hit

    def hold(self, key: Any) -> None:
        """Takes a lease that stays open."""
        self.held.append(self.lease(key))

    def evict(self, pages: int) -> int:
        """Evicts from the tree and returns the pages to the pool, like `reserve`."""
        freed = self.cache.tree.evict(pages)[0]
        self.cache.pool.reclaim(freed)
        return len(freed)

    def grow(self, key: Any) -> Growth:
        """Takes a lease."""
        return GrowingLease(self.lease(key))

    def held_bytes(self) -> int | None:
        """Returns the bytes of the tree."""
        return self.cache.tree.held_bytes()


class GrowingLease:
    """A lease that publishes chunk by chunk, and reads its page table each time."""

    def __init__(self, lease: Any) -> None:
        self.lease = lease
        self.table = lease.page_table

    def publish(self, upto: int) -> None:
        """Reserves and publishes."""
        lease = self.lease
        lease.reserve(upto - lease.reserved)
        lease.publish(upto)
        self.table = lease.page_table

    def append(self, tokens: Any) -> None:
        """Appends, reserves and publishes."""
        lease = self.lease
        lease.append(tokens)
        lease.reserve(len(tokens))
        lease.publish(lease.length)
        self.table = lease.page_table

    def finish(self) -> None:
        """Ends the lease."""
        self.lease.abort()


class MainstemTree(System):
    """Mainstem's lower interface: Tree and Pool, for engines with an allocator of their own."""

    lists: Literal["accepted"] = "accepted"

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        from mainstem import Pool, Tree

        self.page_size = page_size
        self.pool = Pool(capacity_tokens // page_size)
        self.tree = Tree(page_size)
        self.parts = {call: (self.tree, call) for call in ("match", "insert", "evict")}

    @classmethod
    def load(cls) -> dict[str, str]:
        """Returns the version."""
        return MainstemLease.load()

    def prepare(self, prompt: Prompt) -> Any:
        """Returns an int32 array."""
        return np.array(prompt, np.int32)

    def serve(self, key: Any, namespace: str | None = None) -> int:
        """Serves a request; the insertion continues where the match ended."""
        tree, pool = self.tree, self.pool
        match = tree.match(key, namespace)
        tree.lock(match.node)
        missing = len(key) // self.page_size - len(match.page_ids)
        if missing > pool.free:
            pool.reclaim(tree.evict(missing - pool.free)[0])
        page_ids = pool.allocate(missing)
        tree.insert(key, np.concatenate([match.page_ids, page_ids]), namespace, after=match.node)
        pool.publish(page_ids)
        tree.unlock(match.node)
        return match.length

    def look_up(self, key: Any) -> int:
        """Matches; the match has the page ids."""
        return self.tree.match(key).length

    def hold(self, key: Any) -> None:
        """Matches and locks."""
        self.tree.lock(self.tree.match(key).node)

    def evict(self, pages: int) -> int:
        """Evicts, and returns the pages to the pool."""
        freed = self.tree.evict(pages)[0]
        self.pool.reclaim(freed)
        return len(freed)

    def grow(self, key: Any) -> Growth:
        """Inserts after the last node."""
        return GrowingPath(self.tree, self.pool, key)

    def held_bytes(self) -> int | None:
        """Returns the bytes of the tree."""
        return self.tree.held_bytes()


class GrowingPath:
    """A locked path of `Tree`; the caller keeps tokens and page ids."""

    def __init__(self, tree: Any, pool: Any, tokens: Ints) -> None:
        self.tree, self.pool, self.page_size = tree, pool, tree.page_size
        self.tokens = np.empty(2 * len(tokens) + 2**16, np.int32)
        self.tokens[: len(tokens)] = tokens
        self.length = len(tokens)
        self.page_ids = np.empty(len(self.tokens) // self.page_size, np.int32)
        self.count, self.node = 0, 0

    def publish(self, upto: int) -> None:
        """Allocates, inserts, moves the lock."""
        tree, count = self.tree, upto // self.page_size
        new = self.pool.allocate(count - self.count)
        self.page_ids[self.count : count] = new
        node = tree.insert(self.tokens[:upto], self.page_ids[:count], after=self.node).node
        self.pool.publish(new)
        tree.lock(node)
        tree.unlock(self.node)
        self.node, self.count = node, count

    def append(self, tokens: Ints) -> None:
        """Appends to the buffer, then publishes."""
        self.tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.publish(self.length)

    def finish(self) -> None:
        """Unlocks."""
        self.tree.unlock(self.node)


class PythonRadix(System):
    """The radix cache of python_radix.py, with a stack of free slots."""

    lists: Literal["converted"] = "converted"
    lacks: ClassVar[Mapping[str, str]] = {"namespaces": "it has no namespaces"}

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        from bench.python_radix import RadixCache

        self.page_size = page_size
        self.tree = RadixCache(page_size)
        self.free = np.arange(capacity_tokens // page_size * page_size, dtype=np.int32)
        self.n_free = len(self.free)
        self.parts = {call: (self.tree, call) for call in ("match", "insert", "evict")}

    @classmethod
    def load(cls) -> dict[str, str]:
        """Returns NumPy's version."""
        return {"numpy": np.__version__}

    def prepare(self, prompt: Prompt) -> Any:
        """Returns an int32 array."""
        return np.array(prompt, np.int32)

    def serve(self, key: Any, namespace: str | None = None) -> int:
        """Serves a request; slots come from the top of the stack and return to it."""
        slots, node = self.tree.match(key)
        self.tree.lock(node)
        missing = len(key) // self.page_size * self.page_size - len(slots)
        if missing > self.n_free:
            self.make_room(missing - self.n_free)
        self.tree.insert(key, np.concatenate([slots, self.allocate(missing)]))
        self.tree.unlock(node)
        return len(slots)

    def make_room(self, slots: int) -> int:
        """Evicts; returns the number of slots returned to the stack."""
        before = self.n_free
        for freed in self.tree.evict(slots):
            self.free[self.n_free : self.n_free + len(freed)] = freed
            self.n_free += len(freed)
        return self.n_free - before

    def allocate(self, slots: int) -> Ints:
        """Allocates from the top of the stack."""
        self.n_free -= slots
        return self.free[self.n_free : self.n_free + slots]

    def look_up(self, key: Any) -> int:
        """Matches; the match has the slots."""
        return len(self.tree.match(key)[0])

    def hold(self, key: Any) -> None:
        """Matches and locks."""
        self.tree.lock(self.tree.match(key)[1])

    def evict(self, pages: int) -> int:
        """Evicts like a request."""
        return self.make_room(pages * self.page_size) // self.page_size

    def grow(self, key: Any) -> Growth:
        """Inserts the prefix so far."""
        return GrowingRadix(self, key)


class GrowingRadix:
    """A locked path of the radix cache. Each insertion starts at the root, because it cannot continue from a node."""

    def __init__(self, system: PythonRadix, tokens: Ints) -> None:
        self.system, self.tree = system, system.tree
        self.tokens = np.empty(2 * len(tokens) + 2**16, np.int32)
        self.tokens[: len(tokens)] = tokens
        self.length, self.done = len(tokens), 0
        self.slots = np.empty(len(self.tokens), np.int32)
        self.node = self.tree.root

    def publish(self, upto: int) -> None:
        """Allocates, inserts, finds the new end, moves the lock."""
        self.slots[self.done : upto] = self.system.allocate(upto - self.done)
        self.tree.insert(self.tokens[:upto], self.slots[:upto])
        _, node = self.tree.match(self.tokens[:upto])
        self.tree.lock(node)
        self.tree.unlock(self.node)
        self.node, self.done = node, upto

    def append(self, tokens: Ints) -> None:
        """Appends to the buffer, then publishes."""
        self.tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.publish(self.length)

    def finish(self) -> None:
        """Unlocks."""
        self.tree.unlock(self.node)


class BlockDict(System):
    """The dict of chained block hashes of block_dict.py."""

    lists: Literal["converted"] = "converted"
    lacks: ClassVar[Mapping[str, str]] = {"nodes": NO_NODES, "split": NO_NODES}

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        from bench.block_dict import BlockCache

        if page_size == 1:
            raise ValueError(HASH_EACH)
        self.cache = BlockCache(page_size, capacity_tokens // page_size)
        self.parts = {"match": (self.cache, "match"), "insert": (self.cache, "insert"), "evict": (self.cache, "evict")}

    @classmethod
    def load(cls) -> dict[str, str]:
        """Returns the hash in use."""
        from bench.block_dict import HASH

        return {"dict of block hashes": HASH}

    def prepare(self, prompt: Prompt) -> Any:
        """Returns the tokens as bytes, 4 each."""
        return np.array(prompt, np.int32).tobytes()

    def serve(self, key: Any, namespace: str | None = None) -> int:
        """Serves a request; the first block's parent is the namespace."""
        cache = self.cache
        found, page_ids = cache.match(key, namespace)
        cache.lock(found)
        hashes, _ = cache.insert(key, found, page_ids, namespace)
        cache.unlock(hashes)
        return len(found) * cache.page_size

    def look_up(self, key: Any) -> int:
        """Matches; the match has the page ids."""
        return len(self.cache.match(key)[0]) * self.cache.page_size

    def hold(self, key: Any) -> None:
        """Matches and locks."""
        self.cache.lock(self.cache.match(key)[0])

    def evict(self, pages: int) -> int:
        """Evicts the least recently used."""
        return self.cache.evict(pages)

    def grow(self, key: Any) -> Growth:
        """Continues from the last hash."""
        return GrowingHashes(self.cache, key)


class GrowingHashes:
    """Locked blocks, and the tokens that are not hashed yet."""

    def __init__(self, cache: Any, tokens: bytes) -> None:
        self.cache, self.tokens = cache, bytearray(tokens)
        self.hashes: list[bytes] = []
        self.page_ids: list[int] = []

    def publish(self, upto: int) -> None:
        """Hashes and inserts new blocks, which are then locked."""
        at = len(self.hashes) * self.cache.block_bytes
        new, page_ids = self.cache.extend(bytes(self.tokens[at : 4 * upto]), self.hashes[-1] if self.hashes else b"")
        self.hashes += new
        self.page_ids += page_ids

    def append(self, tokens: bytes) -> None:
        """Appends to the buffer, then publishes."""
        self.tokens += tokens
        self.publish(len(self.tokens) // 4)

    def finish(self) -> None:
        """Unlocks."""
        self.cache.unlock(self.hashes)
