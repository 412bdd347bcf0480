"""What a model takes that only takes time: the benchmarks in virtual time move their clocks by it."""

from __future__ import annotations


def prefill_s(tokens: float, context: float, token_s: float, doubled_at: int) -> float:
    """Returns the seconds that computing takes.

    Args:
        tokens: computed.
        context: tokens before them.
        token_s: seconds that a token takes at the beginning of a prompt.
        doubled_at: position at which it takes twice as long.
    """
    return token_s * tokens * (1 + (context + tokens / 2) / doubled_at)
