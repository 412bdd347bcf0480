"""Settings from a mapping, such as a file: a key for each flag, written as on the command line.

The settings in settings have their keys beside the others, as flags do. A secret that is not given may come from the
environment, as on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from mainstem.errors import BadArgument
from mainstem.settings.fields import Settings, declared

S = TypeVar("S", bound=Settings)


def read_settings(kind: type[S], given: object, at: str = "", environment: Mapping[str, str] | None = None) -> S:
    """Makes settings from a mapping.

    Args:
        kind: the class of the settings.
        given: values by the names of flags, with `_` for `-`; None: all defaults.
        at: what stands before the names in errors, such as `engine.`.
        environment: where secrets that are not given are looked up.

    Raises:
        BadArgument: it is no mapping, a name is unknown, or a value is outside its range; the error names it.
    """
    if not isinstance(given if given is not None else {}, Mapping):
        raise BadArgument(at.rstrip(".") or "settings", given, "a mapping of names and values")
    left = {str(name).replace("-", "_"): value for name, value in dict(given or {}).items()}  # type: ignore[call-overload]
    known = sorted(names_of(kind))
    unknown = next((name for name in left if name not in known), None)
    if unknown is not None:
        near = get_close_matches(unknown, known, 1)
        raise BadArgument(f"{at}{unknown}", "(not a setting)", near[0] if near else f"one of {', '.join(known)}")
    try:
        return _made(kind, left, environment or {})
    except BadArgument as error:
        raise BadArgument(f"{at}{error.name}", error.value, error.allowed) from error


def names_of(kind: type[Settings]) -> set[str]:
    """Returns the names that a mapping of these settings may have."""
    hints, names = get_type_hints(kind), set()
    for field in fields(kind):
        rule = declared(field)
        if rule is None:
            names |= names_of(hints[field.name])
        elif rule.flag:
            names.add(field.name)
    return names


def _made(kind: type[S], given: Mapping[str, object], environment: Mapping[str, str]) -> S:
    hints, values = get_type_hints(kind), {}
    for field in fields(kind):
        rule, hint = declared(field), hints[field.name]
        if rule is None:
            values[field.name] = _made(hint, given, environment)
        elif field.name in given:
            values[field.name] = _value(field, hint, given[field.name])
        elif rule.secret and (text := environment.get(f"MAINSTEM_{field.name.upper()}")):
            values[field.name] = _value(field, hint, text.split() if get_origin(hint) is tuple else text)
    return kind(**values)


def _value(field: Field[Any], hint: object, value: object) -> object:
    """Converts a value to the type of its setting; the setting refuses a value that cannot be converted."""
    rule = declared(field)
    if rule is not None and rule.unit is not None and isinstance(value, str):
        return rule.unit.parse(field.name, value)
    if isinstance(value, str) and Path in (hint, *get_args(hint)):
        return Path(value)
    return tuple(value) if isinstance(value, list) else value
