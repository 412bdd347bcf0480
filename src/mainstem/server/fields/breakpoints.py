"""Breakpoints: the places in a prompt up to which a client wants it to be kept, and for how long.

Knows the fields and the names of times that the APIs have, not how a prompt is rendered: a place is named by a variant
of the conversation that has an extra text there (`runtime.prompts`). A prefix is retained only if the client gives a
time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from mainstem.runtime.request import Prefix
from mainstem.server.fields.tools import Tool

MOST = 4
"""Breakpoints of one request that count, as at OpenAI and Anthropic."""

TtlName: TypeAlias = Literal["5m", "30m", "1h", "12h"]


class Ttl(NamedTuple):
    """A time that has a name: its length, and whether each hit begins it anew."""

    seconds: float
    renewed: bool


TTLS: Mapping[str, Ttl] = {
    "5m": Ttl(300.0, True),
    "1h": Ttl(3600.0, True),
    "30m": Ttl(1800.0, False),
    "12h": Ttl(43200.0, False),
}
"""The times of Anthropic, which a hit renews, and of OpenAI, which are a minimum."""

_PUT_IN = "\ue000"  # for private use: hardly a text has it, and no template looks for it


class Breakpoint(Struct):
    """`prompt_cache_breakpoint`: the prefix ends after the part, the message or the tool that has it."""

    mode: Literal["explicit"]
    ttl: TtlName | None = None


class CacheControl(Struct):
    """`cache_control`, Anthropic's word for the same. Without a time of its own, nothing is retained."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CacheOptions(Struct):
    """`prompt_cache_options`: whether the end of the prompt is a breakpoint, and the time of those without one."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: TtlName | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a conversation.

    Args:
        ttl: the name of the time for which all before it is retained; None: it is not.
        tool: the place is after the tool of this index.
        message: the place is in the message of this index. Without a tool and a message it is the end of the prompt.
        part: parts of the message before it.
        offset: characters before it, if the message is one text.
    """

    ttl: str | None
    tool: int | None = None
    message: int | None = None
    part: int = 0
    offset: int = 0

    @property
    def inside(self) -> bool:
        """Whether anything comes after it."""
        return self.tool is not None or self.message is not None

    def variant(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[Tool]]:
        """Returns the conversation with something put in at this place.

        Args:
            messages: as templates take them.
            tools: of the request.
        """
        given, listed = list(messages), list(tools)
        if self.tool is not None:
            listed.insert(self.tool + 1, replace(listed[self.tool], name=_PUT_IN))
        elif self.message is not None:
            message = given[self.message]
            given[self.message] = {**message, "content": self._put_in(message["content"])}
        return given, listed

    def _put_in(self, content: Any) -> Any:
        if isinstance(content, list):
            return [*content[: self.part], {"type": "text", "text": _PUT_IN}, *content[self.part :]]
        text = content or ""
        return text[: self.offset] + _PUT_IN + text[self.offset :]

    def prefix(self, end: int, longest_s: float) -> Prefix:
        """Returns the prefix of so many tokens that ends here; it is retained for `longest_s` at most."""
        if self.ttl is None:
            return Prefix(end)
        ttl = TTLS[self.ttl]
        return Prefix(end, min(ttl.seconds, longest_s), ttl.renewed, self.ttl)


def counted(found: Sequence[Mark], options: CacheOptions) -> list[Mark]:
    """Returns the marks that count: the last ones, and with them the end of the prompt unless only explicit ones do.

    Args:
        found: in the order of the prompt.
        options: of the request, which give the time of marks without one.
    """
    given = [replace(mark, ttl=mark.ttl or options.ttl) for mark in found]
    return given[-MOST:] if options.mode == "explicit" else [*given[1 - MOST :], Mark(options.ttl)]


def after_tools(tools: Iterable[tuple[bool, Breakpoint | CacheControl | None]]) -> list[Mark]:
    """Returns the places after tools that have a breakpoint.

    Args:
        tools: for each tool, whether the model may call it, and its breakpoint. The breakpoint of a tool that is left
            out is after the tool before it.
    """
    marks, index = list[Mark](), -1
    for offered, own in tools:
        index += offered
        if own is not None and index >= 0:
            marks.append(Mark(own.ttl, tool=index))
    return marks
