"""A double of EIC's Python client `eic`: the calls that engines make, their arguments and results, over one dict.

From SGLang's and AIBrix's back ends: vectors of names and of (address, length, registered); options with a namespace; a
status for the call and one for each value; memory marked as registered must be registered; a value longer than its
place is an error of that value. The names and numbers of the codes are guesses.
"""

from __future__ import annotations

import ctypes
from enum import Enum
from typing import Any

from doubles.stores import Framed, Service

service = Service()


class StatusCode(Enum):
    SUCCESS, PARTIAL_FAILED, OBJECT_NOT_FOUND, INVALID_ARGUMENT, NO_SPACE, RPC_ERROR = range(6)


class LogLevel(Enum):
    DEBUG, INFO, WARNING = 0, 1, 2


class TransportType(Enum):
    TRANSPORT_TCP, TRANSPORT_RDMA, TRANSPORT_GDR = 1, 3, 4


class MemoryType(Enum):
    MEMORY_DEFAULT, MEMORY_CUDA = 0, 1


class StringVector(list[str]):
    def append(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError("append(): incompatible function arguments")
        super().append(name)


class IOBuffers(list[tuple[int, int, bool]]):
    def append(self, address: int, length: int, registered: bool) -> None:  # type: ignore[override]
        if not (isinstance(address, int) and isinstance(length, int) and isinstance(registered, bool)):
            raise TypeError("append(): incompatible function arguments")
        super().append((address, length, registered))


class _Options:
    ns, ttl_second = "", -1


ExistOption = GetOption = DelOption = SetOption = _Options


class InitOption:
    log_dir: str
    log_level: LogLevel
    transport_type: TransportType
    flag_file: str | None = None


class MemoryInfo:
    type = MemoryType.MEMORY_DEFAULT
    cuda_id = 0


class Outcome:
    def __init__(self, codes: list[StatusCode]) -> None:
        self.status_codes = [] if service.told.get("terse") else codes


class Client:
    def init(self, instance_id: str, endpoint: str, option: InitOption) -> int:
        assert isinstance(option.log_level, LogLevel) and option.log_dir
        service.wait()
        service.told |= {"instance": instance_id, "endpoint": endpoint, **vars(option)}
        return -1 if service.down else 0

    def register_memory(self, buffers: IOBuffers, info: MemoryInfo) -> bool:
        assert info.type in MemoryType
        service.regions += [(address, length) for address, length, _ in buffers if service.registers]
        return service.registers

    def mexist(self, keys: StringVector, option: ExistOption) -> tuple[StatusCode, Outcome]:
        return self._outcome(keys, option, [_found(key in service.values) for key in keys])

    def mset(self, keys: StringVector, values: IOBuffers, option: SetOption) -> tuple[StatusCode, Outcome]:
        service.told["ttl"] = option.ttl_second
        codes = []
        for key, (address, length, registered) in zip(keys, values, strict=True):
            code = service.codes.get(key, StatusCode.SUCCESS)
            if registered and not service.knows(address, length):
                code = StatusCode.INVALID_ARGUMENT
            elif not service.has_room(length):
                code = StatusCode.NO_SPACE
            if code is StatusCode.SUCCESS and not service.down:
                service.values[key] = ctypes.string_at(address, length)
            codes.append(code)
        return self._outcome(keys, option, codes)

    def mget(self, keys: StringVector, option: GetOption, values: IOBuffers) -> tuple[StatusCode, IOBuffers, Outcome]:
        codes = []
        for key, (address, length, registered) in zip(keys, values, strict=True):
            value = service.values.get(key)
            code = service.codes.get(key, _found(value is not None))
            if (registered and not service.knows(address, length)) or len(value or b"") > length:
                code = StatusCode.INVALID_ARGUMENT
            if code is StatusCode.SUCCESS and not service.down and value is not None:
                ctypes.memmove(address, value, len(value))
            codes.append(code)
        status, outcome = self._outcome(keys, option, codes)
        return status, values, outcome

    def mdel(self, keys: StringVector, option: DelOption) -> tuple[StatusCode, Outcome]:
        gone = [service.deletes and service.values.pop(key, None) is not None for key in keys]
        return self._outcome(keys, option, [_found(was) for was in gone])

    def _outcome(self, keys: StringVector, option: _Options, codes: list[StatusCode]) -> tuple[StatusCode, Outcome]:
        service.wait()
        service.told["namespace"] = option.ns
        service.batches.append(len(keys))
        if service.down:
            return StatusCode.RPC_ERROR, Outcome([StatusCode.RPC_ERROR] * len(keys))
        different = set(codes)
        if different <= {StatusCode.SUCCESS}:
            return StatusCode.SUCCESS, Outcome(codes)
        return (codes[0] if len(different) == 1 else StatusCode.PARTIAL_FAILED), Outcome(codes)


def _found(there: bool) -> StatusCode:
    return StatusCode.SUCCESS if there else StatusCode.OBJECT_NOT_FOUND


def _reads(*_: object) -> tuple[Any, None, Outcome]:
    return StatusCode.SUCCESS, None, Outcome([StatusCode.SUCCESS] * 2)


PACKAGE = "eic"
SPEC = "eic://10.0.0.1:7000?instance=kv-1"
BAD = ("eic:?instance=i", "eic://h:1", "eic://h?instance=i&ttl=x", "eic://h?instance=i&staging=1", "eic://h?a=1")
FRAMED = Framed(10_000, 200_000, (Client, "mget", _reads), failed=StatusCode.RPC_ERROR)
