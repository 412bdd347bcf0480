"""Finds the tokens of answers again when a chat sends them back as text.

A client sends the text of an answer with its next question. Tokenised anew, the text often yields other tokens than the
model generated, and the KV of the answer is not found. So the tokens are kept with the prompt that they answered. A
prompt whose rendered text begins with the text of an earlier prompt, and goes on as its answer did, gets the tokens of
this answer. Nothing else of it changes: other text is tokenised as ever, and the model sees an unusual tokenization
only where it generated it itself, after the same text.

Rendered text counts, not messages, so a call of a tool is found, too, if the template writes it as the model did. The
text is escaped (`runtime.escapes`), so that no text of a control token passes for the token. If a template drops or
trims a part of an answer, the text after it is tokenised as ever.

    text of a prompt      |------- 128 -------|------- 128 -------|--- rest ---|
    digests               d0: namespace       d1: of d0 and text  d2: of d1 and text
    place of the prompt   (d2, rest)

A prompt that begins with an earlier one passes the same digests. So all earlier prompts are found in one pass over the
text, and prompts are kept as digests. The first digest is that of the namespace, so no tenant finds the answers of
another.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.namespaces import Namespace, encode_namespace
from mainstem.errors import RequestTooLong
from mainstem.metric import Metric, gauge
from mainstem.runtime.request import Delta, PreparedPrompt, Usage
from mainstem.runtime.text.cuts import Tokenization, common_length, decoded, with_generated
from mainstem.runtime.text.detokenizer import Tokenizer
from mainstem.runtime.text.prompts import Prompts, Template, Variant
from mainstem.server.run import Watcher

_STRIDE = 128  # characters from one digest of a prompt to the next
_CONTEXT_TOKENS = 8  # kept of a prompt: its last tokens and the first of its answer may be cut differently
_MOST_ANSWERS = 128  # kept of one prompt: as many as a request has choices
_TOKEN_BYTES = 20  # of an answer: a token, where it ends, and its text
_ANSWER_BYTES = 2048  # and what else is kept of an answer and its prompt


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Counts since the start, and the size of what is kept now.

    Args:
        remembered: answers.
        found: answers that were found again, once for each prompt.
        tokens: tokens of answers in these prompts.
        bytes: size of the answers that are kept.
    """

    remembered: int
    found: int
    tokens: int
    bytes: int

    METRICS: ClassVar = (
        Metric("mainstem_answers_remembered", "Answers whose tokens were kept", "remembered"),
        Metric("mainstem_answers_found", "Answers found again in prompts", "found"),
        Metric("mainstem_answer_tokens", "Tokens of the answers found again", "tokens"),
        gauge("mainstem_answers_bytes", "Size of the answers that are kept", "bytes"),
    )  # fmt: skip


class Place(NamedTuple):
    """Identifies a prompt: by the digest of its namespace and its text up to a stride, and by the rest of the text."""

    digest: bytes
    rest: str


