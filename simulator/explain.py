"""Profile "explain": a tree that remembers what it evicted, beside one that does not, and the truth beside both.

The truth is a log without bounds: of every page that ever was, by namespace and tokens, when it was last used, and how
it went. No cause may be wrong, stack distances are counted naively, and both trees must do exactly the same. With
memory for four capacities, one miss in a hundred may be called forgotten.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from mainstem.cache.explain import Explanation, Stretch
from mainstem.cache.tree import DEVICE, HOST, Tree
from simulator.world import World, require

_NAMESPACES = (None, None, "one", "two")
_VOCAB = 5000  # few prompts have a page in common by chance
_MOST_PAGES = 8  # of a prompt
_FILTERS = 8  # the memory of what was forgotten, in memories of what was evicted; there are two
_LEAST_MISSES = 400  # before the share of what was forgotten is looked at


@dataclass
class Page:
    """A page of some prompt, in the truth: what is known of it since the run began."""

    namespace: str | None
    above: Page | None
    tokens: tuple[int, ...]
    depth: int
    below: dict[tuple[int, ...], Page] = field(default_factory=dict)
    ids: dict[int, int] = field(default_factory=dict)  # by tier, while it is there
    flying: set[int] = field(default_factory=set)  # tiers where it is in flight
    used: int = 0
    uses: int = 0
    gone: int = -1  # the tick of its last departure; -1: it was never there
    last: str = ""  # the tier that it was evicted from, "removed", or "" where nobody can say

    @property
    def here(self) -> bool:
        return bool(self.ids)

    def path(self) -> list[Page]:
        """The pages from the first one to this one."""
        above = [] if self.above is None or self.above.depth < 0 else self.above.path()
        return [*above, self]


class Explain:
    """A run of the profile "explain"."""

    def __init__(self, world: World) -> None:
        self.world, random = world, world.random
        self.size = random.choice((1, 2, 4))
        self.capacity = random.choice((40, 80, 160))
        self.times = random.choice((4, 4, 4, 0.2))
        tiers = random.choice((1, 1, 2))
        policy = random.choice(("lru", "lru", "lru", "lfu", "fifo", "slru"))
        self.memory = max(1, int(self.capacity * self.times))
        self.remembers = Tree(self.size, tiers=tiers, policy=policy, explain_pages=self.memory)
        self.plain = Tree(self.size, tiers=tiers, policy=policy)
        self.roots = {name: Page(name, None, (), -1) for name in set(_NAMESPACES)}
        self.by_id: dict[tuple[int, int], Page] = {}
        self.recent: list[tuple[str | None, list[int]]] = []
        self.next_id = 0
        self.misses = self.forgotten = self.departed = 0

    # ---------------------------------------------------------------- operations

    def step(self) -> None:
        """Does one operation on both trees, and asks for an explanation."""
        random = self.world.random
        act = random.random()
        name, tokens = self._prompt()
        if act < 0.5:
            self._serve(name, tokens)
        elif act < 0.6:
            self._evict(random.randrange(1, 8), DEVICE)
        elif act < 0.7 and self.plain.tiers > 1:
            self._back_up(name, tokens)
        elif act < 0.75 and self.plain.tiers > 1:
            self._evict(random.randrange(1, 8), HOST)
        elif act < 0.86:
            self._remove(name, tokens[: random.randrange(len(tokens) + 1)] if random.random() < 0.9 else [])
        elif act < 0.862:
            for tier in range(self.plain.tiers):
                self._evict(2**40, tier)
        self._check(*self._prompt())
        self.world.pass_time(1.0)

    def end(self) -> None:
        """Checks both trees, and how much was forgotten."""
        self.remembers.check()
        self.plain.check()
        self.world.seen["misses"] += self.misses
        self.world.seen["forgotten"] += self.forgotten if self.times >= 4 else 0
        if self.times >= 4 and self.misses >= _LEAST_MISSES:
            require(self.forgotten <= self.misses / 100, "too much was forgotten", self.forgotten, self.misses)

    def close(self) -> None:
        """Holds nothing."""

    def _prompt(self) -> tuple[str | None, list[int]]:
        """Draws an earlier prompt, mostly a late one, whole, cut, continued or changed; or a new one."""
        random = self.world.random
        if not self.recent or random.random() < 0.2:
            tokens = [random.randrange(_VOCAB) for _ in range(random.randrange(1, _MOST_PAGES * self.size))]
            return random.choice(_NAMESPACES), tokens
        back = min(int(random.expovariate(20 / self.capacity)), len(self.recent) - 1)
        name, tokens = self.recent[-1 - back]
        tokens = list(tokens)
        change = random.random()
        if change < 0.3:
            tokens += [random.randrange(_VOCAB) for _ in range(random.randrange(2 * self.size + 1))]
        elif change < 0.4:
            tokens[random.randrange(len(tokens))] = random.randrange(_VOCAB)
        elif change < 0.5:
            tokens = tokens[: random.randrange(1, len(tokens) + 1)]
        elif change < 0.55:
            name = random.choice(_NAMESPACES)
        return name, tokens[: (_MOST_PAGES + 2) * self.size]

    def _serve(self, name: str | None, tokens: list[int]) -> None:
        """Matches a prompt and inserts what is missing, as a request does."""
        self.recent = [*self.recent[-200:], (name, tokens)]
        matches = [tree.match(tokens, name) for tree in (self.remembers, self.plain)]
        require(all(np.array_equal(one, two) for one, two in zip(*matches, strict=True)), "matches differ")
        tick, pages = self.remembers.core.tick(), self._pages(name, tokens)
        for page in pages[: (matches[0].length + matches[0].host_length) // self.size]:
            page.used, page.uses = tick, page.uses + 1
        ids = list(range(self.next_id, self.next_id + len(pages)))
        self.next_id += len(pages)
        added = [tree.insert(tokens, ids, name) for tree in (self.remembers, self.plain)]
        require(all(np.array_equal(one, two) for one, two in zip(*added, strict=True)), "insertions differ")
        tick = self.remembers.core.tick()
        for page, id, kept in zip(pages, ids, added[0].page_ids.tolist(), strict=True):
            if not page.ids:
                page.uses = 0
            page.used = tick
            if kept == id:
                page.ids[DEVICE] = id
                self.by_id[DEVICE, id] = page
        self._evict(self.remembers.stats().cached_pages - self.capacity, DEVICE)
        self.world.did("serve", len(tokens))

    def _evict(self, pages: int, tier: int) -> None:
        if pages <= 0:
            return
        ns = None if pages == 2**40 else b""
        freed = [tree.evict_for(ns, pages, tier=tier)[0].tolist() for tree in (self.remembers, self.plain)]
        require(freed[0] == freed[1], "other pages are evicted with a memory")
        for id in freed[0]:
            page = self.by_id.pop((tier, id))
            del page.ids[tier]
            if not page.ids:
                last = ("device", "host")[tier] if ns is not None else "removed"  # all of it: a flush
                page.gone, page.last = self.remembers.core.tick(), last
        self.departed += len(freed[0])
        self.world.did("evict", len(freed[0]), tier)

    def _back_up(self, name: str | None, tokens: list[int]) -> None:
        """Copies a prompt to the host, or fails to."""
        node = self.remembers.match(tokens, name)
        require(self.plain.match(tokens, name).node == node.node, "matches differ")
        tick = self.remembers.core.tick()
        for page in self._pages(name, tokens)[: (node.length + node.host_length) // self.size]:
            page.used, page.uses = tick, page.uses + 1
        arrives = self.world.fault("copy fails") is None
        for lacking in self.remembers.core.lacking(node.node, DEVICE, HOST, 0):
            end, start = self.remembers.length(lacking), self.remembers.core.start(lacking) * self.size
            pages = self._pages(name, tokens)[start // self.size : end // self.size]
            ids = list(range(self.next_id, self.next_id + len(pages)))
            self.next_id += len(pages)
            for tree in (self.remembers, self.plain):
                tree.attach(lacking, ids)
                if arrives:
                    tree.commit(lacking, HOST)
                else:
                    tree.cancel(lacking, HOST)
            if not arrives:
                break
            for page, id in zip(pages, ids, strict=True):
                page.ids[HOST] = id
                self.by_id[HOST, id] = page
        self.world.did("back up", arrives)

    def _remove(self, name: str | None, tokens: list[int]) -> None:
        freed = [tree.remove(tokens, name) for tree in (self.remembers, self.plain)]
        ids = [[part.tolist() for tier in one for part in tier] for one in freed]
        require(ids[0] == ids[1], "other pages are removed with a memory")
        tick = self.remembers.core.tick()
        self.departed += sum(len(parts[0]) for parts in freed[0])
        for tier, parts in enumerate(freed[0]):
            for id in parts[0].tolist():
                page = self.by_id.pop((tier, id))
                del page.ids[tier]
                page.gone, page.last = tick, "removed"
        for page in self._ever(name, tokens):
            if page.gone >= 0 and not page.ids:
                page.last = "removed"
        self.world.did("remove", len(tokens))

    def _ever(self, name: str | None, tokens: list[int]) -> list[Page]:
        """Returns what a removal declares of pages that were gone already: all of a namespace, or the last of a key."""
        if not tokens:
            found, left = [], [self.roots[name]]
            while left:
                page = left.pop()
                found.append(page)
                left.extend(page.below.values())
            return found[1:]
        pages = self._pages(name, tokens)
        return pages[-1:] if len(tokens) % self.size == 0 else []

    # ---------------------------------------------------------------- the truth

    def _pages(self, name: str | None, tokens: list[int]) -> list[Page]:
        """The whole pages of a prompt; the truth has them from now on, as pages that were never there."""
        pages, at = [], self.roots[name]
        for begin in range(0, len(tokens) - self.size + 1, self.size):
            part = tuple(tokens[begin : begin + self.size])
            at = at.below.setdefault(part, Page(name, at, part, at.depth + 1))
            pages.append(at)
        return pages

    def _check(self, name: str | None, tokens: list[int]) -> None:
        self.remembers.note_time(self.world.now_s)
        distances = self.world.chance(0.2)
        found = self.remembers.explain(tokens, name, distances=distances)
        pages = self._pages(name, tokens)
        at = 0
        for stretch in found.stretches:
            require(stretch.begin == at < stretch.end, "stretches cover the prompt in order", stretch)
            at = stretch.end
            self._check_stretch(found, stretch, pages)
        require(at == len(pages) * self.size, "stretches cover all whole pages", at)
        most = _FILTERS * self.memory
        require(found.since_tick == 0 or self.departed > most, "nothing is lost so early", found.since_tick)
        counts: dict[str, int] = defaultdict(int)
        for stretch in found.stretches:
            counts[stretch.cause or stretch.tier or ""] += stretch.end - stretch.begin
        self.world.did("explain", sorted(counts.items()))

    def _check_stretch(self, found: Explanation, stretch: Stretch, pages: list[Page]) -> None:
        covered = pages[stretch.begin // self.size : stretch.end // self.size]
        self.world.reads += len(covered)
        if stretch.tier is not None:
            tier = ("device", "host").index(stretch.tier)
            require(all(tier in page.ids for page in covered), "a found page is there", stretch)
            return
        require(not any(page.here for page in covered), "what is not found is not there", stretch)
        self.misses += 1
        if stretch.cause == "forgotten":
            self.forgotten += 1
        elif stretch.cause in ("never_seen", "parted"):
            wrong = [
                page.gone for page in covered if page.gone > found.since_tick or (page.gone == 0 == found.since_tick)
            ]
            require(not wrong, "it was seen", stretch, wrong, found.since_tick)
            self._check_parting(stretch, covered[0])
        elif stretch.cause == "removed":
            require(all(page.last == "removed" for page in covered), "it was not removed", stretch)
        else:
            require(stretch.cause == "evicted" and stretch.eviction is not None, "no such cause", stretch)
            self._check_eviction(stretch, covered)

    def _check_parting(self, stretch: Stretch, first: Page) -> None:
        """The nearest prompt is the one of those that are there which agrees furthest."""
        assert first.above is not None
        others = [page for page in first.above.below.values() if page.here]
        known = first.above.depth < 0 or first.above.here
        agree = max((_agreement(page.tokens, first.tokens) for page in others), default=-1) if known else -1
        parts = agree > 0 or (agree == 0 and first.depth > 0)
        require(parts == (stretch.cause == "parted"), "it parts where the nearest prompt goes on", stretch, agree)
        if stretch.parted is not None:
            require(stretch.parted.at == stretch.begin + agree, "it parts somewhere else", stretch, agree)
            other = np.frombuffer(stretch.parted.other, "<u4")[: self.size - agree].tolist()
            nearest = [page.tokens[agree:] for page in others if _agreement(page.tokens, first.tokens) == agree]
            require(any(list(tokens[: len(other)]) == other for tokens in nearest), "no such other side", stretch)

    def _check_eviction(self, stretch: Stretch, covered: list[Page]) -> None:
        gone, tick = stretch.eviction, covered[0].gone
        assert gone is not None
        for page in covered:
            require(page.last == gone.tier and page.gone == tick, "it went otherwise", stretch, page.last, page.gone)
            require(gone.idle_ticks in (None, page.gone - page.used), "it was used at another time", stretch, page.used)
        if gone.distance_pages is not None:
            require(gone.distance_pages == self._distance(covered[-1]), "another stack distance", stretch)
            self.world.seen["distances"] += 1

    def _distance(self, of: Page) -> int:
        """Pages used since, or with it and at or above it, of all that were not removed."""
        count, left = 0, list(self.roots.values())
        while left:
            page = left.pop()
            left.extend(page.below.values())
            if page.depth < 0 or (page.gone < 0 and not page.here) or (page.last == "removed" and not page.here):
                continue
            count += page.used > of.used or (page.used == of.used and page.depth <= of.depth)
        return count


def _agreement(one: tuple[int, ...], two: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), len(one))
