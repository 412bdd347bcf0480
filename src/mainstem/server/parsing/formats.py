"""Formats: how models write calls, and the grammars that hold a model to them.

A `CallFormat` is one way to write calls. Its texts `call` and `parameter` are the templates for everything that is
written: the grammars of calls that are required or strict, and the example for a model whose chat template knows no
tools.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mainstem.server.fields.schemas import closed
from mainstem.server.fields.tools import Tool, Tooling
from mainstem.server.parsing.custom import AROUND, TextInputs, held
from mainstem.server.parsing.output import OutputParser
from mainstem.server.parsing.parameters import Parameters, written
from mainstem.server.parsing.reasoning import Thinking
from mainstem.server.parsing.scanners import (
    CallScanner,
    DeepSeekScanner,
    HarmonyScanner,
    HermesScanner,
    JsonScanner,
    Llama3Scanner,
    MistralScanner,
)
from mainstem.server.parsing.tagged import Glm45Scanner, Qwen3CoderScanner

MAX_FORCED = 16
"""Maximum number of calls of an answer that must call tools, since a weak model may find no end."""

_NAME, _ARGUMENTS, _KEY, _VALUE = "%name%", "%arguments%", "%key%", "%value%"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls.

    Args:
        scanner: finds calls.
        call: how one is written, with `%name%` and `%arguments%`.
        between: what is between two calls.
        opening, closing: what is around all.
        parameter: how one argument is written, with `%key%` and `%value%`; empty: all of them are one JSON object.
        text: what is before a text.
        thinking: how thoughts are marked, if the scanner finds them, too: then it reads every answer.
        markers: texts that may be special tokens.
        signs: texts that together tell models with this format from others; none: the first marker.
        id_length: the ids of calls have so many letters and digits, since templates insist on it; None: any.
    """

    scanner: type[CallScanner]
    call: str
    between: str = "\n"
    opening: str = ""
    closing: str = ""
    parameter: str = ""
    text: str = ""
    thinking: Thinking | None = None
    markers: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    id_length: int | None = None

    def parser(self, tooling: Tooling, name: str | None = None) -> OutputParser:
        """Returns a parser of one answer.

        Args:
            tooling: the tools of the request.
            name: of the answer, unique: the ids of its calls follow from it, so that another engine gives the same.
                None: they are random.
        """
        unique, numbers = name or secrets.token_hex(16), itertools.count()
        made = self.scanner(tooling, lambda: self._id_of(f"{unique} {next(numbers)}"))
        custom = frozenset(tool.name for tool in tooling.callable if tool.custom)
        return TextInputs(made, custom) if custom else made

    def fits(self, place: Container[str]) -> bool:
        """Returns whether a chat template, or a vocabulary, is that of a model with this format."""
        signs = self.signs or self.markers[:1]
        return bool(signs) and all(sign in place for sign in signs)

    def _id_of(self, name: str) -> str:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return f"call_{digest[:24]}" if self.id_length is None else digest[: self.id_length]

    def accepted_id(self, given: str) -> str:
        """Returns a client's id of a call in a form that templates take; the same one for the same id."""
        if self.id_length is None or (len(given) == self.id_length and given.isalnum()):
            return given
        return self._id_of(given)

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Returns calls as the model writes them, each given as a name and its arguments in JSON."""
        texts = [
            _filled(self.call, {_NAME: name, _ARGUMENTS: self._written_arguments(arguments)})
            for name, arguments in calls
        ]
        return self.opening + self.between.join(texts) + self.closing

    def _written_arguments(self, arguments: str) -> str:
        given = _object(arguments) if self.parameter else None
        if given is None:
            return arguments
        return "".join(_filled(self.parameter, {_KEY: key, _VALUE: written(value)}) for key, value in given.items())

    def grammar(self, tooling: Tooling, special: Mapping[str, int], loose: Container[str] = ()) -> str:
        """Returns the rules of answers that are calls of the tools that may be called; the first one is `calls`.

        Args:
            tooling: the tools.
            special: the ids of markers that are special tokens. Other markers are text.
            loose: names of tools whose arguments may be any object.

        Returns:
            Rules in the dialect of Lark that llguidance reads.
        """
        rules = [
            f"calls: {self._sequence(self.opening, 'call', tooling, special)}",
            f"call: {self._alternatives(self.call, tooling, special)}",
        ]
        for i, tool in enumerate(tooling.callable):
            if self.parameter:
                rules += _Tagged(self.parameter, special).rules(f"arguments_{i}", tool, tool.name in loose)
            else:
                rules.append(f"arguments_{i}: {_json_arguments(tool, loose)}")
        if self.parameter:
            rules += _Tagged(self.parameter, special).common()
        return "\n".join(rules)

    def offer(self, tooling: Tooling, special: Mapping[str, int], never: str = "") -> str:
        """Returns the rules of answers that may call tools: text, or calls after it; the first one is `offer`.

        From where calls begin, the arguments of strict tools fit their schemas, and those of others are any object. No
        text has what begins a call.

        Args:
            tooling: the tools.
            special: see `grammar`.
            never: what a text does not begin with, after white space; empty: anything.
        """
        loose = {tool.name for tool in tooling.callable if not tool.strict}
        begins, banned = self.scanner.begins, list[str]()
        rules, starts = [self.grammar(tooling, special, loose)], [f"{terms(self.text, special)} TEXT"]
        if begins:
            rules.append(f"MARKED: {ANY} ({' | '.join(map(_quoted, begins))}) {ANY}")
            banned.append("MARKED")
        if begins and (self.opening + self.call).startswith(begins[0]) and not self.text:
            opening = self.opening.removeprefix(begins[0])
            call = self.call if self.opening else self.call.removeprefix(begins[0])
            starts.append(f"said {self._sequence(opening, 'first', tooling, special)}")
            rules += [upto("said", "TEXT", begins[0], special), f"first: {self._alternatives(call, tooling, special)}"]
        else:
            starts.append("calls")
            if not self.text:
                rules.append(f"CALLED: {_BEGINS_OBJECT} {ANY}")
                banned.append("CALLED")
                if begins:
                    starts.append("said calls")
                    rules.append(upto("said", "TEXT", begins[0], special))
        if never:
            rules.append(f"NEVER: /\\s*/ {_quoted(never)} {ANY}")
            banned.append("NEVER")
        text = " & ".join([ANY, *(f"~{name}" for name in banned)])
        return "\n".join([f"offer: {' | '.join(starts)}", *rules, f"TEXT: {text}"])

    def _sequence(self, opening: str, first: str, tooling: Tooling, special: Mapping[str, int]) -> str:
        """Returns one call, by a rule, or several, with the opening and closing text."""
        more = f"({terms(self.between, special)} call){{0,{MAX_FORCED - 1}}}" if tooling.parallel else ""
        return f"{terms(opening, special)} {first} {more} {terms(self.closing, special)}"

    def _alternatives(self, shape: str, tooling: Tooling, special: Mapping[str, int]) -> str:
        """Returns a shape filled in for each tool that may be called."""
        shapes = [shape.replace(_NAME, tool.name) for tool in tooling.callable]
        return " | ".join(terms(each, special, {_ARGUMENTS: f"arguments_{i}"}) for i, each in enumerate(shapes))


# ---------------------------------------------------------------- grammars

ANY = "/(?s:.*)/"
"""The terminal of all texts."""

_BEGINS_OBJECT = r'/\s*(\[\s*)?\{\s*"([^"\\]*\\|(name|arguments|parameters|id|type)")/'
"""The beginning of an object that may be a call, or of an array of one."""


def terms(text: str, special: Mapping[str, int], rules: Mapping[str, str] = {}) -> str:
    """Returns a text as a sequence of terms of Lark.

    Args:
        text: which.
        special: the ids of texts in it that are special tokens.
        rules: the names of rules for other texts in it.
    """
    if not (special or rules):
        return _quoted(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, [*rules, *special])) + ")", text)
    named = {**{marker: f"<[{token}]>" for marker, token in special.items()}, **rules}
    return " ".join(named.get(part) or _quoted(part) for part in parts if part)


def upto(name: str, body: str, end: str, special: Mapping[str, int]) -> str:
    """Returns the rule of a text up to and including its end: the first one there is, or a special token."""
    lazy = "" if any(end.startswith(marker) for marker in special) else "[lazy]"
    return f"{name}{lazy}: {body} {terms(end, special)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Tagged:
    """The grammars of arguments that are written one by one.

    They come in the order of the schema. Of texts, only `enum` and `const` are held.
    """

    def __init__(self, shape: str, special: Mapping[str, int]) -> None:
        self._before, rest = shape.split(_KEY)
        self._middle, self._after = rest.split(_VALUE)
        self._special = special

    def rules(self, name: str, tool: Tool, loose: bool) -> list[str]:
        """Returns the rules of a tool's arguments, the first one of this name."""
        tool = replace(tool, parameters=closed(tool.parameters))
        parameters = Parameters({} if loose else tool.parameters)
        each = [(f"{name}_{i}", key) for i, key in enumerate(parameters.names)]
        sequence = [rule if key in parameters.required else f"{rule}?" for rule, key in each]
        others = "properties" not in tool.parameters or tool.parameters.get("additionalProperties") is not False
        if loose or others:
            sequence.append("other*")
        made = [f"{name}: {' '.join(sequence) or _quoted('')}"]
        for rule, key in each:
            opened = terms(self._before + _KEY + self._middle, self._special, {_KEY: _quoted(key)})
            made.append(f"{rule}: {opened} {self._value(parameters, key, tool)}")
        return made

    def common(self) -> list[str]:
        """Returns the rules that those of all tools share."""
        before, middle = terms(self._before, self._special), terms(self._middle, self._special)
        return [
            f"other: {before} KEY {middle} text",
            r"KEY: /[^<>\s]+/",
            f"ENDED: {ANY} {_quoted(self._after.strip())} {ANY}",
            f"VALUE: {ANY} & ~ENDED",
            upto("text", "VALUE", self._after, self._special),
        ]

    def _value(self, parameters: Parameters, key: str, tool: Tool) -> str:
        """Returns the terms of a value and of the text after it."""
        schema, after = parameters.schema(key), terms(self._after, self._special)
        if tool.form is not None and (text := held(tool.name, tool.form, escaped=False)) is not None:
            return f"{text} {after}"
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return f"({' | '.join(_quoted(written(value)) for value in values)}) {after}"
        if "string" in parameters.types(key):
            return "text"
        definitions = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
        return f"%json {json.dumps({**definitions, **schema, 'x-guidance': _SPELLING})} {after}"


