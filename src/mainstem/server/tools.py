"""Tools: the functions that a model may call, and which of them a request lets it call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)  # a mapping is no plain default
    strict: bool = False

    def spec(self) -> dict[str, Any]:
        """Returns the tool as chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.parameters)}}


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
