"""Acceptance of `mainstem.integrations.sglang` in SGLang itself: `make test-sglang`. Its real controllers and pools."""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import redis
from machine import eventually, patience

pytest.importorskip("sglang", reason="no SGLang here; slow lane: make test-sglang")

import torch
from doubles import sglang_hicache as doubled
from rigs.kept_store import KeptStore
from rigs.servers import free_port, valkey
from rigs.sglang_calls import keep, record, transcripts
from rigs.sglang_controller import PAGE, Engine, Family, HybridCacheController, one_rank
from rigs.sglang_process import PAGE_BYTES, Server, save_model
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.server_args import ServerArgs

from mainstem.errors import BackendUnavailable, StorageError
from mainstem.integrations.sglang import _RARE, _SERVER
from mainstem.tiers.storage.sealer import HEADER_BYTES

pytestmark = pytest.mark.deadline

ROOT = Path(__file__).parents[2]
TOKENS = list(range(1000, 1000 + 8 * PAGE))
POOLS: list[tuple[Family, str]] = [
    *(("mha", layout) for layout in ("layer_first", "page_first", "page_first_direct", "page_head")),
    *(("mla", layout) for layout in ("layer_first", "page_first", "page_first_direct")),
    *(("hybrid", layout) for layout in ("page_first", "page_first_direct")),
]
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines, and closes them."""
    engines: list[Engine] = []

    def make(*arguments: Any, **options: Any) -> Engine:
        engines.append(Engine(*arguments, **options))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


@pytest.fixture
def kept() -> tuple[str, KeptStore]:
    """A spec, and the store that it names."""
    name = f"test-{next(NUMBERS)}"
    return f"rigs.kept_store:KeptStore?name={name}", KeptStore.named(name)


def equal(pages: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(pages) == len(expected) and all(
        torch.equal(page, like) for page, like in zip(pages, expected, strict=True)
    )


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "generic"])
@pytest.mark.parametrize(("family", "layout"), POOLS)
def test_everything_is_found_after_a_restart(
    engine: Callable[..., Engine], tmp_path: Path, family: Family, layout: str, v1: bool
) -> None:
    spec = f"file:{tmp_path}/kv?capacity=64MiB"
    first = engine(spec, family, layout, v1=v1)
    assert first.fill(TOKENS) == len(TOKENS)
    first.close()
    second = engine(spec, family, layout, v1=v1)
    found, pages, others = second.fetch_all([*TOKENS, 1, 2, 3])
    assert found == len(TOKENS) and equal(pages, second.expect(TOKENS))
    for side, arrived in zip(second.sides, others, strict=True):
        assert equal(arrived, second.expect(TOKENS, side=side)), side.name
    assert second.backend.faults == {}


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_a_hybrid_prefix_ends_only_where_its_state_and_its_window_were_stored(
    engine: Callable[..., Engine], kept: tuple[str, KeptStore], layout: str
) -> None:
    own = engine(kept[0], "hybrid", layout)
    for pages in (5, 8):
        own.fill(TOKENS[: pages * PAGE])
    for pages, found in ((8, 8), (7, 5), (5, 5), (4, 0)):
        hit, arrived, others = own.fetch_all(TOKENS[: pages * PAGE])
        assert hit == found * PAGE and equal(arrived, own.expect(TOKENS[:hit]))
        for side, other in zip(own.sides, others, strict=True):
            assert equal(other, own.expect(TOKENS[:hit], side=side) if hit else []), side.name


def test_a_prompt_that_diverges_finds_what_it_shares(
    engine: Callable[..., Engine], kept: tuple[str, KeptStore]
) -> None:
    first = engine(kept[0])
    first.fill(TOKENS)
    found, pages = first.fetch([*TOKENS[: 3 * PAGE], *range(5 * PAGE)])
    assert found == 3 * PAGE and equal(pages, first.expect(TOKENS[: 3 * PAGE]))


@pytest.mark.parametrize("namespace", [{"cache_salt": "a tenant"}, {"extra_key": "an adapter"}], ids=str)
def test_a_prompt_in_another_namespace_finds_nothing(
    engine: Callable[..., Engine], kept: tuple[str, KeptStore], namespace: dict[str, str]
) -> None:
    own = engine(kept[0])
    own.fill(TOKENS)
    assert own.fetch(TOKENS)[0] == len(TOKENS)
    assert own.fetch(TOKENS, **namespace) == (0, [])


def test_a_long_prompt_takes_several_calls_and_batches(
    engine: Callable[..., Engine], kept: tuple[str, KeptStore]
) -> None:
    tokens = list(range(30 * PAGE))
    first = engine(kept[0], batch_pages=4, batches=2, writes=2)
    assert first.fill(tokens) == len(tokens)
    found, pages = first.fetch(tokens)
    assert found == len(tokens) and equal(pages, first.expect(tokens))


def test_two_controllers_share_a_store_at_once(engine: Callable[..., Engine]) -> None:
    port = free_port()
    with valkey(port):
        spec = f"redis://127.0.0.1:{port}/0"
        both = [engine(spec), engine(spec)]
        prompts = [[number, *TOKENS[1:]] for number in range(6)]
        errors: list[BaseException] = []

        def serve(own: Engine, mine: list[list[int]]) -> None:
            try:
                for prompt in mine:
                    own.fill(prompt)
                    found, pages = own.fetch(prompt)
                    assert found == len(prompt) and equal(pages, own.expect(prompt))
            except BaseException as error:  # noqa: BLE001  # reported by the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=serve, args=(both[n], prompts[n::2] + prompts[:2])) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience(120))
        assert not errors
        for own, others in ((both[0], prompts[1::2]), (both[1], prompts[0::2])):
            for prompt in others:  # what only the other one has computed
                found, pages = own.fetch(prompt)
                assert found == len(prompt) and equal(pages, own.expect(prompt))
        for own in both:
            own.close()


def test_the_calls_are_those_that_are_replayed_without_sglang(engine: Callable[..., Engine]) -> None:
    """MAINSTEM_RECORD=1 keeps the calls instead, in tests/recorded/."""
    recorded: dict[str, Any] = {}
    for (family, layout), v1 in itertools.product(POOLS, (True, False)):
        spec, sessions = f"rigs.kept_store:KeptStore?name=calls-{next(NUMBERS)}", []
        for restart in (False, True):
            own = engine(spec, family, layout, v1=v1)
            sessions.append(record(own.backend, own.controller.storage_config))
            if not restart:
                own.fill(TOKENS[: 3 * PAGE])
                own.fill(TOKENS)
            for prompt in ([*TOKENS, 1, 2], [*TOKENS[: 3 * PAGE], *range(4 * PAGE)], [9, *TOKENS[1:]]):
                own.fetch(prompt)
            own.close()
        recorded[f"{family}, {layout}, {'the first interface' if v1 else 'the oldest interface'}"] = sessions
    if os.environ.get("MAINSTEM_RECORD"):
        keep(recorded)
    assert recorded == transcripts(), "SGLang makes other calls than were recorded"


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "generic"])
@pytest.mark.parametrize("family", ["mha", "mla", "hybrid"])
def test_altered_pages_are_never_served_and_counted(
    engine: Callable[..., Engine], kept: tuple[str, KeptStore], family: Family, v1: bool
) -> None:
    spec, store = kept
    first = engine(spec, family, v1=v1)
    first.fill(TOKENS)
    assert store.alter() >= 8
    found, pages = first.fetch(TOKENS)
    assert found == len(TOKENS) and pages == []
    assert first.backend.faults["altered"] >= 1
    first.fill(TOKENS)  # the first altered page was deleted, so that it is stored again
    if family != "hybrid":
        assert equal(first.fetch(TOKENS)[1], first.expect(TOKENS[:PAGE]))


def test_pages_after_an_altered_one_are_not_served(engine: Callable[..., Engine], kept: tuple[str, KeptStore]) -> None:
    spec, store = kept
    first = engine(spec)
    first.fill(TOKENS)
    key = store.stored_keys()[-6]  # in the order in which they were stored
    store.set_value(key, store.value(key)[:-1] + b"\xff")
    found, pages = first.fetch(TOKENS)
    assert found == len(TOKENS) and equal(pages, first.expect(TOKENS[: 2 * PAGE]))


def test_a_page_of_another_prompt_is_not_served(engine: Callable[..., Engine], kept: tuple[str, KeptStore]) -> None:
    spec, store = kept
    first = engine(spec)
    first.fill(TOKENS)
    theirs = [store.value(key) for key in store.stored_keys()]
    for key, value in zip(store.stored_keys(), theirs[1:] + theirs[:1], strict=True):
        store.set_value(key, value)
    assert first.fetch(TOKENS) == (len(TOKENS), [])
    assert first.backend.faults["misdirected"] + first.backend.faults.get("length", 0) >= 1


def test_a_store_that_dies_is_a_miss_and_serves_again_when_it_is_back(
    engine: Callable[..., Engine], kept: tuple[str, KeptStore]
) -> None:
    spec, store = kept
    first = engine(spec, breaker_failures=3, breaker_cooldown_s=0.0)
    first.fill(TOKENS)
    store.always = StorageError("unreachable", "it died")
    assert first.fetch(TOKENS) == (0, [])
    assert first.fill([7, *TOKENS[1:]]) == 0
    assert first.backend.faults["unreachable"] >= 2
    store.always = None
    found, pages = first.fetch(TOKENS)
    assert found == len(TOKENS) and equal(pages, first.expect(TOKENS))


@pytest.mark.parametrize("method", ["exists", "get", "put"])
def test_a_store_that_hangs_is_a_miss_after_its_deadline(
    engine: Callable[..., Engine], kept: tuple[str, KeptStore], method: str
) -> None:
    spec, store = kept
    first = engine(spec, call_timeout_s=patience(0.2))
    first.fill(TOKENS)
    back = threading.Event()
    real = getattr(super(KeptStore, store), method)

    def late(*arguments: Any) -> Any:
        back.wait(patience(60))
        return real(*arguments)

    store.instead = {method: late}
    if method == "put":
        assert first.fill([7, *TOKENS[1:]]) == 0
    else:
        assert first.fetch(TOKENS)[1] == []
    assert first.backend.faults["timeout"] >= 1
    host = first.host
    host.kv_buffer.fill_(1.0)  # SGLang uses the memory for something else
    store.instead = {}
    back.set()
    first.close()  # all calls have ended
    assert bool((host.kv_buffer == 1.0).all()), "a late call wrote to memory that is no longer its own"
    second = engine(spec)
    found, pages = second.fetch(TOKENS)
    assert found == len(TOKENS) and equal(pages, second.expect(TOKENS))


# ---------------------------------------------------------------- identity


@pytest.mark.parametrize(
    "changed",
    [
        {"layout": "layer_first"},
        {"family": "mla"},
        {"page_size": 2 * PAGE},
        {"dtype": torch.float16},
        {"model": "another"},
        {"weights": "of yesterday"},
        {"storage_secret": "s" * 16},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_another_layout_or_model_stored_is_not_found(
    engine: Callable[..., Engine],
    kept: tuple[str, KeptStore],
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
) -> None:
    engine(kept[0]).fill(TOKENS)
    other = engine(kept[0], **changed)
    assert other.fetch(TOKENS) == (0, [])
    explained = [text for text in caplog.messages if "are not found, because they differ" in text]
    assert len(explained) == ("model" not in changed and "storage_secret" not in changed)
    if "layout" in changed:
        assert "layout sglang page_first, here sglang layer_first" in explained[0]
    if "page_size" in changed:
        assert "page size 16, here 32" in explained[0]


def test_sglangs_configuration_has_the_fields_that_the_double_has_and_no_others_count() -> None:
    """A field that is new in SGLang fails until the integration reads it, or the double says why it need not."""
    assert {each.name for each in fields(HiCacheStorageConfig)} == {
        each.name for each in fields(doubled.HiCacheStorageConfig)
    }
    names = {*ServerArgs.__struct_fields__}
    read = {*_SERVER, *_RARE}
    assert read <= names, "a setting that SGLang does not have is None in every name"
    unread = {name for listed in doubled.UNREAD.values() for name in listed.split()}
    assert {name for name in names - read if re.search(doubled.FORMATS, name)} == unread


def test_latents_are_stored_once_for_all_ranks(engine: Callable[..., Engine], kept: tuple[str, KeptStore]) -> None:
    spec, _ = kept
    with one_rank(0, 2):
        zero = engine(spec, "mla")
    with one_rank(1, 2):
        one = engine(spec, "mla")
    one.fill(TOKENS)
    assert one.fetch(TOKENS) == (0, [])  # SGLang lets rank 0 write for all
    zero.fill(TOKENS)
    found, pages = one.fetch(TOKENS)
    assert found == len(TOKENS) and equal(pages, zero.expect(TOKENS))
    with one_rank(0, 1):
        assert equal(engine(spec, "mla").fetch(TOKENS)[1], zero.expect(TOKENS))  # for any number of ranks


def test_clear_deletes_everything(engine: Callable[..., Engine], kept: tuple[str, KeptStore]) -> None:
    first = engine(kept[0])
    first.fill(TOKENS)
    assert first.backend.clear()
    assert first.fetch(TOKENS) == (0, [])


# ---------------------------------------------------------------- what is wrong at the start


def test_a_store_that_is_not_there(engine: Callable[..., Engine]) -> None:
    with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1"):
        engine(f"redis://127.0.0.1:{free_port()}/0")


def test_sglang_reads_the_example() -> None:
    extra, threshold, *_ = HybridCacheController.parse_storage_backend_extra_config(f"@{ROOT}/examples/sglang.toml")
    assert (extra["class_name"], threshold) == ("MainstemHiCache", 256)


# ---------------------------------------------------------------- the real server


@pytest.mark.timeout(1800)
def test_the_real_server_continues_after_a_restart_and_recomputes_altered_pages(tmp_path: Path) -> None:
    model, log = save_model(tmp_path / "model"), tmp_path / "server.log"
    prompts = [[number, *range(10, 10 + 6 * PAGE)] for number in range(1, 4)]
    port = free_port()
    with valkey(port):
        store = f"redis://127.0.0.1:{port}/0"
        with Server(model, store, log) as server:
            cold = [server.generate(prompt) for prompt in prompts]
            eventually(lambda: len(stored(port)) == 3 * 6, 60)
        assert [hit for _, hit in cold] == [0, 0, 0]
        with Server(model, store, log) as server:
            warm = [server.generate(prompt) for prompt in prompts]
            assert warm == [(answer, 6 * PAGE) for answer, _ in cold]
            assert alter(port) == 3 * 6
            server.ask("/flush_cache", method="POST")
            assert [server.generate(prompt) for prompt in prompts] == cold, "an altered page was served"
        assert log.read_text(errors="replace").count("storage: altered") == 1


def stored(port: int) -> list[bytes]:
    """Returns the keys of all pages in a store, which are known by their length."""
    client = redis.Redis(port=port)
    return [key for key in client.scan_iter() if client.strlen(key) == HEADER_BYTES + PAGE_BYTES]


def alter(port: int) -> int:
    """Changes a byte of every page in a store; returns how many there are."""
    client, pages = redis.Redis(port=port), stored(port)
    for key in pages:
        client.setrange(key, 200, bytes([client.getrange(key, 200, 200)[0] ^ 1]))
    return len(pages)
