"""The benchmark of evaluations, without a model: its questions, what it compares, and its goals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import scores
from bench.client import ServerFailed
from bench.report import Report


def test_questions_are_the_same_each_time_and_their_passages_say_the_answers() -> None:
    settings = scores.Settings(questions=40, shots=3, options=4)
    made = scores.questions(settings, "a")
    assert made == scores.questions(settings, "a") != scores.questions(settings, "b")
    assert len(made) == 43 and {each["right"] for each in made} == {0, 1, 2, 3}
    for each in made:
        year = each["question"].split()[-1].rstrip("?")
        assert len({*each["options"]}) == 4
        assert f"{each['options'][each['right']]} was built in {year}." in each["passage"]


def test_the_task_has_the_shots_apart(tmp_path: Path) -> None:
    scores.write_task(tmp_path, scores.Settings(questions=7, shots=2))
    task = yaml.safe_load((tmp_path / "generated.yaml").read_text())
    lines = {name: Path(path).read_text().splitlines() for name, path in task["dataset_kwargs"]["data_files"].items()}
    assert {name: len(each) for name, each in lines.items()} == {"shots": 2, "questions": 7}
    assert not {*lines["shots"]} & {*lines["questions"]} and json.loads(lines["questions"][0])["options"]


def test_only_one_server_keeps_scores_and_all_compute_in_float32() -> None:
    commands = {name: system.command for name, system in scores.systems().items()}
    assert [name for name, command in commands.items() if "--keep-scores 1" in command] == [scores.KEPT]
    assert all("--dtype float32" in command and "bfloat16" not in command for command in commands.values())


def test_likelihoods_are_compared_question_by_question() -> None:
    right = [[(-1.0, False), (-2.0, True)], [(-3.0, False), (-4.0, False)], [(-1.0, False), (-1.5, False)]]
    made = [[(-1.0, False), (-2.25, True)], [(-4.0, False), (-3.5, True)]]
    assert scores.compare(right, made) == {"difference": 1.0, "other_ranks": 1, "other_greedy": 1}


def row(part: str, question_s: float, **more: Any) -> dict[str, Any]:
    return {"part": part, "questions": 2, "seconds": 2 * question_s, "question_s": question_s, "accuracy": 0.5, **more}


def test_goals_are_ratios_of_what_a_question_takes() -> None:
    rows = [
        row(scores.KEPT, 0.1, difference=2e-5, other_ranks=0),
        row(scores.COMPUTED, 1.0),
        row(scores.OWN, 0.15),
    ]
    judged = {each["what"]: (each["measured"], each["met"]) for each in scores.judge(rows)}
    found = list(judged.values())
    assert found[0] == (pytest.approx(10.0), True) and found[1] == (None, None)
    assert found[2] == (pytest.approx(1.5), False)
    assert found[3:] == [(2e-5, False), (0, True)]
    assert scores.table(rows).row_count == 3


def test_a_part_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = {scores.KEPT: [[(-1.0, True)]], scores.OWN: [[(-1.5, True)]]}

    def measured(part: str, model: Path, folder: Path, settings: scores.Settings) -> dict[str, Any]:
        if part not in options:
            raise ServerFailed("it did not start")
        return row(part, 1.0, options=options[part])

    monkeypatch.setattr(scores, "measure", measured)
    monkeypatch.setattr(scores, "EVAL_PYTHON", tmp_path)
    monkeypatch.setattr(scores.System, "version", lambda self: None if self.name == "vLLM" else "1")
    report = Report("scores", "today", True, lambda line: None)
    scores.run(scores.QUICK, report)
    assert [(each["part"], each.get("difference")) for each in report.rows] == [(scores.KEPT, 0.5), (scores.OWN, None)]
    assert report.failures == [f"{scores.COMPUTED}: it did not start"]
    assert report.notes == ["vLLM is left out: it is not installed"] and len(report.more["goals"]) == 5
    monkeypatch.setattr(scores, "EVAL_PYTHON", tmp_path / "nowhere")
    scores.run(scores.QUICK, report)
    assert report.failures[-1] == "lm_eval is not installed: make .venv-clients/ready"
