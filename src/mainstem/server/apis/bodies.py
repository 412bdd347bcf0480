"""The bodies of requests: JSON as typed structs, and errors that name the field by its path in the body."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Struct

from mainstem.server.errors import ApiError, wrong
from mainstem.server.fields.rules import OPENAI, Rules, Unheeded, check_fields

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Decoded = TypeVar("Decoded", bound=Struct)


def decode(body: bytes, kind: type[Decoded]) -> Decoded:
    """Parses a body of any kind.

    Raises:
        ApiError: 400; malformed JSON, or a wrong type or value.
    """
    with _malformed():
        body.decode()  # msgspec checks no text of fields that it skips or keeps raw
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            raise _field_error(str(error), "", kind.__struct_fields__) from None


def decode_known(body: bytes, kind: type[Decoded], unheeded: Unheeded | None = None, rules: Rules = OPENAI) -> Decoded:
    """Parses a body of any kind, and checks the names of its fields; see `check_known`."""
    request = decode(body, kind)
    check_known(body, kind, unheeded, rules)
    return request


def check_known(body: bytes, kind: type[Struct], unheeded: Unheeded | None, rules: Rules = OPENAI) -> None:
    """Checks the names of the fields of a body, by an API's rules; see `fields.check_fields`.

    Raises:
        ApiError: 400; a field is unknown or not supported.
    """
    with _malformed():
        check_fields(body, kind, rules, Unheeded() if unheeded is None else unheeded)


def check_value(value: object, kind: Any, at: str) -> None:
    """Checks a value that a body has at a path, as `decode` would where a field has this type.

    Raises:
        ApiError: 400; it is of another type, or outside of its range.
    """
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), at) from None


def subset(name: str, kind: type[Struct], fields: Sequence[str], says: str, **defaults: Any) -> type[Struct]:
    """Returns a type with some of the fields of another; `defaults`: of fields that are required there."""
    hints = get_type_hints(kind, include_extras=True)
    chosen = []
    for field in msgspec.structs.fields(kind):
        if field.name in fields:
            default = defaults.get(field.name, field.default)
            chosen.append(
                (field.name, hints[field.name]) if field.required and field.name not in defaults
                else (field.name, hints[field.name], default)
            )  # fmt: skip
    return msgspec.defstruct(name, chosen, kw_only=True, module=kind.__module__, namespace={"__doc__": says})


def prompts_of(given: str | list[str | int | list[int]], name: str) -> list[str | list[int]]:
    """Returns the prompts in a field, each as text or token ids.

    Raises:
        ApiError: 400; the list is empty, or mixes texts and ids.
    """
    if isinstance(given, str):
        return [given]
    kinds = {type(part) for part in given}
    if kinds == {int}:
        return [given]  # type: ignore[list-item]
    if kinds not in ({str}, {list}):
        allowed = "a string, or a list of strings, of token ids, or of lists of token ids; a list must not be empty"
        raise wrong(name, f"must be {allowed}")
    return list(given)  # type: ignore[arg-type]


@contextmanager
def _malformed() -> Iterator[None]:
    """Turns errors of malformed JSON into an ApiError; parts of a body are read only when names are checked."""
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The JSON of the body is nested too deeply", code="invalid_json") from None


def _field_error(message: str, at: str, fields: Sequence[str] = ()) -> ApiError:
    """Splits msgspec's `Expected ... - at `$.messages[0].role``, because clients want the path in `param`.

    Args:
        message: of msgspec.
        at: the path of what it has read.
        fields: of a whole body, for an unknown one.
    """
    problem, _, path = message.partition(" - at ")
    at += path.strip("`").removeprefix("$") if at else path.strip("`").removeprefix("$").lstrip(".")
    missing = re.search(r"missing required field `(\w+)`", problem)
    if missing:
        at = f"{at}.{missing[1]}".lstrip(".")
        problem = "this field is required"
    named = re.match(r"`([^`]+)`: (.*)", problem, re.DOTALL)
    if named:
        at, problem = f"{at}.{named[1]}".lstrip("."), named[2]
    unknown = re.search(r"unknown field `(.*)`", problem)
    if unknown:
        inside = f"{at}." if at else ""
        problem = "unknown field" + ("" if inside else f"; this route has {', '.join(fields)}")
        at = inside + unknown[1]
    return ApiError(400, f"{at or 'body'}: {problem[0].lower()}{problem[1:]}", param=at or None)
