"""Commands of functions: flags of the settings that they take, and the examples of their docstrings.

Needs cyclopts, so only commands import it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import cyclopts
from cyclopts import Parameter

from mainstem.settings.fields import Settings, declared
from mainstem.units import Unit

F = TypeVar("F", bound=Callable[..., object])

SEVERAL = Parameter(negative="", show_default=False)
"""A flag that may be repeated."""

Switch = Annotated[bool, Parameter(negative="")]
"""A flag that turns something on, such as --json."""


def group(name: str, doc: str | None, **options: Any) -> cyclopts.App:
    """Makes an app of several commands.

    Args:
        name: of the app.
        doc: a docstring, whose examples end the help.
        options: further arguments of `cyclopts.App`.
    """
    return cyclopts.App(name=name, help_epilogue=_examples(doc), help_format="plaintext", **options)


def alone(name: str) -> Callable[[Callable[..., object]], cyclopts.App]:
    """Makes an app of one function. Its settings are flags, and the examples of its docstring end its help."""

    def make(function: Callable[..., object]) -> cyclopts.App:
        app = group(name, function.__doc__)
        app.default(takes_settings(function))
        return app

    return make


def command(app: cyclopts.App, name: str | None = None) -> Callable[[F], F]:
    """Makes a function a command of an app, like `alone`; without a name it has that of the function."""

    def add(function: F) -> F:
        app.command(takes_settings(function), name=name, help_epilogue=_examples(function.__doc__))
        return function

    return add


def _examples(doc: str | None) -> str:
    """Returns the last section of a docstring, as it is laid out there."""
    return "Examples:" + inspect.cleandoc(doc or "").partition("Examples:")[2]


def takes_settings(command: F) -> F:
    """Makes a flag of each setting that a command takes, and of the settings in those.

    cyclopts reads annotations, so what it needs is added to those of the command and of the classes.
    """
    hints = get_type_hints(command, include_extras=True)
    command.__annotations__ = {name: _flattened(hint) if _has_settings(hint) else hint for name, hint in hints.items()}
    return command


def _flattened(settings: type[Settings]) -> Any:
    for kind in settings.__mro__:
        if _has_settings(kind):
            _annotate(kind)
    return Annotated[settings, Parameter(name="*")]


@cache
def _annotate(settings: type[Settings]) -> None:
    hints, own = get_type_hints(settings, include_extras=True), settings.__annotations__
    for field in fields(settings):
        if field.name in own:
            own[field.name] = _annotated(field, hints[field.name])


def _annotated(field: Field[Any], hint: Any) -> Any:
    rule = declared(field)
    if rule is None or not rule.flag:
        return _flattened(hint) if _has_settings(hint) else Annotated[hint, Parameter(parse=False)]
    if rule.unit is not None:
        hint = Annotated[Any, _written(rule.unit)]
    if field.default is None or field.default == ():
        hint = Annotated[hint, SEVERAL]
    if rule.alias is not None:
        hint = Annotated[hint, Parameter(alias=rule.alias)]
    return Annotated[hint, Parameter(env_var=f"MAINSTEM_{field.name.upper()}")] if rule.secret else hint


def _written(unit: Unit) -> Parameter:
    """Returns how a flag with a unit is read, and how its default is shown."""

    def read(_: object, tokens: Sequence[cyclopts.Token]) -> Any:
        return unit.parse((tokens[0].keyword or "").lstrip("-").replace("-", "_"), tokens[0].value)

    return Parameter(converter=read, n_tokens=1, accepts_keys=False, show_default=unit.show)


def _has_settings(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, Settings)
