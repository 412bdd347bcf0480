"""The same prompt gives the same tokens, whatever the engine does: cold, warm, in chunks, in any batch, preempted.

Greedy tokens and logprobs are compared with plain transformers, computed without a cache of any kind. Bound: float32,
and natural logprobs within 1e-3.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence

import pytest
from rigs.greedy import Greedy, ask, family_of_prompts, pair_of, plain, same
from rigs.slow import slow_but

from bench.tiny_models import FAMILIES, VOCAB
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel
from mainstem.settings.engine import EngineConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gpt2")

pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def tiny_pair(family: str) -> tuple[LoadedModel, Callable[[Sequence[int], int], Greedy]]:
    return pair_of(family, FAMILIES[family])


@pytest.mark.parametrize("family", slow_but(ARCHITECTURES, "llama", "gpt2"))
@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(pages=100, page_size=16),
        EngineConfig(pages=200, page_size=8, token_budget=7),
        EngineConfig(pages=500, page_size=1, token_budget=40),
        EngineConfig(pages=100, page_size=16, cache=False),
        EngineConfig(pages=17, page_size=5, token_budget=16),  # too few for all at once: some are preempted
    ],
    ids=["whole", "chunks", "page 1", "no cache", "few pages"],
)
def test_cold_warm_chunked_and_batched_give_the_same_tokens(family: str, config: EngineConfig) -> None:
    model, greedy = tiny_pair(family)
    prompts = family_of_prompts(VOCAB, 43, [1, 6, 20, 9])
    with Engine(model, config) as engine:
        for prompt in prompts:  # one by one: the first is cold, the others are warm
            (alone,) = ask(engine, [prompt], 8)
            same(alone, greedy(prompt, 8))
        assert (alone.usage.cached_tokens > 0) == config.cache
        for completion, prompt in zip(ask(engine, prompts, 8), prompts, strict=True):  # all together, warm
            same(completion, greedy(prompt, 8))
        engine.flush()
        for completion, prompt in zip(ask(engine, prompts, 8), prompts, strict=True):  # all together, cold
            same(completion, greedy(prompt, 8))


@pytest.mark.parametrize("family", slow_but(ARCHITECTURES, "llama", "gpt2"))
def test_drafts_change_neither_tokens_nor_logprobs(family: str) -> None:
    model, greedy = tiny_pair(family)
    (prompt,) = family_of_prompts(VOCAB, 20, [1])
    with Engine(model, EngineConfig(pages=100, page_size=8, draft_tokens=7)) as engine:
        for _ in range(2):  # the second time, the tree knows the answer
            (completion,) = ask(engine, [prompt], 24)
            same(completion, greedy(prompt, 24))
        assert engine.stats().totals.accepted_tokens >= 15


@pytest.mark.slow
@pytest.mark.model
def test_the_real_model_gives_the_same_tokens(smollm2: LoadedModel) -> None:
    greedy = plain(copy.deepcopy(smollm2.model))
    text = "The harbour of Kelder Point was dug by salt traders, and its lighthouse is forty-one metres tall. " * 4
    shared = smollm2.tokenizer.encode(text)
    prompts = [shared + smollm2.tokenizer.encode(q) for q in ("How tall is the lighthouse?", "Who dug it?", "It")]
    expected = [greedy(prompt, 6) for prompt in prompts]
    with Engine(smollm2, EngineConfig(pages=64, page_size=16, token_budget=33)) as engine:
        for completion, wanted in zip(ask(engine, prompts, 6), expected, strict=True):
            same(completion, wanted)
        for prompt, wanted in zip(prompts, expected, strict=True):
            (warm,) = ask(engine, [prompt], 6)
            assert warm.usage.cached_tokens >= len(prompt) - 1 - 16
            same(warm, wanted)
