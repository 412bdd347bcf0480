"""S3 and what speaks like it: every page an object, `<prefix>/<64 hex digits>` in one bucket.

The package `obstore` signs, sends and retries; here are the requests side by side and the deadline over them. Requests
run in threads: obstore's other form, coroutines, is no faster, and ends the process with an abort where one is under
way when the interpreter ends (seen with 0.12.1).

    0 ............ timeout_s / 2 ....... * 3/4 ......... timeout_s
    | requests begin            | the last one's retries  | its last try ends

A request that finds the server silent or gone lets no other begin. An object is read piece by piece and no further than
its buffer goes, whatever length the server announced.

What it does not know: where credentials come from (AWS_ACCESS_KEY_ID and the rest of the environment, as obstore reads
it), and how much room there is.
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
from mainstem.storage.base import ABSENT, Backend, BackendStats, Capabilities, check_options, parse_seconds

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Store

T = TypeVar("T")

_PIECE_BYTES = 1 << 20
_LISTED = 1000

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")

_CAUSES = (
    ("full", re.compile(r"status code: 507|<Code>(QuotaExceeded|XMinioStorageFull|InsufficientStorage)")),
    ("timeout", re.compile(r"kind: Timeout|TimedOut")),
    ("refused", re.compile(r"status code: \d|PermissionDenied|Unauthenticated|MissingCredentials")),
    ("unreachable", re.compile(r"kind: (Connect|Interrupted)")),
)
"""What obstore's message says it was; all else is an answer that is none."""


