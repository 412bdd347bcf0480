"""The benchmark of quantized weights: what it derives from losses and times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rigs.serving import tiny_folder

from bench import weights
from bench.report import Report
from mainstem.runtime.models.loading import load_model


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_the_same_weights_lose_nothing_and_those_of_4_bits_something(tmp_path: Path, quantization: str) -> None:
    report = Report("weights", "2026-01-01", quick=True, progress=lambda line: None)
    folder = str(tiny_folder("llama", tmp_path / "tiny"))
    plain, own, other = (
        load_model(folder, dtype="bfloat16", quantization=each) for each in ("none", quantization, "none")
    )
    before = [parameter.clone() for parameter in other.model.parameters()]
    weights.run(weights.Settings(passages=2, length=65, rows=(1, 3), turns=2), report, plain, own, other)
    loss, shifted = report.more["loss"]
    assert loss["tokens"] == shifted["tokens"] == 2 * 64 and loss["perplexity"] > 1
    assert (loss["error"] > 0) == (quantization == "int4") == (loss["loss"] != 0) == (loss["bits"] > 0)
    assert shifted["loss"] != loss["loss"] and 6 < shifted["bits"] < 9
    assert [row["rows"] for row in report.rows] == [1, 3] and report.tables
    for row in report.rows:
        assert min(value for name, value in row.items() if name.endswith("_s")) > 0
    fast, little, fast_too, little_too = report.more["goals"]
    assert fast["met"] == (report.rows[0]["ratio"] >= fast["goal"])
    assert fast_too["met"] == (report.rows[0]["shifted_ratio"] >= fast["goal"])
    assert little["met"] == (loss["loss"] <= little["goal"]) and little_too["met"] == (
        shifted["loss"] <= little["goal"]
    )
    assert plain.model.dtype is torch.float32
    near = [
        float((new - old).detach().norm() / old.norm())
        for new, old in zip(other.model.parameters(), before, strict=True)
    ]
    assert max(near) < 0.15, "its weights are again where they were"
