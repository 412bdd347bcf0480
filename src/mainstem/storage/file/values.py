"""The file `values`: parts of it to and from buffers, in few calls. Reading verifies the content of the buffers.

It does not know which values the store holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from mainstem.storage.file.disk import Folder
from mainstem.storage.file.space import GRAIN_BYTES, Entry, Piece

READ_BYTES = 1 << 20
"""Values are read together up to this size. More is another task, which an idle thread can take."""

WRITE_BYTES = 1 << 30
"""The limit for one write call; Linux allows nearly twice as much."""

_ZEROS = memoryview(bytes(GRAIN_BYTES))
_DISCARD = memoryview(bytearray(GRAIN_BYTES))  # receives the bytes between values


class Values:
    """Reads and writes values. Several threads may read.

    Args:
        folder: has the file.
        digest: computes digests of values.
        junk: a grain of random bytes, which destroys values.
        threads: threads that read, with the caller's.
    """

    def __init__(self, folder: Folder, digest: Callable[[memoryview], bytes], junk: bytes, threads: int) -> None:
        self._folder, self._digest, self._junk, self._threads = folder, digest, memoryview(junk), threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), "file store")

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()

    def read(self, pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
        """Fills the buffers. Returns the pieces that do not verify, and those that could not be read.

        Raises:
            OSError: none could be read.
        """
        runs = list(_runs(pieces, READ_BYTES))
        corrupt: list[Piece] = []
        unread: list[Piece] = []
        errors: list[OSError] = []

        def work() -> None:
            while True:
                try:
                    first, last = runs.pop()
                except IndexError:
                    return
                try:
                    corrupt.extend(self._read_run(pieces[first:last]))
                except OSError as error:
                    unread.extend(pieces[first:last])
                    errors.append(error)

        helpers = [self._pool.submit(work) for _ in range(min(self._threads, len(runs)) - 1)]
        try:
            work()
        finally:  # no thread may write to the caller's buffers after this call
            wait(begun := [helper for helper in helpers if not helper.cancel()])
        for helper in begun:
            helper.result()  # raises any error that is not a disk error
        if errors and len(unread) == len(pieces):
            raise errors[0]
        return corrupt, unread

    def write(self, pieces: Iterable[Piece], doomed: Iterable[Entry]) -> None:
        """Writes values. Destroys the doomed ones that none of them overwrites from the first byte on.

        The bytes written over a value must differ from it: a new value that begins with the doomed one does not destroy
        it, and random bytes may equal a value of a few bytes. Only an index that lost records leads to such a value.
        """
        pieces = sorted(pieces, key=lambda piece: piece.entry.offset)
        starts = {entry.offset for _, entry, _ in pieces}
        for entry in doomed:
            if entry.offset not in starts:
                self._folder.write("values", [self._junk], entry.offset)
        for first, last in _runs(pieces, WRITE_BYTES):
            self._folder.write("values", _vector(pieces[first:last], _ZEROS), pieces[first].entry.offset)

    def _read_run(self, run: Sequence[Piece]) -> list[Piece]:
        """Fills the buffers of a run. Returns the pieces that do not verify."""
        self._folder.read("values", _vector(run, _DISCARD), run[0].entry.offset)
        return [piece for piece in run if self._digest(piece.buffer) != piece.entry.digest]


def _runs(pieces: Sequence[Piece], limit_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields half-open ranges of pieces that are contiguous in the file, up to the limit or of one piece."""
    first = start = end = 0
    for at, (_, entry, _) in enumerate(pieces):
        if entry.offset != end or entry.end - start > limit_bytes:
            if at:
                yield first, at
            first, start = at, entry.offset
        end = entry.end
    if pieces:
        yield first, len(pieces)


def _vector(pieces: Sequence[Piece], filler: memoryview) -> list[memoryview]:
    """Returns the buffers of pieces, with filler up to whole grains."""
    buffers = []
    for _, entry, buffer in pieces:
        buffers.append(buffer)
        if gap := entry.end - entry.offset - entry.length:
            buffers.append(filler[:gap])
    return buffers
