"""Makes prompts that fit the model's context, from text, conversations or token ids.

This module knows the tokenizer, its chat template and the model's context. It does not know HTTP. A text that cannot
fit is rejected by its size, before the template or the tokenizer processes it. All calls may be slow on a long text:
callers with an event loop run them on a thread.
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
    """Makes prompts for one model. Returned arrays are read-only, so that requests can share them.

    Args:
        tokenizer: the model's tokenizer.
        max_context: positions that the model takes, prompt and answer together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        # A lossless tokenizer cannot fit more bytes than this into the context.
        self._max_bytes = max_context * max(len(token.encode()) for token in tokenizer.get_vocab())

    def text(self, text: str) -> NDArray[np.int32]:
        """Encodes a plain text, with the special tokens that the tokenizer adds.

        Returns:
            int32 [n], n >= 1.

        Raises:
            BadArgument: the text has no tokens, or is not encodable as UTF-8.
            RequestTooLong: it is longer than the context; raised before tokenising if no tokenisation could fit.
        """
        self.check_size([text], "prompt")
        return self._encode(text, special_tokens=True, name="prompt")

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

    def conversation(
        self, messages: Sequence[Mapping[str, str]], *, generation_prompt: bool = True
    ) -> NDArray[np.int32]:
        """Encodes a conversation, up to where the assistant's answer begins.

        Args:
            messages: `role` and `content` of each, as chat templates take them.
            generation_prompt: False: only up to the end of the messages, for the prefix of a longer conversation.

        Returns:
            int32 [n], n >= 1.

        Raises:
            BadArgument: the chat template rejects the conversation, there is no template, or a message is not encodable
                as UTF-8.
            RequestTooLong: it is longer than the context; raised before the template runs if no tokenisation could fit.
        """
        if len(messages) > self._max_context:
            raise RequestTooLong(f"messages: {len(messages)} messages cannot fit {self._max_context} tokens")
        self.check_size([message["content"] for message in messages], "messages")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation_prompt
            )
        except (TemplateError, ValueError, TypeError) as error:
            given = [message["role"] for message in messages]
            raise BadArgument("messages", given, f"messages that the model's chat template takes: {error}") from error
        self.check_size([str(text)], "messages")
        return self._encode(str(text), special_tokens=False, name="messages")

    def spell(self, token: int) -> str:
        """Returns the text of a single token; a part of a character shows as U+FFFD."""
        return str(self._tokenizer.decode([token]))

    def check_size(self, texts: Sequence[str], name: str) -> None:
        """Rejects texts that no tokenisation could fit into the context, by their size alone.

        Raises:
            RequestTooLong: the texts together cannot fit.
            BadArgument: a text is not encodable as UTF-8.
        """
        size = sum(_utf8_bytes(text, name) for text in texts)
        if size > self._max_bytes:
            raise RequestTooLong(
                f"{name}: a text of {size} bytes cannot fit {self._max_context} tokens, which are at most"
                f" {self._max_bytes} bytes"
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
        # The message does not hold the text itself, since it could not be printed.
        where = f"{text[error.start : error.end]!a} at character {error.start}"
        raise BadArgument(name, where, "text that UTF-8 can encode, without surrogates") from None
