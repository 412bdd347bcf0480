"""Measures the time to the first token while storage is dead, hung, slow, full or corrupt, relative to no storage.

Every store gets the same series of requests: new documents, then the same documents again, latest first. The device
holds one document and the host half of them. So in the second pass, some are on the host and the others in storage, if
anywhere.

    new        cached nowhere yet: the cost of asking a store in vain
    on host    requests that storage must not delay
    stored     below the host: read from a working store, otherwise computed

Every request goes to two engines over the same model, one after the other: one without storage, one with the store.
Times are compared pair by pair, so that other load affects both. On a shared machine, the time that a request waits
for storage before it is admitted, and the processor time meanwhile, are more reliable.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rigs import servers

from bench.prompts import Prompts, submit
from bench.report import Report
from mainstem.errors import BadArgument
from mainstem.runtime.engine import Engine
from mainstem.runtime.memory.host import SLOT_ALIGNMENT
from mainstem.runtime.memory.kv import kv_shapes
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.loading import LoadedModel
from mainstem.settings.engine import EngineConfig, HostSize, TierConfig
from mainstem.storage.memory import MemoryBackend
from mainstem.storage.options import check_options
from mainstem.tiers.storage.sealer import HEADER_BYTES

GOAL = 1.10
"""Maximum median time relative to no storage, for stores that are dead, frozen or hung."""

GOAL_FOR = ("dead", "frozen", "hung")
KINDS = ("new", "on host", "stored")
PAGE_SIZE = 16
_PAUSE_S = 0.05  # after each request, so that copies to the host end before the next one


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        documents: documents of the series; half of them fit the host.
        tokens: tokens of each document; enough that storage is used.
        rounds: how often the series runs over every store.
        stores: names from `STORES`.
        dtype: type of the weights.
    """

    documents: int = 12
    tokens: int = 340
    rounds: int = 4
    stores: tuple[str, ...] = ("healthy", "dead", "frozen", "hung", "slow", "lying", "full")
    dtype: str = "bfloat16"


QUICK = Settings(documents=6, rounds=1, stores=("healthy", "dead", "hung"))


# ---------------------------------------------------------------- faulty stores


