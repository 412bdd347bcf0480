"""Our own systems of the index benchmark, and the face behind which each system is driven alike.

One request is: match, lock, make room, allocate, insert, unlock, on a pool of `capacity_tokens` slots. Each system is
given its prompts in the type it likes best, by `prepare`. A look-up is what an engine calls to learn how much of a
prompt is cached, and reads the pages or slots that were found. Peers of other projects are in peers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

Prompt = list[int] | Ints
"""Token ids, before a system has them in its own type."""

Parts = Mapping[str, tuple[Any, str]]
"""For each part of a request, "match", "insert" and "evict", the object and its method that do it."""

NO_NODES = "it has entries for blocks, and no nodes"
HASH_EACH = "a hash for each token: not how it is used"


class Growth(Protocol):
    """A sequence that is computed piece by piece, each of which is shared at once. Lengths are whole pages."""

    def publish(self, upto: int) -> None:
        """The prompt's tokens up to there have pages and are in the index; what a step needs of them was read."""

    def append(self, tokens: Any) -> None:
        """Decoded tokens, prepared, join the sequence and are published."""

    def finish(self) -> None:
        """Unlocks it; what was published stays."""


class System(Protocol):
    """An index with a pool.

    Attributes:
        parts: what is timed alone; the methods are looked up at each call, so that a clock can be put around them.
        lists: what a prompt as a list of int is to it: its "own" type, "accepted" by `serve` too, or "converted".
        lacks: why it is not asked for a scenario, or for long prompts in "nodes"; by their names.
    """

    parts: Parts
    lists: Literal["own", "accepted", "converted"]
    lacks: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def load(cls) -> dict[str, str]:
        """Imports what it needs; the versions of the packages that are measured. Raises ImportError."""

    def prepare(self, prompt: Prompt) -> Any:
        """The prompt in the system's own type."""

    def prepare_in(self, prompt: Prompt, namespace: str) -> Any:
        """The same, for a namespace."""
        return self.prepare(prompt)

    def serve(self, key: Any, namespace: str | None = None) -> int:
        """One whole request; the tokens that were found."""

    def look_up(self, key: Any) -> int:
        """What an engine asks at a request's arrival, pages read; the tokens that were found. Leaves nothing locked."""

    def hold(self, key: Any) -> None:
        """Looks up, and keeps what was found from eviction for as long as the system lives."""

    def evict(self, pages: int) -> int:
        """Makes that many pages free for others; how many it made."""

    def grow(self, key: Any) -> Growth:
        """Begins to compute a prompt of which nothing is cached."""

    def held_bytes(self) -> int | None:
        """What the index says that it holds; None where it does not say."""
        return None


Make = Callable[[int, int], System]
"""make(page_size, capacity_tokens); raises ImportError where the system is not installed."""


