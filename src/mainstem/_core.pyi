"""
The core of Mainstem: the radix tree over bytes, and the page pool. Use mainstem.Tree and mainstem.PrefixCache.
"""

from collections.abc import Sequence

import numpy
import numpy.typing


def encode_tokens(tokens: object, limit: int) -> bytes:
    """Token ids as little-endian 4-byte symbols. Raises BadTokens."""

class Tree:
    """The radix tree over bytes; see src/mainstem/core/csrc/tree.h."""

    def __init__(self, symbol_bytes: int, page_size: int, components: Sequence[tuple[str, int]], tiers: int, policy: str, hash_seed: int) -> None: ...

    def match(self, ns: bytes, key: bytes | bytearray, partial: bool, symbols: int | None = None) -> tuple[int, int, int, numpy.typing.NDArray[numpy.int32], int, int, int, int, int, int]:
        """
        pages, partial symbols, node, ids, partial id, partial node, pending, reach and host pages, host node.
        """

    def peek(self, ns: bytes, key: bytes | bytearray, partial: bool, symbols: int | None = None) -> tuple[int, int]:
        """Pages, and symbols of the next one, that a match would return."""

    def insert(self, ns: bytes, key: bytes | bytearray, ids: Sequence[numpy.typing.NDArray[numpy.int32]], after: int, priority: int, tier: int, ready: bool, verify: bool, symbols: int | None = None) -> tuple[int, int, int, numpy.typing.NDArray[numpy.int32]]:
        """
        node, pages, existing pages, the tree's ids behind `after`, which `verify` compares with the key.
        """

    def lock(self, node: int, tier: int) -> None: ...

    def unlock(self, node: int, tier: int) -> None: ...

    def move_lock(self, from_node: int, to_node: int, tier: int) -> None: ...

    def attach(self, node: int, component: int, tier: int, ids: numpy.typing.NDArray[numpy.int32], ready: bool) -> None: ...

    def commit(self, node: int, tier: int) -> None: ...

    def cancel(self, node: int, tier: int) -> list[numpy.typing.NDArray[numpy.int32]]: ...

    def evict(self, ids: int, component: int, tier: int) -> list[numpy.typing.NDArray[numpy.int32]]: ...

    def waiting(self, component: int, tier: int) -> tuple[int, int, int, int, int, int, int] | None:
        """
        The first candidate without a rank: node, created, accessed, hits, priority, start and number of pages.
        """

    def rank(self, node: int, component: int, tier: int, major: float, minor: float) -> None: ...

    def end(self, node: int) -> int:
        """Pages from the root to the node's end."""

    def ids(self, node: int, component: int, tier: int) -> numpy.typing.NDArray[numpy.int32]:
        """Ids from the root to the node's end; -1 where the cell is absent."""

    def namespaces(self) -> list[bytes]: ...

    def nodes(self, ns: bytes) -> list[tuple[tuple[int, int, int, int, int, int, int], int, int, bytes, list[tuple[int, int, numpy.typing.NDArray[numpy.int32]]]]]:
        """
        Depth first: stats (as in waiting), parent, children, key, and (residency, locks, ids) a cell.
        """

    def counts(self, component: int, tier: int) -> tuple[int, int, int]:
        """Ids present, of these locked, and in flight."""

    def counters(self) -> tuple[int, int, int, int, int, int, int, int, int]:
        """
        match calls, queried and hit symbols, insert calls, inserted and evicted pages, splits; nodes, namespaces, bytes.
        """

    def bytes(self) -> int:
        """Memory held, in bytes; looks at every node."""

    def check(self) -> None:
        """Raises CorruptTree, naming the node and the rule."""

class Pool:
    """
    Who owns each page: nobody (free), the tree (cached), or one lease (private).
    """

    def __init__(self, pages: int) -> None: ...

    def allocate(self, n: int) -> numpy.typing.NDArray[numpy.int32]:
        """free -> private. Raises OutOfPages."""

    def publish(self, ids: numpy.typing.NDArray[numpy.int32]) -> None:
        """private -> cached. Raises WrongOwner."""

    def release(self, ids: numpy.typing.NDArray[numpy.int32]) -> None:
        """private -> free. Raises WrongOwner."""

    def reclaim(self, ids: numpy.typing.NDArray[numpy.int32]) -> None:
        """cached -> free. Raises WrongOwner."""

    def owner(self, page: int) -> str:
        """'free', 'cached' or 'private'. Raises WrongOwner outside the pool."""

    def check(self) -> None:
        """Raises CorruptTree."""

    @property
    def free(self) -> int: ...

    @property
    def cached(self) -> int: ...

    @property
    def private(self) -> int: ...

    @property
    def total(self) -> int: ...