@dataclass(slots=True, eq=False)
class _Answer:
    """An answer, and its text with the end of the prompt, which is made when it is first needed."""

    tokens: NDArray[np.int32]
    known: Tokenization | None = None

    @property
    def size(self) -> int:
        return _ANSWER_BYTES + _TOKEN_BYTES * len(self.tokens)


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt, its end, and its answers, oldest first."""

    namespace: bytes
    context: Tokenization
    answers: list[_Answer] = field(default_factory=list)


class _Earlier(NamedTuple):
    """An earlier prompt with which a text begins, up to a character."""

    end: int
    context: Tokenization
    answers: tuple[_Answer, ...]


class Answers:
    """The answers of one server, in a number of bytes; those that were not used for longest go first.

    Any thread may call it. A tokenizer without offsets cannot be used: then nothing is remembered.

    Args:
        prompts: of the model.
        tokenizer: of the model.
        capacity: bytes; 0: nothing is remembered.
    """

    def __init__(self, prompts: Prompts, tokenizer: Tokenizer, capacity: int) -> None:
        self._prompts, self._tokenizer = prompts, tokenizer
        self._capacity = capacity if prompts.has_offsets else 0
        self._lock = threading.Lock()  # guards all below
        self._known: OrderedDict[Place, _Prompt] = OrderedDict()  # in the order of their last use
        self._digests: Counter[bytes] = Counter()  # of the places
        self._remembered = self._found = self._tokens = self._bytes = 0

    @property
    def enabled(self) -> bool:
        """Whether anything is remembered."""
        return self._capacity > 0

    def tokenize(self, text: str, namespace: bytes) -> tuple[Tokenization, Place]:
        """Tokenises the text of a prompt, with the tokens of the answers in it.

        Args:
            text: as rendered.
            namespace: encoded.

        Returns:
            The tokenization, and the place at which answers to this prompt are remembered.

        Raises:
            BadArgument: the text has no tokens.
            RequestTooLong: it is longer than the context.
        """
        digests = _digests(text, namespace)
        place = Place(digests[-1], text[(len(digests) - 1) * _STRIDE :])
        plain = made = self._prompts.tokenize(text)
        found = tokens = 0
        for earlier in self._look_up(text, digests):
            known, at = self._longest(earlier, text), earlier.end - len(earlier.context.text)
            made, taken = with_generated(self._tokenizer, made, known, at, earlier.end, self._prompts.escapes)
            found, tokens = found + (taken > 0), tokens + taken
        try:
            self._prompts.check_length(len(made.tokens), "messages")
        except RequestTooLong:  # generated tokens may be more than the tokenizer's
            return plain, place
        with self._lock:
            self._found += found
            self._tokens += tokens
        return made, place

    def remember(self, place: Place, namespace: bytes, context: Tokenization, tokens: Sequence[int]) -> None:
        """Keeps an answer.

        Args:
            place: of the prompt.
            namespace: of the prompt, encoded.
            context: the end of the prompt.
            tokens: of the answer.
        """
        answer = _Answer(np.asarray(tokens, np.int32))
        if answer.size > self._capacity:
            return
        with self._lock:
            prompt = self._known.get(place)
            if prompt is None:
                prompt = self._known[place] = _Prompt(namespace, context)
                self._digests[place.digest] += 1
            self._known.move_to_end(place)
            if any(np.array_equal(answer.tokens, other.tokens) for other in prompt.answers):
                return
            if len(prompt.answers) == _MOST_ANSWERS:
                self._bytes -= prompt.answers.pop(0).size
            prompt.answers.append(answer)
            self._remembered += 1
            self._bytes += answer.size
            while self._bytes > self._capacity:
                self._drop_oldest()

    def forget(self, namespace: bytes | None = None) -> None:
        """Forgets all answers, or those of one namespace."""
        with self._lock:
            for place, prompt in list(self._known.items()):
                if namespace in (None, prompt.namespace):
                    self._drop(place)

    def stats(self) -> AnswerStats:
        """Returns the counts."""
        with self._lock:
            return AnswerStats(self._remembered, self._found, self._tokens, self._bytes)

    def check(self) -> None:
        """Checks that the bytes are those of the answers, within the capacity, and that places are found by digests.

        Raises:
            AssertionError: a rule is broken.
        """
        with self._lock:
            answers = [answer for prompt in self._known.values() for answer in prompt.answers]
            assert self._bytes == sum(answer.size for answer in answers), "the bytes are those of the answers"
            assert self._bytes <= self._capacity, "more bytes than the capacity"
            assert self._digests == Counter(place.digest for place in self._known), "each place has its digest"
            counts = [len(prompt.answers) for prompt in self._known.values()]
            assert all(0 < n <= _MOST_ANSWERS for n in counts), "a prompt has answers, and not too many"
            assert len(answers) <= self._remembered, "more answers are kept than were remembered"
            assert min(self._found, self._tokens - self._found) >= 0, "an answer that was found has tokens"

    def _look_up(self, text: str, digests: Sequence[bytes]) -> list[_Earlier]:
        """Returns all prompts with which a text begins, shortest first."""
        found: list[_Earlier] = []
        places: list[Place] = []
        with self._lock:
            for at, digest in enumerate(digests):
                begin = at * _STRIDE
                for end in range(begin, min(begin + _STRIDE, len(text) + 1)) if digest in self._digests else ():
                    place = Place(digest, text[begin:end])
                    prompt = self._known.get(place)
                    if prompt is not None:
                        found.append(_Earlier(end, prompt.context, tuple(prompt.answers)))
                        places.append(place)
            for place in reversed(places):  # without its first answer, a chat finds nothing of the others
                self._known.move_to_end(place)
        return found

    def _longest(self, earlier: _Earlier, text: str) -> Tokenization:
        """Returns the answer to an earlier prompt with which a text goes on for longest, and the prompt's end."""
        answer, plain = earlier.answers[0], self._prompts.escapes.plain
        if len(earlier.answers) > 1:
            before = decoded(self._tokenizer, earlier.context.tokens.tolist())

            def same(answer: _Answer) -> int:
                tokens = np.concatenate([earlier.context.tokens, answer.tokens]).tolist()
                said = decoded(self._tokenizer, tokens)[len(before) :]
                return common_length(said, plain(text[earlier.end : earlier.end + len(said)]))

            answer = max(earlier.answers, key=same)
        if answer.known is None:
            context = earlier.context
            answer.known = context + Tokenization.of_generated(
                self._tokenizer, answer.tokens.tolist(), context.tokens, self._prompts.escapes
            )
        return answer.known

    def _drop_oldest(self) -> None:
        """Drops the first answer of the prompt that was not used for longest."""
        place, prompt = next(iter(self._known.items()))
        self._bytes -= prompt.answers.pop(0).size
        if not prompt.answers:
            self._drop(place)

    def _drop(self, place: Place) -> None:
        self._bytes -= sum(answer.size for answer in self._known.pop(place).answers)
        self._digests[place.digest] -= 1
        if not self._digests[place.digest]:
            del self._digests[place.digest]


