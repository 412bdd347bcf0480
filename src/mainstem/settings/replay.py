"""The settings of replays and plans: reading a trace, caches, assumptions, memory on offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mainstem.errors import BadArgument
from mainstem.settings.fields import (
    INT32_MAX,
    INT64_MAX,
    Range,
    Settings,
    instance,
    integer,
    number,
    one_of,
    setting,
    switch,
    texts,
)
from mainstem.units import DTYPE_BYTES, RATE, SIZE, TIME

MAX_GPUS = 1024
"""Maximum number of devices in one replica."""

MAX_REPLICAS = 4096
"""Maximum number of replicas, and of machines."""

MAX_BLOCKS = 2**62
"""Maximum capacity of a tier."""

_MIN, _MAX = 1e-3, 1e24  # sizes and rates: a value outside is a typo, and would overflow or underflow

TraceFormat = Literal["auto", "mooncake", "bailian", "tokens", "openai", "recording", "mstrace"]
OnBad = Literal["stop", "skip"]
Routing = Literal["round-robin", "two-choices", "hash", "consistent-hash", "prefix", "cost"]
PlanRouting = Literal["shared", "round-robin", "two-choices", "hash", "consistent-hash", "prefix", "cost"]

DTYPE = Range(f"one of {', '.join(DTYPE_BYTES)}", lambda dtype: dtype in DTYPE_BYTES)
_AMOUNT = number(_MIN, _MAX)
_FRACTION = number(1e-4, 1)


@dataclass(frozen=True)
class TraceOptions(Settings):
    """How a trace is read.

    Args:
        format: Format of the lines; auto detects it from the first lines.
        block_size: Tokens per block. Default: 512 for mooncake, the recorded size for recordings, 16 for others.
        on_bad: Stop at a bad line, or skip and count it.
        tokenizer: Name or folder of a tokenizer, for requests as text. Without one, each byte counts as a token.
        prompt_rules: File of rules, or the name of one of Mainstem's own, such as claude-code, for bodies of requests:
            they are read as the rules leave them. Repeat it for several files.
    """

    format: TraceFormat = setting("auto", one_of(TraceFormat))
    block_size: int | None = setting(None, integer(1, INT32_MAX))
    on_bad: OnBad = setting("stop", one_of(OnBad))
    tokenizer: str | None = setting(None, instance(str, "a name or a folder"))
    prompt_rules: tuple[str, ...] = setting((), texts("a tuple of files of rules", bool))


@dataclass(frozen=True)
class Growth(Settings):
    """How a trace is grown; see `mainstem.replay.grow`.

    Args:
        seed: Seed of the draws; 0 or more.
        shift: Maximum shift in time of a session, such as 60s or 5m; never beyond the ends of the trace.
        new_prompts: Probability that a population has prompts of its own in place of a shared one.
        shared_by: Different continuations from which a block counts as shared, as that of a system prompt.

    `shift` is in seconds.
    """

    seed: int = setting(0, integer(0, INT64_MAX))
    shift: float = setting(60.0, number(0), unit=TIME)
    new_prompts: float = setting(0.1, number(0, 1))
    shared_by: int = setting(16, integer(2, INT32_MAX))

    @property
    def stated(self) -> str:
        """Every setting, as a trace's notes state them."""
        return f"seed={self.seed}, shift={self.shift:g}s, new_prompts={self.new_prompts:g}, shared_by={self.shared_by}"


