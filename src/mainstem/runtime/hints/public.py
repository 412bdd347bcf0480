"""Public prefixes: the operator lets all tenants share them, such as the system prompt of a product.

Their KV is computed once, in a namespace without a tenant or salt, and pinned there. A request of a tenant that begins
with one gets a copy of its pages in its own namespace, before its prompt is matched. So no page is ever in two
namespaces: a tenant's copy counts for it and is evicted as all its other pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.components import Full
from mainstem.cache.keys import Encoded
from mainstem.cache.namespaces import Namespace, NamespaceLike
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.errors import OutOfPages

log = logging.getLogger(__name__)

CopyPage = Callable[[int, int, int], None]


class PublicPrefixes:
    """The public prefixes of one cache. One thread, that of the engine.

    Args:
        copy_page: copies the first positions of a page to another page.
    """

    def __init__(self, cache: PrefixCache, copy_page: CopyPage) -> None:
        self._cache, self._copy_page = cache, copy_page
        self._prefixes: list[NDArray[np.int32]] = []  # whole pages of tokens, the longest first

    @property
    def supported(self) -> bool:
        """Whether copies are made: of models whose layers all have full attention."""
        return self._cache.enabled and self._cache.tree.components == (Full(),)

    def add(self, tokens: Sequence[int] | NDArray[np.int32]) -> int:
        """Declares a prefix public; returns how many of its tokens fill pages, which are what is shared."""
        size = self._cache.page_size
        whole = np.asarray(tokens, np.int32)[: len(tokens) // size * size]
        if not self.supported:
            log.warning(
                "public prefixes are computed for each tenant: only full attention has pages that can be copied"
            )
        elif len(whole):
            self._prefixes = sorted([*self._prefixes, whole], key=len, reverse=True)
        return len(whole)

    def adopt(self, key: Encoded, namespace: NamespaceLike) -> int:
        """Copies the longest public prefix that a prompt begins with to its namespace; returns the positions copied.

        Nothing is copied where the prompt is not a tenant's, the pages are there, or there is no room.
        """
        if not self._prefixes or namespace is None or (public := _public(namespace)) == namespace:
            return 0
        for prefix in self._prefixes:
            if key.symbols.startswith(prefix.tobytes()):
                return self._copy(prefix, public, namespace)
        return 0

    def _copy(self, prefix: NDArray[np.int32], public: Namespace, namespace: NamespaceLike) -> int:
        cache, size = self._cache, self._cache.page_size
        longer = np.append(prefix, np.int32(0))  # a lease leaves its last token to compute
        if cache.peek(longer, namespace) >= len(prefix) or cache.peek(longer, public) < len(prefix):
            return 0
        with cache.lease(longer, public) as source, cache.lease(longer, namespace) as target:
            first = target.published
            if source.published < len(prefix) or target.loadable:
                return 0
            try:
                target.reserve(len(prefix) - target.reserved, counts=False)
            except OutOfPages:
                return 0
            for page in range(first // size, len(prefix) // size):
                self._copy_page(int(source.page_table[page]), int(target.page_table[page]), size)
            target.publish(len(prefix))
        return len(prefix) - first


def _public(namespace: NamespaceLike) -> Namespace:
    """Returns the namespace in which a public prefix is: the same without tenant and salt."""
    return replace(namespace, tenant=None, salt=None, name=None) if isinstance(namespace, Namespace) else Namespace()
