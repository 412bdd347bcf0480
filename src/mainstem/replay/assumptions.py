"""What a plan takes for granted, and what it may buy: settings, checked once.

Knows ranges; neither models nor devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from mainstem.errors import BadArgument, check_integer
from mainstem.replay.costs import dtype_bytes

MOST_GPUS = 1024
"""Devices of one replica at most."""

Routing: TypeAlias = Literal["shared", "prefix", "hash", "round-robin"]
"""Who finds what: all replicas everything, or each what it was sent, as `mainstem.replay.simulate.Setup` sends it."""

_LEAST, _MOST = 1e-3, 1e24  # of sizes and rates: what is beyond is a slip, and no float can reckon with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What the plan takes for granted. Every one is printed; None: taken from the model or the device.

    Args:
        gpus: devices of one replica; None: the fewest, a power of two, that hold the weights.
        replicas: copies of the model; memory and storage are what all of them have together.
        routing: "shared": every replica finds all that any of them keeps; else each has its part of every tier.
        kv_copies: devices of a replica that keep the same KV; None: what tensor parallelism makes of the KV heads.
        mfu: part of the peak rate that prefill reaches; above 0, up to 1.
        memory_share: part of a device's memory for weights and KV; the rest is for activations. Above 0, up to 1.
        link_share: part of the host link's rate that transfers reach; above 0, up to 1.
        flops: peak rate of one device.
        device_memory: bytes of one device.
        bandwidth_device: bytes a second of a device's memory.
        bandwidth_host: bytes a second from host memory to one device, as reached.
        kv_dtype: of keys, values and convolutions' states.
        state_dtype: of recurrent states.
        weights_dtype: None: as published.
        bytes_per_token: that a cached token takes, all in all.
        write_policy: lower tiers hold copies of what is above, or only what was evicted from there.
        policy: of eviction.
        overhead_s: of a request, beside computing and loading.
        queue: whether requests wait for a free replica, in the order of the trace.
        gain: what a gigabyte must save at the knee, in percent of the FLOPs of all prefills.
        steps: sizes of host memory and of storage that are tried, each half of the next.
        slo_share: part of the first tokens that must be in time.
        most_busy: part of the time that a replica may prefill; the rest is for decoding, and for bursts.

    Raises:
        BadArgument: names the field and its range.
    """

    gpus: int | None = None
    replicas: int = 1
    routing: Routing = "shared"
    kv_copies: int | None = None
    mfu: float = 0.4
    memory_share: float = 0.9
    link_share: float = 0.8
    flops: float | None = None
    device_memory: float | None = None
    bandwidth_device: float | None = None
    bandwidth_host: float | None = None
    kv_dtype: str = "bf16"
    state_dtype: str = "fp32"
    weights_dtype: str | None = None
    bytes_per_token: float | None = None
    write_policy: Literal["write_through", "write_back"] = "write_through"
    policy: str = "lru"
    overhead_s: float = 0.0
    queue: bool = False
    gain: float = 0.01
    steps: int = 3
    slo_share: float = 0.9
    most_busy: float = 0.7

    def __post_init__(self) -> None:
        """Checks every field."""
        for name in ("mfu", "memory_share", "link_share", "slo_share", "most_busy"):
            if not 1e-4 <= getattr(self, name) <= 1:
                raise BadArgument(name, getattr(self, name), "from 0.0001 to 1")
        for name in ("flops", "device_memory", "bandwidth_device", "bandwidth_host", "bytes_per_token"):
            value = getattr(self, name)
            if value is not None and not _LEAST <= value <= _MOST:
                raise BadArgument(name, value, f"a number from {_LEAST:g} to {_MOST:g}")
        for name in ("overhead_s", "gain"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadArgument(name, getattr(self, name), "a number, 0 or more")
        for name, most in (("gpus", MOST_GPUS), ("kv_copies", MOST_GPUS), ("replicas", 1024), ("steps", 16)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1, most)
        if self.write_policy not in ("write_through", "write_back"):
            raise BadArgument("write_policy", self.write_policy, "write_through or write_back")
        if self.routing not in get_args(Routing):
            raise BadArgument("routing", self.routing, f"one of {', '.join(get_args(Routing))}")
        dtype_bytes("kv_dtype", self.kv_dtype)
        dtype_bytes("state_dtype", self.state_dtype)
        if self.weights_dtype is not None:
            dtype_bytes("weights_dtype", self.weights_dtype)


@dataclass(frozen=True, slots=True)
class Memory:
    """What could be bought below the device, for all replicas together.

    Args:
        host_bytes: at most.
        storage_bytes: at most.
        storage_bytes_per_s: what one request reads it at when nobody else does.

    Raises:
        BadArgument: a negative size, or storage without a rate.
    """

    host_bytes: int = 0
    storage_bytes: int = 0
    storage_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks the sizes."""
        check_integer("host_memory", self.host_bytes, 0, 1 << 62)
        check_integer("storage", self.storage_bytes, 0, 1 << 62)
        if self.storage_bytes and not 0 < self.storage_bytes_per_s <= _MOST:
            raise BadArgument("storage", self.storage_bytes, "given with what it is read at, such as 8TB@7GB/s")
