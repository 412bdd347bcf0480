"""What a request says of the form of its answer: OpenAI's `response_format`, and the fields that open servers share.

Knows JSON and the names of fields, and turns them into a `Grammar`. Does not know what grammars mean, nor which
compile.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct

from mainstem.server.errors import ApiError
from mainstem.settings.engine import Grammar, GrammarKind

Choices = Annotated[list[str], Meta(min_length=1)]

_FORMATS = ("text", "json_object", "json_schema")


class JsonSchema(Struct):
    """`response_format.json_schema`. The schema is held in any case, whatever `strict` says."""

    schema: Raw = msgspec.field(default_factory=Raw)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """`response_format`, as in the OpenAI API reference."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct):
    """`structured_outputs` of vLLM. Its other fields are refused."""

    json: Raw = msgspec.field(default_factory=Raw)
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Asked(NamedTuple):
    """A grammar, and the path of the field that asks for it."""

    field: str
    grammar: Grammar


class Structured(Struct, kw_only=True):
    """The fields of a request that say what form its answer has; None and empty texts ask for nothing."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = msgspec.field(default_factory=Raw)
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def asked(self) -> Asked | None:
        """Returns the grammar of the answer.

        Raises:
            ApiError: 400; two fields ask for one, or a field is of a form that is not supported.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        given = [
            *_of_format(self.response_format),
            *_of_fields("structured_outputs.", outputs.json, outputs.regex, outputs.choice, outputs.grammar),
            *([Asked("structured_outputs.json_object", Grammar("json_object"))] if outputs.json_object else []),
            *_of_fields("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar),
        ]
        if len(given) > 1:
            names = " and ".join(each.field for each in given)
            raise ApiError(400, f"{names}: at most one of them may be set", param=given[1].field)
        return given[0] if given else None


def _of_format(format: ResponseFormat | None) -> list[Asked]:
    if format is None:
        return []
    if format.type not in _FORMATS:
        allowed = ", ".join(map(repr, _FORMATS))
        message = f"response_format.type: must be one of {allowed}, got {format.type!r}"
        raise ApiError(400, message, param="response_format.type", code="unsupported_parameter")
    if format.type == "json_schema":
        at = "response_format.json_schema"
        asked = [] if format.json_schema is None else _of_schema(f"{at}.schema", format.json_schema.schema)
        if not asked:
            field = at if format.json_schema is None else f"{at}.schema"
            raise ApiError(400, f"{field}: this field is required with type 'json_schema'", param=field)
        return asked
    return [Asked("response_format", Grammar("json_object"))] if format.type == "json_object" else []


def _of_fields(prefix: str, json: Raw, regex: str | None, choice: list[str] | None, grammar: str | None) -> list[Asked]:
    texts: list[tuple[str, GrammarKind, str | None]] = [
        ("regex", "regex", regex),
        ("choice", "choice", None if choice is None else msgspec.json.encode(choice).decode()),
        ("grammar", "lark", grammar),
    ]
    others = [Asked(prefix + name, Grammar(kind, text)) for name, kind, text in texts if text]
    return _of_schema(f"{prefix}json", json) + others


def _of_schema(field: str, schema: Raw) -> list[Asked]:
    """Returns the grammar of a schema as it stands in the body: an object, a boolean, or a text of either."""
    text = bytes(schema).decode()
    if text in ("", "null"):
        return []
    return [Asked(field, Grammar("json_schema", msgspec.json.decode(schema) if text.startswith('"') else text))]
