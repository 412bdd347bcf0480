"""The calls of vLLM's real engine, replayed: the connector answers them as it did in acceptance (`make test-vllm`).

The content of a block is a fingerprint of its name in storage. So a block that is loaded shows whether it is the one
that was asked for, layer by layer.
"""

from __future__ import annotations

import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from doubles.vllm_interface import (
    KV_CACHE,
    MODULES,
    SPECS,
    BlockStored,
    KVConnectorRole,
    Spec,
    vllm_config,
    vllm_double,
)
from rigs.hand_driven import HandWorkers

from mainstem.cache.components import Chunked, Component, Full, State, Window
from mainstem.errors import BadArgument
from mainstem.storage.memory import MemoryBackend

TRANSCRIPTS = sorted((Path(__file__).parents[1] / "recorded").glob("vllm-*.json.xz"))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with vllm_double() as found:
        monkeypatch.setattr(found, "ThreadWorkers", lambda threads, name: HandWorkers(instant=True))
        yield found


def configs(config: dict[str, Any], groups: list[Any], blocks: int, hash_tokens: int) -> tuple[Any, Any]:
    """Makes vLLM's two configurations from what a transcript has of them."""
    made = [
        SimpleNamespace(layer_names=layers, kv_cache_spec=SPECS[spec["type"]](**spec), is_eagle_group=False)
        for layers, spec in groups
    ]
    groups_ = {"kv_cache_groups": made, "prefix_cacheable_group_ids": tuple(range(len(made)))}
    cache = SimpleNamespace(**{**KV_CACHE, "num_blocks": blocks, "hash_block_size": hash_tokens, **groups_})
    return vllm_config(config), cache


HASHES = [bytes([at]) * 32 for at in range(1, 5)]


def make_request(
    name: str, hashes: list[bytes] = HASHES, tokens: Sequence[int] = range(128), salt: str | None = None
) -> Any:
    """Makes one of vLLM's requests, of four blocks unless said otherwise."""
    return SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        all_token_ids=list(tokens),
        lora_request=None,
        cache_salt=salt,
        session_id=None,
        num_preemptions=0,
        num_computed_tokens=0,
    )


