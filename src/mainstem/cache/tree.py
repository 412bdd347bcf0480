"""`Tree`: the lower interface, for engines with their own allocator.

Encodes tokens and namespaces as bytes for the core and applies policies written in Python. Knows nothing of pools,
leases or tensors. Not thread-safe: call it from one thread at a time, as a scheduler does.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mainstem import _core
from mainstem._core import TreeStats
from mainstem.cache.components import Component, Full, by_name
from mainstem.cache.explain import Explanation, Timeline, explain_runs
from mainstem.cache.keys import KeyKind, Spliced, TokenKeys, TokenLike
from mainstem.cache.namespaces import DEFAULT, NamespaceLike, describe_namespace, encode_namespace
from mainstem.cache.policies import SLRU_PROTECTED_HITS, BuiltIn, NodeStats, Policy, Rank, find_policy
from mainstem.errors import BadArgument, BadTokens, check_integer
from mainstem.units import counted

Ids = NDArray[np.int32]

DEVICE, HOST = 0, 1  # tiers
IN_FLIGHT = 1
PRESENT = 2
MOST_EXPLAINED = 2**30  # pages
_EVERYTHING = 2**62
_SHOWN_SYMBOLS = 8


class Match(NamedTuple):
    """The longest prefix of a key that is in the tree. Lengths are in symbols.

    `node` is the handle of its end (0: nothing matched); `page_ids` are the int32 page ids of `length`. With
    `partial=True`, the next `partial` symbols agree with the beginning of page `partial_page`, the first of
    `partial_node`. `pending` symbols after the match are in flight. `reach` is how far the first component alone
    matches. The next `host_length` symbols, up to `host_node`, are present if lower tiers count as well.
    """

    node: int
    length: int
    page_ids: Ids
    partial: int
    partial_page: int
    partial_node: int
    pending: int
    reach: int
    host_length: int
    host_node: int


class Inserted(NamedTuple):
    """The result of an insertion. Lengths are in symbols from the root.

    The key is in the tree up to `length`, which ends at `node`; `existing` symbols were there before, present or in
    flight. `page_ids` are the tree's page ids after `after`. Where they differ from the caller's, the caller's page is
    a duplicate and stays the caller's. Pages that another insertion has in flight hold nothing yet; `Tree.peek` returns
    how far a match goes. With `ready=False`, `node` has a transfer in flight only if `length` exceeds `existing`.
    """

    node: int
    length: int
    existing: int
    page_ids: Ids


@dataclass(frozen=True, slots=True)
class CellView:
    """One component of a node on one tier: its ids (empty if absent), its locks, and whether it is in flight."""

    ids: Ids
    locks: int
    present: bool
    in_flight: bool


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node, for tools. Positions are in symbols, times in ticks; `cells` are by component and tier.

    `removed`: no match finds the node; it is the first to be evicted once its locks and transfers have ended.
    """

    node: int
    parent: int
    namespace: bytes
    start: int
    length: int
    key: bytes
    children: int
    created: int
    last_access: int
    hits: int
    priority: int
    cells: dict[tuple[str, int], CellView]
    removed: bool = False


SURVEYED = (
    "place", "parent", "node", "start", "pages", "hits", "accessed", "created", "device", "host", "locks", "flags",
)  # fmt: skip
"""The columns of a `Survey`.

`place` and `parent` are numbers of places, 0 for none; `node` is a handle; `start` and `pages` are in pages, `accessed`
and `created` in ticks. `device` and `host` say whether the first component is absent (0), `IN_FLIGHT` or `PRESENT`
there; `locks` are those of the device, retentions included. `flags`: 1 removed, 2 demoted, 4 retained on the device.
"""


class Survey(NamedTuple):
    """The nodes at some of the places of a tree, for tools.

    `rows` are int64 [nodes, len(SURVEYED)]: live nodes, and the root of each namespace as a node without pages.
    `places` is the number of all places. `names` are the encoded namespaces, by the places of their roots.
    """

    rows: NDArray[np.int64]
    places: int
    names: dict[int, bytes]


