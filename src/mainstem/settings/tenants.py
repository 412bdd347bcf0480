"""The tenants of a server and their quotas of the cache, from the file of `--tenants`.

[others]                                  # every key, or every salt, without a table of its own
device.maximum = "25%"

[tenants.search]                          # a name for people
api_key_env = "SEARCH_KEY"                # or api_key = "...", or cache_salt = "..."
device = { guaranteed = "2GiB", maximum = "50%" }
host = { guaranteed = "16GiB" }
retained = 0.5                            # of its maximum
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from mainstem.errors import BadArgument
from mainstem.units import parse_bytes


class Amounts(Struct, frozen=True, forbid_unknown_fields=True):
    """The guarantee and the maximum of a tenant on one tier: sizes, or percentages of the tier."""

    guaranteed: str = "0%"
    maximum: str = "100%"

    def fractions(self, at: str, tier_bytes: int) -> tuple[float, float]:
        """Returns both as fractions of a tier.

        Args:
            at: the field's place, for errors.
            tier_bytes: the size of the tier.

        Raises:
            BadArgument: one is neither a size nor a percentage, or exceeds the tier.
        """
        return (
            _fraction(f"{at}.guaranteed", self.guaranteed, tier_bytes),
            _fraction(f"{at}.maximum", self.maximum, tier_bytes),
        )


def _fraction(at: str, text: str, tier_bytes: int) -> float:
    percent = text.strip().removesuffix("%")
    try:
        share = float(percent) / 100 if percent != text.strip() else parse_bytes(at, text) / max(tier_bytes, 1)
    except ValueError:  # BadArgument is one
        raise BadArgument(at, text, 'a size such as "2GiB", or a percentage such as "25%"') from None
    if not 0 <= share <= 1:
        raise BadArgument(at, text, f"0 up to the size of the tier, {tier_bytes} bytes")
    return share


class Others(Struct, frozen=True, forbid_unknown_fields=True):
    """The quota of each tenant without a table of its own."""

    device: Amounts = Amounts()
    host: Amounts = Amounts()
    retained: float | None = None


class Tenant(Others, frozen=True, forbid_unknown_fields=True):
    """One tenant: exactly one of `api_key`, `api_key_env` (the variable that has the key) and `cache_salt`."""

    api_key: str | None = None
    api_key_env: str | None = None
    cache_salt: str | None = None

    def __repr__(self) -> str:
        return f"Tenant(device={self.device}, host={self.host}, retained={self.retained})"  # and no secret

    def key(self, name: str) -> str | None:
        """Returns the tenant's key; None: it is known by its salt.

        Raises:
            BadArgument: the variable is not set.
        """
        if self.api_key_env is None:
            return self.api_key
        if not (key := os.environ.get(self.api_key_env)):
            raise BadArgument(
                f"tenants.{name}.api_key_env", self.api_key_env, "a variable of the environment that is set"
            )
        return key


class Tenants(Struct, frozen=True, forbid_unknown_fields=True):
    """The file: the tenants by their names, and the quota of all others."""

    tenants: Mapping[str, Tenant] = {}
    others: Others = Others()

    @property
    def keys(self) -> dict[str, str]:
        """The API keys by the tenants' names."""
        return {name: key for name, tenant in self.tenants.items() if (key := tenant.key(name)) is not None}


def read_tenants(path: Path) -> Tenants:
    """Reads the file of `--tenants`.

    Raises:
        BadArgument: it cannot be read, or a tenant is malformed; the message names the field.
    """
    try:
        tenants = msgspec.toml.decode(path.read_bytes(), type=Tenants)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise BadArgument("tenants", str(path), f"a file of tenants as docs/serving.md shows it ({error})") from error
    seen: dict[tuple[str, str], str] = {}
    for name, tenant in tenants.tenants.items():
        ways = {"api_key": tenant.api_key, "api_key_env": tenant.api_key_env, "cache_salt": tenant.cache_salt}
        given = [way for way, value in ways.items() if value is not None]
        if len(given) != 1:
            raise BadArgument(
                f"tenants.{name}", given, "a table with exactly one of api_key, api_key_env and cache_salt"
            )
        is_key = tenant.cache_salt is None
        who = ("api_key", tenant.key(name) or "") if is_key else ("cache_salt", tenant.cache_salt or "")
        if not (who[1].isprintable() and who[1] and not (is_key and " " in who[1])):
            raise BadArgument(f"tenants.{name}.{given[0]}", "(not shown)", "printable, without spaces, and not empty")
        if (other := seen.setdefault(who, name)) != name:
            raise BadArgument(f"tenants.{name}", f"the {who[0]} of {other}", "a tenant of its own")
    if len({kind for kind, _ in seen}) > 1:
        allowed = "either all with API keys or all with salts: where keys divide the cache, salts divide a key's part"
        raise BadArgument("tenants", sorted(tenants.tenants), allowed)
    return tenants
