"""Structured output as clients ask for it: which field gives which grammar, which is refused, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rigs.app_client import chat, client, complete, error_of, events
from rigs.byte_pairs import byte_pairs
from rigs.fake_engine import FakeEngine
from rigs.serving import real_server
from starlette.testclient import TestClient

from bench.tiny_models import tiny
from mainstem.errors import ModelNotFound
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel, load_model
from mainstem.server.app import create_app
from mainstem.settings.engine import EngineConfig, Grammar

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
OPEN = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}


def json_schema(**fields: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "place", **fields}}


ASKED = [
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ({"response_format": json_schema(schema=SCHEMA, strict=True)}, Grammar("json_schema", TEXT)),
    ({"response_format": json_schema(schema=SCHEMA, strict=False)}, Grammar("json_schema", TEXT)),
    ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
    ({"guided_json": TEXT}, Grammar("json_schema", TEXT)),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["é", "b"]}, Grammar("choice", '["é","b"]')),
    ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
    ({"structured_outputs": {"regex": "a+", "json": None}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar("json_schema", TEXT)),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, Grammar("json_schema", TEXT)),
    ({"response_format": json_schema(schema=OPEN)}, Grammar("json_schema", TEXT)),
    ({"guided_json": OPEN}, Grammar("json_schema", TEXT)),
    ({"guided_json": json.dumps(OPEN)}, Grammar("json_schema", TEXT)),
    ({"json_schema": OPEN}, Grammar("json_schema", TEXT)),
    ({"json_schema": json.dumps(OPEN)}, Grammar("json_schema", TEXT)),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, Grammar("lark", 'root ::= "a"')),
    ({"regex": "", "ebnf": None, "json_schema": None}, None),
    ({"response_format": {"type": "text"}, "guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None, "guided_regex": "", "guided_grammar": ""}, None),
    ({"structured_outputs": {"json_object": False}}, None),
    ({"structured_outputs": None, "guided_choice": None}, None),
]


@pytest.mark.parametrize(("fields", "grammar"), ASKED, ids=lambda value: str(value)[:60])
def test_each_field_asks_for_its_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    for ask in (chat, complete):
        engine = FakeEngine()
        assert ask(client(engine), **fields).status_code == 200
        assert engine.streams[0].request.params.grammar == grammar


REFUSED = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": json_schema()}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(schema=None)}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(schema=3)}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(schema={"type": "oops"})}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema"),
    ({"response_format": {**json_schema(schema=SCHEMA), "schema": SCHEMA}}, "response_format.schema"),
    ({"regex": "["}, "regex"),
    ({"ebnf": "root ::= absent"}, "ebnf"),
    ({"json_schema": {"type": "oops"}}, "json_schema"),
    ({"json_schema": SCHEMA, "regex": "a"}, "regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": []}, "guided_json"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_grammar": "start: absent"}, "guided_grammar"),
    ({"structured_outputs": {"json": {"type": 4}}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"guided_regex": "a", "allowed_token_ids": [97]}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_bad_field_is_named_before_anything_runs(fields: dict[str, Any], param: str) -> None:
    for ask in (chat, complete):
        engine = FakeEngine()
        error = error_of(ask(client(engine), **fields), 400)
        assert error["param"] == param and param in error["message"]
        assert not engine.streams


def test_the_grammar_of_many_choices_is_compiled_once() -> None:
    engine = FakeEngine()
    server = client(engine)
    for _ in range(3):
        assert complete(server, ["a", "b"], n=2, seed=1, guided_regex="a+").status_code == 200
    assert engine.grammars.compiled == 1
    assert "mainstem_compiled_grammars_total 1.0" in server.get("/metrics").text


def test_a_model_whose_tokens_are_unknown_refuses_grammars() -> None:
    engine = FakeEngine()
    engine.tokenizer.decode = lambda tokens, **options: " ".join(map(str, tokens))  # type: ignore[method-assign]
    error = error_of(complete(client(engine), guided_regex="a+"), 400)
    assert "tokenizer" in error["message"] and not engine.streams


# ---------------------------------------------------------------- over an engine


@pytest.fixture(scope="module")
def server(one_thread: None) -> Iterator[TestClient]:
    tokenizer = byte_pairs()
    model = tiny("llama", vocab_size=400, eos_token_id=tokenizer.eos_token_id, max_position_embeddings=1024)
    loaded = LoadedModel(model, tokenizer, "fake", torch.float32, 1024)
    with Engine(loaded, EngineConfig(pages=400, page_size=8)) as engine:
        yield TestClient(create_app(engine))


def place(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"city", "big"} and len(value["city"]) <= 12 and type(value["big"]) is bool


def test_answers_of_all_choices_conform(server: TestClient) -> None:
    for ask in (chat, complete):
        choices = ask(server, n=4, seed=5, response_format=json_schema(schema=SCHEMA), max_tokens=900).json()["choices"]
        texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
        for text, choice in zip(texts, choices, strict=True):
            assert choice["finish_reason"] == "stop"
            place(text)
        assert len({*texts}) > 1


def test_a_stream_conforms(server: TestClient) -> None:
    chunks = events(chat(server, stream=True, response_format=json_schema(schema=SCHEMA), max_tokens=900))
    place("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_an_answer_that_is_cut_says_so(server: TestClient) -> None:
    (choice,) = chat(server, response_format=json_schema(schema=SCHEMA), max_tokens=4).json()["choices"]
    assert choice["finish_reason"] == "length"


def test_log_probabilities_are_those_of_the_model(server: TestClient) -> None:
    (choice,) = complete(server, guided_choice=["yes"], logprobs=1, temperature=0).json()["choices"]
    assert choice["text"] == "yes" and all(value < -0.5 for value in choice["logprobs"]["token_logprobs"])


# ---------------------------------------------------------------- the default model and the official client


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.deadline
def test_the_official_client_parses_answers_of_the_default_model() -> None:
    import openai
    import pydantic

    class Place(pydantic.BaseModel):
        city: str = pydantic.Field(max_length=40)
        inhabitants: int = pydantic.Field(ge=0, le=10**9)
        capital: bool

    try:
        load_model(dtype="float32")
    except ModelNotFound as error:
        pytest.skip(str(error))
    messages: Any = [{"role": "user", "content": "Describe Paris in JSON: city, inhabitants, capital."}]
    with real_server({"max-context": "1024"}) as process:
        api = openai.OpenAI(base_url=f"{process.http.base_url}/v1", api_key="none", max_retries=0)
        given: Any = {"model": process.model, "messages": messages, "max_tokens": 200, "temperature": 0}

        parsed = api.chat.completions.parse(**given, response_format=Place)
        assert isinstance(parsed.choices[0].message.parsed, Place)

        schema = Place.model_json_schema() | {"additionalProperties": False}
        format: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
        whole = api.chat.completions.create(**given, response_format=format)
        Place.model_validate_json(whole.choices[0].message.content or "")
        assert whole.choices[0].finish_reason == "stop"

        chunks = list(api.chat.completions.create(**given, response_format=format, stream=True))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == whole.choices[0].message.content
        with api.chat.completions.stream(**given, response_format=Place) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Place)

        many = api.chat.completions.create(**{**given, "temperature": 1.5}, n=4, seed=1, response_format=format)
        for choice in many.choices:
            Place.model_validate_json(choice.message.content or "")

        extra = {"guided_choice": ["Paris", "Rome", "Zürich"]}
        chosen = api.chat.completions.create(**given, extra_body=extra)
        assert chosen.choices[0].message.content in extra["guided_choice"]
        with pytest.raises(openai.BadRequestError) as bad:
            api.chat.completions.create(**given, extra_body={"guided_regex": "(a"})
        assert bad.value.param == "guided_regex"
