"""Doubles of clients of stores, one module each: its functions and classes are the client's, with the same checks.

Besides, each says:

    PACKAGE    the module that it stands for            SPEC       opens a store of it; `{folder}` is one for the test
    BAD        specs that are refused                   service    what the store holds, and its faults
    FRAMED     `Framed`, if the back end is a framed one

A new one is tested by `tests/storage/test_storage_unproven.py` without a line there.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass
class Service:
    """What a store holds, by name, and its faults."""

    values: dict[str, bytes] = field(default_factory=dict)
    capacity: int = 1 << 30
    down: bool = False
    frozen: threading.Event | None = None
    """No call ends until it is set."""
    codes: dict[str, Any] = field(default_factory=dict)
    """By name, the code that calls return for it."""
    registers: bool = True
    deletes: bool = True
    regions: list[tuple[int, int]] = field(default_factory=list)
    """Registered memory: address, length."""
    batches: list[int] = field(default_factory=list)
    """How many values each read and write had."""
    told: dict[str, Any] = field(default_factory=dict)
    """What the client was told, by name."""

    def reset(self) -> None:
        self.__dict__.update(type(self)().__dict__)

    def wait(self) -> None:
        if self.frozen:
            self.frozen.wait()

    def knows(self, address: int, length: int) -> bool:
        return any(start <= address and address + length <= start + size for start, size in self.regions)

    def has_room(self, length: int) -> bool:
        return sum(map(len, self.values.values())) + length <= self.capacity


@dataclass(frozen=True)
class Framed:
    """How a framed back end is driven.

    Args:
        size: of the values of the tests; 40 of them are more than the memory holds.
        room: the size of that memory.
        reads: replaces the class and method that reads by one that says that it has read two values, and has not.
        silent: the calls that say nothing of a service that is down.
        failed: the code of a value that fails alone; None: none does.
        checks_deletes: it finds out that a value is still there.
    """

    size: int
    room: int
    reads: tuple[type, str, Callable[..., Any]]
    silent: tuple[str, ...] = ()
    failed: Any = None
    checks_deletes: bool = True


def load() -> dict[str, ModuleType]:
    """Returns the double of each scheme that has one."""
    return {
        module.name: importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)
    }
