"""Measures what weights of 4 bits cost and give: perplexity and the time of a decode step, on the real model.

The model's file holds weights of 4 bits, whose numbers are found again. So the model is measured twice: as it is, and
with groups that are half a group away from the file's, which stands for a model that was never quantized.

All read the same text, and the differences of the same tokens' losses are averaged. They compute in float32, so that
only the weights differ. The text is the documentation of this repository.

Times are those of one thread's CPU, in turns: of the decoder's linear layers alone, and of whole steps over pages. The
shifted model has no steps: what its layers are given would have to be shifted, too.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import nn

from bench.codec import texts_of_documentation, tokens_of
from bench.report import Report
from mainstem.runtime.kernels.exchanges import weights_of
from mainstem.runtime.kernels.linear import GROUP, products
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.quantization import packed, quantize
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.segments import Segment

_SLICE = 128  # positions whose logits are computed at once
_PAGE = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        passages: passages to measure; fewer if the text is shorter.
        length: tokens of each.
        rows: requests of a step.
        before: positions of each request before the step.
        turns: of each measurement of time.
        goal: how many times as fast the linear layers shall be for one row.
        most_loss: of perplexity.
        dtype: of the weights that are compared with.
    """

    passages: int = 20
    length: int = 1025
    rows: tuple[int, ...] = (1, 4, 7)
    before: int = 64
    turns: int = 15
    goal: float = 1.2
    most_loss: float = 0.04
    dtype: str = "bfloat16"


QUICK = Settings(passages=2, length=257, turns=5)


def run(settings: Settings, report: Report, plain: LoadedModel, own: LoadedModel, other: LoadedModel) -> None:
    """Measures a model on one thread, and adds rows to the report.

    Args:
        settings: as above.
        report: gets the rows.
        plain: the model.
        own: the same, quantized.
        other: the same as `plain`; it is quantized here, by other groups.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    report.settings.update(asdict(settings), model=plain.name, threads=1)
    _shift(other, GROUP // 2)
    quantize(other.model, other.name)
    models = {"own": plain, "int4": own, "int4 shifted": other}
    try:
        report.rows += _times(settings, report, models)
        _shift(other, -(GROUP // 2))
        text = torch.from_numpy(tokens_of(plain, texts_of_documentation()))
        losses = {name: _losses(settings, report, model, text) for name, model in models.items()}
    finally:
        torch.set_num_threads(threads)
    report.more["loss"] = [
        _loss(name, models[name], losses["own"], losses[name]) for name in models if name != "own"
    ]  # fmt: skip
    report.more["goals"] = _goals(settings, report)
    report.tables.append(_table(report))


def _shift(loaded: LoadedModel, columns: int) -> None:
    """Rolls the inputs of the decoder's linear layers, so that groups are other numbers."""
    for group in _groups(loaded.model):
        for layer in group:
            layer.weight.data = layer.weight.data.roll(columns, 1)


def _goals(settings: Settings, report: Report) -> list[dict[str, Any]]:
    goals = []
    for loss, ratio in zip(report.more["loss"], ("ratio", "shifted_ratio"), strict=True):
        fast, what = report.rows[0][ratio], f"linear layers of one row by {loss['weights']}"
        goals += [
            {"what": f"{what}, times as fast as the core's own dtype", "goal": settings.goal, "unit": "",
             "measured": fast, "met": fast >= settings.goal},
            {"what": f"perplexity that {loss['weights']} loses", "goal": settings.most_loss, "unit": "",
             "measured": loss["loss"], "met": loss["loss"] <= settings.most_loss},
        ]  # fmt: skip
    return goals


# ---------------------------------------------------------------- loss


def _loss(name: str, model: LoadedModel, before: torch.Tensor, after: torch.Tensor) -> dict[str, Any]:
    differences = after - before
    layers = [layer for group in _groups(model.model) for layer in group]
    codes = [found for layer in layers if (found := packed(layer)) is not None]
    return {
        "weights": name,
        "bits": 8 * sum(part.nbytes for each in codes for part in each) / sum(layer.weight.numel() for layer in layers),
        "tokens": len(differences),
        "perplexity": math.exp(before.mean()),
        "loss": math.expm1(differences.mean()),
        "error": float(differences.std()) / len(differences) ** 0.5,
    }


