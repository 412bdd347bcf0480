"""The file `index`: a record of each change, in their order. The last record of a key counts.

It does not know which values are still stored, so its owner decides when to rewrite it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct

from mainstem.storage.file.disk import Folder
from mainstem.storage.file.space import Entry

RECORD = Struct("<32s16sqqQ")  # little-endian, 72 bytes
"""key, digest of the value, offset in `values` (-1: deleted), length, checksum of the fields before it."""

EMPTY = bytes(RECORD.size)
"""A record that does not verify."""

SLACK_RECORDS = 1024
"""The index is long when it has more records than twice the live ones plus this."""

_BODY = Struct(RECORD.format[:-1])
_FORMAT = 0x6D61696E7374656D + 1  # seeds the checksum: records of another format version do not verify


class Index:
    """The records of a store. One thread at a time.

    Args:
        folder: has the file.
        checksum: of bytes, under a seed.
    """

    def __init__(self, folder: Folder, checksum: Callable[[bytes | memoryview, int], int]) -> None:
        self._folder, self._checksum = folder, checksum
        self._places = 0  # that may have a record

    def __len__(self) -> int:
        """Counts the places that may have a record."""
        return self._places

    def is_long(self, live: int, more: int) -> bool:
        """Whether it should be rewritten before more records, given the number of live ones."""
        return self._places + more > 2 * live + SLACK_RECORDS

    def record(self, key: bytes, entry: Entry) -> bytes:
        """Returns a record for `append`."""
        body = _BODY.pack(key, entry.digest, entry.offset, entry.length)
        return body + self._checksum(body, _FORMAT).to_bytes(8, "little")

    def load(self) -> Iterator[tuple[bytes, Entry]]:
        """Yields what the records say that verify, the oldest first. Later records go after the last of them."""
        size = self._folder.size("index")
        chunk = memoryview(bytearray(RECORD.size << 14))
        for start in range(0, size, len(chunk)):
            whole = self._folder.read("index", [chunk], start) // RECORD.size
            for at, (key, digest, offset, length, checksum) in enumerate(
                RECORD.iter_unpack(chunk[: whole * RECORD.size]), start // RECORD.size
            ):
                body = chunk[at * RECORD.size - start :][: _BODY.size]
                if self._checksum(body, _FORMAT) == checksum:
                    self._places = at + 1
                    yield key, Entry(offset, length, digest)

    def append(self, records: Sequence[bytes]) -> None:
        """Writes records. Their places are used even if this fails (rule 3)."""
        offset = self._places * RECORD.size
        self._places += len(records)
        self._folder.write("index", [memoryview(b"".join(records))], offset)

    def rewrite(self, live: Iterable[tuple[bytes, Entry]]) -> None:
        """Replaces the file atomically by one with these records only."""
        records = [self.record(key, entry) for key, entry in live]
        self._folder.replace("index", memoryview(b"".join(records)))
        self._places = len(records)
