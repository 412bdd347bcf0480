"""The OpenAI HTTP protocol as data: requests, responses, stream chunks and errors.

Knows JSON and the names of fields, and turns them into `SamplingParams` and back. Does not know HTTP, the engine, or
how text becomes tokens. Follows the OpenAI API reference (completions, chat completions, models); `top_k`, `min_p`,
`cache_salt`, `priority` and `ignore_eos` are extensions that other open servers share.

`fields` says what becomes of fields that are not honoured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from mainstem.errors import (
    BadArgument,
    BadTokens,
    EngineClosed,
    EngineFull,
    MainstemError,
    RequestTooLong,
    UnsupportedModel,
)
from mainstem.runtime.prompts import Template
from mainstem.runtime.request import Delta, TokenLogprob, Usage
from mainstem.server.fields import Refused, check_fields
from mainstem.settings.engine import SamplingParams

MAX_CHOICES = 128
"""Maximum number of choices of one HTTP request: prompts times `n`."""

MAX_STOPS = 16
"""Maximum number of stop strings of one request."""

COMPLETION_TOKENS = 16
"""Default of `max_tokens` of /v1/completions, as in the OpenAI reference."""

_LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity; the value that the OpenAI API uses for "practically never"

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Decoded = TypeVar("Decoded", bound=Struct)


class ErrorDetail(Struct):
    """What went wrong, in the four fields that OpenAI clients read."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct):
    """The body of every response that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A refusal or failure that is reported to the client.

    Args:
        status: the HTTP status.
        message: one sentence for people.
        type: the OpenAI error type.
        param: the path of the wrong field (`messages[0].content`).
        code: a stable word for programs.
        headers: extra response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message, type, param, code)
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """Returns the JSON of the response."""
        return encode(ErrorBody(self.detail))


def api_error(error: MainstemError) -> ApiError:
    """Translates a typed error of the layers below for the client; internal errors become a 500 without details."""
    message = str(error)
    match error:
        case BadArgument():
            return ApiError(400, message, param=error.name)
        case UnsupportedModel():
            return ApiError(400, message)
        case BadTokens():
            return ApiError(400, message, param="prompt")
        case RequestTooLong():
            return ApiError(400, message, code="context_length_exceeded")
        case EngineFull():
            headers = {"Retry-After": "1"}
            return ApiError(429, message, type="rate_limit_error", code="engine_full", headers=headers)
        case EngineClosed():
            return unavailable("The engine has stopped and accepts no more requests.", "engine_closed")
    return internal_error()


def text_only(at: str) -> ApiError:
    """Returns the error for an image sent to a text-only model; `at` is the path of the field."""
    return ApiError(400, f"{at}: this model accepts text only", param=at, code="unsupported_content")


def draining() -> ApiError:
    """Returns the error for a request to a server that is shutting down."""
    return unavailable("The server is shutting down and accepts no new requests.", "draining")


def unavailable(message: str, code: str) -> ApiError:
    """Returns a 503 that asks the client to retry later, maybe at another server."""
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError(503, message, type="service_unavailable_error", code=code, headers=headers)


def internal_error() -> ApiError:
    """Returns the error for a fault of the server, which logs the cause under the request's id."""
    return ApiError(500, "The server had an error while handling the request.", type="server_error")


# --- requests -----------------------------------------------------------------------------------------------------


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`stream_options`: whether a last chunk carries the usage, and the others what was used so far.

    `include_obfuscation` pads chunks at OpenAI, against who reads their lengths on the network; it is ignored.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class _Request(Struct, kw_only=True):
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
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
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

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_chunks(self) -> bool:
        """Whether the other chunks carry what was used so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def _params(self, max_tokens: int, logprobs: int | None, choice: int) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else self.seed + choice,  # so that the choices of one request differ
            stop=tuple(text for text in stop if text),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=_biases(self.logit_bias or {}),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            skip_special_tokens=self.skip_special_tokens is not False,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
        )


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
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each as text or token ids.

        Raises:
            ApiError: 400; the list is empty, or mixes texts and ids.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(part) for part in self.prompt}
        if kinds == {int}:
            return [self.prompt]  # type: ignore[list-item]
        if kinds not in ({str}, {list}):
            allowed = "a string, or a list of strings, of token ids, or of lists of token ids; a list must not be empty"
            raise ApiError(400, f"prompt: must be {allowed}", param="prompt")
        return list(self.prompt)  # type: ignore[arg-type]

    def params(self, room: int, choice: int) -> SamplingParams:
        """Returns the sampling parameters of one choice; `room` (positions left in the context) is not used here.

        Raises:
            BadArgument: a value is outside its range.
        """
        return self._params(COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens, self.logprobs, choice)


class ImageUrl(Struct):
    """The location of an image. The model's processor chooses the resolution, so `detail` must be absent or "auto"."""

    url: str
    detail: str | None = None


