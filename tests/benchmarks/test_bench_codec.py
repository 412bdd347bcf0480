"""The benchmark of codecs: what it derives from losses and times."""

from __future__ import annotations

from pathlib import Path

import pytest
from rigs.serving import tiny_folder

from bench import codec
from bench.report import Report
from mainstem.runtime.models.loading import load_model


@pytest.mark.slow
def test_exact_pages_cost_nothing_and_fewer_bits_cost_more(tmp_path: Path) -> None:
    report = Report("codec", "2026-01-01", quick=True, progress=lambda line: None)
    loaded = load_model(str(tiny_folder("llama", tmp_path, max_position_embeddings=128)), dtype="float32")
    settings = codec.Settings(
        passages=2, half=64, calibration=256, ratios=(2, 16), others=("none", "int8"), page_size=16
    )
    codec.run(settings, report, loaded)
    fine, coarse, none, int8 = report.rows
    assert [row["tokens"] for row in report.rows] == [2 * 63] * 4
    assert none["loss"] == none["error"] == 0 and none["ratio"] == 1
    assert int8["ratio"] == pytest.approx(2 / (1 + 4 / 64))
    assert 0 < fine["error"] < coarse["error"]
    assert fine["pays_below_mb_s"] == pytest.approx(fine["decode_mb_s"] / 2)
    assert report.more["goals"][0]["measured"] == 100 * fine["loss"]
    assert report.settings["perplexity"] > 1 and report.tables
