"""Eviction policies: which leaf goes first.

The simple ones are one rule: rank a leaf; the lowest rank is evicted first. They also stand in core/csrc/policy.h,
where the tree applies them without asking Python; a test compares the two. Those that remember more (queues, second
chances, what was evicted) are in core/csrc/policies, one file each. A policy of your own is any object with `name` and
`rank`; the tree asks it about a leaf whenever the leaf has changed. Knows nothing of trees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mainstem.errors import BadArgument

SLRU_PROTECTED_HITS = 2
"""From this many hits on, slru keeps a leaf for as long as there are others."""


class NodeStats(NamedTuple):
    """What a policy may look at. Times are ticks of the tree's counter: one a match or insert."""

    node: int
    created: int
    last_access: int
    hits: int
    priority: int
    depth_pages: int
    pages: int


Rank = tuple[float, float]


class Policy(Protocol):
    """A rule of eviction."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def rank(self, node: NodeStats) -> Rank:
        """The place of a leaf in the order; the lowest goes first. Finite numbers."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A policy that the core knows by its name.

    `source` says where it was published; "" for those that have no author. `rank` is its rule in Python; None: it
    remembers more than one leaf says, and the core alone has it (core/csrc/policies).
    """

    name: str
    rank: Callable[[NodeStats], Rank] | None = None
    source: str = ""


BUILT_IN = {
    policy.name: policy
    for policy in (
        BuiltIn("lru", lambda n: (n.last_access, 0)),
        BuiltIn("lfu", lambda n: (n.hits, n.last_access)),
        BuiltIn("fifo", lambda n: (n.created, 0)),
        BuiltIn("mru", lambda n: (-n.last_access, 0)),
        BuiltIn("filo", lambda n: (-n.created, 0)),
        BuiltIn("slru", lambda n: (n.hits >= SLRU_PROTECTED_HITS, n.last_access)),
        BuiltIn("priority", lambda n: (n.priority, n.last_access)),
        BuiltIn("length-aware", lambda n: (n.hits, -n.depth_pages), "Qin et al., Mooncake, arXiv:2407.00079"),
        BuiltIn("lru-2", source="O'Neil, O'Neil and Weikum, SIGMOD 1993"),
        BuiltIn("2q", source="Johnson and Shasha, VLDB 1994"),
        BuiltIn("arc", source="Megiddo and Modha, FAST 2003"),
        BuiltIn("s3-fifo", source="Yang et al., SOSP 2023"),
        BuiltIn("sieve", source="Zhang et al., NSDI 2024"),
        BuiltIn("w-tinylfu", source="Einziger, Friedman and Manes, ACM ToS 2017"),
        BuiltIn("gdsf", source="Cherkasova, HP Labs 1998"),
        BuiltIn("flop-aware", source="Pan et al., Marconi, MLSys 2025, arXiv:2411.19379"),
        BuiltIn("gittins", source="docs/research/learned-policy.md; the index: Gittins, J. R. Stat. Soc. B, 1979"),
    )
}
"""The built-in policies by name."""


def find_policy(policy: str | Policy) -> Policy | BuiltIn:
    """The policy of that name, or the object itself.

    Raises:
        BadArgument: no built-in policy has that name, and it is no policy.
    """
    if isinstance(policy, str) and policy in BUILT_IN:
        return BUILT_IN[policy]
    if isinstance(policy, str) or not callable(getattr(policy, "rank", None)) or not hasattr(policy, "name"):
        raise BadArgument("policy", policy, f"one of {', '.join(BUILT_IN)}, or an object with name and rank(node)")
    return policy
