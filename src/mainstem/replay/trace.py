"""A trace: requests in order of arrival, each with the blocks of its prompt. It can be read repeatedly, in batches.

A block is `block_size` tokens of a prompt; the last block of a request may have fewer (it is partial). The name of a
block covers everything before it. Equal names mean equal prefixes, so the blocks of a request are a path from a root.

A trace is a memory-mapped file, and takes almost no memory of its own. The format (suffix `.mstrace`) is little-endian
and uncompressed:

    0   magic "MSTRACE\\0"
    8   version, block_size                       u32, u32
    16  requests n, blocks m                      u64, u64
    32  distinct blocks, or 2**64 - 1: unknown    u64
    40  length of the text                        u64
    48  BLAKE2b of bytes 0 to 48 and the text     16 bytes
    64  text: JSON {name, tenants, kinds, notes}, padded to 8 bytes with spaces
        time_s f64 [n], input_tokens, output_tokens i64 [n], offsets i64 [n + 1], chat i64 [n],
        tenant, kind, turn i32 [n], each padded to 8 bytes, blocks u64 [m]

Knows no other formats (`mainstem.replay.readers.open` does), and nothing about caches.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument, MainstemError, check_integer

SUFFIX = ".mstrace"
MAGIC = b"MSTRACE\0"
VERSION = 1
MAX_TOKENS = 2**40
"""Maximum number of tokens of one prompt, one answer or one block."""

Int64s = NDArray[np.int64]
Uint64s = NDArray[np.uint64]

_HEADER = struct.Struct("<8sIIQQQQ16s")
_SIGNED = 48  # bytes before the checksum
_UNKNOWN = 2**64 - 1
_BATCH_BLOCKS = 1 << 18
_BATCH_REQUESTS = 1 << 16
_SORTED_REQUESTS = 1 << 12  # requests whose blocks are in memory at once

COLUMNS: dict[str, np.dtype[Any]] = {
    "time_s": np.dtype("<f8"),
    "input_tokens": np.dtype("<i8"),
    "output_tokens": np.dtype("<i8"),
    "offsets": np.dtype("<i8"),
    "chat": np.dtype("<i8"),
    "tenant": np.dtype("<i4"),
    "kind": np.dtype("<i4"),
    "turn": np.dtype("<i4"),
    "blocks": np.dtype("<u8"),
}
"""The columns of a batch, and their types in a file."""

_PER_REQUEST = tuple(name for name in COLUMNS if name not in ("offsets", "blocks"))


class TraceError(MainstemError):
    """The input is not a trace, or has a bad line; the message names the line and what was expected.

    Args:
        message: the message.
        line: number of the bad line, from 1; None: the error is not about a line.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Batch:
    """Some requests in order of arrival, as columns.

    Args:
        time_s: [n] seconds since the trace began, non-decreasing.
        input_tokens: [n] tokens of the prompt.
        output_tokens: [n] tokens of the answer; 0: unknown.
        offsets: [n + 1] where each request's blocks begin in `blocks`, and where the last ones end.
        blocks: [offsets[-1]] names of blocks, those of each request from the root down.
        tenant: [n] index into `Trace.tenants`; 0 is "", none.
        kind: [n] index into `Trace.kinds`; 0 is "", none.
        chat: [n] a number shared by the requests of one conversation; -1: unknown.
        turn: [n] number of the request in its conversation, from 1; 0: unknown.
    """

    time_s: NDArray[np.float64]
    input_tokens: Int64s
    output_tokens: Int64s
    offsets: Int64s
    blocks: Uint64s
    tenant: NDArray[np.int32]
    kind: NDArray[np.int32]
    chat: Int64s
    turn: NDArray[np.int32]

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]], *, block_size: int = 1, **columns: object) -> Self:
        """Creates a batch from one list of blocks per request.

        Args:
            paths: names of blocks, from 0 to 2**64 - 1.
            block_size: tokens per block, for `input_tokens` if that column is not given; all blocks are then whole.
            columns: the other columns. Default: one request per second, without answer, tenant, kind and chat.

        Raises:
            BadArgument: there is no such column.
        """
        for name in columns:
            if name not in _PER_REQUEST:
                raise BadArgument("column", name, f"one of {', '.join(_PER_REQUEST)}")
        n = len(paths)
        lengths = np.array([len(path) for path in paths], dtype=np.int64)
        given: dict[str, object] = {
            "time_s": np.arange(n),
            "input_tokens": lengths * block_size,
            "chat": np.full(n, -1),
        }
        given |= columns
        return cls(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            blocks=np.array([block for path in paths for block in path], dtype=np.uint64),
            **{name: np.array(given.get(name, np.zeros(n)), dtype=COLUMNS[name]) for name in _PER_REQUEST},
        )

    def __len__(self) -> int:
        return len(self.time_s)

    @property
    def lengths(self) -> Int64s:
        """[n] blocks of each request."""
        return np.diff(self.offsets)

    @property
    def depths(self) -> Int64s:
        """[blocks] number of blocks above each."""
        return np.arange(len(self.blocks), dtype=np.int64) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def owners(self) -> Int64s:
        """[blocks] the request of each block, from 0."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)

    def tokens(self, block_size: int) -> Int64s:
        """Returns [blocks] tokens of each: `block_size`, or the rest of the prompt for a partial last block."""
        left: Int64s = np.repeat(self.input_tokens, self.lengths) - self.depths * block_size
        return np.minimum(left, block_size)

    def slice(self, start: int, stop: int) -> Batch:
        """Returns the requests [start, stop), as views where possible."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Batch(
            offsets=self.offsets[start : stop + 1] - first,
            blocks=self.blocks[first:last],
            **{name: getattr(self, name)[start:stop] for name in _PER_REQUEST},
        )

    def take(self, order: Int64s) -> Batch:
        """Returns a copy of the requests with these indices, in this order."""
        lengths = self.lengths[order]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        places = np.repeat(self.offsets[order] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Batch(
            offsets=offsets, blocks=self.blocks[places], **{name: getattr(self, name)[order] for name in _PER_REQUEST}
        )


class Trace:
    """Requests that can be read repeatedly. Create one with `of`, `open` or `mainstem.replay.readers.open.open_trace`.

    Attributes:
        name: name of the trace.
        block_size: tokens per block.
        tenants: names of tenants; the first is "".
        kinds: names of kinds of requests; the first is "".
        notes: what readers of results should know about how it was read, one sentence each.
        whole: all requests as one batch; the file is read only where the batch is accessed.
    """

    def __init__(self, buffer: mmap.mmap, header: _Header, source: str) -> None:
        self._buffer = buffer
        self._header = header
        self._distinct = header.distinct
        self.name = header.name
        self.block_size = header.block_size
        self.tenants = header.tenants
        self.kinds = header.kinds
        self.notes = header.notes
        self.whole = Batch(**_views(buffer, header))
        _check(self.whole, self.block_size, len(self.tenants), len(self.kinds), source)

    @classmethod
    def of(
        cls,
        batches: Batch | Iterable[Batch],
        *,
        block_size: int = 1,
        name: str = "",
        tenants: Iterable[str] = ("",),
        kinds: Iterable[str] = ("",),
        notes: Iterable[str] = (),
        distinct_blocks: int | None = None,
    ) -> Self:
        """Creates a trace from batches, which are read once and kept in a temporary file.

        Sorts requests by time, stably, and counts times from the first.

        Args:
            batches: the requests.
            block_size: tokens per block.
            name: name of the trace.
            tenants: names of tenants. This and the next two are read after the last batch, so they may grow until then.
            kinds: names of kinds of requests.
            notes: sentences.
            distinct_blocks: number of distinct blocks, where it is known; None: it is counted when it is asked for.

        Raises:
            BadArgument: a column is too short or too long.
            TraceError: a column has invalid values.
        """
        check_integer("block_size", block_size, 1, 2**32 - 1)
        with ExitStack() as stack:
            staged = {key: stack.enter_context(tempfile.TemporaryFile()) for key in COLUMNS if key != "offsets"}
            lengths = stack.enter_context(tempfile.TemporaryFile())
            for batch in [batches] if isinstance(batches, Batch) else batches:
                _stage(batch, staged, lengths)
            columns = {key: _mapped(file, COLUMNS[key]) for key, file in staged.items()}
            columns["offsets"] = np.concatenate([[0], np.cumsum(_mapped(lengths, np.dtype("<i8")))]).astype("<i8")
            whole = Batch(**columns)
            counts = len(whole), len(whole.blocks), distinct_blocks
            file = stack.enter_context(tempfile.TemporaryFile())
            _write(file, whole, _Header(block_size, *counts, name, tuple(tenants), tuple(kinds), tuple(notes)))
            return cls.read(file, name or "batches")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens a file in the format of this module.

        Raises:
            TraceError: the file has another format, is truncated, or was changed.
            OSError: it cannot be read.
        """
        with open(path, "rb") as file:
            return cls.read(file, os.fspath(path))

    @classmethod
    def read(cls, file: IO[bytes], source: str) -> Self:
        """Like `open`, from an open file, which may be closed or removed afterwards; `source` is its name in errors."""
        if os.fstat(file.fileno()).st_size < _HEADER.size:
            raise TraceError(f"{source} is cut short: it has fewer than the {_HEADER.size} bytes of a header")
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return cls(buffer, _Header.parse(buffer, source), source)

    def __len__(self) -> int:
        return len(self.whole)

    def __repr__(self) -> str:
        return (
            f"Trace({self.name!r}, {len(self)} requests, {len(self.whole.blocks)} blocks of {self.block_size} tokens)"
        )

    def batches(self) -> Iterator[Batch]:
        """Yields all requests, a few hundred thousand blocks at a time; a request is never split between batches."""
        start, offsets = 0, self.whole.offsets
        while start < len(self):
            within = int(np.searchsorted(offsets, offsets[start] + _BATCH_BLOCKS, side="right")) - 1
            stop = min(max(within, start + 1), start + _BATCH_REQUESTS)
            yield self.whole.slice(start, stop)
            start = stop

    @property
    def distinct_blocks(self) -> int:
        """Number of distinct blocks: what an infinite cache would hold. Counted at the first access, then kept."""
        if self._distinct is None:
            seen = Seen()
            for batch in self.batches():
                seen.add(batch.blocks)
            self._distinct = len(seen)
        return self._distinct

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace to a file, which appears when it is complete.

        Raises:
            OSError: the file cannot be written.
        """
        head, target = replace(self._header, distinct=self.distinct_blocks).encode(), Path(path)
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        with open(part, "xb") as file:
            try:
                file.write(head)
                with memoryview(self._buffer) as view, view[self._header.columns_at :] as columns:
                    file.write(columns)
                file.close()
                os.replace(part, target)
            except BaseException:
                part.unlink()
                raise


class Seen:
    """A growing set of blocks: sorted runs, each at least twice as long as the next, 8 bytes per block."""

    def __init__(self) -> None:
        self._runs: list[Uint64s] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, blocks: Uint64s) -> NDArray[np.bool_]:
        """Adds blocks.

        Returns:
            [blocks] whether this is the first use of the block, in this call and all before.
        """
        found, first = np.unique(blocks, return_index=True)
        new = np.ones(len(found), dtype=bool)
        for run in self._runs:
            places = np.searchsorted(run, found)
            new &= run[np.minimum(places, len(run) - 1)] != found
        mask = np.zeros(len(blocks), dtype=bool)
        mask[first[new]] = True
        if new.any():
            self._push(found[new])
        return mask

    def _push(self, run: Uint64s) -> None:
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            other = self._runs.pop()
            run = np.concatenate([other, run])
            run.sort(kind="stable")
        self._runs.append(run)


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio: the step between the numbers that SplitMix64 mixes."""


def mix(numbers: Uint64s) -> Uint64s:
    """Maps 64 bits to 64 bits, one to one; each result bit depends on all input bits: SplitMix64's output function.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the constants are variant 13
    of Stafford's mixers.
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


