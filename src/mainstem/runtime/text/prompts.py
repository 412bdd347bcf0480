"""Makes prompts that fit the model's context, from text, conversations or token ids.

This module knows the tokenizer, its chat template and the model's context. It does not know HTTP. A text that cannot
fit is rejected by its size, before the template or the tokenizer processes it. All calls may be slow on a long text:
callers with an event loop run them on a thread.

**Marks.** Other conversations may go on differently wherever a message begins. Templates differ in what they write
there, so it is found by trial: the conversation up to a message is rendered twice, with two other texts in its place.
Their common part ends where that message's text begins, after the system message, the tools, and all turns
before. It counts only if the real prompt begins with it: a template that treats the last message differently yields
fewer marks, never wrong ones.

**Variants.** A place in a conversation is named by a variant of it: the same, but for something put in at that place.
The prefix up to there is what both have in common, however the template writes it.

**Control tokens.** Text that is given is text: only the template writes control tokens. A rendered text is escaped
where what it was made of has the text of one (`runtime.escapes`), and is tokenised here alone.

**Other tokens.** `prompt` also takes a conversation with other tokens than the tokenizer's own: those that the model
generated (`runtime.cuts`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument, BadTokens, RequestTooLong
from mainstem.runtime.request import PreparedPrompt
from mainstem.runtime.text.cuts import Tokenization, common_length, common_tokens
from mainstem.runtime.text.detokenizer import Detokenizer
from mainstem.runtime.text.escapes import TEMPLATE_ERRORS, Escapes, beginning, begun_once, not_taken, utf8_bytes
from mainstem.runtime.text.spelling import Spelled, spelled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TRIED = 4
"""Messages at each end of a conversation at which marks are looked for: bounds the cost."""

_ENDING = 16
"""Tokens of a prompt's ending."""

_OF_USER = {"role": "user"}
_PROBES = ("A", "B")  # texts in place of a message; they must have no beginning in common


