"""Writes answers and errors of /v1/messages, whole and as the events of a stream, by Anthropic's API reference.

Each block of an answer is a content block: thinking, text, or the use of a tool.

    message_start, ping
    content_block_start
    content_block_delta             text_delta, thinking_delta or input_json_delta
    content_block_stop
    message_delta                   why the answer ended, and the usage
    message_stop                    or error
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mainstem.errors import RequestTooLong
from mainstem.runtime.request import Delta, TokenLogprob
from mainstem.server.apis.blocks import Block, BlockReply
from mainstem.server.apis.replies import Explained, Generated, UsageBody, named_event
from mainstem.server.errors import ApiError
from mainstem.server.parsing.output import Call, Reasoning
from mainstem.server.watch.diagnosis import Finding
from mainstem.server.watch.explained import RewriteBody

PATH = "/v1/messages"
VERSION = "anthropic-version"
"""The header that only clients of this API send."""
ID_PREFIX = "msg_"

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""By the HTTP status; others are `invalid_request_error`."""


class TokenCount(Struct):
    """The response of POST /v1/messages/count_tokens."""

    input_tokens: int


class ThinkingTokens(Struct):
    """How many of the answer's tokens are thinking."""

    thinking_tokens: int


class CacheCreation(Struct):
    """How many tokens of the prompt were added to the cache and are retained, by the time for which they are."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Struct):
    """Tokens of one message. The tokens that were found in the cache, and those added to it, are known at the end.

    Neither is part of `input_tokens`. `cache_creation_input_tokens` are those before the last breakpoint,
    whether they are retained or not.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | UnsetType = UNSET
    cache_creation_input_tokens: int | UnsetType = UNSET
    cache_creation: CacheCreation | UnsetType = UNSET
    output_tokens_details: ThinkingTokens | UnsetType = UNSET
    prompt_rewrites: list[RewriteBody] | UnsetType = UNSET
    weight_versions: list[list[Generated]] | UnsetType = UNSET


class MessageBody(Struct):
    """A response of POST /v1/messages."""

    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    type: str = "message"
    role: str = "assistant"
    diagnostics: dict[str, Any] | UnsetType | None = UNSET
    explanation: Explained = UNSET


