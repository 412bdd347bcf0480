"""The conversation of a request for /v1/messages: its messages and their blocks, by Anthropic's API reference.

A document or the result of a search is a text, with its title first. Blocks of an earlier answer that only Anthropic's
servers can read, or that report a tool that they ran, are left out, and named as ignored. So is a line that only
accounts for the request (`attribution`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from mainstem.server.apis.conversation import ConversationBuilder, check_type, needed
from mainstem.server.errors import wrong
from mainstem.server.fields.breakpoints import CacheControl
from mainstem.server.fields.rules import Field, Rules

LEFT_OUT = frozenset(
    {
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "mcp_tool_listing",
        "fallback",
    }
)
"""Types of blocks that only Anthropic can use: encrypted reasoning, and tools that its servers ran."""

_ATTRIBUTION = re.compile(r"\s*x-anthropic-billing-header:[^\n]*(?:\n\s*)?")

BY_CODE = "a call of a tool by code that Anthropic runs"
_EARLIER = Field("of an earlier answer; nothing is verified", ("",))
_TEXT = {"citations": Field("of an earlier answer; or whether to cite", ([], {"enabled": False}))}
RULES: Mapping[str, Rules] = {
    "system": Rules(_TEXT),
    "content": Rules(
        {**_TEXT, "signature": _EARLIER, "encrypted_content": _EARLIER, "tool_changes": _EARLIER},
        {
            "caller": Field(BY_CODE, ({"type": "direct"},)),
            "toolset_name": Field("a tool of a set that Anthropic looks up"),
            "transformations": Field("an image that Anthropic changes"),
        },
        left_out=LEFT_OUT.__contains__,
    ),
}
"""Other fields of blocks: which are ignored, and which are refused."""


class Source(Struct):
    """The location of an image or a document: in the message, or at a URL."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[ContentBlock] | None = None


class ContentBlock(Struct):
    """A part of a message; `type` says which fields it has."""

    type: str
    text: str | None = None
    source: Source | str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: str | list[ContentBlock] | dict[str, Any] | None = None
    title: str | None = None
    context: str | None = None
    is_error: bool | None = None
    thinking: str | None = None
    cache_control: CacheControl | None = None


class Message(Struct):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


_TEXT_BLOCK: dict[str, tuple[str, ...]] = {"text": ("text", "cache_control")}
_SHOWN = _TEXT_BLOCK | {
    "image": ("source", "cache_control"),
    "document": ("source", "title", "context", "cache_control"),
    "search_result": ("source", "title", "content", "cache_control"),
}
_COMPACTION = {"compaction": ("content", "cache_control")}
_BLOCKS = {
    "system": _TEXT_BLOCK,
    "user": _SHOWN | {"tool_result": ("tool_use_id", "content", "is_error", "cache_control")} | _COMPACTION,
    "assistant": {
        **_TEXT_BLOCK,
        "thinking": ("thinking",),
        "tool_use": ("id", "name", "input", "cache_control"),
        **_COMPACTION,
    },
    "tool": _SHOWN | {"tool_reference": ("tool_name", "cache_control")},
    "document": _TEXT_BLOCK | {"image": ("source", "cache_control")},
}
"""The fields of blocks, by the role of their message and by type; `tool` stands for the content of a `tool_result`."""
_IMAGES = {"base64": ("media_type", "data"), "url": ("url",)}
_DOCUMENTS = {"text": ("media_type", "data"), "content": ("content",)}


def conversation_of(system: str | Sequence[ContentBlock] | None, messages: Sequence[Message]) -> ConversationBuilder:
    """Builds the conversation. Adjacent turns of one role are one message; results of tools have their own.

    Raises:
        ApiError: 400; a block is of a type that is not supported there, or lacks a field.
    """
    built = ConversationBuilder()
    if isinstance(system, str) and system:
        _add_content(built, "system", system, "system")
    for i, block in enumerate(() if isinstance(system, str) else system or ()):
        if not _is_attribution(block):
            _add_block(built, "system", block, f"system[{i}]", _BLOCKS["system"])
    for i, message in enumerate(messages):
        at = f"messages[{i}].content"
        shown = message.content if isinstance(message.content, str) else _shown(message.content)
        if not shown and message.role == "assistant":  # an answer may have been cut before it said anything
            _enter(built, "assistant", at)
        elif shown == []:
            raise wrong(at, "must have at least one block")
        else:
            _add_content(built, message.role, message.content, at)
    return built


