"""
The core of Mainstem: the radix tree over bytes, and the page pool. Use mainstem.Tree and mainstem.PrefixCache.
"""

from collections.abc import Callable, Sequence
from typing import Final, Self

import numpy
import numpy.typing


def encode_tokens(tokens: object | None, limit: int) -> bytes:
    """Encodes token ids as little-endian 4-byte symbols. Raises BadTokens."""

def hash_blocks(tokens: object | None, block_tokens: int, width: int, seed: object) -> bytes:
    """As mainstem.hash_blocks, which checks its arguments."""

def owner_of(ns: bytes) -> bytes:
    """As mainstem.cache.namespaces.owner_of."""

def policies() -> list[str]:
    """The names of the policies that rank nodes themselves."""

class TreeStats:
    """
    Counts of a tree. Pages are those of the first component on the device, unless stated otherwise; cached = locked + evictable.
    """

    @property
    def match_calls(self) -> int:
        """Matches."""

    @property
    def queried_symbols(self) -> int:
        """Symbols that matches looked up."""

    @property
    def hit_symbols(self) -> int:
        """Symbols that matches found on the device."""

    @property
    def insert_calls(self) -> int:
        """Insertions."""

    @property
    def inserted_pages(self) -> int:
        """Pages of the first component that insertions added, on any tier."""

    @property
    def evicted_pages(self) -> int:
        """Pages and slots evicted, on any tier."""

    @property
    def splits(self) -> int:
        """Nodes split."""

    @property
    def cached_pages(self) -> int:
        """Pages present: locked or evictable."""

    @property
    def locked_pages(self) -> int:
        """Pages present that a lock protects."""

    @property
    def evictable_pages(self) -> int:
        """Pages present that repeated eviction frees."""

    @property
    def in_flight_pages(self) -> int:
        """Pages whose transfer has not ended."""

    @property
    def nodes(self) -> int:
        """Nodes, without roots."""

    @property
    def namespaces(self) -> int:
        """Roots."""

    @property
    def advice_won(self) -> int:
        """Pages found because advice was followed."""

    @property
    def advice_lost(self) -> int:
        """Pages missed because advice was followed."""

    def as_dict(self) -> dict[str, int]:
        """All counts, by name."""

    def __repr__(self) -> str: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

