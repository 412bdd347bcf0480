"""The names of stored pages, each made once: a prefix that grows by a page costs one hash.

A page's name is chained from the name of the page before it (`Sealer.keys`). Kept are the names of the pages that nodes
end with, by the nodes' handles: a handle stands for one prefix for as long as it lives, and a split or a join leaves it
with the node whose end it names. So the names below a node are made from the nearest node above that has one.

Knows the tree by handles, and hashes by `Sealer`; knows no store.
"""

from __future__ import annotations

from collections import OrderedDict

from mainstem._core import Tree
from mainstem.tiers.pages import Sealer

_MOST = 1 << 16  # nodes; about 16 MB


class PageNames:
    """Names of pages of one tree.

    Args:
        tree: whose handles are meant.
        sealer: makes the names.
        page_bytes: of a page's symbols.
    """

    def __init__(self, tree: Tree, sealer: Sealer, page_bytes: int) -> None:
        self._tree, self._sealer, self._page_bytes = tree, sealer, page_bytes
        self._last: OrderedDict[int, bytes] = OrderedDict()  # of a node's pages; what was used last comes last

    def of(self, node: int, begin: int) -> tuple[bytes, list[bytes]]:
        """Of a node's path the name in front of page `begin`, and those of the pages from there to the node's end.

        Raises:
            StaleHandle: the node was evicted.
        """
        tree = self._tree
        path, at = [], node
        while at and (at not in self._last or tree.end(at) > begin):
            path.append(at)
            at = tree.parent(at)
        start = tree.end(at) if at else 0
        namespace, symbols = tree.path_key(node, start)
        parent = self._get(at) if at else self._sealer.root(namespace)
        names = self._sealer.keys(parent, symbols, self._page_bytes)
        for passed in path:
            self.keep(passed, names[tree.end(passed) - start - 1])
        return names[begin - start - 1] if begin > start else parent, names[begin - start :]

    def last(self, namespace: bytes, node: int) -> bytes:
        """The name of the page that a node ends with; in front of all pages of a namespace, if it is the root (0)."""
        return self.of(node, self._tree.end(node))[0] if node else self._sealer.root(namespace)

    def keep(self, node: int, name: bytes) -> None:
        """Takes note of a name that somebody else has made."""
        self._last[node] = name
        self._last.move_to_end(node)
        if len(self._last) > _MOST:
            self._last.popitem(last=False)

    def _get(self, node: int) -> bytes:
        self._last.move_to_end(node)
        return self._last[node]
