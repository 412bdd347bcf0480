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
from collections.abc import Iterable, Mapping

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


def check_fields(body: bytes, kind: type[Struct], tolerated: list[str] | None = None) -> None:
    """Checks the names in a body, a JSON object, that a type has been decoded from.

    Args:
        body: the JSON.
        kind: the type; its fields are honoured.
        tolerated: unknown names are appended to it. None: they are refused.

    Raises:
        Refused: a field is unknown, or is not supported and asks for something.
    """
    for name, raw in msgspec.json.decode(body, type=dict[str, Raw]).items():
        if name in kind.__struct_fields__ or name in WITHOUT_EFFECT:
            continue
        if name in REFUSED:
            _check_neutral(name, msgspec.json.decode(raw))
        elif tolerated is None:
            raise Refused(name, f"unknown field{_nearest(name, kind.__struct_fields__)}", "unknown_field")
        else:
            tolerated.append(name)


def _check_neutral(name: str, value: object) -> None:
    if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in REFUSED[name]):
        return
    wanted = " or ".join(msgspec.json.encode(neutral).decode() for neutral in REFUSED[name][1:])
    rest = f"omit it or use {wanted}" if wanted else "omit it"
    raise Refused(name, f"not supported; {rest}", "unsupported_parameter")


def _nearest(name: str, honoured: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, [*honoured, *WITHOUT_EFFECT, *REFUSED], 1)
    return f"; did you mean {found[0]}?" if found else ""
