"""Measures what codecs of stored pages cost: bytes, perplexity and time, on the real model.

Each passage of text is read in two halves. The second half continues from the pages of the first, once as they were
computed and once as each codec gives them back. The differences of the same tokens' losses are averaged, so what a
token is hard for does not matter. Every page goes through the codec, the first one of the passage, too.

The model is calibrated on the documentation strings of Python's standard library, and measured on the documentation of
this repository: other authors, another matter, and neither is in what the model learned to say as it stands.

A store that reads B bytes a second loads n bytes in n / B seconds, encoded in n / (ratio B) + n / decode. So a codec
pays below the bandwidth decode (1 - 1 / ratio).
"""

from __future__ import annotations

import ast
import math
import random
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from transformers import DynamicCache

from bench.report import ROOT, Report
from mainstem.runtime.models.calibration import calibrate
from mainstem.runtime.models.loading import LoadedModel
from mainstem.tiers.storage.calibrated import Calibrated
from mainstem.tiers.storage.codecs import CODECS, Codec, Page

_SLICE = 128  # positions whose logits are computed at once


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        passages: passages to measure; fewer if the text is shorter.
        half: tokens of each half of a passage.
        calibration: tokens to calibrate on.
        ratios: of the calibrated codecs.
        others: codecs to compare with.
        page_size: positions of a page.
        goal: the most that the perplexity may rise at the first ratio.
        dtype: of weights. The model computes in float32, because the rounding of bfloat16 makes losses differ by as
            much as codecs do.
        pages_dtype: of the pages that are stored, and of the exact ones.
    """

    passages: int = 50
    half: int = 1024
    calibration: int = 24_576
    ratios: tuple[float, ...] = (6, 8)
    others: tuple[str, ...] = ()
    page_size: int = 16
    goal: float = 0.001
    dtype: str = "float32"
    pages_dtype: str = "bfloat16"


QUICK = Settings(passages=2, half=256, calibration=4096, others=("int8", "fp8"))


@dataclass(slots=True)
class _Trial:
    """A codec, and what was measured of it."""

    name: str
    ratio: float
    codec: Codec
    differences: list[torch.Tensor]
    encode_s: float = 0.0
    decode_s: float = 0.0
    payload_bytes: int = 0


def run(settings: Settings, report: Report, loaded: LoadedModel) -> None:
    """Measures one model on one thread, and adds rows to the report. A goal that is missed is a note."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    report.settings.update(asdict(settings), model=loaded.name, threads=1)
    try:
        trials = _trials(settings, report, loaded)
        losses = _measure(settings, report, loaded, trials)
    finally:
        torch.set_num_threads(threads)
    perplexity = math.exp(torch.cat(losses).mean())
    report.settings.update(tokens=sum(map(len, losses)), perplexity=perplexity)
    report.rows += [_row(trial) for trial in trials]
    first = next(row for row in report.rows if row["codec"].startswith("calibrated"))
    what = f"rise of the perplexity after pages {first['ratio']:.0f} times smaller"
    loss, goal = 100 * first["loss"], 100 * settings.goal
    report.more["goals"] = [{"what": what, "goal": goal, "unit": "%", "measured": loss, "met": loss <= goal}]
    report.tables.append(_table(report))


def _trials(settings: Settings, report: Report, loaded: LoadedModel) -> list[_Trial]:
    text = "\n\n".join(_docstrings())
    tokens = tokens_of(loaded, text)[: settings.calibration]
    began_s = time.process_time()
    made = calibrate(
        loaded, tokens, settings.ratios[0], lambda stage, done, of: report.progress(f"{stage}: {done} of {of}")
    )
    report.settings["calibrate_s"] = round(time.process_time() - began_s)
    trials = [
        _Trial("calibrated", ratio, Calibrated(ratio, made.bases, made.frequencies, made.weights), [])
        for ratio in settings.ratios
    ]
    size = 1 << 20
    for name in settings.others:
        ratio = size / CODECS[name].encoded_bytes(size, settings.pages_dtype)
        trials.append(_Trial(name, ratio, CODECS[name], []))
    return trials


@torch.inference_mode()
def _measure(settings: Settings, report: Report, loaded: LoadedModel, trials: list[_Trial]) -> list[torch.Tensor]:
    """Fills in the trials, and returns the losses after exact pages."""
    half, losses = settings.half, []
    tokens = torch.from_numpy(tokens_of(loaded, texts_of_documentation()))
    passages = min(settings.passages, len(tokens) // (2 * half))
    for number in range(passages):
        passage = tokens[2 * half * number :][None, : 2 * half]
        cache = DynamicCache()
        loaded.model(input_ids=passage[:, :half], past_key_values=cache, logits_to_keep=1)
        exact = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers], 1)
        exact = exact.to(getattr(torch, settings.pages_dtype))
        losses.append(_losses(loaded, passage[:, half:], exact))
        for trial in trials:
            trial.differences.append(_losses(loaded, passage[:, half:], _stored(settings, trial, exact)) - losses[-1])
        report.progress(f"codec: {number + 1} of {passages} passages: {', '.join(map(_describe, trials))}")
    return losses


