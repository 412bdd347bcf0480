"""Eviction policies: which leaf is evicted first.

The built-in policies are rules of the core (core/csrc/eviction/policy.h), which applies them without calling Python. A
simple one ranks a leaf, and the lowest rank is evicted first. One that keeps more state (queues, evicted pages) has a
file in core/csrc/eviction/policies. Your own policy is any object with `name` and `rank`; the tree
calls `rank` whenever a leaf has changed. Knows nothing of trees.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

from mainstem import _core
from mainstem.errors import BadArgument
from mainstem.imports import PATH, load_object

SLRU_PROTECTED_HITS = 2
"""A leaf with at least this many hits is protected: slru evicts the others first. `slru:3` sets another threshold."""
_MAX_HITS = 2**32 - 1


class NodeStats(NamedTuple):
    """The facts by which a policy ranks a node. Times are ticks of the tree's counter, one per match or insertion."""

    node: int
    created: int
    last_access: int
    hits: int
    priority: int
    depth_pages: int
    pages: int


Rank = tuple[float, float]


class Policy(Protocol):
    """An eviction policy."""

    @property
    def name(self) -> str:
        """The name of the policy, for messages."""

    def rank(self, node: NodeStats) -> Rank:
        """Returns the rank of a leaf, two finite numbers; the lowest rank is evicted first.

        Anything else, and any exception, is raised as a BadArgument where pages are evicted.
        """


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A policy that the core knows by name.

    `source` is its publication; "" if it has none. `protected_hits` is for slru.
    """

    name: str
    source: str = ""
    protected_hits: int = SLRU_PROTECTED_HITS

    @property
    def rule(self) -> str:
        """The name without a parameter."""
        return self.name.partition(":")[0]


_SOURCES = {
    "slru": "Karedy, Love and Wherry, Computer 1994",
    "arc": "Megiddo and Modha, FAST 2003",
    "gittins": "docs/research/learned-policy.md; the index: Gittins, J. R. Stat. Soc. B, 1979",
    "tail": "after Zhang et al., Tail-Optimized LRU, arXiv 2510.15152, 2025",
}
BUILT_IN = {name: BuiltIn(name, _SOURCES.get(name, "")) for name in _core.policies()}
"""The built-in policies by name."""
REMOVED = frozenset({"lru-2", "2q", "s3-fifo", "sieve", "w-tinylfu", "gdsf", "flop-aware", "length-aware"})
"""Policies that earlier versions had; the mean of our workloads is worse with each than with lru."""


def find_policy(policy: str | Policy) -> Policy | BuiltIn:
    """Returns a policy by its name, or the object itself.

    Args:
        policy: the name of a built-in policy; `slru:N`, which protects what was hit at least N times; an object with
            `name` and `rank`; or `module:name`, such an object (which is copied) or a class that makes one without
            arguments. The module may be in the working directory.

    Raises:
        BadArgument: no built-in policy has that name, its parameter is out of range, the module has no such object or
            cannot be imported, or the object is not a policy.

    >>> find_policy("slru:3").name
    'slru:3'
    """
    if isinstance(policy, str):
        if policy in BUILT_IN:
            return BUILT_IN[policy]
        rule, colon, parameter = policy.partition(":")
        if colon and rule in BUILT_IN:
            return _with_parameter(policy, rule, parameter)
    found = _load(policy) if isinstance(policy, str) and PATH.fullmatch(policy) else policy
    if isinstance(found, str | type) or not callable(getattr(found, "rank", None)) or not hasattr(found, "name"):
        allowed = f"one of {', '.join(BUILT_IN)}, slru:N, or an object with name and rank(node), or its module:name"
        if isinstance(found, str) and found in REMOVED:
            allowed += f"; {found} was removed, docs/research/learned-policy.md says why"
        raise BadArgument("policy", policy, allowed)
    return found


def _with_parameter(policy: str, rule: str, parameter: str) -> BuiltIn:
    if rule != "slru":
        raise BadArgument("policy", policy, f"{rule}; slru is the only built-in policy with a parameter")
    hits = int(parameter) if parameter.isdecimal() and parameter.isascii() and len(parameter) < 20 else 0
    if not 1 <= hits <= _MAX_HITS:
        raise BadArgument("policy", policy, f"slru:N with N, the hits that protect a leaf, from 1 to {_MAX_HITS}")
    return replace(BUILT_IN[rule], name=policy, protected_hits=hits)


def _load(path: str) -> Policy:
    """Imports the object `module:name` and copies it, so that each cache has its own."""
    found = load_object("policy", path)
    try:
        loaded = found() if isinstance(found, type) else copy.deepcopy(found)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise BadArgument(
            "policy", path, f"an object that can be copied, or a class without arguments: {why}"
        ) from error
    return cast("Policy", loaded)
