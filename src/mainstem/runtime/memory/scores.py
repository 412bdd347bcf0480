"""How likely the tokens of prompts were, beside the pages that hold their keys and values.

    plane    float32 [1, pages, page_size, 2 + 2 * best]       a row for each position
    row      log-probability | rank | token, log-probability | ...      then the likeliest tokens

A row belongs to the token at its position, given all before it, as its keys and values do. So it moves with its page
through all tiers. A row with NaN in it is unknown: nobody has asked for it since the page was free, or it was copied
while it was written. All are forgotten when the page is freed.

This module knows rows and page tables. It does not know requests, and computes no log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.runtime.request import TokenLogprob

_ROW = torch.float32  # holds ranks and tokens up to 16,777,216


def row_bytes(best: int | None) -> int:
    """Returns the bytes that scores take per position; `best`: see `KeptScores`, None: 0."""
    return 0 if best is None else (2 + 2 * best) * _ROW.itemsize


class KeptScores:
    """Log-probabilities of tokens, by the pages of the tokens.

    Args:
        pages: as in the pool that they belong to.
        page_size: positions per page.
        best: how many of the likeliest tokens are kept with each.
        device: of the pages.

    Attributes:
        plane: the tensor that page ids index.
        best: as given.
    """

    def __init__(self, pages: int, page_size: int, best: int, device: torch.device | str = "cpu") -> None:
        self.best = best
        self.plane = torch.full((1, pages, page_size, 2 + 2 * best), torch.nan, dtype=_ROW, device=device)
        self._page_size = page_size

    def read(self, table: NDArray[np.int32], begin: int, tokens: NDArray[np.int32]) -> list[TokenLogprob]:
        """Returns the scores of tokens up to the first whose score is unknown.

        Args:
            table: the pages of the sequence, from its beginning.
            begin: the position of the first token.
            tokens: at these positions, which the table covers.
        """
        if not len(tokens):
            return []
        rows = self._rows(table, begin, begin + len(tokens)).cpu().numpy()
        unknown = np.isnan(rows).any(1)
        known = rows[: int(unknown.argmax()) if unknown.any() else len(rows)].tolist()
        return [
            TokenLogprob(token, logprob, tuple(zip(map(int, best[::2]), best[1::2], strict=True)), int(rank))
            for token, (logprob, rank, *best) in zip(tokens[: len(known)].tolist(), known, strict=True)
        ]

    def write(self, table: NDArray[np.int32], begin: int, scores: Sequence[TokenLogprob]) -> None:
        """Keeps the scores of the tokens from position `begin` on, each with `best` of the likeliest tokens or more."""
        rows = [(s.logprob, s.rank, *(number for pair in s.top[: self.best] for number in pair)) for s in scores]
        if rows:
            flat = self._flat(table, begin, begin + len(rows))
            self.plane.flatten(0, 2)[flat] = torch.tensor(rows, dtype=_ROW).to(self.plane.device)

    def forget(self, page_ids: NDArray[np.int32]) -> None:
        """Forgets all scores of pages that are free now."""
        self.plane[0, torch.from_numpy(page_ids.astype(np.int64)).to(self.plane.device)] = torch.nan

    def _rows(self, table: NDArray[np.int32], begin: int, end: int) -> torch.Tensor:
        return self.plane.flatten(0, 2)[self._flat(table, begin, end)]

    def _flat(self, table: NDArray[np.int32], begin: int, end: int) -> torch.Tensor:
        at = np.arange(begin, end, dtype=np.int64)
        flat = table[at // self._page_size].astype(np.int64) * self._page_size + at % self._page_size
        return torch.from_numpy(flat).to(self.plane.device)
