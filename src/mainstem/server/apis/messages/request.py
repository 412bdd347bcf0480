"""Requests for /v1/messages and /v1/messages/count_tokens, by Anthropic's API reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from mainstem.server.apis.bodies import check_known, check_value, decode, subset
from mainstem.server.apis.conversation import ConversationBuilder, check_type, function
from mainstem.server.apis.generation import Conversation, Generation
from mainstem.server.apis.messages import blocks
from mainstem.server.apis.messages.blocks import ContentBlock, Message
from mainstem.server.errors import wrong
from mainstem.server.fields.breakpoints import MOST, CacheControl, CacheOptions, after_tools
from mainstem.server.fields.rules import CACHE_CONTROL, THINKING, Field, Rules, Unheeded
from mainstem.server.fields.sampling import Common, StopTexts, Thinking, stops_of
from mainstem.server.fields.structured import of_schema
from mainstem.server.fields.tools import Tool as Function
from mainstem.server.fields.tools import Tooling, is_hosted, tooling_of
from mainstem.server.watch.diagnosis import Comparison, Finding, Shape

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
        **blocks.RULES,
        "cache_control": CACHE_CONTROL,
        "tools": Rules(
            {
                "defer_loading": Field("a tool that Anthropic shows the model only when it looks for it", (False,)),
                "eager_input_streaming": Field("arguments are always streamed", (False,)),
                "input_examples": Field("calls to learn from", ([],)),
            },
            {"allowed_callers": Field(blocks.BY_CODE, (["direct"],))},
            left_out=is_hosted,
        ),
        "output_config": Rules({"task_budget": Field("how many tokens a task should take")}),
        "thinking": THINKING,
    },
)
"""The fields that are not honoured: which are ignored, and which are refused."""


class Diagnostics(Struct):
    """`diagnostics`: compares the request with the one whose answer has this id, and keeps it for a later one."""

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


class MessageRequest(Common, kw_only=True):
    """The body of POST /v1/messages; None means the default."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: int
    system: str | list[ContentBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: CacheControl | None = None
    stop_sequences: StopTexts | None = None
    diagnostics: Diagnostics | None = None


CountRequest = subset(
    "CountRequest",
    MessageRequest,
    (
        *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"),
        *("chat_template_kwargs", "cache_control", "prompt_rules"),
    ),
    "The body of POST /v1/messages/count_tokens; None means the default.",
)

_SCHEMA = "output_config.format.schema"
PATHS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
}
"""The names of fields that others call otherwise."""


def read(body: bytes, unheeded: Unheeded | None = None) -> Generation:
    """Reads a request; see `completions.read`."""
    return _read(body, decode(body, MessageRequest), MessageRequest, unheeded)


def read_count(body: bytes, unheeded: Unheeded | None = None, model: str = "") -> Generation:
    """Reads a request to count a prompt, which always names its model; see `read`."""
    counted = decode(body, CountRequest)
    return _read(body, MessageRequest(max_tokens=0, **msgspec.structs.asdict(counted)), CountRequest, unheeded)


def _read(body: bytes, request: MessageRequest, kind: type[Struct], unheeded: Unheeded | None) -> Generation:
    """Reads a request; `kind`: the type of its body, which says which fields it may have."""
    built = blocks.conversation_of(request.system, request.messages)
    _mark_last(built, request)
    messages, marks = built.finished()
    check_known(body, kind, unheeded, RULES)  # after the kinds of blocks: their fields differ
    tooling = _chosen([*_offered(request.tools or ())], request.tool_choice)
    if unheeded is not None:
        unheeded.ignored += blocks.attribution(request.system)
    config, continues = request.output_config or OutputConfig(), request.messages[-1].role == "assistant"
    conversation = Conversation(
        messages,
        tooling,
        begins=False if continues else None,
        continues=continues or None,
        variables=request.chat_template_kwargs,
        thinks=None if request.thinking is None else request.thinking.thinks,
        effort=config.effort,
    )
    return Generation.of(
        request,
        conversation,
        [*after_tools((not is_hosted(tool.type), tool.cache_control) for tool in request.tools or ()), *marks],
        CacheOptions("explicit"),
        paths=PATHS,
        sampling={"stop": stops_of(tuple(request.stop_sequences or ()))},
        max_tokens=request.max_tokens,
        form=None if config.format is None else of_schema(_SCHEMA, Raw(msgspec.json.encode(config.format.schema)))[0],
        include_usage=True,  # the first event says how long the prompt is
        counts_chunks=True,
        comparison=_comparison(request, conversation),
    )


def _mark_last(built: ConversationBuilder, request: MessageRequest) -> None:
    """Adds the breakpoint of the request, after its last block, unless that has one.

    Raises:
        ApiError: 400; there are too many.
    """
    blocks = request.messages[-1].content
    own = isinstance(blocks, list) and bool(blocks) and blocks[-1].cache_control is not None
    if request.cache_control is not None and not own:
        built.mark(request.cache_control.ttl)
    breakpoints = built.marked + sum(tool.cache_control is not None for tool in request.tools or ())
    if breakpoints > MOST:
        raise wrong("cache_control", f"at most {MOST} breakpoints in a request, got {breakpoints}")


def _offered(tools: Sequence[Tool]) -> Iterator[tuple[str, Function]]:
    """Yields the tools that the model may call, each with the path of its name."""
    for at, tool in ((f"tools[{i}]", tool) for i, tool in enumerate(tools)):
        if is_hosted(tool.type):
            continue
        if tool.type not in (None, "custom"):
            problem = f"only tools of the type 'custom' are supported, got {tool.type!r}"
            raise wrong(f"{at}.type", problem, "unsupported_tool")
        yield f"{at}.name", function(tool.name, tool.description, tool.input_schema, tool.strict, at, "input_schema")


_CHOICES = {
    "auto": ("disable_parallel_tool_use",),
    "any": ("disable_parallel_tool_use",),
    "tool": ("name", "disable_parallel_tool_use"),
    "none": (),
}
"""The fields of a choice of tools, by type."""


def _chosen(tools: Sequence[tuple[str, Function]], choice: ToolChoice | None) -> Tooling:
    """Returns the tools, and which may be called; see `tooling_of`."""
    if choice is None:
        return tooling_of(tools)
    check_type(choice, choice.type, _CHOICES, "tool_choice")
    if choice.type == "tool":
        check_value(choice.name, str, "tool_choice.name")
        return tooling_of(tools, "required", {"tool_choice.name": str(choice.name)}, parallel=False)
    kind = "required" if choice.type == "any" else choice.type
    return tooling_of(tools, kind, parallel=not choice.disable_parallel_tool_use)


def _comparison(request: MessageRequest, conversation: Conversation) -> Comparison | None:
    if request.diagnostics is None:
        return None
    shape = Shape.of(conversation.messages, [tool.spec() for tool in conversation.tooling.tools])
    return Comparison(shape, request.diagnostics.previous_message_id, otherwise=Finding("same"))
