"""A trace, and a model on its devices, in the figures that every plan computes with; and what serving the trace takes.

    a request     |<- device ->|<- host ->|<- another machine ->|<- storage ->|<- computed ->|
                  0             loaded      over the network      loaded         prefill        first token

    time to first token = overhead + bytes loaded / bandwidth + max(FLOPs / (peak x mfu), weights / memory bandwidth)

Every row of a plan is priced here, by `Study.serve`. One machine is a fleet of one, whose requests find nothing on
another machine. Knows `ModelShape` and `Device`; no caches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument
from mainstem.replay.plan.costs import Floats, ModelShape
from mainstem.replay.plan.hardware import Device
from mainstem.replay.trace import Int64s, Trace
from mainstem.settings.replay import MAX_GPUS, Assumptions, Memory
from mainstem.units import dtype_bytes

_EVEN = 1e-9  # load is divided evenly enough


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

    @property
    def shared(self) -> dict[str, Any]:
        """These fields by name, of which every plan is made."""
        return {each.name: getattr(self, each.name) for each in fields(Planned)}

    def needed(self, load: float) -> int:
        """Returns the replicas of which none is busier than allowed.

        Args:
            load: seconds that one would compute, per second of the trace.
        """
        return max(1, math.ceil(load / self.given.most_busy - _EVEN))


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


class Served(NamedTuple):
    """The hits, times and bytes of serving a trace.

    Args:
        outcome: the fields of an `Outcome`.
        hits: [4] shares of the input tokens found on the device, on the host, on another machine and in storage, and
            not above.
        known: [requests] tokens found anywhere.
        computing_s: [requests] prefill.
        pulled, read: [requests] bytes from another machine and from storage.
    """

    outcome: dict[str, Any]
    hits: list[float]
    known: Int64s
    computing_s: Floats
    pulled: Floats
    read: Floats


@dataclass(frozen=True, slots=True)
class Study:
    """A trace on an engine.

    Args:
        trace: the trace.
        tokens: [requests] tokens of each prompt, 1 or more.
        facts: what every plan of it has.
    """

    trace: Trace
    tokens: Int64s
    facts: Planned

    @classmethod
    def of(
        cls,
        trace: Trace,
        model: ModelShape,
        device: Device,
        memory: Memory,
        given: Assumptions,
        slo_ttft_s: float | None,
    ) -> Study:
        """Puts a model on its devices, for a trace of one or more requests.

        Raises:
            BadArgument: the weights do not fit the devices, or the limit is not above 0.
        """
        if slo_ttft_s is not None and not 0 < slo_ttft_s < math.inf:
            raise BadArgument("slo_ttft", slo_ttft_s, "a time above 0, such as 500ms")
        tokens = np.maximum(trace.whole.input_tokens, 1)
        engine = _engine(trace, tokens, model, device, memory, given)
        facts = Planned(
            trace=trace.name,
            requests=len(trace),
            input_tokens=int(tokens.sum()),
            distinct_blocks=trace.distinct_blocks,
            block_size=trace.block_size,
            span_s=float(trace.whole.time_s[-1] - trace.whole.time_s[0]),
            model=model,
            device=device,
            memory=memory,
            given=given,
            slo_ttft_s=slo_ttft_s,
            engine=engine,
        )
        return cls(trace, tokens, facts)

    def known(self, blocks: Int64s) -> Int64s:
        """Returns the tokens of the first `blocks` [requests] blocks of each request; the last may be partial."""
        return np.minimum(blocks * self.trace.block_size, self.tokens)

    def serve(
        self,
        found: Sequence[Int64s],
        bare: Outcome | None,
        *,
        machines: int = 0,
        machine: NDArray[np.int32] | None = None,
        network: float = math.inf,
    ) -> Served:
        """Serves every request, given what it finds.

        Args:
            found: [4] of [requests] blocks within reach of the device, the host, other machines and storage: each has
                what those before it have.
            bare: the row without a cache; None: this is that row.
            machines: for which requests wait, first come, first served; 0: nobody waits.
            machine: [requests] who serves each, if requests wait; None: the first that is free.
            network: bytes per second to a machine from the others, and from storage.
        """
        facts, engine, tokens = self.facts, self.facts.engine, self.facts.input_tokens
        reaches = [self.known(blocks) for blocks in found]
        flops, computing_s = engine.prefill(facts.model, self.tokens, reaches[-1])
        loaded, pulled, read = (engine.moved_bytes(above, below, reaches[-1]) for above, below in pairwise(reaches))
        # Bytes from the network or from storage pass through host memory, at the slowest of the rates.
        link, remote = engine.host_bytes_per_s, min(network, engine.host_bytes_per_s)
        loading = loaded / link + pulled / remote + read / min(engine.storage_bytes_per_s or math.inf, remote)
        ttft_s = facts.given.overhead + loading + computing_s
        if machines:
            ttft_s = ttft_s + waits(self.trace.whole.time_s, ttft_s, machines, machine)
        sums = [int(each.sum()) for each in reaches]
        hits = [(below - above) / tokens for above, below in pairwise([0, *sums])]
        total = float(flops.sum())
        outcome = {
            "device_hit_rate": hits[0],
            "host_hit_rate": hits[1],
            "token_hit_rate": sums[-1] / tokens,
            "ttft_mean_s": float(ttft_s.mean()),
            "ttft_p90_s": float(np.quantile(ttft_s, 0.9)),
            "slo_share": None if facts.slo_ttft_s is None else float((ttft_s <= facts.slo_ttft_s).mean()),
            "flops": total,
            "flops_saved_share": 0.0 if bare is None else 1 - total / bare.flops,
        }
        return Served(outcome, hits, reaches[-1], computing_s, pulled, read)


def waits(arrivals_s: Floats, services_s: Floats, servers: int, server: NDArray[np.int32] | None = None) -> Floats:
    """Returns how long each request waits for its server, first come, first served.

    Args:
        arrivals_s: [requests] arrival times, non-decreasing.
        services_s: [requests] service times.
        servers: number of servers, 1 or more.
        server: [requests] who serves each; None: the first that is free.
    """
    free = [float(arrivals_s[0])] * servers
    waited = np.empty(len(arrivals_s))
    own = [0] * len(arrivals_s) if server is None else server.tolist()
    for i, (arrival, service, at) in enumerate(zip(arrivals_s.tolist(), services_s.tolist(), own, strict=True)):
        start = max(arrival, free[at])
        if server is None:
            heapq.heapreplace(free, start + service)
        else:
            free[at] = start + service
        waited[i] = start - arrival
    return waited


def _engine(
    trace: Trace, tokens: Int64s, model: ModelShape, device: Device, memory: Memory, given: Assumptions
) -> Engine:
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
    token_bytes, end_bytes, block_bytes = _cached_bytes(trace, int(tokens.mean()), model, given)
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


def _cached_bytes(trace: Trace, tokens: int, model: ModelShape, given: Assumptions) -> tuple[float, float, float]:
    """Returns the bytes of a token, of a prompt's end, and of a block with its share of ends.

    Args:
        tokens: of a prompt, on average.

    The end of each request keeps its windows and a checkpoint of the states. A block has as many ends as the trace has
    requests per distinct block, at most one.
    """
    if given.bytes_per_token is not None:
        return given.bytes_per_token, 0.0, given.bytes_per_token * trace.block_size
    token = model.kv_bytes_per_token(given.kv_dtype)
    windows = model.window_bytes(tokens, given.kv_dtype)
    states = model.state_bytes(given.kv_dtype, given.state_dtype)
    ends = min(1.0, len(trace) / max(trace.distinct_blocks, 1))
    window_share = min(ends * windows, trace.block_size * model.window_bytes_per_token(given.kv_dtype))
    return token, windows + states, max(trace.block_size * token + window_share + ends * states, 1.0)
