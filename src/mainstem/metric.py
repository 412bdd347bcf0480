"""`Metric`: the row that shows a number to Prometheus, beside the number.

A class of statistics has its rows in `METRICS`. Statistics that it has as a field have theirs in their own class. So a
counter, its row and its documentation change together, and no list of all metrics is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of a class of statistics.

    Args:
        name: without the `_total` that counters have in Prometheus.
        text: its description.
        values: where its value is in the statistics, as a path; with labels, the path for each combination of their
            values. A `*` in both stands for every key of a mapping.
        labels: the names of its labels.
        kind: a counter only grows, a gauge goes up and down.
    """

    name: str
    text: str
    values: str | Mapping[tuple[str, ...], str]
    labels: tuple[str, ...] = ()
    kind: Literal["counter", "gauge"] = "counter"

    @property
    def paths(self) -> Mapping[tuple[str, ...], str]:
        """The paths of its values, by the values of its labels."""
        return {(): self.values} if isinstance(self.values, str) else self.values


gauge = partial(Metric, kind="gauge")


def each(path: str, *names: str) -> dict[tuple[str, ...], str]:
    """Returns a path for each of the values of a label, which it contains."""
    return {(name,): path.format(name) for name in names}


@cache
def rows(kind: Any) -> tuple[tuple[str, Metric], ...]:
    """Returns the rows of a class of statistics and of those in its fields, each with the path of its statistics."""
    return tuple(_rows(kind, ""))


def _rows(kind: Any, path: str) -> Iterator[tuple[str, Metric]]:
    kind = next((one for one in get_args(kind) if NoneType in get_args(kind) and one is not NoneType), kind)
    for row in getattr(kind, "METRICS", ()):
        yield path, row
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        for field in fields(kind):
            yield from _rows(hints[field.name], f"{path}.{field.name}".lstrip("."))
