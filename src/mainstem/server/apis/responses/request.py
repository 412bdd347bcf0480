"""Requests for /v1/responses and /v1/responses/input_tokens, by the OpenAI API reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from mainstem.server.apis.bodies import check_known, decode, subset
from mainstem.server.apis.conversation import ConversationBuilder, check_type, needed
from mainstem.server.apis.generation import Conversation, Generation, Keep, Linked
from mainstem.server.apis.responses import items, tools
from mainstem.server.apis.responses.items import Item
from mainstem.server.apis.responses.tools import Tool, ToolChoice
from mainstem.server.errors import wrong
from mainstem.server.fields.breakpoints import CacheOptions
from mainstem.server.fields.rules import Field, Rules, Unheeded
from mainstem.server.fields.sampling import Common, StopTexts
from mainstem.server.fields.structured import AnswerForm, of_schema
from mainstem.server.kept.response_store import Kept
from mainstem.server.watch.diagnosis import Comparison, Shape
from mainstem.settings.engine import Grammar

_ASKER = Field("who asks")

RULES = Rules(
    advice={
        "user": _ASKER,
        "safety_identifier": _ASKER,
        "service_tier": Field("what OpenAI charges", ("auto", "default")),
        "prompt_cache_retention": Field("a maximum; prefixes are kept while there is room"),
        "max_tool_calls": Field("a limit of calls that a server makes; this one makes none"),
        "access_programs": Field("what OpenAI lets an account do"),
        "context_management": Field("what OpenAI leaves out of a long prompt", ([],)),
        "moderation": Field("a check of the answer by another model"),
        "personality": Field("a style of OpenAI's models"),
        "client_metadata": Field("a note of the client"),
        "truncation": Field("whether a prompt that is too long is cut", ("disabled",)),
    },
    refused={
        "background": Field("an answer that is fetched later", (False,)),
        "conversation": Field("a conversation that OpenAI keeps"),
        "image": Field("an answer that is a picture"),
        "prompt": Field("a prompt that OpenAI keeps"),
    },
    inside={
        **items.RULES,
        **tools.RULES,
        "text": Rules({"verbosity": Field("how long an answer should be", ("medium",))}),
        "reasoning": Rules(
            {
                "summary": Field("reasoning is always shown whole"),
                "generate_summary": Field("reasoning is always shown whole"),
                "context": Field("which earlier reasoning the model sees", ("auto",)),
                "mode": Field("how OpenAI reasons", ("standard",)),
            }
        ),
        "stream_options": Rules({"include_obfuscation": Field("pads chunks at OpenAI", (False,))}),
    },
)
"""The fields that are not honoured: which are ignored, and which are refused."""

_FORMATS = {"text": (), "json_object": (), "json_schema": ("name", "schema", "strict", "description")}
"""The fields of forms of an answer, by type."""


class Format(Struct):
    """`text.format`: plain text, a JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Any = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct):
    """`text`: the form of the answer."""

    format: Format | None = None


class ReasoningOptions(Struct):
    """`reasoning`: how much the model should think."""

    effort: str | None = None


class ResponseCacheOptions(CacheOptions):
    """`prompt_cache_options`.

    `prewarm`: the prompt is computed, and nothing is generated. `comparison_response_id`: the response says why it
    could not use the prompt of that one.
    """

    prewarm: bool | None = None
    comparison_response_id: str | None = None


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class StreamOptions(Struct):
    """`stream_options`; the server honours none of its fields."""


class ResponseRequest(Common, kw_only=True):
    """The body of POST /v1/responses; None means the default."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[Include] | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    stop: str | StopTexts | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: ResponseCacheOptions | None = None

    @property
    def prewarms(self) -> bool:
        """Whether nothing is generated."""
        return bool(self.prompt_cache_options and self.prompt_cache_options.prewarm)

    @property
    def seals(self) -> bool:
        """Whether reasoning is repeated in a form that the client brings back as it is."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def logprobs(self) -> int | None:
        """Alternatives to each token of the answer whose log-probabilities are shown; None: none are."""
        shown = bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if shown else None


InputCountRequest = subset(
    "InputCountRequest",
    ResponseRequest,
    (
        *("model", "input", "instructions", "previous_response_id", "parallel_tool_calls", "reasoning", "text"),
        *("tools", "tool_choice", "chat_template_kwargs", "prompt_rules"),
    ),
    "The body of POST /v1/responses/input_tokens: of a request, what the prompt consists of.",
    model=None,
)

PATHS = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
}
"""The names of fields that others call otherwise."""


