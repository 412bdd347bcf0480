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
stop text, unless stop texts count in a part of the text only: then all of it is returned, up to and with the token that
completes the stop text, and who reads the text finds the same part in it. This module does not know requests or
schedulers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mainstem.settings.engine import SamplingParams

# A window that ends in more replacement characters than this will never be valid: an incomplete character is at most
# three byte tokens, and a run of byte tokens before it, up to the last boundary, may decode to such characters with it.
_BROKEN_AT = 12
_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """The part of a tokenizer that decoding needs; those of Hugging Face transformers have it."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any) -> str | list[str]:
        """Returns the text of tokens."""


class Content(Protocol):
    """Finds the part of a text in which stop texts count, and the stop texts in it."""

    @property
    def stop(self) -> str | None:
        """The stop text that is complete; None: none is."""

    def feed(self, text: str) -> object:
        """Goes on with some more text."""

    def close(self, cut: bool = False) -> object:
        """Ends the text; `cut`: at its limit."""


class Stops:
    """Finds the first of several stop texts in a text that grows. It holds back what may be the start of one.

    If there are several, the first to be complete counts, so the result does not depend on how the text is split.

    Args:
        texts: which.
        shows: whether the stop text is part of the text that it ends.

    Attributes:
        found: the stop text that ended the text; None: none did. Then nothing more may be pushed.
    """

    def __init__(self, texts: Sequence[str] = (), shows: bool = False) -> None:
        self._texts, self._shows = tuple(texts), shows
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Adds some text, and returns what is now safe to show."""
        assert self.found is None
        self._held += text
        ends = [(at + len(text), at, text) for text in self._texts if (at := self._held.find(text)) >= 0]
        if ends:
            end, begin, self.found = min(ends)
            safe, self._held = self._held[: end if self._shows else begin], ""
            return safe
        return self._take(len(self._held) - self._started())

    def flush(self) -> str:
        """Returns what was held back, when nothing follows."""
        return self._take(len(self._held))

    def _started(self) -> int:
        """Returns the length of the longest end of the held text that begins a stop text."""
        longest = max(map(len, self._texts), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._texts):
                return length
        return 0

    def _take(self, length: int) -> str:
        safe, self._held = self._held[:length], self._held[length:]
        return safe


class Detokenizer:
    """The text of one request.

    Args:
        tokenizer: decodes tokens.
        stop: texts that end the request.
        context: tokens before the first one (the prompt): the first space depends on them. Never part of the text.
        skip_special: whether special tokens have no text.
        shows_stop: whether the text that ends the request is part of its own.
        hidden: tokens that have no text.
        content: finds stop texts, in place of `stop`; None: they count anywhere.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        context: Sequence[int] | NDArray[np.int32] = (),
        skip_special: bool = True,
        shows_stop: bool = False,
        hidden: Collection[int] = (),
        content: Content | None = None,
    ) -> None:
        self._tokenizer, self._skip_special, self._hidden = tokenizer, skip_special, hidden
        self._stops, self._content = Stops(stop if content is None else (), shows_stop), content
        self._window = [int(token) for token in context[-_CONTEXT_TOKENS:]]
        self._read = len(self._window)
        self._text = self._decode(self._window)
        self._emitted = len(self._text.rstrip(_REPLACEMENT))

    @property
    def stop(self) -> str | None:
        """The stop text that is complete; None: none is."""
        return self._stops.found if self._content is None else self._content.stop

    @property
    def whole(self) -> bool:
        """Whether the text of the tokens so far ends with a character, of which no token that follows is a part."""
        return self._emitted == len(self._text)

    def push(self, token: int) -> str:
        """Adds a token, and returns the text that is now safe to show; sets `stop` when a stop text is complete."""
        assert self.stop is None
        self._window.append(token)
        return self._add(self._whole_text())

    def flush(self, cut: bool = False) -> str:
        """Returns all text held back, when no token follows. An incomplete character is a replacement character.

        Args:
            cut: whether the request has ended at its limit.
        """
        if self.stop is not None:
            return ""
        rest = ""
        if len(self._window) > self._read:
            rest = self._text[self._emitted :]
            self._slide()
        rest = self._add(rest)
        if self._content is not None and self.stop is None:
            self._content.close(cut)
        return rest if self.stop is not None else rest + self._stops.flush()

    def _add(self, text: str) -> str:
        if self._content is None:
            return self._stops.push(text)
        self._content.feed(text)
        return text

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

    def _decode(self, tokens: list[int]) -> str:
        # Cleaning up spaces would change text before a token, which may have been shown already.
        text = self._tokenizer.decode(
            [token for token in tokens if token not in self._hidden],
            skip_special_tokens=self._skip_special,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of a tokenizer's special tokens, by their texts."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(each): token for token, each in added.items() if each.special}


def hiding(params: SamplingParams, special: Mapping[str, int]) -> tuple[bool, Collection[int]]:
    """Returns whether special tokens have no text, and which tokens have none besides.

    A special token that a stop text names keeps its text, whatever the request says of special tokens: else it would
    never stop.

    Args:
        params: of the request.
        special: see `special_tokens`.
    """
    named = {token for text, token in special.items() if any(text in stop for stop in params.stop)}
    if not named:
        return params.skip_special_tokens, params.hidden_tokens
    hidden = params.hidden_tokens.union(special.values() if params.skip_special_tokens else ())
    return False, hidden - named
