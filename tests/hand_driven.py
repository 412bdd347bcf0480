"""What tests of the tiers drive by hand: a clock, workers that run a call when they are told to, stores that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from mainstem.identity import Identity
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.pages import Sealer
from mainstem.tiers.store import StorageConfig, Store

T = TypeVar("T")

IDENTITY = Identity(
    model="ghost",
    weights="0123",
    dtype="uint64",
    quantization="none",
    layout="layer, number",
    shape="2 layers",
    attention="gqa",
    rope="none",
    tokenizer="letters",
    symbols="TokenKeys/4",
    page_size=2,
)
SECRET = b"a secret of the tests"


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class HandCall(Generic[T]):
    """A call that waits until `run`."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._ended = False
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001  # as a thread would
            self._error = error
        self._ended = True

    def done(self) -> bool:
        return self._ended

    def result(self) -> T:
        assert self._ended
        if self._error is not None:
            raise self._error
        return self._value


class HandWorkers:
    """Calls in the order in which they came; each runs when it is told to, or at once if `instant`."""

    def __init__(self, *, instant: bool = False) -> None:
        self.instant = instant
        self.waiting: list[HandCall[Any]] = []
        self.submitted = 0
        self.closed = False
        self.hang = False  # at `close`

    def submit(self, function: Callable[[], T]) -> HandCall[T]:
        call = HandCall(function)
        self.submitted += 1
        if self.instant:
            call.run()
        else:
            self.waiting.append(call)
        return call

    def run(self, at: int = 0) -> None:
        self.waiting.pop(at).run()

    def run_all(self) -> int:
        ran = 0
        while self.waiting:
            self.run()
            ran += 1
        return ran

    def close(self, timeout_s: float) -> bool:
        self.closed = True
        return not self.hang


class FaultyBackend(MemoryBackend):
    """A store whose next calls do something else, and which counts the calls that reach it.

    `next_calls` has what happens to the next calls, by the method's name or for any: an exception is raised, a function
    is called in its place, with the same arguments.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.always: Any = None
        self.instead: dict[str, Any] = {}
        self.calls: list[str] = []

    def _turn(self, name: str, real: Callable[..., Any], *arguments: Any) -> Any:
        self.calls.append(name)
        fault = self.instead.get(name, self.always)
        if isinstance(fault, BaseException):
            raise fault
        return real(*arguments) if fault is None else fault(*arguments)

    def exists(self, keys: Sequence[bytes]) -> int:
        return self._turn("exists", super().exists, keys)  # type: ignore[no-any-return]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        return self._turn("get", super().get, keys, buffers)  # type: ignore[no-any-return]

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return self._turn("put", super().put, keys, buffers)  # type: ignore[no-any-return]

    def delete(self, keys: Sequence[bytes]) -> None:
        self._turn("delete", super().delete, keys)

    def keys(self) -> list[bytes]:
        return list(self._values)

    def value(self, key: bytes) -> bytes:
        return self._values[key]

    def set_value(self, key: bytes, value: bytes) -> None:
        self._values[key] = value


def make_store(
    backend: MemoryBackend,
    workers: HandWorkers | None = None,
    clock: Clock | None = None,
    *,
    writers: HandWorkers | None = None,
    identity: dict[str, Any] | None = None,
    **config: Any,
) -> Store:
    """A store whose calls run on one set of workers, at once if none are given."""
    readers = workers or HandWorkers(instant=True)
    sealer = Sealer(replace(IDENTITY, **(identity or {})), SECRET)
    limits = StorageConfig(**{"prefetch_min_tokens": 1, **config})
    return Store(backend, sealer, limits, readers=readers, writers=writers or readers, clock=clock or Clock())
