"""EIC (Elastic Instant Cache), a memory pool of a cloud: values under names in a namespace.

Its client is closed source; only the calls that engines make are known. None of them reports the length of a value, or
takes a timeout. So each value is stored in a frame, after its length, and passes through memory of this back end in a
thread of its own, with one copy. A call that ends after the deadline cannot touch the memory of the caller.

A batch has one status, and each value has its own. The statuses of the values count: the call fails only if all values
failed and not all of their codes mean "no such name".

Sources: the EIC back ends of SGLang (mem_cache/storage/eic) and AIBrix (l2/connectors/eic). Not run against a real EIC:
tests use a double of its client. Assumed, because it is documented nowhere: `mset` replaces a value.
"""

from __future__ import annotations

import importlib
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.imports import needs
from mainstem.storage.base import ABSENT, Backend, BackendStats, Capabilities, check_options
from mainstem.storage.native import ClientThread, Frame, Frames
from mainstem.storage.wrappers import Remembered
from mainstem.units import parse_bytes, parse_timeout

_Answer = TypeVar("_Answer")
_NAMES_A_CALL = 1024


class EICBackend(Backend):
    """Values in an EIC instance.

    Names cannot be listed: `clear` deletes only what was put through this object.

    Args:
        endpoint: the endpoint that EIC reports, usually `address:port`.
        instance: id of the instance.
        namespace: namespace of the values, and prefix of every name.
        transport: number of `eic.TransportType`; engines use 3 over RDMA.
        log_dir: folder for the log of the client; the one for temporary files by default.
        flag_file: flag file of the client, if it needs one.
        ttl_s: how long EIC keeps a value, in seconds; -1: as long as there is room.
        staging_bytes: size of the registered memory that values pass through; no value may be longer.
        timeout_s: timeout of one round through that memory.

    Raises:
        BadArgument: staging_bytes is too small.
        BackendUnavailable: the client is not installed, or cannot connect.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=True, zero_copy=False, evicts=True, overwrites=True
    )

    def __init__(
        self,
        endpoint: str,
        instance: str,
        namespace: str = "mainstem",
        transport: int = 3,
        log_dir: str | None = None,
        flag_file: str | None = None,
        ttl_s: int = -1,
        staging_bytes: int = 64 << 20,
        timeout_s: float = 5.0,
    ) -> None:
        if staging_bytes < 4096:
            raise BadArgument("staging_bytes", staging_bytes, "at least 4096")
        self._eic = _client()
        self._endpoint, self._instance = endpoint, instance
        self._namespace = namespace
        self._transport = transport
        self._log_dir = log_dir or tempfile.gettempdir()
        self._flag_file = flag_file
        self._ttl_s = ttl_s
        self._staging_bytes = staging_bytes
        self._timeout_s = timeout_s
        self._put = Remembered()
        self._closed = False
        self._link: _Link | None = None
        self._lock = threading.Lock()
        try:
            with self._lock:
                self._open()
        except StorageError as error:
            raise BackendUnavailable(f"eic at {endpoint}: {error}") from error

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`eic://10.0.0.1:7000?instance=kv-1&namespace=mainstem&transport=3&log_dir=/var/log/eic&ttl=-1&timeout=5`.

        Further options: `flag_file=/etc/eic.flags&staging=64MiB`.
        """
        endpoint = address.removeprefix("//")
        check_options(
            options,
            ("instance", "namespace", "transport", "log_dir", "flag_file", "ttl", "staging", "timeout"),
        )
        if not endpoint or not options.get("instance"):
            raise BadArgument("storage", f"eic:{address}", "eic://endpoint?instance=id")
        return cls(
            endpoint,
            options["instance"],
            options.get("namespace", "mainstem"),
            _parse_integer("transport", options.get("transport", "3")),
            options.get("log_dir"),
            options.get("flag_file"),
            _parse_integer("ttl", options.get("ttl", "-1")),
            parse_bytes("staging", options.get("staging", "64MiB")),
            parse_timeout("timeout", options.get("timeout", "5")),
        )

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Makes one batch call for each 1,024 keys."""
        there: list[bool] = []
        with self._lock:
            self._check_open()
            for start in range(0, len(keys), _NAMES_A_CALL):
                there += self._run(partial(self._exists, keys=keys[start : start + _NAMES_A_CALL]))
        return there

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads rounds of frames, each value into its own buffer."""
        lengths = [ABSENT for _ in zip(keys, buffers, strict=True)]
        with self._lock:
            frames = self._open().frames
            for round_ in frames.rounds(keys, buffers):
                frames.blank(round_)
                for frame, done in zip(round_, self._run(partial(self._get, round_=round_)), strict=True):
                    lengths[frame.at] = frames.take(frame) if done else ABSENT
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes rounds of frames."""
        stored = [False for _ in zip(keys, buffers, strict=True)]
        self._put.add(keys)
        with self._lock:
            frames = self._open().frames
            for round_ in frames.rounds(keys, buffers):
                frames.fill(round_)
                for frame, done in zip(round_, self._run(partial(self._set, round_=round_)), strict=True):
                    stored[frame.at] = done
        return stored

    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes, then checks: the result of `mdel` is not documented."""
        unique = list(dict.fromkeys(keys))
        with self._lock:
            self._check_open()
            for start in range(0, len(unique), _NAMES_A_CALL):
                some = unique[start : start + _NAMES_A_CALL]
                left = self._run(partial(self._delete, keys=some))
                if any(left):
                    raise StorageError("io", f"EIC still has {sum(left)} of {len(some)} values")
        self._put.discard(unique)

    def clear(self) -> None:
        """Deletes the values that were put through this object."""
        self._put.clear(self.delete)

    def stats(self) -> BackendStats:
        """Returns no counts: the client cannot query them."""
        self._check_open()
        return BackendStats()

    def close(self) -> None:
        """Drops the client, which has no close call."""
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.thread.end()
                self._link = None

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("closed", "the EIC store is closed")

    def _open(self) -> _Link:
        self._check_open()
        if self._link is None:
            self._link = _Link(self._staging_bytes)
            self._run(self._connect)
        return self._link

    def _run(self, job: Callable[[_Link], _Answer]) -> _Answer:
        """Runs a job in the thread of the client. The job only touches memory of the link."""
        link = self._link or self._open()

        async def run() -> _Answer:
            return job(link)

        try:
            return link.thread.run(run(), self._timeout_s)
        except StorageError:
            link.thread.end()
            self._link = None
            raise

    # ---------------------------------------------------------------- in the thread of the client

    def _connect(self, link: _Link) -> None:
        options = self._eic.InitOption()
        options.log_dir = self._log_dir
        options.log_level = self._eic.LogLevel(2)
        options.transport_type = self._eic.TransportType(self._transport)
        if self._flag_file is not None:
            options.flag_file = self._flag_file
        client = self._eic.Client()
        code = client.init(self._instance, self._endpoint, options)
        if code != 0:
            raise StorageError("unreachable", f"EIC: init of {self._instance} at {self._endpoint}: code {code}")
        memory = self._eic.MemoryInfo()
        memory.type = self._eic.MemoryType.MEMORY_DEFAULT
        region = self._eic.IOBuffers()
        region.append(link.frames.address, len(link.frames.memory), True)
        if not client.register_memory(region, memory):
            raise StorageError("refused", f"EIC cannot register {self._staging_bytes} bytes")
        link.client = client

    def _exists(self, link: _Link, keys: Sequence[bytes]) -> list[bool]:
        option = self._eic.ExistOption()
        option.ns = self._namespace
        status, outcome = link.client.mexist(self._names(keys), option)
        return self._done("mexist", status, outcome, len(keys))

    def _get(self, link: _Link, round_: Sequence[Frame]) -> list[bool]:
        option = self._eic.GetOption()
        option.ns = self._namespace
        names = self._names([frame.key for frame in round_])
        status, _, outcome = link.client.mget(names, option, self._places(link, round_))
        return self._done("mget", status, outcome, len(round_))

    def _set(self, link: _Link, round_: Sequence[Frame]) -> list[bool]:
        option = self._eic.SetOption()
        option.ns = self._namespace
        option.ttl_second = self._ttl_s
        names = self._names([frame.key for frame in round_])
        status, outcome = link.client.mset(names, self._places(link, round_), option)
        return self._done("mset", status, outcome, len(round_))

    def _delete(self, link: _Link, keys: Sequence[bytes]) -> list[bool]:
        option = self._eic.DelOption()
        option.ns = self._namespace
        link.client.mdel(self._names(keys), option)
        return self._exists(link, keys)

    def _names(self, keys: Sequence[bytes]) -> Any:
        names = self._eic.StringVector()
        for key in keys:
            names.append(f"{self._namespace}/{key.hex()}")
        return names

    def _places(self, link: _Link, round_: Sequence[Frame]) -> Any:
        places = self._eic.IOBuffers()
        for frame in round_:
            places.append(link.frames.address + frame.start, Frames.HEAD_BYTES + len(frame.buffer), True)
        return places

    def _done(self, what: str, status: Any, outcome: Any, count: int) -> list[bool]:
        """Returns for each value whether the call succeeded."""
        ok, some = self._eic.StatusCode.SUCCESS, self._eic.StatusCode.PARTIAL_FAILED
        codes = list(outcome.status_codes)
        if len(codes) != count:
            if status == ok:
                return [True] * count
            raise StorageError("io", f"EIC: {what} of {count} values: {status}")
        done = [code == ok for code in codes]
        if not any(done) and status not in (ok, some) and not all(map(_says_absent, codes)):
            raise StorageError("io", f"EIC: {what} of {count} values: {status}")
        return done


class _Link:
    """One client, with its thread and its memory."""

    def __init__(self, staging_bytes: int) -> None:
        self.thread = ClientThread("EIC")
        self.frames = Frames(staging_bytes)
        self.client: Any = None


def _says_absent(code: object) -> bool:
    """Returns whether a code means "absent". Code names are not documented; other stores use these words."""
    return any(words in str(code).upper() for words in ("NOT_FOUND", "NOT_EXIST", "NOTFOUND", "NOTEXIST"))


def _parse_integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadArgument(name, text, "an integer") from None


def _client() -> Any:
    with needs("eic", "eic needs EIC's Python client, which comes with the service"):
        return importlib.import_module("eic")