# --- the file -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Header:
    """The head of a file; `columns_at`: where its columns begin."""

    block_size: int
    requests: int
    blocks: int
    distinct: int | None
    name: str
    tenants: tuple[str, ...]
    kinds: tuple[str, ...]
    notes: tuple[str, ...]
    columns_at: int = 0

    def encode(self) -> bytes:
        text = json.dumps({key: getattr(self, key) for key in ("name", "tenants", "kinds", "notes")}).encode()
        text += b" " * (-len(text) % 8)
        counts = self.requests, self.blocks, _UNKNOWN if self.distinct is None else self.distinct
        head = _HEADER.pack(MAGIC, VERSION, self.block_size, *counts, len(text), b"")[:_SIGNED]
        return head + _checksum(head, text) + text

    @classmethod
    def parse(cls, buffer: mmap.mmap, source: str) -> Self:
        """Parses the header of a file, and checks the file's length."""
        magic, version, block_size, n, m, distinct, length, checksum = _HEADER.unpack_from(buffer)
        if magic != MAGIC:
            raise TraceError(f"{source} is not a {SUFFIX} file: it begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise TraceError(f"{source} has version {version}: only version {VERSION} can be read")
        at = _HEADER.size + length
        text = buffer[_HEADER.size : at]
        if len(text) < length or length % 8 or checksum != _checksum(buffer[:_SIGNED], text):
            raise TraceError(f"{source} is damaged: its header does not match its checksum")
        try:
            found = json.loads(text)
            tenants, kinds, notes = (tuple(map(str, found[key])) for key in ("tenants", "kinds", "notes"))
            known = None if distinct == _UNKNOWN else distinct
            header = cls(block_size, n, m, known, str(found["name"]), tenants, kinds, notes, at)
        except (ValueError, TypeError, KeyError) as error:
            raise TraceError(f"{source} is damaged: its names cannot be read") from error
        if len(buffer) != header.size:
            raise TraceError(f"{source} is cut short or too long: it has {len(buffer)} bytes, not {header.size}")
        return header

    @property
    def size(self) -> int:
        return self.columns_at + sum(_padded(dtype, self.count(name)) for name, dtype in COLUMNS.items())

    def count(self, column: str) -> int:
        return {"offsets": self.requests + 1, "blocks": self.blocks}.get(column, self.requests)


def _checksum(head: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(head + text, digest_size=16).digest()


def _padded(dtype: np.dtype[Any], count: int) -> int:
    size = dtype.itemsize * count
    return size + -size % 8


def _views(buffer: mmap.mmap, header: _Header) -> dict[str, NDArray[Any]]:
    views, at = {}, header.columns_at
    for name, dtype in COLUMNS.items():
        views[name] = np.frombuffer(buffer, dtype, header.count(name), at)
        at += _padded(dtype, header.count(name))
    return views


def _check(batch: Batch, block_size: int, tenants: int, kinds: int, source: str) -> None:
    """Checks the guarantees of every trace, except that blocks are paths."""
    offsets = batch.offsets
    if block_size < 1:
        raise TraceError(f"{source}: a block has no tokens")
    if offsets[0] != 0 or offsets[-1] != len(batch.blocks) or (np.diff(offsets) < 0).any():
        raise TraceError(f"{source}: offsets are out of order")
    bad = {
        "time_s": not np.isfinite(batch.time_s).all() or (np.diff(batch.time_s) < 0).any(),
        "input_tokens": _outside(batch.input_tokens, 0, MAX_TOKENS),
        "output_tokens": _outside(batch.output_tokens, 0, MAX_TOKENS),
        "tenant": _outside(batch.tenant, 0, tenants - 1),
        "kind": _outside(batch.kind, 0, kinds - 1),
        "chat": _outside(batch.chat, -1, 2**63 - 1),
        "turn": _outside(batch.turn, 0, 2**31 - 1),
        "blocks": bool(((batch.lengths - 1) * block_size >= batch.input_tokens).any()),
    }
    for name, wrong in bad.items():
        if wrong:
            raise TraceError(f"{source}: {name} has invalid values")


def _outside(column: NDArray[Any], low: int, high: int) -> bool:
    return bool(len(column)) and not low <= int(column.min()) <= int(column.max()) <= high


def _stage(batch: Batch, staged: Mapping[str, IO[bytes]], lengths: IO[bytes]) -> None:
    """Appends a batch to the files of the columns."""
    if not np.isfinite(batch.time_s).all():
        raise TraceError("time_s has values that are not finite")
    for name, file in staged.items():
        column = getattr(batch, name)
        expected = int(batch.offsets[-1]) if name == "blocks" else len(batch.offsets) - 1
        if column.shape != (expected,):
            raise BadArgument(name, column.shape, f"a column of length {expected}")
        file.write(np.ascontiguousarray(column, dtype=COLUMNS[name]).data)
    lengths.write(batch.lengths.astype("<i8").data)


def _mapped(file: IO[bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
    file.flush()
    if os.fstat(file.fileno()).st_size == 0:
        return np.zeros(0, dtype)
    return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


def _write(file: IO[bytes], batch: Batch, header: _Header) -> None:
    """Writes a trace: sorts requests by time, and counts times from the first."""
    time_s = batch.time_s
    unsorted = int((time_s < np.maximum.accumulate(time_s)).sum()) if len(batch) else 0
    if unsorted:
        note = f"Requests that were out of order, and sorted by time: {unsorted}."
        header = replace(header, notes=(*header.notes, note))
    file.write(header.encode())
    order = np.argsort(time_s, kind="stable") if unsorted else None
    for name, dtype in COLUMNS.items():
        size = sum(file.write(column.data) for column in _pieces(batch, name, order))
        file.write(bytes(_padded(dtype, size // dtype.itemsize) - size))
    file.flush()


def _pieces(batch: Batch, name: str, order: Int64s | None) -> Iterator[NDArray[Any]]:
    """Yields a column as it is written, in the given order; blocks in pieces, because there may be many."""
    column: NDArray[Any] = getattr(batch, name)
    if name == "time_s" and len(batch):
        column = column - column.min()
    if order is None:
        yield column
    elif name == "offsets":
        yield batch.take(order[:0]).offsets
        yield np.cumsum(batch.lengths[order])
    elif name == "blocks":
        for start in range(0, len(order), _SORTED_REQUESTS):
            yield batch.take(order[start : start + _SORTED_REQUESTS]).blocks
    else:
        yield column[order]