def read(body: bytes, unheeded: Unheeded | None = None) -> Generation | Linked:
    """Reads a request; see `completions.read`."""
    return _read(body, decode(body, ResponseRequest), ResponseRequest, unheeded)


def read_count(body: bytes, unheeded: Unheeded | None, model: str) -> Generation | Linked:
    """Reads a request to count a prompt; see `read`. `model`: the model, if the request names none."""
    fields = msgspec.structs.asdict(decode(body, InputCountRequest))
    return _read(body, ResponseRequest(**{**fields, "model": fields["model"] or model}), InputCountRequest, unheeded)


class _Items(Struct):
    input: list[dict[str, Any]]


def _read(
    body: bytes, request: ResponseRequest, kind: type[Struct], unheeded: Unheeded | None
) -> Generation | Linked:  # fmt: skip
    """Reads a request; `kind`: the type of its body, which says which fields it may have."""
    listed = request.input if isinstance(request.input, list) else []
    given = msgspec.json.decode(body, type=_Items).input if listed else []
    if isinstance(request.input, str):
        given = [{"type": "message", "role": "user", "content": request.input}]
    references = {
        i: needed(item, "id", f"input[{i}]") for i, item in enumerate(listed) if item.type == "item_reference"
    }

    def join(earlier: Sequence[dict[str, Any]], found: Mapping[int, dict[str, Any]]) -> Generation:
        own = [found.get(i, item) for i, item in enumerate(given)]
        return _generation(request, earlier, own, unheeded, lambda: check_known(body, kind, unheeded, RULES))

    if request.previous_response_id is None and not references:
        return join((), {})
    return Linked(request.previous_response_id, references, join)


def _generation(
    request: ResponseRequest, earlier: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]],
    unheeded: Unheeded | None, check_names: Callable[[], None],
) -> Generation:  # fmt: skip
    """Returns the request, with the items of the earlier conversation before its own."""
    here = "input[{}]" if isinstance(request.input, list) else "input"
    placed = [("previous_response_id", each) for each in msgspec.convert(earlier, list[Item])]
    placed += [(here.format(i), each) for i, each in enumerate(msgspec.convert(own, list[Item]))]
    built = ConversationBuilder()
    if request.instructions:
        built.begin("system", "instructions")
        built.text(request.instructions)
    for at, item in placed:
        left = items.add(built, item, at)
        if unheeded is not None and at != "previous_response_id":
            unheeded.ignored += left
    if not built.messages:
        raise wrong("input", "this field is required")
    messages, marks = built.finished()
    check_names()  # after the kinds of items: their fields differ
    offered = [(f"tools[{i}]", tool) for i, tool in enumerate(request.tools or ())]
    more = [(f"{at}.tools[{i}]", tool) for at, item in placed for i, tool in enumerate(items.offered(item))]
    parallel = request.parallel_tool_calls is not False
    conversation = Conversation(
        messages,
        tools.chosen(tools.tools_of(offered, more), request.tool_choice, parallel),
        "input",
        variables=request.chat_template_kwargs,
        effort=None if request.reasoning is None else request.reasoning.effort,
    )
    return Generation.of(
        request,
        conversation,
        marks,
        request.prompt_cache_options,
        paths=PATHS,
        max_tokens=0 if request.prewarms else request.max_output_tokens,
        logprobs=request.logprobs,
        form=_form(request.text),
        session=request.prompt_cache_key,
        comparison=_comparison(request, conversation),
        keep=None if request.store is False else _keeper([*earlier, *own]),
    )


def _form(text: TextOptions | None) -> AnswerForm | None:
    if text is None or text.format is None:
        return None
    format, at = text.format, "text.format.schema"
    check_type(format, format.type, _FORMATS, "text.format")
    if format.type != "json_schema":
        return AnswerForm("text.format", Grammar("json_object")) if format.type == "json_object" else None
    form = of_schema(at, Raw(msgspec.json.encode(format.schema)))
    if not form:
        raise wrong(at, "this field is required with type 'json_schema'")
    return form[0]


def _comparison(request: ResponseRequest, conversation: Conversation) -> Comparison:
    shape = Shape.of(conversation.messages, [tool.spec() for tool in conversation.tooling.tools])
    options = request.prompt_cache_options
    earlier = None if options is None else options.comparison_response_id
    return Comparison(shape, earlier, keeps=request.store is not False)


def _keeper(conversation: Sequence[dict[str, Any]]) -> Keep:
    return lambda body: Kept(msgspec.json.encode(body), msgspec.json.encode([*conversation, *body.output]))
