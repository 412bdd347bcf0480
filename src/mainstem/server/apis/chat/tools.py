"""The tools of a chat in JSON, by the OpenAI API reference: specifications, choices, and calls.

Knows the names of fields, and turns them into a `Tool`. Does not know messages, nor how a model writes calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mainstem.server.apis.conversation import ToolName, call, function
from mainstem.server.fields.breakpoints import Breakpoint, CacheControl
from mainstem.server.fields.tools import Tool, Tooling, custom_tool, is_hosted, tooling_of
from mainstem.server.parsing.custom import Form


class FunctionCall(Struct):
    """The function of a call, and its arguments: a JSON object, if the model wrote one."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: str


class CustomCall(Struct):
    """The custom tool of a call, and its text."""

    name: Annotated[str, Meta(min_length=1)]
    input: str


class ToolCall(Struct):
    """A call of a tool in a message of the assistant."""

    id: Annotated[str, Meta(min_length=1)]
    function: FunctionCall | None = None
    custom: CustomCall | None = None
    type: Literal["function", "custom"] = "function"

    def __post_init__(self) -> None:
        """Checks that it has the field of its type, and no other."""
        _check_type(self, self.type)

    def template_input(self) -> dict[str, Any]:
        """Returns it as chat templates take it."""
        if self.custom is not None:
            return call(self.id, self.custom.name, self.custom.input, custom=True)
        assert self.function is not None, "it was checked"
        return call(self.id, self.function.name, self.function.arguments)


def _check_type(part: Struct, kind: str) -> None:
    """Checks that a part of a body has the field of its type, and not that of the other type."""
    if getattr(part, kind) is None:
        raise ValueError(f"Object missing required field `{kind}`")
    other = {"function": "custom", "custom": "function"}[kind]
    if getattr(part, other) is not None:
        raise ValueError(f"`{other}`: not a field of the type {kind!r}")


class FunctionSpec(Struct):
    """A function that the model may call. Arguments are held to the schema where it is strict or calls are required.

    `cache_control` is an extension: litellm reads it here, too.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class CustomGrammar(Struct):
    """The grammar of a text: in llguidance's dialect of Lark, or a regular expression of Rust for all of it."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1)]


class CustomFormat(Struct):
    """The form of the text that a custom tool takes: any, or by a grammar."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None

    def __post_init__(self) -> None:
        """Checks that a grammar is there where it is the form."""
        if (self.type == "grammar") != (self.grammar is not None):
            raise ValueError("`grammar`: this field is required where the type is 'grammar', and not a field of 'text'")


class CustomSpec(Struct):
    """A tool that takes one text instead of arguments."""

    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class ToolSpec(Struct):
    """A tool of a request: a function, a custom one, or one that only some servers have.

    A tool that only some servers have is left out: the model may do without it. `prompt_cache_breakpoint` and
    `cache_control` are extensions.
    """

    function: FunctionSpec | None = None
    custom: CustomSpec | None = None
    type: str = "function"
    prompt_cache_breakpoint: Breakpoint | None = None
    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        """Checks that it has the field of its type, and no other."""
        if self.type in ("function", "custom"):
            _check_type(self, self.type)
        elif not is_hosted(self.type):
            raise ValueError(f"`type`: must be 'function' or 'custom', got {self.type!r}")

    @property
    def name(self) -> str | None:
        """The name; None: the tool is left out."""
        given = self.custom or self.function
        return None if given is None or is_hosted(self.type) else given.name

    @property
    def breakpoint(self) -> Breakpoint | CacheControl | None:
        """The breakpoint after it."""
        within = None if self.function is None else self.function.cache_control
        return self.prompt_cache_breakpoint or self.cache_control or within

    def tool(self, at: str) -> Tool:
        """Returns the tool at a path, which is not one that is left out."""
        if self.custom is not None:
            grammar = None if self.custom.format is None else self.custom.format.grammar
            form = None if grammar is None else Form(grammar.syntax, grammar.definition)
            where = f"{at}.custom.format.grammar.definition"
            return custom_tool(self.custom.name, self.custom.description, form, where)
        assert self.function is not None, "it was checked"
        each = self.function
        return function(each.name, each.description, each.parameters, each.strict, f"{at}.function", "parameters")


def tools_of(specs: Sequence[ToolSpec] | None) -> list[tuple[str, Tool]]:
    """Returns the tools of a request that are not left out, each with the path of its name."""
    paths = ((f"tools[{i}]", spec) for i, spec in enumerate(specs or ()) if spec.name is not None)
    return [(f"{at}.{spec.type}.name", spec.tool(at)) for at, spec in paths]


class FunctionName(Struct):
    """The name of a tool."""

    name: str


class NamedTool(Struct):
    """A tool by its name."""

    function: FunctionName | None = None
    custom: FunctionName | None = None
    type: Literal["function", "custom"] = "function"

    def __post_init__(self) -> None:
        """Checks that it has the field of its type, and no other."""
        _check_type(self, self.type)

    @property
    def path(self) -> dict[str, str]:
        """The name of the tool, by the path of the name."""
        tool = self.custom or self.function
        return {} if tool is None else {f"{self.type}.name": tool.name}


class AllowedTools(Struct):
    """Some of the tools, which may or must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class ToolChoice(Struct):
    """A choice of tools by name: one that must be called, or some."""

    type: Literal["function", "custom", "allowed_tools"]
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    def __post_init__(self) -> None:
        """Checks that it has the field of its type."""
        if getattr(self, self.type) is None:
            raise ValueError(f"Object missing required field `{self.type}`")

    @property
    def named(self) -> dict[str, str]:
        """The names of the tools that may be called, by their paths."""
        if self.type == "allowed_tools" and self.allowed_tools is not None:
            tools = enumerate(self.allowed_tools.tools)
            paths = {f"tools[{i}].{at}": name for i, tool in tools for at, name in tool.path.items()}
            return {f"tool_choice.allowed_tools.{at}": name for at, name in paths.items()}
        given = self.custom if self.type == "custom" else self.function
        return {} if given is None else {f"tool_choice.{self.type}.name": given.name}


def chosen(
    specs: Sequence[ToolSpec] | None, choice: Literal["none", "auto", "required"] | ToolChoice | None, parallel: bool
) -> Tooling:
    """Returns the tools of a chat, and which may be called; see `tooling_of`. One that is named is called once."""
    tools = tools_of(specs)
    if choice is None or isinstance(choice, str):
        return tooling_of(tools, choice or "auto", parallel=parallel)
    if choice.allowed_tools is not None and choice.type == "allowed_tools":
        return tooling_of(tools, choice.allowed_tools.mode, choice.named, parallel=parallel)
    return tooling_of(tools, "required", choice.named, parallel=False)
