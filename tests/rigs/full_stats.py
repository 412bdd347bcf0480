"""Statistics in which nothing is missing and every number is another, for tests of what shows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType, SimpleNamespace
from typing import Any, get_args, get_type_hints


def parts(kind: Any) -> dict[str, Any]:
    """Returns the types of what statistics of this type consist of; `*` stands for the keys of a mapping."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in fields(kind)}
    if get_args(kind):
        return {"*": get_args(kind)[1]}
    return {name: int for name, member in vars(kind).items() if isinstance(member, property)}  # counters of the core


def present(kind: Any) -> Any:
    """Returns the type without None."""
    return next(one for one in get_args(kind) if one is not NoneType) if NoneType in get_args(kind) else kind


def filled(kind: Any, count: Iterator[int]) -> Any:
    """Returns statistics of this type, complete, in which every number is another."""
    kind = present(kind)
    if kind in (int, float, bool):
        return kind(next(count))
    if get_args(kind):
        return {key: filled(parts(kind)["*"], count) for key in ("first", "second")}
    made = kind if is_dataclass(kind) else SimpleNamespace
    return made(**{name: filled(part, count) for name, part in parts(kind).items()})
