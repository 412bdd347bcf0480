"""Which fields of a request are honoured, which change nothing, and which are refused.

    honoured          a field of the request's type
    without effect    on the answer (`WITHOUT_EFFECT`)
    refused           it would change the answer, and this server does not support it (`REFUSED`), unless its value is
                      one that asks for nothing
    unknown           refused, too: it may be a slip that would change the answer

The same holds for what is inside: messages, parts of their content, calls, tools. Knows names and values,
not what they mean.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Raw, Struct

WITHOUT_EFFECT: Mapping[str, str] = {
    "user": "who asks",
    "safety_identifier": "who asks",
    "metadata": "notes of the client",
    "store": "whether OpenAI keeps the answer",
    "service_tier": "what OpenAI charges",
    "prediction": "text that OpenAI drafts from; drafts come from the cache and the prompt",
    "prompt_cache_retention": "a maximum; prefixes are kept while there is room",
    "request_id": "the header X-Request-Id names a request",
}
"""Fields that change no answer, and what they are."""

REFUSED: Mapping[str, tuple[object, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "audio": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "suffix": (None, ""),
    "spaces_between_special_tokens": (None, True),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
}
"""Fields that would change the answer and are not supported, with the values that ask for nothing."""


class Rules(NamedTuple):
    """What becomes of fields that are not honoured.

    Args:
        without_effect: as `WITHOUT_EFFECT`.
        refused: as `REFUSED`.
        inside: the same for the objects in a request, by the field that they are in.
    """

    without_effect: Mapping[str, str] = {}
    refused: Mapping[str, tuple[object, ...]] = {}
    inside: Mapping[str, Rules] = {}


OPENAI = Rules(
    WITHOUT_EFFECT,
    REFUSED,
    inside={
        "messages": Rules(
            {
                "annotations": "sources of an earlier answer",
                "parsed": "an earlier answer as an object of the client",
                "provider_specific_fields": "notes of the client",
            },
            {"audio": (None,), "function_call": (None,)},
        ),
        "content": Rules({}, dict.fromkeys(("input_audio", "file"), (None,))),
        "tool_calls": Rules({"index": "the place of a call in a stream"}),
    },
)
"""The rules of completions and chats."""


class Refused(Exception):
    """A field that is not accepted.

    Args:
        name: of the field.
        problem: what is wrong with it, and what is allowed.
        code: a stable word for programs.
    """

    def __init__(self, name: str, problem: str, code: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name, self.code = name, code


def check_fields(body: bytes, kind: type[Struct], tolerated: list[str] | None = None, rules: Rules = OPENAI) -> None:
    """Checks the names in a body, a JSON object, that a type has been decoded from.

    Args:
        body: the JSON.
        kind: the type; its fields are honoured.
        tolerated: unknown names are appended to it. None: they are refused.
        rules: of the API.

    Raises:
        Refused: a field is unknown, or is not supported and asks for something.
    """
    _check(body, kind, rules, "", tolerated)


def _check(body: bytes | Raw, kind: type[Struct], rules: Rules, at: str, tolerated: list[str] | None) -> None:
    inner = _structs(kind)
    for name, raw in msgspec.json.decode(body, type=dict[str, Raw]).items():
        if name in inner:
            within = rules.inside.get(name, Rules())._replace(inside=rules.inside)
            for path, each in _objects(raw, at + name):
                _check(each, inner[name], within, f"{path}.", tolerated)
        if name in kind.__struct_fields__ or name in rules.without_effect:
            continue
        if name in rules.refused:
            _check_neutral(at + name, msgspec.json.decode(raw), rules.refused[name])
        elif tolerated is None:
            known = (*kind.__struct_fields__, *rules.without_effect, *rules.refused)
            raise Refused(at + name, f"unknown field{_nearest(name, known)}", "unknown_field")
        else:
            tolerated.append(at + name)


@cache
def _structs(kind: type[Struct]) -> dict[str, type[Struct]]:
    """Returns the fields that hold objects of a type, or lists of them."""
    return {name: found for name, hint in get_type_hints(kind).items() if (found := _struct_in(hint))}


def _struct_in(hint: Any) -> type[Struct] | None:
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    return next((found for part in get_args(hint) if (found := _struct_in(part))), None)


def _objects(raw: Raw, at: str) -> Iterable[tuple[str, Raw]]:
    """Yields the objects in a value that is one, or a list of them, with their paths."""
    first = bytes(raw)[:1]
    if first == b"{":
        yield at, raw
    elif first == b"[":
        for i, each in enumerate(msgspec.json.decode(raw, type=list[Raw])):
            yield from _objects(each, f"{at}[{i}]")


def _check_neutral(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in allowed):
        return
    wanted = " or ".join(msgspec.json.encode(neutral).decode() for neutral in allowed[1:])
    rest = f"omit it or use {wanted}" if wanted else "omit it"
    raise Refused(name, f"not supported; {rest}", "unsupported_parameter")


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""
