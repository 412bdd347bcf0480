"""Schemas as models are held to them: which objects are closed, and which stay open."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from mainstem.server.schemas import closed, closed_text

TEXT = {"type": "string"}
SHUT = {"additionalProperties": False}


def thing(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": TEXT}, **more}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (thing(), thing(**SHUT)),
        (thing(required=["a"]), thing(required=["a"], **SHUT)),
        ({"properties": {}}, {"properties": {}, **SHUT}),
        ({"items": thing()}, {"items": thing(**SHUT)}),
        ({"items": [thing()]}, {"items": [thing(**SHUT)]}),
        ({"prefixItems": [thing(), TEXT]}, {"prefixItems": [thing(**SHUT), TEXT]}),
        ({"properties": {"b": thing()}}, {"properties": {"b": thing(**SHUT)}, **SHUT}),
        (thing(additionalProperties=thing()), thing(additionalProperties=thing(**SHUT))),
        ({"patternProperties": {"^x": thing()}}, {"patternProperties": {"^x": thing(**SHUT)}}),
        ({"anyOf": [thing(), TEXT]}, {"anyOf": [thing(**SHUT), TEXT]}),
        ({"oneOf": [thing(), {"type": "null"}]}, {"oneOf": [thing(**SHUT), {"type": "null"}]}),
        ({"allOf": [thing()]}, {"allOf": [thing(**SHUT)]}),
        (
            {"$ref": "#/$defs/T", "$defs": {"T": thing(), "U": {"items": thing()}}},
            {"$ref": "#/$defs/T", "$defs": {"T": thing(**SHUT), "U": {"items": thing(**SHUT)}}},
        ),
        (
            {"items": {"$ref": "#/definitions/T"}, "definitions": {"T": thing()}},
            {"items": {"$ref": "#/definitions/T"}, "definitions": {"T": thing(**SHUT)}},
        ),
    ],
    ids=str,
)
def test_objects_have_no_properties_but_those_that_are_named(schema: Any, expected: Any) -> None:
    before = copy.deepcopy(schema)
    assert closed(schema) == expected
    assert schema == before, "what is given is not changed"
    assert closed(expected) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": TEXT},
        thing(additionalProperties=True),
        thing(additionalProperties=False),
        thing(patternProperties={"^x": TEXT}),
        thing(required=["a", "b"]),
        {"const": {"properties": {"a": 1}}},
        {"enum": [{"properties": {"a": 1}}]},
        {"default": {"properties": {"a": 1}}, "type": "object"},
        {"allOf": [thing(), thing()]},
        {"properties": {"p": TEXT}, "anyOf": [thing(), thing()]},
        {"properties": {"p": TEXT}, "$ref": "#/$defs/T", "$defs": {"T": thing()}},
        {"allOf": [{"$ref": "#/$defs/T"}, thing()], "$defs": {"T": thing()}},
        {"not": thing()},
        thing(**{"if": thing(), "then": thing()}),
        True,
        7,
        {"properties": 3},
        {"properties": {}, "required": 3},
        {"items": None, "allOf": {}, "$defs": []},
    ],
    ids=str,
)
def test_what_says_more_than_names_stays_open(schema: Any) -> None:
    text = json.dumps(schema)
    assert closed_text(text) == text
    if isinstance(schema, dict):
        assert closed(schema) == schema


def test_texts_that_are_no_schema_stay_as_they_are() -> None:
    deep = '{"items":' * 100_000 + "{}" + "}" * 100_000
    for text in ("", "{", '"x', "[]", "null", deep, '{"properties": {"' + "a" * 300_000 + '": {}}}'):
        assert closed_text(text) == text
    assert closed_text('{"properties": {"é": true}}') == '{"properties":{"é":true},"additionalProperties":false}'