class Replay:
    """Plays vLLM's part of a transcript."""

    def __init__(self, module: ModuleType, lines: list[Any]) -> None:
        self.lines, self.loaded, self.saved, self.announced = lines, 0, 0, 0
        start = next(line for line in lines if line[0] == "config")
        caches = next(line for line in lines if line[0] == "caches")[1]
        vllm, cache = configs(*start[1:])
        self.scheduler = module.MainstemConnector(vllm, KVConnectorRole.SCHEDULER, cache)
        self.worker = module.MainstemConnector(vllm, KVConnectorRole.WORKER, cache)
        self.layers = {number: group.layer_names for number, group in enumerate(cache.kv_cache_groups)}
        self.tensors = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            for name, (shape, dtype) in caches.items()
        }
        self.worker.register_kv_caches(self.tensors)
        self.requests: dict[str, Any] = {}
        self.waiting: dict[str, Any] = {}

    def run(self) -> None:
        for name, *arguments in self.lines:
            if name not in ("config", "caches"):
                getattr(self, name)(*arguments)
        assert not self.waiting, "every load has ended"
        self.worker.shutdown()
        self.scheduler.shutdown()

    def new(self, request: str, hashes: list[str]) -> None:
        live = [bytes.fromhex(each) for each in hashes]
        self.requests[request] = make_request(request, live, tokens=range(1024))
        self.scheduler.on_new_request(self.requests[request])

    def match(self, request: str, computed: int, tokens: int, preemptions: int, found: list[Any]) -> None:
        entry = self.requests[request]
        entry.num_tokens, entry.num_preemptions = tokens, preemptions
        assert list(self.scheduler.get_num_new_matched_tokens(entry, computed)) == found

    def alloc(self, request: str, blocks: list[list[int]], tokens: int) -> None:
        ids = SimpleNamespace(get_block_ids=lambda: blocks)
        self.scheduler.update_state_after_alloc(self.requests[request], ids, tokens)

    def step(
        self, scheduled: dict[str, Any], hashes: dict[str, list[str]], offered: dict[str, Any], expected: dict[str, Any]
    ) -> None:
        for request, (_, computed, _) in scheduled.items():
            entry = self.requests[request]
            entry.num_computed_tokens = computed
            entry.block_hashes[:] = [bytes.fromhex(each) for each in hashes[request]]
        state = SimpleNamespace(get_block_ids=lambda name: scheduled[name][2], boundary_state_offloads=offered)
        output = SimpleNamespace(
            num_scheduled_tokens={name: tokens for name, (tokens, _, _) in scheduled.items()},
            kv_connector_block_state=state,
        )
        meta = self.scheduler.build_connector_meta(output)
        shown = {
            kind: [[job.request, [[part.row.number, part.blocks] for part in job.parts]] for job in jobs]
            for kind, jobs in (("loads", meta.plan.loads), ("saves", meta.plan.saves))
        }
        assert shown == expected
        self.forward(meta)

    def forward(self, meta: Any) -> None:
        self.worker.bind_connector_metadata(meta)
        for job in meta.plan.saves:
            for part in job.parts:
                for name, block in zip(part.names, part.blocks, strict=True):
                    self.saved += 1
                    for layer in self.layers[part.row.number]:
                        self.tensors[layer][block] = fingerprint(name, layer)
        for layer in self.tensors:
            self.worker.save_kv_layer(layer, self.tensors[layer], None)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        self.waiting |= {job.request: job for job in meta.plan.loads}
        self.check_loaded(self.worker.get_transfer_results(set()))
        self.worker.clear_connector_metadata()
        confirmed = SimpleNamespace(kv_connector_worker_meta=self.worker.build_connector_worker_meta())
        self.scheduler.update_connector_output(confirmed)
        self.announced += sum(len(event.block_hashes) for event in self.scheduler.take_events())

    def check_loaded(self, results: Any) -> None:
        assert not self.worker.get_block_ids_with_load_errors() and not results.failed_recving
        for request in results.finished_recving:
            for part in self.waiting.pop(request).parts:
                for name, block in zip(part.names, part.blocks, strict=True):
                    self.loaded += 1
                    for layer in self.layers[part.row.number]:
                        assert (self.tensors[layer][block] == fingerprint(name, layer)).all(), (request, layer, block)

    def received(self, requests: list[str], failed: list[str]) -> None:
        assert not failed
        assert not set(requests) & set(self.waiting), "it was loaded by now"

    def finished(self, request: str) -> None:
        assert self.scheduler.request_finished_all_groups(self.requests[request], ()) == (False, None)

    def reset(self) -> None:
        assert self.scheduler.reset_cache()


def fingerprint(name: bytes, layer: str) -> float:
    return float(zlib.crc32(name + layer.encode()) % 101 + 1)


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.name.split(".")[0])
def test_the_calls_of_the_real_engine_are_answered_as_in_acceptance(module: ModuleType, path: Path) -> None:
    replay = Replay(module, json.loads(lzma.decompress(path.read_bytes())))
    replay.run()
    assert replay.saved > 50 and replay.loaded > 25
    assert replay.announced == replay.saved


def test_there_are_transcripts() -> None:
    assert {"vllm-full", "vllm-windows", "vllm-states", "vllm-preempted"} <= {
        path.name.split(".")[0] for path in TRANSCRIPTS
    }


