"""Each field of a request is honoured, advice, refused, or unknown.

    honoured   a field of the request's type
    advice     it can make an answer better, cheaper, or accounted for otherwise, and never another kind of answer:
               taken whatever its value is, and named as ignored unless it asks for nothing
    refused    the answer would be of another kind, which this server does not give; unless it asks for nothing
    unknown    refused, too: it may be a slip that would change the answer. A tolerant server takes it and names it

The same holds for what is inside: messages, parts of their content, calls, tools. Knows names and values,
not what they mean.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints
from urllib.parse import quote

import msgspec
from msgspec import Raw, Struct

from mainstem.server.errors import wrong
from mainstem.server.fields.tools import is_hosted

IGNORED_HEADER, UNKNOWN_HEADER = "X-Mainstem-Ignored", "X-Mainstem-Unknown-Fields"
_MOST_NAMED = 1024  # characters of a header


class Field(NamedTuple):
    """A field that is not honoured.

    Args:
        why: what the field is, or what it would do; the reason for its class.
        neutral: values that ask for nothing, as null does.
        code: of the error, where the field is refused.
    """

    why: str
    neutral: tuple[object, ...] = ()
    code: str = "unsupported_parameter"

    def asks(self, value: object) -> bool:
        """Returns whether a value asks for something; false is not 0."""
        neutral = (None, *self.neutral)
        return not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


class Rules(NamedTuple):
    """The fields that are not honoured: which are ignored, and which are refused.

    Args:
        advice: the fields that are taken and ignored, by name.
        refused: those that are not taken.
        inside: the same for the objects in a request, by the field that they are in.
        left_out: whether objects of a type are left out as a whole, and named as ignored.
    """

    advice: Mapping[str, Field] = {}
    refused: Mapping[str, Field] = {}
    inside: Mapping[str, Rules] = {}
    left_out: Callable[[str], bool] = lambda _: False


_EARLIER = Field("of an earlier answer")
_OF_THE_CLIENT = Field("a note of the client")
_ASKER = Field("who asks")

THINKING = Rules(
    {
        "budget_tokens": Field("a limit of thinking"),
        "display": Field("whether thoughts are shown; they always are", ("summarized",)),
        "block_binding": Field("how Anthropic checks earlier thoughts"),
    }
)
"""The rules of `thinking`, in all APIs that have it."""

CACHE_CONTROL = Rules({"scope": Field("who else may share the prefix; the server's keys say so", ("organization",))})
"""The rules of `cache_control`, in all APIs that have it."""

OPENAI = Rules(
    advice={
        "user": _ASKER,
        "safety_identifier": _ASKER,
        "service_tier": Field("what OpenAI charges", ("auto", "default")),
        "prediction": Field("text to draft from; drafts come from the cache and the prompt"),
        "prompt_cache_retention": Field("a maximum; prefixes are kept while there is room"),
        "request_id": Field("the header X-Request-Id names a request"),
        "verbosity": Field("how long an answer should be", ("medium",)),
        "moderation": Field("a check of the answer by another model"),
    },
    refused={
        "functions": Field("another form of `tools`, and of the answer", ([],)),
        "function_call": Field("another form of `tool_choice`, and of the answer", ("none", "auto")),
        "modalities": Field("an answer that is not text", (["text"],)),
        "audio": Field("an answer that is sound"),
        "web_search_options": Field("an answer from a search that OpenAI makes"),
        "suffix": Field("an answer that fits between two texts", ("",)),
        "spaces_between_special_tokens": Field("other spaces in the answer", (True,)),
        "use_beam_search": Field("the answers of a beam search", (False,)),
        "length_penalty": Field("the order of a beam search", (1,)),
    },
    inside={
        "messages": Rules(
            {
                **dict.fromkeys(("annotations", "parsed", "thinking_blocks", "reasoning_details"), _EARLIER),
                "provider_specific_fields": _OF_THE_CLIENT,
                "extra_content": _OF_THE_CLIENT,
            },
            {
                "audio": Field("an earlier answer that was sound"),
                "function_call": Field("another form of `tool_calls`"),
            },
        ),
        "content": Rules(refused=dict.fromkeys(("input_audio", "file"), Field("a prompt that is no text"))),
        "image_url": Rules({"detail": Field("how closely to look; the model's processor decides", ("auto",))}),
        "tool_calls": Rules(
            {"index": _EARLIER, "provider_specific_fields": _OF_THE_CLIENT, "extra_content": _OF_THE_CLIENT}
        ),
        "function": Rules({"parsed_arguments": _EARLIER}),
        "stream_options": Rules({"include_obfuscation": Field("pads chunks at OpenAI", (False,))}),
        "thinking": THINKING,
        "tools": Rules(left_out=is_hosted),
        "cache_control": CACHE_CONTROL,
    },
)
"""The rules of chats."""

OF_CHATS = {"metadata": _OF_THE_CLIENT, "store": Field("whether the answer is kept: that of a chat is", (False,))}
COMPLETIONS = OPENAI._replace(advice={**OPENAI.advice, **OF_CHATS})
"""The rules of completions."""


@dataclass(slots=True)
class Unheeded:
    """The fields of one request that have no effect, by their paths in its body.

    Args:
        tolerant: whether unknown fields are taken; else they are refused.
        ignored: those that are advice, and ask for something.
        unknown: those that the server does not know.
    """

    tolerant: bool = False
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a response that name them; as many as there is room for, those of the whole request first."""
        lists = ((IGNORED_HEADER, self.ignored), (UNKNOWN_HEADER, self.unknown))
        return {header: _listed(names) for header, names in lists if names}

    @property
    def kinds(self) -> set[str]:
        """The ignored fields without indices."""
        return {re.sub(r"\[\d+\]", "[]", name) for name in self.ignored}


