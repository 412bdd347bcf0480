"""How a setting is declared: a field of a frozen dataclass with a default, a range, and how it is written as text.

    @dataclass(frozen=True)
    class Limits(Settings):
        \"\"\"The bounds of a step.

        Args:
            max_running: Maximum number of requests that run at the same time; 1 or more.
        \"\"\"

        max_running: int = setting(16, integer(1))

A part of the program takes the dataclass, and so does the command line (`mainstem.settings.flags`): the flag is the
name of the field, and its help is the docstring. Knows no command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple, TypeVar, get_args

from mainstem.errors import BadArgument
from mainstem.units import Unit

T = TypeVar("T")

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
_NOT_SHOWN = "(not shown)"


class Range(NamedTuple):
    """The values that a setting may have, in words and as a test. None is also allowed if it is the default."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Declared:
    """The rules that `setting` adds to a field.

    Args:
        range: what it may be.
        unit: how it is written as text; None: as its type is.
        flag: whether the command line sets it.
        secret: whether it is never shown. The environment may set it, as MAINSTEM_ and its name in capitals.
        alias: the flag that other servers have for it; it is taken, too.
    """

    range: Range
    unit: Unit | None
    flag: bool
    secret: bool
    alias: str | None


ANY = Range("anything", lambda value: True)
"""The range of a setting that other code checks."""


def setting(
    default: T,
    range_: Range = ANY,
    *,
    unit: Unit | None = None,
    flag: bool = True,
    secret: bool = False,
    alias: str | None = None,
) -> T:
    """Declares a field of a `Settings`. The arguments are those of `Declared`."""
    rule = Declared(range_, unit, flag, secret, alias)
    made: T = field(default=default, repr=not secret, metadata={"setting": rule})
    return made


def declared(own: Field[Any]) -> Declared | None:
    """Returns the rules that `setting` added to a field; None: `setting` did not make it."""
    return own.metadata.get("setting")


@dataclass(frozen=True)
class Settings:
    """Checks every field once, when it is made.

    Raises:
        BadArgument: a value is outside its range; it names the field and the range.
    """

    def __post_init__(self) -> None:
        """Checks every field. A class that overrides it calls it first."""
        for own in fields(self):
            rule, value = declared(own), getattr(self, own.name)
            if rule is None or (value is None and own.default is None) or rule.range.holds(value):
                continue
            raise BadArgument(own.name, _NOT_SHOWN if rule.secret else value, rule.range.words)

    def refuse(self, without: str) -> None:
        """Refuses every flag that is not at its default, because it would do nothing.

        Raises:
            BadArgument: names the first such flag. Secrets are allowed: the environment may set them for all programs.
        """
        for own in fields(self):
            rule, value = declared(own), getattr(self, own.name)
            if rule is not None and rule.flag and not rule.secret and value != own.default:
                raise BadArgument(own.name, value, f"left out without {without}")


# ---------------------------------------------------------------- ranges


def integer(low: int, high: int = INT32_MAX) -> Range:
    """An int in [low, high]."""
    return Range(f"an integer from {low} to {high}", lambda value: _is(value, int) and low <= value <= high)


def number(low: float, high: float = math.inf, *, above: bool = False, below: bool = False) -> Range:
    """A finite number in [low, high]; `above` leaves out low, `below` leaves out high."""
    first = f"above {low:g}" if above else f"{low:g} or more"
    last = "" if high == math.inf else f" and below {high:g}" if below else f", up to {high:g}"

    def holds(value: object) -> bool:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            return False
        return (low < value if above else low <= value) and (value < high if below else value <= high)

    return Range(f"a number, {first}{last}", holds)


def seconds(*, above: bool = False) -> Range:
    """A time in seconds, 0 or more, that a program can wait."""
    return Range("a number of seconds, " + ("above 0" if above else "0 or more"), number(0, 1e9, above=above).holds)


def one_of(literal: object) -> Range:
    """One of the values of a `Literal`."""
    values = get_args(literal)
    return Range("one of " + ", ".join(values), lambda value: value in values)


def instance(type_: type, words: str) -> Range:
    """Any value of a type."""
    return Range(words, lambda value: isinstance(value, type_))


def switch() -> Range:
    """True or False."""
    return instance(bool, "True or False")


def secret_bytes(least: int) -> Range:
    """A secret of at least `least` bytes."""
    return Range(f"at least {least} bytes", lambda value: isinstance(value, bytes) and len(value) >= least)


def texts(words: str, holds: Callable[[str], bool]) -> Range:
    """A tuple of strings for each of which `holds`."""
    return Range(
        words,
        lambda value: isinstance(value, tuple) and all(isinstance(text, str) and holds(text) for text in value),
    )


def _is(value: object, type_: type) -> bool:
    return isinstance(value, type_) and not isinstance(value, bool)


SECRET = Unit(lambda _, text: text.encode("utf-8", "surrogateescape"))
"""A secret as text; arguments that are no UTF-8 keep their bytes."""
