"""Tables of the tree, the tiers, the policies, and of batches and agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.recorded.numbers import Records, Row, short, table
from mainstem.cache.policies import REMOVED

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
    return table(["µs a request", *(f"page {size}" for size in sizes), "page 16, from lists"], lines)


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
        lines.append([what, *("–" if one is None else short(one["median"]) for one in found)])
    heads = [_label(next(row for (of, _), row in rows.items() if of == system), record) for system in systems]
    return table(["", *heads], lines)


def _core(records: Records) -> str:
    """The goals of the core alone, and the measured values."""
    goals = records["core"]["goals"]
    return table(
        ["", "measured", "goal", ""],
        ([goal["what"], short(goal["measured"]), f"{goal['goal']:g}", goal["unit"]] for goal in goals),
    )


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
    return table(["%", *(f"{workload}, {slots:,}" for workload, slots in columns)], lines)


def _tiers(records: Records) -> str:
    """GB/s with pages of 16 tokens; in brackets the percentage of memcpy (host) or of the plain file (stores)."""
    rows = {(row["what"], row["dtype"]): row for row in records["tiers"]["rows"] if row["page_size"] == 16}
    dtypes = list(dict.fromkeys(dtype for _, dtype in rows))

    def cell(row: Row, way: str) -> str:
        peers = row.get("of", {})
        peer = peers.get("plain file, fdatasync", peers.get("memcpy"))
        return short(row[way]["median"]) + (f" ({100 * peer[way]:.0f} %)" if peer else "")

    lines = []
    for what in dict.fromkeys(what for what, _ in rows):
        cells = [cell(rows[what, dtype], way) for dtype in dtypes for way in ("down", "up") if (what, dtype) in rows]
        lines.append([what, *cells])
    return table(["GB/s", *(f"{dtype}, {way}" for dtype in dtypes for way in ("down", "up"))], lines)


def _faults(records: Records) -> str:
    """Time to the first token with each store, and without one."""
    lines = []
    for row in records["store-faults"]["rows"]:
        times = [f"{1000 * row[name]:.0f}" for name in ("without_p50_s", "p50_s", "without_p99_s", "p99_s")]
        ratios = [f"{row['ratio']:.2f}", f"{row['p99_ratio']:.2f}"]
        lines.append([row["store"], row["kind"], str(row["requests"]), *times, *ratios])
    heads = ["store", "prefix", "requests", "without, p50 ms", "with, p50 ms", "without, p99 ms", "with, p99 ms"]
    return table([*heads, "median ratio", "p99 ratio"], lines)


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
    return table(["policy", "% of the gap", "worst", "at", "best", "at", "time"], lines)


def _agents(records: Records) -> str:
    """Hits in percent with true, wrong and no hints, and the mean time of a job with true ones and without."""
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
    return table(["workload", "%", *heads, "optimum", "job, s: lru / hints"], lines)


def _agents_tails(records: Records) -> str:
    """Quantiles of the time to the first token, as computed and as measured."""
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
    return table(["workload", "%", *names, "lru, with its wait"], lines)


def _edits(records: Records) -> str:
    """Prompt tokens computed over those that are new, by what clients change and by the way they are served."""
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
    return table(["changed", "room in the cache", *ways], lines)


def _batch(records: Records) -> str:
    """Prompt tokens computed over the least, by what the cache holds and by the order, with eight requests at once."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in records["batch"]["rows"]:
        if row["running"] == 8:
            found.setdefault((row["batch"], f"{row['percent']:g}", f"{row['capacity']:,}"), {})[row["order"]] = row
    lines = ([*place, *(f"{row['ratio']:.3f}" for row in own.values())] for place, own in found.items())
    return table(["batch", "% held", "tokens", *next(iter(found.values()))], lines)


def _batch_runs(records: Records) -> str:
    """Seconds and computed tokens of a whole batch, by how it was run."""
    rows = records["batch-runs"]["rows"]
    ours_s = rows[0]["seconds"]
    lines = (
        [f"`{row['way']}`", f"{row['requests']:,}", f"{row['seconds']:.0f}", f"{row['seconds'] / ours_s:.1f}",
         f"{row['prompt_tokens']:,}", f"{row['computed']:,}", f"{row['over_least']:.2f}"]
        for row in rows
    )  # fmt: skip
    return table(["", "requests", "s", "times", "prompt tokens", "computed", "over the least"], lines)


def _batch_serving(records: Records) -> str:
    """First tokens of users, beside a batch and without one."""
    [row] = records["batch-serving"]["rows"]
    names = ("p50", "p90", "p99")
    lines = (
        [what, *(f"{row[f'{name}_{key}']:{form}}" for name in names)]
        for what, key, form in (
            ("without, s", "alone_s", ".3f"),
            ("beside, s", "beside_s", ".3f"),
            ("ratio", "ratio", ".2f"),
        )
    )
    return table(["first tokens", *names], lines)


def _batch_ends(records: Records) -> str:
    """Steps of short batches over the least, by order."""
    rows, orders = records["batch"]["ends"], records["batch"]["settings"]["orders"]
    lines = ([row["batch"], str(row["prompts"]), *(f"{row[name]:.2f}" for name in orders)] for row in rows)
    return table(["batch", "prompts", *orders], lines)


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
    return table(["tokens", "cached before", "GFLOPs", "predicted", "measured", "ratio"], lines)


def _states(records: Records) -> str:
    """Hits in percent by rule, with few slots for states; the mean last."""
    rules = ("marks", "unmarked", "earlier", "marconi")
    rows = records["states"]["rows"]
    lines = [[row["workload"], f"{row['slots']:,}", *(f"{row[rule]:.1f}" for rule in rules)] for row in rows]
    means = [f"{sum(row[rule] for row in rows) / len(rows):.1f}" for rule in rules]
    return table(["%", "slots", "marks", "no marks", "earlier rule", "Marconi"], [*lines, ["mean", "", *means]])


def _codec(records: Records) -> str:
    """What codecs of stored pages cost."""
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
    return table(heads, lines)


CACHES: Mapping[str, Callable[[Records], str]] = {
    "requests": _requests,
    "requests, main peers": lambda records: _requests(records, MAIN_PEERS),
    "scenarios": _scenarios,
    "core": _core,
    "hit rates": _hits,
    "tiers": _tiers,
    "store faults": _faults,
    "policies": _policies,
    "agents": _agents,
    "agents tails": _agents_tails,
    "edits": _edits,
    "batch": _batch,
    "batch ends": _batch_ends,
    "batch runs": _batch_runs,
    "batch serving": _batch_serving,
    "plan": _plan,
    "codec": _codec,
    "states": _states,
}