@pytest.fixture
def given() -> tuple[Any, Any]:
    """The two configurations of a transcript."""
    lines = json.loads(lzma.decompress(TRANSCRIPTS[0].read_bytes()))
    return configs(*next(line for line in lines if line[0] == "config")[1:])


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("cache_config", "enable_prefix_caching", False, "enable_prefix_caching = False: must be True"),
        ("cache_config", "prefix_caching_hash_algo", "xxhash", "must be sha256 or sha256_cbor"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size = 2: must be 1"),
        ("load_config", "load_format", "dummy", "load_format = 'dummy'"),
        ("kv_transfer_config", "kv_connector_extra_config", {}, "storage = None: must be the spec of a store"),
        ("kv_transfer_config", "kv_connector_extra_config", {"storage": "memory:"}, "tiny has no files of weights"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    module: ModuleType, given: tuple[Any, Any], part: str, name: str, value: object, message: str
) -> None:
    setattr(getattr(given[0], part), name, value)
    with pytest.raises(BadArgument, match=message):
        module.MainstemConnector(given[0], KVConnectorRole.SCHEDULER, given[1])


def test_a_version_that_was_not_tested_is_refused_before_what_it_may_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "vllm", {"__version__": "0.33.0"})
    monkeypatch.delitem(MODULES, "vllm.v1.kv_cache_interface")
    with (
        pytest.raises(BadArgument, match=r"vllm = '0.33.0': must be a version .* tested with: 0\.32\.\*"),
        vllm_double(),
    ):
        pass


def test_options_are_refused_where_vllm_shows_them_first(module: ModuleType) -> None:
    with pytest.raises(BadArgument, match=r"storage = 'fle:./kv': must be one of memory:, file:, "):
        module.MainstemConnector.requires_piecewise_for_cudagraph({"storage": "readonly+fle:./kv"})
    assert not module.MainstemConnector.requires_piecewise_for_cudagraph({"storage": "file:./kv?capacity=64GiB"})


@pytest.mark.parametrize(
    ("kind", "fields", "component"),
    [
        ("FullAttentionSpec", {}, Full()),
        ("SlidingWindowSpec", {"sliding_window": 64}, Window(63)),
        ("SlidingWindowSpec", {"sliding_window": 64, "extra_retained_tokens": 3}, Window(66)),
        ("SlidingWindowSpec", {"sliding_window": 1}, Window(1)),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 48}, Chunked(48)),
        ("MambaSpec", {"mamba_cache_mode": "align"}, State()),
        ("MambaSpec", {"mamba_cache_mode": "none"}, State()),
    ],
)
@pytest.mark.parametrize("uniform", [False, True])
def test_a_group_is_the_component_that_vllm_needs_of_it(
    module: ModuleType, kind: str, fields: dict[str, Any], component: Component, uniform: bool
) -> None:
    """Blocks of 48 tokens, and a group with a number that is not its place among those that are stored."""
    spec = SPECS[kind](block_size=48, **fields)
    if uniform:
        spec = SPECS["UniformTypeKVCacheSpecs"](block_size=48, kv_cache_specs={"a": spec, "b": spec})
    group = SimpleNamespace(kv_cache_spec=spec, is_eagle_group=False)
    (found,) = module.groups_of(SimpleNamespace(prefix_cacheable_group_ids=(1,), kv_cache_groups=[None, group]))
    assert (found.component, found.block_tokens, found.row.number) == (component, 48, 1)
    assert (found.row.exact, found.offered) == (kind == "MambaSpec", fields.get("mamba_cache_mode") == "align")


@pytest.mark.parametrize(
    ("spec", "draft", "message"),
    [
        (SPECS["FullAttentionSpec"](block_size=16), True, "a draft model with layers of its own"),
        (SPECS["FullAttentionSpec"](block_size=16, has_layer_views=False), False, "layers have a KV cache each"),
        (Spec(block_size=16), False, "full, sliding or chunked attention, MLA, or a recurrent state"),
    ],
)
def test_a_group_that_cannot_be_stored_is_refused(module: ModuleType, spec: Any, draft: bool, message: str) -> None:
    group = SimpleNamespace(kv_cache_spec=spec, is_eagle_group=draft)
    with pytest.raises(BadArgument, match=message):
        module.groups_of(SimpleNamespace(prefix_cacheable_group_ids=(0,), kv_cache_groups=[group]))