def attribution(system: str | Sequence[ContentBlock] | None) -> list[str]:
    """Returns the paths of the blocks of a system prompt that are for Anthropic's accounts, not for the model.

    Claude Code sends one first. It has a number that differs in each request, so nothing after it would ever be found
    in the cache.
    """
    blocks = () if isinstance(system, str) else system or ()
    return [f"system[{i}]" for i, block in enumerate(blocks) if _is_attribution(block)]


def _is_attribution(block: ContentBlock) -> bool:
    return block.type == "text" and _ATTRIBUTION.fullmatch(block.text or "") is not None


def _shown(blocks: Sequence[ContentBlock]) -> list[ContentBlock]:
    return [block for block in blocks if block.type not in LEFT_OUT]


def _add_content(
    built: ConversationBuilder, role: str, content: object, at: str, kinds: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Adds a text or blocks to a message of a role; `kinds`: the types that may be there, and their fields."""
    if isinstance(content, str):
        _enter(built, role, at)
        built.text(content)
        return
    if not isinstance(content, list):
        raise wrong(at, "must be a text or a list of blocks")
    for i, block in enumerate(content):
        if block.type not in LEFT_OUT:
            _add_block(built, role, block, f"{at}[{i}]", kinds or _BLOCKS[role])


def _enter(built: ConversationBuilder, role: str, at: str) -> None:
    if built.role != role:
        built.begin(role, at)


def _add_block(
    built: ConversationBuilder, role: str, block: ContentBlock, at: str, kinds: Mapping[str, Sequence[str]]
) -> None:
    check_type(block, block.type, kinds, at)
    if block.type != "tool_result":
        _enter(built, role, at)
    match block.type:
        case "text":
            built.text(needed(block, "text", at))
        case "image":
            _add_image(built, block, at)
        case "document":
            _add_document(built, role, block, at)
        case "search_result":
            built.text(needed(block, "title", at))
            built.text(needed(block, "source", at, str))
            _add_content(built, role, needed(block, "content", at, list), f"{at}.content", _TEXT_BLOCK)
        case "tool_reference":
            built.text(needed(block, "tool_name", at))
        case "compaction":
            built.text("" if block.content is None else needed(block, "content", at, str))
        case "thinking":
            built.reasoning(needed(block, "thinking", at))
        case "tool_use":
            built.call(needed(block, "id", at), needed(block, "name", at), needed(block, "input", at), at)
        case "tool_result":
            built.result(needed(block, "tool_use_id", at), at, "tool_use_id")
            if block.is_error:
                built.text("Error:")
            _add_content(built, "tool", block.content or "", f"{at}.content")
    if block.cache_control is not None:
        built.mark(block.cache_control.ttl)


def _add_image(built: ConversationBuilder, block: ContentBlock, at: str) -> None:
    source: Source = needed(block, "source", at, Source)
    at = f"{at}.source"
    check_type(source, source.type, _IMAGES, at)
    if source.type == "base64":
        built.image(f"data:{needed(source, 'media_type', at)};base64,{needed(source, 'data', at)}", f"{at}.data")
    else:
        built.image(needed(source, "url", at), f"{at}.url")


def _add_document(built: ConversationBuilder, role: str, block: ContentBlock, at: str) -> None:
    source: Source = needed(block, "source", at, Source)
    at = f"{at}.source"
    if source.type not in _DOCUMENTS:
        advice = "documents are read as text here; send the text of a PDF, or pictures of its pages"
        problem = f"must be 'text' or 'content', got {source.type!r}: {advice}"
        raise wrong(f"{at}.type", problem, "unsupported_content")
    check_type(source, source.type, _DOCUMENTS, at)
    for text in (block.title, block.context):
        if text:
            built.text(text)
    name = "data" if source.type == "text" else "content"
    _add_content(built, role, needed(source, name, at), f"{at}.{name}", _BLOCKS["document"])
