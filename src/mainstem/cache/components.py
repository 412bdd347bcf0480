"""Components: what a model keeps for a prefix, as rows of the tree (core/csrc/residency/component.h)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument, check_integer


class _Attention:
    """The defaults of kinds of attention."""

    __slots__ = ()

    @property
    def window(self) -> int | None:
        """How many positions each query sees at most, up to its own; None: all that its neighbours see."""
        return None


@dataclass(frozen=True, slots=True)
class Full(_Attention):
    """Full attention: one id per page; a match needs every page from the root on."""

    name: ClassVar[str] = "full"

    def seen_from(self, position: int) -> int:
        """Returns the first position that the query at `position` sees."""
        return 0

    def begins(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns `seen_from` of each of these positions."""
        return np.zeros_like(positions)

    def needed_from(self, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first position that a match ending at each of these needs."""
        return np.zeros_like(ends)

    def row(self) -> tuple[str, int, bool]:
        """Returns the row in the form that the core takes."""
        return "full", 0, False


@dataclass(frozen=True, slots=True)
class _Local(_Attention):
    """Attention to some of the last positions."""

    tokens: int
    name: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", check_integer("tokens", self.tokens, 1, 2**32 - 1))

    def row(self) -> tuple[str, int, bool]:
        """Returns the row in the form that the core takes."""
        return self.name, self.tokens, False


@dataclass(frozen=True, slots=True)
class Window(_Local):
    """Sliding-window attention over the last `tokens` symbols; earlier pages may be absent.

    Raises:
        BadArgument: `tokens` is below 1.
    """

    name: ClassVar[str] = "window"

    def seen_from(self, position: int) -> int:
        """Returns the first position that the query at `position` sees."""
        return max(0, position + 1 - self.tokens)

    @property
    def window(self) -> int | None:
        """How many positions each query sees at most, up to its own."""
        return self.tokens

    def begins(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns `seen_from` of each of these positions."""
        return np.maximum(positions + 1 - self.tokens, 0)

    def needed_from(self, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first position that a match ending at each of these needs."""
        return np.maximum(ends - self.tokens, 0)


@dataclass(frozen=True, slots=True)
class Chunked(_Local):
    """Chunked local attention: a query at position p reads positions [p - p % tokens, p] only.

    Pages before the last boundary may be absent. A match that ends at a boundary, a multiple of `tokens`, needs none.

    Raises:
        BadArgument: `tokens` is below 1.
    """

    name: ClassVar[str] = "chunked"

    def seen_from(self, position: int) -> int:
        """Returns the first position that the query at `position` sees."""
        return position - position % self.tokens

    def begins(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns `seen_from` of each of these positions."""
        return positions - positions % self.tokens

    def needed_from(self, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first position that a match ending at each of these needs; at a boundary, its end."""
        return ends - ends % self.tokens


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state: one slot, at the end of a node.

    Args:
        most_on_path: the most states on one path from the root; beyond that, the one that saves the least is evicted.
        weigh_flops: evict first what saves the least computation and has not been used for long (GreedyDual, Young
            1994), instead of following the policy.

    Raises:
        BadArgument: `most_on_path` is below 1.
    """

    most_on_path: int | None = None
    weigh_flops: bool = True
    name: ClassVar[str] = "state"

    def __post_init__(self) -> None:
        if self.most_on_path is not None:
            object.__setattr__(self, "most_on_path", check_integer("most_on_path", self.most_on_path, 1, 2**31 - 1))

    def row(self) -> tuple[str, int, bool]:
        """Returns the row in the form that the core takes."""
        return "state", self.most_on_path or 0, bool(self.weigh_flops)


Local = Window | Chunked
"""A component of which a query sees only the last positions."""

Attended = Full | Local
"""A component of attention: it says which keys a query sees."""

Component = Attended | State
KINDS: tuple[type[Component], ...] = get_args(Component)
"""All kinds, in the order of a model's rows."""
_Row = TypeVar("_Row", bound=Component)


def by_name(components: Iterable[_Row]) -> dict[str, _Row]:
    """Returns the components of a model by name, in order: of pools, cells, tables and metrics.

    A name is that of the kind. Where a model has several of a kind, their tokens are added.

    Raises:
        BadArgument: two components have the same name.

    >>> list(by_name([Full(), Window(512)]))
    ['full', 'window']
    >>> list(by_name([Full(), Window(4096), Window(512)]))
    ['full', 'window-4096', 'window-512']
    """
    rows = tuple(components)
    kinds = Counter(type(row) for row in rows)
    named = {}
    for row in rows:
        tokens = f"-{row.tokens}" if isinstance(row, Local) and kinds[type(row)] > 1 else ""
        named[row.name + tokens] = row
    if len(named) < len(rows):
        raise BadArgument("components", rows, "Full() and State() once, and windows or chunks that differ in tokens")
    return named
