"""Text and conversations to token ids.

Knows the tokenizer, its chat template and the model's context. Does not know HTTP. Everything here may take long on a
long text: callers with an event loop run it on a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from mainstem.errors import BadArgument, RequestTooLong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Prompts:
    """Makes prompts for one model.

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
            BadArgument: no tokens at all.
            RequestTooLong: longer than any prompt that fits; found before tokenising.
        """
        return self._encode(text, special_tokens=True, name="prompt")

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> NDArray[np.int32]:
        """The token ids of a conversation, up to where the assistant's answer begins.

        Args:
            messages: `role` and `content` each, as chat templates take them.

        Returns:
            int32 [n], n >= 1.

        Raises:
            BadArgument: the chat template refuses the conversation, or there is no template.
            RequestTooLong: longer than any prompt that fits; found before tokenising.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError, TypeError) as error:
            given = [message["role"] for message in messages]
            raise BadArgument("messages", given, f"what the model's chat template takes: {error}") from error
        return self._encode(str(text), special_tokens=False, name="messages")

    def spell(self, token: int) -> str:
        """The text of one token on its own; a part of a character shows as U+FFFD."""
        return str(self._tokenizer.decode([token]))

    def _encode(self, text: str, *, special_tokens: bool, name: str) -> NDArray[np.int32]:
        size = len(text.encode(errors="replace"))
        if size > self._max_bytes:
            raise RequestTooLong(
                f"{name}: a text of {size} bytes cannot fit {self._max_context} tokens, which are {self._max_bytes}"
                " bytes at the most"
            )
        ids = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        if not ids:
            raise BadArgument(name, text, "a text with at least one token")
        return np.asarray(ids, dtype=np.int32)
