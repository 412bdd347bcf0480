"""Writes answers of /v1/responses, whole and as the events of a stream, by the OpenAI API reference.

Each block of an answer is an item: reasoning, a message with one text, or a call of a function.

    response.created, response.in_progress
    response.output_item.added      an item begins, and with it its only part, if it has one:
    response.content_part.added
    response.output_text.delta      or reasoning_text.delta, function_call_arguments.delta, custom_tool_call_input.delta
    ...                             the same with "done" and the whole content, in the opposite order
    response.completed              or incomplete, or failed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mainstem.runtime.request import TokenLogprob
from mainstem.server.apis.blocks import Block, BlockReply
from mainstem.server.apis.generation import Conversation
from mainstem.server.apis.replies import (
    Explained,
    Generated,
    PromptTokensDetails,
    UsageBody,
    chosen_token,
    named_event,
)
from mainstem.server.apis.responses.items import sealed
from mainstem.server.apis.responses.request import ResponseCacheOptions, ResponseRequest
from mainstem.server.apis.responses.tools import Tool
from mainstem.server.errors import ApiError
from mainstem.server.parsing.output import Call, Reasoning
from mainstem.server.watch.diagnosis import Finding
from mainstem.server.watch.explained import RewriteBody

ID_PREFIX = "resp_"


class InputTokenCount(Struct):
    """The response of POST /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


class CacheWrites(Struct):
    """How many of the prompt's tokens were added to the cache and are retained, by the time for which they are."""

    ttl_30m_tokens: int
    ttl_12h_tokens: int


class InputDetails(Struct):
    """How many of the prompt's tokens were found in the cache, and how many were added to it."""

    cached_tokens: int
    cache_write_tokens: int = 0
    cache_write_tokens_details: CacheWrites | UnsetType = UNSET


class OutputDetails(Struct):
    """How many of the answer's tokens are reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    prompt_rewrites: list[RewriteBody] | UnsetType = UNSET
    weight_versions: list[list[Generated]] | UnsetType = UNSET


class Reason(Struct):
    """Why a response is incomplete."""

    reason: str


class Failure(Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseBody(Struct):
    """A response, in any state; it repeats fields of the request."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]]
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    text: dict[str, Any]
    tools: list[Any]
    tool_choice: Any
    store: bool
    completed_at: int | None = None
    error: Failure | None = None
    incomplete_details: Reason | None = None
    usage: ResponseUsage | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_diagnostics: dict[str, Any] | None = None
    explanation: Explained = UNSET
    truncation: str = "disabled"
    background: bool = False
    object: str = "response"


