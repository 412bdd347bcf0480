"""Requests for /v1/chat/completions, by the OpenAI API reference and as open servers extend it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mainstem.server.apis.bodies import decode_known
from mainstem.server.apis.chat.tools import ToolCall, ToolChoice, ToolSpec, chosen, tools_of
from mainstem.server.apis.conversation import after_message, after_part, joined
from mainstem.server.apis.generation import Conversation, Generation, Keep
from mainstem.server.apis.shared import OpenRequest
from mainstem.server.errors import ApiError, wrong
from mainstem.server.fields.breakpoints import Breakpoint, CacheControl, Mark, after_tools
from mainstem.server.fields.rules import Unheeded
from mainstem.server.fields.sampling import Thinking
from mainstem.server.fields.tools import tooling_of
from mainstem.server.kept.response_store import Kept


class ImageUrl(Struct):
    """The location of an image."""

    url: str


class ContentPart(Struct):
    """One part of a message's content: text, an image, or why the assistant refused."""

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: Breakpoint | None = None
    cache_control: CacheControl | None = None


class Message(Struct):
    """One message of a conversation.

    `reasoning_content`, which some clients call `reasoning`, is what the assistant thought; some templates show it.
    `prompt_cache_breakpoint` and `cache_control` are extensions: of a message as a whole.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Annotated[str, Meta(min_length=1)] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prompt_cache_breakpoint: Breakpoint | None = None
    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        """Checks that a message has the fields of its role."""
        answers = self.role == "assistant"
        if self.role == "function":
            raise ValueError("`role`: 'function' is deprecated; use 'tool' with tool_call_id")
        if self.tool_calls and not answers:
            raise ValueError(f"`tool_calls`: only the assistant calls tools, not {self.role!r}")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("Object missing required field `tool_call_id`")
        if self.content is None and not answers:  # an answer may have been cut before it said anything
            raise ValueError("Object missing required field `content`")

    def template_input(self, at: str) -> dict[str, Any]:
        """Converts the message for a chat template, see `conversation`: `developer` is `system`, which templates know.

        Args:
            at: the path of this message, for the error.

        Raises:
            ApiError: 400; a part is neither text nor an image.
        """
        role = "system" if self.role == "developer" else self.role
        rest = {
            "name": self.name,
            "tool_calls": [call.template_input() for call in self.tool_calls] if self.tool_calls else None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        given = {name: value for name, value in rest.items() if value is not None}
        return {"role": role, "content": self._content(at), **given}

    def _content(self, at: str) -> str | list[dict[str, Any]] | None:
        if self.content is None:
            return self.refusal
        if isinstance(self.content, str):
            return self.content
        return joined([_part(part, f"{at}.content[{i}]") for i, part in enumerate(self.content)])


Messages = Annotated[list[Message], Meta(min_length=1)]


def template_input(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Converts the messages of a request for a chat template; see `Message.template_input`."""
    return [message.template_input(f"messages[{i}]") for i, message in enumerate(messages)]


def conversation(messages: Sequence[Message], tools: Sequence[ToolSpec] | None, **options: Any) -> Conversation:
    """Returns the prompt of messages and tools; `options`: the other arguments of a `Conversation`.

    Raises:
        ApiError: 400; see `Message.template_input` and `tools_of`.
    """
    return Conversation(template_input(messages), tooling_of(tools_of(tools)), **options)


def _marks(messages: Sequence[Message]) -> Iterator[Mark]:
    """Yields the places of breakpoints: after parts of messages, and after messages."""
    for index, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        texts = [(part.text if part.type == "text" else part.refusal) or "" for part in parts]
        for i, part in enumerate(parts, 1):
            if (own := part.prompt_cache_breakpoint or part.cache_control) is not None:
                yield after_part(index, i, own.ttl, texts)
        if (own := message.prompt_cache_breakpoint or message.cache_control) is not None:
            yield after_message(index, own.ttl, len(messages))


def _part(part: ContentPart, at: str) -> dict[str, str]:
    if part.type == "image_url":
        return _image_part(part, at)
    if part.type not in ("text", "refusal"):
        message = f"{at}: only parts of type 'text', 'refusal' and 'image_url' are supported, got {part.type!r}"
        raise ApiError(400, message, param=f"{at}.type", code="unsupported_content")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise ApiError(400, f"{at}: a {part.type} part needs the field '{part.type}'", param=f"{at}.{part.type}")
    return {"type": "text", "text": text}


def _image_part(part: ContentPart, at: str) -> dict[str, str]:
    image = part.image_url
    if image is None:
        raise ApiError(400, f"{at}: an image part needs the field 'image_url'", param=f"{at}.image_url")
    return {"type": "image", "url": image.url, "at": f"{at}.image_url.url"}


class ChatRequest(OpenRequest, kw_only=True):
    """The body of POST /v1/chat/completions. `thinking` is an extension that several open models' servers share."""

    messages: Messages
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None


PATHS = {"prompt": "messages", "logprobs": "top_logprobs"}


def read(body: bytes, unheeded: Unheeded | None = None) -> Generation:
    """Reads a request; see `completions.read`."""
    request = decode_known(body, ChatRequest, unheeded)
    parallel = request.parallel_tool_calls is not False
    tooling, form = chosen(request.tools, request.tool_choice, parallel), request.form()
    if form is not None and tooling.choice == "required" and not form.at.startswith("response_format"):
        raise wrong(form.at, "not supported where tools must be called")
    if request.top_logprobs is not None and not request.logprobs:
        raise wrong("top_logprobs", "needs logprobs = true")
    conversation = Conversation(
        template_input(request.messages),
        tooling,
        begins=request.add_generation_prompt,
        continues=request.continue_final_message,
        variables=request.chat_template_kwargs,
        special_tokens=request.add_special_tokens,
        thinks=None if request.thinking is None else request.thinking.thinks,
        effort=request.reasoning_effort,
    )
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    parts = dict(request.parts())
    return Generation.of(
        request,
        conversation,
        [
            *after_tools((spec.name is not None, spec.breakpoint) for spec in request.tools or ()),
            *_marks(request.messages),
        ],
        **parts,
        paths=PATHS,
        choices=parts["kept"],
        max_tokens=most,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        form=form,
        keep=_keeper(request, body) if request.store else None,
    )


def _keeper(request: ChatRequest, body: bytes) -> Keep:
    messages = msgspec.json.encode(msgspec.json.decode(body)["messages"])

    def keep(answer: Struct) -> Kept:
        return Kept(msgspec.json.encode({**msgspec.to_builtins(answer), "metadata": request.metadata or {}}), messages)

    return keep
