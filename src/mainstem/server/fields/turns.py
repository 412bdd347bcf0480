"""The messages of a chat, made of what another API calls a conversation.

Builds the body that `requests.parse_chat` reads, so that all conversations are checked and rendered in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mainstem.server.errors import ApiError


class Turns:
    """Messages in the form of /v1/chat/completions.

    `names` has the paths by which the client knows a message or a part, by those in the chat's body, for errors.
    `marks` is the number of breakpoints.
    """

    def __init__(self) -> None:
        self.marks = 0
        self.messages: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}

    @property
    def role(self) -> str | None:
        """The role of the last message."""
        return self.messages[-1]["role"] if self.messages else None

    def begin(self, role: str, at: str, **fields: str) -> None:
        """Begins a message, whose path is `at`; adjacent system messages are one, since most templates take one."""
        if role == "system" and self.role == "system":
            return
        self.messages.append({"role": role, "content": None, **fields})
        self.names[self._here] = at

    def text(self, text: str) -> None:
        """Adds a text to the last message."""
        self._parts().append({"type": "text", "text": text})

    def image(self, url: str, at: str) -> None:
        """Adds an image to the last message; `at` is the path of its URL."""
        parts = self._parts()
        self.names[f"{self._here}.content[{len(parts)}].image_url.url"] = at
        parts.append({"type": "image_url", "image_url": {"url": url}})

    def mark(self, ttl: str | None) -> None:
        """Makes a breakpoint after what was added last to the last message: a part of it, or else the whole message."""
        last = self.messages[-1]
        marked = last if last.get("tool_calls") or not last["content"] else last["content"][-1]
        marked["prompt_cache_breakpoint"] = {"mode": "explicit", "ttl": ttl}
        self.marks += 1

    def reasoning(self, text: str) -> None:
        """Adds what the assistant thought before the rest of the last message."""
        last = self.messages[-1]
        last["reasoning_content"] = last.get("reasoning_content", "") + text

    def result(self, call_id: str, at: str, id_name: str) -> None:
        """Begins a message with the result of a call; `at` and `id_name` as in `call`."""
        self.begin("tool", at, tool_call_id=call_id)
        self.names[f"{self._here}.tool_call_id"] = f"{at}.{id_name}"

    def call(self, id: str, name: str, arguments: str | Mapping[str, Any], at: str, id_name: str = "id") -> None:
        """Adds a call of a tool to the last message, an assistant's.

        Args:
            id, name: of the call; of the tool.
            arguments: an object, or its JSON.
            at: the path of the call.
            id_name: the client's name of its id.
        """
        calls = self.messages[-1].setdefault("tool_calls", [])
        here = f"{self._here}.tool_calls[{len(calls)}]"
        self.names |= {here: at, f"{here}.function": at, f"{here}.id": f"{at}.{id_name}"}
        given = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": given}})

    def custom_call(self, id: str, name: str, text: str, at: str, id_name: str = "id") -> None:
        """Adds a call of a custom tool, with a text, to the last message; see `call`."""
        calls = self.messages[-1].setdefault("tool_calls", [])
        here = f"{self._here}.tool_calls[{len(calls)}]"
        self.names |= {here: at, f"{here}.custom": at, f"{here}.id": f"{at}.{id_name}"}
        calls.append({"id": id, "type": "custom", "custom": {"name": name, "input": text}})

    @property
    def _here(self) -> str:
        return f"messages[{len(self.messages) - 1}]"

    def _parts(self) -> list[dict[str, Any]]:
        last = self.messages[-1]
        if last["content"] is None:
            last["content"] = []
        content: list[dict[str, Any]] = last["content"]
        return content


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
        message = f"{at}.type: must be one of {', '.join(map(repr, fields))} here, got {kind!r}"
        raise ApiError(400, message, param=f"{at}.type", code="unsupported_content")
    for name in part.__struct_fields__:
        if name not in ("type", *fields[kind]) and getattr(part, name) is not None:
            raise ApiError(400, f"{at}.{name}: not a field of the type {kind!r}", param=f"{at}.{name}")
