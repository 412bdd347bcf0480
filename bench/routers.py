"""Rules that send requests to replicas, ours and others', with one interface, for the replay of `fleet`.

    ours               `CostRouter`, fed with the events of the caches
    cache_aware        sglang-router's rule, after its documentation: where the longest prefix was sent, if that is more
                       than `CACHE_THRESHOLD` of the prompt, else where the least was sent; the shortest queue while
                       queues differ by more than both `BALANCE_ABS` requests and a factor of `BALANCE_REL`. A tree for
                       all replicas, of which the least recently used leaves are dropped every `EVICTION_S`
    consistent hash    a ring of `POINTS` for each replica, by the first block
    power of two       the shorter queue of two that are drawn
    round robin

What others read as text or tokens are blocks here; a block is `block_tokens` tokens. Each measures the lengths of
queues in requests, as they do. `dynamo`, a service of its own, is in `bench.dynamo`.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mainstem.events.source import Event
from mainstem.fleet.front.asking import Prompt
from mainstem.fleet.front.routing import CostRouter

CACHE_THRESHOLD, BALANCE_ABS, BALANCE_REL, EVICTION_S, MAX_TREE_TOKENS = 0.3, 64, 1.5, 120.0, 1 << 24
"""sglang-router's defaults; its tree counts 2**26 characters, about four of which are a token."""
POINTS = 160

Blocks = NDArray[np.int32]


class Router(Protocol):
    """Chooses replicas, which are numbers from 0."""

    def choose(self, blocks: Blocks) -> int:
        """Returns the replica of a request, which then is sent there."""

    def ended(self, replica: int) -> None:
        """Takes into account that a request has ended."""

    def apply(self, replica: int, events: Sequence[Event]) -> None:
        """Follows events of a replica's cache."""

    def close(self) -> None:
        """Ends what it has started."""


class Blind:
    """A router without events, which counts requests under way."""

    def __init__(self, replicas: int) -> None:
        self.queues = [0] * replicas

    def choose(self, blocks: Blocks) -> int:
        """See `Router`."""
        chosen = self.pick(blocks)
        self.queues[chosen] += 1
        return chosen

    def pick(self, blocks: Blocks) -> int:
        """Returns the replica of a request."""
        raise NotImplementedError

    def ended(self, replica: int) -> None:
        """See `Router`."""
        self.queues[replica] -= 1

    def apply(self, replica: int, events: Sequence[Event]) -> None:
        """Knows nothing of events."""

    def close(self) -> None:
        """Has started nothing."""


class RoundRobin(Blind):
    """One after another."""

    _next = -1

    def pick(self, blocks: Blocks) -> int:
        """See `Blind`."""
        self._next = (self._next + 1) % len(self.queues)
        return self._next


class PowerOfTwo(Blind):
    """The shorter queue of two."""

    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas)
        self._random = random.Random(seed)

    def pick(self, blocks: Blocks) -> int:
        """See `Blind`."""
        return min(self._random.sample(range(len(self.queues)), 2), key=lambda replica: self.queues[replica])


class ConsistentHash(Blind):
    """A ring."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        points = [(_point(f"{replica}/{point}"), replica) for replica in range(replicas) for point in range(POINTS)]
        self._ring = sorted(points)

    def pick(self, blocks: Blocks) -> int:
        """See `Blind`."""
        return self._ring[bisect(self._ring, (_point(str(int(blocks[0]))), 0)) % len(self._ring)][1]


class CacheAware(Blind):
    """sglang-router's rule; see the module."""

    def __init__(self, replicas: int, clock: Callable[[], float], block_tokens: int) -> None:
        super().__init__(replicas)
        self._clock, self._evicted_s = clock, 0.0
        self._most = MAX_TREE_TOKENS // block_tokens
        self._tree: dict[int, dict[int, float]] = {}  # blocks, whose names cover all before: replicas, and when
        self._sizes: Counter[int] = Counter(dict.fromkeys(range(replicas), 0))

    def pick(self, blocks: Blocks) -> int:
        """See `Blind`."""
        now_s = self._clock()
        if now_s >= self._evicted_s + EVICTION_S:
            self._evict()
            self._evicted_s = now_s
        chosen = self._pick(blocks.tolist())
        for block in blocks.tolist():
            seen = self._tree.setdefault(block, {})
            self._sizes[chosen] += chosen not in seen
            seen[chosen] = now_s
        return chosen

    def _pick(self, blocks: list[int]) -> int:
        most, least = max(self.queues), min(self.queues)
        if most - least > BALANCE_ABS and most > BALANCE_REL * least:
            return self.queues.index(least)
        matched, last = 0, None
        for block in blocks:
            found = self._tree.get(block)
            if not found:
                break
            matched, last = matched + 1, found
        if last is not None and matched > CACHE_THRESHOLD * len(blocks):
            return max(last, key=lambda replica: (last[replica], -replica))
        return min(self._sizes, key=lambda replica: (self._sizes[replica], replica))

    def _evict(self) -> None:
        for replica, size in self._sizes.items():
            if size <= self._most:
                continue
            seen = sorted((found[replica], -block) for block, found in self._tree.items() if replica in found)
            for _, block in seen[: size - self._most]:
                del self._tree[-block][replica]
            self._sizes[replica] = self._most


class Ours:
    """`CostRouter`; a block is a page of one token."""

    def __init__(
        self, replicas: int, clock: Callable[[], float], prefill: tuple[float, float], page_size: int = 1
    ) -> None:
        self.router = CostRouter(clock, page_size=page_size, key=bytes(16))
        self.names = [f"{replica:04}" for replica in range(replicas)]
        self.router.follow({name: {"costs": {"prefill": prefill}} for name in self.names})

    def choose(self, blocks: Blocks) -> int:
        """See `Router`."""
        prompt = Prompt(blocks)
        name = self.router.order(prompt, self.names)[0]
        self.router.sent(prompt, name)
        return int(name)

    def ended(self, replica: int) -> None:
        """See `Router`."""
        self.router.ended(self.names[replica])

    def apply(self, replica: int, events: Sequence[Event]) -> None:
        """See `Router`."""
        self.router.apply(self.names[replica], events)

    def close(self) -> None:
        """Has started nothing."""


def _point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