@dataclass(frozen=True)
class Setup(Settings):
    """Lower tiers, time to live and replicas, besides the cache on the device.

    Args:
        host_blocks: Capacity of the host tier; None: no such tier. It receives every block written to the device.
            Blocks that only it has are loaded to the device when they are hit.
        storage_blocks: The same for storage, below the host or directly below the device.
        ttl: Blocks unused for longer than this expire: 300s, 5m.
        replicas: Number of independent caches of this capacity; 1 or more.
        routing: Which replica gets a request: each in turn (round-robin); the less loaded of two drawn at random
            (two-choices); by its first block, modulo the replicas (hash) or so that few move when one is added
            (consistent-hash); the one with the longest prefix that is not busy (prefix); or the one that a fleet's
            front chooses (cost).
        router_lag: Time after which a router knows what came to a replica or left it, such as 50ms; for prefix and
            cost. With 0 it knows at once, and one core serves them.
        prefill_rate: Tokens per second that a replica computes, for first tokens and for routing by cost.
        load_rate: Tokens per second that a replica loads from its lower tiers, for the same.

    `ttl` and `router_lag` are in seconds. A load is the recent prompt tokens, halved every 60 s. By prefix, a replica
    gets a request if it has half of it; of equals, the one with the least load. Skipped are replicas with more than 1.5
    times the mean and 32 average requests above it. By cost, replicas are ranked as in production, by the time of the
    queue, of computing and of loading (core/csrc/routing/ranking.h).
    """

    host_blocks: int | None = setting(None, integer(1, MAX_BLOCKS), flag=False)
    storage_blocks: int | None = setting(None, integer(1, MAX_BLOCKS), flag=False)
    ttl: float | None = setting(None, number(0), unit=TIME)
    replicas: int = setting(1, integer(1, MAX_REPLICAS))
    routing: Routing = setting("prefix", one_of(Routing))
    router_lag: float = setting(0.0, number(0, 1e6), unit=TIME)
    prefill_rate: float = setting(10_000.0, number(1e-3, 1e12))
    load_rate: float = setting(100_000.0, number(1e-3, 1e12))


ONE_CACHE = Setup()
"""One cache without lower tiers."""


@dataclass(frozen=True, kw_only=True)
class Assumptions(Settings):
    """The assumptions of a plan. The output lists every field. None: taken from the model or the device.

    Args:
        gpus: Devices per replica. Default: the fewest that hold the weights.
        replicas: Copies of the model; memory and storage are totals over all of them.
        routing: Replicas find what any of them keeps (shared). Otherwise each has its part of every tier, and requests
            are routed by longest cached prefix (prefix), expected time (cost), first block (hash, consistent-hash),
            to the less loaded of two (two-choices) or in turn (round-robin).
        kv_copies: Devices of a replica that keep the same KV. Default: as tensor parallelism repeats KV heads.
        mfu: Fraction of the peak rate that prefill reaches; above 0, up to 1.
        memory_share: Fraction of device memory for weights and KV; the rest is for activations.
        link_share: Fraction of the host link's peak that transfers reach.
        flops: Peak FLOPs per second of one device. Default: from the device table.
        device_memory: Memory of one device, such as 141GB. Default: from the device table.
        bandwidth_device: Memory bandwidth of one device, such as 4.8TB/s. Default: from the device table.
        bandwidth_host: Read rate from host memory to one device, such as 50GB/s. Default: --link-share of the link.
        kv_dtype: Type of KV: bf16, fp8, fp16, int8, fp32 and so on.
        state_dtype: Type of recurrent states.
        weights_dtype: Type of weights. Default: as the model is published.
        bytes_per_token: Total memory of a cached token. Default: computed from the model.
        write_policy: Lower tiers hold copies of what is above (write_through), or only what was evicted (write_back).
        policy: Eviction policy: a name, or package.module:Class of your own; see docs/policies.md.
        overhead: Overhead per request, besides computing and loading, such as 20ms.
        queue: Include the time that requests wait for a free replica.
        gain: Percent of prefill FLOPs that a gigabyte must save at the knee.
        steps: Number of sizes to try for host memory and for storage; each is half of the next.
        slo_share: Fraction of first tokens that must arrive within --slo-ttft.
        most_busy: Maximum fraction of time that a replica prefills; the rest is for decoding and for bursts.

    Sizes are in bytes, rates in bytes per second, times in seconds.
    """

    gpus: int | None = setting(None, integer(1, MAX_GPUS))
    replicas: int = setting(1, integer(1, MAX_REPLICAS))
    routing: PlanRouting = setting("shared", one_of(PlanRouting))
    kv_copies: int | None = setting(None, integer(1, MAX_GPUS))
    mfu: float = setting(0.4, _FRACTION)
    memory_share: float = setting(0.9, _FRACTION)
    link_share: float = setting(0.8, _FRACTION)
    flops: float | None = setting(None, _AMOUNT)
    device_memory: float | None = setting(None, _AMOUNT, unit=SIZE)
    bandwidth_device: float | None = setting(None, _AMOUNT, unit=RATE)
    bandwidth_host: float | None = setting(None, _AMOUNT, unit=RATE)
    kv_dtype: str = setting("bf16", DTYPE)
    state_dtype: str = setting("fp32", DTYPE)
    weights_dtype: str | None = setting(None, DTYPE)
    bytes_per_token: float | None = setting(None, _AMOUNT)
    write_policy: Literal["write_through", "write_back"] = setting(
        "write_through", one_of(Literal["write_through", "write_back"])
    )
    policy: str = setting("lru")  # `replay.simulate.sweep.check_policy` checks it
    overhead: float = setting(0.0, number(0), unit=TIME)
    queue: bool = setting(False, switch())
    gain: float = setting(0.01, number(0))
    steps: int = setting(3, integer(1, 16))
    slo_share: float = setting(0.9, _FRACTION)
    most_busy: float = setting(0.7, _FRACTION)


