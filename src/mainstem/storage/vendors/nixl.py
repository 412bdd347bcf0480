"""NIXL: transfers between registered memory and files or S3 objects, by the POSIX and OBJ plugins of its agent.

    NixlBackend   batches, registered memory, one or many concurrent transfers      agent: only moves bytes
        └── Files or Objects: where the value of a key is, its length, and whether it is whole

NIXL only moves bytes: it does not rename, delete or list, or report the length of an object. So this module creates,
renames and deletes files by system calls, and objects through the S3 back end. An agent completes or fails a transfer
as a whole, and rarely says why. Its behaviour in failures was observed with version 1.5.1.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, Self

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.imports import is_missing
from mainstem.storage.base import ABSENT, KEY_BYTES, SCANNED, Backend, BackendStats, Capabilities, Listed
from mainstem.storage.calls import Calls
from mainstem.storage.native import Memory
from mainstem.storage.options import Readers, parse_text, read_options
from mainstem.storage.vendors.s3 import S3Backend
from mainstem.units import parse_bytes, parse_timeout

PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
"""The first selects one of the others. Each of the others works alone, also on a machine without a GPU."""

APIS = {"aio": "use_aio", "uring": "use_uring", "posix": "use_posix_aio"}
"""Mainstem's names for the I/O APIs of the POSIX plugin."""

RUN = 64
"""The limit for the values in one transfer: each keeps a file open."""

POLL_S = 1e-4


class Spot(NamedTuple):
    """The location of one value for an agent. `length` is in bytes; ABSENT: no value, or no room for one."""

    length: int
    number: int
    meta: str = ""


