"""Mooncake Store: values in the memory of many machines, one master that knows where, over RDMA or TCP.

    this process ── keys ──> mooncake_master             which segment holds which key, and leases on them
         └── pages ──> segments of other processes       the bytes, straight from and into registered memory

The client never raises, it returns numbers (`ErrorCode` in its types.h); they are read here, one for each key. It knows
write-once values: the first one stays. Facts about its failures were seen with version 0.3.13.post1.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.imports import needs
from mainstem.storage.base import (
    ABSENT,
    Backend,
    BackendStats,
    Capabilities,
    check_options,
    parse_bytes,
    parse_seconds,
)
from mainstem.storage.native import Calls, Memory

DONE, FULL, BAD_LENGTH = 0, -200, -600
MISSES = (-703, -704, -707)
"""Being written, not there, and a lease that ran out while it was read: whatever came is not to be trusted."""

CAUSES = {-800: "unreachable", -900: "unreachable", -901: "timeout"}
"""A transfer that failed, a master that is not there, and one that does not answer; all others are `protocol`."""

MIN_SEGMENT_BYTES = 16 << 20
RDMA_DEVICES = Path("/sys/class/infiniband")
PROTOCOLS = ("tcp", "rdma")
OPTIONS = ("segment", "local_buffer", "protocol", "devices", "metadata", "hostname", "prefix", "timeout")


class MooncakeBackend(Backend):
    """Values in a Mooncake store.

    Each step of a call (a question to the master, a transfer of a page) ends after `timeout_s`, and a call has up to
    three of them; the client's own retries of a dead master add about 4 s. The client takes such limits from the
    environment of the process only, so the first back end of a process sets them, and those that are set already
    stay: MC_RPC_TIMEOUT_MS and MC_RPC_CONNECT_TIMEOUT_MS, and for TCP MC_TCP_STATUS_TIMEOUT_SEC and
    MC_TCP_PROGRESS_TIMEOUT_SEC (whole seconds) with MC_TCP_ENABLE_CONNECTION_POOL=0, as pooled connections wait for
    their limit one after the other. A call blocks until the client has returned: nothing touches its buffers later.

    After a restart of the master or of a store node calls work again by themselves; the values are gone. Opening and
    closing hold the interpreter: all threads of the process stand still, for a second or two of `close`.

    Args:
        master: `host:port` of mooncake_master.
        segment_bytes: memory that this process gives to the store for as long as it is open, 16 MiB or more; 0: none.
        staging_bytes: of one buffer that values outside of registered memory pass through.
        protocol: `tcp` or `rdma`.
        devices: names of RDMA devices, with commas between; empty: the client finds them.
        metadata: `P2PHANDSHAKE`, or the address of a metadata server.
        hostname: by which other clients reach this one.
        prefix: of every name in the store: letters, digits, `_`, `-` and `.`.
        timeout_s: see above.

    Raises:
        BadArgument: a master, protocol, prefix or size that is none.
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
            raise BackendUnavailable(f"mooncake: no RDMA device in {RDMA_DEVICES}; the client would take TCP unasked")
        _set_limits(timeout_s)
        store = _new_client()
        _probe(master, timeout_s)
        if store.setup(hostname, metadata, segment_bytes, 0, protocol, devices, master) != DONE:
            raise BackendUnavailable(f"mooncake: setup with the master at {master} failed; its log on stderr says why")
        self._store = store
        self._calls = Calls("mooncake")
        self._memory = Memory(self._tell, self._forget, staging_bytes)

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`mooncake://10.0.0.1:50051?segment=4GiB&local_buffer=64MiB&protocol=rdma&hostname=10.0.0.7&timeout=5`.

        The other options are `devices`, `metadata` and `prefix`; `local_buffer` is the constructor's `staging_bytes`.
        """
        if not address.startswith("//"):
            raise BadArgument("storage address", address, "//host:port of mooncake_master")
        check_options(options, OPTIONS)
        texts = {
            name: options[name] for name in ("protocol", "devices", "metadata", "hostname", "prefix") if name in options
        }
        return cls(
            address[2:],
            segment_bytes=parse_bytes("segment", options.get("segment", "512MiB")),
            staging_bytes=parse_bytes("local_buffer", options.get("local_buffer", "64MiB")),
            timeout_s=parse_seconds("timeout", options.get("timeout", "5")),
            **texts,
        )

    @property
    def staged(self) -> int:
        """Values that passed through the staging buffer because their memory is not registered."""
        return self._memory.staged

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Registers memory with the client; it is withdrawn by `close`."""
        with self._calls.call():
            self._memory.register(buffers)

    def exists(self, keys: Sequence[bytes]) -> int:
        """Asks the master alone: a value whose node died a moment ago may still be counted."""
        with self._calls.call():
            found = self._store.batch_is_exist(self._names(keys))
        if found and found[0] < 0:
            raise _error(found[0])
        return next((at for at, one in enumerate(found) if one != 1), len(found))

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads into the buffers; of a value longer than its buffer the length is reported as one byte more."""
        names = self._names(keys, buffers)
        codes = [0] * len(names)
        with self._calls.call():
            for places in _rounds(names):
                found = self._get([names[at] for at in places], [buffers[at] for at in places])
                for at, code in zip(places, found, strict=True):
                    codes[at] = code
        _check(codes, (*MISSES, BAD_LENGTH))
        return [_length(code, len(buffer)) for code, buffer in zip(codes, buffers, strict=True)]

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes from the buffers; there is room for none while leases (5 s or so) keep all old values."""
        names = self._names(keys, buffers)
        with self._calls.call():
            codes = self._memory.send(
                buffers, lambda part, at, sizes: self._store.batch_put_from(names[part], at, sizes)
            )
        _check(codes, (FULL, BAD_LENGTH))
        return [code == DONE for code in codes]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Removes values, leases notwithstanding: who reads one at this moment may see other bytes, and verifies."""
        with self._calls.call():
            codes = self._store.batch_remove(self._names(keys), True)
        failed = [code for code in codes if code != DONE and code not in MISSES]
        if failed:
            raise _error(failed[0])

    def clear(self) -> None:
        """Removes all names of the prefix, whoever stored them; see `delete`."""
        with self._calls.call():
            removed = self._store.remove_by_regex(f"^{self._prefix.replace('.', '[.]')}/", True)
        if removed < 0:
            raise _error(removed)

    def stats(self) -> BackendStats:
        """Nothing: the client cannot say; the master has counters for all its clients at its metrics port."""
        with self._calls.call():
            return BackendStats()

    def close(self) -> None:
        """Waits for running calls, withdraws memory and segment. The segment's values are gone then."""
        if self._calls.close():
            self._memory.close()
            self._store.close()

    def _get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        return self._memory.receive(buffers, lambda part, at, sizes: self._store.batch_get_into(names[part], at, sizes))

    def _names(self, keys: Sequence[bytes], buffers: Sequence[memoryview] | None = None) -> list[str]:
        if buffers is not None and len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        return [f"{self._prefix}/{key.hex()}" for key in keys]

    def _tell(self, address: int, size: int) -> None:
        if self._store.register_buffer(address, size) != DONE:
            raise StorageError("refused", f"mooncake does not register {size} bytes; does `ulimit -l` allow it?")

    def _forget(self, address: int, size: int) -> None:
        self._store.unregister_buffer(address)