@dataclass(frozen=True, slots=True)
class Template:
    """How a chat template is applied.

    Args:
        generation_prompt: end with the beginning of an answer.
        continues: leave the last message open, so that the answer continues it.
        variables: of the template, such as `enable_thinking`.
        tools: as the template takes them, each `{"type": "function", "function": ...}`; None: the template is not
            asked for any.
        special_tokens: begin with the token with which the tokenizer begins texts, if the template does not.

    Raises:
        BadArgument: both of the first two are set, or a variable has the name of an argument of transformers.
    """

    generation_prompt: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None
    special_tokens: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        if self.generation_prompt and self.continues:
            raise BadArgument("continue_final_message", True, "False with add_generation_prompt")
        reserved = next((name for name in self.variables if name in _RESERVED), None)
        if reserved is not None:
            raise BadArgument("chat_template_kwargs", reserved, "variables of the template")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `apply_chat_template`."""
        continues = {"continue_final_message": True} if self.continues else {}
        tools = {} if self.tools is None else {"tools": [dict(tool) for tool in self.tools]}
        return {**self.variables, "add_generation_prompt": self.generation_prompt, **continues, **tools}


# Names that transformers gives its templates, or takes itself.
_RESERVED = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "template_kwargs", "load_audio_from_video",
    "sanitize_control_tokens",
}  # fmt: skip

ANSWER = Template()
"""Ends with the beginning of an answer."""

WHOLE = Template(generation_prompt=False)
"""Ends with the last message."""

Variant: TypeAlias = tuple[Sequence[Mapping[str, Any]], Template]
"""A conversation and the way in which the chat template is applied to it. Two variants differ from some token on."""


class Prompts:
    """Makes prompts for one model. Returned arrays are read-only, so that requests can share them.

    Args:
        tokenizer: the model's tokenizer.
        max_context: positions that the model takes, prompt and answer together.
        marks: whether `prepare` looks for marks, which only models with recurrent states need.
        escapes: tell control tokens from their texts; None: those of the tokenizer.

    Attributes:
        escapes: as given, or made.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_context: int,
        *,
        marks: bool = False,
        escapes: Escapes | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.escapes = Escapes(tokenizer) if escapes is None else escapes
        self._max_context = max_context
        self._marks = marks
        # A lossless tokenizer cannot fit more bytes than this into a token.
        self._token_bytes = max(len(token.encode()) for token in tokenizer.get_vocab())

    def text(
        self, text: str, *, special_tokens: bool = True, parse_special: bool = True, escaped: bool = False
    ) -> NDArray[np.int32]:
        """Encodes a text that is no conversation, or one that was rendered elsewhere.

        Args:
            text: which.
            special_tokens: with those that the tokenizer adds, but for a first one with which the text begins anyway.
            parse_special: the texts of control tokens become these; else they are text.
            escaped: parts of it are escaped, see `Escapes.text`: there they are text in any case.

        Returns:
            int32 [n], n >= 1.

        Raises:
            BadArgument: the text has no tokens, or is not encodable as UTF-8.
            RequestTooLong: it is longer than the context; raised before tokenising if no tokenisation could fit.
        """
        self.check_size([self.escapes.plain(text) if escaped else text], "prompt")
        text = text if parse_special else self.escapes.text(text, name="prompt")
        ids = self.escapes.encode(text, special_tokens=special_tokens, name="prompt")
        return self._checked_ids(text, begun_once(self._tokenizer, ids) if special_tokens else ids, "prompt")

    def tokens(self, ids: Sequence[int]) -> NDArray[np.int32]:
        """Makes a prompt of token ids, each an int32.

        Returns:
            int32 [n], n >= 1.

        Raises:
            BadTokens: there are no tokens.
            RequestTooLong: the prompt is longer than the context.
        """
        if not ids:
            raise BadTokens("prompt: must have at least one token")
        return self._fitting(ids, "prompt")

    def conversation(self, messages: Sequence[Mapping[str, Any]], template: Template = ANSWER) -> NDArray[np.int32]:
        """Returns the tokens of `prepare`, int32 [n], n >= 1."""
        return self.rendered(self.render(messages, template))

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], template: Template = ANSWER, variants: Sequence[Variant] = ()
    ) -> PreparedPrompt:
        """Encodes a conversation, by default up to where the assistant's answer begins.

        Args:
            messages: `role` and `content` of each, as chat templates take them; content may be None.
            template: how the model's chat template is applied; `WHOLE` gives the prefix of a longer conversation.
            variants: of the conversation.

        Returns:
            The tokens, n >= 1; the marks if they are looked for: where the texts of messages begin; and where the
            variants part from it.

        Raises:
            BadArgument: the chat template rejects the conversation, there is no template, or a message is not encodable
                as UTF-8.
            RequestTooLong: it is longer than the context; raised before the template runs if no tokenisation could fit.
        """
        text = self.render(messages, template)
        if self.has_offsets and (self._marks or variants):
            return self.prompt(messages, template, self.tokenize(text), variants)
        tokens = self.rendered(text)
        boundaries = {*self._boundaries(messages, text, template)} if self._marks else ()
        marks = sorted({self._position(text, tokens, boundary) for boundary in boundaries})
        partings = [self._position(text, tokens, at) for at in self._partings(text, variants)]
        return PreparedPrompt(tokens, marks=tuple(marks), partings=tuple(partings))

    def unlimited(self) -> Prompts:
        """Returns the same for prompts of any length, which are cut or counted, not computed."""
        return Prompts(self._tokenizer, sys.maxsize, marks=self._marks, escapes=self.escapes)

    @property
    def has_offsets(self) -> bool:
        """Whether the tokenizer says where tokens are in the text, which `tokenize` needs."""
        return bool(getattr(self._tokenizer, "is_fast", False))

    def rendered(self, text: str) -> NDArray[np.int32]:
        """Encodes the text of a conversation, as `render` returns it; see `tokenize`."""
        return self._checked_ids(text, self.escapes.encode(text), "messages")

    def tokenize(self, text: str) -> Tokenization:
        """Tokenises the text of a conversation, as `render` returns it; the tokenizer must have offsets.

        Raises:
            BadArgument: the text has no tokens.
            RequestTooLong: it is longer than the context.
        """
        ids, offsets = self.escapes.encode_with_offsets(text)
        return Tokenization.of_offsets(text, self._checked_ids(text, ids, "messages"), offsets)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: Template,
        tokenization: Tokenization,
        variants: Sequence[Variant] = (),
    ) -> PreparedPrompt:
        """Makes a prompt of any tokenization of a conversation's text; see `prepare`.

        Raises:
            RequestTooLong: it is longer than the context.
        """
        tokens = self._fitting(tokenization.tokens, "messages")
        boundaries = self._boundaries(messages, tokenization.text, template) if self._marks else ()
        marks = sorted({tokenization.before(boundary) for boundary in boundaries})
        partings = [tokenization.before(at) if at else 0 for at in self._partings(tokenization.text, variants)]
        return PreparedPrompt(tokens, marks=tuple(marks), partings=tuple(partings))

    def before_next(
        self, messages: Sequence[Mapping[str, Any]], template: Template, following: Mapping[str, str] = _OF_USER
    ) -> str | None:
        """Returns the text of a conversation up to where the text of its next message will begin.

        Args:
            messages, template: of the conversation.
            following: the next message, without its text.

        Returns:
            None: the template takes no such message.
        """
        return self._until(messages, following, template)

    def render(self, messages: Sequence[Mapping[str, Any]], template: Template = ANSWER) -> str:
        """Returns the text of a conversation that may fit, escaped; raises what `prepare` raises."""
        if len(messages) > self._max_context:
            raise RequestTooLong("messages", len(messages), self._max_context, counted=False)
        self.check_size([message["content"] or "" for message in messages], "messages")
        try:
            text = self._render(messages, template)
        except TEMPLATE_ERRORS as error:
            raise not_taken(messages, error) from error
        self.check_size([self.escapes.plain(text)], "messages")
        return text

    def _render(self, messages: Sequence[Mapping[str, Any]], template: Template) -> str:
        escaped, arguments = self.escapes.messages(messages), self.escapes.value(template.arguments)
        text = self.escapes.rendered(str(self._tokenizer.apply_chat_template(escaped, tokenize=False, **arguments)))
        _, begin = beginning(self._tokenizer) if template.special_tokens else (None, "")
        return text if text.startswith(begin) else begin + text

    def _boundaries(self, messages: Sequence[Mapping[str, Any]], text: str, template: Template) -> Iterator[int]:
        """Yields characters of the rendered conversation at which the texts of messages begin."""
        count = len(messages)
        for at in sorted({*range(min(count, _TRIED)), *range(max(count - _TRIED, 0), count)}):
            before = self._until(messages[:at], messages[at], template)
            if before is not None and text.startswith(before):
                yield len(before)

    def _until(self, head: Sequence[Mapping[str, Any]], message: Mapping[str, Any], template: Template) -> str | None:
        """Returns what is rendered before the text of a message that is the last one; None if it is not shown."""
        whole = replace(template, generation_prompt=False, continues=False)
        try:
            one, other = (self._render([*head, {**message, "content": probe}], whole) for probe in _PROBES)
        except TEMPLATE_ERRORS:
            return None  # a conversation that this template does not let end here
        boundary = common_length(one, other)
        return one[:boundary] if boundary < len(one) else None

    def _partings(self, text: str, variants: Sequence[Variant]) -> list[int]:
        """Returns the character at which each variant parts from a rendered conversation; 0: see `PreparedPrompt`."""
        return [parting(text, partial(self._render, *variant)) for variant in variants]

    def _position(self, text: str, tokens: NDArray[np.int32], boundary: int) -> int:
        """Returns how many tokens are before a character, for a tokenizer that keeps no offsets."""
        return common_tokens(np.asarray(self.escapes.encode(text[:boundary]), np.int32), tokens)

    def words(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of words, each at the beginning of a text and after a blank if these differ.

        The text of a control token is a word by this token, and by those that spell it.
        """
        spelled = [form for text in texts for form in (text, f" {text.lstrip()}")]
        forms = [each for form in spelled for each in (form, self.escapes.text(form, name="bad_words"))]
        return tuple(dict.fromkeys(tuple(self.escapes.encode(each, name="bad_words")) for each in forms))

    def read(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Returns the text of tokens, by default special ones included.

        Raises:
            BadTokens: a token is outside the vocabulary.
        """
        wrong = next((token for token in tokens if not 0 <= token < len(self._tokenizer)), None)
        if wrong is not None:
            raise BadTokens(f"token {wrong}: must be from 0 to {len(self._tokenizer) - 1}")
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special))

    def offsets(self, tokens: Sequence[int], text: str) -> list[int]:
        """Returns where in a text each of its tokens begins, in characters.

        A special token that the text does not show has no length, and a part of a character begins where that does.
        """
        shown, special = Detokenizer(self._tokenizer, skip_special=False), {*self._tokenizer.all_special_ids}
        offsets, at = [], 0
        for token in tokens:
            offsets.append(min(at, len(text)))
            piece = shown.push(token)
            at += len(piece) if token not in special or text.startswith(piece, at) else 0
        return offsets

    def ending(self, tokens: Sequence[int] | NDArray[np.int32]) -> str:
        """Returns the last text of a prompt, special tokens included; its other tokens may be those of images."""
        last = [int(token) for token in tokens[-_ENDING:] if 0 <= token < len(self._tokenizer)]
        return str(self._tokenizer.decode(last))

    def spell(self, token: int) -> Spelled:
        """Returns the text of a single token, and its bytes."""
        return spelled(self._tokenizer, token)

    def check_size(self, texts: Sequence[str], name: str) -> None:
        """Rejects texts that no tokenisation could fit into the context, by their size alone.

        Raises:
            RequestTooLong: the texts together cannot fit.
            BadArgument: a text is not encodable as UTF-8.
        """
        size = sum(utf8_bytes(text, name) for text in texts)
        least = -(-size // self._token_bytes)
        if least > self._max_context:
            raise RequestTooLong(name, least, self._max_context, counted=False)

    def check_length(self, tokens: int, name: str) -> None:
        """Raises RequestTooLong for a prompt that is longer than the context."""
        if tokens > self._max_context:
            raise RequestTooLong(name, tokens, self._max_context)

    def _checked_ids(self, text: str, ids: Sequence[int], name: str) -> NDArray[np.int32]:
        if not ids:
            raise BadArgument(name, text, "a text with at least one token")
        return self._fitting(ids, name)

    def _fitting(self, ids: Sequence[int] | NDArray[np.int32], name: str) -> NDArray[np.int32]:
        self.check_length(len(ids), name)
        prompt = np.asarray(ids, dtype=np.int32)
        prompt.flags.writeable = False
        return prompt


def parting(text: str, render: Callable[[], str]) -> int:
    """Returns the character at which a variant of a conversation parts from its text.

    Args:
        text: of the conversation.
        render: returns that of the variant.

    Returns:
        0 if the template does not take the variant, or does not show what differs.
    """
    try:
        other = render()
    except TEMPLATE_ERRORS:
        return 0
    return common_length(text, other) if other != text else 0
