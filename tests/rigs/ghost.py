"""A runner without a model: every slot holds a fingerprint of all tokens up to it, and every read is checked.

A slot stores its token and the chain hash of the sequence up to it, h[i] = mix(h[i - 1], token[i]). A forward that
reads a page of another prompt, a stale page or a slot that was never written finds a broken chain and raises. Pages of
a sliding window store the same, and are read only as far as the window reaches. A recurrent state is the hash at its
position. Within an image the token of a position is derived from the image's identity. Logits are a function of the
last hash only, so any output can be computed without a cache: see `complete`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken

from mainstem.cache.components import Component, Full, Local, State, Window, by_name
from mainstem.cache.prefix_cache import Pool
from mainstem.runtime.memory.scores import KeptScores
from mainstem.runtime.request import ImageInput, Request, TokenLogprob
from mainstem.runtime.sampling.grammars import Grammars
from mainstem.runtime.sampling.processor import LogitsProcessor
from mainstem.runtime.sampling.sampler import Sampler, sample
from mainstem.runtime.sampling.scores import score
from mainstem.runtime.segments import Segment
from mainstem.runtime.text.detokenizer import Detokenizer, hiding, special_tokens

VOCAB = 48
EOS = 7
POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
_SEED = np.uint64(0x9E37_79B9_7F4A_7C15)
_ODD = np.uint64(0xBF58_476D_1CE4_E5B9)
_ODDER = np.uint64(0x94D0_49BB_1331_11EB)


class WrongKVError(AssertionError):
    """A forward read content that the request's tokens did not write."""


