"""Ten chat templates with the structure of well-known families, each with a small tokenizer of its kind.

The templates say in which order turns, roles and special tokens are written, and what is trimmed or dropped. The
tokenizers are trained here: pairs of bytes with two ways to divide a text, and pieces with a mark in place of blanks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_VOCAB = 900

THOUGHT = ("<think>", "</think>")
"""Tokens around what a model thinks. They are shown, as those of other text."""


@dataclass(frozen=True)
class Family:
    """A family of chat models.

    Args:
        template: the chat template.
        special: its special tokens; the first begins a text, the last ends an answer.
        kind: of the tokenizer: "gpt2", "llama3" or "pieces".
        thinks: whether it drops from earlier answers what was thought: all up to `</think>`, which is a token.
        blank: whether an answer begins with a blank, which the template writes by itself.
    """

    template: str
    special: tuple[str, ...]
    kind: str
    thinks: bool = False
    blank: bool = False


FAMILIES = {
    # What was thought before the last question is dropped, and so is an empty thought.
    "qwen": Family(
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set text = m['content'] %}"
        "{% if m['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in text %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{% endif %}",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "gpt2",
        thinks=True,
    ),
    "llama3": Family(
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' ~ m['role'] ~ '<|end_header_id|>\n\n' }}"
        "{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "llama3",
    ),
    # The system message is a part of the first question, and there is nothing that begins an answer.
    "mistral": Family(
        "{{ bos_token }}{% set ns = namespace(before='') %}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{% set ns.before = m['content'] + '\n\n' %}"
        "{% elif m['role'] == 'user' %}{{ '[INST]' + ns.before + m['content'] + '[/INST]' }}{% set ns.before = '' %}"
        "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}",
        ("<s>", "[INST]", "[/INST]", "</s>"),
        "llama3",
    ),
    "gemma": Family(
        "{{ bos_token }}{% for m in messages %}{% set who = 'model' if m['role'] == 'assistant' else m['role'] %}"
        "{{ '<start_of_turn>' + who + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        "pieces",
    ),
    "phi": Family(
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "gpt2",
    ),
    # Roles are plain text.
    "zephyr": Family(
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("<s>", "</s>"),
        "pieces",
    ),
    # The prompt itself begins to think, and no earlier answer keeps what it thought.
    "deepseek": Family(
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}"
        "{% elif m['role'] == 'assistant' %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + eos_token }}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|Assistant|>' }}"
        "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\n' }}{% endif %}{% endif %}",
        ("<|begin|>", "<|User|>", "<|Assistant|>", "<|end|>"),
        "llama3",
        thinks=True,
    ),
    # It writes a system message of its own if there is none.
    "granite": Family(
        "{% if messages[0]['role'] != 'system' %}{{ '<|start_of_role|>system<|end_of_role|>Be helpful.' }}"
        "{{ eos_token + '\n' }}{% endif %}{% for m in messages %}"
        "{{ '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        "gpt2",
    ),
    "command": Family(
        "{{ bos_token }}{% for m in messages %}{{ '<|START_TURN|>' }}{% if m['role'] == 'user' %}{{ '<|USER|>' }}"
        "{% elif m['role'] == 'system' %}{{ '<|SYSTEM|>' }}{% else %}{{ '<|CHATBOT|>' }}{% endif %}"
        "{{ m['content'].strip() + '<|END_TURN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_TURN|><|CHATBOT|>' }}{% endif %}",
        ("<BOS>", "<|START_TURN|>", "<|USER|>", "<|SYSTEM|>", "<|CHATBOT|>", "<|END_TURN|>"),
        "gpt2",
    ),
    # There are no special tokens at all.
    "falcon": Family(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
        "{% elif m['role'] == 'user' %}{{ 'User: ' + m['content'] }}"
        "{% else %}{{ 'Falcon: ' + m['content'].strip() }}{% endif %}"
        "{% if not loop.last or add_generation_prompt %}{{ '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Falcon:' }}{% endif %}",
        ("<|endoftext|>",),
        "llama3",
        blank=True,
    ),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a family, with its chat template. Every call returns the same one."""
    family = FAMILIES[name]
    text = _text()
    made = _pieces() if family.kind == "pieces" else _bytes(family.kind)
    alphabet = [] if family.kind == "pieces" else pre_tokenizers.ByteLevel.alphabet()
    extra = [f"<0x{byte:02X}>" for byte in range(256)] if family.kind == "pieces" else []
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB, special_tokens=[*family.special, *extra], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(text.splitlines(keepends=True), trainer)
    if family.thinks:
        made.add_tokens([AddedToken(text, normalized=False) for text in THOUGHT])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=family.special[0], eos_token=family.special[-1]
    )
    tokenizer.chat_template = family.template
    return tokenizer


