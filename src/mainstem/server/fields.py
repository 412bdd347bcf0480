"""Which fields of a request are honoured, which change nothing, and which are refused.

    honoured          a field of the request's type
    without effect    on the answer (`WITHOUT_EFFECT`)
    refused           it would change the answer, and this server does not support it (`REFUSED`), unless its value is
                      one that asks for nothing
    unknown           refused, too: it may be a slip that would change the answer

Knows names and values, not what they mean.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

WITHOUT_EFFECT: Mapping[str, str] = {
    "user": "who asks",
    "safety_identifier": "who asks",
    "metadata": "notes of the client",
    "store": "whether OpenAI keeps the answer",
    "service_tier": "what OpenAI charges",
    "prediction": "text that OpenAI drafts from; drafts come from the cache and the prompt",
    "prompt_cache_key": "prefixes are found by their content",
    "prompt_cache_retention": "prefixes are kept while there is room",
    "parallel_tool_calls": "no tools are called",
    "request_id": "the header X-Request-Id names a request",
}
"""Fields that change no answer, and what they are."""

REFUSED: Mapping[str, tuple[object, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None, ""),
    "guided_choice": (None,),
    "guided_grammar": (None, ""),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "audio": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "prompt_cache_options": (None,),
    "suffix": (None, ""),
    "echo": (None, False),
    "prompt_logprobs": (None,),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
}
"""Fields that would change the answer and are not supported, with the values that ask for nothing."""


class Rules(NamedTuple):
    """What becomes of the fields of an API's requests that are not honoured, as `WITHOUT_EFFECT` and `REFUSED`."""

    without_effect: Mapping[str, str]
    refused: Mapping[str, tuple[object, ...]]


OPENAI = Rules(WITHOUT_EFFECT, REFUSED)
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
    for name, raw in msgspec.json.decode(body, type=dict[str, Raw]).items():
        if name in kind.__struct_fields__ or name in rules.without_effect:
            continue
        if name in rules.refused:
            _check_neutral(name, msgspec.json.decode(raw), rules.refused[name])
        else:
            known = [*kind.__struct_fields__, *rules.without_effect, *rules.refused]
            _unknown(name, f"unknown field{_nearest(name, known)}", tolerated)


def check_nested(body: bytes, request: Struct, tolerated: list[str] | None = None) -> None:
    """Checks the names inside the honoured fields of a body.

    Args:
        body: the JSON of an object.
        request: what was decoded from it; its types have a field for each name that is known.
        tolerated: the paths of unknown names are appended to it. None: they are refused.

    Raises:
        Refused: a name is unknown, and its value is not null.
    """
    given, known = msgspec.json.decode(body), msgspec.to_builtins(request)
    for name, value in given.items():
        for path in _strange(value, known.get(name), name):
            _unknown(path, "unknown field", tolerated)


def _strange(given: Any, known: Any, at: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            if name in known:
                yield from _strange(value, known[name], f"{at}.{name}")
            elif value is not None:
                yield f"{at}.{name}"
    elif isinstance(given, list) and isinstance(known, list):
        for i, pair in enumerate(zip(given, known, strict=True)):
            yield from _strange(*pair, f"{at}[{i}]")


def _unknown(name: str, problem: str, tolerated: list[str] | None) -> None:
    if tolerated is None:
        raise Refused(name, problem, "unknown_field")
    tolerated.append(name)


def _check_neutral(name: str, value: object, neutrals: tuple[object, ...]) -> None:
    if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in neutrals):
        return
    wanted = " or ".join(msgspec.json.encode(neutral).decode() for neutral in neutrals[1:])
    rest = f"omit it or use {wanted}" if wanted else "omit it"
    raise Refused(name, f"not supported; {rest}", "unsupported_parameter")


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {found[0]}?" if found else ""
