"""`mainstem plan`: its options, and what it prints. Argument parsing and printing, nothing else."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from json import dumps
from typing import TYPE_CHECKING, Literal

import cyclopts
from cyclopts import Parameter

from mainstem.replay.commands.trace import Json, TraceOptions, TracePath, bar, read_trace
from mainstem.units import parse_bytes, parse_rate, parse_seconds, parse_store

if TYPE_CHECKING:
    from mainstem.replay.plan.assumptions import Assumptions, Memory

_EXAMPLES = """\
Examples:

  mainstem plan trace.jsonl.xz --model llama-3.1-8b --gpu h200 --host-memory 1TB --storage 8TB@7GB/s --slo-ttft 500ms
  mainstem plan trace.mstrace --model ./my-model --gpu l40s --gpus 4 --host-memory 512GB --kv-dtype fp8
  mainstem plan trace.mstrace --model deepseek-v3 --gpu b200 --storage 30TB@20GB/s --json > plan.json

docs/planning.md explains the table and gives the sources of the formulas."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The assumptions, which the output lists below the table.

    Args:
        gpus: Devices per replica. Default: the fewest that hold the weights.
        replicas: Copies of the model; memory and storage are totals over all of them.
        routing: Replicas find what any of them keeps (shared). Otherwise each has its part of every tier, and requests
            are routed by longest cached prefix (prefix), by first block (hash) or in turn (round-robin).
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
    """

    gpus: int | None = None
    replicas: int = 1
    routing: Literal["shared", "prefix", "hash", "round-robin"] = "shared"
    kv_copies: int | None = None
    mfu: float = 0.4
    memory_share: float = 0.9
    link_share: float = 0.8
    flops: float | None = None
    device_memory: str | None = None
    bandwidth_device: str | None = None
    bandwidth_host: str | None = None
    kv_dtype: str = "bf16"
    state_dtype: str = "fp32"
    weights_dtype: str | None = None
    bytes_per_token: float | None = None
    write_policy: Literal["write_through", "write_back"] = "write_through"
    policy: str = "lru"
    overhead: str = "0ms"
    queue: bool = False
    gain: float = 0.01
    steps: int = 3
    slo_share: float = 0.9
    most_busy: float = 0.7

    def assumptions(self) -> Assumptions:
        """Returns these options as the plan's assumptions.

        Raises:
            BadArgument: a value is outside its range.
        """
        from mainstem.replay.plan.assumptions import Assumptions
        from mainstem.replay.simulate.sweep import check_policy

        check_policy(self.policy)  # before reading the trace, which may take long
        return Assumptions(
            gpus=self.gpus,
            replicas=self.replicas,
            routing=self.routing,
            kv_copies=self.kv_copies,
            mfu=self.mfu,
            memory_share=self.memory_share,
            link_share=self.link_share,
            flops=self.flops,
            device_memory=None if self.device_memory is None else parse_bytes("device_memory", self.device_memory),
            bandwidth_device=_rate("bandwidth_device", self.bandwidth_device),
            bandwidth_host=_rate("bandwidth_host", self.bandwidth_host),
            kv_dtype=self.kv_dtype,
            state_dtype=self.state_dtype,
            weights_dtype=self.weights_dtype,
            bytes_per_token=self.bytes_per_token,
            write_policy=self.write_policy,
            policy=self.policy,
            overhead_s=parse_seconds("overhead", self.overhead),
            queue=self.queue,
            gain=self.gain,
            steps=self.steps,
            slo_share=self.slo_share,
            most_busy=self.most_busy,
        )


def _rate(name: str, text: str | None) -> float | None:
    return None if text is None else parse_rate(name, text)


def _memory(host_memory: str, storage: str | None) -> Memory:
    from mainstem.replay.plan.assumptions import Memory

    store = (0, 0.0) if storage is None else parse_store("storage", storage)
    return Memory(parse_bytes("host_memory", host_memory), *store)


_TRACE, _PLAN = TraceOptions(), PlanOptions()
plan = cyclopts.App(name="plan", help_epilogue=_EXAMPLES, help_format="plaintext")


@plan.default
def plan_trace(
    path: TracePath,
    *,
    model: str,
    gpu: str,
    host_memory: str = "0",
    storage: str | None = None,
    slo_ttft: str | None = None,
    options: PlanOptions = _PLAN,
    reading: TraceOptions = _TRACE,
    json: Json = False,
) -> None:
    """Plan what memory to buy: replay a trace of requests with each mix of memory.

    Args:
        path: The trace; - is standard input.
        model: A folder with a config.json, such a file, or a name such as llama-3.1-8b or deepseek-v3.
        gpu: The device: h200, h100, a100-80gb, l40s, b200, mi300x, rtx4090, cpu and so on.
        host_memory: Maximum host memory over all replicas, such as 1TB.
        storage: Maximum storage and its read rate, such as 8TB@7GB/s.
        slo_ttft: Limit of the time to first token, such as 500ms.
        json: Print one JSON object.
    """
    from mainstem.replay.plan.configs import read_shape
    from mainstem.replay.plan.hardware import find_device
    from mainstem.replay.plan.plan import plan as make
    from mainstem.replay.plan.words import plan_as_dict, show_plan

    shape, device, memory = read_shape(model), find_device(gpu), _memory(host_memory, storage)
    given = options.assumptions()
    limit_s = None if slo_ttft is None else parse_seconds("slo_ttft", slo_ttft)
    requests = read_trace(path, reading)
    for note in requests.notes:
        print(note, file=sys.stderr)
    with bar("replaying") as progress:
        found = make(requests, shape, device, memory, given, slo_ttft_s=limit_s, progress=progress)
    print(dumps(plan_as_dict(found), ensure_ascii=False) if json else show_plan(found))
