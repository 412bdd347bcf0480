"""SiMM, a memory pool over RDMA that many servers share: values under names, one client per process.

Its client has its own timeouts and returns one code per value; it never raises. The codes are below. Two properties of
the client shape this file. It sends a server the length of the registered region, not of the piece that a value is read
to, so a value that is too long overwrites what follows its piece. And a server that answers after the timeout may still
write to the piece. So values pass through registered memory of this back end, with one copy.

Sources: https://github.com/scitix/SiMM, release 0.2.0 (python/simm/kv, src/client). The client needs RDMA, and takes
values of up to 4 MB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from mainstem.errors import BadArgument, StorageError
from mainstem.imports import load_package
from mainstem.storage.base import Capabilities
from mainstem.storage.framed import OPTIONS, Frame, FramedBackend, Frames, Link
from mainstem.storage.options import parse_host, parse_number, read_options

LONGEST = 4 << 20
"""The longest value that the client takes, in bytes. It refuses a whole batch if one value is longer."""

_EXISTS = -4005
_CAUSES = {
    **dict.fromkeys((-1002, -2000), "timeout"),
    **dict.fromkeys((-1004, -1901, -2001, -2002, -2300, -2301, -2302), "unreachable"),
}
"""Codes in src/common/errcode/errcode_def.h that mean that no server was reached or answered."""


class SiMMBackend(FramedBackend):
    """Values in a SiMM cluster.

    `put` keeps the first value of a name, because the batch call of the client does not overwrite. For `exists`, the
    client does not distinguish an absent key from an unreachable server, so in a dead cluster every key is absent;
    `get` and `put` raise.

    Args:
        host: host of the cluster manager.
        port: port of the cluster manager.
        namespace: prefix of every name.
        staging_bytes: size of the registered memory that values pass through; at least twice `LONGEST`.
        threads: number of client threads.
        timeout_s: timeout of the client, which rounds it up to 0.03, 0.3, 1, 3, 5, 10, 30 or 60 s.

    Raises:
        BadArgument: staging_bytes is too small, or threads is below 1.
        BackendUnavailable: the client is not installed, or it cannot register memory.
    """

    capabilities: ClassVar[Capabilities] = replace(FramedBackend.capabilities, overwrites=False)
    remedy = "its client takes no longer ones, and no option raises that"

    def __init__(
        self,
        host: str,
        port: int,
        namespace: str = "mainstem",
        staging_bytes: int = 64 << 20,
        threads: int = 10,
        timeout_s: float = 5.0,
    ) -> None:
        if threads < 1:
            raise BadArgument("threads", threads, "a number above 0")
        kv = load_package("simm.kv", "simm needs its client, built from https://github.com/scitix/SiMM")
        torch = load_package("torch", "simm needs PyTorch: pip install torch")
        flags = {
            "cm_primary_node_ip": host,
            "cm_primary_node_port": str(port),
            "clnt_thread_pool_size": str(threads),
            "clnt_sync_req_timeout_ms": str(max(1, int(timeout_s * 1000))),
        }
        link_to = f"simm at {host}:{port}"
        super().__init__(
            "SiMM", link_to, lambda: _Link(kv, torch, flags, Frames(staging_bytes, LONGEST)), namespace, timeout_s
        )

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`simm://10.0.0.1:30001?namespace=mainstem&staging=64MiB&threads=10&timeout=5`."""
        host, port = parse_host(address, "//host:port of the cluster manager")
        return cls(host, port, **read_options(options, {"threads": ("threads", parse_number), **OPTIONS}))


class _Link(Link):
    """One registered region of the client, which lives as long as the process."""

    def __init__(self, kv: Any, torch: Any, flags: Mapping[str, str], frames: Frames) -> None:
        super().__init__("SiMM", frames)
        self._kv, self._flags = kv, flags
        self._tensor = torch.frombuffer(frames.memory, dtype=torch.uint8)
        self._region: Any = None

    async def connect(self) -> None:
        for name, text in self._flags.items():
            if self._kv.set_flag(name, text) is False:
                raise StorageError("refused", f"this SiMM client has no flag {name}")
        self._store = self._kv.Store()
        self._region = self._kv.register_mr(self._tensor)
        if self._region is None:
            size = len(self.frames.memory)
            raise StorageError("refused", f"SiMM cannot register {size} bytes: check the limit on locked memory")

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Makes one batch call."""
        return [bool(there) for there in self._store.mexists(names)] if names else []

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes one by one: the client has no batch call. Checks after an error, which may mean an absent name."""
        failed = [name for name in names if self._store.delete(name) != 0]
        left = [name for name in failed if self._store.exists(name)]
        if left:
            raise StorageError("io", f"SiMM still has {len(left)} of {len(names)} values")

    async def read(self, names: Sequence[str], round_: Sequence[Frame]) -> list[bool | StorageError]:
        """Makes one call. If a value was longer than its frame, it may have overwritten others."""
        codes = self._codes("get", self._store.mget(names, self._views(round_)))
        if any(code > frame.size for code, frame in zip(codes, round_, strict=True)):
            return [StorageError("io", "SiMM: a value was longer than its place")] * len(codes)
        return [code > 0 for code in codes]

    async def write(self, names: Sequence[str], round_: Sequence[Frame]) -> list[bool]:
        """Makes one call."""
        codes = self._codes("put", self._store.mput(names, self._views(round_)))
        return [code in (0, _EXISTS) for code in codes]

    async def close(self) -> None:
        if self._region is not None:
            self._kv.deregister_mr(self._region)

    def _views(self, round_: Sequence[Frame]) -> list[Any]:
        start = self.frames.address
        return [self._kv.BlockView.from_buffer(start + frame.start, frame.size, self._region) for frame in round_]

    def _codes(self, what: str, codes: Sequence[int]) -> Sequence[int]:
        """Returns the codes of values. Raises if none of them says anything of its value."""
        if all(code in _CAUSES for code in codes):
            raise StorageError(_CAUSES[codes[0]], f"SiMM: {what} of {len(codes)} values: code {codes[0]}")
        return codes


BACKEND = SiMMBackend
