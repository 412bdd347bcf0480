"""Calls whose schema no grammar holds in full: what does not fit is logged, and all is shown as it is."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mainstem.server.parsing.checked import Checked, by_schema, fits
from mainstem.server.parsing.formats import FORMATS
from tests.server.fields.test_tools import TOOLS, T, W
from tests.server.parsing.test_output import scanned

OSLO = {"properties": {"city": {"not": {"const": "Rome"}}}}


def test_a_call_that_does_not_fit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    text = f"<tool_call>{T}</tool_call><tool_call>{W}</tool_call>"
    for schema, logged in ((OSLO, True), ({"required": ["city"]}, False), ({"required": 7}, False)):
        caplog.clear()
        made = Checked(FORMATS["hermes"].parser(TOOLS), {"weather": by_schema(schema)})
        kinds = [type(piece) for piece in scanned(made, *text)]
        assert kinds == [type(piece) for piece in scanned(FORMATS["hermes"].parser(TOOLS), text)]
        said = 'a call of the tool weather is not what it takes: {"city": "Rome"}'
        assert (said in caplog.text) == bool(caplog.records) == logged


@pytest.mark.parametrize("end", ["", '": b}}</tool_call>'])
def test_what_is_no_call_and_what_is_cut_is_not_checked(end: str, caplog: pytest.LogCaptureFixture) -> None:
    made = Checked(FORMATS["hermes"].parser(TOOLS), {"weather": by_schema({"maxProperties": 0})})
    scanned(made, '<tool_call>{"name": "weather", "arguments": {"a' + end, cut=not end)
    assert not caplog.records


DEEP: dict[str, Any] = {"$ref": "#/$defs/a0", "$defs": {
    f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)
}}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"uniqueItems": True}, [1, 2, "1", True], True),
        ({"uniqueItems": True}, [1, 2, 1.0], False),
        ({"uniqueItems": True}, [{"a": 1, "b": 2}, {"b": 2, "a": 1}], False),
        ({"propertyNames": {"maxLength": 2}}, {"ab": 1, "abc": 2}, False),
        ({"propertyNames": {"pattern": "^a"}}, {"b": 1}, None),
        ({"not": {"required": ["z"]}}, {"z": 1}, False),
        ({"not": {"pattern": "a"}}, "a", None),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}, False),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"c": 1}, True),
        ({"if": {"required": ["a"]}, "else": False}, {"c": 1}, False),
        ({"contains": {"type": "string"}}, [1, 2], False),
        ({"contains": {"type": "string"}, "maxContains": 1}, ["a", "b"], False),
        ({"contains": {"type": "string"}, "minContains": 0}, [], True),
        ({"oneOf": [{"type": "integer"}, {"minimum": 5}]}, 7, False),
        ({"oneOf": [{"type": "integer"}, {"minimum": 5}]}, 3, True),
        ({"oneOf": [{"type": "integer"}, {"format": "x"}]}, "a", None),
        ({"anyOf": [{"type": "null"}, {"maxLength": 1}]}, "ab", False),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, False),
        ({"dependentSchemas": {"a": {"maxProperties": 1}}}, {"a": 1, "b": 2}, False),
        ({"minProperties": 2}, {"a": 1}, False),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": False}, {"a": 1.0}, True),
        ({"properties": {"a": {"type": ["integer", "null"]}}}, {"a": True}, False),
        ({"properties": {}, "additionalProperties": {"type": "string"}}, {"b": 1}, False),
        ({"patternProperties": {"^a": {}}, "additionalProperties": False}, {"b": 1}, None),
        ({"items": {"enum": [1, "a"]}}, [1, "a", True], False),
        ({"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}, ["a", 1], True),
        ({"items": [{"type": "string"}]}, [1], False),
        ({"$ref": "#/$defs/s~1", "$defs": {"s/": {"const": 1}}}, 2, False),
        ({"$ref": "http://there/s.json"}, 2, None),
        ({"$ref": "#"}, 2, None),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 2, "minimum": 0, "maximum": 3}, 1, False),
        ({"minimum": 5}, True, True),
        ({"minLength": 2, "minItems": 1, "maxItems": 2}, "a", False),
        ({"type": "file"}, 1, None),
        ({"required": 7, "description": "a"}, {}, None),
        (DEEP, 1, None),
        ({"const": {"a": [1, 2.0]}}, {"a": [1.0, 2]}, True),
        ({"enum": [[1.5], [True]]}, [1], False),
        ({"uniqueItems": True}, [[1], [1.0]], False),
        ({"not": {"multipleOf": 2}}, 3, None),
        ({"multipleOf": 2, "maximum": 2}, 3, False),
        ({"not": {"title": "t", "then": False, "$defs": {}}}, 3, False),
        ({"type": "integer", "x-order": 1}, 3, None),
        ({"items": {"enum": [*range(1000)]}}, [7] * 100, True),
        ({"items": {"enum": [*range(1000)]}}, [7] * 1000, None),
        ({"items": {"properties": {str(i): {} for i in range(1000)}}}, [{}] * 1000, None),
        ({"allOf": [{"enum": ["a"]}] * 10}, "b" * 10_000, False),
    ],
)  # fmt: skip
def test_whether_a_value_fits(schema: dict[str, Any], value: Any, expected: bool | None) -> None:
    assert fits(schema, value) is expected


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"items": {"enum": [*range(10_000)]}}, [-1] * 10_000),
        ({"items": {"required": [f"a{i}" for i in range(10_000)]}}, [{}] * 10_000),
        ({"allOf": [{"uniqueItems": True}] * 10_000}, [*range(10_000)]),
        ({"allOf": [{"const": "a"}] * 10_000}, "b" * 1_000_000),
    ],
)
def test_the_work_of_a_check_is_bounded(schema: dict[str, Any], value: Any) -> None:
    began = time.process_time()
    assert fits(schema, value) in (None, False)
    assert time.process_time() - began < 5, "by the product of their sizes it would be a minute and more"
