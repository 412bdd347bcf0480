"""Your own policy beside built-in ones: protect what is deep in the tree, which is expensive to compute again."""

from __future__ import annotations

import random

import mainstem


class DeepStays:
    """Evicts the leaf with the fewest pages before it; recency breaks ties."""

    name = "deep stays"

    def rank(self, node: mainstem.NodeStats) -> tuple[float, float]:
        return node.depth_pages, node.last_access


def hit_rate(policy: str | mainstem.Policy) -> float:
    rng = random.Random(0)
    cache = mainstem.PrefixCache(pages=400, page_size=4, policy=policy)
    documents = [[rng.randrange(1000) for _ in range(rng.choice([40, 400]))] for _ in range(12)]
    for _ in range(400):
        prompt = rng.choice(documents) + [rng.randrange(1000) for _ in range(16)]
        with cache.lease(prompt) as lease:
            lease.reserve(len(prompt) - lease.hit)
            lease.finish()
    leases = cache.stats().leases
    return leases.hit / leases.queried


for policy in ("lru", "lfu", DeepStays()):
    print(f"{policy if isinstance(policy, str) else policy.name:12} {hit_rate(policy):.1%} of all tokens reused")