def test_blocks_that_hashes_do_not_divide_are_refused(module: ModuleType, given: tuple[Any, Any]) -> None:
    given[1].hash_block_size = 48
    with pytest.raises(BadArgument, match="block size = 32: must be a multiple of 48"):
        module.MainstemConnector(given[0], KVConnectorRole.SCHEDULER, given[1])


def test_a_policy_that_fails_requests_is_warned_of(
    module: ModuleType, given: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    given[0].kv_transfer_config.kv_load_failure_policy = "fail"
    module.MainstemConnector(given[0], KVConnectorRole.SCHEDULER, given[1]).shutdown()
    assert sum('kv_load_failure_policy is "fail"' in record.message for record in caplog.records) == 1


def test_every_rank_has_blocks_of_its_own_unless_ranks_hold_the_same_heads(
    module: ModuleType, given: tuple[Any, Any]
) -> None:
    vllm, cache = given
    options = module.Options("memory:", weights="tiny")

    def shards(replicas: int, mla: bool = False) -> list[str]:
        vllm.parallel_config.tensor_parallel_size, cache.kv_tp_replicas = 4, replicas
        vllm.model_config.use_mla = mla
        return [module.identity_of(vllm, cache, options, rank).shard for rank in range(4)]

    assert shards(1) == ["0 of 4", "1 of 4", "2 of 4", "3 of 4"]
    assert shards(2) == ["0 of 2", "0 of 2", "1 of 2", "1 of 2"]
    assert shards(1, mla=True) == [""] * 4


@pytest.mark.parametrize(
    ("replicas", "mla", "needed", "last"),
    [(1, False, (0, 1, 2, 3), 0), (1, False, (0, 1, 2, 3), 3), (2, False, (1, 2), 1), (2, False, (0, 3), 3),
     (4, False, (3,), 3), (1, True, (2,), 2)],
)  # fmt: skip
def test_a_hit_needs_what_every_rank_of_its_own_has_stored(
    module: ModuleType, given: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, replicas: int, mla: bool,
    needed: tuple[int, ...], last: int,
) -> None:  # fmt: skip
    """Whichever of them lacks it. Ranks that hold the same write the same blocks, so one of them is enough."""
    vllm, cache = given
    vllm.parallel_config.tensor_parallel_size, cache.kv_tp_replicas, vllm.model_config.use_mla = 4, replicas, mla
    cache.kv_cache_groups, cache.prefix_cacheable_group_ids = cache.kv_cache_groups[:1], (0,)
    scheduler = module.MainstemConnector(vllm, KVConnectorRole.SCHEDULER, cache)

    def store(rank: int, name: str) -> None:
        """Computes the prompt, and writes the blocks of one rank."""
        ranked = sys.modules["vllm.distributed.parallel_state"]
        monkeypatch.setattr(ranked, "get_tensor_model_parallel_rank", lambda: rank)
        worker = module.MainstemConnector(vllm, KVConnectorRole.WORKER, cache)
        worker.register_kv_caches(
            {layer: torch.zeros([8, 2, 32, 64]) for layer in cache.kv_cache_groups[0].layer_names}
        )
        scheduler.on_new_request(request := make_request(name))
        state = SimpleNamespace(get_block_ids=lambda name: [[1, 2, 3, 4]], boundary_state_offloads={})
        output = SimpleNamespace(num_scheduled_tokens={request.request_id: 128}, kv_connector_block_state=state)
        worker.bind_connector_metadata(scheduler.build_connector_meta(output))
        worker.wait_for_save()
        worker.shutdown()

    def hit(name: str) -> Any:
        request = make_request(name)
        request.num_tokens = 129
        return scheduler.get_num_new_matched_tokens(request, 0)[0]

    for rank in needed:
        if rank != last:
            store(rank, f"of rank {rank}")
    assert hit("before") == 0
    store(last, "of the last")
    assert hit("after") == 128
    scheduler.shutdown()


class Worked:
    """A connector for both roles, whose writes run on demand, and a request of four blocks."""

    def __init__(self, module: ModuleType, given: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        workers = {"mainstem-read": HandWorkers(instant=True), "mainstem-write": HandWorkers()}
        monkeypatch.setattr(module, "ThreadWorkers", lambda threads, name: workers[name])
        self.writers = workers["mainstem-write"]
        given[1].kv_cache_groups = given[1].kv_cache_groups[:1]
        given[1].prefix_cacheable_group_ids = (0,)
        self.scheduler = module.MainstemConnector(given[0], KVConnectorRole.SCHEDULER, given[1])
        self.writers.run_all()
        self.worker = module.MainstemConnector(given[0], KVConnectorRole.WORKER, given[1])
        layers = given[1].kv_cache_groups[0].layer_names
        self.worker.register_kv_caches({name: torch.zeros([8, 2, 32, 64]) for name in layers})

    def save(self, request: Any, blocks: list[int], end: int) -> None:
        """Runs a step that computes a request up to `end`."""
        state = SimpleNamespace(get_block_ids=lambda name: [blocks], boundary_state_offloads={})
        scheduled = {request.request_id: end - request.num_computed_tokens}
        output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.worker.wait_for_save()
        request.num_computed_tokens = end

    def published(self, ranks: int = 1) -> list[Any]:
        """Returns the events that vLLM gets after what `ranks` workers have to say."""
        self.worker.get_transfer_results(set())
        meta = self.worker.build_connector_worker_meta()
        for _ in range(ranks - 1):
            meta = meta and meta.aggregate(meta)
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=meta))
        return list(self.scheduler.take_events())


