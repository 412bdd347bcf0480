"""Mainstem: a prefix cache for LLM inference. One radix tree over paged KV memory; see `PrefixCache` and `Tree`."""

from mainstem.cache import CacheStats, Lease, PrefixCache
from mainstem.components import Component, Full, State, Window
from mainstem.errors import (
    BadArgument,
    BadTokens,
    CorruptTree,
    LeaseClosed,
    MainstemError,
    NotLocked,
    OutOfPages,
    StaleHandle,
    WrongOwner,
)
from mainstem.keys import (
    BigramKeys,
    Coordinate,
    HashKeys,
    Image,
    KeyKind,
    Size,
    Text,
    TokenKeys,
    TypedKeys,
    hash_blocks,
)
from mainstem.namespaces import Namespace
from mainstem.policies import NodeStats, Policy
from mainstem.pool import Pool
from mainstem.tree import Inserted, Match, NodeView, Tree, TreeStats

__version__ = "0.1.0"

__all__ = [
    "BadArgument",
    "BadTokens",
    "BigramKeys",
    "CacheStats",
    "Component",
    "Coordinate",
    "CorruptTree",
    "Full",
    "HashKeys",
    "Image",
    "Inserted",
    "KeyKind",
    "Lease",
    "LeaseClosed",
    "MainstemError",
    "Match",
    "Namespace",
    "NodeStats",
    "NodeView",
    "NotLocked",
    "OutOfPages",
    "Policy",
    "Pool",
    "PrefixCache",
    "Size",
    "StaleHandle",
    "State",
    "Text",
    "TokenKeys",
    "Tree",
    "TreeStats",
    "TypedKeys",
    "Window",
    "WrongOwner",
    "__version__",
    "hash_blocks",
]
