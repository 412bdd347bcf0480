"""Writes answers of /v1/chat/completions, whole and as the events of a stream, by the OpenAI API reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from mainstem.runtime.request import Delta
from mainstem.server.apis.blocks import Answer, Began, Block, Grew, Step
from mainstem.server.apis.replies import (
    ChosenToken,
    ChunkReply,
    Explained,
    PromptLogprobs,
    UsageBody,
    chosen_token,
    entries_of,
)
from mainstem.server.parsing.output import Call, Reasoning, Text

ID_PREFIX = "chatcmpl-"


class ChatLogprobs(Struct):
    """`logprobs` of a chat choice."""

    content: list[ChosenToken]


class CalledFunction(Struct):
    """The name and the arguments of a call, or the part of them that a chunk adds."""

    arguments: str
    name: str | UnsetType = UNSET


class CalledCustom(Struct):
    """The name and the text of a call of a custom tool, or the part of them that a chunk adds."""

    input: str
    name: str | UnsetType = UNSET


class CalledTool(Struct):
    """A call of a tool, or the part that a chunk adds. Only chunks have the index, and only the first one has an id."""

    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(Struct):
    """A whole answer; its content is null if it has only calls or reasoning."""

    content: str | None
    role: str = "assistant"
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatPiece(Struct):
    """The part of an answer that a chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer of /v1/chat/completions."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatBody(Struct):
    """A response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    explanation: Explained = UNSET
    object: str = "chat.completion"


class ChatChunkChoice(Struct):
    """A piece of one answer."""

    index: int
    delta: ChatPiece
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """One event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    explanation: Explained = UNSET
    object: str = "chat.completion.chunk"


class ChatReply(ChunkReply):
    """Writes the answers of one /v1/chat/completions request; see `Reply`."""

    @cached_property
    def _answers(self) -> dict[int, Answer]:
        """The answers so far of a stream, by choice."""
        return {}

    def chunk(self, index: int, delta: Delta) -> ChatChunk | None:
        usage = self._usage.after(delta)
        steps = [*self._answer(index).take(delta)]
        if not self._is_shown(delta, steps):
            return None
        shown = _piece(steps)
        prompt: list[int] | UnsetType = UNSET
        if index not in self._sent:  # not before the first token, for clients that time it
            self._sent[index] = 0
            prompt = self._prompt_ids(index)
            shown.role = "assistant"
            if shown.content is UNSET:
                shown.content = None if steps else ""
        logprobs, ids = self._logprobs([delta]), self._token_ids([delta])
        choice = ChatChunkChoice(index, shown, logprobs, self._reason(self._answers[index]), ids)
        return self._chunk([choice], usage, prompt)

    def last(self, usage: UsageBody) -> ChatChunk:
        chunk = self._chunk([], usage)
        chunk.explanation = self._extras.explanation
        return chunk

    def closing(self, usage: UsageBody) -> bytes:
        if self._extras.keep is not None:
            self._extras.keep(self._body([answer for _, answer in sorted(self._answers.items())], usage))
        return super().closing(usage)

    def whole(self, answers: Sequence[Sequence[Delta]], usage: UsageBody) -> ChatBody:
        made = [Answer(self._parser(), streams=False) for _ in answers]
        for answer, deltas in zip(made, answers, strict=True):
            answer.take_all(deltas)
        body = self._body(made, usage)
        if self._extras.keep is not None:
            self._extras.keep(body)
        return body

    def _answer(self, index: int) -> Answer:
        if index not in self._answers:
            self._answers[index] = Answer(self._parser())
        return self._answers[index]

    def _body(self, answers: Sequence[Answer], usage: UsageBody) -> ChatBody:
        choices = [
            ChatChoice(
                index,
                _message(answer),
                self._logprobs(answer.deltas),
                str(self._reason(answer)),
                self._token_ids(answer.deltas),
            )
            for index, answer in enumerate(answers)
        ]
        prompt = self._prompt_logprobs(answers[0].deltas), self._prompt_ids(0)
        head = self._head
        return ChatBody(head.id, head.created, head.model, choices, usage, *prompt, self._extras.explanation)

    def _reason(self, answer: Answer) -> str | None:
        """Returns why an answer ended: with `tool_calls` only if every call that began can be made."""
        reason = answer.last.finish_reason
        return "tool_calls" if reason == "stop" and answer.calls else reason

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: UsageBody | UnsetType | None,
        prompt: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(self._head.id, self._head.created, self._head.model, choices, usage, prompt)

    def _logprobs(self, deltas: Sequence[Delta]) -> ChatLogprobs | None:
        entries = entries_of(deltas)
        return ChatLogprobs([chosen_token(entry, self._spell, self._name) for entry in entries]) if entries else None


def _message(answer: Answer) -> ChatMessage:
    def said(kind: type) -> str:
        return "".join(block.text for block in answer.blocks if isinstance(block.begin, kind))

    called = [block for block in answer.blocks if isinstance(block.begin, Call) and not block.withdrawn]
    calls = [_called(block, block.text, begins=True) for block in called]
    for call in calls:
        call.index = UNSET
    content = said(Text) or (None if answer.began else "")
    return ChatMessage(content, reasoning_content=said(Reasoning) or UNSET, tool_calls=calls or UNSET)


def _piece(steps: Sequence[Step]) -> ChatPiece:
    """Returns the part of an answer that these steps add."""
    begun = [step.block for step in steps if isinstance(step, Began)]
    grown: dict[int, tuple[Block, list[str]]] = {}
    for step in steps:
        if isinstance(step, Began | Grew):
            grown.setdefault(step.block.index, (step.block, []))[1].append(step.text)

    def said(kind: type) -> str:
        return "".join(text for block, texts in grown.values() for text in texts if isinstance(block.begin, kind))

    calls = [
        _called(block, "".join(texts), begins=block in begun)
        for block, texts in grown.values()
        if isinstance(block.begin, Call)
    ]
    return ChatPiece(content=said(Text) or UNSET, reasoning_content=said(Reasoning) or UNSET, tool_calls=calls or UNSET)


def _called(block: Block, text: str, *, begins: bool) -> CalledTool:
    """Returns a call, or the part that is added to it."""
    call = block.begin
    assert isinstance(call, Call), "it is one"
    name = call.name if begins else UNSET
    what: dict[str, Any] = (
        {"custom": CalledCustom(text, name)} if call.custom else {"function": CalledFunction(text, name)}
    )
    if begins:
        what |= {"id": call.id, "type": "custom" if call.custom else "function"}
    return CalledTool(index=call.number, **what)
