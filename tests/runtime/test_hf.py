"""`hf.cached`: transformers' own `generate()` gives what it gives without the cache, and computes less."""

from __future__ import annotations

import copy
import functools
import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import patience
from rigs.slow import slow_but
from transformers import LogitsProcessorList, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bench.tiny_models import (
    ALONE,
    FAMILIES,
    GATHERED,
    HYBRIDS,
    LATENT,
    REFUSED,
    RESUMED,
    STEPPED,
    VARIANTS,
    VOCAB,
    WINDOWED,
    tiny,
)  # fmt: skip
from mainstem import Namespace, hf
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.attention.paged import plain_attention
from mainstem.settings.engine import EngineConfig, HostSize, StorageConfig, TierConfig

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
PAGE = 4
PAD, EOS = 0, 1
SMALL = EngineConfig(page_size=PAGE, pages=400, token_budget=16)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", FAMILIES["llama"]),
    "alibi": ("bloom", GATHERED["bloom"]),
    "window": ("mistral", WINDOWED["mistral"]),
    "windows and full": ("gemma3_text", WINDOWED["gemma3_text"]),
    "chunks": VARIANTS["llama4_text"],
    "shared keys": VARIANTS["gemma3n_text"],
    "latent": ("deepseek_v3", LATENT["deepseek_v3"]),
    "conv": ("lfm2", HYBRIDS["lfm2"]),
    "state": ("mamba2", HYBRIDS["mamba2"]),
    "state and full": ("bamba", HYBRIDS["bamba"]),
    "resumed": ("jamba", RESUMED["jamba"]),
}
FULL = ("full", "latent")
QUICK = ("full", "windows and full", "chunks", "latent", "conv", "state")


class Rig:
    """A tiny model with a cache under its `generate`, and the `generate` without it."""

    def __init__(self, kind: str = "full", config: EngineConfig = SMALL, **options: Any) -> None:
        family, changes = KINDS[kind]
        self.model: Any = tiny(family, **changes)
        self.model.generation_config.pad_token_id, self.model.generation_config.eos_token_id = PAD, EOS
        self.plain = functools.partial(type(self.model).generate, self.model)
        self.cache = hf.Cached(self.model, config, **options)
        self.computed = 0  # columns of all rows
        self.model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, _: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        self.computed += args[0].numel()

    def both(self, *rows: list[int], new: int = 6, **options: Any) -> torch.Tensor:
        """Generates with and without the cache, and returns the tokens, which must be equal."""
        given = batch(*rows)
        options = {"max_new_tokens": new, "do_sample": False, "suppress_tokens": [PAD], **options}
        torch.manual_seed(0)
        expected = self.plain(**given, **options)
        self.computed = 0
        torch.manual_seed(0)
        got = self.model.generate(**given, **options)
        assert torch.equal(got, expected)
        return got

    def hits(self, call: Callable[[], object]) -> int:
        """Returns how many tokens a call did not compute."""
        before = self.cache.stats().cached_tokens
        call()
        return self.cache.stats().cached_tokens - before

    def verify(self) -> None:
        """Verifies that nothing is pinned and nothing is lost."""
        assert self.cache.drain(patience(30))
        self.cache.check()
        stats = self.cache.stats().cache
        assert stats.leases.open == 0
        assert all(pool.private == pool.locked == 0 for pool in stats.pools.values())


def batch(*rows: list[int]) -> dict[str, torch.Tensor]:
    """Returns rows with padding on their left, and the mask."""
    width = max(map(len, rows))
    pads = [width - len(row) for row in rows]
    return {
        "input_ids": torch.tensor([[PAD] * pad + row for pad, row in zip(pads, rows, strict=True)]),
        "attention_mask": torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads]),
    }


