"""Measures copies of pages down and up: host memory and storage back ends, against memcpy and a plain file.

    device tensors --down--> host slots --put--> back end        floors: memcpy     pwrite, with and without fdatasync
    device tensors <---up--- host slots <--get-- back end                memcpy     preadv, from the system's cache

Each measure moves the same bytes as its floors and takes turns with them. Pages have a model's shape and are scattered
on both sides. Values are copied from and to the slots of a host pool, as in the tiers. The plain file is preallocated,
and the file store is full and evicts before it is timed, because new disk blocks cost many times more for any writer.
Knows no tree.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from rigs import servers

from bench.report import Report
from bench.tables import number
from mainstem.errors import BackendUnavailable, StorageError
from mainstem.runtime.memory.host import HostLayout, HostPool, Planes
from mainstem.storage.base import Backend, open_backend
from mainstem.tiers.host.transfer import Move
from mainstem.tiers.storage.sealer import HEADER_BYTES

MEMCPY, SYNCED, UNSYNCED = "memcpy", "plain file, fdatasync", "plain file, no sync"
HOST: dict[HostLayout, str] = {"page_first": "host, page_first", "layer_first": "host, layer_first"}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark. The shape is that of SmolLM2-135M.

    Args:
        page_sizes: page sizes in tokens.
        dtypes: types of keys and values.
        layers, kv_heads, head_dim: shape of the model.
        copied_bytes: bytes between device and host per round.
        stored_bytes: bytes to and from each store per round.
        batch_bytes: bytes of one call to a store, and of plain IO between two syncs.
        rounds: counted rounds of each measure.
        warm_ups: rounds before them; after two, the file store is full.
        stores: names from `STORES`.
        folder: folder for files; None: the system's temporary folder.
    """

    page_sizes: tuple[int, ...] = (1, 16, 64)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    layers: int = 30
    kv_heads: int = 3
    head_dim: int = 64
    copied_bytes: int = 256 << 20
    stored_bytes: int = 64 << 20
    batch_bytes: int = 16 << 20
    rounds: int = 5
    warm_ups: int = 3
    stores: tuple[str, ...] = ("memory", "file", "redis", "s3", "mooncake", "nixl")
    folder: str | None = None

    @property
    def all_bytes(self) -> int:
        """Bytes put into a store in all rounds of a case, with some margin."""
        return (2 + self.warm_ups + self.rounds) * self.stored_bytes

    def planes(self, case: Case, size: int) -> Planes:
        """Creates keys and values of about `size` bytes, with their memory touched."""
        dtype = getattr(torch, case.dtype)
        page_bytes = 2 * self.layers * case.page_size * self.kv_heads * self.head_dim * dtype.itemsize
        shape = (self.layers, max(size // page_bytes, 1), case.page_size, self.kv_heads, self.head_dim)
        return Planes(tuple(torch.randint(-99, 99, shape).to(dtype) for _ in range(2)))


QUICK = Settings(page_sizes=(16,), stored_bytes=32 << 20, rounds=3)


class Case(NamedTuple):
    """One kind of page."""

    page_size: int
    dtype: str


class Goal(NamedTuple):
    """The fraction of a floor that a measure should reach, with pages of 16 tokens."""

    what: str
    measure: str
    way: str
    floor: str
    at_least: float


GOALS = (
    Goal("load back on the CPU, of memcpy", HOST["page_first"], "up", MEMCPY, 0.8),
    Goal("put to the file store, of pwrite and fdatasync", "file", "down", SYNCED, 0.7),
    Goal("get from the file store, of preadv from the cache", "file", "up", SYNCED, 0.7),
)
GOAL_PAGE_SIZE = 16


def run(settings: Settings, report: Report) -> None:
    """Measures everything, and adds the table and the goals to the report."""
    report.settings.update(asdict(settings))
    cases = [Case(size, dtype) for size in settings.page_sizes for dtype in settings.dtypes]
    for case in cases:
        report.progress(f"tiers: {case.dtype}, pages of {case.page_size}: device and host")
        add_rows(report.rows, _host_rows(settings, case))
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        for name in settings.stores:
            _run_store(name, cases, settings, report, Path(folder))
    report.rows.sort(key=lambda row: cases.index(Case(row["page_size"], row["dtype"])))
    report.more["goals"] = judge(report.rows)
    report.tables += [table(report.rows), goals_table(report.more["goals"])]


def add_rows(rows: list[Row], more: Sequence[Row]) -> None:
    """Adds rows; floors are added only once, although each group measures its own."""
    known = {(row["what"], row["page_size"], row["dtype"]) for row in rows}
    rows.extend(row for row in more if (row["what"], row["page_size"], row["dtype"]) not in known)


# ---------------------------------------------------------------- in turns

Call = Callable[[int], object]
Ways = Mapping[str, Mapping[str, Call]]


def measure(
    case: Case, value_bytes: int, moved_bytes: int, floors: Ways, others: Ways, settings: Settings
) -> list[Row]:
    """Measures GB/s of each way; all of them take turns in every round.

    Args:
        case: the kind of page, for the rows.
        value_bytes: bytes of one page, for the rows.
        moved_bytes: bytes moved by each call.
        floors: calls by name and by `down` and `up`; each takes the number of the round.
        others: further calls; their rows have the fraction of each floor that they reach.
        settings: gives the number of rounds.
    """
    samples: dict[tuple[str, str], list[float]] = {}
    for turn in range(settings.warm_ups + settings.rounds):
        for name, calls in {**floors, **others}.items():
            for way, call in calls.items():
                seconds = _seconds(call, turn)
                if turn >= settings.warm_ups:
                    samples.setdefault((name, way), []).append(moved_bytes / seconds / 1e9)
    rows = []
    for name, calls in {**floors, **others}.items():
        speeds = {way: samples[name, way] for way in calls}
        row: Row = {"what": name, "page_size": case.page_size, "dtype": case.dtype, "value_bytes": value_bytes}
        row |= {way: {"median": median(s), "least": min(s), "most": max(s)} for way, s in speeds.items()}
        if name in others:
            row["of"] = {floor: {way: _part(s, samples[floor, way]) for way, s in speeds.items()} for floor in floors}
        rows.append(row)
    return rows


def _part(speeds: Sequence[float], floor: Sequence[float]) -> float:
    """Returns the median over rounds of the fraction of the round's own floor, because load varies between rounds."""
    return median(speed / best for speed, best in zip(speeds, floor, strict=True))


def _seconds(call: Call, turn: int) -> float:
    started = time.perf_counter()
    call(turn)
    return time.perf_counter() - started


def _memmove(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    assert target.nbytes == source.nbytes
    ctypes.memmove(target.ctypes.data, source.ctypes.data, target.nbytes)


# ---------------------------------------------------------------- device and host


def _host_rows(settings: Settings, case: Case) -> list[Row]:
    planes = settings.planes(case, settings.copied_bytes)
    order = np.random.default_rng(0)
    ids, slots = (order.permutation(planes.pages).astype(np.int32) for _ in range(2))
    moved = planes.pages * planes.payload_bytes
    device = [tensor.view(torch.uint8).flatten().numpy() for tensor in planes.tensors]
    flat = np.ones(moved, np.uint8)
    halves = list(zip(device, np.split(flat, len(device)), strict=True))
    floors = {
        MEMCPY: {
            "down": lambda _: [_memmove(host, tensor) for tensor, host in halves],
            "up": lambda _: [_memmove(tensor, host) for tensor, host in halves],
        }
    }
    pools = {layout: HostPool([planes], [planes.pages], layout) for layout in HOST}
    down, up = [Move(0, ids, slots)], [Move(0, slots, ids)]
    others = {HOST[layout]: _copies(pool, down, up) for layout, pool in pools.items()}
    rows = measure(case, planes.payload_bytes, moved, floors, others, settings)
    for pool in pools.values():
        pool.close()
    return rows


def _copies(pool: HostPool, down: Sequence[Move], up: Sequence[Move]) -> dict[str, Call]:
    return {"down": lambda _: pool.down(down).wait(), "up": lambda _: pool.up(up).wait()}


# ---------------------------------------------------------------- stores


@contextmanager
def _memory(folder: Path, settings: Settings) -> Iterator[str]:
    yield "memory:"


@contextmanager
def _file(folder: Path, settings: Settings) -> Iterator[str]:
    yield f"file:{folder}/file?capacity={2 * settings.stored_bytes}"


@contextmanager
def _redis(folder: Path, settings: Settings) -> Iterator[str]:
    port = servers.free_port()
    with servers.valkey(port):
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def _s3(folder: Path, settings: Settings) -> Iterator[str]:
    port = servers.free_port()
    Path(folder, "objects", "pages").mkdir(parents=True)
    os.environ.update(servers.S3_CREDENTIALS)
    with servers.rclone_s3(port, Path(folder, "objects")):
        yield f"s3://pages/bench?endpoint=http://127.0.0.1:{port}&region=us-east-1&timeout=60"


@contextmanager
def _mooncake(folder: Path, settings: Settings) -> Iterator[str]:
    if importlib.util.find_spec("mooncake") is None:
        raise BackendUnavailable("the package mooncake is not installed")
    port = servers.free_port()
    with servers.mooncake_master(port):
        yield f"mooncake://127.0.0.1:{port}?segment={settings.all_bytes}&timeout=60"


@contextmanager
def _nixl(folder: Path, settings: Settings) -> Iterator[str]:
    yield f"nixl:posix?path={folder}/nixl"


STORES: dict[str, Callable[[Path, Settings], AbstractContextManager[str]]] = {
    "memory": _memory,
    "file": _file,
    "redis": _redis,
    "s3": _s3,
    "mooncake": _mooncake,
    "nixl": _nixl,
}
"""Context managers that start each store, given a folder; its spec can be opened while the context is active."""


def _run_store(name: str, cases: Sequence[Case], settings: Settings, report: Report, folder: Path) -> None:
    try:
        with STORES[name](folder, settings) as spec:
            for case in cases:
                report.progress(f"tiers: {case.dtype}, pages of {case.page_size}: {name}")
                with closing(open_backend(spec)) as backend:
                    add_rows(report.rows, _store_rows(name, backend, settings, case, folder))
    except (BackendUnavailable, FileNotFoundError, RuntimeError) as error:
        report.notes.append(f"{name} is left out: {error}")
    except StorageError as error:
        report.notes.append(f"{name} failed: {error}")


def _store_rows(name: str, backend: Backend, settings: Settings, case: Case, folder: Path) -> list[Row]:
    planes = settings.planes(case, settings.stored_bytes)
    pool = HostPool([planes], [planes.pages], storage=True)
    every = np.arange(planes.pages, dtype=np.int32)
    pool.down([Move(0, every, every)]).wait()
    backend.register(pool.regions())
    store = _Store(backend, pool.slots(0, range(planes.pages)), settings.batch_bytes)
    (region,) = pool.regions()
    memory = np.frombuffer(region, np.uint8)
    copy = np.ones_like(memory)
    with _PlainFile(folder / "plain", region, settings.batch_bytes) as plain:
        floors = {
            MEMCPY: {"down": lambda _: _memmove(copy, memory), "up": lambda _: _memmove(memory, copy)},
            SYNCED: {"down": plain.write_synced, "up": plain.read},
            UNSYNCED: {"down": plain.write, "up": plain.read},
        }
        others = {name: {"down": store.put, "up": store.get}}
        rows = measure(case, HEADER_BYTES + planes.payload_bytes, len(region), floors, others, settings)
    store.check()
    backend.clear()
    pool.close()
    return rows


class _Store:
    """Puts every slot under new keys in each round, and gets them again."""

    def __init__(self, backend: Backend, slots: Sequence[memoryview], batch_bytes: int) -> None:
        self._backend = backend
        self._slots = slots
        self._content = [bytes(slot) for slot in slots[:3]]
        self._batch = max(batch_bytes // len(slots[0]), 1)

    def put(self, turn: int) -> None:
        for keys, slots in self._batches(turn):
            if not all(self._backend.put(keys, slots)):
                raise StorageError("full", "it did not accept all values")

    def get(self, turn: int) -> None:
        for slot in self._slots[:3]:
            slot[-9:] = bytes(9)
        for keys, slots in self._batches(turn):
            if self._backend.get(keys, slots) != [len(slot) for slot in slots]:
                raise StorageError("io", "it did not return all values")

    def check(self) -> None:
        """Checks that the last values read are those that were put.

        Raises:
            StorageError: they differ.
        """
        if [bytes(slot) for slot in self._slots[:3]] != self._content:
            raise StorageError("io", "it returned other values")

    def _batches(self, turn: int) -> Iterator[tuple[list[bytes], Sequence[memoryview]]]:
        for begin in range(0, len(self._slots), self._batch):
            slots = self._slots[begin : begin + self._batch]
            names = (f"{turn}/{begin + at}".encode() for at in range(len(slots)))
            yield [hashlib.blake2b(name, digest_size=32).digest() for name in names], slots


class _PlainFile:
    """Copies the same memory to and from a preallocated file, with one call and optionally one sync per batch."""

    def __init__(self, path: Path, memory: memoryview, batch_bytes: int) -> None:
        self._path = path
        self._parts = [(at, memory[at : at + batch_bytes]) for at in range(0, len(memory), batch_bytes)]
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._file, 0, len(memory))

    def __enter__(self) -> _PlainFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)
        self._path.unlink()

    def write(self, turn: int) -> None:
        for at, part in self._parts:
            assert os.pwrite(self._file, part, at) == len(part)

    def write_synced(self, turn: int) -> None:
        for at, part in self._parts:
            assert os.pwrite(self._file, part, at) == len(part)
            os.fdatasync(self._file)

    def read(self, turn: int) -> None:
        for at, part in self._parts:
            assert os.preadv(self._file, [part], at) == len(part)


# ---------------------------------------------------------------- results


def judge(rows: Sequence[Row], goals: Sequence[Goal] = GOALS) -> list[Row]:
    """Returns a row for each goal and dtype: what, goal, unit, measured, met; None: it was not measured."""
    found = {(row["what"], row["dtype"]): row for row in rows if row["page_size"] == GOAL_PAGE_SIZE}
    judged = []
    for goal in goals:
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            row = found.get((goal.measure, dtype))
            part = None if row is None else row["of"][goal.floor][goal.way]
            met = None if part is None else part >= goal.at_least
            what = f"{goal.what}; {dtype}, pages of {GOAL_PAGE_SIZE}"
            judged.append({"what": what, "goal": goal.at_least, "unit": "ratio", "measured": part, "met": met})
    return judged


def table(rows: Sequence[Row]) -> Table:
    """Builds a table with one line per measure and kind of page."""
    heads = ("page", "type", "KiB per page", "", "down, GB/s", "up, GB/s", "of memcpy", "of a plain file")
    shown = Table(*heads, title="pages down and up; of memcpy and of a plain file (fdatasync, cached): down, up")
    before = None
    for row in rows:
        case = (row["page_size"], row["dtype"])
        if before not in (None, case):
            shown.add_section()
        before = case
        of = row.get("of", {})
        parts = [_parts(of.get(floor)) for floor in (MEMCPY, SYNCED)]
        speeds = [_speed(row[way]) for way in ("down", "up")]
        shown.add_row(*map(str, case), number(row["value_bytes"] / 1024), row["what"], *speeds, *parts)
    return shown


def goals_table(goals: Sequence[Row]) -> Table:
    """The goals, and whether they are met."""
    shown = Table("goal", "at least", "measured", "met", title="goals")
    for goal in goals:
        measured = "–" if goal["measured"] is None else number(goal["measured"])
        shown.add_row(
            goal["what"], number(goal["goal"]), measured, {True: "met", False: "missed", None: "–"}[goal["met"]]
        )
    return shown


def _speed(speed: dict[str, float]) -> str:
    return f"{number(speed['median'])} ({number(speed['least'])} to {number(speed['most'])})"


def _parts(parts: dict[str, float] | None) -> str:
    return "" if parts is None else f"{100 * parts['down']:.0f} %, {100 * parts['up']:.0f} %"
