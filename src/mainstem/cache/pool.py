"""The page pool. Knows page ids and their owners, not the tree or tensors."""

from mainstem._core import Pool

__all__ = ["Pool"]
