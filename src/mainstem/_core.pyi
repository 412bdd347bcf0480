"""
The core of Mainstem: the radix tree over bytes, and the page pool. Use mainstem.Tree and mainstem.PrefixCache.
"""

from collections.abc import Callable, Sequence
from typing import Self

import numpy
import numpy.typing


def encode_tokens(tokens: object, limit: int) -> bytes:
    """Token ids as little-endian 4-byte symbols. Raises BadTokens."""

def hash_blocks(tokens: object, block_tokens: int, width: int, seed: bytes) -> bytes:
    """See mainstem.hash_blocks, which checks its arguments."""

class Tree:
    """The radix tree over bytes; see src/mainstem/core/csrc/tree.h."""

    def __init__(self, symbol_bytes: int, page_size: int, components: Sequence[tuple[str, int, bool]], tiers: int, policy: str, hash_seed: int, symbol_tokens: float = 1.0, protected_hits: int = 2) -> None: ...

    def match(self, ns: bytes, tokens: object, limit: int, partial: bool) -> tuple[int, int, numpy.typing.NDArray[numpy.int32], int, int, int, int, int, int, int]:
        """
        The fields of mainstem.Match. Tokens are ids below `limit`; with limit 0, symbols in bytes.
        """

    def peek(self, ns: bytes, tokens: object, limit: int, partial: bool, most: int | None = None) -> tuple[int, int, int]:
        """
        Symbols that a match of the first `most` would find (-1: all but one): in whole pages, of the next page, and in whole pages more when every tier counts.
        """

    def insert(self, ns: bytes, tokens: object, limit: int, ids: Sequence[numpy.typing.NDArray[numpy.int32]], after: int, priority: int, tier: int, ready: bool, past_flights: bool = False) -> tuple[int, int, int, numpy.typing.NDArray[numpy.int32]]:
        """
        The fields of mainstem.Inserted. Ends in front of pages in flight, or goes on behind them.
        """

    def remove(self, ns: bytes, tokens: object, limit: int) -> int:
        """
        Takes the page that a key ends in, and all that follows it, out of the tree; the number of pages.
        """

    def evict_removed(self, tier: int) -> list[numpy.typing.NDArray[numpy.int32]]:
        """
        Ids of what was removed and is neither locked nor in flight, by component.
        """

    def removed(self, node: int) -> bool:
        """Whether a node was removed."""

    def lock(self, node: int, tier: int) -> None: ...

    def unlock(self, node: int, tier: int) -> None: ...

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

    def start(self, node: int) -> int:
        """Pages from the root to the node's beginning."""

    def parent(self, node: int) -> int:
        """The node that a node hangs below; 0: the root."""

    def lacking(self, node: int, above: int, below: int, hits: int) -> list[int]:
        """
        From the top, the nodes on a path that hold something on tier `above` that tier `below` lacks: as far as `below` can have them without a gap, and they have so many hits.
        """

    def locate(self, ns: bytes, key: bytes, pages: int) -> int:
        """
        The node that ends behind the first pages of a key, splitting one; 0 if the tree does not have them.
        """

    def residency(self, node: int, component: int, tier: int) -> int:
        """0: absent, 1: in flight, 2: present."""

    def hot_spans(self, tier: int) -> list[tuple[int, int, bytes, bytes]]:
        """
        All that is present on a tier, each page once, what is hottest first: see PathSpan in tree.h.
        """

    def in_flight_above(self, node: int, tier: int) -> int:
        """
        By whose name the nearest pages above a node are in flight; 0: none are.
        """

    def own_ids(self, node: int, component: int, tier: int) -> numpy.typing.NDArray[numpy.int32]:
        """Ids of the node alone; none where they are not present."""

    def next_victim(self, component: int, tier: int) -> int:
        """The node that evict() comes to first, or 0."""

    def path_key(self, node: int, begin: int = 0) -> tuple[bytes, bytes]:
        """
        The name of a node's namespace, and the symbols from page `begin` to its end.
        """

    def ids(self, node: int, component: int, tier: int) -> numpy.typing.NDArray[numpy.int32]:
        """Ids from the root to the node's end; -1 where the cell is absent."""

    def namespaces(self) -> list[bytes]: ...

    def nodes(self, ns: bytes) -> list[tuple[tuple[int, int, int, int, int, int, int], int, int, bool, bytes, list[tuple[int, int, numpy.typing.NDArray[numpy.int32]]]]]:
        """
        Depth first: stats (as in waiting), parent, children, whether it was removed, key, and (residency, locks, ids) a cell.
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

class Cache:
    """A tree and a pool that agree; see src/mainstem/core/csrc/cache.h."""

    def __init__(self, tree: Tree, pools: tuple[Pool, ...], token_limit: int, enabled: bool) -> None: ...

    def evict_with(self, evict: Callable[[int, int], object]) -> None:
        """
        From now on evict(component, n) is asked to free about n ids of a pool, instead of the tree's own order.
        """

    def copy_state_with(self, copy: Callable[[int, int], object]) -> None:
        """
        From now on copy(source, target) is asked to copy states from slot to slot.
        """

    def take_back(self) -> None:
        """Ends leases that were dropped."""

    def counters(self) -> tuple[int, int, int, int, int, int, int, int, int]:
        """
        Open leases; positions queried, hit and hit inside pages; leases without a page for that; duplicate pages; positions hit on the host; states published, and those for which there was no slot.
        """

    def take_touched(self) -> list[int]:
        """
        Ends of what was matched and published since the last call, if there is more than one tier.
        """

    def end_load(self, load: int) -> None:
        """A load whose lease is closed has ended: its pages can be given back."""

class Lease:
    """
    One sequence's hold on its prefix and on the pages it adds. Made by `PrefixCache.lease`; a context manager.
    """

    def __init__(self, cache: Cache, ns: bytes, tokens: object, priority: int, most: int | None = None, inside: bool = False) -> None: ...

    @property
    def hit(self) -> int:
        """Positions that need no compute; less than the length of the prompt."""

    @property
    def hit_tokens(self) -> int:
        """The same in tokens of the key kind."""

    @property
    def loadable(self) -> int:
        """Positions behind the hit that the host tier has."""

    @property
    def reserved(self) -> int:
        """Positions that have a page."""

    @property
    def length(self) -> int:
        """Positions of the sequence: the prompt and what was appended."""

    @property
    def published(self) -> int:
        """Positions of this sequence that are known to be in the tree."""

    @property
    def page_table(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        Page ids of the sequence, int32 [pages], those of the tree first; read it again after `reserve` and `publish`.

        Raises:
            LeaseClosed: the lease has ended; its pages may be others' by now.
        """

    @property
    def window_table(self) -> numpy.typing.NDArray[numpy.int32] | None:
        """
        Page ids of sliding-window attention, int32 [pages], -1 behind the window, which must not be read; None where there is no window beside full attention. Where all layers slide, `page_table` is such a table.

        Raises:
            LeaseClosed: the lease has ended.
        """

    @property
    def state(self) -> int:
        """
        The slot of the recurrent state that this sequence computes with; -1 where there are no states. Its content is a copy of the tree's at the hit; without a hit it is garbage.

        Raises:
            LeaseClosed: the lease has ended.
        """

    @property
    def reach(self) -> int:
        """
        How far the first component alone was matched; where it is more than the hit, a checkpoint there pays.
        """

    def slide(self, begin: int, end: int) -> None:
        """
        Positions [begin, end) are computed next: window pages for them. Private pages behind the window of `begin` go back. Does nothing without a window.

        Raises:
            OutOfPages: no room for more window pages; what lay behind the window went back all the same.
            BadArgument: end is beyond what is reserved, or begin beyond what has window pages.
            LeaseClosed: the lease has ended.
        """

    def checkpoint(self, position: int, room: bool = True) -> bool:
        """
        The state of this sequence stands at `position`: a copy of it becomes visible to others when the pages up to there are published. A copy that was not published is replaced.

        Args:
            position: a page border, not before what is published.
            room: evict another state where no slot is free.

        Returns whether there was a slot for it.

        Raises:
            BadArgument: no page border, before what is published, or beyond what is reserved.
            LeaseClosed: the lease has ended.
        """

    def reserve(self, n: int) -> None:
        """
        Pages for n positions more; evicts what it must. Those of a sliding window come with `slide`.

        Raises:
            OutOfPages: no room; nothing was changed.
            BadArgument: n is negative.
            LeaseClosed: the lease has ended.
        """

    def append(self, tokens: object) -> None:
        """
        Decoded tokens join the sequence. O(1) a token.

        Raises:
            BadTokens: a token is out of range; nothing was appended.
            LeaseClosed: the lease has ended.
        """

    def publish(self, upto: int) -> None:
        """
        Positions [0, upto) are computed: their whole pages become visible to others now.

        Pages that another lease published first go back to the pool, and `page_table` names the tree's instead. The cost grows with what is new, not with the prefix; only where another lease was first is the table copied, so that views of it keep what they showed.

        Raises:
            BadArgument: upto is beyond what is reserved, or beyond the sequence.
            LeaseClosed: the lease has ended.
        """

    def finish(self, upto: int | None = None) -> None:
        """
        Publishes [0, upto), unlocks, and gives every private page back. A second call does nothing.

        Args:
            upto: positions whose KV is computed. None: all that are reserved, less the last one if tokens were appended, since no forward has computed the KV of a token that was only just sampled.

        Raises:
            BadArgument: see `publish`; the lease stays open.
        """

    def abort(self) -> None:
        """
        Unlocks and gives every private page back; what was published stays. A second call does nothing.
        """

    def begin_copy(self) -> tuple[int, int, int] | None:
        """
        Source page, target page and positions of a copy that would lengthen the hit; for `PrefixCache`.
        """

    def end_copy(self, copied: bool) -> None:
        """Ends what `begin_copy` began."""

    def begin_load(self) -> tuple[int, list[tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32]]]]:
        """
        A number for the load, and of each component the host's ids and the private ones that they are to be copied to; for the tiers.
        """

    def end_load(self, arrived: bool) -> None:
        """
        Ends what `begin_load` began; what arrived is part of the hit now, and published.
        """

    @property
    def closed(self) -> bool:
        """Whether the lease has ended."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

def copy_rows(target: numpy.typing.NDArray[numpy.uint8], targets: numpy.typing.NDArray[numpy.int32], source: numpy.typing.NDArray[numpy.uint8], sources: numpy.typing.NDArray[numpy.int32]) -> None:
    """
    Copies row sources[i] of `source` to row targets[i] of `target`, both [rows, bytes], without the GIL.

    No row may be written twice in a call, or read and written. Raises BadArgument.
    """

class Replay:
    """
    Serves the requests of a trace by real trees, which are its own from then on; see src/mainstem/core/csrc/replay.h.
    """

    def __init__(self, trees: Sequence[Tree], capacities: Sequence[int], ttl_s: float, routing: str, evictions: Sequence[Callable[[int, int], list[numpy.typing.NDArray[numpy.int32]]] | None]) -> None:
        """
        A tree a replica, a capacity a tier. Where a tree's policy is written in Python, evict(pages, tier) evicts.
        """

    def feed(self, times_s: numpy.typing.NDArray[numpy.float64], tokens: numpy.typing.NDArray[numpy.int64], offsets: numpy.typing.NDArray[numpy.int64], blocks: numpy.typing.NDArray[numpy.uint64]) -> tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32]]:
        """
        Serves requests; the blocks that each hit, [requests * tiers], and the replica that served it.
        """

    def totals(self, replica: int, tier: int) -> tuple[int, int, int, int, int, list[int], list[int], list[int], list[int]]:
        """
        Blocks hit, loaded, written, evicted and expired; of those evicted age and idle time, in accesses and in seconds: [0] counts zeros, [i] numbers in [2**(i-1), 2**i).
        """

    def bytes(self) -> int:
        """Memory held beside the trees."""

class Optimum:
    """The offline optimum; see src/mainstem/core/csrc/optimum.h."""

    def __init__(self) -> None: ...

    def add(self, offsets: numpy.typing.NDArray[numpy.int64], blocks: numpy.typing.NDArray[numpy.uint64]) -> None:
        """The next requests."""

    def finish(self) -> None:
        """Those were all: `run` may be called, from several threads."""

    def run(self, capacity: int) -> tuple[numpy.typing.NDArray[numpy.int32], int]:
        """The blocks that each request hits, and how many blocks are evicted."""
