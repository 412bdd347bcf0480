"""Tools: how models write calls, the parsers that find them, and the grammars that hold a model to them.

A `CallFormat` is one way to write calls. All that writes is made from its shape, the text `call`: the grammars of calls
that are required and of calls that are strict, and what a model reads whose chat template knows no tools.

A parser shows a call when its name is complete, and then its arguments as they come, as the model wrote them. Only the
names of tools that may be called begin a call; anything else is text. What is no call stays in the text as it was
written, markers included. White space around calls is part of the form.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from mainstem.server.output import END, Arguments, Call, Piece, Scanner, Steps, Text, joined

Choice = Literal["none", "auto", "required"]

MAX_FORCED = 16
"""Maximum number of calls of an answer that must call tools, since a weak model may find no end."""

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The schema of no arguments."""

_NAME, _ARGUMENTS = "%name%", "%arguments%"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Args:
        name: unique in a request; letters, digits and `_-.:/`.
        description: what it does, for the model.
        parameters: the JSON schema of its arguments, which are an object.
        strict: whether its calls are held to that schema even where the model chooses whether to call.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)  # a mapping is no plain default
    strict: bool = False

    def spec(self) -> dict[str, Any]:
        """Returns the tool as chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class Tooling:
    """The tools of a request, and which the model may call.

    The prompt has all tools, whatever the choice, so that requests with another choice find the same prefix.

    Args:
        tools: in the order of the request.
        choice: none: no call is looked for; auto: the model chooses; required: the answer is at least one call.
        allowed: names of the tools that may be called; None: all.
        parallel: whether an answer may have several calls.
    """

    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    allowed: frozenset[str] | None = None
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called, in order."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)


NO_TOOLS = Tooling()


# ---------------------------------------------------------------- parsers


class _Malformed(Exception):
    """What was read is no call."""


class CallScanner(Scanner):
    """Finds calls of one format; an `OutputParser`.

    Args:
        tooling: the tools that may be called.
        new_id: returns the id of a call.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tooling: Tooling, new_id: Callable[[], str]) -> None:
        self._names = {tool.name for tool in tooling.callable}
        self._most = None if tooling.parallel else 1
        self._new_id = new_id
        self._calls = 0
        self._taken = [""]  # what was read of a call that may still turn out to be text
        self._held = ""  # white space after text, which belongs to the form if a call follows
        self._after_call = False
        super().__init__()

    def close(self) -> Sequence[Piece]:
        """See `OutputParser.close`."""
        found = super().close()
        return joined([*found, Text(self._held)]) if self._held else found

    def _say(self, text: str) -> None:
        """Adds text. White space waits for what follows."""
        for character in text:
            if not character.isspace():
                self._pieces.append(Text(self._held + character))
                self._after_call, self._held = False, ""
            elif not self._after_call:
                self._held += character

    def _attempt(self, before: str, calls: Steps[None]) -> Steps[bool]:
        """Reads calls, after the text `before`; returns whether there were some.

        What turns out to be none becomes text, except for the end that may begin a marker: it is read again.
        """
        self._taken = [before]
        try:
            yield from calls
        except _Malformed:
            before, *read = self._taken
            text = "".join(read)
            longest = max(map(len, self.markers), default=0)
            again = next(at for at in range(max(len(text) - longest, 0), len(text) + 1) if self._may_begin(text[at:]))
            self._say(before + text[:again])
            self._push_back(text[again:])
            return False
        return True

    def _may_begin(self, text: str) -> bool:
        return not text or any(marker.startswith(text) for marker in self.markers)

    def _take(self) -> Steps[str]:
        character = yield from self._next()
        self._taken.append(character)
        return character

    def _reread(self) -> None:
        self._push_back(self._taken.pop())

    def _solid(self) -> Steps[str]:
        """Returns the next character that is no white space."""
        while (character := (yield from self._take())).isspace():
            pass
        return character

    def _peek(self) -> Steps[str]:
        """Skips white space, and returns the character after it, which is read again."""
        character = yield from self._solid()
        self._reread()
        return character

    def _expect(self, text: str) -> Steps[None]:
        for wanted in text:
            if (yield from self._take()) != wanted:
                raise _Malformed

    def _json_calls(self) -> Steps[None]:
        """Reads an object that is a call, or an array of some."""
        if (yield from self._solid()) == "{":
            yield from self._json_call()
            return
        self._reread()
        yield from self._expect("[")
        separator = ","
        while separator == ",":
            if (yield from self._solid()) != "{":
                raise _Malformed
            yield from self._json_call()
            separator = yield from self._solid()
        if separator != "]":
            raise _Malformed

    def _json_call(self) -> Steps[None]:
        """Reads the rest of an object that is a call."""
        begun, early, has_arguments = False, "", False
        separator = ","
        while separator == ",":
            key = yield from self._json_text()
            if (yield from self._solid()) != ":":
                raise _Malformed
            if key == "name" and not begun:
                begun = self._begin((yield from self._json_text()))
                self._argue(early)
            elif key in _ARGUMENT_KEYS and not has_arguments:
                has_arguments = True
                early = yield from self._arguments(begun)
            elif key in _OTHER_KEYS:
                yield from self._json_value(_ignore)
            else:
                raise _Malformed
            separator = yield from self._solid()
        if separator != "}" or not begun:
            raise _Malformed
        if not has_arguments:
            self._argue("{}")
        self._taken = [""]

    def _begin(self, name: str) -> bool:
        """Shows the beginning of a call. From here on nothing that was read can become text."""
        if name not in self._names:
            raise _Malformed
        self._taken, self._held, self._after_call = [""], "", True
        self._calls += 1
        if self._shown:
            self._pieces.append(Call(self._calls - 1, self._new_id(), name))
        return True

    @property
    def _shown(self) -> bool:
        return self._most is None or self._calls <= self._most

    def _argue(self, text: str) -> None:
        """Adds to the arguments of the call."""
        if text and self._shown:
            self._pieces.append(Arguments(self._calls - 1, text))

    def _arguments(self, begun: bool) -> Steps[str]:
        """Reads a call's arguments, shows them if the call has begun, and otherwise returns them.

        Some models write the object as a string, or null if it is empty.
        """
        collected: list[str] = []
        if (yield from self._peek()) == "{":
            try:
                yield from self._json_value(self._argue if begun else collected.append)
            finally:
                self._taken = [""] if begun else self._taken
        else:
            yield from self._json_value(collected.append)
            collected = [_plain_arguments("".join(collected))]
            if begun:
                self._argue(collected.pop())
        return "".join(collected)

    def _json_text(self) -> Steps[str]:
        """Reads a JSON string, and returns what it stands for."""
        if (yield from self._peek()) != '"':
            raise _Malformed
        raw: list[str] = []
        yield from self._json_value(raw.append)
        try:
            return str(json.loads("".join(raw), strict=False))
        except ValueError:
            raise _Malformed from None

    def _json_value(self, show: Callable[[str], object]) -> Steps[None]:
        """Reads a JSON value as far as it takes to find its end."""
        character = yield from self._solid()
        if character in _ENDS:
            raise _Malformed
        depth = 0
        while character != END:
            show(character)
            if character == '"':
                yield from self._rest_of_string(show)
            depth += (character in _OPENING) - (character in _CLOSING)
            if depth == 0 and (character == '"' or character in _CLOSING):
                return
            character = yield from self._take()
            if depth == 0 and (character in _ENDS or character.isspace()):
                self._reread()
                return
        raise _Malformed

    def _rest_of_string(self, show: Callable[[str], object]) -> Steps[None]:
        escaped = False
        while character := (yield from self._take()):
            show(character)
            if character == '"' and not escaped:
                return
            escaped = character == "\\" and not escaped
        raise _Malformed


