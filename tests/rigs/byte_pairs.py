"""A small fast tokenizer over bytes, with tokens of one byte and of several, as real models have them."""

from __future__ import annotations

import functools
from typing import Any

_TEXTS = [
    '{"name": "value", "count": 12}',
    "[true, false, null]",
    '"},\n  {"',
    "abab cdcd ab cd",
    "über ête",
    "yes no maybe",
]
_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@functools.cache
def byte_pairs() -> Any:
    """Returns the tokenizer, with the special tokens `<eos>` and `<user>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=alphabet,
        special_tokens=["<eos>", "<user>"],
    )
    made.train_from_iterator(_TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", chat_template=_TEMPLATE)


def bytes_of(token: int) -> bytes:
    """Returns the bytes of a token; none of a special one."""
    tokenizer = byte_pairs()
    if token in tokenizer.all_special_ids:
        return b""
    return bytes(_byte_of(letter) for letter in tokenizer.convert_ids_to_tokens(token))


@functools.cache
def _bytes_by_letter() -> dict[str, int]:
    """The letters that stand for bytes in vocabularies like GPT-2's: what is printable for itself, others after."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + at): byte for at, byte in enumerate(others)}}


def _byte_of(letter: str) -> int:
    return _bytes_by_letter()[letter]
