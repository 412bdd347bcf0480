"""Writes the figures of the documentation from the recorded results.

    python -m bench.figures [--write]

A page marks each figure from a record: a table by its name in `TABLES`, a number by its place in the record and its
format:

    <!--= requests -->
    | ...
    <!--/-->

    takes <!--= core: long match, page 16, 1 nodes, over its floor / median | .2f -->1.01<!--/--> times what

Without `--write`, it reports what differs from the records, as a test does. With it, it rewrites the pages.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mainstem.cache.policies import REMOVED

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (
    "README.md", "docs/arithmetic.md", "docs/batch.md", "docs/fleet.md", "docs/gpu.md", "docs/models.md",
    "docs/numbers.md", "docs/performance.md", "docs/planning.md", "docs/policies.md", "docs/serving.md", "docs/vllm.md",
)  # fmt: skip
"""Pages with recorded figures."""
MARK = re.compile(r"(<!--= (?P<what>.+?) -->)(?P<line>\n?)(?P<now>.*?)(?P<end>\n?<!--/-->)", re.DOTALL)

Row = Mapping[str, Any]
Records = Mapping[str, Mapping[str, Any]]
"""Each recorded file, by the name of its benchmark."""


def load(folder: Path = RESULTS) -> Records:
    """Loads all records; `gpu` is the newest one of a GPU."""
    paths = folder.glob("recorded-*.json")
    records = {path.stem.removeprefix("recorded-"): json.loads(path.read_text()) for path in paths}
    of_gpus = [json.loads(path.read_text()) for path in folder.glob("gpu-*.json") if "gpu-tests-" not in path.name]
    return {**records, "gpu": max(of_gpus, key=lambda record: record["date"])} if of_gpus else records


def rewritten(page: str, records: Records) -> str:
    """Returns a page with the figures of these records.

    Raises:
        KeyError: a mark names neither a table nor a number; the message quotes it.
    """
    return MARK.sub(lambda found: found[1] + found["line"] + _figure(found["what"], records) + found["end"], page)


def _figure(what: str, records: Records) -> str:
    if what in TABLES:
        return TABLES[what](records)
    where, _, form = what.partition(" | ")
    try:
        return FORMS[form](number(where, records)) if form in FORMS else format(number(where, records), form)
    except (KeyError, ValueError) as error:
        raise KeyError(f"no such figure: {what!r} ({error})") from error


# ---------------------------------------------------------------- numbers


class Source(NamedTuple):
    """Rows of a record, and the fields that identify a row."""

    record: str
    rows: str
    keys: tuple[str, ...]


SOURCES = {
    "core": Source("core", "rows", ("name",)),
    "ttft": Source("ttft", "rows", ("dtype", "prefix")),
    "throughput": Source("throughput", "rows", ("concurrent",)),
    "request": Source("index", "rows", ("system", "page_size")),
    "scenario": Source("index", "scenarios", ("system", "scenario")),
    "faults": Source("store-faults", "rows", ("store", "kind")),
    "routers": Source("fleet", "rows", ("trace", "router", "replicas")),
    "tiers": Source("tiers", "rows", ("what", "page_size", "dtype")),
    "marks": Source("marks", "goals", ("what",)),
    "policy": Source("policies", "rows", ("policy",)),
    "agents": Source("agents", "goals", ("what",)),
    "edits": Source("edits", "rows", ("edit", "room", "way")),
    "loss": Source("weights", "loss", ("weights",)),
}
FORMS: Mapping[str, Callable[[float], str]] = {
    "ms": lambda seconds: f"{1000 * seconds:,.0f}",
    "%": lambda share: f"{100 * share:.0f}",
}


def number(where: str, records: Records) -> float:
    """Looks up `source: key / ... / field / ...`, such as `scenario: mainstem / miss / measures / µs / median`.

    Raises:
        KeyError: there is no such row or field.
    """
    name, _, rest = where.partition(": ")
    source, parts = SOURCES[name], rest.split(" / ")
    keys, path = parts[: len(source.keys)], parts[len(source.keys) :]
    rows = records[source.record][source.rows]
    found: Any = next((row for row in rows if [str(row[key]) for key in source.keys] == keys), None)
    if found is None:
        raise KeyError(" / ".join(keys))
    for field in path:
        found = found[field]
    return float(found)


# ---------------------------------------------------------------- tables


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


MAIN_PEERS = ("mainstem", "python", "sglang-rust", "sglang-python", "vllm")


def _requests(records: Records, systems: Sequence[str] | None = None) -> str:
    """Microseconds per request, and in brackets the ratio to the leases in the same rounds."""
    record = records["index"]
    rows = {(row["system"], row["page_size"]): row for row in record["rows"]}
    sizes = sorted({size for _, size in rows})

    def cell(system: str, size: int, mode: str) -> str:
        measured = rows[system, size].get(mode)
        if measured is None:
            return "–"
        ratio = "" if system == "mainstem" else f" ({measured['ratio']:.1f})"
        return f"{measured['us']:,.1f}{ratio}"

    lines = []
    for system in systems or dict.fromkeys(system for system, _ in rows):
        cells = [*(cell(system, size, "prepared") for size in sizes), cell(system, 16, "lists")]
        if any(text != "–" for text in cells):
            lines.append([_label(rows[system, 16], record), *cells])
    return _table(["µs a request", *(f"page {size}" for size in sizes), "page 16, from lists"], lines)


def _label(row: Row, record: Row) -> str:
    """Returns a system's name, with its version if it belongs to another project."""
    for package, name in (("sglang", "SGLang"), ("vllm", "vLLM"), ("ai-dynamo-runtime", "Dynamo")):
        if row["label"].startswith(name) and package in record["versions"]:
            return str(row["label"].replace(name, f"{name} {record['versions'][package]}", 1))
    return f"**{row['label']}**" if row["system"] == "mainstem" else str(row["label"])


