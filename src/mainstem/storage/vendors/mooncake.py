"""Mooncake Store: values in the memory of many machines, and one master that locates them, over RDMA or TCP.

    this process ── keys ───> mooncake_master             which segment holds which key, and leases on them
         └── values ──> segments of other processes       the bytes, directly from and into registered memory

The client never raises: it returns a number (`ErrorCode` in its types.h) for each key, which this module interprets.
Values are write-once: the first one stays. Its behaviour in failures was observed with version 0.3.13.post1.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.imports import load_package
from mainstem.storage.base import ABSENT, Backend, BackendStats, Capabilities
from mainstem.storage.calls import Calls
from mainstem.storage.native import Memory
from mainstem.storage.options import Readers, parse_text, read_options
from mainstem.units import parse_bytes, parse_timeout

DONE, FULL, BAD_LENGTH = 0, -200, -600
MISSES = (-703, -704, -707)
"""Being written, absent, and a lease that expired during the read, so that its bytes cannot be trusted."""

CAUSES = {-800: "unreachable", -900: "unreachable", -901: "timeout"}
"""Failed transfer, no master, and a master that does not answer. All other codes are `protocol`."""

MIN_SEGMENT_BYTES = 16 << 20
RDMA_DEVICES = Path("/sys/class/infiniband")
PROTOCOLS = ("tcp", "rdma")
OPTIONS: Readers = {
    "segment": ("segment_bytes", parse_bytes),
    "local_buffer": ("staging_bytes", parse_bytes),
    **{name: (name, parse_text) for name in ("protocol", "devices", "metadata", "hostname", "prefix")},
    "timeout": ("timeout_s", parse_timeout),
}


class MooncakeBackend(Backend):
    """Values in a Mooncake store.

    Each step of a call (a request to the master, a transfer of a value) ends after `timeout_s`, and a call has up to
    three steps. Retries of the client add about 4 s if the master is dead. The client reads timeouts only from the
    environment of the process, so the first back end of a process sets these variables, unless they are set already:
    MC_RPC_TIMEOUT_MS and MC_RPC_CONNECT_TIMEOUT_MS, and for TCP MC_TCP_STATUS_TIMEOUT_SEC and
    MC_TCP_PROGRESS_TIMEOUT_SEC (whole seconds) with MC_TCP_ENABLE_CONNECTION_POOL=0, because pooled connections time
    out one after the other. A call blocks until the client returns: nothing touches its buffers later.

    After a restart of the master or of a store node, calls work again without action; the values are lost. Opening and
    closing hold the GIL: all threads of the process stop, for a second or two during `close`.

    Args:
        master: `host:port` of mooncake_master.
        segment_bytes: memory that this process lends to the store while it is open, 16 MiB or more; 0: none.
        staging_bytes: size of one buffer that values outside of registered memory pass through.
        protocol: `tcp` or `rdma`.
        devices: names of RDMA devices, separated by commas; empty: the client finds them.
        metadata: `P2PHANDSHAKE`, or the address of a metadata server.
        hostname: the name by which other clients reach this one.
        prefix: prefix of every name in the store: letters, digits, `_`, `-` and `.`.
        timeout_s: see above.

    Raises:
        BadArgument: invalid master, protocol, prefix or size.
        BackendUnavailable: the client or libibverbs is not installed, the master does not answer, or there is no RDMA.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=False, shared=True, zero_copy=True, evicts=True, overwrites=False
    )

    def __init__(
        self,
        master: str,
        *,
        segment_bytes: int = 512 << 20,
        staging_bytes: int = 64 << 20,
        protocol: str = "tcp",
        devices: str = "",
        metadata: str = "P2PHANDSHAKE",
        hostname: str = "127.0.0.1",
        prefix: str = "mainstem",
        timeout_s: float = 5.0,
    ) -> None:
        if not re.fullmatch(r"[\w.-]+", prefix, re.ASCII):
            raise BadArgument("prefix", prefix, "letters, digits, _, - and .")
        if not re.fullmatch(r"[^\s/]+:\d{1,5}", master) or int(master.rpartition(":")[2]) > 65535:
            raise BadArgument("master", master, "host:port of mooncake_master")
        if protocol not in PROTOCOLS:
            raise BadArgument("protocol", protocol, "one of " + ", ".join(PROTOCOLS))
        if segment_bytes and segment_bytes < MIN_SEGMENT_BYTES:
            raise BadArgument("segment_bytes", segment_bytes, f"0, or at least {MIN_SEGMENT_BYTES}")
        if staging_bytes < 1:
            raise BadArgument("staging_bytes", staging_bytes, "at least 1")
        self._prefix = prefix
        if protocol == "rdma" and not (RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())):
            raise BackendUnavailable(f"mooncake: no RDMA device in {RDMA_DEVICES}; the client would silently use TCP")
        _set_limits(timeout_s)
        store = _new_client()
        _probe(master, timeout_s)
        if store.setup(hostname, metadata, segment_bytes, 0, protocol, devices, master) != DONE:
            raise BackendUnavailable(f"mooncake: setup with the master at {master} failed; its log on stderr says why")
        self._store = store
        self._calls = Calls("the mooncake store")
        self._memory = Memory(self._register, self._deregister, staging_bytes)

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`mooncake://10.0.0.1:50051?segment=4GiB&local_buffer=64MiB&protocol=rdma&hostname=10.0.0.7&timeout=5`.

        The other options are `devices`, `metadata` and `prefix`; `local_buffer` is the constructor's `staging_bytes`.
        """
        if not address.startswith("//"):
            raise BadArgument("storage address", address, "//host:port of mooncake_master")
        return cls(address[2:], **read_options(options, OPTIONS))

    @property
    def staged(self) -> int:
        """Values that passed through the staging buffer because their memory is not registered."""
        return self._memory.staged

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Registers memory with the client. `close` deregisters it."""
        with self._calls.call():
            self._memory.register(buffers)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Asks only the master, once. It may still report a value whose node has just died."""
        with self._calls.call():
            codes = self._store.batch_is_exist(self._names(keys))
        _check(codes, ())
        return [code == 1 for code in codes]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads into the buffers. Asks for the length of each value that is longer than its buffer."""
        names = self._names(keys, buffers)
        codes = [0] * len(names)
        with self._calls.call():
            for places in _rounds(names):
                found = self._get([names[at] for at in places], [buffers[at] for at in places])
                for at, code in zip(places, found, strict=True):
                    codes[at] = self._store.get_size(names[at]) if code == BAD_LENGTH else code
        _check(codes, MISSES)
        return [code if code >= 0 else ABSENT for code in codes]

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes from the buffers. There is no room while leases (about 5 s) protect all old values."""
        names = self._names(keys, buffers)
        with self._calls.call():
            codes = self._memory.send(
                buffers, lambda part, at, sizes: self._store.batch_put_from(names[part], at, sizes)
            )
        _check(codes, (FULL, BAD_LENGTH))
        return [code == DONE for code in codes]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes values despite leases. A concurrent reader may see other bytes, and must verify them."""
        with self._calls.call():
            codes = self._store.batch_remove(self._names(keys), True)
        failed = [code for code in codes if code != DONE and code not in MISSES]
        if failed:
            raise _error(failed[0])

    def clear(self) -> None:
        """Deletes all names with the prefix, of any client; see `delete`."""
        with self._calls.call():
            removed = self._store.remove_by_regex(f"^{self._prefix.replace('.', '[.]')}/", True)
        if removed < 0:
            raise _error(removed)

    def stats(self) -> BackendStats:
        """Returns no counts: the client has none. The metrics port of the master counts for all its clients."""
        with self._calls.call():
            return BackendStats()

    def close(self) -> None:
        """Waits for running calls, then deregisters memory and segment. The values in the segment are lost."""
        if self._calls.close():
            self._memory.close()
            self._store.close()

    def _get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        return self._memory.receive(buffers, lambda part, at, sizes: self._store.batch_get_into(names[part], at, sizes))

    def _names(self, keys: Sequence[bytes], buffers: Sequence[memoryview] | None = None) -> list[str]:
        if buffers is not None and len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        return [f"{self._prefix}/{key.hex()}" for key in keys]

    def _register(self, address: int, size: int) -> None:
        if self._store.register_buffer(address, size) != DONE:
            raise StorageError("refused", f"mooncake cannot register {size} bytes: check `ulimit -l`")

    def _deregister(self, address: int, size: int) -> None:
        self._store.unregister_buffer(address)


