"""`mainstem.integrations.sglang` with a double of SGLang, and with the calls that SGLang itself made.

With SGLang itself: `make test-sglang`, which records the calls.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.sglang_hicache import (
    HiCacheStorageConfig,
    HostPool,
    LogicalPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    installed,
)
from rigs.kept_store import KeptStore
from rigs.sglang_calls import replay, transcripts

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from tests.pages.test_public import undocumented

ROOT = Path(__file__).parents[2]
PAGE = 16
KEYS = [f"{number:064x}" for number in range(8)]
NUMBERS = itertools.count()
Make = Callable[..., Any]


@pytest.fixture
def store() -> KeptStore:
    name = f"double-{next(NUMBERS)}"
    made = KeptStore.named(name)
    made.spec = f"rigs.kept_store:KeptStore?name={name}"  # type: ignore[attr-defined]
    return made


@pytest.fixture
def make(store: KeptStore) -> Iterator[Make]:
    """Makes a back end of HiCache, with its pools."""
    backends: list[Any] = []
    with installed() as module:

        def backend(
            pools: dict[str, HostPool] | None = None, extra: dict[str, Any] | None = None, **config: Any
        ) -> Any:
            options = {"storage": store.spec, "storage_secret": "a secret of sixteen", "interface_v1": 1}  # type: ignore[attr-defined]
            made = module.MainstemHiCache(HiCacheStorageConfig(extra_config={**options, **(extra or {})}, **config), {})
            backends.append(made)
            pools = pools or {PoolName.KV: HostPool()}
            made.register_mem_pool_host(pools[PoolName.KV])
            for name, pool in pools.items():
                made.register_mem_host_pool_v2(pool, name)
            made.on_host_pools_registered()
            return made

        yield backend
        for each in backends:
            each.close()


def indices(pages: int, first: int = 0, page_size: int = PAGE) -> torch.Tensor:
    return torch.arange(first * page_size, (first + pages) * page_size)


def numbers(pool: HostPool) -> torch.Tensor:
    pool.buffer.copy_(torch.arange(pool.buffer.numel()).view(pool.buffer.shape))
    return pool.buffer.clone()


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_return_to_other_places_of_another_pool(make: Make, layout: str) -> None:
    one, two = HostPool(layout=layout), HostPool(layout=layout)
    before = numbers(one)
    assert make({PoolName.KV: one}).batch_set_v1(KEYS, indices(8)) == [True] * 8
    other = make({PoolName.KV: two})
    assert other.batch_exists([*KEYS, "f" * 64]) == 8
    assert other.batch_get_v1(KEYS, indices(8, 20)) == [True] * 8
    for page in range(8):
        assert torch.equal(two.get_data_page((20 + page) * PAGE), one.get_data_page(page * PAGE))
    assert torch.equal(one.buffer, before)


def test_the_oldest_interface_finds_what_the_first_one_stored(make: Make) -> None:
    pool = HostPool()
    numbers(pool)
    backend = make({PoolName.KV: pool})
    backend.batch_set_v1(KEYS[:2], indices(2))
    assert backend.exists(KEYS[1]) and not backend.exists(KEYS[2])
    assert torch.equal(backend.get(KEYS[1]), pool.get_data_page(PAGE))
    target = pool.get_dummy_flat_data_page()
    assert backend.get(KEYS[0], target) is target and torch.equal(target, pool.get_data_page(0))
    assert backend.get(KEYS[2]) is None
    assert backend.set(KEYS[2], pool.get_data_page(2 * PAGE))
    assert backend.batch_get_v1(KEYS[:3], indices(3, 10)) == [True] * 3
    assert torch.equal(pool.get_data_page(12 * PAGE), pool.get_data_page(2 * PAGE))


def test_pools_of_a_hybrid_model_are_found_by_their_policies(make: Make) -> None:
    kv, states, index = HostPool(), HostPool((3, 5), page_size=1), HostPool((2, 16, 4))
    backend = make({PoolName.KV: kv, PoolName.MAMBA: states, PoolName.INDEXER: index})
    for pool in (kv, states, index):
        numbers(pool)
    backend.batch_set_v1(KEYS[:6], indices(6))
    backend.batch_set_v2([PoolTransfer(PoolName.INDEXER, indices(5), KEYS[:5])])
    for at in (2, 4):
        backend.batch_set_v2([PoolTransfer(PoolName.MAMBA, indices(1, at, 1), KEYS[at : at + 1])])
    state = PoolTransfer(PoolName.MAMBA, keys=[""], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(KEYS, [state, PoolTransfer(PoolName.INDEXER)])
    assert found.kv_hit_pages == 5
    assert found.extra_pool_hit_pages == {"kv": 6, "mamba": 5, "indexer": 5}
    assert found.restorable_prefix_pages == [3, 5]
    two = PoolTransfer(PoolName.MAMBA, keys=["", ""], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert backend.batch_exists_v2(KEYS, [two]).kv_hit_pages == 0
    unknown = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    assert backend.batch_exists_v2(KEYS, [unknown]).kv_hit_pages == 0
    assert backend.batch_exists_v2(KEYS).kv_hit_pages == 6
    got = backend.batch_get_v2([PoolTransfer(PoolName.MAMBA, indices(1, 20, 1), KEYS[4:5])])
    assert got == {PoolName.MAMBA: [True]} and torch.equal(states.get_data_page(20), states.get_data_page(4))


def test_indices_that_do_not_fit_copy_nothing(make: Make) -> None:
    pool = HostPool()
    before = numbers(pool)
    backend = make({PoolName.KV: pool})
    backend.batch_set_v1(KEYS[:1], indices(1, 5))
    for wrong in (None, indices(2), indices(1)[:-1]):
        assert backend.batch_get_v2([PoolTransfer(PoolName.KV, wrong, KEYS[:1])]) == {"kv": [False]}
    assert torch.equal(pool.buffer, before)
    assert backend.faults == {"refused": 3}


def test_a_pool_that_only_counts_has_pages_without_content(make: Make) -> None:
    backend = make({PoolName.KV: LogicalPool()})
    assert backend.batch_set_v1(KEYS, indices(8)) == [True] * 8
    assert backend.batch_exists(KEYS) == 8
    assert backend.batch_get_v1(KEYS, indices(8)) == [True] * 8


def test_a_pool_without_flat_pages_is_refused(make: Make) -> None:
    class Split(HostPool):
        def get_dummy_flat_data_page(self) -> torch.Tensor:
            raise NotImplementedError

    with pytest.raises(BadArgument, match=r"Split.*flat pages"):
        make({PoolName.KV: Split()})


# ---------------------------------------------------------------- identity


@pytest.mark.parametrize(
    "changed",
    [
        {"pool": HostPool(layout="layer_first")},
        {"pool": HostPool(dtype=torch.float16)},
        {"pool": HostPool(dtype=torch.int32)},
        {"pool": HostPool((2, 16, 8, 2), head_num=8)},
        {"pool": HostPool(start_layer=2)},
        {"pool": HostPool(storage_format_tag="packed")},
        {"config": {"model_name": "other"}},
        {"config": {"tp_size": 2}},
        {"config": {"tp_rank": 1, "tp_size": 2}},
        {"config": {"pp_rank": 1, "pp_size": 2}},
        {"config": {"attn_cp_rank": 1, "attn_cp_size": 2}},
        {"config": {"is_mla_model": True}},
        {"extra": {"weights": "new"}},
        {"extra": {"storage_secret": "another of sixteen"}},
    ],
    ids=str,
)
def test_nothing_is_found_after_a_change(make: Make, changed: dict[str, Any]) -> None:
    make().batch_set_v1(KEYS, indices(8))
    assert make().batch_exists(KEYS) == 8
    other = make(
        {PoolName.KV: changed["pool"]} if "pool" in changed else None, changed.get("extra"), **changed.get("config", {})
    )
    assert other.batch_exists(KEYS) == 0
    assert other.batch_get_v1(KEYS, indices(8)) == [False] * 8


@pytest.mark.parametrize("kind", ["pp", "attn_cp", "tp"])
def test_ranks_have_pages_of_their_own(make: Make, kind: str) -> None:
    zero, one = (make(**{f"{kind}_rank": rank, f"{kind}_size": 2}) for rank in (0, 1))
    zero.batch_set_v1(KEYS, indices(8))
    assert (zero.batch_exists(KEYS), one.batch_exists(KEYS)) == (8, 0)


@pytest.mark.parametrize("changed", [{"layout": "layer_first"}, {"dtype": torch.int32}, {"index_head_dim": 8}], ids=str)
def test_a_change_of_another_pool_concerns_its_pages_only(make: Make, changed: dict[str, Any]) -> None:
    def pools(**described: Any) -> dict[str, HostPool]:
        return {PoolName.KV: HostPool(), PoolName.INDEXER: HostPool(**described)}

    before = make(pools())
    before.batch_set_v1(KEYS, indices(8))
    before.batch_set_v2([PoolTransfer(PoolName.INDEXER, indices(8), KEYS)])
    assert before.batch_exists_v2(KEYS, [PoolTransfer(PoolName.INDEXER)]).kv_hit_pages == 8
    after = make(pools(**changed))
    assert after.batch_exists(KEYS) == 8
    assert after.batch_exists_v2(KEYS, [PoolTransfer(PoolName.INDEXER)]).kv_hit_pages == 0


def test_latents_are_shared_by_all_ranks_but_states_and_heads_are_not(make: Make) -> None:
    def rank(number: int, size: int) -> Any:
        pools = {
            PoolName.KV: HostPool((2, 16, 9), kv_cache_dim=9),
            PoolName.MAMBA: HostPool((3, 5), page_size=1),
            PoolName.INDEXER: HostPool((2, 16, 4), head_num=2),
        }
        return make(pools, is_mla_model=True, tp_rank=number, tp_size=size)

    zero, one, alone = rank(0, 2), rank(1, 2), rank(0, 1)
    zero.batch_set_v1(KEYS, indices(8))
    zero.batch_set_v2([PoolTransfer(PoolName.MAMBA, indices(8, 0, 1), KEYS), PoolTransfer("indexer", indices(8), KEYS)])
    assert (one.batch_exists(KEYS), alone.batch_exists(KEYS)) == (8, 8)
    for name in (PoolName.MAMBA, PoolName.INDEXER):
        assert zero.batch_exists_v2(KEYS, [PoolTransfer(name)]).kv_hit_pages == 8
        assert one.batch_exists_v2(KEYS, [PoolTransfer(name)]).kv_hit_pages == 0
        assert alone.batch_exists_v2(KEYS, [PoolTransfer(name)]).kv_hit_pages == 0


def test_settings_of_the_server_are_part_of_the_identity(store: KeptStore) -> None:
    found = []
    for quantization in ("fp8", "fp8", "none"):
        with installed(settings={"quantization": quantization, "kv_cache_dtype": "auto"}) as module:
            config = HiCacheStorageConfig(extra_config={"storage": store.spec})  # type: ignore[attr-defined]
            backend = module.MainstemHiCache(config)
            backend.register_mem_pool_host(HostPool())
            found.append(backend.batch_exists(KEYS))
            backend.batch_set_v1(KEYS, indices(8))
            backend.close()
    assert found == [0, 8, 0]


def test_another_layout_is_explained_at_the_start_in_one_line(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make()
    make()
    assert not caplog.messages
    make({PoolName.KV: HostPool(layout="layer_first")})
    (line,) = caplog.messages
    assert "pages of tiny that others stored are not found" in line
    assert "layout sglang page_first, here sglang layer_first" in line


# ---------------------------------------------------------------- faults and mistakes


def test_altered_pages_are_not_copied_into_the_pool_counted_and_logged_once(
    make: Make, store: KeptStore, caplog: pytest.LogCaptureFixture
) -> None:
    pool = HostPool()
    backend = make({PoolName.KV: pool})
    backend.batch_set_v1(KEYS, indices(8))
    store.alter()
    before = numbers(pool)
    for key in KEYS:
        assert backend.batch_get_v1([key], indices(1)) == [False]
    assert torch.equal(pool.buffer, before)
    assert backend.faults == {"altered": 8}
    assert len([line for line in caplog.messages if "altered" in line]) == 1


def test_a_dead_store_is_a_miss(make: Make, store: KeptStore) -> None:
    backend = make(extra={"breaker_failures": 100})
    store.always = StorageError("unreachable", "it died")
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS, indices(8)) == [False] * 8
    assert backend.batch_set_v1(KEYS, indices(8)) == [False] * 8
    assert backend.batch_get(KEYS) == [None] * 8
    assert backend.faults == {"unreachable": 4}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"capacity": "1GiB"}, "must be one of storage, storage_secret, weights, batch_pages"),
        ({"storage": 3}, "storage = 3: must be a text"),
        ({"storage": "nowhere:"}, "must be one of memory:, file:"),
        ({"storage_secret": "short"}, "storage_secret = .*at least 16 bytes"),
        ({"call_timeout_s": 0}, "call_timeout_s = 0: must be"),
    ],
)
def test_a_wrong_key_is_one_clear_line(make: Make, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message) as raised:
        make(extra=extra)
    assert "\n" not in str(raised.value) and "short" not in str(raised.value)


def test_without_a_store(make: Make) -> None:
    with installed() as module, pytest.raises(BadArgument, match="storage = None"):
        module.MainstemHiCache(HiCacheStorageConfig(extra_config=None))


def test_the_environment_has_the_secret(make: Make, store: KeptStore, monkeypatch: pytest.MonkeyPatch) -> None:
    make().batch_set_v1(KEYS, indices(8))
    monkeypatch.setenv("MAINSTEM_STORAGE_SECRET", "a secret of sixteen")
    with installed() as module:
        backend = module.MainstemHiCache(HiCacheStorageConfig(extra_config={"storage": store.spec}))  # type: ignore[attr-defined]
        backend.register_mem_pool_host(HostPool())
        assert backend.batch_exists(KEYS) == 8


def test_stores_of_one_process_have_a_place_for_each_rank(make: Make, tmp_path: Path) -> None:
    spec = f"file:{tmp_path}/kv?capacity=64MiB"
    with pytest.raises(BadArgument, match=r"one with \{rank\} in its spec"):
        make(extra={"storage": spec}, tp_size=2)
    each = f"file:{tmp_path}/kv-{{rank}}?capacity=64MiB"
    numbered = {"pp_size": 2, "attn_cp_size": 3, "tp_size": 4}
    for dp_rank, number in ((0, 23), (1, 47)):
        make(extra={"storage": each}, dp_rank=dp_rank, pp_rank=1, attn_cp_rank=2, tp_rank=3, **numbered)
        assert (tmp_path / f"kv-{number}").exists()
    with pytest.raises(BadArgument, match="one of them writes for all"):
        make(extra={"storage": each}, is_mla_model=True, tp_size=2)


@pytest.mark.parametrize("version", ["0.5.22", "0.6.0"])
def test_an_unknown_version_of_sglang_is_refused(version: str) -> None:
    known = "SGLang {} is not known to this version of Mainstem; known: 0.5.23"
    with pytest.raises(BackendUnavailable, match=known.format(version)), installed(version):
        pass


def test_without_sglang_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.delitem(sys.modules, "mainstem.integrations.sglang", raising=False)
    with pytest.raises(BackendUnavailable, match=r"pip install sglang==0\.5\.23"):
        __import__("mainstem.integrations.sglang")


def test_a_secret_that_is_missing_is_a_warning(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAINSTEM_STORAGE_SECRET", raising=False)
    with installed() as module, caplog.at_level(logging.WARNING):
        module.MainstemHiCache(HiCacheStorageConfig(extra_config={"storage": "memory:"})).close()
    assert caplog.messages == ["storage has no secret: stored pages are safe from damage, not from forgery"]


def test_everything_public_is_documented() -> None:
    with installed() as module:
        assert undocumented(module) == []


def test_the_configuration_of_the_example_and_of_the_page_is_accepted(make: Make, tmp_path: Path) -> None:
    example = tomllib.loads((ROOT / "examples" / "sglang.toml").read_text())
    (page,) = re.findall(r"extra-config '(\{.*?\})'", (ROOT / "docs" / "sglang.md").read_text(), re.DOTALL)
    assert json.loads(page) == example
    store = {"storage": example["storage"].replace("./", f"{tmp_path}/").replace("64GiB", "1MiB")}
    assert make(extra={**example, **store}).batch_set_v1(KEYS, indices(8)) == [True] * 8


# ---------------------------------------------------------------- the calls that SGLang made


@pytest.mark.parametrize("name", sorted(transcripts()))
def test_sglangs_own_calls_have_the_answers_that_they_had(store: KeptStore, name: str) -> None:
    with installed() as module:
        replay(module, transcripts()[name], store.spec)  # type: ignore[attr-defined]