@torch.inference_mode()
def _losses(settings: Settings, report: Report, loaded: LoadedModel, text: torch.Tensor) -> torch.Tensor:
    """Returns the losses of all tokens but the first of each passage, float64. The model is float32 from here on."""
    model: Any = loaded.model.float()
    model.set_attn_implementation("sdpa")
    size = settings.length
    parts = []
    for number in range(min(settings.passages, len(text) // size)):
        passage = text[number * size :][:size]
        hidden = model.base_model(input_ids=passage[None, :-1], use_cache=False).last_hidden_state[0]
        head = model.get_output_embeddings()
        for each, of in zip(hidden.split(_SLICE), passage[1:].split(_SLICE), strict=True):
            parts.append(nn.functional.cross_entropy(head(each).float(), of, reduction="none").double())
        report.progress(f"weights: passage {number + 1} of {settings.passages}")
    return torch.cat(parts)


# ---------------------------------------------------------------- time


@torch.inference_mode()
def _times(settings: Settings, report: Report, models: dict[str, LoadedModel]) -> list[dict[str, Any]]:
    groups = [_groups(loaded.model) for loaded in models.values()]
    pages = max(settings.rows) * -(-(settings.before + 1) // _PAGE)
    plain = models["own"]
    runners = [ModelRunner(loaded, pages, _PAGE) for loaded in (plain, models["int4"])]
    rows = []
    for count in settings.rows:
        inputs = {layer.in_features: torch.randn(count, layer.in_features) for group in groups[0] for layer in group}
        given = {width: x.to(plain.dtype) for width, x in inputs.items()}
        ways: dict[str, Callable[[], object]] = {
            "pytorch": lambda given=given: _by_pytorch(groups[0], given),  # type: ignore[misc]
            "own": lambda given=given: _by_core(groups[0], given),  # type: ignore[misc]
            "int4": lambda given=given: _by_core(groups[1], given),  # type: ignore[misc]
            "shifted": lambda given=given: _by_core(groups[2], given),  # type: ignore[misc]
            "own_step": _step(settings, runners[0], count),
            "int4_step": _step(settings, runners[1], count),
        }
        times = _in_turns(settings.turns, ways)
        medians = {f"{name}_s": statistics.median(own) for name, own in times.items()}
        ratios = {
            name: statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))
            for name, slow, fast in (
                ("ratio", "own", "int4"), ("shifted_ratio", "own", "shifted"), ("step_ratio", "own_step", "int4_step"),
            )
        }  # fmt: skip
        rows.append({"rows": count, **medians, **ratios})
        report.progress(f"weights: {count} rows: " + ", ".join(f"{name} {each:.2f}" for name, each in ratios.items()))
    return rows


def _in_turns(turns: int, ways: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Returns the times of each way in seconds of CPU, after a turn that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            began_s = time.thread_time()
            way()
            if turn > 0:
                times[name].append(time.thread_time() - began_s)
    return times


def _groups(model: Any) -> list[list[nn.Linear]]:
    """Returns the linear layers of a Llama decoder that are given the same."""
    groups = []
    for layer in model.get_decoder().layers:
        attention, mlp = layer.self_attn, layer.mlp
        groups += [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
        groups += [[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    return groups


def _by_core(groups: list[list[nn.Linear]], given: dict[int, torch.Tensor]) -> None:
    for group in groups:
        products(given[group[0].in_features], [weights_of(layer) for layer in group])


def _by_pytorch(groups: list[list[nn.Linear]], given: dict[int, torch.Tensor]) -> None:
    for group in groups:
        for layer in group:
            nn.functional.linear(given[layer.in_features], layer.weight)


def _step(settings: Settings, runner: ModelRunner, count: int) -> Callable[[], object]:
    """Returns a decode step of requests whose positions before it are computed here."""
    each = -(-(settings.before + 1) // _PAGE)
    tables = [(np.arange(i * each, (i + 1) * each, dtype=np.int32),) for i in range(count)]
    tokens = np.random.default_rng(0).integers(0, runner.vocab_size, (count, settings.before + 1)).astype(np.int32)
    for text, table in zip(tokens, tables, strict=True):
        runner.forward([Segment(text[:-1], 0, table, 0)])
    segments = [Segment(text[-1:], settings.before, table, 1) for text, table in zip(tokens, tables, strict=True)]
    return lambda: runner.forward(segments)


def _table(report: Report) -> Table:
    title = f"{report.settings['model']}; milliseconds of one thread's CPU; " + "; ".join(
        f"{loss['weights']}: {loss['bits']:.2f} bits, perplexity {loss['loss']:+.2%} ± {loss['error']:.2%} over "
        f"{loss['tokens']:,} tokens" for loss in report.more["loss"]
    )  # fmt: skip
    names, ratios = (
        ("pytorch", "own", "int4", "shifted", "own_step", "int4_step"),
        ("ratio", "shifted_ratio", "step_ratio"),
    )
    shown = Table("rows", *(name.replace("_", " ") for name in (*names, *ratios)), title=title)
    for row in report.rows:
        times = [f"{1000 * row[f'{name}_s']:.1f}" for name in names]
        shown.add_row(str(row["rows"]), *times, *(f"{row[name]:.2f}" for name in ratios))
    return shown
