"""Writes answers of /v1/completions, whole and as the events of a stream, by the OpenAI API reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import UNSET, Struct, UnsetType

from mainstem.runtime.request import Delta, TokenLogprob
from mainstem.server.apis.replies import (
    ChunkReply,
    Echo,
    Explained,
    PromptLogprobs,
    UsageBody,
    entries_of,
    finite,
    scores_of,
)


class CompletionLogprobs(Struct):
    """`logprobs` of a completion choice: four lists of equal length; offsets count characters of the text.

    With `echo`, they begin with the tokens of the prompt. Those before `logprob_start` have no log-probability, nor has
    the first one. The token itself is among the likeliest ones in any case, so that there may be one more of these than
    was asked for.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


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


class CompletionReply(ChunkReply):
    """Writes the answers of one /v1/completions request; see `Reply`."""

    def chunk(self, index: int, delta: Delta) -> CompletionBody | None:
        usage = self._usage.after(delta)
        if not self._is_shown(delta, delta.text):
            return None
        return self._body([self._choice(index, [delta])], usage)

    def last(self, usage: UsageBody) -> CompletionBody:
        return self._body([], usage, self._extras.explanation)

    def whole(self, answers: Sequence[Sequence[Delta]], usage: UsageBody) -> CompletionBody:
        choices = [self._choice(index, deltas) for index, deltas in enumerate(answers)]
        return self._body(choices, usage, self._extras.explanation)

    def _body(
        self,
        choices: list[CompletionChoice],
        usage: UsageBody | UnsetType | None,
        explanation: Explained = UNSET,
    ) -> CompletionBody:
        return CompletionBody(self._head.id, self._head.created, self._head.model, choices, usage, explanation)

    def _choice(self, index: int, deltas: Sequence[Delta]) -> CompletionChoice:
        echoes, begins = self._extras.echoes, index not in self._sent
        echo = echoes[index // self._asked.kept] if begins and echoes else None
        self._sent.setdefault(index, 0 if echo is None else len(echo.text))
        offsets = [offset for delta in deltas for offset in self._offsets(index, delta)]
        logprobs = self._logprobs(entries_of(deltas), offsets) if offsets and self._asked.shows_logprobs else None
        text = "".join(delta.text for delta in deltas)
        if echo is not None:
            text = echo.text + text
            logprobs = self._echoed(echo, scores_of(deltas), logprobs) if echo.offsets else None
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
        return CompletionLogprobs(tokens, [finite(entry.logprob) for entry in entries], [*best], offsets)

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Returns the likeliest tokens at a place, and the chosen one if it is not among them."""
        top = {self._name(token): finite(value) for token, value in entry.top}
        top.setdefault(self._name(entry.token), finite(entry.logprob))
        return top

    def _echoed(
        self, echo: Echo, scores: Sequence[TokenLogprob], answer: CompletionLogprobs | None
    ) -> CompletionLogprobs:
        """Returns the log-probabilities of a prompt, and of its answer after them."""
        kept = [replace(score, top=score.top[: echo.alternatives]) for score in scores]
        made, answer = self._logprobs(kept, []), answer or CompletionLogprobs([], [], [], [])
        unscored = [None] * (len(echo.tokens) - len(kept))
        return CompletionLogprobs(
            [*map(self._name, echo.tokens), *answer.tokens],
            [*unscored, *made.token_logprobs, *answer.token_logprobs],
            [*unscored, *made.top_logprobs, *answer.top_logprobs],
            [*echo.offsets, *answer.text_offset],
        )
