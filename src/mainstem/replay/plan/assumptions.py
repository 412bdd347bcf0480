"""The assumptions of a plan, and the memory that it may buy. Values are checked once, on construction.

Knows ranges; knows neither models nor devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from mainstem.errors import BadArgument, check_integer
from mainstem.replay.plan.costs import dtype_bytes

MAX_GPUS = 1024
"""Maximum number of devices in one replica."""

Routing: TypeAlias = Literal["shared", "prefix", "hash", "round-robin"]
"""Whether replicas share one cache, or how `replay.simulate.sweep.Setup` routes requests to separate caches."""

_MIN, _MAX = 1e-3, 1e24  # sizes and rates: a value outside is a typo, and would overflow or underflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What the plan assumes. The output lists every field. None: taken from the model or the device.

    Args:
        gpus: devices per replica. None: the smallest power of two that holds the weights.
        replicas: copies of the model. Memory and storage are totals over all replicas.
        routing: "shared": every replica finds what any replica keeps. Otherwise each has its share of every tier.
        kv_copies: devices of a replica that keep the same KV. None: follows from tensor parallelism and the KV heads.
        mfu: fraction of the peak rate that prefill reaches; above 0, up to 1.
        memory_share: fraction of device memory for weights and KV; the rest is for activations. Above 0, up to 1.
        link_share: fraction of the host link's rate that transfers reach; above 0, up to 1.
        flops: peak FLOPs per second of one device.
        device_memory: bytes of one device.
        bandwidth_device: bytes per second of a device's memory.
        bandwidth_host: achieved bytes per second from host memory to one device.
        kv_dtype: type of keys, values and convolution states.
        state_dtype: type of recurrent states.
        weights_dtype: type of the weights. None: as published.
        bytes_per_token: total bytes of a cached token.
        write_policy: whether lower tiers hold copies of what is above, or only what was evicted from there.
        policy: eviction policy.
        overhead_s: overhead per request, besides computing and loading.
        queue: whether requests wait for a free replica, in trace order.
        gain: percent of all prefill FLOPs that a gigabyte must save at the knee.
        steps: number of sizes to try for host memory and for storage; each is half of the next.
        slo_share: fraction of first tokens that must be in time.
        most_busy: maximum fraction of time that a replica prefills; the rest is for decoding and for bursts.

    Raises:
        BadArgument: a field is outside its range; the message names both.
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
            if value is not None and not _MIN <= value <= _MAX:
                raise BadArgument(name, value, f"a number from {_MIN:g} to {_MAX:g}")
        for name in ("overhead_s", "gain"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadArgument(name, getattr(self, name), "a number, 0 or more")
        for name, limit in (("gpus", MAX_GPUS), ("kv_copies", MAX_GPUS), ("replicas", 1024), ("steps", 16)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1, limit)
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
    """The memory on offer below the device, as totals over all replicas.

    Args:
        host_bytes: maximum host memory.
        storage_bytes: maximum storage.
        storage_bytes_per_s: read rate of a single request without contention.

    Raises:
        BadArgument: a size is negative, or storage has no rate.
    """

    host_bytes: int = 0
    storage_bytes: int = 0
    storage_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks the sizes."""
        check_integer("host_memory", self.host_bytes, 0, 1 << 62)
        check_integer("storage", self.storage_bytes, 0, 1 << 62)
        if self.storage_bytes and not 0 < self.storage_bytes_per_s <= _MAX:
            raise BadArgument("storage", self.storage_bytes, "given with its read rate, such as 8TB@7GB/s")