def _losses(loaded: LoadedModel, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Returns the losses of tokens but the first one, float64, after exact or coded pages.

    Args:
        kept: keys and values, [2, layers, heads, positions, numbers].
    """
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kept.transpose(0, 1).to(loaded.dtype)):
        cache.update(keys[None], values[None], layer)
    hidden = loaded.model.base_model(input_ids=tokens, past_key_values=cache).last_hidden_state[0]
    head, targets = loaded.model.get_output_embeddings(), tokens[0, 1:]
    parts = [
        torch.nn.functional.cross_entropy(head(each).float(), of, reduction="none")
        for each, of in zip(hidden[:-1].split(_SLICE), targets.split(_SLICE), strict=True)
    ]
    return torch.cat(parts).double()


def _stored(settings: Settings, trial: _Trial, exact: torch.Tensor) -> torch.Tensor:
    """Returns keys and values as they come back from the codec, page by page."""
    back = torch.empty_like(exact)
    for number in range(exact.shape[3] // settings.page_size):
        part = slice(number * settings.page_size, (number + 1) * settings.page_size)
        page = exact[:, :, :, part].transpose(2, 3).contiguous()
        payload = memoryview(bytearray(page.view(torch.uint8).numpy().tobytes()))
        coded = memoryview(bytearray(trial.codec.encoded_bytes(len(payload), settings.pages_dtype)))
        read = bytearray(len(payload))
        began_s = time.process_time()
        trial.codec.encode(payload, coded, settings.pages_dtype, Page("full", number))
        middle_s = time.process_time()
        trial.codec.decode(coded, memoryview(read), settings.pages_dtype)
        trial.encode_s += middle_s - began_s
        trial.decode_s += time.process_time() - middle_s
        trial.payload_bytes += len(payload)
        back[:, :, :, part] = torch.frombuffer(read, dtype=page.dtype).view(page.shape).transpose(2, 3)
    return back


def _describe(trial: _Trial) -> str:
    row = _row(trial)
    return f"{row['codec']} {row['ratio']:.1f}: {row['loss']:+.3%} +- {row['error']:.3%}"


def _row(trial: _Trial) -> dict[str, Any]:
    differences = torch.cat(trial.differences)
    mean, error = float(differences.mean()), float(differences.std()) / len(differences) ** 0.5
    decode = trial.payload_bytes / trial.decode_s / 1e6
    return {
        "codec": trial.name,
        "ratio": trial.ratio,
        "tokens": len(differences),
        "loss": math.expm1(mean),
        "error": error,
        "encode_mb_s": trial.payload_bytes / trial.encode_s / 1e6,
        "decode_mb_s": decode,
        "pays_below_mb_s": decode * (1 - 1 / trial.ratio),
    }


def _table(report: Report) -> Table:
    about = report.settings
    title = (
        f"stored pages of {about['model']} in {about['pages_dtype']}, {about['tokens']:,} tokens, one thread, CPU time"
    )
    shown = Table(
        "codec", "times smaller", "perplexity", "encode, MB/s", "decode, MB/s", "pays below, MB/s", title=title
    )
    for row in report.rows:
        shown.add_row(
            row["codec"], f"{row['ratio']:.2f}", f"{row['loss']:+.3%} ± {row['error']:.3%}",
            f"{row['encode_mb_s']:.0f}", f"{row['decode_mb_s']:.0f}", f"{row['pays_below_mb_s']:.0f}",
        )  # fmt: skip
    return shown


# ---------------------------------------------------------------- texts


def tokens_of(loaded: LoadedModel, text: str) -> NDArray[np.int64]:
    """Returns a text as a model reads it."""
    return np.array(loaded.tokenizer(text, verbose=False)["input_ids"], np.int64)


def texts_of_documentation() -> str:
    """Returns the documentation of this repository as one text."""
    pages = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "bench" / "README.md"]
    return "\n\n".join(path.read_text() for path in pages)


def _docstrings() -> list[str]:
    """Returns the longer documentation strings of the standard library, in an order of no meaning."""
    root = Path(sysconfig.get_path("stdlib"))
    own = (path for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")))
    found = [text for path in own if path.parent.name not in ("test", "site-packages") for text in _documented(path)]
    random.Random(0).shuffle(found)
    return found


def _documented(path: Path) -> Iterator[str]:
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text is not None and len(text) > 400:
                yield text