class _Pages:
    """The slots of one component. Each position has its token and the hash of all tokens up to it."""

    def __init__(self, name: str, pages: int, page_size: int) -> None:
        self.name, self.page_size = name, page_size
        self.hash = np.full((pages, page_size), POISON, np.uint64)
        self.token = np.full((pages, page_size), -1, np.int64)

    def slots(self, table: NDArray[np.int32], begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = np.arange(begin, end)
        assert end <= len(table) * self.page_size, f"the {self.name} table does not cover the segment"
        page_ids = table[positions // self.page_size].astype(np.int64)
        if (page_ids < 0).any():
            raise WrongKVError(f"{self.name}: a position of [{begin}, {end}) has no page")
        return page_ids, positions % self.page_size

    def verify(self, table: NDArray[np.int32], begin: int, end: int) -> NDArray[np.uint64]:
        """Returns the hashes of [begin, end). Each must follow from the one before it, the one at 0 from the seed."""
        slots = self.slots(table, begin, end)
        hashes, tokens = self.hash[slots], self.token[slots]
        before = np.concatenate(([_SEED if begin == 0 else POISON], hashes[:-1]))
        wrong = np.flatnonzero(hashes != mix(before, tokens)) if len(hashes) else np.empty(0, np.int64)
        wrong = wrong[wrong > 0] if begin else wrong
        if wrong.size or (hashes == POISON).any():
            at = int(wrong[0]) if wrong.size else int(np.argmax(hashes == POISON))
            raise WrongKVError(f"{self.name}, position {begin + at}, page {slots[0][at]}: not what its tokens wrote")
        return hashes

    def write(self, table: NDArray[np.int32], begin: int, tokens: Sequence[int], hashes: Sequence[np.uint64]) -> None:
        slots = self.slots(table, begin, begin + len(tokens))
        self.hash[slots], self.token[slots] = hashes, tokens


class Ghost:
    """Pages of fingerprints with the interface of a model runner.

    Args:
        pages: number of pages; or of pages and slots of each component, in order.
        page_size: positions per page.
        is_private: whether a page of the first component may be written; other writes raise. See `guard`.
    """

    vocab_size = VOCAB
    scores: KeptScores | None = None  # beside the pages of the first component

    def __init__(
        self,
        pages: int | Mapping[Component, int],
        page_size: int,
        is_private: Callable[[int], bool] = lambda page: True,
    ) -> None:
        rows = pages if isinstance(pages, Mapping) else {Full(): pages}
        self.page_size = page_size
        self.is_private = is_private
        self.computed: list[int] = []
        self.forwards: list[list[int]] = []
        self.fail_next: Exception | None = None
        named = by_name(rows)
        self._local = {name: row for name, row in named.items() if isinstance(row, Local)}
        self._paged = [_Pages(name, rows[row], page_size) for name, row in named.items() if not isinstance(row, State)]
        assert Full() in rows or Window(1) not in rows, "a window of 1 does not depend on the tokens before it"
        slots = next((n for row, n in rows.items() if isinstance(row, State)), 0)
        self._states = np.full(slots, POISON, np.uint64)
        self._hash, self._token = self._paged[0].hash, self._paged[0].token
        self._pools: Mapping[str, Pool] = {}

    def guard(self, pools: Mapping[str, Pool]) -> None:
        """Allows writes only to pages and slots that these pools report as private, in any component."""
        first, self._pools = self._paged[0].name, pools
        self.is_private = lambda page: pools[first].owner(page) == "private"

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        assert segments
        self._check_writes(segments)
        self._check_images(segments)
        before = [self._verified(segment) for segment in segments]
        if self.fail_next is not None:
            self._spoil(segments)
            error, self.fail_next = self.fail_next, None
            raise error
        written = [self._write(segment, start) for segment, start in zip(segments, before, strict=True)]
        for segment, hashes in zip(segments, written, strict=True):
            if segment.pooling is not None:
                segment.pooling.add(segment.start, torch.stack([logits(hash_) for hash_ in hashes]))
        self.forwards.append([len(segment.tokens) for segment in segments])
        asked = [hashes[len(hashes) - s.logits :] for s, hashes in zip(segments, written, strict=True)]
        rows = [logits(hash_) for hashes in asked for hash_ in hashes]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def embed(self, segment: Segment) -> None:
        """Does nothing: a ghost knows images by their identity."""

    def copy_page(self, source: int, target: int, positions: int) -> None:
        assert source != target and 0 < positions <= self.page_size
        self._hash[target, :positions] = self._hash[source, :positions]
        self._token[target, :positions] = self._token[source, :positions]
        self._hash[target, positions:] = POISON
        if self.scores is not None:
            self.scores.plane[:, target, :positions] = self.scores.plane[:, source, :positions]

    def copy_state(self, source: int, target: int) -> None:
        assert source != target
        if self._states[source] == POISON:
            raise WrongKVError(f"state {source} is copied, but was never written")
        self._require_private("state", {target})
        self._states[target] = self._states[source]

    def _tables(self, segment: Segment) -> list[tuple[_Pages, NDArray[np.int32]]]:
        return list(zip(self._paged, segment.tables[: len(self._paged)], strict=True))  # states have none

    def _verified(self, segment: Segment) -> np.uint64:
        """Returns the hash before the segment, after checking everything that it reads."""
        ends = {self._read(pages, table, segment.start) for pages, table in self._tables(segment)}
        ends -= {None}
        if (segment.state >= 0) != bool(len(self._states)):
            raise WrongKVError(f"state {segment.state} of {len(self._states)}")
        if segment.state >= 0 and segment.start > 0:
            ends.add(self._states[segment.state])
        if len(ends) > 1:
            raise WrongKVError(f"at {segment.start} the components belong to different prefixes")
        return ends.pop() if ends else _SEED

    def _read(self, pages: _Pages, table: NDArray[np.int32], start: int) -> np.uint64 | None:
        """Returns the last hash that is read of one component; None if nothing is read."""
        if pages.name not in self._local:
            hashes = pages.verify(table, 0, start)
            return hashes[-1] if len(hashes) else None
        # With states, what is read after the last page boundary is kept, too.
        row, kept = self._local[pages.name], start // self.page_size * self.page_size if len(self._states) else start
        back = row.tokens if isinstance(row, Window) else kept % row.tokens
        before = table[: max(0, kept - back) // self.page_size]
        if (before >= 0).any():
            raise WrongKVError(f"pages {before[before >= 0]} are before the {row.name} of {start}, but in the table")
        read = start - row.tokens + 1 if isinstance(row, Window) else start - start % row.tokens
        hashes = pages.verify(table, max(0, read), start)
        return hashes[-1] if len(hashes) else None

    def _write(self, segment: Segment, hash_: np.uint64) -> list[np.uint64]:
        """Writes a segment; returns the hash after each of its tokens."""
        assert len(segment.tokens) > 0
        tokens, hashes = symbols_of(segment.tokens, segment.images, segment.start), []
        for token in tokens:
            hash_ = chain([token], hash_)
            hashes.append(hash_)
        self.computed += map(int, hashes)
        for pages, table in self._tables(segment):
            pages.write(table, segment.start, tokens, hashes)
        if segment.state >= 0:
            self._states[segment.state] = hash_
        return hashes

    def _spoil(self, segments: Sequence[Segment]) -> None:
        """Poisons what a failed forward would have written."""
        for segment in segments:
            for pages, table in self._tables(segment):
                pages.hash[pages.slots(table, segment.start, segment.start + len(segment.tokens))] = POISON
            if segment.state >= 0:
                self._states[segment.state] = POISON

    def _check_writes(self, segments: Sequence[Segment]) -> None:
        """Checks that no page or state is written by two segments, or without being private."""
        written: set[tuple[str, int]] = set()
        for segment in segments:
            end = segment.start + len(segment.tokens)
            mine = {pages.name: {*pages.slots(table, segment.start, end)[0].tolist()} for pages, table in
                    self._tables(segment)}  # fmt: skip
            mine |= {"state": {segment.state}} if segment.state >= 0 else {}
            named = {(name, id) for name, ids in mine.items() for id in ids}
            if named & written:
                raise WrongKVError(f"{named & written} are written by two segments")
            written |= named
            for name, ids in mine.items():
                self._require_private(name, ids)

    def _require_private(self, name: str, ids: set[int]) -> None:
        if name == self._paged[0].name:
            shared = {id for id in ids if not self.is_private(id)}
        else:
            shared = {id for id in ids if name in self._pools and self._pools[name].owner(id) != "private"}
        if shared:
            raise WrongKVError(f"{name} {shared} are written but not private")

    def _check_images(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            begin, end = segment.start, segment.start + len(segment.tokens)
            for image in segment.images:
                cut = image.start < begin < image.end or image.start < end < image.end
                assert image.splits or not cut, f"[{begin}, {end}) cuts an image at [{image.start}, {image.end})"
            if segment.positions is not None:
                assert segment.positions.shape == (3, end - begin)


def symbols_of(tokens: NDArray[np.int32], images: Sequence[ImageInput], start: int = 0) -> list[int]:
    """Returns the symbols of tokens from position `start` on; those within images come from their identity."""
    symbols = [int(token) for token in tokens]
    for image in images:
        first = VOCAB + int.from_bytes(hashlib.sha256(image.identity).digest()[:5], "little")
        for at in range(max(image.start, start), min(image.end, start + len(symbols))):
            symbols[at - start] = first + at - image.start
    return symbols


def mix(hashes: NDArray[np.uint64], tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        mixed = (hashes ^ (tokens.astype(np.uint64) + np.uint64(1)) * _ODD) * _ODDER
    return mixed ^ (mixed >> np.uint64(29))


def chain(tokens: Sequence[int], hash_: np.uint64 = _SEED) -> np.uint64:
    """Returns the hash after a sequence of tokens. Equal to repeated `mix`, but faster for single tokens."""
    value, odd, odder = int(hash_), int(_ODD), int(_ODDER)
    for token in tokens:
        value = (value ^ (token + 1) * odd) * odder % 2**64
        value ^= value >> 29
    return np.uint64(value)


def logits(hash_: np.uint64) -> torch.Tensor:
    """Returns float32 [VOCAB] in [-4, 4), a function of the hash."""
    spread = mix(np.full(VOCAB, hash_), np.arange(VOCAB, dtype=np.int64)) >> np.uint64(40)
    return torch.from_numpy((spread.astype(np.float64) / 2**21 - 4).astype(np.float32))


def scores(tokens: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """Returns the expected log-probabilities of a prompt's tokens after the first."""
    if len(tokens) == 1:
        return []
    rows = torch.stack([logits(chain(tokens[:at])) for at in range(1, len(tokens))])
    return score(rows, np.array(tokens[1:], np.int32), alternatives) or []


def embedding(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Returns the expected embedding of a prompt; its hidden states are its logits."""
    rows = [logits(chain(tokens[:at])).numpy().astype(np.float64) for at in range(1, len(tokens) + 1)]
    mean = np.mean(rows, axis=0)
    return np.asarray(mean / np.linalg.norm(mean), np.float32)


class GhostTokenizer:
    """Every token is one letter, except EOS, which is special and decodes to nothing."""

    eos_token_id = EOS

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return {EOS: AddedToken(_LETTERS[EOS], special=True)}

    def encode(self, text: str) -> list[int]:
        return [_LETTERS.index(letter) for letter in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: object) -> str:
        return "".join(_LETTERS[t] for t in token_ids if not (skip_special_tokens and t == EOS))


_LETTERS = "".join(chr(ord("A") + i) for i in range(VOCAB))


def prompt(seed: int | float | str, length: int) -> list[int]:
    """Draws tokens of a ghost."""
    return random.Random(seed).choices(range(VOCAB), k=length)


def complete(request: Request) -> tuple[tuple[int, ...], str, str]:
    """Returns the expected tokens, text and finish reason of a request, without pages, batches or a cache."""
    params = request.params
    grammar = None if params.grammar is None else Grammars(GhostTokenizer(), VOCAB).compile(params.grammar)
    processor = LogitsProcessor(params, request.tokens, {EOS}, grammar) if params.shapes_logits else None
    sampler = Sampler(params, random.Random(0), processor)
    tokenizer = GhostTokenizer()
    skipped, hidden = hiding(params, special_tokens(tokenizer))
    shown = (skipped, params.include_stop_str_in_output, hidden)
    text = Detokenizer(tokenizer, params.stop, (), *shown)
    hash_ = chain(symbols_of(request.tokens, request.images))
    tokens: list[int] = []
    out, reason = "", None if params.max_tokens else "length"
    while reason is None:
        (choice,) = sample(logits(hash_).unsqueeze(0), [sampler])
        if not isinstance(choice, tuple):
            reason = choice
            break
        token = choice[0]
        hash_ = chain([token], hash_)
        tokens.append(token)
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            reason = "stop"
            out += text.push(token) if params.include_stop_str_in_output else ""
            break
        out += text.push(token)
        last = "length" if len(tokens) == params.max_tokens else None
        reason = "stop" if text.stop is not None else sampler.ended or last
    return tuple(tokens), out + text.flush(), reason
