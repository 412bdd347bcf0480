"""The time to the first token of stored prompts on this CPU, beside loading everything and computing everything.

The store is memory at the end of a link of a given rate, which all reads share; the model is real. Each prompt is asked
of three engines in turns, with empty device and host. `loading` shows the same in virtual time, over more cases.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any, ClassVar, Literal, Self, get_args

from rich.table import Table

from bench.prompts import Prompts, submit
from bench.report import Report
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel
from mainstem.settings.engine import EngineConfig, HostSize, PrefetchPolicy, StorageConfig, TierConfig
from mainstem.storage.memory import MemoryBackend
from mainstem.storage.options import check_options

GOAL = 1.25
"""The p99 is at most that many times the better of the other two."""

Way = Literal["Mainstem", "load", "compute"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        rates: bytes a second from storage.
        lengths: tokens of a prompt.
        rounds: prompts of each case.
        warm_ups: prompts before them, which teach the estimates.
        dtype: type of the weights.
    """

    rates: tuple[float, ...] = (4e6, 16e6, 64e6, 400e6)
    lengths: tuple[int, ...] = (400, 1200)
    rounds: int = 10
    warm_ups: int = 3
    dtype: str = "bfloat16"


QUICK = Settings(rates=(16e6, 400e6), lengths=(400,), rounds=3)


class Throttled(MemoryBackend):
    """What all stores of this class share, at the end of one link: `bench.throttled:Throttled?`."""

    rate: ClassVar[float] = 0.0
    """Bytes a second; 0: as many as memory allows."""
    _shared: ClassVar[MemoryBackend] = MemoryBackend()
    _link: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """Opens it; there are no options."""
        check_options(options, ())
        return cls()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._shared.exists(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        if rate := self.rate:  # once: it changes while a read waits for the link
            with self._link:
                time.sleep(sum(map(len, buffers)) / rate)
        return self._shared.get(keys, buffers)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return self._shared.put(keys, buffers)


def run(settings: Settings, report: Report, loaded: LoadedModel) -> None:
    """Measures every case, and adds rows to the report."""
    report.settings.update(asdict(settings), model=loaded.name, goal=GOAL)
    prompts = Prompts(loaded)
    with ExitStack() as stack:
        engines = {way: stack.enter_context(Engine(loaded, _config(way))) for way in get_args(Way)}
        for rate in settings.rates:
            for length in settings.lengths:
                report.progress(f"throttled: {rate / 1e6:g} MB/s, {length} tokens")
                times: dict[Way, list[float]] = {way: [] for way in engines}
                for number in range(settings.warm_ups + settings.rounds):
                    tokens = prompts.tokens(length)
                    Throttled.rate = 0.0
                    submit(engines["load"], tokens, new_tokens=1).result()
                    Throttled.rate = rate
                    order = list(engines)[number % 3 :] + list(engines)[: number % 3]
                    for way in order:
                        for engine in engines.values():  # so that nothing else is on the link
                            _rest(engine)
                        engines[way].flush()
                        usage = submit(engines[way], tokens, new_tokens=1).result().usage
                        times[way].append(usage.ttft_s)
                report.rows.append(_row(rate, length, {way: each[settings.warm_ups :] for way, each in times.items()}))
                if report.rows[-1]["of_better"] > GOAL:
                    ratio = report.rows[-1]["of_better"]
                    report.notes.append(f"goal missed: {rate / 1e6:g} MB/s, {length} tokens: {ratio:.2f}")
    worst = max(row["of_better"] for row in report.rows)
    what = "first token of a stored prompt over the better of loading and computing all, p99, worst case"
    report.more["goals"] = [{"what": what, "goal": GOAL, "unit": "x", "measured": worst, "met": worst <= GOAL}]
    report.tables.append(table(report.rows))


def _config(way: Way) -> EngineConfig:
    policy: PrefetchPolicy = "wait_complete" if way == "load" else "timeout"
    limits = StorageConfig(prefetch=policy, call_timeout_s=60.0)
    storage = TierConfig(HostSize(host_ratio=2.0), storage=f"{__name__}:Throttled?", limits=limits)
    return EngineConfig(kv_bytes=256 << 20, tiers=TierConfig() if way == "compute" else storage)


def _rest(engine: Engine) -> None:
    """Waits until nothing is moved between tiers."""
    while (stats := engine.stats().tiers) is not None and (stats.queued or stats.under_way):
        time.sleep(0.01)


def _row(rate: float, length: int, times: Mapping[Way, Sequence[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"rate": rate, "length": length}
    for way, each in times.items():
        row[way] = {"p50_s": median(each), "p99_s": quantiles(each, n=100, method="inclusive")[98]}
    row["of_better"] = row["Mainstem"]["p99_s"] / min(row["load"]["p99_s"], row["compute"]["p99_s"])
    row["p50_of_better"] = row["Mainstem"]["p50_s"] / min(row["load"]["p50_s"], row["compute"]["p50_s"])
    return row


def table(rows: list[dict[str, Any]]) -> Table:
    """Builds a table of all rows for the terminal."""
    title = "time to the first token of a stored prompt, ms, and its ratio to the better of the other two"
    shown = Table("MB/s", "tokens", "Mainstem", "p99", "load", "p99", "compute", "p99", "p50s", "p99s", title=title)
    for row in rows:
        times = [row[way][name] for way in get_args(Way) for name in ("p50_s", "p99_s")]
        shown.add_row(
            f"{row['rate'] / 1e6:g}", str(row["length"]), *(f"{seconds * 1000:,.0f}" for seconds in times),
            f"{row['p50_of_better']:.2f}", f"{row['of_better']:.2f}",
        )  # fmt: skip
    return shown
