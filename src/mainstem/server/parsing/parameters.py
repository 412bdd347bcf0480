"""Parameters: arguments of calls that a model writes one by one, as text, and their values in JSON.

`<parameter=size>5</parameter>` may be a number or a text: the tool's schema decides. If it allows only texts, the value
is a text. If it allows other types, or says nothing, a value that can be read as one of them is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mainstem.server.parsing.repair import repaired

TEXT = frozenset(["string"])
"""The types of a parameter that is always a text."""

_ALL = frozenset(["string", "number", "integer", "boolean", "null", "object", "array"])
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as some templates write values
_DEPTH = 16  # of references


class Parameters:
    """The parameters of one tool.

    Args:
        schema: of the tool's arguments, which are an object.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema

    @property
    def names(self) -> Sequence[str]:
        """Those that the schema names, in its order."""
        return [*_mapping(self._schema.get("properties"))]

    @property
    def required(self) -> frozenset[str]:
        """Those that must be given."""
        required = self._schema.get("required")
        return frozenset(required if isinstance(required, list) else ())

    def schema(self, name: str) -> Mapping[str, Any]:
        """Returns the schema of a parameter, without references at its top; empty: it may be anything."""
        schema = _mapping(self._schema.get("properties")).get(name, self._schema.get("additionalProperties"))
        for _ in range(_DEPTH):
            reference = _mapping(schema).get("$ref")
            if not isinstance(reference, str):
                break
            schema = self._referred(reference)
        return _mapping(schema)

    def types(self, name: str) -> frozenset[str]:
        """Returns the types of JSON that a parameter may have."""
        return self._types(self.schema(name), _DEPTH)

    def value(self, name: str, text: str) -> str:
        """Returns the JSON of a parameter that is given as text."""
        types, spelled = self.types(name), text.strip()
        spelled = _PYTHON.get(spelled, spelled)
        if types != TEXT:
            try:
                spelled = repaired(spelled) if spelled[:1] in ("{", "[") else spelled
                kind = _type(json.loads(spelled, parse_constant=_refuse))
            except (ValueError, RecursionError):
                kind = "string"
            if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
                return spelled
        return json.dumps(text, ensure_ascii=False)

    def _referred(self, reference: str) -> Any:
        found: Any = self._schema if reference.startswith("#/") else None
        for part in reference.split("/")[1:]:
            found = _mapping(found).get(part.replace("~1", "/").replace("~0", "~"))
        return found

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or not depth:
            return _ALL
        if isinstance(reference := schema.get("$ref"), str):
            return self._types(self._referred(reference), depth - 1)
        types = _ALL
        if isinstance(named := schema.get("type"), str | list):
            types &= {named} if isinstance(named, str) else {*map(str, named)}
        if "const" in schema:
            types &= {_type(schema["const"])}
        if isinstance(values := schema.get("enum"), list):
            types &= {*map(_type, values)}
        for key in ("anyOf", "oneOf"):
            if isinstance(each := schema.get(key), list) and each:
                types &= frozenset[str]().union(*(self._types(one, depth - 1) for one in each))
        for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            types &= self._types(one, depth - 1)
        return types or _ALL


def written(text: Any) -> str:
    """Returns a value of JSON as it is written between tags: a text as it is, all else as JSON."""
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _type(value: Any) -> str:
    """Returns the type of a value, as schemas call it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = ((str, "string"), (int, "integer"), (float, "number"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "object")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
