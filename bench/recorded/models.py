"""Tables of models, servers and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.recorded.numbers import Records, Row, table


def _ttft(records: Records) -> str:
    """Milliseconds to the first token, cold and warm, for each length of the prefix."""
    rows = {(row["dtype"], row["prefix"]): row for row in records["ttft"]["rows"]}
    prefixes = sorted({prefix for _, prefix in rows})

    def cell(row: Row) -> str:
        return f"{1000 * row['cold_s']:,.0f} / {1000 * row['warm_s']:,.0f} ({row['ratio']:.0f}x)"

    dtypes = dict.fromkeys(dtype for dtype, _ in rows)
    lines = [[f"{dtype}, cold / warm, ms", *(cell(rows[dtype, prefix]) for prefix in prefixes)] for dtype in dtypes]
    return table(["prefix", *(f"{prefix:,}" for prefix in prefixes)], lines)


def _throughput(records: Records) -> str:
    """Requests per second with and without reuse of the prefix."""
    record = records["throughput"]
    rows = record["rows"]
    lines = [
        [f"{what}, requests a second", *(f"{row[key]['requests_per_s']:.2f}" for row in rows)]
        for what, key in (("with reuse", "reuse"), ("without", "no_reuse"))
    ]
    return table([f"at once ({record['settings']['dtype']})", *(str(row["concurrent"]) for row in rows)], lines)


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
    return table(["requests", "bfloat16", "ratio", "float32", "ratio"], lines)


def _loading(records: Records) -> str:
    """The first token of stored prompts in virtual time, over the better of loading all and computing all."""
    rows = {(row["length"], row["bandwidth"], row["fault"]): row["of_better"] for row in records["loading"]["rows"]}
    lengths, rates, faults = (list(dict.fromkeys(part)) for part in zip(*rows, strict=True))
    lines = (
        [f"{length:,}", *(" / ".join(f"{rows[length, rate, fault]:.2f}" for fault in faults) for rate in rates)]
        for length in lengths
    )
    return table(["tokens", *(f"{rate / 1e6:,.0f} MB/s" for rate in rates)], lines)


def _throttled(records: Records) -> str:
    """The first token of stored prompts on this CPU, from a store at the end of a link of a given rate."""
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
    return table(heads, lines)


def _kv(records: Records) -> str:
    """What keys and values in 8 bits cost."""
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
    return table(["kv-cache-dtype", "times as many pages", "perplexity", *steps], lines)


def _weights(records: Records) -> str:
    """What weights of 4 bits cost and give."""
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
    return table(heads, lines)


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
            parts += [table(heads, lines) for _, heads, lines in shown(record)]
    return "\n\n".join(parts) or "Not recorded yet."


def _bits(records: Records) -> str:
    """What changes in answers, by system."""
    rows = records["bits"]["rows"]
    values = {(row["system"], row["what"]): row["value"] for row in rows}
    systems, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("system", "what"))

    def cell(value: float | str) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    return table(
        ["", *systems], ([what, *(cell(values.get((system, what), "–")) for system in systems)] for what in names)
    )


def _scores(records: Records) -> str:
    """What a question takes, with kept scores and without."""
    rows = records["scores"]["rows"]
    kept = rows[0]["question_s"]
    lines = (
        [row["part"], f"{row['questions']:,}", f"{row['question_s']:.2f}", f"{row['question_s'] / kept:.1f}",
         f"{row['cached_tokens'] / row['prompt_tokens']:.0%}" if "prompt_tokens" in row else "",
         f"{row['difference']:.0e}" if "difference" in row else ""]
        for row in rows
    )  # fmt: skip
    return table(["", "questions", "s a question", "times", "found", "difference, nats"], lines)


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
    return table(["ms", *heads, "prompts whose pages were altered"], lines)


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

    def of_part(records: Records) -> str:
        heads, fields, forms = zip(*_GPU[part], strict=True)
        rows = records["gpu"][part]
        return table(heads, ([cell(row.get(f), form) for f, form in zip(fields, forms, strict=True)] for row in rows))

    return of_part


MODELS: Mapping[str, Callable[[Records], str]] = {
    "ttft": _ttft,
    "throughput": _throughput,
    "attention": _attention,
    "loading": _loading,
    "throttled": _throttled,
    "kv": _kv,
    "weights": _weights,
    "models": _models,
    "servers": _servers,
    "bits": _bits,
    "scores": _scores,
    "engines": _engines,
    **{f"gpu {part}": _gpu(part) for part in _GPU},
}
