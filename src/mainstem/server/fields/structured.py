"""The fields for the form of an answer: OpenAI's `response_format`, and those that open servers share.

Knows JSON and the names of fields, and turns them into a `Grammar`. Does not know what grammars mean, nor which
compile.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct

from mainstem.server.errors import ApiError, wrong
from mainstem.server.fields.sampling import Common
from mainstem.server.fields.schemas import closed_text
from mainstem.settings.engine import Grammar, GrammarKind

Choices = Annotated[list[str], Meta(min_length=1)]

_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA = "response_format.json_schema.schema"


class JsonSchema(Struct):
    """`response_format.json_schema`. The answer is held to the schema, whether `strict` is set or not."""

    schema: Raw = msgspec.field(default_factory=Raw)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """`response_format`, as in the OpenAI API reference; `schema` is llama.cpp's place of a schema."""

    type: str
    json_schema: JsonSchema | None = None
    schema: Raw = msgspec.field(default_factory=Raw)


class StructuredOutputs(Struct):
    """`structured_outputs` of vLLM. Its other fields are refused."""

    json: Raw = msgspec.field(default_factory=Raw)
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class AnswerForm(NamedTuple):
    """The grammar of an answer, and the path of the field that asks for it."""

    at: str
    grammar: Grammar


class Structured(Common, kw_only=True):
    """The fields of a request for the form of its answer; None and empty texts ask for nothing.

    `guided_json` and its like are vLLM's; `json_schema`, `regex` and `ebnf` SGLang's.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = msgspec.field(default_factory=Raw)
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: Raw = msgspec.field(default_factory=Raw)
    regex: str | None = None
    ebnf: str | None = None

    def form(self) -> AnswerForm | None:
        """Returns the grammar of the answer.

        Raises:
            ApiError: 400; two fields ask for one, or a field is of a form that is not supported.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        schemas = {
            "structured_outputs.json": outputs.json,
            "guided_json": self.guided_json,
            "json_schema": self.json_schema,
        }
        texts: list[tuple[str, GrammarKind, str | None]] = [
            ("structured_outputs.regex", "regex", outputs.regex),
            ("structured_outputs.choice", "choice", _encoded(outputs.choice)),
            ("structured_outputs.grammar", "lark", outputs.grammar),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", _encoded(self.guided_choice)),
            ("guided_grammar", "lark", self.guided_grammar),
            ("regex", "regex", self.regex),
            ("ebnf", "lark", self.ebnf),
        ]
        forms = [
            *_of_format(self.response_format),
            *(form for field, schema in schemas.items() for form in of_schema(field, schema)),
            *([AnswerForm("structured_outputs.json_object", Grammar("json_object"))] if outputs.json_object else []),
            *(AnswerForm(field, Grammar(kind, text)) for field, kind, text in texts if text),
        ]
        if len(forms) > 1:
            names = " and ".join(each.at for each in forms)
            raise ApiError(400, f"{names}: at most one of them may be set", param=forms[1].at)
        return forms[0] if forms else None


def _of_format(format: ResponseFormat | None) -> list[AnswerForm]:
    if format is None:
        return []
    if format.type not in _FORMATS:
        problem = f"must be one of {', '.join(map(repr, _FORMATS))}, got {format.type!r}"
        raise wrong("response_format.type", problem, "unsupported_parameter")
    inner = format.json_schema or JsonSchema()
    forms = [*of_schema(_SCHEMA, inner.schema), *of_schema("response_format.schema", format.schema)]
    if format.type == "json_object":
        return forms or [AnswerForm("response_format", Grammar("json_object"))]
    if format.type == "json_schema" and not forms:
        field = _SCHEMA.removesuffix(".schema") if format.json_schema is None else _SCHEMA
        raise wrong(field, "this field is required with type 'json_schema'")
    return forms if format.type == "json_schema" else []


def _encoded(choice: list[str] | None) -> str | None:
    return None if choice is None else msgspec.json.encode(choice).decode()


def of_schema(at: str, schema: Raw) -> list[AnswerForm]:
    """Returns the grammar of a schema as it stands in a body, at a path: an object, a boolean, or a text of either."""
    text = bytes(schema).decode()
    if text in ("", "null"):
        return []
    given = msgspec.json.decode(schema) if text.startswith('"') else text
    return [AnswerForm(at, Grammar("json_schema", closed_text(given)))]
