"""/v1/responses, by the OpenAI API reference: requests, and what is kept of their answers.

A request is converted into one for /v1/chat/completions, whose checks and rendering are the only ones. `ResponseReply`
writes the answer. The ids of items contain that of their response, so that a reference to one is found in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mainstem.server import requests
from mainstem.server.breakpoints import Breakpoint, CacheOptions
from mainstem.server.diagnosis import Earlier, Finding, Fingerprint, Shape
from mainstem.server.errors import ApiError, renamed
from mainstem.server.fields import Field, Rules, Unheeded
from mainstem.server.generation import Task
from mainstem.server.output import OutputParser
from mainstem.server.replies import ChunkUsage, Extras, Head
from mainstem.server.response_reply import ID_PREFIX, ResponseReply
from mainstem.server.response_store import Kept, Owner, ResponseStore
from mainstem.server.turns import Turns, check_type

_EARLIER = Field("of an earlier answer")
_ASKER = Field("who asks")
_DIRECT = "a call of a tool by code that OpenAI runs"
_LATER = Field("a call whose result comes later", (False,))
_DETAIL = Field("how closely to look; the model's processor decides", ("auto",))
_PART = Rules(
    {"annotations": _EARLIER, "logprobs": _EARLIER, "detail": _DETAIL},
    {"file_id": Field("a file that OpenAI keeps")},
)

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
        "truncation": Field("whether a prompt that is too long is cut", ("disabled",)),
    },
    refused={
        "background": Field("an answer that is fetched later", (False,)),
        "conversation": Field("a conversation that OpenAI keeps"),
        "image": Field("an answer that is a picture"),
        "prompt": Field("a prompt that OpenAI keeps"),
    },
    inside={
        "input": Rules(
            {"status": _EARLIER, "phase": _EARLIER},
            {
                "caller": Field(_DIRECT, ({"type": "direct"},)),
                "namespace": Field("a tool of a set that OpenAI looks up"),
                "async": _LATER,
            },
        ),
        "content": _PART,
        "output": _PART,
        "tools": Rules(
            {
                "defer_loading": Field("a tool that OpenAI shows the model only when it looks for it", (False,)),
                "output_schema": Field("what a tool returns"),
            },
            {"allowed_callers": Field(_DIRECT, (["direct"],)), "async": _LATER},
        ),
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
"""What becomes of fields that are not honoured."""

_SAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "cache_salt",
    "priority",
    "chat_template_kwargs",
    "stream",
    "parallel_tool_calls",
    "prompt_cache_key",
    "explain",
)
"""Fields that a chat has under the same name."""

_ITEMS = {
    "message": ("id", "role", "content"),
    "reasoning": ("id", "content", "summary", "encrypted_content"),
    "function_call": ("id", "call_id", "name", "arguments"),
    "function_call_output": ("id", "call_id", "name", "output"),
    "item_reference": ("id",),
}
_PARTS = {
    "input_text": ("text", "prompt_cache_breakpoint"),
    **dict.fromkeys(("output_text", "text"), ("text",)),
    "refusal": ("refusal",),
    "input_image": ("image_url", "prompt_cache_breakpoint"),
}
_THOUGHTS = dict.fromkeys(("reasoning_text", "summary_text"), ("text",))
_FORMATS = {"text": (), "json_object": (), "json_schema": ("name", "schema", "strict", "description")}
_CHOICES = {"function": ("name",), "allowed_tools": ("mode", "tools")}
"""The fields of items and their parts, of forms of an answer, and of choices of tools, by type."""

_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
"""The names of other fields."""


class Part(Struct, omit_defaults=True):
    """A part of a message, of the output of a call, or of reasoning; `type` says which fields it has."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    prompt_cache_breakpoint: Breakpoint | None = None


