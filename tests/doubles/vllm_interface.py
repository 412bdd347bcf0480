"""The parts of vLLM's interface that `mainstem.integrations.vllm` uses, so that its calls can be replayed without vLLM.

Only what the connector imports is here, with the same names and fields, as vLLM 0.32 has them.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass


class KVConnectorWorkerMetadata:
    pass


class SupportsHMA:
    pass


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class KVConnectorBase_V1:  # noqa: N801  # vLLM's name
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata


CONFIG: dict[str, dict[str, Any]] = {
    "model_config": {
        "model": "tiny", "dtype": "torch.bfloat16", "quantization": None, "use_mla": False, "revision": None,
        "quantization_config": None, "code_revision": None,
    },
    "cache_config": {
        "enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256", "block_size": 16, "cache_dtype": "auto",
        "mamba_cache_dtype": "auto", "mamba_ssm_cache_dtype": "auto", "kv_cache_dtype_skip_layers": [],
        "use_replayssm": False, "replayssm_buffer_len": 16,
    },
    "parallel_config": {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    },
    "attention_config": {"backend": None, "backend_per_kind": {}, "indexer_kv_dtype": "auto"},
    "load_config": {"load_format": "auto"},
    "kv_transfer_config": {"kv_load_failure_policy": "recompute"},
}  # fmt: skip
"""The fields of vLLM's configuration that the connector reads, as they are where nobody sets them."""

KV_CACHE: dict[str, Any] = {
    "num_blocks": 8, "kv_cache_groups": [], "prefix_cacheable_group_ids": (0,), "kv_cache_layout": None,
    "hash_block_size": 16, "kv_tp_replicas": 1,
}  # fmt: skip
"""The fields of `KVCacheConfig` that it reads."""


_HOW_FAST = "how fast, or with which rounding, the same is computed"
_WHAT_MEMORY = "how much memory there is, and what vLLM keeps in it"
_WHERE_FROM = "where files come from; their content counts"
_WHAT_IS_ASKED = "what requests may ask for, and how answers are sampled"
_ELSEWHERE = "a copy of what another field says, or follows from the configuration of the model"

UNREAD: dict[str, dict[str, str]] = {
    "model_config": {
        _WHERE_FROM: "model_weights hf_config_path tokenizer tokenizer_mode tokenizer_revision trust_remote_code "
        "allowed_local_media_path allowed_media_domains hf_token config_format",
        _HOW_FAST: "enforce_eager disable_cascade_attn model_impl model_class_overrides enable_cumem_allocator "
        "allow_deprecated_quantization",
        _WHAT_MEMORY: "max_model_len spec_target_max_model_len enable_sleep_mode sleep_preserve_parameter_names "
        "sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend",
        _WHAT_IS_ASKED: "runner convert seed return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel "
        "enable_trace_replay skip_tokenizer_init enable_prompt_embeds served_model_name generation_config "
        "override_generation_config logits_processors io_processor_plugin renderer_num_workers pooler_config",
        _ELSEWHERE: "hf_text_config is_submodel_config word_embeddings_untied_by_checkpoint hf_overrides",
        "the specs of the groups say it": "disable_sliding_window",
        "images are in the hashes of blocks, with what processes them": "multimodal_config",
    },
    "cache_config": {
        _WHAT_MEMORY: "user_specified_block_size prefix_match_unit gpu_memory_utilization num_gpu_blocks_override "
        "prefix_cache_retention_interval mamba_page_size_padded skip_page_size_padded num_gpu_blocks num_cpu_blocks "
        "effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes "
        "cache_hit_alignment_tokens kv_offloading_size kv_offloading_backend enable_mamba_shared_prefix_checkpoint "
        "swa_bounded_replay _block_size_resolved",
        _ELSEWHERE: "kv_cache_layout is_attention_free sliding_window mamba_block_size hash_block_size "
        "mamba_cache_mode",
        _HOW_FAST: "kv_sharing_fast_prefill use_kda_recoverssm",
    },
    "attention_config": {
        _HOW_FAST: "minimax_m3_msa_decode_backend flash_attn_version flash_attn_max_num_splits_for_cuda_graph "
        "tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph use_trtllm_attention indexer_sparse_logits "
        "disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization sparse_mla_force_mqa "
        "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size "
        "flex_attn_kv_block_size",
        _WHAT_MEMORY: "hisparse_config",
        "a model of another kind, whose configuration says it": "use_non_causal",
    },
    "kv_cache": {
        _WHAT_MEMORY: "kv_cache_tensors prefix_cache_retention_interval cache_hit_alignment_tokens "
        "hisparse_host_num_blocks hisparse_host_block_stride hisparse_shared_host_pool",
    },
}
"""Fields of vLLM's classes that the connector does not read, by why blocks do not depend on them."""


