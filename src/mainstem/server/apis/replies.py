"""The parts that the answers of all APIs share: usage, log-probabilities, extras, and server-sent events.

Knows JSON and the names of fields. Does not know HTTP or the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import time
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mainstem.runtime.request import Delta, TokenLogprob, Usage
from mainstem.runtime.text.spelling import Spelled
from mainstem.server.apis.generation import Generation
from mainstem.server.errors import ApiError, ErrorBody
from mainstem.server.parsing.output import OutputParser, PlainText
from mainstem.server.watch.diagnosis import Finding
from mainstem.server.watch.explained import PromptExplained, RewriteBody

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


class Generated(Struct):
    """Consecutive tokens that one version of the weights has generated."""

    version: int
    tokens: int


class UsageBody(Struct):
    """Tokens of one HTTP request, over all its choices; each prompt counts once.

    `weight_versions`: of each choice in turn, if the weights have changed since the engine began.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET  # known at the end
    prompt_rewrites: list[RewriteBody] | UnsetType = UNSET
    weight_versions: list[list[Generated]] | UnsetType = UNSET


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
    versions = [[Generated(*part) for part in usage.weight_versions] for usage in usages]
    changed = any(part.version for each in versions for part in each)
    return UsageBody(prompt, completion, prompt + completion, details, weight_versions=versions if changed else UNSET)


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
    """One entry of GET /v1/models; `parent` is the base model of an adapter, `exact` whether a hit changes no bit."""

    id: str
    created: int
    max_model_len: int
    exact: str
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


class PromptLogprob(Struct):
    """How likely a token was at its place in a prompt, and its place among all tokens there, from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]
"""For each token of a prompt, itself and the alternatives, by their ids; None for the first token."""


MakeReply: TypeAlias = "Callable[[Head, Spell, ChunkUsage, Extras, Callable[[], OutputParser]], Reply]"
"""Makes the reply of an API; the arguments are those of `Reply`."""

Explained: TypeAlias = list[PromptExplained] | UnsetType
"""Why each prompt of a request was found in part only, if it asked for that."""


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
    """The parts of a response beside the texts of answers, as the request asks for them.

    Args:
        asked: the request.
        echoes: one for each prompt, if answers begin with it.
        prompt_tokens: the ids of each prompt, if ids are shown, of answers, too.
        finding: of the comparison with another request; None: there is none.
        keep: takes the body of the whole answer, to keep it; None: it is not kept.
        now: returns seconds since the epoch.
        explained: returns, after the end, why its prompts were found in part only; None: the server does not explain.
    """

    asked: Generation
    echoes: Sequence[Echo] = ()
    prompt_tokens: Sequence[list[int]] = ()
    finding: Finding | None = None
    keep: Callable[[Any], None] | None = None
    now: Callable[[], float] = time
    explained: Callable[[], list[PromptExplained]] | None = None

    @property
    def missed(self) -> tuple[str, int] | None:
        """The first cause of a miss in the first prompt, and its tokens; None: there is none."""
        account = [] if self.explained is None else self.explained()
        stretches = account[0].stretches if account else []
        causes = [(each.cause, each.end - each.begin) for each in stretches if each.cause is not UNSET]
        return next(((cause, tokens) for cause, tokens in causes if cause != "partial_page"), None)

    @property
    def explanation(self) -> Explained:
        """Why its prompts were found in part only, if it asked for that; once it has ended."""
        return self.explained() if self.asked.request.explain and self.explained is not None else UNSET


class ChunkUsage:
    """The usage in chunks before the last: nothing, null, or the usage so far.

    Args:
        include: whether the last chunk carries the usage; earlier ones then have `usage: null`.
        prompt_tokens: of all prompts, to carry the usage so far; None: not.
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


class Reply(ABC):
    """Writes the answers of one request, whole or as the events of a stream. Choices are counted from 0.

    Args:
        head: id, time and model of the response.
        spell: spells one token.
        usage: counts the tokens that the events of a stream report.
        extras: parts of the response beside the texts of answers.
        parser: makes the parser of one answer.
    """

    def __init__(
        self,
        head: Head,
        spell: Spell,
        usage: ChunkUsage,
        extras: Extras,
        parser: Callable[[], OutputParser] = PlainText,
    ) -> None:
        self._head, self._spell, self._usage, self._extras, self._parser = head, spell, usage, extras, parser
        self._asked = extras.asked

    def opening(self) -> bytes:
        """Returns the events before the first token; most APIs have none."""
        return b""

    @abstractmethod
    def events(self, index: int, delta: Delta) -> bytes:
        """Returns the client's events for one of the engine's; empty if there is nothing to send."""

    @abstractmethod
    def closing(self, usage: UsageBody) -> bytes:
        """Returns the last events of a stream."""

    @abstractmethod
    def failing(self, error: ApiError) -> bytes:
        """Returns the last events of a stream that failed."""

    def ping(self) -> bytes:
        """Returns an event, or a comment, that only shows that the stream is alive."""
        return COMMENT

    @abstractmethod
    def whole(self, answers: Sequence[Sequence[Delta]], usage: UsageBody) -> Struct:
        """Returns the response with all answers, each given as its events."""