class Item(Struct, omit_defaults=True):
    """One item of a conversation: a message, a call of a function, its output, reasoning, or a reference to an item."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None


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


class Tool(Struct):
    """A function that the model may call. A chat's `tools` are checked, so all but the type may be absent here."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseCacheOptions(CacheOptions):
    """`prompt_cache_options`.

    `prewarm`: the prompt is computed, and nothing is generated. `comparison_response_id`: the response says why it
    could not use the prompt of that one.
    """

    prewarm: bool | None = None
    comparison_response_id: str | None = None


class ToolName(Struct):
    """A function by its name."""

    name: str
    type: Literal["function"] = "function"


class ToolChoice(Struct):
    """The function that must be called, or some that may or must be."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolName] | None = None


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
    """`stream_options`, of which none is honoured."""


class ResponseRequest(Struct, kw_only=True):
    """The body of POST /v1/responses; None means the default."""

    model: str
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[Include] | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    explain: bool | None = None

    @property
    def prewarms(self) -> bool:
        """Whether nothing is generated."""
        return bool(self.prompt_cache_options and self.prompt_cache_options.prewarm)

    def items(self) -> list[Item]:
        """The new items of the conversation."""
        if isinstance(self.input, str):
            return [Item(type="message", role="user", content=self.input)]
        return self.input or []

    def chat(self, messages: Sequence[dict[str, Any]]) -> bytes:
        """Returns the body of the chat that generates the same."""
        logprobs = bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
        fields = {name: getattr(self, name) for name in _SAME}
        fields |= {"messages": messages, "max_tokens": 0 if self.prewarms else self.max_output_tokens}
        if self.prompt_cache_options is not None:
            options = self.prompt_cache_options
            fields["prompt_cache_options"] = {"mode": options.mode, "ttl": options.ttl}
        if logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.tools:
            fields["tools"] = [_function(tool, f"tools[{i}].type") for i, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            fields["tool_choice"] = _choice(self.tool_choice)
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _format(self.text.format)
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})

    def names(self) -> dict[str, str]:
        """Returns the names of fields by those of `chat`, where they differ, but for the messages."""
        chosen = self.tool_choice.tools if isinstance(self.tool_choice, ToolChoice) else None
        allowed = (f"tools[{i}]" for i in range(len(chosen or ())))
        tools = {f"tools[{i}].function": f"tools[{i}]" for i in range(len(self.tools or ()))}
        return _NAMES | tools | {f"tool_choice.allowed_tools.{at}.function": f"tool_choice.{at}" for at in allowed}


def _function(tool: Tool, at: str) -> dict[str, Any]:
    if tool.type != "function":
        message = f"{at}: only tools of the type 'function' are supported, got {tool.type!r}"
        raise ApiError(400, message, param=at, code="unsupported_tool")
    fields = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _choice(choice: str | ToolChoice) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    check_type(choice, choice.type, _CHOICES, "tool_choice")
    if choice.type == "function":
        return {"type": "function", "function": {"name": choice.name}}
    tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools or ()]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": tools}}


def _format(format: Format) -> dict[str, Any]:
    check_type(format, format.type, _FORMATS, "text.format")
    if format.type != "json_schema":
        return {"type": format.type}
    fields = {name: getattr(format, name) for name in ("name", "schema", "strict", "description")}
    return {"type": "json_schema", "json_schema": {name: value for name, value in fields.items() if value is not None}}


# --- conversations ------------------------------------------------------------------------------------------------


def _add(turns: Turns, item: Item, at: str) -> None:
    """Adds an item to the messages of a chat; what the assistant thought, said and called in a row is one message."""
    kind = item.type or "message"
    check_type(item, kind, _ITEMS, at)
    match kind:
        case "message":
            _add_message(turns, item, at)
        case "reasoning":
            _begin_turn(turns, at, after=())
            turns.reasoning(_thought(item, at))
        case "function_call":
            _begin_turn(turns, at, after=("reasoning_content", "content", "tool_calls"))
            call_id, name = _needed(item, "call_id", at), _needed(item, "name", at)
            turns.call(call_id, name, _needed(item, "arguments", at), at, "call_id")
        case "function_call_output":
            turns.result(_needed(item, "call_id", at), at, "call_id")
            _add_content(turns, _needed(item, "output", at), f"{at}.output")


def _add_message(turns: Turns, item: Item, at: str) -> None:
    role = _needed(item, "role", at)
    if role == "assistant":
        _begin_turn(turns, at, after=("reasoning_content",))
    else:
        turns.begin("system" if role == "developer" else role, at)
    _add_content(turns, _needed(item, "content", at), f"{at}.content")


def _begin_turn(turns: Turns, at: str, after: Sequence[str]) -> None:
    """Begins a message of the assistant, unless the last one is its and has nothing but fields of `after`."""
    last = turns.messages[-1] if turns.role == "assistant" else None
    if last is None or any(value for name, value in last.items() if name not in ("role", *after)):
        turns.begin("assistant", at)


def _add_content(turns: Turns, content: str | list[Part], at: str) -> None:
    if isinstance(content, str):
        turns.text(content)
        return
    for i, part in enumerate(content):
        here = f"{at}[{i}]"
        check_type(part, part.type, _PARTS, here)
        if part.type == "input_image":
            turns.image(_needed(part, "image_url", here), f"{here}.image_url")
        else:
            turns.text(_needed(part, "refusal" if part.type == "refusal" else "text", here))
        if part.prompt_cache_breakpoint is not None:
            turns.mark(part.prompt_cache_breakpoint.ttl)


def _thought(item: Item, at: str) -> str:
    content = [Part("reasoning_text", item.content)] if isinstance(item.content, str) else item.content or []
    for name, parts in (("content", content), ("summary", item.summary or [])):
        for i, part in enumerate(parts):
            check_type(part, part.type, _THOUGHTS, f"{at}.{name}[{i}]")
    text = "".join(part.text or "" for part in content) or "\n".join(part.text or "" for part in item.summary or ())
    if not text and item.encrypted_content:
        message = f"{at}.encrypted_content: this server cannot read it; send the item with its content"
        raise ApiError(400, message, param=f"{at}.encrypted_content", code="unsupported_content")
    return text


def _needed(part: Item | Part, name: str, at: str) -> Any:
    value = getattr(part, name)
    if value is None:
        kind = part.type or "message"
        message = f"{at}.{name}: this field is required where the type is {kind!r}"
        raise ApiError(400, message, param=f"{at}.{name}")
    return value


# --- the API ------------------------------------------------------------------------------------------------------


class Deleted(Struct):
    """The response of DELETE /v1/responses/{id}."""

    id: str
    deleted: bool = True
    object: str = "response"


class Responses:
    """The API over the responses that it keeps.

    Args:
        store: keeps them.
        now: returns seconds since the epoch.
        fingerprints: keeps what a later request may be compared with.
    """

    def __init__(
        self, store: ResponseStore[Kept], now: Callable[[], float], fingerprints: ResponseStore[Fingerprint]
    ) -> None:
        self._store, self._now, self._fingerprints = store, now, fingerprints

    def parse(self, body: bytes, unheeded: Unheeded | None, owner: Owner) -> Task:
        """Parses a request, and joins it to the conversation that it continues.

        Args:
            body: the JSON.
            unheeded: fields that do nothing are added to it.
            owner: the client, whose responses it may continue.

        Raises:
            ApiError: 400; malformed JSON, a wrong type or value, or a field that is unknown or not supported. 404; the
                response or the item that it refers to is not there.
        """
        request = requests.decode(body, ResponseRequest)
        earlier = self._conversation(owner, request.previous_response_id)
        items = self._resolved(owner, request.items())
        turns = Turns()
        if request.instructions:
            turns.begin("system", "instructions")
            turns.text(request.instructions)
        for item in earlier:
            _add(turns, item, "previous_response_id")
        for i, item in enumerate(items):
            _add(turns, item, f"input[{i}]" if isinstance(request.input, list) else "input")
        if not turns.messages:
            raise ApiError(400, "input: this field is required", param="input")
        chat, names = request.chat(turns.messages), {**request.names(), **turns.names}
        requests.check_known(body, ResponseRequest, unheeded, RULES)  # after the kinds of items: their fields differ
        with renamed(names):
            parsed = requests.parse_chat(chat)
        shape = Shape.of(turns.messages, [msgspec.to_builtins(tool) for tool in request.tools or ()])
        return Task(parsed, self._replier(request, [*earlier, *items], owner), names, shape)

    def get(self, owner: Owner, id: str) -> bytes:
        """Returns the JSON of a response.

        Raises:
            ApiError: 404; it is not there.
        """
        return self._kept(owner, id, None).body

    def delete(self, owner: Owner, id: str) -> Deleted:
        """Forgets a response.

        Raises:
            ApiError: 404; it is not there.
        """
        if not self._store.delete(owner, id):
            raise _not_found(id, None)
        return Deleted(id)

    def _replier(self, request: ResponseRequest, items: Sequence[Item], owner: Owner) -> Callable[..., ResponseReply]:
        def keep(id: str, body: Struct, output: Sequence[dict[str, Any]]) -> None:
            conversation = msgspec.json.encode([*items, *output])
            self._store.put(owner, id, Kept(msgspec.json.encode(body), conversation))

        def reply(
            head: Head,
            spell: Callable[[int], str],
            usage: ChunkUsage,
            extras: Extras,
            parser: Callable[[], OutputParser],
        ) -> ResponseReply:
            kept = keep if request.store is not False else None
            finding = self._diagnosed(request, head.id, extras.fingerprint, owner)
            return ResponseReply(head, spell, request, kept, parser, self._now, finding, extras)

        return reply

    def _diagnosed(
        self, request: ResponseRequest, id: str, fingerprint: Fingerprint | None, owner: Owner
    ) -> Finding | None:
        """Compares a request with the one that it names, and keeps what later ones may be compared with."""
        if fingerprint is None:
            return None
        requests_before = Earlier(self._fingerprints, owner)
        options = request.prompt_cache_options
        named = None if options is None else options.comparison_response_id
        finding = None if named is None else requests_before.compare(named, fingerprint)
        if request.store is not False:
            requests_before.keep(id, fingerprint)
        return finding

    def _conversation(self, owner: Owner, id: str | None) -> list[Item]:
        if id is None:
            return []
        return msgspec.json.decode(self._kept(owner, id, "previous_response_id").conversation, type=list[Item])

    def _resolved(self, owner: Owner, items: Sequence[Item]) -> list[Item]:
        """Returns items with those that references stand for; each at most once, so that a body cannot grow by them."""
        outputs: dict[str, dict[str, Any]] = {}  # the items of an answer, by id
        resolved = []
        for i, item in enumerate(items):
            if item.type != "item_reference":
                resolved.append(item)
                continue
            at, id = f"input[{i}].id", _needed(item, "id", f"input[{i}]")
            answer = ID_PREFIX + id.split("_")[1] if id.count("_") == 2 else ""
            if answer not in outputs:
                kept = self._store.get(owner, answer)
                output = [] if kept is None else msgspec.json.decode(kept.body)["output"]
                outputs[answer] = {each["id"]: each for each in output}
            if id not in outputs[answer]:
                message = (
                    f"{at}: the item {id!r} was not found, or it was referred to before; no answer is kept forever"
                )
                raise ApiError(404, message, param=at, code="item_not_found")
            resolved.append(msgspec.convert(outputs[answer].pop(id), Item))
        return resolved

    def _kept(self, owner: Owner, id: str, param: str | None) -> Kept:
        kept = self._store.get(owner, id)
        if kept is None:
            raise _not_found(id, param)
        return kept


def _not_found(id: str, param: str | None) -> ApiError:
    message = f"The response {id!r} was not found: not every response is kept, and none forever."
    return ApiError(404, message, param=param, code="response_not_found")
