import random

import pytest
from rigs.templates import byte_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mainstem.runtime.text.detokenizer import Detokenizer, hiding, special_tokens
from mainstem.settings.engine import SamplingParams

TEXT = "Grüße, 世界! Здравствуй 👩‍👩‍👧 naïve  two spaces\n\ttab — “quotes” 🇩🇪 e\u0301 \ufffd end "


def _byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every token is a run of bytes, which may end anywhere in a character or span two characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    as_letters = dict(zip(range(256), _byte_letters(), strict=True))
    crossing = [as_letters[0x96] + as_letters[0x88], as_letters[0x88] + as_letters[0xE2], "he", "ll", "hell"]
    vocab = {letter: i for i, letter in enumerate([*letters, *crossing])}
    merges = [(crossing[0][0], crossing[0][1]), (crossing[1][0], crossing[1][1]), ("h", "e"), ("l", "l"), ("he", "ll")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    return tokenizer


def _byte_letters() -> list[str]:
    backend = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    printable = {ord(c): c for c in backend.alphabet() if ord(c) < 256}
    spare = iter(range(256, 512))
    return [printable.get(byte) or chr(next(spare)) for byte in range(256)]


def _sentence_piece() -> PreTrainedTokenizerFast:
    """Words with a leading mark for a space; unknown characters as byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁world", "hel", "lo", "▁a", *"abcdefghijklmnopqrstuvwxyz.,!\n"]
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def _bytes_as_pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids = []
    for character in text:
        piece = "▁" if character == " " else character
        known = tokenizer.get_vocab().get(piece)
        ids += [known] if known is not None else [3 + byte for byte in character.encode()]
    return ids


BYTE_LEVEL = _byte_level()
SENTENCE_PIECE = _sentence_piece()


def _pieces(
    tokenizer: PreTrainedTokenizerFast, tokens: list[int], stop: tuple[str, ...] = ()
) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = []
    for token in tokens:
        pieces.append(detokenizer.push(token))
        if detokenizer.stop is not None:
            break
    return [*pieces, detokenizer.flush()], detokenizer.stop


@pytest.mark.parametrize("name", ["byte level", "sentence piece"])
def test_the_pieces_are_the_tokenizers_own_text_and_never_half_a_character(name: str) -> None:
    tokenizer, tokens = {
        "byte level": (BYTE_LEVEL, BYTE_LEVEL.encode(TEXT)),
        "sentence piece": (SENTENCE_PIECE, _bytes_as_pieces(SENTENCE_PIECE, TEXT)),
    }[name]
    pieces, _ = _pieces(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens) == TEXT
    assert "\ufffd" not in "".join(pieces).replace("\ufffd end", "")
    assert max(map(len, pieces)) <= 4


def test_characters_split_across_tokens_are_shown_once_they_are_complete() -> None:
    text = "█" * 40
    tokens = BYTE_LEVEL.encode(text)
    assert len(tokens) < 3 * 40
    pieces, _ = _pieces(BYTE_LEVEL, tokens)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 2


def test_spaces_before_words_are_kept_inside_and_after_the_context() -> None:
    ids = SENTENCE_PIECE.convert_tokens_to_ids(["▁hello", "▁world", "</s>", "▁hello", "▁", "▁a"])
    pieces, _ = _pieces(SENTENCE_PIECE, ids)
    assert "".join(pieces) == "hello world hello  a"
    after = Detokenizer(SENTENCE_PIECE, context=ids[:1])
    assert after.push(ids[1]) == " world"


def test_special_tokens_read_as_nothing_however_many_there_are() -> None:
    eos = BYTE_LEVEL.eos_token_id
    tokens = [eos] * 30 + BYTE_LEVEL.encode("hello ") + [eos] * 30 + BYTE_LEVEL.encode("é!") + [eos]
    pieces, _ = _pieces(BYTE_LEVEL, tokens)
    assert "".join(pieces) == "hello é!"


def test_hidden_tokens_read_as_nothing_and_other_special_ones_as_they_are_spelled() -> None:
    tokenizer = byte_tokenizer("chatml", ["<call>", "<other>"])
    call, other = (tokenizer.convert_tokens_to_ids(text) for text in ("<call>", "<other>"))
    letters = tokenizer.encode("né")
    detokenizer = Detokenizer(tokenizer, context=[other, call], skip_special=False, hidden=frozenset([other, 0]))
    tokens = [other, *letters[:1], other, 0, *letters[1:2], other, *letters[2:], call, other, other, other]
    shown = [detokenizer.push(token) for token in tokens]
    assert "".join(shown) + detokenizer.flush() == "né<call>"
    assert shown[-4] == "<call>", "at once"


def test_bytes_that_never_become_a_character_are_shown_at_last() -> None:
    broken = [_token_of_byte(0xFF)] * 50
    pieces, _ = _pieces(BYTE_LEVEL, [*BYTE_LEVEL.encode("hi"), *broken, *BYTE_LEVEL.encode("there")])
    assert "".join(pieces) == "hi" + "\ufffd" * 50 + "there"
    assert any("\ufffd" in piece for piece in pieces[:30])


def test_half_a_character_at_the_end_is_shown_by_flush() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert detokenizer.push(_token_of_byte(0xF0)) == detokenizer.push(_token_of_byte(0x9F)) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_the_context_is_never_part_of_the_text() -> None:
    half = [*BYTE_LEVEL.encode("prompt "), _token_of_byte(0xC3)]
    assert Detokenizer(BYTE_LEVEL, context=half).flush() == ""
    detokenizer = Detokenizer(BYTE_LEVEL, context=half)
    assert detokenizer.push(_token_of_byte(0xA9)) + detokenizer.flush() == "é"


@pytest.mark.parametrize(
    ("text", "stop", "expected", "ended_by"),
    [
        ("hello world", ("wor",), "hello ", "wor"),
        ("hello world", ("xyz",), "hello world", None),
        ("hello wo", ("world",), "hello wo", None),
        ("aab", ("ab",), "a", "ab"),
        ("ababac", ("abac",), "ab", "abac"),
        ("abc", ("abc", "b"), "a", "b"),
        ("abc", ("bc", "abc"), "", "abc"),
        ("STOP", ("STOP",), "", "STOP"),
        ("Grüße", ("ü",), "Gr", "ü"),
        ("a 👩‍👩‍👧 b", ("👧",), "a 👩‍👩‍", "👧"),
        ("line\n\nnext", ("\n\n",), "line", "\n\n"),
    ],
)
def test_text_ends_before_the_stop_string(
    text: str, stop: tuple[str, ...], expected: str, ended_by: str | None
) -> None:
    pieces, found = _pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text), stop)
    assert "".join(pieces) == expected
    assert found == ended_by


SPECIAL = {"<call>": 300, "<end>": 301, "<other>": 302}


@pytest.mark.parametrize(
    ("stop", "skips", "hidden", "expected"),
    [
        ((), True, frozenset(), (True, frozenset())),
        (("x", "en"), True, frozenset([7]), (True, frozenset([7]))),
        (("<end>",), True, frozenset(), (False, {300, 302})),
        (("a<end>b<call>", "c"), True, frozenset([7]), (False, {302, 7})),
        (("<end>",), False, frozenset([301, 302]), (False, {302})),
    ],
)
def test_special_tokens_that_a_stop_text_names_have_their_text(
    stop: tuple[str, ...], skips: bool, hidden: frozenset[int], expected: tuple[bool, set[int]]
) -> None:
    assert hiding(SamplingParams(stop=stop, skip_special_tokens=skips, hidden_tokens=hidden), SPECIAL) == expected


def test_a_stop_text_of_special_tokens_is_found_in_what_they_are_spelled() -> None:
    tokenizer = byte_tokenizer("chatml", ["<call>", "<other>"])
    special = special_tokens(tokenizer)
    assert special.keys() >= {"<call>", "<other>", "<s>"}
    tokens = tokenizer.encode("a<other>b<call> c", add_special_tokens=False)
    for stop, shown in (("<call>", "ab"), ("b<call> c", "a"), ("<call>c", "ab<call> c")):
        skips, hidden = hiding(SamplingParams(stop=(stop,)), special)
        made = Detokenizer(tokenizer, (stop,), skip_special=skips, hidden=hidden)
        text = ""
        for token in tokens:
            text += made.push(token) if made.stop is None else ""
        assert (text + made.flush(), made.stop) == (shown, stop if "c" not in shown else None)


def test_what_may_start_a_stop_string_is_held_and_nothing_else() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, ("END",))
    shown = [detokenizer.push(token) for token in BYTE_LEVEL.encode("xENEN!")]
    assert shown == ["x", "", "", "EN", "", "EN!"]


def test_the_text_does_not_depend_on_how_it_is_cut_into_tokens() -> None:
    rng = random.Random(8)
    for _ in range(300):
        text = "".join(rng.choice("hel█é ") for _ in range(rng.randint(1, 14)))
        stop = tuple("".join(rng.choice("hel█") for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 3)))
        merged, cut = BYTE_LEVEL.encode(text), [_token_of_byte(byte) for byte in text.encode()]
        one, one_stopped = _pieces(BYTE_LEVEL, merged, stop)
        other, other_stopped = _pieces(BYTE_LEVEL, cut, stop)
        assert ("".join(one), one_stopped) == ("".join(other), other_stopped)
        assert all(s not in "".join(one) for s in stop)
        assert text.startswith("".join(one))


def _token_of_byte(byte: int) -> int:
    return BYTE_LEVEL.convert_tokens_to_ids(_byte_letters()[byte])


def test_of_two_stop_strings_in_one_token_the_one_that_is_whole_first_counts() -> None:
    vocab = BYTE_LEVEL.get_vocab()
    for tokens in ([vocab["hell"]], [vocab["he"], vocab["ll"]], [vocab[letter] for letter in "hel"]):
        pieces, ended_by = _pieces(BYTE_LEVEL, tokens, ("hell", "el"))
        assert ("".join(pieces), ended_by) == ("h", "el")
