"""Uploads: the fields of a form (RFC 7578), and its file, which goes to the disk as it comes."""

from __future__ import annotations

import email
import re
from collections.abc import Callable
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import IO

import anyio
import anyio.to_thread
from starlette.requests import Request

from mainstem.server.errors import ApiError, wrong

_MOST_FIELDS = 1 << 14  # bytes of headers and of fields
_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.I | re.A)


class Form:
    """The form of an upload, read piece by piece.

    Args:
        content_type: of the request.
        file: gets what is uploaded.

    Attributes:
        fields: the texts of fields.
        filename: of the file; None: none has come.

    Raises:
        ApiError: 400; the type is none of a form.
    """

    def __init__(self, content_type: str, file: IO[bytes]) -> None:
        found = _BOUNDARY.match(content_type)
        if found is None:
            raise wrong("Content-Type", "must be multipart/form-data with a boundary")
        self._line = b"\r\n--" + (found[1] or found[2]).encode()
        self._file = file
        self._buffer = b"\r\n"  # the first line of a boundary need not have one before it
        self._field: str | None = ""  # that is read now; None: the head of the next part; "": nothing
        self._ended = False
        self._parts: dict[str, bytes] = {}
        self.filename: str | None = None

    @property
    def fields(self) -> dict[str, str]:
        """The texts of fields.

        Raises:
            ApiError: 400; the form has not ended, or has no file.
        """
        if not self._ended or self.filename is None:
            raise wrong("file", "this field is required" if self._ended else "the form has no end")
        return {name: value.decode(errors="replace") for name, value in self._parts.items()}

    def feed(self, data: bytes) -> None:
        """Reads a piece.

        Raises:
            ApiError: 400; it is no form, or has more than one file, or its fields are too long.
        """
        self._buffer += data
        while not self._ended and (self._head() if self._field is None else self._body()):
            pass
        if self._ended:
            self._buffer = b""

    def _body(self) -> bool:
        """Reads what is there of a part; returns whether it has ended."""
        end = self._buffer.find(self._line)
        taken = max(len(self._buffer) - len(self._line), 0) if end < 0 else end
        self._take(self._buffer[:taken])
        self._buffer = self._buffer[taken:]
        rest = len(self._line)
        if end < 0 or len(self._buffer) < rest + 2:
            return False
        mark, self._buffer = self._buffer[rest : rest + 2], self._buffer[rest + 2 :]
        if mark not in (b"--", b"\r\n"):
            raise wrong("body", "a line of the boundary goes on")
        self._field, self._ended = None, mark == b"--"
        return not self._ended

    def _head(self) -> bool:
        """Reads the head of a part; returns whether it is there."""
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if len(head) > _MOST_FIELDS:
            raise wrong("body", "the head of a part is too long")
        if not found:
            return False
        read = email.message_from_string(head.decode(errors="replace"))
        name = read.get_param("name", header="content-disposition")
        if not isinstance(name, str) or name in self._parts or (name == "file" and self.filename is not None):
            raise wrong("body", "each part must have a name of its own")
        if name == "file":
            self.filename = _filename(read) or "upload"
        else:
            self._parts[name] = b""
        self._field, self._buffer = name, rest
        return True

    def _take(self, data: bytes) -> None:
        if self._field == "file":
            self._file.write(data)
        elif self._field:
            self._parts[self._field] += data
            if sum(map(len, self._parts.values())) > _MOST_FIELDS:
                raise wrong(self._field[:100], "the fields of the form are too long")


def _filename(head: Message) -> str:
    """Returns the name of a file: that of `filename*` (RFC 5987), which has a charset, before a plain one."""
    given = head.get_params(failobj=[], header="content-disposition")
    named = [value for name, value in given if name.lower() == "filename"]
    try:
        found = next((collapse_rfc2231_value(value) for value in named if isinstance(value, tuple)), None)
    except ValueError:
        raise wrong("filename*", "must be UTF-8''NAME") from None
    name = found or (str(named[0]) if named else "")
    return name.encode(errors="replace").decode()


async def read_upload(http: Request, file: IO[bytes], fits: Callable[[int], bool]) -> Form:
    """Reads the form of a request.

    Args:
        http: the request.
        file: gets the file.
        fits: is told the bytes of the body so far, and returns whether they may be kept. It is called on a thread.

    Raises:
        ApiError: 413; they may not. 400; it is no form.
        ClientDisconnect: the client has gone.
        OSError: the disk is full.
    """
    form, size = Form(http.headers.get("content-type", ""), file), 0
    declared = http.headers.get("content-length", "")

    def feed(piece: bytes) -> bool:
        kept = fits(size)
        if kept:
            form.feed(piece)
        return kept

    if await anyio.to_thread.run_sync(fits, int(declared) if declared.isdecimal() else 0):
        async for piece in http.stream():
            size += len(piece)
            if not await anyio.to_thread.run_sync(feed, piece):
                break
        else:
            return form
    message = "The file is too large: no more is left for the files of this key (option --batch-bytes)."
    raise ApiError(413, message, code="file_too_large", headers={"Connection": "close"})