class Files:
    """Files `<folder>/<2 hex digits>/<64 hex digits>`. A value is written to a temporary file and renamed when whole.

    While the system runs, a name always belongs to a whole file. Files are not synced: after a power loss a file may
    hold zeros or be short. `clear` deletes the temporary files of killed writers.

    Args:
        folder: the folder; it is created if missing.
        api: one of `APIS`.

    Raises:
        BadArgument: unknown api.
        BackendUnavailable: the folder cannot be created.
    """

    plugin = "POSIX"
    segment = "FILE"

    def __init__(self, folder: str | Path, api: str = "aio") -> None:
        if api not in APIS:
            raise BadArgument("api", api, "one of " + ", ".join(APIS))
        self.parameters = {APIS[api]: "true"}
        self._folder = Path(folder)
        try:
            for shard in range(256):
                (self._folder / f"{shard:02x}").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BackendUnavailable(f"nixl: no folder for values: {error}") from error

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._path(key).exists() for key in keys]

    @contextmanager
    def readable(self, keys: Sequence[bytes]) -> Iterator[list[Spot]]:
        """Opens files. They stay open, and so exist, until the block ends."""
        with ExitStack() as files:
            yield [self._open(files, key) for key in keys]

    @contextmanager
    def writable(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Iterator[list[Spot]]:
        """Creates files that are renamed at the end of the block, unless it raises."""
        with ExitStack() as files:
            made = [self._path(key).with_suffix(f".{uuid.uuid4().hex}") for key in keys]
            spots = [self._make(files, path, size) for path, size in zip(made, sizes, strict=True)]
            yield spots
            for key, path, spot in zip(keys, made, spots, strict=True):
                if spot.length != ABSENT:
                    path.replace(self._path(key))

    def changed(self, key: bytes, spot: Spot) -> bool:
        """Returns False: an open file never changes."""
        return False

    def explain(self) -> None:
        """Does nothing: a folder fails only through its files."""

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def scan(self) -> Iterator[Sequence[Listed]]:
        """See `Backend.scan`. Ages are of the last put."""
        paths = (path for path in self._folder.glob("[0-9a-f][0-9a-f]/*") if re.fullmatch("[0-9a-f]{64}", path.name))
        while batch := list(islice(paths, SCANNED)):
            yield [found for path in batch if (found := _listed(path)) is not None]

    def clear(self) -> None:
        """Deletes the files of this store, with temporary ones of dead writers. The folders stay."""
        for path in self._folder.glob("[0-9a-f][0-9a-f]/*"):
            if re.fullmatch(r"[0-9a-f]{64}(\.[0-9a-f]{32})?", path.name):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Does nothing: no file is open between calls."""

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / name

    def _open(self, files: ExitStack, key: bytes) -> Spot:
        try:
            number = os.open(self._path(key), os.O_RDONLY)
        except FileNotFoundError:
            return Spot(ABSENT, -1)
        files.callback(os.close, number)
        return Spot(os.fstat(number).st_size, number)

    def _make(self, files: ExitStack, path: Path, size: int) -> Spot:
        """Allocates disk space first, because the agent does not report a full disk."""
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        files.callback(path.unlink, missing_ok=True)
        files.callback(os.close, number)
        try:
            os.posix_fallocate(number, 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            return Spot(ABSENT, -1)
        return Spot(size, number)


def _listed(path: Path) -> Listed | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return Listed(bytes.fromhex(path.name), status.st_size, max(0.0, time.time() - status.st_mtime))


class Objects(S3Backend):
    """Objects in an S3 bucket. The S3 back end locates, measures, deletes and lists them.

    Both clients read credentials from the environment (AWS_ACCESS_KEY_ID and the rest). The agent's client has its own
    timeouts: it gives up on a silent server after 3 s in a read, and after 9 s in a write. A dead server would block it
    for half a minute without AWS_RETRY_MODE=standard and AWS_MAX_ATTEMPTS=1. This class sets both for the process,
    unless they are set already. Before each transfer, the S3 back end makes a request under its own timeout.
    The arguments are those of the S3 back end.
    """

    plugin = "OBJ"
    segment = "OBJ"

    def __init__(
        self,
        bucket: str,
        prefix: str = "mainstem",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        **more: Any,
    ) -> None:
        os.environ.setdefault("AWS_RETRY_MODE", "standard")
        os.environ.setdefault("AWS_MAX_ATTEMPTS", "1")
        super().__init__(bucket, prefix, endpoint=endpoint, region=region, **more)  # no agent without a bucket
        self.parameters = {"bucket": bucket, "req_checksum": "required"}
        if region:
            self.parameters["region"] = region
        if endpoint:
            scheme = endpoint.partition(":")[0]
            own = {"endpoint_override": endpoint, "scheme": scheme, "use_virtual_addressing": "false"}
            self.parameters |= own
        self._numbers = count()

    @contextmanager
    def readable(self, keys: Sequence[bytes]) -> Iterator[list[Spot]]:
        """Locates objects with their lengths: the agent would silently fill part of a buffer from a shorter object."""
        yield [self._spot(key, length) for key, length in zip(keys, self._known_lengths(keys), strict=True)]

    @contextmanager
    def writable(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Iterator[list[Spot]]:
        """Names objects, which appear whole. Probes the server first, because the agent waits long for a silent one."""
        self.explain()
        yield [self._spot(key, size) for key, size in zip(keys, sizes, strict=True)]

    def changed(self, key: bytes, spot: Spot) -> bool:
        """Returns whether the object has changed or disappeared since its length was read."""
        return self._known_lengths([key]) != [spot.length]

    def explain(self) -> None:
        """Probes the server with the S3 client, because the agent never says why it failed.

        Raises:
            StorageError: the server does not answer.
        """
        self._known_lengths([bytes(KEY_BYTES)])

    def _spot(self, key: bytes, length: int) -> Spot:
        return Spot(length, next(self._numbers), self._path(key))

    def _known_lengths(self, keys: Sequence[bytes]) -> list[int]:
        lengths = self._lengths(keys)
        for length in lengths:
            if isinstance(length, StorageError):
                raise length
        return [length for length in lengths if not isinstance(length, StorageError)]


_PLACES: dict[str, tuple[type[Files | Objects], str, Readers]] = {
    "posix": (Files, "path", {"path": ("folder", parse_text), "api": ("api", parse_text)}),
    "obj": (
        Objects,
        "bucket",
        {name: (name, parse_text) for name in ("bucket", "prefix", "endpoint", "region")}
        | {"timeout": ("timeout_s", parse_timeout)},
    ),
}
"""Of each address: the class, the option that it needs, and how its options are read."""


class NixlBackend(Backend):
    """Values that a NIXL agent moves.

    A call blocks until the agent has finished with the buffers. `Objects` documents its timeouts. `Files` has none: a
    call takes as long as the system needs.

    Args:
        place: `Files(folder)` or `Objects(bucket)`; closed with the back end.
        staging_bytes: size of one buffer that values outside of registered memory pass through.
        sleep: called between two polls of a transfer.

    Raises:
        BackendUnavailable: NIXL is not installed, or its plugin does not start.
    """

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """batched: of files, not of objects."""
        files = isinstance(self._place, Files)
        return Capabilities(persistent=True, shared=True, zero_copy=True, evicts=False, overwrites=True, batched=files)

    def __init__(
        self, place: Files | Objects, *, staging_bytes: int = 64 << 20, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._place = place
        self._sleep = sleep
        self._name = f"mainstem-{uuid.uuid4().hex}"
        self._agent, self._errors = _new_agent(self._name, place)
        self._registrations: dict[int, Any] = {}
        self._calls = Calls("the nixl store")
        self._memory = Memory(self._register, self._deregister, staging_bytes)

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`nixl:posix?path=/var/kv&api=uring` or `nixl:obj?bucket=kv&endpoint=http://127.0.0.1:9000`.

        `posix` has the options `path` and `api` (aio, uring or posix); `obj` has `bucket`, `prefix`, `endpoint`,
        `region` and `timeout` (of requests by the S3 back end); both have `staging`.
        """
        if address not in _PLACES:
            raise BadArgument("storage address", address, "posix or obj")
        make, name, readers = _PLACES[address]
        arguments = read_options(options, {**readers, "staging": ("staging_bytes", parse_bytes)})
        _needed(options, name)
        staging = {"staging_bytes": arguments.pop("staging_bytes")} if "staging" in options else {}
        return cls(make(**arguments), **staging)

    @classmethod
    def open_existing(cls, address: str, options: Mapping[str, str]) -> Self:
        """Opens a folder only if it has the folders of values."""
        if address == "posix" and not Path(_needed(options, "path"), "00").is_dir():
            raise BackendUnavailable(f"nixl {options['path']}: there is no store")
        return cls.from_spec(address, options)

    @property
    def staged(self) -> int:
        """Values that passed through the staging buffer because their memory is not registered."""
        return self._memory.staged

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Registers memory with the agent. `close` deregisters it."""
        with self._call():
            self._memory.register(buffers)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Works without the agent."""
        with self._call():
            return self._place.exists(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads values that have the length of their buffers. One that cannot be read is absent, unless all fail."""
        with self._call():
            return [length for run, views in _runs(keys, buffers) for length in self._get(run, views)]

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes values in runs. Each run is stored as a whole, and the call fails if the agent fails."""
        with self._call():
            return [stored for run, views in _runs(keys, buffers) for stored in self._put(run, views)]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Works without the agent."""
        with self._call():
            self._place.delete(keys)

    def scan(self) -> Iterator[Sequence[Listed]]:
        """Works without the agent."""
        batches = self._place.scan()
        while True:
            with self._call():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def clear(self) -> None:
        """Works without the agent."""
        with self._call():
            self._place.clear()

    def stats(self) -> BackendStats:
        """Returns no counts: they would need a listing of all values."""
        with self._call():
            return BackendStats()

    def close(self) -> None:
        """Waits for running calls, then drops the agent."""
        if self._calls.close():
            self._memory.close()
            self._place.close()
            del self._agent

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._calls.call():
            try:
                yield
            except OSError as error:
                raise StorageError("io", str(error)) from error
            except self._errors as error:
                self._place.explain()
                raise StorageError("io", f"nixl raised {error}") from error

    def _get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        with self._place.readable(keys) as spots:
            lengths = [spot.length for spot in spots]
            fit = [at for at, buffer in enumerate(buffers) if lengths[at] == len(buffer)]
            read = self._memory.receive(
                [buffers[at] for at in fit],
                lambda part, at, sizes: self._read([(keys[n], spots[n]) for n in fit[part]], at, sizes),
            )
        for at, length in zip(fit, read, strict=True):
            lengths[at] = length
        return lengths

    def _put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        with self._place.writable(keys, [len(buffer) for buffer in buffers]) as spots:
            room = [at for at, spot in enumerate(spots) if spot.length != ABSENT]
            self._memory.send(
                [buffers[at] for at in room],
                lambda part, at, sizes: self._move("WRITE", [spots[n] for n in room[part]], at, sizes),
            )
        return [spot.length != ABSENT for spot in spots]

    def _read(self, values: Sequence[tuple[bytes, Spot]], addresses: list[int], sizes: list[int]) -> list[int]:
        """Reads all values at once, or one by one after a failure, because the agent does not say which one failed."""
        with suppress(*self._errors):
            return self._move("READ", [spot for _, spot in values], addresses, sizes)
        self._place.explain()
        lengths, failed = [], 0
        for (key, spot), address, size in zip(values, addresses, sizes, strict=True):
            try:
                lengths += self._move("READ", [spot], [address], [size])
            except self._errors:
                lengths.append(ABSENT)
                failed += not self._place.changed(key, spot)
        if failed == len(values):
            raise StorageError("io", f"nixl could read none of {failed} values")
        return lengths

    def _move(self, operation: str, spots: Sequence[Spot], addresses: list[int], sizes: list[int]) -> list[int]:
        """Makes one transfer. Returns the sizes, because it succeeds as a whole."""
        agent, plugins = self._agent, [self._place.plugin]
        here = agent.get_xfer_descs([(at, size, 0) for at, size in zip(addresses, sizes, strict=True)], "DRAM")
        places = [(0, size, spot.number, spot.meta) for spot, size in zip(spots, sizes, strict=True)]
        registered = agent.register_memory(places, self._place.segment, backends=plugins)
        try:
            there = agent.get_xfer_descs([place[:3] for place in places], self._place.segment)
            handle = agent.initialize_xfer(operation, here, there, self._name, backends=plugins)
            try:
                self._wait(handle, agent.transfer(handle))
            finally:
                agent.release_xfer_handle(handle)
        finally:
            agent.deregister_memory(registered, backends=plugins)
        return sizes

    def _wait(self, handle: Any, state: str) -> None:
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
            if state == "PROC":
                self._sleep(POLL_S)
        if state != "DONE":
            raise StorageError("io", f"nixl ended a transfer in the state {state}")

    def _register(self, address: int, size: int) -> None:
        try:
            self._registrations[address] = self._agent.register_memory(
                [(address, size, 0, "")], "DRAM", backends=[self._place.plugin]
            )
        except self._errors as error:
            raise StorageError("refused", f"nixl cannot register {size} bytes: {error}") from error

    def _deregister(self, address: int, size: int) -> None:
        self._agent.deregister_memory(self._registrations.pop(address), backends=[self._place.plugin])


def _runs(
    keys: Sequence[bytes], buffers: Sequence[memoryview]
) -> Iterator[tuple[Sequence[bytes], Sequence[memoryview]]]:
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
    for start in range(0, len(keys), RUN):
        yield keys[start : start + RUN], buffers[start : start + RUN]


def _needed(options: Mapping[str, str], name: str) -> str:
    if not options.get(name):
        raise BadArgument(f"storage option {name}", None, "given: it has no default")
    return options[name]


def _new_agent(name: str, place: Files | Objects) -> tuple[Any, tuple[type[Exception], ...]]:
    """Makes an agent with one plugin and no thread of its own, for calls from any thread. Also returns its errors."""
    try:
        package = _package()
    except BackendUnavailable:
        place.close()
        raise
    bindings = importlib.import_module(f"{package.__name__}._bindings")
    errors = tuple(each for known, each in vars(bindings).items() if re.fullmatch(r"nixl\w+Error", known))
    config = package.nixl_agent_config(
        backends=[], enable_prog_thread=False, sync_mode=package.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    try:
        agent = package.nixl_agent(name, config)
        agent.create_backend(place.plugin, place.parameters)
    except (*errors, RuntimeError) as error:
        place.close()
        raise BackendUnavailable(f"nixl: the plugin {place.plugin} does not start: {error}") from error
    return agent, errors


def _package() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # otherwise it logs every agent to stdout
    for name in PACKAGES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if not is_missing(error, name):
                raise BackendUnavailable(f"{name} cannot be imported: {error}") from error
    raise BackendUnavailable(f"nixl needs one of {', '.join(PACKAGES)}: pip install 'mainstem[nixl]'")


BACKEND = NixlBackend
