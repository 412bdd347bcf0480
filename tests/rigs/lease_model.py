"""A slow, obvious model of leases on several components, which tests compare with the real ones.

A prefix is a number here (`Names`). A page is identified by the prefix that it ends, a state by the prefix that it
follows. What the tree holds is one dict per component; where a match may end, what a lock keeps and what a publication
adds are found by scanning it. The model does not predict the order of eviction: `settle` asks for the owner of each id
and returns what is gone. It has no nodes, splits or contents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from mainstem.cache.components import Chunked, Component, State, Window, by_name

Owner = Callable[[str, int], str]


class Names:
    """Numbers prefixes: equal numbers mean equal namespaces and tokens."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self.before: list[int] = []

    def root(self, namespace: Hashable) -> int:
        """Returns the empty prefix of a namespace."""
        return self._number(-1, namespace)

    def extend(self, name: int, tokens: Sequence[int]) -> list[int]:
        """Returns the prefixes that extend `name` by one, two, ... and all of these tokens."""
        names = [name]
        for token in tokens:
            names.append(self._number(names[-1], token))
        return names[1:]

    def back(self, name: int, steps: int) -> list[int]:
        """Returns the last `steps` prefixes up to `name`, the shortest first."""
        names = [name]
        while len(names) < steps:
            names.append(self.before[names[-1]])
        return names[::-1]

    def _number(self, before: int, symbol: Hashable) -> int:
        number = self._numbers.setdefault((before, symbol), len(self.before))
        if number == len(self.before):
            self.before.append(before)
        return number


@dataclass(eq=False)
class ModelLease:
    """One sequence in use: its prefixes and its private ids."""

    names: list[int]
    hit: int = 0
    reach: int = 0
    published: int = 0
    reserved: int = 0
    own: dict[str, dict[int, int]] = field(default_factory=dict)
    """By component: page to private id."""
    state: int = -1
    mark: tuple[int, int] | None = None
    """A checkpoint that is not published yet: its position and its slot."""
    appended: bool = False

    @property
    def length(self) -> int:
        return len(self.names) - 1