_SCENARIOS = (
    ("lookup of 131,072 cached tokens, page 16, 1 node", "long", "page 16, 1 node, µs"),
    ("in 64 nodes", "long", "page 16, 64 nodes, µs"),
    ("in 1,024 nodes", "long", "page 16, 1024 nodes, µs"),
    ("the same tokens as a list", "lists", "µs"),
    ("a miss of 131,072 tokens", "miss", "µs"),
    ("evict one page of 50,000 leaves and return it to the pool, p50", "leaves", "all free, p50 µs"),
    ("the same, p99", "leaves", "all free, p99 µs"),
    ("half of them locked, p50", "leaves", "half locked, p50 µs"),
    ("the same, p99", "leaves", "half locked, p99 µs"),
    ("one request of a session, turns 1 to 50", "session", "first 50 turns, µs"),
    ("turns 451 to 500 (170,000 tokens)", "session", "last 50 turns, µs"),
    ("first request in one of 10,000 namespaces, p50", "namespaces", "first visit, p50 µs"),
    ("chunk of 512 after 1k", "chunks", "near, µs"),
    ("chunk of 512 after 120k", "chunks", "far, µs"),
    ("16 decoded tokens after 100,000", "decode", "far, µs"),
    ("lookup next to a busy thread, p50", "busy", "p50 µs"),
    ("the same, p99", "busy", "p99 µs"),
    ("cold lookup among 51 million tokens, others 5.1 million, p50", "cold", "p50 µs"),
    ("bytes a token, 4,096-token nodes", "memory-4096", "bytes a token"),
    ("bytes a token, 256-token leaves", "memory-256", "bytes a token"),
)


def _scenarios(records: Records) -> str:
    """One line per scenario, with medians of the rounds; one column per measured system."""
    record = records["index"]
    rows = {(row["system"], row["scenario"]): row for row in record["scenarios"]}
    systems = list(dict.fromkeys(system for system, _ in rows))
    lines = []
    for what, scenario, name in _SCENARIOS:
        found = [rows.get((system, scenario), {}).get("measures", {}).get(name) for system in systems]
        lines.append([what, *("–" if one is None else _short(one["median"]) for one in found)])
    heads = [_label(next(row for (of, _), row in rows.items() if of == system), record) for system in systems]
    return _table(["", *heads], lines)


def _core(records: Records) -> str:
    """The goals of the core alone, and the measured values."""
    goals = records["core"]["goals"]
    return _table(
        ["", "measured", "goal", ""],
        ([goal["what"], _short(goal["measured"]), f"{goal['goal']:g}", goal["unit"]] for goal in goals),
    )