def words(n: int, seed: int = 0) -> list[int]:
    """Returns n tokens that neither end nor pad."""
    return random.Random(seed).choices(range(2, VOCAB), k=n)


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **options: Any) -> Rig:
        made.append(Rig(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.verify()
        each.cache.close()


# ---------------------------------------------------------------- equal outputs, less computed


@pytest.mark.parametrize("kind", slow_but(KINDS, *QUICK))
def test_a_prompt_that_was_seen_is_not_computed_again(rig: Callable[..., Rig], kind: str) -> None:
    made, prompt = rig(kind), words(41)
    assert made.hits(lambda: made.both(prompt)) == 0
    assert made.hits(lambda: made.both(prompt)) == 40
    assert made.computed == 1 + 5  # the last token of the prompt, and the steps


@pytest.mark.parametrize("kind", slow_but(KINDS, *QUICK))
def test_the_next_turn_of_a_chat_hits_the_answer(rig: Callable[..., Rig], kind: str) -> None:
    made = rig(kind)
    chat = made.both(words(21), new=30, suppress_tokens=[PAD, EOS])[0].tolist()
    hit = made.hits(lambda: made.both([*chat, *words(5, seed=1)]))
    assert hit >= (len(chat) - 1) // PAGE * PAGE


@pytest.mark.parametrize("kind", slow_but(KINDS, *QUICK))
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_random_conversations_and_batches_give_the_same_tokens(rig: Callable[..., Rig], kind: str, seed: int) -> None:
    dice = random.Random(seed)
    made, known = rig(kind), [words(30, seed), words(17, seed + 1)]
    made.both(known[0])
    for _ in range(6):
        rows = []
        for _ in range(dice.choice((1, 1, 2, 3))):
            start = dice.choice(known)
            cut = dice.choice((len(start), dice.randrange(len(start) + 1)))
            rows.append([*start[:cut], *words(dice.randrange(1, 9), dice.randrange(99))])
        answers = made.both(*rows, new=dice.randrange(1, 12))
        for row, answer in zip(rows, answers.tolist(), strict=True):
            tokens = [*row, *answer[-(answers.shape[1] - max(map(len, rows))) :]]
            if len(tokens) < 60 and not {PAD, EOS} & {*tokens}:
                known.append(tokens)
        made.verify()
    assert made.hits(lambda: made.both(known[0])) > 0


def test_logits_are_those_of_the_whole_prompt(rig: Callable[..., Rig]) -> None:
    made, prompt = rig(), batch(words(41))
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = made.plain(**prompt, **options)
    for _ in range(2):
        got = made.model.generate(**prompt, **options)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)
    assert made.cache.stats().cached_tokens == 40


def test_a_prompt_without_a_mask_hits_as_well(rig: Callable[..., Rig]) -> None:
    made, ids = rig(), torch.tensor([words(30)])
    expected = made.plain(ids, max_new_tokens=3, do_sample=False)
    for _ in range(2):
        assert torch.equal(made.model.generate(ids, max_new_tokens=3, do_sample=False), expected)
    assert made.cache.stats().cached_tokens == 29


def test_it_generates_inside_inference_mode(rig: Callable[..., Rig]) -> None:
    made = rig("state and full")
    with torch.inference_mode():
        made.both(words(20))
    assert made.hits(lambda: made.both(words(20))) == 19 // PAGE * PAGE


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("kind", slow_but(KINDS, *QUICK))
def test_rows_that_share_a_prompt_compute_it_once(rig: Callable[..., Rig], kind: str) -> None:
    made, shared = rig(kind), words(40)
    rows = [[*shared, *words(n, seed=n)] for n in (3, 5, 4, 6)]
    made.both(*rows, new=1)
    if kind in ("alibi", "state"):  # transformers gives them no positions, so rows with padding pass
        assert made.cache.stats().passed == {"position_ids": 1}
        return
    assert made.computed <= 46 + 3 * (6 + 40 * (kind in ("conv", "state and full", "resumed"))) + 4
    assert made.hits(lambda: made.both(*rows, new=1)) >= 4 * 40


def test_rows_start_together_at_the_shortest_hit(rig: Callable[..., Rig]) -> None:
    made = rig()
    long, short = words(40), words(20, seed=1)
    made.both(long, new=1)
    made.both(short, new=1)
    rows = ([*long, *words(8, seed=2)], [*short, *words(9, seed=3)])
    hit = made.hits(lambda: made.both(*rows, new=1))
    # Columns: 48. The first row could start at 40; the second has 19 of padding, and could start at 39.
    assert hit == 39 + 20
    assert made.computed == 2 * 9


def test_a_row_without_a_hit_does_not_make_the_others_compute(rig: Callable[..., Rig]) -> None:
    made, shared = rig(), words(60)
    made.both(shared, new=1)
    rows = [[*shared, *words(2, seed=n)] for n in range(4)]
    made.both(*rows, words(62, seed=9), new=1)
    assert made.computed == (61 + 4 * 1) + 5


@pytest.mark.parametrize("kind", FULL)
def test_several_answers_to_one_prompt_compute_it_once(rig: Callable[..., Rig], kind: str) -> None:
    made = rig(kind)
    made.both(words(40), new=1, num_return_sequences=4, do_sample=True)
    assert made.computed == 39 + 3 * 3 + 4  # each row hits the whole pages that the first one filled


def test_a_row_that_ends_early_is_kept_without_what_fills_it_up(rig: Callable[..., Rig]) -> None:
    made = rig("full")
    early = LogitsProcessorList([EndsFirst()])
    rows = [words(20), words(20, seed=1)]
    given = batch(*rows)
    answer = made.model.generate(**given, max_new_tokens=24, do_sample=False, logits_processor=early)
    assert answer[0, 22:].tolist() == [PAD] * 22
    pages = made.cache.stats().cache.pool.cached
    assert pages <= (20 + 3) // PAGE + (20 + 23) // PAGE


class EndsFirst:
    """Ends the first row after two tokens, and no other."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, EOS] = -torch.inf
        if ids.shape[1] == 21:
            scores[0] = -torch.inf
            scores[0, EOS] = 0
        return scores


@pytest.mark.parametrize("kind", ["full", "window", "state and full"])
def test_padding_before_a_single_row_has_no_effect(rig: Callable[..., Rig], kind: str) -> None:
    made, prompt = rig(kind), words(25)
    made.both(prompt, new=2)
    given = {"input_ids": torch.tensor([[PAD] * 7 + prompt]), "attention_mask": torch.tensor([[0] * 7 + [1] * 25])}
    expected = made.plain(**given, max_new_tokens=6, do_sample=False)
    for _ in range(2):
        assert torch.equal(made.model.generate(**given, max_new_tokens=6, do_sample=False), expected)
    assert made.cache.stats().cached_tokens >= 2 * 24


def test_a_state_that_has_seen_padding_is_not_kept(rig: Callable[..., Rig]) -> None:
    made, short = rig("state and full"), words(6 * PAGE, seed=1)
    made.both(words(30), short, new=1)  # nothing is shared, so both are computed together
    assert made.hits(lambda: made.both([*short, *words(3)], new=1)) == 0


# ---------------------------------------------------------------- ways to generate


@pytest.mark.parametrize("kind", ["full", "windows and full", "state and full"])
def test_sampling_draws_the_same_tokens(rig: Callable[..., Rig], kind: str) -> None:
    made = rig(kind)
    for _ in range(3):
        made.both(words(33), do_sample=True, temperature=1.5, top_k=20, new=12)
    assert made.cache.stats().cached_tokens >= 2 * 32


def test_a_streamer_gets_the_prompt_and_every_token(rig: Callable[..., Rig]) -> None:
    made, streams = rig(), (Stream(), Stream(), Stream())
    given = batch(words(30))
    expected = made.plain(**given, max_new_tokens=5, do_sample=False, streamer=streams[0])
    for stream in streams[1:]:
        got = made.model.generate(**given, max_new_tokens=5, do_sample=False, streamer=stream)
        assert torch.equal(got, expected)
        assert stream.tokens == streams[0].tokens
        assert stream.ended


class Stream:
    """A streamer that remembers."""

    def __init__(self, fails_at: int = -1) -> None:
        self.tokens: list[int] = []
        self.ended, self._fails_at = False, fails_at

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        if 0 <= self._fails_at < len(self.tokens):
            raise RuntimeError("the reader has gone")

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("kind", slow_but(["full", "windows and full", "latent"], "full"))
def test_an_assistant_drafts_for_a_cached_model(rig: Callable[..., Rig], kind: str) -> None:
    made = rig(kind)
    assistant: Any = tiny("llama", num_hidden_layers=1)
    assistant.generation_config.pad_token_id, assistant.generation_config.eos_token_id = PAD, EOS
    chat = made.both(words(21), new=30, assistant_model=assistant)[0].tolist()
    hit = made.hits(lambda: made.both(chat, new=10, assistant_model=assistant))
    assert hit >= ((len(chat) - 2) // PAGE * PAGE if kind in FULL else 20)
    assert not made.cache.stats().passed


def test_a_prompt_that_drafts_for_itself_hits(rig: Callable[..., Rig]) -> None:
    made, prompt = rig(), words(9) * 4
    for _ in range(2):
        made.both(prompt, new=20, prompt_lookup_num_tokens=3)
    assert made.cache.stats().cached_tokens == 35


def test_guidance_by_a_negative_prompt_is_not_taken_for_a_step(rig: Callable[..., Rig]) -> None:
    made, negative = rig(), torch.tensor([words(12, seed=5)])
    for _ in range(3):
        made.both(words(30), new=8, guidance_scale=1.5, negative_prompt_ids=negative)
    made.both(words(30), new=8)


def test_what_generate_returns_is_transformers_own_cache(rig: Callable[..., Rig]) -> None:
    for kind in ("full", "windows and full", "state and full"):
        made = rig(kind)
        options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
        expected = made.plain(**batch(words(40)), **options)
        for _ in range(2):
            got = made.model.generate(**batch(words(40)), **options)
            ours, theirs = got.past_key_values, expected.past_key_values
            assert type(ours) is type(theirs)
            for mine, own in zip(ours.layers, theirs.layers, strict=True):
                assert type(mine) is type(own)
                assert getattr(mine, "record_past", False) is False
                if getattr(own, "keys", None) is not None:
                    torch.testing.assert_close(mine.keys, own.keys, atol=1e-4, rtol=1e-4)
                    assert mine.get_seq_length() == own.get_seq_length()
        longer = torch.cat([got.sequences, torch.tensor([words(3)])], 1)
        again = made.model.generate(longer, past_key_values=ours, max_new_tokens=3, do_sample=False)
        assert torch.equal(again, made.plain(longer, max_new_tokens=3, do_sample=False))


# ---------------------------------------------------------------- what runs without the cache


def given_cache(rig: Rig) -> dict[str, Any]:
    return {"past_key_values": StaticCache(config=rig.model.config, max_cache_len=64)}


PASSED: dict[str, Callable[[Rig], dict[str, Any]]] = {
    "beam_search": lambda rig: {"num_beams": 2},
    "beam_sample": lambda rig: {"num_beams": 2, "do_sample": True},
    "use_cache=False": lambda rig: {"use_cache": False},
    "past_key_values": given_cache,
    "inputs: output_hidden_states": lambda rig: {"output_hidden_states": True, "return_dict_in_generate": True},
    "inputs: output_attentions": lambda rig: {"output_attentions": True, "return_dict_in_generate": True},
    "a cache of another kind: StaticCache": lambda rig: {"cache_implementation": "static"},
    "prefill_chunk_size": lambda rig: {"prefill_chunk_size": 8},
    "attention_mask": lambda rig: {"attention_mask": torch.tensor([[1] * 12 + [0] * 3 + [1] * 15])},
    "position_ids": lambda rig: {"position_ids": torch.arange(5, 35)[None]},
    "the model drafts for itself": lambda rig: {"assistant_early_exit": 1},
    "custom_generate": lambda rig: {"custom_generate": type(rig.model)._sample},
}


@pytest.mark.parametrize("reason", PASSED)
def test_what_is_not_known_runs_without_the_cache_and_is_counted(
    rig: Callable[..., Rig], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = rig("full")
    made.both(words(30))
    for _ in range(2):
        results = []
        for generate in (made.plain, made.model.generate):
            torch.manual_seed(0)
            options = {"max_new_tokens": 4, "do_sample": False, **PASSED[reason](made)}
            result = generate(torch.tensor([words(30)]), **options)
            results.append(getattr(result, "sequences", result))
        assert str(results[0]) == str(results[1])
    stats = made.cache.stats()
    assert stats.passed[reason] == 2
    assert stats.cached_tokens == 0
    logged = [record for record in caplog.records if reason in record.getMessage()]
    assert len(logged) == 1


def test_embeddings_in_place_of_tokens_pass(rig: Callable[..., Rig]) -> None:
    made = rig()
    embeddings = made.model.get_input_embeddings()(torch.tensor([words(12)])).detach()
    expected = made.plain(inputs_embeds=embeddings, max_new_tokens=4, do_sample=False)
    assert torch.equal(made.model.generate(inputs_embeds=embeddings, max_new_tokens=4, do_sample=False), expected)
    assert made.cache.stats().passed == {"inputs: inputs_embeds": 1}


def test_a_model_in_training_mode_passes(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.model.train()
    made.model.generate(torch.tensor([words(12)]), max_new_tokens=2)
    made.model.eval()
    assert made.cache.stats().passed == {"the model is in training mode": 1}


def test_autocast_passes(rig: Callable[..., Rig]) -> None:
    made = rig()
    with torch.autocast("cpu", torch.bfloat16):
        made.model.generate(torch.tensor([words(12)]), max_new_tokens=2)
    assert made.cache.stats().passed == {"autocast": 1}


def test_a_prompt_longer_than_the_context_passes(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.both(words(140), new=2)
    assert made.cache.stats().passed == {"a prompt longer than the model's context": 1}
    made.both(words(120, seed=3), new=20)  # ends beyond it
    made.both(words(120, seed=3), new=20)


def test_a_forward_outside_of_generate_is_not_touched(rig: Callable[..., Rig]) -> None:
    made, ids = rig(), torch.tensor([words(12)])
    with torch.no_grad():
        before = made.model(ids).logits
        made.model.generate(ids, max_new_tokens=2)
        assert torch.equal(made.model(ids).logits, before)
    assert made.cache.stats().calls == 1


# ---------------------------------------------------------------- who shares with whom


def test_namespaces_do_not_share(rig: Callable[..., Rig]) -> None:
    made = rig()
    for name in (None, "a", "b", Namespace(salt="c"), Namespace(extra=("a",))):
        assert made.hits(functools.partial(call_in, made, name)) == 0
    assert made.hits(lambda: call_in(made, "a")) == 29
    with pytest.raises(BadArgument, match="namespace"):
        made.model.generate(torch.tensor([words(5)]), namespace=7)


def call_in(made: Rig, name: Any) -> None:
    given = batch(words(30))
    expected = made.plain(**given, max_new_tokens=3, do_sample=False)
    assert torch.equal(made.model.generate(**given, max_new_tokens=3, do_sample=False, namespace=name), expected)


def lora(model: Any, seed: int, name: str = "default") -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    if hasattr(model, "add_adapter") and hasattr(model, "get_base_model"):
        model.add_adapter(name, config)
        return model.eval()
    return get_peft_model(model, config, adapter_name=name).eval()


def test_an_adapter_shares_with_neither_the_base_nor_another_adapter(rig: Callable[..., Rig]) -> None:
    made = rig()
    given = {**batch(words(30)), "max_new_tokens": 6, "do_sample": False}

    def generated(model: Any) -> tuple[list[int], int]:
        tokens: list[Any] = []
        hit = made.hits(lambda: tokens.extend(model.generate(**given).tolist()))
        return tokens, hit

    base, _ = generated(made.model)
    assert generated(made.model) == (base, 29)
    adapted = lora(made.model, 1)
    first, hit = generated(adapted)
    assert (first != base, hit) == (True, 0)
    assert generated(adapted) == (first, 29)
    lora(adapted, 2, "second").set_adapter("second")
    second, hit = generated(adapted)
    assert (second not in (first, base), hit) == (True, 0)
    adapted.set_adapter("default")
    assert generated(adapted) == (first, 29)
    with adapted.disable_adapter():
        assert generated(adapted) == (base, 29)
    rows = {**batch(words(30), words(30)), "max_new_tokens": 6, "do_sample": False}
    mixed = adapted.generate(**rows, adapter_names=["default", "second"])
    assert mixed.tolist() == [first[0], second[0]]
    assert made.cache.stats().passed == {"rows with adapters of their own": 1}


def test_merged_weights_share_with_nothing_before(rig: Callable[..., Rig]) -> None:
    made = rig()
    given = {**batch(words(30)), "max_new_tokens": 6, "do_sample": False}
    base = made.model.generate(**given)
    merged = lora(made.model, 1).merge_and_unload()
    assert merged is made.model
    assert made.hits(lambda: merged.generate(**given)) == 0
    assert not torch.equal(merged.generate(**given), base)
    assert made.hits(lambda: merged.generate(**given)) == 29


@pytest.mark.parametrize("counted", [True, False])
def test_weights_changed_in_place_share_with_nothing_before(rig: Callable[..., Rig], counted: bool) -> None:
    made = rig()
    made.both(words(30))
    weight = made.model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        (weight[1:] if counted else weight.data).mul_(0.5)  # PyTorch counts the first, and the second changes all
    assert made.hits(lambda: made.both(words(30))) == 0
    assert made.hits(lambda: made.both(words(30))) == 29


# ---------------------------------------------------------------- threads, small pools, errors


@pytest.mark.deadline
@pytest.mark.parametrize("kind", ["full", "windows and full", "state and full"])
def test_threads_share_and_give_the_same_tokens(rig: Callable[..., Rig], kind: str) -> None:
    made, shared = rig(kind), words(40)
    prompts = [[*shared, *words(4, seed=n)] for n in range(4)]
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = [made.plain(torch.tensor([prompt]), **options) for prompt in prompts]
    start = threading.Barrier(4)

    def work(n: int) -> bool:
        start.wait(patience(60))
        got = [made.model.generate(torch.tensor([prompts[n]]), **options) for _ in range(3)]
        return all(torch.equal(each, expected[n]) for each in got)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4), timeout=patience(120)))
    assert made.cache.stats().cached_tokens >= 8 * 40


@pytest.mark.parametrize("kind", slow_but(["full", "windows and full", "latent"], "windows and full"))
def test_a_tiny_pool_evicts_and_the_tokens_stay_right(rig: Callable[..., Rig], kind: str) -> None:
    config = replace(SMALL, pages=16, token_budget=8, window_ratio=1.0)
    made = rig(kind, config)
    for _ in range(3):
        for seed in range(4):
            made.both(words(30, seed), new=8)
            made.both(words(30, seed), words(28, seed + 1), words(25, seed + 2), new=8)
        made.verify()
    stats = made.cache.stats()
    assert stats.unkept > 0
    assert stats.cache.tree.evicted_pages > 0


def test_with_too_few_states_a_call_passes(rig: Callable[..., Rig]) -> None:
    made = rig("state and full", replace(SMALL, state_slots=3))
    rows = [words(20, seed) for seed in range(5)]
    made.both(*rows)
    made.both(*rows)
    assert made.cache.stats().passed == {"OutOfPages at the start": 2}


@pytest.mark.parametrize("kind", ["full", "windows and full", "state and full"])
def test_a_streamer_that_fails_leaves_nothing_pinned(rig: Callable[..., Rig], kind: str) -> None:
    made, prompt = rig(kind), words(30)
    with pytest.raises(RuntimeError, match="the reader has gone") as caught:
        made.model.generate(torch.tensor([prompt]), max_new_tokens=8, streamer=Stream(fails_at=33))
    made.verify()
    assert caught.tb is not None  # it holds the frames of the call, and so its leases, until here
    assert made.hits(lambda: made.both(prompt)) >= 29 // PAGE * PAGE


def test_a_forward_that_fails_leaves_nothing_pinned(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.both(words(20))

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    hook = made.model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="the device is lost") as caught:
        made.model.generate(torch.tensor([[*words(20), *words(9, 1)]]), max_new_tokens=2)
    hook.remove()
    made.verify()
    assert caught.tb is not None
    made.both([*words(20), *words(9, 1)])


# ---------------------------------------------------------------- the beginning and the end


@pytest.mark.parametrize("kind", ["full", "resumed"])
def test_closing_leaves_the_model_as_it_was(kind: str) -> None:
    family, changes = KINDS[kind]
    model: Any = tiny(family, **changes)
    before = [dict(vars(module)) for module in model.modules()]
    with hf.cached(model, SMALL) as cache:
        assert vars(model)["generate"] is not None
        with pytest.raises(BadArgument, match="close its cache first"):
            hf.cached(model, SMALL)
        with pytest.raises(TypeError, match="close the cache first"):
            copy.deepcopy(model)
    assert [dict(vars(module)) for module in model.modules()] == before
    cache.close()
    model.generate(torch.tensor([words(5)]), max_new_tokens=2)
    assert cache.stats().calls == 0
    hf.cached(model, SMALL).close()


def test_a_refused_model_is_as_it_was() -> None:
    family, changes = KINDS["resumed"]
    model: Any = tiny(family, **changes)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(BadArgument, match="kv_bytes"):
        hf.cached(model, EngineConfig(kv_bytes=10))
    assert [dict(vars(module)) for module in model.modules()] == before
    with pytest.raises(BadArgument, match="policy"):
        hf.cached(model, replace(SMALL, policy="slru:0"))


@pytest.mark.deadline
def test_closing_waits_for_calls_of_other_threads(rig: Callable[..., Rig]) -> None:
    made = rig()
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Waits(Stream):
        def put(self, value: torch.Tensor) -> None:
            inside.set()
            go_on.wait(patience(60))

    def generate() -> None:
        made.model.generate(torch.tensor([words(20)]), max_new_tokens=3, streamer=Waits())

    def close() -> None:
        made.cache.close()
        closed.set()

    first, second = threading.Thread(target=generate), threading.Thread(target=close)
    first.start()
    assert inside.wait(patience(60))
    second.start()
    assert not closed.is_set()
    go_on.set()
    first.join(patience(60))
    assert closed.wait(patience(60))
    assert "generate" not in vars(made.model)


REFUSALS = {
    "rwkv": ("rwkv", ALONE["rwkv"], "outside the cache that generate"),
    "recurrent_gemma": ("recurrent_gemma", STEPPED["recurrent_gemma"], "outside the cache that generate"),
    "xlstm": (*REFUSED["xlstm"], "a cache class of its own"),
    "deepseek_v32": (*REFUSED["deepseek_v32"], "sparse index"),
    "rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "length of the whole sequence",
    ),
    "masks by layer": (*VARIANTS["llama, windows"], "the self-test failed"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_model_that_cannot_be_cached_is_one_clear_error(name: str) -> None:
    family, changes, reason = REFUSALS[name]
    model: Any = tiny(family, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        hf.cached(model, SMALL)
    assert "generate" not in vars(model)


def test_what_is_no_model_that_generates_is_refused() -> None:
    with pytest.raises(BadArgument, match="a model of transformers that generates"):
        hf.cached(torch.nn.Linear(2, 2))
    with pytest.raises(BadArgument, match=r"model\.eval"):
        hf.cached(tiny("llama").train())
    with pytest.raises(BadArgument, match="tp"):
        hf.cached(tiny("llama"), replace(SMALL, tp=2))
    with pytest.raises(UnsupportedModel, match="on meta"):
        hf.cached(tiny("llama").to("meta"))


def test_an_encoder_decoder_is_refused() -> None:
    from transformers import AutoModelForSeq2SeqLM

    config = CONFIG_MAPPING["t5"](
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        hf.cached(AutoModelForSeq2SeqLM.from_config(config).eval(), SMALL)


# ---------------------------------------------------------------- tiers


@pytest.mark.parametrize("kind", ["full", "windows and full", "latent", "state and full"])
def test_prefixes_survive_a_restart(tmp_path: Path, kind: str) -> None:
    waits = StorageConfig(prefetch="wait_complete", prefetch_min_tokens=1, call_timeout_s=patience(30))
    tiers = TierConfig(HostSize(host_ratio=1.0), storage=f"file:{tmp_path}/kv?capacity=16MiB", limits=waits)
    config = replace(SMALL, tiers=tiers)
    prompt, answers = words(81), []
    for hit in (0, 80):
        made = Rig(kind, config)
        with made.cache:
            answers.append(made.both(prompt))
            assert made.cache.stats().cached_tokens == hit
            made.verify()
            assert made.cache.drain(patience(30))  # closing waits only so long
    assert torch.equal(*answers)


def test_pages_that_the_device_lost_come_back_from_the_host(rig: Callable[..., Rig]) -> None:
    config = replace(SMALL, pages=16, tiers=TierConfig(HostSize(host_ratio=8.0)))
    made = rig("full", config, sleep=lambda _: None)
    for seed in range(3):
        made.both(words(49, seed), new=1)
        assert made.cache.drain(patience(30))
    assert made.hits(lambda: made.both(words(49), new=1)) == 48
    tiers = made.cache.stats().tiers
    assert tiers is not None
    assert tiers.loaded > 0


# ---------------------------------------------------------------- a real model


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_answers_as_without_the_cache(smollm2: Any) -> None:
    model, tokenizer = smollm2.model, smollm2.tokenizer
    system = "You are a guide to the lighthouse of Port Arden, which was lit in 1889 and is 41 metres tall. " * 8
    chat: list[dict[str, str]] = [{"role": "system", "content": system}]
    with plain_attention(model), hf.cached(model) as cache:  # an engine of another test has left its own
        for question in ("How tall is it?", "When was it lit?", "And who are you?"):
            chat.append({"role": "user", "content": question})
            given = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            expected = type(model).generate(model, **given, max_new_tokens=24, do_sample=False)
            answer = model.generate(**given, max_new_tokens=24, do_sample=False)
            assert torch.equal(answer, expected)
            text = tokenizer.decode(answer[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
            chat.append({"role": "assistant", "content": text})
        stats = cache.stats()
    assert stats.cached_tokens > 0.6 * stats.prompt_tokens
    assert not stats.passed


@pytest.mark.slow
@pytest.mark.model
def test_the_notebook_shows_hits_in_ten_lines(smollm2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((ROOT / "examples" / "transformers.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    lines = [line for line in code.splitlines() if line and not line.startswith(("from", "import"))]
    assert len(lines) <= 10
    exec(compile(code, "<notebook>", "exec"), {"__name__": "notebook"})
    shown = capsys.readouterr().out.splitlines()
    cached, _, asked, *_ = shown[-1].split()
    assert len(shown) == 3
    assert 0.5 * int(asked) < int(cached) < int(asked)
