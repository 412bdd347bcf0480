"""The folder of files and batches: each for its owner only, in a number of bytes for each owner, for a time.

    ID.json     who owns it, and the object as clients see it; it is replaced as a whole
    ID.jsonl    the content of a file
    secret      makes names of owners from their keys, so that no key is in the folder

Owners are named by digests of their keys: an owner's batches go on after a restart, if the server still has the key.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from mainstem.errors import BadArgument, MainstemError
from mainstem.server.kept.response_store import ENTRY_BYTES


class FileObject(Struct, kw_only=True, tag="file", tag_field="object"):
    """A file, as clients see it."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"
    status_details: None = None


class BatchError(Struct):
    """Why a batch failed. Line: of its file, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct):
    """The errors of a batch."""

    data: list[BatchError]
    object: str = "list"


class Counts(Struct):
    """The requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(Struct, kw_only=True, tag="batch", tag_field="object"):
    """A batch, as clients see it. Times are seconds since the epoch."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None

    @property
    def ended_at(self) -> int | None:
        """When it ended; None: it has not."""
        times = (self.completed_at, self.failed_at, self.expired_at, self.cancelled_at)
        return next((at for at in times if at is not None), None)

    @property
    def files(self) -> tuple[str, str, str]:
        """The ids of its input, of its answers, and of its errors, also of files that nobody sees yet."""
        name = self.id.removeprefix("batch_")
        return self.input_file_id, f"file-{name}-output", f"file-{name}-errors"


class _Record(Struct):
    owner: str
    object: FileObject | BatchObject


Object = TypeVar("Object", FileObject, BatchObject)


class Shelf:
    """The folder of one server. Any thread may call it.

    Args:
        folder: it is made if it is not there.
        most_bytes: of the files and records of one owner.
        age_s: seconds after which a file, or a batch that ended, is deleted.
        now: seconds since the epoch.

    Attributes:
        secret: 32 bytes, which make names of owners.

    Raises:
        BadArgument: another server has the folder, or it cannot be used.
    """

    def __init__(self, folder: Path, most_bytes: int, age_s: float, now: Callable[[], float]) -> None:
        self._folder, self._most_bytes, self._age_s, self._now = folder, most_bytes, age_s, now
        self._lock = threading.Lock()  # guards all below
        self._records: dict[str, _Record] = {}  # by id, the oldest first
        self._sizes: dict[str, dict[str, int]] = {}  # by owner and id
        self._looked_at = -1  # the second in which it last looked for what is to be deleted
        try:
            with ExitStack() as undo:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._held = undo.enter_context(open(folder / "lock", "a"))
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.secret = self._secret()
                self._load()
                undo.pop_all()
        except BlockingIOError:
            raise BadArgument("batch_folder", str(folder), "a folder that no other server uses") from None
        except (OSError, msgspec.DecodeError) as error:
            raise BadArgument("batch_folder", str(folder), f"a folder of batches: {error}") from None

    def close(self) -> None:
        """Lets another server use the folder."""
        self._held.close()

    def path(self, id: str) -> Path:
        """Returns where the content of a file is."""
        return self._folder / f"{id}.jsonl"

    def said(self, error: MainstemError | OSError) -> str:
        """Returns what failed, without the server's paths."""
        if isinstance(error, OSError):
            why = type(error).__name__ if error.errno is None else os.strerror(error.errno)  # it may name folders, too
            return f"The server cannot read or write its files: {why}."
        return str(error).replace(f"{self._folder}{os.sep}", "")

    def reserve(self, owner: str, id: str, size: int) -> bool:
        """Counts a file that has no record yet, or has grown; returns whether its owner may have so many bytes."""
        with self._lock:
            self._expire()
            sizes = self._sizes.setdefault(owner, {})
            if sum(sizes.values()) - sizes.get(id, 0) + size > self._most_bytes:
                return False
            sizes[id] = size
            return True

    def forget(self, owner: str, id: str) -> None:
        """Deletes the content of a file that has no record."""
        with self._lock:
            self.path(id).unlink(missing_ok=True)
            self._sizes.get(owner, {}).pop(id, None)

    def expires(self, created_at: int) -> int:
        """Returns when a file expires."""
        return int(created_at + self._age_s)

    def put(self, owner: str, object: FileObject | BatchObject) -> None:
        """Keeps an object, in place of an earlier one with its id. It is on the disk when this returns."""
        part = self._folder / f"{object.id}.part"
        with self._lock:
            record = msgspec.json.encode(_Record(owner, object))  # not before: another thread may have put a later one
            with open(part, "wb") as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self._folder / f"{object.id}.json")
            sync(self._folder)
            self._enter(_Record(owner, object), len(record))

    def get(self, owner: str, id: str, kind: type[Object]) -> Object | None:
        """Returns an object; None: its owner has none with this id."""
        with self._lock:
            self._expire()
            record = self._records.get(id)
            if record is None or record.owner != owner or not isinstance(record.object, kind):
                return None
            return record.object

    def objects(self, owner: str, kind: type[Object]) -> list[Object]:
        """Returns what an owner has of a kind, the oldest first."""
        with self._lock:
            self._expire()
            owned = [each.object for each in self._records.values() if each.owner == owner]
            return [each for each in owned if isinstance(each, kind)]

    def unfinished(self) -> list[tuple[str, BatchObject]]:
        """Returns the batches that have not ended with their owners, the oldest first."""
        with self._lock:
            return self._unfinished()

    def delete(self, id: str) -> None:
        """Deletes an object and its content, if it is there."""
        with self._lock:
            if id in self._records:
                self._drop(id)

    def in_use(self, id: str) -> bool:
        """Whether a batch that has not ended needs a file."""
        return any(id in batch.files for _, batch in self.unfinished())

    def check(self) -> None:
        """Checks that sizes are those of the files, and that each record is on the disk.

        Raises:
            AssertionError: a rule is broken.
        """
        with self._lock:
            names = {path.stem for path in self._folder.glob("*.json")}
            assert names == self._records.keys(), "each record is on the disk, and no other"
            counted = {id for sizes in self._sizes.values() for id in sizes}
            assert names <= counted, "each record counts"
            contents = {path.stem for path in self._folder.glob("*.jsonl")}
            assert contents <= counted, "each content has an owner"

    def _secret(self) -> bytes:
        path = self._folder / "secret"
        if not path.exists():
            part = self._folder / "secret.part"
            part.write_bytes(secrets.token_bytes(32))
            part.chmod(0o600)
            os.replace(part, path)
        return path.read_bytes()

    def _load(self) -> None:
        for part in self._folder.glob("*.part"):
            part.unlink()
        read = [msgspec.json.decode(path.read_bytes(), type=_Record) for path in self._folder.glob("*.json")]
        for record in sorted(read, key=lambda each: (each.object.created_at, each.object.id)):
            self._enter(record, len(msgspec.json.encode(record)))
        unrecorded = {id: owner for owner, batch in self._unfinished() for id in batch.files}
        for path in self._folder.glob("*.jsonl"):
            if path.stem not in self._records and path.stem not in unrecorded:
                path.unlink()
            elif path.stem not in self._records:
                self._sizes[unrecorded[path.stem]][path.stem] = path.stat().st_size

    def _enter(self, record: _Record, size: int) -> None:
        self._records[record.object.id] = record
        content = record.object.bytes if isinstance(record.object, FileObject) else 0
        self._sizes.setdefault(record.owner, {})[record.object.id] = ENTRY_BYTES + size + content

    def _unfinished(self) -> list[tuple[str, BatchObject]]:
        found: list[Any] = [(each.owner, each.object) for each in self._records.values()]
        return [pair for pair in found if isinstance(pair[1], BatchObject) and pair[1].ended_at is None]

    def _expire(self) -> None:
        if int(self._now()) == self._looked_at:  # each answer of a batch comes here
            return
        self._looked_at = int(self._now())
        needed = {id for _, batch in self._unfinished() for id in batch.files}
        for id, record in list(self._records.items()):
            kept = record.object
            since = kept.created_at if isinstance(kept, FileObject) else kept.ended_at
            if since is not None and self._now() >= since + self._age_s and id not in needed:
                self._drop(id)

    def _drop(self, id: str) -> None:
        record = self._records.pop(id)
        (self._folder / f"{id}.json").unlink(missing_ok=True)
        self.path(id).unlink(missing_ok=True)
        sizes = self._sizes[record.owner]
        del sizes[id]
        if not sizes:
            del self._sizes[record.owner]


def sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