class Faulty(MemoryBackend):
    """A store in memory with an injected fault: `bench.store_faults:Faulty?fault=hung`."""

    ended = threading.Event()
    """Ends blocked calls, so that a benchmark can continue with the next store."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        if fault not in ("hung", "slow", "lying", "full"):
            raise BadArgument("fault", fault, "one of hung, slow, lying, full")
        self._fault = fault

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """Opens `bench.store_faults:Faulty?fault=slow`."""
        check_options(options, ("fault",))
        return cls(options.get("fault", ""))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._block()
        return super().exists(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        self._block()
        lengths = super().get(keys, buffers)
        if self._fault == "lying":
            for buffer in buffers:
                buffer[-1] ^= 1
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        self._block()
        return [False] * len(keys) if self._fault == "full" else super().put(keys, buffers)

    def _block(self) -> None:
        if self._fault == "hung":
            self.ended.wait()
        elif self._fault == "slow":
            self.ended.wait(1)


Opened = tuple[str, Callable[[], None]]
"""The spec of a store, and a function that makes it fail once an engine has opened it."""


@contextmanager
def _injected(fault: str) -> Iterator[Opened]:
    Faulty.ended.clear()
    try:
        yield f"{__name__}:Faulty?fault={fault}", lambda: None
    finally:
        Faulty.ended.set()


@contextmanager
def _valkey(strike: signal.Signals | None) -> Iterator[Opened]:
    """Starts a real server, which will get a signal."""
    port = servers.free_port()
    with servers.valkey(port, "--maxmemory", "1gb") as server:
        yield f"redis://127.0.0.1:{port}/0", lambda: None if strike is None else server.send_signal(strike)


STORES: dict[str, Callable[[], AbstractContextManager[Opened]]] = {
    "healthy": partial(_valkey, None),
    "dead": partial(_valkey, signal.SIGKILL),
    "frozen": partial(_valkey, signal.SIGSTOP),
    "hung": partial(_injected, "hung"),
    "slow": partial(_injected, "slow"),
    "lying": partial(_injected, "lying"),
    "full": partial(_injected, "full"),
}
"""Valkey for faults of a real server; the other faults are injected. "hung" has no timeout of its own."""


# ---------------------------------------------------------------- one series


@dataclass(frozen=True, slots=True)
class _Time:
    """Seconds of one request: to its first token; of that, before admission; and processor time of all threads."""

    ttft_s: float
    waited_s: float
    cpu_s: float


@dataclass(slots=True)
class _Run:
    """Times of requests without and with a store, by kind; and the counts of the tiers."""

    times: dict[str, list[tuple[_Time, _Time]]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    stored_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)


def _series(settings: Settings, loaded: LoadedModel, name: str, run: _Run, seed: int) -> None:
    """Adds one series to a run."""
    prompts = Prompts(loaded, seed)
    documents = [prompts.tokens(settings.tokens) for _ in range(settings.documents)]
    with (
        STORES[name]() as (spec, strike),
        Engine(loaded, _config(settings, loaded, None)) as without,
        Engine(loaded, _config(settings, loaded, spec)) as engine,
    ):
        engines = (without, engine)
        _ask(engines, prompts.tokens(64))  # the first request is slower
        strike()
        for at, document in enumerate([*documents, *reversed(documents)]):
            if at == settings.documents:  # evicts the last document from the device
                _ask(engines, prompts.tokens(settings.tokens))
            pair = _ask(engines if at % 2 else engines[::-1], prompts.extend(document, 4))
            run.times[_kind(at, settings.documents)].append(pair if at % 2 else pair[::-1])
        stats = engine.stats()
        assert stats.tiers is not None
        run.stored_tokens += stats.totals.storage_tokens
        run.faults.update(stats.tiers.faults)
        Faulty.ended.set()  # so that the engine need not wait for blocked calls


def _ask(engines: tuple[Engine, Engine], tokens: NDArray[np.int32]) -> tuple[_Time, _Time]:
    """Sends one request to each engine, in their order."""
    first, second = (_timed(engine, tokens) for engine in engines)
    return first, second


def _timed(engine: Engine, tokens: NDArray[np.int32]) -> _Time:
    began_s = time.process_time()
    usage = submit(engine, tokens, new_tokens=1).result().usage
    cpu_s = time.process_time() - began_s
    time.sleep(_PAUSE_S)
    return _Time(usage.ttft_s, usage.queue_s, cpu_s)


def _kind(at: int, documents: int) -> str:
    return KINDS[max(0, at * 2 // documents - 1)]


def _config(settings: Settings, loaded: LoadedModel, spec: str | None) -> EngineConfig:
    whole = settings.tokens // PAGE_SIZE  # pages of a document that are copied and stored
    layout = Layout.of(loaded.model.config, loaded.max_context)
    shape = kv_shapes(loaded.model, layout.kv_layers)["full"]
    page_bytes = shape.bytes_per_page(PAGE_SIZE, loaded.dtype) + SLOT_ALIGNMENT + HEADER_BYTES
    host = HostSize(host_bytes=page_bytes * (whole + 1) * (settings.documents // 2 + 1))
    return EngineConfig(pages=whole + 6, page_size=PAGE_SIZE, tiers=TierConfig(host, storage=spec))


# ---------------------------------------------------------------- all stores


def run(settings: Settings, report: Report, loaded: LoadedModel) -> None:
    """Measures every store, and adds rows to the report."""
    report.settings.update(asdict(settings), model=loaded.name, goal=GOAL)
    runs = {name: _Run() for name in settings.stores}
    for number in range(settings.rounds):
        for name, run in runs.items():
            report.progress(f"store-faults: round {number + 1} of {settings.rounds}, {name}")
            _series(settings, loaded, name, run, seed=number)
    report.rows += [_row(name, kind, run) for name, run in runs.items() for kind in KINDS]
    for row in report.rows:
        if row["store"] in GOAL_FOR and row["ratio"] > GOAL:
            report.notes.append(f"goal missed: {row['store']}, {row['kind']}: {row['ratio']:.2f}, at most {GOAL:.2f}")
    report.tables.append(table(report.rows))


def _row(name: str, kind: str, run: _Run) -> dict[str, Any]:
    pairs = run.times[kind]
    without, times = ([pair[side].ttft_s for pair in pairs] for side in (0, 1))
    waited = [ours.waited_s for _, ours in pairs]
    return {
        "store": name,
        "kind": kind,
        "requests": len(pairs),
        "without_p50_s": median(without),
        "without_p99_s": _p99(without),
        "p50_s": median(times),
        "p99_s": _p99(times),
        "ratio": median(ours / theirs for theirs, ours in zip(without, times, strict=True)),
        "p99_ratio": _p99(times) / _p99(without),
        "cpu_ratio": median(ours.cpu_s / theirs.cpu_s for theirs, ours in pairs),
        "waited_p50_s": median(waited),
        "waited_p99_s": _p99(waited),
        "stored_tokens": run.stored_tokens,
        "faults": dict(run.faults),
    }


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


_TIMES = ("without_p50", "without_p99", "p50", "p99")
_WAITS = ("waited_p50", "waited_p99")
_RATIOS = ("ratio", "p99_ratio", "cpu_ratio")


def table(rows: list[dict[str, Any]]) -> Table:
    """Builds a table of all rows for the terminal."""
    title = "time to the first token, ms, without storage and with it, and the ratio of the two, request by request"
    shown = Table("store", "kind", "without: p50", "p99", "with: p50", "p99", title=title)
    for name in ("ratio", "p99 / p99", "CPU ratio", "waited: p50", "p99", "requests", "faults"):
        shown.add_column(name)
    for row in rows:
        faults = ", ".join(f"{count} {cause}" for cause, count in sorted(row["faults"].items()))
        shown.add_row(
            row["store"], row["kind"], *(f"{row[f'{name}_s'] * 1000:.0f}" for name in _TIMES),
            *(f"{row[name]:.2f}" for name in _RATIOS), *(f"{row[f'{name}_s'] * 1000:.1f}" for name in _WAITS),
            str(row["requests"]), faults,
        )  # fmt: skip
    return shown
