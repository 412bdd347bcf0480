"""The time to the first token: the same prefix never seen, and seen once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from bench.prompts import Prompts, submit
from bench.report import Report
from mainstem.runtime.engine import Engine, EngineConfig
from mainstem.runtime.models import LoadedModel
from mainstem.runtime.request import Usage


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Args:
        prefix_lengths: tokens that both requests share; shortened where the model's context is less.
        suffix_length: tokens of each request's own.
        token_budget: prompt tokens a length, which says how often it is repeated.
        repeats: most and least repetitions of a length.
        dtypes: of the weights.
    """

    prefix_lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    suffix_length: int = 20
    token_budget: int = 8192
    repeats: tuple[int, int] = (5, 2)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


QUICK = Settings(prefix_lengths=(256, 1024), token_budget=2048, repeats=(3, 2))


def run(settings: Settings, report: Report, loaded: LoadedModel) -> None:
    """Measures one model in the dtype that it has, and adds to the report's rows."""
    config = EngineConfig(kv_bytes=1 << 30)
    prompts = Prompts(loaded)
    report.settings.update(asdict(settings), model=loaded.name)
    with Engine(loaded, config) as engine:
        _measure(engine, prompts, 64, settings)  # the first request of a process is slower than all others
        for length in _lengths(settings, engine):
            report.progress(f"ttft: {loaded.dtype}, prefix {length}")
            pairs = [_measure(engine, prompts, length, settings) for _ in range(_repeats(settings, length))]
            report.rows.append({"dtype": str(loaded.dtype).removeprefix("torch."), **_row(length, pairs)})


def _lengths(settings: Settings, engine: Engine) -> Iterator[int]:
    most = engine.max_context - settings.suffix_length - 1
    return (min(length, most) for length in settings.prefix_lengths)


def _repeats(settings: Settings, length: int) -> int:
    most, least = settings.repeats
    return max(least, min(most, settings.token_budget // length))


def _measure(engine: Engine, prompts: Prompts, length: int, settings: Settings) -> tuple[Usage, Usage]:
    """A new prefix, cold; the same one with another suffix, warm. Nothing else runs."""
    prefix = prompts.tokens(length)
    cold, warm = (
        submit(engine, prompts.behind(prefix, settings.suffix_length), new_tokens=1).result().usage for _ in range(2)
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
    """All rows, for the terminal."""
    title = "time to the first token, ms, median"
    shown = Table("dtype", "prefix", "cold", "warm", "cold / warm", "tokens reused", "repeats", title=title)
    for row in rows:
        shown.add_row(
            row["dtype"], str(row["prefix"]), f"{row['cold_s'] * 1000:.0f}", f"{row['warm_s'] * 1000:.1f}",
            f"{row['ratio']:.1f}", f"{row['reused_tokens']} of {row['prompt_tokens']}", str(row["repeats"]),
        )  # fmt: skip
    return shown
