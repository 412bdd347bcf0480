"""Measures requests and tokens per second of many requests that share a prefix, with and without reuse."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from bench.prompts import Prompts, submit
from bench.report import Report
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel
from mainstem.settings.engine import EngineConfig

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        concurrent: concurrent requests; all are submitted at once.
        prefix_length: tokens of the shared prefix, which is cached before the clock starts, like a system prompt.
        question_length: tokens of each request's own question.
        new_tokens: tokens to generate per request.
        rounds: rounds in which the two engines take turns.
        dtype: type of the weights.
    """

    concurrent: tuple[int, ...] = (1, 2, 4, 8, 16)
    prefix_length: int = 1000
    question_length: int = 20
    new_tokens: int = 32
    rounds: int = 1
    dtype: str = "float32"


QUICK = Settings(concurrent=(1, 4))


def run(settings: Settings, report: Report, loaded: LoadedModel, clock: Clock = time.perf_counter) -> None:
    """Measures one model with and without its cache, and adds rows to the report."""
    prompts = Prompts(loaded)
    prefix = prompts.tokens(settings.prefix_length)
    report.settings.update(asdict(settings), model=loaded.name)
    config = EngineConfig(kv_bytes=1 << 30, max_running=max(settings.concurrent))
    plain = EngineConfig(kv_bytes=1 << 30, max_running=max(settings.concurrent), cache=False)
    with Engine(loaded, config) as reusing, Engine(loaded, plain) as computing:
        for engine in (reusing, computing):
            submit(engine, prefix, new_tokens=1).result()
        for concurrent in settings.concurrent:
            report.progress(f"throughput: {concurrent} at a time")
            seconds: dict[Engine, list[float]] = {reusing: [], computing: []}
            for _ in range(settings.rounds):
                asked = [prompts.extend(prefix, settings.question_length) for _ in range(concurrent)]
                for engine, taken in seconds.items():
                    taken.append(_seconds(engine, asked, settings.new_tokens, clock))
            report.rows.append(_row(concurrent, settings, median(seconds[reusing]), median(seconds[computing])))
    report.tables.append(_table(report.rows))


def _seconds(engine: Engine, asked: list[Any], new_tokens: int, clock: Clock) -> float:
    started_s = clock()
    streams = [submit(engine, tokens, new_tokens) for tokens in asked]
    for stream in streams:
        stream.result()
    return clock() - started_s


def _row(concurrent: int, settings: Settings, reusing_s: float, computing_s: float) -> dict[str, Any]:
    def rates(duration_s: float) -> dict[str, float]:
        requests_per_s = concurrent / duration_s
        return {"requests_per_s": requests_per_s, "tokens_per_s": requests_per_s * settings.new_tokens}

    return {
        "concurrent": concurrent,
        "reuse": rates(reusing_s),
        "no_reuse": rates(computing_s),
        "ratio": computing_s / reusing_s,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    title = "throughput of requests that share a prefix"
    columns = ("requests/s", "tokens/s")
    shown = Table("at a time", *columns, *(f"{name}, no reuse" for name in columns), "ratio", title=title)
    for row in rows:
        rates = [row[mode][rate] for mode in ("reuse", "no_reuse") for rate in ("requests_per_s", "tokens_per_s")]
        shown.add_row(str(row["concurrent"]), *(f"{rate:.2f}" for rate in rates), f"{row['ratio']:.1f}")
    return shown
