"""Turns tokens into text that is safe to show, one token at a time.

The tokenizer itself decodes a short window of recent tokens, because the text of a token depends on its neighbours: a
leading space, the rest of a character. Two boundaries move over the tokens:

```
   tokens    . . . . . [ context | new ]
                       prefix    read    end          window = tokens[prefix:end]
   text of the window  [ ####### | ## ... ]
                                    emitted           characters of the window's text that were returned already
```

Text that ends in a replacement character may be an incomplete character and is held back. So is the possible start of a
stop string. This module does not know requests or schedulers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# A window that ends in more replacement characters than this will never be valid: an incomplete character is at most
# three byte tokens, and a run of byte tokens before it, up to the last boundary, may decode to such characters with it.
_BROKEN_AT = 12
_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What decoding needs of a tokenizer; those of Hugging Face transformers have it."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any) -> str | list[str]:
        """Returns the text of tokens."""


class Detokenizer:
    """The text of one request.

    Args:
        tokenizer: decodes tokens.
        stop: texts that end the request.
        context: tokens before the first one (the prompt): the first space depends on them. Never part of the text.
        skip_special: whether special tokens have no text.
        shows_stop: whether the text that ends the request is part of its own.
        hidden: tokens that have no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        context: Sequence[int] | NDArray[np.int32] = (),
        skip_special: bool = True,
        shows_stop: bool = False,
        hidden: Collection[int] = (),
    ) -> None:
        self._tokenizer, self._skip_special, self._shows_stop = tokenizer, skip_special, shows_stop
        self._stop, self._hidden = tuple(stop), hidden
        self._window = [int(token) for token in context[-_CONTEXT_TOKENS:]]
        self._read = len(self._window)
        self._text = self._decode(self._window)
        self._emitted = len(self._text.rstrip(_REPLACEMENT))
        self._held = ""
        self.stop: str | None = None

    @property
    def whole(self) -> bool:
        """Whether the text of the tokens so far ends with a character, of which no token that follows is a part."""
        return self._emitted == len(self._text)

    def push(self, token: int) -> str:
        """Adds a token, and returns the text that is now safe to show; sets `stop` when a stop string is complete.

        If there are several stop strings, the first to be complete counts, so the text does not depend on how it is
        split into tokens.
        """
        assert self.stop is None
        self._window.append(token)
        self._held += self._whole_text()
        ends = [(at + len(text), at, text) for text in self._stop if (at := self._held.find(text)) >= 0]
        if ends:
            end, begin, self.stop = min(ends)
            safe, self._held = self._held[: end if self._shows_stop else begin], ""
            return safe
        return self._take_held(len(self._held) - self._started_stop())

    def flush(self) -> str:
        """Returns all text held back, when no token follows. An incomplete character is a replacement character."""
        if self.stop is not None:
            return ""
        if len(self._window) > self._read:
            self._held += self._text[self._emitted :]
            self._slide()
        return self._take_held(len(self._held))

    def _whole_text(self) -> str:
        before, text = self._text, self._decode(self._window)
        self._text, whole = text, text.rstrip(_REPLACEMENT)
        if len(text) - len(whole) > _BROKEN_AT:
            whole = text
        fresh = whole[self._emitted :]
        self._emitted = max(self._emitted, len(whole))
        if whole == text == before:
            self._window.pop()  # a skipped special token: as context it would hide the text before it
        elif whole == text:
            self._slide()
        return fresh

    def _slide(self) -> None:
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._text = self._decode(self._window)
        self._emitted = len(self._text)

    def _started_stop(self) -> int:
        """Returns the length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0

    def _take_held(self, length: int) -> str:
        safe, self._held = self._held[:length], self._held[length:]
        return safe

    def _decode(self, tokens: list[int]) -> str:
        # Cleaning up spaces would change text before a token, which may have been shown already.
        text = self._tokenizer.decode(
            [token for token in tokens if token not in self._hidden],
            skip_special_tokens=self._skip_special,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text
