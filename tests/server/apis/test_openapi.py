"""The description of the server: it lists every route, and what routes take and return fits it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from rigs.fake_engine import FakeEngine
from starlette.routing import Route
from starlette.testclient import TestClient

from mainstem.server.app import create_app

CLIENT = TestClient(create_app(FakeEngine()))
DOCUMENT: Any = CLIENT.get("/openapi.json").json()
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
# What the check below understands; a keyword that it would not check fails the test.
KEYWORDS = {
    *("$ref", "anyOf", "type", "enum", "properties", "required", "additionalProperties", "items", "minItems"),
    *("maxItems", "minLength", "maxLength", "minimum", "maximum", "title", "description", "default", "propertyNames"),
    *("const", "prefixItems", "pattern", "format"),
}


def resolved(schema: Any) -> Any:
    while "$ref" in schema:
        kind, name = schema["$ref"].removeprefix("#/components/").split("/")
        schema = DOCUMENT["components"][kind][name]
    return schema


def problems(value: Any, schema: Any, at: str = "") -> Iterator[str]:
    """Yields where a value does not fit a schema."""
    schema = resolved(schema)
    if "anyOf" in schema:
        tried = [list(problems(value, each, at)) for each in schema["anyOf"]]
        if all(tried):
            yield min(tried, key=len)[0]
        return
    kind = schema.get("type")
    fits = (
        kind is None
        or (isinstance(value, (int, float)) and not isinstance(value, bool) and kind == "number")
        or (kind in TYPES and isinstance(value, TYPES[kind]) and not (isinstance(value, bool) and kind == "integer"))
    )
    if not fits:
        yield f"{at}: {value!r} is no {kind}"
    elif isinstance(value, dict):
        known = schema.get("properties", {})
        yield from (f"{at}: no {name}" for name in schema.get("required", ()) if name not in value)
        for name, inner in value.items():
            other = schema.get("additionalProperties", {})
            if name not in known and other is False:
                yield f"{at}.{name}: unknown"
            else:
                yield from problems(inner, known.get(name, other if isinstance(other, dict) else {}), f"{at}.{name}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from problems(inner, schema.get("items", {}), f"{at}[{i}]")
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"


def schemas(within: Any) -> Iterator[Any]:
    """Yields all schemas in one."""
    yield within
    for each in (*within.get("properties", {}).values(), *within.get("anyOf", ()), *within.get("prefixItems", ())):
        yield from schemas(each)
    for name in ("items", "additionalProperties", "propertyNames"):
        if isinstance(within.get(name), dict):
            yield from schemas(within[name])


def test_every_route_is_described_and_nothing_else() -> None:
    routes = {
        (method, route.path.replace(":path}", "}"))
        for route in CLIENT.app.routes  # type: ignore[attr-defined]
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(method.upper(), path) for path, each in DOCUMENT["paths"].items() for method in each} == routes


def test_the_document_is_openapi() -> None:
    assert DOCUMENT["openapi"].startswith("3.1.") and {"title", "version"} <= DOCUMENT["info"].keys()
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            assert {"200", "default"} <= operation["responses"].keys() and operation["summary"]
            declared = {parameter["name"] for parameter in operation.get("parameters", ())}
            assert declared == {part[1:-1] for part in path.split("/") if part.startswith("{")}
            bodies = [*operation["responses"].values(), *filter(None, [operation.get("requestBody")])]
            for content in (content for body in bodies for content in body["content"].values()):
                resolved(content["schema"])


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    assert len(DOCUMENT["components"]["schemas"]) > 20
    for name, schema in DOCUMENT["components"]["schemas"].items():
        for each in schemas(schema):
            assert not each.keys() - KEYWORDS, name
            assert resolved(each) is not None
            assert each.get("required", []) == [n for n in each.get("required", []) if n in each["properties"]]


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
def test_bodies_fit_their_schemas(method: str, path: str, body: Any) -> None:
    described = DOCUMENT["paths"]["/v1/models/{name}" if path.startswith("/v1/models/") else path][method.lower()]
    if body is not None:
        schema = described["requestBody"]["content"]["application/json"]["schema"]
        assert not [*problems(body, schema)]
    reply = CLIENT.request(method, path, json=body)
    assert reply.status_code == 200
    assert not [*problems(reply.json(), described["responses"]["200"]["content"]["application/json"]["schema"])]
    if body is not None:
        wrong = CLIENT.request(method, path, json={**body, "model": 3})
        assert wrong.status_code == 400 and [*problems({**body, "model": 3}, schema)]
        assert not [*problems(wrong.json(), described["responses"]["default"]["content"]["application/json"]["schema"])]


def test_events_fit_their_schema() -> None:
    content = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    body = {"model": "fake", "messages": MESSAGES, "stream": True, "logprobs": True}
    lines = CLIENT.post("/v1/chat/completions", json=body).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    assert len(events) > 3
    assert not [found for event in events for found in problems(event, content["text/event-stream"]["schema"])]


def test_the_check_finds_what_does_not_fit() -> None:
    schema = {"$ref": "#/components/schemas/CompletionBody"}
    good = CLIENT.post("/v1/completions", json={"model": "fake", "prompt": "a"}).json()
    assert not [*problems(good, schema)]
    for wrong in ({**good, "created": "now"}, {**good, "choices": [{}]}, {**good, "choices": None}):
        assert [*problems(wrong, schema)]
    del good["id"]
    assert [*problems(good, schema)] == [": no id"]


def test_a_chat_that_is_forgotten_is_not_described_as_a_response() -> None:
    described = DOCUMENT["components"]["schemas"]["Deleted"]["properties"]["object"]
    assert "default" not in described, "both kinds of answers have it"
