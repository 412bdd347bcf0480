"""Streams numbered lines from a file or from standard input, compressed (xz, gzip, zstd) or not.

Detects the compression by the first bytes of a file, not by its name. Knows nothing about the contents of a line.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import IO, Any

from mainstem.imports import load_package
from mainstem.replay.trace import TraceError

MAX_LINE_BYTES = 64 << 20
"""Maximum length of a line; the rest is dropped. A prompt of a million tokens has about 8 MB."""

Progress = Callable[[int, int], None]
"""Called now and then with the bytes read and the bytes of the file (0: unknown)."""

_BOM = b"\xef\xbb\xbf"
_FRAME_INPUT = 4096  # small, because it is decompressed at once: a few hundred bytes can become a megabyte


class Source:
    """A file that is read once, from the start.

    Args:
        path: path of the file; "-" is standard input.
        progress: see `Progress`.

    Raises:
        OSError: it cannot be opened.
        TraceError: it is damaged, or standard input is closed.
        BackendUnavailable: it is compressed with zstd, and the package zstandard is missing.
    """

    def __init__(self, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
        self.name = os.fspath(path)
        self._progress = progress
        self._read = 0
        with ExitStack() as undo:
            self._file = _standard_input() if self.name == "-" else undo.enter_context(open(self.name, "rb"))
            status = None if self.name == "-" else os.fstat(self._file.fileno())
            self._size = 0 if status is None else status.st_size
            self._again = status is not None and stat.S_ISREG(status.st_mode)  # whether it can be opened again
            self._unpack()
            self._close = undo.pop_all()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close.close()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yields lines with their numbers, from 1. Skips blank lines, and cuts lines that are too long.

        Raises:
            TraceError: the compressed data is damaged or truncated.
            OSError: it cannot be read.
        """
        number = 0
        while line := self._guarded(number, lambda: self._stream.readline(MAX_LINE_BYTES + 1)):
            number += 1
            rest = line
            while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = self._guarded(number, lambda: self._stream.readline(MAX_LINE_BYTES + 1))
            if line := line.removeprefix(_BOM).strip():
                yield number, line

    def copy(self, target: IO[bytes]) -> None:
        """Writes the decompressed contents to `target`. Raises what `lines` raises."""
        while data := self._guarded(0, lambda: self._stream.read(1 << 20)):
            target.write(data)

    def _unpack(self) -> None:
        head, rest = _front(_Raw(self._take))
        unpack = next((unpack for magic, unpack in _COMPRESSED.items() if head.startswith(magic)), None)
        self.plain = unpack is None and self._again
        try:
            self.head, self._stream = (head, rest) if unpack is None else _front(unpack(rest))
        except _DAMAGE as error:
            raise self._damaged(0, error) from error

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        self._read += len(data)
        if self._progress is not None:
            self._progress(self._read, self._size)
        return data

    def _guarded(self, number: int, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except _DAMAGE as error:
            raise self._damaged(number, error) from error

    def _damaged(self, number: int, error: Exception) -> TraceError:
        where = f" after line {number}" if number else ""
        return TraceError(f"{self.name} is damaged or cut short{where}: {error}", number or None)


def _standard_input() -> IO[bytes]:
    if sys.stdin is None:
        raise TraceError("standard input is closed")
    return sys.stdin.buffer


class _Raw(io.RawIOBase):
    """A stream over a function that returns up to n bytes, and none at the end; pushed-back bytes come first."""

    def __init__(self, take: Callable[[int], bytes], pushed: bytes = b"") -> None:
        self._take = take
        self._pushed = pushed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._pushed or self._take(len(buffer))
        data, self._pushed = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


class _Frames:
    """Decompresses frame after frame; raises if the last frame is incomplete or is not a frame."""

    def __init__(self, source: IO[bytes], begin: Callable[[], Any], padding: bytes = b"") -> None:
        self._source = source
        self._begin = begin
        self._padding = padding  # allowed between frames
        self._frame: Any = None

    def take(self, size: int) -> bytes:
        """Returns the next bytes, in any number; none at the end."""
        del size
        out = b""
        while not out and (data := self._source.read(_FRAME_INPUT)):
            while data := data if self._frame else data.lstrip(self._padding):
                self._frame = self._frame or self._begin()
                out += self._frame.decompress(data)
                data = self._frame.unused_data if self._frame.eof else b""
                self._frame = None if self._frame.eof else self._frame
        if not out and self._frame is not None:
            raise EOFError("the last frame is incomplete")
        return out


def _xz(source: IO[bytes]) -> io.RawIOBase:
    """Decompresses xz. Not with `lzma.LZMAFile`, which silently ignores anything after the last frame."""
    return _Raw(_Frames(source, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padding=b"\0").take)


def _zstd(source: IO[bytes]) -> io.RawIOBase:
    zstandard = load_package("zstandard", "a file in zstd needs the package zstandard: pip install 'mainstem[zstd]'")
    frames = _Frames(source, lambda: zstandard.ZstdDecompressor().decompressobj())

    def take(size: int) -> bytes:
        try:
            return frames.take(size)
        except zstandard.ZstdError as error:
            raise zlib.error(str(error)) from error

    return _Raw(take)


def _front(raw: io.RawIOBase | IO[bytes]) -> tuple[bytes, IO[bytes]]:
    """Returns the first 8 bytes of a stream, and the stream including them."""
    head = b""
    while len(head) < 8 and (data := raw.read(8 - len(head))):
        head += data
    return head, io.BufferedReader(_Raw(lambda size: raw.read(size) or b"", head), 1 << 16)


_COMPRESSED: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\xfd7zXZ\0": _xz,
    b"\x1f\x8b": lambda source: gzip.GzipFile(fileobj=source),
    b"\x28\xb5\x2f\xfd": _zstd,
}

_DAMAGE = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)