def _missed(records: Records) -> str:
    """Goals of any benchmark that the recorded run missed."""
    goals = ((name, goal) for name, record in sorted(records.items()) for goal in record.get("goals", ()))
    lines = [
        [goal["what"] + _kind(name), _short(goal["measured"]), _short(goal["goal"]), goal["unit"]]
        for name, goal in goals
        if goal["met"] is False
    ]
    return _table(["", "measured", "goal", ""], lines) if lines else "All of them are met."


def _kind(record: str) -> str:
    """Returns the kind of CPU that a record of servers names."""
    return f", {record.removeprefix('servers-')}" if record.startswith("servers-") else ""


def _hits(records: Records) -> str:
    """Hit rates in percent of tokens, for each policy of Mainstem and each peer."""
    rows = [row for row in records["index"]["hit_rates"] if row["policy"] not in REMOVED]
    columns = list(dict.fromkeys((row["workload"], row["capacity_tokens"]) for row in rows))
    found = {(row["label"], row["policy"], row["workload"], row["capacity_tokens"]): row for row in rows}
    lines = []
    for label, policy in dict.fromkeys((row["label"], row["policy"]) for row in rows):
        own = [found[label, policy, *column] for column in columns]
        if any("hit_rate" in row for row in own):
            cells = [f"{100 * row['hit_rate']:.2f}" if "hit_rate" in row else "–" for row in own]
            lines.append([f"{label}, {policy}", *cells])
    return _table(["%", *(f"{workload}, {slots:,}" for workload, slots in columns)], lines)


def _tiers(records: Records) -> str:
    """GB/s with pages of 16 tokens; in brackets the percentage of memcpy (host) or of the plain file (stores)."""
    rows = {(row["what"], row["dtype"]): row for row in records["tiers"]["rows"] if row["page_size"] == 16}
    dtypes = list(dict.fromkeys(dtype for _, dtype in rows))

    def cell(row: Row, way: str) -> str:
        peers = row.get("of", {})
        peer = peers.get("plain file, fdatasync", peers.get("memcpy"))
        return _short(row[way]["median"]) + (f" ({100 * peer[way]:.0f} %)" if peer else "")

    lines = []
    for what in dict.fromkeys(what for what, _ in rows):
        cells = [cell(rows[what, dtype], way) for dtype in dtypes for way in ("down", "up") if (what, dtype) in rows]
        lines.append([what, *cells])
    return _table(["GB/s", *(f"{dtype}, {way}" for dtype in dtypes for way in ("down", "up"))], lines)


def _faults(records: Records) -> str:
    """Time to the first token with each store, and without one."""
    lines = []
    for row in records["store-faults"]["rows"]:
        times = [f"{1000 * row[name]:.0f}" for name in ("without_p50_s", "p50_s", "without_p99_s", "p99_s")]
        ratios = [f"{row['ratio']:.2f}", f"{row['p99_ratio']:.2f}"]
        lines.append([row["store"], row["kind"], str(row["requests"]), *times, *ratios])
    heads = ["store", "prefix", "requests", "without, p50 ms", "with, p50 ms", "without, p99 ms", "with, p99 ms"]
    return _table([*heads, "median ratio", "p99 ratio"], lines)


def _ttft(records: Records) -> str:
    """Milliseconds to the first token, cold and warm, for each length of the prefix."""
    rows = {(row["dtype"], row["prefix"]): row for row in records["ttft"]["rows"]}
    prefixes = sorted({prefix for _, prefix in rows})

    def cell(row: Row) -> str:
        return f"{1000 * row['cold_s']:,.0f} / {1000 * row['warm_s']:,.0f} ({row['ratio']:.0f}x)"

    dtypes = dict.fromkeys(dtype for dtype, _ in rows)
    lines = [[f"{dtype}, cold / warm, ms", *(cell(rows[dtype, prefix]) for prefix in prefixes)] for dtype in dtypes]
    return _table(["prefix", *(f"{prefix:,}" for prefix in prefixes)], lines)


def _throughput(records: Records) -> str:
    """Requests per second with and without reuse of the prefix."""
    record = records["throughput"]
    rows = record["rows"]
    lines = [
        [f"{what}, requests a second", *(f"{row[key]['requests_per_s']:.2f}" for row in rows)]
        for what, key in (("with reuse", "reuse"), ("without", "no_reuse"))
    ]
    return _table([f"at once ({record['settings']['dtype']})", *(str(row["concurrent"]) for row in rows)], lines)