@pytest.fixture
def work(module: ModuleType, given: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[], Worked]:
    return lambda: Worked(module, given, monkeypatch)


def test_blocks_are_announced_as_vllm_announces_its_own_once_they_are_stored(work: Callable[[], Worked]) -> None:
    worked = work()
    request = make_request("a", salt="s")
    request.lora_request = SimpleNamespace(lora_path="nowhere", lora_name="french", name="french", adapter_id=3)
    worked.scheduler.on_new_request(request)
    worked.save(request, [1, 2, 3, 4], 64)
    worked.scheduler.request_finished(request, [])
    assert worked.published() == [], "nothing is stored yet"
    worked.writers.run_all()
    (event,) = worked.published()
    assert event == BlockStored(
        block_hashes=[0x0101010101010101, 0x0202020202020202],
        parent_block_hash=None,
        token_ids=list(range(64)),
        block_size=32,
        lora_id=3,
        medium="STORAGE",
        lora_name="french",
        extra_keys=[("s",), None],
        group_idx=0,
        kv_cache_spec_kind="FullAttentionSpec",
        kv_cache_spec_sliding_window=None,
    )
    assert worked.published() == []


def test_an_event_says_what_precedes_its_blocks(work: Callable[[], Worked]) -> None:
    worked = work()
    request = make_request("a")
    request.num_computed_tokens = 32
    worked.scheduler.on_new_request(request)
    worked.save(request, [1, 2, 0, 4], 128)
    worked.writers.run_all()
    events = worked.published()
    assert [(event.parent_block_hash, event.token_ids[0], len(event.token_ids)) for event in events] == [
        (0x0101010101010101, 32, 32),
        (0x0303030303030303, 96, 32),
    ], "a block that vLLM does not keep is not stored"


