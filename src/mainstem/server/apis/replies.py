"""The bodies of responses for completions and chats, whole and as the events of a stream, by the OpenAI API reference.

Knows JSON and the names of fields. Does not know HTTP, the engine, or requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mainstem.runtime.request import Delta, TokenLogprob, Usage
from mainstem.runtime.text.spelling import Spelled
from mainstem.server.errors import ApiError, ErrorBody
from mainstem.server.parsing.output import (
    Arguments,
    Call,
    NoCall,
    OutputParser,
    Piece,
    PlainText,
    Reasoning,
    Text,
    joined,
)
from mainstem.server.watch.diagnosis import Fingerprint
from mainstem.server.watch.explained import PromptExplained

Spell: TypeAlias = Callable[[int], Spelled]
"""Spells one token."""

_LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity; the value that the OpenAI API uses for "practically never"


class CachedByTier(Struct):
    """The tiers that held the cached tokens when the request came."""

    device: int
    host: int
    storage: int


class PromptTokensDetails(Struct):
    """How many of the prompt's tokens were found in the cache, and how many were added to it.

    Those count that are before the last breakpoint. `cache_write_tokens_by_ttl`: those of them that are retained, by
    the name of the time.
    """

    cached_tokens: int
    cached_tokens_by_tier: CachedByTier
    cache_write_tokens: int = 0
    cache_write_tokens_by_ttl: dict[str, int] | UnsetType = UNSET


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
    written = [_written(usage) for usage in least]
    by_ttl: Counter[str] = Counter()
    for _, retained in written:
        by_ttl.update(retained)
    by_tier = CachedByTier(cached - host - storage, host, storage)
    details = PromptTokensDetails(cached, by_tier, sum(added for added, _ in written), dict(by_ttl) or UNSET)
    return UsageBody(prompt, completion, prompt + completion, details)


def _written(usage: Usage) -> tuple[int, dict[str, int]]:
    """Returns the tokens that a prompt has added to the cache before the last prefix that is marked, in whole pages.

    And those of them that are retained, by the name of the time: of several times, the longest counts.
    """
    last = max((kept.cached for _, kept in usage.prefixes), default=0)
    retained: dict[str, int] = {}
    at = usage.cached_tokens
    for prefix, kept in sorted(usage.prefixes, key=lambda each: each[0].retain_s or 0.0, reverse=True):
        if prefix.ttl is not None:
            retained[prefix.ttl] = retained.get(prefix.ttl, 0) + max(kept.positions - at, 0)
            at = max(at, kept.positions)
    return max(last - usage.cached_tokens, 0), retained


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
    """`logprobs` of a completion choice: four lists of equal length; offsets count characters of the text.

    With `echo`, they begin with the tokens of the prompt. The first one of these has no log-probability. The token
    itself is among the likeliest ones in any case, so that there may be one more of these than was asked for.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """How likely a token was at its place in a prompt, and its place among all tokens there, from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]
"""For each token of a prompt, itself and the alternatives, by their ids; None for the first token."""


Explained: TypeAlias = list[PromptExplained] | UnsetType
"""Why each prompt of a request was found in part only, if it asked for that."""


class CompletionChoice(Struct):
    """One answer of /v1/completions, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionBody(Struct):
    """A response of /v1/completions; its stream chunks have the same form."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    explanation: Explained = UNSET
    object: str = "text_completion"


class CalledFunction(Struct):
    """The name and the arguments of a call, or what a chunk adds to them."""

    arguments: str
    name: str | UnsetType = UNSET


class CalledCustom(Struct):
    """The name and the text of a call of a custom tool, or what a chunk adds to them."""

    input: str
    name: str | UnsetType = UNSET


class CalledTool(Struct):
    """A call of a tool, or what a chunk adds to it. Only chunks have the index, and only the first one has an id."""

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
    """What a chunk adds to an answer."""

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


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every chunk of one response repeats."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the beginning of its answers.

    Args:
        text: of the prompt.
        tokens: its ids.
        offsets: where in the text each token begins; none: log-probabilities are not shown.
        alternatives: number of alternatives to each token that are shown.
    """

    text: str
    tokens: Sequence[int]
    offsets: Sequence[int] = ()
    alternatives: int = 0


