"""Merges the answers of all replicas into one, for routes that concern every replica."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import NamedTuple, TypeAlias

from mainstem.fleet.front.asking import Head

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?( .*)")
_COMMENT = re.compile(r"# (?:HELP|TYPE) (\S+)")
_JSON = ((b"content-type", b"application/json"),)


class Whole(NamedTuple):
    """An answer in full."""

    head: Head
    body: bytes


Merge: TypeAlias = Callable[[Sequence[Whole]], Whole]
"""Makes one answer of several, of which there is at least one."""


def best(answers: Sequence[Whole]) -> Whole:
    """Returns the first that did not fail, else the first."""
    return next((answer for answer in answers if answer.head.status < 400), answers[0])


def _unless_failed(merge: Merge) -> Merge:
    """Returns a merge that gives the first answer that failed, if there is one."""

    @wraps(merge)
    def merged(answers: Sequence[Whole]) -> Whole:
        return next((answer for answer in answers if answer.head.status >= 400), None) or merge(answers)

    return merged


@_unless_failed
def alike(answers: Sequence[Whole]) -> Whole:
    """Returns the first."""
    return answers[0]


@_unless_failed
def summed(answers: Sequence[Whole]) -> Whole:
    """Returns the sums of the numbers."""
    bodies = [json.loads(answer.body) for answer in answers]
    return _as_json(answers[0], {name: sum(body[name] for body in bodies) for name in bodies[0]})


@_unless_failed
def lists(answers: Sequence[Whole]) -> Whole:
    """Returns the entries of all lists in one, the oldest first."""
    bodies = [json.loads(answer.body) for answer in answers]
    entries = sorted((entry for body in bodies for entry in body["data"]), key=lambda entry: int(entry["created"]))
    ends = {f"{end}_id": entries[i]["id"] if entries else None for end, i in (("first", 0), ("last", -1))}
    more = any(body["has_more"] for body in bodies)
    return _as_json(answers[0], {"object": "list", "data": entries, **ends, "has_more": more})


@_unless_failed
def by_replica(answers: Sequence[Whole]) -> Whole:
    """Returns all bodies by the names of the replicas."""
    return _as_json(answers[0], {"replicas": {answer.head.replica: json.loads(answer.body) for answer in answers}})


@_unless_failed
def texts(answers: Sequence[Whole]) -> Whole:
    """Returns all texts below the names of the replicas."""
    parts = [f"replica {answer.head.replica}:\n{answer.body.decode()}".rstrip("\n") + "\n" for answer in answers]
    return Whole(answers[0].head, "\n".join(parts).encode())


@_unless_failed
def metrics(answers: Sequence[Whole]) -> Whole:
    """Returns the metrics of all replicas, each sample with the label `replica`."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for answer in answers:
        family = families.setdefault("", ([], []))
        for line in answer.body.decode().splitlines():
            if comment := _COMMENT.match(line):
                family = families.setdefault(comment[1], ([], []))
                if line not in family[0]:
                    family[0].append(line)
            elif sample := _SAMPLE.fullmatch(line):
                family[1].append(_labelled(sample[1], sample[2], sample[3], answer.head.replica))
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    return Whole(answers[0].head, ("\n".join(lines) + "\n").encode())


def _labelled(name: str, labels: str | None, rest: str, replica: str) -> str:
    return f'{name}{{{f"{labels}," if labels else ""}replica="{replica}"}}{rest}'


def _as_json(first: Whole, value: object) -> Whole:
    return Whole(Head(first.head.status, _JSON, first.head.replica), json.dumps(value).encode())


ROUTES: Mapping[tuple[str, str], Merge] = {
    ("POST", "/v1/load_lora_adapter"): alike,
    ("POST", "/v1/unload_lora_adapter"): alike,
    ("POST", "/v1/update_weights"): alike,
    ("POST", "/v1/cache/flush"): summed,
    ("POST", "/v1/cache/remove"): summed,
    ("POST", "/v1/cache/hints"): best,
    ("GET", "/v1/chat/completions"): lists,
    ("GET", "/v1/cache/stats"): by_replica,
    ("GET", "/v1/cache/tenants"): by_replica,
    ("GET", "/v1/cache/tree"): texts,
    ("GET", "/metrics"): metrics,
}
"""The routes that all replicas answer, and how their answers become one."""