def _policies(records: Records) -> str:
    """The share of the gap to the optimum that each policy closes, with its worst and best cell; best policy first."""

    def cell(side: Row) -> list[str]:
        return [f"{side['gain']:+.2f}", f"{side['workload']}, {side['percent']} %" if side["gain"] else ""]

    known = [row for row in records["policies"]["rows"] if row["policy"] not in REMOVED]
    rows = sorted(known, key=lambda row: -row["closed"])
    lines = [
        [row["policy"], f"{row['closed']:.1f}", *cell(row["worst"]), *cell(row["best"]), f"{row['cost']:.1f}"]
        for row in rows
    ]
    return _table(["policy", "% of the gap", "worst", "at", "best", "at", "time"], lines)


def _agents(records: Records) -> str:
    """Hits in percent with true, wrong and no hints, and the mean time of a job with true ones and without."""
    if "agents" not in records:
        return "Not recorded yet."
    found: dict[tuple[str, float], dict[tuple[str, str], Row]] = {}
    for row in records["agents"]["rows"]:
        found.setdefault((row["workload"], row["percent"]), {})[row["policy"], row["way"]] = row

    def hits(rows: Mapping[tuple[str, str], Row], *names: tuple[str, str]) -> str:
        return " / ".join(f"{rows[name]['hit_rate']:.1f}" if name in rows else "–" for name in names)

    lines = []
    for (workload, percent), rows in found.items():
        jobs = [f"{rows[name]['job_s']:.0f}" for name in (("lru", ""), ("lru", "hints")) if name in rows]
        ways = ("", "hints", "shuffled", "inverted")
        cells = [hits(rows, *((policy, way) for way in ways)) for policy in ("lru", "gittins", "tail")]
        lines.append([workload, f"{percent:g}", *cells, hits(rows, ("optimum", "")), " / ".join(jobs)])
    kinds = "no hints / hints / shuffled / inverted"
    heads = [f"{policy}: {kinds}" for policy in ("lru", "gittins", "tail")]
    return _table(["workload", "%", *heads, "optimum", "job, s: lru / hints"], lines)


def _agents_tails(records: Records) -> str:
    """Quantiles of the time to the first token, as computed and as measured."""
    if "agents" not in records:
        return "Not recorded yet."
    ways = (("lru", ""), ("tail", ""), ("gittins", ""), ("lru", "hints"), ("tail", "hints"))
    bounds = (("optimum", ""), ("unlimited", ""))
    found: dict[tuple[str, float], dict[tuple[str, str], Row]] = {}
    for row in records["agents"]["rows"]:
        if "prefill_p90_s" in row:
            found.setdefault((row["workload"], row["percent"]), {})[row["policy"], row["way"]] = row

    if not found:
        return "Not recorded yet."

    def cell(rows: Mapping[tuple[str, str], Row], way: tuple[str, str], name: str) -> str:
        if way not in rows:
            return "–"
        return " / ".join(f"{rows[way][f'{name}_{quantile}_s']:.3g}" for quantile in ("p50", "p90", "p99"))

    lines = [
        [
            workload,
            f"{percent:g}",
            *(cell(rows, way, "prefill") for way in (*ways, *bounds)),
            cell(rows, ways[0], "first"),
        ]
        for (workload, percent), rows in found.items()
    ]
    names = [f"{policy}, hints" if way else policy for policy, way in (*ways, *bounds)]
    return _table(["workload", "%", *names, "lru, with its wait"], lines)


def _edits(records: Records) -> str:
    """Prompt tokens computed over those that are new, by what clients change and by the way they are served."""
    if "edits" not in records:
        return "Not recorded yet."
    rows = records["edits"]["rows"]
    found = {(row["edit"], row["room"], row["way"]): row for row in rows}
    ways = list(dict.fromkeys(row["way"] for row in rows))

    def cell(row: Row | None) -> str:
        if row is None:
            return "–"
        ahead = f" ({row['with_ahead']:.2f})" if row["ahead"] else ""
        return f"{row['ratio']:.2f}{ahead}, {row['first_p90_s']:.1f} s"

    places = dict.fromkeys((row["edit"], row["room"]) for row in rows)
    lines = ([*place, *(cell(found.get((*place, way))) for way in ways)] for place in places)
    return _table(["changed", "room in the cache", *ways], lines)


