"""Applies rules to a prompt: its messages, its tools, or the texts that are completed.

All functions return what they were given where no rule finds anything. Rules apply in their order: where two find the
same characters of a text, the first one counts.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mainstem.prompt_rules.notes import Note, Notes
from mainstem.prompt_rules.rules import Edit, Move, Rewrite, Rule, Sort

Message = dict[str, Any]
"""A message as chat templates take it: `role`, and `content`, which is a text, a list of parts, or None."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A tool as far as rules read it.

    Args:
        name, description, parameters: as the client has them.
        index: its place in the client's list; None: the client did not send it this time.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    index: int | None

    @property
    def size(self) -> int:
        """The characters that it has."""
        return len(self.name) + len(self.description or "") + len(_spelled(self.parameters))


@dataclass(slots=True)
class Rewritten:
    """A prompt after the rules.

    Args:
        messages, tools, texts: of the prompt.
        changes: by the rules, in the order of the prompt.
        notes: what was moved.
        first, last: the messages that notes go behind; None: there is none, and nothing is moved there.
        remembers: whether a rule moves text behind the last message, where notes of earlier turns may stand, too.
        first_notes: those that go behind the first one.
        whole: see `rewritten`.
        edits: the changed characters of each message that is one text, by its number.
    """

    messages: list[Message]
    tools: list[Declared]
    texts: list[str]
    changes: list[Rewrite] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    last: int | None = None
    remembers: bool = False
    first: int | None = None
    first_notes: list[Note] = field(default_factory=list)
    whole: bool = True
    edits: dict[int, list[Edit]] = field(default_factory=dict)

    def place(self, notes: Notes, scope: object, *, remember: bool = True) -> None:
        """Puts the notes of this turn and of earlier ones behind their messages.

        Args:
            notes: knows those of earlier turns.
            scope, remember: see `Notes.placed`.
        """
        if self.last is None or not self.remembers:
            return
        for index, placed in notes.placed(scope, self.messages, self.last, self.notes, remember=remember).items():
            self.put(index, placed)

    def put(self, index: int, notes: Sequence[Note]) -> None:
        """Puts notes behind a message, and says so."""
        self.messages[index] = noted(self.messages[index], "".join(note.text for note in notes))
        self.changes += [Rewrite(note.rule, "move", f"messages[{index}]", 0, len(note.text)) for note in notes]

    def takes(self, edit: Edit, index: int) -> bool:
        """Returns whether a note of a change, which is in a message of this index, has a message to go behind."""
        if not edit.note or not self.whole:
            return True
        return self.last is not None if edit.after == "last" else self.first is not None and index <= self.first

    def offset(self, message: int, at: int) -> int:
        """Returns where a position in the text of a message is now; one in what was replaced is behind it."""
        moved = at
        for edit in self.edits.get(message, ()):
            if at >= edit.end:
                moved += len(edit.text) - (edit.end - edit.start)
            elif at > edit.start:
                moved += edit.start + len(edit.text) - at
        return moved


def rewritten(
    rules: Sequence[Rule],
    messages: Sequence[Message] = (),
    tools: Sequence[Declared] = (),
    texts: Sequence[str] = (),
    *,
    whole: bool = True,
) -> Rewritten:
    """Returns a prompt after the rules. `notes` has the texts that they moved; `place` puts them behind messages.

    Args:
        rules: those that cover the request.
        messages, tools: of a conversation.
        texts: prompts that are completed, instead of a conversation.
        whole: whether the conversation is that of a request; else it is what several begin with.
    """
    made = Rewritten(list(messages), list(tools), list(texts), whole=whole)
    made.last = max((i for i, message in enumerate(messages) if message["role"] != "assistant"), default=None)
    made.first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    made.remembers = any(isinstance(rule.action, Move) and rule.action.after == "last" for rule in rules)
    _sort(rules, made)
    for number, tool in enumerate(made.tools):
        text = tool.description or ""
        if edits := _found(rules, text, "tools", f"tools[{number}]", made, -1):
            made.tools[number] = replace(tool, description=_applied(text, edits))
    for index, message in enumerate(messages):
        _in_message(rules, message, index, made)
    _place_first(made)
    for number, text in enumerate(texts):
        if edits := _found(rules, text, "prompt", f"prompt[{number}]", made, 0):
            made.texts[number] = _applied(text, edits)
    return made


def _in_message(rules: Sequence[Rule], message: Message, index: int, made: Rewritten) -> None:
    """Changes the texts of a message."""
    place, content = message["role"], message["content"]
    at = "system" if place == "system" and index == 0 else f"messages[{index}]"
    if isinstance(content, str):
        if edits := _found(rules, content, place, at, made, index):
            made.messages[index] = {**message, "content": _applied(content, edits)}
            made.edits[index] = edits
        return
    parts = list[Any](content or ())
    for number, part in enumerate(parts):
        if part["type"] == "text" and (edits := _found(rules, part["text"], place, at, made, index)):
            parts[number] = {**part, "text": _applied(part["text"], edits)}
            made.messages[index] = {**message, "content": parts}


