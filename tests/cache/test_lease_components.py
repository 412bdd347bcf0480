"""Leases on full attention, a window and a state: the owner of each id, what may be read, what must not be evicted.

Ids have contents here: each position of a page and each state holds the prefix that was computed into it. So the tests
can verify that everything a lease may read is what a computation without a cache would have written.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from rigs.cache import some_tokens
from rigs.lease_model import LeaseModel, ModelLease, Names
from rigs.policy_models import InPython
from rigs.slow import slow_but

from mainstem.cache.components import Chunked, Component, Full, State, Window
from mainstem.cache.keys import Image, TypedKeys
from mainstem.cache.namespaces import encode_namespace
from mainstem.cache.policies import Policy
from mainstem.cache.prefix_cache import Lease, PrefixCache
from mainstem.errors import BadArgument, LeaseClosed, OutOfPages

KINDS = [
    "full", "full window", "full state", "full window state", "window", "full capped", "window state",
    "full chunked", "full chunked state", "full window chunked", "full wide window", "wide window",
    "full chunks chunked",
]  # fmt: skip
MOST_UNLIKE = ("full capped", "full chunked state", "full window state", "wide window", "window state")
SPACES = [None, None, None, "a"]
UNWRITTEN = -1


def rows_of(kind: str, window: int, full: int = 24, windows: int = 14, states: int = 7) -> dict[Component, int]:
    """Returns the components that a kind names, and the number of ids of each."""
    rows: dict[str, tuple[Component, int]] = {
        "full": (Full(), full),
        "window": (Window(window), windows),
        "wide": (Window(2 * window + 1), windows + 3),
        "chunked": (Chunked(window + 1), windows),
        "chunks": (Chunked(2 * window), windows),
        "state": (State(), states),
        "capped": (State(most_on_path=2, weigh_flops=False), 2 * states),
    }
    return dict(rows[name] for name in kind.split())


# ---------------------------------------------------------------- a cache whose ids have contents


@dataclass(eq=False)
class Run:
    """One sequence: its lease, the model's lease, and the number of computed positions."""

    real: Lease
    model: ModelLease
    computed: int