def _rounds(names: Sequence[str]) -> list[list[int]]:
    """Places of a batch, such that no name is twice in a round: the client fills one buffer of it and reports two."""
    rounds: list[list[int]] = []
    seen: Counter[str] = Counter()
    for at, name in enumerate(names):
        if seen[name] == len(rounds):
            rounds.append([])
        rounds[seen[name]].append(at)
        seen[name] += 1
    return rounds


def _length(code: int, size: int) -> int:
    if code == BAD_LENGTH:
        return size + 1
    return code if code >= 0 else ABSENT


def _check(codes: Sequence[int], single: Sequence[int]) -> None:
    """Raises where every key failed; `single` are failures of one key, of which the others are told."""
    if codes and all(code < 0 and code not in single for code in codes):
        raise _error(codes[0])


def _error(code: int) -> StorageError:
    return StorageError(CAUSES.get(code, "protocol"), f"mooncake said {code}")


def _set_limits(timeout_s: float) -> None:
    """What the client reads from the environment; set by the user, it stays."""
    milliseconds, seconds = str(max(1, round(timeout_s * 1000))), str(math.ceil(timeout_s))
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", milliseconds)
    os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", milliseconds)
    os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", seconds)
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", seconds)
    os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "0")
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "3")  # each with another port of its own


def _new_client() -> Any:
    client = "pip install 'mainstem[mooncake]', and libibverbs.so.1 of the system (Debian: libibverbs1)"
    with needs("mooncake", f"mooncake needs its client: {client}"):
        return importlib.import_module("mooncake.store").MooncakeDistributedStore()


def _probe(master: str, timeout_s: float) -> None:
    """Whether anybody listens: `setup` itself would wait long for a master that is not there."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        raise BackendUnavailable(f"mooncake: no master at {master}: {error}") from error
