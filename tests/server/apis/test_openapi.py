"""The description of the server: it lists every route, and what routes take and return is of the types it has."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from rigs.fake_engine import FakeEngine
from starlette.routing import Route
from starlette.testclient import TestClient

from mainstem.server.app import create_app
from mainstem.server.fields.openapi import Operation

CLIENT = TestClient(create_app(FakeEngine()))
ROUTES: Any = CLIENT.app.routes  # type: ignore[attr-defined]
DOCUMENT: Any = CLIENT.get("/openapi.json").json()
SCHEMAS: Any = DOCUMENT["components"]["schemas"]


def operation(method: str, path: str) -> Operation:
    (found,) = (each for each in ROUTES if each.method == method and each.path_regex.match(path))
    assert isinstance(found, Operation)
    return found


def test_every_route_is_described_and_nothing_else() -> None:
    routes = {
        (method, route.path.replace(":path}", "}"))
        for route in ROUTES
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(method.upper(), path) for path, each in DOCUMENT["paths"].items() for method in each} == routes


def test_the_document_is_openapi() -> None:
    assert DOCUMENT["openapi"].startswith("3.1.") and {"title", "version"} <= DOCUMENT["info"].keys()
    for path, operations in DOCUMENT["paths"].items():
        for each in operations.values():
            assert {"200", "default"} <= each["responses"].keys() and each["summary"]
            declared = {parameter["name"] for parameter in each.get("parameters", ())}
            assert declared == {part[1:-1] for part in path.split("/") if part.startswith("{")}
            assert all(
                "content" in body for body in (*each["responses"].values(), each.get("requestBody", {"content"}))
            )
    assert len(SCHEMAS) > 20
    assert {*re.findall(r"#/components/schemas/([\w.]+)", json.dumps(DOCUMENT))} == SCHEMAS.keys()


MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
CALLS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/completions", {"model": "fake", "prompt": [[65, 66]], "logprobs": 1, "echo": True}),
    ("POST", "/v1/completions", {"model": "fake", "prompt": "ab", "prompt_logprobs": 1, "stop": ["x"], "n": 2}),
    ("POST", "/v1/chat/completions", {"model": "fake", "messages": MESSAGES, "logprobs": True, "top_logprobs": 1}),
    ("POST", "/v1/chat/completions", {"model": "fake", "messages": MESSAGES, "return_token_ids": True}),
    ("POST", "/tokenize", {"prompt": "ab", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [65]}),
    ("POST", "/v1/cache/remove", {"prompt": "ab"}),
    ("POST", "/v1/cache/flush", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/fake", None),
    ("GET", "/version", None),
    ("GET", "/health", None),
]


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
def test_bodies_are_of_the_types_that_are_described(method: str, path: str, body: Any) -> None:
    described = operation(method, path)
    reply = CLIENT.request(method, path, json=body)
    assert reply.status_code == 200
    assert again(reply.content, described.response) == reply.json()
    if body is not None:
        msgspec.convert(body, described.request)
        assert body.keys() <= {*described.request.__struct_fields__}  # type: ignore[union-attr]


def again(text: bytes | str, kind: Any) -> Any:
    """Returns the JSON of a value that is read as one of a type: the same, if it has all fields and no others."""
    return json.loads(msgspec.json.encode(msgspec.json.decode(text, type=kind)))


def test_events_are_of_the_type_that_is_described() -> None:
    body = {"model": "fake", "messages": MESSAGES, "stream": True, "logprobs": True}
    lines = CLIENT.post("/v1/chat/completions", json=body).text.split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line and "[DONE]" not in line]
    kind = operation("POST", "/v1/chat/completions").event
    assert len(events) > 3 and [again(event, kind) for event in events] == [*map(json.loads, events)]


def test_a_chat_that_is_forgotten_is_not_described_as_a_response() -> None:
    assert "default" not in SCHEMAS["Deleted"]["properties"]["object"], "both kinds of answers have it"
