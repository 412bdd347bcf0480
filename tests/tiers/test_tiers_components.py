"""The tiers for every component, without a cache: what a window, a state and full attention leave on the host.

The engine here has an allocator of its own. A page of component c at the end of a prefix holds a number that is a
function of c and all tokens of the prefix, on any tier.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from rigs.ghost_memory import GhostMemory
from rigs.hand_driven import FaultyBackend, HandWorkers, fingerprint, make_store

from mainstem.cache.components import Chunked, Component, Full, State, Window, by_name
from mainstem.cache.pool import Pool
from mainstem.cache.tree import Inserted, Tree
from mainstem.errors import CorruptTree
from mainstem.tiers.controller import Tiers
from mainstem.tiers.host.tier import HostTier
from mainstem.tiers.host.transfer import Move

DEVICE, HOST = 0, 1


class Engine:
    """A tree with its own pools on both tiers."""

    def __init__(
        self,
        *components: Component,
        size: int = 1,
        device: int = 40,
        host: int | tuple[int, ...] = 30,
        backend: FaultyBackend | None = None,
    ) -> None:
        self.size, self.components = size, components
        self.names = list(by_name(components))
        self.tree = Tree(size, components=components, tiers=2)
        rows = len(components)
        below = (host,) * rows if isinstance(host, int) else host
        self.pools = [Pool(device) for _ in components]
        self.memory = GhostMemory([device] * rows, list(below), instant=False)
        self.workers = HandWorkers()
        store = None if backend is None else make_store(backend, self.workers, batch_pages=2)
        self.tiers = Tiers(self.tree, self.pools, HostTier(self.memory, pages=below), store)
        self.locked: list[int] = []
        self.reloaded = 0
        self.recent: list[Sequence[int]] = []

    # content

    def layers(self, row: int, tokens: Sequence[int]) -> list[int]:
        mark = fingerprint(str(row), tokens)
        return [mark * self.memory.layers + layer for layer in range(self.memory.layers)]

    def prefixes(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(self.size, len(tokens) + 1, self.size)]

    def places(self, row: int, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the prefixes that a component has an id for, in the order of its ids."""
        prefixes = self.prefixes(tokens)
        return prefixes[-1:] if self.names[row] == "state" else prefixes

    def needed(self, row: int, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns those of `places` that a match which ends here needs."""
        component = self.components[row]
        if isinstance(component, Window):
            return self.prefixes(tokens)[max(len(tokens) - component.tokens, 0) // self.size :]
        if isinstance(component, Chunked):
            return self.prefixes(tokens)[len(tokens) // component.tokens * component.tokens // self.size :]
        return self.places(row, tokens)

    def held(self) -> dict[tuple[int, int], dict[tuple[int, ...], int]]:
        """Returns the ids that are present, by row and tier, and by prefix."""
        found: dict[tuple[int, int], dict[tuple[int, ...], int]] = {
            (row, tier): {} for row in range(len(self.names)) for tier in (DEVICE, HOST)
        }
        keys: dict[int, bytes] = {0: b""}
        for view in self.tree.nodes():
            key = keys[view.node] = keys[view.parent] + view.key
            tokens = np.frombuffer(key, np.int32).tolist()
            for (name, tier), cell in view.cells.items():
                if cell.present:
                    row = self.names.index(name)
                    places = self.places(row, tokens)[-len(cell.ids) :]
                    found[row, tier].update(zip(places, cell.ids.tolist(), strict=True))
        return found

    def longest(self, tokens: Sequence[int], tiers: Sequence[int]) -> int:
        """Returns where a match ends if it may use these tiers."""
        held = self.held()
        usable = [set[tuple[int, ...]]().union(*(held[row, tier] for tier in tiers)) for row in range(len(self.names))]

        def allowed(end: int) -> bool:
            return all(usable[row].issuperset(self.needed(row, tokens[:end])) for row in range(len(usable)))

        return max((end for end in range(self.size, len(tokens) + 1, self.size) if allowed(end)), default=0)

    def verify(self) -> None:
        self.tree.check()
        self.tiers.check()
        for (row, tier), places in self.held().items():
            content = (self.memory.device if tier == DEVICE else self.memory.host)[row]
            for place, page in places.items():
                assert content[:, page].tolist() == self.layers(row, place), (self.names[row], tier)
            pool = self.pools[row] if tier == DEVICE else self.tiers.host_pools[row]
            assert sorted(places.values()) == [p for p in range(pool.total) if pool.owner(p) == "cached"]
            assert pool.free + pool.cached + pool.private == pool.total

    # operations

    def allocate(self, row: int, n: int) -> list[int]:
        if (missing := n - self.pools[row].free) > 0:
            self.evict(missing, row)
        return self.pools[row].allocate(n).tolist() if self.pools[row].free >= n else []

    def evict(self, n: int, row: int, tier: int = DEVICE) -> int:
        pools = self.pools if tier == DEVICE else self.tiers.host_pools
        freed = self.tree.evict(n, self.names[row], tier)
        for pool, ids in zip(pools, freed, strict=True):
            pool.reclaim(ids)
        return len(freed[row])

    def put(self, tokens: Sequence[int], columns: list[list[int]]) -> Inserted:
        """Inserts device pages into the tree; frees duplicates."""
        added = self.tree.insert(list(tokens), columns if len(columns) > 1 else columns[0])
        for row, (name, column) in enumerate(zip(self.names, columns, strict=True)):
            mine = np.array(
                [page for page in column if page >= 0 and self.pools[row].owner(page) == "private"], np.int32
            )
            theirs = self.tree.page_ids(added.node, name) if added.node else np.empty(0, np.int32)
            kept = np.isin(mine, theirs)
            self.pools[row].publish(mine[kept])
            self.pools[row].release(mine[~kept])
        return added

    def compute(self, tokens: Sequence[int], *, state: bool = True, whole_window: bool = True) -> int:
        """Computes a prefix and publishes it; returns its node, or 0 without room."""
        tokens = tokens[: len(tokens) // self.size * self.size]
        columns: list[list[int]] = []
        for row, name in enumerate(self.names):
            places = self.places(row, tokens) if name != "state" or state else []
            if isinstance(self.components[row], Window) and not whole_window:
                places = self.needed(row, tokens)
            page_ids = self.allocate(row, len(places))
            if len(page_ids) < len(places):
                for other, column in enumerate(columns):
                    self.pools[other].release(np.array([page for page in column if page >= 0], np.int32))
                return 0
            for page, place in zip(page_ids, places, strict=True):
                self.memory.device[row][:, page] = self.layers(row, place)
            absent = len(tokens) // self.size - len(page_ids) if name != "state" else 0
            columns.append([-1] * absent + page_ids)
        return self.put(tokens, columns).node if tokens else 0

    def back_up(self, tokens: Sequence[int]) -> bool:
        node = self.tree.match(list(tokens)).node
        return self.tiers.back_up(node) if node else False

    def settle(self) -> None:
        for _ in range(50):
            for ticket in self.memory.tickets:
                ticket.wait()
            self.memory.tickets.clear()
            ran = self.workers.run_all()
            self.tiers.poll()
            if not (ran or self.tiers.busy):
                return
        raise AssertionError("never at rest")

    def reload(self, tokens: Sequence[int], *, fail: bool = False) -> int:
        """Loads what the device lacks of the prefix on both tiers and publishes it; returns its length."""
        match = self.tree.match(list(tokens))
        prefix = tuple(tokens[: match.length + match.host_length])
        if not match.host_length:
            return match.length
        self.tree.lock(match.node, DEVICE)
        self.tree.lock(match.host_node, HOST)
        self.tree.lock(match.host_node, DEVICE)
        columns = [self.column(row, match.host_node, prefix) for row in range(len(self.names))]
        complete = all(column is not None for column in columns)
        moves = [self.move(row, column, match.host_node) for row, column in enumerate(columns) if column is not None]
        if complete:
            ticket = self.memory.up(moves)
            if fail:
                ticket.fail(RuntimeError("on purpose"))
            ticket.wait()
        if complete and not fail:
            self.put(prefix, [column for column in columns if column is not None])
        else:
            for move in moves:
                self.pools[move.component].release(move.target)
        self.tree.unlock(match.host_node, DEVICE)
        self.tree.unlock(match.host_node, HOST)
        self.tree.unlock(match.node, DEVICE)
        self.reloaded += complete and not fail
        return len(prefix) if complete and not fail else match.length

    def column(self, row: int, node: int, prefix: tuple[int, ...]) -> list[int] | None:
        """Returns the device pages that a match at this end needs: existing ones, and new ones for the rest."""
        here = self.tree.page_ids(node, self.names[row], DEVICE).tolist()
        places = self.needed(row, prefix)
        needed = here[len(here) - len(places) :]
        missing = [page < 0 for page in needed]
        new = self.allocate(row, sum(missing))
        if len(new) < sum(missing):
            return None
        rest = iter(new)
        page_ids = [next(rest) if lacks else page for page, lacks in zip(needed, missing, strict=True)]
        return page_ids if self.names[row] == "state" else [-1] * (len(here) - len(page_ids)) + page_ids

    def move(self, row: int, column: list[int], node: int) -> Move:
        there = self.tree.page_ids(node, self.names[row], HOST).tolist()[-len(column) :]
        pairs = [(a, b) for a, b in zip(there, column, strict=True) if b >= 0 and self.pools[row].owner(b) == "private"]
        assert all(source >= 0 for source, _ in pairs), "the tree reported them"
        source, target = (np.array([pair[at] for pair in pairs], np.int32) for at in (0, 1))
        return Move(row, source, target)

    def close(self) -> None:
        for node in self.locked:
            self.tree.unlock(node)
        self.settle()
        for tier, pools in ((DEVICE, self.pools), (HOST, self.tiers.host_pools)):
            for pool, ids in zip(pools, self.tree.flush(tier), strict=True):
                pool.reclaim(ids)
            assert [pool.free for pool in pools] == [pool.total for pool in pools]
        assert self.tree.stats().nodes == 0
        self.verify()


KINDS: dict[str, tuple[Component, ...]] = {
    "full": (Full(),),
    "window": (Window(3),),
    "full window": (Full(), Window(3)),
    "full wide window": (Full(), Window(7)),
    "full state": (Full(), State()),
    "two windows": (Window(5), Window(2)),
    "full two windows two chunks": (Full(), Window(6), Window(3), Chunked(5), Chunked(4)),
    "full window state": (Full(), Window(3), State()),
    "window state": (Window(2), State()),
    "full chunked": (Full(), Chunked(3)),
    "full chunked at its boundary": (Full(), Chunked(4)),
    "full window chunked state": (Full(), Window(3), Chunked(5), State()),
}
P = list(range(1, 9))


# ---------------------------------------------------------------- one prefix


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_backed_up_and_reloaded_with_all_its_components(kind: str, size: int) -> None:
    engine = Engine(*KINDS[kind], size=size)
    engine.compute(P)
    assert engine.back_up(P)
    engine.settle()
    engine.verify()
    for row in range(len(engine.names)):
        engine.evict(99, row)
    engine.verify()
    match = engine.tree.match(P)
    assert (match.length, match.host_length) == (0, len(P))
    assert engine.reload(P) == len(P)
    assert engine.tree.match(P).length == len(P)
    engine.verify()
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_copy_leaves_nothing_of_any_component(kind: str) -> None:
    engine = Engine(*KINDS[kind])
    engine.compute(P)
    assert engine.back_up(P)
    for ticket in engine.memory.tickets:
        ticket.fail(RuntimeError("on purpose"))
    engine.settle()
    assert all(pool.free == pool.total for pool in engine.tiers.host_pools)
    assert engine.tree.match(P).length == len(P)
    assert engine.back_up(P)
    engine.settle()
    engine.verify()
    engine.close()


def test_pages_before_the_window_are_not_needed_for_a_reload() -> None:
    engine = Engine(Full(), Window(3))
    engine.compute(P, whole_window=False)
    engine.back_up(P)
    engine.settle()
    assert len(engine.held()[1, HOST]) == 3
    for row in (0, 1):
        engine.evict(99, row)
    assert engine.reload(P) == 8
    assert engine.longest(P, [DEVICE]) == 8
    assert engine.tree.match(P[:5]).length == 0
    engine.close()


@pytest.mark.parametrize("small", [1, 2])
def test_the_host_makes_room_in_the_pool_of_the_window_that_lacks_it(small: int) -> None:
    host = tuple(len(P) if row == small else 30 for row in range(3))
    engine = Engine(Full(), Window(5), Window(2), host=host)
    other = [*range(11, 19)]
    for tokens in (P, other):
        engine.compute(tokens)
        assert engine.back_up(tokens)
        engine.settle()
        engine.verify()
    assert [pool.cached for pool in engine.tiers.host_pools] == [8 if row == small else 16 for row in range(3)]
    engine.close()


def test_window_pages_computed_later_are_backed_up_later() -> None:
    engine = Engine(Full(), Window(3))
    engine.compute(P, whole_window=False)
    engine.back_up(P)
    engine.settle()
    engine.compute(P)
    engine.back_up(P)
    engine.settle()
    engine.verify()
    assert len(engine.held()[1, HOST]) == 8
    assert len(engine.held()[0, HOST]) == 8, "once"
    engine.close()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["full state", "full window", "full window state"])
def test_pages_added_while_their_node_is_in_flight_are_backed_up_later(kind: str, fails: bool) -> None:
    engine = Engine(*KINDS[kind])
    engine.compute(P, state=False, whole_window=False)
    nothing: dict[str, list[int]] = {"full": [0] * 8, "window": [-1] * 8, "state": []}  # new
    assert engine.tiers.back_up(engine.tree.insert(P, [nothing[name] for name in engine.names]).node)
    engine.compute(P)
    engine.tiers.back_up(engine.tree.match(P).node)
    if fails:
        engine.memory.tickets[0].fail(RuntimeError("on purpose"))
    for ticket in list(engine.memory.tickets):
        ticket.wait()
        engine.tiers.poll()
        engine.verify()
    assert engine.back_up(P)
    engine.settle()
    engine.verify()
    assert {name: len(engine.held()[row, HOST]) for row, name in enumerate(engine.names)} == {
        name: {"full": 8, "window": 8, "state": 1}[name] for name in engine.names
    }
    engine.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_waits_for_every_copy_above_its_last_node(fails: bool) -> None:
    """The host has the first node without its state; the second is in flight; the third is copied with that state."""
    engine = Engine(Full(), State())
    engine.compute(P[:2], state=False)
    first = engine.tree.insert(P[:2], [[0, 0], []]).node
    engine.tiers.back_up(first)
    engine.settle()
    engine.compute(P[:4])
    assert engine.back_up(P[:4])
    engine.compute(P[:2])
    engine.compute(P[:6])
    assert engine.back_up(P[:6])
    above, below = engine.memory.tickets
    below.wait()
    engine.tiers.poll()
    engine.verify()
    assert len(engine.held()[0, HOST]) == 2
    if fails:
        above.fail(RuntimeError("on purpose"))
    above.wait()
    engine.tiers.poll()
    engine.verify()
    assert len(engine.held()[0, HOST]) == (2 if fails else 6)
    engine.close()


def test_a_copy_below_a_part_of_a_failed_copy_does_not_begin() -> None:
    """A copy of a node that is split fails, while a copy of the upper half's own state is under way."""
    engine = Engine(Full(), State())
    engine.compute(P)
    assert engine.back_up(P)
    engine.compute(P[:2])
    assert engine.back_up(P[:2]), "the state; everything else is in flight"
    engine.memory.tickets[0].fail(RuntimeError("on purpose"))
    engine.tiers.poll()
    engine.compute([*P[:2], 9])
    assert not engine.back_up([*P[:2], 9])
    engine.verify()
    engine.settle()
    assert engine.back_up([*P[:2], 9])
    engine.settle()
    assert len(engine.held()[0, HOST]) == 3
    engine.close()


def test_a_match_combines_both_tiers() -> None:
    """Full attention is partly on the device only, the window on the host only."""
    engine = Engine(Full(), Window(3))
    engine.compute(P)
    engine.back_up(P)
    engine.settle()
    engine.evict(8, 1)  # the window leaves the device
    engine.evict(5, 0, HOST)
    match = engine.tree.match(P)
    assert match.length + match.host_length == engine.longest(P, [DEVICE, HOST])
    assert engine.reload(P) == match.length + match.host_length
    engine.verify()
    engine.close()


def test_a_match_may_end_at_a_state_on_the_host() -> None:
    engine = Engine(Full(), State())
    engine.compute(P[:4])
    engine.compute(P)
    engine.back_up(P)
    engine.settle()
    for row in (0, 1):
        engine.evict(99, row)
    assert [engine.tree.match(P[:end]).host_length for end in (3, 4, 7, 8)] == [0, 4, 4, 8]
    assert engine.reload(P[:6]) == 4
    assert engine.tree.match(P[:6]).length == 4
    engine.close()


def test_the_pages_of_the_host_are_counted_by_component() -> None:
    engine = Engine(Full(), State())
    engine.compute(P[:4])
    engine.compute(P)
    engine.back_up(P)
    engine.settle()
    counts = engine.tiers.stats().host_pools
    assert {name: pool.cached for name, pool in counts.items()} == {"full": len(P), "state": 2}
    assert all(pool.free + pool.cached + pool.private == pool.total for pool in counts.values())
    engine.close()


@pytest.mark.parametrize("row", [0, 1, 2])
def test_without_host_room_for_one_component_nothing_is_backed_up(row: int) -> None:
    engine = Engine(*KINDS["full window state"])
    other = engine.tiers.host_pools[row].allocate(engine.tiers.host_pools[row].total)
    engine.compute(P)
    assert not engine.back_up(P)
    assert not engine.tiers.busy
    engine.tiers.host_pools[row].release(other)
    assert engine.back_up(P)
    engine.settle()
    engine.close()


def test_check_detects_a_host_page_without_an_owner() -> None:
    engine = Engine(Full())
    engine.compute(P)
    engine.back_up(P)
    engine.settle()
    page = next(iter(engine.held()[0, HOST].values()))
    engine.tiers.host_pools[0].reclaim(np.array([page], np.int32))
    with pytest.raises(CorruptTree, match="host pages of full"):
        engine.tiers.check()
    engine = Engine(Full())
    engine.tiers.host_pools[0].allocate(1)
    with pytest.raises(CorruptTree, match="private"):
        engine.tiers.check()


def test_window_pages_that_a_write_does_not_hold_are_not_written() -> None:
    """The host lacks the window of the first node and all of the last; that of the node between may be evicted."""
    backend = FaultyBackend()
    engine = Engine(Full(), Window(2), backend=backend)
    engine.compute(P[:4])
    engine.back_up(P[:4])
    engine.settle()
    backend.clear()
    engine.compute(P[:6])
    engine.evict(2, 1, HOST)
    assert sorted(map(len, engine.held()[1, HOST])) == [3, 4]
    engine.back_up(P[:6])
    engine.settle()
    assert engine.tiers.store is not None
    sealer = engine.tiers.store.sealer
    names = sealer.names(sealer.root(b""), engine.tree.keys.encode(P[:6]), 4)
    there = {name: [key in backend.stored_keys() for key in sealer.keys(names, name)] for name in engine.names}
    assert there == {"full": [True] * 6, "window": [True, True, False, False, True, True]}
    engine.close()


def test_a_write_holds_the_windows_of_all_its_nodes() -> None:
    """While a path of several nodes is written, no window page of it leaves the host."""
    backend = FaultyBackend()
    engine = Engine(Full(), Window(2), backend=backend)
    engine.compute([*P[:2], 98, 99])  # so that the path is more than one node
    engine.compute(P[:6])
    engine.back_up(P[:6])
    for ticket in engine.memory.tickets:
        ticket.wait()
    engine.tiers.poll()
    engine.tiers.poll()
    assert engine.tiers.stats().queued == 6
    assert engine.evict(6, 1, HOST) == 0
    engine.settle()
    engine.close()


# ---------------------------------------------------------------- random operations


def some_tokens(rng: random.Random, size: int) -> list[int]:
    return [int(rng.random() < 0.3) for _ in range(rng.randrange(1, 8) * size)]


def step(engine: Engine, rng: random.Random) -> None:
    tokens, roll = some_tokens(rng, engine.size), rng.random()
    row, tier = rng.randrange(len(engine.names)), rng.choice([DEVICE] * 4 + [HOST])
    if roll < 0.25:
        engine.recent = [*engine.recent[-5:], tokens]
        engine.compute(tokens, state=rng.random() < 0.7, whole_window=rng.random() < 0.6)
        if rng.random() < 0.6:
            engine.back_up(tokens)
    elif roll < 0.45:
        engine.back_up(tokens)
    elif roll < 0.6:
        end_some(engine, rng)
    elif roll < 0.65:
        engine.tiers.poll()
    elif roll < 0.7:
        wanted = rng.choice([tokens, *engine.recent, *engine.recent])
        if rng.random() < 0.7:  # nothing is left but what is in storage
            engine.compute(wanted)
            engine.back_up(wanted)
            engine.settle()
            for at in range(2 * len(engine.names)):
                engine.evict(99, at // 2, at % 2)
        engine.tiers.prefetch([*wanted, 9])
        if rng.random() < 0.7:
            engine.settle()
    elif roll < 0.76:
        engine.evict(rng.randrange(6) if tier == HOST else rng.randrange(16), row, tier)
    elif roll < 0.9:
        for at in range(len(engine.names)) if rng.random() < 0.3 else ():
            engine.evict(99, at)
        engine.reload(rng.choice([tokens, *engine.recent, *engine.recent]), fail=rng.random() < 0.2)
    elif roll < 0.95 and len(engine.locked) < 3:
        if node := engine.tree.match(tokens).node:
            engine.tree.lock(node)
            engine.locked.append(node)
    elif engine.locked:
        engine.tree.unlock(engine.locked.pop(rng.randrange(len(engine.locked))))


def end_some(engine: Engine, rng: random.Random) -> None:
    for _ in range(rng.randint(0, len(engine.workers.waiting))):
        engine.workers.run(rng.randrange(len(engine.workers.waiting)))
    tickets = [ticket for ticket in engine.memory.tickets if not ticket.done()]
    engine.memory.tickets = tickets
    for ticket in rng.sample(tickets, rng.randint(0, len(tickets))):
        if rng.random() < 0.2:
            ticket.fail(RuntimeError("on purpose"))
        ticket.wait()


def verify_matches(engine: Engine, rng: random.Random) -> None:
    tokens = some_tokens(rng, engine.size)
    match = engine.tree.match(tokens)
    assert match.length == engine.longest(tokens, [DEVICE])
    assert match.length + match.host_length == engine.longest(tokens, [DEVICE, HOST])


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, marks=[] if size == 2 or "chunked" in kind else pytest.mark.slow)
        for kind in KINDS
        for size in (1, 2)
    ],
)
def test_random_operations_leave_every_page_correct(kind: str, size: int) -> None:
    backend, rng = FaultyBackend(), random.Random(f"{kind} {size}")
    engine = Engine(*KINDS[kind], size=size, device=14, host=24, backend=backend)
    for _ in range(500):
        step(engine, rng)
        if rng.random() < 0.02 and (held := backend.stored_keys()):
            key = rng.choice(held)
            backend.set_value(key, backend.value(key)[:-1] + b"?")
        engine.verify()
        verify_matches(engine, rng)
    engine.close()
    stats = engine.tiers.stats()
    moved = min(stats.backed_up, engine.reloaded, stats.stored, stats.prefetched)
    assert moved >= 3, "the operations copy pages between all tiers, in both directions"
