"""The benchmark of models: its rows are right, it finds errors, and the documentation shows its record."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import __main__ as command
from bench import models
from bench.models import CASES, QUICK, Case, Settings, markdown, run
from bench.report import Report

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "bench" / "results" / "recorded-models.json"
PAGE = ROOT / "docs" / "models.md"


def measured(*names: str) -> Report:
    report = Report("models", "2026-01-02T03:04:05+00:00", quick=True, progress=lambda line: None)
    run(Settings(models=names, real=False), report)
    return report


@pytest.mark.parametrize(
    ("name", "components", "hits"),
    [
        ("llama", "full", [0, 64, 64]),
        ("mistral, sliding", "window(8)", [0, 64, 64]),
        ("deepseek_v3", "full", [0, 64, 64]),
        ("gemma3_text", "full + window(20)", [0, 64, 64]),
        ("lfm2", "full + state", [0, 64, 64]),
        *(
            pytest.param(name, "full + state", [0, 64, 64], marks=pytest.mark.slow)
            for name in ("jamba", "minimax", "recurrent_gemma", "rwkv")
        ),
    ],
)
def test_a_row_of_each_kind(name: str, components: str, hits: list[int]) -> None:
    report = measured(name)
    assert report.failures == []
    (row,) = report.rows
    assert (row["components"], row["hits"], row["tokens_equal"]) == (components, hits, True)
    assert row["prompts"] == [73, 84, 95]
    assert 0 < max(row["from_plain"].values()) < 1e-4 * row["spread"]
    assert len(report.tables) == 1


def test_notes_say_how_a_model_goes_on_from_its_states() -> None:
    report = measured("mamba", "rwkv")
    assert [row["notes"] for row in report.rows] == [["our scan"], ["alone"]]


@pytest.mark.slow
def test_images_and_adapters_have_rows() -> None:
    report = measured("llava, images", "pixtral, images", "llama, LoRA")
    assert report.failures == []
    images, _, adapter = report.rows
    assert images["notes"][-1].startswith("encoder: 2 runs")
    assert adapter["hits"] == [0, 64, 64]


def test_a_refused_model_has_its_reason() -> None:
    report = measured("xlstm")
    assert report.failures == []
    assert (
        "| refused: keeps its state in a cache class of its own, and computes logits of all tokens only |"
        in markdown(report.rows)
    )


def altered(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    forward = models.ModelRunner.forward

    def altered_forward(self: Any, segments: Sequence[Any]) -> torch.Tensor:
        return change(forward(self, segments)) if segments[0].start else forward(self, segments)

    return altered_forward


def test_wrong_logits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.ModelRunner, "forward", altered(lambda rows: rows * 1.01))
    assert [failure.partition(" by ")[0] for failure in measured("llama").failures] == [
        "llama: logits differ from transformers"
    ]


def test_wrong_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.ModelRunner, "forward", altered(lambda rows: -rows))
    assert measured("llama").failures[-1] == "llama: tokens differ"


def test_a_missing_hit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_least_hits", lambda *given: [0, 64, 65])
    assert measured("llama").failures == ["llama: it hit [0, 64, 64] tokens, but the minimum is [0, 64, 65]"]


def test_a_wrongly_accepted_or_refused_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "bad", Case(CASES["llama"].build, refused=True))
    monkeypatch.setitem(CASES, "worse", Case(CASES["xlstm"].build))
    assert measured("bad", "worse").failures == ["bad: it is not refused", "worse: it is refused"]


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "absent", Case(CASES["llama"].build, needs=("no_such_package", "some-extra")))
    report = measured("absent")
    assert report.failures == []
    assert "not run: pip install 'mainstem[some-extra]'" in markdown(report.rows)


def test_the_process_fails_with_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "QUICK", Settings(models=("llama",), real=False))
    monkeypatch.setattr(sys, "argv", ["bench", "models", "--quick", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert not ended.value.code
    monkeypatch.setattr(models, "_least_hits", lambda *given: [1, 1, 1])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1
    assert json.loads((tmp_path / "models.json").read_text())["rows"][0]["failures"]


def test_the_documentation_shows_what_was_recorded() -> None:
    record, page = json.loads(RECORD.read_text()), PAGE.read_text()
    assert markdown(record["rows"]) in page
    assert record["machine"]["cpu"] in page
    assert not any(row["failures"] for row in record["rows"])


def test_every_model_was_recorded() -> None:
    rows = json.loads(RECORD.read_text())["rows"]
    assert {row["model"] for row in rows} >= {name for name, case in CASES.items() if not case.real}
    assert not [row["model"] for row in rows if "missing" in row and not CASES[row["model"]].real]
    assert QUICK.shared == Settings().shared
