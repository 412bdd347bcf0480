"""JSON schemas as models are held to them: an object has the properties that its schema names, and no others.

The schema of a tool that is not strict is held as far as a grammar can hold it: `holdable` leaves out the rest.

By the standard, a schema that does not mention other properties allows them, and a model then makes some up. Most
authors of schemas mean that there are none, and most servers that hold a model to a schema read it so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

_LONGEST = 1 << 18  # characters; longer ones are refused when they are compiled
_OTHERS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties", *_DEFINITIONS)
_PARTS = ("items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf")
_ALSO = ("properties", "$ref", "anyOf", "oneOf")
_BEYOND = ("not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties", "$dynamicRef")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema whose objects, at any depth, have only the properties that it names.

    An object stays open where its schema says something of others, or requires one that it does not name. So does what
    is put together of several schemas, and all that is in these: each names a part.
    """
    whole = all(_speakers(each) < 2 for each in _all(schema))
    made: dict[str, Any] = _closed(schema, alone=True, whole=whole)
    return made


@lru_cache(maxsize=16)
def closed_text(text: str) -> str:
    """Returns a schema in JSON, closed as by `closed`; a text that is no schema stays as it is."""
    if len(text) > _LONGEST:
        return text
    try:
        schema = msgspec.json.decode(text)
        made = closed(schema) if isinstance(schema, dict) else schema
    except (msgspec.DecodeError, RecursionError):
        return text
    return text if made == schema else msgspec.json.encode(made).decode()


def _closed(schema: Any, alone: bool, whole: bool) -> Any:
    """Closes a schema if it alone (`alone`) describes a value; `whole`: whether definitions always do."""
    if not isinstance(schema, dict):
        return schema
    alone = alone and _speakers(schema) < 2

    def within(name: str) -> Callable[[Any], Any]:
        return lambda part: _closed(part, whole if name in _DEFINITIONS else alone, whole)

    made = {name: _mapped(name, value, within(name)) for name, value in schema.items()}
    return {**made, "additionalProperties": False} if alone and _names_all(made) else made


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Returns whether a schema names all properties that it says something of."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or any(name in schema for name in _OTHERS):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _mapped(name: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the value of a keyword with the schemas in it changed."""
    if name in _NAMED and isinstance(value, dict):
        return {key: change(part) for key, part in value.items()}
    if name in _PARTS:
        return [change(part) for part in value] if isinstance(value, list) else change(value)
    return value


def _all(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema, and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    parts: list[Any] = []
    for name, value in schema.items():
        _mapped(name, value, parts.append)
    for part in parts:
        yield from _all(part)


def _speakers(schema: Mapping[str, Any]) -> int:
    """Returns how many parts of a schema name properties of an object; 2 or more if they cannot be told apart."""
    several = schema.get("allOf")
    joined = len(several) if isinstance(several, list) else 0
    beyond = 2 * any(name in schema for name in _BEYOND)
    return joined + beyond + sum(name in schema for name in _ALSO)


_SURE = frozenset(
    ("type", "properties", "required", "items", "prefixItems", "additionalProperties", "enum", "const", "default",
     "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
     "title", "description", "examples", "$schema", "$id", "$comment", *_DEFINITIONS)
)  # fmt: skip
"""Keywords that every grammar holds, or that ask for nothing."""

_TRIALS = 200  # of one schema


class _Keyword(NamedTuple):
    """A keyword that a grammar may not hold, the schema that it was taken from, and its value."""

    schema: dict[str, Any]
    name: str
    value: Any


def holdable(
    schema: Mapping[str, Any], problem: Callable[[Mapping[str, Any]], str]
) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Returns what a grammar can hold of a schema of an object, and the keywords that it leaves out.

    A `oneOf` that cannot be held becomes an `anyOf`. If a keyword is left out that may name properties, the object
    stays open to properties that it does not name.

    Args:
        schema: of the object.
        problem: returns why a grammar cannot hold a schema; empty: it can.
    """
    if not problem(schema):
        return schema, ()
    made = deepcopy(dict(schema))
    doubtful = [_Keyword(part, name, part[name]) for part in [*_all(made)] for name in part if name not in _SURE]
    doubtful.sort(key=lambda each: each.name != "$ref")  # definitions without a reference are not tried
    for part, name, _ in doubtful:
        del part[name]
    if problem(made):
        return {"type": "object"}, ["all of it"]
    trial = _Trial(made, problem)
    trial.put_back(doubtful)
    return made, sorted({*trial.left_out})


class _Trial:
    """Puts keywords back into a schema, as many as a grammar can hold."""

    def __init__(self, schema: Mapping[str, Any], problem: Callable[[Mapping[str, Any]], str]) -> None:
        self._schema, self._problem, self._trials = schema, problem, 0
        self.left_out: list[str] = []

    def put_back(self, keywords: Sequence[_Keyword]) -> None:
        """Puts keywords back, those of a schema before those inside it."""
        if not keywords:
            return
        for part, name, value in keywords:
            part[name] = value
        if self._fits():
            return
        for part, name, _ in keywords:
            del part[name]
        if len(keywords) == 1:
            self._leave_out(keywords[0])
            return
        middle = len(keywords) // 2
        self.put_back(keywords[:middle])
        self.put_back(keywords[middle:])

    def _leave_out(self, keyword: _Keyword) -> None:
        part, name, value = keyword
        self.left_out.append(name)
        if name == "oneOf" and "anyOf" not in part:
            part["anyOf"] = value
            if self._fits():
                return
            del part["anyOf"]
        if name in (*_BEYOND, *_ALSO, "allOf", "then", "else"):
            part.setdefault("additionalProperties", True)

    def _fits(self) -> bool:
        self._trials += 1
        return self._trials <= _TRIALS and not self._problem(self._schema)