class ChunkReply(Reply):
    """The streams of completions and chats: chunks of one form, the last one with the usage."""

    @cached_property
    def _sent(self) -> dict[int, int]:
        """Characters sent so far, by choice; a choice is missing until something of it was sent."""
        return {}

    def events(self, index: int, delta: Delta) -> bytes:
        chunk = self.chunk(index, delta)
        return b"" if chunk is None else event(chunk)

    def closing(self, usage: UsageBody) -> bytes:
        last = self.last(usage)
        return (event(last) if self._usage.include or last.explanation else b"") + DONE

    def failing(self, error: ApiError) -> bytes:
        return broken(error)

    def _is_shown(self, delta: Delta, answer: object) -> bool:
        """Returns whether an event adds to the answer, or has anything else for the client."""
        shown = answer or delta.logprobs or delta.finish_reason or delta.prompt_logprobs
        return bool(shown or (self._extras.prompt_tokens and delta.tokens))

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._asked.ids_for_names else self._spell(token).text

    def _prompt_logprobs(self, deltas: Sequence[Delta]) -> PromptLogprobs | UnsetType:
        if self._asked.prompt_logprobs is None:
            return UNSET
        return [*[None] * self._asked.unscored, *map(self._scored, scores_of(deltas))]

    def _scored(self, score: TokenLogprob) -> dict[int, PromptLogprob]:
        top = [(score.token, score.logprob, score.rank)]
        top += [(*pair, rank) for rank, pair in enumerate(score.top[: self._asked.prompt_logprobs], 1)]
        by_token: dict[int, PromptLogprob] = {}
        for token, logprob, rank in top:
            by_token.setdefault(token, PromptLogprob(finite(logprob), rank, self._spell(token).text))
        return by_token

    def _token_ids(self, deltas: Sequence[Delta]) -> list[int] | UnsetType:
        return [token for delta in deltas for token in delta.tokens] if self._extras.prompt_tokens else UNSET

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        ids = self._extras.prompt_tokens
        return ids[index // self._asked.kept] if ids else UNSET

    @abstractmethod
    def chunk(self, index: int, delta: Delta) -> Struct | None:
        """Returns the chunk of one event, or None if there is nothing to send."""

    @abstractmethod
    def last(self, usage: UsageBody) -> Any:
        """Returns the last chunk, which carries the usage and the explanation."""


def chosen_token(entry: TokenLogprob, spell: Spell, name: Callable[[int], str] | None = None) -> ChosenToken:
    """Returns the log-probabilities of a generated token as chats show them.

    Args:
        entry: the token.
        spell: spells a token.
        name: returns what stands for a token; None: its text.
    """

    def shown(token: int, logprob: float) -> tuple[str, float, list[int] | None]:
        text, raw = spell(token)
        return text if name is None else name(token), finite(logprob), None if raw is None else list(raw)

    return ChosenToken(*shown(entry.token, entry.logprob), [Alternative(*shown(*pair)) for pair in entry.top])


def entries_of(deltas: Sequence[Delta]) -> list[TokenLogprob]:
    """Returns the log-probabilities of an answer."""
    return [entry for delta in deltas for entry in delta.logprobs]


def scores_of(deltas: Sequence[Delta]) -> list[TokenLogprob]:
    """Returns the log-probabilities of a prompt."""
    return [entry for delta in deltas for entry in delta.prompt_logprobs]


def finite(logprob: float) -> float:
    """Returns a log-probability that JSON has."""
    return max(logprob, _LOWEST_LOGPROB)


def named_event(name: str, fields: Mapping[str, Any]) -> bytes:
    """Returns one server-sent event with a name, which its JSON repeats as `type`."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


def event(body: Struct) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def broken(error: ApiError) -> bytes:
    """Returns the events that end a stream of chunks that failed, wherever it was."""
    return event(ErrorBody(error.detail)) + DONE


DONE = b"data: [DONE]\n\n"
"""The event that ends a stream."""

COMMENT = b": ping\n\n"
"""A comment of server-sent events, which every client skips: https://html.spec.whatwg.org/multipage/server-sent-events."""
