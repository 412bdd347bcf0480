"""How much memory the tiers of a cache have, and how much of it each owner: a tenant, or a salt or a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mainstem.cache.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class OwnerUsage:
    """The memory of one owner in the cache.

    Args:
        bytes: on the device and, where there is one, on the host.
        retained: positions that it retains.
    """

    bytes: tuple[int, ...]
    retained: int


class TierMemory:
    """The memory of one cache.

    Args:
        cache: the cache.
        id_bytes: the bytes of a page, or a slot, of each component by its name.

    Attributes:
        tier_bytes: of the device's pools and, where there is one, of the host's.
    """

    def __init__(self, cache: PrefixCache, id_bytes: Mapping[str, int]) -> None:
        self._cache, self._id_bytes = cache, id_bytes
        tiers = [tuple(cache.pools.values())] + ([] if cache.tiers is None else [cache.tiers.host_pools])
        totals = [dict(zip(cache.tree.names, (pool.total for pool in pools), strict=True)) for pools in tiers]
        self.tier_bytes = tuple(map(self._bytes, totals))

    def by_owner(self) -> dict[bytes, OwnerUsage]:
        """Returns what each owner has, by the names of `owner_of`; nothing without quotas."""
        kept = self._cache.retention.kept
        return {
            owner: OwnerUsage(tuple(map(self._bytes, tiers)), kept(owner))
            for owner, tiers in self._cache.tenants.usage().items()
        }

    def _bytes(self, tier: Mapping[str, int]) -> int:
        return sum(n * self._id_bytes[name] for name, n in tier.items())