class Tree:
    """The radix tree over bytes; see src/mainstem/core/csrc/tree/tree.h."""

    def __init__(self, symbol_bytes: int, page_size: int, components: Sequence[tuple[str, int, bool]], tiers: int, policy: str, hash_seed: int, protected_hits: int = 2) -> None: ...

    def match(self, ns: bytes, tokens: object | None, limit: int, partial: bool) -> tuple[int, int, numpy.typing.NDArray[numpy.int32], int, int, int, int, int, int, int]:
        """
        The fields of mainstem.Match. Tokens are ids below `limit`; with limit 0, symbols in bytes.
        """

    def peek(self, ns: bytes, tokens: object | None, limit: int, partial: bool, most: int | None = None) -> tuple[int, int, int]:
        """
        Symbols that a match of the first `most` symbols would find (-1: all but one): in whole pages, in the next page, and in further whole pages when every tier counts.
        """

    def continuation(self, ns: bytes, tokens: object | None, limit: int, most: int) -> bytes: ...

    def remember(self, pages: int) -> None: ...

    def tick(self) -> int:
        """The number of matches and insertions, and of ends of leases."""

    def explain(self, ns: bytes, symbols: bytes, distances: bool) -> tuple[list[tuple[int, int, str, tuple[str, int, int, int, int, int] | None, int]], int, bytes, int]:
        """
        Runs of the whole pages: (begin, end, cause, departure, tick of the last use) in symbols; of a departure: why, tier, hits, ticks of the last use and of the departure, stack distance in pages; -1: not known. Then how many symbols of the last run agree with the nearest key, how that goes on, and the tick before which nothing may be known.
        """

    def insert(self, ns: bytes, tokens: object | None, limit: int, ids: Sequence[numpy.typing.NDArray[numpy.int32]], after: int, priority: int, tier: int, ready: bool, past_flights: bool = False) -> tuple[int, int, int, numpy.typing.NDArray[numpy.int32]]:
        """The fields of mainstem.Inserted."""

    def remove(self, ns: bytes, symbols: bytes) -> int: ...

    def evict_removed(self, tier: int) -> list[numpy.typing.NDArray[numpy.int32]]: ...

    def removed(self, node: int) -> bool: ...

    def lock(self, node: int, tier: int) -> None: ...

    def unlock(self, node: int, tier: int) -> None: ...

    def retain(self, ns: bytes, key: bytes, tier: int, room: Sequence[int]) -> tuple[int, int, list[int]]:
        """Returns the node (0: nothing), its pages, and ids by component."""

    def retain_node(self, node: int, tier: int, room: Sequence[int]) -> tuple[int, int, list[int]]: ...

    def end_retention(self, node: int, tier: int) -> list[int]:
        """Returns ids by component. Raises NotLocked."""

    def demote(self, ns: bytes, key: bytes, tiers: int) -> list[int]: ...

    def expect(self, ns: bytes, key: bytes, account: int, now: float, due: float) -> int: ...

    def note_time(self, now: float) -> None: ...

    def path(self, ns: bytes, key: bytes) -> list[int]: ...

    def attach(self, node: int, component: int, tier: int, ids: numpy.typing.NDArray[numpy.int32], ready: bool) -> None: ...

    def commit(self, node: int, tier: int) -> None: ...

    def cancel(self, node: int, tier: int) -> list[numpy.typing.NDArray[numpy.int32]]: ...

    def evict(self, ids: int, component: int, tier: int, ns: bytes | None = b"") -> list[numpy.typing.NDArray[numpy.int32]]: ...

    def share_out(self, others: Sequence[tuple[int, int]], named: Sequence[tuple[bytes, Sequence[tuple[int, int]]]]) -> None:
        """
        Each share by component and then by tier: guaranteed and at most so many ids.
        """

    def owner(self, node: int) -> bytes: ...

    def owners(self) -> list[bytes]: ...

    def owned(self, ns: bytes) -> list[tuple[int, int, int]]:
        """As of `counts`, by component and then by tier."""

    def available(self, component: int, tier: int, ns: bytes = ...) -> int: ...

    def beyond_maximum(self, component: int, tier: int) -> tuple[bytes, int]: ...

    def waiting(self, component: int, tier: int) -> tuple[int, int, int, int, int, int, int] | None:
        """
        The first candidate without a rank: node, created, accessed, hits, priority, start and number of pages.
        """

    def rank(self, node: int, component: int, tier: int, major: float, minor: float) -> None: ...

    def end(self, node: int) -> int: ...

    def start(self, node: int) -> int: ...

    def parent(self, node: int) -> int: ...

    def lacking(self, node: int, above: int, below: int, hits: int) -> list[int]: ...

    def locate(self, ns: bytes, key: bytes, pages: int) -> int: ...

    def extent(self, ns: bytes, key: bytes) -> int: ...

    def ends_or_parts(self, node: int) -> bool: ...

    def presence(self, node: int, component: int, tier: int) -> int:
        """0: absent, 1: in flight, 2: present."""

    def hot_spans(self, tier: int) -> list[tuple[int, int, bytes, bytes]]:
        """The fields of each PathSpan."""

    def in_flight_above(self, node: int, tier: int) -> int: ...

    def own_ids(self, node: int, component: int, tier: int) -> numpy.typing.NDArray[numpy.int32]: ...

    def next_victim(self, component: int, tier: int, want: int = 1, ns: bytes = ...) -> int: ...

    def path_key(self, node: int, begin: int = 0) -> tuple[bytes, bytes]: ...

    def ids(self, node: int, component: int, tier: int) -> numpy.typing.NDArray[numpy.int32]:
        """Ids from the root to the node's end; -1 where the cell is absent."""

    def namespaces(self) -> list[bytes]: ...

    def nodes(self, ns: bytes) -> list[tuple[tuple[int, int, int, int, int, int, int], int, int, bool, bytes, list[tuple[int, int, numpy.typing.NDArray[numpy.int32]]]]]:
        """
        Depth first: stats (as in waiting), parent, children, whether it was removed, key, and (residency, locks, ids) for each cell.
        """

    def survey(self, first: int, count: int) -> bytes:
        """The fields of mainstem.cache.tree.SURVEYED, 8 bytes each, native."""

    def name_at(self, place: int) -> bytes: ...

    def places(self) -> int: ...

    def counts(self, component: int, tier: int) -> tuple[int, int, int]:
        """Ids present, locked (of those present), and in flight."""

    def stats(self) -> TreeStats: ...

    def listen(self, key: bytes, places: Sequence[int], limit: int) -> None: ...

    def take_moves(self) -> list[tuple[bytes, int, tuple[int, int, bytes, bytes] | None]] | None:
        """
        What was noted since the last call, or None if more than `limit` pages were. Each is (hashes, medium, path): 8 bytes a page, native; the tier, 2 for storage, or 3 for what pages in storage continue and was not told to be there; path is None for pages that left, else the first page, the hash of the page before, the namespace and the symbols.
        """

    def all_moves(self) -> list[tuple[bytes, int, tuple[int, int, bytes, bytes] | None]]:
        """
        Everything that a match can find now, in the form of `take_moves`, parents first.
        """

    def note_written(self, node: int, begin: int) -> None: ...

    def note_deleted(self, node: int) -> None: ...

    def moves_dropped(self) -> int: ...

    def bytes(self) -> int:
        """Memory used, in bytes; reads every node."""

    def check(self) -> None:
        """Raises CorruptTree with the node and the broken rule."""