class Tree:
    """A radix tree from token sequences to page ids.

    Args:
        page_size: symbols per page; pages are the unit of matching.
        keys: how token sequences become symbols.
        components: what is kept for a prefix; the first is the main one. Methods take them by name, see `names`.
        tiers: 1 for the device alone, 2 with host memory, 3 with storage (in a replay).
        policy: see `mainstem.cache.policies.find_policy`.
        explain_pages: how many evicted pages are remembered for `explain`; None: none.

    Raises:
        BadArgument: an argument out of range.

    >>> tree = Tree(page_size=1)
    >>> tree.insert([1, 2, 3, 4], page_ids=[10, 11, 12, 13]).existing
    0
    >>> match = tree.match([1, 2, 9])
    >>> match.length, match.page_ids.tolist()
    (2, [10, 11])
    """

    def __init__(
        self,
        page_size: int = 16,
        keys: KeyKind | None = None,
        components: Items[Component] = (Full(),),
        tiers: int = 1,
        policy: str | Policy = "lru",
        explain_pages: int | None = None,
    ) -> None:
        self.keys = keys if keys is not None else TokenKeys()
        self.page_size = check_integer("page_size", page_size, 1, 2**20)
        self.page_bytes = self.page_size * self.keys.symbol_bytes  # of a page's symbols
        self.components = tuple(components)
        if not self.components:
            raise BadArgument("components", components, "at least one component")
        self.names = tuple(by_name(self.components))
        self._rows = {name: row for row, name in enumerate(self.names)}
        self.tiers = check_integer("tiers", tiers, 1, 3)
        self.policy = find_policy(policy)
        self._token_limit = self.keys.token_limit
        self._ranks = None if isinstance(self.policy, BuiltIn) else self.policy
        self.ranks_outside = self._ranks is not None
        # The seed only permutes a hash table: it changes no result.
        self.core = _core.Tree(
            self.keys.symbol_bytes,
            self.page_size,
            [component.row() for component in self.components],
            self.tiers,
            self.policy.rule if isinstance(self.policy, BuiltIn) else "external",
            secrets.randbits(64),
            self.policy.protected_hits if isinstance(self.policy, BuiltIn) else SLRU_PROTECTED_HITS,
        )
        if remembered := check_integer("explain_pages", explain_pages or 0, 0, MOST_EXPLAINED):
            self.core.remember(remembered)
        self._timeline = Timeline()

    def match(self, tokens: TokenLike, namespace: NamespaceLike = None, *, partial: bool = False) -> Match:
        """Returns the longest present prefix. Splits the node it ends in, refreshes what it returns, creates nothing.

        Args:
            partial: also look inside the next page.

        Raises:
            BadTokens: see `KeyKind.encode`.
        """
        key, limit = self._key(tokens)
        return Match._make(self.core.match(encode_namespace(namespace), key, limit, partial))

    def peek(self, tokens: TokenLike, namespace: NamespaceLike = None) -> int:
        """Returns how many symbols `match` would find. Changes nothing.

        Raises:
            BadTokens: see `KeyKind.encode`.
        """
        key, limit = self._key(tokens)
        return self.core.peek(encode_namespace(namespace), key, limit, False)[0]

    def explain(
        self, tokens: TokenLike, namespace: NamespaceLike = None, *, encoded: bool = False, distances: bool = False
    ) -> Explanation:
        """Says of the whole pages of a key where they are, and why the others are nowhere. Changes nothing.

        The answer depends on this namespace alone: the pages of another one are `never_seen` here. Namespaces share the
        memory as they share the pages, so the evictions of one make others `forgotten` sooner.

        Args:
            tokens: the whole key, from the root.
            encoded: the key is given as its symbols, in bytes, which are not checked.
            distances: also count `Evicted.distance_pages`, for which every node is visited. They count pages of all
                namespaces, so they are for whoever may know about those.

        Raises:
            BadTokens: see `KeyKind.encode`.
        """
        symbols = bytes(tokens) if encoded else self.keys.encode(tokens)
        runs, parted, other, horizon = self.core.explain(encode_namespace(namespace), symbols, bool(distances))
        return explain_runs(runs, parted, other, horizon, policy=self.policy.name, timeline=self._timeline)

    def note_time(self, now_s: float) -> None:
        """Notes the time in seconds, by any clock that never goes back, so that `explain` can say when."""
        self._timeline.note(self.core.tick(), now_s)

    def continuation(
        self, tokens: TokenLike, most: int, namespace: NamespaceLike = None, *, encoded: bool = False
    ) -> bytes:
        """Returns what followed a key, in the sequence used last among those that begin with it. Changes nothing.

        Unlike a match, it may begin inside a page, and does not ask whether a tier still has the pages.

        Args:
            tokens: the whole key, from the root.
            most: the largest number of symbols to return.
            encoded: the key is given as its symbols, in bytes, which are not checked.

        Returns:
            The symbols, in bytes, up to the end of a sequence; none if nothing begins with the key.

        Raises:
            BadTokens: see `KeyKind.encode`.
            BadArgument: `most` is out of range.
        """
        key, limit = (tokens, 0) if encoded else self._key(tokens)
        return self.core.continuation(encode_namespace(namespace), key, limit, check_integer("most", most, 0, 2**31))

    def insert(
        self,
        tokens: TokenLike,
        page_ids: ArrayLike | Items[ArrayLike],
        namespace: NamespaceLike = None,
        *,
        after: int = 0,
        priority: int = 0,
        tier: int = 0,
        ready: bool = True,
    ) -> Inserted:
        """Inserts a prefix; keeps what the tree already has of it.

        Continues after pages in flight: no match finds the rest until they are committed; cancelling them removes it.

        Args:
            tokens: the whole key, from the root; symbols after the last whole page are ignored.
            page_ids: one id per whole page of the key. With several components: one such list for each; leading -1s in
                a window's list are outside the window; a state's list has one id, or none.
            after: handle of a prefix of the key; only what follows it is walked.
            priority: for the policy "priority"; a prefix has the highest priority that it was inserted with.
            ready: False: what is new is in flight until `commit` or `cancel`.

        Raises:
            BadTokens: see `KeyKind.encode`.
            BadArgument: the number of ids does not fit the key, an id is negative, or `after` is on another path.
            StaleHandle: the node of `after` was evicted.
        """
        priority = check_integer("priority", priority, -(2**31), 2**31 - 1)
        tier, after = self._tier(tier), _handle(after)
        columns = [page_ids] if len(self.components) == 1 else cast("Items[ArrayLike]", page_ids)
        ids = [_as_ids(cast("ArrayLike", column)) for column in columns]
        key, limit = self._key(tokens)
        name = encode_namespace(namespace)
        return Inserted._make(self.core.insert(name, key, limit, ids, after, priority, tier, bool(ready), True))

    def remove(self, tokens: TokenLike, namespace: NamespaceLike = None) -> list[list[Ids]]:
        """Removes the page that holds the last token of a prefix, and everything after it.

        From now on no match finds them on any tier. Locked pages and pages in flight stay until they are unlocked or
        their transfer ends, and are then evicted first. An empty prefix removes the whole namespace.

        Returns:
            The ids that were neither locked nor in flight, by tier and component.

        Raises:
            BadTokens: see `KeyKind.encode`.
        """
        self.core.remove(encode_namespace(namespace), self.key_to_remove(tokens))
        freed: list[list[Ids]] = []
        for tier in range(self.tiers):
            try:
                freed.append(self.evict_removed(tier))
            except Exception:  # as in `evict_removed`
                if not any(len(ids) for part in freed for ids in part):
                    raise
                freed.append([np.empty(0, np.int32) for _ in self.components])
        return freed

    def key_to_remove(self, tokens: TokenLike) -> bytes:
        """Returns the symbols of a prefix: none, for the whole namespace, only if no tokens are given.

        Raises:
            BadTokens: see `KeyKind.encode`; or the tokens make no symbol yet.
        """
        key = self.keys.encode(tokens)
        ids = tokens.ids if isinstance(tokens, Spliced) else tokens
        if not key and len(ids):
            raise BadTokens(
                f"{tokens!r} make no symbol: must make at least one, or be empty to remove the whole namespace"
            )
        return key

    def evict_removed(self, tier: int = 0) -> list[Ids]:
        """Evicts what was removed and is no longer locked or in flight; returns its ids, one array per component.

        Raises:
            BadArgument: there is no such tier.
        """
        tier = self._tier(tier)
        parts = [self.core.evict_removed(tier)]
        while self.ranks_outside:  # a node without a rank hides those that go first
            try:
                for row in range(len(self.components)):
                    self._rank_waiting(row, tier)
            except Exception:
                if not any(len(ids) for part in parts for ids in part):
                    raise
                break  # return the ids freed so far; the policy fails again at the next eviction
            parts.append(self.core.evict_removed(tier))
            if not any(map(len, parts[-1])):
                break
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def lock(self, node: int, tier: int = 0) -> None:
        """Protects a prefix from eviction, from its node up to the root. Locks nest; the root needs none.

        Raises:
            StaleHandle: the node was evicted.
        """
        self.core.lock(_handle(node), self._tier(tier))

    def unlock(self, node: int, tier: int = 0) -> None:
        """Releases one lock.

        Raises:
            NotLocked: this node has no lock.
            StaleHandle: the node was evicted.
        """
        self.core.unlock(_handle(node), self._tier(tier))

    def attach(self, node: int, ids: ArrayLike, component: str = "full", tier: int = 1, *, ready: bool = False) -> None:
        """Adds a node's pages on another tier (to back up or to load), in flight until `commit` or `cancel`.

        Raises:
            BadArgument: the wrong number of ids, a cell that is not absent, or a parent that is absent on that tier.
            StaleHandle: the node was evicted.
        """
        self.core.attach(_handle(node), self._row(component), self._tier(tier), _as_ids(ids), bool(ready))

    def commit(self, node: int, tier: int = 0) -> None:
        """Ends a transfer: what is in flight under this node becomes present.

        Raises:
            BadArgument: nothing is in flight under this node.
            StaleHandle: the node was cancelled.
        """
        self.core.commit(_handle(node), self._tier(tier))

    def cancel(self, node: int, tier: int = 0) -> list[Ids]:
        """Ends a transfer: frees what is in flight under this node; returns its ids, one array per component.

        Pages inserted after it are removed (see `remove`). Its own `cancel` returns those ids, or `evict` once its
        own transfer has ended.

        Raises:
            BadArgument: nothing is in flight under this node, or something after it is on this tier and also on
                another: cancel that first.
            StaleHandle: the node was cancelled.
        """
        return self.core.cancel(_handle(node), self._tier(tier))

    def evict(self, pages: int, component: str = "full", tier: int = 0, namespace: NamespaceLike = None) -> list[Ids]:
        """Evicts exactly `pages` ids of a component, or all that are evictable if fewer. Costs O(log n) per node.

        Full pages are evicted from the tails of leaves, in the order of the policy, together with the other components'
        ids at these positions. Returns one array of ids per component.

        With quotas, owners beyond their maxima give way first; then the policy decides between those beyond their
        guarantees; what is within a guarantee is evicted only for the owner of `namespace`, if that is its own.

        Raises:
            BadArgument: `pages` is below 0, or there is no such component or tier.
        """
        ns = b"" if namespace is None else encode_namespace(namespace)
        return self.evict_for(ns, pages, component, tier)

    def evict_for(self, ns: bytes | None, pages: int, component: str = "full", tier: int = 0) -> list[Ids]:
        """Evicts as `evict` does, for an encoded namespace; None: whatever the quotas are."""
        if self.ranks_outside or component not in self._rows:
            row = self._row(component)
            return self._evict_ranked(ns, check_integer("pages", pages, 0, _EVERYTHING), row, self._tier(tier))
        return self.core.evict(pages, self._rows[component], tier, ns)

    def _evict_ranked(self, ns: bytes | None, pages: int, row: int, tier: int) -> list[Ids]:
        """Ranks what has changed, evicts, and ranks again what the eviction has changed."""
        parts: list[list[Ids]] = []
        missing = pages
        while missing > 0:
            try:
                if not self._rank_waiting(row, tier):
                    break
            except Exception:
                if not parts:
                    raise
                break  # return the ids freed so far; the policy fails again at the next call
            freed = self.core.evict(missing, row, tier, ns)
            if not len(freed[row]):
                break  # what is left is within guarantees
            parts.append(freed)
            missing -= len(freed[row])
        empty = [np.empty(0, np.int32) for _ in self.components]
        return [np.concatenate(column) for column in zip(empty, *parts, strict=True)]

    def _rank_waiting(self, row: int, tier: int) -> bool:
        """Asks the policy to rank every candidate that has changed; returns whether anything can be evicted."""
        while self._ranks is not None and (waiting := self.core.waiting(row, tier)) is not None:
            stats = NodeStats(*waiting)
            self.core.rank(stats.node, row, tier, *_rank(self._ranks, stats))
        present, locked, _ = self.core.counts(row, tier)
        return present > locked

    def next_victim(self, component: str = "full", tier: int = 0, want: int = 1, ns: bytes = b"") -> int:
        """Returns the node that `evict_for` takes first; 0 if nothing can be evicted.

        Raises:
            BadArgument: there is no such component or tier.
        """
        row, tier = self._row(component), self._tier(tier)
        if self.ranks_outside and not self._rank_waiting(row, tier):
            return 0
        return self.core.next_victim(row, tier, want, ns)

    def flush(self, tier: int = 0) -> list[Ids]:
        """Evicts everything on a tier that is neither locked nor in flight; returns one array of ids per component."""
        tier = self._tier(tier)
        parts: list[list[Ids]] = []
        for component in self._rows:
            try:
                parts.append(self.evict_for(None, _EVERYTHING, component, tier))
            except Exception:  # as in `evict_removed`
                if not any(len(ids) for part in parts for ids in part):
                    raise
                break
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def page_ids(self, node: int, component: str = "full", tier: int = 0) -> Ids:
        """Returns the ids from the root to the end of a node; -1 where they are absent.

        Raises:
            StaleHandle: the node was evicted.
        """
        return self.core.ids(_handle(node), self._row(component), self._tier(tier))

    def length(self, node: int) -> int:
        """Returns the number of symbols from the root to the end of a node.

        Raises:
            StaleHandle: the node was evicted.
        """
        return self.core.end(_handle(node)) * self.page_size

    def nodes(self, *namespaces: NamespaceLike) -> Iterator[NodeView]:
        """Yields all nodes, or those of some namespaces: depth first, children in insertion order, removed last."""
        names = [encode_namespace(n) for n in namespaces] if namespaces else self.core.namespaces()
        columns = [(component, tier) for component in self.names for tier in range(self.tiers)]
        for name in names:
            for stats, parent, children, removed, key, cells in self.core.nodes(name):
                node, created, accessed, hits, priority, start, pages = stats
                views = {
                    column: CellView(ids, locks, presence == PRESENT, presence == IN_FLIGHT)
                    for column, (presence, locks, ids) in zip(columns, cells, strict=True)
                }
                yield NodeView(
                    node, parent, name, start * self.page_size, pages * self.page_size, key, children,
                    created, accessed, hits, priority, views, removed,
                )  # fmt: skip

    def survey(self, first: int, count: int) -> Survey:
        """Describes what is at the places [first, first + count), in no order.

        A node stays at its place as long as it lives. The work is bounded by `count`, so that a large tree can be read
        in slices, between which it may change.

        Raises:
            BadArgument: a number below 0.
        """
        first = check_integer("first", first, 0, _EVERYTHING)
        count = check_integer("count", count, 0, _EVERYTHING)
        rows = np.frombuffer(self.core.survey(first, count), np.int64).reshape(-1, len(SURVEYED))
        roots = rows[(rows[:, 1] == 0) & (rows[:, 4] == 0), 0].tolist()
        names = {place: self.core.name_at(place) for place in roots}
        return Survey(rows, self.core.places(), names)

    def pretty(self, describe: Callable[[bytes], str] | None = None) -> str:
        """Returns the tree as text, one line per node: its length, first symbols, locks and hits.

        Args:
            describe: turns a node's key into text; None shows its first symbols as numbers.
        """
        lines: list[str] = []
        for name, group in groupby(self.nodes(), key=lambda view: view.namespace):
            views = list(group)
            held = f"{sum(view.length for view in views)} tokens in {counted(len(views), 'node')}"
            lines.append(f"{_show_namespace(name)}: {held}")
            lines.extend(self._branches(views, describe or self._first_symbols))
        return "\n".join(lines) if lines else "(empty)"

    def _branches(self, views: list[NodeView], describe: Callable[[bytes], str]) -> Iterator[str]:
        children = {0: sum(view.parent == 0 for view in views)} | {view.node: view.children for view in views}
        left = dict(children)
        rails = {0: ""}
        for view in views:
            left[view.parent] -= 1
            rail = rails[view.parent]
            if children[view.parent] == 1:  # an only child is not indented: chains may be long
                branch, rails[view.node] = "· ", rail
            elif left[view.parent] == 0:
                branch, rails[view.node] = "└─ ", rail + "   "
            else:
                branch, rails[view.node] = "├─ ", rail + "│  "
            cell = view.cells[self.names[0], 0]
            flight = ", in flight" if cell.in_flight else ""
            yield (f"{rail}{branch}{view.length} {describe(view.key)} locks={cell.locks} hits={view.hits}{flight}")

    def _first_symbols(self, key: bytes) -> str:
        width = self.keys.symbol_bytes
        shown = min(len(key), _SHOWN_SYMBOLS * width)
        symbols = [str(int.from_bytes(key[at : at + width], "little")) for at in range(0, shown, width)]
        return f"[{' '.join(symbols)}{' …' if shown < len(key) else ''}]"

    def stats(self) -> TreeStats:
        """Returns the counts, which the core keeps up to date."""
        return self.core.stats()

    def held_bytes(self) -> int:
        """Returns the bytes of memory that the core holds; visits every node."""
        return self.core.bytes()

    def check(self) -> None:
        """Verifies every structural rule from scratch; slow.

        Raises:
            CorruptTree: names the node and the rule.
        """
        self.core.check()

    def _key(self, tokens: TokenLike) -> tuple[TokenLike, int]:
        """Returns the tokens, or their symbols, for the core, which reads plain token ids itself."""
        limit = self._token_limit
        return (tokens, limit) if limit else (self.keys.encode(tokens), 0)

    def _tier(self, tier: int) -> int:
        return check_integer("tier", tier, 0, self.tiers - 1)

    def _row(self, component: str) -> int:
        row = self._rows.get(component)
        if row is None:
            raise BadArgument("component", component, "one of " + ", ".join(self._rows))
        return row


