"""Scanners: the parsers that find calls of tools in the output of a model, one for each form with arguments in JSON.

Those of calls whose arguments have tags of their own are in `tagged`.

A scanner shows a call when its name is complete, and then its arguments as they come: as the model wrote them, if they
are JSON, or repaired; arguments in tags become JSON by the schema of the tool. A call is complete with its arguments.
Only the names of tools that may be called begin a call; anything else is text, as it was written, markers included.
White space around calls is part of the form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from mainstem.server.fields.tools import Tooling
from mainstem.server.parsing.custom import as_arguments
from mainstem.server.parsing.output import END, Arguments, Call, NoCall, Piece, Reasoning, Scanner, Steps, Text, joined
from mainstem.server.parsing.repair import NoJson, Repair, repaired, strict


class Malformed(Exception):
    """The text that was read is no call."""


class CallScanner(Scanner):
    """Finds calls of one format; an `OutputParser`.

    Args:
        tooling: the tools that may be called.
        new_id: returns the id of a call.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts at which a scanner stops."""

    begins: ClassVar[tuple[str, ...]] = ()
    """The markers that begin calls after text, the usual one first; none: calls are only where an answer begins."""

    def __init__(self, tooling: Tooling, new_id: Callable[[], str]) -> None:
        self._names = {tool.name for tool in tooling.callable}
        self._custom = {tool.name for tool in tooling.callable if tool.custom}
        self._most = None if tooling.parallel else 1
        # Then a text that is no call is the beginning of a call that was cut off.
        self._calls_alone = tooling.choice == "required"
        self._new_id = new_id
        self._calls = self._complete = 0
        self._open: int | None = None  # the call that is not complete yet
        self._takes_text = False  # whether its tool is custom
        self._taken = [""]  # the characters of a call that may still turn out to be text
        self._held = ""  # white space after text, which belongs to the form if a call follows
        self._after_call = False
        super().__init__()

    def close(self, cut: bool = False) -> Sequence[Piece]:
        """See `OutputParser.close`."""
        found = super().close(cut)
        return joined([*found, Text(self._held)]) if self._held else found

    def _scan(self) -> Steps[None]:
        """Reads text, and calls where one of `begins` stands. A marker after a call that begins none is not shown."""
        while marker := (yield from self._until(self.markers, self._say)):
            if marker in self.begins:
                yield from self._attempt(marker, self._calls_after(marker))
            elif not self._after_call:
                self._say(marker)

    def _calls_after(self, marker: str) -> Steps[None]:
        """Reads calls, after one of `begins`: by default in JSON."""
        yield from self._json_calls()

    def _say(self, text: str) -> None:
        """Adds text. White space waits for what follows."""
        for character in () if self._calls_alone else text:
            if not character.isspace():
                self._pieces.append(Text(self._held + character))
                self._after_call, self._held = False, ""
            elif not self._after_call:
                self._held += character

    def _attempt(self, before: str, calls: Steps[None]) -> Steps[bool]:
        """Reads calls, after the text `before`; returns whether there were some.

        A call that turns out to be none becomes text, but for an end that may begin a marker, which is read again.
        """
        self._taken = [before]
        try:
            yield from calls
        except Malformed:
            if self._open is not None and self._ended and self._cut:
                return True
            before, *read = self._taken
            text = "".join(read)
            self._withdraw()
            longest = max(map(len, self.markers), default=0)
            again = next(at for at in range(max(len(text) - longest, 0), len(text) + 1) if self._may_begin(text[at:]))
            self._say(before + text[:again])
            self._push_back(text[again:])
            return False
        return True

    def _withdraw(self) -> None:
        """Takes back the open call, if there is one. Its text is shown, even where an answer has only calls."""
        if self._open is not None:
            if self._shown:
                self._pieces.append(NoCall(self._open))
            self._open, self._calls_alone = None, False

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
                raise Malformed

    def _name(self, *others: str) -> Steps[str]:
        """Reads as much of a name of a tool, or of other texts, as there is."""
        known, name = (*self._names, *others), ""
        while (character := (yield from self._take())) and any(each.startswith(name + character) for each in known):
            name += character
        self._reread()
        return name

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
                raise Malformed
            yield from self._json_call()
            separator = yield from self._solid()
        if separator != "]":
            raise Malformed

    def _json_call(self) -> Steps[None]:
        """Reads the rest of an object that is a call."""
        begun, early, has_arguments = False, "", False
        separator = ","
        while separator == ",":
            if (yield from self._peek()) == "}":  # after a comma too many
                separator = yield from self._solid()
                break
            key = yield from self._json_text()
            if (yield from self._solid()) != ":":
                raise Malformed
            if key == "name" and not begun:
                begun = self._begin((yield from self._json_text()))
                if has_arguments:
                    self._argue(early)
                    self._settle()
            elif key in _ARGUMENT_KEYS and not has_arguments:
                has_arguments = True
                early = yield from self._arguments(begun)
            elif key in _OTHER_KEYS:
                yield from self._json_value(_ignore)
            else:
                raise Malformed
            separator = yield from self._solid()
        if separator != "}" or not begun:
            raise Malformed
        if not has_arguments:
            self._argue("{}")
            self._settle()
        self._taken = [""]

    def _begin(self, name: str) -> bool:
        """Shows the beginning of a call. The white space before it is text again if it turns out to be none."""
        if name not in self._names:
            raise Malformed
        self._taken[0], self._held = self._held + self._taken[0], ""
        self._open, self._takes_text = self._calls, name in self._custom
        self._calls += 1
        if self._shown:
            self._pieces.append(Call(self._open, self._new_id(), name))
        return True

    def _settle(self) -> None:
        """Notes that the call is complete. Nothing that was read can become text any more."""
        self._taken, self._open, self._after_call = [""], None, True
        self._complete += 1

    @property
    def _shown(self) -> bool:
        return self._most is None or self._complete < self._most

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
            yield from self._strict(self._argue if begun else collected.append)
        else:
            yield from self._json_value(collected.append)
            collected = [_plain_arguments("".join(collected), begun and self._takes_text)]
            if begun:
                self._argue(collected.pop())
        if begun:
            self._settle()
        return "".join(collected)

    def _json_text(self) -> Steps[str]:
        """Reads a JSON string, and returns its value."""
        if (yield from self._peek()) not in _QUOTES:
            raise Malformed
        raw: list[str] = []
        yield from self._strict(raw.append)
        return str(json.loads("".join(raw)))

    def _json_value(self, show: Callable[[str], object]) -> Steps[None]:
        """Reads a JSON value. One that is neither an object, an array nor a text ends where something else begins."""
        character = yield from self._peek()
        if character in _OPENING or character in _QUOTES:
            yield from self._strict(show)
            return
        if character in _ENDS:
            raise Malformed
        while not ((character := (yield from self._take())) in _ENDS or character.isspace()):
            if character == END:
                raise Malformed
            show(character)
        self._reread()

    def _strict(self, show: Callable[[str], object]) -> Steps[None]:
        """Reads an object, an array or a text, and shows it as strict JSON."""
        repair = Repair()
        while not repair.ended:
            character = yield from self._take()
            if character == END:
                raise Malformed
            try:
                show(repair.feed(character))
            except NoJson:
                raise Malformed from None


_OPENING, _ENDS, _QUOTES = frozenset("{["), frozenset(",}]"), frozenset("\"'")
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_OTHER_KEYS = frozenset(("id", "type"))


def _ignore(text: str) -> None:
    """Shows nothing."""


def _plain_arguments(written: str, takes_text: bool) -> str:
    """Returns arguments that are no object as one, if they stand for one: null, or a text that has one.

    Args:
        written: what was.
        takes_text: whether the tool takes a text, which may be written as it is.
    """
    if takes_text and written[:1] in _QUOTES:
        return as_arguments(json.loads(written))
    try:
        if written[:1] not in _QUOTES:
            meant = "{}" if strict(written) == "null" else ""
        else:
            text = json.loads(written)
            meant = repaired(text) if text.strip() else "{}"
    except (NoJson, RecursionError):
        raise Malformed from None
    if not meant.startswith("{"):
        raise Malformed
    return meant


class HermesScanner(CallScanner):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text."""

    markers = ("<tool_call>", "</tool_call>")
    begins = markers[:1]


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
        """Returns the text before a call, or between two."""
        gap = yield from self._blanks()
        while self._after_call and (character := (yield from self._next())) in (";", ","):
            gap += character + (yield from self._blanks())
        if self._after_call:
            self._push_back(character)
        return gap


