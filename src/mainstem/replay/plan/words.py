"""Formats a plan, of memory or of machines, as text: tables, advice, and every assumption with its option; and as JSON.

Knows numbers and their formats; computes nothing but ratios of two numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeAlias

from mainstem.replay.plan.engine import Outcome, Planned
from mainstem.replay.plan.fleet import HOURS_A_MONTH, FleetPlan, FleetRow, Flow
from mainstem.replay.plan.plan import Knee, Plan, PlanRow, everything
from mainstem.units import counted, show_bytes, show_seconds

AnyPlan: TypeAlias = Plan | FleetPlan

_CONVENTION = "a convention"
_ROUND = "a round number, no quote"
_DGX = "NVIDIA DGX H100 data sheet: 10.2 kW less 8 x 700 W"
_SHARING = ("each replica has its part of every tier", "every replica finds what any of them keeps")


class Stated(NamedTuple):
    """One assumption.

    Args:
        what: name of the assumption.
        value: the value used, in bytes, seconds, and bytes or FLOPs per second.
        shown: the same, formatted.
        option: the command-line option that changes it; empty: none.
        source: source of the value.
    """

    what: str
    value: float | str
    shown: str
    option: str
    source: str


def assumptions(plan: AnyPlan) -> tuple[Stated, ...]:
    """Returns every assumption that the figures of a plan depend on."""
    model, device, rules = _of_the_model(plan), _of_the_device(plan), _of_the_rules(plan)
    if isinstance(plan, FleetPlan):
        parts = [model, _of_the_machines(plan), device, rules, _of_money(plan)]
    else:
        parts = [model, _of_the_replicas(plan), device, rules]
    return tuple(Stated(what, value, _shown(value, form), *more) for part in parts for what, value, form, *more in part)


def _shown(value: Any, form: str) -> str:
    """Shows a value in a form: one of `str.format`, or bytes, rate or seconds."""
    if form == "rate" and not value:
        return "none"
    return {"bytes": show_bytes, "rate": _rate, "seconds": show_seconds}.get(form, form.format)(value)


_Assumed: TypeAlias = Iterator[tuple[str, Any, str, str, str]]
"""The fields of `Stated`, with the form in which the value is shown."""


def _of_the_model(plan: Planned) -> _Assumed:
    given, model, engine = plan.given, plan.model, plan.engine
    dtype = given.weights_dtype or model.weights_dtype
    size, token, end, block = model.weights_bytes(dtype), engine.token_bytes, engine.end_bytes, engine.block_bytes
    kept = "with a window and a state for each request of the trace" if end else "full attention"
    kept = kept if given.bytes_per_token is None else "as given"
    yield "weights", size, f"{show_bytes(size)} in {dtype}", "--weights-dtype", f"{model.parameters:.3g} parameters"
    yield "parameters per token", model.active_parameters, "{:.3g}", "", "its layers"
    yield "KV per token", token, f"{show_bytes(token)} in {given.kv_dtype}", "--kv-dtype", "its layers"
    states = f"states in {given.state_dtype}"
    yield "windows and states", end, f"{show_bytes(end)} a prompt", "--state-dtype", states
    yield "a cached block", block, f"{show_bytes(block)} a block of {plan.block_size}", "--bytes-per-token", kept


def _of_the_replicas(plan: Plan) -> _Assumed:
    routing = plan.given.routing
    yield "replicas", plan.given.replicas, "{}", "--replicas", "memory is a total over all of them"
    yield "routing", routing, "{}", "--routing", _SHARING[routing == "shared"]


def _of_the_machines(plan: FleetPlan) -> _Assumed:
    fleet, memory = plan.fleet, plan.memory
    chosen = "cost unless given" if plan.given.routing == "shared" else "as given"
    yield "a machine", 1, "one replica", "", "its devices, its host memory, its link"
    yield "most machines", fleet.machines, "{}", "--machines", "halves of it are tried, too"
    yield "host memory of a machine", fleet.machine_memory, "bytes", "--machine-memory", "for KV"
    yield "network of a machine", fleet.network or 0, "rate", "--network", "one direction"
    size, read = memory.storage_bytes, memory.storage_bytes_per_s
    yield "shared store", size, show_bytes(size) if size else "none", "--storage", "every block is written once"
    yield "read rate of the store", read, "rate", "--storage", "of one request; and of all"
    yield "routing", plan.routing, "{}", "--routing", chosen
    lag, interval = show_seconds(fleet.router_lag), show_seconds(fleet.interval)
    yield "the router knows", fleet.router_lag, f"{lag} later", "--router-lag", "what came and left"
    yield "peaks", fleet.interval, f"of {interval}", "--interval", _CONVENTION
    yield "price of a machine", fleet.machine_gain, "{:g} % of prefill FLOPs", "--machine-gain", _CONVENTION


def _of_the_device(plan: Planned) -> _Assumed:
    """Yields what the plan assumes of the devices of one replica, or of all."""
    given, device, engine = plan.given, plan.device, plan.engine
    peak = given.flops or device.flops_per_s(given.weights_dtype or plan.model.weights_dtype)
    memory = given.device_memory or device.memory_bytes
    memory_rate = given.bandwidth_device or device.memory_bytes_per_s
    link = given.bandwidth_host or device.host_bytes_per_s * given.link_share
    copies = "enough KV heads" if engine.kv_copies == 1 else "tensor parallelism over fewer KV heads"

    def source(value: float | None, otherwise: str = device.source) -> str:
        return otherwise if value is None else "as given"

    fewest = source(given.gpus, "the fewest that hold the weights")
    yield "devices per replica", engine.gpus, f"{engine.gpus} x {device.name}", "--gpus", fewest
    yield "devices with the same KV", engine.kv_copies, "{}", "--kv-copies", source(given.kv_copies, copies)
    yield "memory", memory, "bytes", "--device-memory", source(given.device_memory)
    yield "for weights and KV", given.memory_share, "{:g} of it", "--memory-share", "rest: activations"
    yield "KV on all devices", engine.cache_bytes, "bytes", "", "left by the weights"
    yield "peak rate", peak, f"{peak / 1e12:.4g} TFLOP/s", "--flops", source(given.flops)
    yield "reached in prefill", given.mfu, "{:g} of it", "--mfu", "Llama 3 in training: 0.38 to 0.43"
    yield "memory rate", memory_rate, "rate", "--bandwidth-device", source(given.bandwidth_device)
    share = source(given.bandwidth_host, f"{given.link_share:g} of the link's peak (--link-share)")
    yield "from host memory", link, f"{show_bytes(link)}/s a device", "--bandwidth-host", share


def _of_the_rules(plan: AnyPlan) -> _Assumed:
    """Yields what the plan assumes of the rules of caches, and its conventions."""
    given = plan.given
    if isinstance(plan, Plan):
        yield "from storage", plan.engine.storage_bytes_per_s, "rate", "--storage", "as given"
    held = "copies of what is above" if given.write_policy == "write_through" else "what was evicted from above"
    queue = ("counted", "--no-queue") if given.queue else ("not counted", "--queue")
    yield "lower tiers hold", given.write_policy, "{}", "--write-policy", held
    yield "eviction", given.policy, "{}", "--policy", "hits by tier are exact for lru"
    yield "overhead per request", given.overhead, "seconds", "--overhead", "added to the rest"
    yield "waiting for a replica", queue[0], *queue, "first come, first served"
    yield "price of memory", given.gain, "{:g} % of prefill FLOPs per GB", "--gain", _CONVENTION
    yield "sizes tried", given.steps, "{} of each tier", "--steps", "each half of the next"
    yield "busy with prefill", given.most_busy, "{:g} at most", "--most-busy", _CONVENTION
    yield "in time", given.slo_share, "{:g} of requests", "--slo-share", "with --slo-ttft"


def _of_money(plan: FleetPlan) -> _Assumed:
    fleet, device = plan.fleet, plan.device
    rent, rented = (device.dollars_per_h, _ROUND) if fleet.device_price is None else (fleet.device_price, "as given")
    watts, drawn = (device.watts, device.source) if fleet.device_power is None else (fleet.device_power, "as given")
    included = "in the price of a device" if fleet.energy_price == 0 else "as given"
    month = "${:g} a GB and month"
    yield "a device with its share of a machine", rent, "${:g} an hour", "--device-price", rented
    yield "a month", HOURS_A_MONTH, "{:g} hours", "", "of the trace's load"
    yield "host memory for KV", fleet.memory_price, month, "--memory-price", _ROUND
    yield "the shared store", fleet.store_price, month, "--store-price", _ROUND
    yield "energy", fleet.energy_price, "${:g} a kWh", "--energy-price", included
    yield "a busy device", watts, "{:g} W", "--device-power", drawn
    yield "a device without prefill", fleet.idle_power, "{:g} of it", "--idle-power", "decoding: none"
    yield "the rest of a machine", fleet.machine_power, "{:g} W a device", "--machine-power", _DGX
    yield "a terabyte of the store", fleet.store_power, "{:g} W", "--store-power", _ROUND
    yield "the building", fleet.pue, "{:g} times", "--pue", _ROUND


# ---- advice


def notes(plan: AnyPlan) -> tuple[str, ...]:
    """Returns what the tables do not show, a sentence or two each; the first says what to buy, or how many machines."""
    if isinstance(plan, FleetPlan):
        return *_needed(plan), *_knees(plan), *_network(plan), *_warnings(plan)
    return _buy(plan), *_replicas(plan), *_in_time(plan), *_knee(plan), *_warnings(plan)


def _buy(plan: Plan) -> str:
    best, alone = plan.buy, plan.rows[0]
    if len(plan.rows) == 1:
        return "Buy: nothing was offered (--host-memory, --storage)."
    if best == alone:
        return f"Buy: no memory below the device, which saves {alone.flops_saved_share:.1%} of prefill FLOPs by itself."
    return (
        f"Buy: {_tiers(best)}. It saves {best.flops_saved_share:.1%} of prefill FLOPs ({alone.flops_saved_share:.1%} "
        f"with the device alone). The first token takes {show_seconds(best.ttft_mean_s)} on average "
        f"({show_seconds(alone.ttft_mean_s)}), and {show_seconds(best.ttft_p90_s)} at p90 "
        f"({show_seconds(alone.ttft_p90_s)})."
    )


def _replicas(plan: Plan) -> Iterator[str]:
    """Yields how many devices are needed, and what the figures mean if there are fewer."""
    given, gpus = plan.given, plan.engine.gpus
    needed = [row.replicas * gpus for row in (plan.buy, plan.rows[0], plan.bare) if row.replicas is not None]
    if not needed:
        return
    yield (
        f"Prefill needs {needed[0]:,} {plan.device.name} with that, {needed[1]:,} with the device alone and "
        f"{needed[2]:,} without a cache, if each may be busy {given.most_busy:.0%} of the time."
    )
    if needed[0] > given.replicas * gpus:
        there = f"There {'is' if given.replicas == 1 else 'are'} {given.replicas * gpus}"
        times = "" if given.queue else ", and the times above assume that a replica is free"
        yield f"{there}{times}. Plan again with --replicas {needed[0] // gpus}: more devices also cache more."


def _knee(plan: Plan) -> Iterator[str]:
    knee, gain = plan.knee, plan.given.gain
    alone = plan.rows[0].flops_saved_share
    whole = everything(plan)
    if knee.memory_bytes:
        rate = 100 * (knee.saved_share - alone) / (knee.memory_bytes / 1e9)
        yield (
            f"Knee: {_tiers(knee)} saves {knee.saved_share:.1%} of prefill FLOPs ({alone:.1%} with the device "
            f"alone), {rate:.2g} % per GB; beyond it, a GB saves at most {gain:g} %."
        )
        if knee.memory_bytes == knee.curve[-1][0] < int(whole):
            yield "All memory on offer is worth its price: offer more to find the knee."
    elif len(knee.curve) > 1:
        yield f"Knee: the device alone, {alone:.1%} of prefill FLOPs: no amount saves more than {gain:g} % per GB."
    yield (
        f"Unlimited memory would save {knee.endless_saved_share:.1%}; all blocks of the trace take {show_bytes(whole)}."
    )


def _in_time(plan: Plan) -> Iterator[str]:
    if plan.slo_ttft_s is None:
        return
    required, alone = f"required {plan.given.slo_share:.4g}", plan.rows[0]
    yield (
        f"Within {show_seconds(plan.slo_ttft_s)}: {plan.bare.slo_share or 0:.1%} of first tokens without a cache, "
        f"{alone.slo_share or 0:.1%} with the device alone, {plan.buy.slo_share or 0:.1%} with what to buy."
    )
    if met := [row for row in plan.rows if row.slo_met]:
        smallest = min(met, key=lambda row: (_bought(row), row.ttft_mean_s))
        yield f"The smallest mix that reaches the {required} is {_tiers(smallest)}, with {smallest.slo_share or 0:.1%}."
    else:
        closest = max(plan.rows, key=lambda row: (row.slo_share or 0.0, -_bought(row)))
        yield (
            f"No mix reaches the {required}. The closest is {_tiers(closest)}, with {closest.slo_share or 0:.1%}; "
            "the rest needs faster devices, or more of them per replica (--gpus)."
        )


def _bought(row: PlanRow) -> int:
    return row.host_bytes + row.storage_bytes


def _tiers(row: PlanRow | Knee) -> str:
    bought = [(row.host_bytes, "host memory"), (row.storage_bytes, "storage")]
    return " and ".join(f"{show_bytes(size)} of {tier}" for size, tier in bought if size) or "the device alone"


def _needed(plan: FleetPlan) -> Iterator[str]:
    bare, most = plan.bare, plan.given.most_busy
    without = f"{bare.size.machines:,} without a cache"
    if plan.enough is None:
        last = plan.rows[-1]
        yield (
            f"Too few with {counted(last.size.machines, 'machine')}: at their hits it takes {last.needed:,} "
            f"({without}), if each may be busy {most:.0%} of the time. Plan again with --machines {last.needed}."
        )
        return
    row = plan.enough
    machines = f"{counted(row.size.machines, 'machine')} of {plan.engine.gpus} x {plan.device.name}"
    yield (
        f"It takes {machines} ({without}), if each may be busy {most:.0%} of the time with prefill. They find "
        f"{row.token_hit_rate:.1%} of prompt tokens, and the first token takes {show_seconds(row.ttft_mean_s)} on "
        "average; without a cache and without waiting, it takes "
        f"{show_seconds(bare.ttft_mean_s)}."
    )
    yield (
        f"A month costs ${row.money:,.0f} (${bare.money:,.0f} without a cache) and {row.energy_kwh:,.0f} kWh "
        f"({bare.energy_kwh:,.0f}), at the assumptions below."
    )


def _knees(plan: FleetPlan) -> Iterator[str]:
    knee, fleet = plan.knee, plan.fleet
    machines = f"{counted(knee.size.machines, 'machine')} {'saves' if knee.size.machines == 1 else 'save'}"
    yield (
        f"Knee: {machines} {knee.flops_saved_share:.1%} of prefill FLOPs; beyond them, a machine "
        f"saves at most {fleet.machine_gain:g} %, on average."
    )
    row = plan.host_knee
    if fleet.machine_memory:
        each = f"{show_bytes(row.size.host_bytes)} of host memory each" if row.size.host_bytes else "no host memory"
        yield (
            f"With {counted(row.size.machines, 'machine')}, {each} is the knee: {row.flops_saved_share:.1%}; beyond "
            f"it, a gigabyte saves at most {plan.given.gain:g} %."
        )


def _network(plan: FleetPlan) -> Iterator[str]:
    row = plan.enough or plan.rows[-1]
    if row.size.network:
        yield (
            f"Network: machines read {_flow(row.network)} from each other. One machine reads {_flow(row.inbound)} at "
            f"most (from the store, too), and sends {_flow(row.outbound)}."
        )
    if row.size.store_bytes:
        yield f"Store: {_flow(row.store_read)} are read, and {_flow(row.store_written)} written."


def _flow(flow: Flow) -> str:
    return f"{_rate(flow.mean_bytes_per_s)} on average and {_rate(flow.peak_bytes_per_s)} in the busiest interval"


def _warnings(plan: AnyPlan) -> Iterator[str]:
    engine, computing_s = plan.engine, plan.bare.flops / plan.input_tokens / plan.engine.flops_per_s
    if isinstance(plan, FleetPlan):
        yield from _uncounted(plan)
        hosts, device = [plan.fleet.machine_memory], "the KV on a machine's devices"
        tiers = {"the store": engine.storage_bytes_per_s if (plan.enough or plan.rows[-1]).size.store_bytes else 0}
    else:
        yield from _overload(plan)
        hosts, device = [row.host_bytes for row in plan.rows], "the size of the KV on the devices"
        tiers = {"host memory": engine.host_bytes_per_s, "storage": engine.storage_bytes_per_s}
    size = engine.cache_bytes
    if plan.given.write_policy == "write_through" and any(0 < each <= size for each in hosts):
        yield (
            f"Host memory up to {show_bytes(size)}, {device}, adds nothing: it holds copies "
            "(--write-policy write_back changes that)."
        )
    for tier, bytes_per_s in tiers.items():
        if bytes_per_s and (loading_s := engine.token_bytes / bytes_per_s) > computing_s:
            yield (
                f"Loading a token from {tier} takes {show_seconds(loading_s)}, computing it "
                f"{show_seconds(computing_s)}: hits there save FLOPs, but delay the first token."
            )
    if engine.end_bytes:
        yield (
            "The plan assumes that hits may end anywhere. A running cache keeps windows and states only where prompts "
            "end or fork, so the hit rates of this model are upper bounds."
        )


def _overload(plan: Plan) -> Iterator[str]:
    """Yields a note if storage is read more than it can be."""
    slow = max(plan.rows, key=lambda row: row.storage_busy or 0.0)
    if (slow.storage_busy or 0.0) > plan.given.most_busy:
        yield (
            f"With {_tiers(slow)}, storage is read {slow.storage_busy:.0%} of the time: requests wait for it, which "
            "these times do not include."
        )


def _uncounted(plan: FleetPlan) -> Iterator[str]:
    """Yields notes of what is asked for more than it can give."""
    row, network, store = plan.enough or plan.rows[-1], plan.fleet.network, plan.memory.storage_bytes_per_s
    busiest = max(row.inbound.peak_bytes_per_s, row.outbound.peak_bytes_per_s)
    if network and busiest > network:
        yield f"A machine's network is asked for {_rate(busiest)} and has {_rate(network)}: transfers wait, uncounted."
    if row.size.store_bytes and (peak := row.store_read.peak_bytes_per_s) > store:
        yield f"The store is asked for {_rate(peak)} and has {_rate(store)}: reads wait, uncounted."
    if row.busiest > max(plan.given.most_busy, 1.25 * row.busy):
        yield f"The busiest machine computes {row.busiest:.0%} of the time, the average one {row.busy:.0%}."


# ---- the text

_Head: TypeAlias = Sequence[tuple[str, tuple[str, ...]]]
"""Groups of columns, and the columns of each."""

_HEAD: _Head = (
    ("memory bought", ("host", "storage")),
    ("prompt tokens found in", ("any", "device", "host", "storage")),
    ("first token", ("mean", "p90", "in time")),
    ("saved", ("FLOPs", "GPU-h", "% / GB")),
    ("GPUs", ("busy", "need")),
)
_FLEET_HEAD: _Head = (
    ("", ("machines", "host each", "network", "store")),
    ("prompt tokens found in", ("any", "device", "host", "peer", "store")),
    ("first token", ("mean", "p90", "in time")),
    ("saved", ("FLOPs",)),
    ("machines", ("busy", "busiest", "need")),
    ("peers", ("mean", "peak")),
    ("store read", ("mean", "peak")),
    ("a month", ("dollars", "kWh")),
)


def show_plan(plan: AnyPlan) -> str:
    """Returns the whole plan as text for a terminal."""
    gpus, advice, below = plan.engine.gpus, notes(plan), list[str]()
    marks: Mapping[str, PlanRow | FleetRow | None]
    if isinstance(plan, FleetPlan):
        where, head = f"machines of {gpus} x {plan.device.name}, routed by {plan.routing}", _FLEET_HEAD
        bare, *rows = (_fleet_cells(row) for row in (plan.bare, *plan.rows))
        marks = {"enough": plan.enough, "knee": plan.knee}
        below = ["With less:\n" + _table([_fleet_cells(row) for row in plan.memories], head)]
    else:
        where, head = f"{gpus * plan.given.replicas} x {plan.device.name}", _HEAD
        bare, *rows = (_cells(row, gpus) for row in (plan.bare, *plan.rows))
        mixes = {(row.host_bytes, row.storage_bytes): row for row in plan.rows if _bought(row)}
        chosen: dict[str, PlanRow | Knee] = {"buy": plan.buy, "knee": plan.knee}
        marks = {name: mixes.get((each.host_bytes, each.storage_bytes)) for name, each in chosen.items()}
    marked = [", ".join(name for name, each in marks.items() if each == row) for row in plan.rows]
    bought = len(head[0][1])
    bare = ("no cache", *[""] * (bought - 1), *bare[bought:])
    span = f" in {show_seconds(plan.span_s)}" if plan.span_s else ""
    title = (
        f"{plan.trace}: {counted(plan.requests, 'request')}{span}, {plan.input_tokens:,} prompt tokens\n"
        f"{plan.model.name} on {where}"
    )
    assumed = _aligned([(each.what, each.shown, each.option, each.source) for each in assumptions(plan)], left=4)
    assumed = f"Assumptions, and the options that change them:\n{assumed}"
    return "\n\n".join((title, advice[0], _table([bare, *rows], head, marked), *below, "\n".join(advice[1:]), assumed))


def _cells(row: PlanRow, gpus: int) -> tuple[str, ...]:
    return (
        _size(row.host_bytes),
        _size(row.storage_bytes),
        *_found(row, row.storage_hit_rate),
        f"{row.gpu_hours_saved:.3g}",
        "-" if row.gain_per_gb is None else f"{row.gain_per_gb:.2g}",
        "-" if row.busy is None else _busy(row.busy),
        "-" if row.replicas is None else f"{row.replicas * gpus:,}",
    )


def _fleet_cells(row: FleetRow) -> tuple[str, ...]:
    flows = [each for flow in (row.network, row.store_read) for each in (flow.mean_bytes_per_s, flow.peak_bytes_per_s)]
    return (
        f"{row.size.machines:,}",
        _size(row.size.host_bytes),
        "yes" if row.size.network else "-",
        _size(row.size.store_bytes),
        *_found(row, row.peer_hit_rate, row.store_hit_rate),
        _busy(row.busy),
        _busy(row.busiest),
        f"{row.needed:,}",
        *(_rate(each) if each else "-" for each in flows),
        f"{row.money:,.0f}",
        f"{row.energy_kwh:,.0f}",
    )


def _found(row: Outcome, *below: float) -> Iterator[str]:
    """Yields what a row has in any plan: where tokens are found, the first token, and the FLOPs saved."""
    for rate in (row.token_hit_rate, row.device_hit_rate, row.host_hit_rate, *below):
        yield f"{rate:.1%}"
    yield show_seconds(row.ttft_mean_s)
    yield show_seconds(row.ttft_p90_s)
    yield "-" if row.slo_share is None else f"{row.slo_share:.1%}"
    yield f"{row.flops_saved_share:.1%}"


def _size(size: int) -> str:
    return show_bytes(size) if size else "-"


def _rate(bytes_per_s: float) -> str:
    return f"{show_bytes(bytes_per_s)}/s"


def _busy(share: float) -> str:
    """Formats the part of a time in which a device computes; one that would need more than all of it is named so."""
    return f"{share:.0%}" if share <= 1 else ">100%"


def _table(rows: Sequence[Sequence[str]], head: _Head, marks: Sequence[str] = ()) -> str:
    """Formats rows below two header lines: groups of columns, and columns. The last have their marks behind them."""
    lines = _aligned([tuple(name for _, names in head for name in names), *rows]).split("\n")
    groups, column, place = "", 0, 0
    ends = [match.end() for match in re.finditer(r"\S+(?: \S+)*", lines[0])]
    for title, names in head:
        column += len(names)
        groups += title.rjust(ends[column - 1] - place)
        place = max(len(groups), ends[column - 1])
    for at, mark in enumerate(marks, len(lines) - len(marks)):
        lines[at] += f"  <- {mark}" if mark else ""
    return "\n".join((groups, *lines))


def _aligned(rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Aligns columns two spaces apart, the first `left` to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def plan_as_dict(plan: AnyPlan) -> dict[str, Any]:
    """Returns a plan for JSON: an entry for each row; `assumptions` and `notes` are as in the text."""
    fields = asdict(replace(plan, model=replace(plan.model, layers=())))
    return {
        **{name: value for name, value in fields.items() if name != "given"},
        "model": plan.model.name,
        "device": plan.device.name,
        "options": fields["given"],
        "assumptions": [each._asdict() for each in assumptions(plan)],
        "notes": list(notes(plan)),
    }