def _batch(records: Records) -> str:
    """Prompt tokens computed over the least, by what the cache holds and by the order, with eight requests at once."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in records["batch"]["rows"]:
        if row["running"] == 8:
            found.setdefault((row["batch"], f"{row['percent']:g}", f"{row['capacity']:,}"), {})[row["order"]] = row
    lines = ([*place, *(f"{row['ratio']:.3f}" for row in own.values())] for place, own in found.items())
    return _table(["batch", "% held", "tokens", *next(iter(found.values()))], lines)


def _batch_ends(records: Records) -> str:
    """Steps of short batches over the least, by order."""
    rows, orders = records["batch"]["ends"], records["batch"]["settings"]["orders"]
    lines = ([row["batch"], str(row["prompts"]), *(f"{row[name]:.2f}" for name in orders)] for row in rows)
    return _table(["batch", "prompts", *orders], lines)


def _plan(records: Records) -> str:
    """Predicted and measured processor time of prefills."""
    lines = (
        [
            f"{row['tokens']:,}",
            f"{row['past']:,}",
            f"{row['flops'] / 1e9:.1f}",
            f"{1000 * row['predicted_s']:,.0f} ms",
            f"{1000 * row['measured_s']:,.0f} ms",
            f"{row['ratio']:.2f}",
        ]
        for row in records["plan"]["rows"]
    )
    return _table(["tokens", "cached before", "GFLOPs", "predicted", "measured", "ratio"], lines)


def _attention(records: Records) -> str:
    """A step's attention, folded and request by request, with pages of 16 positions."""
    groups: dict[str, dict[str, Row]] = {}
    for row in records["attention"]["rows"]:
        if row["page_size"] == 16:
            groups.setdefault(row["shape"], {})[row["dtype"]] = row

    def cell(row: Row) -> list[str]:
        times = f"{1000 * row['folded_s']:,.1f}, {1000 * row['by_request_s']:,.1f} ms"
        return [times, f"{row['ratio']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f})"]

    lines = ([shape, *cell(rows["bfloat16"]), *cell(rows["float32"])] for shape, rows in groups.items())
    return _table(["requests", "bfloat16", "ratio", "float32", "ratio"], lines)


def _loading(records: Records) -> str:
    """The first token of stored prompts in virtual time, over the better of loading all and computing all."""
    rows = {(row["length"], row["bandwidth"], row["fault"]): row["of_better"] for row in records["loading"]["rows"]}
    lengths, rates, faults = (list(dict.fromkeys(part)) for part in zip(*rows, strict=True))
    lines = (
        [f"{length:,}", *(" / ".join(f"{rows[length, rate, fault]:.2f}" for fault in faults) for rate in rates)]
        for length in lengths
    )
    return _table(["tokens", *(f"{rate / 1e6:,.0f} MB/s" for rate in rates)], lines)


def _throttled(records: Records) -> str:
    """The first token of stored prompts on this CPU, from a store at the end of a link of a given rate."""
    if "throttled" not in records:
        return "Not recorded yet."
    lines = (
        [
            f"{row['rate'] / 1e6:g}",
            f"{row['length']:,}",
            *(
                f"{1000 * row[way]['p50_s']:,.0f}, {1000 * row[way]['p99_s']:,.0f}"
                for way in ("Mainstem", "load", "compute")
            ),
            f"{row['p50_of_better']:.2f}, {row['of_better']:.2f}",
        ]
        for row in records["throttled"]["rows"]
    )
    heads = ["MB/s", "tokens", "**Mainstem**, ms", "loading all, ms", "computing all, ms", "over the better"]
    return _table(heads, lines)


def _codec(records: Records) -> str:
    """What codecs of stored pages cost."""
    if "codec" not in records:
        return "Not recorded yet."
    lines = (
        [
            row["codec"],
            f"{row['ratio']:.3g}",
            f"{row['loss']:+.3%} ± {row['error']:.3%}",
            f"{row['tokens']:,}",
            f"{row['encode_mb_s']:.0f}, {row['decode_mb_s']:.0f}",
            f"{row['pays_below_mb_s']:.0f}",
        ]
        for row in records["codec"]["rows"]
    )
    heads = ["codec", "times smaller", "perplexity", "tokens", "encode, decode, MB/s", "pays below, MB/s"]
    return _table(heads, lines)