class Pool:
    """
    Tracks the owner of each page: nobody (free), the tree (cached), or one lease (private).
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

    def freed_with(self, freed: Callable[[numpy.typing.NDArray[numpy.int32]], object]) -> None:
        """
        Calls freed(ids) from now on when pages have become free, before anybody gets them. It must not refer to the pool: nothing would end that cycle.
        """

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

class LeaseCounters:
    """What the leases of a cache have counted."""

    @property
    def open(self) -> int:
        """Leases that have not ended."""

    @property
    def queried(self) -> int:
        """Positions that leases asked for, counted at their first `reserve`."""

    @property
    def hit(self) -> int:
        """Positions of those that they reused."""

    @property
    def partial_hit(self) -> int:
        """Positions hit that were copied from the middle of a page."""

    @property
    def partial_missed(self) -> int:
        """Leases that found no page to copy the beginning of another into."""

    @property
    def duplicate_pages(self) -> int:
        """
        Pages freed at their publication, because another lease had published them.
        """

    @property
    def host_hit(self) -> int:
        """Positions hit that were loaded from the host."""

    @property
    def checkpoints(self) -> int:
        """States published."""

    @property
    def checkpoints_missed(self) -> int:
        """Checkpoints for which no slot was free."""

    def as_dict(self) -> dict[str, int]:
        """All counts, by name."""

    def __repr__(self) -> str: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

class Cache:
    """
    A tree and the pools of its pages; see src/mainstem/core/csrc/lease/cache.h.
    """

    def __init__(self, tree: Tree, pools: tuple[Pool, ...], token_limit: int, enabled: bool) -> None: ...

    def evict_with(self, evict: Callable[[int, int, bytes], object]) -> None:
        """
        Calls evict(component, n, ns) from now on to free about n ids of a pool for a namespace, instead of the tree's own order.
        """

    def copy_state_with(self, copy: Callable[[int, int], object]) -> None:
        """
        Calls copy(source, target) from now on to copy states from slot to slot.
        """

    def take_back(self) -> None:
        """Ends leases that were dropped."""

    def settle(self) -> None: ...

    def counters(self) -> LeaseCounters: ...

    def take_touched(self) -> list[int]: ...

    @property
    def has_touched(self) -> bool: ...

    def end_load(self, load: int) -> None: ...

class Lease:
    """
    One sequence's hold on its prefix and on the pages it adds. Made by `PrefixCache.lease`; a context manager. Its tables and its state, and all calls but `finish` and `abort`, raise LeaseClosed once the lease has ended: others may own its pages by then.
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
        """Positions after the hit that the host tier has."""

    @property
    def reserved(self) -> int:
        """Positions that have a page."""

    @property
    def length(self) -> int:
        """Positions of the sequence: the prompt and the appended tokens."""

    @property
    def published(self) -> int:
        """Positions of this sequence that are known to be in the tree."""

    @property
    def tables(self) -> tuple[numpy.typing.NDArray[numpy.int32], ...]:
        """
        For each component, the page ids of the sequence, int32 [pages], the tree's first. Of a component that does not read everything, those before what is read are -1. A state's table is empty. Read them again after `reserve`, `slide` and `publish`.
        """

    @property
    def page_table(self) -> numpy.typing.NDArray[numpy.int32]:
        """The first component's table."""

    @property
    def window_table(self) -> numpy.typing.NDArray[numpy.int32] | None:
        """The next component's table, if it has one."""

    @property
    def state(self) -> int:
        """
        The slot of the recurrent state that this sequence computes with; -1 if there are no states. It starts as a copy of the tree's state at the hit; without a hit it holds garbage.
        """

    @property
    def reach(self) -> int:
        """
        Positions that the first component alone matched; if they exceed the hit, a checkpoint there pays off.
        """

    def slide(self, begin: int, end: int) -> None:
        """
        Allocates window pages for positions [begin, end), which are computed next. Frees private pages before the window of `begin`. Does nothing without a window.

        Raises:
            OutOfPages: no room for more window pages; pages before the window were freed all the same: nothing reads them.
            BadArgument: end is beyond what is reserved, or begin beyond what has window pages.
        """

    def checkpoint(self, position: int, room: bool = True, mark: bool = False) -> bool:
        """
        Copies the state of this sequence, which is at `position`. Others see the copy once the pages up to there are published. Replaces a copy that was not published.

        Args:
            position: a page boundary, not before what is published.
            room: evict another state if no slot is free.
            mark: other sequences are expected to part from this one here, as at the end of a system prompt: a newer state of this sequence does not supersede this one.

        Returns whether there was a slot for it.

        Raises:
            BadArgument: not a page boundary, before what is published, or beyond what is reserved.
        """

    def reserve(self, n: int, counts: bool = True) -> None:
        """
        Allocates pages for n more positions, and evicts if it must. `slide` allocates those of a window. `counts`: whether the lease counts as a query of the cache.

        Raises:
            OutOfPages: no room; nothing was changed.
            BadArgument: n is negative.
        """

    def append(self, tokens: object | None) -> None:
        """
        Appends decoded tokens to the sequence. O(1) per token.

        Raises:
            BadTokens: a token is out of range; nothing was appended.
        """

    def publish(self, upto: int) -> None:
        """
        Publishes the whole pages of positions [0, upto), which are computed: others can find them now.

        Pages that another lease published first are freed, and `page_table` names the tree's instead. The cost grows with the new pages, not with the prefix. Only if another lease was first is the table copied, so that views of it do not change.

        Raises:
            BadArgument: upto is beyond what is reserved, or beyond the sequence.
        """

    def finish(self, upto: int | None = None) -> None:
        """
        Publishes [0, upto), unlocks, and frees every private page. A second call does nothing.

        Args:
            upto: positions whose KV is computed. None: all reserved positions, less the last one if tokens were appended, since no forward has computed the KV of a token that was just sampled.

        Raises:
            BadArgument: see `publish`; the lease stays open.
        """

    def abort(self) -> None:
        """
        Unlocks and frees every private page; published pages stay. A second call does nothing.
        """

    def begin_copy(self) -> tuple[int, int, int] | None:
        """
        Source page, target page and positions of a copy that would extend the hit; for `PrefixCache`.
        """

    def end_copy(self, copied: bool) -> None:
        """Ends the copy that `begin_copy` started."""

    def begin_load(self) -> tuple[int, list[tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32]]]]:
        """
        The number of the load, and for each component the host's ids and the private ids to copy them to; for the tiers.
        """

    def end_load(self, arrived: bool) -> None:
        """
        Ends the load that `begin_load` started; if it arrived, publishes it and adds it to the hit.
        """

    @property
    def closed(self) -> bool:
        """Whether the lease has ended."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

def copy_rows(target: numpy.typing.NDArray[numpy.uint8], targets: numpy.typing.NDArray[numpy.int32], source: numpy.typing.NDArray[numpy.uint8], sources: numpy.typing.NDArray[numpy.int32]) -> None:
    """
    Copies row sources[i] of `source` to row targets[i] of `target`, both [rows, bytes], without the GIL.

    In one call, no row may be written twice, or both read and written. Raises BadArgument.
    """

class EntropyCoder:
    """
    Codes of int16 numbers (rANS) with fixed tables, one for each class of rows.

    Raises BadArgument unless `frequencies` is uint16 [classes, TOKENS], each at least 1, and those of a class add up to 4096.
    """

    def __init__(self, frequencies: numpy.typing.NDArray[numpy.uint16]) -> None: ...

    TOKENS: Final[int] = ...
    """Tokens of a table."""

    def encode(self, numbers: numpy.typing.NDArray[numpy.int16], classes: numpy.typing.NDArray[numpy.uint8], out: numpy.typing.NDArray[numpy.uint8]) -> int:
        """
        Encodes numbers [rows, columns], -32767 to 32767, by the class of each row; without the GIL.

        Returns the length of the code; 0: `out` has no room for it, and its content is undefined.
        """

    def decode(self, code: numpy.typing.NDArray[numpy.uint8], classes: numpy.typing.NDArray[numpy.uint8], numbers: numpy.typing.NDArray[numpy.int16]) -> None:
        """
        Decodes into `numbers`; without the GIL. Bytes after the code are not read.

        Raises BadArgument if these bytes are no code of as many numbers; `numbers` are then undefined.
        """

def instructions() -> str:
    """
    The instructions that kernels compute with: "plain", "avx2", "avx512", "avx512_bf16" (pairs of bfloat16) or "amx" (tiles of them). Each has an order of sums of its own.
    """

def limit_instructions(name: str) -> None:
    """
    Lets kernels compute with no more than these, so that machines of several kinds compute the same. Raises BadArgument if the name is unknown.
    """

def linear(x: int, rows: int, inputs: int, weights: Sequence[tuple[tuple[int, int, int, int, int], int]], out: int, rounds: bool, bfloat16: bool, threads: int) -> None:
    """
    Computes linear layers that are given the same x, [rows, inputs], on PyTorch's threads, without the GIL.

    Each weight is ((address, bias, codes, scales, bits), outputs), all but the first 0 where there is none. `out` gets [rows, outputs] of one after another. All are contiguous and float32, or bfloat16; without `rounds`, `out` is float32, the sums as they are. Codes of 4 or 8 bits and scales are the same weight, see `kernels.Codes`. Raises BadArgument if `inputs` is 0, or not a multiple of 32 with codes, or these have other bits.
    """

def rms_norm(x: int, weight: int, out: int, rows: int, width: int, epsilon: float, offset: float, rounds: bool, bfloat16: bool, threads: int) -> None:
    """
    Computes the RMS norm of x [rows, width] to `out`, times weight [width] plus `offset`, without the GIL.

    Tensors are addresses, as for `linear`. With `rounds`, what is multiplied by the weight is rounded before. Raises BadArgument if `width` is 0.
    """

def apply(name: str, x: int, out: int, count: int, bfloat16: bool, threads: int) -> None:
    """
    Computes a function of `count` numbers x to `out`, each from its own number alone, without the GIL: "silu", "gelu", "gelu_tanh", "sigmoid" or "softplus".

    Tensors are addresses, as for `linear`. Raises BadArgument if the name is unknown.
    """

class AttentionPlan:
    """
    Which rows of a batch see which keys, for all layers of a kind. One thread at a time.
    """

    def __init__(self, parts: Sequence[tuple[int, numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32]]], rows: int) -> None:
        """
        Each part is a position, the slots from there on, the rows that see some of them, and for each row the positions where these begin and end. A row sees keys of 256 positions, from a multiple of 256 on, in one part.

        Raises BadArgument if a row sees nothing or is not below `rows`, or a range is not one of the slots.
        """

    def attend(self, queries: int, keys: int, values: int, out: int, sizes: tuple[int, int, int, int], strides: tuple[int, int], scales: tuple[int, int], stored: str, positions: int, scale: float, softcap: float, sinks: int, bfloat16: bool, threads: int) -> None:
        """
        Computes `out` [rows, heads, numbers of a value], without the GIL. Tensors are addresses, as for `linear`.

        `sizes` are heads, KV heads, and numbers of a key and a value. `keys` and `values` have `positions` rows, `strides` numbers apart: `stored` as "auto", like queries, or as "int8" or "fp8" times `scales`, float32 [positions, KV heads], 0 without. `softcap` and `sinks` are 0 without them. Raises BadArgument if a slot is not below `positions`, a size does not fit, or `stored` is unknown.
        """

class DecoderLayer:
    """A layer of a decoder, at the addresses of its weights."""

    def __init__(self, sizes: tuple[int, int, int, int, int], norms: Sequence[tuple[int, float, float]], matrices: Sequence[tuple[int, int, int, int, int]], scale: float, activation: str, bfloat16: bool) -> None:
        """
        `sizes` are hidden, inner, heads, KV heads, and numbers of a head. `norms` are those before attention and before the MLP, of queries and of keys, each weight (0 for none), epsilon and offset, as for `rms_norm`. `matrices` are queries, keys, values, output, gate, up and down, each as for `linear`.

        Raises BadArgument if a size is not a multiple of 32, or the activation is unknown.
        """

    def run(self, x: int, cosines: int, sines: int, plan: AttentionPlan, keys: int, values: int, slots: numpy.typing.NDArray[numpy.int64], positions: int, threads: int) -> None:
        """
        Computes x float32 [rows of the plan, hidden] in place, without the GIL, and writes the rows' keys and values to their slots.

        `cosines` and `sines` are [rows, numbers of a head]. Raises BadArgument if a slot is not below `positions`.
        """

def scan(q: int, k: int, v: int, decay: int, beta: int, state: int, out: int, sizes: tuple[int, int, int, int, int], by_key: bool, threads: int) -> None:
    """
    Computes linear attention with a decay, token by token, without the GIL.

    Tensors are addresses of contiguous float32. `sizes` are rows, tokens, heads, and numbers of a key and of a value. q and k are [rows, tokens, heads, keys], v and `out` [rows, tokens, heads, values], `decay` as k if `by_key`, else [rows, tokens, heads], as is `beta`, 0 without the delta rule. `state` [rows, heads, keys, values] is overwritten.
    """

class Replay:
    """
    Serves the requests of a trace with real trees, which nothing else may use from then on; see src/mainstem/core/csrc/replay/replay.h.
    """

    def __init__(self, trees: Sequence[Tree], capacities: Sequence[int], ttl_s: float, routing: str, evictions: Sequence[Callable[[int, int], list[numpy.typing.NDArray[numpy.int32]]] | None], block_tokens: int, costs: tuple[float, float, float, float, float | None], parts: int) -> None:
        """
        Takes one tree per replica and one capacity per tier. For policies written in Python, evict(pages, tier) evicts. Costs: seconds of a token, of a position that it attends to, of a token from the host, from storage and from another replica; None: replicas read nothing from each other. Parts: how many threads may serve.
        """

    def feed(self, times_s: numpy.typing.NDArray[numpy.float64], tokens: numpy.typing.NDArray[numpy.int64], offsets: numpy.typing.NDArray[numpy.int64], blocks: numpy.typing.NDArray[numpy.uint64], stored: numpy.typing.NDArray[numpy.int64] | None = None) -> tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32]]:
        """
        Serves requests, one after another; a store that all replicas share has the first `stored` blocks of each. Returns the blocks that each hit, [requests * tiers], the replica that served it, the peer that it asks, and the blocks from the first that the peer holds; 0: it asks none.
        """

    def route(self, times_s: numpy.typing.NDArray[numpy.float64], tokens: numpy.typing.NDArray[numpy.int64], offsets: numpy.typing.NDArray[numpy.int64], blocks: numpy.typing.NDArray[numpy.uint64], stored: numpy.typing.NDArray[numpy.int64] | None = None) -> tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32]]:
        """
        Routes requests by what was learned so far. Returns the same columns; `serve` fills in the hits.
        """

    def serve(self, part: int) -> None:
        """
        Serves the requests that were routed last to the replicas of a part, each part once; from any thread.
        """

    def learn(self, part: int) -> None:
        """
        After all parts have served: learns a part of what changed; from any thread.
        """

    def totals(self, replica: int, tier: int) -> tuple[int, int, int, int, int, list[int], list[int], list[int], list[int]]:
        """
        Blocks hit, loaded, written, evicted and expired; age and idle time of evicted blocks, in accesses and in seconds: [0] counts zeros, [i] counts numbers in [2**(i-1), 2**i).
        """

    def bytes(self) -> int:
        """Memory used beside the trees."""

class Optimum:
    """The offline optimum; see src/mainstem/core/csrc/replay/optimum.h."""

    def __init__(self) -> None: ...

    def add(self, offsets: numpy.typing.NDArray[numpy.int64], blocks: numpy.typing.NDArray[numpy.uint64]) -> None:
        """Adds the next requests."""

    def finish(self) -> None:
        """Ends the trace: `run` may be called now, from several threads."""

    def run(self, capacity: int) -> tuple[numpy.typing.NDArray[numpy.int32], int]:
        """
        Returns the blocks that each request hits, and the number of blocks evicted.
        """

class IndexCounts:
    """What a routing index holds, and what it has seen."""

    @property
    def workers(self) -> int:
        """Workers known."""

    @property
    def blocks(self) -> int:
        """Distinct pages that anybody has, or is expected to have."""

    @property
    def held(self) -> int:
        """Pages that workers have, each counted for each of them."""

    @property
    def expected(self) -> int:
        """The same of pages that they were sent and are expected to have."""

    @property
    def bytes(self) -> int:
        """Memory of the index."""

    @property
    def stored(self) -> int:
        """Pages that events stored."""

    @property
    def removed(self) -> int:
        """Pages that events removed."""

    @property
    def cleared(self) -> int:
        """Events that cleared all of a worker."""

    @property
    def orphans(self) -> int:
        """Pages stored after one that is not known: ignored."""

    @property
    def unknown(self) -> int:
        """Pages removed from where they were not: ignored."""

    @property
    def malformed(self) -> int:
        """Events that make no sense: ignored."""

    @property
    def conflicts(self) -> int:
        """
        Pages whose hash names another page, or that have another hash, too: ignored.
        """

    @property
    def expired(self) -> int:
        """Expected pages that no event confirmed in time."""

    @property
    def forgotten(self) -> int:
        """Pages forgotten because the index was full."""

    def as_dict(self) -> dict[str, int]:
        """All counts, by name."""

    def __repr__(self) -> str: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

class Routing:
    """
    Which worker has which page, and when each would answer; see src/mainstem/core/csrc/routing/index.h and ranking.h. Media: 0 the device, 1 the host, 2 storage.
    """

    def __init__(self, key: bytes, page_tokens: int, capacity: int) -> None:
        """
        Takes a secret key of 16 bytes, the tokens of a page, and the pages of all workers together at most.
        """

    def add(self) -> int: ...

    def drop(self, worker: int) -> None: ...

    def expect_for(self, worker: int, seconds: float) -> None: ...

    def share_store(self, worker: int, store: int) -> None: ...

    def store(self, worker: int, medium: int, space: bytes, parent: object | None, hashes: object | None, tokens: object | None) -> None: ...

    def remove(self, worker: int, medium: int, hashes: object | None) -> None: ...

    def clear(self, worker: int) -> None: ...

    def malformed(self, worker: int) -> None: ...

    def match(self, space: bytes, tokens: object) -> tuple[list[int], list[int], list[int]]:
        """Returns the fields of Depths."""

    def rank(self, space: bytes, tokens: object, workers: numpy.typing.NDArray[numpy.int32], stay: int | None, now_s: float) -> numpy.typing.NDArray[numpy.int32]:
        """Returns workers, the best first."""

    def estimates(self, space: bytes, tokens: object, workers: numpy.typing.NDArray[numpy.int32], stay: int | None, now_s: float) -> list[tuple[int, float, float, int]]:
        """
        Returns the same with what they are ordered by, the seconds until a first token, and the tokens that need not be computed.
        """

    def sent(self, worker: int, space: bytes, tokens: object, now_s: float) -> None: ...

    def ended(self, worker: int, now_s: float) -> None: ...

    def expire(self, now_s: float) -> None: ...

    def set_times(self, worker: int, prefill: tuple[float, float], host: tuple[float, float], storage: tuple[float, float], peer: tuple[float, float] | None) -> None:
        """
        Each in seconds: for a token, and for each position that it attends to; then latency and time for a token.
        """

    def set_queue(self, worker: int, tokens: float, now_s: float) -> None: ...

    def counts(self) -> IndexCounts: ...

    def check(self) -> None:
        """Raises CorruptTree."""
