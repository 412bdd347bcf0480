"""What a batch takes in the best order, also one that is too long for the memory.

The order is a depth-first walk of the tree of the prompts, see `order`. So what is computed needs no simulation: each
prompt finds what it shares with the one before it in sorted order, up to what the cache holds. No order and no eviction
finds more.
"""

from __future__ import annotations

import heapq
import mmap
import os
import struct
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import IO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mainstem.batch.order import encoded, order, shared
from mainstem.cache.keys import TokenLike, hash_blocks
from mainstem.errors import BadArgument, BadTokens, check_integer

_HASH_BYTES = 8
_HEAD = struct.Struct("<qI")  # of a line in a run: its number, and the bytes of its key
_LINE_BYTES = 160
"""What Python takes for a key and its number, beside the bytes of the key."""
_LEAST_READ = 2**12

Line: TypeAlias = tuple[bytes, int]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The order of a batch, and what it takes.

    Args:
        order: int64 [prompts], their indices or numbers, in the order in which they are to run.
        tokens: of all prompts.
        computed: those that are computed, one prompt after another, with a cache of the given capacity.
        least: those that are computed if the cache holds everything: no order computes fewer.
        answers: tokens of all answers, as far as they are known.
    """

    order: NDArray[np.int64] = field(repr=False)
    tokens: int
    computed: int
    least: int
    answers: int

    def seconds(self, prefill_tokens_s: float, decode_tokens_s: float) -> float:
        """Returns how long the batch takes.

        Args:
            prefill_tokens_s: prompt tokens that are computed in a second.
            decode_tokens_s: tokens of answers in a second, of all requests that run at once.

        Raises:
            BadArgument: a rate is not above 0.
        """
        for name, rate in (("prefill_tokens_s", prefill_tokens_s), ("decode_tokens_s", decode_tokens_s)):
            if not rate > 0:
                raise BadArgument(name, rate, "above 0")
        return self.computed / prefill_tokens_s + self.answers / decode_tokens_s


def plan(
    prompts: Sequence[TokenLike],
    capacity: int | None = None,
    *,
    lengths: Sequence[int] | None = None,
    page_size: int = 16,
) -> Plan:
    """Plans a batch that is in memory.

    Args:
        prompts, capacity, lengths: see `order`.
        page_size: tokens of a page; prompts share whole pages.

    Raises:
        BadTokens, BadArgument: see `order`.
    """
    found = order(prompts, capacity, lengths=lengths, page_size=page_size)
    keys, width = encoded(prompts)
    count = _Found(capacity, page_size, page_size * width)
    for one, other in pairwise(sorted(keys)):
        count.add(one, other)
    return count.plan(np.array(found, np.int64), sum(map(len, keys)) // width, sum(lengths or ()))


def plan_lines(
    lines: Iterable[tuple[int, TokenLike, int]],
    capacity: int | None = None,
    *,
    page_size: int = 16,
    memory_bytes: int = 2**26,
    folder: str | os.PathLike[str] | None = None,
) -> Plan:
    """Plans a batch of any length in bounded memory: hashes of pages are sorted in a temporary file.

    Prompts with the same whole pages run in the order of their numbers. Unlike in `order`, answers decide nothing:
    which subtree has the longest is only known at the end, and a batch of this length hardly notices its last requests.
    The file takes 8 bytes for each whole page of each prompt and 12 for the prompt, and the order 8 for each prompt, in
    another file, which is mapped. Both vanish with the plan, or with the process.

    Args:
        lines: number, token ids, and expected tokens of the answer of each prompt. The number is what the caller finds
            it by, such as the offset of its line, from 0 to 2**63 - 1.
        capacity: see `order`.
        page_size: see `plan`.
        memory_bytes: about how much of them are held in memory, from 64 KiB.
        folder: of the files; None: that of the system.

    Raises:
        BadTokens: a prompt is no sequence of token ids.
        BadArgument: an argument or a number is out of range.
        OSError: a file cannot be written.
    """
    check_integer("memory_bytes", memory_bytes, 2**16, 2**62)
    count = _Found(capacity, page_size, _HASH_BYTES)
    tokens = answers = 0

    def keyed() -> Iterator[Line]:
        nonlocal tokens, answers
        for number, prompt, answer in lines:
            answers += check_integer("answer", answer, 0, 2**62)
            try:
                key = hash_blocks(prompt, page_size, _HASH_BYTES)
            except BadTokens as error:
                raise BadTokens(f"prompt {number}: {error}") from None
            tokens += len(prompt)
            yield key, check_integer("number", number, 0, 2**63 - 1)

    with tempfile.TemporaryFile(dir=folder) as spilled, tempfile.TemporaryFile(dir=folder) as numbers:
        runs, last = _spill(keyed(), memory_bytes, spilled), b""
        some = array("q")
        for key, number in _merged(spilled, runs, memory_bytes):
            count.add(last, key)
            last = key
            some.append(number)
            if len(some) * some.itemsize >= _LEAST_READ:
                numbers.write(some)
                del some[:]
        numbers.write(some)
        numbers.flush()
        return count.plan(_mapped(numbers), tokens, answers)


class _Found:
    """What prompts find of the ones before them, in sorted order.

    Args:
        capacity, page_size: in tokens.
        page_bytes: of a key.
    """

    def __init__(self, capacity: int | None, page_size: int, page_bytes: int) -> None:
        self._page_size = check_integer("page_size", page_size, 1, 2**31 - 1)
        self._page_bytes = page_bytes
        self._room = 2**62 if capacity is None else check_integer("capacity", capacity, 1, 2**62) // page_size
        self._pages = self._within = 0

    def add(self, one: bytes, other: bytes) -> None:
        """Counts the keys of two neighbours."""
        pages = shared(one, other) // self._page_bytes
        self._pages += pages
        self._within += min(pages, self._room)

    def plan(self, found: NDArray[np.int64], tokens: int, answers: int) -> Plan:
        computed, least = (tokens - pages * self._page_size for pages in (self._within, self._pages))
        return Plan(found, tokens, computed, least, answers)


def _spill(lines: Iterable[Line], memory_bytes: int, file: IO[bytes]) -> list[tuple[int, int]]:
    """Writes lines in sorted runs, each as long as fits the memory; returns where they begin and end."""
    runs: list[tuple[int, int]] = []
    held: list[Line] = []
    size = 0

    def write() -> None:
        nonlocal size
        held.sort()
        begin = file.tell()
        file.writelines(_HEAD.pack(number, len(key)) + key for key, number in held)
        runs.append((begin, file.tell()))
        held.clear()
        size = 0

    for line in lines:
        held.append(line)
        size += _LINE_BYTES + len(line[0])
        if size >= memory_bytes:
            write()
    write()
    file.flush()
    return runs


def _merged(file: IO[bytes], runs: Sequence[tuple[int, int]], memory_bytes: int) -> Iterator[Line]:
    each = max(_LEAST_READ, memory_bytes // len(runs) // 4)  # the lines of a piece take more than its bytes
    return heapq.merge(*(_lines(file.fileno(), begin, end, each) for begin, end in runs))


def _lines(file: int, begin: int, end: int, at_once: int) -> Iterator[Line]:
    """Reads a run, a piece at a time."""
    piece, at = b"", 0
    while begin < end or at < len(piece):
        whole = len(piece) - at >= _HEAD.size
        number, length = _HEAD.unpack_from(piece, at) if whole else (0, at_once)
        if not whole or len(piece) - at - _HEAD.size < length:
            more = os.pread(file, min(max(at_once, length + _HEAD.size), end - begin), begin)
            begin += len(more)
            piece, at = piece[at:] + more, 0
            continue
        at += _HEAD.size + length
        yield piece[at - length : at], number


def _mapped(file: IO[bytes]) -> NDArray[np.int64]:
    if not os.fstat(file.fileno()).st_size:
        return np.zeros(0, np.int64)
    return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.int64)