class ContentPart(Struct):
    """One part of a message's content: text, or an image."""

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None


class Message(Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    tool_calls: Any = None

    def template_input(self, at: str) -> dict[str, Any]:
        """Converts the message for a chat template. `developer` becomes `system`, the older name that templates know.

        Returns:
            `role` and `content`. The content is one text, or with images a list of parts, each `{"type": "text",
            "text": ...}` or `{"type": "image", "url": ..., "at": the path of the part}`.

        Args:
            at: the path of this message, for the error.

        Raises:
            ApiError: 400; a part is neither text nor an image, or there are tool calls.
        """
        if self.tool_calls:
            raise ApiError(400, f"{at}.tool_calls: tools are not supported", param=f"{at}.tool_calls")
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        parts = [_part(part, f"{at}.content[{i}]") for i, part in enumerate(self.content)]
        if all(part["type"] == "text" for part in parts):
            return {"role": role, "content": "\n".join(part["text"] for part in parts)}
        return {"role": role, "content": parts}


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
    if part.type != "text":
        message = f"{at}: only parts of type 'text' and 'image_url' are supported, got {part.type!r}"
        raise ApiError(400, message, param=f"{at}.type", code="unsupported_content")
    if part.text is None:
        raise ApiError(400, f"{at}: a text part needs the field 'text'", param=f"{at}.text")
    return {"type": "text", "text": part.text}


def _image_part(part: ContentPart, at: str) -> dict[str, str]:
    image = part.image_url
    if image is None:
        raise ApiError(400, f"{at}: an image part needs the field 'image_url'", param=f"{at}.image_url")
    if image.detail not in (None, "auto"):
        message = f"{at}.image_url.detail: not supported; omit it or use 'auto'"
        raise ApiError(400, message, param=f"{at}.image_url.detail", code="unsupported_parameter")
    return {"type": "image", "url": image.url, "at": f"{at}.image_url.url"}


def template_of(
    add_generation_prompt: bool | None, continue_final_message: bool | None, variables: dict[str, Any] | None
) -> Template:
    """Returns how a chat template is applied, from the fields of a request.

    Raises:
        BadArgument: they contradict each other, or a variable has a reserved name.
    """
    continues = bool(continue_final_message)
    begins = not continues if add_generation_prompt is None else add_generation_prompt
    return Template(begins, continues, variables or {})


class ChatRequest(_Request, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Converts the messages for a chat template; see `Message.template_input`.

        Raises:
            ApiError: 400; a part is neither text nor an image, or there are tool calls.
        """
        return template_input(self.messages)

    def template(self) -> Template:
        """Returns how the chat template is applied; see `template_of`."""
        return template_of(self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)

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
        return self._params(max(room, 1) if asked is None else asked, logprobs, choice)


def parse_completion(body: bytes, tolerated: list[str] | None = None) -> CompletionRequest:
    """Parses the request in a body.

    Args:
        body: the JSON.
        tolerated: the names of unknown fields are appended to it; None: they are refused.

    Raises:
        ApiError: 400; malformed JSON, a wrong type or value, or a field that is unknown or not supported.
    """
    request = _decode_known(body, CompletionRequest, tolerated)
    if request.best_of not in (None, request.choices):
        raise ApiError(400, f"best_of: not supported unless it equals n, got {request.best_of}", param="best_of")
    return request


def parse_chat(body: bytes, tolerated: list[str] | None = None) -> ChatRequest:
    """Parses the request in a body; see `parse_completion`."""
    return _decode_known(body, ChatRequest, tolerated)


def _decode_known(body: bytes, kind: type[Decoded], tolerated: list[str] | None) -> Decoded:
    request = decode(body, kind)
    try:
        check_fields(body, kind, tolerated)
    except Refused as error:
        raise ApiError(400, str(error), param=error.name, code=error.code) from None
    return request


def decode(body: bytes, kind: type[Decoded]) -> Decoded:
    """Parses a body of any kind.

    Raises:
        ApiError: 400; malformed JSON, or a wrong type or value.
    """
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), kind.__struct_fields__) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The JSON of the body is nested too deeply", code="invalid_json") from None
    return request


def _field_error(message: str, fields: Sequence[str]) -> ApiError:
    """Splits msgspec's `Expected ... - at `$.messages[0].role``, because clients want the path in `param`."""
    problem, _, path = message.partition(" - at ")
    at = path.strip("`").removeprefix("$").lstrip(".")
    missing = re.search(r"missing required field `(\w+)`", problem)
    if missing:
        at = f"{at}.{missing[1]}".lstrip(".")
        problem = "this field is required"
    unknown = re.search(r"unknown field `(.*)`", problem)
    if unknown:
        at, problem = unknown[1], f"unknown field; this route has {', '.join(fields)}"
    return ApiError(400, f"{at or 'body'}: {problem[0].lower()}{problem[1:]}", param=at or None)


# --- responses ----------------------------------------------------------------------------------------------------


class CachedByTier(Struct):
    """The tiers that held the cached tokens when the request came."""

    device: int
    host: int
    storage: int


class PromptTokensDetails(Struct):
    """How many of the prompt's tokens were found in the cache instead of computed."""

    cached_tokens: int
    cached_tokens_by_tier: CachedByTier


class UsageBody(Struct):
    """Tokens of one HTTP request, over all its choices; each prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET  # known at the end


def usage_body(usages: Sequence[Usage], choices: int) -> UsageBody:
    """Returns the usage of one HTTP request.

    A prompt with several choices counts once, with the cached tokens of the choice that found the fewest. Later choices
    find what the first one has just computed, which says nothing about the cache before the request.

    Args:
        usages: one per choice; the choices of a prompt are adjacent.
        choices: number of choices per prompt.
    """
    groups = [usages[i : i + choices] for i in range(0, len(usages), choices)]
    prompt = sum(group[0].prompt_tokens for group in groups)
    least = [min(group, key=lambda usage: usage.cached_tokens) for group in groups]
    cached = sum(usage.cached_tokens for usage in least)
    host, storage = sum(usage.host_tokens for usage in least), sum(usage.storage_tokens for usage in least)
    completion = sum(usage.completion_tokens for usage in usages)
    details = PromptTokensDetails(cached, CachedByTier(cached - host - storage, host, storage))
    return UsageBody(prompt, completion, prompt + completion, details)


class Model(Struct):
    """One entry of GET /v1/models; `parent` is the base model of an adapter."""

    id: str
    created: int
    max_model_len: int
    parent: str | None = None
    object: str = "model"
    owned_by: str = "mainstem"


class ModelList(Struct):
    """The response body of GET /v1/models."""

    data: list[Model]
    object: str = "list"


class Alternative(Struct):
    """A candidate for a token of the answer, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(Alternative):
    """The generated token, with the most likely alternatives."""

    top_logprobs: list[Alternative]


class ChatLogprobs(Struct):
    """`logprobs` of a chat choice."""

    content: list[ChosenToken]


class CompletionLogprobs(Struct):
    """`logprobs` of a completion choice: four lists of equal length; offsets count characters of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One answer of /v1/completions, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class CompletionBody(Struct):
    """A response of /v1/completions; its stream chunks have the same form."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    object: str = "text_completion"


class ChatMessage(Struct):
    """A whole answer."""

    content: str
    role: str = "assistant"


class ChatPiece(Struct):
    """What a chunk adds to an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer of /v1/chat/completions."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatBody(Struct):
    """A response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: str = "chat.completion"


class ChatChunkChoice(Struct):
    """A piece of one answer."""

    index: int
    delta: ChatPiece
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(Struct):
    """One event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every chunk of one response repeats."""

    id: str
    created: int
    model: str


class ChunkUsage:
    """The usage in chunks before the last: nothing, null, or what was used so far.

    Args:
        include: whether the last chunk carries the usage; earlier ones then have `usage: null`.
        prompt_tokens: of all prompts, to carry what was used so far; None: not.
    """

    def __init__(self, include: bool, prompt_tokens: int | None = None) -> None:
        self._include, self._prompt_tokens, self._completion_tokens = include, prompt_tokens, 0

    def after(self, delta: Delta) -> UsageBody | UnsetType | None:
        """Returns the usage after an event."""
        if not self._include:
            return UNSET
        if self._prompt_tokens is None:
            return None
        self._completion_tokens += len(delta.tokens)
        total = self._prompt_tokens + self._completion_tokens
        return UsageBody(self._prompt_tokens, self._completion_tokens, total)


class CompletionReply:
    """Writes the answers of one /v1/completions request, whole or as chunks.

    Args:
        head: the fields that every chunk repeats.
        spell: returns the text of one token.
        usage: of the chunks of a stream.
    """

    def __init__(self, head: Head, spell: Callable[[int], str], usage: ChunkUsage) -> None:
        self._head = head
        self._spell = spell
        self._usage = usage
        self._shown: dict[int, int] = {}  # characters sent so far, by choice

    def chunk(self, index: int, delta: Delta) -> CompletionBody | None:
        """Returns the chunk of one event, or None if there is nothing to send."""
        usage = self._usage.after(delta)
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return None
        return self._body([self._choice(index, [delta])], usage)

    def closing(self, usage: UsageBody) -> CompletionBody:
        """Returns the last chunk, if the client requested the usage."""
        return self._body([], usage)

    def whole(self, answers: Sequence[Sequence[Delta]], usage: UsageBody) -> CompletionBody:
        """Returns a response with all answers, each given as its events."""
        return self._body([self._choice(index, deltas) for index, deltas in enumerate(answers)], usage)

    def _body(self, choices: list[CompletionChoice], usage: UsageBody | UnsetType | None) -> CompletionBody:
        return CompletionBody(self._head.id, self._head.created, self._head.model, choices, usage)

    def _choice(self, index: int, deltas: Sequence[Delta]) -> CompletionChoice:
        offsets = [offset for delta in deltas for offset in self._offsets(index, delta)]
        logprobs = self._logprobs(_entries(deltas), offsets) if offsets else None
        return CompletionChoice(index, _text(deltas), logprobs, deltas[-1].finish_reason)

    def _offsets(self, index: int, delta: Delta) -> list[int]:
        """Returns where in the answer each token of an event begins.

        Counts characters that were sent. Each token of a split character is spelled as one character, but the character
        is sent once, so spellings only divide the text among the tokens of one event.
        """
        offset = self._shown.get(index, 0)
        end = self._shown[index] = offset + len(delta.text)
        offsets = []
        for entry in delta.logprobs:
            offsets.append(min(offset, end))
            offset += len(self._spell(entry.token))
        return offsets

    def _logprobs(self, entries: Sequence[TokenLogprob], offsets: list[int]) -> CompletionLogprobs:
        tokens = [self._spell(entry.token) for entry in entries]
        best = [{self._spell(token): _finite(value) for token, value in entry.top} for entry in entries]
        return CompletionLogprobs(tokens, [_finite(entry.logprob) for entry in entries], best, offsets)


class ChatReply:
    """Writes the answers of one /v1/chat/completions request, whole or as chunks.

    Args:
        head: the fields that every chunk repeats.
        spell: returns the text of one token.
        usage: of the chunks of a stream.
    """

    def __init__(self, head: Head, spell: Callable[[int], str], usage: ChunkUsage) -> None:
        self._head = head
        self._spell = spell
        self._usage = usage
        self._begun: set[int] = set()  # choices whose role has been sent

    def chunk(self, index: int, delta: Delta) -> ChatChunk | None:
        """Returns the chunk of one event, or None if there is nothing to send."""
        usage = self._usage.after(delta)
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return None
        piece = ChatPiece(content=delta.text) if delta.text else ChatPiece()
        if index not in self._begun:  # not before the first token, for clients that time it
            self._begun.add(index)
            piece = ChatPiece("assistant", delta.text)
        choice = ChatChunkChoice(index, piece, self._logprobs([delta]), delta.finish_reason)
        return self._chunk([choice], usage)

    def closing(self, usage: UsageBody) -> ChatChunk:
        """Returns the last chunk, if the client requested the usage."""
        return self._chunk([], usage)

    def whole(self, answers: Sequence[Sequence[Delta]], usage: UsageBody) -> ChatBody:
        """Returns a response with all answers, each given as its events."""
        choices = [
            ChatChoice(index, ChatMessage(_text(deltas)), self._logprobs(deltas), str(deltas[-1].finish_reason))
            for index, deltas in enumerate(answers)
        ]
        return ChatBody(self._head.id, self._head.created, self._head.model, choices, usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageBody | UnsetType | None) -> ChatChunk:
        return ChatChunk(self._head.id, self._head.created, self._head.model, choices, usage)

    def _logprobs(self, deltas: Sequence[Delta]) -> ChatLogprobs | None:
        entries = _entries(deltas)
        return ChatLogprobs([self._chosen(entry) for entry in entries]) if entries else None

    def _chosen(self, entry: TokenLogprob) -> ChosenToken:
        text = self._spell(entry.token)
        top = [_alternative(self._spell(token), value) for token, value in entry.top]
        return ChosenToken(text, _finite(entry.logprob), _bytes(text), top)


def _text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _entries(deltas: Sequence[Delta]) -> list[TokenLogprob]:
    return [entry for delta in deltas for entry in delta.logprobs]


def _alternative(text: str, logprob: float) -> Alternative:
    return Alternative(text, _finite(logprob), _bytes(text))


def _bytes(text: str) -> list[int] | None:
    """Returns the token's bytes, or None for a part of a character, whose text does not determine them."""
    return None if "\ufffd" in text else list(text.encode())


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


def encode(body: Struct) -> bytes:
    """Returns the JSON of a response."""
    return msgspec.json.encode(body)


def event(body: Struct) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"
"""The event that ends a stream."""
