"""Bringing a prefix up to the device, for requests that are yet to come: read from storage, then loaded from the host.

    storage --prefetch--> host --load, by a lease of its own--> device

`go_on` moves it on. What has arrived belongs to the tree, like any prefix; nothing is held beyond the end.
"""

from __future__ import annotations

from mainstem.cache.keys import TokenLike
from mainstem.cache.namespaces import NamespaceLike
from mainstem.cache.prefix_cache import Lease, PrefixCache
from mainstem.errors import OutOfPages
from mainstem.tiers.host.load import Load
from mainstem.tiers.prefetch.prefetch import Prefetch


class Promotion:
    """A prefix on its way to the device.

    Args:
        cache: the cache, which has tiers.
        tokens: a prompt; all but its last token is brought up, since a lease leaves that to compute.

    Raises:
        BadTokens: a token is out of range.
    """

    def __init__(self, cache: PrefixCache, tokens: TokenLike, namespace: NamespaceLike) -> None:
        assert cache.tiers is not None
        self._cache, self._tiers = cache, cache.tiers
        self._tokens, self._namespace = tokens, namespace
        self._prefetch: Prefetch | None = self._tiers.prefetch(tokens, namespace)
        self._lease: Lease | None = None
        self._load: Load | None = None

    @property
    def reading(self) -> bool:
        """Whether storage is asked for it."""
        return self._prefetch is not None

    def go_on(self) -> bool:
        """Takes the next step if the last one has ended; returns whether anything is under way. Else it is closed."""
        if self._prefetch is not None and not self._prefetch.ended:
            return True
        if self._load is None:
            self._revoke()
            self._load = self._begin_load()
        if self._load is not None and self._load.arrived is None:
            return True
        self.close()
        return False

    def close(self) -> None:
        """Ends it; a second call does nothing. What is being read still arrives on the host."""
        self._revoke()
        if self._lease is not None:
            self._lease.abort()

    def _begin_load(self) -> Load | None:
        try:
            self._lease = self._cache.lease(self._tokens, self._namespace)
        except OutOfPages:
            return None
        return self._tiers.load(self._lease)

    def _revoke(self) -> None:
        if self._prefetch is not None:
            self._prefetch.revoke()
            self._prefetch = None
