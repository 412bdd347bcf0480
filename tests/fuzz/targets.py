"""What is fuzzed: each target takes any bytes, and may raise only the errors that its function names.

`make fuzz` searches for others; `tests/core/test_fuzz_corpus.py` replays what it has found. A target imports what it
drives when it is made, so that the fuzzer can instrument that, and that alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fuzz.calls import cache_calls, tree_calls

Run = Callable[[bytes], object]


class Target(NamedTuple):
    """One target.

    Args:
        name: of the target, and of its folder in the corpus.
        make: imports what it drives; returns what takes the bytes.
    """

    name: str
    make: Callable[[], Run]


def _in_a_file(read: Callable[[Path], object]) -> Run:
    """Gives a reader of files the bytes as a file."""
    folder = tempfile.TemporaryDirectory(prefix="fuzz-")
    path = Path(folder.name) / "input"

    def run(data: bytes, folder: object = folder) -> None:
        path.write_bytes(data)
        read(path)

    return run


# ---------------------------------------------------------------- traces


def _traces() -> Run:
    """The first byte chooses the format, and whether bad lines are skipped."""
    from mainstem.errors import BadArgument
    from mainstem.replay.readers.formats import FORMATS
    from mainstem.replay.readers.open import open_trace
    from mainstem.replay.trace import TraceError
    from mainstem.settings.replay import TraceOptions

    names: list[Any] = ["auto", *(row.name for row in FORMATS)]

    def read(path: Path) -> None:
        data = path.read_bytes()
        how = data[0] if data else 0
        path.write_bytes(data[1:])
        options = TraceOptions(format=names[how // 2 % len(names)], on_bad="skip" if how % 2 else "stop")
        with suppress(TraceError, BadArgument):
            open_trace(path, options)

    return _in_a_file(read)


def _converted_traces() -> Run:
    from mainstem.errors import BadArgument
    from mainstem.replay.readers.open import open_trace
    from mainstem.replay.trace import MAGIC, TraceError

    def read(path: Path) -> None:
        path.write_bytes(MAGIC + path.read_bytes())
        with suppress(TraceError, BadArgument):
            open_trace(path)

    return _in_a_file(read)


# ---------------------------------------------------------------- messages of other processes


def _events() -> Run:
    from mainstem.events.wire import decode, encode

    def run(data: bytes) -> None:
        try:
            batch = decode(data)
        except ValueError:
            return
        with suppress(ValueError, OverflowError):  # numbers that the format does not have, which msgspec takes
            assert decode(encode(batch)) == batch or batch.sent_s != batch.sent_s  # no number equals no number

    return run


def _owner() -> Run:
    """The first byte chooses the message."""
    from mainstem.owner import protocol

    readers: tuple[Callable[[memoryview], object], ...] = (
        protocol.Hello.unpack,
        protocol.Welcome.unpack,
        protocol.unpack_keys,
        protocol.unpack_sizes,
        protocol.unpack_places,
        protocol.unpack_listed,
        protocol.unpack_failure,
    )

    def run(data: bytes) -> None:
        if data:
            with suppress(protocol.Malformed):
                readers[data[0] % len(readers)](memoryview(data)[1:])

    return run


def _frames() -> Run:
    """What another process wrote where values were expected: nothing is copied where a length is wrong."""
    from mainstem.storage.framed import Frames

    frames = Frames(8192)

    def run(data: bytes) -> None:
        sizes = [each * 16 for each in data[:8]]
        keys = [bytes([at % 3]) for at in range(len(sizes))]
        buffers = [memoryview(bytearray(size)) for size in sizes]
        for round_ in frames.rounds(keys, buffers):
            assert len({frame.key for frame in round_}) == len(round_)
            assert all(frame.start + frame.size <= len(frames.memory) for frame in round_)
            frames.memory[: len(data)] = data
            for frame in round_:
                length = frames.take(frame)
                assert length == len(frame.buffer) or not any(frame.buffer)

    return run


# ---------------------------------------------------------------- the server


def _bodies() -> Run:
    """The first byte chooses the route."""
    from mainstem.server.apis.bodies import decode
    from mainstem.server.apis.generation import Linked
    from mainstem.server.apis.messages.request import read_count
    from mainstem.server.apis.table import APIS, Api
    from mainstem.server.errors import ApiError
    from mainstem.server.management import LoadAdapter, parse_hint, parse_remove

    def read(body: bytes, api: Api) -> object:
        request = api.read(body, None)
        return request.join([], {}) if isinstance(request, Linked) else request

    adapter = partial(decode, kind=LoadAdapter)
    routes: tuple[Callable[[bytes], object], ...] = (
        *(partial(read, api=api) for api in APIS.values()),
        read_count,
        parse_hint,
        parse_remove,
        adapter,
    )

    def run(data: bytes) -> None:
        if data:
            with suppress(ApiError):
                routes[data[0] % len(routes)](data[1:])

    return run


def _tools() -> Run:
    """A text in pieces: the first byte chooses the format, the second how long each piece is."""
    from mainstem.server.fields.tools import Tool, Tooling
    from mainstem.server.parsing.formats import FORMATS
    from mainstem.server.parsing.output import joined

    city = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
    tooling = Tooling((Tool("weather", "The weather.", city), Tool("time")))
    formats = [FORMATS[name] for name in sorted(FORMATS)]

    def scan(at: int, texts: Iterator[str]) -> list[Any]:
        parser = formats[at].parser(tooling)
        pieces = joined([*(piece for text in texts for piece in parser.feed(text)), *parser.close()])
        return [(type(piece).__name__, getattr(piece, "text", None), getattr(piece, "name", None)) for piece in pieces]

    def run(data: bytes) -> None:
        if len(data) < 3:
            return
        at, size = data[0] % len(formats), 1 + data[1] % 8
        text = data[2:].decode("utf-8", "replace")
        whole = scan(at, iter([text]))
        assert whole == scan(at, (text[begin : begin + size] for begin in range(0, len(text), size)))

    return run


# ---------------------------------------------------------------- settings


def _tenants() -> Run:
    from mainstem.errors import BadArgument
    from mainstem.settings.tenants import read_tenants

    def read(path: Path) -> None:
        with suppress(BadArgument):
            assert read_tenants(path).keys is not None

    return _in_a_file(read)


def _units() -> Run:
    from mainstem import units
    from mainstem.errors import BadArgument

    parsers: tuple[Callable[[str, str], object], ...] = (
        units.parse_bytes,
        units.parse_rate,
        units.parse_store,
        units.parse_seconds,
        units.parse_timeout,
        units.dtype_bytes,
    )

    def run(data: bytes) -> None:
        if data:
            with suppress(BadArgument):
                parsers[data[0] % len(parsers)]("value", data[1:].decode("utf-8", "replace"))

    return run


TARGETS = (
    Target("traces", _traces),
    Target("converted-traces", _converted_traces),
    Target("events", _events),
    Target("owner", _owner),
    Target("frames", _frames),
    Target("bodies", _bodies),
    Target("tools", _tools),
    Target("tenants", _tenants),
    Target("units", _units),
    Target("tree", tree_calls),
    Target("cache", cache_calls),
)