@dataclass(frozen=True, slots=True)
class Extras:
    """What a reply shows besides the texts of answers, as the request asks for it.

    Args:
        choices: answers to each prompt.
        logprobs: whether log-probabilities of the answers' tokens are shown; else they served to choose answers.
        echoes: one for each prompt, if answers begin with it.
        prompt_logprobs: number of alternatives to each token of a prompt; None: its log-probabilities are not shown.
        prompt_tokens: the ids of each prompt, if ids are shown, of answers, too.
        ids_for_names: whether tokens are named by their ids in log-probabilities.
        fingerprint: of the request, if a diagnosis compares it.
        explained: returns why its prompts were found in part only, once it has ended; None: the server does not
            explain.
        explains: whether the client asks for that.
    """

    choices: int = 1
    logprobs: bool = True
    echoes: Sequence[Echo] = ()
    prompt_logprobs: int | None = None
    prompt_tokens: Sequence[list[int]] = ()
    ids_for_names: bool = False
    fingerprint: Fingerprint | None = None
    explained: Callable[[], list[PromptExplained]] | None = None
    explains: bool = False

    @property
    def missed(self) -> tuple[str, int] | None:
        """The first cause why something of its first prompt was not found, and its tokens; None: there is none."""
        account = [] if self.explained is None else self.explained()
        stretches = account[0].stretches if account else []
        causes = [(each.cause, each.end - each.begin) for each in stretches if each.cause is not UNSET]
        return next(((cause, tokens) for cause, tokens in causes if cause != "partial_page"), None)

    @property
    def explanation(self) -> Explained:
        """Why its prompts were found in part only, if it asked for that; once it has ended."""
        return self.explained() if self.explains and self.explained is not None else UNSET


NO_EXTRAS = Extras()


class ChunkUsage:
    """The usage in chunks before the last: nothing, null, or what was used so far.

    Args:
        include: whether the last chunk carries the usage; earlier ones then have `usage: null`.
        prompt_tokens: of all prompts, to carry what was used so far; None: not.
    """

    def __init__(self, include: bool, prompt_tokens: int | None = None) -> None:
        self.include, self._prompt_tokens, self._completion_tokens = include, prompt_tokens, 0

    def after(self, delta: Delta) -> UsageBody | UnsetType | None:
        """Returns the usage after an event."""
        if not self.include:
            return UNSET
        if self._prompt_tokens is None:
            return None
        self._completion_tokens += len(delta.tokens)
        total = self._prompt_tokens + self._completion_tokens
        return UsageBody(self._prompt_tokens, self._completion_tokens, total)


class Reply(Protocol):
    """Writes the answers of one request, whole or as the events of a stream. Choices are counted from 0."""

    def opening(self) -> bytes:
        """Returns the events before the first token."""

    def events(self, index: int, delta: Delta) -> bytes:
        """Returns what an event of the engine is to the client; empty if there is nothing to send."""

    def closing(self, usage: UsageBody) -> bytes:
        """Returns the last events of a stream."""

    def failing(self, error: ApiError) -> bytes:
        """Returns the last events of a stream that failed."""

    def ping(self) -> bytes:
        """Returns what says that a stream is alive, and nothing else."""

    def whole(self, answers: Sequence[Sequence[Delta]], usage: UsageBody) -> Struct:
        """Returns a response with all answers, each given as its events."""


Body = TypeVar("Body", CompletionBody, ChatBody, ChatChunk)