def _kv(records: Records) -> str:
    """What keys and values in 8 bits cost."""
    if "kv" not in records:
        return "Not recorded yet."
    exact, *_ = rows = records["kv"]["rows"]
    contexts = [name for name in exact if name.startswith("step_ms")]
    lines = (
        [
            row["kv_cache_dtype"],
            f"{exact['page_bytes'] / row['page_bytes']:.2f}",
            f"{row['loss']:+.3%} ± {row['error']:.3%}",
            *(f"{row[name]:.0f} ms ({row[name] / exact[name]:.2f})" for name in contexts),
        ]
        for row in rows
    )
    steps = (f"a step of {name.removeprefix('step_ms, ')}" for name in contexts)
    return _table(["kv-cache-dtype", "times as many pages", "perplexity", *steps], lines)


def _weights(records: Records) -> str:
    """What weights of 4 bits cost and give."""
    if "weights" not in records:
        return "Not recorded yet."
    record = records["weights"]
    own = record["settings"]["dtype"]
    lines = [
        [
            str(row["rows"]),
            ", ".join(f"{1000 * row[f'{name}_s']:.1f}" for name in ("pytorch", "own", "int4", "shifted")),
            f"{row['ratio']:.2f}, {row['shifted_ratio']:.2f}",
            f"{1000 * row['own_step_s']:.1f}, {1000 * row['int4_step_s']:.1f}",
            f"{row['step_ratio']:.2f}",
        ]
        for row in record["rows"]
    ]
    heads = [
        "rows",
        f"linear layers, ms: {own} by PyTorch, by the core; int4, int4 shifted",
        "ratios",
        f"step, ms: {own}, int4",
        "ratio",
    ]
    return _table(heads, lines)


def _models(records: Records) -> str:
    """The table of the models, as the benchmark itself writes it."""
    from bench.models import markdown  # imports the runtime

    return markdown(records["models"]["rows"]).rstrip()


def _servers(records: Records) -> str:
    """All tables of the benchmark of servers, which it also prints, for each kind of CPU."""
    from bench.servers import shown  # imports an HTTP client

    parts = []
    for name, record in sorted(records.items()):
        if name.startswith("servers-"):
            parts.append(f"Instructions `{name.removeprefix('servers-')}` ({record['machine']['cpu']}):")
            parts += [_table(heads, lines) for _, heads, lines in shown(record)]
    return "\n\n".join(parts) or "Not recorded yet."


def _bits(records: Records) -> str:
    """What changes in answers, by system."""
    rows = records["bits"]["rows"]
    values = {(row["system"], row["what"]): row["value"] for row in rows}
    systems, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("system", "what"))

    def cell(value: float | str) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    return _table(
        ["", *systems], ([what, *(cell(values.get((system, what), "–")) for system in systems)] for what in names)
    )


def _states(records: Records) -> str:
    """Hits in percent by rule, with few slots for states; the mean last."""
    rules = ("marks", "unmarked", "earlier", "marconi")
    rows = records["states"]["rows"]
    lines = [[row["workload"], f"{row['slots']:,}", *(f"{row[rule]:.1f}" for rule in rules)] for row in rows]
    means = [f"{sum(row[rule] for row in rows) / len(rows):.1f}" for rule in rules]
    return _table(["%", "slots", "marks", "no marks", "earlier rule", "Marconi"], [*lines, ["mean", "", *means]])


def _engines(records: Records) -> str:
    """Milliseconds and CPU milliseconds inside vLLM, for each store."""

    def cells(row: Row, name: str) -> list[str]:
        return [f"{1000 * row[key]:,.0f}" if key in row else "–" for key in (f"{name}_s", f"{name}_cpu_s")]

    lines = [
        [row["system"], *cells(row, "first"), *cells(row, "saved"), *cells(row, "loaded"), row["altered"] or "–"]
        for row in records["engines"]["rows"]
    ]
    times = ("first token of a new prompt", "until it is stored", "first token after a restart")
    heads = [head for time in times for head in (time, "CPU")]
    return _table(["ms", *heads, "prompts whose pages were altered"], lines)


