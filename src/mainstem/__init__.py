"""Mainstem: a prefix cache for LLM inference. One radix tree over paged KV memory; see `PrefixCache` and `Tree`."""

from mainstem._core import LeaseCounters, TreeStats
from mainstem.batch.order import order
from mainstem.cache.components import Chunked, Component, Full, State, Window
from mainstem.cache.identity import Identity
from mainstem.cache.keys import (
    BigramKeys,
    Coordinate,
    HashKeys,
    Image,
    KeyKind,
    Size,
    Spliced,
    Text,
    TokenKeys,
    TypedKeys,
    hash_blocks,
)
from mainstem.cache.namespaces import Namespace
from mainstem.cache.policies import NodeStats, Policy
from mainstem.cache.pool import Pool
from mainstem.cache.prefix_cache import CacheStats, Lease, PoolStats, PrefixCache
from mainstem.cache.tree import Inserted, Match, NodeView, Tree
from mainstem.errors import (
    BackendUnavailable,
    BadArgument,
    BadTokens,
    CorruptTree,
    LeaseClosed,
    MainstemError,
    NotLocked,
    OutOfPages,
    StaleHandle,
    StorageError,
    WrongOwner,
)
from mainstem.settings.engine import HostPolicy, StorageConfig
from mainstem.tiers.controller import Tiers, TierStats
from mainstem.tiers.host.load import Load
from mainstem.tiers.host.tier import HostTier
from mainstem.tiers.prefetch.prefetch import Prefetch
from mainstem.tiers.storage.sealer import Sealer
from mainstem.tiers.storage.store import Store

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "BadArgument",
    "BadTokens",
    "BigramKeys",
    "CacheStats",
    "Chunked",
    "Component",
    "Coordinate",
    "CorruptTree",
    "Full",
    "HashKeys",
    "HostPolicy",
    "HostTier",
    "Identity",
    "Image",
    "Inserted",
    "KeyKind",
    "Lease",
    "LeaseClosed",
    "LeaseCounters",
    "Load",
    "MainstemError",
    "Match",
    "Namespace",
    "NodeStats",
    "NodeView",
    "NotLocked",
    "OutOfPages",
    "Policy",
    "Pool",
    "PoolStats",
    "Prefetch",
    "PrefixCache",
    "Sealer",
    "Size",
    "Spliced",
    "StaleHandle",
    "State",
    "StorageConfig",
    "StorageError",
    "Store",
    "Text",
    "TierStats",
    "Tiers",
    "TokenKeys",
    "Tree",
    "TreeStats",
    "TypedKeys",
    "Window",
    "WrongOwner",
    "__version__",
    "hash_blocks",
    "order",
]
