"""The items of conversations of /v1/responses, by the OpenAI API reference, as messages of a conversation.

One rule decides about each item. An item of the client, of the assistant or of a tool of the client is taken. If the
client ran a tool that OpenAI's models know by heart, the call is shown as one of a function of that name. An item that
OpenAI ran, or that only OpenAI can read, is left out and named as ignored: the model could not be shown any of it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from mainstem.server.apis.conversation import ConversationBuilder, check_type, needed
from mainstem.server.apis.responses.tools import Tool, qualified
from mainstem.server.errors import wrong
from mainstem.server.fields.breakpoints import Breakpoint
from mainstem.server.fields.rules import Field, Rules

ITEMS: Mapping[str, tuple[str, ...]] = {
    "message": ("id", "role", "content"),
    "reasoning": ("id", "content", "summary", "encrypted_content"),
    "function_call": ("id", "call_id", "namespace", "name", "arguments"),
    "function_call_output": ("id", "call_id", "namespace", "name", "output"),
    "custom_tool_call": ("id", "call_id", "namespace", "name", "input"),
    "custom_tool_call_output": ("id", "call_id", "name", "output"),
    "local_shell_call": ("id", "call_id", "action"),
    "local_shell_call_output": ("id", "call_id", "output"),
    "shell_call": ("id", "call_id", "action"),
    "shell_call_output": ("id", "call_id", "output"),
    "apply_patch_call": ("id", "call_id", "operation"),
    "apply_patch_call_output": ("id", "call_id", "output"),
    "additional_tools": ("id", "role", "tools"),
    "tool_search_output": ("id", "call_id", "execution", "tools"),
    "agent_message": ("id", "author", "recipient", "content"),
    "item_reference": ("id",),
}
"""The fields of items that are taken, by type."""

_OF_OPENAI = (
    "file_search_call, web_search_call, computer_call, computer_call_output, code_interpreter_call, "
    "image_generation_call, mcp_list_tools, mcp_approval_request, mcp_approval_response, mcp_call, "
    "tool_search_call, program, program_output, compaction, context_compaction"
)
LEFT_OUT = frozenset(_OF_OPENAI.split(", "))
"""The types of items that OpenAI ran, or alone can read."""

REFUSED = {
    "compaction_trigger": "asks for an answer that is a compaction",
    "configuration_update": "changes settings between two turns",
}
"""The types of items that would change the answer, and how."""

_PARTS: Mapping[str, tuple[str, ...]] = {
    "input_text": ("text", "prompt_cache_breakpoint"),
    **dict.fromkeys(("output_text", "text"), ("text",)),
    "refusal": ("refusal",),
    "input_image": ("image_url", "prompt_cache_breakpoint"),
}
_THOUGHTS = dict.fromkeys(("reasoning_text", "summary_text"), ("text",))
_EARLIER = Field("of an earlier answer", ([],))
_STATUS = Field("of an earlier answer", ("completed", "incomplete", "in_progress"))
_LATER = Field("a call whose result comes later", (False,))
_DIRECT = Field("a call of a tool by code that OpenAI runs", ({"type": "direct"},))
_DETAIL = Field("how closely to look; the model's processor decides", ("auto",))
_PART = Rules(
    {"annotations": _EARLIER, "logprobs": _EARLIER, "detail": _DETAIL},
    {"file_id": Field("a file that OpenAI keeps")},
)
RULES: Mapping[str, Rules] = {
    "input": Rules(
        {
            "status": _STATUS,
            "phase": _EARLIER,
            "environment": Field("where a command was run"),
            "max_output_length": Field("how much of an output was kept"),
        },
        {"caller": _DIRECT, "async": _LATER},
        left_out=LEFT_OUT.__contains__,
    ),
    "content": _PART,
    "output": _PART,
}
"""Other fields of items and of their parts: which are ignored, and which are refused."""


class Part(Struct, omit_defaults=True):
    """A part of a message, of the output of a call, or of reasoning; `type` says which fields it has.

    A part of the output of shell commands has no type.
    """

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    prompt_cache_breakpoint: Breakpoint | None = None
    stdout: str | None = None
    stderr: str | None = None
    outcome: Any = None


class Item(Struct, omit_defaults=True):
    """One item of a conversation; `type` says which fields it has."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    action: Any = None
    operation: Any = None
    output: str | list[Part] | dict[str, Any] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    tools: list[Tool] | None = None
    execution: str | None = None
    author: str | None = None
    recipient: str | None = None


