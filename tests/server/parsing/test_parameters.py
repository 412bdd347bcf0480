"""Arguments that are written one by one: their types by the schema, and what texts stand for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mainstem.server.parsing.parameters import TEXT, Parameters, written

STRING: Any = {"type": "string"}
NUMBER: Any = {"type": "number"}


def parameters(schema: Any, **more: Any) -> Parameters:
    return Parameters({"type": "object", "properties": {"x": schema}, **more})


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (STRING, "string"),
        ({"enum": ["a", "b"]}, "string"),
        ({"const": 5}, "integer"),
        ({"type": ["string", "null"]}, "string null"),
        ({"anyOf": [STRING, NUMBER]}, "string number"),
        ({"oneOf": [STRING, {"const": None}]}, "string null"),
        ({"allOf": [{"type": ["string", "null"]}, STRING]}, "string"),
        ({"type": ["string", "integer"], "enum": ["a"]}, "string"),
        ({"$ref": "#/$defs/name"}, "string"),
        ({"anyOf": [{"$ref": "#/$defs/name"}, {"$ref": "#/$defs/list~1of"}]}, "string array"),
    ],
)
def test_types_follow_from_the_schema(schema: Any, types: str) -> None:
    definitions = {"name": STRING, "list/of": {"type": "array"}}
    assert parameters(schema, **{"$defs": definitions}).types("x") == {*types.split()}


@pytest.mark.parametrize(
    "schema",
    [{}, True, None, 7, {"$ref": "#/$defs/absent"}, {"$ref": "https://example.com"}, {"$ref": "#"}, {"anyOf": []},
     {"type": 7}, {"enum": 7}, {"type": "string", "const": 5}],
)  # fmt: skip
def test_what_says_nothing_allows_all(schema: Any) -> None:
    assert len(parameters(schema).types("x")) == 7


def test_references_in_a_circle_come_to_an_end() -> None:
    circle = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    assert len(parameters({"$ref": "#/$defs/a"}, **{"$defs": circle}).types("x")) == 7
    tree = {"t": {"anyOf": [{"$ref": "#/$defs/t"}, STRING]}}
    assert "string" in parameters({"$ref": "#/$defs/t"}, **{"$defs": tree}).types("x")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (STRING, "5", '"5"'),
        (STRING, ' a"\\\n', '" a\\"\\\\\\n"'),
        (NUMBER, "5", "5"),
        (NUMBER, " 5.50\n", "5.50"),
        (NUMBER, "five", '"five"'),
        (NUMBER, "NaN", '"NaN"'),
        ({"type": "integer"}, "5.5", '"5.5"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "1", '"1"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "none", '"none"'),
        ({"type": "object"}, '{"a": [1, "b"]}', '{"a": [1, "b"]}'),
        ({"type": "array"}, "[" * 9000, json.dumps("[" * 9000)),
        ({}, "5", "5"),
        ({}, '"quoted"', '"\\"quoted\\""'),
        ({}, "plain", '"plain"'),
    ],
)
def test_a_text_becomes_what_its_schema_allows(schema: Any, text: str, value: str) -> None:
    assert parameters(schema).value("x", text) == value


def test_parameters_that_the_schema_does_not_name() -> None:
    assert Parameters({}).value("x", "5") == "5"
    assert parameters(STRING, additionalProperties=STRING).types("y") == TEXT
    assert Parameters({"properties": 7, "required": 7}).names == []
    made = parameters(STRING, required=["x"])
    assert (made.names, made.required) == (["x"], {"x"})


def test_texts_are_written_as_they_are() -> None:
    assert [written(value) for value in ("a\n", "5", 5, None, ["é"])] == ["a\n", "5", "5", "null", '["é"]']
