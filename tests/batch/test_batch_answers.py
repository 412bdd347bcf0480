"""The file of answers: whole lines only, each request once, of one batch only."""

from __future__ import annotations

import errno
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_batch_lines import line, written

from mainstem.batch.answers import Answers, Failure, Response
from mainstem.batch.lines import Requests
from mainstem.errors import BadArgument, MainstemError

GOOD = Response(200, "id", msgspec.Raw(b'{"a":1}'))


@pytest.fixture
def requests(tmp_path: Path) -> Any:
    with closing(Requests(written(tmp_path, *(line(f"r{i}") for i in range(4))))) as read:
        yield read


def test_answers_are_lines_of_the_format(tmp_path: Path, requests: Requests) -> None:
    path = tmp_path / "answers.jsonl"
    with closing(Answers(path, requests)) as answers:
        answers.add(2, GOOD)
        answers.add(0, None, Failure("code", "why"))
        assert answers.answered.tolist() == [True, False, True, False]
        assert (answers.failed, answers.size) == (1, path.stat().st_size)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {
        "id": requests.id(2), "custom_id": "r2", "error": None,
        "response": {"status_code": 200, "request_id": "id", "body": {"a": 1}},
    }  # fmt: skip
    assert (second["response"], second["error"]) == (None, {"code": "code", "message": "why"})


@pytest.mark.parametrize("torn", [0, 1, 30, -1])
def test_an_answer_that_was_not_finished_is_cut_off(tmp_path: Path, requests: Requests, torn: int) -> None:
    path = tmp_path / "answers.jsonl"
    with closing(Answers(path, requests)) as answers:
        answers.add(2, GOOD)
        whole = answers.size
        answers.add(1, GOOD)
    path.write_bytes(path.read_bytes()[: whole + torn if torn >= 0 else torn])
    with closing(Answers(path, requests)) as answers:
        assert answers.answered.tolist() == [False, False, True, False]
        assert path.stat().st_size == whole
        answers.add(1, GOOD)
        assert answers.answered.tolist() == [False, True, True, False]


def test_answers_of_another_batch_are_refused(tmp_path: Path, requests: Requests) -> None:
    """Also where it has the same custom_ids."""
    path = tmp_path / "answers.jsonl"
    with closing(Answers(path, requests)) as answers:
        answers.add(0, GOOD)
    before = path.read_bytes()
    with (
        closing(Requests(written(tmp_path, line("r0", max_tokens=1), line("r1")))) as other,
        pytest.raises(BadArgument, match="line 1 answers another one"),
    ):
        Answers(path, other)
    assert path.read_bytes() == before


def test_a_batch_that_got_more_requests_goes_on(tmp_path: Path, requests: Requests) -> None:
    path = tmp_path / "answers.jsonl"
    with closing(Answers(path, requests)) as answers:
        answers.add(3, GOOD)
    added = written(tmp_path, line("new"), *(line(f"r{i}") for i in range(4)))
    with closing(Requests(added)) as more, closing(Answers(path, more)) as answers:
        assert answers.answered.tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("text", ["no JSON\n", '{"id": 5}\n'])
def test_what_are_no_answers_is_not_touched(tmp_path: Path, requests: Requests, text: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(BadArgument, match="line 1"):
        Answers(path, requests)
    assert path.read_text() == text


def test_a_second_answer_is_refused(tmp_path: Path, requests: Requests) -> None:
    path = tmp_path / "answers.jsonl"
    with closing(Answers(path, requests)) as answers:
        answers.add(0, GOOD)
        with pytest.raises(AssertionError, match="once"):
            answers.add(0, GOOD)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(BadArgument, match="line 2 is its second answer"):
        Answers(path, requests)


def test_two_processes_do_not_write_to_one_file(tmp_path: Path, requests: Requests) -> None:
    with closing(Answers(tmp_path / "answers.jsonl", requests)), pytest.raises(BadArgument, match="no other process"):
        Answers(tmp_path / "answers.jsonl", requests)


def test_a_full_disk_leaves_whole_answers(tmp_path: Path, requests: Requests) -> None:
    left = [250]

    def write(file: int, data: bytes) -> int:
        """Takes what fits, as a disk that is almost full does."""
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = os.write(file, data[: left[0]])
        left[0] -= taken
        return taken

    path = tmp_path / "answers.jsonl"
    with closing(Answers(path, requests, write=write)) as answers:
        answers.add(0, GOOD)
        whole = path.read_bytes()
        assert left[0] < len(whole) < 250
        with pytest.raises(MainstemError, match="No space left"):
            answers.add(1, GOOD)
        assert path.read_bytes() == whole
        left[0] = 1000
        answers.add(1, GOOD)
        assert answers.answered.tolist() == [True, True, False, False]
    with closing(Answers(path, requests)) as answers:
        assert answers.answered.tolist() == [True, True, False, False]


def test_answers_are_on_the_disk_after_a_second(
    tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, synced = [0.0], list[float]()
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(now[0]))
    with closing(Answers(tmp_path / "answers.jsonl", requests, clock=lambda: now[0])) as answers:
        for index, now[0] in enumerate((0.5, 0.9, 1.0, 1.5)):
            answers.add(index, GOOD)
    assert synced == [1.0, 1.5]
