"""The file store and power loss, at every call to the disk, with any part of the unsynced data.

A random workload runs on a simulated disk. Before each of its calls the power is cut several times (in copies), each
time with another part of the unsynced sectors and names. Each copy is reopened and read. MAINSTEM_CRASH_WORKLOADS sets
the number of workloads.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import count

import pytest
from rigs.simulated_disk import Disk, Faulty

from mainstem.storage.base import ABSENT
from mainstem.storage.file import FileBackend, backend, index
from mainstem.storage.file.space import GRAIN_BYTES

WORKLOADS = int(os.environ.get("MAINSTEM_CRASH_WORKLOADS", "6"))
CAPACITY = 24 * GRAIN_BYTES
SIZES = (1, 700, 4096, 4097, 9000, 20_000)
MIN_FREE = 1 << 20


class Workload:
    """Random calls, and what each key may hold after them. `during`: what it may also hold during a call."""

    def __init__(self, seed: int, cuts: int) -> None:
        self.rng = random.Random(seed)
        self.cuts = cuts
        self.seen: Counter[str] = Counter()
        self.keys = [self.rng.randbytes(32) for _ in range(12)]
        self.may: dict[bytes, set[bytes]] = {key: set() for key in self.keys}
        self.during: dict[bytes, set[bytes]] = {}
        self.disk = Disk()
        self.io = Faulty(self.disk, lambda number, name: self.cut(name))
        self.store: FileBackend | None = None

    def run(self, steps: int) -> None:
        self.store = self.open(self.io)
        for _ in range(steps):
            self.step()
            self.store.check()
        self.close()

    def open(self, io: Faulty | Disk) -> FileBackend:
        return FileBackend(
            "simulated",
            CAPACITY,
            io=io,
            threads=1,
            min_free_bytes=MIN_FREE,
            clock=count().__next__,  # queries the free space on every put
            random=random.Random("junk").randbytes,
        )

    def close(self) -> None:
        store, self.store = self.store, None
        assert store
        store.close()

    def step(self) -> None:
        assert self.store
        kind = self.rng.choices(("put", "scarce", "get", "delete", "reopen", "clear"), (12, 3, 3, 3, 1, 0.3))[0]
        some = self.rng.sample(self.keys, self.rng.randint(1, 6))
        if kind == "put":
            values = [self.rng.randbytes(self.rng.choice(SIZES)) for _ in some]
            self.during = {key: {value} for key, value in zip(some, values, strict=True)}
            assert all(self.store.put(some, [memoryview(value) for value in values]))
            self.may.update(self.during)
        elif kind == "scarce":  # others use some of the reserved free space during one put
            used = self.disk.size_bytes - self.disk.free_bytes(0)
            self.disk.size_bytes = used + MIN_FREE - self.rng.randint(1, 12) * GRAIN_BYTES
            values = [self.rng.randbytes(self.rng.choice(SIZES)) for _ in some]
            self.during = {key: {value} for key, value in zip(some, values, strict=True)}
            stored = self.store.put(some, [memoryview(value) for value in values])
            self.may.update({key: self.during[key] if kept else set() for key, kept in zip(some, stored, strict=True)})
            self.disk.size_bytes = Disk().size_bytes
        elif kind == "get":
            self.verify(self.store, set())
        elif kind == "delete":
            self.during = {key: set() for key in some}
            self.store.delete(some)
            self.may.update(self.during)
        elif kind == "clear":
            self.during = {key: set() for key in self.keys}
            self.store.clear()
            self.may.update(self.during)
        else:
            self.close()
            store = self.open(self.io)
            self.verify(store, set())  # drops evicted values that an old record still names
            self.store = store
        self.during = {}

    def cut(self, name: str) -> None:
        """Cuts the power, then reads and writes what survived."""
        self.seen[name] += 1
        there = self.store.exists(self.keys) if self.store else [False] * len(self.keys)
        resident = {key for key, found in zip(self.keys, there, strict=True) if found and key not in self.during}
        for _ in range(self.cuts):
            disk = self.disk.after_power_loss(self.rng)
            store = self.open(disk)
            store.check()
            self.verify(store, resident)
            value = memoryview(self.rng.randbytes(3000))
            assert store.put(self.keys[:1], [value]) == [True]
            store.check()
            store.close()
            store = self.open(disk)
            buffer = memoryview(bytearray(3000))
            assert store.get(self.keys[:1], [buffer]) == [3000] and buffer == value
            store.close()

    def verify(self, store: FileBackend, resident: set[bytes]) -> None:
        lengths = store.get(self.keys, [memoryview(bytearray(0)) for _ in self.keys])
        buffers = [memoryview(bytearray(max(length, 0))) for length in lengths]
        for key, length, buffer in zip(self.keys, store.get(self.keys, buffers), buffers, strict=True):
            self.seen["absent" if length == ABSENT else "read"] += 1
            if length == ABSENT:
                assert key not in resident, "a value was lost after its put had returned"
            else:
                allowed = self.may[key] | self.during.get(key, set())
                assert bytes(buffer) in allowed, "neither the value last put nor a miss"


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, WORKLOADS))])
def test_no_power_loss_shows_a_wrong_value_or_loses_a_durable_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SLACK_RECORDS", 10)
    monkeypatch.setattr(backend, "STEP_BYTES", 8 * GRAIN_BYTES)
    workload = Workload(seed, cuts=6)
    workload.run(steps=25)
    seen = workload.seen
    assert seen["read"] > 100 and seen["absent"] > 100, seen
    assert seen["pwritev"] > 40 and seen["rename"] > 0 and seen["allocate"] > 0 and seen["truncate"] > 0, seen


def test_the_simulated_disk_loses_only_unsynced_data() -> None:
    disk = Disk()
    fd = disk.open("a", 0, 3)
    disk.pwritev(fd, [memoryview(b"x" * 2000)], 0)
    disk.fdatasync(fd)
    names = {tuple(disk.after_power_loss(random.Random(seed)).files) for seed in range(50)}
    assert names == {(), ("a",)}, "a name that is not synced may be lost"
    disk.fsync(3)
    disk.pwritev(fd, [memoryview(b"y" * 1500)], 0)
    seen = {bytes(disk.after_power_loss(random.Random(seed)).files["a"].live[::512]) for seed in range(200)}
    assert {b"xxxx", b"yyyx", b"yxyx"} <= seen, "whole, lost and torn writes"
