"""The calls of vLLM's real engine, replayed: the connector answers them as it did in acceptance (`make test-vllm`).

The content of a block is a fingerprint of its name in storage. So a block that is loaded shows whether it is the one
that was asked for, layer by layer.
"""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from doubles.vllm_interface import SPECS, KVConnectorRole, vllm_double
from rigs.hand_driven import HandWorkers

from mainstem.errors import BadArgument

TRANSCRIPTS = sorted((Path(__file__).parent / "recorded").glob("vllm-*.json.xz"))
DTYPES = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with vllm_double() as found:
        monkeypatch.setattr(found, "ThreadWorkers", lambda threads, name: HandWorkers(instant=True))
        yield found


def configs(config: dict[str, Any], groups: list[Any], blocks: int, hash_tokens: int) -> tuple[Any, Any]:
    """Makes vLLM's two configurations from what a transcript has of them."""
    vllm = SimpleNamespace(**{part: SimpleNamespace(**values) for part, values in config.items()})
    vllm.model_config.model = "tiny"
    vllm.model_config.hf_config = SimpleNamespace(to_dict=dict)
    vllm.attention_config = SimpleNamespace(backend=None)
    vllm.kv_transfer_config.kv_connector_extra_config = {"storage": "memory:", "weights": "tiny"}
    made = [
        SimpleNamespace(layer_names=layers, kv_cache_spec=SPECS[spec["type"]](**spec), is_eagle_group=False)
        for layers, spec in groups
    ]
    cache = SimpleNamespace(
        kv_cache_groups=made,
        num_blocks=blocks,
        hash_block_size=hash_tokens,
        kv_cache_layout=None,
        kv_tp_replicas=1,
        prefix_cacheable_group_ids=tuple(range(len(made))),
    )
    return vllm, cache


class Replay:
    """Plays vLLM's part of a transcript."""

    def __init__(self, module: ModuleType, lines: list[Any]) -> None:
        self.lines, self.loaded, self.saved = lines, 0, 0
        start = next(line for line in lines if line[0] == "config")
        caches = next(line for line in lines if line[0] == "caches")[1]
        vllm, cache = configs(*start[1:])
        self.scheduler = module.MainstemConnector(vllm, KVConnectorRole.SCHEDULER, cache)
        self.worker = module.MainstemConnector(vllm, KVConnectorRole.WORKER, cache)
        self.layers = {number: group.layer_names for number, group in enumerate(cache.kv_cache_groups)}
        self.tensors = {name: torch.zeros(shape, dtype=DTYPES[dtype]) for name, (shape, dtype) in caches.items()}
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
        self.requests[request] = SimpleNamespace(
            request_id=request, block_hashes=live, lora_request=None, num_preemptions=0, num_computed_tokens=0
        )
        self.scheduler.on_new_request(self.requests[request])

    def match(self, request: str, computed: int, tokens: int, preemptions: int, found: list[Any]) -> None:
        entry = self.requests[request]
        entry.num_tokens, entry.num_preemptions = tokens, preemptions
        assert list(self.scheduler.get_num_new_matched_tokens(entry, computed)) == found

    def alloc(self, request: str, blocks: list[list[int]], tokens: int) -> None:
        ids = SimpleNamespace(get_block_ids=lambda: blocks)
        self.scheduler.update_state_after_alloc(self.requests[request], ids, tokens)

    def step(self, scheduled: dict[str, Any], hashes: dict[str, list[str]], expected: dict[str, Any]) -> None:
        for request, (_, computed, _) in scheduled.items():
            entry = self.requests[request]
            entry.num_computed_tokens = computed
            entry.block_hashes[:] = [bytes.fromhex(each) for each in hashes[request]]
        state = SimpleNamespace(get_block_ids=lambda name: scheduled[name][2], boundary_state_offloads={})
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
    return float(zlib.crc32(name + layer.encode()) % 251 + 1)


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.name.split(".")[0])
def test_the_calls_of_the_real_engine_are_answered_as_in_acceptance(module: ModuleType, path: Path) -> None:
    replay = Replay(module, json.loads(lzma.decompress(path.read_bytes())))
    replay.run()
    assert replay.saved > 50 and replay.loaded > 50


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 2


def test_a_version_that_was_not_tested_is_refused(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    start = next(line for line in json.loads(lzma.decompress(TRANSCRIPTS[0].read_bytes())) if line[0] == "config")
    vllm, cache = configs(*start[1:])
    monkeypatch.setattr(module.vllm, "__version__", "0.33.0")
    with pytest.raises(BadArgument, match=r"vllm = '0.33.0': must be a version .* tested with: 0\.32\.\*"):
        module.MainstemConnector(vllm, KVConnectorRole.SCHEDULER, cache)