_OPENING, _CLOSING, _ENDS = frozenset("{["), frozenset("}]"), frozenset(",}]")
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_OTHER_KEYS = frozenset(("id", "type"))


def _ignore(text: str) -> None:
    """Shows nothing."""


def _plain_arguments(written: str) -> str:
    """Returns arguments that are no JSON object as one, if they stand for one."""
    if written == "null":
        return "{}"
    try:
        meant = json.loads(written, strict=False)
    except (ValueError, RecursionError):
        return written
    return meant.encode(errors="replace").decode() if isinstance(meant, str) else written


class HermesScanner(CallScanner):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text."""

    markers = ("<tool_call>", "</tool_call>")

    def _scan(self) -> Steps[None]:
        while marker := (yield from self._until(self.markers, self._say)):
            if marker == "<tool_call>":
                yield from self._attempt(marker, self._json_calls())
            elif not self._after_call:
                self._say(marker)


class JsonScanner(CallScanner):
    """`{"name": ..., "arguments": {...}}` where the text begins, or several, or an array of some."""

    def _scan(self) -> Steps[None]:
        begins = True  # whether a call needs no marker here: at the beginning, and after a call
        while True:
            if begins:
                gap = yield from self._gap()
                character = yield from self._next()
                self._push_back(character)
                if character in _OPENING:
                    begins = yield from self._attempt(gap, self._json_calls())
                    continue
                self._say(gap)
            marker = yield from self._until(self.markers, self._say)
            if marker == END:
                return
            begins = yield from self._attempt(marker, self._json_calls())

    def _gap(self) -> Steps[str]:
        """Returns what is before a call, or between two."""
        gap = yield from self._blanks()
        while self._after_call and (character := (yield from self._next())) in (";", ","):
            gap += character + (yield from self._blanks())
        if self._after_call:
            self._push_back(character)
        return gap


class Llama3Scanner(JsonScanner):
    """The same, and after `<|python_tag|>` anywhere in the text."""

    markers = ("<|python_tag|>",)


class MistralScanner(CallScanner):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]name[ARGS]{...}`, anywhere in the text."""

    markers = ("[TOOL_CALLS]",)

    def _scan(self) -> Steps[None]:
        while marker := (yield from self._until(self.markers, self._say)):
            yield from self._attempt(marker, self._listed_or_named())

    def _listed_or_named(self) -> Steps[None]:
        if (yield from self._peek()) in _OPENING:
            yield from self._json_calls()
            return
        name = ""
        while (character := (yield from self._take())) not in _OPENING:
            name = (name + character).lstrip()
            if character == END or not any(known.startswith(name) for known in self._names):
                raise _Malformed
        self._reread()
        if character == "[":
            yield from self._between_name_and_arguments()
        self._begin(name)
        yield from self._arguments(True)

    def _between_name_and_arguments(self) -> Steps[None]:
        """Reads `[ARGS]`, or `[CALL_ID]...[ARGS]`."""
        yield from self._expect("[")
        if (yield from self._take()) == "C":
            yield from self._expect("ALL_ID]")
            while (yield from self._take()).isalnum():
                pass
            self._reread()
            yield from self._expect("[A")
        else:
            self._reread()
            yield from self._expect("A")
        yield from self._expect("RGS]")


