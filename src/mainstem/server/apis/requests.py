"""The bodies of requests for completions and chats, by the OpenAI API reference.

Knows JSON and the names of fields, and turns them into `SamplingParams`. Does not know HTTP, the engine, or how text
becomes tokens. `top_k`, `min_p`, `cache_salt`, `priority`, `ignore_eos` and others are extensions that open servers
share. `fields` says what becomes of fields that are not honoured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from mainstem.cache.expected import check_next_use
from mainstem.cache.retention import LEAST_S
from mainstem.errors import BadArgument
from mainstem.runtime.request import Hints
from mainstem.runtime.text.prompts import Template
from mainstem.server.apis.tool_fields import ToolCall, ToolChoice, ToolSpec, tools_of
from mainstem.server.errors import ApiError
from mainstem.server.fields.breakpoints import Breakpoint, CacheControl, CacheOptions, Mark, counted
from mainstem.server.fields.rules import COMPLETIONS, OPENAI, Refused, Rules, Unheeded, check_fields
from mainstem.server.fields.structured import Asked, Structured
from mainstem.server.fields.tools import Tooling
from mainstem.settings.engine import SEEDS, SamplingParams

MAX_CHOICES = 128
"""Maximum number of choices of one HTTP request: prompts times `n`."""

MAX_STOPS = 16
"""Maximum number of stop strings of one request."""

COMPLETION_TOKENS = 16
"""Default of `max_tokens` of /v1/completions, as in the OpenAI reference."""

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Decoded = TypeVar("Decoded", bound=Struct)


class StreamOptions(Struct):
    """`stream_options`: whether a last chunk carries the usage, and the others what was used so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CacheHints(Struct):
    """`cache_hints`: what is known of how the KV of a request will be used again; see `runtime.request.Hints`."""

    retain_s: float | None = None
    one_shot: bool | None = None
    no_store: bool | None = None
    next_use_s: float | None = None
    next_use_steps: float | None = None


class _Request(Structured, kw_only=True):
    """The fields of both kinds of request; None means the default, as in the OpenAI API."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[TokenId] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: list[Annotated[str, Meta(min_length=1)]] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_hints: CacheHints | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    explain: bool | None = None

    @property
    def kept(self) -> int:
        """Number of answers to each prompt that the client gets."""
        return self.n or 1

    def hints(self, longest_s: float) -> Hints:
        """Returns what is known of how its KV will be used again; it may be retained for at most `longest_s`.

        Raises:
            BadArgument: the time is out of range, or nothing would be there to retain.
        """
        given = self.cache_hints or CacheHints()
        name = "cache_hints.retain_s"
        if given.retain_s is not None and not LEAST_S <= given.retain_s <= longest_s:
            raise BadArgument(name, given.retain_s, f"seconds from {LEAST_S} to {longest_s:g} (max_retain_s)")
        if given.retain_s is not None and given.no_store:
            raise BadArgument(name, given.retain_s, "left out with cache_hints.no_store")
        check_next_use(given.next_use_s, given.next_use_steps, longest_s, "cache_hints.")
        for name in ("next_use_s", "next_use_steps"):
            value = getattr(given, name)
            if value is not None and given.no_store:
                raise BadArgument(f"cache_hints.{name}", value, "left out with cache_hints.no_store")
        one_shot, no_store = bool(given.one_shot), bool(given.no_store)
        return Hints(
            given.retain_s,
            one_shot,
            no_store,
            next_use_s=given.next_use_s,
            next_use_steps=given.next_use_steps,
            session=self.prompt_cache_key or None,
        )

    def marks(self) -> list[Mark]:
        """Returns the places in the prompt that count as breakpoints, in its order."""
        return counted(self._marks(), self.prompt_cache_options or CacheOptions())

    def _marks(self) -> list[Mark]:
        return []

    @property
    def choices(self) -> int:
        """Number of answers to each prompt that are generated."""
        return self.kept

    @property
    def scored(self) -> int | None:
        """For how many alternatives of each token of the prompt log-probabilities are needed; None: for none."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_chunks(self) -> bool:
        """Whether the other chunks carry what was used so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def _params(self, max_tokens: int, logprobs: int | None, choice: int) -> SamplingParams:
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs: cannot be streamed", param="prompt_logprobs")
        asked = self.asked()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else _seed(self.seed, choice),
            stop=tuple(text for text in stop if text),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=self.scored,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=_biases(self.logit_bias or {}),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            skip_special_tokens=self.skip_special_tokens is not False,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            grammar=None if asked is None else asked.grammar,
        )


def _seed(seed: int, choice: int) -> int:
    """Returns the seed of a choice: those of one request differ, also after the last seed there is."""
    return seed + choice - SEEDS if 0 <= seed < SEEDS <= seed + choice else seed + choice


def _biases(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Returns token ids and biases; JSON has only texts as keys."""
    wrong = next((token for token in given if not (token.isascii() and token.isdecimal())), None)
    if wrong is not None:
        raise ApiError(400, f"logit_bias: the key {wrong!r} is no token id", param="logit_bias")
    return tuple((int(token), bias) for token, bias in given.items())


