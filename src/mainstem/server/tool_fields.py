"""The tools of a chat in JSON, by the OpenAI API reference: what it offers, what may be called, and what was called.

Knows the names of fields, and turns them into a `Tool`. Does not know messages, nor how a model writes calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mainstem.server.breakpoints import Breakpoint
from mainstem.server.tools import NO_PARAMETERS, Tool


class FunctionCall(Struct):
    """What a call calls. The arguments are a JSON object, if the model wrote one."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: str


class ToolCall(Struct):
    """A call of a tool in a message of the assistant."""

    id: Annotated[str, Meta(min_length=1)]
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionSpec(Struct):
    """A function that the model may call. Arguments are held to the schema where it is strict or calls are required."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$(?!\n)")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        """Checks that the arguments are an object."""
        if self.parameters is not None and self.parameters.get("type", "object") != "object":
            raise ValueError("`parameters`: must be a JSON schema of an object")


class ToolSpec(Struct):
    """A tool of a request. `prompt_cache_breakpoint` is an extension."""

    function: FunctionSpec
    type: Literal["function"] = "function"
    prompt_cache_breakpoint: Breakpoint | None = None


def tools_of(specs: Sequence[ToolSpec] | None) -> tuple[Tool, ...]:
    """Returns the tools of a request."""
    functions = [spec.function for spec in specs or ()]
    return tuple(
        Tool(each.name, each.description, each.parameters or NO_PARAMETERS, bool(each.strict)) for each in functions
    )


class FunctionName(Struct):
    """The name of a tool."""

    name: str


class NamedTool(Struct):
    """A tool by its name."""

    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(Struct):
    """Some of the tools, which may or must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class ToolChoice(Struct):
    """A choice of tools by name: one that must be called, or some."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    def __post_init__(self) -> None:
        """Checks that it has the field of its type."""
        if getattr(self, self.type) is None:
            raise ValueError(f"Object missing required field `{self.type}`")

    @property
    def named(self) -> dict[str, str]:
        """The names of the tools that may be called, by their paths."""
        if self.type == "function" or self.allowed_tools is None:
            return {} if self.function is None else {"tool_choice.function.name": self.function.name}
        return {
            f"tool_choice.allowed_tools.tools[{i}].function.name": tool.function.name
            for i, tool in enumerate(self.allowed_tools.tools)
        }
