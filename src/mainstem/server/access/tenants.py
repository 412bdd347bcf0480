"""Tenants of a server: their quotas from the file of `--tenants`, and their use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from mainstem.cache.namespaces import DEFAULT, Namespace, NamespaceLike, owner_of
from mainstem.cache.quotas import Quota, Quotas, Share
from mainstem.errors import BadArgument
from mainstem.server.access.api_keys import Access
from mainstem.settings.tenants import Amounts, Others, Tenant, Tenants

if TYPE_CHECKING:
    from mainstem.runtime.engine import Engine
    from mainstem.runtime.memory.shares import OwnerUsage

_TIERS = ("device", "host")


class TierUsage(Struct):
    """What a tenant has of one tier, and its quota there, in bytes."""

    bytes: int
    guaranteed_bytes: int
    maximum_bytes: int


class TenantUsage(Struct):
    """What one tenant has now. `name`: of its table in the file, else what it is known by."""

    name: str
    device: TierUsage
    host: TierUsage | None
    retained_tokens: int


class Usage(Struct):
    """The response body of GET /v1/cache/tenants."""

    data: list[TenantUsage]
    object: str = "list"


def show_owner(owner: bytes) -> str:
    """Returns the name of an owner; of a key, the beginning of its digest."""
    text = owner[9:].decode("utf-8", "replace")
    return f"key {text[:12]}" if owner[:1] == b"t" else f"salt {text}" if owner else DEFAULT


class Tenancy:
    """The tenants of one server.

    Args:
        tenants: the file.
        access: knows the keys.
        engine: whose cache they share; it gets their quotas.

    Raises:
        BadArgument: a quota is out of range, or more is guaranteed than there is.
    """

    def __init__(self, tenants: Tenants, access: Access, engine: Engine) -> None:
        self._access, self._engine = access, engine
        self._namespaces: dict[str, Namespace] = {
            name: Namespace(salt=tenant.cache_salt) if (key := tenant.key(name)) is None else self._of_key(key)
            for name, tenant in tenants.tenants.items()
        }
        self._names = {owner_of(namespace.encode()): name for name, namespace in self._namespaces.items()}
        named: dict[NamespaceLike, Quota] = {
            self._namespaces[name]: self._quota(f"tenants.{name}", tenant) for name, tenant in tenants.tenants.items()
        }
        self._quotas = Quotas(named, self._quota("others", tenants.others))
        engine.set_quotas(self._quotas)

    def usage(self) -> Usage:
        """Returns the use of each tenant; those with a table first, in its order."""
        by_owner = self._engine.usage()
        order = [owner_of(namespace.encode()) for namespace in self._namespaces.values()]
        order += sorted(by_owner.keys() - {*order})
        return Usage([self._used(owner, by_owner) for owner in order])

    def _used(self, owner: bytes, by_owner: Mapping[bytes, OwnerUsage]) -> TenantUsage:
        quota, sizes = self._quotas.of(owner), self._engine.tier_bytes
        used = by_owner.get(owner)
        tiers = [
            TierUsage(
                0 if used is None else used.bytes[tier],
                int(quota.tiers[tier].guaranteed * total),
                int(quota.tiers[tier].maximum * total),
            )
            for tier, total in enumerate(sizes)
        ]
        host = tiers[1] if len(tiers) > 1 else None
        return TenantUsage(self.name(owner), tiers[0], host, 0 if used is None else used.retained)

    def name(self, owner: bytes) -> str:
        """Returns the name of an owner's table, else as `show_owner`."""
        return self._names.get(owner) or show_owner(owner)

    def _of_key(self, key: str) -> Namespace:
        tenant = self._access.tenant_of(key)
        assert tenant is not None
        return Namespace(tenant=tenant.hex())

    def _quota(self, at: str, rules: Tenant | Others) -> Quota:
        shares = {}
        sizes = dict(zip(_TIERS, self._engine.tier_bytes, strict=False))
        for tier in _TIERS:
            amounts: Amounts = getattr(rules, tier)
            if tier not in sizes and amounts != Amounts():
                raise BadArgument(f"{at}.{tier}", amounts, "left out without a host tier")
            guaranteed, maximum = amounts.fractions(f"{at}.{tier}", sizes.get(tier, 0))
            try:
                shares[tier] = Share(guaranteed, maximum)
            except BadArgument as error:
                raise BadArgument(f"{at}.{tier}.{error.name}", getattr(amounts, error.name), error.allowed) from None
        try:
            return Quota(**shares, retained=rules.retained)
        except BadArgument as error:
            raise BadArgument(f"{at}.{error.name}", error.value, error.allowed) from None