class MainstemLease(System):
    """Mainstem as an engine uses it: PrefixCache and Lease.

    Args:
        policy: of eviction.
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
        """The version."""
        from mainstem import __version__

        return {"mainstem": __version__}

    def prepare(self, prompt: Prompt) -> Any:
        """An int32 array."""
        return np.array(prompt, np.int32)

    def serve(self, key: Any, namespace: str | None = None) -> int:
        """Lease, reserve, read the page table, publish, finish."""
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
        """A lease, its pages, and its end."""
        lease = self.lease(key)
        self.table = lease.page_table
        lease.abort()
        return lease.hit

    def hold(self, key: Any) -> None:
        """A lease that stays open."""
        self.held.append(self.lease(key))

    def evict(self, pages: int) -> int:
        """The tree evicts and the pool takes back, as `reserve` has them do."""
        freed = self.cache.tree.evict(pages)[0]
        self.cache.pool.reclaim(freed)
        return len(freed)

    def grow(self, key: Any) -> Growth:
        """A lease."""
        return GrowingLease(self.lease(key))

    def held_bytes(self) -> int | None:
        """Of the tree."""
        return self.cache.tree.held_bytes()


class GrowingLease:
    """A lease that publishes chunk by chunk, its page table read each time."""

    def __init__(self, lease: Any) -> None:
        self.lease = lease
        self.table = lease.page_table

    def publish(self, upto: int) -> None:
        """Reserve and publish."""
        lease = self.lease
        lease.reserve(upto - lease.reserved)
        lease.publish(upto)
        self.table = lease.page_table

    def append(self, tokens: Any) -> None:
        """Append, reserve and publish."""
        lease = self.lease
        lease.append(tokens)
        lease.reserve(len(tokens))
        lease.publish(lease.length)
        self.table = lease.page_table

    def finish(self) -> None:
        """The lease ends."""
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
        """The version."""
        return MainstemLease.load()

    def prepare(self, prompt: Prompt) -> Any:
        """An int32 array."""
        return np.array(prompt, np.int32)

    def serve(self, key: Any, namespace: str | None = None) -> int:
        """Insertion goes on where the match ended."""
        tree, pool = self.tree, self.pool
        match = tree.match(key, namespace)
        tree.lock(match.node)
        missing = len(key) // self.page_size - len(match.page_ids)
        if missing > pool.free:
            pool.reclaim(tree.evict(missing - pool.free)[0])
        pages = pool.allocate(missing)
        tree.insert(key, np.concatenate([match.page_ids, pages]), namespace, after=match.node)
        pool.publish(pages)
        tree.unlock(match.node)
        return match.length

    def look_up(self, key: Any) -> int:
        """A match, which holds the pages."""
        return self.tree.match(key).length

    def hold(self, key: Any) -> None:
        """Match and lock."""
        self.tree.lock(self.tree.match(key).node)

    def evict(self, pages: int) -> int:
        """Evict, and give back to the pool."""
        freed = self.tree.evict(pages)[0]
        self.pool.reclaim(freed)
        return len(freed)

    def grow(self, key: Any) -> Growth:
        """Insertions behind the last node."""
        return GrowingPath(self.tree, self.pool, key)

    def held_bytes(self) -> int | None:
        """Of the tree."""
        return self.tree.held_bytes()


class GrowingPath:
    """A locked path of `Tree`, whose caller keeps tokens and pages."""

    def __init__(self, tree: Any, pool: Any, tokens: Ints) -> None:
        self.tree, self.pool, self.page_size = tree, pool, tree.page_size
        self.tokens = np.empty(2 * len(tokens) + 2**16, np.int32)
        self.tokens[: len(tokens)] = tokens
        self.length = len(tokens)
        self.pages = np.empty(len(self.tokens) // self.page_size, np.int32)
        self.count, self.node = 0, 0

    def publish(self, upto: int) -> None:
        """Allocate, insert, move the lock."""
        tree, count = self.tree, upto // self.page_size
        new = self.pool.allocate(count - self.count)
        self.pages[self.count : count] = new
        node = tree.insert(self.tokens[:upto], self.pages[:count], after=self.node).node
        self.pool.publish(new)
        tree.lock(node)
        tree.unlock(self.node)
        self.node, self.count = node, count

    def append(self, tokens: Ints) -> None:
        """Into the buffer, then as above."""
        self.tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.publish(self.length)

    def finish(self) -> None:
        """Unlock."""
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
        """NumPy's version."""
        return {"numpy": np.__version__}

    def prepare(self, prompt: Prompt) -> Any:
        """An int32 array."""
        return np.array(prompt, np.int32)

    def serve(self, key: Any, namespace: str | None = None) -> int:
        """Slots are taken from the top of the stack and given back to it."""
        slots, node = self.tree.match(key)
        self.tree.lock(node)
        missing = len(key) // self.page_size * self.page_size - len(slots)
        if missing > self.n_free:
            self.make_room(missing - self.n_free)
        self.tree.insert(key, np.concatenate([slots, self.allocate(missing)]))
        self.tree.unlock(node)
        return len(slots)

    def make_room(self, slots: int) -> int:
        """Evicts; the number of slots that went back to the stack."""
        before = self.n_free
        for freed in self.tree.evict(slots):
            self.free[self.n_free : self.n_free + len(freed)] = freed
            self.n_free += len(freed)
        return self.n_free - before

    def allocate(self, slots: int) -> Ints:
        """From the top of the stack."""
        self.n_free -= slots
        return self.free[self.n_free : self.n_free + slots]

    def look_up(self, key: Any) -> int:
        """A match, which holds the slots."""
        return len(self.tree.match(key)[0])

    def hold(self, key: Any) -> None:
        """Match and lock."""
        self.tree.lock(self.tree.match(key)[1])

    def evict(self, pages: int) -> int:
        """As a request does it."""
        return self.make_room(pages * self.page_size) // self.page_size

    def grow(self, key: Any) -> Growth:
        """Insertions of the prefix so far."""
        return GrowingRadix(self, key)


