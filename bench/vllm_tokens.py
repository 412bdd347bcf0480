"""vLLM, asked for the tokens of prompts that another server has answered, with the answers that it gave.

vLLM cannot be told what to say, and its own answers would be in no history. So each prompt is asked for one token,
which counts; then prompt and answer together, which does not count: that leaves what decoding the answer would have
left. It is a little more, since the last token of an answer is decoded without being computed. The model is a tiny one
with random weights: which tokens are computed does not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from bench.agent_traffic import Step
from bench.client import ServerFailed
from bench.hosted import SYSTEMS, Hosted
from bench.saying import tokenizer
from bench.tiny_models import tiny

Spoken = tuple[NDArray[np.int32], Sequence[int]]
"""The tokens of a prompt, and those of its answer."""
_VLLM = next(system for system in SYSTEMS if system.name == "vLLM")
_BLOCK = 32  # tokens; the least that vLLM's attention on a CPU takes
_LIMIT_S = 600.0


def version() -> str | None:
    """Returns the version of vLLM, or None if it is not installed."""
    return _VLLM.version()


class Repeated:
    """A server that is sent what another one was sent.

    Args:
        url: of the server, without a path.
        spoken: the prompts and answers of the other one, in the order in which steps are asked.
    """

    ahead = 0

    def __init__(self, url: str, spoken: Iterable[Spoken]) -> None:
        self._url, self._spoken = url, iter(spoken)

    def ask(self, step: Step) -> tuple[Mapping[str, Any], NDArray[np.int32], Sequence[int]]:
        """Sends the next prompt, whatever the step; returns its usage, its tokens, and those of its answer.

        Raises:
            ServerFailed: the server refused it.
        """
        prompt, said = next(self._spoken)
        usage = self._computed(prompt.tolist())
        self._computed([*prompt.tolist(), *said])
        return usage, prompt, said

    def _computed(self, tokens: Sequence[int]) -> Mapping[str, Any]:
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 1, "temperature": 0}
        reply = httpx.post(f"{self._url}/v1/completions", json=body, timeout=_LIMIT_S)
        if reply.status_code != 200:
            raise ServerFailed(f"status {reply.status_code}: {reply.text[:300]}")
        usage: dict[str, Any] = reply.json()["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return {**usage, "prompt_tokens_details": {"cached_tokens": details.get("cached_tokens") or 0}}


@contextmanager
def repeating(spoken: Iterable[Spoken], tokens: int, context: int) -> Iterator[Repeated]:
    """Runs vLLM.

    Args:
        spoken: see `Repeated`.
        tokens: that its cache has room for.
        context: tokens of a request at most.
    """
    with TemporaryDirectory() as folder:
        words, model = tokenizer(), Path(folder) / "tiny"
        shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
        tiny(
            "llama", vocab_size=len(words), num_key_value_heads=1, max_position_embeddings=context, **shape, **ends
        ).save_pretrained(model)
        words.save_pretrained(model)
        blocks = tokens // _BLOCK
        sizes = f"--block-size {_BLOCK} --num-gpu-blocks-override {blocks}"
        most = f"--max-model-len {min(context, (blocks - 1) * _BLOCK)}"  # one block is nobody's
        system = replace(_VLLM, command=f"{_VLLM.command} --enable-prompt-tokens-details {sizes} {most}")
        with Hosted(system, model, Path(folder) / "log", stopped=False) as server:
            yield Repeated(server.url, spoken)
