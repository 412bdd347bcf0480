"""Flags of a command from the settings that it takes. Needs cyclopts, so only commands import it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import cyclopts
from cyclopts import Parameter

from mainstem.settings.fields import Declared, Settings, declared
from mainstem.units import Unit

F = TypeVar("F", bound=Callable[..., object])

SEVERAL = Parameter(negative="", show_default=False)
"""A flag that may be repeated."""


def takes_settings(command: F) -> F:
    """Makes a flag of each setting that a command takes, and of the settings in those."""
    hints = get_type_hints(command, include_extras=True)
    command.__annotations__ = {name: _flags(hint) if _has_settings(hint) else hint for name, hint in hints.items()}
    return command


def _written(unit: Unit) -> Parameter:
    """Returns how a flag with a unit is read, and how its default is shown."""

    def read(_: object, tokens: Sequence[cyclopts.Token]) -> Any:
        return unit.parse((tokens[0].keyword or "").lstrip("-").replace("-", "_"), tokens[0].value)

    def show(default: Any) -> str | bool:
        return unit.show(default)

    return Parameter(converter=read, n_tokens=1, accepts_keys=False, show_default=show)


@cache
def _flags(settings: type[Settings]) -> type[Settings]:
    """Returns a class with annotations for cyclopts that makes instances of the class itself."""
    hints = get_type_hints(settings, include_extras=True)
    content = {
        "__annotations__": {field.name: _annotated(field, hints[field.name]) for field in fields(settings)},
        "__module__": settings.__module__,
        "__new__": lambda _, **values: settings(**values),
    }
    return Parameter(name="*")(type(settings.__name__, (settings,), content))


def _annotated(field: Field[Any], hint: Any) -> Any:
    rule = declared(field)
    if rule is None or not rule.flag:
        return _flags(hint) if _has_settings(hint) else Annotated[hint, Parameter(parse=False)]
    if rule.unit is not None:  # the text is all that cyclopts sees
        hint = Annotated[str, _written(rule.unit)]
    if field.default is None or field.default == ():
        hint = Annotated[hint, SEVERAL]
    return Annotated[hint, _environment(field.name, rule)]


def _environment(name: str, rule: Declared) -> Parameter:
    return Parameter(env_var=f"MAINSTEM_{name.upper()}") if rule.secret else Parameter()


def _has_settings(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, Settings) and is_dataclass(hint)
