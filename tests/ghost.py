"""A runner without a model: every slot holds a fingerprint of all tokens up to it, and every read is checked.

A slot stores its token and the chain hash of the sequence up to it, h[i] = mix(h[i - 1], token[i]). A forward that
reads a page of another prompt, a stale page or a slot that nobody wrote finds a broken chain and raises. Logits are a
function of the last hash alone, so any output can be computed without a cache: see `complete`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.runtime.request import Request
from mainstem.runtime.runner import Segment
from mainstem.runtime.sampling import Sampler, sample
from mainstem.runtime.text import Detokenizer

VOCAB = 48
EOS = 7
POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
_SEED = np.uint64(0x9E37_79B9_7F4A_7C15)
_ODD = np.uint64(0xBF58_476D_1CE4_E5B9)
_ODDER = np.uint64(0x94D0_49BB_1331_11EB)


class WrongKVError(AssertionError):
    """A forward read what the request's tokens did not write."""


class Ghost:
    """Pages of fingerprints behind the interface of a model runner.

    Args:
        pages, page_size: of the pool.
        is_private: whether a page may be written; a write to another one raises.
    """

    vocab_size = VOCAB

    def __init__(self, pages: int, page_size: int, is_private: Callable[[int], bool] = lambda page: True) -> None:
        self.page_size = page_size
        self.is_private = is_private
        self.computed: list[int] = []
        self.forwards: list[list[int]] = []
        self.fail_next: Exception | None = None
        self._hash = np.full((pages, page_size), POISON, np.uint64)
        self._token = np.full((pages, page_size), -1, np.int64)

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        assert segments
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self._check_writes(segments)
        before = [self._verified(segment) for segment in segments]
        last = [self._write(segment, start) for segment, start in zip(segments, before, strict=True)]
        self.forwards.append([len(segment.tokens) for segment in segments])
        rows = [logits(end) for segment, end in zip(segments, last, strict=True) if segment.logits]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def copy_page(self, source: int, target: int, positions: int) -> None:
        assert source != target and 0 < positions < self.page_size
        self._hash[target, :positions] = self._hash[source, :positions]
        self._token[target, :positions] = self._token[source, :positions]
        self._hash[target, positions:] = POISON

    def _slots(self, segment: Segment, start: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = np.arange(start, end)
        assert end <= len(segment.page_table) * self.page_size, "the page table does not cover the segment"
        return segment.page_table[positions // self.page_size].astype(np.int64), positions % self.page_size

    def _verified(self, segment: Segment) -> np.uint64:
        """The hash in front of the segment, after checking every slot up to it."""
        slots = self._slots(segment, 0, segment.start)
        hashes, tokens = self._hash[slots], self._token[slots]
        expected = mix(np.concatenate(([_SEED], hashes[:-1])), tokens) if len(hashes) else hashes
        wrong = np.flatnonzero(hashes != expected)
        if wrong.size:
            at = int(wrong[0])
            raise WrongKVError(f"position {at} of {segment.start}, page {slots[0][at]}: not what its tokens wrote")
        return hashes[-1] if len(hashes) else _SEED

    def _write(self, segment: Segment, hash_: np.uint64) -> np.uint64:
        assert len(segment.tokens) > 0
        pages, offsets = self._slots(segment, segment.start, segment.start + len(segment.tokens))
        for page, offset, token in zip(pages, offsets, segment.tokens.tolist(), strict=True):
            hash_ = chain([token], hash_)
            self._hash[page, offset], self._token[page, offset] = hash_, token
            self.computed.append(int(hash_))
        return hash_

    def _check_writes(self, segments: Sequence[Segment]) -> None:
        """Nobody else may read or write a page that is being written."""
        written: set[int] = set()
        for segment in segments:
            pages, _ = self._slots(segment, segment.start, segment.start + len(segment.tokens))
            mine = set(pages.tolist())
            if mine & written:
                raise WrongKVError(f"pages {mine & written} are written by two segments")
            written |= mine
            if shared := {page for page in mine if not self.is_private(page)}:
                raise WrongKVError(f"pages {shared} are written but not private")


def mix(hashes: NDArray[np.uint64], tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        mixed = (hashes ^ (tokens.astype(np.uint64) + np.uint64(1)) * _ODD) * _ODDER
    return mixed ^ (mixed >> np.uint64(29))


def chain(tokens: Sequence[int], hash_: np.uint64 = _SEED) -> np.uint64:
    for token in tokens:
        hash_ = mix(np.array([hash_]), np.array([token], np.int64))[0]
    return hash_


def logits(hash_: np.uint64) -> torch.Tensor:
    """float32 [VOCAB] in [-4, 4), a function of the hash."""
    spread = mix(np.full(VOCAB, hash_), np.arange(VOCAB, dtype=np.int64)) >> np.uint64(40)
    return torch.from_numpy((spread.astype(np.float64) / 2**21 - 4).astype(np.float32))


class GhostTokenizer:
    """Every token is one letter, but for EOS, which is special and reads as nothing."""

    def encode(self, text: str) -> list[int]:
        return [_LETTERS.index(letter) for letter in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: object) -> str:
        return "".join(_LETTERS[t] for t in token_ids if not (skip_special_tokens and t == EOS))


_LETTERS = "".join(chr(ord("A") + i) for i in range(VOCAB))


def complete(request: Request) -> tuple[tuple[int, ...], str, str]:
    """What a request must give: tokens, text and finish reason, without pages, batches or a cache."""
    params = request.params
    sampler = Sampler(params, random.Random(0))
    text = Detokenizer(GhostTokenizer(), params.stop)
    hash_ = chain(request.tokens.tolist())
    tokens: list[int] = []
    out, reason = "", None
    while reason is None:
        ((token, _),) = sample(logits(hash_).unsqueeze(0), [sampler])
        hash_ = chain([token], hash_)
        tokens.append(token)
        if token == EOS and not params.ignore_eos:
            reason = "stop"
            break
        out += text.push(token)
        reason = "stop" if text.stopped else "length" if len(tokens) == params.max_tokens else None
    return tuple(tokens), out + text.flush(), reason
