"""The tools of /v1/responses, by the OpenAI API reference, as those of a chat.

A namespace is a group of tools. Each of them is offered under a name that has both, and its calls come back with both
apart. Tools that OpenAI runs are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from mainstem.server.errors import ApiError
from mainstem.server.fields.rules import Field, Rules
from mainstem.server.fields.tools import is_hosted
from mainstem.server.fields.turns import check_type

_TOOLS: Mapping[str, tuple[str, ...]] = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
    "namespace": ("name", "description", "tools"),
}
_IN_NAMESPACES = {kind: _TOOLS[kind] for kind in ("function", "custom")}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "function": ("name",),
    "custom": ("name",),
    "allowed_tools": ("mode", "tools"),
}
"""The fields of tools, of forms of texts, and of choices of tools, by type."""

RULES: Mapping[str, Rules] = {
    "tools": Rules(
        {
            "defer_loading": Field("a tool that OpenAI shows the model only when it looks for it", (False,)),
            "output_schema": Field("what a tool returns"),
        },
        {
            "allowed_callers": Field("a call of a tool by code that OpenAI runs", (["direct"],)),
            "async": Field("a call whose result comes later", (False,)),
        },
        left_out=is_hosted,
    )
}
"""What becomes of other fields of tools."""


class TextFormat(Struct, omit_defaults=True):
    """The form of the text that a custom tool takes: any, or by a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class Tool(Struct, omit_defaults=True):
    """A tool; `type` says which fields it has. A chat's `tools` are checked, so all may be absent here."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None
    format: TextFormat | None = None
    tools: list[Tool] | None = None


class ToolName(Struct):
    """A tool by its name, or by its type where OpenAI runs it."""

    type: str = "function"
    name: str | None = None


class ToolChoice(Struct):
    """The tool that must be called, or some that may or must be."""

    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolName] | None = None


class Tools(NamedTuple):
    """The tools of a request, as those of a chat.

    Args:
        chat: the tools.
        names: the paths of the client's body, by those of the chat's.
        apart: namespace and name of tools in a namespace, by the name under which they are offered.
    """

    chat: list[dict[str, Any]]
    names: dict[str, str]
    apart: dict[str, tuple[str, str]]


def qualified(namespace: str | None, name: str) -> str:
    """Returns the name under which a tool of a namespace is offered; None: it is in none."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def tools_of(given: Iterable[tuple[str, Tool]], more: Iterable[tuple[str, Tool]] = ()) -> Tools:
    """Returns the tools of a request.

    Args:
        given: by the request itself, each with its path.
        more: by items of the conversation; those that are there already, the same, are left out.

    Raises:
        ApiError: 400; a tool is of an unknown type, or has fields of another.
    """
    made, flat = Tools([], {}, {}), [*_flat(given)]
    for each in _flat(more):
        if each[1:] not in [known[1:] for known in flat]:
            flat.append(each)
    for at, namespace, tool in flat:
        here = f"tools[{len(made.chat)}]"
        made.chat.append(_chat_tool(tool, namespace))
        made.names.update({f"{here}.{tool.type}": at, f"{here}.custom.format.grammar": f"{at}.format"})
        if namespace is not None and tool.name is not None:
            made.apart[qualified(namespace, tool.name)] = (namespace, tool.name)
    return made


def _flat(given: Iterable[tuple[str, Tool]]) -> Iterator[tuple[str, str | None, Tool]]:
    """Yields the path, the namespace and the tool of each function and custom tool."""
    for at, tool in given:
        if is_hosted(tool.type or ""):
            continue
        check_type(tool, tool.type or "", _TOOLS, at)
        if tool.type != "namespace":
            yield at, None, tool
            continue
        if not tool.name:
            raise ApiError(400, f"{at}.name: this field is required", param=f"{at}.name")
        for i, each in enumerate(tool.tools or ()):
            check_type(each, each.type or "", _IN_NAMESPACES, f"{at}.tools[{i}]")
            yield f"{at}.tools[{i}]", tool.name, _introduced(each, tool) if i == 0 else each


def _introduced(tool: Tool, namespace: Tool) -> Tool:
    """Returns the first tool of a namespace, whose description says what the namespace is."""
    said = [text for text in (namespace.description, tool.description) if text]
    return Tool(tool.type, tool.name, "\n".join(said) or None, tool.parameters, tool.strict, tool.format)


def _chat_tool(tool: Tool, namespace: str | None) -> dict[str, Any]:
    fields = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    if tool.name is not None:
        fields["name"] = qualified(namespace, tool.name)
    if tool.format is not None:
        fields["format"] = _format(tool.format)
    kind = tool.type or ""
    return {"type": kind, kind: {name: value for name, value in fields.items() if value is not None}}


def _format(format: TextFormat) -> dict[str, Any]:
    if format.type == "text":
        return {"type": "text"}
    grammar = {"syntax": format.syntax, "definition": format.definition}
    return {"type": "grammar", "grammar": {name: value for name, value in grammar.items() if value is not None}}


def choice_of(choice: str | ToolChoice) -> str | dict[str, Any]:
    """Returns which tools may be called, as a chat says it.

    Raises:
        ApiError: 400; a tool that OpenAI runs must be called.
    """
    if isinstance(choice, str):
        return choice
    check_type(choice, choice.type, _CHOICES, "tool_choice")
    if choice.type != "allowed_tools":
        return {"type": choice.type, choice.type: {"name": choice.name}}
    tools = [{"type": tool.type, tool.type: {"name": tool.name}} for tool in choice.tools or () if not _left_out(tool)]
    if not tools and choice.tools:
        if choice.mode == "required":
            message = "tool_choice.tools: this server has none of them"
            raise ApiError(400, message, param="tool_choice.tools", code="unsupported_tool")
        return "none"
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": tools}}


def _left_out(tool: ToolName) -> bool:
    return is_hosted(tool.type)


def choice_names(choice: str | ToolChoice | None) -> dict[str, str]:
    """Returns the paths of a choice, by those of the chat's."""
    given = choice.tools if isinstance(choice, ToolChoice) else None
    kept = (i for i, tool in enumerate(given or ()) if not _left_out(tool))
    paths = {f"tools[{made}].{kind}": f"tools[{i}]" for made, i in enumerate(kept) for kind in ("function", "custom")}
    inside = {f"tool_choice.allowed_tools.{old}": f"tool_choice.{new}" for old, new in paths.items()}
    return inside | dict.fromkeys(
        ("tool_choice.function", "tool_choice.custom", "tool_choice.allowed_tools"), "tool_choice"
    )