class GrowingRadix:
    """A locked path of the radix cache; it knows no place to go on from, so each insertion starts at the root."""

    def __init__(self, system: PythonRadix, tokens: Ints) -> None:
        self.system, self.tree = system, system.tree
        self.tokens = np.empty(2 * len(tokens) + 2**16, np.int32)
        self.tokens[: len(tokens)] = tokens
        self.length, self.done = len(tokens), 0
        self.slots = np.empty(len(self.tokens), np.int32)
        self.node = self.tree.root

    def publish(self, upto: int) -> None:
        """Allocate, insert, find the new end, move the lock."""
        self.slots[self.done : upto] = self.system.allocate(upto - self.done)
        self.tree.insert(self.tokens[:upto], self.slots[:upto])
        _, node = self.tree.match(self.tokens[:upto])
        self.tree.lock(node)
        self.tree.unlock(self.node)
        self.node, self.done = node, upto

    def append(self, tokens: Ints) -> None:
        """Into the buffer, then as above."""
        self.tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.publish(self.length)

    def finish(self) -> None:
        """Unlock."""
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
        """Which hash it uses."""
        from bench.block_dict import HASH

        return {"dict of block hashes": HASH}

    def prepare(self, prompt: Prompt) -> Any:
        """The tokens' bytes, 4 each."""
        return np.array(prompt, np.int32).tobytes()

    def serve(self, key: Any, namespace: str | None = None) -> int:
        """The first block's parent is the namespace."""
        cache = self.cache
        found, pages = cache.match(key, namespace)
        cache.lock(found)
        hashes, _ = cache.insert(key, found, pages, namespace)
        cache.unlock(hashes)
        return len(found) * cache.page_size

    def look_up(self, key: Any) -> int:
        """A match, which holds the pages."""
        return len(self.cache.match(key)[0]) * self.cache.page_size

    def hold(self, key: Any) -> None:
        """Match and lock."""
        self.cache.lock(self.cache.match(key)[0])

    def evict(self, pages: int) -> int:
        """The longest unused."""
        return self.cache.evict(pages)

    def grow(self, key: Any) -> Growth:
        """Goes on from the last hash."""
        return GrowingHashes(self.cache, key)


class GrowingHashes:
    """Locked blocks, and the tokens whose hashes are still to be made."""

    def __init__(self, cache: Any, tokens: bytes) -> None:
        self.cache, self.tokens = cache, bytearray(tokens)
        self.hashes: list[bytes] = []
        self.pages: list[int] = []

    def publish(self, upto: int) -> None:
        """Hash and insert what is new; `insert` locks it."""
        at = len(self.hashes) * self.cache.block_bytes
        new, pages = self.cache.extend(bytes(self.tokens[at : 4 * upto]), self.hashes[-1] if self.hashes else b"")
        self.hashes += new
        self.pages += pages

    def append(self, tokens: bytes) -> None:
        """Into the buffer, then as above."""
        self.tokens += tokens
        self.publish(len(self.tokens) // 4)

    def finish(self) -> None:
        """Unlock."""
        self.cache.unlock(self.hashes)
