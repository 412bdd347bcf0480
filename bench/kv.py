"""Measures what keys and values in 8 bits cost: perplexity, pages, and time of a decode step, on the real model.

The same passages are read with exact keys and with each kind of rounded ones: every key and value that a token attends
to is rounded, its own included, as in pages. The differences of the same tokens' losses are averaged.

Decode steps of the kinds take turns, so that the machine's other work meets all of them. What the pages hold does not
matter to their time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, get_args

import numpy as np
import torch
from rich.table import Table

from bench.codec import texts_of_documentation
from bench.report import Report
from mainstem.runtime.memory.eight_bits import eight_bits
from mainstem.runtime.memory.kv import KVPool
from mainstem.runtime.models.caches import Rounding
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.segments import Segment
from mainstem.settings.engine import KVCacheDtype

KINDS = get_args(KVCacheDtype)
_SLICE = 128  # positions whose logits are computed at once


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        passages: passages to measure; fewer if the text is shorter.
        length: tokens of each.
        contexts: requests, and how many tokens they have in common before the step.
        steps: of each kind.
        page_size: positions per page.
        dtype: of the model whose perplexity is measured.
        decode_dtype: of that whose steps are.
    """

    passages: int = 24
    length: int = 1024
    contexts: tuple[tuple[int, int], ...] = ((8, 800), (1, 4096))
    steps: int = 20
    page_size: int = 16
    dtype: str = "float32"
    decode_dtype: str = "bfloat16"


QUICK = Settings(passages=2, length=256, contexts=((2, 64),), steps=3)


def run(settings: Settings, report: Report, load: Callable[[str], LoadedModel]) -> None:
    """Measures on one thread, and adds rows to the report.

    Args:
        settings: of the benchmark.
        report: gets a row for each kind.
        load: returns the model in a dtype, each time anew: a runner exchanges parts of it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    report.settings.update(asdict(settings), threads=1)
    try:
        losses = _losses(settings, report, load(settings.dtype))
        steps = _steps(settings, report, load)
    finally:
        torch.set_num_threads(threads)
    exact = losses["auto"]
    report.settings.update(tokens=len(exact), perplexity=math.exp(exact.mean()))
    for kind in KINDS:
        difference = losses[kind] - exact
        row: dict[str, Any] = {"kv_cache_dtype": kind, "tokens": len(exact), **steps[kind]}
        row["loss"] = math.expm1(float(difference.mean()))
        row["error"] = float(difference.std()) / len(exact) ** 0.5
        report.rows.append(row)
    report.tables.append(_table(settings, report))


@torch.inference_mode()
def _losses(settings: Settings, report: Report, loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Returns the losses of all tokens but the first of each passage, float64, by kind."""
    text = loaded.tokenizer(texts_of_documentation(), verbose=False)["input_ids"]
    length, found = settings.length, dict[str, list[torch.Tensor]]()
    for number in range(min(settings.passages, len(text) // length)):
        tokens = torch.tensor(text[number * length :][:length])
        for kind in KINDS:
            found.setdefault(kind, []).append(_loss(loaded.model, tokens, eight_bits(kind)))
        report.progress(f"kv: {number + 1} of {settings.passages} passages")
    return {kind: torch.cat(parts) for kind, parts in found.items()}


def _loss(model: Any, tokens: torch.Tensor, bits: torch.dtype | None) -> torch.Tensor:
    layers = range(model.config.get_text_config(decoder=True).num_hidden_layers)
    cache = Rounding(model.config, {} if bits is None else dict.fromkeys(layers, bits))
    hidden = model.base_model(input_ids=tokens[None], past_key_values=cache).last_hidden_state[0]
    head = model.get_output_embeddings()
    parts = [
        torch.nn.functional.cross_entropy(head(each).float(), of, reduction="none")
        for each, of in zip(hidden[:-1].split(_SLICE), tokens[1:].split(_SLICE), strict=True)
    ]
    return torch.cat(parts).double()


def _steps(settings: Settings, report: Report, load: Callable[[str], LoadedModel]) -> dict[str, dict[str, int | float]]:
    """Returns bytes of a page and the median milliseconds of a step in each context, by kind."""
    size = settings.page_size
    pages = max(-(-tokens // size) + requests for requests, tokens in settings.contexts)
    runners = {kind: ModelRunner(load(settings.decode_dtype), pages, size, kind) for kind in KINDS}
    found: dict[str, dict[str, int | float]] = {}
    for kind, runner in runners.items():
        (pool,) = (pool for pool in runner.pools.values() if isinstance(pool, KVPool))
        for plane in pool.planes:
            plane.zero_()
        found[kind] = {"page_bytes": sum(plane.nbytes for plane in pool.planes) // pages}
    for requests, tokens in settings.contexts:
        taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(settings.steps + 1):
            for kind, runner in runners.items():
                segments = _segments(requests, tokens, size)
                began_s = time.perf_counter()
                runner.forward(segments)
                taken[kind].append(1000 * (time.perf_counter() - began_s))
        for kind in KINDS:
            found[kind][_name(requests, tokens)] = median(taken[kind][1:])
        report.progress(
            f"kv: {requests} behind {tokens}: {', '.join(f'{k} {median(v):.1f} ms' for k, v in taken.items())}"
        )
    return found


def _segments(requests: int, tokens: int, size: int) -> list[Segment]:
    """Returns one new token for each request, all after the same tokens."""
    common = np.arange(-(-tokens // size), dtype=np.int32)
    start = len(common) * size
    tables = (np.append(common, np.int32(len(common) + i)) for i in range(requests))
    return [Segment(np.array([7 + i], np.int32), start, (table,), 1) for i, table in enumerate(tables)]


def _name(requests: int, tokens: int) -> str:
    return f"step_ms, {requests} after {tokens}"


def _table(settings: Settings, report: Report) -> Table:
    contexts = [_name(*context) for context in settings.contexts]
    shown = Table("kv_cache_dtype", "bytes of a page", "perplexity", *contexts, title="keys and values in pages")
    exact = report.rows[0]
    for row in report.rows:
        times = (f"{row[name]:.1f} ({row[name] / exact[name]:.2f})" for name in contexts)
        loss = f"{row['loss']:+.3%} ± {row['error']:.3%}"
        shown.add_row(row["kv_cache_dtype"], f"{row['page_bytes']:,}", loss, *times)
    return shown
