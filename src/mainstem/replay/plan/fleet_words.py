"""Formats the plan of a fleet as text: two tables, the advice, and every assumption with its option; and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from mainstem.replay.plan.fleet import HOURS_A_MONTH, FleetPlan, FleetRow, Flow
from mainstem.replay.plan.words import Stated, aligned, of_the_device, of_the_model, of_the_rules, show_busy, table
from mainstem.units import counted, show_bytes, show_seconds

_CONVENTION = "a convention"
_ROUND = "a round number, no quote"


def fleet_assumptions(plan: FleetPlan) -> tuple[Stated, ...]:
    """Returns every assumption that the figures of a plan depend on."""
    of_the_plan = (of_the_model(plan), _of_the_machines(plan), of_the_device(plan), of_the_rules(plan.given))
    return tuple(stated for part in (*of_the_plan, _of_money(plan)) for stated in part)


def _of_the_machines(plan: FleetPlan) -> list[Stated]:
    fleet, memory, rate = plan.fleet, plan.memory, plan.fleet.network
    size, store_rate = memory.storage_bytes, memory.storage_bytes_per_s
    chosen = "cost unless given" if plan.given.routing == "shared" else "as given"
    return [
        Stated("a machine", 1, "one replica", "", "its devices, its host memory, its link"),
        Stated("most machines", fleet.machines, str(fleet.machines), "--machines", "halves of it are tried, too"),
        Stated(
            "host memory of a machine",
            fleet.machine_memory,
            show_bytes(fleet.machine_memory),
            "--machine-memory",
            "for KV",
        ),
        Stated("network of a machine", rate or 0, _rate(rate) if rate else "none", "--network", "one direction"),
        Stated("shared store", size, show_bytes(size) if size else "none", "--storage", "every block is written once"),
        Stated("read rate of the store", store_rate, _rate(store_rate), "--storage", "of one request; and of all"),
        Stated("routing", plan.routing, plan.routing, "--routing", chosen),
        Stated(
            "the router knows",
            fleet.router_lag,
            f"{show_seconds(fleet.router_lag)} later",
            "--router-lag",
            "what came and left",
        ),
        Stated("peaks", fleet.interval, f"of {show_seconds(fleet.interval)}", "--interval", _CONVENTION),
        Stated(
            "price of a machine",
            fleet.machine_gain,
            f"{fleet.machine_gain:g} % of prefill FLOPs",
            "--machine-gain",
            _CONVENTION,
        ),
    ]


def _of_money(plan: FleetPlan) -> list[Stated]:
    fleet, device = plan.fleet, plan.device
    rent = device.dollars_per_h if fleet.device_price is None else fleet.device_price
    watts = device.watts if fleet.device_power is None else fleet.device_power
    source = device.source if fleet.device_power is None else "as given"
    included = "in the price of a device" if fleet.energy_price == 0 else "as given"

    def month(each: float) -> str:
        return f"${each:g} a GB and month"

    return [
        Stated(
            "a device with its share of a machine",
            rent,
            f"${rent:g} an hour",
            "--device-price",
            _ROUND if fleet.device_price is None else "as given",
        ),
        Stated("a month", HOURS_A_MONTH, f"{HOURS_A_MONTH:g} hours", "", "of the trace's load"),
        Stated("host memory for KV", fleet.memory_price, month(fleet.memory_price), "--memory-price", _ROUND),
        Stated("the shared store", fleet.store_price, month(fleet.store_price), "--store-price", _ROUND),
        Stated("energy", fleet.energy_price, f"${fleet.energy_price:g} a kWh", "--energy-price", included),
        Stated("a busy device", watts, f"{watts:g} W", "--device-power", source),
        Stated(
            "a device without prefill",
            fleet.idle_power,
            f"{fleet.idle_power:g} of it",
            "--idle-power",
            "decoding: none",
        ),
        Stated(
            "the rest of a machine",
            fleet.machine_power,
            f"{fleet.machine_power:g} W a device",
            "--machine-power",
            "NVIDIA DGX H100 data sheet: 10.2 kW less 8 x 700 W",
        ),
        Stated("a terabyte of the store", fleet.store_power, f"{fleet.store_power:g} W", "--store-power", _ROUND),
        Stated("the building", fleet.pue, f"{fleet.pue:g} times", "--pue", _ROUND),
    ]


def _rate(rate: float) -> str:
    return f"{show_bytes(rate)}/s"


# ---- advice


def fleet_notes(plan: FleetPlan) -> tuple[str, ...]:
    """Returns what the tables do not show, a sentence or two each; the first says how many machines it takes."""
    return *_needed(plan), *_knees(plan), *_network(plan), *_warnings(plan)


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
    yield (
        f"Knee: {knee.size.machines:,} machines save {knee.flops_saved_share:.1%} of prefill FLOPs; beyond them, a "
        f"machine saves at most {fleet.machine_gain:g} %, on average."
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


def _warnings(plan: FleetPlan) -> Iterator[str]:
    row, rate = plan.enough or plan.rows[-1], plan.fleet.network
    busiest = max(row.inbound.peak_bytes_per_s, row.outbound.peak_bytes_per_s)
    if rate and busiest > rate:
        yield f"A machine's network is asked for {_rate(busiest)} and has {_rate(rate)}: transfers wait, uncounted."
    store = plan.memory.storage_bytes_per_s
    if row.size.store_bytes and row.store_read.peak_bytes_per_s > store:
        peak = _rate(row.store_read.peak_bytes_per_s)
        yield f"The store is asked for {peak} and has {_rate(store)}: reads wait, uncounted."
    if row.busiest > max(plan.given.most_busy, 1.25 * row.busy):
        yield f"The busiest machine computes {row.busiest:.0%} of the time, the average one {row.busy:.0%}."
    device = plan.engine.cache_bytes
    if 0 < plan.fleet.machine_memory <= device and plan.given.write_policy == "write_through":
        yield (
            f"Host memory up to {show_bytes(device)}, the KV on a machine's devices, adds nothing: it holds copies "
            "(--write-policy write_back changes that)."
        )
    computing = plan.bare.flops / plan.input_tokens / plan.engine.flops_per_s
    if row.size.store_bytes and plan.engine.token_bytes / store > computing:
        yield (
            f"Loading a token from the store takes {show_seconds(plan.engine.token_bytes / store)}, computing it "
            f"{show_seconds(computing)}: hits there save FLOPs, but delay the first token."
        )
    if plan.engine.end_bytes:
        yield (
            "The plan assumes that hits may end anywhere. A running cache keeps windows and states only where prompts "
            "end or fork, so the hit rates of this model are upper bounds."
        )


# ---- the text

_HEAD = (
    ("", ("machines", "host each", "network", "store")),
    ("prompt tokens found in", ("any", "device", "host", "peer", "store")),
    ("first token", ("mean", "p90", "in time")),
    ("saved", ("FLOPs",)),
    ("machines", ("busy", "busiest", "need")),
    ("peers", ("mean", "peak")),
    ("store read", ("mean", "peak")),
    ("a month", ("dollars", "kWh")),
)


def show_fleet(plan: FleetPlan) -> str:
    """Returns the whole plan as text for a terminal."""
    head = (
        f"{plan.trace}: {counted(plan.requests, 'request')} in {show_seconds(plan.span_s)}, "
        f"{plan.input_tokens:,} prompt tokens\n"
        f"{plan.model.name} on machines of {plan.engine.gpus} x {plan.device.name}, routed by {plan.routing}"
    )
    bare = ("no cache", "", "", "", *_cells(plan.bare)[4:])
    machines = [bare, *(_cells(row) for row in plan.rows)]
    marks = ["", "", "", *(_mark(row, plan) for row in plan.rows)]
    lines = zip(table(machines, _HEAD).split("\n"), marks, strict=True)
    shown = "\n".join(f"{line}  {mark}".rstrip() for line, mark in lines)
    less = "With less:\n" + table([_cells(row) for row in plan.memories], _HEAD)
    stated = [(each.what, each.shown, each.option, each.source) for each in fleet_assumptions(plan)]
    title = "Assumptions, and the options that change them:\n"
    first, *others = fleet_notes(plan)
    return "\n\n".join((head, first, shown, less, "\n".join(others), title + aligned(stated, left=4)))


def _mark(row: FleetRow, plan: FleetPlan) -> str:
    marks = {"enough": row == plan.enough, "knee": row == plan.knee}
    return "<- " + ", ".join(mark for mark, is_so in marks.items() if is_so) if any(marks.values()) else ""


def _cells(row: FleetRow) -> tuple[str, ...]:
    size = row.size
    hits = (row.token_hit_rate, row.device_hit_rate, row.host_hit_rate, row.peer_hit_rate, row.store_hit_rate)
    flows = [rate for flow in (row.network, row.store_read) for rate in (flow.mean_bytes_per_s, flow.peak_bytes_per_s)]
    return (
        f"{size.machines:,}",
        show_bytes(size.host_bytes) if size.host_bytes else "-",
        "yes" if size.network else "-",
        show_bytes(size.store_bytes) if size.store_bytes else "-",
        *(f"{rate:.1%}" for rate in hits),
        show_seconds(row.ttft_mean_s),
        show_seconds(row.ttft_p90_s),
        "-" if row.slo_share is None else f"{row.slo_share:.1%}",
        f"{row.flops_saved_share:.1%}",
        show_busy(row.busy),
        show_busy(row.busiest),
        f"{row.needed:,}",
        *(_rate(rate) if rate else "-" for rate in flows),
        f"{row.money:,.0f}",
        f"{row.energy_kwh:,.0f}",
    )


def fleet_as_dict(plan: FleetPlan) -> dict[str, Any]:
    """Returns a plan for JSON: `rows` and `memories` have one entry per fleet; the rest is as in the text."""
    found = asdict(replace(plan, model=replace(plan.model, layers=())))
    found["model"] = plan.model.name
    found["device"] = plan.device.name
    for row in (*found["rows"], *found["memories"], found["bare"], found["knee"], found["host_knee"], found["enough"]):
        if row is not None:
            row["size"] = row["size"]._asdict()
    found["options"] = found.pop("given")
    found["assumptions"] = [stated._asdict() for stated in fleet_assumptions(plan)]
    found["notes"] = list(fleet_notes(plan))
    return found
