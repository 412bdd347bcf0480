"""`Tenants`: the owners of namespaces (`owner_of`) that share one cache, and how much of it each has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mainstem.cache.quotas import Quotas, limits
from mainstem.cache.retention import Retention
from mainstem.cache.tree import DEVICE, Tree
from mainstem.errors import BadArgument


class Tenants:
    """The tenants of one cache.

    Args:
        totals: the sizes of the pools, by tier and component.
        reserve: ids of each component, by name, that nobody is guaranteed on the device; of others, half.
        retention: what they retain.
        settle: evicts what they have beyond their maxima, as far as it is not in use any more.

    Attributes:
        quotas: how much each may have.
    """

    def __init__(
        self,
        tree: Tree,
        totals: Sequence[Sequence[int]],
        reserve: Mapping[str, int],
        retention: Retention,
        settle: Callable[[], None],
    ) -> None:
        self._tree, self._totals, self._reserve = tree, totals, reserve
        self._retention, self._settle = retention, settle
        self.quotas = Quotas()

    def set_quotas(self, quotas: Quotas) -> None:
        """Gives each tenant its quota of each tier.

        Pages beyond a tenant's maximum are evicted first, as soon as no lease uses them. Pages within a guarantee are
        evicted only for their owner's own requests. All retentions end.

        Raises:
            BadArgument: more is guaranteed on the device than all but the reserve.
        """
        for row, name in enumerate(self._tree.names):
            total, guaranteed = self._totals[DEVICE][row], quotas.guaranteed(self._totals)[DEVICE][row]
            most = total - self._reserve.get(name, total - total // 2)
            if guaranteed > most:
                allowed = f"at most {most} of {total} {name} pages in all: the rest is left to running requests"
                raise BadArgument("guarantees of the device", guaranteed, allowed)
        named = [(owner, limits(quota, self._totals)) for owner, quota in quotas.by_owner.items()]
        self._tree.core.share_out(limits(quotas.others, self._totals), named)
        self._retention.set_quotas(quotas)
        self.quotas = quotas
        self._settle()

    def usage(self) -> dict[bytes, list[dict[str, int]]]:
        """Returns what each tenant has: by its name, then by tier, the ids of each component; none without quotas."""
        core, tiers = self._tree.core, self._tree.tiers
        owned = {owner: [counts[0] for counts in core.owned(owner)] for owner in core.owners()}
        return {
            owner: [dict(zip(self._tree.names, ids[tier::tiers], strict=True)) for tier in range(tiers)]
            for owner, ids in owned.items()
        }
