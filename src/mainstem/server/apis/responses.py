"""/v1/responses, by the OpenAI API reference: requests, and what is kept of their answers.

A request is converted into one for /v1/chat/completions, whose checks and rendering are the only ones. `ResponseReply`
writes the answer. The ids of items contain that of their response, so that a reference to one is found in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import msgspec
from msgspec import Meta, Struct

from mainstem.server.apis import requests, response_items, response_tools
from mainstem.server.apis.replies import ChunkUsage, Extras, Head, Spell
from mainstem.server.apis.response_items import Item
from mainstem.server.apis.response_reply import ID_PREFIX, ResponseReply
from mainstem.server.apis.response_tools import Tool, ToolChoice, choice_names, choice_of, tools_of
from mainstem.server.errors import ApiError, renamed
from mainstem.server.fields.breakpoints import CacheOptions
from mainstem.server.fields.rules import Field, Rules, Unheeded
from mainstem.server.fields.turns import Turns, check_type
from mainstem.server.generation import Task
from mainstem.server.kept.listing import Page, page
from mainstem.server.kept.response_store import Kept, Owner, ResponseStore
from mainstem.server.parsing.output import OutputParser
from mainstem.server.watch.diagnosis import Earlier, Finding, Fingerprint, Shape

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
        **response_items.RULES,
        **response_tools.RULES,
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

_FORMATS = {"text": (), "json_object": (), "json_schema": ("name", "schema", "strict", "description")}
"""The fields of forms of an answer, by type."""

_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""The names of other fields."""


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

    @property
    def seals(self) -> bool:
        """Whether reasoning is repeated in a form that the client brings back as it is."""
        return "reasoning.encrypted_content" in (self.include or ())

    def chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> bytes:
        """Returns the body of the chat that generates the same."""
        logprobs = bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
        fields = {name: getattr(self, name) for name in _SAME}
        fields |= {"messages": messages, "max_tokens": 0 if self.prewarms else self.max_output_tokens}
        if self.prompt_cache_options is not None:
            options = self.prompt_cache_options
            fields["prompt_cache_options"] = {"mode": options.mode, "ttl": options.ttl}
        if logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if tools:
            fields["tools"] = tools
        if self.tool_choice is not None:
            fields["tool_choice"] = choice_of(self.tool_choice)
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _format(self.text.format)
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


