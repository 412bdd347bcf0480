"""The requests of a batch: a file with a line of JSON each, by OpenAI's batch format.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ..., "messages": [...]}}

All lines are read and checked before the first one is sent. Of each, its place in the file and a digest are kept, 32
bytes in all, and not its text.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from mainstem.errors import MainstemError

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/embeddings", "/v1/score", "/v1/rerank",
)  # fmt: skip
"""The routes that a request of a batch may be for."""

MAX_LINE_BYTES = 1 << 28
"""The longest line, unless a server that answers it says less."""

_MOST_PROBLEMS = 100  # of a file, that are told
_LONGEST_ID = 128  # characters of a custom_id
_PREFIX = "batch_req_"


class Line(Struct):
    """A request. `body`: its JSON."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=_LONGEST_ID)]
    method: str
    url: str
    body: msgspec.Raw


class _Body(Struct):
    """What is read of a body before it is sent. Its other fields are for the server to check."""

    stream: bool | None = None
    background: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None


class Problem(NamedTuple):
    """Why a line cannot be sent. Line: its number, from 1."""

    line: int
    code: str
    message: str


class BadBatch(MainstemError, ValueError):
    """Lines of a batch cannot be sent.

    Args:
        problems: the first ones.
        more: whether there are others.
    """

    def __init__(self, problems: Sequence[Problem], *, more: bool = False) -> None:
        shown = "; ".join(f"line {each.line}: {each.message}" for each in problems[:5])
        super().__init__(f"{shown}{'; and more' if more or len(problems) > 5 else ''}")
        self.problems = list(problems)


class Requests:
    """The requests of a file, in its order.

    Args:
        path: of the file. It must not change while it is open.
        only: the route that all of them must be for; None: any of `URLS`.
        most_bytes: of a line, without its end. No more of a longer one is held in memory.

    Attributes:
        answer_tokens: of each request, the most tokens that its answer may have; 0: it does not say.

    Raises:
        BadBatch: a line is broken, or there is none.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path, only: str | None = None, *, most_bytes: int = MAX_LINE_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._file = open(path, "rb")  # noqa: SIM115  # `close` closes it
        try:
            self._read(URLS if only is None else (only,))
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __len__(self) -> int:
        return len(self._begins)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._file.fileno()).st_size

    def __getitem__(self, index: int) -> Line:
        """Reads a request.

        Raises:
            MainstemError: the file has changed.
        """
        begin, end = int(self._begins[index]), int(self._ends[index])
        line = os.pread(self._file.fileno(), end - begin, begin)
        if _digest(line) != self._digests[index].tobytes():
            raise MainstemError(f"{self._path} has changed since it was read")
        return msgspec.json.decode(line, type=Line)

    def id(self, index: int) -> str:
        """Returns the id of a request's answer: a digest of its line."""
        digest: bytes = self._digests[index].tobytes()
        return _PREFIX + digest.hex()

    def find(self, id: str) -> int | None:
        """Returns the request with the id of an answer; None: it is not in this file."""
        try:
            wanted = np.frombuffer(bytes.fromhex(id.removeprefix(_PREFIX)), np.uint64)
        except ValueError:
            return None
        if len(wanted) != 2:
            return None
        first, last = (np.searchsorted(self._heads, wanted[0], side) for side in ("left", "right"))
        places = self._by_head[int(first) : int(last)]
        return next((int(at) for at in places if (self._digests[at] == wanted).all()), None)

    def _read(self, urls: Sequence[str]) -> None:
        begins, ends, numbers = array("q"), array("q"), array("q")
        keys, tokens, digests = array("Q"), array("q"), bytearray()
        problems: list[Problem] = []
        for number, begin, line in self._lines():
            if len(problems) > _MOST_PROBLEMS:
                break
            try:
                if line is None:
                    raise _Refused("line_too_long", f"longer than {self._most_bytes:,} bytes")
                parsed, body = _parsed(line, urls)
            except _Refused as refused:
                problems.append(Problem(number, *refused.args))
                continue
            begins.append(begin)
            ends.append(begin + len(line))
            numbers.append(number)
            keys.append(int.from_bytes(hashlib.blake2b(parsed.custom_id.encode(), digest_size=8).digest()))
            most = body.max_completion_tokens or body.max_tokens or body.max_output_tokens or 0
            tokens.append(min(max(most, 0), 2**31))
            digests += _digest(line)
        self._begins, self._ends = np.array(begins, np.int64), np.array(ends, np.int64)
        self._digests = np.frombuffer(bytes(digests), np.uint64).reshape(-1, 2)
        self._by_head = np.argsort(self._digests[:, 0], kind="stable")
        self._heads = self._digests[self._by_head, 0]
        self.answer_tokens: NDArray[np.int64] = np.array(tokens, np.int64)
        problems += self._doubles(np.array(keys, np.uint64), np.array(numbers, np.int64))
        if not problems and not len(self):
            problems = [Problem(1, "empty_file", "the file has no request")]
        if problems:
            problems.sort()
            raise BadBatch(problems[:_MOST_PROBLEMS], more=len(problems) > _MOST_PROBLEMS)

    def _lines(self) -> Iterator[tuple[int, int, bytes | None]]:
        """Yields the number of each line that is not blank, its place, and its text; None: it is too long."""
        begin = number = 0
        while piece := self._file.readline(self._most_bytes + 1):
            number += 1
            if len(piece) > self._most_bytes and not piece.endswith(b"\n"):
                yield number, begin, None
                while piece and not piece.endswith(b"\n"):
                    begin += len(piece)
                    piece = self._file.readline(self._most_bytes + 1)
            elif text := piece.strip():
                yield number, begin + piece.index(text), text
            begin += len(piece)

    def _doubles(self, keys: NDArray[np.uint64], numbers: NDArray[np.int64]) -> Iterator[Problem]:
        """Yields the lines that have the `custom_id` of an earlier one."""
        order = np.argsort(keys, kind="stable")
        equal = np.flatnonzero(keys[order][1:] == keys[order][:-1])
        for at in equal[: _MOST_PROBLEMS + 1].tolist():
            earlier, later = int(order[at]), int(order[at + 1])
            id = self[later].custom_id
            if self[earlier].custom_id == id:  # and not only its digest
                message = f"the custom_id {id!r} is that of line {numbers[earlier]}, too"
                yield Problem(int(numbers[later]), "duplicate_custom_id", message)


class _Refused(Exception):
    """A line cannot be sent: a code, and the reason."""


def _parsed(line: bytes, urls: Sequence[str]) -> tuple[Line, _Body]:
    try:
        line.decode()  # msgspec checks no text of what it keeps raw
        parsed = msgspec.json.decode(line, type=Line)
    except msgspec.ValidationError as error:
        raise _Refused("invalid_request", f"not a request: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Refused("invalid_json_line", f"not JSON: {error}") from None
    if parsed.method != "POST":
        raise _Refused("invalid_method", f"method: must be POST, not {parsed.method[:100]!r}")
    if parsed.url not in urls:
        raise _Refused("invalid_url", f"url: must be {' or '.join(urls)}, not {parsed.url[:100]!r}")
    try:
        body = msgspec.json.decode(parsed.body, type=_Body)
    except msgspec.ValidationError as error:
        raise _Refused("invalid_request", f"body: {error}") from None
    for name in ("stream", "background"):
        if getattr(body, name):
            raise _Refused("invalid_request", f"body.{name}: must be left out in a batch")
    return parsed, body


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=16, person=b"mainstem request").digest()
