"""S3 and compatible stores: each value is an object, `<prefix>/<64 hex digits>` in one bucket.

The package `obstore` signs, sends and retries requests. This module runs them concurrently under a deadline. They run
in threads: the coroutines of obstore are no faster, and abort the process if one is still running when the interpreter
exits (seen with 0.12.1).

    0 ............ timeout_s / 2 ....... * 3/4 ......... timeout_s
    | requests begin            | the last one's retries  | its last try ends

Once a request finds the server silent or unreachable, no further one starts. An object is read piece by piece and never
past the end of its buffer, regardless of the length that the server announced.

Obstore reads credentials from the environment (AWS_ACCESS_KEY_ID and the rest). The room in a bucket is unknown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from mainstem.errors import BackendUnavailable, BadArgument, StorageError, check_integer
from mainstem.imports import needs
from mainstem.storage.base import ABSENT, SCANNED, Backend, BackendStats, Capabilities, Listed
from mainstem.storage.options import Readers, parse_number, parse_text, read_options
from mainstem.units import parse_timeout

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Store

T = TypeVar("T")

OPTIONS: Readers = {
    "endpoint": ("endpoint", parse_text),
    "region": ("region", parse_text),
    "requests": ("requests", parse_number),
    "timeout": ("timeout_s", parse_timeout),
}

_PIECE_BYTES = 1 << 20

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")

_CAUSES = (
    ("full", re.compile(r"status code: 507|<Code>(QuotaExceeded|XMinioStorageFull|InsufficientStorage)")),
    ("timeout", re.compile(r"kind: Timeout|TimedOut")),
    ("refused", re.compile(r"status code: \d|PermissionDenied|Unauthenticated|MissingCredentials")),
    ("unreachable", re.compile(r"kind: (Connect|Interrupted)")),
)
"""Causes by the text of an obstore message. All other messages have the cause `protocol`."""


class S3Backend(Backend):
    """Values in a bucket.

    `get` reports an object that it cannot read as absent, and `put` one that it cannot write as not stored, if any
    request of the batch succeeded. If all requests failed, the call raises.

    Args:
        bucket: an existing bucket.
        prefix: prefix of the object names: parts of letters, digits and `_ . -`, separated by `/`.
        endpoint: URL of the server; None: Amazon's, or AWS_ENDPOINT_URL.
        region: region; None: AWS_REGION, or us-east-1.
        requests: the limit for concurrent requests.
        timeout_s: the limit for a call, above 0; for `clear`, the limit for each of its steps.

    Raises:
        BadArgument: an argument is out of its range.
        BackendUnavailable: the package `obstore` is missing, or the bucket cannot be listed.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=True, zero_copy=False, evicts=False, overwrites=True, batched=False
    )

    def __init__(
        self,
        bucket: str,
        prefix: str = "mainstem",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        requests: int = 16,
        timeout_s: float = 5.0,
    ) -> None:
        if not _BUCKET.fullmatch(bucket):
            raise BadArgument("bucket", bucket, "3 to 63 lower-case letters, digits, dots and hyphens")
        if not _PREFIX.fullmatch(prefix) or len(prefix) > 512:
            raise BadArgument("prefix", prefix, "parts of letters, digits and _.- separated by /, none starting with .")
        if endpoint is not None and not re.fullmatch(r"https?://[^\s/]+/?", endpoint):
            raise BadArgument("endpoint", endpoint, "http://host:port or https://host:port")
        self._threads = ThreadPoolExecutor(check_integer("requests", requests, 1, 1024), "mainstem-s3")
        with needs("obstore", "the package obstore is missing: pip install 'mainstem[s3]'"):
            from obstore.exceptions import BaseError
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._closed = False
        self._error: type[Exception] = BaseError
        try:
            with self._as_storage_error():
                self._store = _open_store(bucket, endpoint, region, timeout_s)
                next(iter(self._store.list(prefix, chunk_size=1)), None)
        except StorageError as error:
            self.close()
            raise BackendUnavailable(f"s3 bucket {bucket}: {error}") from error

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1`.

        Options: endpoint, region, requests, timeout (seconds).
        """
        arguments = read_options(options, OPTIONS)
        if not address.startswith("//"):
            raise BadArgument("storage address", address, "//bucket or //bucket/prefix")
        bucket, _, prefix = address[2:].partition("/")
        return cls(bucket, prefix.rstrip("/") or "mainstem", **arguments)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Sends one HEAD for each key."""
        return [length != ABSENT for length in _answers(self._lengths(keys), ABSENT)]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Sends one GET for each key, and stops it if the length differs."""
        pairs = list(zip(keys, buffers, strict=True))

        def read(at: int) -> int:
            key, buffer = pairs[at]
            found = self._found(lambda: self._store.get(self._path(key)))
            if found is None:
                return ABSENT
            size = int(found.meta["size"])
            return size if size != len(buffer) else _copy(found.stream(_PIECE_BYTES), buffer)

        return _answers(self._each(read, len(pairs)), ABSENT)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Sends one PUT for each key, never a multipart upload."""
        pairs = list(zip(keys, buffers, strict=True))

        def write(at: int) -> bool:
            key, buffer = pairs[at]
            self._store.put(self._path(key), buffer, use_multipart=False)
            return True

        results = self._each(write, len(pairs))
        return _answers([False if _is_full(result) else result for result in results], False)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Sends one request for each thousand keys."""
        with self._as_storage_error():
            if keys:
                self._store.delete([self._path(key) for key in keys])

    def scan(self) -> Iterator[Sequence[Listed]]:
        """Lists the prefix, a thousand objects at a time: those whose names are keys. Ages are of the last put."""
        ours = re.compile(re.escape(self._prefix) + "/([0-9a-f]{64})")
        with self._as_storage_error():
            for objects in self._store.list(self._prefix, chunk_size=SCANNED):
                named = [(found, ours.fullmatch(found["path"])) for found in objects]
                now_s = time.time()
                yield [
                    Listed(bytes.fromhex(name[1]), found["size"], max(0.0, now_s - found["last_modified"].timestamp()))
                    for found, name in named
                    if name
                ]

    def clear(self) -> None:
        """Deletes what `scan` lists."""
        for found in self.scan():
            self.delete([value.key for value in found])

    def stats(self) -> BackendStats:
        """Returns no counts: they would need a listing of all values."""
        self._check_open()
        return BackendStats()

    def close(self) -> None:
        """Starts no more requests. Running ones end by themselves."""
        self._closed = True
        self._threads.shutdown(wait=False)

    def _path(self, key: bytes) -> str:
        return f"{self._prefix}/{key.hex()}"

    def _lengths(self, keys: Sequence[bytes]) -> list[int | StorageError]:
        def head(at: int) -> int:
            found = self._found(lambda: self._store.head(self._path(keys[at])))
            return ABSENT if found is None else int(found["size"])

        return self._each(head, len(keys))

    def _found(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except FileNotFoundError:
            return None

    def _each(self, job: Callable[[int], T], count: int) -> list[T | StorageError]:
        """Runs jobs concurrently and returns their results. No job is running when it returns."""
        self._check_open()
        last_start_s = time.monotonic() + self._timeout_s / 2
        hopeless: list[StorageError] = []

        def run(at: int) -> T | StorageError:
            if hopeless:
                return hopeless[0]
            if time.monotonic() > last_start_s:
                return StorageError("timeout", "no time left for this request")
            try:
                with self._as_storage_error():
                    return job(at)
            except StorageError as error:
                if error.cause in ("timeout", "unreachable"):
                    hopeless.append(error)
                return error

        futures: list[Future[T | StorageError]] = []
        with suppress(RuntimeError):  # closed by another thread: no more jobs are accepted
            futures.extend(self._threads.submit(run, at) for at in range(count))
        wait(futures)
        self._check_open()
        return [future.result() for future in futures]

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("closed", "the s3 client is closed")

    @contextmanager
    def _as_storage_error(self) -> Iterator[None]:
        self._check_open()
        try:
            yield
        except (self._error, OSError) as error:
            text = str(error)
            cause = next((cause for cause, pattern in _CAUSES if pattern.search(text)), "protocol")
            raise StorageError(cause, text.partition("\n")[0][:300]) from error


def _open_store(bucket: str, endpoint: str | None, region: str | None, timeout_s: float) -> S3Store:
    """Opens a client whose requests end within half the timeout: a quarter for retries, a quarter for the last try."""
    from obstore.store import S3Store

    quarter = timedelta(seconds=timeout_s / 4)
    place: S3Config = {}
    if endpoint:
        place["endpoint"] = endpoint
    if region:
        place["region"] = region
    return S3Store(
        bucket,
        config=place,
        client_options={
            "timeout": quarter,
            "connect_timeout": quarter,
            "allow_http": endpoint is not None and endpoint.startswith("http:"),
        },
        retry_config={
            "max_retries": 2,
            "retry_timeout": quarter,
            "backoff": {"init_backoff": quarter / 20, "max_backoff": quarter / 2, "base": 2},
        },
    )


def _answers(results: Sequence[T | StorageError], otherwise: T) -> list[T]:
    """Returns results, with a substitute for failures. Raises if all failed."""
    failures = [result for result in results if isinstance(result, StorageError)]
    if failures and len(failures) == len(results):
        raise failures[0]
    return [otherwise if isinstance(result, StorageError) else result for result in results]


def _is_full(result: bool | StorageError) -> bool:
    return isinstance(result, StorageError) and result.cause == "full"


def _copy(pieces: Iterable[bytes], buffer: memoryview) -> int:
    """Fills a buffer. Returns the number of bytes, or more than fits if there are more."""
    at = 0
    for piece in pieces:
        end = at + len(piece)
        if end > len(buffer):
            return end
        buffer[at:end] = piece
        at = end
    return at


BACKEND = S3Backend