class _Chunks(ABC):
    """What is common to the streams of completions and chats: chunks of one form, the last one with the usage.

    Args:
        head: the fields that every chunk repeats.
        spell: spells one token.
        usage: of the chunks of a stream.
        extras: what is shown besides texts.
        parser: makes what finds the pieces of an answer; those of completions are texts.
    """

    def __init__(
        self,
        head: Head,
        spell: Spell,
        usage: ChunkUsage,
        extras: Extras = Extras(),
        parser: Callable[[], OutputParser] = PlainText,
    ) -> None:
        self._head = head
        self._spell = spell
        self._usage = usage
        self._extras = extras
        self._parsers = defaultdict[int, OutputParser](parser)  # by choice
        self._called: dict[int, bool] = {}  # choices with calls, and whether each of these is complete
        self._sent: dict[int, int] = {}  # characters so far, of each choice of which something was sent

    def opening(self) -> bytes:
        """See `Reply`."""
        return b""

    def events(self, index: int, delta: Delta) -> bytes:
        """See `Reply`."""
        chunk = self.chunk(index, delta)
        return b"" if chunk is None else event(chunk)

    def closing(self, usage: UsageBody) -> bytes:
        """See `Reply`."""
        last = self.last(usage)
        return (event(last) if self._usage.include or last.explanation else b"") + DONE

    def failing(self, error: ApiError) -> bytes:
        """See `Reply`."""
        return event(ErrorBody(error.detail)) + DONE

    def ping(self) -> bytes:
        """See `Reply`."""
        return COMMENT

    def _is_shown(self, delta: Delta, said: object) -> bool:
        """Returns whether an event has anything for the client, beside what it `said`."""
        shown = said or delta.logprobs or delta.finish_reason or delta.prompt_logprobs
        return bool(shown or (self._extras.prompt_tokens and delta.tokens))

    def _explained(self, body: Body) -> Body:
        """Adds the explanation to a body."""
        body.explanation = self._extras.explanation
        return body

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._extras.ids_for_names else self._spell(token).text

    def _prompt_logprobs(self, deltas: Sequence[Delta]) -> PromptLogprobs | UnsetType:
        if self._extras.prompt_logprobs is None:
            return UNSET
        return [None, *map(self._scored, _scores(deltas))]

    def _scored(self, score: TokenLogprob) -> dict[int, PromptLogprob]:
        top = [(score.token, score.logprob, score.rank)]
        top += [(*pair, rank) for rank, pair in enumerate(score.top[: self._extras.prompt_logprobs], 1)]
        found: dict[int, PromptLogprob] = {}
        for token, logprob, rank in top:
            found.setdefault(token, PromptLogprob(_finite(logprob), rank, self._spell(token).text))
        return found

    def _token_ids(self, deltas: Sequence[Delta]) -> list[int] | UnsetType:
        return [token for delta in deltas for token in delta.tokens] if self._extras.prompt_tokens else UNSET

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        given = self._extras.prompt_tokens
        return given[index // self._extras.choices] if given else UNSET

    @abstractmethod
    def chunk(self, index: int, delta: Delta) -> Struct | None:
        """Returns the chunk of one event, or None if there is nothing to send."""

    @abstractmethod
    def last(self, usage: UsageBody) -> CompletionBody | ChatChunk:
        """Returns the last chunk, which carries the usage and the explanation."""


class CompletionReply(_Chunks):
    """Writes the answers of one /v1/completions request; see `Reply`."""

    def chunk(self, index: int, delta: Delta) -> CompletionBody | None:
        """See `_Chunks.chunk`."""
        usage = self._usage.after(delta)
        if not self._is_shown(delta, delta.text):
            return None
        return self._body([self._choice(index, [delta])], usage)

    def last(self, usage: UsageBody) -> CompletionBody:
        """See `_Chunks.last`."""
        return self._explained(self._body([], usage))

    def whole(self, answers: Sequence[Sequence[Delta]], usage: UsageBody) -> CompletionBody:
        """See `Reply`."""
        return self._explained(self._body([self._choice(index, deltas) for index, deltas in enumerate(answers)], usage))

    def _body(self, choices: list[CompletionChoice], usage: UsageBody | UnsetType | None) -> CompletionBody:
        return CompletionBody(self._head.id, self._head.created, self._head.model, choices, usage)

    def _choice(self, index: int, deltas: Sequence[Delta]) -> CompletionChoice:
        extras, begins = self._extras, index not in self._sent
        echo = extras.echoes[index // extras.choices] if begins and extras.echoes else None
        self._sent.setdefault(index, 0 if echo is None else len(echo.text))
        offsets = [offset for delta in deltas for offset in self._offsets(index, delta)]
        logprobs = self._logprobs(_entries(deltas), offsets) if offsets and extras.logprobs else None
        text = _text(deltas)
        if echo is not None:
            text = echo.text + text
            logprobs = self._echoed(echo, _scores(deltas), logprobs) if echo.offsets else None
        return CompletionChoice(
            index,
            text,
            logprobs,
            deltas[-1].finish_reason,
            self._prompt_logprobs(deltas),
            self._token_ids(deltas),
            self._prompt_ids(index) if begins else UNSET,
        )

    def _offsets(self, index: int, delta: Delta) -> list[int]:
        """Returns where in the answer each token of an event begins.

        Counts characters that were sent. Each token of a split character is spelled as one character, but the character
        is sent once, so spellings only divide the text among the tokens of one event.
        """
        offset = self._sent[index]
        end = self._sent[index] = offset + len(delta.text)
        offsets = []
        for entry in delta.logprobs:
            offsets.append(min(offset, end))
            offset += len(self._spell(entry.token).text)
        return offsets

    def _logprobs(self, entries: Sequence[TokenLogprob], offsets: list[int]) -> CompletionLogprobs:
        tokens = [self._name(entry.token) for entry in entries]
        best = [*map(self._top, entries)]
        return CompletionLogprobs(tokens, [_finite(entry.logprob) for entry in entries], [*best], offsets)

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Returns the likeliest tokens at a place and the one that is there, if it is none of them."""
        top = {self._name(token): _finite(value) for token, value in entry.top}
        top.setdefault(self._name(entry.token), _finite(entry.logprob))
        return top

    def _echoed(
        self, echo: Echo, scores: Sequence[TokenLogprob], answer: CompletionLogprobs | None
    ) -> CompletionLogprobs:
        """Returns the log-probabilities of a prompt, and of its answer after them."""
        kept = [replace(score, top=score.top[: echo.alternatives]) for score in scores]
        made, answer = self._logprobs(kept, []), answer or CompletionLogprobs([], [], [], [])
        return CompletionLogprobs(
            [*map(self._name, echo.tokens), *answer.tokens],
            [None, *made.token_logprobs, *answer.token_logprobs],
            [None, *made.top_logprobs, *answer.top_logprobs],
            [*echo.offsets, *answer.text_offset],
        )


class ChatReply(_Chunks):
    """Writes the answers of one /v1/chat/completions request; see `Reply`."""

    def chunk(self, index: int, delta: Delta) -> ChatChunk | None:
        """See `_Chunks.chunk`."""
        usage = self._usage.after(delta)
        pieces = self._parse(index, delta)
        if not self._is_shown(delta, pieces):
            return None
        shown = _chat_piece(pieces)
        prompt: list[int] | UnsetType = UNSET
        if index not in self._sent:  # not before the first token, for clients that time it
            self._sent[index] = 0
            prompt = self._prompt_ids(index)
            shown.role = "assistant"
            if shown.content is UNSET:
                shown.content = None if pieces else ""
        logprobs, ids = self._logprobs([delta]), self._token_ids([delta])
        return self._chunk([ChatChunkChoice(index, shown, logprobs, self._reason(index, delta), ids)], usage, prompt)

    def last(self, usage: UsageBody) -> ChatChunk:
        """See `_Chunks.last`."""
        return self._explained(self._chunk([], usage))

    def whole(self, answers: Sequence[Sequence[Delta]], usage: UsageBody) -> ChatBody:
        """See `Reply`."""
        choices = [
            self._answer(index, deltas, [self._parse(index, delta) for delta in deltas])
            for index, deltas in enumerate(answers)
        ]
        return self._of(choices, answers[0], usage)

    def _of(self, choices: list[ChatChoice], first: Sequence[Delta], usage: UsageBody) -> ChatBody:
        """Returns the body of a response; `first`: the events of the first answer, as far as they have the prompt."""
        head, prompt = self._head, self._prompt_logprobs(first)
        return self._explained(ChatBody(head.id, head.created, head.model, choices, usage, prompt, self._prompt_ids(0)))

    def _answer(self, index: int, deltas: Sequence[Delta], pieces: Sequence[Sequence[Piece]]) -> ChatChoice:
        """Returns an answer, of its events and the pieces that each of them has made certain."""
        message = _chat_message(joined([piece for some in pieces for piece in some]))
        reason = str(self._reason(index, deltas[-1]))
        return ChatChoice(index, message, self._logprobs(deltas), reason, self._token_ids(deltas))

    def _parse(self, index: int, delta: Delta) -> list[Piece]:
        """Returns the pieces that are certain after an event."""
        parser = self._parsers[index]
        pieces = [*parser.feed(delta.text)]
        if delta.finish_reason:
            pieces += parser.close(delta.finish_reason == "length")
        for piece in pieces:
            if isinstance(piece, Call | NoCall):
                self._called[index] = isinstance(piece, Call) and self._called.get(index, True)
        return pieces

    def _reason(self, index: int, delta: Delta) -> str | None:
        """Returns why an answer ended: with `tool_calls` only if all that were begun can be made."""
        return "tool_calls" if delta.finish_reason == "stop" and self._called.get(index) else delta.finish_reason

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: UsageBody | UnsetType | None,
        prompt: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(self._head.id, self._head.created, self._head.model, choices, usage, prompt)

    def _logprobs(self, deltas: Sequence[Delta]) -> ChatLogprobs | None:
        entries = _entries(deltas)
        return ChatLogprobs([chosen_token(entry, self._spell, self._name) for entry in entries]) if entries else None


def chosen_token(entry: TokenLogprob, spell: Spell, name: Callable[[int], str] | None = None) -> ChosenToken:
    """Returns the log-probabilities of a generated token as chats show them.

    Args:
        entry: the token.
        spell: spells a token.
        name: returns what stands for a token; None: its text.
    """

    def shown(token: int, logprob: float) -> tuple[str, float, list[int] | None]:
        text, raw = spell(token)
        return text if name is None else name(token), _finite(logprob), None if raw is None else list(raw)

    return ChosenToken(*shown(entry.token, entry.logprob), [Alternative(*shown(*pair)) for pair in entry.top])


def _chat_message(pieces: Sequence[Piece]) -> ChatMessage:
    none = {piece.number for piece in pieces if isinstance(piece, NoCall)}
    shown = _chat_piece([p for p in pieces if not (isinstance(p, Call | Arguments) and p.number in none)])
    content = shown.content if shown.content is not UNSET else None if pieces else ""
    calls = shown.tool_calls
    if calls is not UNSET:
        for call in calls:
            call.index = UNSET
    return ChatMessage(content, reasoning_content=shown.reasoning_content, tool_calls=calls)


def _chat_piece(pieces: Sequence[Piece]) -> ChatPiece:
    """Returns what pieces of an answer add to it."""
    begun = {piece.number: piece for piece in pieces if isinstance(piece, Call)}
    given: dict[int, list[Arguments]] = {number: [] for number in begun}
    for piece in pieces:
        if isinstance(piece, Arguments):
            given.setdefault(piece.number, []).append(piece)
    calls = [_called(number, begun.get(number), parts) for number, parts in given.items()]
    said = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return ChatPiece(content=said or UNSET, reasoning_content=thought or UNSET, tool_calls=calls or UNSET)


def _called(number: int, begin: Call | None, parts: Sequence[Arguments]) -> CalledTool:
    """Returns a call, or what is added to it."""
    text, name = "".join(part.text for part in parts), UNSET if begin is None else begin.name
    custom = any(part.custom for part in parts) if begin is None else begin.custom
    what: dict[str, Any] = {"custom": CalledCustom(text, name)} if custom else {"function": CalledFunction(text, name)}
    if begin is not None:
        what |= {"id": begin.id, "type": "custom" if custom else "function"}
    return CalledTool(index=number, **what)


def _text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _entries(deltas: Sequence[Delta]) -> list[TokenLogprob]:
    return [entry for delta in deltas for entry in delta.logprobs]


def _scores(deltas: Sequence[Delta]) -> list[TokenLogprob]:
    """Returns the log-probabilities of a prompt."""
    return [entry for delta in deltas for entry in delta.prompt_logprobs]


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

COMMENT = b": ping\n\n"
"""A comment of server-sent events, which every client skips: https://html.spec.whatwg.org/multipage/server-sent-events."""
