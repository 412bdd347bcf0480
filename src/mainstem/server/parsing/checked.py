"""Checks of calls whose schema, or form of a text, no grammar can hold in full: a call that does not fit is logged.

The schemas come from clients, so a check takes a bounded number of steps, fetches nothing, and runs no expression:
`pattern` and `format` are not checked. A call is logged only if it is certainly wrong.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from mainstem.server.parsing.output import Arguments, Call, NoCall, OutputParser, Piece

log = logging.getLogger(__name__)

_SHOWN = 200  # characters of a call that does not fit
_STEPS = 200_000  # of one check: keywords, their parts, and the parts of the values that are compared with them

Fits: TypeAlias = bool | None
"""Whether a value fits; None: it is unknown."""

Check: TypeAlias = Callable[[str], Fits]
"""Says whether the arguments of a call, as a client gets them, fit."""


class Checked:
    """An `OutputParser` that checks the calls of some tools once they are complete. It shows all as it is.

    Args:
        parser: finds the calls.
        checks: of the tools' arguments, by their names.
    """

    def __init__(self, parser: OutputParser, checks: Mapping[str, Check]) -> None:
        self._parser, self._checks = parser, checks
        self._calls: dict[int, tuple[str, list[str]]] = {}

    def feed(self, text: str) -> Sequence[Piece]:
        """See `OutputParser.feed`."""
        return [*self._noted(self._parser.feed(text))]

    def close(self, cut: bool = False) -> Sequence[Piece]:
        """See `OutputParser.close`."""
        pieces = [*self._noted(self._parser.close(cut))]
        complete = list(self._calls.values())
        for name, arguments in complete[:-1] if cut else complete:
            given = "".join(arguments)
            if self._checks[name](given) is False:
                shown = given if len(given) <= _SHOWN else given[:_SHOWN] + "…"
                log.warning("a call of the tool %s is not what it takes: %s", name, shown)
        return pieces

    def _noted(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if isinstance(piece, Call) and piece.name in self._checks:
                self._calls[piece.number] = piece.name, []
            elif isinstance(piece, Arguments) and piece.number in self._calls:
                self._calls[piece.number][1].append(piece.text)
            elif isinstance(piece, NoCall):
                self._calls.pop(piece.number, None)
            yield piece


def by_schema(schema: Mapping[str, Any]) -> Check:
    """Returns the check of arguments in JSON by a schema; those that are no JSON were cut off."""

    def check(arguments: str) -> Fits:
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        return fits(schema, value)

    return check


def fits(schema: Mapping[str, Any], value: Any) -> Fits:
    """Returns whether a value, as Python reads JSON, fits a schema."""
    try:
        return _Judge(schema).fits(schema, value)
    except RecursionError:
        return None


class _Judge:
    """Compares values with the parts of one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._steps = root, _STEPS

    def fits(self, schema: Any, value: Any) -> Fits:
        self._steps -= 1
        if isinstance(schema, bool):
            return schema
        return _all(self._rule(name, schema, value) for name in schema) if isinstance(schema, dict) else None

    def referred(self, reference: Any) -> Any:
        found: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            found = found[part.replace("~1", "/").replace("~0", "~")]
        return found if reference.startswith("#") else None

    def _rule(self, name: str, schema: Mapping[str, Any], value: Any) -> Fits:
        kind, rule = _RULES.get(name, (object, None))
        self._steps -= 1 + _size(schema[name]) + _size(value)
        if rule is None or self._steps < 0:
            return True if name in _SILENT else None
        if not isinstance(value, kind) or (kind == _NUMBER and isinstance(value, bool)):
            return True  # a keyword says nothing of other types
        try:
            return rule(self, schema[name], value, schema)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):
            return None  # it is no schema


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, dict)) else 1


def _all(each: Iterable[Fits]) -> Fits:
    results = {*each}
    return False if False in results else None if None in results else True


def _not(result: Fits) -> Fits:
    return None if result is None else not result


def _any(each: Iterable[Fits]) -> Fits:
    return _not(_all(map(_not, each)))


def _number_of(each: Iterable[Fits], least: float, most: float) -> Fits:
    """Returns whether so many are true."""
    results = [*each]
    sure, possible = results.count(True), results.count(True) + results.count(None)
    return False if sure > most or possible < least else True if least <= sure and possible <= most else None