class Llama3Scanner(JsonScanner):
    """The same, and after `<|python_tag|>` anywhere in the text."""

    markers = begins = ("<|python_tag|>",)


class MistralScanner(CallScanner):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]name[ARGS]{...}`, anywhere in the text."""

    markers = begins = ("[TOOL_CALLS]",)

    def _calls_after(self, marker: str) -> Steps[None]:
        if (yield from self._peek()) in _OPENING:
            yield from self._json_calls()
            return
        name = ""
        while (character := (yield from self._take())) not in _OPENING:
            name = (name + character).lstrip()
            if character == END or not any(known.startswith(name) for known in self._names):
                raise Malformed
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


class DeepSeekScanner(CallScanner):
    """Calls between markers, anywhere in the text.

    `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`, or
    the same with `function` in place of the name, and after `<｜tool▁sep｜>` the name and a fenced block of JSON.
    """

    begins = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    markers = (*begins, "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

    def _calls_after(self, marker: str) -> Steps[None]:
        if marker == self.begins[0]:
            yield from self._peek()
            yield from self._expect(self.begins[1])
        name = yield from self._name("function")
        yield from self._expect("<｜tool▁sep｜>")
        fenced = (yield from self._peek()) not in _OPENING
        if fenced:
            name = yield from self._name()
            yield from self._peek()
            yield from self._expect("```json")
        self._begin(name)
        yield from self._arguments(True)
        if fenced:
            yield from self._end("```")

    def _end(self, text: str) -> Steps[None]:
        """Reads the end of a call, as far as the answer goes."""
        yield from self._peek()
        for wanted in text:
            if (character := (yield from self._take())) != wanted and character != END:
                raise Malformed
        self._taken = [""]


