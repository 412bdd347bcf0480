"""What vLLM calls of the connector, written down while its real engine runs: the transcripts that `make test` replays.

Runs in vLLM's environment, scheduler and worker in one process. Each entry of a transcript is one call: its name, what
the connector reads of its arguments, and its result.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import Any

from mainstem.integrations.vllm import MainstemConnector

CONFIG = {
    "cache_config": (
        "enable_prefix_caching", "prefix_caching_hash_algo", "block_size", "cache_dtype", "mamba_cache_dtype",
        "mamba_ssm_cache_dtype", "use_replayssm", "replayssm_buffer_len",
    ),
    "parallel_config": (
        "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ),
    "model_config": ("dtype", "quantization", "use_mla", "revision"),
    "load_config": ("load_format",),
    "kv_transfer_config": ("kv_load_failure_policy",),
}  # fmt: skip
"""What the connector reads of vLLM's configuration."""

_lines: list[Any] = []


def _note(*entry: Any) -> None:
    _lines.append(entry)


def _spec(spec: Any) -> dict[str, Any]:
    return {"type": type(spec).__name__, **{each.name: _plain(getattr(spec, each.name)) for each in fields(spec)}}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | str) else str(value)


class RecordedConnector(MainstemConnector):
    """The connector, with a transcript."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role.name == "SCHEDULER":
            config = {
                part: {name: _plain(getattr(getattr(vllm_config, part), name)) for name in names}
                for part, names in CONFIG.items()
            }
            groups = [[group.layer_names, _spec(group.kv_cache_spec)] for group in kv_cache_config.kv_cache_groups]
            _note("config", config, groups, kv_cache_config.num_blocks, kv_cache_config.hash_block_size)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        _note("new", request.request_id, [each.hex() for each in request.block_hashes])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] is not None:
            _note("match", request.request_id, num_computed_tokens, request.num_tokens, request.num_preemptions, found)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        _note("alloc", request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        state = scheduler_output.kv_connector_block_state
        step = {
            name: [tokens, self._requests[name].num_computed_tokens, state.get_block_ids(name)]
            for name, tokens in scheduler_output.num_scheduled_tokens.items()
        }
        offered = state.boundary_state_offloads
        hashes = {name: [each.hex() for each in self._requests[name].block_hashes] for name in step}
        meta = super().build_connector_meta(scheduler_output)
        plan = {
            kind: [[job.request, [[part.row.number, part.blocks] for part in job.parts]] for job in jobs]
            for kind, jobs in (("loads", meta.plan.loads), ("saves", meta.plan.saves))
        }
        if step or plan["loads"]:
            _note("step", step, hashes, offered, plan)
        return meta

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        _note("finished", request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def reset_cache(self) -> bool:
        _note("reset")
        return super().reset_cache()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        _note("caches", {name: [list(each.shape), str(each.dtype)] for name, each in kv_caches.items()})

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self.drain(60.0)  # as in a replay, where a write ends at once

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            _note("received", sorted(results.finished_recving), sorted(results.failed_recving))
        return results

    def shutdown(self) -> None:
        super().shutdown()
        with open(os.environ["MAINSTEM_TRANSCRIPT"], "w") as file:
            json.dump(_lines, file)
