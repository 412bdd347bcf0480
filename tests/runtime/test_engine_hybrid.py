"""Models with windows and states answer the same whether their prompts are computed, on the device or on the host.

The answers are those of plain transformers, computed without a cache: equal greedy tokens, logprobs within 1e-3.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.greedy import Greedy, ask, family_of_prompts, pair_of, same
from rigs.letters import Letters
from rigs.slow import slow_but

from bench.tiny_models import GATHERED, HYBRIDS, LATENT, RESUMED, VARIANTS, VOCAB, WINDOWED
from mainstem.runtime.engine import Engine
from mainstem.runtime.memory.host import HostPool
from mainstem.runtime.memory.tiers import identity_of
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Completion, Request
from mainstem.settings.engine import (
    EngineConfig,
    HostPolicy,
    HostSize,
    SamplingParams,
    StorageConfig,
    TierConfig,
    WritePolicy,
)
from mainstem.tiers.host.transfer import Move

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 6
SHARED = 40
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": ("gemma3_text", {**WINDOWED["gemma3_text"], "sliding_window": 8}),  # full attention and a window
    "gemma2": ("gemma2", WINDOWED["gemma2"]),  # the same, with capped scores
    "mistral": ("mistral", {**WINDOWED["mistral"], "sliding_window": 20}),  # a window alone
    "llama, windows": VARIANTS["llama, windows"],  # full attention and two windows
    "gemma3n_text": VARIANTS["gemma3n_text"],  # layers that share the keys of others
    "llama4_text": VARIANTS["llama4_text"],  # full attention and chunks
    "deepseek_v3": ("deepseek_v3", LATENT["deepseek_v3"]),  # latents
    "mimo_v2_flash": ("mimo_v2_flash", WINDOWED["mimo_v2_flash"]),  # values smaller than keys, unequal pools
    "bloom": ("bloom", GATHERED["bloom"]),  # attention of its own
    "kimi_linear": ("kimi_linear", HYBRIDS["kimi_linear"]),  # latents and states
    "qwen3_next": ("qwen3_next", HYBRIDS["qwen3_next"]),  # full attention and states
    "lfm2": ("lfm2", HYBRIDS["lfm2"]),  # the same, with states of convolutions
    "mamba2": ("mamba2", HYBRIDS["mamba2"]),  # states alone
}
QUICK = ("gemma3_text", "mimo_v2_flash", "bloom", "lfm2", "mamba2")
IN_PAGES = ("deepseek_v3", "bloom")
"""Kinds with full attention alone: a hit may end inside a page, whose first positions are copied."""
PAIRS = zip(*(family_of_prompts(VOCAB, SHARED, [20, 13], seed) for seed in (1, 2)), strict=True)
PROMPTS = [prompt for pair in PAIRS for prompt in pair]  # each takes the memory of the one before


@functools.cache
def pair(family: str) -> tuple[LoadedModel, tuple[Greedy, ...]]:
    """A model, and its answer to each prompt without a cache."""
    model, greedy = pair_of(*KINDS[family])
    return model, tuple(greedy(prompt, NEW) for prompt in PROMPTS)


@contextmanager
def engine(family: str, *, pages: int = 400, slots: int = 60, write: WritePolicy | None = None) -> Iterator[Engine]:
    tiers = TierConfig() if write is None else TierConfig(HostSize(host_ratio=20.0), HostPolicy(write, 1, 4))
    states = slots if KINDS[family][0] in HYBRIDS else None
    config = EngineConfig(pages=pages, page_size=4, token_budget=16, state_slots=states, tiers=tiers)
    with Engine(pair(family)[0], config, random=random.Random(0)) as made:
        yield made


SMALL = {"pages": 18, "slots": 3}
"""Room for one request, which takes all that is left of the one before."""


def answer(made: Engine, family: str, order: Sequence[int] = range(len(PROMPTS))) -> list[Completion]:
    """Runs requests one after another; each must answer as without a cache."""
    completions = []
    for at in order:
        (completion,) = ask(made, [PROMPTS[at]], NEW)
        same(completion, pair(family)[1][at])
        completions.append(completion)
    return completions


@pytest.mark.parametrize("family", slow_but(KINDS, *QUICK, "llama, windows", "deepseek_v3"))
def test_cold_and_warm_give_the_same_answers(family: str) -> None:
    with engine(family) as made:
        cold, *_ = answer(made, family)
        assert cold.usage.cached_tokens == 0
        for warm, prompt in zip(answer(made, family), PROMPTS, strict=True):
            hit = len(prompt) - 1 if family in IN_PAGES else (len(prompt) - 1) // 4 * 4
            assert (warm.usage.cached_tokens, warm.usage.host_tokens) == (hit, 0)


@pytest.mark.parametrize("marks", [(), (SHARED,)])
@pytest.mark.parametrize("family", slow_but(["qwen3_next", "lfm2", "mamba2"], "lfm2", "mamba2"))
def test_a_mark_saves_the_second_request_what_it_shares(family: str, marks: tuple[int, ...]) -> None:
    prompts = family_of_prompts(VOCAB, SHARED, [20, 13, 9], 3)
    greedy = pair_of(*KINDS[family])[1]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0, logprobs=0)
    with engine(family) as made:
        found = [made.submit(Request(np.array(prompt), params, marks=marks)).result() for prompt in prompts]
    for completion, prompt in zip(found, prompts, strict=True):
        same(completion, greedy(prompt, NEW))
    assert [each.usage.cached_tokens for each in found] == [0, SHARED if marks else 0, SHARED]


@pytest.mark.parametrize(
    "write",
    [
        "write_back",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("write_through", "write_through_selective")),
    ],
)
@pytest.mark.parametrize("family", slow_but(KINDS, *QUICK))
def test_what_was_evicted_comes_back_from_the_host_and_gives_the_same_answers(family: str, write: WritePolicy) -> None:
    with engine(family, **SMALL, write=write) as made:
        answer(made, family, [0, 0, 1, 1, 2, 2, 3, 3])  # pages that were hit are backed up, by any policy
        again = answer(made, family)
        assert any(completion.usage.host_tokens >= SHARED for completion in again)
        assert made.stats().cache.tree.evicted_pages > 0
        assert loads(made)[0] > 0 and loads(made)[1] == 0


@pytest.mark.parametrize("family", slow_but(KINDS, *QUICK))
def test_loads_that_fail_in_the_middle_change_no_answer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer arrives, and every state with it, and is used; the other layers do not arrive."""
    with engine(family, **SMALL, write="write_through") as made:
        answer(made, family)
        fail_after_the_first_layer(monkeypatch)
        loaded_before = loads(made)[0]
        for completion in answer(made, family):
            assert completion.usage.host_tokens == 0
        assert loads(made)[0] == loaded_before and loads(made)[1] > 0
        monkeypatch.undo()
        assert any(completion.usage.host_tokens for completion in answer(made, family))


