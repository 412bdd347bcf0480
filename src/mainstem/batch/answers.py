"""The answers to a batch: a file to which whole lines are appended, by OpenAI's batch format.

    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}

The id of an answer is a digest of its request, so a file says by itself what is answered in it. A process that is
killed leaves a whole file, or one with a part of a line at its end, which the next one cuts off.
"""  # noqa: E501  # a line as the file has it

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mainstem.batch.lines import Requests
from mainstem.errors import BadArgument, MainstemError

Write = Callable[[int, bytes], int]
"""Writes to a file descriptor, as `os.write`."""


class Response(Struct):
    """What a server answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(Struct):
    """Why there is no response."""

    code: str
    message: str


class Answer(Struct):
    """A line: a response, or an error."""

    id: str
    custom_id: str
    response: Response | None
    error: Failure | None


class _Status(Struct):
    status_code: int = 0


class _Code(Struct):
    code: str = ""


class _Known(Struct):
    """What is read again of an answer."""

    id: str
    custom_id: str
    response: _Status | None = None
    error: _Code | None = None


class Answers:
    """The answers to a batch in a file. Any thread may add some.

    Args:
        path: of the file, which is made if it is not there.
        requests: of the batch.
        write: appends bytes.
        clock: seconds, monotonic.
        only_reads: the file is not changed, nor made: one that is not there has no answers.

    Attributes:
        answered: of each request, whether its answer is in the file: bool [requests].
        failed: how many answers are no success.
        codes: of the errors that are in the file.

    Raises:
        BadArgument: another process writes to the file, or it has something else than answers to these requests.
        OSError: it cannot be read or written.
    """

    def __init__(
        self,
        path: Path,
        requests: Requests,
        *,
        write: Write = os.write,
        clock: Callable[[], float] = time.monotonic,
        only_reads: bool = False,
    ) -> None:
        self._path, self._requests, self._write, self._clock = path, requests, write, clock
        self._only_reads = only_reads
        self._lock = threading.Lock()  # guards all below
        self.answered: NDArray[np.bool_] = np.zeros(len(requests), np.bool_)
        self.failed = 0
        self.codes: set[str] = set()
        self._file: IO[bytes]
        self._synced_s = clock()
        if only_reads:
            self._file = open(path if path.exists() else os.devnull, "rb")  # noqa: SIM115  # `close` closes it
        else:
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
        try:
            self._end = self._read(self._file)
        except BaseException:
            self._file.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of the file."""
        with self._lock:
            return self._end

    def add(self, index: int, response: Response | None, error: Failure | None = None) -> None:
        """Appends the answer to a request. It is on the disk about a second later.

        Raises:
            MainstemError: the disk is full, or fails. All earlier answers are whole, and this one is not there.
        """
        answer = Answer(self._requests.id(index), self._requests[index].custom_id, response, error)
        line = msgspec.json.encode(answer) + b"\n"
        with self._lock:
            assert not self.answered[index], "a request is answered once"
            try:
                self._append(line)
            except OSError as failed:
                os.ftruncate(self._file.fileno(), self._end)
                message = f"{self._path}: {failed.strerror}; all answers before are kept"
                raise MainstemError(message) from failed
            self._end += len(line)
            self.answered[index] = True
            self.failed += response is None or response.status_code != 200
            self.codes |= set() if error is None else {error.code}

    def close(self) -> None:
        """Brings all answers to the disk, and closes the file."""
        with self._lock:
            if not self._file.closed:
                if not self._only_reads:
                    os.fsync(self._file.fileno())
                self._file.close()

    def _append(self, line: bytes) -> None:
        written, file = 0, self._file.fileno()
        os.lseek(file, self._end, os.SEEK_SET)
        while written < len(line):  # a disk that is almost full takes a part
            written += self._write(file, line[written:])
        if self._clock() - self._synced_s >= 1:
            os.fsync(file)
            self._synced_s = self._clock()

    def _read(self, file: IO[bytes]) -> int:
        """Reads what is answered, cuts off a line that was not finished, and returns the end of the rest."""
        try:
            if not self._only_reads:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise self._wrong("a file that no other process writes answers to") from None
        end = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                known = msgspec.json.decode(line, type=_Known)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise self._wrong(f"a file of answers: line {number} is none") from None
            index = self._requests.find(known.id)
            if index is None:
                raise self._wrong(f"a file of answers to these requests: line {number} answers another one") from None
            if self.answered[index]:
                raise self._wrong(f"a file in which each request is answered once: line {number} is its second answer")
            self.answered[index] = True
            self.failed += known.response is None or known.response.status_code != 200
            self.codes |= set() if known.error is None else {known.error.code}
            end += len(line)
        if not self._only_reads:
            os.ftruncate(file.fileno(), end)
        return end

    def _wrong(self, allowed: str) -> BadArgument:
        return BadArgument("output", str(self._path), allowed)