class S3Backend(Backend):
    """Values in a bucket.

    `get` reports an object that could not be read as absent, and `put` one that could not be written as not stored,
    as long as any request of the batch was answered; where none was, the call fails.

    Args:
        bucket: that is there already.
        prefix: of the objects' names: parts of letters, digits and `_ . -`, with `/` between.
        endpoint: URL of the server; None: Amazon's, or AWS_ENDPOINT_URL.
        region: None: AWS_REGION, or us-east-1.
        requests: most that are under way at once.
        timeout_s: the longest that a call may take; of `clear`, each of its steps.

    Raises:
        BadArgument: an argument out of its range.
        BackendUnavailable: the package `obstore` is missing, or the bucket cannot be listed.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=True, zero_copy=False, evicts=False, overwrites=True
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
            raise BadArgument("prefix", prefix, "parts of letters, digits and _.- with / between, none with . in front")
        if endpoint is not None and not re.fullmatch(r"https?://[^\s/]+/?", endpoint):
            raise BadArgument("endpoint", endpoint, "http://host:port or https://host:port")
        if not timeout_s > 0:
            raise BadArgument("timeout_s", timeout_s, "above 0")
        with needs("obstore", "the package obstore is missing: pip install 'mainstem[s3]'"):
            from obstore.exceptions import BaseError
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._closed = False
        self._error: type[Exception] = BaseError
        self._threads = ThreadPoolExecutor(check_integer("requests", requests, 1, 1024), "mainstem-s3")
        try:
            with self._errors_named():
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
        check_options(options, ("endpoint", "region", "requests", "timeout"))
        if not address.startswith("//"):
            raise BadArgument("storage address", address, "//bucket or //bucket/prefix")
        bucket, _, prefix = address[2:].partition("/")
        requests = options.get("requests", "16")
        return cls(
            bucket,
            prefix.rstrip("/") or "mainstem",
            endpoint=options.get("endpoint"),
            region=options.get("region"),
            requests=int(requests) if re.fullmatch(r"[0-9]{1,4}", requests) else 0,
            timeout_s=parse_seconds("timeout", options.get("timeout", "5")),
        )

    def exists(self, keys: Sequence[bytes]) -> int:
        """One HEAD a key; none behind a gap once it is known."""
        gap = len(keys)

        def look(at: int) -> bool:
            nonlocal gap
            if at > gap:
                return False
            found = self._found(lambda: self._store.head(self._path(keys[at]))) is not None
            if not found:
                gap = min(gap, at)
            return found

        for at, found in enumerate(self._each(look, len(keys))):
            if isinstance(found, StorageError):
                raise found
            if not found:
                return at
        return len(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """One GET a key, ended where the length is another."""
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
        """One PUT a key, each as a whole, never in parts."""
        pairs = list(zip(keys, buffers, strict=True))

        def write(at: int) -> bool:
            key, buffer = pairs[at]
            self._store.put(self._path(key), buffer, use_multipart=False)
            return True

        results = self._each(write, len(pairs))
        return _answers([False if _is_full(result) else result for result in results], False)

    def delete(self, keys: Sequence[bytes]) -> None:
        """One request for a thousand keys."""
        self._delete([self._path(key) for key in keys])

    def clear(self) -> None:
        """Lists the prefix, a thousand objects at a time, and deletes those whose names are keys."""
        ours = re.compile(re.escape(self._prefix) + "/[0-9a-f]{64}")
        with self._errors_named():
            for objects in self._store.list(self._prefix, chunk_size=_LISTED):
                self._delete([found["path"] for found in objects if ours.fullmatch(found["path"])])

    def stats(self) -> BackendStats:
        """Nothing: it would take a walk."""
        self._check_open()
        return BackendStats()

    def close(self) -> None:
        """Lets no request begin any more; those under way end by themselves."""
        self._closed = True
        self._threads.shutdown(wait=False)

    def _path(self, key: bytes) -> str:
        return f"{self._prefix}/{key.hex()}"

    def _found(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except FileNotFoundError:
            return None

    def _delete(self, paths: list[str]) -> None:
        with self._errors_named():
            if paths:
                self._store.delete(paths)

    def _each(self, job: Callable[[int], T], count: int) -> list[T | StorageError]:
        """What came of each job, side by side; when it returns, none is under way."""
        self._check_open()
        last_start_s = time.monotonic() + self._timeout_s / 2
        hopeless: list[StorageError] = []

        def run(at: int) -> T | StorageError:
            if hopeless:
                return hopeless[0]
            if time.monotonic() > last_start_s:
                return StorageError("timeout", "no time was left for this request")
            try:
                with self._errors_named():
                    return job(at)
            except StorageError as error:
                if error.cause in ("timeout", "unreachable"):
                    hopeless.append(error)
                return error

        futures: list[Future[T | StorageError]] = []
        with suppress(RuntimeError):  # closed by another thread: no job is taken any more
            futures.extend(self._threads.submit(run, at) for at in range(count))
        wait(futures)
        self._check_open()
        return [future.result() for future in futures]

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("closed", "the s3 client is closed")

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        self._check_open()
        try:
            yield
        except (self._error, OSError) as error:
            text = str(error)
            cause = next((cause for cause, pattern in _CAUSES if pattern.search(text)), "protocol")
            raise StorageError(cause, text.partition("\n")[0][:300]) from error


def _open_store(bucket: str, endpoint: str | None, region: str | None, timeout_s: float) -> S3Store:
    """A client whose requests end within half the timeout: a quarter for tries, a quarter for the last of them."""
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
    """Results, with something else for failures; unless all failed."""
    failures = [result for result in results if isinstance(result, StorageError)]
    if failures and len(failures) == len(results):
        raise failures[0]
    return [otherwise if isinstance(result, StorageError) else result for result in results]


def _is_full(result: bool | StorageError) -> bool:
    return isinstance(result, StorageError) and result.cause == "full"


def _copy(pieces: Iterable[bytes], buffer: memoryview) -> int:
    """Fills a buffer; returns how much there was, or that it was too much."""
    at = 0
    for piece in pieces:
        end = at + len(piece)
        if end > len(buffer):
            return end
        buffer[at:end] = piece
        at = end
    return at
