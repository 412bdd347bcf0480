"""Numbers by their places in the records, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Records = Mapping[str, Mapping[str, Any]]
"""Each recorded file, by the name of its benchmark."""


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


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def short(value: float) -> str:
    """Formats a number with about three digits."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
