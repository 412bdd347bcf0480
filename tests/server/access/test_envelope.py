"""The envelope of every request: ids, and what a bug looks like from outside."""

from __future__ import annotations

import re

import pytest
from rigs.app_client import client
from rigs.fake_engine import FakeEngine

from mainstem.errors import CorruptTree


@pytest.mark.parametrize("bug", [ZeroDivisionError("detail"), CorruptTree("detail")])
def test_a_bug_is_a_logged_500_without_a_traceback(bug: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> str:
        raise bug

    engine = FakeEngine()
    engine.tree = broken  # type: ignore[method-assign]
    response = client(engine).get("/v1/cache/tree", headers={"X-Request-Id": "abc"})
    assert "detail" not in response.text
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert response.headers["x-request-id"] == "abc"
    assert "request abc failed" in caplog.text
    assert f"{type(bug).__name__}: detail" in caplog.text


def test_request_ids() -> None:
    server = client()
    assert server.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = server.get("/health", headers={"X-Request-Id": "x" * 200}).headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", made)
    assert server.get("/v1/nothing").headers["x-request-id"]
    headers = server.post("/v1/messages", json={}, headers={"X-Request-Id": "mine-2"}).headers
    assert headers["request-id"] == headers["x-request-id"] == "mine-2", "the one that Anthropic's clients read"


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/nothing", 404, "There is no endpoint at /v1/nothing."),
        ("GET", "/" + "x" * 3000, 404, f"There is no endpoint at /{'x' * 3000}."),
        *(
            (method, path, 404, f"There is no endpoint at {path}: did you mean {meant}?")
            for method, path, meant in [
                ("POST", "/chat/completions", "/v1/chat/completions"),
                ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
                ("POST", "/v1/v1/messages", "/v1/messages"),
                ("POST", "/messages/count_tokens", "/v1/messages/count_tokens"),
                ("GET", "/models", "/v1/models"),
                ("GET", "/models/some/name", "/v1/models/some/name"),
                ("GET", "/responses/resp_1", "/v1/responses/resp_1"),
                ("POST", "/openai/v1/responses", "/v1/responses"),
                ("GET", "/v1/health", "/health"),
                ("POST", "/v1/tokenize", "/tokenize"),
                ("POST", "/v1/chat/completion", "/v1/chat/completions"),
            ]
        ),
        ("GET", "/v1/completions", 405, "/v1/completions does not accept GET: use POST."),
        ("POST", "/v1/models", 405, "/v1/models does not accept POST: use GET."),
        ("PUT", "/v1/responses/resp_1", 405, "/v1/responses/resp_1 does not accept PUT: use DELETE or GET."),
        ("DELETE", "/ping", 405, "/ping does not accept DELETE: use GET or POST."),
        ("PUT", "/ping", 405, "/ping does not accept PUT: use GET or POST."),
        ("OPTIONS", "/metrics", 405, "/metrics does not accept OPTIONS: use GET."),
    ],
)
def test_what_no_route_takes_is_said_in_the_form_of_the_api(method: str, path: str, status: int, message: str) -> None:
    response = client().request(method, path)
    assert (response.status_code, response.json()["error"]["message"]) == (status, message)
    if status == 405:
        named = message.partition("use ")[2].rstrip(".").split(" or ")
        allowed = sorted([*named, "HEAD"] if "GET" in named else named)
        assert response.headers["allow"] == ", ".join(allowed)
        for each in allowed:
            assert client().request(each, path, content=b"").status_code != 405, "what Allow names is taken"


def test_errors_of_messages_have_their_own_form() -> None:
    response = client().get("/v1/messages")
    assert (response.status_code, response.json()["type"]) == (405, "error")
