"""Formats the plan of a fleet as text: two tables, the advice, and every assumption with its option; and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mainstem.replay.plan.fleet import HOURS_A_MONTH, FleetPlan, FleetRow, Flow
from mainstem.replay.plan.words import (
    Stated,
    as_dict,
    in_words,
    marked,
    of_the_device,
    of_the_model,
    of_the_rules,
    page,
    rate,
    show_busy,
    slow_tier,
    table,
    upper_bounds,
    useless_copies,
)
from mainstem.units import counted, show_bytes, show_seconds

_CONVENTION = "a convention"
_ROUND = "a round number, no quote"
_EVENTS = "what came and left"
_DGX = "NVIDIA DGX H100 data sheet: 10.2 kW less 8 x 700 W"


def fleet_assumptions(plan: FleetPlan) -> tuple[Stated, ...]:
    """Returns every assumption that the figures of a plan depend on."""
    of_the_plan = (of_the_model(plan), _of_the_machines(plan), of_the_device(plan), of_the_rules(plan.given))
    return tuple(stated for part in (*of_the_plan, _of_money(plan)) for stated in part)


def _of_the_machines(plan: FleetPlan) -> list[Stated]:
    fleet, memory = plan.fleet, plan.memory
    size, read = memory.storage_bytes, memory.storage_bytes_per_s
    chosen = "cost unless given" if plan.given.routing == "shared" else "as given"
    lag, price = show_seconds(fleet.router_lag), "{:g} % of prefill FLOPs"
    return [
        Stated("a machine", 1, "one replica", "", "its devices, its host memory, its link"),
        in_words("most machines", fleet.machines, "{}", "--machines", "halves of it are tried, too"),
        in_words("host memory of a machine", fleet.machine_memory, "bytes", "--machine-memory", "for KV"),
        in_words("network of a machine", fleet.network or 0, "rate", "--network", "one direction"),
        Stated("shared store", size, show_bytes(size) if size else "none", "--storage", "every block is written once"),
        in_words("read rate of the store", read, "rate", "--storage", "of one request; and of all"),
        Stated("routing", plan.routing, plan.routing, "--routing", chosen),
        Stated("the router knows", fleet.router_lag, f"{lag} later", "--router-lag", _EVENTS),
        Stated("peaks", fleet.interval, f"of {show_seconds(fleet.interval)}", "--interval", _CONVENTION),
        in_words("price of a machine", fleet.machine_gain, price, "--machine-gain", _CONVENTION),
    ]


def _of_money(plan: FleetPlan) -> list[Stated]:
    fleet, device = plan.fleet, plan.device
    rent = device.dollars_per_h if fleet.device_price is None else fleet.device_price
    watts = device.watts if fleet.device_power is None else fleet.device_power
    rented = _ROUND if fleet.device_price is None else "as given"
    drawn = device.source if fleet.device_power is None else "as given"
    included = "in the price of a device" if fleet.energy_price == 0 else "as given"
    month, each = "${:g} a GB and month", "{:g} W a device"
    return [
        in_words("a device with its share of a machine", rent, "${:g} an hour", "--device-price", rented),
        in_words("a month", HOURS_A_MONTH, "{:g} hours", "", "of the trace's load"),
        in_words("host memory for KV", fleet.memory_price, month, "--memory-price", _ROUND),
        in_words("the shared store", fleet.store_price, month, "--store-price", _ROUND),
        in_words("energy", fleet.energy_price, "${:g} a kWh", "--energy-price", included),
        in_words("a busy device", watts, "{:g} W", "--device-power", drawn),
        in_words("a device without prefill", fleet.idle_power, "{:g} of it", "--idle-power", "decoding: none"),
        in_words("the rest of a machine", fleet.machine_power, each, "--machine-power", _DGX),
        in_words("a terabyte of the store", fleet.store_power, "{:g} W", "--store-power", _ROUND),
        in_words("the building", fleet.pue, "{:g} times", "--pue", _ROUND),
    ]


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
    return f"{rate(flow.mean_bytes_per_s)} on average and {rate(flow.peak_bytes_per_s)} in the busiest interval"


def _warnings(plan: FleetPlan) -> Iterator[str]:
    row, network = plan.enough or plan.rows[-1], plan.fleet.network
    busiest = max(row.inbound.peak_bytes_per_s, row.outbound.peak_bytes_per_s)
    if network and busiest > network:
        yield f"A machine's network is asked for {rate(busiest)} and has {rate(network)}: transfers wait, uncounted."
    store = plan.memory.storage_bytes_per_s
    if row.size.store_bytes and row.store_read.peak_bytes_per_s > store:
        peak = rate(row.store_read.peak_bytes_per_s)
        yield f"The store is asked for {peak} and has {rate(store)}: reads wait, uncounted."
    if row.busiest > max(plan.given.most_busy, 1.25 * row.busy):
        yield f"The busiest machine computes {row.busiest:.0%} of the time, the average one {row.busy:.0%}."
    yield from useless_copies(plan, [plan.fleet.machine_memory], "the KV on a machine's devices")
    if row.size.store_bytes:
        yield from slow_tier(plan, "the store", store, plan.bare.flops / plan.input_tokens / plan.engine.flops_per_s)
    yield from upper_bounds(plan)


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
    marks = [{"enough": row == plan.enough, "knee": row == plan.knee} for row in plan.rows]
    less = "With less:\n" + table([_cells(row) for row in plan.memories], _HEAD)
    return page(head, [marked(machines, _HEAD, marks), less], fleet_notes(plan), fleet_assumptions(plan))


def _cells(row: FleetRow) -> tuple[str, ...]:
    size = row.size
    hits = (row.token_hit_rate, row.device_hit_rate, row.host_hit_rate, row.peer_hit_rate, row.store_hit_rate)
    flows = [each for flow in (row.network, row.store_read) for each in (flow.mean_bytes_per_s, flow.peak_bytes_per_s)]
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
        *(rate(each) if each else "-" for each in flows),
        f"{row.money:,.0f}",
        f"{row.energy_kwh:,.0f}",
    )


def fleet_as_dict(plan: FleetPlan) -> dict[str, Any]:
    """Returns a plan for JSON: `rows` and `memories` have one entry per fleet; the rest is as in the text."""
    fields = as_dict(plan, fleet_assumptions(plan), fleet_notes(plan))
    for row in (
        *fields["rows"],
        *fields["memories"],
        *(fields[name] for name in ("bare", "knee", "host_knee", "enough")),
    ):
        if row is not None:
            row["size"] = row["size"]._asdict()
    return fields
