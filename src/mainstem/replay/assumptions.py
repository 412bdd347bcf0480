"""What a plan takes for granted, and what it may buy: settings, checked once.

Knows ranges; neither models nor devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mainstem.errors import BadArgument, check_integer
from mainstem.replay.costs import dtype_bytes

MOST_GPUS = 1024
"""Devices of one replica at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What the plan takes for granted. Every one is printed; None: taken from the model or the device.

    Args:
        gpus: devices of one replica; None: the fewest, a power of two, that hold the weights.
        replicas: copies of the model that share one cache, each request going where its prefix lies.
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

    Raises:
        BadArgument: names the field and its range.
    """

    gpus: int | None = None
    replicas: int = 1
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

    def __post_init__(self) -> None:
        """Checks every field."""
        for name in ("mfu", "memory_share", "link_share"):
            if not 0 < getattr(self, name) <= 1:
                raise BadArgument(name, getattr(self, name), "above 0 and up to 1")
        for name in ("flops", "device_memory", "bandwidth_device", "bandwidth_host", "bytes_per_token"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise BadArgument(name, value, "a number above 0")
        for name in ("overhead_s", "gain"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadArgument(name, getattr(self, name), "a number, 0 or more")
        for name, most in (("gpus", MOST_GPUS), ("replicas", 10**6), ("steps", 16)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1, most)
        if self.write_policy not in ("write_through", "write_back"):
            raise BadArgument("write_policy", self.write_policy, "write_through or write_back")
        dtype_bytes("kv_dtype", self.kv_dtype)
        dtype_bytes("state_dtype", self.state_dtype)
        if self.weights_dtype is not None:
            dtype_bytes("weights_dtype", self.weights_dtype)


@dataclass(frozen=True, slots=True)
class Memory:
    """What could be bought below the device.

    Args:
        host_bytes: at most.
        storage_bytes: at most.
        storage_bytes_per_s: what it is read at.

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
        if self.storage_bytes and not self.storage_bytes_per_s > 0:
            raise BadArgument("storage", self.storage_bytes, "given with what it is read at, such as 8TB@7GB/s")