class LeaseWorld:
    """A cache and its model, driven together. Every operation ends with checks."""

    def __init__(self, size: int, rows: dict[Component, int], policy: str | Policy = "lru") -> None:
        self.size, self.names = size, Names()
        self.content: dict[tuple[str, int], list[int]] = {}
        self.states: dict[int, int] = {}
        self.model = LeaseModel(size, rows, self.names.before)
        has_state = "state" in self.model.rows
        self.cache = PrefixCache(rows, size, policy=policy, copy_state=self.copy_state if has_state else None)
        self.pools = self.cache.pools
        self.runs: list[Run] = []

    def owner(self, row: str, held: int) -> str:
        return self.pools[row].owner(held)

    def copy_state(self, source: int, target: int) -> None:
        """Copies into a new slot, which no lease may have yet."""
        assert source != target
        assert self.owner("state", target) == "private"
        assert target not in [run.model.state for run in self.runs]
        self.states[target] = self.states[source]

    def table(self, run: Run, row: str) -> list[int]:
        table = run.real.tables[list(self.model.rows).index(row)]
        return [int(held) for held in table]

    # ---------------------------------------------------------------- operations

    def lease(self, tokens: list[int], space: str | None = None) -> Run | None:
        """Opens a lease; None if there is no slot for its state."""
        root = self.names.root(encode_namespace(space))
        names = [root, *self.names.extend(root, tokens)]
        assert self.cache.peek(tokens, space) == self.model.match(names, len(tokens) - 1)[0]
        free = self.model.free("state") if "state" in self.model.rows else 0
        model = self.model.open(names)
        try:
            real = self.cache.lease(tokens, space)
        except OutOfPages:
            assert "state" in self.model.rows
            assert self.model.room("state") == 0
            self.model.close(model)
            self.settle({})
            return None
        assert (real.hit, real.reach) == (model.hit, model.reach)
        assert (real.published, real.reserved, real.length) == (model.hit, model.hit, len(tokens))
        self.settle({"state": 1 - free} if "state" in self.model.rows else {})
        run = Run(real, model, model.hit)
        self.take_slot(run)
        self.runs.append(run)
        return run

    def take_slot(self, run: Run) -> None:
        slot = run.real.state
        assert (slot < 0) == ("state" not in self.model.rows)
        if slot < 0:
            return
        assert slot not in self.model.private("state")
        assert slot not in self.model.held["state"].values()
        run.model.state = slot
        if run.model.hit == 0:
            self.states[slot] = UNWRITTEN

    def settle(self, wanted: dict[str, int]) -> None:
        """Settles the model after an operation that must evict exactly `wanted` ids of each component."""
        gone = self.model.settle(self.owner)
        for row, names in gone.items():
            with_full = gone.get("full", {}) if row != "full" else {}
            assert len(names.keys() - with_full.keys()) == max(0, wanted.get(row, 0)), f"evicted of {row}"

    def reserve(self, run: Run, positions: int) -> None:
        model, first = run.model, self.model.first
        pages = -(-(model.reserved + positions) // self.size)
        had = len(self.table(run, first))
        missing = max(0, pages - had) if first == "full" else 0
        free, room = self.model.free(first), self.model.room(first)
        try:
            run.real.reserve(positions)
        except OutOfPages:
            assert missing > room
            assert len(self.table(run, first)) == had
            return
        assert missing <= room
        self.settle({first: missing - free} if missing else {})
        model.reserved += positions
        if first == "full":
            self.take_pages(run, first, set(range(had, pages)))

    def take_pages(self, run: Run, row: str, indices: set[int]) -> None:
        """Notes new private pages, which no lease and no prefix has."""
        table = self.table(run, row)
        for page in indices:
            held = table[page]
            assert held not in self.model.private(row)
            assert held not in self.model.held[row].values()
            run.model.own[row][page] = held
            self.content[row, held] = [UNWRITTEN] * self.size

    def slide(self, run: Run, begin: int, end: int) -> bool:
        """Returns whether windows and chunks had pages for [begin, end); those that `begin` does not read are freed."""
        missing: dict[str, set[int]] = {}
        needed: dict[str, int] = {}
        fits = True
        for row in self.model.paged:
            own = run.model.own[row]
            if not fits or isinstance(self.model.rows[row], Full):
                continue
            for page in [page for page in own if page < self.model.first_needed(row, begin)]:
                del own[page]
            more = set(range(begin // self.size, -(-end // self.size))) - own.keys()
            fits = len(more) <= self.model.room(row)
            if fits and more:
                missing[row], needed[row] = more, len(more) - self.model.free(row)
        try:
            run.real.slide(begin, end)
            assert fits
        except OutOfPages:
            assert not fits
        self.settle(needed)
        for row, pages in missing.items():
            self.take_pages(run, row, pages)
        return fits

    def compute(self, run: Run, positions: int) -> None:
        """Writes positions into the pages and the state of a lease, as a forward does."""
        begin = run.computed
        end = min(begin + positions, run.real.reserved, run.real.length)
        if begin >= end or not self.slide(run, begin, end):
            return
        names = run.model.names
        for row in self.model.paged:
            table = self.table(run, row)
            for at in range(begin, end):
                held = table[at // self.size]
                assert self.owner(row, held) == "private"
                self.content[row, held][at % self.size] = names[at + 1]
        if (slot := run.real.state) >= 0:
            assert self.owner("state", slot) == "private"
            assert begin == 0 or self.states[slot] == names[begin]
            self.states[slot] = names[end]
        run.computed = end

    def is_at_boundary(self, run: Run) -> bool:
        """Returns whether there is a state, at a page boundary, where a checkpoint is allowed."""
        return "state" in self.model.rows and run.computed > 0 and run.computed % self.size == 0

    def checkpoint(self, run: Run, room: bool = True) -> bool:
        """Takes a checkpoint of the state, which is at a page boundary. It replaces one that is not published yet."""
        model, again = run.model, run.model.mark is not None
        free, can_be_had = self.model.free("state"), self.model.room("state")
        done = run.real.checkpoint(run.computed, room)
        assert done == (again or (can_be_had if room else free) > 0)
        if done:
            self.settle({"state": 1 - free} if room and not again else {})
            slot = model.mark[1] if model.mark else self.new_slot()
            assert self.states[slot] == model.names[run.computed]
            model.mark = run.computed, slot
        return done

    def new_slot(self) -> int:
        """Returns the slot that the pool has allocated and that no lease is known to have."""
        known = set(self.model.private("state"))
        (slot,) = {slot for slot in range(self.pools["state"].total) if self.owner("state", slot) == "private"} - known
        return slot

    def publish(self, run: Run, upto: int) -> None:
        duplicates = self.cache.stats().leases.duplicate_pages
        run.real.publish(upto)
        twice, too_many = self.model.publish(run.model, upto)
        self.settle({"state": too_many})
        assert run.real.published == run.model.published
        assert self.cache.stats().leases.duplicate_pages == duplicates + twice

    def append(self, run: Run, tokens: list[int]) -> None:
        run.real.append(tokens)
        run.model.names += self.names.extend(run.model.names[-1], tokens)
        run.model.appended = run.model.appended or bool(tokens)

    def finish(self, run: Run, upto: int | None) -> None:
        """Finishes a lease; `upto=None` is all that has a page, less a last appended token, and must be computed."""
        model = run.model
        run.real.finish(upto)
        _, too_many = self.model.publish(
            model, min(model.reserved, model.length - model.appended) if upto is None else upto
        )
        self.closed(run)
        self.settle({"state": too_many})

    def abort(self, run: Run) -> None:
        run.real.abort()
        self.closed(run)

    def drop(self, run: Run) -> None:
        """Drops a lease without ending it."""
        del run.real
        self.closed(run)

    def closed(self, run: Run) -> None:
        self.runs.remove(run)
        self.model.close(run.model)

    def evict(self, row: str, count: int) -> None:
        evictable = len(self.model.held[row]) - len(self.model.locked(row))
        parts = self.cache.tree.evict(count, row)
        for pool, part in zip(self.pools.values(), parts, strict=True):
            pool.reclaim(part)
        assert len(parts[list(self.pools).index(row)]) == min(count, evictable)
        self.settle({row: min(count, evictable)})

    def flush(self) -> None:
        self.cache.flush()
        self.model.settle(self.owner)
        for row, held in self.model.held.items():
            assert held.keys() == self.model.locked(row)

    # ---------------------------------------------------------------- what must hold

    def verify(self) -> None:
        self.cache.check()
        for at, (row, pool) in enumerate(self.pools.items()):
            held, private = self.model.held[row], self.model.private(row)
            assert (pool.free, pool.cached, pool.private) == (self.model.free(row), len(held), len(private))
            assert len(set(private)) == len(private)
            assert all(self.owner(row, own) == "private" for own in private)
            present, locked, _ = self.cache.tree.core.counts(at, 0)
            assert (present, locked) == (len(held), len(self.model.locked(row)))
        for run in self.runs:
            self.verify_run(run)

    def verify_run(self, run: Run) -> None:
        """Verifies that what the next forward of a lease reads is present, private or locked, and right."""
        for row in self.model.paged:
            table = self.table(run, row)
            pages = {run.model.published // self.size, *(page + 1 for page in run.model.own[row])}
            if isinstance(self.model.rows[row], Chunked):  # at a boundary no page is left that is read
                pages.add(run.computed // self.size)
            assert len(table) == max(pages)
            for page in range(self.model.first_needed(row, run.computed), -(-run.computed // self.size)):
                assert table[page] == self.model.expected_id(run.model, row, page) >= 0
                names = run.model.names[page * self.size + 1 : min((page + 1) * self.size, run.computed) + 1]
                assert self.content[row, table[page]][: len(names)] == names
            for page in range(self.model.first_needed(row, run.model.published)):
                assert table[page] == -1, "it may be evicted, so the table must not name it"
        slot = run.real.state
        assert slot == run.model.state
        assert slot < 0 or run.computed == 0 or self.states[slot] == run.model.names[run.computed]
        if run.model.mark:
            position, marked = run.model.mark
            assert self.states[marked] == run.model.names[position]

    def audit(self) -> None:
        """Verifies that the tree holds what the model does, in the same place, with the right contents."""
        held: dict[str, dict[int, int]] = {row: {} for row in self.model.rows}
        ends: dict[int, int] = {}
        for view in self.cache.tree.nodes():
            above = ends[view.parent] if view.parent else self.names.root(view.namespace)
            names = self.names.extend(above, np.frombuffer(view.key, "<i4").tolist())
            ends[view.node] = names[-1]
            for row in self.model.rows:
                cell = view.cells[row, 0]
                boundaries = names[self.size - 1 :: self.size] if row in self.model.paged else names[-1:]
                held[row] |= zip(boundaries, cell.ids.tolist(), strict=False)
                assert cell.locks <= view.cells[self.model.first, 0].locks or self.model.first == "window"
        assert held == self.model.held
        for row in self.model.rows:
            for name, at in held[row].items():
                if row in self.model.paged:
                    assert self.content[row, at] == self.names.back(name, self.size)
                else:
                    assert self.states[at] == name

    def end(self) -> None:
        """Ends every lease and verifies that every id is free."""
        while self.runs:
            self.abort(self.runs[0])
        self.flush()
        self.verify()
        assert all(pool.free == pool.total for pool in self.pools.values())
        assert self.cache.tree.stats().nodes == 0


# ---------------------------------------------------------------- random operations


class Chance:
    """Draws operations on a world."""

    def __init__(self, world: LeaseWorld, rng: random.Random) -> None:
        self.world, self.rng = world, rng

    def step(self) -> None:
        world, rng, roll = self.world, self.rng, self.rng.random()
        if not world.runs or (roll < 0.2 and len(world.runs) < 5):
            world.lease(some_tokens(rng, world.size) or [0], rng.choice(SPACES))
        elif roll < 0.25:
            world.evict(rng.choice(list(world.model.rows)), rng.randrange(7))
        elif roll < 0.255:
            world.flush()
        else:
            self.step_run(rng.choice(world.runs), roll)

    def step_run(self, run: Run, roll: float) -> None:
        world, rng = self.world, self.rng
        if roll < 0.6:
            self.advance(run)
        elif roll < 0.68:
            self.checkpoint(run)
        elif roll < 0.78:
            world.publish(run, rng.choice([run.computed, rng.randint(0, run.computed)]))
        elif roll < 0.86:
            world.append(run, some_tokens(rng, world.size, 1))
        elif roll < 0.93:
            self.finish(run)
        elif roll < 0.97:
            world.abort(run)
        else:
            world.drop(run)

    def advance(self, run: Run) -> None:
        """Computes a chunk of some length, often up to where another prompt branches off, or to a page boundary."""
        world, rng = self.world, self.rng
        if run.computed == run.real.length:
            world.append(run, some_tokens(rng, world.size, 2))
        missing = run.real.length - run.real.reserved
        if missing > 0:
            world.reserve(run, rng.choice([missing, missing, rng.randrange(3 * world.size)]))
        to_reach, to_page = run.real.reach - run.computed, -run.computed % world.size + world.size
        world.compute(run, rng.choice([run.real.length, to_page, rng.randrange(1, 3 * world.size), max(to_reach, 1)]))
        if rng.random() < 0.4:
            self.checkpoint(run)
        if rng.random() < 0.5:
            world.publish(run, run.computed)

    def checkpoint(self, run: Run) -> None:
        if self.world.is_at_boundary(run):
            self.world.checkpoint(run, self.rng.random() < 0.7)

    def finish(self, run: Run) -> None:
        world, rng = self.world, self.rng
        world.compute(run, run.real.length)
        whole = run.computed >= min(run.real.reserved, run.real.length)
        world.finish(run, None if whole and rng.random() < 0.5 else rng.randint(0, run.computed))


SETTINGS = [
    pytest.param(1, "lru", {}, marks=pytest.mark.slow),
    pytest.param(2, InPython("filo"), {"full": 50, "windows": 30, "states": 12}, marks=pytest.mark.slow),
    (4, "slru", {"full": 16, "windows": 9, "states": 5}),
]


@pytest.mark.parametrize(("size", "policy", "ids"), SETTINGS, ids=["1 lru", "2 youngest", "4 slru"])
@pytest.mark.parametrize("kind", slow_but(KINDS, *MOST_UNLIKE))
def test_leases_do_as_the_model(kind: str, size: int, policy: str | Policy, ids: dict[str, int]) -> None:
    rng = random.Random(f"{kind} {size}")
    world = LeaseWorld(size, rows_of(kind, rng.choice([1, 2 * size + 1, 3 * size]), **ids), policy)
    chance = Chance(world, rng)
    for step in range(3600):
        chance.step()
        world.verify()
        if step % 8 == 0:
            world.audit()
    world.audit()
    world.end()


# ---------------------------------------------------------------- the same, smaller

SMALL: list[dict[Component, int]] = [
    {Full(): 9},
    {Full(): 9, Window(2): 5},
    {Full(): 9, State(): 4},
    {Full(): 9, Window(3): 6, State(): 4},
    {Full(): 9, Chunked(4): 6},
    {Window(3): 6},
    {Full(): 9, Window(5): 6, Window(2): 5},
]


def test_leases_of_small_caches_do_as_the_model() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        chance = Chance(LeaseWorld(rng.randint(1, 3), rng.choice(SMALL)), rng)
        for _ in range(40):
            chance.step()
            chance.world.verify()
            chance.world.audit()


# ---------------------------------------------------------------- each rule by name


def advance(world: LeaseWorld, run: Run, upto: int, mark: bool = False) -> None:
    """Computes and publishes up to a position, with a checkpoint there if `mark`."""
    world.reserve(run, max(0, upto - run.real.reserved))
    world.compute(run, upto - run.computed)
    assert run.computed == upto
    if mark:
        assert world.checkpoint(run)
    world.publish(run, upto)
    world.verify()


def serve(world: LeaseWorld, tokens: list[int], *marks: int) -> tuple[int, int]:
    """Serves one request from beginning to end; returns its hit and its reach."""
    run = world.lease(tokens)
    assert run is not None
    world.verify()
    for mark in marks:
        advance(world, run, mark, mark=True)
    advance(world, run, len(tokens))
    found = run.real.hit, run.real.reach
    world.finish(run, len(tokens))
    world.verify()
    world.audit()
    return found


def test_a_split_leaves_the_state_with_the_lower_half() -> None:
    world = LeaseWorld(2, rows_of("full state", window=1))
    serve(world, [1, 1, 2, 2, 3, 3, 4, 4, 5], 8)
    assert serve(world, [1, 1, 2, 2, 7, 7]) == (0, 4)
    assert serve(world, [1, 1, 2, 2, 8, 8]) == (0, 4)
    assert serve(world, [1, 1, 2, 2, 3, 3, 4, 4, 9]) == (8, 8)


def test_a_lease_that_runs_long_holds_a_window_of_pages() -> None:
    size, window = 4, 10
    world = LeaseWorld(size, {Full(): 60, Window(window): 8})
    run = world.lease([token % 7 for token in range(200)])
    assert run is not None
    for end in range(6, 200, 6):  # 50 pages long, with 8 window pages in the pool
        advance(world, run, end)
        locked = world.model.locked("window")
        assert len(locked) <= -(-window // size) + 1
        assert len(world.model.private("window")) <= -(-6 // size) + 1
        world.evict("window", 99)
        world.evict("full", 99)
        assert world.model.held["window"].keys() == locked
        assert len(world.model.held["full"]) == end // size
    world.finish(run, None)
    world.end()


def test_a_window_lock_goes_with_its_lease() -> None:
    world = LeaseWorld(1, {Full(): 20, Window(3): 20})
    serve(world, list(range(9)))
    first, second = world.lease(list(range(10))), world.lease([*range(5), 99])
    assert first is not None
    assert second is not None
    assert (first.real.hit, second.real.hit) == (9, 5)
    assert len(world.model.locked("window")) == 6
    world.evict("window", 99)
    assert world.table(first, "window")[:6] == [-1] * 6
    world.abort(first)
    world.evict("window", 99)
    assert len(world.model.held["window"]) == 3
    world.verify()
    world.end()


def test_a_lease_computes_with_a_copy_of_the_state() -> None:
    world = LeaseWorld(1, rows_of("full state", window=1))
    serve(world, [1, 2, 3], 2)
    (slot,) = world.model.held["state"].values()
    runs = [world.lease([1, 2, token]) for token in (3, 4, 5)]
    slots = {slot} | {run.real.state for run in runs if run}
    assert len(slots) == 4
    for run in runs:
        assert run is not None
        assert run.real.hit == 2
        advance(world, run, 3)
    assert serve(world, [1, 2, 6]) == (2, 2)
    world.end()


def test_the_state_of_a_lease_advances_while_its_checkpoint_waits() -> None:
    world = LeaseWorld(1, rows_of("full state", window=1))
    run = world.lease([1, 2, 3, 4, 5])
    assert run is not None
    world.reserve(run, 5)
    world.compute(run, 2)
    assert world.checkpoint(run)
    world.compute(run, 2)  # the checkpoint stays at 2
    world.publish(run, 4)
    world.verify()
    world.finish(run, 4)
    assert serve(world, [1, 2, 3, 4, 5]) == (2, 4)
    world.end()


def test_a_later_checkpoint_replaces_one_that_was_not_published() -> None:
    world = LeaseWorld(1, rows_of("full state", window=1))
    run = world.lease([1, 2, 3, 4, 5])
    assert run is not None
    world.reserve(run, 5)
    for _ in range(4):
        world.compute(run, 1)
        assert world.checkpoint(run)
    assert world.cache.pools["state"].private == 2
    world.finish(run, 4)
    assert world.cache.stats().leases.checkpoints == 1
    assert serve(world, [1, 2, 3, 4, 5]) == (4, 4)
    world.end()


def test_a_checkpoint_without_room_evicts_no_other_state() -> None:
    world = LeaseWorld(1, rows_of("full state", window=1, states=2))
    serve(world, [1, 2, 3], 2)
    run = world.lease([7, 8, 9])
    assert run is not None
    world.reserve(run, 3)
    world.compute(run, 2)
    assert not world.checkpoint(run, room=False)
    assert world.cache.stats().leases.checkpoints_missed == 1
    assert len(world.model.held["state"]) == 1
    assert world.checkpoint(run)
    world.publish(run, 2)
    world.verify()
    assert world.model.held["state"].keys() == {run.model.names[2]}
    world.end()


def test_a_lease_without_a_slot_leaves_nothing_locked() -> None:
    world = LeaseWorld(1, rows_of("full window state", window=2, states=2))
    serve(world, [1, 2, 3], 2)
    first = world.lease([1, 2, 3])  # locks the tree's slot and has the other one for itself
    assert first is not None
    with pytest.raises(OutOfPages, match="state slots"):
        world.cache.lease([1, 2, 3])
    assert world.cache.stats().leases.open == 1
    world.verify()
    world.abort(first)
    world.end()


@pytest.mark.parametrize("row", ["window", "state"])
def test_a_tombstone_keeps_its_kv_and_is_filled_again(row: str) -> None:
    world = LeaseWorld(2, rows_of(f"full {row}", window=4))
    prompt = [1, 1, 2, 2, 3, 3, 4, 4, 5]
    marks = [8] if row == "state" else []
    serve(world, prompt, *marks)
    world.evict(row, 99)
    assert len(world.model.held["full"]) == 4
    assert serve(world, prompt, *marks) == (0, 8)
    assert world.cache.stats().leases.duplicate_pages == 4
    assert serve(world, prompt, *marks[1:]) == (8, 8)
    world.end()


def test_a_tombstone_in_the_middle_shortens_no_later_hit() -> None:
    world = LeaseWorld(1, rows_of("full state", window=1))
    serve(world, [1, 2, 3, 4, 5], 2, 4)
    held = world.model.held["state"]
    deep = world.lease([1, 2, 3, 4, 6])  # its lock keeps the deeper state
    world.evict("state", 99)
    assert deep is not None
    assert held.keys() == {deep.model.names[4]}
    assert serve(world, [1, 2, 9]) == (0, 2)
    assert serve(world, [1, 2, 3, 4, 7]) == (4, 4)
    world.abort(deep)
    world.end()


@pytest.mark.parametrize("kind", ["full state", "full window state"])
def test_the_second_request_adds_the_checkpoint_that_the_third_hits(kind: str) -> None:
    world = LeaseWorld(2, rows_of(kind, window=3))
    shared = [1, 1, 2, 2, 3, 3]
    assert serve(world, [*shared, 4, 4, 5], 8) == (0, 0)
    hit, reach = serve(world, [*shared, 6, 6, 5], 6)
    assert (hit, reach) == (0, len(shared))
    assert serve(world, [*shared, 7, 7, 5]) == (reach, reach)
    world.end()


def test_a_window_kept_at_a_fork_is_hit_by_the_next_request() -> None:
    """Full attention reaches the fork, but the window there was evicted."""
    world = LeaseWorld(1, {Full(): 30, Window(2): 30})
    serve(world, list(range(8)))
    last = world.lease(list(range(9)))
    assert last is not None
    world.evict("window", 99)
    assert serve(world, [0, 1, 2, 3, 99]) == (0, 4)
    assert serve(world, [0, 1, 2, 3, 98]) == (4, 4)
    world.abort(last)
    world.end()


def test_a_path_keeps_no_more_states_than_it_may() -> None:
    world = LeaseWorld(1, {Full(): 30, State(most_on_path=2): 9})
    serve(world, list(range(9)), 2, 4, 6, 8)
    assert len(world.model.held["state"]) == 2
    assert world.cache.peek(list(range(9))) == 8
    serve(world, [0, 1, 50, 51], 3)  # another path has its own
    assert len(world.model.held["state"]) == 3 - (world.cache.peek([0, 1, 2]) == 2)
    world.end()


def test_where_all_layers_slide_there_is_no_full_page() -> None:
    world = LeaseWorld(2, {Window(4): 6})
    run = world.lease([token % 5 for token in range(40)])
    assert run is not None
    assert run.real.window_table is None
    for end in range(3, 41, 3):  # 20 pages long, with 6 pages in the pool
        advance(world, run, end)
    assert len(run.real.page_table) == run.computed // 2 + run.computed % 2
    world.finish(run, None)
    assert world.cache.peek([token % 5 for token in range(40)]) == 38
    world.end()


@pytest.mark.parametrize("kind", ["full", "full window", "window"])
def test_without_states_there_is_no_slot(kind: str) -> None:
    world = LeaseWorld(1, rows_of(kind, window=2))
    run = world.lease([1, 2, 3])
    assert run is not None
    assert run.real.state == -1
    assert (run.real.window_table is None) == (kind != "full window")


@pytest.mark.parametrize("position", [0, 1, 3, 6])
def test_a_checkpoint_is_at_a_page_boundary_that_is_reserved_and_not_published(position: int) -> None:
    world = LeaseWorld(2, rows_of("full state", window=1))
    run = world.lease([1, 2, 3, 4, 5, 6, 7])
    assert run is not None
    advance(world, run, 5)
    with pytest.raises(BadArgument, match="position"):
        run.real.checkpoint(position)


def test_states_cannot_be_kept_without_a_copy() -> None:
    with pytest.raises(BadArgument, match="copy_state"):
        PrefixCache({Full(): 4, State(): 2})


def test_a_copy_that_fails_changes_nothing() -> None:
    class Broken(Exception):
        pass

    def copy(source: int, target: int) -> None:
        if failing:
            raise Broken

    failing = False
    cache = PrefixCache({Full(): 8, State(): 3}, 1, copy_state=copy)
    with cache.lease([1, 2, 3]) as lease:
        lease.reserve(3)
        failing = True
        with pytest.raises(Broken):
            lease.checkpoint(2)
        assert cache.stats().pools["state"].private == 1
        failing = False
        assert lease.checkpoint(2)
        lease.finish()
    failing = True
    with pytest.raises(Broken):
        cache.lease([1, 2, 4])
    cache.check()
    stats = cache.stats()
    assert (stats.leases.open, stats.pool.locked, stats.pools["state"].private) == (0, 0, 0)
    cache.flush()
    assert all(pool.free == pool.total for pool in cache.pools.values())


def test_a_cache_that_is_off_keeps_neither_window_nor_state() -> None:
    cache = PrefixCache(rows_of("full window state", window=2), 1, enabled=False, copy_state=never)
    for _ in range(2):
        with cache.lease([1, 2, 3, 4]) as lease:
            assert (lease.hit, lease.reach) == (0, 0)
            lease.reserve(4)
            for at in range(4):
                lease.slide(at, at + 1)
            assert cache.stats().pools["window"].private == 3
            assert not lease.checkpoint(4)
            lease.finish(4)
        cache.check()
        assert all(pool.free == pool.total for pool in cache.pools.values())


def never(source: int, target: int) -> None:
    raise AssertionError("there is nothing to copy")


def test_a_hit_ends_at_no_state_inside_an_image() -> None:
    image = Image(bytes(16), 6)
    cache = PrefixCache({Full(): 30, State(): 5}, 1, keys=TypedKeys(), copy_state=lambda source, target: None)
    with cache.lease([1, image, 2, 3]) as lease:
        lease.reserve(9)
        for position in (1, 4):
            assert lease.checkpoint(position)
            lease.publish(position)
        lease.finish(9)
    lease = cache.lease([1, image, 4])
    assert (lease.hit, lease.hit_tokens, lease.reach) == (1, 1, 7)
    lease.abort()
    cache.check()


def test_a_window_slides_over_what_is_reserved_and_leaves_no_gap() -> None:
    world = LeaseWorld(2, rows_of("full window", window=2))
    run = world.lease([1, 2, 3, 4, 5, 6])
    assert run is not None
    world.reserve(run, 4)
    for begin, end in ((0, 5), (2, 4), (2, 1)):
        with pytest.raises(BadArgument):
            run.real.slide(begin, end)
    world.verify()
    world.end()


def test_a_slide_that_leaves_a_gap_in_one_component_changes_none() -> None:
    cache = PrefixCache({Full(): 24, Window(4): 14, Chunked(4): 2}, 2)
    with cache.lease(some_tokens(random.Random(0), 12)) as lease:
        lease.reserve(12)
        with pytest.raises(OutOfPages):
            lease.slide(0, 8)  # the window has its pages by now, the chunk does not
        before = [table.tolist() for table in lease.tables]
        with pytest.raises(BadArgument, match="begin"):
            lease.slide(8, 10)
        assert [table.tolist() for table in lease.tables] == before


def test_a_lease_that_has_ended_shows_no_window_and_no_state() -> None:
    world = LeaseWorld(1, rows_of("full window state", window=2))
    run = world.lease([1, 2, 3])
    assert run is not None
    real = run.real
    world.abort(run)
    calls: list[Callable[[], object]] = [
        lambda: real.window_table,
        lambda: real.state,
        lambda: real.slide(0, 0),
        lambda: real.checkpoint(0),
    ]
    for call in calls:
        with pytest.raises(LeaseClosed):
            call()


def test_one_more_window_is_all_that_a_second_branch_needs() -> None:
    """Chunks of a prefill leave windows that no request will match: they must not displace those that are matched."""
    cache = PrefixCache({Full(): 200, Window(4): 13}, 2)
    shared, found = list(range(100, 140)), []
    for number in range(6):
        tokens = shared + [number] * 20
        with cache.lease(tokens) as lease:
            found.append(lease.hit)
            lease.reserve(len(tokens) - lease.hit)
            for begin in range(lease.hit, len(tokens), 8):
                lease.slide(begin, min(begin + 8, len(tokens)))
                lease.publish(min(begin + 8, len(tokens)))
        cache.check()
    assert found[2:] == [40] * 4


@pytest.mark.parametrize(
    "sizes", [{Full(): 700, Window(8): 700}, {Full(): 700, Window(8): 12}, {Window(8): 12}], ids=str
)
def test_a_long_answer_leaves_few_nodes_before_its_window(sizes: dict[Component, int]) -> None:
    cache = PrefixCache(sizes, 1)
    with cache.lease([1]) as lease:
        lease.reserve(1)
        for end in range(1, 601):
            lease.slide(end - 1, end)
            lease.publish(end)
            lease.append([end % 7])
            lease.reserve(1)
        assert cache.stats().tree.nodes <= 8 + 4
        lease.finish(600)
    cache.check()
    tokens = [1, *(end % 7 for end in range(1, 601))]
    assert cache.peek(tokens) == 600
