"""A store shared by several processes, and the workers that call it. It fails, lies, loses data, stalls and recovers.

`Disk` is what survives a kill. `SimBackend` is one process's client: it injects every fault that a back end may have.
`SimWorkers` decides when a call runs and when its caller is notified, which may be never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar, cast

from mainstem.errors import StorageError
from mainstem.storage.base import ABSENT, Backend, BackendStats, Capabilities
from mainstem.tiers.storage.sealer import HEADER_BYTES, Sealer
from simulator.world import World, require

T = TypeVar("T")

_CAUSES = tuple(cause for cause in StorageError.CAUSES if cause != "closed")


class Disk:
    """Values by key, with the faults of the medium.

    Args:
        world: random choices.
        capacity: number of values; when full, a new value is rejected or replaces another.
    """

    def __init__(self, world: World, capacity: int) -> None:
        self.world, self.capacity = world, capacity
        self.values: dict[bytes, bytes] = {}
        self.stale: dict[bytes, bytes] = {}  # the previous value of a key
        self.evicts = world.chance(0.5)
        self.outage: str | None = None
        self._contents: dict[bytes, bytes] = {}  # of pages, as first written

    def store(self, key: bytes, value: bytes) -> bool:
        """Stores a value; returns whether there was room."""
        if key not in self.values and len(self.values) >= self.capacity:
            if not self.evicts:
                return False
            del self.values[self.world.random.choice(list(self.values))]
        if key in self.values:
            self.stale[key] = self.values[key]
        self.values[key] = value
        return True

    def witness(self, key: bytes, content: bytes) -> None:
        """Checks that every write of a page with one key has the same content."""
        if content[:1] and len(content) < 4096:  # notes are longer and may change
            require(self._contents.setdefault(key, content) == content, "two contents for one key", key.hex())

    def decay(self) -> None:
        """Injects a fault of the medium between calls."""
        world, values = self.world, self.values
        kind = world.fault("disk: loses some", "disk: loses all", "disk: rots", "disk: swaps") if values else None
        if kind is None:
            return
        keys = list(values)
        if kind == "disk: loses all" and world.chance(0.2):
            values.clear()
        elif kind in ("disk: loses some", "disk: loses all"):
            world.faults[kind] -= 1
            world.faults["disk: loses some"] += 1
            for key in world.random.sample(keys, 1 + len(keys) // 8):
                del values[key]
        elif kind == "disk: rots":
            key = world.random.choice(keys)
            values[key] = flip(world, values[key])
        else:
            one, two = world.random.choice(keys), world.random.choice(keys)
            values[one], values[two] = values[two], values[one]


def flip(world: World, value: bytes) -> bytes:
    """Returns the value with one bit flipped."""
    changed = bytearray(value)
    if changed:
        changed[world.random.randrange(min(len(changed), 512))] ^= 1 << world.random.randrange(8)
    return bytes(changed)


class SimBackend(Backend):
    """The client of one process.

    Args:
        disk: the shared disk.
        forger: seals pages like an attacker who knows everything except the secret.
        reaches: whether calls reach the store now.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=True, zero_copy=True, evicts=True, overwrites=True
    )

    def __init__(self, disk: Disk, forger: Sealer, reaches: Callable[[], bool] = lambda: True) -> None:
        self.disk, self.world, self._forger, self._reaches = disk, disk.world, forger, reaches
        self.dying = False  # the process is being killed: writes are torn

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        kind = self._begin("exists", *_EXISTS_LIES, "raises")
        there = [key in self.disk.values for key in keys]
        random = self.world.random
        if kind == "exists lies: too many":
            there = [found or random.random() < 0.5 for found in there]
        elif kind == "exists lies: too few":
            there = [found and random.random() < 0.5 for found in there]
        elif kind == "exists lies: wrong key":
            random.shuffle(there)
        elif kind == "exists lies: wrong length":
            there = there[: random.randrange(len(keys))] if keys and random.random() < 0.5 else [*there, True]
        self.world.did("exists", len(keys), there)
        return there

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        kind = self._begin("get", *_GET_LIES, "raises", "raises in the middle", "answers too few")
        before = [bytes(buffer) for buffer in buffers] if kind == "get lies: nothing filled" else []
        lengths = [self._read(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
        if kind is not None and keys:
            at = self.world.random.randrange(len(keys))
            if kind == "get raises in the middle":
                buffers[at][:] = bytes(len(buffers[at]))
                raise StorageError(self.world.random.choice(_CAUSES), "simulated")
            if kind == "get answers too few":
                lengths.pop()
            elif kind == "get lies: nothing filled":
                buffers[at][:] = before[at]
                lengths[at] = len(buffers[at])
            else:
                lengths[at] = self._lie(kind, keys[at], buffers[at], lengths[at])
        self.world.did("get", len(keys), lengths)
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        kind = self._begin("put", *_PUT_LIES, "refuses", "raises", "raises in the middle", "takes place twice")
        at = self.world.random.randrange(len(keys)) if kind is not None and keys else len(keys)
        for key, buffer in zip(keys, buffers, strict=True):
            self.disk.witness(key, bytes(buffer[HEADER_BYTES:]))
        if self.dying:
            at, kind = self.world.random.randint(0, len(keys)), "put torn by a kill"
        stored = []
        for number, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            fault = kind if number == at else None
            if kind == "put refuses" and number >= at:
                stored.append(False)
                continue
            if fault == "put raises in the middle":
                raise StorageError(self.world.random.choice(_CAUSES), "simulated")
            stored.append(self._write(key, bytes(buffer), fault))
            if fault == "put torn by a kill":
                break
        self.world.did("put", len(keys), stored)
        return stored

    def delete(self, keys: Sequence[bytes]) -> None:
        self._begin("delete", "raises")
        for key in keys:
            self.disk.values.pop(key, None)
        self.world.did("delete", len(keys))

    def clear(self) -> None:
        self.disk.values.clear()

    def stats(self) -> BackendStats:
        return BackendStats(entries=len(self.disk.values))

    def close(self) -> None:
        """Does nothing."""

    # ---------------------------------------------------------------- helpers

    def _begin(self, call: str, *faults: str) -> str | None:
        """Draws the fault of this call; raises at once if that is the fault."""
        world = self.world
        if not self._reaches():
            world.faults["network: store"] += 1
            raise StorageError("unreachable", "simulated")
        if self.disk.outage is not None and not world.calm:
            world.faults[f"outage: {self.disk.outage}"] += 1
            if self.disk.outage == "full" and call == "put":
                raise StorageError("full", "simulated")
            if self.disk.outage == "dead":
                raise StorageError("unreachable", "simulated")
        kinds = [f"{call} {fault}" for fault in faults]
        kind = world.fault(*kinds) or (world.fault(*kinds) if call == "get" else None)  # gets are few: two tries
        if kind is not None and kind.endswith(" raises"):
            world.did(call, "raises")
            if world.chance(0.3):  # a client is third-party code
                raise world.random.choice((OSError, ValueError, KeyError, RuntimeError, MemoryError))("simulated")
            raise StorageError(world.random.choice(_CAUSES), "simulated")
        return kind

    def _read(self, key: bytes, buffer: memoryview) -> int:
        value = self.disk.values.get(key)
        if value is None:
            return ABSENT
        if len(value) == len(buffer):
            buffer[:] = value
        return len(value)

    def _write(self, key: bytes, value: bytes, fault: str | None) -> bool:
        world, disk = self.world, self.disk
        if fault == "put lies: lost":
            return True
        if fault in ("put lies: torn", "put torn by a kill"):
            end = world.random.randrange(len(value))
            value = value[:end] + (bytes(len(value) - end) if world.chance(0.5) else b"")
            world.faults["put torn by a kill"] += fault == "put torn by a kill"
        elif fault == "put lies: altered":
            value = flip(world, value)
        elif fault == "put lies: under another key" and disk.values:
            key = world.random.choice(list(disk.values))
        stored = disk.store(key, value)
        if fault == "put takes place twice":
            stored = disk.store(key, value)
        return stored

    def _lie(self, kind: str, key: bytes, buffer: memoryview, length: int) -> int:
        world, values = self.world, self.disk.values
        if kind == "get lies: absent":
            return ABSENT
        if kind == "get lies: altered":
            buffer[:] = flip(world, bytes(buffer))
        elif kind == "get lies: short":
            return max(0, len(buffer) - world.random.choice((1, 8, 64, len(buffer))))
        elif kind == "get lies: long":
            return len(buffer) + world.random.choice((1, 64, 1 << 40))
        elif kind == "get lies: cut":
            end = world.random.randrange(len(buffer))
            buffer[end:] = bytes(len(buffer) - end)
        elif kind == "get lies: forged":
            self._forge(key, buffer)
        else:
            other = self.disk.stale.get(key) if kind == "get lies: stale" else None
            other = other or (values[world.random.choice(list(values))] if values else b"")
            if len(other) == len(buffer):
                buffer[:] = other
        return len(buffer)

    def _forge(self, key: bytes, buffer: memoryview) -> None:
        """Forges a page: the right header, other content, and the forger's tag or the original one."""
        tag = bytes(buffer[HEADER_BYTES - 32 : HEADER_BYTES])
        content = flip(self.world, bytes(buffer[HEADER_BYTES:]))
        buffer[HEADER_BYTES:] = content
        self._forger.seal(buffer, key)
        if self.world.chance(0.5):
            buffer[HEADER_BYTES - 32 : HEADER_BYTES] = tag


_EXISTS_LIES = ("lies: too many", "lies: too few", "lies: wrong key", "lies: wrong length")
_GET_LIES = tuple(
    f"lies: {lie}"
    for lie in ("absent", "altered", "short", "long", "cut", "forged", "misdirected", "stale", "nothing filled")
)
_PUT_LIES = ("lies: lost", "lies: torn", "lies: altered", "lies: under another key")


class SimCall(Generic[T]):
    """A call that runs at one time and is answered at a later one."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function: Callable[[], T] | None = function
        self.answered = False
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """Runs the call, once."""
        function, self.function = self.function, None
        if function is None:
            return
        try:
            self._value = function()
        except BaseException as error:  # noqa: BLE001  # raised again by `result`
            self._error = error

    def done(self) -> bool:
        return self.answered

    def result(self) -> T:
        require(self.answered, "the result of a call that has not ended")
        if self._error is not None:
            raise self._error
        return self._value


class SimWorkers:
    """Workers in virtual time.

    Args:
        world: the clock and random choices.
        disk: its outages affect the calls.
        threads: calls at once.
    """

    def __init__(self, world: World, disk: Disk, threads: int) -> None:
        self._world, self._disk, self._free = world, disk, threads
        self._latency_s = world.random.choice((0.001, 0.01, 0.05))
        self._waiting: list[SimCall[object]] = []
        self._running: list[SimCall[object]] = []
        self._closed = False

    def submit(self, function: Callable[[], T]) -> SimCall[T]:
        call = SimCall(function)
        self._world.did("submit")
        self._waiting.append(cast("SimCall[object]", call))
        self._start()
        return call

    def close(self, timeout_s: float) -> bool:
        """Waits for running calls until the time is over."""
        self._closed = True
        self._world.pass_time(timeout_s)
        return not self._running

    def kill(self) -> list[SimCall[object]]:
        """Stops all calls; returns those that were running."""
        self._closed, running, self._running, self._waiting = True, self._running, [], []
        return running

    def _start(self) -> None:
        world = self._world
        while self._waiting and self._free > 0:
            self._free -= 1
            call = self._waiting.pop(0)
            self._running.append(call)
            delay_s = world.delay_s(self._latency_s)
            stuck = self._disk.outage == "hangs" or world.fault("call: hangs", "call: late", "call: slow")
            if stuck and not world.calm:
                long_s = {"call: slow": 0.1, "call: late": 2.0}.get(str(stuck), 10.0)
                world.faults["outage: hangs"] += stuck is True
                delay_s += world.random.uniform(0, long_s)
            world.at(delay_s, lambda call=call: self._run(call))  # type: ignore[misc]

    def _run(self, call: SimCall[object]) -> None:
        """Runs the call now; its answer follows later."""
        if call in self._running:
            call.run()
            self._world.at(self._world.delay_s(self._latency_s), lambda: self._answer(call))

    def _answer(self, call: SimCall[object]) -> None:
        if call in self._running:
            self._running.remove(call)
            self._free += 1
            call.answered = True
            self._start()