def add(built: ConversationBuilder, item: Item, at: str) -> list[str]:
    """Adds an item to a conversation; reasoning, text and calls of the assistant in a row are one message.

    Returns:
        The paths of what is not shown, besides items of `LEFT_OUT`.

    Raises:
        ApiError: 400; the item is not one that is taken, or has not what its type has.
    """
    kind = item.type or "message"
    if kind in LEFT_OUT:
        return []
    if kind in REFUSED:
        raise wrong(f"{at}.type", f"{kind!r} is not supported, since it {REFUSED[kind]}", "unsupported_content")
    check_type(item, kind, ITEMS, at)
    match kind:
        case "message":
            _add_message(built, item, at)
        case "agent_message":
            built.begin("user", at)
            built.text(f"From {item.author} to {item.recipient}:")
            return _add_content(built, needed(item, "content", at), f"{at}.content", ("encrypted_content",))
        case "reasoning":
            return _add_reasoning(built, item, at)
        case "function_call" | "custom_tool_call" | "local_shell_call" | "shell_call" | "apply_patch_call":
            _begin_turn(built, at, after=("reasoning_content", "content", "tool_calls"))
            _add_call(built, item, kind, at)
        case "additional_tools" | "tool_search_output" | "item_reference":
            pass  # the reader has already resolved their tools and references
        case _:
            built.result(_call_id(item, at), at, "call_id")
            output = needed(item, "output", at)
            _add_content(built, json.dumps(output) if isinstance(output, dict) else output, f"{at}.output")
    return []


def _add_call(built: ConversationBuilder, item: Item, kind: str, at: str) -> None:
    call_id = _call_id(item, at)
    if kind == "custom_tool_call":
        name = qualified(item.namespace, needed(item, "name", at))
        built.call(call_id, name, needed(item, "input", at), at, "call_id", custom=True)
        return
    if kind == "function_call":
        name, arguments = qualified(item.namespace, needed(item, "name", at)), needed(item, "arguments", at)
    else:
        name = kind.removesuffix("_call")
        arguments = needed(item, "operation" if kind == "apply_patch_call" else "action", at)
    built.call(call_id, name, arguments, at, "call_id")


def _call_id(item: Item, at: str) -> str:
    """Returns the id of a call; outputs of `local_shell_call` have it as their own."""
    call_id = item.call_id or (item.id if item.type == "local_shell_call_output" else None)
    return call_id or str(needed(item, "call_id", at))


def _add_message(built: ConversationBuilder, item: Item, at: str) -> None:
    role = needed(item, "role", at)
    if role == "assistant":
        _begin_turn(built, at, after=("reasoning_content",))
    else:
        built.begin("system" if role == "developer" else role, at)
    _add_content(built, needed(item, "content", at), f"{at}.content")


def _begin_turn(built: ConversationBuilder, at: str, after: Sequence[str]) -> None:
    """Begins a message of the assistant, unless the last one is its and has nothing but fields of `after`."""
    last = built.messages[-1] if built.role == "assistant" else None
    if last is None or any(value for name, value in last.items() if name not in ("role", *after)):
        built.begin("assistant", at)


def _add_content(
    built: ConversationBuilder, content: str | list[Part], at: str, unread: Sequence[str] = ()
) -> list[str]:
    """Adds a content; returns the paths of parts of the types in `unread`, which are left out."""
    if isinstance(content, str):
        built.text(content)
        return []
    left = []
    for i, part in enumerate(content):
        here = f"{at}[{i}]"
        if part.type in unread:
            left.append(here)
        elif part.type is None and part.outcome is not None:
            built.text((part.stdout or "") + (part.stderr or "") + f"\n{json.dumps(part.outcome)}")
        else:
            _add_part(built, part, here)
    return left


def _add_part(built: ConversationBuilder, part: Part, at: str) -> None:
    kind = needed(part, "type", at)
    check_type(part, kind, _PARTS, at)
    if kind == "input_image":
        built.image(needed(part, "image_url", at), f"{at}.image_url")
    else:
        built.text(needed(part, "refusal" if kind == "refusal" else "text", at))
    if part.prompt_cache_breakpoint is not None:
        built.mark(part.prompt_cache_breakpoint.ttl)


def _add_reasoning(built: ConversationBuilder, item: Item, at: str) -> list[str]:
    content = [Part("reasoning_text", item.content)] if isinstance(item.content, str) else item.content or []
    for name, parts in (("content", content), ("summary", item.summary or [])):
        for i, part in enumerate(parts):
            check_type(part, needed(part, "type", f"{at}.{name}[{i}]"), _THOUGHTS, f"{at}.{name}[{i}]")
    sealed = None if item.encrypted_content is None else unsealed(item.encrypted_content)
    shown = "".join(part.text or "" for part in content) or sealed
    if text := shown or "\n".join(part.text or "" for part in item.summary or ()):
        _begin_turn(built, at, after=())
        built.reasoning(text)
    return [f"{at}.encrypted_content"] if item.encrypted_content and sealed is None else []


def offered(item: Item) -> Sequence[Tool]:
    """Returns the tools that an item offers."""
    return () if item.type in LEFT_OUT else item.tools or ()


# --- reasoning that a client brings back as it went ---------------------------------------------------------------

_SEAL = "mainstem.1."


def sealed(text: str) -> str:
    """Returns reasoning as `encrypted_content`: encoded, not encrypted, since the item shows the same text."""
    return _SEAL + base64.urlsafe_b64encode(text.encode(errors="replace")).decode()


def unsealed(content: str) -> str | None:
    """Returns the reasoning in an `encrypted_content`; None: another server wrote it."""
    if not content.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(content.removeprefix(_SEAL), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