class ResponseReply(BlockReply):
    """Writes one response, which repeats fields of the request."""

    _number = 0
    """Of the next event."""

    @cached_property
    def _request(self) -> ResponseRequest:
        """The request that this answers."""
        assert isinstance(self._asked.request, ResponseRequest), "the body of this API"
        return self._asked.request

    @cached_property
    def _apart(self) -> Mapping[str, tuple[str, str]]:
        """Namespace and name of tools in a namespace, by the name under which they are offered."""
        assert isinstance(self._asked.prompt, Conversation), "the prompt of this API"
        return {tool.name: tool.apart for tool in self._asked.prompt.tooling.tools if tool.apart is not None}

    def opening(self) -> bytes:
        begun = {"response": self._body("in_progress")}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def closing(self, usage: UsageBody) -> bytes:
        body = self.finish(usage)
        return self._event(f"response.{body.status}", {"response": body})

    def failing(self, error: ApiError) -> bytes:
        body = self._body("failed")
        body.error = Failure(error.detail.code or error.detail.type, error.detail.message)
        refused = self._event("error", {"error": error.detail}) if error.status < 500 else b""  # as OpenAI's own does
        return refused + self._event("response.failed", {"response": body})

    def begun(self, block: Block) -> bytes:
        item = {**self._item(block), "status": "in_progress"}
        if isinstance(block.begin, Call):
            return self._of_item("output_item.added", block, {"item": item})
        part = _part(block, [])
        return self._of_item("output_item.added", block, {"item": {**item, "content": []}}) + self._of_part(
            "content_part.added", block, {"part": part}
        )

    def grown(self, block: Block, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        if isinstance(block.begin, Call):
            return self._of_part(f"{_EVENTS[block.begin.custom]}.delta", block, {"delta": text})
        return self._of_part(f"{_kind(block)}.delta", block, {"delta": text, **self._shown(block, logprobs)})

    def ended(self, block: Block) -> bytes:
        if isinstance(block.begin, Call):
            item = self._called(block.begin, block.text)
            fields = ("input",) if block.begin.custom else ("name", "arguments")
            done = self._of_part(f"{_EVENTS[block.begin.custom]}.done", block, {name: item[name] for name in fields})
        else:
            whole = {"text": block.text, **self._shown(block, block.logprobs)}
            done = self._of_part(f"{_kind(block)}.done", block, whole)
            done += self._of_part("content_part.done", block, {"part": _part(block, self._logprobs_of(block))})
        return done + self._of_item("output_item.done", block, {"item": self._item(block)})

    def finish(self, usage: UsageBody) -> ResponseBody:
        cut = self.answer.last.finish_reason == "length" and not self._request.prewarms
        body = self._body("incomplete" if cut else "completed")
        body.completed_at = None if cut else int(self._extras.now())
        body.incomplete_details = Reason("max_output_tokens") if body.status == "incomplete" else None
        details = _input_details(usage.prompt_tokens_details)
        if self._extras.finding is not None:
            body.prompt_cache_diagnostics = _diagnostics(
                self._extras.finding, details.cached_tokens, self._extras.missed
            )
        body.explanation = self._extras.explanation
        body.usage = ResponseUsage(
            usage.prompt_tokens,
            details,
            usage.completion_tokens,
            OutputDetails(self.answer.reasoning_tokens),
            usage.total_tokens,
            usage.prompt_rewrites,
            usage.weight_versions,
        )
        if self._extras.keep is not None:
            self._extras.keep(body)
        return body

    def _body(self, status: str) -> ResponseBody:
        request = self._request
        reasoning, text = request.reasoning, request.text
        return ResponseBody(
            id=self._head.id,
            created_at=self._head.created,
            model=self._head.model,
            status=status,
            output=[self._item(block) for block in self.answer.blocks if not block.withdrawn],
            instructions=request.instructions,
            previous_response_id=request.previous_response_id,
            max_output_tokens=request.max_output_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_logprobs=request.top_logprobs or 0,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning={"effort": None if reasoning is None else reasoning.effort, "summary": None},
            text={"format": {"type": "text"}} if text is None else msgspec.to_builtins(text),
            tools=[_shown_tool(tool) for tool in request.tools or ()],
            tool_choice="auto" if request.tool_choice is None else request.tool_choice,
            store=request.store is not False,
            prompt_cache_key=request.prompt_cache_key,
            prompt_cache_options=_applied(request.prompt_cache_options),
        )

    def _item(self, block: Block) -> dict[str, Any]:
        """Returns the item of a block, as far as it is known."""
        last = self.answer.last.finish_reason == "length" and block is self.answer.blocks[-1]
        cut = block is self.answer.open or block.withdrawn or last
        common = {"id": self._id(block), "status": "incomplete" if cut else "completed"}
        match block.begin:
            case Call():
                return {**self._called(block.begin, block.text), **common}
            case Reasoning():
                sealing = self._request.seals and block is not self.answer.open
                seal = {"encrypted_content": sealed(block.text)} if sealing else {}
                return {"type": "reasoning", **common, "summary": [], "content": [_part(block, [])], **seal}
        return {
            "type": "message",
            **common,
            "role": "assistant",
            "content": [_part(block, self._logprobs_of(block))],
        }

    def _called(self, call: Call, given: str) -> dict[str, Any]:
        """Returns the fields of an item that are the call's; `given`: the arguments, or the text."""
        namespace, name = self._apart.get(call.name, (None, call.name))
        where = {} if namespace is None else {"namespace": namespace}
        kind, field = ("custom_tool_call", "input") if call.custom else ("function_call", "arguments")
        return {"type": kind, "call_id": call.id, **where, "name": name, field: given}

    def _id(self, block: Block) -> str:
        prefix = {Call: "fc", Reasoning: "rs"}.get(type(block.begin), "msg")
        if isinstance(block.begin, Call) and block.begin.custom:
            prefix = "ctc"
        return f"{prefix}_{self._head.id.removeprefix(ID_PREFIX)}_{block.index}"

    def _logprobs_of(self, block: Block) -> list[Any]:
        return [chosen_token(entry, self._spell) for entry in block.logprobs]

    def _shown(self, block: Block, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Returns the field of log-probabilities, which only events of texts have."""
        if isinstance(block.begin, Reasoning):
            return {}
        return {"logprobs": [chosen_token(entry, self._spell) for entry in logprobs]}

    def _of_part(self, name: str, block: Block, fields: dict[str, Any]) -> bytes:
        place = {} if isinstance(block.begin, Call) else {"content_index": 0}
        return self._of_item(name, block, {"item_id": self._id(block), **place, **fields})

    def _of_item(self, name: str, block: Block, fields: dict[str, Any]) -> bytes:
        return self._event(f"response.{name}", {"output_index": block.index, **fields})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(name, {"sequence_number": number, **fields})


_REASONS = {
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "input_changed",
    "messages": "input_changed",
}


def _diagnostics(finding: Finding, cached: int, missed: tuple[str, int] | None) -> dict[str, Any]:
    """Returns `prompt_cache_diagnostics`.

    Args:
        finding: of the comparison.
        cached: tokens that were found in the cache.
        missed: the cause of the first miss, and tokens of it, where the server explains.
    """
    if finding.cause == "not_found":
        return {"type": "comparison_response_not_found"}
    if finding.cause in _REASONS:
        return {
            "type": "cache_miss",
            "reason": _REASONS[finding.cause],
            "cache_missed_tokens": finding.missed,
            "comparison_reusable_tokens": finding.reusable,
        }
    if finding.cause == "same" and cached >= finding.reusable:
        return {"type": "cache_hit"}
    # What is the same and was not found has been evicted, mostly; this API has no word for it, so there is one of ours.
    why = {} if missed is None else {"mainstem_cause": missed[0], "cache_missed_tokens": missed[1]}
    return {"type": "unavailable", **why}


def _input_details(found: PromptTokensDetails | UnsetType) -> InputDetails:
    if isinstance(found, UnsetType):
        return InputDetails(0)
    by_ttl = found.cache_write_tokens_by_ttl
    writes = UNSET if by_ttl is UNSET else CacheWrites(by_ttl.get("30m", 0), by_ttl.get("12h", 0))
    return InputDetails(found.cached_tokens, found.cache_write_tokens, writes)


def _shown_tool(tool: Tool) -> dict[str, Any]:
    """Returns a tool as a response repeats it; functions have all their fields, for clients that insist on them."""
    functions = dict.fromkeys(("name", "description", "parameters", "strict")) if tool.type == "function" else {}
    return {**functions, **msgspec.to_builtins(tool)}


def _applied(options: ResponseCacheOptions | None) -> dict[str, Any] | None:
    """Returns the options that a response repeats: those of a request that gives a time."""
    if options is None or options.ttl is None:
        return None
    shown = {"mode": options.mode or "implicit", "ttl": options.ttl}
    named = options.comparison_response_id
    return shown if named is None else {**shown, "comparison_response_id": named}


def broken(error: ApiError) -> bytes:
    """Returns the event that ends a stream whose beginning is not known."""
    return named_event("error", {"code": error.detail.code, "message": error.detail.message, "param": None})


_EVENTS = {False: "function_call_arguments", True: "custom_tool_call_input"}
"""The part of the names of a call's events that says what they carry, by whether the tool is custom."""


def _kind(block: Block) -> str:
    return "reasoning_text" if isinstance(block.begin, Reasoning) else "output_text"


def _part(block: Block, logprobs: list[Any]) -> dict[str, Any]:
    if isinstance(block.begin, Reasoning):
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}
