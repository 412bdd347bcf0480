"""A cache that audits itself: it finds bits that were flipped, and nothing else, and disturbs nobody."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from machine import eventually, patience
from rigs.letters import Letters

from bench.tiny_models import ALL, VOCAB, loaded, tiny
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.tree import DEVICE, HOST
from mainstem.errors import BadArgument, StorageError
from mainstem.runtime.audit.auditor import Auditor, AuditStats
from mainstem.runtime.audit.prefix_audit import Means
from mainstem.runtime.engine import Engine
from mainstem.runtime.request import Completion, ImageInput, Request
from mainstem.settings.engine import (
    EngineConfig,
    HostPolicy,
    HostSize,
    PeerConfig,
    SamplingParams,
    StorageConfig,
    TierConfig,
)
from mainstem.tiers.storage.sealer import HEADER_BYTES, Label

SIZE = 4
WAIT_S = patience(60)

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(name: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> Engine:
    family, changes = ALL[name]
    model = tiny(family, **{"max_position_embeddings": 640, **changes}).to(dtype)  # type: ignore[call-arg,arg-type]
    made = replace(loaded(model, name), dtype=dtype, tokenizer=Letters())  # type: ignore[arg-type]
    settings = {"pages": 200, "page_size": SIZE, "audit_share": 1.0, "token_budget": 16, **config}
    return Engine(made, EngineConfig(**settings), random=random.Random(0))


def tokens_of(length: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def ask(engine: Engine, *prompts: Any, new: int = 4) -> list[Completion]:
    params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=0)
    streams = [engine.submit(Request(prompt, params)) for prompt in prompts]
    return [stream.result(timeout_s=WAIT_S) for stream in streams]


def scores(answer: Completion) -> list[tuple[int, float]]:
    return [(token, each.logprob) for token, each in zip(answer.tokens, answer.logprobs, strict=True)]


def audits(engine: Engine) -> AuditStats:
    stats = engine.stats().audits
    assert stats is not None
    return stats


def settle(engine: Engine) -> AuditStats:
    """Waits until everything that was drawn is audited, and nothing is under way."""
    core = engine._core
    tiers = core.tiers
    eventually(
        lambda: core.auditor.idle_s is None and not core.scheduler.busy and not (tiers and tiers.busy),  # type: ignore[union-attr]
        WAIT_S,
    )
    return audits(engine)


def is_exact(engine: Engine) -> bool:
    return engine.exact.startswith("yes")


def ids_of(engine: Engine, prompt: Any, tier: int) -> Sequence[int]:
    tree = engine._core.cache.tree
    node = tree.core.locate(b"", tree.keys.encode(prompt), len(prompt) // SIZE)
    ids: Sequence[int] = tree.core.ids(node, 0, tier).tolist()
    return ids


# ---------------------------------------------------------------- bits that are flipped on purpose


def tiers_of(tmp_path: Path) -> TierConfig:
    return TierConfig(
        size=HostSize(host_ratio=2.0),
        host=HostPolicy(load_min_tokens=1),
        storage=f"file:{tmp_path}/kv?capacity=64MiB",
        limits=StorageConfig(prefetch="wait_complete", prefetch_min_tokens=0),
    )


def names_of(engine: Engine, prompt: Any) -> list[bytes]:
    tiers, tree = engine._core.tiers, engine._core.cache.tree
    assert tiers is not None and tiers.store is not None
    sealer = tiers.store.sealer
    return sealer.names(sealer.root(b""), tree.keys.encode(prompt), tree.page_bytes)


def flip_device(engine: Engine, prompt: Any, page: int) -> None:
    pool: Any = engine._core.model.pools["full"]
    with torch.inference_mode():
        pool.v[1, ids_of(engine, prompt, DEVICE)[page], 2].view(torch.uint8)[0, 3] ^= 1


def flip_host(engine: Engine, prompt: Any, page: int) -> None:
    memory: Any = engine._core.tiers.host.memory  # type: ignore[union-attr]
    memory.slots(0, [ids_of(engine, prompt, HOST)[page]])[0][-1] ^= 1


def flip_storage(engine: Engine, prompt: Any, page: int) -> None:
    """Flips a bit of a stored page, and seals it anew, so that the seal is right."""
    core = engine._core
    assert core.tiers is not None and core.tiers.store is not None
    store = core.tiers.store
    keys = store.sealer.keys([names_of(engine, prompt)[page]], "full")
    value = memoryview(bytearray(HEADER_BYTES + core.tiers.host.memory.payload_bytes(0)))
    assert store.backend.get(keys, [value]) == [len(value)]
    value[HEADER_BYTES + 5] ^= 1
    store.sealer.seal(value, keys[0], Label(component="full"))
    store.backend.delete(keys)
    assert store.backend.put(keys, [value]) == [True]


FLIPS = {"device": flip_device, "host": flip_host, "storage": flip_storage}


@pytest.mark.parametrize("tier", FLIPS)
@pytest.mark.parametrize("page", [pytest.param(0, marks=pytest.mark.slow), 6, pytest.param(9, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found_and_removed_from_every_tier(
    tier: str, page: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = tokens_of(42)
    with engine_of(tiers=tiers_of(tmp_path)) as engine:
        if not is_exact(engine):
            return
        cold = ask(engine, prompt)[0]
        assert settle(engine).tokens == {"device": 0, "host": 0, "storage": 0}
        assert ask(engine, prompt)[0].usage.cached_tokens == 41  # one is always computed
        clean = settle(engine)
        assert clean.tokens == {"device": 40, "host": 40, "storage": 40} and clean.prefixes["equal"] == 1
        FLIPS[tier](engine, prompt, page)
        ask(engine, prompt)
        found = settle(engine)
        assert found.mismatches == {**dict.fromkeys(FLIPS, 0), tier: 1} and found.prefixes["different"] == 1
        assert f"the {tier} copy of page {page} of a prefix" in caplog.text and "layer" in caplog.text
        again = ask(engine, prompt)[0]
        assert again.usage.cached_tokens // SIZE == page and scores(again) == scores(cold)
        assert settle(engine).mismatches == found.mismatches
        assert scores(ask(engine, prompt)[0]) == scores(cold)
        engine._core.cache.check()


def test_what_storage_alone_has_after_a_page_is_removed_with_it(tmp_path: Path) -> None:
    prompt = tokens_of(42)
    with engine_of(tiers=tiers_of(tmp_path)) as engine:
        if not is_exact(engine):
            return
        ask(engine, prompt)
        settle(engine)
        core, names = engine._core, names_of(engine, prompt)
        assert core.tiers is not None and core.tiers.store is not None and core.auditor is not None
        poll, store = core.auditor.poll, core.tiers.store

        def polled() -> None:
            """Leaves four pages on the device and the host."""
            for tier, pool in ((DEVICE, core.cache.pool), (HOST, core.tiers.host_pools[0])):  # type: ignore[union-attr]
                pool.reclaim(core.cache.tree.evict(max(0, pool.cached - 4), tier=tier)[0])
            poll()

        core.auditor.poll = polled  # type: ignore[method-assign]
        flip_device(engine, prompt, 1)
        ask(engine, prompt)
        assert settle(engine).mismatches["device"] == 1
        assert len(names) == 10
        eventually(
            lambda: store.backend.exists(store.sealer.keys(names, "full")) == [True] + [False] * 9,
            WAIT_S,
        )


def test_the_place_of_a_difference_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    prompt = tokens_of(42)
    with engine_of() as engine:
        if not is_exact(engine):
            return
        ask(engine, prompt)
        flip_device(engine, prompt, 5)
        ask(engine, prompt)
        settle(engine)
    assert (
        f"the device copy of page 5 of a prefix is not what computing it gives: full, layer 1, position {5 * SIZE + 2}"
        in caplog.text
    )


# ---------------------------------------------------------------- nothing else is found


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"pages": 30}),
        pytest.param("llama", {"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("mistral windowed", {}, marks=pytest.mark.slow),
        pytest.param("olmo3 windowed", {}, marks=pytest.mark.slow),
        ("mamba2", {}),
        pytest.param("bamba", {"checkpoint_tokens": 8}, marks=pytest.mark.slow),
        pytest.param("rwkv", {}, marks=pytest.mark.slow),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(given),
)
def test_a_clean_run_has_no_mismatches(name: str, config: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    chance = random.Random(3)
    with engine_of(name, dtype, **{"pages": 48, "max_running": 4, "tiers": tiers_of(tmp_path), **config}) as engine:
        if not is_exact(engine):
            return
        known = [tokens_of(chance.randint(30, 90), seed) for seed in range(5)]
        for _ in range(12):
            prompts = [
                np.concatenate([chance.choice(known), tokens_of(chance.randint(1, 9), chance.randrange(99))])
                for _ in range(chance.randint(1, 5))
            ]
            ask(engine, *prompts, new=chance.randint(1, 12))
            if chance.random() < 0.3:
                settle(engine)
        stats, totals = settle(engine), engine.stats().totals
        assert stats.mismatches == dict.fromkeys(FLIPS, 0) and stats.prefixes["failed"] == 0
        assert stats.prefixes["equal"] > 0 and all(stats.tokens.values()), stats
        assert totals.host_tokens
        engine._core.cache.check()


def test_scores_beside_pages_are_not_compared(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    with engine_of(keep_scores=1, tiers=tiers_of(tmp_path)) as engine:
        for _ in range(3):
            found = engine.submit(Request(tokens_of(40), params)).result(timeout_s=WAIT_S)
        assert found.usage.cached_tokens == 38
        stats = settle(engine)
    assert all(stats.tokens.values()) and stats.mismatches == dict.fromkeys(FLIPS, 0)


def test_pages_of_requests_that_were_preempted_are_audited_too() -> None:
    prompts = [tokens_of(36, seed) for seed in range(3)]
    with engine_of(pages=30, max_running=3) as engine:  # each grows to 17 pages
        if not is_exact(engine):
            return
        ask(engine, *prompts, new=30)
        assert engine.stats().totals.preemptions
        ask(engine, *prompts)
        stats = settle(engine)
        assert stats.prefixes["equal"] > 0 and stats.prefixes["failed"] == 0
        assert stats.mismatches == dict.fromkeys(FLIPS, 0)


def test_a_state_in_which_a_bit_is_flipped_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompt = tokens_of(42)
    with engine_of("mamba2", tiers=tiers_of(tmp_path)) as engine:
        if not is_exact(engine):
            return
        cold = ask(engine, prompt)[0]
        settle(engine)
        tree, pool = engine._core.cache.tree, engine._core.model.memory.states
        assert pool is not None
        node = tree.core.locate(b"", tree.keys.encode(prompt), 10)
        with torch.inference_mode():
            pool.tensors[1][int(tree.core.own_ids(node, 1, DEVICE)[0])].view(torch.uint8)[0, 0, 0] ^= 1
        ask(engine, prompt)
        found = settle(engine)
        assert found.mismatches == {"device": 1, "host": 0, "storage": 0} and "state, after position 39" in caplog.text
        assert scores(ask(engine, prompt)[0]) == scores(cold)


def test_a_store_that_fails_is_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens_of(42)
    with engine_of(tiers=tiers_of(tmp_path)) as engine:
        if not is_exact(engine):
            return
        ask(engine, prompt)
        settle(engine)
        assert engine._core.tiers is not None and engine._core.tiers.store is not None

        def fails(*arguments: Any) -> Any:
            raise StorageError("io", "the disk is gone")

        monkeypatch.setattr(engine._core.tiers.store.backend, "get", fails)
        ask(engine, prompt)
        stats = settle(engine)
        assert stats.tokens == {"device": 40, "host": 40, "storage": 0} and stats.prefixes["equal"] == 1
        assert not any(stats.mismatches.values())


def test_what_peers_read_on_the_host_is_no_storage() -> None:
    prompt = tokens_of(42)
    with engine_of(tiers=TierConfig(peers=PeerConfig(peer_listen="127.0.0.1:0"))) as engine:
        if not is_exact(engine):
            return
        ask(engine, prompt)
        settle(engine)
        ask(engine, prompt)
        assert settle(engine).tokens == {"device": 40, "host": 40, "storage": 0}


# ---------------------------------------------------------------- nobody is disturbed


def test_an_audit_leaves_pages_and_locks_as_they_were() -> None:
    prompt = tokens_of(42)
    with engine_of() as engine:
        if not is_exact(engine):
            return
        cache, seen = engine._core.cache, []

        def state() -> tuple[Any, ...]:
            return (
                cache.stats(settle=False).pools,
                cache.tree.core.counts(0, DEVICE),
                cache.stats(settle=False).leases.hit,
            )

        poll = engine._core.auditor.poll  # type: ignore[union-attr]

        def polled() -> None:
            before = state()
            poll()
            seen.append((before, state()))

        engine._core.auditor.poll = polled  # type: ignore[union-attr,method-assign]
        ask(engine, prompt)
        ask(engine, prompt)
        assert settle(engine).prefixes["equal"] == 1
        assert len(seen) >= 3 and all(str(before) == str(after) for before, after in seen)


def test_a_request_that_arrives_during_an_audit_waits_for_one_chunk() -> None:
    prompt, other = tokens_of(400), tokens_of(30, 1)
    with engine_of() as engine:
        if not is_exact(engine):
            return
        ask(engine, prompt)
        core, streams, generated = engine._core, [], []
        poll = core.auditor.poll  # type: ignore[union-attr]

        def polled() -> None:
            generated.append(core.scheduler.totals.generated_tokens)
            if len(generated) == 3:
                streams.append(engine.submit(Request(other, SamplingParams(max_tokens=3, ignore_eos=True))))
            poll()

        core.auditor.poll = polled  # type: ignore[union-attr,method-assign]
        ask(engine, prompt)
        assert settle(engine).prefixes["equal"] == 1 and len(streams[0].result(timeout_s=WAIT_S).tokens) == 3
        assert generated == [8] * 3 + [11] * 22 and audits(engine).tokens["device"] == 396


def test_a_prefix_that_is_evicted_meanwhile_is_not_audited() -> None:
    prompt = tokens_of(42)
    with engine_of() as engine:
        if not is_exact(engine):
            return
        ask(engine, prompt)
        poll = engine._core.auditor.poll  # type: ignore[union-attr]

        def polled() -> None:
            poll()
            engine._core.cache.flush()

        engine._core.auditor.poll = polled  # type: ignore[union-attr,method-assign]
        ask(engine, prompt)
        stats = settle(engine)
        assert stats.prefixes["evicted"] == 1 and stats.tokens["device"] == 16


def test_an_audit_that_fails_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    prompt = tokens_of(42)
    with engine_of() as engine:
        if not is_exact(engine):
            return
        ask(engine, prompt)
        engine._core.auditor._means = replace(engine._core.auditor._means, forward=lambda segments: 1 / 0)  # type: ignore
        ask(engine, prompt)
        assert settle(engine).prefixes["failed"] == 1 and "an audit failed" in caplog.text
        assert len(ask(engine, prompt)[0].tokens) == 4


# ---------------------------------------------------------------- what is drawn


def auditor_of(share: float) -> Auditor:
    means = Means(PrefixCache(8, SIZE), lambda segments: torch.empty(0), [], [], 1)
    return Auditor(means, share, random.Random(0))


def test_hits_are_drawn_by_their_share() -> None:
    auditor = auditor_of(0.25)
    for _ in range(400):
        auditor.note(Request(tokens_of(9)), tokens_of(9))
    assert auditor.stats().prefixes["dropped"] == pytest.approx(100 - 64, abs=20)


def test_what_is_not_known_to_be_exact_is_left_out() -> None:
    auditor = auditor_of(1.0)
    image = ImageInput(1, 5, b"i" * 16, {})
    adapter: Any = object()
    auditor.note(Request(tokens_of(9), adapter=adapter), tokens_of(9))
    auditor.note(Request(tokens_of(9), images=(image,)), tokens_of(9))
    auditor.note(Request(tokens_of(9), positions=np.zeros((3, 9), np.int64)), tokens_of(9))
    auditor.note(Request(tokens_of(3)), tokens_of(3))  # less than a page
    assert auditor.idle_s is None
    auditor.note(Request(tokens_of(4)), tokens_of(4))
    assert auditor.idle_s == 0.0


def test_nothing_is_audited_by_default() -> None:
    with engine_of(audit_share=0.0) as engine:
        assert engine.stats().audits is None
        assert engine._core.model.pools["full"].pages == engine.pages


def test_a_model_that_is_not_exact_is_not_audited_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with engine_of("stablelm", torch.bfloat16) as engine:
        assert engine.exact.startswith("no: ")
        assert f"the model is not exact: {engine.exact.removeprefix('no: ')}" in caplog.text
        ask(engine, tokens_of(42))
        assert len(ask(engine, tokens_of(42))[0].tokens) == 4 and engine.stats().audits is None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"audit_share": 1.5}, "a number, 0 or more, up to 1"),
        ({"audit_share": -0.1}, "a number, 0 or more, up to 1"),
        ({"cache": False}, "0 without the cache"),
        ({"tp": 2}, "0 if tp > 1: divided layers are not exact"),
        ({"tiers": TierConfig(storage="memory:", storage_codec="int8")}, "0 with storage_codec int8"),
    ],
)
def test_settings_with_which_bits_cannot_be_compared_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArgument, match=f"audit_share = .*: must be {says}"):
        EngineConfig(**{"audit_share": 0.001, **config})
