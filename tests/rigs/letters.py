"""A tokenizer for models with random weights, whose tokens mean nothing."""

from __future__ import annotations

from collections.abc import Sequence


class Letters:
    """One letter for each token of any vocabulary. It only decodes.

    Args:
        eos_token_id: the token that ends an answer; None: no token does.
    """

    def __init__(self, eos_token_id: int | None = None) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **options: object) -> str:
        return "".join(chr(0x4E00 + token) for token in token_ids)

    def get_vocab(self) -> dict[str, int]:
        return {}