def _listed(names: Iterable[str]) -> str:
    text = ", ".join(quote(name, "[]") for name in sorted(names, key=lambda name: name.count("[")))
    return (
        text if len(text) <= _MOST_NAMED else f"{text[: _MOST_NAMED - 3].rpartition(', ')[0]}, ...".removeprefix(", ")
    )


def check_fields(body: bytes | Raw, kind: type[Struct], rules: Rules, unheeded: Unheeded, at: str = "") -> None:
    """Checks the names in a body, a JSON object, that a type has been decoded from.

    Args:
        body: the JSON.
        kind: the type; its fields are honoured.
        rules: of the API.
        unheeded: names of fields that do nothing are added to it.
        at: what stands before the names: the path of an object in a body, and a dot.

    Raises:
        ApiError: 400; a field is unknown and such are not tolerated, or is not supported and asks for something.
    """
    inner = _structs(kind)
    for name, raw in msgspec.json.decode(body, type=dict[str, Raw]).items():
        if name in inner:
            within = rules.inside.get(name, Rules())._replace(inside=rules.inside)
            for path, each in _objects(raw, at + name):
                if within.left_out(msgspec.json.decode(each, type=_Typed).type):
                    unheeded.ignored.append(path)
                else:
                    check_fields(each, inner[name], within, unheeded, f"{path}.")
        if name in kind.__struct_fields__:
            continue
        known = rules.advice.get(name) or rules.refused.get(name)
        if known is None:
            _take_unknown(at, name, (*kind.__struct_fields__, *rules.advice, *rules.refused), unheeded)
        elif known.asks(msgspec.json.decode(raw)):
            if name in rules.refused:
                raise wrong(at + name, _problem(known), known.code)
            unheeded.ignored.append(at + name)


class _Typed(Struct):
    """Any object; only its type is read."""

    type: Any = ""


def _take_unknown(at: str, name: str, known: Iterable[str], unheeded: Unheeded) -> None:
    if not unheeded.tolerant:
        raise wrong(at + name, f"unknown field{_nearest(name, known)}", "unknown_field")
    unheeded.unknown.append(at + name)


@cache
def _structs(kind: type[Struct]) -> dict[str, type[Struct]]:
    """Returns the fields that hold objects of a type, or lists of them."""
    return {name: struct for name, hint in get_type_hints(kind).items() if (struct := _struct_in(hint))}


def _struct_in(hint: Any) -> type[Struct] | None:
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    return next((struct for part in get_args(hint) if (struct := _struct_in(part))), None)


def _objects(raw: Raw, at: str) -> Iterable[tuple[str, Raw]]:
    """Yields the objects in a value that is one, or a list of them, with their paths."""
    first = bytes(raw)[:1]
    if first == b"{":
        yield at, raw
    elif first == b"[":
        for i, each in enumerate(msgspec.json.decode(raw, type=list[Raw])):
            yield from _objects(each, f"{at}[{i}]")


def _problem(refused: Field) -> str:
    wanted = " or ".join(msgspec.json.encode(neutral).decode() for neutral in refused.neutral)
    rest = f"omit it or use {wanted}" if wanted else "omit it"
    return f"not supported; {rest} ({refused.why})"


_SAME: Sequence[Sequence[str]] = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict", "n_predict"),
    ("min_tokens", "min_new_tokens"),
    ("messages", "input", "prompt"),
    ("system", "instructions"),
    ("stop", "stop_sequences", "stop_strings"),
    ("response_format", "text", "output_config"),
    ("reasoning_effort", "reasoning", "thinking"),
    ("repetition_penalty", "repeat_penalty"),
    ("seed", "random_seed"),
    ("parameters", "input_schema"),
    ("tool_call_id", "tool_use_id", "call_id"),
    ("n", "best_of", "num_return_sequences"),
    ("prompt_cache_breakpoint", "cache_control"),
)
"""The names of one field in different APIs."""


def _nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint at the field that was meant: by another API's name for it, or by a slip."""
    known = list(known)
    others = next((group for group in _SAME if name in group), ())
    near = [each for each in others if each in known] or difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""
