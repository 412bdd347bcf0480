"""The tools of a request, and those of them that the model may call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mainstem.server.errors import wrong
from mainstem.server.parsing.custom import Form, parameters

Choice = Literal["none", "auto", "required"]

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The schema of no arguments."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Args:
        name: unique in a request; letters, digits and `_-.:/`.
        description: what it does, for the model.
        parameters: the JSON schema of its arguments, which are an object.
        strict: whether its calls are held to that schema even where the model chooses whether to call.
        custom: whether the client takes a text instead; see `custom`.
        form: that its calls are held to, wherever calls are held; None: any text.
        at: the client's path of its schema, or of the definition of its form.
        apart: its namespace, and its name there, of a tool that is in one.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)  # a mapping is no plain default
    strict: bool = False
    custom: bool = False
    form: Form | None = None
    at: str = field(default="", compare=False)
    apart: tuple[str, str] | None = None

    def spec(self) -> dict[str, Any]:
        """Returns the tool as chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.parameters)}}


def custom_tool(name: str, description: str | None, form: Form | None, at: str = "") -> Tool:
    """Returns a tool that takes a text; a form is held even where the model chooses whether to call."""
    return Tool(name, description, parameters(form), strict=form is not None, custom=True, form=form, at=at)


_OF_OPENAI = (
    "web_search, web_search_preview, file_search, computer, computer_use, computer_use_preview, code_interpreter, "
    "image_generation, mcp, local_shell, shell, apply_patch, tool_search, programmatic_tool_calling"
)
_OF_ANTHROPIC = (
    "web_search, web_fetch, code_execution, bash, text_editor, computer, memory, advisor, tool_search_tool_bm25, "
    "tool_search_tool_regex, mcp_toolset, browser_toolset, computer_toolset"
)
HOSTED = frozenset(f"{_OF_OPENAI}, {_OF_ANTHROPIC}".split(", "))
"""Types of tools that OpenAI or Anthropic run, or that their models know by heart: no other model can call them."""


def is_hosted(type: object) -> bool:
    """Returns whether the type of a tool, which may end with a date, is one of `HOSTED`."""
    return isinstance(type, str) and re.sub(r"(_\d{8}|_\d{4}_\d{2}_\d{2})$", "", type) in HOSTED


@dataclass(frozen=True, slots=True)
class Tooling:
    """The tools of a request, and which the model may call.

    The prompt has all tools, whatever the choice, so that requests with another choice find the same prefix.

    Args:
        tools: in the order of the request.
        choice: none: no call is looked for; auto: the model chooses; required: the answer is at least one call.
        allowed: names of the tools that may be called; None: all.
        parallel: whether an answer may have several calls.
    """

    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    allowed: frozenset[str] | None = None
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called, in order."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)


NO_TOOLS = Tooling()

_CALLABLE = "that can be called here: those that OpenAI or Anthropic run are left out"


def tooling_of(
    tools: Sequence[tuple[str, Tool]],
    choice: Choice = "auto",
    named: Mapping[str, str] | None = None,
    *,
    parallel: bool = True,
) -> Tooling:
    """Returns the tools of a request, and which the model may call.

    Args:
        tools: those that can be called, each with the path of its name.
        choice: see `Tooling`.
        named: the names of those that may be called, by their paths; None: all may.
        parallel: see `Tooling`.

    Raises:
        ApiError: 400; two tools have one name, or what is chosen is not there.
    """
    names: list[str] = []
    for at, tool in tools:
        if tool.name in names:
            raise wrong(at, f"there is another tool named {tool.name!r}")
        names.append(tool.name)
    for at, name in (named or {}).items():
        if name not in names:
            others = f"the tools are {', '.join(names)}" if names else f"there is none {_CALLABLE}"
            raise wrong(at, f"there is no tool named {name!r}; {others}")
    if choice == "required" and not names:
        raise wrong("tool_choice", f"'required' needs tools {_CALLABLE}")
    allowed = None if named is None else frozenset(named.values())
    return Tooling(tuple(tool for _, tool in tools), choice, allowed, parallel)
