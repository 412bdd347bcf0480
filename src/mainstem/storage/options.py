"""The options of a spec, for `Backend.from_spec`: which a back end has, and what makes an argument of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from mainstem.errors import BadArgument, one_of


def check_options(options: Mapping[str, str], allowed: Iterable[str]) -> None:
    """Rejects unknown options.

    Raises:
        BadArgument: an option is unknown; the message names the allowed ones.
    """
    allowed = tuple(allowed)
    for name in options:
        if name not in allowed:
            raise BadArgument("storage option", name, one_of(name, allowed) if allowed else "none")


Readers: TypeAlias = Mapping[str, tuple[str, Callable[[str, str], Any]]]
"""The options of a spec: for each the argument of the class, and what makes its value of the option's name and text."""


def read_options(options: Mapping[str, str], readers: Readers) -> dict[str, Any]:
    """Returns the arguments of a class that the options of a spec are.

    Raises:
        BadArgument: an option is unknown or invalid.
    """
    check_options(options, readers)
    return {argument: read(name, options[name]) for name, (argument, read) in readers.items() if name in options}


def parse_text(name: str, text: str) -> str:
    """Returns the text of an option as it is."""
    return text


def parse_number(name: str, text: str) -> int:
    """Parses a whole number.

    Raises:
        BadArgument: the text is none.
    """
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise BadArgument(name, text, "a whole number")
    return int(text)


def parse_host(address: str, allowed: str) -> tuple[str, int]:
    """Parses `//host:port`.

    Args:
        address: of a spec.
        allowed: what the error asks for.

    Raises:
        BadArgument: it has another form.
    """
    found = re.fullmatch(r"//([^/@?\s]+):([0-9]{1,5})", address)
    if not found or not 0 < int(found[2]) < 65536:
        raise BadArgument("storage address", address, allowed)
    return found[1].strip("[]"), int(found[2])