def test_after_a_reset_a_request_finds_nothing_of_before_and_what_it_goes_on_with_is_not_saved(
    work: Callable[[], Worked],
) -> None:
    worked = work()
    running, waiting = (make_request(name, tokens=range(129)) for name in ("running", "waiting"))
    running.num_tokens = waiting.num_tokens = 129
    worked.scheduler.on_new_request(running)
    worked.scheduler.on_new_request(waiting)
    worked.save(running, [1, 2, 3, 4], 64)
    worked.writers.run_all()
    assert worked.scheduler.get_num_new_matched_tokens(waiting, 0) == (64, True)
    worked.scheduler.reset_cache()
    assert worked.scheduler.get_num_new_matched_tokens(waiting, 0) == (0, False)
    worked.save(running, [1, 2, 3, 4], 128)
    assert worked.writers.run_all() == 0, "its first blocks were computed before"
    running.num_computed_tokens, running.num_preemptions = 0, 1
    assert worked.scheduler.get_num_new_matched_tokens(running, 0) == (0, False)
    worked.save(running, [1, 2, 3, 4], 96)
    worked.writers.run_all()
    waiting.num_preemptions = 1
    assert worked.scheduler.get_num_new_matched_tokens(waiting, 0) == (96, True)


def test_a_step_without_tokens_leaves_the_interpreter_to_the_threads_that_read(
    module: ModuleType, work: Callable[[], Worked], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[str] = []
    monkeypatch.setattr(module.Transfers, "pause", lambda self: pauses.append("pause"))
    worked = work()
    request = make_request("a")
    worked.scheduler.on_new_request(request)
    for scheduled, expected in [({"a": 64}, 0), ({}, 1)]:
        state = SimpleNamespace(get_block_ids=lambda name: [[1, 2, 3, 4]], boundary_state_offloads={})
        output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
        worked.worker.bind_connector_metadata(worked.scheduler.build_connector_meta(output))
        worked.worker.start_load_kv(None)
        worked.worker.wait_for_save()
        assert len(pauses) == expected


@pytest.mark.parametrize("why", ["a rank is missing", "forgotten", "nobody listens"])
def test_what_is_not_known_to_be_found_is_not_announced(
    given: tuple[Any, Any], work: Callable[[], Worked], why: str
) -> None:
    if why == "a rank is missing":
        given[0].parallel_config.tensor_parallel_size = 2
    if why == "nobody listens":
        given[0].kv_events_config = None
    worked = work()
    request = make_request("a")
    worked.scheduler.on_new_request(request)
    worked.save(request, [1, 2, 3, 4], 64)
    if why == "forgotten":
        worked.scheduler.reset_cache()
    worked.writers.run_all()
    assert worked.published() == []
    worked.scheduler.on_new_request(request)
    worked.save(request, [1, 2, 3, 4], 128)
    worked.writers.run_all()
    assert len(worked.published(ranks=2 if why == "a rank is missing" else 1)) == (why != "nobody listens")


@pytest.mark.parametrize("refused", [0, 1])
def test_what_a_full_store_refuses_is_not_announced(
    work: Callable[[], Worked], monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    worked, put = work(), MemoryBackend.put

    def full(self: MemoryBackend, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        pairs = enumerate(zip(keys, buffers, strict=True))
        return [at != refused and put(self, [key], [buffer])[0] for at, (key, buffer) in pairs]

    worked.scheduler.on_new_request(request := make_request("a"))
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBackend, "put", full)
        worked.save(request, [1, 2, 3, 4], 64)
        worked.writers.run_all()
    assert worked.published() == []
    worked.save(request, [1, 2, 3, 4], 128)
    worked.writers.run_all()
    (event,) = worked.published()
    assert event.token_ids == list(range(64, 128))
    assert worked.worker.counts["full"] == 1


def test_an_adapter_adds_the_digest_of_its_files(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"a")
    request = SimpleNamespace(lora_request=SimpleNamespace(lora_path=str(tmp_path), lora_name="a"))
    first = module.adapter_of(request)
    assert first == module.adapter_of(request) != b""
    (tmp_path / "more").write_bytes(b"b")
    assert module.adapter_of(request) != first
    request.lora_request.lora_path = "nowhere"
    assert module.adapter_of(request) != module.adapter_of(request), "what cannot be read is never shared"
    assert module.adapter_of(SimpleNamespace(lora_request=None)) == b""