class Turn:
    """One request: makes the prompt of its conversation, and remembers the answers.

    Args:
        answers: where answers are found and remembered.
        prompts: of the model.
        namespace: of the request.

    Attributes:
        messages, template: of the conversation; None before `prepare`, or if the request is no conversation.
    """

    def __init__(self, answers: Answers, prompts: Prompts, namespace: Namespace | None) -> None:
        self._answers, self._prompts = answers, prompts
        self._namespace = encode_namespace(namespace)
        self._kept: tuple[Place, Tokenization] | None = None
        self.messages: Sequence[Mapping[str, str]] | None = None
        self.template: Template | None = None

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], template: Template, variants: Sequence[Variant] = ()
    ) -> PreparedPrompt:
        """Makes the prompt; see `Prompts.prepare`."""
        self.messages, self.template = messages, template
        if not self._answers.enabled:
            return self._prompts.prepare(messages, template, variants)
        made, place = self._answers.tokenize(self._prompts.render(messages, template), self._namespace)
        self._kept = place, made.tail(_CONTEXT_TOKENS)
        return self._prompts.prompt(messages, template, made, variants)

    def tokenize(self, text: str) -> NDArray[np.int32]:
        """Returns the tokens of the text of another conversation, as `prepare` would; raises what it raises."""
        if not self._answers.enabled:
            return self._prompts.rendered(text)
        return self._answers.tokenize(text, self._namespace)[0].tokens

    def watchers(self) -> list[Watcher]:
        """Returns the watchers that remember one answer."""
        if self._kept is None:
            return []
        place, context = self._kept

        def remember(finish: str, usage: Usage | None, deltas: Sequence[Delta]) -> None:
            tokens = [token for delta in deltas for token in delta.tokens]
            if tokens:  # also of an answer that was cut short: its text may come back
                self._answers.remember(place, self._namespace, context, tokens)

        return [Watcher(remember)]


def _digests(text: str, namespace: bytes) -> list[bytes]:
    """Returns the digest of the namespace, and of all text up to each multiple of `_STRIDE`."""
    digests = [hashlib.blake2b(namespace, digest_size=16, person=b"mainstem answer").digest()]
    for begin in range(0, len(text) - _STRIDE + 1, _STRIDE):
        data = digests[-1] + text[begin : begin + _STRIDE].encode(errors="surrogatepass")
        digests.append(hashlib.blake2b(data, digest_size=16).digest())
    return digests
