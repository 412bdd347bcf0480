"""Requests for /v1/messages and /v1/messages/count_tokens, by Anthropic's API reference.

A request is converted into one for /v1/chat/completions, whose checks and rendering are the only ones. `MessageReply`
writes the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mainstem.server.apis import message_blocks, requests
from mainstem.server.apis.message_blocks import ContentBlock, Message
from mainstem.server.apis.message_reply import MessageReply
from mainstem.server.apis.replies import ChunkUsage, Extras, Head
from mainstem.server.errors import ApiError, renamed
from mainstem.server.fields.breakpoints import MOST, CacheControl
from mainstem.server.fields.rules import CACHE_CONTROL, THINKING, Field, Rules, Unheeded
from mainstem.server.fields.tools import is_hosted
from mainstem.server.fields.turns import Turns, check_type
from mainstem.server.generation import Task
from mainstem.server.parsing.output import OutputParser
from mainstem.server.watch.diagnosis import Earlier, Finding, Shape

_ASKER = Field("who asks")

RULES = Rules(
    advice={
        "metadata": _ASKER,
        "user_profile_id": _ASKER,
        "workspace_id": _ASKER,
        "service_tier": Field("what Anthropic charges", ("auto",)),
        "speed": Field("how quickly Anthropic answers", ("standard",)),
        "inference_geo": Field("where Anthropic computes"),
        "betas": Field("what of Anthropic's API is new to the client", ([],)),
        "billing_policy": Field("who pays Anthropic"),
        "fallback_credit_token": Field("who pays Anthropic"),
        "fallbacks": Field("which models answer where one declines; this server asks none whether it may"),
        "context_management": Field("what Anthropic leaves out of a long prompt", ({"edits": []},)),
    },
    refused={
        "thread": Field("a conversation that Anthropic keeps; send all of it", code="thread_unsupported_request"),
        "compaction": Field("an answer that sums up the conversation for Anthropic"),
        "container": Field("code that Anthropic runs"),
        "mcp_servers": Field("calls of tools that Anthropic makes", ([],)),
    },
    inside={
        **message_blocks.RULES,
        "cache_control": CACHE_CONTROL,
        "tools": Rules(
            {
                "defer_loading": Field("a tool that Anthropic shows the model only when it looks for it", (False,)),
                "eager_input_streaming": Field("arguments are always streamed", (False,)),
                "input_examples": Field("calls to learn from", ([],)),
            },
            {"allowed_callers": Field(message_blocks.BY_CODE, (["direct"],))},
            left_out=is_hosted,
        ),
        "output_config": Rules({"task_budget": Field("how many tokens a task should take")}),
        "thinking": THINKING,
    },
)
"""What becomes of fields that are not honoured."""

_SAME = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stream",
    "min_p",
    "seed",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "cache_salt",
    "priority",
    "explain",
    "chat_template_kwargs",
)
"""Fields that a chat has under the same name."""

_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "tool_choice.function": "tool_choice",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""The names of other fields."""


class Diagnostics(Struct):
    """`diagnostics`: the request is compared with the one whose answer has this id, and a later one with this."""

    previous_message_id: str | None = None


