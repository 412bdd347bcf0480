"""Places of a source that an operator can change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """A place that an operator can change.

    Args:
        operator: its name.
        line: from 1.
        column: from 0.
        text: of the line, without the white space around it.
        place: its number among all places of this operator in the file, from 0.
    """

    operator: str
    line: int
    column: int
    text: str
    place: int
