"""A trace, and a model on its devices, in the figures that every plan computes with.

    time to first token = overhead + bytes loaded / bandwidth + max(FLOPs / (peak x mfu), weights / memory bandwidth)

Knows `ModelShape` and `Device`; no caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument
from mainstem.replay.plan.costs import Floats, ModelShape
from mainstem.replay.plan.hardware import Device
from mainstem.replay.trace import Trace
from mainstem.settings.replay import MAX_GPUS, Assumptions, Memory
from mainstem.units import dtype_bytes

Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Engine:
    """A model on its devices, in the figures that the plan computes with. Rates are achieved rates.

    Args:
        gpus: devices per replica.
        kv_copies: devices of a replica that keep the same KV.
        cache_bytes: memory for KV on all devices together, counting each copy once.
        flops_per_s: FLOPs per second of a replica.
        weight_bytes: bytes per parameter.
        weights_bytes_per_s: read rate from device memory, all devices of a replica together.
        host_bytes_per_s: read rate from host memory, all devices of a replica together, counting each copy once.
        storage_bytes_per_s: read rate from storage; 0 without storage.
        token_bytes: bytes to load per cached token.
        end_bytes: bytes to load once per prompt, for windows and states.
        block_bytes: bytes of a cached block, including its share of windows and states.
    """

    gpus: int
    kv_copies: int
    cache_bytes: float
    flops_per_s: float
    weight_bytes: float
    weights_bytes_per_s: float
    host_bytes_per_s: float
    storage_bytes_per_s: float
    token_bytes: float
    end_bytes: float
    block_bytes: float

    def prefill(self, model: ModelShape, tokens: Int64s, known: Int64s) -> tuple[Floats, Floats]:
        """Returns the FLOPs and the seconds of each prefill. The last token is always computed, for its logits."""
        known = np.minimum(known, tokens - 1)
        flops = model.prefill_flops(tokens - known, known)
        weights = model.met_parameters(tokens - known) * self.weight_bytes / self.weights_bytes_per_s
        return flops, np.maximum(flops / self.flops_per_s, weights)

    def moved_bytes(self, above: Int64s, below: Int64s, deepest: Int64s) -> Floats:
        """Returns the bytes between two reaches; windows and states come from where the prompt's last hit is."""
        ends_here = (below > above) & (below == deepest)
        moved: Floats = (below - above) * self.token_bytes + ends_here * self.end_bytes
        return moved

    def storage_rate(self, network_bytes_per_s: float = math.inf) -> float:
        """Bytes per second from storage to the devices, through a network, if there is one, and host memory."""
        return min(self.storage_bytes_per_s or math.inf, network_bytes_per_s, self.host_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a trace as columns."""

    time_s: Floats
    tokens: Int64s
    blocks: Int64s
    block_size: int
    distinct_blocks: int

    @classmethod
    def of(cls, trace: Trace) -> Load:
        batches = list(trace.batches())
        return cls(
            np.concatenate([batch.time_s for batch in batches]),
            np.maximum(np.concatenate([batch.input_tokens for batch in batches]), 1),
            np.concatenate([np.diff(batch.offsets) for batch in batches]),
            trace.block_size,
            trace.distinct_blocks,
        )

    @property
    def span_s(self) -> float:
        """The time from the first request to the last."""
        return float(self.time_s[-1] - self.time_s[0])

    def tokens_of(self, blocks: Int64s) -> Int64s:
        """Returns the tokens of the first `blocks` blocks of each request; the last block may be partial."""
        return np.minimum(blocks * self.block_size, self.tokens)


@dataclass(frozen=True, slots=True)
class Planned:
    """What every plan has: its inputs, and what follows from them alone.

    Args:
        trace: name of the trace.
        requests, input_tokens, distinct_blocks, block_size, span_s: properties of the trace.
        model, device, memory, given, slo_ttft_s: the inputs.
        engine: the model on the devices of one replica, or of all.
    """

    trace: str
    requests: int
    input_tokens: int
    distinct_blocks: int
    block_size: int
    span_s: float
    model: ModelShape
    device: Device
    memory: Memory
    given: Assumptions
    slo_ttft_s: float | None
    engine: Engine

    def load_s(self, bytes_per_s: float) -> float:
        """Returns the seconds to load a token at this rate; 0: there is nothing to load from."""
        return self.engine.token_bytes / bytes_per_s if bytes_per_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What every row of a plan has. Rates and shares are from 0 to 1; hit rates are shares of the input tokens.

    Args:
        device_hit_rate: found on the device.
        host_hit_rate: found in host memory and not above.
        token_hit_rate: found anywhere.
        ttft_mean_s: mean time to first token.
        ttft_p90_s: 90th percentile of the time to first token.
        slo_share: share of requests with the first token in time; None without a limit.
        flops: FLOPs of all prefills.
        flops_saved_share: share saved relative to no cache.
    """

    device_hit_rate: float
    host_hit_rate: float
    token_hit_rate: float
    ttft_mean_s: float
    ttft_p90_s: float
    slo_share: float | None
    flops: float
    flops_saved_share: float


def outcome(
    hits: Sequence[float] | Floats,
    tokens: float,
    ttft_s: NDArray[Any],
    flops: float,
    *,
    limit_s: float | None,
    bare: Outcome | None,
) -> dict[str, Any]:
    """Returns the fields of an `Outcome`.

    Args:
        hits: tokens found on the device, on the host and on each place below, and not above.
        tokens: of all prompts.
        ttft_s: [requests] times to first token.
        flops: of all prefills.
        limit_s: of these times.
        bare: the row without a cache; None: this is that row.
    """
    return {
        "device_hit_rate": float(hits[0] / tokens),
        "host_hit_rate": float(hits[1] / tokens),
        "token_hit_rate": float(sum(hits) / tokens),
        "ttft_mean_s": float(ttft_s.mean(dtype=np.float64)),
        "ttft_p90_s": float(np.quantile(ttft_s, 0.9)),
        "slo_share": None if limit_s is None else float((ttft_s <= limit_s).mean()),
        "flops": flops,
        "flops_saved_share": 0.0 if bare is None else 1 - flops / bare.flops,
    }


def planned(
    trace: Trace, model: ModelShape, device: Device, memory: Memory, given: Assumptions, slo_ttft_s: float | None
) -> tuple[Load, Engine, dict[str, Any]]:
    """Returns the columns of a trace, the model on its devices, and the fields of a `Planned`.

    Raises:
        BadArgument: the weights do not fit the devices, or the limit is not above 0.
    """
    if slo_ttft_s is not None and not 0 < slo_ttft_s < math.inf:
        raise BadArgument("slo_ttft", slo_ttft_s, "a time above 0, such as 500ms")
    load = Load.of(trace)
    engine = engine_of(load, model, device, memory, given)
    facts = {
        "trace": trace.name,
        "requests": len(trace),
        "input_tokens": int(load.tokens.sum()),
        "distinct_blocks": load.distinct_blocks,
        "block_size": load.block_size,
        "span_s": load.span_s,
        "model": model,
        "device": device,
        "memory": memory,
        "given": given,
        "slo_ttft_s": slo_ttft_s,
        "engine": engine,
    }
    return load, engine, facts


def engine_of(load: Load, model: ModelShape, device: Device, memory: Memory, given: Assumptions) -> Engine:
    """Returns the model on its devices.

    Raises:
        BadArgument: the weights do not fit, or more devices have the same KV than a replica has.
    """
    weights = model.weights_bytes(given.weights_dtype)
    usable = (given.device_memory or device.memory_bytes) * given.memory_share
    gpus = given.gpus or _fewest(weights, usable, model.name, device.name)
    if gpus * usable <= weights:
        raise BadArgument("gpus", gpus, f"enough for {weights / 1e9:.0f} GB of weights: {usable / 1e9:.0f} GB fit each")
    dtype = given.weights_dtype or model.weights_dtype
    peak = given.flops or device.flops_per_s(dtype)
    copies = given.kv_copies or model.kv_copies(gpus)
    if copies > gpus:
        raise BadArgument("kv_copies", copies, f"at most the devices of a replica, which are {gpus}")
    token_bytes, end_bytes, block_bytes = _cached_bytes(load, model, given)
    return Engine(
        gpus=gpus,
        kv_copies=copies,
        cache_bytes=given.replicas * (gpus * usable - weights) / copies,
        flops_per_s=peak * given.mfu * gpus,
        weight_bytes=dtype_bytes("weights_dtype", dtype),
        weights_bytes_per_s=(given.bandwidth_device or device.memory_bytes_per_s) * gpus,
        host_bytes_per_s=(given.bandwidth_host or device.host_bytes_per_s * given.link_share) * gpus / copies,
        storage_bytes_per_s=memory.storage_bytes_per_s,
        token_bytes=token_bytes,
        end_bytes=end_bytes,
        block_bytes=block_bytes,
    )


def _fewest(weights: float, usable: float, model: str, device: str) -> int:
    """Returns the fewest devices that hold the weights and leave a tenth as much for KV."""
    gpus = 1
    while gpus * usable < 1.1 * weights:
        gpus *= 2
    if gpus > MAX_GPUS:
        raise BadArgument("model", model, f"one whose weights fit {MAX_GPUS} of {device}")
    return gpus


def _cached_bytes(load: Load, model: ModelShape, given: Assumptions) -> tuple[float, float, float]:
    """Returns the bytes of a token, of a prompt's end, and of a block with its share of ends.

    The end of each request keeps its windows and a checkpoint of the states. A block has as many ends as the trace has
    requests per distinct block, at most one.
    """
    if given.bytes_per_token is not None:
        return given.bytes_per_token, 0.0, given.bytes_per_token * load.block_size
    token = model.kv_bytes_per_token(given.kv_dtype)
    windows = model.window_bytes(int(load.tokens.mean()), given.kv_dtype)
    states = model.state_bytes(given.kv_dtype, given.state_dtype)
    ends = min(1.0, len(load.tokens) / max(load.distinct_blocks, 1))
    window_share = min(ends * windows, load.block_size * model.window_bytes_per_token(given.kv_dtype))
    return token, windows + states, max(load.block_size * token + window_share + ends * states, 1.0)
