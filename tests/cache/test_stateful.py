"""Random operations on the tree and on the cache, each compared with the reference and followed by check().

The cache's pages have contents here: every computed position is recorded with its namespace and all tokens up to it. So
the tests can verify that every page in a lease or in the tree holds exactly the right tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from rigs.cache import some_tokens
from rigs.policy_models import InPython
from rigs.reference import POLICIES, Page, ReferenceCache, ReferenceLease, ReferenceTree

from mainstem.cache.namespaces import encode_namespace, owner_of
from mainstem.cache.prefix_cache import Lease, PrefixCache
from mainstem.cache.tree import NodeView, Tree
from mainstem.errors import BadArgument, NotLocked, OutOfPages, StaleHandle

SIZES = [1, 3, 16]
SPACES = [None, None, None, "a", "b"]
SHARE = 0.4  # of the pages, that one namespace may retain


def policy_of(name: str, python: bool) -> Any:
    return InPython(name) if python else name


# ---------------------------------------------------------------- the tree


@dataclass
class Place:
    """A handle and its page in the model."""

    handle: int
    page: Page
    locks: int = 0


@dataclass
class Flight:
    """A transfer: its handle, and its pages."""

    handle: int
    pages: list[Page]


def last_uses(views: list[NodeView]) -> dict[int, int]:
    """Returns when each node or a descendant was last used, which a policy sees once the node is a leaf."""
    used = {view.node: view.last_access for view in views}
    for view in sorted(views, key=lambda view: -view.start):
        if view.parent in used:
            used[view.parent] = max(used[view.parent], used[view.node])
    return used


class TreeWorld:
    """A tree and its model, driven together."""

    def __init__(self, size: int, policy: str, python: bool = False) -> None:
        self.size = size
        # A memory of evictions changes nothing: where there is one, all else is as the model says.
        self.tree = Tree(page_size=size, policy=policy_of(policy, python), explain_pages=20 if size > 1 else None)
        self.joins = not python and policy not in ("fifo", "filo")
        self.model = ReferenceTree(size, policy)
        self.places: list[Place] = []
        self.flights: list[Flight] = []
        self.next_id = 0

    def match(self, tokens: list[int], space: str | None) -> None:
        peeked = self.tree.peek(tokens, space)
        real, modelled = self.tree.match(tokens, space, partial=True), self.model.match(tokens, space)
        assert peeked == real.length == modelled.length
        assert real.page_ids.tolist() == modelled.page_ids
        assert (real.pending, real.partial) == (modelled.pending, modelled.partial)
        if modelled.donor:
            assert real.partial_page == modelled.donor.id
        self.remember(real.node, modelled.end)

    def insert(self, tokens: list[int], space: str | None, priority: int, ready: bool, after: Place | None) -> None:
        if after:
            space, prefix = after.page.key
            tokens = [token for page in prefix for token in page] + tokens
        ids = list(range(self.next_id, self.next_id + len(tokens) // self.size))
        self.next_id += len(ids)
        handle, page = (after.handle, after.page) if after else (0, None)
        options = {"priority": priority, "ready": ready}
        real = self.tree.insert(tokens, np.array(ids, dtype=np.int32), space, after=handle, **options)
        modelled = self.model.insert(tokens, ids, space, page, **options)
        assert (real.length, real.existing) == (modelled.length, modelled.existing)
        assert real.page_ids.tolist() == modelled.page_ids
        if not ready and modelled.added:
            self.flights.append(Flight(real.node, modelled.added))
        elif modelled.end is None or modelled.end.ready:
            self.remember(real.node, modelled.end)

    def remember(self, handle: int, page: Page | None) -> None:
        assert (handle == 0) == (page is None)
        if page:
            self.places.append(Place(handle, page))
        unlocked = [place for place in self.places if not place.locks]
        if len(unlocked) > 12:
            self.places.remove(unlocked[0])

    def settle(self, flight: Flight, commit: bool) -> None:
        self.flights.remove(flight)
        if commit:
            self.tree.commit(flight.handle)
            self.model.commit(flight.pages)
            self.remember(flight.handle, flight.pages[-1])
        else:
            assert self.tree.cancel(flight.handle)[0].tolist() == self.model.cancel(flight.pages)

    def remove(self, tokens: list[int], space: str | None) -> None:
        freed = self.tree.remove(tokens, space)[0][0].tolist()
        self.model.remove(tokens, space)
        assert sorted(freed) == sorted(self.model.evict(len(self.model.pages), only_removed=True))

    def is_live(self, place: Place) -> bool:
        """Returns whether a handle is valid: its page exists, and its node was not joined to what follows."""
        if place.page not in self.model.pages:
            return False
        try:
            self.tree.length(place.handle)
        except StaleHandle:
            assert (self.joins or place.page.top) and place.locks == 0
            return False
        return True

    def lock(self, place: Place) -> None:
        if not self.is_live(place):
            for call in (self.tree.lock, self.tree.unlock, self.tree.page_ids):
                with pytest.raises(StaleHandle):
                    call(place.handle)
            return
        self.tree.lock(place.handle)
        self.model.lock(place.page)
        place.locks += 1
        held = [page.id if page in self.model.pages else -1 for page in place.page.path()]
        assert self.tree.page_ids(place.handle).tolist() == held

    def unlock(self, place: Place) -> None:
        if not self.is_live(place):
            return
        if place.page.locks == 0:
            with pytest.raises(NotLocked):
                self.tree.unlock(place.handle)
        elif place.locks:
            self.tree.unlock(place.handle)
            self.model.unlock(place.page)
            place.locks -= 1

    def evict(self, count: int) -> None:
        assert sorted(self.tree.evict(count)[0].tolist()) == sorted(self.model.evict(count))

    def flush(self) -> None:
        assert sorted(self.tree.flush()[0].tolist()) == sorted(self.model.evict(len(self.model.pages)))

    def verify(self) -> None:
        self.tree.check()
        stats, model = self.tree.stats(), self.model
        present = [page for page in model.pages if page.ready]
        assert stats.cached_pages == len(present)
        assert stats.in_flight_pages == len(model.pages) - len(present)
        assert stats.evictable_pages == len(model.evictable()) == stats.cached_pages - stats.locked_pages
        assert stats.namespaces == len({page.key[0] for page in model.pages})
        for name in ("match_calls", "queried_symbols", "hit_symbols", "inserted_pages", "evicted_pages"):
            assert getattr(stats, name) == model.counts[name]
        self.verify_nodes()

    def verify_nodes(self) -> None:
        pages = {page.id: page for page in self.model.pages}
        views = list(self.tree.nodes())
        used = last_uses(views)
        held = [(view, page) for view in views for page in view.cells["full", 0].ids.tolist()]
        assert sorted(page for _, page in held) == sorted(pages)
        for view, page in held:
            modelled = pages[page]
            # A node joined from several pieces has the creation time of the last piece.
            joins = self.joins or view.removed
            assert view.created == modelled.created or (joins and view.created > modelled.created)
            # If the policy does not rank by recency, one node may have pages of different recency.
            assert used[view.node] == modelled.last_access or (
                not self.joins and used[view.node] > modelled.last_access
            )
            assert (view.hits, view.priority) == (modelled.hits, modelled.priority)
            assert view.cells["full", 0].present == modelled.ready
            assert view.removed == bool(modelled.top)

    def step(self, rng: random.Random) -> None:
        tokens, space = some_tokens(rng, self.size), rng.choice(SPACES)
        place = rng.choice(self.places) if self.places else None
        after = place if place and self.is_live(place) and rng.random() < 0.4 else None
        roll = rng.random()
        if roll < 0.25:
            self.match(tokens, space)
        elif roll < 0.6:
            self.insert(tokens, space, rng.randrange(3), rng.random() < 0.8, after)
        elif roll < 0.7 and place:
            self.lock(place)
        elif roll < 0.85 and place:
            self.unlock(place)
        elif roll < 0.92 and self.flights:
            self.settle(rng.choice(self.flights), rng.random() < 0.5)
        elif roll < 0.94:
            self.remove(tokens, space)
        elif roll < 0.99:
            self.evict(rng.randrange(8))
        else:
            self.flush()
        self.verify()


def marks(size: int, policy: str, python: bool = False, **kind: Any) -> list[pytest.MarkDecorator]:
    """Pages of one size show every policy, and some policies pages of other sizes."""
    return [] if size == 3 or (not python and policy in ("lru", "fifo", "slru")) else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("size", "policy", "python"),
    [
        pytest.param(size, policy, python, marks=marks(size, policy, python))
        for size in SIZES
        for policy in sorted(POLICIES)
        for python in (False, True)
    ],
)
def test_the_tree_does_as_the_reference(size: int, policy: str, python: bool) -> None:
    world, rng = TreeWorld(size, policy, python), random.Random(f"{size} {policy} {python}")
    for _ in range(500):
        world.step(rng)


# ---------------------------------------------------------------- the cache


@dataclass(eq=False)
class Run:
    """One sequence: its lease, the model's lease, and the number of computed positions."""

    real: Lease
    model: ReferenceLease
    computed: int