class LeaseModel:
    """Pools of ids, what the tree holds of each component, and the leases.

    Args:
        totals: the number of ids of each component, in the order of the rows.
        before: `Names.before`; needed where a cap on states makes exceptions.
    """

    def __init__(self, page_size: int, totals: dict[Component, int], before: Sequence[int] = ()) -> None:
        self.page_size = page_size
        self.before = before
        self.parted: set[int] = set()
        self.rows = by_name(totals)
        self.totals = {name: totals[row] for name, row in self.rows.items()}
        self.first = next(iter(self.rows))
        self.held: dict[str, dict[int, int]] = {name: {} for name in self.rows}
        self.leases: list[ModelLease] = []

    @property
    def paged(self) -> list[str]:
        """The components with one id per page."""
        return [name for name, row in self.rows.items() if not isinstance(row, State)]

    # ---------------------------------------------------------------- what a prefix needs

    def first_needed(self, row: str, end: int) -> int:
        """Returns the first page that a match ending at `end` needs."""
        component = self.rows[row]
        if isinstance(component, Chunked):
            return end // component.tokens * component.tokens // self.page_size
        return max(0, end - component.tokens) // self.page_size if isinstance(component, Window) else 0

    def needed(self, row: str, names: list[int], end: int) -> list[int]:
        """Returns the prefixes whose ids a match ending at `end` needs."""
        if isinstance(self.rows[row], State):
            return [names[end]] if end else []
        indices = range(self.first_needed(row, end), end // self.page_size)
        return [names[(page + 1) * self.page_size] for page in indices]

    def kept(self, row: str, names: list[int], end: int) -> list[int]:
        """Returns the prefixes whose ids a lock of the prefix that ends at `end` keeps, which has the last page."""
        component = self.rows[row]
        if isinstance(component, Chunked) and end and end % component.tokens == 0:
            first = (end - component.tokens) // self.page_size
            return [names[(page + 1) * self.page_size] for page in range(first, end // self.page_size)]
        return self.needed(row, names, end)

    def match(self, names: list[int], limit: int) -> tuple[int, int]:
        """Returns the hit of at most `limit` positions, and how far the first component alone reaches."""
        hit = reach = 0
        for end in range(self.page_size, limit + 1, self.page_size):
            allowed = [all(name in self.held[row] for name in self.needed(row, names, end)) for row in self.rows]
            hit = end if all(allowed) else hit
            reach = end if allowed[0] else reach
        return hit, reach

    # ---------------------------------------------------------------- owners

    def locked(self, row: str) -> set[int]:
        """Returns the prefixes that must not be evicted: what each lease needs of what it has published."""
        kept = {name for lease in self.leases for name in self.kept(row, lease.names, lease.published)}
        return kept & self.held[row].keys()

    def private(self, row: str) -> list[int]:
        """Returns the ids that belong to leases."""
        if row in self.paged:
            return [own for lease in self.leases for own in lease.own[row].values()]
        slots = [lease.state for lease in self.leases if lease.state >= 0]
        return slots + [lease.mark[1] for lease in self.leases if lease.mark]

    def free(self, row: str) -> int:
        return self.totals[row] - len(self.held[row]) - len(self.private(row))

    def room(self, row: str) -> int:
        """Returns the number of ids that are free or can be evicted."""
        return self.totals[row] - len(self.locked(row)) - len(self.private(row))

    def settle(self, owner: Owner) -> dict[str, dict[int, int]]:
        """Drops what is no longer cached; returns the prefixes that were evicted and their ids, by component."""
        gone = {
            row: {name: held for name, held in ids.items() if owner(row, held) != "cached"}
            for row, ids in self.held.items()
        }
        for row, names in gone.items():
            assert not self.locked(row).intersection(names), f"{row}: evicted under a lock"
            for name in names:
                del self.held[row][name]
        self.parted &= self.held.get("state", {}).keys()
        return gone

    # ---------------------------------------------------------------- leases

    def _children(self) -> Counter[int]:
        """Returns how many pages of the first component follow each prefix."""
        found: Counter[int] = Counter()
        for name in self.held[self.first]:
            for _ in range(self.page_size):
                name = self.before[name]
            found[name] += 1
        return found

    def _note_parting(self, names: list[int], hit: int) -> None:
        """Remembers the hit of a prompt that forks from another sequence further on."""
        row = self.rows.get("state")
        if not isinstance(row, State) or row.most_on_path is None:
            return
        whole = range(self.page_size, len(names) - 1, self.page_size)
        known = list(takewhile(lambda end: names[end] in self.held[self.first], whole))
        if hit and len(known) < len(whole) and self._children()[names[known[-1]]]:
            self.parted.add(names[hit])

    def open(self, names: list[int]) -> ModelLease:
        """Opens a lease on a sequence; its hit is locked."""
        hit, reach = self.match(names, len(names) - 2)
        self._note_parting(names, hit)
        lease = ModelLease(names, hit, reach, hit, hit, {row: {} for row in self.paged})
        self.leases.append(lease)
        return lease

    def expected_id(self, lease: ModelLease, row: str, page: int) -> int:
        """Returns the id in the table of a lease at a page; -1: nothing that may be read."""
        if page < lease.published // self.page_size:
            return self.held[row].get(lease.names[(page + 1) * self.page_size], -1)
        return lease.own[row].get(page, -1)

    def publish(self, lease: ModelLease, upto: int) -> tuple[int, int]:
        """Publishes the whole pages of [0, upto), and a checkpoint among them.

        Returns the number of duplicate pages, and how many states on the path must be evicted for the new one.
        """
        boundary, duplicates, too_many = upto // self.page_size * self.page_size, 0, 0
        if lease.mark and lease.published <= lease.mark[0] <= boundary:
            duplicates += self._publish_pages(lease, lease.mark[0])
            too_many = self._request_checkpoint(lease)
        if self.first != "window" or boundary // self.page_size - 1 in lease.own["window"]:
            duplicates += self._publish_pages(lease, boundary)  # else there is nothing left to publish at its end
        return duplicates, too_many

    def _publish_pages(self, lease: ModelLease, boundary: int) -> int:
        """Publishes pages up to a boundary and frees duplicates; returns how many there were."""
        duplicates = 0
        for row in self.paged:
            for page in range(lease.published // self.page_size, boundary // self.page_size):
                if page in lease.own[row]:
                    name = lease.names[(page + 1) * self.page_size]
                    duplicates += not self._give(row, name, lease.own[row].pop(page))
        lease.published = max(lease.published, boundary)
        return duplicates

    def _request_checkpoint(self, lease: ModelLease) -> int:
        """Publishes the checkpoint if the tree has none there; returns how many states its path then has too many."""
        assert lease.mark
        (position, slot), lease.mark = lease.mark, None
        name, row = lease.names[position], self.rows["state"]
        assert isinstance(row, State)
        if not self._give("state", name, slot) or row.most_on_path is None:
            return 0
        boundaries = range(self.page_size, position + 1, self.page_size)
        on_path = [end for end in boundaries if lease.names[end] in self.held["state"]]
        children = self._children()
        removable = 0
        for end, following in pairwise(on_path):
            forks = any(children[lease.names[at]] > 1 for at in boundaries if end <= at < following)
            at_end = lease.names[end]
            removable += not (forks or at_end in self.parted or at_end in self.locked("state"))
        return max(0, min(len(on_path) - row.most_on_path, removable))

    def _give(self, row: str, name: int, own: int) -> bool:
        """Gives an id to the tree; returns whether the tree took it, else it is a duplicate and free."""
        return self.held[row].setdefault(name, own) == own

    def close(self, lease: ModelLease) -> None:
        """Ends a lease: releases its locks and frees its private ids."""
        self.leases.remove(lease)
