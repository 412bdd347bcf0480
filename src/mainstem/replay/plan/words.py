"""Formats a plan as text: the table, the advice, and every assumption with its option; and the same as JSON.

Knows numbers and their formats; computes nothing but ratios of two numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from operator import add
from typing import Any, NamedTuple, TypeAlias

from mainstem.replay.plan.engine import Planned
from mainstem.replay.plan.plan import Knee, Plan, PlanRow, everything
from mainstem.settings.replay import Assumptions
from mainstem.units import counted, show_bytes, show_seconds


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


def in_words(what: str, value: float, form: str, option: str, source: str) -> Stated:
    """Returns a number that is assumed, formatted by `form`: one of `str.format`, or bytes, rate or seconds."""
    show = {"bytes": show_bytes, "rate": rate, "seconds": show_seconds}.get(form, form.format)
    return Stated(what, value, show(value) if value or form != "rate" else "none", option, source)


def rate(bytes_per_s: float) -> str:
    """Formats a rate."""
    return f"{show_bytes(bytes_per_s)}/s"


def assumptions(plan: Plan) -> tuple[Stated, ...]:
    """Returns every assumption that the figures of a plan depend on."""
    return tuple(of_the_model(plan) + _of_the_replicas(plan) + of_the_device(plan) + _of_the_cache(plan))


def of_the_model(plan: Planned) -> list[Stated]:
    """Returns what the plan assumes of the model."""
    given, model, engine = plan.given, plan.model, plan.engine
    dtype = given.weights_dtype or model.weights_dtype
    size = model.weights_bytes(dtype)
    token, end, block = engine.token_bytes, engine.end_bytes, engine.block_bytes
    fixed = given.bytes_per_token is not None
    in_all = f"{show_bytes(block)} a block of {plan.block_size}"
    kept = (
        "as given" if fixed else "with a window and a state for each request of the trace" if end else "full attention"
    )
    return [
        Stated(
            "weights", size, f"{show_bytes(size)} in {dtype}", "--weights-dtype", f"{model.parameters:.3g} parameters"
        ),
        in_words("parameters per token", model.active_parameters, "{:.3g}", "", "its layers"),
        Stated("KV per token", token, f"{show_bytes(token)} in {given.kv_dtype}", "--kv-dtype", "its layers"),
        Stated(
            "windows and states", end, f"{show_bytes(end)} a prompt", "--state-dtype", f"states in {given.state_dtype}"
        ),
        Stated("a cached block", block, in_all, "--bytes-per-token", kept),
    ]


def _of_the_replicas(plan: Plan) -> list[Stated]:
    given = plan.given
    return [
        in_words("replicas", given.replicas, "{}", "--replicas", "memory is a total over all of them"),
        Stated("routing", given.routing, given.routing, "--routing", _SHARING[given.routing == "shared"]),
    ]


def of_the_device(plan: Planned) -> list[Stated]:
    """Returns what the plan assumes of the devices of one replica, or of all."""
    given, device, engine = plan.given, plan.device, plan.engine
    peak = given.flops or device.flops_per_s(given.weights_dtype or plan.model.weights_dtype)
    memory = given.device_memory or device.memory_bytes
    memory_rate = given.bandwidth_device or device.memory_bytes_per_s
    link = given.bandwidth_host or device.host_bytes_per_s * given.link_share
    fewest = "the fewest that hold the weights" if given.gpus is None else "as given"
    share = f"{given.link_share:g} of the link's peak (--link-share)" if given.bandwidth_host is None else "as given"

    def source(value: float | None) -> str:
        return device.source if value is None else "as given"

    return [
        Stated("devices per replica", engine.gpus, f"{engine.gpus} x {device.name}", "--gpus", fewest),
        in_words("devices with the same KV", engine.kv_copies, "{}", "--kv-copies", _copies(plan)),
        in_words("memory", memory, "bytes", "--device-memory", source(given.device_memory)),
        in_words("for weights and KV", given.memory_share, "{:g} of it", "--memory-share", "rest: activations"),
        in_words("KV on all devices", engine.cache_bytes, "bytes", "", "left by the weights"),
        Stated("peak rate", peak, f"{peak / 1e12:.4g} TFLOP/s", "--flops", source(given.flops)),
        in_words("reached in prefill", given.mfu, "{:g} of it", "--mfu", "Llama 3 in training: 0.38 to 0.43"),
        in_words("memory rate", memory_rate, "rate", "--bandwidth-device", source(given.bandwidth_device)),
        Stated("from host memory", link, f"{show_bytes(link)}/s a device", "--bandwidth-host", share),
    ]


_SHARING = ("each replica has its part of every tier", "every replica finds what any of them keeps")


def _copies(plan: Planned) -> str:
    if plan.given.kv_copies is not None:
        return "as given"
    return "enough KV heads" if plan.engine.kv_copies == 1 else "tensor parallelism over fewer KV heads"


def _of_the_cache(plan: Plan) -> list[Stated]:
    storage = in_words("from storage", plan.engine.storage_bytes_per_s, "rate", "--storage", "as given")
    return [storage, *of_the_rules(plan.given)]


def of_the_rules(given: Assumptions) -> list[Stated]:
    """Returns what the plan assumes of the rules of caches, and its conventions."""
    held = "copies of what is above" if given.write_policy == "write_through" else "what was evicted from above"
    queue = ("counted", "--no-queue") if given.queue else ("not counted", "--queue")
    return [
        Stated("lower tiers hold", given.write_policy, given.write_policy, "--write-policy", held),
        Stated("eviction", given.policy, given.policy, "--policy", "hits by tier are exact for lru"),
        in_words("overhead per request", given.overhead, "seconds", "--overhead", "added to the rest"),
        Stated("waiting for a replica", queue[0], *queue, "first come, first served"),
        in_words("price of memory", given.gain, "{:g} % of prefill FLOPs per GB", "--gain", "a convention"),
        in_words("sizes tried", given.steps, "{} of each tier", "--steps", "each half of the next"),
        in_words("busy with prefill", given.most_busy, "{:g} at most", "--most-busy", "a convention"),
        in_words("in time", given.slo_share, "{:g} of requests", "--slo-share", "with --slo-ttft"),
    ]


# ---- advice


def notes(plan: Plan) -> tuple[str, ...]:
    """Returns what the table does not show, a sentence or two each; the first says what to buy."""
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
    whole = everything(plan.distinct_blocks, plan.engine, plan.given)
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


def _warnings(plan: Plan) -> Iterator[str]:
    engine = plan.engine
    yield from _overload(plan)
    yield from useless_copies(plan, [row.host_bytes for row in plan.rows], "the size of the KV on the devices")
    computing_s = plan.bare.flops / plan.input_tokens / engine.flops_per_s
    yield from slow_tier(plan, "host memory", engine.host_bytes_per_s, computing_s)
    yield from slow_tier(plan, "storage", engine.storage_bytes_per_s, computing_s)
    yield from upper_bounds(plan)


def useless_copies(plan: Planned, host_bytes: Iterable[int], device: str) -> Iterator[str]:
    """Yields a note if an amount of host memory only repeats what the device has."""
    size = plan.engine.cache_bytes
    if plan.given.write_policy == "write_through" and any(0 < each <= size for each in host_bytes):
        yield (
            f"Host memory up to {show_bytes(size)}, {device}, adds nothing: it holds copies "
            "(--write-policy write_back changes that)."
        )


def slow_tier(plan: Planned, tier: str, bytes_per_s: float, computing_s: float) -> Iterator[str]:
    """Yields a note if a token is computed sooner than loaded from a tier."""
    if (loading_s := plan.load_s(bytes_per_s)) > computing_s:
        yield (
            f"Loading a token from {tier} takes {show_seconds(loading_s)}, computing it {show_seconds(computing_s)}: "
            "hits there save FLOPs, but delay the first token."
        )


def upper_bounds(plan: Planned) -> Iterator[str]:
    """Yields a note if the model has windows or states."""
    if plan.engine.end_bytes:
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


# ---- the text

Head: TypeAlias = Sequence[tuple[str, tuple[str, ...]]]
"""Groups of columns, and the columns of each."""

_HEAD = (
    ("memory bought", ("host", "storage")),
    ("prompt tokens found in", ("any", "device", "host", "storage")),
    ("first token", ("mean", "p90", "in time")),
    ("saved", ("FLOPs", "GPU-h", "% / GB")),
    ("GPUs", ("busy", "need")),
)


def show_plan(plan: Plan) -> str:
    """Returns the whole plan as text for a terminal."""
    span = f" in {show_seconds(plan.span_s)}" if plan.span_s else ""
    head = (
        f"{plan.trace}: {counted(plan.requests, 'request')}{span}, {plan.input_tokens:,} prompt tokens\n"
        f"{plan.model.name} on {plan.engine.gpus * plan.given.replicas} x {plan.device.name}"
    )
    gpus = plan.engine.gpus
    rows = [("no cache", "", *_cells(plan.bare, gpus)[2:]), *(_cells(row, gpus) for row in plan.rows)]
    return page(head, [marked(rows, _HEAD, [_marks(row, plan) for row in plan.rows])], notes(plan), assumptions(plan))


def page(head: str, tables: Sequence[str], notes: Sequence[str], stated: Sequence[Stated]) -> str:
    """Joins the parts of a plan; the first note stands before the tables."""
    title = "Assumptions, and the options that change them:\n"
    rows = [(each.what, each.shown, each.option, each.source) for each in stated]
    return "\n\n".join((head, notes[0], *tables, "\n".join(notes[1:]), title + aligned(rows, left=4)))


def marked(rows: Sequence[Sequence[str]], head: Head, marks: Sequence[Mapping[str, bool]]) -> str:
    """Formats rows; those at the end have the names of their marks behind them."""
    names = [", ".join(name for name, is_so in each.items() if is_so) for each in marks]
    lines = table(rows, head).split("\n")
    ends = [""] * (len(lines) - len(names)) + [f"  <- {name}" if name else "" for name in names]
    return "\n".join(map(add, lines, ends))


def _marks(row: PlanRow, plan: Plan) -> dict[str, bool]:
    knee, anything = plan.knee, _bought(row) > 0
    at_knee = (row.host_bytes, row.storage_bytes) == (knee.host_bytes, knee.storage_bytes)
    return {"buy": anything and row == plan.buy, "knee": anything and at_knee}


def _cells(row: PlanRow, gpus: int) -> tuple[str, ...]:
    hits = (row.token_hit_rate, row.device_hit_rate, row.host_hit_rate, row.storage_hit_rate)
    return (
        show_bytes(row.host_bytes) if row.host_bytes else "-",
        show_bytes(row.storage_bytes) if row.storage_bytes else "-",
        *(f"{rate:.1%}" for rate in hits),
        show_seconds(row.ttft_mean_s),
        show_seconds(row.ttft_p90_s),
        "-" if row.slo_share is None else f"{row.slo_share:.1%}",
        f"{row.flops_saved_share:.1%}",
        f"{row.gpu_hours_saved:.3g}",
        "-" if row.gain_per_gb is None else f"{row.gain_per_gb:.2g}",
        "-" if row.busy is None else show_busy(row.busy),
        "-" if row.replicas is None else f"{row.replicas * gpus:,}",
    )


def show_busy(share: float) -> str:
    """Formats the part of a time in which a device computes; one that would need more than all of it is named so."""
    return f"{share:.0%}" if share <= 1 else ">100%"


def table(rows: Sequence[Sequence[str]], head: Head) -> str:
    """Formats rows below two header lines: groups of columns, and columns."""
    lines = aligned([tuple(name for _, names in head for name in names), *rows]).split("\n")
    groups, column, place = "", 0, 0
    ends = _ends(lines[0])
    for title, names in head:
        column += len(names)
        groups += title.rjust(ends[column - 1] - place)
        place = max(len(groups), ends[column - 1])
    return "\n".join((groups, *lines))


def _ends(line: str) -> list[int]:
    """Returns where the cells of a line end."""
    return [match.end() for match in re.finditer(r"\S+(?: \S+)*", line)]


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> str:
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


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """Returns a plan for JSON: `rows` has one entry per mix; `knee`, `assumptions` and `notes` are as in the text."""
    return as_dict(plan, assumptions(plan), notes(plan))


def as_dict(plan: Planned, stated: Sequence[Stated], notes: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of any plan for JSON, with what the text says besides."""
    fields = asdict(replace(plan, model=replace(plan.model, layers=())))
    return {
        **{name: value for name, value in fields.items() if name != "given"},
        "model": plan.model.name,
        "device": plan.device.name,
        "options": fields["given"],
        "assumptions": [each._asdict() for each in stated],
        "notes": list(notes),
    }
