"""Your own storage back end: SQLite in one class, checked by the conformance suite, named by `module:Class`."""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import ClassVar, Self

from tiers import PAGE_SIZE, NumpyMemory, run

import mainstem
from mainstem import HostTier
from mainstem.cache.identity import Identity
from mainstem.errors import StorageError
from mainstem.settings.engine import HostPolicy, StorageConfig
from mainstem.storage import ABSENT, Backend, BackendStats, Capabilities, Listed, conformance, open_backend
from mainstem.storage.options import check_options
from mainstem.tiers.storage.sealer import Sealer
from mainstem.tiers.storage.store import Store
from mainstem.tiers.storage.workers import ThreadWorkers


class SqliteBackend(Backend):
    """Stores values in a table. Errors of SQLite become a `StorageError`, which the tiers count as a miss."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=True, zero_copy=False, evicts=False, overwrites=True
    )

    def __init__(self, path: str, timeout_s: float = 5.0) -> None:
        self._turn, self._closed = threading.Lock(), False
        self._db = sqlite3.connect(path, timeout_s, check_same_thread=False)
        self._db.execute("CREATE TABLE IF NOT EXISTS pages (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`own_backend:SqliteBackend?path=pages.db`."""
        check_options(options, ("path",))
        return cls(options.get("path", "pages.db"))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        with self._using() as db:
            return [db.execute("SELECT 1 FROM pages WHERE key = ?", [key]).fetchone() is not None for key in keys]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        lengths = []
        with self._using() as db:
            for key, buffer in zip(keys, buffers, strict=True):
                (value,) = db.execute("SELECT value FROM pages WHERE key = ?", [key]).fetchone() or (None,)
                if value is not None and len(value) == len(buffer):
                    buffer[:] = value
                lengths.append(ABSENT if value is None else len(value))
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        with self._using() as db:
            db.executemany("INSERT OR REPLACE INTO pages VALUES (?, ?)", zip(keys, buffers, strict=True))
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._using() as db:
            db.executemany("DELETE FROM pages WHERE key = ?", ([key] for key in keys))

    def scan(self) -> Iterator[list[Listed]]:
        query, rows = "SELECT key, length(value) FROM pages WHERE key > ? ORDER BY key LIMIT 1000", [(b"", 0)]
        while rows:
            with self._using() as db:
                rows = db.execute(query, rows[-1][:1]).fetchall()
            yield [Listed(key, length) for key, length in rows]

    def clear(self) -> None:
        with self._using() as db:
            db.execute("DELETE FROM pages")

    def stats(self) -> BackendStats:
        with self._using() as db:
            return BackendStats(*db.execute("SELECT count(*), total(length(value)) FROM pages").fetchone())

    def close(self) -> None:
        with self._turn:
            self._closed = True
            self._db.close()

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """Opens a transaction; one thread at a time."""
        with self._turn:
            if self._closed:
                raise StorageError("closed", "the database is closed")
            try:
                with self._db:
                    yield self._db
            except sqlite3.Error as error:
                raise StorageError("io", str(error)) from error


IDENTITY = Identity(
    "toy", "weights 1", "float32", "none", "rows", "1 layer", "mha", "none", "none", "token ids/4", PAGE_SIZE
)


def serve_once(spec: str, prompt: list[int]) -> str:
    """Acts as a process with this store, which serves one prompt and ends."""
    memory = NumpyMemory(device_pages=32, host_pages=64)
    store = Store(
        open_backend(spec),
        Sealer(IDENTITY, b"a secret of at least 16 bytes"),
        StorageConfig(prefetch_min_tokens=PAGE_SIZE),
        readers=ThreadWorkers(2, "read"),
        writers=ThreadWorkers(1, "write"),
        clock=monotonic,
    )
    cache = mainstem.PrefixCache(
        32, PAGE_SIZE, host=HostTier(memory, HostPolicy(load_min_tokens=PAGE_SIZE)), store=store
    )
    cache.tiers.prefetch(prompt)
    cache.tiers.drain(5)  # a scheduler would run other requests meanwhile
    where = run(cache, memory, prompt)
    cache.tiers.drain(5)  # writes to the store complete in the background
    stats = cache.tiers.stats()
    cache.tiers.close()
    return f"{where}; {stats.prefetched} pages came from the database, {stats.stored} went into it"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = conformance.check(lambda: SqliteBackend(f"{folder}/checked.db"))
        for result in results:
            print(result)
        assert all(result.passed for result in results)
        spec = f"own_backend:SqliteBackend?path={folder}/pages.db"
        print(f"\nmainstem serve --storage '{spec}'  would serve a model with it. Here, a toy:")
        for process in ("first", "second"):
            print(f"{process} process: {serve_once(spec, list(range(42)))}")


if __name__ == "__main__":
    main()