class CompletionRequest(_Request, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: int | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None

    @property
    def choices(self) -> int:
        """Number of answers to each prompt that are generated."""
        return self.best_of or self.kept

    @property
    def scored(self) -> int | None:
        """See `_Request.scored`: an echo shows log-probabilities of the prompt, too."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((k for k in asked if k is not None), default=None)

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each as text or token ids.

        Raises:
            ApiError: 400; the list is empty, or mixes texts and ids.
        """
        return prompts_of(self.prompt, "prompt")

    def params(self, room: int, choice: int) -> SamplingParams:
        """Returns the sampling parameters of one choice; `room` (positions left in the context) is not used here.

        Raises:
            BadArgument: a value is outside its range.
        """
        ranked = self.choices > self.kept  # by their log-probabilities
        logprobs = 0 if ranked and self.logprobs is None else self.logprobs
        return self._params(COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens, logprobs, choice)


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
        """Checks what a message of its role has."""
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
        """Converts the message for a chat template. `developer` becomes `system`, the older name that templates know.

        Returns:
            `role` and `content`, and `name`, `tool_calls`, `tool_call_id` and `reasoning_content` where they are given.
            The content is one text, or None for an assistant that said nothing, or with images a list of parts, each
            `{"type": "text", "text": ...}` or `{"type": "image", "url": ..., "at": the path of the part}`.

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

    def marks(self, index: int) -> Iterator[Mark]:
        """Yields the places after parts that have a breakpoint; `index`: of this message."""
        parts = self.content if isinstance(self.content, list) else []
        offset = 0
        for i, part in enumerate(parts):
            offset += len((part.text if part.type == "text" else part.refusal) or "") + (i > 0)  # the line break
            if (own := part.prompt_cache_breakpoint or part.cache_control) is not None:
                yield Mark(own.ttl, message=index, part=i + 1, offset=offset)

    def _content(self, at: str) -> str | list[dict[str, str]] | None:
        if self.content is None:
            return self.refusal
        if isinstance(self.content, str):
            return self.content
        parts = [_part(part, f"{at}.content[{i}]") for i, part in enumerate(self.content)]
        if all(part["type"] == "text" for part in parts):
            return "\n".join(part["text"] for part in parts)
        return parts


Messages = Annotated[list[Message], Meta(min_length=1)]


def template_input(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Converts the messages of a request for a chat template; see `Message.template_input`."""
    return [message.template_input(f"messages[{i}]") for i, message in enumerate(messages)]


def parts(messages: Sequence[dict[str, Any]], type: str) -> list[dict[str, Any]]:
    """Returns the parts of one type of a conversation with images, as `Message.template_input` makes them, in order."""
    lists = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part for parts in lists for part in parts if part["type"] == type]


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


def template_of(
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    variables: dict[str, Any] | None,
    add_special_tokens: bool | None,
) -> Template:
    """Returns how a chat template is applied, from the fields of a request.

    Raises:
        BadArgument: they contradict each other, or a variable has a reserved name.
    """
    continues = bool(continue_final_message)
    begins = not continues if add_generation_prompt is None else add_generation_prompt
    return Template(begins, continues, variables or {}, special_tokens=bool(add_special_tokens))


