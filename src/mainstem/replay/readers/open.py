"""Opens traces in common formats: lines of JSON (`mainstem.replay.readers.formats`), or converted traces (`.mstrace`).

- A bad line raises, or is skipped and counted, as requested.
- Times may go back, because servers log requests as they end. Requests are sorted by time, and the trace notes how many
  were out of order. A request without a time arrives with the one before it; if the first has none, all arrive at once.
- Names of blocks are chained: they cover all ids before them and the model, even if the ids did not. Equal names mean
  equal paths, by 64 bits: good enough for replay, no protection against forged ids that collide.

Reads a file once, a batch at a time, into a file of columns. Knows no policies and no caches.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument
from mainstem.imports import is_missing
from mainstem.replay.readers.formats import (
    BYTES_NOTE,
    FORMATS,
    RECORDING,
    BadLine,
    Format,
    Line,
    Reading,
    Request,
    Rewrite,
    Tokenize,
    hashed,
)
from mainstem.replay.readers.lines import MAX_LINE_BYTES, Progress, Source
from mainstem.replay.readers.rewrites import Rewrites
from mainstem.replay.readers.texts import Tokenizer, as_bytes
from mainstem.replay.trace import COLUMNS, GOLDEN, MAGIC, Batch, Int64s, Trace, TraceError, Uint64s, mix
from mainstem.settings.fields import INT32_MAX
from mainstem.settings.replay import TraceOptions

SHOWN = 20
"""Number of bad lines to report; all are counted."""


_FIRST_LINES = 16  # to detect the format by
_BATCH = 1 << 17  # requests and blocks in memory at once, approximately
_SHOWN_BYTES = 160
_CODES = {  # type codes of columns for `array`; names of blocks are read as Q
    **{name: dtype.char for name, dtype in COLUMNS.items() if name != "offsets"},
    "length": "q",
    "seed": "Q",
    "blocks": "Q",
}


def open_trace(
    path: str | os.PathLike[str],
    options: TraceOptions = TraceOptions(),
    *,
    progress: Progress | None = None,
) -> Trace:
    """Opens a trace from a file of any format, compressed or not, or from standard input. Reads it once.

    Args:
        path: path of the file; "-" is standard input.
        options: its format, and what to do with bad lines.
        progress: called with the bytes read and the bytes of the file (0: unknown).

    Raises:
        TraceError: the file is not a trace, is damaged, or has a bad line or no good one.
        BadArgument: an argument is outside its range, or does not apply to the format.
        BackendUnavailable: the package for a compression or a tokenizer is missing.
        OSError: the file cannot be read.
    """
    with Source(path, progress) as source:
        if options.format == "mstrace" or (options.format == "auto" and source.head == MAGIC):
            return _ready_made(source, options)
        return _Reader(source, options).trace()


def _ready_made(source: Source, options: TraceOptions) -> Trace:
    with tempfile.TemporaryFile() as file:
        if source.plain:
            trace = Trace.open(source.name)
        else:
            source.copy(file)
            file.flush()
            trace = Trace.read(file, source.name)
    if options.block_size not in (None, trace.block_size):
        raise BadArgument("block_size", options.block_size, f"{trace.block_size}, as in the file, or left out")
    _refuse_tokenizer(options.tokenizer, "mstrace")
    _refuse_rules(options.prompt_rules, "mstrace")
    return trace


def _refuse_tokenizer(tokenizer: str | None, format: str) -> None:
    if tokenizer is not None:
        raise BadArgument("tokenizer", tokenizer, f"left out: a trace of format {format} has no text")


def _refuse_rules(sources: Sequence[str], format: str) -> None:
    """Refuses rules of prompts for traces that have no messages: a text that a template has rendered has none."""
    if sources:
        wanted = f"left out: a trace of format {format} has no messages; rules apply to bodies of requests"
        raise BadArgument("prompt_rules", ", ".join(sources), wanted)


class _Reader:
    """Reads the lines of one source."""

    def __init__(self, source: Source, options: TraceOptions) -> None:
        self._source = source
        self._skips = options.on_bad == "skip"
        self._decode = _decoder()
        self._lines = source.lines()
        self._first = list(islice(self._lines, _FIRST_LINES))
        named = (row for row in FORMATS if row.name == options.format)
        self._format = self._detect_format() if options.format == "auto" else next(named)
        self._notes: list[str] = []
        self._bad: list[str] = []
        self._bad_lines = 0
        self._rewrites: Rewrites | None = None
        self._name = os.path.basename(source.name).partition(".")[0] or source.name
        self._reading = Reading(
            options.block_size or self._format.block_size or self._recorded_block_size(),
            self._tokenizer(options.tokenizer),
            self._rewrite(options.prompt_rules),
        )

    def trace(self) -> Trace:
        columns = _Columns()
        trace = Trace.of(
            self._batches(columns),
            block_size=self._reading.block_size,
            name=self._name,
            tenants=columns.tenants,
            kinds=columns.kinds,
            notes=self._notes,
        )
        if len(trace) == 0:
            raise TraceError(f"{self._source.name} has no request{self._instead()}")
        return trace

    def _batches(self, columns: _Columns) -> Iterator[Batch]:
        for number, line in chain(self._first, self._lines):
            request = self._request(number, line)
            if request is not None and columns.add(request) >= _BATCH:
                yield columns.take()
        yield columns.take()
        if not columns.timed:
            self._notes.append("The first request has no time, so all requests arrive at once, in file order.")
        if (secrets := len(self._reading.keys)) > 1:
            self._notes.append(f"Recorded under {secrets} secrets: prompts under different secrets share no blocks.")
        if self._rewrites is not None:
            self._notes.append(self._rewrites.said)
        if self._bad_lines:
            more = ", and more" if self._bad_lines > len(self._bad) else ""
            self._notes.append(f"Bad lines, left out: {self._bad_lines} ({'; '.join(self._bad)}{more}).")

    def _request(self, number: int, line: bytes) -> Request | None:
        try:
            return self._format.read(self._object(line), self._reading)
        except BadLine as bad:
            if not self._skips:
                raise TraceError(
                    f"{self._source.name}, line {number}: {bad}. Expected for {self._format.name}: "
                    f"{self._format.expected}. The line: {_shown(line)} (--on-bad skip leaves bad lines out)",
                    number,
                ) from bad
            self._bad_lines += 1
            if len(self._bad) < SHOWN:
                self._bad.append(f"line {number}: {bad}")
            return None

    def _object(self, line: bytes) -> Line:
        if len(line) > MAX_LINE_BYTES:
            raise BadLine(f"it is longer than {MAX_LINE_BYTES} bytes")
        try:
            found = self._decode(line)
        except (ValueError, RecursionError) as error:
            raise BadLine(f"not JSON ({error})") from error
        if not isinstance(found, dict):
            raise BadLine("not a JSON object")
        return found

    def _objects(self) -> Iterator[Line]:
        """Yields the first lines that are objects."""
        for _, line in self._first:
            with suppress(BadLine):
                yield self._object(line)

    def _detect_format(self) -> Format:
        found = next((row for line in self._objects() for row in FORMATS if row.fits(line)), None)
        if found is None:
            raise TraceError(f"the first lines of {self._source.name} have no known trace format{self._instead()}")
        return found

    def _instead(self) -> str:
        rows = "; ".join(f"{row.name}: {row.expected}" for row in FORMATS)
        shown = f"Line {self._first[0][0]} is: {_shown(self._first[0][1])}" if self._first else "It is empty"
        return f". Expected: one JSON object per line, such as {rows}. {shown}"

    def _recorded_block_size(self) -> int:
        """Returns the block size from the header of a recording."""
        header: Line = next(self._objects(), {})
        size = header.get("block_size")
        if header.get("format") != RECORDING or type(size) is not int or not 1 <= size <= INT32_MAX:
            raise TraceError(f"{self._source.name} does not begin with the header of a recording{self._instead()}", 1)
        return size

    def _tokenizer(self, name: str | None) -> Tokenize:
        if self._format.name != "openai":
            _refuse_tokenizer(name, self._format.name)
            return as_bytes
        self._notes.append(f"Tokens are those of {name}." if name else BYTES_NOTE)
        return as_bytes if name is None else Tokenizer(name)

    def _rewrite(self, sources: Sequence[str]) -> Rewrite:
        if not sources:
            return lambda body, url: body
        if self._format.name != "openai":
            _refuse_rules(sources, self._format.name)
        self._rewrites = Rewrites(sources)
        self._name += ", after rules"
        return self._rewrites


def _shown(line: bytes) -> str:
    text = line[:_SHOWN_BYTES].decode(errors="replace")
    return ascii(text)[1:-1] + ("..." if len(line) > _SHOWN_BYTES else "")


def _decoder() -> Callable[[bytes], Any]:
    try:
        return cast("Callable[[bytes], Any]", importlib.import_module("msgspec.json").Decoder().decode)
    except ImportError as error:
        if not is_missing(error, "msgspec"):
            raise
        return partial(json.loads, parse_constant=_no_number)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number")


class _Columns:
    """Collects requests into batches."""

    def __init__(self) -> None:
        self.tenants = {"": 0}
        self.kinds = {"": 0}
        self._now_s: float | None = None
        self.timed = True
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _CODES.items()}

    def add(self, request: Request) -> int:
        """Adds a request; returns how many requests and blocks there are now."""
        columns = self._columns
        columns["time_s"].append(self._time(request.time_s))
        columns["input_tokens"].append(request.input_tokens)
        columns["output_tokens"].append(request.output_tokens)
        columns["chat"].append(request.chat)
        columns["turn"].append(request.turn)
        columns["tenant"].append(self.tenants.setdefault(request.tenant, len(self.tenants)))
        columns["kind"].append(self.kinds.setdefault(request.kind, len(self.kinds)))
        columns["length"].append(len(request.blocks))
        columns["seed"].append(hashed(request.model) if request.model else 0)
        columns["blocks"].extend(request.blocks)
        return len(columns["time_s"]) + len(columns["blocks"])

    def _time(self, given_s: float | None) -> float:
        if self._now_s is None:
            self._now_s, self.timed = given_s or 0.0, given_s is not None
        elif given_s is not None and self.timed:
            self._now_s = given_s
        return self._now_s

    def take(self) -> Batch:
        """Returns a batch of the requests added since the last call."""
        found: dict[str, NDArray[Any]] = {name: np.array(column) for name, column in self._columns.items()}
        self._clear()
        offsets = np.concatenate([[0], np.cumsum(found.pop("length"))]).astype(np.int64)
        blocks = _chained(found.pop("blocks"), offsets, found.pop("seed"))
        return Batch(offsets=offsets, blocks=blocks, **found)


def _chained(ids: Uint64s, offsets: Int64s, seeds: Uint64s) -> Uint64s:
    """Returns names that cover all ids from the request's first one on, and their positions: sums of mixed 64 bits."""
    lengths = np.diff(offsets)
    depths = (np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)).astype(np.uint64)
    sums = np.cumsum(mix(ids ^ mix((depths + np.uint64(1)) * GOLDEN)), dtype=np.uint64)
    before = np.concatenate([np.zeros(1, np.uint64), sums])[offsets[:-1]]
    return mix(sums - np.repeat(before - seeds, lengths))
