"""SiMM, a memory pool over RDMA that many servers share: values under names, one client per process.

Its client has its own timeouts and returns one code per value; it never raises. The codes are below. Two properties of
the client shape this file. It sends a server the length of the registered region, not of the piece that a value is read
to, so a value that is too long may overwrite what follows. And a server that answers after the timeout may still write
to the piece. So values pass through registered memory of this back end, with one copy, and the caller's memory is safe.

Sources: https://github.com/scitix/SiMM, release 0.2.0 (python/simm/kv, src/client). The client needs RDMA, and takes
values of up to 4 MB. Not run against a real SiMM: tests use a double of its client.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.imports import needs
from mainstem.storage.base import ABSENT, Backend, BackendStats, Capabilities, Limit, check_options
from mainstem.storage.framed import Remembered
from mainstem.units import parse_bytes, parse_timeout

LONGEST = 4 << 20
"""The limit for a value, in bytes. The client refuses a whole batch if one value is longer."""

_EXISTS = -4005
_CAUSES = {
    -1002: "timeout",
    -1004: "unreachable",
    -1901: "unreachable",
    -2000: "timeout",
    -2001: "unreachable",
    -2002: "unreachable",
    -2300: "unreachable",
    -2301: "unreachable",
    -2302: "unreachable",
}
"""Codes in src/common/errcode/errcode_def.h that mean that no server was reached or answered."""


class SiMMBackend(Backend):
    """Values in a SiMM cluster.

    `put` keeps the first value of a name, because the batch call of the client does not overwrite. For `exists`, the
    client does not distinguish an absent key from an unreachable server, so in a dead cluster every key is absent;
    `get` and `put` raise. Names cannot be listed: `clear` deletes only what was put through this object.

    Args:
        host: host of the cluster manager.
        port: port of the cluster manager.
        namespace: prefix of every name.
        staging_bytes: size of the registered memory that values pass through; at least twice `LONGEST`.
        threads: number of client threads.
        timeout_s: timeout of the client, which rounds it up to 0.03, 0.3, 1, 3, 5, 10, 30 or 60 s.

    Raises:
        BadArgument: staging_bytes is too small.
        BackendUnavailable: the client is not installed, or it cannot register memory.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=True, zero_copy=False, evicts=True, overwrites=False
    )

    longest = Limit(LONGEST, "its client takes no longer ones, and no option raises that")

    def __init__(
        self,
        host: str,
        port: int,
        namespace: str = "mainstem",
        staging_bytes: int = 64 << 20,
        threads: int = 10,
        timeout_s: float = 5.0,
    ) -> None:
        if staging_bytes < 2 * LONGEST:
            raise BadArgument("staging_bytes", staging_bytes, f"at least {2 * LONGEST}")
        self._kv, torch = _client()
        flags = {
            "cm_primary_node_ip": host,
            "cm_primary_node_port": str(port),
            "clnt_thread_pool_size": str(threads),
            "clnt_sync_req_timeout_ms": str(max(1, int(timeout_s * 1000))),
        }
        for name, text in flags.items():
            if self._kv.set_flag(name, text) is False:
                raise BackendUnavailable(f"this SiMM client has no flag {name}")
        self._store = self._kv.Store()
        self._tensor = torch.empty(staging_bytes, dtype=torch.uint8)
        self._region = self._kv.register_mr(self._tensor)
        if self._region is None:
            raise BackendUnavailable(f"SiMM cannot register {staging_bytes} bytes: check the limit on locked memory")
        self._staging = memoryview(self._tensor.numpy())
        self._namespace = namespace
        self._put = Remembered()
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`simm://10.0.0.1:30001?namespace=mainstem&staging=64MiB&threads=10&timeout=5`."""
        host, _, port = address.removeprefix("//").rpartition(":")
        if not host or not port.isdecimal():
            raise BadArgument("storage address", address, "//host:port of the cluster manager")
        check_options(options, ("namespace", "staging", "threads", "timeout"))
        threads = options.get("threads", "10")
        if not threads.isdecimal() or int(threads) < 1:
            raise BadArgument("threads", threads, "a number above 0")
        return cls(
            host,
            int(port),
            options.get("namespace", "mainstem"),
            parse_bytes("staging", options.get("staging", "64MiB")),
            int(threads),
            parse_timeout("timeout", options.get("timeout", "5")),
        )

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Makes one batch call."""
        with self._open():
            return [bool(found) for found in self._store.mexists([self._name(key) for key in keys])] if keys else []

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads batches that fit the staging memory, each value into its own buffer."""
        pairs = list(zip(keys, buffers, strict=True))
        with self._open():
            codes = [code for round_ in self._rounds(pairs) for code in self._read(round_)]
        _raise_if_nothing_is_known("get", codes)
        return [code if code > 0 else ABSENT for code in codes]

    def _read(self, pairs: Sequence[tuple[bytes, memoryview]]) -> list[int]:
        places, views = self._places(pairs)
        codes = [int(code) for code in self._store.mget([self._name(key) for key, _ in pairs], views)]
        if len(pairs) > 1 and any(code > len(buffer) for code, (_, buffer) in zip(codes, pairs, strict=True)):
            # One value was longer than its place and may have overwritten its neighbours. A single one always has room.
            return [code for pair in pairs for code in self._read([pair])]
        for code, place, (_, buffer) in zip(codes, places, pairs, strict=True):
            if code == len(buffer) == len(place):
                buffer[:] = place
        return codes

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes batches that fit the staging memory. Refuses values longer than `LONGEST`."""
        pairs = list(zip(keys, buffers, strict=True))
        self._put.add(keys)
        with self._open():
            fitting = [(key, buffer) for key, buffer in pairs if 0 < len(buffer) <= LONGEST]
            codes = iter([code for round_ in self._rounds(fitting) for code in self._write(round_)])
        results = [next(codes) if 0 < len(buffer) <= LONGEST else None for _, buffer in pairs]
        _raise_if_nothing_is_known("put", [code for code in results if code is not None])
        return [code in (0, _EXISTS) for code in results]

    def _write(self, pairs: Sequence[tuple[bytes, memoryview]]) -> list[int]:
        places, views = self._places(pairs)
        for place, (_, buffer) in zip(places, pairs, strict=True):
            place[:] = buffer
        return [int(code) for code in self._store.mput([self._name(key) for key, _ in pairs], views)]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes one by one: the client has no batch call. Checks after an error, which may mean an absent name."""
        with self._open():
            failed = [key for key in dict.fromkeys(keys) if self._store.delete(self._name(key)) != 0]
            left = [key for key in failed if self._store.exists(self._name(key))]
        self._put.discard(set(keys) - set(left))
        if left:
            raise StorageError("io", f"SiMM still has {len(left)} of {len(keys)} values")

    def clear(self) -> None:
        """Deletes the values that were put through this object."""
        self._put.clear(self.delete)

    def stats(self) -> BackendStats:
        """Returns no counts: the client cannot query them."""
        with self._open():
            return BackendStats()

    def close(self) -> None:
        """Deregisters the memory. The client itself lives as long as the process."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._kv.deregister_mr(self._region)

    def _open(self) -> threading.Lock:
        if self._closed:
            raise StorageError("closed", "the SiMM store is closed")
        return self._lock

    def _name(self, key: bytes) -> str:
        return f"{self._namespace}/{key.hex()}"

    def _rounds(self, pairs: Sequence[tuple[bytes, memoryview]]) -> Iterator[list[tuple[bytes, memoryview]]]:
        """Splits a batch into rounds that leave room for the longest value after the last, and hold no key twice."""
        room = len(self._staging) - LONGEST
        round_: dict[bytes, memoryview] = {}
        used = 0
        for key, buffer in pairs:
            if round_ and (used + len(buffer) > room or key in round_):
                yield list(round_.items())
                round_, used = {}, 0
            round_[key] = buffer
            used += len(buffer)
        if round_:
            yield list(round_.items())

    def _places(self, pairs: Sequence[tuple[bytes, memoryview]]) -> tuple[list[memoryview], list[Any]]:
        places, views, start = [], [], 0
        base: int = self._tensor.data_ptr()
        for _, buffer in pairs:
            size = min(len(buffer), len(self._staging) - start)
            places.append(self._staging[start : start + size])
            views.append(self._kv.BlockView.from_buffer(base + start, size, self._region))
            start += size
        return places, views


def _raise_if_nothing_is_known(what: str, codes: Sequence[int]) -> None:
    if codes and all(code in _CAUSES for code in codes):
        raise StorageError(_CAUSES[codes[0]], f"SiMM: {what} of {len(codes)} values: code {codes[0]}")


def _client() -> tuple[Any, Any]:
    with needs("simm", "simm needs its client, built from https://github.com/scitix/SiMM"):
        client = importlib.import_module("simm.kv")
    with needs("torch", "simm needs PyTorch: pip install torch"):
        return client, importlib.import_module("torch")
