"""The rows of the tree as storage sees them: which components have content, and what is kept exact."""

from __future__ import annotations

from typing import NamedTuple

from mainstem.cache.components import State
from mainstem.cache.tree import Tree
from mainstem.tiers.host.transfer import HostMemory


class Row(NamedTuple):
    """A component whose pages are stored.

    Args:
        number: its row in the tree.
        name: its name in the tree, unlike any other row's, part of each stored value's key.
        exact: no codec may change its content. A state is: an error would be carried along by all that is computed
            from it.
    """

    number: int
    name: str
    exact: bool


def stored_rows(tree: Tree, memory: HostMemory) -> tuple[Row, ...]:
    """Returns the components whose pages have content."""
    return tuple(
        Row(row, name, isinstance(tree.components[row], State))
        for row, name in enumerate(tree.names)
        if memory.payload_bytes(row) > 0
    )