def _runs(records: Records) -> str:
    """The date, the machine and the versions of each record."""
    lines = []
    for name, record in sorted(records.items()):
        machine, versions = record["machine"], record["versions"]
        on = f"{machine['cores']} cores of {machine['cpu']}, load {machine['load']} at the end"
        length = "quick" if record["quick"] else "full"
        if "seconds" in record:
            length += f", {record['seconds'] / 60:.0f} min"
        torch = versions.get("torch", "–")
        lines.append([name, record["date"][:10], (record["commit"] or "–")[:7], length, on, machine["python"], torch])
    return _table(["record", "date", "commit", "run", "machine", "Python", "PyTorch"], lines)


_IN_SHORT: Sequence[tuple[str, Sequence[str], str]] = (
    (
        "match of 131,072 tokens in C++, over comparing the bytes and copying the page ids; 1 / 64 / 1,024 nodes",
        [f"core: long match, page 16, {nodes} nodes, over its floor / median" for nodes in (1, 64, 1024)],
        ".2f",
    ),
    (
        "bytes per cached token, all of malloc; 4,096 / 256 / 64 tokens per node",
        [f"core: memory, nodes of {tokens} tokens, as malloc counts / median" for tokens in (4096, 256, 64)],
        ".1f",
    ),
    (
        "load from the host, relative to memcpy, pages of 16 tokens; float32 / bfloat16",
        [f"tiers: host, page_first / 16 / {dtype} / of / memcpy / up" for dtype in ("float32", "bfloat16")],
        ".2f",
    ),
    (
        "the same, pages of one token",
        [f"tiers: host, page_first / 1 / {dtype} / of / memcpy / up" for dtype in ("float32", "bfloat16")],
        ".2f",
    ),
    *(
        (
            f"first token with a {store} store over that without storage, {what};"
            " median of the ratios / ratio of the p99s / requests",
            [f"faults: {store} / {kind} / {field}" for field in ("ratio", "p99_ratio", "requests")],
            ".3g",
        )
        for store in ("dead", "hung")
        for kind, what in (("new", "new prompt"), ("on host", "prefix on the host"))
    ),
)


def _in_short(records: Records) -> str:
    """The summary of all records."""
    rows = ([what, " / ".join(format(number(one, records), form) for one in ones)] for what, ones, form in _IN_SHORT)
    return _table(["", ""], rows)