class MessageReply(BlockReply):
    """Writes one message; see `Reply`. It has no log-probabilities."""

    shows_cut_calls = False

    def opening(self) -> bytes:
        begun = self._usage.after(Delta(""))
        assert isinstance(begun, UsageBody)
        body = self._body([], None, None, MessageUsage(begun.prompt_tokens, 0))
        return named_event("message_start", {"message": body}) + self.ping()

    def closing(self, usage: UsageBody) -> bytes:
        body = self.finish(usage)
        ended = {"stop_reason": body.stop_reason, "stop_sequence": body.stop_sequence}
        explained = {} if body.explanation is UNSET else {"explanation": body.explanation}
        ending = named_event("message_delta", {"delta": ended, "usage": body.usage, **explained})
        return ending + named_event("message_stop", {})

    def failing(self, error: ApiError) -> bytes:
        return named_event("error", {"error": _error(error)})

    def ping(self) -> bytes:
        return named_event("ping", {})

    def begun(self, block: Block) -> bytes:
        return named_event("content_block_start", {"index": block.index, "content_block": _content(block)})

    def grown(self, block: Block, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        match block.begin:
            case Call():
                delta = {"type": "input_json_delta", "partial_json": text}
            case Reasoning():
                delta = {"type": "thinking_delta", "thinking": text}
            case _:
                delta = {"type": "text_delta", "text": text}
        return named_event("content_block_delta", {"index": block.index, "delta": delta})

    def ended(self, block: Block) -> bytes:
        return named_event("content_block_stop", {"index": block.index})

    def finish(self, usage: UsageBody) -> MessageBody:
        details = usage.prompt_tokens_details
        read, added = (0, 0) if isinstance(details, UnsetType) else (details.cached_tokens, details.cache_write_tokens)
        by_ttl = {} if isinstance(details, UnsetType) else details.cache_write_tokens_by_ttl or {}
        created = CacheCreation(by_ttl.get("5m", 0), by_ttl.get("1h", 0))
        thinking = ThinkingTokens(self.answer.reasoning_tokens)
        rest = usage.prompt_tokens - read - added
        counted = MessageUsage(
            rest, usage.completion_tokens, read, added, created, thinking, usage.prompt_rewrites, usage.weight_versions
        )
        content = [_content(block) for block in self.answer.blocks]
        return self._body(content, self._stop_reason(), self.answer.last.stop, counted)

    def _body(
        self, content: list[dict[str, Any]], stop_reason: str | None, stop: str | None, usage: MessageUsage
    ) -> MessageBody:
        head = self._head
        diagnostics: dict[str, Any] | UnsetType | None = UNSET
        if self._extras.finding is not None:
            diagnostics = _diagnostics(
                self._extras.finding, usage, None if stop_reason is None else self._extras.missed
            )
        made = MessageBody(head.id, head.model, content, stop_reason, stop, usage, diagnostics=diagnostics)
        made.explanation = UNSET if stop_reason is None else self._extras.explanation
        return made

    def _stop_reason(self) -> str:
        if self.answer.last.finish_reason == "length":
            return "max_tokens"
        if self.answer.last.stop is not None:
            return "stop_sequence"
        return "tool_use" if self.answer.calls else "end_turn"


_REASONS = {
    "model": "model_changed",
    "system": "system_changed",
    "tools": "tools_changed",
    "messages": "messages_changed",
}


def _diagnostics(finding: Finding, usage: MessageUsage, missed: tuple[str, int] | None) -> dict[str, Any] | None:
    """Returns `diagnostics`; None: nothing has changed, and all that could be reused was found.

    Args:
        finding: of the comparison.
        usage: of the message.
        missed: the cause of the first miss, and tokens of it, where the server explains; in the last event only.
    """
    why = {} if missed is None else {"mainstem_cause": missed[0], "cache_missed_input_tokens": missed[1]}
    if finding.cause == "same":
        short = bool(why) and (usage.cache_read_input_tokens or 0) < finding.reusable
        return {"cache_miss_reason": {"type": "unavailable", **why}} if short else None
    if finding.cause in _REASONS:
        reason = {"type": _REASONS[finding.cause], "cache_missed_input_tokens": finding.missed}
    else:
        reason = (
            {"type": "previous_message_not_found"} if finding.cause == "not_found" else {"type": "unavailable", **why}
        )
    return {"cache_miss_reason": reason}


def _content(block: Block) -> dict[str, Any]:
    match block.begin:
        case Call(_, id, name):
            return {"type": "tool_use", "id": id, "name": name, "input": msgspec.Raw(block.text.encode() or b"{}")}
        case Reasoning():
            return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


# --- errors -------------------------------------------------------------------------------------------------------


class _Details(Struct):
    """A word for programs, and the fields that it is about: clients go on without these."""

    error_code: str
    unsupported: list[str]


class _Error(Struct):
    type: str
    message: str
    details: _Details | UnsetType = UNSET


class _ErrorBody(Struct):
    error: _Error
    type: str = "error"


def speaks(path: str, headers: Mapping[str, str]) -> bool:
    """Returns whether a client expects the forms of this API, by the path, or on a path of both by a header."""
    if f"{path}/".startswith("/v1/models/"):
        return VERSION in headers
    return f"{path}/".startswith(f"{PATH}/")


def error_body(error: ApiError) -> bytes:
    """Returns the JSON of an error in Anthropic's form."""
    return msgspec.json.encode(_ErrorBody(_error(error)))


def broken(error: ApiError) -> bytes:
    """Returns the event that ends a stream whose beginning is not known."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


def _error(error: ApiError) -> _Error:
    message = _too_long(error.cause) if isinstance(error.cause, RequestTooLong) else error.detail.message
    code, param = error.detail.code or "", error.detail.param
    details = _Details(code, [param]) if "unsupported" in code and param is not None else UNSET
    return _Error(_ERROR_TYPES.get(error.status, "invalid_request_error"), message, details)


def _too_long(error: RequestTooLong) -> str:
    """Returns the words of this API, which clients look for: they compact, or ask for a shorter answer."""
    tokens, most = error.tokens, error.maximum
    if error.answer and tokens <= most:
        problem = f"input length and `max_tokens` exceed context limit: {tokens} + {error.answer} > {most}"
        return f"{problem}, decrease input length or `max_tokens` and try again"
    return f"prompt is too long: {tokens} tokens > {most} maximum" + ("" if error.counted else " (at least)")