@dataclass(frozen=True)
class Fleet(Settings):
    """Many machines, each a replica with its devices, host memory and link, and their cost.

    Args:
        machines: Most machines to try; also tried are halves of it, and the fewest that carry the load.
        machine_memory: Host memory for KV of one machine, such as 1TB.
        network: Rate at which one machine reads from others and from the shared store, such as 50GB/s. Default:
            machines do not read from each other.
        router_lag: Time after which the router knows what came to a machine or left it.
        interval: Length of the intervals in which bytes are counted, for peaks.
        machine_gain: Percent of prefill FLOPs that another machine must save at the knee.
        device_price: Dollars per hour of a device with its share of a machine. Default: from the device table.
        memory_price: Dollars a month of a gigabyte of host memory for KV.
        store_price: Dollars a month of a gigabyte of the shared store.
        energy_price: Dollars of a kilowatt-hour, where the price of a device does not include it.
        device_power: Watts of a busy device. Default: from the device table.
        idle_power: Share of that power that a device draws when it computes no prefill.
        machine_power: Watts of the rest of a machine, for each device.
        store_power: Watts of a terabyte of the shared store.
        pue: Energy of the whole building, relative to that of the machines.

    Sizes are in bytes, rates in bytes per second, times in seconds.
    """

    machines: int = setting(16, integer(1, MAX_REPLICAS))
    machine_memory: int = setting(0, integer(0, 1 << 62), unit=SIZE)
    network: float | None = setting(None, _AMOUNT, unit=RATE)
    router_lag: float = setting(0.05, number(0, 1e6), unit=TIME)
    interval: float = setting(10.0, number(1e-3, 1e9), unit=TIME)
    machine_gain: float = setting(0.1, number(0))
    device_price: float | None = setting(None, number(0))
    memory_price: float = setting(0.2, number(0))
    store_price: float = setting(0.05, number(0))
    energy_price: float = setting(0.0, number(0))
    device_power: float | None = setting(None, number(0))
    idle_power: float = setting(0.3, number(0, 1))
    machine_power: float = setting(575.0, number(0))
    store_power: float = setting(1.0, number(0))
    pue: float = setting(1.3, number(1, 10))

    def __post_init__(self) -> None:
        """Checks every field, and that a network has two ends."""
        super().__post_init__()
        if self.network is not None and self.machines < 2:
            raise BadArgument("network", self.network, "left out with one machine: there is nobody to read from")


@dataclass(frozen=True)
class Memory(Settings):
    """The memory on offer below the device, as totals over all replicas.

    Args:
        host_bytes: Maximum host memory.
        storage_bytes: Maximum storage.
        storage_bytes_per_s: Read rate of a single request without contention; above 0 if there is storage.
    """

    host_bytes: int = setting(0, integer(0, 1 << 62), flag=False)
    storage_bytes: int = setting(0, integer(0, 1 << 62), flag=False)
    storage_bytes_per_s: float = setting(0.0, number(0, _MAX), flag=False)

    def __post_init__(self) -> None:
        """Checks every field, and that storage has a rate."""
        super().__post_init__()
        if self.storage_bytes and not self.storage_bytes_per_s:
            raise BadArgument("storage", self.storage_bytes, "given with its read rate, such as 8TB@7GB/s")
