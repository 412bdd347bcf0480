"""A double of EIC's Python client `eic`: the calls that engines make, their arguments and results, over one dict.

From SGLang's and AIBrix's back ends: vectors of names and of (address, length, registered); options with a namespace; a
status for the call and one for each value; memory marked as registered must be registered; a value longer than its
place is an error of that value. Tests change `instance`.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class StatusCode(Enum):
    SUCCESS = 0
    PARTIAL_FAILED = 1
    OBJECT_NOT_FOUND = 2
    INVALID_ARGUMENT = 3
    NO_SPACE = 4
    RPC_ERROR = 5


class LogLevel(Enum):
    DEBUG, INFO, WARNING = 0, 1, 2


class TransportType(Enum):
    TRANSPORT_TCP, TRANSPORT_RDMA, TRANSPORT_GDR = 1, 3, 4


class MemoryType(Enum):
    MEMORY_DEFAULT, MEMORY_CUDA = 0, 1


@dataclass
class Instance:
    """One instance and its faults."""

    values: dict[tuple[str, str], bytes] = field(default_factory=dict)
    capacity: int = 1 << 30
    down: bool = False
    terse: bool = False
    """Outcomes contain no codes."""
    codes: dict[str, StatusCode] = field(default_factory=dict)
    frozen: threading.Event | None = None
    registers: bool = True
    deletes: bool = True
    inits: list[tuple[str, str, Any]] = field(default_factory=list)
    regions: list[tuple[int, int]] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    ttl: set[int] = field(default_factory=set)


instance = Instance()


def reset() -> Instance:
    instance.__dict__.update(Instance().__dict__)
    return instance


class StringVector(list[str]):
    def append(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError("append(): incompatible function arguments")
        super().append(name)


class IOBuffers:
    def __init__(self) -> None:
        self.places: list[tuple[int, int, bool]] = []

    def append(self, address: int, length: int, registered: bool) -> None:
        if not (isinstance(address, int) and isinstance(length, int) and isinstance(registered, bool)):
            raise TypeError("append(): incompatible function arguments")
        self.places.append((address, length, registered))


class _Options:
    ns = ""


class ExistOption(_Options):
    pass


class GetOption(_Options):
    pass


class DelOption(_Options):
    pass


class SetOption(_Options):
    ttl_second = -1


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
        self.status_codes = [] if instance.terse else codes


class Client:
    def __init__(self) -> None:
        self.regions: list[tuple[int, int]] = []

    def init(self, instance_id: str, endpoint: str, option: InitOption) -> int:
        assert isinstance(option.log_level, LogLevel) and isinstance(option.transport_type, TransportType)
        assert option.log_dir
        self._wait()
        instance.inits.append((instance_id, endpoint, option))
        return -1 if instance.down else 0

    def register_memory(self, buffers: IOBuffers, info: MemoryInfo) -> bool:
        assert info.type in MemoryType
        if instance.registers:
            self.regions += [(address, length) for address, length, _ in buffers.places]
            instance.regions += self.regions
        return instance.registers

    def mexist(self, keys: StringVector, option: ExistOption) -> tuple[StatusCode, Outcome]:
        found = {True: StatusCode.SUCCESS, False: StatusCode.OBJECT_NOT_FOUND}
        return self._outcome(keys, [found[(option.ns, key) in instance.values] for key in keys])

    def mset(self, keys: StringVector, values: IOBuffers, option: SetOption) -> tuple[StatusCode, Outcome]:
        instance.ttl.add(option.ttl_second)
        codes = []
        for key, place in zip(keys, values.places, strict=True):
            code = instance.codes.get(key, StatusCode.SUCCESS) if self._known(place) else StatusCode.INVALID_ARGUMENT
            if sum(map(len, instance.values.values())) + place[1] > instance.capacity:
                code = StatusCode.NO_SPACE
            if code is StatusCode.SUCCESS and not instance.down:
                instance.values[option.ns, key] = ctypes.string_at(place[0], place[1])
            codes.append(code)
        return self._outcome(keys, codes)

    def mget(self, keys: StringVector, option: GetOption, values: IOBuffers) -> tuple[StatusCode, IOBuffers, Outcome]:
        codes = []
        for key, place in zip(keys, values.places, strict=True):
            value = instance.values.get((option.ns, key))
            code = instance.codes.get(key, StatusCode.SUCCESS if value is not None else StatusCode.OBJECT_NOT_FOUND)
            if not self._known(place) or (value is not None and len(value) > place[1]):
                code = StatusCode.INVALID_ARGUMENT
            if code is StatusCode.SUCCESS and not instance.down and value is not None:
                ctypes.memmove(place[0], value, len(value))
            codes.append(code)
        status, outcome = self._outcome(keys, codes)
        return status, values, outcome

    def mdel(self, keys: StringVector, option: DelOption) -> tuple[StatusCode, Outcome]:
        gone = [instance.deletes and instance.values.pop((option.ns, key), None) is not None for key in keys]
        return self._outcome(keys, [StatusCode.SUCCESS if was else StatusCode.OBJECT_NOT_FOUND for was in gone])

    def _known(self, place: tuple[int, int, bool]) -> bool:
        address, length, registered = place
        inside = any(start <= address and address + length <= start + size for start, size in self.regions)
        return inside or not registered

    def _outcome(self, keys: StringVector, codes: list[StatusCode]) -> tuple[StatusCode, Outcome]:
        self._wait()
        instance.batches.append(len(keys))
        if instance.down:
            return StatusCode.RPC_ERROR, Outcome([StatusCode.RPC_ERROR] * len(keys))
        different = set(codes)
        if different <= {StatusCode.SUCCESS}:
            return StatusCode.SUCCESS, Outcome(codes)
        return (codes[0] if len(different) == 1 else StatusCode.PARTIAL_FAILED), Outcome(codes)

    @staticmethod
    def _wait() -> None:
        if instance.frozen:
            instance.frozen.wait()