def _json_arguments(tool: Tool, loose: Container[str]) -> str:
    """Returns the terms of arguments in JSON: by the schema of the tool, or with a text in its form."""
    if tool.form is not None and tool.name not in loose:
        text = held(tool.name, tool.form, escaped=True)
        if text is not None:
            before, after = AROUND
            return f"{_quoted(before)} {text} {_quoted(after)}"
    return f"%json {schema_of(tool, loose)}"


def schema_of(tool: Tool, loose: Container[str] = ()) -> str:
    """Returns the schema in JSON that arguments are held to: an object, in one spelling, of the properties it names."""
    if tool.name in loose:
        return json.dumps({"type": "object", "x-guidance": _SPELLING})
    return json.dumps({"type": "object", **closed(tool.parameters), "x-guidance": _SPELLING})


_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


# ---------------------------------------------------------------- the table

_OBJECT = '{"name": "%name%", "arguments": %arguments%}'
_CALLS, _CALL, _CALLED, _DONE = DeepSeekScanner.markers

FORMATS = {
    "qwen3_coder": CallFormat(
        Qwen3CoderScanner,
        "<tool_call>\n<function=%name%>\n%arguments%</function>\n</tool_call>",
        parameter="<parameter=%key%>\n%value%\n</parameter>\n",
        markers=("<tool_call>", "</tool_call>"),
        signs=("<tool_call>", "<parameter="),
    ),
    "glm45": CallFormat(
        Glm45Scanner,
        "<tool_call>%name%\n%arguments%</tool_call>",
        parameter="<arg_key>%key%</arg_key>\n<arg_value>%value%</arg_value>\n",
        markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        signs=("<arg_key>",),
    ),
    "hermes": CallFormat(
        HermesScanner, f"<tool_call>\n{_OBJECT}\n</tool_call>", markers=("<tool_call>", "</tool_call>")
    ),
    "deepseek_v3": CallFormat(
        DeepSeekScanner,
        f"{_CALL}function<｜tool▁sep｜>%name%\n```json\n%arguments%\n```{_CALLED}",
        opening=_CALLS,
        closing=_DONE,
        markers=(*DeepSeekScanner.markers, "<｜tool▁sep｜>"),
        signs=("<｜tool▁sep｜>", "```json"),
    ),
    "deepseek_v31": CallFormat(
        DeepSeekScanner,
        f"{_CALL}%name%<｜tool▁sep｜>%arguments%{_CALLED}",
        between="",
        opening=_CALLS,
        closing=_DONE,
        markers=(*DeepSeekScanner.markers, "<｜tool▁sep｜>"),
        signs=("<｜tool▁sep｜>",),
    ),
    "harmony": CallFormat(
        HarmonyScanner,
        "<|channel|>commentary to=functions.%name% <|constrain|>json<|message|>%arguments%",
        between="<|call|><|start|>assistant",
        text="<|channel|>final<|message|>",
        thinking=Thinking("<|channel|>analysis<|message|>", "<|end|>", after="<|start|>assistant"),
        markers=(*HarmonyScanner.markers, "<|message|>", "<|constrain|>"),
        signs=("<|channel|>", "<|message|>"),
    ),
    "mistral_args": CallFormat(
        MistralScanner,
        "[TOOL_CALLS]%name%[ARGS]%arguments%",
        between="",
        markers=("[ARGS]", "[TOOL_CALLS]", "[CALL_ID]"),
        id_length=9,
    ),
    "mistral": CallFormat(
        MistralScanner,
        _OBJECT,
        opening="[TOOL_CALLS] [",
        between=", ",
        closing="]",
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        id_length=9,
    ),
    "llama3_json": CallFormat(
        Llama3Scanner, '{"name": "%name%", "parameters": %arguments%}', between="; ", markers=("<|python_tag|>",)
    ),
    "json": CallFormat(JsonScanner, _OBJECT),
}
"""The formats, by the name of the option. The first one that fits a model is chosen."""


def format_of(template: str, vocabulary: Container[str]) -> CallFormat:
    """Returns the format of a model: by its chat template, or else its vocabulary, or else plain JSON."""
    for place in (template, vocabulary):
        for each in FORMATS.values():
            if each.fits(place):
                return each
    return FORMATS["json"]


def _filled(shape: str, given: Mapping[str, str]) -> str:
    """Returns a shape with texts in its places; the texts may contain any characters."""
    parts = re.split("(" + "|".join(given) + ")", shape)
    return "".join(given.get(part, part) for part in parts)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
