"""Compares the planner's estimate of a prefill with the measured time, on a small random model.

The longest prompt without a cache gives the rate that this machine reaches, like `--mfu` in a plan. All other estimates
follow from FLOPs alone. After 3,000 cached positions, attention costs as much per token as the matrices, so a wrong
count of either shows. Measures the processor time of one thread, so other load on the machine matters little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from bench.report import Report
from bench.tiny_models import VOCAB, tiny
from mainstem.replay.plan.configs import read_shape

Clock = Callable[[], float]
_SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        prompts: tokens to compute, and cached tokens before them; the first has none, and is the yardstick.
        layers: layers of the model.
        rounds: rounds in which all prompts take turns; the median of each counts.
    """

    prompts: tuple[tuple[int, int], ...] = (
        *((3072, 0), (1536, 0), (768, 0), (384, 0), (192, 0)),
        *((1536, 1536), (768, 2304), (384, 2688), (192, 2880), (192, 1344), (192, 576)),
    )
    layers: int = 4
    rounds: int = 3


QUICK = Settings(prompts=((768, 0), (384, 0), (192, 0), (384, 384), (192, 576)), layers=2, rounds=1)


def run(settings: Settings, report: Report, clock: Clock = time.process_time) -> None:
    """Measures all prompts, and adds rows and a table to the report."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _run(settings, report, clock)
    finally:
        torch.set_num_threads(threads)


def _run(settings: Settings, report: Report, clock: Clock) -> None:
    longest = max(tokens + past for tokens, past in settings.prompts)
    model = tiny("llama", num_hidden_layers=settings.layers, max_position_embeddings=longest, **_SIZES)
    report.settings.update(asdict(settings), **_SIZES)
    measured_s: dict[tuple[int, int], list[float]] = {prompt: [] for prompt in settings.prompts}
    _prefill_s(model, 64, 64, clock)  # the first one in a process is slower
    for done in range(settings.rounds):
        report.progress(f"plan: round {done + 1} of {settings.rounds}")
        for prompt, taken_s in measured_s.items():
            taken_s.append(_prefill_s(model, *prompt, clock))
    shape = read_shape(model.config.to_dict())
    flops = {prompt: float(shape.prefill_flops(*prompt)) for prompt in settings.prompts}
    yardstick = settings.prompts[0]
    flops_per_s = flops[yardstick] / median(measured_s[yardstick])
    report.notes.append(f"{flops_per_s / 1e9:.1f} GFLOP/s with {yardstick[0]:,} tokens: the rate for all rows")
    report.rows.extend(
        _row(prompt, flops[prompt], median(taken_s), flops_per_s) for prompt, taken_s in measured_s.items()
    )
    report.tables.append(_table(report.rows))


def _prefill_s(model: PreTrainedModel, tokens: int, past: int, clock: Clock) -> float:
    """Returns the seconds from the tokens to the logits of the last one; cached tokens are computed before."""
    ids = torch.arange(past + tokens).unsqueeze(0) % VOCAB
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        if past:
            model(ids[:, :past], past_key_values=cache, use_cache=True, logits_to_keep=1)
        started_s = clock()
        model(ids[:, past:], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return clock() - started_s


def _row(prompt: tuple[int, int], flops: float, measured_s: float, flops_per_s: float) -> dict[str, Any]:
    return {
        "tokens": prompt[0],
        "past": prompt[1],
        "flops": flops,
        "measured_s": measured_s,
        "predicted_s": flops / flops_per_s,
        "ratio": flops / flops_per_s / measured_s,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("tokens", "cached before", "GFLOPs", "predicted", "measured", "ratio", title="time of a prefill")
    for row in rows:
        times = (f"{1000 * row[key]:.1f} ms" for key in ("predicted_s", "measured_s"))
        shown.add_row(
            f"{row['tokens']:,}", f"{row['past']:,}", f"{row['flops'] / 1e9:.2f}", *times, f"{row['ratio']:.2f}"
        )
    return shown
