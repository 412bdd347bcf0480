"""The router's index and ranking beside slow models: what must be there is, and what must not be is not.

The index samples the pages that it might forget, so the model is exact where a replica has no more than it samples.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from mainstem.cache.namespaces import Namespace
from mainstem.events.source import AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium
from mainstem.fleet.front.asking import Prompt
from mainstem.fleet.front.routing import CostRouter

PAGE, EXPECT_S = 2, 50.0
SPACES = (None, Namespace(adapter="x"))
MEDIA: tuple[Medium, ...] = ("GPU", "CPU", "STORAGE")
STORES = {"a": "s", "b": "s", "c": "t", "d": None}

Path = tuple[object, ...]
"""A page by its namespace and all tokens from the beginning to its end, page by page."""


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Worker:
    """A replica, as the model knows it."""

    store: str | None
    held: dict[Path, set[Medium]] = field(default_factory=dict)
    expected: dict[Path, int] = field(default_factory=dict)
    """By page, the number of its newest due."""
    dues: list[tuple[float, Path, int]] = field(default_factory=list)
    numbers: int = 0

    @property
    def size(self) -> int:
        return max(len(self.held), len(self.dues))

    def pop_due(self) -> bool:
        """Drops the oldest due; returns whether its page is expected no more."""
        _, path, number = self.dues.pop(0)
        if self.expected.get(path) != number:
            return False
        del self.expected[path]
        return True


class Model:
    """All replicas, in the order of their numbers."""

    def __init__(self, capacity: int, clock: Clock) -> None:
        self.capacity, self.clock = capacity, clock
        self.workers: dict[int, tuple[str, Worker]] = {}
        self.stamps: dict[Path, int] = {}
        self.stamp = self.forgotten = self.expired = 0

    def follow(self, names: list[str]) -> None:
        for number, (name, _) in list(self.workers.items()):
            if name not in names:
                del self.workers[number]
        for name in sorted(set(names) - {name for name, _ in self.workers.values()}):
            number = next(at for at in range(99) if at not in self.workers)
            self.workers[number] = name, Worker(STORES[name])

    def of(self, name: str) -> Worker:
        return next(worker for each, worker in self.workers.values() if each == name)

    def store(self, name: str, path: Path, medium: Medium, pages: int) -> None:
        """Stores the last pages of a path, unless the page before them is not known."""
        worker = self.of(name)
        if pages < len(path) - 1 and path[:-pages] not in worker.held:
            return
        self.stamp += 1
        for end in range(len(path) - pages + 1, len(path) + 1):
            page = path[:end]
            worker.held.setdefault(page, set()).add(medium)
            worker.expected.pop(page, None)
            self.stamps[page] = self.stamp
            self.forget()

    def remove(self, name: str, page: Path, medium: Medium) -> None:
        worker = self.of(name)
        if medium in worker.held.get(page, ()):
            worker.held[page].remove(medium)
            worker.expected.pop(page, None)
            if not worker.held[page]:
                del worker.held[page]

    def clear(self, name: str) -> None:
        worker = self.of(name)
        for each in (worker.held, worker.expected, worker.dues):
            each.clear()

    def sent(self, name: str, path: Path) -> None:
        worker = self.of(name)
        self.stamp += 1
        for end in range(2, len(path) + 1):
            page = path[:end]
            self.stamps[page] = self.stamp
            if "GPU" in worker.held.get(page, ()):
                continue
            worker.numbers += 1
            worker.dues.append((self.clock(), page, worker.numbers))
            worker.expected[page] = worker.numbers
            self.forget()

    def expire(self) -> None:
        for _, worker in self.workers.values():
            while worker.dues and worker.dues[0][0] + EXPECT_S <= self.clock():
                self.expired += worker.pop_due()

    def forget(self) -> None:
        """Forgets of the replica with the most pages: what came longest ago, and of that the end of a path."""
        workers = [worker for _, (_, worker) in sorted(self.workers.items())]
        while sum(len(worker.held) + len(worker.dues) for worker in workers) > self.capacity:
            most = max(workers, key=lambda worker: worker.size)
            if len(most.held) < most.size:
                self.forgotten += most.pop_due()
            else:
                del most.held[min(most.held, key=lambda page: (self.stamps[page], -len(page)))]
                self.forgotten += 1

    def match(self, path: Path) -> dict[str, tuple[int, int, int]]:
        self.expire()
        return {name: self._depths(worker, path) for name, worker in self.workers.values()}

    def _depths(self, worker: Worker, path: Path) -> tuple[int, int, int]:
        others = [each for _, each in self.workers.values()]
        shared = [each for each in others if each is worker or (each.store and each.store == worker.store)]

        def on(page: Path) -> list[bool]:
            media = worker.held.get(page, set())
            device = "GPU" in media or page in worker.expected
            host = device or "CPU" in media
            return [device, host, host or any("STORAGE" in each.held.get(page, ()) for each in shared)]

        found = []
        for at in range(3):
            depth = 0
            while depth + 1 < len(path) and on(path[: depth + 2])[at]:
                depth += 1
            found.append(depth * PAGE)
        return found[0], found[1], found[2]


class Rig:
    """The router and the model, driven together."""

    def __init__(self, seed: int, capacity: int) -> None:
        self.draw, self.clock = random.Random(seed), Clock()
        self.router = CostRouter(self.clock, page_size=PAGE, capacity=capacity, expect_s=EXPECT_S, key=bytes(16))
        self.model = Model(capacity, self.clock)
        self.hashes: dict[tuple[str, Path], int] = {}
        self.lives = 0
        self.follow(["a", "b", "c"])

    def follow(self, names: list[str]) -> None:
        self.lives += 1  # a replica that begins anew names its pages anew
        self.router.follow({name: {"store": STORES[name], "queued": 9} for name in names})
        self.model.follow(names)

    def path(self) -> Path:
        draw = self.draw
        pages = [tuple(draw.choice(((0, 0), (0, 1), (1, 1)))) for _ in range(draw.randrange(1, 6))]
        return (draw.choice(SPACES), *pages)

    def hash(self, name: str, page: Path) -> int:
        return self.hashes.setdefault((name, page), 1 + len(self.hashes))

    def prompt(self, path: Path) -> Prompt:
        tokens = [token for page in path[1:] for token in page]  # type: ignore[attr-defined]
        return Prompt(np.array(tokens, np.int32), path[0])  # type: ignore[arg-type]

    def store(self, name: str) -> None:
        path, medium = self.path(), self.draw.choice(MEDIA)
        pages = self.draw.choice((len(path) - 1, self.draw.randrange(1, len(path))))
        own = range(len(path) - pages + 1, len(path) + 1)
        parent = path[:-pages]
        tokens = tuple(self.prompt(path).tokens.tolist()[-pages * PAGE :])
        hashes = tuple(self.hash(name, path[:end]) for end in own)
        above = self.hash(name, parent) if len(parent) > 1 else None
        adapter = None if path[0] is None else "x"
        self.apply(name, BlockStored(hashes, above, tokens, PAGE, medium, adapter))
        self.model.store(name, path, medium, pages)

    def apply(self, name: str, event: Event) -> None:
        self.router.apply(name, [event])

    def step(self) -> None:
        draw, names = self.draw, [name for name, _ in self.model.workers.values()]
        name = draw.choice(names)
        match draw.randrange(12):
            case 0:
                keep = [each for each in STORES if draw.random() < 0.7]
                self.follow(keep or ["a"])
            case 1:
                self.apply(name, AllBlocksCleared())
                self.model.clear(name)
            case 2 | 3 | 4:
                held = list(self.model.of(name).held) or [self.path()[:2]]
                page, medium = draw.choice(held), draw.choice(MEDIA)
                self.apply(name, BlockRemoved((self.hash(name, page),), medium))
                self.model.remove(name, page, medium)
            case 5 | 6:
                path = self.path()
                self.router.sent(self.prompt(path), name)
                self.model.sent(name, path)
            case 7:
                self.clock.now_s += draw.choice((1.0, EXPECT_S))
            case _:
                self.store(name)
        self.router.check()
        asked = self.path()
        assert self.router.match(self.prompt(asked)) == self.model.match(asked)


@pytest.mark.parametrize("capacity", [3, 11, 16, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_the_index_knows_what_the_model_knows_and_forgets_in_its_order(seed: int, capacity: int) -> None:
    rig = Rig(seed, capacity)
    for _ in range(250):
        rig.step()
    counts = rig.router.stats()
    assert (counts["forgotten"], counts["expired"]) == (rig.model.forgotten, rig.model.expired)
    assert (rig.model.forgotten > 0) == (capacity < 100) and counts["orphans"] > 0
    held = sum(len(worker.held) for _, worker in rig.model.workers.values())
    expected = sum(len(worker.expected) for _, worker in rig.model.workers.values())
    assert (counts["held"], counts["expected"], counts["workers"]) == (held, expected, len(rig.model.workers))
    rig.router.follow({})
    left = rig.router.stats()
    assert [left[name] for name in ("blocks", "held", "expected", "workers")] == [0] * 4
    rig.router.check()


def test_a_full_index_forgets_the_end_of_a_path_before_its_beginning() -> None:
    router = CostRouter(Clock(), page_size=PAGE, capacity=6, key=bytes(16))
    router.follow({"a": {}})
    router.apply("a", [BlockStored(tuple(range(6)), None, tuple(range(12)), PAGE, "GPU")])
    for more in range(1, 5):
        router.apply("a", [BlockStored((100 + more,), None, (50 + more, 0), PAGE, "GPU")])
        found = router.match(Prompt(np.arange(12, dtype=np.int32)))
        assert found["a"] == ((6 - more) * PAGE,) * 3


# ---------------------------------------------------------------- the ranking


HALF_LIFE_S, OTHERS, IN_USE = 60.0, 8.0, 0.4


class Busy:
    """A model of the ranking: it computes costs from all that each replica was sent, from the beginning every time."""

    def __init__(self, clock: Clock, costs: dict[str, float]) -> None:
        self.clock, self.costs = clock, costs
        self.work: list[tuple[float, str, float]] = []
        self.free_s = dict.fromkeys(costs, 0.0)
        self.under_way = dict.fromkeys(costs, 0)

    def sent(self, name: str, service_s: float) -> None:
        self.work.append((self.clock(), name, service_s))
        self.free_s[name] = max(self.free_s[name], self.clock()) + service_s
        self.under_way[name] += 1

    def ended(self, name: str) -> None:
        self.under_way[name] = max(0, self.under_way[name] - 1)
        if not self.under_way[name]:
            self.free_s[name] = min(self.free_s[name], self.clock())

    def leave(self, name: str) -> None:
        self.work = [each for each in self.work if each[1] != name]
        self.free_s[name], self.under_way[name] = 0.0, 0

    def busy(self, name: str) -> float:
        lately = (done * math.exp2((at - self.clock()) / HALF_LIFE_S) for at, each, done in self.work if each == name)
        return min(1.0, sum(lately) * math.log(2) / HALF_LIFE_S)

    def estimate(self, names: list[str], service_s: dict[str, float]) -> dict[str, tuple[float, float]]:
        in_use = sum(map(self.busy, names)) / len(names)
        others = OTHERS * min(1.0, in_use / IN_USE)
        seconds = {name: max(0.0, self.free_s[name] - self.clock()) + service_s[name] for name in names}
        return {name: (seconds[name] + (others + self.busy(name)) * service_s[name], seconds[name]) for name in names}


@pytest.mark.parametrize("seed", range(3))
def test_estimates_are_those_of_all_that_was_ever_sent(seed: int) -> None:
    draw, clock = random.Random(seed), Clock()
    costs = {"a": 4e-3, "b": 4e-3, "c": 16e-3}
    router, model = CostRouter(clock, page_size=50, key=bytes(16)), Busy(clock, costs)
    said = {name: {"costs": {"prefill": (cost, 0.0)}} for name, cost in costs.items()}
    router.follow(said)
    for turn in range(120):
        tokens = draw.randrange(1, 1000)
        asked = Prompt(np.full(tokens, 10 + turn, np.int32))
        service_s = {name: tokens * cost for name, cost in costs.items()}
        name = draw.choice(list(costs))
        match draw.randrange(5):
            case 0:
                router.ended(name)
                model.ended(name)
            case 1:
                clock.now_s += draw.choice((0.1, 5.0, HALF_LIFE_S, 70 * HALF_LIFE_S))
            case 2 if draw.random() < 0.2:  # another one takes its place, and inherits nothing
                router.follow({each: stats for each, stats in said.items() if each != name})
                router.check()
                router.follow(said)
                model.leave(name)
            case _:
                router.sent(asked, name)
                model.sent(name, service_s[name])
        asked = Prompt(np.full(tokens, 10_000 + turn, np.int32))  # nobody has it
        found = {each.replica: (each.cost_s, each.seconds) for each in router.estimates(asked, list(costs))}
        wanted = model.estimate(list(costs), service_s)
        assert found == {each: pytest.approx(wanted[each], rel=1e-6, abs=1e-9) for each in costs}
        router.check()
