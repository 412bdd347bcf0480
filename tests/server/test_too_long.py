"""A prompt that is too long is refused in the words and codes by which clients know that they must compact."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.errors import RequestTooLong
from mainstem.server.app import create_app

MOST = 64
LONG = "x" * 100
SHORT = "x" * 20

CODES = {"context_length_exceeded"}
"""What Codex (in `response.failed`), Cline, Goose and opencode compare `error.code` with."""

PHRASES = [
    re.compile(r"maximum context length is \d+ tokens", re.I),  # opencode, pi, and most that go by the message
    re.compile(r"this model's maximum context length is"),  # litellm, in lower case
    re.compile(r"maximum context length is (\d+)"),  # those that learn the limit from it
    re.compile(r"reduce the length of the"),
]
PROMPT_TOO_LONG = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)\s*maximum", re.I)
OUTPUT_TOO_LONG = re.compile(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")
"""What Claude Code and others read from the messages of Anthropic's API."""

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "%"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "%"}]},
    "/v1/responses": {"input": "%"},
    "/v1/messages": {"messages": [{"role": "user", "content": "%"}], "max_tokens": 1},
}
FIELDS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
}
STREAMED = ("/v1/responses", True)  # fails in its stream
ANSWERS = {"/v1/responses": "max_output_tokens"}


def server() -> TestClient:
    return TestClient(create_app(FakeEngine(max_context=MOST)))  # type: ignore[arg-type]


def ask(path: str, text: str, **fields: Any) -> Any:
    body = json.loads(json.dumps(BODIES[path]).replace("%", text))
    return server().post(path, json={"model": "fake", **body, **fields})


def tokens(path: str, text: str) -> int:
    """The prompt that the double's template makes of a text; a token is a byte."""
    return len(text) if path == "/v1/completions" else len(f"<user>{text}\n<assistant>")


@pytest.mark.parametrize(
    ("path", "stream"), [(path, stream) for path in FIELDS for stream in (False, True) if (path, stream) != STREAMED]
)
def test_openais_words(path: str, stream: bool) -> None:
    response = ask(path, LONG, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", FIELDS[path])
    assert error["code"] in CODES
    assert all(phrase.search(error["message"].lower()) for phrase in PHRASES)
    assert f"is {MOST} tokens" in error["message"]
    numbers = [int(each) for each in re.findall(r"\d+", error["message"])]
    assert numbers == [MOST, tokens(path, LONG) if "at least" not in error["message"] else len(LONG)]


@pytest.mark.parametrize("path", FIELDS)
def test_openais_words_for_an_answer_that_is_too_long(path: str) -> None:
    response = ask(path, SHORT, **{ANSWERS.get(path, "max_tokens"): 60})
    error, prompt = response.json()["error"], tokens(path, SHORT)
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", FIELDS[path])
    where = f"{prompt + 60} tokens ({prompt} in the {FIELDS[path]}, 60 in the completion)"
    assert all(phrase.search(error["message"].lower()) for phrase in PHRASES) and where in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_words(stream: bool) -> None:
    response = ask("/v1/messages", LONG, stream=stream)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    found = PROMPT_TOO_LONG.search(body["error"]["message"])
    assert found is not None and MOST < int(found[1]) <= tokens("/v1/messages", LONG) and int(found[2]) == MOST


def test_anthropics_words_for_an_answer_that_is_too_long() -> None:
    body = ask("/v1/messages", SHORT, max_tokens=60).json()
    found = OUTPUT_TOO_LONG.search(body["error"]["message"])
    assert found is not None and [int(each) for each in found.groups()] == [tokens("/v1/messages", SHORT), 60, MOST]
    assert not PROMPT_TOO_LONG.search(body["error"]["message"]), "a shorter answer is enough"


def test_a_stream_of_responses_fails_within_as_openais_does() -> None:
    response = ask("/v1/responses", LONG, stream=True)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n") if line[:5] == "data:"]
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "error", "response.failed"
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
    assert events[2]["error"]["code"] == events[3]["response"]["error"]["code"] == "context_length_exceeded"
    assert events[2]["error"]["param"] == "input"
    assert events[0]["response"]["id"] == events[3]["response"]["id"] and events[3]["response"]["status"] == "failed"
    assert PHRASES[0].search(events[3]["response"]["error"]["message"])


def test_other_refusals_of_a_stream_of_responses_have_a_status() -> None:
    assert ask("/v1/responses", SHORT, stream=True, top_p=9).status_code == 400
    assert ask("/v1/responses", SHORT, stream=True, model="other").status_code == 404


def test_a_refused_stream_is_counted_as_one_that_was_refused() -> None:
    made = server()
    made.post("/v1/responses", json={"model": "fake", "input": LONG, "stream": True})
    assert 'mainstem_requests_total{outcome="refused"} 1.0' in made.get("/metrics").text


def test_a_text_that_nobody_has_counted_says_the_least_that_it_can_have() -> None:
    exact, least = RequestTooLong("prompt", 11, 10), RequestTooLong("prompt", 11, 10, counted=False)
    assert "resulted in 11 tokens" in str(exact) and "resulted in at least 11 tokens" in str(least)
    assert least.renamed("input").counted is False and "your input" in str(least.renamed("input"))