def _found(rules: Sequence[Rule], text: str, place: str, at: str, made: Rewritten, index: int) -> list[Edit]:
    """Returns the changes of a text that do not overlap, in order, and notes them.

    Args:
        rules: that may change it.
        text, place, at: what it is.
        made: the prompt.
        index: of its message; -1: it is before all messages.
    """
    kept: list[tuple[Edit, Rule]] = []
    for rule in rules:
        edits = (edit for edit in rule.edits(text, place) if made.takes(edit, index))
        kept += [(edit, rule) for edit in _free(edits, [other for other, _ in kept])]
        kept.sort(key=lambda each: each[0].start)
    for edit, rule in kept:
        made.changes.append(Rewrite(rule.name, rule.action.name, at, edit.end - edit.start, len(edit.text)))
        if edit.note:
            (made.notes if edit.after == "last" else made.first_notes).append(Note(rule.name, edit.note))
    return [edit for edit, _ in kept]


def _free(edits: Iterable[Edit], taken: Sequence[Edit]) -> Iterator[Edit]:
    """Yields the changes that overlap with none of those taken, in time linear in both; all are in order."""
    at = 0
    for edit in edits:
        while at < len(taken) and taken[at].end <= edit.start:
            at += 1
        if at == len(taken) or edit.end <= taken[at].start:
            yield edit


def _place_first(made: Rewritten) -> None:
    """Puts what stays the same through a session behind the user's first message."""
    if made.first is not None and made.first_notes:
        made.put(made.first, made.first_notes)


def _applied(text: str, edits: Iterable[Edit]) -> str:
    pieces, at = list[str](), 0
    for edit in edits:
        pieces += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join((*pieces, text[at:]))


def noted(message: Message, note: str) -> Message:
    """Returns a message with a note behind it."""
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": note}]}
    return {**message, "content": (content or "") + note}


# ---- tools


def _sort(rules: Sequence[Rule], made: Rewritten) -> None:
    """Sorts the tools of a prompt, as rules say."""
    for rule in rules:
        if not isinstance(rule.action, Sort):
            continue
        before = list(made.tools)
        if "tools" in rule.action.lists:
            made.tools = sorted(before, key=lambda tool: tool.name)
        if "keys" in rule.action.lists:
            made.tools = [_with_keys_sorted(tool) for tool in made.tools]
        if (size := _moved(before, made.tools)) > 0:
            made.changes.append(Rewrite(rule.name, rule.action.name, "tools", size, size))


def _with_keys_sorted(tool: Declared) -> Declared:
    parameters = sorted_keywords(tool.parameters)
    return tool if _spelled(parameters) == _spelled(tool.parameters) else replace(tool, parameters=parameters)


def _moved(before: Sequence[Declared], after: Sequence[Declared]) -> int:
    """Returns how many characters of tools have another place now."""
    pairs = zip(before, after, strict=True)
    return sum(new.size for old, new in pairs if old is not new)


def _spelled(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


_SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_SCHEMAS = {
    "items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "anyOf", "allOf", "oneOf", "prefixItems",
}  # fmt: skip


def sorted_keywords(schema: Any) -> Any:
    """Returns a JSON schema with its keywords in one order; names of parameters and values keep theirs."""
    if isinstance(schema, list):
        return [sorted_keywords(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for keyword in sorted(schema):
        value = schema[keyword]
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            value = {name: sorted_keywords(each) for name, each in value.items()}
        elif keyword in _SCHEMAS:
            value = sorted_keywords(value)
        made[keyword] = value
    return made


class KeptTools:
    """The tools that sessions had, so that one that is missing in a request stays where it was in the prompt.

    Args:
        most_sessions: that are remembered; the one that was used last is forgotten last.
        most_tools: of one session.
        most_characters: of the tools of all sessions.
    """

    def __init__(self, most_sessions: int = 1024, most_tools: int = 256, most_characters: int = 64 << 20) -> None:
        self._most_sessions, self._most_tools, self._most_characters = most_sessions, most_tools, most_characters
        self._lock = threading.Lock()
        self._characters = 0
        self._sessions: OrderedDict[tuple[object, str], _Kept] = OrderedDict()

    def with_kept(
        self, scope: object, session: str, tools: Sequence[Declared], *, remember: bool = True
    ) -> list[Declared]:
        """Returns the tools of a session: those that it had, in their order, and then those that are new.

        Args:
            scope: what must be equal for two sessions to be one besides their names, such as the client.
            session: its name.
            tools: of this request; they replace those of the same name.
            remember: whether the request is answered.
        """
        now = {tool.name: tool for tool in tools}
        with self._lock:
            had = self._sessions.get((scope, session), _NONE)
            made = [now.pop(tool.name, replace(tool, index=None)) for tool in had.tools]
            made += now.values()
            if len(made) > self._most_tools:
                made = list(tools)
            if remember:
                self._put((scope, session), _Kept(tuple(made), sum(tool.size for tool in made)))
        return made

    def check(self) -> None:
        """Checks that the size is that of what is remembered, and within its bounds."""
        with self._lock:
            assert self._characters == sum(kept.characters for kept in self._sessions.values()), self._characters
            assert self._characters <= self._most_characters and len(self._sessions) <= self._most_sessions

    def _put(self, session: tuple[object, str], kept: _Kept) -> None:
        self._characters += kept.characters - self._sessions.pop(session, _NONE).characters
        self._sessions[session] = kept
        while self._characters > self._most_characters or len(self._sessions) > self._most_sessions:
            self._characters -= self._sessions.popitem(last=False)[1].characters


class _Kept(NamedTuple):
    """The tools of a session, and their size."""

    tools: tuple[Declared, ...]
    characters: int


_NONE = _Kept((), 0)
