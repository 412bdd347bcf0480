"""The tools of /v1/responses, by the OpenAI API reference.

A namespace is a group of tools. Each of them is offered under a name that has both, and its calls come back with both
apart. Tools that OpenAI runs are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mainstem.server.apis.bodies import check_value
from mainstem.server.apis.conversation import check_name, check_type, function
from mainstem.server.errors import wrong
from mainstem.server.fields.rules import Field, Rules
from mainstem.server.fields.tools import Tool as Offered
from mainstem.server.fields.tools import Tooling, custom_tool, is_hosted, tooling_of
from mainstem.server.parsing.custom import Form

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
"""Other fields of tools: which are ignored, and which are refused."""


class TextFormat(Struct, omit_defaults=True):
    """The form of the text that a custom tool takes: any, or by a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class Tool(Struct, omit_defaults=True):
    """A tool; `type` says which fields it has."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
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


def qualified(namespace: str | None, name: str) -> str:
    """Returns the name under which a tool of a namespace is offered; None: it is in none."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def tools_of(given: Iterable[tuple[str, Tool]], more: Iterable[tuple[str, Tool]]) -> list[tuple[str, Offered]]:
    """Returns the tools that the model may call, each with the path of its name.

    Args:
        given: by the request itself, each with its path.
        more: by items of the conversation; those that are there already, the same, are left out.

    Raises:
        ApiError: 400; a tool is of an unknown type, has fields of another, or lacks one.
    """
    flat = [*_flat(given)]
    for each in _flat(more):
        if each[1:] not in [known[1:] for known in flat]:
            flat.append(each)
    return [(f"{at}.name", _offered(at, namespace, tool)) for at, namespace, tool in flat]


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
            raise wrong(f"{at}.name", "this field is required")
        for i, each in enumerate(tool.tools or ()):
            check_type(each, each.type or "", _IN_NAMESPACES, f"{at}.tools[{i}]")
            yield f"{at}.tools[{i}]", tool.name, _introduced(each, tool) if i == 0 else each


def _introduced(tool: Tool, namespace: Tool) -> Tool:
    """Returns the first tool of a namespace, whose description says what the namespace is."""
    said = [text for text in (namespace.description, tool.description) if text]
    return Tool(tool.type, tool.name, "\n".join(said) or None, tool.parameters, tool.strict, tool.format)


def _offered(at: str, namespace: str | None, tool: Tool) -> Offered:
    name = None if tool.name is None else qualified(namespace, tool.name)
    if tool.type == "function":
        made = function(name, tool.description, tool.parameters, tool.strict, at, "parameters")
    else:
        form = None if tool.format is None else _form(tool.format, f"{at}.format")
        made = custom_tool(check_name(name, at), tool.description, form, f"{at}.format.definition")
    return made if namespace is None else replace(made, apart=(namespace, str(tool.name)))


def _form(format: TextFormat, at: str) -> Form | None:
    if format.type == "text":
        return None
    for name in ("syntax", "definition"):
        if getattr(format, name) is None:
            raise wrong(f"{at}.{name}", "this field is required")
    check_value(format.definition, Annotated[str, Meta(min_length=1)], f"{at}.definition")
    return Form(format.syntax, format.definition)  # type: ignore[arg-type]


def chosen(
    tools: Sequence[tuple[str, Offered]],
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
    parallel: bool,
) -> Tooling:
    """Returns the tools, and which may be called; see `tooling_of`. One that is named is called once.

    Raises:
        ApiError: 400; besides, a tool that OpenAI runs must be called.
    """
    if choice is None or isinstance(choice, str):
        return tooling_of(tools, choice or "auto", parallel=parallel)
    check_type(choice, choice.type, _CHOICES, "tool_choice")
    if choice.type != "allowed_tools":
        check_value(choice.name, str, "tool_choice.name")
        return tooling_of(tools, "required", {"tool_choice.name": str(choice.name)}, parallel=False)
    at, given = "tool_choice.tools", choice.tools or []
    kept = {f"{at}[{i}]": tool for i, tool in enumerate(given) if not is_hosted(tool.type)}
    if given and not kept:
        if choice.mode == "required":
            raise wrong(at, "this server has none of them", "unsupported_tool")
        return tooling_of(tools, "none", parallel=parallel)
    check_value(given, Annotated[list[Any], Meta(min_length=1)], at)
    for path, tool in kept.items():
        check_value(tool.type, Literal["function", "custom"], f"{path}.type")
        check_value(tool.name, str, f"{path}.name")
    named = {f"{path}.name": str(tool.name) for path, tool in kept.items()}
    return tooling_of(tools, choice.mode or "auto", named, parallel=parallel)
