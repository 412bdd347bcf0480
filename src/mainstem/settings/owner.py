"""The settings of the owner of a store, one process for all that use the store on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from mainstem.settings.fields import INT64_MAX, Settings, instance, integer, seconds, setting
from mainstem.units import SIZE


@dataclass(frozen=True)
class OwnerConfig(Settings):
    """The resources of the owner of a store.

    Args:
        socket: Where it listens, in a folder that only this user can open. Default: named after the store, in a folder
            of this user.
        host_bytes: Shared memory for values of the store, at least 1MiB. It takes memory as it fills.
        linger_s: Seconds that it stays after its last client. Default: until it is stopped.
    """

    socket: str | None = setting(None, instance(str, "the path of a socket"))
    host_bytes: int = setting(8 << 30, integer(1 << 20, INT64_MAX), unit=SIZE)
    linger_s: float | None = setting(None, seconds())
