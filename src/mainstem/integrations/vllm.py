"""Mainstem's storage inside vLLM: a KV connector, loaded by name.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "MainstemConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "mainstem.integrations.vllm", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"storage": "file:./kv?capacity=64GiB"}}'

vLLM makes one connector in the scheduler and one in each worker. The first decides what is loaded and saved
(`block_plan`), the others do it (`block_transfer`). This module translates between vLLM's objects and theirs. What a
block's content depends on is an `Identity`, which both compute from vLLM's configuration. See docs/vllm.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.cache.components import Chunked, Component, Full, State, Window
from mainstem.cache.identity import Identity
from mainstem.errors import BackendUnavailable, BadArgument, redacted
from mainstem.imports import needs
from mainstem.integrations.block_events import Announcements
from mainstem.integrations.block_plan import GroupBlocks, Job, LayerGroup, Planner, StepPlan
from mainstem.integrations.block_transfer import Transfers
from mainstem.integrations.files import digest_adapter, digest_weights
from mainstem.integrations.options import Options
from mainstem.settings.engine import StorageConfig
from mainstem.storage.base import Backend, open_backend
from mainstem.storage.wrappers import Wrapper
from mainstem.tiers.storage import identities
from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.sealer import PUBLIC_SECRET, Sealer
from mainstem.tiers.storage.store import Store
from mainstem.tiers.storage.workers import ThreadWorkers

VERSIONS = ("0.32.",)
"""The beginnings of the versions of vLLM that this connector was tested with."""

with needs("vllm", "mainstem.integrations.vllm is loaded by vLLM, which is not installed: pip install vllm"):
    import vllm

    if not vllm.__version__.startswith(VERSIONS):  # before what another version may not have
        known = ", ".join(f"{version}*" for version in VERSIONS)
        raise BadArgument("vllm", vllm.__version__, f"a version that MainstemConnector was tested with: {known}")
    from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import (
        generate_block_hash_extra_keys,
        maybe_convert_block_hash,
        to_event_extra_keys,
    )
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
        get_kv_cache_spec_kind,
        get_kv_cache_spec_sliding_window,
        group_kernel_blocks,
    )

log = logging.getLogger("vllm.mainstem")  # vLLM shows the loggers below its own

SECRET = "MAINSTEM_STORAGE_SECRET"
"""The environment variable with the secret of the store. vLLM logs its options, so the secret is none of them."""

_CLOSE_S = 30.0  # for writes that are queued when the engine ends


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM need not be installed where types are checked
    """The scheduler's message to the workers in each step. `idle`: the step computes nothing."""

    plan: StepPlan = field(default_factory=StepPlan)
    idle: bool = False