class Tool(Struct):
    """A function that the model may call, or a tool that Anthropic knows; those are left out."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Struct):
    """Whether the model has to call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Struct):
    """JSON by a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    """The form of the answer, and how much the model should think."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens; None means the default."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[ContentBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: requests.Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: CacheControl | None = None

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a chat, but for the messages."""
        fields: dict[str, Any] = {name: getattr(self, name, None) for name in _SAME}
        fields["prompt_cache_options"] = {"mode": "explicit"}
        if self.tools:
            fields["tools"] = [_tool(tool, f"tools[{i}].type") for i, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            fields |= _choice(self.tool_choice)
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
            if self.output_config.format is not None:
                schema = {"name": "output", "schema": self.output_config.format.schema, "strict": True}
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.thinking is not None:
            fields["thinking"] = {"type": self.thinking.type}
        if self.messages[-1].role == "assistant":
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        return fields


class MessageRequest(CountRequest, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    priority: int | None = None
    diagnostics: Diagnostics | None = None
    explain: bool | None = None

    def fields(self) -> dict[str, Any]:
        """See `CountRequest.fields`. The usage counts from the first event on, which says how long the prompt is."""
        options = {"include_usage": True, "continuous_usage_stats": True}
        return super().fields() | {"stop": self.stop_sequences, "stream_options": options}


_CHOICES = {
    "auto": ("disable_parallel_tool_use",),
    "any": ("disable_parallel_tool_use",),
    "tool": ("name", "disable_parallel_tool_use"),
    "none": (),
}
"""The fields of a choice of tools, by type."""


def _tool(tool: Tool, at: str) -> dict[str, Any]:
    """Returns a tool of a chat, which leaves the same ones out."""
    marked = {} if tool.cache_control is None else {"prompt_cache_breakpoint": _breakpoint(tool.cache_control)}
    if is_hosted(tool.type):
        return {"type": tool.type, **marked}
    if tool.type not in (None, "custom"):
        message = f"{at}: only tools of the type 'custom' are supported, got {tool.type!r}"
        raise ApiError(400, message, param=at, code="unsupported_tool")
    fields = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": given, **marked}


def _breakpoint(control: CacheControl) -> dict[str, Any]:
    return {"mode": "explicit", "ttl": control.ttl}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    check_type(choice, choice.type, _CHOICES, "tool_choice")
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return fields | {"tool_choice": "required" if choice.type == "any" else choice.type}


# --- requests -----------------------------------------------------------------------------------------------------


def parse(body: bytes, unheeded: Unheeded | None, earlier: Earlier) -> Task:
    """Parses a request.

    Args:
        body: the JSON.
        unheeded: fields that do nothing are added to it.
        earlier: requests of the same client.

    Raises:
        ApiError: 400; malformed JSON, a wrong type or value, or a field that is unknown or not supported.
    """
    request = requests.decode(body, MessageRequest)
    task = _task(body, request, unheeded)
    if request.diagnostics is None:
        return task
    named = request.diagnostics.previous_message_id

    def reply(
        head: Head, spell: object, usage: ChunkUsage, extras: Extras, parser: Callable[[], OutputParser]
    ) -> MessageReply:
        assert extras.fingerprint is not None
        finding = None if named is None else earlier.compare(named, extras.fingerprint)
        earlier.keep(head.id, extras.fingerprint)
        return MessageReply(head, spell, usage, extras, parser, finding or Finding("same"))

    return replace(task, reply=reply)


def parse_count(body: bytes, unheeded: Unheeded | None = None) -> Task:
    """Parses a request whose prompt is counted; see `parse`."""
    return _task(body, requests.decode(body, CountRequest), unheeded)


def _turns(request: CountRequest) -> Turns:
    """Returns the messages of a chat."""
    turns = message_blocks.turns_of(request.system, request.messages)
    _mark_last(turns, request)
    return turns


def _mark_last(turns: Turns, request: CountRequest) -> None:
    """Adds the breakpoint of the request, after its last block, unless that has one.

    Raises:
        ApiError: 400; there are too many.
    """
    blocks = request.messages[-1].content
    own = isinstance(blocks, list) and bool(blocks) and blocks[-1].cache_control is not None
    found = turns.marks + sum(tool.cache_control is not None for tool in request.tools or ())
    if request.cache_control is not None and not own:
        found += 1
        turns.mark(request.cache_control.ttl)
    if found > MOST:
        message = f"cache_control: at most {MOST} breakpoints in a request, got {found}"
        raise ApiError(400, message, param="cache_control")


def _task(body: bytes, request: CountRequest, unheeded: Unheeded | None) -> Task:
    turns = _turns(request)
    fields = request.fields()
    requests.check_known(body, type(request), unheeded, RULES)  # after the kinds of blocks: their fields differ
    if unheeded is not None:
        unheeded.ignored += message_blocks.attribution(request.system)
    tools = {f"tools[{i}].function": f"tools[{i}]" for i in range(len(request.tools or ()))}
    schemas = {f"{old}.parameters": f"{new}.input_schema" for old, new in tools.items()}
    names = {**_NAMES, **tools, **schemas, **turns.names}
    chat = {name: value for name, value in fields.items() if value is not None} | {"messages": turns.messages}
    shape = Shape.of(turns.messages, fields.get("tools", ())) if getattr(request, "diagnostics", None) else None
    with renamed(names):
        return Task(requests.parse_chat(msgspec.json.encode(chat)), MessageReply, names, shape)
