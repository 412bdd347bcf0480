"""The lines of a batch: read and checked as a whole, found again by the ids of their answers."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mainstem.batch import lines
from mainstem.batch.lines import MAX_LINE_BYTES, BadBatch, Requests
from mainstem.errors import MainstemError


def line(id: str, url: str = "/v1/chat/completions", method: str = "POST", **body: Any) -> str:
    return json.dumps({"custom_id": id, "method": method, "url": url, "body": body})


def written(folder: Path, *texts: str) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(texts))
    return path


def problems(folder: Path, *texts: str, only: str | None = None) -> list[tuple[int, str]]:
    return problems_of(written(folder, *texts), only=only)


def problems_of(path: Path, most_bytes: int = 1 << 24, only: str | None = None) -> list[tuple[int, str]]:
    with pytest.raises(BadBatch) as caught:
        Requests(path, only, most_bytes=most_bytes)
    return [(each.line, each.code) for each in caught.value.problems]


def test_requests_are_read_where_they_are(tmp_path: Path) -> None:
    path = written(tmp_path, line("é", max_tokens=5), "", "  " + line("b", url="/v1/score") + "\r", line("c"))
    with closing(Requests(path)) as requests:
        assert len(requests) == 3
        assert [requests[i].custom_id for i in range(3)] == ["é", "b", "c"]
        assert bytes(requests[0].body) == b'{"max_tokens": 5}'
        assert [requests.find(requests.id(i)) for i in range(3)] == [0, 1, 2]
        assert requests.size == path.stat().st_size


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"max_tokens": 7}, 7), ({"max_completion_tokens": 8}, 8), ({"max_output_tokens": 9}, 9), ({}, 0),
        ({"max_tokens": None}, 0), ({"max_tokens": -5}, 0),
    ],
)  # fmt: skip
def test_the_longest_answer_is_what_the_body_says(tmp_path: Path, body: dict[str, Any], most: int) -> None:
    with closing(Requests(written(tmp_path, line("a", **body)))) as requests:
        assert requests.answer_tokens.tolist() == [most]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid_json_line"),
        ("[1]", "invalid_request"),
        ('{"custom_id": "a"}', "invalid_request"),
        (line(""), "invalid_request"),
        (line("a", method="GET"), "invalid_method"),
        (line("a", url="/v1/other"), "invalid_url"),
        (line("a", stream=True), "invalid_request"),
        (line("a", background=True), "invalid_request"),
        (line("a", max_tokens="many"), "invalid_request"),
        (line("a").replace("{}", "5"), "invalid_request"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, code: str) -> None:
    assert problems(tmp_path, line("x"), text) == [(2, code)]


def test_text_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(line("a", text="x").encode().replace(b'"x"', b'"\xff"'))
    with pytest.raises(BadBatch, match="line 1"):
        Requests(path)


def test_a_custom_id_is_used_once(tmp_path: Path) -> None:
    texts = [line("a"), line("b"), line("a", max_tokens=1), line("b")]
    assert problems(tmp_path, *texts) == [(3, "duplicate_custom_id"), (4, "duplicate_custom_id")]


def test_an_empty_file_is_no_batch(tmp_path: Path) -> None:
    assert problems(tmp_path, "", " ") == [(1, "empty_file")]


def test_all_requests_are_for_the_one_route(tmp_path: Path) -> None:
    assert problems(tmp_path, line("a"), line("b", url="/v1/score"), only="/v1/score") == [(1, "invalid_url")]


def test_the_length_of_an_id_is_bounded(tmp_path: Path) -> None:
    most = lines._LONGEST_ID
    assert most == 128
    with closing(Requests(written(tmp_path, line("x" * most)))) as requests:
        assert len(requests) == 1
    assert problems(tmp_path, line("x" * (most + 1))) == [(1, "invalid_request")]


def test_the_length_of_a_line_is_bounded_and_the_ones_after_it_are_read(tmp_path: Path) -> None:
    most = len(line("bb"))
    path = written(tmp_path, line("a"), line("bb"), line("ccc"), "x" * 300_000, "{", line("d") + " " * 99)
    with pytest.raises(BadBatch, match=f"line 3: longer than {most} bytes") as caught:
        Requests(path, most_bytes=most)
    assert [(each.line, each.code) for each in caught.value.problems] == [
        (3, "line_too_long"), (4, "line_too_long"), (5, "invalid_json_line"), (6, "line_too_long"),
    ]  # fmt: skip
    with closing(Requests(written(tmp_path, line("a"), line("bb"), "", line("c")), most_bytes=most)) as requests:
        assert [requests[i].custom_id for i in range(3)] == ["a", "bb", "c"]


def test_a_line_has_a_bound_where_no_server_says_less(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with open(path, "wb") as file:
        file.truncate(MAX_LINE_BYTES + 1)
    with pytest.raises(BadBatch, match="line 1: longer than 268,435,456 bytes"):
        Requests(path)


def test_a_line_without_an_end_takes_no_more_memory_than_one_may_have(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with open(path, "wb") as file:
        file.truncate(64 << 20)  # a hole: one line of zeros
    tracemalloc.start()
    try:
        assert [code for _, code in problems_of(path, 1 << 16)] == ["line_too_long"]
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_only_the_first_problems_are_told(tmp_path: Path) -> None:
    most = lines._MOST_PROBLEMS
    assert most == 100
    assert len(problems(tmp_path, *["{"] * most)) == most
    with pytest.raises(BadBatch, match="and more") as caught:
        Requests(written(tmp_path, *["{"] * (most + 1)))
    assert len(caught.value.problems) == most


@pytest.mark.parametrize("id", ["", "batch_req_", "batch_req_00", "batch_req_" + "0" * 32, "batch_req_x" + "0" * 31])
def test_the_id_of_another_answer_is_not_found(tmp_path: Path, id: str) -> None:
    with closing(Requests(written(tmp_path, line("a")))) as requests:
        assert requests.find(id) is None


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path, line("a"), line("b"))
    with closing(Requests(path)) as requests:
        path.write_text("\n".join([line("c"), line("d")]))
        with pytest.raises(MainstemError, match="has changed"):
            requests[1]
