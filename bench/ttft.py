"""Measures the time to the first token with a prefix that is new, and with the same prefix cached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from bench.prompts import Prompts, submit
from bench.report import Report
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Usage
from mainstem.settings.engine import EngineConfig


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        prefix_lengths: tokens that both requests share; limited by the model's context.
        suffix_length: tokens of each request's own suffix.
        token_budget: prompt tokens per length, which determines the number of repetitions.
        repeats: maximum and minimum repetitions of a length.
        dtypes: types of the weights.
        chunk: prompt tokens of a step (`EngineConfig.token_budget`).
    """

    prefix_lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    suffix_length: int = 20
    token_budget: int = 8192
    repeats: tuple[int, int] = (5, 2)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    chunk: int = 512


QUICK = Settings(prefix_lengths=(256, 1024), token_budget=2048, repeats=(3, 2))


def run(settings: Settings, report: Report, loaded: LoadedModel) -> None:
    """Measures one model in its dtype, and adds rows to the report."""
    config = EngineConfig(kv_bytes=1 << 30, token_budget=settings.chunk)
    prompts = Prompts(loaded)
    report.settings.update(asdict(settings), model=loaded.name)
    with Engine(loaded, config) as engine:
        _measure(engine, prompts, 64, settings)  # the first request of a process is slower
        for length in _lengths(settings, engine):
            report.progress(f"ttft: {loaded.dtype}, prefix {length}")
            pairs = [_measure(engine, prompts, length, settings) for _ in range(_repeats(settings, length))]
            report.rows.append({"dtype": str(loaded.dtype).removeprefix("torch."), **_row(length, pairs)})


def _lengths(settings: Settings, engine: Engine) -> Iterator[int]:
    limit = engine.max_context - settings.suffix_length - 1
    return (min(length, limit) for length in settings.prefix_lengths)


def _repeats(settings: Settings, length: int) -> int:
    maximum, minimum = settings.repeats
    return max(minimum, min(maximum, settings.token_budget // length))


def _measure(engine: Engine, prompts: Prompts, length: int, settings: Settings) -> tuple[Usage, Usage]:
    """Measures a new prefix, cold, and the same prefix with another suffix, warm. Nothing else runs."""
    prefix = prompts.tokens(length)
    cold, warm = (
        submit(engine, prompts.extend(prefix, settings.suffix_length), new_tokens=1).result().usage for _ in range(2)
    )
    engine.flush()
    return cold, warm


def _row(length: int, pairs: list[tuple[Usage, Usage]]) -> dict[str, Any]:
    cold_s = median(cold.ttft_s for cold, _ in pairs)
    warm_s = median(warm.ttft_s for _, warm in pairs)
    return {
        "prefix": length,
        "repeats": len(pairs),
        "cold_s": cold_s,
        "warm_s": warm_s,
        "ratio": cold_s / warm_s,
        "prompt_tokens": pairs[0][1].prompt_tokens,
        "reused_tokens": min(warm.cached_tokens for _, warm in pairs),
        "reused_cold": max(cold.cached_tokens for cold, _ in pairs),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Builds a table of all rows for the terminal."""
    title = "time to the first token, ms, median"
    shown = Table("dtype", "prefix", "cold", "warm", "cold / warm", "tokens reused", "repeats", title=title)
    for row in rows:
        shown.add_row(
            row["dtype"], str(row["prefix"]), f"{row['cold_s'] * 1000:.0f}", f"{row['warm_s'] * 1000:.1f}",
            f"{row['ratio']:.1f}", f"{row['reused_tokens']} of {row['prompt_tokens']}", str(row["repeats"]),
        )  # fmt: skip
    return shown
