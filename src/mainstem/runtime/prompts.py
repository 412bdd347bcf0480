"""Text, conversations and given token ids to prompts that fit the model's context.

Knows the tokenizer, its chat template and the model's context. Does not know HTTP. What cannot fit is refused by its
size, before a template or the tokenizer sees it. Everything here may take long on a long text: callers with an event
loop run it on a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from mainstem.errors import BadArgument, BadTokens, RequestTooLong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Prompts:
    """Makes prompts for one model. Those it gives are read-only, so that requests can share them.

    Args:
        tokenizer: the model's tokenizer.
        max_context: positions the model takes, prompt and answer together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        # A tokenizer that loses nothing needs at least this many bytes to fill the context.
        self._max_bytes = max_context * max(len(token.encode()) for token in tokenizer.get_vocab())

    def text(self, text: str) -> NDArray[np.int32]:
        """The token ids of a plain text, with what the tokenizer puts in front of every text.

        Returns:
            int32 [n], n >= 1.

        Raises:
            BadArgument: no tokens at all, or not encodable as UTF-8.
            RequestTooLong: longer than the context; found before tokenising if no tokenisation could fit.
        """
        self.check_size([text], "prompt")
        return self._encode(text, special_tokens=True, name="prompt")

    def tokens(self, ids: Sequence[int]) -> NDArray[np.int32]:
        """The prompt of given token ids, each an int32.

        Returns:
            int32 [n], n >= 1.

        Raises:
            BadTokens: no tokens at all.
            RequestTooLong: longer than the context.
        """
        if not ids:
            raise BadTokens("prompt: must have at least one token")
        return self._fitting(ids, "prompt")

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> NDArray[np.int32]:
        """The token ids of a conversation, up to where the assistant's answer begins.

        Args:
            messages: `role` and `content` each, as chat templates take them.

        Returns:
            int32 [n], n >= 1.

        Raises:
            BadArgument: the chat template refuses the conversation, there is no template, or a message is not encodable
                as UTF-8.
            RequestTooLong: longer than the context; found before the template runs if no tokenisation could fit.
        """
        if len(messages) > self._max_context:
            raise RequestTooLong(f"messages: {len(messages)} messages cannot fit {self._max_context} tokens")
        self.check_size([message["content"] for message in messages], "messages")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError, TypeError) as error:
            given = [message["role"] for message in messages]
            raise BadArgument("messages", given, f"what the model's chat template takes: {error}") from error
        self.check_size([str(text)], "messages")
        return self._encode(str(text), special_tokens=False, name="messages")

    def spell(self, token: int) -> str:
        """The text of one token on its own; a part of a character shows as U+FFFD."""
        return str(self._tokenizer.decode([token]))

    def check_size(self, texts: Sequence[str], name: str) -> None:
        """Texts that no tokenisation could fit into the context are refused, before anything works on them.

        Raises:
            RequestTooLong: they are of that size.
            BadArgument: one is not encodable as UTF-8.
        """
        size = sum(_utf8_bytes(text, name) for text in texts)
        if size > self._max_bytes:
            raise RequestTooLong(
                f"{name}: a text of {size} bytes cannot fit {self._max_context} tokens, which are {self._max_bytes}"
                " bytes at the most"
            )

    def check_length(self, tokens: int, name: str) -> None:
        """Raises RequestTooLong for a prompt that is longer than the context."""
        if tokens > self._max_context:
            raise RequestTooLong(f"{name}: {tokens} tokens, but the context has {self._max_context}")

    def _encode(self, text: str, *, special_tokens: bool, name: str) -> NDArray[np.int32]:
        ids = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        if not ids:
            raise BadArgument(name, text, "a text with at least one token")
        return self._fitting(ids, name)

    def _fitting(self, ids: Sequence[int], name: str) -> NDArray[np.int32]:
        self.check_length(len(ids), name)
        prompt = np.asarray(ids, dtype=np.int32)
        prompt.flags.writeable = False
        return prompt


def _utf8_bytes(text: str, name: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        # The text itself stays out of the message: it could not be printed.
        where = f"{text[error.start : error.end]!a} at character {error.start}"
        raise BadArgument(name, where, "text that UTF-8 can encode, without surrogates") from None