def _rank(policy: Policy, stats: NodeStats) -> Rank:
    method = f"{type(policy).__qualname__}.rank"
    try:
        rank = policy.rank(stats)
    except Exception as error:
        why = f"{method} raised {type(error).__name__}: {error}"
        raise BadArgument("policy", policy.name, f"able to rank every leaf: {why}") from error
    try:
        major, minor = rank
        finite = math.isfinite(major) and math.isfinite(minor)
    except (TypeError, ValueError, OverflowError):  # not two values, not numbers, or too large for a float
        finite = False
    if not finite:
        raise BadArgument(f"rank of policy {policy.name}", rank, "two finite numbers")
    return float(major), float(minor)


def _handle(node: int) -> int:
    return check_integer("node", node, 0, 2**63 - 1)


def _as_ids(page_ids: ArrayLike) -> Ids:
    try:
        ids = np.asarray(page_ids)
    except ValueError as error:
        raise BadArgument("page_ids", page_ids, f"a one-dimensional sequence of integers ({error})") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise BadArgument("page_ids", page_ids, "a one-dimensional sequence of integers")
    if ids.size and not -1 <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise BadArgument("page_ids", page_ids, "page ids from 0 to 2147483647")
    return np.ascontiguousarray(ids, dtype=np.int32)


def _show_namespace(encoded: bytes) -> str:
    return f"namespace {describe_namespace(encoded)}" if encoded else f"({DEFAULT})"
