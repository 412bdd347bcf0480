"""`mainstem plan`: its options, and what it prints. Argument parsing and printing, nothing else."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from json import dumps

from mainstem.errors import BadArgument
from mainstem.replay.commands.trace import TracePath, read_trace
from mainstem.settings.fields import Settings, setting
from mainstem.settings.flags import Switch, alone
from mainstem.settings.replay import Assumptions, Fleet, Memory, TraceOptions
from mainstem.terminal import bar
from mainstem.units import SIZE, STORE, TIME


@dataclass(frozen=True)
class Wish(Settings):
    """What may be bought, and what it is for.

    Args:
        host_memory: Maximum host memory over all replicas, such as 1TB.
        storage: Maximum storage and its read rate, such as 8TB@7GB/s. With --fleet, it is shared by all machines.
        slo_ttft: Limit of the time to first token, such as 500ms.
    """

    host_memory: int = setting(0, unit=SIZE)
    storage: tuple[int, float] | None = setting(None, unit=STORE)
    slo_ttft: float | None = setting(None, unit=TIME)

    def memory(self) -> Memory:
        """Returns the memory on offer."""
        return Memory(self.host_memory, *(self.storage or (0, 0.0)))


@alone("plan")
def plan(
    path: TracePath,
    *,
    model: str,
    gpu: str,
    wish: Wish = Wish(),
    given: Assumptions = Assumptions(),
    fleet: Switch = False,
    machines: Fleet = Fleet(),
    reading: TraceOptions = TraceOptions(),
    json: Switch = False,
) -> None:
    """Plan what memory to buy, or how many machines: replay a trace of requests with each mix of memory, or each fleet.

    Args:
        path: The trace; - is standard input.
        model: A folder with a config.json, such a file, or a name such as llama-3.1-8b or deepseek-v3.
        gpu: The device: h200, h100, a100-80gb, l40s, b200, mi300x, rtx4090, cpu and so on.
        fleet: Plan machines with a network and a shared store, see docs/planning.md.
        json: Print one JSON object.

    Examples:

      mainstem plan trace.jsonl.xz --model llama-3.1-8b --gpu h200 --host-memory 1TB --storage 8TB@7GB/s --slo-ttft 500ms
      mainstem plan trace.mstrace --model ./my-model --gpu l40s --gpus 4 --host-memory 512GB --kv-dtype fp8
      mainstem plan trace.mstrace --model deepseek-v3 --gpu b200 --storage 30TB@20GB/s --json > plan.json
      mainstem plan fleet.mstrace --model qwen3-32b --gpu h200 --fleet --machines 64 --network 25GB/s --storage 99TB@40GB/s

    docs/planning.md explains the table and gives the sources of the formulas.
    """  # noqa: E501  # lines as the help shows them
    from mainstem.replay.plan.configs import read_shape
    from mainstem.replay.plan.fleet import plan_fleet
    from mainstem.replay.plan.hardware import find_device
    from mainstem.replay.plan.plan import plan as plan_memory
    from mainstem.replay.plan.words import AnyPlan, plan_as_dict, show_plan
    from mainstem.replay.simulate.sweep import check_policy

    _check_fleet(fleet, wish, given, machines)
    shape, device, memory = read_shape(model), find_device(gpu), wish.memory()
    check_policy(given.policy)  # before reading the trace, which may take long
    trace = read_trace(path, reading)
    for note in trace.notes:
        print(note, file=sys.stderr)
    found: AnyPlan
    with bar("replaying") as progress:
        if fleet:
            found = plan_fleet(
                trace, shape, device, memory, given, machines, slo_ttft_s=wish.slo_ttft, progress=progress
            )
        else:
            found = plan_memory(trace, shape, device, memory, given, slo_ttft_s=wish.slo_ttft, progress=progress)
    print(dumps(plan_as_dict(found), ensure_ascii=False) if json else show_plan(found))


def _check_fleet(fleet: bool, wish: Wish, given: Assumptions, machines: Fleet) -> None:
    """Checks that options are not mixed up: of one cache, and of machines."""
    if not fleet:
        machines.refuse("--fleet")
    elif wish.host_memory:
        raise BadArgument("host_memory", wish.host_memory, "left out with --fleet: --machine-memory is of one machine")
    elif given.replicas != 1:
        raise BadArgument("replicas", given.replicas, "left out with --fleet: --machines says how many are tried")
    elif given.policy == "opt":
        raise BadArgument("policy", given.policy, "left out with --fleet: the optimum supports only one cache")
