"""Tables of all records together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench.recorded.numbers import Records, number, short, table


def _missed(records: Records) -> str:
    """Goals of any benchmark that the recorded run missed."""
    goals = ((name, goal) for name, record in sorted(records.items()) for goal in record.get("goals", ()))
    lines = [
        [goal["what"] + _kind(name), short(goal["measured"]), short(goal["goal"]), goal["unit"]]
        for name, goal in goals
        if goal["met"] is False
    ]
    return table(["", "measured", "goal", ""], lines) if lines else "All of them are met."


def _kind(record: str) -> str:
    """Returns the kind of CPU that a record of servers names."""
    return f", {record.removeprefix('servers-')}" if record.startswith("servers-") else ""


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
    return table(["record", "date", "commit", "run", "machine", "Python", "PyTorch"], lines)


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
    return table(["", ""], rows)


RECORDS: Mapping[str, Callable[[Records], str]] = {
    "in short": _in_short,
    "missed goals": _missed,
    "records": _runs,
}
