"""Names of pages: each is computed once, and always that of its prefix."""

from __future__ import annotations

import random

import numpy as np
import pytest
from rigs.hand_driven import FaultyBackend, Rig, make_store

from mainstem.cache.tree import Tree
from mainstem.errors import StaleHandle
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.storage.names import PageNames
from mainstem.tiers.storage.sealer import Sealer

PAGE = 4


def counting(sealer: Sealer) -> list[int]:
    """Records the number of pages that each later call hashes."""
    counts: list[int] = []
    names = sealer.names

    def counted(parent: bytes, symbols: bytes | memoryview, page_bytes: int) -> list[bytes]:
        counts.append(len(symbols) // page_bytes)
        return names(parent, symbols, page_bytes)

    sealer.names = counted  # type: ignore[method-assign]
    return counts


def conversation(turns: int, pages: int, odd: int = 0) -> list[list[int]]:
    """Returns the prompt of each turn: the one before, less its last `odd` tokens, and new tokens."""
    tokens, prompts = list[int](), []
    for turn in range(turns):
        tokens = tokens[: len(tokens) - odd] + [turn * 1000 + at for at in range(2 * pages + odd)]
        prompts.append(tokens)
    return prompts


@pytest.mark.parametrize("odd", [0, 3], ids=["each turn continues", "each turn changes the end of the last one"])
def test_a_conversation_costs_as_many_hashes_as_it_has_pages(odd: int) -> None:
    turns, pages = 60, 3
    rig = Rig(1000, 1000, backend=FaultyBackend())
    assert rig.store is not None
    hashed = counting(rig.store.sealer)
    for tokens in conversation(turns, pages, odd):
        rig.tiers.prefetch(tokens)
        for _ in range(2):
            rig.readers.run_all()
            rig.tiers.poll()
        with rig.cache.lease(tokens) as lease:
            lease.reserve(len(tokens) - lease.reserved)
            rig.compute(lease, tokens)
            lease.finish(len(tokens))
        for _ in range(4):
            for ticket in rig.copies:
                ticket.wait()
            rig.tiers.poll()
            rig.writers.run_all()
        assert not rig.tiers.busy
    assert rig.tiers.stats().stored >= turns * pages
    assert sum(hashed) <= 4 * turns * (pages + odd), "a lookup and a write of new and of changed pages"
    assert max(hashed) <= 4 * (pages + odd)


def test_pages_from_storage_are_not_hashed_again_by_a_write_after_them() -> None:
    backend, tokens = FaultyBackend(), list(range(80))
    before = Rig(64, 64, backend=backend)
    before.serve(tokens)
    before.settle()
    rig = Rig(64, 64, backend=backend)
    assert rig.store is not None
    rig.tiers.prefetch([*tokens, 1])
    rig.settle()
    hashed = counting(rig.store.sealer)
    rig.serve([*tokens, 5, 6, 7, 8], load=True)
    rig.settle()
    assert rig.tiers.stats().stored == 2 and sum(hashed) == 2


@pytest.mark.parametrize("writing", ["at once", "later", "never"])
def test_a_long_prefill_is_hashed_once_whenever_it_is_written(writing: str) -> None:
    """A chunk's node is joined to the one before it once that is unlocked: written, or dropped from the queue."""
    queued = 4 if writing == "never" else 1024
    rig = Rig(200, 200, backend=MemoryBackend(), writes=1, queue_pages=queued)
    assert rig.store is not None
    hashed = counting(rig.store.sealer)
    tokens = list(range(240))
    with rig.cache.lease(tokens) as lease:
        lease.reserve(len(tokens))
        rig.compute(lease, tokens)
        for upto in range(6, 241, 6):
            lease.publish(upto)
            for _ in range(2):
                for ticket in rig.copies:
                    ticket.wait()
                rig.tiers.poll()
            if writing == "at once" or (writing == "later" and upto % 60 == 0):
                rig.writers.run_all()
                rig.tiers.poll()
        assert sum(hashed) == 120
        assert rig.tiers.stats().write_dropped == (117 if writing == "never" else 0)
        rig.settle()
    assert rig.tiers.stats().stored == (3 if writing == "never" else 120)


@pytest.mark.parametrize("seed", range(20))
def test_a_name_is_always_that_of_its_prefix(seed: int) -> None:
    """Also after splits, joins, evictions and insertions in between."""
    rng, tree = random.Random(seed), Tree(1)
    sealer = make_store(MemoryBackend()).sealer
    names, free = PageNames(tree.core, sealer, PAGE), iter(range(100_000))
    for _ in range(300):
        namespace = rng.choice([b"", b"a"])
        key = b"".join(bytes([rng.randrange(3)]) * PAGE for _ in range(rng.randint(1, 12)))
        pages = len(key) // PAGE
        if rng.random() < 0.1:
            tree.core.evict(rng.randint(1, 9), 0, 0)
        ids = np.fromiter(free, np.int32, pages)
        node, *_ = tree.core.insert(namespace, key, 0, [ids], 0, 0, 0, True)
        if rng.random() < 0.3:
            tree.core.match(namespace, key[: rng.randint(1, pages) * PAGE], 0, False)
        if rng.random() < 0.3:
            pages = rng.randint(1, pages)
            node = tree.core.locate(namespace, key, pages)
        expected = [sealer.root(namespace), *sealer.names(sealer.root(namespace), key[: pages * PAGE], PAGE)]
        begin = rng.randint(0, pages)
        assert names.of(node, begin) == (expected[begin], expected[begin + 1 :])
        assert names.last(namespace, node) == expected[-1]
        assert names.last(namespace, 0) == expected[0]


def test_names_of_an_evicted_node_are_rejected() -> None:
    tree = Tree(1)
    names = PageNames(tree.core, make_store(MemoryBackend()).sealer, PAGE)
    node, *_ = tree.core.insert(b"", b"aaaabbbb", 0, [np.arange(2, dtype=np.int32)], 0, 0, 0, True)
    names.of(node, 0)
    tree.core.evict(2, 0, 0)
    with pytest.raises(StaleHandle):
        names.of(node, 0)


def test_the_most_recently_used_names_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.tiers.storage.names._MAX_NODES", 2)
    tree = Tree(1)
    sealer = make_store(MemoryBackend()).sealer
    names, hashed = PageNames(tree.core, sealer, PAGE), counting(sealer)
    nodes = []
    for at in range(3):
        ids = np.arange(3 * at, 3 * at + 3, dtype=np.int32)
        nodes.append(tree.core.insert(b"", bytes([at]) * 3 * PAGE, 0, [ids], 0, 0, 0, True)[0])
    for at in (0, 1, 0, 2, 0, 1):
        names.last(b"", nodes[at])
    assert hashed == [3, 3, 0, 3, 0, 3]
