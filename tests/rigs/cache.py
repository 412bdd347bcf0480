"""What tests of the cache do with every prompt, and what they count."""

from __future__ import annotations

import random
from typing import Any

from mainstem.cache.prefix_cache import Lease, PrefixCache


def owners(cache: PrefixCache) -> tuple[int, int, int]:
    """Returns the numbers of free, cached and private pages, which add up to the total."""
    cache.check()
    pool = cache.pool
    assert pool.free + pool.cached + pool.private == pool.total
    return pool.free, pool.cached, pool.private


def prefill(cache: PrefixCache, prompt: Any, namespace: Any = None) -> Lease:
    """Computes and publishes a prompt; returns its lease, which is still open."""
    lease = cache.lease(prompt, namespace)
    lease.reserve(lease.length - lease.reserved)
    lease.publish(lease.length)
    return lease


def some_tokens(rng: random.Random, size: int, pages: int = 5) -> list[int]:
    """Draws tokens whose prefixes often meet others at any page size: few kinds of page, sometimes one odd token."""
    tokens = [token for _ in range(pages) for token in [int(rng.random() < 0.3)] * size]
    if rng.random() < 0.5:
        tokens[rng.randrange(len(tokens))] = 2
    return tokens[: rng.randrange(pages * size + 1)]
