"""Measures transformers' own `generate()` after a shared prefix, with `mainstem.hf.cached` and without, in CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table

from bench.prompts import Prompts
from bench.report import Report
from mainstem import hf
from mainstem.runtime.models.loading import LoadedModel

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        prefix_length: tokens that all prompts share; they are cached before the clock starts.
        question_length: tokens of each prompt's own question.
        new_tokens: tokens to generate; 1 is the time to the first token.
        rounds: prompts of each length of the answer, with the cache and without it by turns.
        goal: the least ratio for the first token.
        dtype: type of the weights.
    """

    prefix_length: int = 1000
    question_length: int = 8
    new_tokens: tuple[int, ...] = (1, 16)
    rounds: int = 7
    goal: float = 15
    dtype: str = "float32"


QUICK = Settings(rounds=2)


def run(settings: Settings, report: Report, loaded: LoadedModel, clock: Clock = time.process_time) -> None:
    """Measures one model on one thread, and adds rows to the report. Different tokens are a failed check."""
    prompts, threads = Prompts(loaded), torch.get_num_threads()
    prefix = prompts.tokens(settings.prefix_length)
    report.settings.update(asdict(settings), model=loaded.name, threads=1)
    torch.set_num_threads(1)
    try:
        with hf.cached(loaded.model) as cache:
            _generate(loaded.model.generate, prefix, 1)
            for new in settings.new_tokens:
                report.progress(f"generate: {new} tokens")
                asked = [prompts.extend(prefix, settings.question_length) for _ in range(settings.rounds)]
                rounds = [_round(loaded.model, prompt, new, clock) for prompt in asked]
                report.rows.append(_row(new, rounds))
            stats = cache.stats()
    finally:
        torch.set_num_threads(threads)
    report.more["hits"] = [{"prompt_tokens": stats.prompt_tokens, "cached_tokens": stats.cached_tokens}]
    differ = [row["new_tokens"] for row in report.rows if not row["equal"]]
    report.failures += [f"answers of {new} tokens differ without the cache" for new in differ]
    report.more["goals"] = [_goal(report.rows[0], settings)]
    report.tables.append(_table(report.rows))


def _round(model: Any, prompt: NDArray[np.int32], new: int, clock: Clock) -> tuple[float, float, bool]:
    """Returns the seconds without the cache and with it, and whether the tokens are equal."""
    results, seconds = [], []
    for generate in (type(model).generate.__get__(model), model.generate):
        began_s = clock()
        results.append(_generate(generate, prompt, new))
        seconds.append(clock() - began_s)
    return seconds[0], seconds[1], torch.equal(*results)


def _generate(generate: Callable[..., torch.Tensor], prompt: NDArray[np.int32], new: int) -> torch.Tensor:
    tokens = torch.from_numpy(prompt).long()[None]
    length = {"max_new_tokens": new, "min_new_tokens": new}
    return generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **length)


def _row(new: int, rounds: list[tuple[float, float, bool]]) -> dict[str, Any]:
    return {
        "new_tokens": new,
        "rounds": len(rounds),
        "plain_s": median(plain for plain, _, _ in rounds),
        "cached_s": median(with_cache for _, with_cache, _ in rounds),
        "ratio": median(plain / with_cache for plain, with_cache, _ in rounds),
        "equal": all(equal for _, _, equal in rounds),
    }


def _goal(row: dict[str, Any], settings: Settings) -> dict[str, Any]:
    what = f"generate()'s first token after {settings.prefix_length} cached tokens, over that without a cache, CPU time"
    limit, measured = 1 / settings.goal, 1 / row["ratio"]
    return {"what": what, "goal": limit, "unit": "ratio", "measured": measured, "met": measured <= limit}


def _table(rows: list[dict[str, Any]]) -> Table:
    title = "transformers' generate(), one thread, CPU time, ms, median"
    shown = Table("new tokens", "without the cache", "with it", "ratio", "equal tokens", "rounds", title=title)
    for row in rows:
        shown.add_row(
            str(row["new_tokens"]), f"{row['plain_s'] * 1000:.0f}", f"{row['cached_s'] * 1000:.0f}",
            f"{row['ratio']:.1f}", "yes" if row["equal"] else "no", str(row["rounds"]),
        )  # fmt: skip
    return shown
