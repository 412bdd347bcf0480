"""Goals of the index, and whether the rows of a run meet them. A goal is one row of `GOALS`; add yours there.

Other benchmarks, such as that of the core in C++, append rows in the form of `judge` to `report.more["goals"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PEER = "sglang-rust"
LEASES, TREE = "mainstem", "mainstem-tree"
FACES = {"lease": LEASES, "Tree.match": TREE}


class Rows:
    """The rows of a run, indexed by system and page size or scenario."""

    def __init__(self, requests: Iterable[dict[str, Any]], scenarios: Iterable[dict[str, Any]]) -> None:
        self._requests = {(row["system"], row["page_size"]): row for row in requests}
        self._scenarios = {(row["system"], row["scenario"]): row for row in scenarios}

    def over(self, system: str, page_size: int, mode: str) -> float | None:
        """Returns Mainstem's time per request over a system's, in the same rounds; None: one was not measured."""
        row = self._requests.get((system, page_size), {})
        return 1 / row[mode]["ratio"] if mode in row else None

    def measure(self, system: str, scenario: str, name: str) -> float | None:
        """Returns the median of a measure; None: it was not measured."""
        value = self._scenarios.get((system, scenario), {}).get("measures", {}).get(name)
        return value["median"] if value else None


@dataclass(frozen=True, slots=True)
class Goal:
    """The limit of a measure.

    Attributes:
        measure: finds the measure among the rows; None: it was not measured.
    """

    what: str
    at_most: float
    unit: str
    measure: Callable[[Rows], float | None]


def _request(what: str, limit: float, system: str, page_size: int, mode: str) -> Goal:
    return Goal(f"{what}, page {page_size}", limit, "ratio", lambda rows: rows.over(system, page_size, mode))


def _requests() -> Iterable[Goal]:
    for what, limit, system, mode in (
        ("a request of the chats, over SGLang's Rust core", 1 / 12, PEER, "prepared"),
        ("a request of the chats, over plain Python", 0.35, "python", "prepared"),
        ("the same from lists, over SGLang's Rust core", 1 / 5, PEER, "lists"),
    ):
        for page_size in (1, 16, 64):
            yield _request(what, limit, system, page_size, mode)


def _scenario(what: str, limit: float, unit: str, scenario: str, name: str, system: str = LEASES) -> Goal:
    return Goal(what, limit, unit, lambda rows: rows.measure(system, scenario, name))


def _look_ups() -> Iterable[Goal]:
    for face, system in FACES.items():
        for nodes in ("1 node", "64 nodes"):
            name = f"page 16, {nodes}, µs"
            yield _scenario(f"look-up of a long prompt in {nodes}, {face}", 15, "µs", "long", name, system)
        yield _scenario(f"look-up beside a busy thread, p99, {face}", 5, "µs", "busy", "p99 µs", system)


def _changes() -> Iterable[Goal]:
    yield _scenario("a chunk far behind over one near the beginning", 1.5, "ratio", "chunks", "far / near")
    yield _scenario("16 decoded tokens far behind", 1, "µs", "decode", "far, µs")
    for state in ("all free", "half locked"):
        for part, limit in (("p50", 1), ("p99", 3)):
            name = f"{state}, {part} µs"
            yield _scenario(f"eviction of a page, leaves {state}, {part}", limit, "µs", "leaves", name)
    for node, limit in ((4096, 5), (256, 8)):
        name = "with its pool, bytes a token"
        yield _scenario(f"memory, nodes of {node} tokens, all included", limit, "bytes a token", f"memory-{node}", name)
    name = "held / the same without the rest"
    yield _scenario("memory behind a split and an eviction, over what lives", 2, "ratio", "split", name)


GOALS: Sequence[Goal] = (*_requests(), *_look_ups(), *_changes())


def judge(rows: Rows, goals: Iterable[Goal] = GOALS) -> list[dict[str, Any]]:
    """Returns a row for each goal: what, goal, unit, measured, met; the last two are None if it was not measured."""
    judged = []
    for goal in goals:
        measured = goal.measure(rows)
        met = None if measured is None else measured <= goal.at_most
        judged.append({"what": goal.what, "goal": goal.at_most, "unit": goal.unit, "measured": measured, "met": met})
    return judged