def _rounds(names: Sequence[str]) -> list[list[int]]:
    """Splits a batch into rounds without repeated names: the client would fill one buffer and report two."""
    rounds: list[list[int]] = []
    seen: Counter[str] = Counter()
    for at, name in enumerate(names):
        if seen[name] == len(rounds):
            rounds.append([])
        rounds[seen[name]].append(at)
        seen[name] += 1
    return rounds


def _check(codes: Sequence[int], single: Sequence[int]) -> None:
    """Raises if every key failed, unless the code is in `single`: such a failure concerns one key only."""
    if codes and all(code < 0 and code not in single for code in codes):
        raise _error(codes[0])


def _error(code: int) -> StorageError:
    return StorageError(CAUSES.get(code, "protocol"), f"mooncake returned {code}")


def _set_limits(timeout_s: float) -> None:
    """Sets the environment variables that the client reads. Variables that the user set stay."""
    milliseconds, seconds = str(max(1, round(timeout_s * 1000))), str(math.ceil(timeout_s))
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", milliseconds)
    os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", milliseconds)
    os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", seconds)
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", seconds)
    os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "0")
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "3")  # each on another port


def _new_client() -> Any:
    client = "pip install 'mainstem[mooncake]', and libibverbs.so.1 of the system (Debian: libibverbs1)"
    return load_package("mooncake.store", f"mooncake needs its client: {client}").MooncakeDistributedStore()


def _probe(master: str, timeout_s: float) -> None:
    """Raises unless the master listens: `setup` would wait a long time for a missing master."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        raise BackendUnavailable(f"mooncake: no master at {master}: {error}") from error


BACKEND = MooncakeBackend
