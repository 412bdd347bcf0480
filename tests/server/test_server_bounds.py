"""What the server takes and keeps at most, and for how long it waits, at the bound and one past it."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import uvicorn
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.errors import BadArgument
from mainstem.server import run, serving
from mainstem.server.app import create_app
from mainstem.server.fields.rules import _listed
from mainstem.server.fields.schemas import closed_text
from mainstem.server.parsing import custom
from mainstem.server.parsing.parameters import Parameters
from mainstem.server.parsing.scanners import _may_be_header
from mainstem.settings.server import ServerConfig
from mainstem.units import parse_timeout


def complete(**fields: Any) -> tuple[int, FakeEngine]:
    engine = FakeEngine()
    engine.max_waiting = 1000
    http = TestClient(create_app(engine))  # type: ignore[arg-type]
    return http.post("/v1/completions", json={"model": "fake", "prompt": "hi", **fields}).status_code, engine


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"stop": ["x"] * 16}, 200),
        ({"stop": ["x"] * 17}, 400),
        ({"n": 128, "max_tokens": 1}, 200),
        ({"n": 129, "max_tokens": 1}, 400),
        ({"prompt": ["hi"] * 2, "n": 65, "max_tokens": 1}, 400),
        ({"logprobs": 20, "max_tokens": 1}, 200),
        ({"logprobs": 21, "max_tokens": 1}, 400),
    ],
)
def test_a_request_has_16_stop_texts_128_choices_and_20_alternatives(fields: dict[str, Any], status: int) -> None:
    assert complete(**fields)[0] == status


def test_a_completion_has_16_tokens_where_no_number_is_given() -> None:
    _, engine = complete()
    assert engine.streams[0].request.params.max_tokens == 16


class Counting(FakeEngine):
    """Counts how many requests were in the engine together."""

    most = 0

    def submit(self, request: Any, **options: Any) -> Any:
        stream = super().submit(request, **options)
        self.most = max(self.most, sum(not each.ended for each in self.streams))
        return stream


@pytest.mark.parametrize(("waiting", "most"), [(100, 64), (64, 64), (10, 10)])
def test_prompts_that_generate_nothing_are_computed_64_at_a_time(waiting: int, most: int) -> None:
    engine = Counting()
    engine.config = replace(engine.config, max_waiting=waiting)
    with TestClient(create_app(engine, ServerConfig(embeddings=True))) as server:
        body = {"model": "fake", "input": ["a"] * 200}
        assert len(server.post("/v1/embeddings", json=body).json()["data"]) == 200
        assert (engine.most, len(engine.streams)) == (most, 200)
        body = {"model": "fake", "text_1": "a", "text_2": ["b"] * 80}
        assert len(server.post("/v1/score", json=body).json()["data"]) == 80
    assert (engine.most, len(engine.streams)) == (most, 200 + 160)


def test_eight_requests_fetch_images_and_256_schemas_are_known() -> None:
    generating = create_app(FakeEngine(), ServerConfig()).state.generating  # type: ignore[arg-type]
    assert generating._parsing_images.total_tokens == 8
    assert generating._preparation._holdable.cache_parameters()["maxsize"] == 256
    assert generating._fingerprints._max_bytes == 16 << 20


@pytest.mark.parametrize(("length", "whole"), [(1024, True), (1025, False), (100_000, False)])
def test_a_header_names_what_fits_in_1024_characters(length: int, whole: bool) -> None:
    names = ["a" * 100, "b" * (length - 102)]  # with what is between them
    listed = _listed(names)
    assert listed == (", ".join(names) if whole else f"{names[0]}, ...")
    many = _listed(f"{number:04}" for number in range(length))
    assert len(many) <= 1024 and many.endswith(", ...") and many.startswith("0000, 0001")


@pytest.mark.parametrize(("length", "is_closed"), [(1 << 18, True), ((1 << 18) + 1, False)])
def test_a_schema_of_262144_characters_is_closed_and_a_longer_one_is_not(length: int, is_closed: bool) -> None:
    start, end = '{"properties": {"', '": true}}'
    text = start + "x" * (length - len(start) - len(end)) + end
    assert len(text) == length
    assert ("additionalProperties" in closed_text(text)) == is_closed


def test_sixteen_closed_schemas_are_known_and_256_terms_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        closed_text(json.dumps({"properties": {f"{number}": True}}))
    assert closed_text.cache_info().currsize == 16
    monkeypatch.setattr(custom, "by_characters", lambda lark, escaped: lark)
    for number in range(260):
        custom.held(f"tool {number}", Form(), escaped=False)
    assert custom.held.cache_info().currsize == 256
    custom.held.cache_clear()


class Form:
    lark = 'start: "x"'
    syntax = "grammar"


@pytest.mark.parametrize(("length", "may_be"), [(255, True), (256, True), (257, False), (100_000, False)])
def test_the_header_of_a_message_has_256_characters_at_most(length: int, may_be: bool) -> None:
    assert _may_be_header("<|channel|>" + "x" * (length - 11)) == may_be


@pytest.mark.parametrize(("references", "found"), [(0, True), (16, True), (17, False), (1000, False)])
def test_references_are_followed_sixteen_deep(references: int, found: bool) -> None:
    chain = {f"r{number}": {"$ref": f"#/$defs/r{number + 1}"} for number in range(1, references)}
    schema = {
        "properties": {"x": {"$ref": "#/$defs/r1"} if references else {"type": "integer"}},
        "$defs": {**chain, f"r{references}": {"type": "integer"}},
    }
    assert (Parameters(schema).schema("x") == {"type": "integer"}) == found
    loop = {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}}
    assert Parameters(loop).schema("x") == {"$ref": "#/$defs/x"}


@pytest.mark.parametrize(("text", "taken"), [("999999999", True), ("1e9", False), ("1000000000000", False)])
def test_a_call_may_take_almost_1e9_seconds(text: str, taken: bool) -> None:
    if taken:
        assert parse_timeout("timeout", text) == 999_999_999
    else:
        with pytest.raises(BadArgument):
            parse_timeout("timeout", text)


# ---------------------------------------------------------------- waits


def test_the_last_event_of_a_choice_whose_client_left_is_waited_for_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    plain = anyio.move_on_after
    monkeypatch.setattr(run.anyio, "move_on_after", lambda seconds: waited.append(seconds) or plain(0.0))

    class Stream:
        def cancel(self) -> None: ...

        def __aiter__(self) -> Stream:
            return self

        async def __anext__(self) -> Any:
            await anyio.sleep_forever()

    left: Any = SimpleNamespace(_streams=[Stream()], answers=[[]], _watchers=[[]])
    anyio.run(run.Run._see_the_end, left, 0)
    assert waited == [10.0]


def test_responses_have_five_seconds_to_end_after_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    server = SimpleNamespace(run=lambda sockets: given.append("runs"))
    monkeypatch.setattr(uvicorn, "Config", lambda app, **options: given.append(options))
    monkeypatch.setattr(serving, "_DrainingServer", lambda *_: server)
    monkeypatch.setattr(serving, "_described", lambda engine: "")
    monkeypatch.setattr(serving, "_model_name", lambda engine, config: "fake")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving._serve(None, ServerConfig(), listener, SimpleNamespace(state=None))  # type: ignore[arg-type]
    assert given[0]["timeout_graceful_shutdown"] == 5 and given[1] == "runs"


@pytest.mark.parametrize("looks", [1, 3])
def test_pages_computed_elsewhere_are_looked_for_every_50_ms(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from mainstem.server import prefill

    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > looks:
            raise RuntimeError("enough")

    monkeypatch.setattr(prefill.anyio, "sleep", sleep)
    first = prefill.PrefillFirst(None, None, 1)  # type: ignore[arg-type]
    scope = {"type": "http", "path": "/v1/completions", "headers": []}
    anyio.run(first._read_ahead, lambda *_: lambda: None, scope, b"")
    assert slept == [0.05] * (looks + 1) and first.looks["done"] == looks
