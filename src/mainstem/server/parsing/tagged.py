"""Scanners of calls whose arguments have tags of their own. A value is text, and becomes JSON by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import ClassVar

from mainstem.server.fields.tools import Tooling
from mainstem.server.parsing.output import END, Steps
from mainstem.server.parsing.parameters import TEXT, Parameters
from mainstem.server.parsing.scanners import CallScanner, Malformed


class TaggedScanner(CallScanner):
    """Calls whose arguments have tags of their own, after `<tool_call>`, anywhere in the text.

    Texts are shown as they come, other values when they are complete.
    """

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    begins: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    head: ClassVar[tuple[str, str]]
    """The texts before and after the name of a tool."""

    key: ClassVar[tuple[str, str]]
    """The texts before and after the name of a parameter."""

    value: ClassVar[tuple[str, str]]
    """The texts before and after its value."""

    tail: ClassVar[str]
    """The text after the last parameter."""

    lines: ClassVar[bool] = False
    """Whether a value has lines of its own."""

    def __init__(self, tooling: Tooling, new_id: Callable[[], str]) -> None:
        self._parameters = {tool.name: Parameters(tool.parameters) for tool in tooling.callable}
        self._given = 0  # arguments of the call
        super().__init__(tooling, new_id)

    def _calls_after(self, marker: str) -> Steps[None]:
        before, after = self.head
        yield from self._peek()
        yield from self._expect("" if marker == before else before)
        name = yield from self._name()
        character = yield from self._take()
        if not (character.isspace() or character == (after or self.key[0])[0]):
            raise Malformed  # the name goes on, or may go on
        self._reread()
        yield from self._peek()
        yield from self._expect(after)
        self._begin(name)
        self._given = 0
        while (yield from self._either(self.key[0], self.tail)) != self.tail:
            yield from self._argument(self._parameters[name])
        self._argue("}" if self._given else "{}")
        self._settle()

    def _argument(self, parameters: Parameters) -> Steps[None]:
        """Reads an argument after its first marker."""
        name = yield from self._upto(self.key[1])
        if self.value[0]:
            yield from self._peek()
            yield from self._expect(self.value[0])
        self._argue(f"{', ' if self._given else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        self._given += 1
        yield from self._value(name, parameters)

    def _value(self, name: str, parameters: Parameters) -> Steps[None]:
        """Reads a value up to its end, and shows it."""
        is_text, waiting = parameters.types(name) == TEXT, list[str]()

        def show(character: str) -> None:
            waiting.append(character)
            if is_text:
                ready = len(waiting) - (self.lines and character == "\n")
                self._argue(_escaped("".join(waiting[:ready])))
                del waiting[:ready]

        if self.lines and (yield from self._next_is("\n")):
            yield from self._take()
        self._argue('"' if is_text else "")
        ended = yield from self._until([self.value[1]], show, self._take)
        rest = "".join(waiting)
        if ended == END:
            self._argue(_escaped(rest) if is_text else rest)
            raise Malformed
        rest = rest.removesuffix("\n") if self.lines else rest
        self._argue(_escaped(rest) + '"' if is_text else parameters.value(name, rest))

    def _next_is(self, text: str) -> Steps[bool]:
        character = yield from self._take()
        self._reread()
        return character == text

    def _either(self, one: str, other: str) -> Steps[str]:
        """Reads one of two texts, after white space, and returns it."""
        yield from self._peek()
        read = ""
        while read not in (one, other):
            character = yield from self._take()
            read += character
            if character == END or not (one.startswith(read) or other.startswith(read)):
                raise Malformed
        return read

    def _upto(self, end: str) -> Steps[str]:
        """Reads up to the text `end`, and returns the text before it."""
        text = ""
        while not text.endswith(end):
            if not (character := (yield from self._take())):
                raise Malformed
            text += character
        return text.removesuffix(end)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Qwen3CoderScanner(TaggedScanner):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, values in lines."""

    markers = (*TaggedScanner.markers, "<function=")
    begins = (*TaggedScanner.begins, "<function=")
    head, key, value, tail, lines = ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", True


class Glm45Scanner(TaggedScanner):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""

    head, key, value = ("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
    tail = "</tool_call>"
