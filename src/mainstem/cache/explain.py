"""Why a prompt missed: stretch by stretch, where it is, or why it must be computed.

    tokens   |<--- found on the device --->|<- host ->|<-- evicted -->|<------ parted, never seen ------>|
             0                                                        ^ where it parts from the nearest prompt

Knows what the core remembers, and the causes that a request adds (`runtime.schedule.explaining`). All writers read
`CAUSES` and `as_json`. Changes nothing: neither recency nor what is evicted next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, Literal, TypeAlias

__all__ = ["CAUSES", "Cause", "Evicted", "Explanation", "Parted", "Stretch", "Timeline", "Why"]

Tier: TypeAlias = Literal["device", "host", "storage"]
Cause: TypeAlias = Literal[
    "never_seen", "parted", "evicted", "over_quota", "removed", "forgotten", "in_flight", "partial_page",
    "window_missing", "state_missing", "too_short", "no_room", "late", "failed", "not_stored", "scored", "disabled",
]  # fmt: skip

CAUSES: Mapping[Cause, str] = {
    "never_seen": "never seen",  # as a whole page, in this namespace; what another namespace has looks the same
    "parted": "parts from an earlier prompt",  # the same; a prompt agrees up to here, or into the first page from here
    "evicted": "evicted",  # see `Evicted`
    "over_quota": "evicted, as the tenant had more than its quota",
    "removed": "removed",  # or flushed
    "forgotten": "evicted or never seen: it is not remembered which",
    "in_flight": "on its way, or being computed by another request",
    "partial_page": "less than a page, or the last token, which is always computed",  # or its page goes on differently
    "window_missing": "cached, but no window is kept there",  # only full attention has it
    "state_missing": "cached, but no state is kept there",
    # Requests alone have the following, and `over_quota`, which `PrefixCache` calls evicted.
    "too_short": "too short to be worth it",  # to be loaded, read, or asked for
    "no_room": "cached, but there was no room to bring it up",
    "late": "in storage, or perhaps, but computing was as quick",
    "failed": "in storage, or perhaps, but that failed",  # or a copy was begun, and it failed
    "not_stored": "an earlier request asked not to store it",
    "scored": "log-probabilities of the prompt, or its embedding, need this position",
    "disabled": "the cache is off",
}
"""The meaning of each cause of a miss, in words for people."""

NEW = ("never_seen", "parted")
"""The causes of what has no earlier page."""

Why = Literal["policy", "quota", "demoted", "dropped"]
"""The reason of an eviction: the policy's order; its owner had more than its quota; it was demoted or dropped."""

TIERS: tuple[Literal["device"], Literal["host"], Literal["storage"]] = ("device", "host", "storage")
_MOST_NOTES = 4096

Departed = tuple[str, int, int, int, int, int]  # of the core: why, tier, hits, last use, departure, distance
Run = tuple[int, int, str, Departed | None, int]


@dataclass(frozen=True, slots=True)
class Evicted:
    """How a stretch was evicted.

    `tier` is the last one that had it. Seconds are None where no time was reported, ticks count matches and insertions.

    Attributes:
        why: what made it go.
        tier: the tier that it was evicted from last.
        policy: the policy of the tree.
        uses: the matches that found it.
        ago_s: seconds since the eviction.
        idle_s: seconds from its last use to the eviction. None also where the policy does not keep track of uses.
        idle_ticks: the same in ticks.
        distance_pages: its LRU stack distance: the pages that LRU would have to hold to have it still, itself included.
            They are of all namespaces. None: not asked for, or not known.
    """

    why: Why
    tier: Literal["device", "host", "storage"]
    policy: str
    uses: int
    ago_s: float | None
    idle_s: float | None
    idle_ticks: int | None
    distance_pages: int | None


@dataclass(frozen=True, slots=True)
class Parted:
    """The place where a prompt parts from the nearest one that the tree has.

    Attributes:
        at: the position of the first token that differs.
        other: the symbols of the nearest prompt from there on, a few, in bytes; not for everybody to see.
    """

    at: int
    other: bytes


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive positions of a prompt, [begin, end): found on a tier, or missed for one cause.

    Attributes:
        tier: where they were found; None: they must be computed, or read from storage.
        cause: why they were not found, see `CAUSES`; None where they were.
        detail: more of the cause: the policy of the wait, the fault, or the tier without room; of a request alone.
        eviction: of what was evicted: when, and how.
        parted: of what parted: where, and from what.
        idle_s: of what was found: seconds since its last page was used last. None: not known, as where other prompts go
            on from there.
        since_s: of what was never seen, or parted, in a request: for how many seconds that is so; None: since the
            server started.
    """

    begin: int
    end: int
    tier: Tier | None = None
    cause: Cause | None = None
    detail: str | None = None
    eviction: Evicted | None = None
    parted: Parted | None = None
    idle_s: float | None = None
    since_s: float | None = None


Stretches: TypeAlias = tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The tiers that have parts of a prompt, and why the rest must be computed.

    Attributes:
        stretches: they cover the prompt, in order, with one cause each.
        since_tick: what is called never seen, or parted, is so since this tick; before it, nothing may be known. 0:
            since the cache was made.
        since_s: the same in seconds before now; None: since the cache was made, or no time was reported.
    """

    stretches: tuple[Stretch, ...]
    since_tick: int = 0
    since_s: float | None = None

    @property
    def found(self) -> int:
        """The positions that need not be computed."""
        return count_found(self.stretches)


def count_found(stretches: Iterable[Stretch]) -> int:
    """Returns the positions that were found on any tier."""
    return sum(each.end - each.begin for each in stretches if each.tier is not None)