class HarmonyScanner(CallScanner):
    """Messages in channels. An answer consists of several: reasoning, calls and text.

    `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`. A call is
    `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`, and a commentary to nobody is
    text. The prompt has opened the first message.
    """

    markers = ("<|channel|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>")
    begins = markers

    def __init__(self, tooling: Tooling, new_id: Callable[[], str]) -> None:
        self._thought = self._spoke = False  # whether there was a thought, and a text
        super().__init__(tooling, new_id)

    def _scan(self) -> Steps[None]:
        yield from self._attempt("", self._message(""))
        while marker := (yield from self._until(self.markers, self._say)):
            if marker in self.markers[:2]:
                yield from self._attempt(marker, self._message(marker))
            elif not self._after_call:
                self._say(marker)

    def _message(self, header: str) -> Steps[None]:
        """Reads a message; `header`: the beginning of its header, which was read."""
        while not header.endswith(_MESSAGE):
            character = yield from self._take()
            header += character
            if character == END or not _may_be_header(header.lstrip()):
                raise Malformed
        match = _HEADER.fullmatch(" ".join(header.split()))
        if match is None:
            raise Malformed
        if recipient := match["author_to"] or match["channel_to"]:
            self._begin(recipient.removeprefix("functions."))
            yield from self._arguments(True)
            return
        if match["channel"] is None:
            raise Malformed
        thinks = match["channel"] == "analysis"
        self._taken, self._held = [""], ""
        if thinks and self._thought:
            self._think("\n")
        elif not thinks and self._spoke:
            self._held = "\n"
        marker = yield from self._until(self.markers, self._think if thinks else self._speak)
        if marker in self.markers[:2]:
            self._push_back(marker)

    def _think(self, text: str) -> None:
        self._thought = True
        self._pieces.append(Reasoning(text))

    def _speak(self, text: str) -> None:
        self._spoke = True
        self._say(text)


_MESSAGE = "<|message|>"
_HEADER = re.compile(
    r"\s*(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=(?P<author_to>[^\s<]+))?\s*"
    r"<\|channel\|>\s*(?P<channel>analysis|commentary|final)?\s*(?:to=(?P<channel_to>[^\s<]+))?"
    r"\s*(?:(?:<\|constrain\|>)?\s*\w+)?\s*<\|message\|>"
)
_HEADERS = ("<|channel|>", "<|start|>", "to=")
_LONGEST_HEADER = 256


def _may_be_header(text: str) -> bool:
    """Whether a message's header may begin so; a marker of another one ends it."""
    begins = any(header.startswith(text) or text.startswith(header) for header in _HEADERS)
    return begins and len(text) <= _LONGEST_HEADER and text.count("<|channel|>") < 2 and "<|start|>" not in text[1:]