class CountRequest(Struct, kw_only=True):
    """The body of POST /v1/responses/input_tokens: of a request, what the prompt consists of."""

    model: str | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenCount(Struct):
    """The response of POST /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


def _format(format: Format) -> dict[str, Any]:
    check_type(format, format.type, _FORMATS, "text.format")
    if format.type != "json_schema":
        return {"type": format.type}
    fields = {name: getattr(format, name) for name in ("name", "schema", "strict", "description")}
    return {"type": "json_schema", "json_schema": {name: value for name, value in fields.items() if value is not None}}


# --- the API ------------------------------------------------------------------------------------------------------


class Deleted(Struct):
    """The response of DELETE /v1/responses/{id}."""

    id: str
    deleted: bool = True
    object: str = "response"


class _Made(NamedTuple):
    """The chat that is made of a request.

    Args:
        chat: its body.
        messages: of it.
        names: the client's paths, by those in the chat.
        apart: see `response_tools.Tools`.
        items: of the conversation, as the client gave them.
    """

    chat: bytes
    messages: list[dict[str, Any]]
    names: dict[str, str]
    apart: Mapping[str, tuple[str, str]]
    items: Sequence[dict[str, Any]]


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
        made = self._made(request, body, unheeded, owner)
        requests.check_known(body, ResponseRequest, unheeded, RULES)  # after the kinds of items: their fields differ
        with renamed(made.names):
            parsed = requests.parse_chat(made.chat)
        shape = Shape.of(made.messages, [msgspec.to_builtins(tool) for tool in request.tools or ()])
        return Task(parsed, self._replier(request, made, owner), made.names, shape)

    def parse_count(self, body: bytes, unheeded: Unheeded, owner: Owner, model: str) -> Task:
        """Parses a request whose prompt is counted; see `parse`. `model`: where it names none."""
        counted = requests.decode(body, CountRequest)
        fields = msgspec.structs.asdict(counted) | {"model": counted.model or model}
        request = ResponseRequest(**fields)
        made = self._made(request, body, unheeded, owner)
        requests.check_known(body, CountRequest, unheeded, RULES)
        with renamed(made.names):
            return Task(requests.parse_chat(made.chat), self._replier(request, made, owner), made.names)

    def _made(self, request: ResponseRequest, body: bytes, unheeded: Unheeded | None, owner: Owner) -> _Made:
        """Makes the chat of a request."""
        given: list[dict[str, Any]] = []
        if isinstance(request.input, str):
            given = [{"type": "message", "role": "user", "content": request.input}]
        elif request.input:
            given = self._resolved(owner, msgspec.json.decode(body)["input"])
        earlier = self._conversation(owner, request.previous_response_id)
        here = "input[{}]" if isinstance(request.input, list) else "input"
        items = [("previous_response_id", each) for each in msgspec.convert(earlier, list[Item])]
        items += [(here.format(i), each) for i, each in enumerate(msgspec.convert(given, list[Item]))]
        turns = Turns()
        if request.instructions:
            turns.begin("system", "instructions")
            turns.text(request.instructions)
        for at, item in items:
            left = response_items.add(turns, item, at)
            if unheeded is not None and at != "previous_response_id":
                unheeded.ignored += left
        if not turns.messages:
            raise ApiError(400, "input: this field is required", param="input")
        offered = [(f"tools[{i}]", tool) for i, tool in enumerate(request.tools or ())]
        more = [(f"{at}.tools[{i}]", tool) for at, item in items for i, tool in enumerate(_offered(item))]
        tools = tools_of(offered, more)
        names = {**_NAMES, **choice_names(request.tool_choice), **tools.names, **turns.names}
        return _Made(request.chat(turns.messages, tools.chat), turns.messages, names, tools.apart, [*earlier, *given])

    def get(self, owner: Owner, id: str) -> bytes:
        """Returns the JSON of a response.

        Raises:
            ApiError: 404; it is not there.
        """
        return self._kept(owner, id, None).body

    def input_items(self, owner: Owner, id: str, query: Mapping[str, str]) -> Page:
        """Returns a page of what a response answers.

        Args:
            owner, id: of the response.
            query: see `listing.page`.

        Raises:
            ApiError: 404; the response is not there. 400; a parameter is wrong.
        """
        kept = self._kept(owner, id, None)
        items = _numbered(id, kept)
        given = items[: len(items) - len(msgspec.json.decode(kept.body)["output"])]
        return page([(item["id"], item) for item in given], query, "desc")

    def cancel(self, owner: Owner, id: str) -> NoReturn:
        """Cancels nothing: a response that is kept has ended, since none is made in the background.

        Raises:
            ApiError: 400, or 404; the response is not there.
        """
        self._kept(owner, id, None)
        message = "Only responses that are made in the background can be cancelled: close the connection of any other."
        raise ApiError(400, message, param="id", code="not_cancellable")

    def delete(self, owner: Owner, id: str) -> Deleted:
        """Forgets a response.

        Raises:
            ApiError: 404; it is not there.
        """
        self._kept(owner, id, None)
        self._store.delete(owner, id)
        return Deleted(id)

    def _replier(self, request: ResponseRequest, made: _Made, owner: Owner) -> Callable[..., ResponseReply]:
        def keep(id: str, body: Struct, output: Sequence[dict[str, Any]]) -> None:
            conversation = msgspec.json.encode([*made.items, *output])
            self._store.put(owner, id, Kept(msgspec.json.encode(body), conversation))

        def reply(
            head: Head,
            spell: Spell,
            usage: ChunkUsage,
            extras: Extras,
            parser: Callable[[], OutputParser],
        ) -> ResponseReply:
            kept = keep if request.store is not False else None
            finding = self._diagnosed(request, head.id, extras.fingerprint, owner)
            return ResponseReply(head, spell, request, kept, parser, self._now, finding, extras, made.apart)

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

    def _conversation(self, owner: Owner, id: str | None) -> list[dict[str, Any]]:
        if id is None:
            return []
        found: list[dict[str, Any]] = msgspec.json.decode(self._kept(owner, id, "previous_response_id").conversation)
        return found

    def _resolved(self, owner: Owner, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns items with those that references stand for; each at most once, so that a body cannot grow by them."""
        known: dict[str, dict[str, Any]] = {}  # the items of an answer and of what it answers, by id
        resolved = []
        for i, item in enumerate(items):
            if item.get("type") != "item_reference":
                resolved.append(item)
                continue
            at = f"input[{i}].id"
            id = response_items.needed(msgspec.convert(item, Item), "id", f"input[{i}]")
            answer = ID_PREFIX + id.split("_")[1] if id.count("_") == 2 else ""
            if answer not in known:
                kept = self._store.get(owner, answer)
                known[answer] = {} if kept is None else {each["id"]: each for each in _numbered(answer, kept)}
            if id not in known[answer]:
                message = (
                    f"{at}: the item {id!r} was not found, or it was referred to before; no answer is kept forever"
                )
                raise ApiError(404, message, param=at, code="item_not_found")
            resolved.append(known[answer].pop(id))
        return resolved

    def _kept(self, owner: Owner, id: str, param: str | None) -> Kept:
        kept = self._store.get(owner, id) if id.startswith(ID_PREFIX) else None
        if kept is None:
            raise _not_found(id, param)
        return kept


def _not_found(id: str, param: str | None) -> ApiError:
    message = f"The response {id!r} was not found: not every response is kept, and none forever."
    return ApiError(404, message, param=param, code="response_not_found")


def _offered(item: Item) -> Sequence[Tool]:
    """Returns the tools that an item offers."""
    return () if item.type in response_items.LEFT_OUT else item.tools or ()


def _numbered(id: str, kept: Kept) -> list[dict[str, Any]]:
    """Returns the items of a conversation, of which each has an id, and messages have parts."""
    items: list[dict[str, Any]] = msgspec.json.decode(kept.conversation)
    for i, item in enumerate(items):
        kind = item.setdefault("type", "message")
        prefix = "msg" if kind == "message" else "item"
        item["id"] = item.get("id") or f"{prefix}_{id.removeprefix(ID_PREFIX)}_i{i}"
        if kind == "message" and isinstance(item.get("content"), str):
            part = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": part, "text": item["content"]}]
    return items
