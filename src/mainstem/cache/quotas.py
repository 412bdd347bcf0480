"""Quotas: how much of each tier an owner has for sure, and how much at most. An owner is a tenant, or a salt or a name.

Knows no tree. The core keeps them (`csrc/residency/owners.h`): an owner beyond its maximum gives way first, and
pages within a guarantee give way to their owner alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mainstem.cache.namespaces import NamespaceLike, encode_namespace, owner_of
from mainstem.errors import BadArgument

_NO_LIMIT = 2**63 - 1
_TIERS = ("device", "host")


@dataclass(frozen=True, slots=True)
class Share:
    """An owner's share of one tier, in fractions of each of the tier's pools.

    Args:
        guaranteed: the share of the pages, 0 to 1, that no other owner may evict.
        maximum: the share, `guaranteed` to 1, beyond which its unused pages are evicted before all others.

    Raises:
        BadArgument: a fraction is out of range.
    """

    guaranteed: float = 0.0
    maximum: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.guaranteed <= 1:
            raise BadArgument("guaranteed", self.guaranteed, "a fraction from 0 to 1")
        if not self.guaranteed <= self.maximum <= 1:
            raise BadArgument("maximum", self.maximum, f"a fraction from {self.guaranteed:g}, what is guaranteed, to 1")

    def of(self, total: int) -> tuple[int, int]:
        """Returns both in pages, or slots, of a pool; a maximum is at least one."""
        return int(self.guaranteed * total), max(1, int(self.maximum * total))


@dataclass(frozen=True, slots=True)
class Quota:
    """The quota of one owner.

    Args:
        device: its share of the device.
        host: its share of the host.
        retained: the fraction of its maximum that it may retain, 0 to 1; None: what the cache allows everybody.

    Raises:
        BadArgument: a fraction is out of range.
    """

    device: Share = Share()
    host: Share = Share()
    retained: float | None = None

    def __post_init__(self) -> None:
        if self.retained is not None and not 0 <= self.retained <= 1:
            raise BadArgument("retained", self.retained, "a fraction from 0 to 1, or None")

    @property
    def tiers(self) -> tuple[Share, Share]:
        return self.device, self.host


@dataclass(frozen=True)
class Quotas:
    """The quotas of all owners of one cache.

    Args:
        named: by namespace: that of its owner counts, so `Namespace(tenant="a")` stands for all that tenant a has.
        others: that of every other owner. Prefixes without tenant, salt or name have no quota, unless it is in `named`.

    Raises:
        BadArgument: two of `named` have one owner, or guarantees exceed a tier.

    >>> quotas = Quotas({Namespace(tenant="a"): Quota(device=Share(guaranteed=0.5))})
    >>> quotas.of(Namespace(tenant="a", salt="x").encode()).device.guaranteed
    0.5
    """

    named: Mapping[NamespaceLike, Quota] = field(default_factory=dict)
    others: Quota = Quota()

    def __post_init__(self) -> None:
        if any(share.guaranteed for share in self.others.tiers):
            raise BadArgument("others", self.others, "without a guarantee, since any number of owners may share it")
        if len(self.by_owner) < len(self.named):
            raise BadArgument("named", list(self.named), "one namespace of each owner")
        for row, tier in enumerate(_TIERS):
            total = sum(quota.tiers[row].guaranteed for quota in self.named.values())
            if total > 1 + 1e-9:
                raise BadArgument(f"guarantees of the {tier}", total, "at most 1 in all")

    @cached_property
    def by_owner(self) -> dict[bytes, Quota]:
        """Those of `named` by the name of the owner, see `owner_of`."""
        return {owner_of(encode_namespace(namespace)): quota for namespace, quota in self.named.items()}

    def of(self, namespace: bytes) -> Quota:
        """Returns the quota of the owner of an encoded namespace."""
        owner = owner_of(namespace)
        return self.by_owner.get(owner, self.others if owner else Quota())

    def guaranteed(self, totals: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns what is guaranteed in all, by tier and component; `totals`: the sizes of the pools."""
        return [
            [sum(quota.tiers[tier].of(total)[0] for quota in self.named.values()) for total in sizes]
            for tier, sizes in enumerate(totals)
        ]


def limits(quota: Quota, totals: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns a quota in ids, guaranteed and at most, by component and then by tier, as the core has it.

    A whole pool is no limit: who fills it alone makes room as if there were no quotas.

    Args:
        totals: the sizes of the pools, by tier and component.
    """

    def of(share: Share, total: int) -> tuple[int, int]:
        guaranteed, most = share.of(total)
        return guaranteed, most if share.maximum < 1 else _NO_LIMIT

    return [of(quota.tiers[tier], sizes[row]) for row in range(len(totals[0])) for tier, sizes in enumerate(totals)]
