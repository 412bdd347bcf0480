"""A radix cache in plain Python and NumPy: the obvious peer, to see the value of the core.

    root --first page--> Node(key, slots) --first page--> Node ...      keys are int32 tokens in whole pages

Each node has one slot per token, a count of locks, and the tick of its last use. Eviction takes unlocked leaves, least
recently used first, and cuts them from their tails, so that it frees exactly the requested number of slots. It is
written the way such caches usually are, and kept simple: no namespaces, one tier, no checks of arguments.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

_NOTHING: Ints = np.empty(0, np.int32)


class Node:
    """A run of whole pages. `key` and `slots` are int32 [tokens]."""

    __slots__ = ("children", "key", "last_used", "lock_ref", "parent", "slots")

    def __init__(self, key: Ints, slots: Ints, parent: Node | None, last_used: int) -> None:
        self.key = key
        self.slots = slots
        self.parent = parent
        self.last_used = last_used
        self.lock_ref = 0
        self.children: dict[bytes, Node] = {}

    def __lt__(self, other: Node) -> bool:
        """Returns whether this node is evicted first."""
        return self.last_used < other.last_used


class RadixCache:
    """Maps token prefixes to slots.

    Args:
        page_size: tokens per page, the unit of matching.
    """

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = page_size
        self.root = Node(_NOTHING, _NOTHING, None, 0)
        self._leaves: set[Node] = set()
        self._ticks = 0

    def match(self, tokens: Ints) -> tuple[Ints, Node]:
        """Returns the slots of the longest cached prefix, and the node of its end, split off if needed."""
        parts, node, _ = self._walk(self._whole_pages(tokens))
        return np.concatenate(parts) if parts else _NOTHING, node

    def insert(self, tokens: Ints, slots: Ints) -> int:
        """Adds the whole pages of a prefix with one slot per token; returns how many tokens were already cached."""
        tokens = self._whole_pages(tokens)
        _, node, at = self._walk(tokens)
        if at < len(tokens):
            leaf = Node(tokens[at:].copy(), slots[at : len(tokens)].copy(), node, self._ticks)
            node.children[self._first_page(leaf.key)] = leaf
            self._leaves.discard(node)
            self._leaves.add(leaf)
        return at

    def lock(self, node: Node) -> None:
        """Protects a node and all above it from eviction."""
        self._add_locks(node, 1)

    def unlock(self, node: Node) -> None:
        """Removes one lock."""
        self._add_locks(node, -1)

    def evict(self, n: int) -> list[Ints]:
        """Frees n slots, a whole number of pages, or as many as possible."""
        heap = [leaf for leaf in self._leaves if not leaf.lock_ref]
        heapq.heapify(heap)
        freed: list[Ints] = []
        while n > 0 and heap:
            leaf = heapq.heappop(heap)
            if len(leaf.key) > n:
                self._split(leaf, len(leaf.key) - n)
            parent = self._remove(leaf)
            freed.append(leaf.slots)
            n -= len(leaf.slots)
            if parent in self._leaves and not parent.lock_ref:
                heapq.heappush(heap, parent)
        return freed

    def _walk(self, tokens: Ints) -> tuple[list[Ints], Node, int]:
        """Descends as far as the tokens agree and marks the path as used; returns slots, last node and tokens."""
        self._ticks += 1
        node, at = self.root, 0
        parts: list[Ints] = []
        while at < len(tokens):
            child = node.children.get(self._first_page(tokens[at:]))
            if child is None:
                break
            same = self._common(child.key, tokens[at:])
            node = child if same == len(child.key) else self._split(child, same)
            node.last_used = self._ticks
            parts.append(node.slots)
            at += same
        return parts, node, at

    def _common(self, key: Ints, tokens: Ints) -> int:
        n = min(len(key), len(tokens))
        differ = key[:n] != tokens[:n]
        first = int(differ.argmax())
        return first - first % self.page_size if differ[first] else n

    def _split(self, node: Node, at: int) -> Node:
        """Inserts a node above with the first `at` tokens, the recency and the locks; returns the new node."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.key[:at].copy(), node.slots[:at].copy(), parent, node.last_used)
        upper.lock_ref = node.lock_ref
        parent.children[self._first_page(upper.key)] = upper
        node.key, node.slots, node.parent = node.key[at:].copy(), node.slots[at:].copy(), upper
        upper.children[self._first_page(node.key)] = node
        return upper

    def _remove(self, leaf: Node) -> Node:
        """Removes a leaf; returns its parent, which may be a leaf now."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._first_page(leaf.key)]
        self._leaves.discard(leaf)
        if not parent.children and parent is not self.root:
            self._leaves.add(parent)
        return parent

    def _add_locks(self, node: Node, n: int) -> None:
        while node.parent is not None:
            node.lock_ref += n
            node = node.parent

    def _whole_pages(self, tokens: Ints) -> Ints:
        return tokens[: len(tokens) // self.page_size * self.page_size]

    def _first_page(self, tokens: Ints) -> bytes:
        return tokens[: self.page_size].tobytes()
