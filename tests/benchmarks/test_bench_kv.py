"""The benchmark of keys and values in 8 bits: what it derives from losses and times."""

from __future__ import annotations

from pathlib import Path

from rigs.serving import tiny_folder

from bench import kv
from bench.report import Report
from mainstem.runtime.models.loading import load_model


def test_exact_keys_cost_nothing_and_8_bits_take_less_room(tmp_path: Path) -> None:
    report = Report("kv", "2026-01-01", quick=True, progress=lambda line: None)
    folder = str(tiny_folder("llama", tmp_path, max_position_embeddings=128))
    settings = kv.Settings(passages=2, length=64, contexts=((2, 32),), steps=1, decode_dtype="float32")
    kv.run(settings, report, lambda dtype: load_model(folder, dtype=dtype))
    exact, int8, fp8 = report.rows
    assert [row["kv_cache_dtype"] for row in report.rows] == ["auto", "int8", "fp8"]
    assert [row["tokens"] for row in report.rows] == [2 * 63] * 3
    assert exact["loss"] == exact["error"] == 0
    assert 0 < int8["error"] < fp8["error"]
    assert exact["page_bytes"] / 4 < int8["page_bytes"] == fp8["page_bytes"] < exact["page_bytes"] / 2
    assert all(row["step_ms, 2 after 32"] > 0 for row in report.rows)
    assert report.settings["perplexity"] > 1 and report.tables