@dataclass
class Saved(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as `Metadata`
    """The workers' answer: the saves that have ended, by number, and whether storage has all their blocks."""

    saves: list[tuple[int, bool]]

    def aggregate(self, other: Saved) -> Saved:
        """Returns the reports of both."""
        return Saved(self.saves + other.saves)


# ---------------------------------------------------------------- what vLLM's configuration says


def check(vllm_config: Any) -> None:
    """Refuses what the connector cannot serve, and warns of what is unwise.

    Raises:
        BadArgument: says what is allowed.
    """
    if vllm_config.load_config.load_format == "dummy":
        raise BadArgument("load_format", "dummy", "one that reads weights: what dummy weights compute is not stored")
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if not cache.enable_prefix_caching:
        raise BadArgument(
            "enable_prefix_caching", False, "True: stored blocks are found by the hashes of prefix caching"
        )
    if not str(cache.prefix_caching_hash_algo).startswith("sha256"):
        raise BadArgument(
            "prefix_caching_hash_algo", cache.prefix_caching_hash_algo, "sha256 or sha256_cbor: others can collide"
        )
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise BadArgument(name, getattr(parallel, name), "1 with MainstemConnector")
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        log.warning(
            'kv_load_failure_policy is "%s": a request fails if a stored block cannot be read; choose "recompute"',
            vllm_config.kv_transfer_config.kv_load_failure_policy,
        )


def groups_of(kv_cache_config: Any) -> list[LayerGroup]:
    """Returns the groups of layers that are stored.

    Raises:
        BadArgument: a group is of a kind that is not known, or has layers of a draft model.
    """
    groups = []
    for number in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[number]
        spec = _spec(group)
        if group.is_eagle_group:
            raise BadArgument("speculative_config", "a draft model with layers of its own", "another method, or none")
        if not spec.has_layer_views:
            raise BadArgument("model", type(spec).__name__, "one whose layers have a KV cache each")
        component = _component(spec)
        offered = isinstance(component, State) and spec.mamba_cache_mode == "align"
        name = f"{component.name} {number}"
        row = Row(number, name, isinstance(component, State))
        groups.append(LayerGroup(row, component, group.kv_cache_spec.block_size, offered))
    return groups


def _spec(group: Any) -> Any:
    spec = group.kv_cache_spec
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _component(spec: Any) -> Component:
    """Returns which positions vLLM needs of a group. It counts a window without the query's own position."""
    if isinstance(spec, SlidingWindowSpec):
        return Window(max(1, spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Chunked(spec.attention_chunk_size)
    if isinstance(spec, MambaSpec):
        return State()
    if isinstance(spec, FullAttentionSpec):
        return Full()
    raise BadArgument("model", type(spec).__name__, "full, sliding or chunked attention, MLA, or a recurrent state")


def identity_of(vllm_config: Any, kv_cache_config: Any, options: Options, tp_rank: int) -> Identity:
    """Returns everything that the content of a block depends on. Equal in the scheduler and all workers.

    Args:
        vllm_config, kv_cache_config: as the connector gets them.
        options: the connector's.
        tp_rank: the worker's rank in its tensor-parallel group.

    Raises:
        BadArgument: there are no weights to compute a digest of.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    config = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"):
        config.pop(name, None)
    specs = [_spec(group) for group in kv_cache_config.kv_cache_groups]
    states = any(isinstance(spec, MambaSpec) for spec in specs)
    replicas = kv_cache_config.kv_tp_replicas  # so many ranks in a row hold the same heads
    shape = "; ".join(
        f"{len(group.layer_names)} layers of {type(spec).__name__} in blocks of {spec.block_size}"
        for group, spec in zip(kv_cache_config.kv_cache_groups, specs, strict=True)
    )
    return Identity(
        model=Path(model.model).name,
        weights=options.weights or digest_weights(model.model, model.revision),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=str(model.quantization or "none"),
        layout=f"vllm {vllm.__version__} {_layout(vllm_config, kv_cache_config, specs)}",
        shape=shape,
        attention=("mla with states" if states else "mla") if model.use_mla else "gqa",
        rope=json.dumps(config.get("rope_parameters"), sort_keys=True, default=str),
        tokenizer="token ids of the model",
        symbols=f"block hash {cache.prefix_caching_hash_algo}",
        page_size=kv_cache_config.hash_block_size or cache.block_size,
        tp_rank=tp_rank // replicas,
        tp_size=parallel.tensor_parallel_size // replicas,
        extra=(
            f"configuration {hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()}",
            f"cache {cache.cache_dtype} {cache.mamba_cache_dtype} {cache.mamba_ssm_cache_dtype}",
            *_unusual(vllm_config),
        ),
    )


def _unusual(vllm_config: Any) -> list[str]:
    """Returns settings that blocks depend on and few use: unless they are set, names are as they were without them."""
    model, cache, attention = vllm_config.model_config, vllm_config.cache_config, vllm_config.attention_config
    settings = {
        "online_quantization": model.quantization_config,  # beside the name of its method
        "code_revision": model.code_revision,
        "unquantized_layers": sorted(cache.kv_cache_dtype_skip_layers),
        "replayssm": cache.use_replayssm and cache.replayssm_buffer_len,  # a state's block has its last inputs, too
        "backend_per_kind": {kind: str(backend) for kind, backend in sorted(attention.backend_per_kind.items())},
        "indexer": attention.indexer_kv_dtype != "auto" and attention.indexer_kv_dtype,
    }
    return [f"{name} {value}" for name, value in settings.items() if value]


def _layout(vllm_config: Any, kv_cache_config: Any, specs: Sequence[Any]) -> str:
    """Returns the order of the numbers in a block. On a CPU it depends on the instruction set."""
    backend = str(vllm_config.attention_config.backend)
    names = [current_platform.device_type, str(kv_cache_config.kv_cache_layout), backend]
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        cache = vllm_config.cache_config
        names += [
            _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, cache.cache_dtype)
            for spec in specs
            if hasattr(spec, "head_size")
        ]
    return " ".join(names)


def adapter_of(request: Any) -> bytes:
    """Returns what a request's LoRA adapter adds to its namespace: vLLM's hashes have its name and path only.

    The adapter's files may be replaced, so their digest counts. Where they cannot be read, nothing is shared.
    """
    adapter = request.lora_request
    if adapter is None:
        return b""
    try:
        return digest_adapter(adapter.lora_path).encode()
    except OSError as error:
        log.warning("LoRA adapter %s cannot be read, so its blocks are not shared: %s", adapter.lora_name, error)
        return secrets.token_bytes(32)


# ---------------------------------------------------------------- what vLLM publishes


class Events:
    """Describes saves as vLLM describes what comes to its own cache, so that one router understands both.

    Args:
        groups: the groups that are stored.
        hash_tokens: positions per hash.
        kv_cache_config: vLLM's.
    """

    def __init__(self, groups: Sequence[LayerGroup], hash_tokens: int, kv_cache_config: Any) -> None:
        self._hash_tokens = hash_tokens
        self._groups = {group.row.number: group for group in groups}
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]

    def of(self, request: Any, save: Job) -> list[BlockStored]:
        """Returns an event for each run of blocks that a save stores."""
        return [self._of_run(request, run) for part in save.parts for run in self._runs(part)]

    def _runs(self, part: GroupBlocks) -> Iterator[GroupBlocks]:
        size, first = self._groups[part.row.number].block_tokens, 0
        for at in range(1, len(part.ends) + 1):
            if at == len(part.ends) or part.ends[at] != part.ends[at - 1] + size:
                yield part.cut(first, at)
                first = at

    def _of_run(self, request: Any, run: GroupBlocks) -> BlockStored:
        number = run.row.number
        size, spec, adapter = self._groups[number].block_tokens, self._specs[number], request.lora_request
        start = run.ends[0] - size
        extra = [generate_block_hash_extra_keys(request, end - size, end, 0)[0] for end in run.ends]
        return BlockStored(
            block_hashes=[self._hash(request, end) for end in run.ends],
            parent_block_hash=self._hash(request, start) if start else None,
            token_ids=list(request.all_token_ids[start : run.ends[-1]]),
            block_size=size,
            lora_id=adapter.adapter_id if adapter else None,
            medium=MEDIUM_STORAGE,
            lora_name=adapter.name if adapter else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=number,
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
            session_id=request.session_id,
        )

    def _hash(self, request: Any, end: int) -> Any:
        return maybe_convert_block_hash(request.block_hashes[end // self._hash_tokens - 1])


# ---------------------------------------------------------------- the store


class _Shared(Wrapper):
    """A back end that the scheduler and a worker of one process share: the last of them closes it."""

    _open: ClassVar[dict[str, tuple[Backend, set[_Shared]]]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, spec: str) -> None:
        self._spec = spec
        with self._lock:
            if spec not in self._open:
                self._open[spec] = (open_backend(spec), set())
            inner, users = self._open[spec]
            users.add(self)
        super().__init__(inner)

    def close(self) -> None:
        """Closes the back end unless another uses it."""
        with self._lock:
            inner, users = self._open.get(self._spec, (self._inner, set()))
            users.discard(self)
            if not users:
                self._open.pop(self._spec, None)
                inner.close()


def _open_store(options: Options, identities_: Sequence[Identity]) -> list[Store]:
    """Opens the store, once for each identity.

    Raises:
        BadArgument: the spec is invalid.
        BackendUnavailable: the store cannot be opened.
    """
    secret = os.environ.get(SECRET, "").encode()
    if not secret:
        log.warning("storage has no secret (%s): stored blocks are safe from damage, not from forgery", SECRET)
    config = StorageConfig(call_timeout_s=options.timeout_s)
    try:
        backend = _Shared(options.spec)
    except BackendUnavailable as error:
        # Without its cause: vLLM logs the traceback of each error of a chain, and this line says it all.
        raise BackendUnavailable(f"storage {redacted(options.storage)!r}: {error}") from None
    readers = ThreadWorkers(config.batches, "mainstem-read")
    writers = ThreadWorkers(config.writes, "mainstem-write")
    return [
        Store(
            backend,
            Sealer(identity, secret or PUBLIC_SECRET),
            config,
            readers=readers,
            writers=writers,
            clock=time.monotonic,
        )
        for identity in identities_
    ]


class Caches:
    """vLLM's KV cache as `block_transfer.Blocks`.

    Args:
        groups: the groups that are stored.
        kv_cache_config: vLLM's.
        tensors: by layer, [blocks, ...]; a block may be several kernel blocks in a row.
    """

    def __init__(self, groups: Sequence[LayerGroup], kv_cache_config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        self._rows = [group.row for group in groups]
        self._layers: dict[int, dict[str, tuple[torch.Tensor, int, int]]] = {}
        self._bytes: dict[int, int] = {}
        for row in self._rows:
            at = 0
            self._layers[row.number] = places = {}
            for name in kv_cache_config.kv_cache_groups[row.number].layer_names:
                if name not in tensors:
                    continue  # another layer's cache, shared
                tensor = group_kernel_blocks(tensors[name], kv_cache_config.num_blocks)
                size = tensor[0].numel() * tensor.element_size()
                places[name] = (tensor, at, at + size)
                at += size
            self._bytes[row.number] = at

    def rows(self) -> Sequence[Row]:
        """The rows of the groups."""
        return self._rows

    def layers(self, row: Row) -> Sequence[str]:
        """The layers of a group by name."""
        return list(self._layers[row.number])

    def block_bytes(self, row: Row) -> int:
        """The bytes of all layers of a block."""
        return self._bytes[row.number]

    def gather(self, row: Row, layer: str, blocks: Sequence[int], slots: NDArray[np.uint8]) -> None:
        """Copies a layer of blocks from the device."""
        tensor, begin, end = self._layers[row.number][layer]
        content = tensor[torch.tensor(blocks, device=tensor.device)].reshape(len(blocks), -1).contiguous()
        torch.from_numpy(slots)[:, begin:end] = content.view(torch.uint8).cpu()

    def scatter(self, row: Row, blocks: Sequence[int], slots: NDArray[np.uint8]) -> None:
        """Copies blocks to the device."""
        content = torch.from_numpy(slots)
        for tensor, begin, end in self._layers[row.number].values():
            part = content[:, begin:end].contiguous().view(tensor.dtype).view(len(blocks), *tensor.shape[1:])
            tensor[torch.tensor(blocks, device=tensor.device)] = part.to(tensor.device)


# ---------------------------------------------------------------- the connector


class MainstemConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as `Metadata`
    """Saves vLLM's KV blocks to a store of Mainstem and loads them from there, asynchronously.

    Args:
        vllm_config, role, kv_cache_config: from vLLM.

    Raises:
        BadArgument: an option or a part of vLLM's configuration is not one that can be served.
        BackendUnavailable: the store cannot be opened.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check(vllm_config)
        self._options = Options.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._groups = groups_of(kv_cache_config)
        self._requests: dict[str, Any] = {}
        self._planner: Planner | None = None
        self._transfers: Transfers | None = None
        self._stores: list[Store] = []
        self._failed_blocks: set[int] = set()
        settings = vllm_config.kv_events_config
        self._events_on = settings is not None and settings.enable_kv_cache_events
        self._announced: Announcements[BlockStored] = Announcements(vllm_config.parallel_config.tensor_parallel_size)
        self._saved: list[tuple[int, bool]] = []
        self._entering: StoreCall[list[identities.Summary]] | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler()

    def _start_scheduler(self) -> None:
        first = identity_of(self._vllm_config, self._kv_cache_config, self._options, 0)
        ranks = 1 if first.replicated else first.tp_size
        replicas = self._kv_cache_config.kv_tp_replicas
        all_ranks = [
            identity_of(self._vllm_config, self._kv_cache_config, self._options, rank * replicas)
            for rank in range(ranks)
        ]
        self._stores = _open_store(self._options, all_ranks)
        self._planner = Planner(self._stores, self._groups, first.page_size)
        self._events = Events(self._groups, first.page_size, self._kv_cache_config)
        self._entering = self._stores[0].enter_identity()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Returns False. Where there are CUDA graphs, vLLM shows the options here first, before it loads weights.

        Raises:
            BadArgument: one of them cannot be served.
        """
        Options.read(extra_config)
        return False

    # ---- scheduler

    def on_new_request(self, request: Any) -> None:
        """Begins a request."""
        assert self._planner is not None
        self._requests[request.request_id] = request
        self._planner.begin(request.request_id, request.block_hashes, adapter_of(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens storage has after those that vLLM has, or None while it is being asked."""
        assert self._planner is not None
        if request.request_id not in self._requests:
            self.on_new_request(request)
        tokens = self._planner.hit(request.request_id, num_computed_tokens, request.num_tokens, request.num_preemptions)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plans a load."""
        assert self._planner is not None
        self._planner.allocated(request.request_id, num_external_tokens, blocks.get_block_ids())

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """Returns the loads and saves of this step."""
        assert self._planner is not None
        state = scheduler_output.kv_connector_block_state
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is not None:
                computed = request.num_computed_tokens
                self._planner.scheduled(request_id, computed, computed + tokens, state.get_block_ids(request_id))
        for request_id, offered in state.boundary_state_offloads.items() if state is not None else ():
            for group, block, end in offered:
                self._planner.state(request_id, group, block, end)
        self._explain()
        plan = self._planner.take()
        if self._events_on:
            for save in plan.saves:
                self._announced.hold(save.number, self._events.of(self._requests[save.request], save))
        return Metadata(plan, idle=not scheduler_output.num_scheduled_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes in which saves have ended on the workers."""
        if isinstance(connector_output.kv_connector_worker_meta, Saved):
            self._announced.confirm(connector_output.kv_connector_worker_meta.saves)

    def take_events(self) -> list[BlockStored]:
        """Returns the blocks that every worker has stored since the last call, for vLLM to publish."""
        return self._announced.take()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request. Its blocks were copied in the steps that computed them, so vLLM may free them."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request of a hybrid model."""
        assert self._planner is not None
        self._planner.end(request.request_id)
        self._requests.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Makes everything that was stored so far unfindable for this engine: its weights may have been replaced.

        A request that runs on is neither saved nor announced until vLLM looks it up anew, to compute it from its start.
        """
        if self._planner is not None:
            self._planner.forget(secrets.token_bytes(16))
            self._requests.clear()
            self._announced.clear()
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not happen is a later miss, nothing else."""
        return False

    def _explain(self) -> None:
        """Logs once why a store with blocks of this model has none for this configuration."""
        if self._entering is not None and self._entering.done():
            identity = self._stores[0].sealer.identity
            assert identity is not None
            why = identities.explain(identities.summarize(identity), self._entering.value)
            self._entering = None
            if why is not None:
                log.warning("storage: %s", why)

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens the store for the memory of this worker."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
        identity = identity_of(self._vllm_config, self._kv_cache_config, self._options, rank)
        self._stores = _open_store(self._options, [identity])
        caches = Caches(self._groups, self._kv_cache_config, kv_caches)
        self._transfers = Transfers(self._stores[0], caches, self._options.buffer_bytes)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begins the saves of a step, before its forward."""
        super().bind_connector_metadata(connector_metadata)
        if self._transfers is not None:
            self._transfers.begin(connector_metadata.plan.saves)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts the loads of a step. Their requests wait, so the forward does not."""
        if self._transfers is not None:
            meta = self._get_connector_metadata()
            self._transfers.load(meta.plan.loads)
            if meta.idle:  # vLLM steps again at once, and would keep the interpreter from the threads that read
                self._transfers.pause()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Returns at once: no request runs before its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Copies a layer of the blocks that are saved, as soon as it is computed."""
        if self._transfers is not None:
            self._transfers.copy(layer_name)

    def wait_for_save(self) -> None:
        """Copies the layers that are left, such as states, and queues the writes."""
        if self._transfers is not None:
            self._transfers.flush()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the loads that have ended. Failures of hybrids are by request, others by block."""
        if self._transfers is None:
            return KVConnectorTransferResults()
        results = self._transfers.poll()
        self._saved += results.saved.items() if self._events_on else ()
        hybrid = len(self._kv_cache_config.kv_cache_groups) > 1
        self._failed_blocks = set() if hybrid else results.failed_blocks
        return KVConnectorTransferResults(
            finished_recving=results.loaded, failed_recving=results.failed if hybrid else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks that could not be loaded, for vLLM to compute."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> Saved | None:
        """Returns the saves that have ended, if somebody listens to events."""
        saved, self._saved = self._saved, []
        return Saved(saved) if saved else None

    @property
    def counts(self) -> Counter[str]:
        """Blocks by what became of them, and faults of the store by cause, since the start."""
        counts = Counter(self._transfers.counts if self._transfers is not None else {})
        for store in self._stores:
            counts.update(store.faults)
        return counts

    def drain(self, timeout_s: float) -> bool:
        """Waits until queued writes have ended; returns whether they have."""
        return self._transfers is None or self._transfers.drain(timeout_s)

    def shutdown(self) -> None:
        """Waits for queued writes, and closes the store."""
        if self._transfers is not None:
            self._transfers.close(_CLOSE_S)
            log.info("storage: %s", ", ".join(f"{count} {what}" for what, count in self.counts.items()))
        for store in self._stores if self._transfers is None else ():
            store.close(_CLOSE_S)
        self._transfers, self._stores = None, []