class Thinking(Struct):
    """`thinking`, as in the Anthropic API reference: whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


_CALLABLE = "that can be called here: those that OpenAI or Anthropic run are left out"


class ChatRequest(_Request, kw_only=True):
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

    def __post_init__(self) -> None:
        """Checks that the names of tools are unique, and that the tools that are chosen are there."""
        names: list[str] = []
        for i, tool in enumerate(self.tools or ()):
            if tool.name in names:
                raise ValueError(f"`tools[{i}].{tool.type}.name`: there is another tool named {tool.name!r}")
            names += [] if tool.name is None else [tool.name]
        if self.tool_choice == "required" and not names:
            raise ValueError(f"`tool_choice`: 'required' needs tools {_CALLABLE}")
        if isinstance(self.tool_choice, ToolChoice):
            for path, name in self.tool_choice.named.items():
                if name not in names:
                    others = f"the tools are {', '.join(names)}" if names else f"there is none {_CALLABLE}"
                    raise ValueError(f"`{path}`: there is no tool named {name!r}; {others}")

    @property
    def has_images(self) -> bool:
        """Whether a message has an image, which may have to be fetched."""
        lists = [message.content for message in self.messages if isinstance(message.content, list)]
        return any(part.type == "image_url" for parts in lists for part in parts)

    def conversation(self) -> list[dict[str, Any]]:
        """Converts the messages for a chat template; see `Message.template_input`.

        Raises:
            ApiError: 400; a part is neither text nor an image.
        """
        return template_input(self.messages)

    def tooling(self) -> Tooling:
        """Returns the tools, and which the model may call. A tool that is named must be called exactly once."""
        tools, choice = tools_of(self.tools), self.tool_choice or "auto"
        parallel = self.parallel_tool_calls is not False
        if isinstance(choice, str):
            return Tooling(tools, choice, None, parallel)
        allowed = frozenset(choice.named.values())
        if choice.type == "allowed_tools" and choice.allowed_tools is not None:
            return Tooling(tools, choice.allowed_tools.mode, allowed, parallel)
        return Tooling(tools, "required", allowed, parallel=False)

    def asked(self) -> Asked | None:
        """See `Structured.asked`. `response_format` is the form of a text: an answer that must be calls has none."""
        asked = super().asked()
        if asked is not None and self.tooling().choice == "required" and not asked.field.startswith("response_format"):
            raise ApiError(400, f"{asked.field}: not supported where tools must be called", param=asked.field)
        return asked

    def _marks(self) -> list[Mark]:
        """Returns the places of all breakpoints: after tools, parts of messages, and messages."""
        found, shown = list[Mark](), -1
        for tool in self.tools or ():
            shown += tool.name is not None  # a tool that is left out counts as the one before it
            if (each := tool.breakpoint) is not None and shown >= 0:
                found.append(Mark(each.ttl, tool=shown))
        for i, message in enumerate(self.messages):
            found += message.marks(i)
            if (each := message.prompt_cache_breakpoint or message.cache_control) is not None:
                found.append(Mark(each.ttl, message=i + 1 if i + 1 < len(self.messages) else None))
        return found

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think before it answers; None: as its chat template has it."""
        kind = None if self.thinking is None else self.thinking.type
        return {"enabled": True, "disabled": False}.get(kind or "")

    def template(self, variables: Mapping[str, Any] = {}) -> Template:
        """Returns how the chat template is applied, with variables that the request may override; see `template_of`."""
        given = {**variables, **(self.chat_template_kwargs or {})}
        return template_of(self.add_generation_prompt, self.continue_final_message, given, self.add_special_tokens)

    def params(self, room: int, choice: int) -> SamplingParams:
        """Returns the sampling parameters of one choice, which may use all `room` in the context by default.

        Raises:
            BadArgument: a value is outside its range.
            ApiError: 400; `top_logprobs` without `logprobs`.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs = true", param="top_logprobs")
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        try:
            return self._params(max(room, 1) if asked is None else asked, logprobs, choice)
        except BadArgument as error:
            if error.name != "logprobs":
                raise
            raise BadArgument("top_logprobs", error.value, error.allowed) from error


def parse_completion(body: bytes, unheeded: Unheeded | None = None) -> CompletionRequest:
    """Parses the request in a body.

    Args:
        body: the JSON.
        unheeded: fields that do nothing are added to it; see `fields.check_fields`.

    Raises:
        ApiError: 400; malformed JSON, a wrong type or value, or a field that is unknown or not supported.
    """
    request = decode(body, CompletionRequest)
    check_known(body, CompletionRequest, unheeded, COMPLETIONS)
    if request.choices < request.kept:
        raise ApiError(400, f"best_of: must be at least n, {request.kept}; got {request.best_of}", param="best_of")
    if request.stream and request.choices > request.kept:
        raise ApiError(400, "best_of: more than n cannot be streamed", param="best_of")
    return request


def parse_chat(body: bytes, unheeded: Unheeded | None = None) -> ChatRequest:
    """Parses the request in a body; see `parse_completion`."""
    return decode_known(body, ChatRequest, unheeded)


def prompts_of(given: str | list[str | int | list[int]], name: str) -> list[str | list[int]]:
    """Returns the prompts in a field, each as text or token ids.

    Raises:
        ApiError: 400; the list is empty, or mixes texts and ids.
    """
    if isinstance(given, str):
        return [given]
    kinds = {type(part) for part in given}
    if kinds == {int}:
        return [given]  # type: ignore[list-item]
    if kinds not in ({str}, {list}):
        allowed = "a string, or a list of strings, of token ids, or of lists of token ids; a list must not be empty"
        raise ApiError(400, f"{name}: must be {allowed}", param=name)
    return list(given)  # type: ignore[arg-type]


def decode_known(body: bytes, kind: type[Decoded], unheeded: Unheeded | None = None) -> Decoded:
    """Parses a body of any kind, and checks the names of its fields; see `parse_completion`."""
    request = decode(body, kind)
    check_known(body, kind, unheeded)
    return request


def check_known(body: bytes, kind: type[Struct], unheeded: Unheeded | None, rules: Rules = OPENAI) -> None:
    """Checks the names of the fields of a body, by an API's rules; see `fields.check_fields`.

    Raises:
        ApiError: 400; a field is unknown or not supported.
    """
    with _malformed():
        try:
            check_fields(body, kind, unheeded, rules)
        except Refused as error:
            raise ApiError(400, str(error), param=error.name, code=error.code) from None


def decode(body: bytes, kind: type[Decoded]) -> Decoded:
    """Parses a body of any kind.

    Raises:
        ApiError: 400; malformed JSON, or a wrong type or value.
    """
    with _malformed():
        body.decode()  # also what the type does not have, and what it keeps as it is
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            raise _field_error(str(error), kind.__struct_fields__) from None


@contextmanager
def _malformed() -> Iterator[None]:
    """Makes an ApiError of what is wrong with JSON. Some of it is first read when names are checked."""
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The JSON of the body is nested too deeply", code="invalid_json") from None


def _field_error(message: str, fields: Sequence[str]) -> ApiError:
    """Splits msgspec's `Expected ... - at `$.messages[0].role``, because clients want the path in `param`."""
    problem, _, path = message.partition(" - at ")
    at = path.strip("`").removeprefix("$").lstrip(".")
    missing = re.search(r"missing required field `(\w+)`", problem)
    if missing:
        at = f"{at}.{missing[1]}".lstrip(".")
        problem = "this field is required"
    named = re.match(r"`([^`]+)`: (.*)", problem, re.DOTALL)
    if named:
        at, problem = f"{at}.{named[1]}".lstrip("."), named[2]
    unknown = re.search(r"unknown field `(.*)`", problem)
    if unknown:
        inside = f"{at}." if at else ""
        problem = "unknown field" + ("" if inside else f"; this route has {', '.join(fields)}")
        at = inside + unknown[1]
    return ApiError(400, f"{at or 'body'}: {problem[0].lower()}{problem[1:]}", param=at or None)
