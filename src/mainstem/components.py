"""Components: what a model keeps for a prefix, as rows of the tree. core/csrc/component.h has the rules of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mainstem.errors import check_integer


@dataclass(frozen=True, slots=True)
class Full:
    """Full attention: a page id for each page, usable from the root on."""

    name: ClassVar[str] = "full"

    def row(self) -> tuple[str, int]:
        """The row as the core takes it."""
        return "full", 0


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding-window attention over the last `tokens` symbols; earlier pages may be absent.

    Raises:
        BadArgument: fewer than 1 symbol.
    """

    tokens: int
    name: ClassVar[str] = "window"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", check_integer("tokens", self.tokens, 1, 2**32 - 1))

    def row(self) -> tuple[str, int]:
        """The row as the core takes it."""
        return "window", self.tokens


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state: one slot, at the end of a node."""

    name: ClassVar[str] = "state"

    def row(self) -> tuple[str, int]:
        """The row as the core takes it."""
        return "state", 0


Component = Full | Window | State
