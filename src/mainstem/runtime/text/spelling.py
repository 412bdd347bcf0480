"""The text of single tokens, and their bytes: a token that is a part of a character has no text of its own.

A byte-level vocabulary, as GPT-2's, writes each byte as a letter; others have tokens such as `<0xE2>` for bytes that no
other token has.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

_REPLACEMENT = "\ufffd"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Spelled(NamedTuple):
    """One token.

    Args:
        text: a part of a character shows as U+FFFD.
        bytes: of UTF-8, which those of its neighbours may complete; None: the vocabulary does not say.
    """

    text: str
    bytes: bytes | None


def spelled(tokenizer: Any, token: int) -> Spelled:
    """Returns how a token is spelled."""
    text = str(tokenizer.decode([token]))
    if _REPLACEMENT not in text:
        return Spelled(text, text.encode())
    piece = getattr(tokenizer, "convert_ids_to_tokens", lambda token: None)(token)
    made = _bytes_of(piece) if isinstance(piece, str) else None
    known = made is not None and made.decode(errors="replace") == text
    return Spelled(text, made if known else None)


def _bytes_of(piece: str) -> bytes | None:
    """Returns the bytes that a piece of a vocabulary stands for, if it has the form of some."""
    if found := _BYTE.fullmatch(piece):
        return bytes.fromhex(found[1])
    letters = _bytes_by_letter()
    return bytes(letters[letter] for letter in piece) if all(letter in letters for letter in piece) else None


@functools.cache
def _bytes_by_letter() -> dict[str, int]:
    """The letters of byte-level vocabularies: printable bytes stand for themselves, the others come after 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
