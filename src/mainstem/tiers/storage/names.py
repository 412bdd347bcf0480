"""The names of stored pages. Each is computed once: a prefix that grows by a page costs one hash.

A page's name is chained from the name of the page before it (`Sealer.names`). `PageNames` caches the name of each
node's last page by the node's handle. A handle names one prefix for as long as it is valid: a split or a join leaves it
with the node whose end it names. So names are computed from the nearest ancestor that has one.

It knows the tree by handles and hashes with `Sealer`; it knows nothing of the store.
"""

from __future__ import annotations

from collections import OrderedDict

from mainstem._core import Tree
from mainstem.tiers.storage.sealer import Sealer

_MAX_NODES = 1 << 16  # about 16 MB


class PageNames:
    """Names of the pages of one tree.

    Args:
        tree: the tree that the handles belong to.
        sealer: computes the names.
        page_bytes: size of a page's symbols in bytes.
    """

    def __init__(self, tree: Tree, sealer: Sealer, page_bytes: int) -> None:
        self._tree, self._sealer, self._page_bytes = tree, sealer, page_bytes
        self._last: OrderedDict[int, bytes] = OrderedDict()  # name of the last page by node; least recently used first

    def of(self, node: int, begin: int) -> tuple[bytes, list[bytes]]:
        """Returns the name of the page before `begin` on a node's path, and the names from `begin` to the node's end.

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
        names = self._sealer.names(parent, symbols, self._page_bytes)
        for passed in path:
            self.keep(passed, names[tree.end(passed) - start - 1])
        return names[begin - start - 1] if begin > start else parent, names[begin - start :]

    def last(self, namespace: bytes, node: int) -> bytes:
        """Returns the name of a node's last page; for the root (0), the parent of a namespace's first pages."""
        return self.of(node, self._tree.end(node))[0] if node else self._sealer.root(namespace)

    def keep(self, node: int, name: bytes) -> None:
        """Caches a name that the caller has computed."""
        self._last[node] = name
        self._last.move_to_end(node)
        if len(self._last) > _MAX_NODES:
            self._last.popitem(last=False)

    def _get(self, node: int) -> bytes:
        self._last.move_to_end(node)
        return self._last[node]
