"""Schemas as models are held to them: which objects are closed, and which stay open."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
from rigs.fake_engine import FakeTokenizer

from mainstem.runtime.sampling.grammars import Grammars
from mainstem.server.fields.schemas import closed, closed_text, holdable
from mainstem.server.fields.tools import Tool
from mainstem.server.parsing.formats import schema_of
from mainstem.settings.engine import Grammar

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


# ---------------------------------------------------------------- what a grammar holds of a schema

GRAMMARS = Grammars(FakeTokenizer(), 256)


def trial(schema: Mapping[str, Any]) -> str:
    return GRAMMARS.problem(Grammar("json_schema", schema_of(Tool("f", None, schema))))


SHORT = {"type": "string", "maxLength": 3}
IDS = {"type": "array", "items": SHORT, "maxItems": 2}
OPEN = {"additionalProperties": True}


@pytest.mark.parametrize(
    ("schema", "held", "left_out"),
    [
        (thing(), thing(), []),
        ({"properties": {"a": {**IDS, "uniqueItems": True}}}, {"properties": {"a": IDS}}, ["uniqueItems"]),
        (thing(propertyNames={"pattern": "^a"}), thing(), ["propertyNames"]),
        (thing(**{"not": {"required": ["z"]}}), thing(**OPEN), ["not"]),
        (thing(**{"if": {}, "then": {}, "else": {}}), thing(**OPEN), ["else", "if", "then"]),
        ({"properties": {"u": {**SHORT, "format": "uri-reference"}, "d": {"type": "string", "format": "date"}}},
         {"properties": {"u": SHORT, "d": {"type": "string", "format": "date"}}}, ["format"]),
        ({"properties": {"a": {**SHORT, "pattern": "(?=a)"}, "b": {"pattern": "^a+$", **TEXT}}},
         {"properties": {"a": SHORT, "b": {"pattern": "^a+$", **TEXT}}}, ["pattern"]),
        ({"properties": {"a": {"oneOf": [{"type": "object"}, thing(contains={})]}}},
         {"properties": {"a": {"anyOf": [{"type": "object"}, thing()]}}}, ["contains", "oneOf"]),
        ({"properties": {"a": {"$ref": "http://there/a.json"}}}, {"properties": {"a": OPEN}}, ["$ref"]),
        ({"$defs": {"a": {**IDS, "contains": {}}}, "properties": {"a": {"$ref": "#/$defs/a"}}},
         {"$defs": {"a": IDS}, "properties": {"a": {"$ref": "#/$defs/a"}}}, ["contains"]),
        (thing(minProperties=2, **{"x-more": 1}), thing(**{"x-more": 1}), ["minProperties"]),
        ({"properties": {"a": {"type": "file"}}}, {"type": "object"}, ["all of it"]),
    ],
)  # fmt: skip
def test_of_a_schema_all_is_held_that_a_grammar_can_hold(
    schema: dict[str, Any], held: dict[str, Any], left_out: list[str]
) -> None:
    before = copy.deepcopy(schema)
    made, named = holdable(schema, trial)
    assert not trial(made)
    assert (made, [*named], schema) == (held, left_out, before)


def test_a_schema_of_many_slips_takes_no_more_trials_than_there_are() -> None:
    trials = 0

    def counted(schema: Mapping[str, Any]) -> str:
        nonlocal trials
        trials += 1
        return "not held" if "uniqueItems" in json.dumps(schema) else ""

    schema = {"properties": {f"p{i}": {**IDS, "uniqueItems": True} for i in range(300)}}
    made, left_out = holdable(schema, counted)
    assert (made, left_out) == ({"properties": {f"p{i}": IDS for i in range(300)}}, ["uniqueItems"])
    assert trials == 2 + 200, "of the whole, of what is sure, and of what may be put back"
