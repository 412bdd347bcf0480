"""Retention: prefixes that no eviction takes before their time is up, because somebody asked for that.

    retain, pin --> device --copied down--> host      until the time, or the pin, ends: then evicted as any other
                       locked on one tier at a time

A retained prefix is locked on the host if that has all of it, else on the device; there it moves down once it has been
copied. It is never dropped before its time, which a hit may renew, and never deleted when that comes. How much an owner
may retain is bounded, and a part of each pool is left to running requests. The time is the caller's, and is passed in.

Prefixes that nobody has asked for (`keep`) give way to those that somebody asks for, and to those that are worth more.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mainstem.cache.keys import TokenLike
from mainstem.cache.namespaces import NamespaceLike, encode_namespace, owner_of
from mainstem.cache.quotas import Quota, Quotas
from mainstem.cache.tree import DEVICE, HOST, PRESENT, Tree
from mainstem.errors import BadArgument, check_rules
from mainstem.tiers.controller import Tiers

LEAST_S = 0.001
"""The shortest time, in seconds, that a client may retain a prefix for: less would be lost in the digits of a clock."""

_MARGIN = 1.0  # by which something must be worth more than what gives way to it
_SPARE_TIMES = 64  # of ended retentions that the heap may hold beside as many as there are


@dataclass(frozen=True, slots=True)
class Kept:
    """The result of a call that retains.

    Args:
        positions: from the root, in whole pages; 0: nothing fits.
        cached: positions of the prefix that device or host have; 0: there is nothing to retain.
    """

    positions: int
    cached: int


@dataclass(frozen=True, slots=True)
class RetentionStats:
    """Counts of what is retained now.

    Args:
        prefixes: retained for a time or pinned. pinned: those without an end.
        owners: who retain anything.
        spare: prefixes of these that nobody has asked for. spare_pages: pages that they have, each with those before
            its end. given_way: those that have ended for others since the start.
        device, host: ids kept of each component.
        limits: the most that an owner may keep of each component on the device.
    """

    prefixes: int
    pinned: int
    owners: int
    spare: int
    spare_pages: int
    given_way: int
    device: dict[str, int]
    host: dict[str, int]
    limits: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Terms:
    """How a prefix is retained: until when, what a hit adds to that, and for `keep` its worth and share."""

    until: float = -math.inf
    renew_s: float = 0.0
    pinned: bool = False
    worth: float = math.inf
    share: float = 1.0


@dataclass(slots=True, eq=False)
class _Entry:
    """One retained prefix: its end, who asked, where it is locked, until when, and what a hit adds to that.

    `worth`: infinite if somebody has asked for it, and `share` is 1 then.
    """

    node: int
    owner: bytes
    tier: int
    pages: int
    until: float = -math.inf
    pinned: bool = False
    renew_s: float = 0.0
    worth: float = math.inf
    share: float = 1.0


class Retention:
    """The retained prefixes of one cache.

    Args:
        totals: the sizes of the pools, by tier and component.
        share: the part of each pool, or of its maximum there, that one owner may keep.
        reserve: ids of each component, by name, that nobody may keep on the device; of others, and on the host, half.
        tiers: copies what is retained down; None: there is no host.
        settle: called when something is retained no longer; see `PrefixCache.set_quotas`.
    """

    def __init__(
        self,
        tree: Tree,
        totals: Sequence[Sequence[int]],
        share: float,
        reserve: Mapping[str, int],
        tiers: Tiers | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._tree, self._core, self._tiers, self._settle = tree, tree.core, tiers, settle
        self._totals, self._share, self._quotas = totals, share, Quotas()
        self._guaranteed = self._quotas.guaranteed(totals)
        halves = [[total - total // 2 for total in sizes] for sizes in totals]
        halves[DEVICE] = [max(0, reserve.get(name, n)) for name, n in zip(tree.names, halves[DEVICE], strict=True)]
        self._most = [
            [max(0, total - kept) for total, kept in zip(sizes, half, strict=True)]
            for sizes, half in zip(totals, halves, strict=True)
        ]
        self._entries: dict[int, _Entry] = {}  # by node
        self._spare: dict[_Entry, None] = {}  # those that nobody has asked for
        self._above: dict[_Entry, None] = {}  # those that are to move down
        self._held: dict[bytes, list[list[int]]] = {}  # by owner: ids by tier and component
        self._sum = [[0] * len(sizes) for sizes in totals]
        self._beyond = [[0] * len(sizes) for sizes in totals]  # of these, what exceeds its owner's guarantee
        self._times: list[tuple[float, int, _Entry]] = []
        self._numbers = itertools.count()
        self._copied = 0  # what the tiers had copied at the last poll
        self._now = -math.inf
        self._pinned = 0
        self._renewed = 0  # entries that a hit renews
        self._spare_pages = self._given_way = 0
        self._nothing = self._stats()

    def set_quotas(self, quotas: Quotas) -> None:
        """Bounds each owner by its quota from now on. What is retained ends, since it may exceed that."""
        self.clear()
        self._quotas, self._guaranteed = quotas, quotas.guaranteed(self._totals)

    # ---------------------------------------------------------------- what is asked for

    def retain(self, tokens: TokenLike, until: float, namespace: NamespaceLike = None, *, renew_s: float = 0.0) -> Kept:
        """Retains a prefix for a time: as much as is cached and fits within the bounds, from the root.

        A prefix that is retained already stays so at least as long as before, and is not counted twice.

        Args:
            until: when it ends, by the clock whose time `poll` takes.
            renew_s: each later hit that has all of it prolongs it to so many seconds from then; 0: none does.

        Raises:
            BadArgument: `until` is no number, or has passed, or `renew_s` is below 0.
            BadTokens: a token is out of range.
        """
        self._check_times(until, renew_s)
        return self._retain(tokens, namespace, _Terms(until, renew_s))

    def keep(
        self,
        tokens: TokenLike,
        until: float,
        namespace: NamespaceLike = None,
        *,
        renew_s: float,
        share: float,
        worth: float,
    ) -> Kept:
        """Retains a prefix that nobody has asked for, as long as nobody asks for the room; see `retain`.

        Args:
            until, renew_s: as for `retain`.
            share: the part of each pool up to which anything is retained in this way, with all that is retained there;
                and of what its owner may have.
            worth: where not all of it fits, what its owner has of this kind and is worth less by more than 1 ends, the
                least first. Closer ones would take each other's place in turn.

        Raises:
            BadArgument: as `retain`, or `share` is not from 0 to 1, or `worth` is no number.
            BadTokens: a token is out of range.
        """  # fmt: skip
        self._check_times(until, renew_s)
        if not 0 <= share <= 1:
            raise BadArgument("share", share, "a number from 0 to 1")
        if not math.isfinite(worth):
            raise BadArgument("worth", worth, "a finite number")
        return self._retain(tokens, namespace, _Terms(until, renew_s, worth=worth, share=share))

    def _check_times(self, until: float, renew_s: float) -> None:
        if not self._now < until < math.inf:
            raise BadArgument("until", until, f"a number above {self._now}, the time now")
        if not 0 <= renew_s < math.inf:
            raise BadArgument("renew_s", renew_s, "a number of 0 or more")

    def pin(self, tokens: TokenLike, namespace: NamespaceLike = None) -> Kept:
        """Retains a prefix until `unpin`, `release`, a removal or a flush; see `retain`.

        Raises:
            BadTokens: a token is out of range.
        """
        return self._retain(tokens, namespace, _Terms(pinned=True))

    def unpin(self, tokens: TokenLike, namespace: NamespaceLike = None) -> int:
        """Ends the longest pin on a prefix; a time that was given to it goes on.

        Returns:
            The positions that were pinned; 0: there is no pin.

        Raises:
            BadTokens: a token is out of range.
        """
        name, key = encode_namespace(namespace), self._tree.keys.encode(tokens)
        for node in reversed(self._core.path(name, key)):
            entry = self._entries.get(node)
            if entry is not None and entry.pinned:
                entry.pinned = False
                self._pinned -= 1
                if entry.until <= self._now:
                    self._end(entry)
                    self._settle()
                return entry.pages * self._tree.page_size
        return 0

    def hit(self, namespace: bytes, key: bytes) -> None:
        """Renews what a prompt has all of, where that was asked for; what has expired stays so.

        Args:
            namespace: its namespace, encoded.
        """
        for node in self._core.path(namespace, key) if self._renewed else ():
            entry = self._entries.get(node)
            if entry is not None and entry.renew_s and entry.until > self._now:
                entry.until = max(entry.until, self._now + entry.renew_s)

    @property
    def renews(self) -> bool:
        """Whether `hit` has anything to do."""
        return self._renewed > 0

    def find(self, tokens: TokenLike, namespace: NamespaceLike = None) -> Kept:
        """Returns how much of a prefix device or host have, and that none of it is retained by this call."""
        device, _, host = self._core.peek(encode_namespace(namespace), self._tree.keys.encode(tokens), 0, False)
        return Kept(0, device + host)

    def release(self, nodes: Sequence[int]) -> int:
        """Ends every retention that ends at one of these nodes, pinned or not; returns how many did."""
        entries = [self._entries[node] for node in nodes if node in self._entries]
        for entry in entries:
            self._end(entry)
        self._settle()
        return len(entries)

    # ---------------------------------------------------------------- time, and what happens to the tree

    def poll(self, now: float) -> None:
        """Ends what has expired, and moves down what has been copied; `PrefixCache.poll` does it. `now` never falls."""
        self._now = max(self._now, now)
        ended = False
        while self._times and self._times[0][0] <= self._now:
            entry = heapq.heappop(self._times)[2]
            if self._entries.get(entry.node) is not entry:
                continue
            if entry.until > self._now:  # a hit has renewed it
                self._queue(entry)
            elif not entry.pinned:
                self._end(entry)
                ended = True
        if ended:
            self._settle()
        if self._above and self._tiers is not None:
            copied = self._tiers.pending.counts["backed_up"]
            for entry in list(self._above) if copied != self._copied else ():
                self._move_down(entry)
            self._copied = copied

    def forget_removed(self) -> None:
        """Ends what was removed from the tree: of a prefix that lost its end, the beginning stays retained."""
        for entry in [entry for entry in self._entries.values() if self._core.removed(entry.node)]:
            above = entry.node
            while above and self._core.removed(above):
                above = self._core.parent(above)
            self._end(entry)
            kept = self._lock_node(above, entry.owner, entry.tier, entry.share) if above else None
            if kept is not None:
                self._enter(kept, _Terms(entry.until, entry.renew_s, entry.pinned, entry.worth, entry.share))

    def clear(self) -> None:
        """Ends all; what exceeds a maximum then is left to the caller."""
        for entry in list(self._entries.values()):
            self._end(entry)

    # ---------------------------------------------------------------- statistics and checks

    def kept(self, owner: bytes) -> int:
        """Returns the positions of the first component that an owner retains, see `namespaces.owner_of`."""
        return sum(tier[0] for tier in self._held.get(owner, ())) * self._tree.page_size

    def stats(self) -> RetentionStats:
        """Returns counts, which are kept up to date."""
        return self._stats() if self._entries else replace(self._nothing, given_way=self._given_way)

    def _stats(self) -> RetentionStats:
        names, tiers = self._tree.names, [*self._sum, [0] * len(self._tree.names)]
        return RetentionStats(
            prefixes=len(self._entries),
            pinned=self._pinned,
            owners=len(self._held),
            spare=len(self._spare),
            spare_pages=self._spare_pages,
            given_way=self._given_way,
            device=dict(zip(names, tiers[DEVICE], strict=True)),
            host=dict(zip(names, tiers[HOST], strict=True)),
            limits={name: self._limit(self._quotas.others, DEVICE, row) for row, name in enumerate(names)},
        )

    def check(self) -> None:
        """Verifies that nothing exceeds its bound, that counts add up, and that what is retained is there; slow.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        for tier, sums in enumerate(self._sum):
            held = [tiers[tier] for tiers in self._held.values()]
            here = [entry.node for entry in self._entries.values() if entry.tier == tier]
            rules = {
                "what owners retain adds up": [sum(rows) for rows in zip([0] * len(sums), *held, strict=True)] == sums,
                "a part is left to requests": _within(sums, self._most[tier]),
                "no owner exceeds its bound": all(
                    held[tier][row] <= self._limit(self._quotas.of(owner), tier, row)
                    for owner, held in self._held.items()
                    for row in range(len(sums))
                ),
                "what is retained is there": all(self._core.presence(node, 0, tier) == PRESENT for node in here),
                "what is retained is findable": not any(map(self._core.removed, here)),
            }
            check_rules(f"retention, tier {tier}", rules)
        self._check_entries()

    def _check_entries(self) -> None:
        entries = self._entries.values()
        timed = {entry for at, _, entry in self._times if at <= entry.until}
        beyond = [[0] * len(sums) for sums in self._sum]
        for owner, held in self._held.items():
            for tier, rows in enumerate(held):
                for row, n in enumerate(rows):
                    guaranteed = self._quotas.of(owner).tiers[tier].of(self._totals[tier][row])[0]
                    beyond[tier][row] += max(0, n - guaranteed)
        rules = {
            "what has expired has ended": all(entry.pinned or entry.until > self._now for entry in entries),
            "an entry is found by its node": all(self._entries[entry.node] is entry for entry in entries),
            "pins are counted": self._pinned == sum(entry.pinned for entry in entries),
            "what a hit renews is counted": self._renewed == sum(entry.renew_s > 0 for entry in entries),
            "what nobody has asked for is within its share": not self._is_beyond(),
            "what gives way is known": {*self._spare} == {entry for entry in entries if entry.worth < math.inf},
            "pages of what gives way are counted": self._spare_pages == sum(entry.pages for entry in self._spare),
            "what gives way is not pinned": not any(entry.pinned for entry in self._spare),
            "what has a time ends": all(entry in timed for entry in entries if entry.until > self._now),
            "what moves down is on the device": all(
                entry.tier == DEVICE and self._entries.get(entry.node) is entry for entry in self._above
            ),
            "what exceeds guarantees adds up": beyond == self._beyond,
            "guarantees are those of the quotas": self._guaranteed == self._quotas.guaranteed(self._totals),
        }
        check_rules("retention", rules)

    # ---------------------------------------------------------------- one entry

    def _retain(self, tokens: TokenLike, namespace: NamespaceLike, terms: _Terms) -> Kept:
        name, key = encode_namespace(namespace), self._tree.keys.encode(tokens)
        device, _, host = self._core.peek(name, key, 0, False)
        owner, cached = owner_of(name), device + host
        entry = self._lock(name, key, owner, terms.share) if cached else None
        while cached > (0 if entry is None else entry.pages * self._tree.page_size):
            least = self._least(owner, terms)
            if least is None:
                break
            self._given_way += 1
            self._end(least)
            if entry is not None:
                self._drop(entry)
            entry = self._lock(name, key, owner, terms.share)
        if entry is None:
            return Kept(0, cached)
        self._enter(entry, terms)
        self._settle()  # it may be kept on the host now, and was on the device
        return Kept(entry.pages * self._tree.page_size, cached)

    def _least(self, owner: bytes, terms: _Terms) -> _Entry | None:
        """Returns what gives way next to something on these terms; None: nothing does.

        Its owner's come first. Others' give way only where somebody asks for it, and they, not its owner's own bound,
        are in the way.
        """
        crowded = terms.worth == math.inf and any(
            room < self._limit(self._quotas.of(owner), tier, row, terms.share) - held
            for tier, holds in enumerate(self._held.get(owner, [[0] * len(sums) for sums in self._sum]))
            for row, (room, held) in enumerate(zip(self._room(owner, tier, terms.share), holds, strict=True))
        )
        less = [entry for entry in self._spare if terms.worth - entry.worth > _MARGIN]
        mine = [entry for entry in less if entry.owner == owner or crowded]
        return min(mine, key=lambda entry: (entry.owner != owner, entry.worth, entry.node), default=None)

    def _lock(self, name: bytes, key: bytes, owner: bytes, share: float) -> _Entry | None:
        """Locks a prefix on the tier that keeps more of it, the lower one if they are equal."""
        best: _Entry | None = None
        for tier in reversed(range(len(self._sum))):
            kept = self._take(self._core.retain(name, key, tier, self._room(owner, tier, share)), owner, tier)
            if kept is None:
                continue
            if best is None or kept.pages > best.pages:
                best, kept = kept, best
            if kept is not None:
                self._drop(kept)
        return best

    def _lock_node(self, node: int, owner: bytes, tier: int, share: float) -> _Entry | None:
        return self._take(self._core.retain_node(node, tier, self._room(owner, tier, share)), owner, tier)

    def _room(self, owner: bytes, tier: int, share: float) -> list[int]:
        """Returns how many ids of each component an owner may keep beside those that it keeps, up to a share of all.

        The guarantees that other owners have not used are left to them. A share below 1 is of all owners together, too.
        """
        quota, room = self._quotas.of(owner), []
        held = self._held[owner][tier] if owner in self._held else [0] * len(self._sum[tier])
        for row, total in enumerate(self._totals[tier]):
            guaranteed = quota.tiers[tier].of(total)[0]
            shared = self._most[tier][row] - self._guaranteed[tier][row] - self._beyond[tier][row]
            most = min(self._most[tier][row], int(total * share))
            left = min(most - self._sum[tier][row], max(0, shared) + max(0, guaranteed - held[row]))
            room.append(max(0, min(left, self._limit(quota, tier, row, share) - held[row])))
        return room

    def _limit(self, quota: Quota, tier: int, row: int, share: float = 1.0) -> int:
        share = min(share, self._share if quota.retained is None else quota.retained)
        return int(quota.tiers[tier].of(self._totals[tier][row])[1] * share)

    def _take(self, kept: tuple[int, int, list[int]], owner: bytes, tier: int) -> _Entry | None:
        """Counts what the core has retained, if it has."""
        node, pages, alone = kept
        if not node:
            return None
        self._count(owner, tier, alone, +1)
        return _Entry(node, owner, tier, pages)

    def _drop(self, entry: _Entry) -> None:
        self._count(entry.owner, entry.tier, self._core.end_retention(entry.node, entry.tier), -1)

    def _count(self, owner: bytes, tier: int, ids: Sequence[int], by: int) -> None:
        held = self._held.setdefault(owner, [[0] * len(sizes) for sizes in self._sum])
        share = self._quotas.of(owner).tiers[tier]
        for row, n in enumerate(ids):
            guaranteed = share.of(self._totals[tier][row])[0]
            self._beyond[tier][row] -= max(0, held[tier][row] - guaranteed)
            held[tier][row] += by * n
            self._sum[tier][row] += by * n
            self._beyond[tier][row] += max(0, held[tier][row] - guaranteed)
        if not any(map(any, held)):
            del self._held[owner]

    def _enter(self, entry: _Entry, terms: _Terms) -> None:
        """Notes an entry that is locked; one that ends at the same node becomes a part of it.

        One that somebody asks for takes the place of one that nobody has asked for, with its own time.
        """
        old = self._entries.get(entry.node)
        until, renew_s, pinned, worth = terms.until, terms.renew_s, terms.pinned, terms.worth
        if old is not None and worth < old.worth == math.inf:
            self._drop(entry)
            return
        if old is not None and (worth == math.inf) == (old.worth == math.inf):
            until, renew_s, pinned = max(until, old.until), max(renew_s, old.renew_s), pinned or old.pinned
            worth = max(worth, old.worth)
        if old is not None:
            self._end(old)
        entry.until, entry.renew_s, entry.pinned, entry.worth = until, renew_s, pinned, worth
        entry.share = terms.share if worth < math.inf else 1.0
        self._entries[entry.node] = entry
        if worth < math.inf:
            self._spare[entry] = None
            self._spare_pages += entry.pages
        self._pinned += pinned
        self._renewed += renew_s > 0
        self._queue(entry)
        if entry.tier == DEVICE and self._tiers is not None:
            self._above[entry] = None
            self._tiers.back_up(entry.node)

    def _end(self, entry: _Entry) -> None:
        del self._entries[entry.node]
        self._above.pop(entry, None)
        if entry.worth < math.inf:
            del self._spare[entry]
            self._spare_pages -= entry.pages
        self._pinned -= entry.pinned
        self._renewed -= entry.renew_s > 0
        self._drop(entry)
        while self._is_beyond():  # what ended was a part of the same prefix, and held more than the share
            self._given_way += 1
            self._end(min(self._spare, key=lambda each: (each.worth, each.node)))

    def _is_beyond(self) -> bool:
        """Whether all that is left is what nobody has asked for, and more than its share."""
        if not self._spare or len(self._spare) < len(self._entries):
            return False
        share = max(entry.share for entry in self._spare)
        most = ([int(total * share) for total in totals] for totals in self._totals)
        return not all(map(_within, self._sum, most))

    def _queue(self, entry: _Entry) -> None:
        if entry.until == -math.inf:
            return
        heapq.heappush(self._times, (entry.until, next(self._numbers), entry))
        if len(self._times) > 2 * len(self._entries) + _SPARE_TIMES:
            self._times = [time for time in self._times if self._entries.get(time[2].node) is time[2]]
            heapq.heapify(self._times)

    def _move_down(self, entry: _Entry) -> None:
        """Locks an entry on the host instead, if that has all of it and the bounds allow it."""
        below = self._lock_node(entry.node, entry.owner, HOST, entry.share)
        if below is None:
            return
        self._drop(entry)
        entry.tier = HOST
        del self._above[entry]
        self._settle()


def _within(ids: Sequence[int], most: Sequence[int]) -> bool:
    return all(n <= limit for n, limit in zip(ids, most, strict=True))