def _text() -> str:
    """Makes the text that trains tokenizers: sentences of made-up words, frequent ones short, and other scripts."""
    draw = random.Random(0)
    parts = ("ba", "con", "de", "er", "fi", "gra", "in", "ka", "lo", "men", "no", "pre", "re", "st", "tion", "un", "wi")
    words = ["".join(draw.choices(parts, k=1 + at // 60)) for at in range(300)]
    lines = []
    for number in range(1200):
        chosen = [words[int(300 * draw.random() ** 2)] for _ in range(draw.randint(3, 12))]
        shape = draw.choice(("{}.", "{}, {}!", "- {}: `{}`", "## {}", "{} = {}({})", "| {} | {} |", '"{}" {}?'))
        rest = chosen[1:]
        fields = [str(draw.choice((draw.choice(words), number, draw.choice(words).upper()))) for _ in range(2)]
        lines.append(shape.format(" ".join([chosen[0].capitalize(), *rest]), *fields))
    return "\n".join([*lines, *["".join(map(chr, range(32, 127))), "äöü éèà 你好 😀 naïve façade"] * 4, ""])


def _bytes(kind: str) -> Tokenizer:
    """A tokenizer of bytes, as GPT-2 or as Llama 3 divides a text; the latter joins dots and ends of lines."""
    made = Tokenizer(models.BPE())
    if kind == "gpt2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        parts = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(parts), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    made.decoder = decoders.ByteLevel()
    return made


def _pieces() -> Tokenizer:
    """A tokenizer of pieces: blanks are a mark in the text, and unknown characters are bytes."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token=None, fuse_unk=False))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|▁*[^▁\n]+|▁+"), "isolated")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def unusual(tokenizer: PreTrainedTokenizerFast, count: int, seed: int, blank: bool = False) -> list[int]:
    """Returns tokens of a text that the tokenizer would tokenise otherwise: whole characters, trimmed on both sides.

    Args:
        tokenizer: of a family.
        count: tokens.
        seed: of their choice.
        blank: whether the first begins with a blank.
    """
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer)) if token not in special}
    whole = [token for token, text in texts.items() if text and "\ufffd" not in text and "<0x" not in text]
    bare = [token for token in whole if texts[token].strip() == texts[token]]
    begun = [token for token in whole if texts[token].startswith(" ") and texts[token].strip()] if blank else bare
    draw = random.Random(seed)
    while True:
        tokens = [draw.choice(begun), *draw.choices(whole, k=count - 2), draw.choice(bare)]
        if tokenizer.encode(tokenizer.decode(tokens), add_special_tokens=False) != tokens:
            return tokens


def spelled(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[int]:
    """Returns the texts of special tokens by tokens of which none is special."""
    pieces = [piece for text in texts for piece in (text[:2], text[2:])]
    tokens = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    assert not {*tokens} & {*tokenizer.all_special_ids}
    return tokens


def reply(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> dict[str, Any]:
    """Returns the message that a client sends back."""
    return {"role": "assistant", "content": tokenizer.decode(list(tokens), skip_special_tokens=True)}