class CacheWorld:
    """A cache and its model, driven together, with pages that have contents."""

    def __init__(
        self, size: int, policy: str, pages: int = 14, copies: bool = False, enabled: bool = True, python: bool = False
    ) -> None:
        self.size = size
        self.content: dict[tuple[int, int], tuple[Any, tuple[int, ...]]] = {}
        copy: Callable[[int, int, int], None] | None = self.copy if copies else None
        options: dict[str, Any] = {"enabled": enabled, "copy_page": copy, "retain_share": SHARE}
        memory = 20 if size > 1 else None
        self.cache = PrefixCache(pages, size, policy=policy_of(policy, python), explain_pages=memory, **options)
        self.model = ReferenceCache(pages, ReferenceTree(size, policy), enabled, copies, SHARE)
        self.now = 0.0
        self.runs: list[Run] = []

    def copy(self, source: int, target: int, positions: int) -> None:
        assert (self.cache.pool.owner(source), self.cache.pool.owner(target)) == ("cached", "private")
        for slot in range(positions):
            self.content[target, slot] = self.content[source, slot]

    def lease(self, tokens: list[int], space: str | None, priority: int, most: int | None = None) -> None:
        if self.model.copies and not self.model.free:
            self.flush()  # which pages a copy keeps is unspecified, except for the copied one
        peeked = min(self.cache.peek(tokens, space), len(tokens) if most is None else most)
        real = self.cache.lease(tokens, space, priority=priority, most=most)
        assert real.hit == peeked or real.hit == peeked // self.size * self.size
        own = real.page_table[real.published // self.size :].tolist()
        modelled = self.model.lease(tokens, space, priority, own, most)
        assert (real.hit, real.reserved, real.published) == (modelled.hit, modelled.reserved, modelled.published)
        assert 0 <= real.hit == real.hit_tokens < real.length
        self.runs.append(Run(real, modelled, real.hit))

    def reserve(self, run: Run, positions: int) -> None:
        before = len(run.real.page_table)
        refused: OutOfPages | None = None
        try:
            run.real.reserve(positions)
        except OutOfPages as error:
            refused = error
        if refused:
            with pytest.raises(OutOfPages, match=re.escape(str(refused))):
                self.model.reserve(run.model, positions)
        else:
            self.model.reserve(run.model, positions, run.real.page_table[before:].tolist())

    def compute(self, run: Run, positions: int) -> None:
        for at in range(run.computed, min(run.computed + positions, run.real.reserved, run.real.length)):
            page = int(run.real.page_table[at // self.size])
            assert self.cache.pool.owner(page) == "private"
            self.content[page, at % self.size] = run.model.namespace, tuple(run.model.symbols[: at + 1])
            run.computed = at + 1

    def publish(self, run: Run, upto: int) -> None:
        run.real.publish(upto)
        self.model.publish(run.model, upto)

    def publish_too_much(self, run: Run) -> None:
        with pytest.raises(BadArgument):
            run.real.publish(min(run.real.reserved, run.real.length) + 1)

    def append(self, run: Run, tokens: list[int]) -> None:
        run.real.append(tokens)
        self.model.append(run.model, tokens)

    def finish(self, run: Run, upto: int | None) -> None:
        if upto is None:
            self.compute(run, run.real.length)
        run.real.finish(upto)
        self.model.finish(run.model, upto)
        self.runs.remove(run)

    def abort(self, run: Run) -> None:
        run.real.abort()
        self.model.abort(run.model)
        self.runs.remove(run)

    def retain(self, tokens: list[int], space: str | None, ttl: float | None) -> None:
        if ttl is None:
            kept, modelled = self.cache.retention.pin(tokens, space), self.model.retain(tokens, space, pinned=True)
        else:
            kept = self.cache.retention.retain(tokens, self.now + ttl, space)
            modelled = self.model.retain(tokens, space, self.now + ttl)
        assert (kept.positions, kept.cached) == modelled

    def unpin(self, tokens: list[int], space: str | None) -> None:
        assert self.cache.retention.unpin(tokens, space) == self.model.unpin(tokens, space)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.cache.poll(self.now)
        self.model.expire(self.now)

    def expect(self, tokens: list[int], space: str | None, seconds: float) -> None:
        expected = self.cache.expected.expect(tokens, self.now + seconds, space)
        assert expected == self.model.expect(tokens, space)

    def demote(self, tokens: list[int], space: str | None, over: bool) -> None:
        assert self.cache.demote(tokens, space, over=over) == self.model.demote(tokens, space, over)

    def flush(self) -> None:
        assert self.cache.flush() == self.model.flush()

    def remove(self, tokens: list[int], space: str | None) -> None:
        assert self.cache.remove(tokens, space) == self.model.remove(tokens, space)
        assert self.cache.peek([*tokens, 0], space) < max(len(tokens), 1)

    def verify(self) -> None:
        self.cache.check()
        self.verify_owners()
        for run in self.runs:
            self.verify_run(run)
        for page in self.model.tree.pages:
            space, prefix = page.key
            tokens = tuple(token for front in prefix for token in front)
            for slot in range(self.size):
                assert self.content[page.id, slot] == (space, tokens[: len(tokens) - self.size + slot + 1])

    def verify_owners(self) -> None:
        pool, model = self.cache.pool, self.model
        owner = dict.fromkeys(model.free, "free") | dict.fromkeys(model.cached(), "cached")
        for run in self.runs:
            owner |= dict.fromkeys(model.private(run.model), "private")
        assert owner == {page: pool.owner(page) for page in range(pool.total)}
        assert pool.free + pool.cached + pool.private == pool.total
        assert self.cache.stats().tree.evictable_pages == len(model.tree.evictable())
        stats, pins = self.cache.stats().retention, [pinned for _, pinned in model.retained.values()]
        assert (stats.prefixes, stats.pinned, stats.device["full"]) == (len(pins), sum(pins), len(model.kept()))
        for space in SPACES:
            kept = self.cache.retention.kept(owner_of(encode_namespace(space)))
            assert kept == len(model.kept(space)) * self.size
        self.content = {slot: held for slot, held in self.content.items() if owner[slot[0]] != "free"}

    def verify_run(self, run: Run) -> None:
        real, model = run.real, run.model
        assert real.page_table.tolist() == model.table
        assert (real.length, real.reserved, real.published) == (len(model.symbols), model.reserved, model.published)
        for at in range(run.computed):
            held = self.content[model.table[at // self.size], at % self.size]
            assert held == (model.namespace, tuple(model.symbols[: at + 1]))

    def step(self, rng: random.Random) -> None:
        roll = rng.random()
        if rng.random() < 0.2:
            self.advise(rng)
        elif not self.runs or (roll < 0.25 and len(self.runs) < 6):
            tokens = some_tokens(rng, self.size) or [0]
            self.lease(tokens, rng.choice(SPACES), rng.randrange(3), rng.choice((*[None] * 8, 0, rng.randrange(9))))
        else:
            self.step_run(rng.choice(self.runs), roll, rng)
        self.verify()

    def advise(self, rng: random.Random) -> None:
        tokens, space = some_tokens(rng, self.size), rng.choice(SPACES)
        roll = rng.random()
        if roll < 0.35:
            self.retain(tokens, space, rng.choice([None, 1, 2, 5]))
        elif roll < 0.5:
            self.unpin(tokens, space)
        elif roll < 0.7:
            self.wait(rng.choice([0, 0.5, 1, 3]))
        elif roll < 0.85:
            self.expect(tokens, space, rng.choice([-1, 0, 2, 9, 1000]))
        else:
            self.demote(tokens, space, rng.random() < 0.5)

    def step_run(self, run: Run, roll: float, rng: random.Random) -> None:
        if roll < 0.5:
            missing = max(run.real.length - run.real.reserved, 0)
            self.reserve(run, rng.choice([missing, missing, rng.randrange(3 * self.size)]))
            self.compute(run, rng.choice([run.real.length, rng.randrange(3 * self.size)]))
        elif roll < 0.7:
            self.publish(run, rng.choice([run.computed, rng.randint(0, run.computed)]))
        elif roll < 0.74:
            self.publish_too_much(run)
        elif roll < 0.82:
            self.append(run, some_tokens(rng, self.size, 1))
        elif roll < 0.92:
            self.finish(run, rng.choice([None, run.computed, rng.randint(0, run.computed)]))
        elif roll < 0.97:
            self.abort(run)
        elif roll < 0.99:
            self.remove(some_tokens(rng, self.size), rng.choice(SPACES))
        else:
            self.flush()


# How a lease that finds no page for its copy counts in the hits of a page is unspecified, so copies are tested with
# policies that ignore hits.
KINDS: list[dict[str, Any]] = [
    *({"policy": policy, "python": python} for policy in sorted(POLICIES) for python in (False, True)),
    *({"policy": policy, "copies": True} for policy in ("lru", "fifo", "mru", "priority")),
    {"policy": "lru", "copies": True, "pages": 5},
    {"policy": "lru", "copies": True, "python": True},
    {"policy": "lru", "enabled": False},
    {"policy": "lru", "enabled": False, "copies": True},
]


@pytest.mark.parametrize(
    ("size", "kind"),
    [pytest.param(size, kind, marks=marks(size, **kind)) for size in SIZES for kind in KINDS],
    ids=lambda each: " ".join(f"{name}={value}" for name, value in each.items()) if isinstance(each, dict) else None,
)
def test_the_cache_does_as_the_reference(size: int, kind: dict[str, Any]) -> None:
    world, rng = CacheWorld(size, **kind), random.Random(f"{size} {sorted(kind.items())}")
    for _ in range(500):
        world.step(rng)
    while world.runs:
        world.abort(world.runs[0])
    world.flush()
    assert world.cache.pool.free == world.cache.pool.total
    world.verify()


# ---------------------------------------------------------------- the same, smaller


def test_small_trees_do_as_the_reference() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        world = TreeWorld(rng.randint(1, 3), rng.choice(sorted(POLICIES)), rng.random() < 0.5)
        for _ in range(40):
            world.step(rng)


def test_small_caches_do_as_the_reference() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        world = CacheWorld(rng.randint(1, 3), "lru", pages=rng.randint(1, 9), copies=rng.random() < 0.5)
        for _ in range(40):
            world.step(rng)
