"""What older versions of a model's weights have computed: it goes first, or at once.

Knows namespaces, of which a version is a part. The runtime says which versions may still be found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from mainstem.cache.namespaces import split_weights
from mainstem.cache.retention import Retention
from mainstem.cache.tree import Tree


class OldWeights:
    """Evicts, removes and no longer retains what older versions have computed. Not thread-safe.

    Args:
        tree: of the cache.
        retention: of the cache.
        remove: removes the prefix with the symbols of each encoded namespace, and returns the device pages freed.
    """

    def __init__(self, tree: Tree, retention: Retention, remove: Callable[[Mapping[bytes, bytes]], int]) -> None:
        self._tree, self._retention, self._remove = tree, retention, remove

    def keep(self, current: str | None, older: Collection[str | None] = ()) -> int:
        """Removes what all but these versions have computed, as `PrefixCache.remove` does.

        Args:
            current: the version that computes, by its name in `Namespace.weights`.
            older: versions that stay: what they have computed is evicted first, and is retained no longer.

        Returns:
            The number of device pages that were freed.
        """
        versions = {name: split_weights(name)[0] for name in self._tree.core.namespaces()}
        for name, version in versions.items():
            if version != current and version in older:
                self._demote(name)
        return self._remove({name: b"" for name, each in versions.items() if each != current and each not in older})

    def _demote(self, name: bytes) -> None:
        """Makes all of an encoded namespace the first to be evicted from every tier, and ends its retentions."""
        core, page = self._tree.core, self._tree.page_bytes
        firsts = [key[:page] for (*_, start, _), _, _, removed, key, _ in core.nodes(name) if not (start or removed)]
        for first in firsts:
            self._retention.release(core.demote(name, first, self._tree.tiers))