# ---------------------------------------------------------------- formats


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls.

    Args:
        scanner: finds calls.
        call: how one is written, with `%name%` and `%arguments%`.
        between: what is between two calls.
        opening, closing: what is around all.
        begin: the marker of calls after text; empty: calls are only where an answer begins.
        markers: texts that may be special tokens. The first one tells models with this format from others.
        id_length: the ids of calls have so many letters and digits, since templates insist on it; None: any.
    """

    scanner: type[CallScanner]
    call: str
    between: str = "\n"
    opening: str = ""
    closing: str = ""
    begin: str = ""
    markers: tuple[str, ...] = ()
    id_length: int | None = None

    def parser(self, tooling: Tooling) -> CallScanner:
        """Returns a parser of one answer."""
        return self.scanner(tooling, self.new_id)

    def new_id(self) -> str:
        """Returns a unique id for a call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(self.id_length))

    def accepted_id(self, given: str) -> str:
        """Returns a client's id of a call in a form that templates take; the same one for the same id."""
        if self.id_length is None or (len(given) == self.id_length and given.isalnum()):
            return given
        return hashlib.sha256(given.encode()).hexdigest()[: self.id_length]

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Returns calls as the model writes them, each given as a name and its arguments in JSON."""
        texts = [self.call.replace(_NAME, name).replace(_ARGUMENTS, arguments) for name, arguments in calls]
        return self.opening + self.between.join(texts) + self.closing

    def grammar(self, tooling: Tooling, special: Mapping[str, int], loose: Container[str] = ()) -> str:
        """Returns the rules of answers that are calls of the tools that may be called; the first one is `calls`.

        Args:
            tooling: the tools.
            special: the ids of markers that are special tokens. Other markers are text.
            loose: names of tools whose arguments may be any object.

        Returns:
            Rules in the dialect of Lark that llguidance reads.
        """
        return "\n".join(
            [
                f"calls: {self._sequence(self.opening, 'call', tooling, special)}",
                f"call: {self._alternatives(self.call, tooling, special)}",
                *(f"arguments_{i}: %json {_schema(tool, loose)}" for i, tool in enumerate(tooling.callable)),
            ]
        )

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
        rules, starts, banned = [self.grammar(tooling, special, loose)], ["TEXT"], list[str]()
        if self.begin:
            marker = _term(self.begin, special)
            said = f"said: TEXT {marker}" if self.begin in special else f"said[lazy]: TEXT {marker}"
            rules += [said, f"MARKED: {_ANY} {json.dumps(self.begin)} {_ANY}"]
            banned.append("MARKED")
        if self.begin and (self.opening + self.call).startswith(self.begin):
            opening = self.opening.removeprefix(self.begin)
            call = self.call if self.opening else self.call.removeprefix(self.begin)
            starts.append(f"said {self._sequence(opening, 'first', tooling, special)}")
            rules.append(f"first: {self._alternatives(call, tooling, special)}")
        else:
            starts += ["calls", *(["said calls"] if self.begin else [])]
            rules.append(f"CALLED: {_BEGINS_OBJECT} {_ANY}")
            banned.append("CALLED")
        if never:
            rules.append(f"NEVER: /\\s*/ {json.dumps(never)} {_ANY}")
            banned.append("NEVER")
        text = " & ".join([_ANY, *(f"~{name}" for name in banned)])
        return "\n".join([f"offer: {' | '.join(starts)}", *rules, f"TEXT: {text}"])

    def _sequence(self, opening: str, first: str, tooling: Tooling, special: Mapping[str, int]) -> str:
        """Returns one call, by a rule, or several, and what is around them."""
        more = f"({self._terms(self.between, '', special)} call){{0,{MAX_FORCED - 1}}}" if tooling.parallel else ""
        return f"{self._terms(opening, '', special)} {first} {more} {self._terms(self.closing, '', special)}"

    def _alternatives(self, shape: str, tooling: Tooling, special: Mapping[str, int]) -> str:
        """Returns what a shape is for each of the tools that may be called."""
        shapes = [shape.replace(_NAME, tool.name) for tool in tooling.callable]
        return " | ".join(self._terms(each, f"arguments_{i}", special) for i, each in enumerate(shapes))

    def _terms(self, text: str, arguments: str, special: Mapping[str, int]) -> str:
        parts = re.split("(" + "|".join(map(re.escape, [_ARGUMENTS, *special])) + ")", text)
        return " ".join(arguments if part == _ARGUMENTS else _term(part, special) for part in parts if part)


def _term(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else json.dumps(text)


_ANY = "/(?s:.*)/"
_BEGINS_OBJECT = r'/\s*(\[\s*)?\{\s*"([^"\\]*\\|(name|arguments|parameters|id|type)")/'
"""What begins an object that may be a call, or an array of one."""

_ALPHANUMERIC = string.ascii_letters + string.digits
_OBJECT = '{"name": "%name%", "arguments": %arguments%}'

FORMATS = {
    "hermes": CallFormat(
        HermesScanner, f"<tool_call>\n{_OBJECT}\n</tool_call>", begin="<tool_call>", markers=("<tool_call>", "</tool_call>")
    ),
    "mistral_args": CallFormat(
        MistralScanner,
        "[TOOL_CALLS]%name%[ARGS]%arguments%",
        between="",
        begin="[TOOL_CALLS]",
        markers=("[ARGS]", "[TOOL_CALLS]", "[CALL_ID]"),
        id_length=9,
    ),
    "mistral": CallFormat(
        MistralScanner,
        _OBJECT,
        opening="[TOOL_CALLS] [",
        between=", ",
        closing="]",
        begin="[TOOL_CALLS]",
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        id_length=9,
    ),
    "llama3_json": CallFormat(
        Llama3Scanner,
        '{"name": "%name%", "parameters": %arguments%}',
        between="; ",
        begin="<|python_tag|>",
        markers=("<|python_tag|>",),
    ),
    "json": CallFormat(JsonScanner, _OBJECT),
}
"""The formats, by the name of the option. The first one that fits a model is chosen."""


def format_of(template: str, vocabulary: Container[str]) -> CallFormat:
    """Returns the format of a model: by its chat template, or else its vocabulary, or else plain JSON."""
    for place in (template, vocabulary):
        for each in FORMATS.values():
            if each.markers and each.markers[0] in place:
                return each
    return FORMATS["json"]


def _schema(tool: Tool, loose: Container[str]) -> str:
    """Returns the schema that arguments are held to: an object, in one spelling, of the properties that it names."""
    if tool.name in loose:
        return json.dumps({"type": "object", "x-guidance": _SPELLING})
    schema = {"type": "object", **tool.parameters, "x-guidance": _SPELLING}
    if "properties" in schema and not schema.keys() & _OTHER_PROPERTIES:
        schema["additionalProperties"] = False
    return json.dumps(schema)


_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OTHER_PROPERTIES = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