def count_missed(stretches: Iterable[Stretch]) -> Counter[str]:
    """Returns the positions that were missed, by cause."""
    counts: Counter[str] = Counter()
    for each in stretches:
        if each.cause is not None:
            counts[each.cause] += each.end - each.begin
    return counts


def as_json(stretch: Stretch, page_tokens: int, *, admin: bool = True) -> dict[str, Any]:
    """Returns a stretch as `/v1/cache/explain` and `mainstem explain` write it, without texts.

    Args:
        stretch: the stretch.
        page_tokens: tokens of a page.
        admin: whether to include what tells of other tenants: `since_s` and `kept_by_tokens`.
    """
    names = ("begin", "end", "tier", "cause", "detail") + (("since_s",) if admin else ())
    body = {name: value for name in names if (value := getattr(stretch, name)) is not None}
    if stretch.parted is not None:
        body["parted"] = {"at": stretch.parted.at}
    if stretch.eviction is not None:
        body["evicted"] = gone = asdict(stretch.eviction)
        pages, _ = gone.pop("distance_pages"), gone.pop("idle_ticks")
        if admin and pages is not None:
            gone["kept_by_tokens"] = pages * page_tokens
    return body


class Timeline:
    """Which tick was when, as far as it was reported: each of the last notes, and older ones at equal distances."""

    def __init__(self) -> None:
        self._old: list[tuple[int, float]] = []
        self._recent: list[tuple[int, float]] = []
        self._apart = 1  # ticks between two old notes, at least

    def note(self, tick: int, now_s: float) -> None:
        """Notes the time at which a tick had passed. Later ticks have later times."""
        if self._recent and self._recent[-1][0] == tick:
            self._recent[-1] = (tick, now_s)
            return
        self._recent.append((tick, now_s))
        if len(self._recent) <= _MOST_NOTES:
            return
        for note in self._recent[: _MOST_NOTES // 2]:
            if not self._old or note[0] - self._old[-1][0] >= self._apart:
                self._old.append(note)
        del self._recent[: _MOST_NOTES // 2]
        while len(self._old) > _MOST_NOTES:
            self._old, self._apart = self._old[::2], 2 * self._apart

    def used_s(self, tick: int) -> float | None:
        """When a tick was: the last time reported before it."""
        return self._before((tick, -inf))

    def left_s(self, tick: int) -> float | None:
        """When something happened after a tick and before the next one."""
        return self._before((tick, inf))

    @property
    def now_s(self) -> float | None:
        """The last time reported."""
        return self._recent[-1][1] if self._recent else None

    def _before(self, place: tuple[int, float]) -> float | None:
        notes = self._recent if self._recent and self._recent[0] <= place else self._old
        at = bisect_left(notes, place)
        return notes[at - 1][1] if at else None


def explain_runs(
    runs: list[Run], parted: int, other: bytes, horizon: int, *, policy: str, timeline: Timeline
) -> Explanation:
    """Makes an explanation of what the core says about whole pages, in symbols."""
    stretches = []
    for begin, end, cause, departed, used in runs:
        if cause in ("device", "host"):
            idle_s = None if used < 0 else _since(timeline.used_s(used), timeline)
            stretches.append(Stretch(begin, end, tier=cause, idle_s=idle_s))  # type: ignore[arg-type]
        elif departed is not None:
            gone = _evicted(departed, policy, timeline)
            stretches.append(Stretch(begin, end, cause="removed" if gone is None else "evicted", eviction=gone))
        else:
            place = Parted(begin + parted, other) if cause == "parted" else None
            stretches.append(Stretch(begin, end, cause=cause, parted=place))  # type: ignore[arg-type]
    return Explanation(
        tuple(joined(stretches)), horizon, _since(timeline.left_s(horizon), timeline) if horizon else None
    )


def within(whole: Explanation, device: int, host: int, end: int) -> Explanation:
    """Fits an explanation of whole pages to a lease, whose hit may end inside a page.

    Args:
        whole: of the whole pages of a prompt.
        device: positions that the lease finds on the device.
        host: positions that it finds there or further on the host.
        end: all positions of the prompt.
    """
    idle_s = {part.tier: part.idle_s for part in whole.stretches}
    stretches = [
        Stretch(0, device, tier="device", idle_s=idle_s.get("device")),
        Stretch(device, host, tier="host", idle_s=idle_s.get("host")),
    ]
    at = host
    for part in whole.stretches:
        if part.end > at:
            here = replace(part, begin=at)
            stretches.append(replace(here, tier=None, cause="partial_page", idle_s=None) if part.tier else here)
            at = part.end
    last = stretches[-1]
    if last.cause in NEW:
        stretches[-1] = replace(last, end=max(end, last.end))
    else:
        stretches.append(Stretch(at, end, cause="partial_page"))
    return replace(whole, stretches=tuple(joined(part for part in stretches if part.begin < part.end)))


def joined(stretches: Iterable[Stretch]) -> Iterator[Stretch]:
    """Joins consecutive stretches that differ only in where they are."""
    last: Stretch | None = None
    for part in stretches:
        if last is not None and replace(part, begin=0, end=0) == replace(last, begin=0, end=0):
            last = replace(last, end=part.end)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


def _evicted(departed: Departed, policy: str, timeline: Timeline) -> Evicted | None:
    why, tier, hits, accessed, gone, distance = departed
    if why == "removed":
        return None
    left, used = timeline.left_s(gone), None if accessed < 0 else timeline.used_s(accessed)
    return Evicted(
        why,  # type: ignore[arg-type]
        TIERS[tier], policy, hits, _since(left, timeline), None if left is None or used is None else left - used,
        None if accessed < 0 else gone - accessed, None if distance < 0 else distance,
    )  # fmt: skip


def _since(then: float | None, timeline: Timeline) -> float | None:
    return None if then is None or timeline.now_s is None else timeline.now_s - then