def _short(value: float) -> str:
    """Formats a number with about three digits."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _fleet(records: Records) -> str:
    """Routers before several caches: hits as a share of those of one cache, balance, time to the first token."""
    if "fleet" not in records:
        return "Not recorded yet."
    rows = {(row["trace"], row["router"], row["replicas"]): row for row in records["fleet"]["rows"]}
    sizes = sorted({replicas for _, _, replicas in rows})

    def cell(row: Row | None) -> str:  # a router may not have been measured at every size
        return "–" if row is None else f"{row['share']:.1f} / {row['balance']:.2f} / {row['first_s']:.1f}"

    lines = [
        [trace.removesuffix("_trace"), router, *(cell(rows.get((trace, router, size))) for size in sizes)]
        for trace, router in dict.fromkeys((trace, router) for trace, router, _ in rows)
    ]
    return _table(["trace", "router", *(f"{size} replicas" for size in sizes)], lines)


def _fleet_goals(records: Records) -> str:
    """The goals of routing, and the measured values."""
    if "fleet" not in records:
        return "Not recorded yet."
    goals = records["fleet"]["goals"]
    return _table(
        ["", "measured", "goal", ""],
        ([goal["what"], _short(goal["measured"]), f"{goal['goal']:g}", goal["unit"]] for goal in goals),
    )


def _fleet_first(records: Records) -> str:
    """The first token of a prompt that another server has computed, by where it comes from."""
    if "first" not in records.get("fleet", {}):
        return "Not recorded yet."

    def cells(row: Row) -> list[str]:
        spread = f"{_short(row['least_s'])} to {_short(row['most_s'])}"
        return [f"{row['tokens']:,}", row["way"], _short(row["p50_s"]), spread, _short(row["sooner"])]

    heads = ["tokens", "by", "first token, s, median", "least to most", "times sooner than computing"]
    return _table(heads, map(cells, records["fleet"]["first"]))


def _fleet_apart(records: Records) -> str:
    """Requests that arrive while others are answered, by how servers divide the work."""
    if "apart" not in records.get("fleet", {}):
        return "Not recorded yet."

    def cells(row: Row) -> list[str]:
        first = [_short(row[name]) for name in ("first_p50_s", "first_most_s")]
        return [row["way"], *first, *(_short(1000 * row[name]) for name in ("token_p50_s", "token_most_s"))]

    heads = ["", "first token, s, median", "most", "each further token, ms, median", "most"]
    return _table(heads, map(cells, records["fleet"]["apart"]))


_GPU: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "copies": (
        ("page", "page_size", "d"),
        ("layout", "layout", ""),
        ("way", "way", ""),
        ("of the link", "share", ".2f"),
    ),
    "decode": (
        ("requests", "requests", "d"),
        ("recorded, ms", "graph_s", "ms"),
        ("launched, ms", "launched_s", "ms"),
        ("transformers, ms", "transformers_s", "ms"),
        ("the bytes alone, ms", "floor_s", "ms"),
        ("transformers / recorded", "ratio", ".1f"),
    ),
    "attention": (
        ("step", "shape", ""),
        ("page", "page_size", "d"),
        ("Mainstem, ms", "graph_s", "ms"),
        ("PyTorch's flash attention, dense keys, ms", "torch_flash_graph_s", "ms"),
    ),
    "folding": (
        ("requests", "sharers", "d"),
        ("shared, ms", "shared_s", "ms"),
        ("copies, ms", "apart_s", "ms"),
        ("ratio", "ratio", ".2f"),
    ),
    "ttft": (
        ("tokens of a step", "chunk", ",d"),
        ("prefix", "prefix", ",d"),
        ("cold, ms", "cold_s", "ms"),
        ("warm, ms", "warm_s", "ms"),
        ("ratio", "ratio", ".1f"),
    ),
}
"""Columns of the tables of a GPU: head, field and format."""


def _gpu(part: str) -> Callable[[Records], str]:
    """Returns what makes the table of a part of the benchmark of a GPU."""

    def cell(value: Any, form: str) -> str:
        return "–" if value is None else f"{1000 * value:.2f}" if form == "ms" else format(value, form)

    def table(records: Records) -> str:
        heads, fields, forms = zip(*_GPU[part], strict=True)
        rows = records["gpu"][part]
        return _table(heads, ([cell(row.get(f), form) for f, form in zip(fields, forms, strict=True)] for row in rows))

    return table


TABLES: Mapping[str, Callable[[Records], str]] = {
    "requests": _requests,
    "requests, main peers": lambda records: _requests(records, MAIN_PEERS),
    "in short": _in_short,
    "scenarios": _scenarios,
    "core": _core,
    "missed goals": _missed,
    "hit rates": _hits,
    "tiers": _tiers,
    "store faults": _faults,
    "ttft": _ttft,
    "throughput": _throughput,
    "policies": _policies,
    "agents": _agents,
    "agents tails": _agents_tails,
    "edits": _edits,
    "batch": _batch,
    "batch ends": _batch_ends,
    "fleet": _fleet,
    "fleet goals": _fleet_goals,
    "fleet first": _fleet_first,
    "fleet apart": _fleet_apart,
    "plan": _plan,
    "attention": _attention,
    "loading": _loading,
    "throttled": _throttled,
    "codec": _codec,
    "kv": _kv,
    "weights": _weights,
    "models": _models,
    "servers": _servers,
    "bits": _bits,
    "states": _states,
    "engines": _engines,
    **{f"gpu {part}": _gpu(part) for part in _GPU},
    "records": _runs,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks or rewrites the pages; returns 1 if a page differs from the records and was not rewritten."""
    parser = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite the pages")
    options = parser.parse_args(arguments)
    records, status = load(), 0
    for name in PAGES:
        path = ROOT / name
        before = path.read_text()
        after = rewritten(before, records)
        if after != before:
            print(f"{name}: {'written' if options.write else 'differs from the records; --write rewrites it'}")
            status = int(not options.write)
        if options.write:
            path.write_text(after)
    return status


if __name__ == "__main__":
    sys.exit(main())
