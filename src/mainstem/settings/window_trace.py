"""The file of expected sequences, from which the engine finds the best ratio of window pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mainstem.errors import BadArgument
from mainstem.units import Unit


@dataclass(frozen=True, slots=True)
class Use:
    """A sequence of a trace without tokens.

    Args:
        length: positions of prompt and answer.
        like: index of an earlier sequence of the trace.
        shared: the length of the prefix that both have in common.
    """

    length: int
    like: int = 0
    shared: int = 0


WindowTrace: TypeAlias = tuple[Sequence[int] | Use, ...]


def read_window_trace(path: Path) -> WindowTrace:
    """Reads a trace from a file with one line of JSON for each sequence.

        {"tokens": [1, 2, 3, ...]}
        {"length": 1200, "like": 0, "shared": 800}

    Raises:
        BadArgument: the file cannot be read, or a line is neither; the message names the line.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            return tuple(_parsed(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument("window_trace", str(path), f"a file of lines of JSON ({error})") from error


def _parsed(line: str, place: str) -> Sequence[int] | Use:
    allowed = 'either {"tokens": [...]} or {"length": ..., "like": ..., "shared": ...}'
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadArgument(place, line[:80], f"{allowed}: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("tokens"), list):
        tokens: list[int] = value["tokens"]
        return tokens
    if not isinstance(value, dict) or "length" not in value or not value.keys() <= {"length", "like", "shared"}:
        raise BadArgument(place, line[:80], allowed)
    return Use(**value)


WINDOW_TRACE = Unit(lambda _, text: read_window_trace(Path(text)))
"""A trace as the path of its file."""
