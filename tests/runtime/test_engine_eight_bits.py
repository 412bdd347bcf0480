"""An engine with keys and values in 8 bits answers the same whether a prompt is computed, on the device, the host or in
storage.

The answers are those of plain transformers with a cache that rounds what it keeps in the same way, computed anew for
each token. Where a number lies between two steps, the order of a sum may decide, so logprobs are compared roughly.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.greedy import Greedy, ask, family_of_prompts, pair_of
from rigs.letters import Letters

from bench.tiny_models import GATHERED, HYBRIDS, VARIANTS, VOCAB, WINDOWED
from mainstem.errors import BadArgument
from mainstem.integrations.transformers import cached
from mainstem.runtime.engine import Engine
from mainstem.runtime.memory.eight_bits import eight_bits
from mainstem.runtime.models.caches import Rounding
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.places import run
from mainstem.runtime.request import Completion
from mainstem.settings.engine import EngineConfig, HostPolicy, HostSize, KVCacheDtype, StorageConfig, TierConfig

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 6
SHARED = 40
TOLERANCE = 5e-3  # rounding of another CPU may move a number of a key to the next of 256
PROMPTS = [*family_of_prompts(VOCAB, SHARED, [20, 13], 1), *family_of_prompts(VOCAB, SHARED, [20, 13], 2)]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma3_text": ("gemma3_text", {**WINDOWED["gemma3_text"], "sliding_window": 8}),  # full attention and a window
    "gemma2": ("gemma2", WINDOWED["gemma2"]),  # the same, with capped scores
    "gpt_oss": ("gpt_oss", WINDOWED["gpt_oss"]),  # sinks
    "gemma3n_text": VARIANTS["gemma3n_text"],  # layers that share the keys of others
    "llama4_text": VARIANTS["llama4_text"],  # full attention and chunks
    "mimo_v2_flash": ("mimo_v2_flash", WINDOWED["mimo_v2_flash"]),  # values smaller than keys, unequal pools
    "bloom": ("bloom", GATHERED["bloom"]),  # attention of its own
    "qwen3_next": ("qwen3_next", HYBRIDS["qwen3_next"]),  # full attention and states
    "lfm2": ("lfm2", HYBRIDS["lfm2"]),  # the same, with states of convolutions
}
QUICK = ("llama", "gemma3_text", "lfm2")
CASES = pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(pytest.param(family, "int8", marks=[] if family in QUICK else pytest.mark.slow) for family in KINDS),
        ("llama", "fp8"),
        pytest.param("gemma3_text", "fp8", marks=pytest.mark.slow),
    ],
)


@functools.cache
def pair(family: str, kind: str) -> tuple[LoadedModel, tuple[Greedy, ...]]:
    """A model, and its answer to each prompt by whole forwards over rounded keys."""
    made, _ = pair_of(*KINDS[family])
    model: Any = copy.deepcopy(made.model)
    model.set_attn_implementation("eager")
    layout = Layout.of(model.config, made.max_context)
    bits = eight_bits(kind)
    assert bits is not None
    kept = {layer: bits for layers in layout.kv_layers.values() for layer in layers}

    def greedy(prompt: Sequence[int]) -> Greedy:
        tokens, found = list(prompt), []
        for _ in range(NEW):
            with torch.inference_mode():
                logits = run(model, Rounding(model.config, kept), input_ids=torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
            found.append((tokens[-1], float(torch.log_softmax(logits.float(), -1)[tokens[-1]])))
        return found

    return made, tuple(map(greedy, PROMPTS))


def config(family: str, kind: KVCacheDtype, pages: int = 400, slots: int = 60, **tiers: Any) -> EngineConfig:
    states = slots if KINDS[family][0] in HYBRIDS else None
    return EngineConfig(
        pages=pages, page_size=4, token_budget=16, state_slots=states, kv_cache_dtype=kind, tiers=TierConfig(**tiers)
    )


def check(completion: Completion, expected: Greedy) -> None:
    assert list(completion.tokens) == [token for token, _ in expected]
    for got, (_, logprob) in zip(completion.logprobs, expected, strict=True):
        assert abs(got.logprob - logprob) < TOLERANCE


def answers(made: Engine, family: str, kind: str) -> list[Completion]:
    """Runs requests one after another."""
    found = [ask(made, [prompt], NEW)[0] for prompt in PROMPTS]
    for completion, expected in zip(found, pair(family, kind)[1], strict=True):
        check(completion, expected)
    return found


@CASES
def test_cold_warm_and_together_requests_get_the_answers_of_rounded_keys(family: str, kind: KVCacheDtype) -> None:
    made, expected = pair(family, kind)
    with Engine(made, config(family, kind), random=random.Random(0)) as engine:
        assert answers(engine, family, kind)[0].usage.cached_tokens == 0
        assert all(completion.usage.cached_tokens >= SHARED for completion in answers(engine, family, kind))
    with Engine(made, config(family, kind), random=random.Random(0)) as engine:
        for completion, answer in zip(ask(engine, PROMPTS, NEW), expected, strict=True):
            check(completion, answer)


@CASES
def test_evicted_pages_come_back_from_the_host_with_their_scales(family: str, kind: KVCacheDtype) -> None:
    made, _ = pair(family, kind)
    small = config(family, kind, 18, 3, size=HostSize(host_ratio=20.0), host=HostPolicy("write_through", 1, 4))
    with Engine(made, small, random=random.Random(0)) as engine:
        answers(engine, family, kind)
        assert any(completion.usage.host_tokens >= SHARED for completion in answers(engine, family, kind))
        stats = engine.stats()
    assert stats.cache.tree.evicted_pages > 0 and stats.tiers is not None and stats.tiers.load_failed == 0


@CASES
def test_stored_pages_are_found_after_a_restart_and_by_no_other_dtype(
    family: str, kind: KVCacheDtype, tmp_path: Path
) -> None:
    pytest.importorskip("blake3", reason="blake3 is not installed")
    made = replace(pair(family, kind)[0], tokenizer=Named())  # type: ignore[arg-type]
    limits = StorageConfig(prefetch="wait_complete", prefetch_min_tokens=4)
    spec = f"file:{tmp_path}/kv?capacity=64MiB"

    def found(dtype: KVCacheDtype) -> int:
        tiers = {"size": HostSize(host_ratio=2.0), "storage": spec, "limits": limits}
        with Engine(made, config(family, dtype, 80, 20, **tiers), random=random.Random(0)) as engine:
            (completion,) = ask(engine, PROMPTS[:1], NEW)
        if dtype == kind:
            check(completion, pair(family, kind)[1][0])
        return completion.usage.storage_tokens

    whole = (len(PROMPTS[0]) - 1) // 4 * 4
    assert [found(kind), found(kind)] == [0, whole]
    assert found("auto") == found("fp8" if kind == "int8" else "int8") == 0
    assert found(kind) == whole


def test_a_cache_under_transformers_keeps_the_dtype_of_the_model() -> None:
    with pytest.raises(BadArgument, match="kv_cache_dtype = 'int8': must be auto"):
        cached(pair_of("llama", {})[0].model, EngineConfig(pages=40, kv_cache_dtype="int8"))


class Named(Letters):
    """With a vocabulary, which stored pages depend on."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}