def test_a_prompt_longer_than_all_windows_is_loaded() -> None:
    with engine("mistral", pages=12, write="write_through") as made:
        answer(made, "mistral")
        assert any(completion.usage.host_tokens >= SHARED for completion in answer(made, "mistral"))


def loads(made: Engine) -> tuple[int, int]:
    """Counts pages that arrived and pages that did not."""
    stats = made.stats().tiers
    assert stats is not None
    return stats.loaded, stats.load_failed


def fail_after_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    up = HostPool.up

    def failing(pool: HostPool, moves: Sequence[Move]) -> Any:
        ticket = up(pool, moves)
        ticket.wait()
        ticket.end(RuntimeError("on purpose, after the first layer"))  # type: ignore[attr-defined]
        return ticket

    monkeypatch.setattr(HostPool, "up", failing)


@pytest.mark.parametrize(
    ("family", "attention", "shape"),
    [
        ("deepseek_v3", "mla", "3 layers, a latent of 32 + 8"),
        ("kimi_linear", "mla with states", "4 layers, a latent of 32 + 8"),
        ("bloom", "mha", "3 layers, 4 of 4 heads"),
        ("gemma2", "gqa", "3 layers, 2 of 4 heads"),
    ],
)
def test_the_identity_says_what_ranks_share(family: str, attention: str, shape: str) -> None:
    pytest.importorskip("blake3", reason="blake3 is not installed")
    identity = identity_of(replace(pair(family)[0], tokenizer=Stored()), 4, "content")  # type: ignore[arg-type]
    assert (identity.attention, identity.shape) == (attention, shape)
    assert identity.replicated == (family == "deepseek_v3")


def transformers_scan(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a model go on from its states token by token."""
    monkeypatch.setattr("mainstem.runtime.memory.states.resume", lambda _: None)


def attention_of_its_own(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a model attend by transformers' code to gathered keys."""
    model.set_attn_implementation("eager")
    monkeypatch.setattr("mainstem.runtime.models.runner.own_attention", lambda _: "on purpose")


@pytest.mark.parametrize(
    ("family", "changes", "change", "line"),
    [
        ("mamba", {**RESUMED["mamba"], "num_hidden_layers": 1}, transformers_scan, "scan resumed, here stepped"),
        pytest.param(
            "jamba", RESUMED["jamba"], transformers_scan, "scan resumed, here stepped", marks=pytest.mark.slow
        ),
        ("llama", {}, attention_of_its_own, "keys paged, here gathered"),
    ],
)
def test_what_was_computed_in_another_way_is_not_found_after_a_restart(
    family: str,
    changes: dict[str, Any],
    change: Callable[[Any, pytest.MonkeyPatch], None],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("blake3", reason="blake3 is not installed")
    storage = StorageConfig(prefetch="wait_complete", prefetch_min_tokens=4)
    tiers = TierConfig(HostSize(host_ratio=2.0), storage=f"file:{tmp_path}/kv?capacity=64MiB", limits=storage)
    config = EngineConfig(pages=80, page_size=4, state_slots=20 if family in RESUMED else None, tiers=tiers)

    def found(changed: bool) -> int:
        made, greedy = pair_of(family, changes)
        with monkeypatch.context() as patched:
            if changed:
                change(made.model, patched)
            with Engine(replace(made, tokenizer=Stored()), config) as engine:  # type: ignore[arg-type]
                (completion,) = ask(engine, PROMPTS[:1], NEW)
        same(completion, greedy(PROMPTS[0], NEW))
        return completion.usage.storage_tokens

    whole = (len(PROMPTS[0]) - 1) // 4 * 4
    assert [found(changed=False), found(changed=False)] == [0, whole]
    assert [found(changed=True), found(changed=True)] == [0, whole]
    assert found(changed=False) == whole
    (why,) = [text for text in caplog.messages if "not found" in text]
    assert line in why


class Stored(Letters):
    """With a vocabulary, which stored pages depend on."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}
