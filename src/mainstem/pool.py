"""The page pool. Knows page ids and their owners; knows no tree and no tensors."""

from mainstem._core import Pool

__all__ = ["Pool"]
