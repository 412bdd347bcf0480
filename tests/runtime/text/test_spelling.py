"""Single tokens: their text, and their bytes, also where these are a part of a character."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mainstem.runtime.text.spelling import Spelled, spelled
from tests.runtime.text.test_text import BYTE_LEVEL, SENTENCE_PIECE, TEXT


@pytest.mark.parametrize("text", [TEXT, "".join(map(chr, range(0x20, 0x800))), "\U0001f469\u200d\U0001f467"])
def test_the_bytes_of_byte_level_tokens_are_those_of_their_text(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text)
    found = [spelled(BYTE_LEVEL, token) for token in tokens]
    assert b"".join(each.bytes or b"?" for each in found) == text.encode()
    assert any("\ufffd" in each.text for each in found), "some of them are parts of characters"


def test_bytes_that_have_tokens_of_their_own() -> None:
    vocabulary = SENTENCE_PIECE.get_vocab()
    for byte in range(256):
        text = bytes([byte]).decode(errors="replace").removeprefix(" ")  # the decoder strips a blank at the begin
        made = spelled(SENTENCE_PIECE, vocabulary[f"<0x{byte:02X}>"])
        assert made == Spelled(text, bytes([byte]) if text else b"")
    assert spelled(SENTENCE_PIECE, vocabulary["hel"]) == ("hel", b"hel")


@pytest.mark.parametrize("piece", [None, "é", "ab", "<0xZZ>", 7])
def test_bytes_that_the_vocabulary_does_not_say_are_unknown(piece: Any) -> None:
    tokenizer = SimpleNamespace(decode=lambda tokens: "\ufffd", convert_ids_to_tokens=lambda token: piece)
    assert spelled(tokenizer, 1) == ("\ufffd", b"\xe9" if piece == "é" else None)