def vllm_config(parts: Mapping[str, Mapping[str, Any]]) -> Any:
    """Makes vLLM's configuration; what `parts` does not set is as in `CONFIG`."""
    made = {name: SimpleNamespace(**{**values, **parts.get(name, {})}) for name, values in CONFIG.items()}
    made["model_config"].hf_config = SimpleNamespace(to_dict=dict)
    options = {"storage": "memory:", "weights": "tiny", "host_bytes": 0, "buffer_bytes": "8MiB"}
    made["kv_transfer_config"].kv_connector_extra_config = options
    return SimpleNamespace(**made, kv_events_config=SimpleNamespace(enable_kv_cache_events=True))


class Spec(SimpleNamespace):
    has_layer_views = True


SPECS = {
    name: type(name, (Spec,), {})
    for name in (
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "ChunkedLocalAttentionSpec",
        "MambaSpec",
        "UniformTypeKVCacheSpecs",
    )
}


@dataclass
class BlockStored:
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None


def extra_keys(request: Any, start: int, end: int, first: int) -> tuple[tuple[Any, ...] | None, int]:
    return ((("cache_salt", request.cache_salt),) if start == 0 and request.cache_salt else None), first


MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.distributed.kv_events": {"MEDIUM_STORAGE": "STORAGE", "BlockStored": BlockStored},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": KVConnectorBase_V1,
        "KVConnectorMetadata": KVConnectorMetadata,
        "KVConnectorRole": KVConnectorRole,
        "KVConnectorTransferResults": KVConnectorTransferResults,
        "KVConnectorWorkerMetadata": KVConnectorWorkerMetadata,
        "SupportsHMA": SupportsHMA,
    },
    "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
    "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu", is_cpu=lambda: False)},
    "vllm.v1.core.kv_cache_utils": {
        "generate_block_hash_extra_keys": extra_keys,
        "maybe_convert_block_hash": lambda hash_bytes: int.from_bytes(hash_bytes[-8:], "big"),
        "to_event_extra_keys": lambda keys: [each and tuple(value for _, value in each) for each in keys],
    },
    "vllm.v1.kv_cache_interface": {
        **SPECS,
        "get_kv_cache_spec_kind": lambda spec: SimpleNamespace(value=type(spec).__name__),
        "get_kv_cache_spec_sliding_window": lambda spec: getattr(spec, "sliding_window", None),
        "group_kernel_blocks": lambda cache, blocks: cache,
    },
}
OURS = "mainstem.integrations.vllm"


@contextmanager
def vllm_double() -> Iterator[ModuleType]:
    """Imports the connector over the double; afterwards neither is imported."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name == OURS or name.split(".")[0] == "vllm"}
    try:
        for path, content in MODULES.items():
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                module = sys.modules.setdefault(name, ModuleType(name))
                module.__path__ = []
            for name, value in content.items():
                setattr(sys.modules[path], name, value)
        yield importlib.import_module(OURS)
    finally:
        for name in list(sys.modules):
            if name == OURS or name.split(".")[0] == "vllm":
                del sys.modules[name]
        sys.modules.update(before)
