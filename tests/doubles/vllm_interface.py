"""The parts of vLLM's interface that `mainstem.integrations.vllm` uses, so that its calls can be replayed without vLLM.

Only what the connector imports is here, with the same names and fields, as vLLM 0.32 has them.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator
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
