"""The batch that is run here and by vLLM: what it asks, the least that it computes, and what is read of its answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench import batch_runs, batch_serving
from bench.client import ServerFailed

SETTINGS = batch_runs.Settings(documents=5, questions=4, words=20, answer=3)


def test_questions_about_a_document_share_it_and_are_shuffled() -> None:
    made = batch_runs.requests(SETTINGS, "m")
    assert made == batch_runs.requests(SETTINGS, "m")
    texts = [line["body"]["messages"][0]["content"] for line in made]
    assert Counter(Counter(text.partition("\n\n")[0] for text in texts).values()) == {4: 5}
    assert len(set(texts)) == len({line["custom_id"] for line in made}) == 20
    documents = [line["custom_id"].partition("-")[0] for line in made]
    assert documents != sorted(documents)
    assert {line["body"]["max_tokens"] for line in made} == {3}


def line(id: str, **usage: object) -> str:
    body = {"choices": [{"message": {"content": id * 2}}], "usage": {"prompt_tokens": 10, **usage}}
    return json.dumps({"custom_id": id, "response": {"status_code": 200, "body": body}}) + "\n"


def test_answers_are_read_with_and_without_what_was_found(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    file.write_text(
        line("a", prompt_tokens_details={"cached_tokens": 4}) + line("b", prompt_tokens_details=None) + line("c")
    )
    assert batch_runs.read(file) == ({"a": "aa", "b": "bb", "c": "cc"}, 30, 4)


def test_an_answer_that_is_an_error_has_no_figures(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    file.write_text(json.dumps({"custom_id": "a", "response": {"status_code": 400, "body": {"error": {}}}}) + "\n")
    with pytest.raises(ServerFailed, match="a has no answer"):
        batch_runs.read(file)


def test_users_beside_a_batch_are_compared_percentile_by_percentile() -> None:
    row = batch_serving.row([0.1] * 50 + [0.2] * 50, [0.1] * 50 + [0.3] * 50)
    assert row["requests"] == 100 and row["p50_ratio"] == pytest.approx(4 / 3)
    assert (row["p99_alone_s"], row["p99_beside_s"]) == (0.2, 0.3) and row["p99_ratio"] == pytest.approx(1.5)