def _spelled(value: Any) -> str:
    """Returns the same text for equal values: 1 is 1.0, and not true."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    """Returns a value whose whole numbers are integers."""
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value % 1 == 0 else value


def _is(value: Any, type: str) -> bool:
    if type == "integer":
        return isinstance(value, _NUMBER) and not isinstance(value, bool) and value % 1 == 0
    if type == "number":
        return isinstance(value, _NUMBER) and not isinstance(value, bool)
    kinds = {"string": str, "boolean": bool, "null": _NONE, "object": dict, "array": list}
    return isinstance(value, kinds[type])


def _items(judge: _Judge, said: Any, value: list[Any], schema: Mapping[str, Any]) -> Fits:
    if isinstance(said, list):
        return _all(judge.fits(*pair) for pair in zip(said, value, strict=False))
    return _all(judge.fits(said, each) for each in value[len(schema.get("prefixItems", ())) :])


def _others(judge: _Judge, said: Any, value: dict[str, Any], schema: Mapping[str, Any]) -> Fits:
    others = [each for name, each in value.items() if name not in schema.get("properties", {})]
    return _all(judge.fits(said, each) for each in others) if "patternProperties" not in schema or not others else None


def _condition(judge: _Judge, said: Any, value: Any, schema: Mapping[str, Any]) -> Fits:
    result = judge.fits(said, value)
    return None if result is None else judge.fits(schema.get("then" if result else "else", True), value)


_NUMBER, _NONE = (int, float), type(None)
_SILENT = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment",
     "$defs", "definitions", "then", "else", "minContains", "maxContains")
)  # fmt: skip
"""Keywords that require nothing by themselves."""
_Rule: TypeAlias = Callable[[_Judge, Any, Any, Mapping[str, Any]], Fits]
_RULES: dict[str, tuple[Any, _Rule]] = {
    "type": (object, lambda j, s, v, _: any(_is(v, each) for each in ([s] if isinstance(s, str) else s))),
    "enum": (object, lambda j, s, v, _: _spelled(v) in map(_spelled, s)),
    "const": (object, lambda j, s, v, _: _spelled(v) == _spelled(s)),
    "$ref": (object, lambda j, s, v, _: j.fits(j.referred(s), v)),
    "allOf": (object, lambda j, s, v, _: _all(j.fits(each, v) for each in s)),
    "anyOf": (object, lambda j, s, v, _: _any(j.fits(each, v) for each in s)),
    "oneOf": (object, lambda j, s, v, _: _number_of((j.fits(each, v) for each in s), 1, 1)),
    "not": (object, lambda j, s, v, _: _not(j.fits(s, v))),
    "if": (object, _condition),
    "properties": (dict, lambda j, s, v, _: _all(j.fits(s[name], v[name]) for name in s if name in v)),
    "additionalProperties": (dict, _others),
    "propertyNames": (dict, lambda j, s, v, _: _all(j.fits(s, name) for name in v)),
    "required": (dict, lambda j, s, v, _: {*s} <= v.keys()),
    "dependentRequired": (dict, lambda j, s, v, _: all({*s[name]} <= v.keys() for name in s if name in v)),
    "dependentSchemas": (dict, lambda j, s, v, _: _all(j.fits(s[name], v) for name in s if name in v)),
    "minProperties": (dict, lambda j, s, v, _: len(v) >= s),
    "maxProperties": (dict, lambda j, s, v, _: len(v) <= s),
    "items": (list, _items),
    "prefixItems": (list, lambda j, s, v, _: _all(j.fits(*pair) for pair in zip(s, v, strict=False))),
    "contains": (list, lambda j, s, v, c: _number_of(
        (j.fits(s, each) for each in v), c.get("minContains", 1), c.get("maxContains", len(v))
    )),
    "uniqueItems": (list, lambda j, s, v, _: s is False or len({*map(_spelled, v)}) == len(v)),
    "minItems": (list, lambda j, s, v, _: len(v) >= s),
    "maxItems": (list, lambda j, s, v, _: len(v) <= s),
    "minLength": (str, lambda j, s, v, _: len(v) >= s),
    "maxLength": (str, lambda j, s, v, _: len(v) <= s),
    "minimum": (_NUMBER, lambda j, s, v, _: v >= s),
    "maximum": (_NUMBER, lambda j, s, v, _: v <= s),
    "exclusiveMinimum": (_NUMBER, lambda j, s, v, _: v > s),
    "exclusiveMaximum": (_NUMBER, lambda j, s, v, _: v < s),
}  # fmt: skip
"""Keywords: the types of values that they apply to, and the check of a value."""
