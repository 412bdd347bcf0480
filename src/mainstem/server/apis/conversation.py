"""Conversations and tools as chat templates take them, built from the parts of an API's body.

A message is a dict with `role` and `content`, and `name`, `tool_calls`, `tool_call_id` and `reasoning_content` where
they are given. The content is one text, None for an assistant that said nothing, or with images a list of parts: each
is `{"type": "text", "text": ...}` or `{"type": "image", "url": ..., "at": the client's path of it}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from mainstem.server.apis.bodies import check_value
from mainstem.server.errors import wrong
from mainstem.server.fields.breakpoints import Mark
from mainstem.server.fields.tools import NO_PARAMETERS, Tool
from mainstem.server.parsing.custom import as_arguments

_NAME = Annotated[str, Meta(min_length=1)]
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$(?!\n)")]


def parts(messages: Sequence[Mapping[str, Any]], type: str) -> list[dict[str, Any]]:
    """Returns the parts of one type of a conversation with images, in order."""
    lists = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part for parts in lists for part in parts if part["type"] == type]


def joined(content: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Returns parts as the content of a message: as one text, unless there are images."""
    if all(part["type"] == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return list(content)


def call(id: str, name: str, arguments: str, *, custom: bool = False) -> dict[str, Any]:
    """Returns a call of a tool; a custom tool is a function with one parameter, and `arguments` its text."""
    given = as_arguments(arguments) if custom else arguments
    return {"id": id, "type": "function", "function": {"name": name, "arguments": given}}


def check_name(name: str | None, at: str) -> str:
    """Returns the name of the tool at a path.

    Raises:
        ApiError: 400; there is none, or it is none of a tool.
    """
    if name is None:
        raise wrong(f"{at}.name", "this field is required")
    check_value(name, ToolName, f"{at}.name")
    return name


def function(
    name: str | None, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None, at: str,
    schema: str,
) -> Tool:  # fmt: skip
    """Returns the function at a path; `schema`: what its API calls `parameters`.

    Raises:
        ApiError: 400; the name is missing or none of a tool, or the arguments are no object.
    """
    named = check_name(name, at)
    if parameters is not None and parameters.get("type", "object") != "object":
        raise wrong(f"{at}.{schema}", "must be a JSON schema of an object")
    return Tool(named, description, parameters or NO_PARAMETERS, bool(strict), at=f"{at}.{schema}")


class ConversationBuilder:
    """Builds messages, part by part.

    Attributes:
        messages: so far; the content of each is a list of parts, or None while it has none.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._paths: list[str] = []
        self._marks: dict[tuple[int, int], str | None] = {}  # by the message, and the parts of it that are before
        self.marked = 0  # times that a breakpoint was made

    @property
    def role(self) -> str | None:
        """The role of the last message."""
        return self.messages[-1]["role"] if self.messages else None

    def begin(self, role: str, at: str, **fields: str) -> None:
        """Begins a message, whose path is `at`; adjacent system messages become one, as most templates want."""
        if role == "system" and self.role == "system":
            return
        self.messages.append({"role": role, "content": None, **fields})
        self._paths.append(at)

    def text(self, text: str) -> None:
        """Adds a text to the last message."""
        self._add({"type": "text", "text": text})

    def image(self, url: str, at: str) -> None:
        """Adds an image to the last message; `at` is the path of its URL."""
        self._add({"type": "image", "url": url, "at": at})

    def mark(self, ttl: str | None) -> None:
        """Makes a breakpoint after the latest part of the last message, or after the whole message."""
        last, index = self.messages[-1], len(self.messages) - 1
        whole = last.get("tool_calls") or not last["content"]
        self._marks[index, _WHOLE if whole else len(last["content"])] = ttl
        self.marked += 1

    def reasoning(self, text: str) -> None:
        """Adds reasoning of the assistant to the last message."""
        last = self.messages[-1]
        last["reasoning_content"] = last.get("reasoning_content", "") + text

    def result(self, call_id: str, at: str, id_name: str) -> None:
        """Begins a message with the result of a call; `at` and `id_name` as in `call`."""
        check_value(call_id, _NAME, f"{at}.{id_name}")
        self.begin("tool", at, tool_call_id=call_id)

    def call(
        self, id: str, name: str, arguments: str | Mapping[str, Any], at: str, id_name: str = "id",
        *, custom: bool = False,
    ) -> None:  # fmt: skip
        """Adds a call of a tool to the last message, an assistant's.

        Args:
            id, name: of the call; of the tool.
            arguments: an object, or its JSON; of a custom tool the text.
            at: the path of the call.
            id_name: the client's name of its id.
            custom: whether the tool takes a text.
        """
        for field, value in ((id_name, id), ("name", name)):
            check_value(value, _NAME, f"{at}.{field}")
        given = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.messages[-1].setdefault("tool_calls", []).append(call(id, name, given, custom=custom))

    def finished(self) -> tuple[list[dict[str, Any]], list[Mark]]:
        """Returns the messages as templates take them, and the breakpoints in their order.

        Raises:
            ApiError: 400; a message has no content, and is not the assistant's.
        """
        for message, at in zip(self.messages, self._paths, strict=True):
            if message["content"] is None and message["role"] != "assistant":
                raise wrong(f"{at}.content", "this field is required")
        return [_as_template(each) for each in self.messages], list(self._placed())

    def _placed(self) -> Iterator[Mark]:
        for (index, part), ttl in sorted(self._marks.items(), key=lambda mark: mark[0]):
            if part == _WHOLE:
                yield after_message(index, ttl, len(self.messages))
            else:
                content = self.messages[index]["content"]
                yield after_part(index, part, ttl, [each.get("text", "") for each in content])

    def _add(self, part: dict[str, Any]) -> None:
        last = self.messages[-1]
        if last["content"] is None:
            last["content"] = []
        last["content"].append(part)


_WHOLE = 1 << 62
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Of a message, in the order in which a chat's have them: a template may write a message as it is."""


def _as_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as templates take it: without thoughts that say nothing, as in a chat."""
    content = None if message["content"] is None else joined(message["content"])
    fields = {**message, "content": content, "reasoning_content": message.get("reasoning_content") or None}
    return {name: fields[name] for name in _FIELDS if fields.get(name) is not None or name == "content"}


def after_part(message: int, parts: int, ttl: str | None, texts: Sequence[str]) -> Mark:
    """Returns the place after some parts of a message; `texts`: of all its parts, empty where it is an image."""
    return Mark(ttl, message=message, part=parts, offset=len("\n".join(texts[:parts])))


def after_message(message: int, ttl: str | None, messages: int) -> Mark:
    """Returns the place after a message of a conversation of so many."""
    return Mark(ttl, message=message + 1 if message + 1 < messages else None)


def check_type(part: Struct, kind: str, fields: Mapping[str, Sequence[str]], at: str) -> None:
    """Checks that a part of a body is of a known type, and has no fields but those of its type.

    Args:
        part: has a field for each name that any type has.
        kind: its type.
        fields: the names of each type.
        at: its path.

    Raises:
        ApiError: 400; names the field.
    """
    if kind not in fields:
        problem = f"must be one of {', '.join(map(repr, fields))} here, got {kind!r}"
        raise wrong(f"{at}.type", problem, "unsupported_content")
    for name in part.__struct_fields__:
        if name not in ("type", *fields[kind]) and getattr(part, name) is not None:
            raise wrong(f"{at}.{name}", f"not a field of the type {kind!r}")


_KINDS: Mapping[type, str] = {str: "a text", list: "a list of blocks"}


def needed(part: Struct, name: str, at: str, kind: type = object) -> Any:
    """Returns a field that the part of a body at a path must have, of some type.

    Raises:
        ApiError: 400; it is not there, or is of another type.
    """
    value, where = getattr(part, name), f"where the type is {getattr(part, 'type', None) or 'message'!r}"
    if value is None:
        raise wrong(f"{at}.{name}", f"this field is required {where}")
    if not isinstance(value, kind):
        raise wrong(f"{at}.{name}", f"must be {_KINDS.get(kind, 'an object')} {where}")
    return value
