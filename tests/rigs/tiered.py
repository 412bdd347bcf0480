"""A scheduler over a ghost with a host tier and a store: the bench of `rigs.scheduler` with tiers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from rigs.ghost import VOCAB, Ghost
from rigs.ghost_memory import GhostTicket
from rigs.hand_driven import HandWorkers
from rigs.scheduler import PAGE, Bench

from mainstem.cache.identity import Identity
from mainstem.cache.keys import KeyKind, TokenKeys
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.runtime.request import Usage
from mainstem.runtime.segments import Segment
from mainstem.settings.engine import HostPolicy, Limits, StorageConfig
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.host.tier import HostTier
from mainstem.tiers.host.transfer import Move
from mainstem.tiers.pending import Agree
from mainstem.tiers.storage.sealer import HEADER_BYTES, Sealer
from mainstem.tiers.storage.store import Store

_LIMITS = Limits()


class GhostHost:
    """Host pages of a ghost: its hashes and tokens, one layer."""

    def __init__(self, ghost: Ghost, pages: int) -> None:
        self.pages = pages
        self.fail_up: Exception | None = None
        self.ups = 0
        self.tickets: list[GhostTicket] = []
        self._ghost = ghost
        self._bytes = np.zeros((pages, HEADER_BYTES + self.payload_bytes(0)), np.uint8)

    def payload_bytes(self, component: int) -> int:
        return 16 * PAGE

    def down(self, moves: Sequence[Move]) -> GhostTicket:
        [(_, source, target)] = moves
        both = np.concatenate([self._ghost._hash[source], self._ghost._token[source].view(np.uint64)], axis=1)
        self._bytes[target, HEADER_BYTES:] = both.view(np.uint8)
        return ended(GhostTicket(1, lambda layer: None))

    def up(self, moves: Sequence[Move]) -> GhostTicket:
        [(_, source, target)] = moves
        self.ups += 1

        def copy(layer: int) -> None:
            both = self._bytes[source, HEADER_BYTES:].copy().view(np.uint64)
            self._ghost._hash[target] = both[:, :PAGE]
            self._ghost._token[target] = both[:, PAGE:].view(np.int64)

        ticket = GhostTicket(1, copy)
        if self.fail_up is not None:
            ticket.fail(self.fail_up)
        self.tickets.append(ticket)
        return ticket

    def slots(self, component: int, page_ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self._bytes[page]) for page in page_ids]

    def regions(self) -> list[memoryview]:
        return []


def ended(ticket: GhostTicket) -> GhostTicket:
    ticket.wait()
    return ticket


class LayeredGhost(Ghost):
    """Waits for arriving pages before it reads them; after pages that did not arrive it computes garbage."""

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        for segment in segments:
            if segment.arriving is not None:
                segment.arriving.wait_layer(0)
        fine = [segment.arriving is None or segment.arriving.error is None for segment in segments]
        good = [segment for segment, well in zip(segments, fine, strict=True) if well]
        rows = iter(super().forward(good) if good else torch.empty(0, VOCAB))
        garbage = torch.zeros(VOCAB)
        asked = [well for segment, well in zip(segments, fine, strict=True) for _ in range(segment.logits)]
        return torch.stack([next(rows) if well else garbage for well in asked]) if asked else torch.empty(0, VOCAB)


class TieredBench(Bench):
    """The same over a host tier and a store, which outlive the cache."""

    step_s = 0.01
    agree: Agree | None = None  # with other ranks

    def __init__(
        self,
        pages: int = 12,
        host_pages: int = 64,
        store: bool = True,
        enabled: bool = True,
        limits: Limits = _LIMITS,
        **config: object,
    ) -> None:
        self.now_s = 0.0
        self.enabled = enabled
        self.ghost = LayeredGhost(pages, PAGE)
        self.host = GhostHost(self.ghost, host_pages)
        self.backend = MemoryBackend()
        self.workers = HandWorkers(instant=True)
        self.context = 256
        self.keys: KeyKind = TokenKeys(VOCAB)
        self.config = StorageConfig(**({"prefetch_min_tokens": PAGE} | config))  # type: ignore[arg-type]
        self.limits = limits
        self.restart(pages, store)

    def restart(self, pages: int = 12, store: bool = True) -> None:
        identity = Identity("m", "w", "u64", "none", "l", "s", "mha", "r", "t", "ids/4", PAGE)
        self.store = Store(
            self.backend, Sealer(identity), self.config, readers=self.workers, writers=self.workers,
            clock=lambda: self.now_s,
        )  # fmt: skip
        tier = HostTier(self.host, HostPolicy(load_min_tokens=PAGE), agree=self.agree)
        cache = PrefixCache(
            pages, PAGE, keys=self.keys, copy_page=self.ghost.copy_page, host=tier,
            store=self.store if store else None, enabled=self.enabled,
        )  # fmt: skip
        assert cache.tiers is not None
        self.tiers = cache.tiers
        self.schedule(cache, self.limits, self.context)

    def serve(self, *prompts: list[int]) -> list[Usage]:
        """Runs prompts together, checks every answer, and returns the usage of each."""
        ids = [self.add(tokens, max_tokens=4) for tokens in prompts]
        self.run()
        self.assert_complete(*ids)
        return [self.usage(id) for id in ids]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            under_way = list(self.host.tickets)
            super().step()
            for ticket in under_way:  # copies go on by themselves
                ticket.step()

    def forget_device(self) -> None:
        for _ in range(5):
            self.tiers.poll()
        self.cache.pool.reclaim(self.cache.tree.flush()[0])
