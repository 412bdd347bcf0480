"""A server whose model says what it is told, without computing anything: the cache, the scheduler and the API are real.

Counts of prompts depend on their tokens and not on numbers, so sessions of any length take seconds. The
tokenizer is trained on the texts of `agent_traffic`, which have about a token for each word then.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from starlette.testclient import TestClient
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.agent_traffic import Sizes, Step, steps, written
from bench.client import ServerFailed
from bench.tiny_models import loaded, tiny
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.request import Request
from mainstem.runtime.segments import Segment
from mainstem.runtime.stream import Stream
from mainstem.server.app import create_app
from mainstem.settings.engine import EngineConfig
from mainstem.settings.server import ServerConfig

_SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")
_VOCAB = 2048
TEMPLATE = (
    "{{ '<|begin|>system\n' + messages[0].content }}{% if tools %}{{ '\n<tools>\n' }}{% for tool in tools %}"
    "{{ (tool | tojson) + '\n' }}{% endfor %}{{ '</tools>' }}{% endif %}{{ '<|end|>\n' }}"
    "{% for m in messages[1:] %}{{ '<|begin|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
"""System prompt and tools first, then one turn after another: nothing in it depends on what comes later."""


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of pairs of bytes, in which digits are tokens of their own."""
    made = Tokenizer(models.BPE())
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    made.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB, min_frequency=2, show_progress=False, initial_alphabet=alphabet, special_tokens=special
    )
    sizes, edits = Sizes(sessions=2, turns=12, turns_spread=0.1, tools=12, tool=200), ("time", "attribution", "id")
    texts = [json.dumps(step.body, ensure_ascii=False) + written(step.answer) for step in steps(sizes, -1, edits)]
    made.train_from_iterator([text.replace("\\n", "\n").replace('\\"', '"') for text in texts], trainer)
    words = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, bos_token=None, eos_token=_SPECIAL[1], pad_token=_SPECIAL[2], chat_template=TEMPLATE
    )
    words.add_tokens(["<think>", "</think>"])  # by which the server knows thoughts
    return words


class Speaker(ModelRunner):
    """Computes nothing, and says what it is told. One request at a time.

    Args:
        arguments: of `ModelRunner`.

    Attributes:
        computed: tokens that it was asked to compute since the start.
        prompt: tokens of the request that it answers.
        answer: what it says to that.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.computed = 0
        self.prompt: NDArray[np.int32] = np.empty(0, np.int32)
        self.answer: Sequence[int] = ()

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Returns logits of which the next token of the answer has the highest."""
        self.computed += sum(len(segment.tokens) for segment in segments)
        ends = [end for s in segments for end in range(s.end - s.logits + 1, s.end + 1)]
        rows = torch.zeros(len(ends), self.vocab_size)
        for row, end in zip(rows, ends, strict=True):
            at = end - len(self.prompt)
            row[self.answer[at] if 0 <= at < len(self.answer) else 0] = 1.0
        return rows


class _Heard(Engine):
    """Tells the model which prompt it answers."""

    def submit(self, request: Request, **given: Any) -> Stream:
        if request.params.max_tokens != 0:  # what is computed ahead has no answer
            speaker = self._core.model
            assert isinstance(speaker, Speaker)
            speaker.prompt = request.tokens
        return super().submit(request, **given)


class Server:
    """A server in this process, which is asked one step after another.

    Args:
        engine, speaker, http: of the server.
        computes_ahead: whether it computes next turns.

    Attributes:
        ahead: tokens that it computed for next turns.
    """

    def __init__(self, engine: Engine, speaker: Speaker, http: TestClient, computes_ahead: bool) -> None:
        self._engine, self._speaker, self._http, self._computes_ahead = engine, speaker, http, computes_ahead
        self._asked = 0
        self.ahead = 0

    def ask(self, step: Step) -> tuple[dict[str, Any], NDArray[np.int32], list[int]]:
        """Sends a step; returns its usage, the tokens of its prompt, and those of its answer.

        Raises:
            ServerFailed: it was not answered as the model was told to.
        """
        said = tokenizer().encode(written(step.answer), add_special_tokens=False)
        self._speaker.answer = [*said, tokenizer().eos_token_id]
        body = {"model": self._engine.name, "max_tokens": len(said) + 2, **step.body}
        reply = self._http.post("/v1/chat/completions", json=body)
        if reply.status_code != 200:
            raise ServerFailed(f"status {reply.status_code}: {reply.text[:300]}")
        usage: dict[str, Any] = reply.json()["usage"]
        if usage["completion_tokens"] not in (len(said), len(said) + 1):
            raise ServerFailed(f"an answer of {usage['completion_tokens']} tokens, not {len(said)}")
        self._asked += 1
        prompt = self._speaker.prompt
        if self._computes_ahead:
            before = self._speaker.computed
            self._settle()
            self.ahead += self._speaker.computed - before
        return usage, prompt, said

    def _settle(self) -> None:
        """Waits until what is computed ahead is there."""
        while True:
            text = self._http.get("/metrics").text
            lines = [line for line in text.splitlines() if line.startswith("mainstem_precomputed_turns_total{")]
            stats = self._engine.stats()
            known = sum(float(line.rpartition(" ")[2]) for line in lines if "used" not in line) >= self._asked
            if known and not stats.running and not stats.waiting:
                return
            time.sleep(0.002)


@contextmanager
def serving(config: ServerConfig, cache: EngineConfig, context: int) -> Iterator[Server]:
    """Runs a server.

    Args:
        config: of the server.
        cache: of its engine.
        context: tokens of a request at most.
    """
    words = tokenizer()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = tiny("llama", vocab_size=len(words), num_key_value_heads=1, max_position_embeddings=context, **sizes)
    made: list[Speaker] = []

    def speaker(*arguments: Any) -> Speaker:
        made.append(Speaker(*arguments))
        return made[0]

    with (
        _Heard(replace(loaded(model), tokenizer=words), cache, runner=speaker) as engine,
        TestClient(create_app(engine, config)) as http,
    ):
        yield Server(engine, made[0], http, config.precompute_turns > 0)
