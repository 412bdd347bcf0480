"""EIC (Elastic Instant Cache), a memory pool of a cloud: values under names in a namespace.

Its client is closed source; only the calls that engines make are known. None of them reports the length of a value, or
takes a timeout. So each value is stored in a frame, after its length, and passes through memory of the link in a thread
of its own, with one copy.

A batch has one status, and each value has its own. The statuses of the values count: the call fails only if all values
failed and not all of their codes mean "no such name". A value that is longer than its place fails, with a code that is
not known, so one that failed is read again with all the memory as its place.

Sources: the EIC back ends of SGLang (mem_cache/storage/eic) and AIBrix (l2/connectors/eic). Assumed, because it is
documented nowhere: `mset` replaces a value.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from mainstem.errors import BadArgument, StorageError
from mainstem.imports import load_package
from mainstem.storage.framed import OPTIONS, Frame, FramedBackend, Frames, Link
from mainstem.storage.options import parse_number, parse_text, read_options

_NAMES_A_CALL = 1024


class EICBackend(FramedBackend):
    """Values in an EIC instance.

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
        eic = load_package("eic", "eic needs EIC's Python client, which comes with the service")
        where = _Where(endpoint, instance, namespace, transport, log_dir or tempfile.gettempdir(), flag_file, ttl_s)
        super().__init__(
            "EIC", f"eic at {endpoint}", lambda: _Link(eic, where, Frames(staging_bytes)), namespace, timeout_s
        )

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`eic://10.0.0.1:7000?instance=kv-1&namespace=mainstem&transport=3&log_dir=/var/log/eic&ttl=-1&timeout=5`.

        Further options: `flag_file=/etc/eic.flags&staging=64MiB`.
        """
        endpoint = address.removeprefix("//")
        texts = {name: (name, parse_text) for name in ("instance", "log_dir", "flag_file")}
        numbers = {"transport": ("transport", parse_number), "ttl": ("ttl_s", parse_number)}
        arguments = read_options(options, {**texts, **numbers, **OPTIONS})
        if not endpoint or not options.get("instance"):
            raise BadArgument("storage", f"eic:{address}", "eic://endpoint?instance=id")
        return cls(endpoint, **arguments)


@dataclass(frozen=True, slots=True)
class _Where:
    """The arguments of the back end that its client needs."""

    endpoint: str
    instance: str
    namespace: str
    transport: int
    log_dir: str
    flag_file: str | None
    ttl_s: int


class _Link(Link):
    """One client."""

    def __init__(self, eic: Any, where: _Where, frames: Frames) -> None:
        super().__init__("EIC", frames)
        self._eic, self._where = eic, where
        self._client: Any = None

    async def connect(self) -> None:
        where = self._where
        options = self._eic.InitOption()
        options.log_dir = where.log_dir
        options.log_level = self._eic.LogLevel(2)
        options.transport_type = self._eic.TransportType(where.transport)
        if where.flag_file is not None:
            options.flag_file = where.flag_file
        client = self._eic.Client()
        code = client.init(where.instance, where.endpoint, options)
        if code != 0:
            raise StorageError("unreachable", f"EIC: init of {where.instance} at {where.endpoint}: code {code}")
        memory = self._eic.MemoryInfo()
        memory.type = self._eic.MemoryType.MEMORY_DEFAULT
        region = self._eic.IOBuffers()
        region.append(self.frames.address, len(self.frames.memory), True)
        if not client.register_memory(region, memory):
            raise StorageError("refused", f"EIC cannot register {len(self.frames.memory)} bytes")
        self._client = client

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Makes one call for each 1,024 names."""
        return [found for some in _calls(names) for found in self._exist(some)]

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes, then checks: the result of `mdel` is not documented."""
        for some in _calls(names):
            self._client.mdel(self._vector(some), self._option(self._eic.DelOption()))
            left = self._exist(some)
            if any(left):
                raise StorageError("io", f"EIC still has {sum(left)} of {len(some)} values")

    async def read(self, names: Sequence[str], round_: Sequence[Frame]) -> list[bool | StorageError]:
        """Makes one call. Which code a value has that is longer than its place is not documented."""
        option = self._option(self._eic.GetOption())
        status, _, outcome = self._client.mget(self._vector(names), option, self._places(round_))
        codes = self._codes("mget", status, outcome, len(round_))
        error = StorageError("io", f"EIC: mget of {len(round_)} values: {status}")
        ok = self._eic.StatusCode.SUCCESS
        return [code == ok if code == ok or _says_absent(code) else error for code in codes]

    async def write(self, names: Sequence[str], round_: Sequence[Frame]) -> list[bool]:
        """Makes one call."""
        option = self._option(self._eic.SetOption())
        option.ttl_second = self._where.ttl_s
        status, outcome = self._client.mset(self._vector(names), self._places(round_), option)
        return self._done("mset", status, outcome, len(round_))

    def _exist(self, names: Sequence[str]) -> list[bool]:
        status, outcome = self._client.mexist(self._vector(names), self._option(self._eic.ExistOption()))
        return self._done("mexist", status, outcome, len(names))

    def _option(self, option: Any) -> Any:
        option.ns = self._where.namespace
        return option

    def _vector(self, names: Sequence[str]) -> Any:
        vector = self._eic.StringVector()
        for name in names:
            vector.append(name)
        return vector

    def _places(self, round_: Sequence[Frame]) -> Any:
        places = self._eic.IOBuffers()
        for frame in round_:
            places.append(self.frames.address + frame.start, frame.size, True)
        return places

    def _codes(self, what: str, status: Any, outcome: Any, count: int) -> list[Any]:
        """Returns the code of each value, or raises if there are none and the call did not succeed."""
        codes = list(outcome.status_codes)
        if len(codes) == count:
            return codes
        if status == self._eic.StatusCode.SUCCESS:
            return [status] * count
        raise StorageError("io", f"EIC: {what} of {count} values: {status}")

    def _done(self, what: str, status: Any, outcome: Any, count: int) -> list[bool]:
        """Returns for each value whether the call succeeded."""
        ok, some = self._eic.StatusCode.SUCCESS, self._eic.StatusCode.PARTIAL_FAILED
        codes = self._codes(what, status, outcome, count)
        done = [code == ok for code in codes]
        if not any(done) and status not in (ok, some) and not all(map(_says_absent, codes)):
            raise StorageError("io", f"EIC: {what} of {count} values: {status}")
        return done


def _calls(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[at : at + _NAMES_A_CALL] for at in range(0, len(names), _NAMES_A_CALL))


def _says_absent(code: object) -> bool:
    """Returns whether a code means "absent". Code names are not documented; other stores use these words."""
    return any(words in str(code).upper() for words in ("NOT_FOUND", "NOT_EXIST", "NOTFOUND", "NOTEXIST"))


BACKEND = EICBackend
