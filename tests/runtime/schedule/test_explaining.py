"""Explanations of requests: what the cache knows, merged with what the tiers did, one cause a stretch."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mainstem.cache.explain import CAUSES, Evicted, Parted, Stretch, Stretches
from mainstem.cache.keys import Encoded
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.runtime.schedule.explaining import Circumstances, TierHit, Unstored, known_to
from mainstem.tiers.prefetch.missed import Missed

PAGE = 4
GONE = Evicted("policy", "device", "lru", 1, 5.0, 7.0, 9, None)
NEVER = Stretch(8, 22, cause="never_seen")
KNOWN = [Stretch(0, 8, "device"), NEVER]


def merge(known: list[Stretch], **fields: Any) -> Stretches:
    return Circumstances(known, PAGE, **{"found": [TierHit(0, 8, "device")], **fields}).explain()


def spans(stretches: Stretches) -> list[tuple[int, int, str | None, str | None]]:
    return [(each.begin, each.end, each.tier or each.cause, each.detail) for each in stretches]


def test_what_the_cache_knows_is_kept() -> None:
    assert merge(
        KNOWN,
    ) == tuple(KNOWN)


@pytest.mark.parametrize(
    ("cause", "shown"),
    [
        ("timeout", ("late", "timeout")),
        ("slow", ("late", "slow")),
        ("limit", ("late", "limit")),
        ("meanwhile", ("late", "meanwhile")),
        ("breaker", ("failed", "breaker")),
        ("fault", ("failed", "altered")),
        ("host_room", ("no_room", "host_room")),
        ("too_few", ("too_short", "too_few")),
    ],
)
def test_what_storage_did_not_bring_counts_before_what_the_cache_knows(cause: str, shown: tuple[str, str]) -> None:
    missed = Missed(3, 5, cause, "altered" if cause == "fault" else None)  # type: ignore[arg-type]
    found = spans(merge(KNOWN, missed=[missed]))
    assert found == [
        (0, 8, "device", None),
        (8, 12, "never_seen", None),
        (12, 20, *shown),
        (20, 22, "never_seen", None),
    ]


def test_too_few_to_ask_for_explains_what_was_here_before_and_nothing_that_is_new() -> None:
    missed = [Missed(2, 5, "unasked")]
    assert merge(KNOWN, missed=missed) == tuple(KNOWN)
    for cause in ("evicted", "over_quota", "forgotten", "removed"):
        gone = [KNOWN[0], replace(NEVER, cause=cause)]  # type: ignore[arg-type]
        assert spans(merge(gone, missed=missed))[1:] == [(8, 20, "too_short", "unasked"), (20, 22, cause, None)]


def test_a_component_in_the_way_is_named() -> None:
    for name, cause in (("state", "state_missing"), ("window", "window_missing"), ("chunked-8", "window_missing")):
        assert spans(merge(KNOWN, missed=[Missed(2, 4, "component", name)]))[1] == (8, 16, cause, None)


def test_what_was_found_is_found_whatever_else_is_known() -> None:
    found = [TierHit(0, 8, "device"), TierHit(8, 12, "host"), TierHit(12, 16, "storage")]
    merged = spans(merge(KNOWN, found=found, missed=[Missed(2, 5, "timeout")]))
    assert merged[:3] == [(0, 8, "device", None), (8, 12, "host", None), (12, 16, "storage", None)]
    assert merged[3] == (16, 20, "late", "timeout")


def test_what_is_cached_and_not_used_says_why() -> None:
    whole = [Stretch(0, 20, "device"), Stretch(20, 22, cause="partial_page")]
    used = [TierHit(0, 16, "device")]
    assert spans(merge([Stretch(0, 22, "device")], found=used))[1:] == [
        (16, 22, "partial_page", None)
    ]  # of 16 to 20 the lease had no copy
    assert spans(merge(whole, found=[], scored_from=0)) == [(0, 22, "scored", None)]
    assert spans(merge(whole, found=[TierHit(0, 8, "device")], scored_from=9)) == [
        (0, 8, "device", None), (8, 9, "partial_page", None), (9, 22, "scored", None)
    ]  # fmt: skip
    host = [Stretch(0, 8, "device"), Stretch(8, 20, "host"), Stretch(20, 22, cause="partial_page")]
    assert spans(merge(host))[1] == (8, 20, "too_short", "host")
    assert spans(merge(host, too_short=False))[1] == (8, 20, "no_room", "device")
    assert spans(merge(host, failed=(8, 20)))[1] == (8, 20, "failed", "load")


def test_a_failed_load_takes_back_what_it_brought() -> None:
    explained = Circumstances(KNOWN, PAGE)
    explained.found = [TierHit(0, 8, "device"), TierHit(8, 12, "host"), TierHit(12, 20, "storage")]
    explained.fail()
    assert explained.found == [TierHit(0, 8, "device")]
    assert explained.failed == (8, 20)
    explained.fail()
    assert explained.found == [TierHit(0, 8, "device")] and explained.failed == (8, 8)


@pytest.mark.parametrize("tier", ["host", "storage"])
def test_the_last_page_of_whole_ones_is_always_computed_after_a_load(tier: Any) -> None:
    """A load ends before it, whether another tier has it or not; on the device, its first positions would be copied."""
    gone = Stretch(0, 24, cause="evicted", eviction=GONE)
    made = merge([gone], found=[TierHit(0, 20, tier)])
    assert spans(made) == [(0, 20, tier, None), (20, 24, "partial_page", None)]
    made = merge([gone], found=[TierHit(0, 20, "device")])
    assert spans(made) == [(0, 20, "device", None), (20, 24, "evicted", None)]


def test_what_was_computed_while_the_rest_was_read_is_late() -> None:
    known = [Stretch(0, 8, "host"), Stretch(8, 22, cause="evicted", eviction=GONE)]
    made = merge(known, found=[TierHit(8, 20, "storage")])
    assert spans(made) == [(0, 8, "late", "meanwhile"), (8, 20, "storage", None), (20, 22, "partial_page", None)]


def test_only_what_differs_has_parted() -> None:
    """The tokens of its page before it agree. What comes after another cause was never seen."""
    parted = Stretch(8, 22, cause="parted", parted=Parted(10, b"other"), since_s=5.0)
    known = [Stretch(0, 8, "device"), parted]
    _, agrees, differs = merge(known)
    assert (agrees.begin, agrees.end, agrees.cause, agrees.parted) == (8, 10, "partial_page", None)
    assert differs == replace(parted, begin=10)
    made = merge(known, missed=[Missed(2, 4, "fault", "altered")])
    assert spans(made)[1:] == [(8, 16, "failed", "altered"), (16, 22, "never_seen", None)]
    assert made[-1].parted is None and made[-1].since_s == 5.0


def test_what_is_new_says_since_when_that_is_known() -> None:
    cache = PrefixCache(5, PAGE, explain_pages=1)

    def new(number: int) -> tuple[str | None, float | None]:
        (found,) = known_to(cache, Encoded.of(cache.tree.keys, np.arange(20) + 1000 * number), None)
        return found.cause, found.since_s

    assert new(0) == ("never_seen", None)
    for number in range(1, 1200):  # until the oldest evictions are forgotten altogether
        cache.poll(float(number))
        with cache.lease(np.arange(20) + 1000 * number) as lease:
            lease.reserve(20)
            lease.finish()
    cause, since_s = new(5000)
    assert cause == "never_seen" and since_s is not None and 0 < since_s < 1200


def test_stretches_cover_every_prompt_once() -> None:
    random_ = random.Random(7)
    for _ in range(500):
        length = random_.randint(1, 60)
        cuts = sorted(random_.sample(range(1, length + 1), min(length, random_.randint(0, 4))))
        bounds = [0, *cuts, length] if not cuts or cuts[-1] < length else [0, *cuts]
        known = [
            Stretch(begin, end, *random_.choice([("device", None), ("host", None), (None, random_.choice([*CAUSES]))]))
            for begin, end in pairwise(bounds)
            if begin < end
        ]
        hit = random_.randint(0, length - 1)
        missed = [
            Missed(begin, begin + random_.randint(1, 4), random_.choice(["timeout", "fault", "unasked"]))
            for begin in random_.sample(range(15), 3)
        ]
        made = merge(known, found=[TierHit(0, hit, "device")] if hit else [], missed=missed)
        assert [made[0].begin, *(each.end for each in made)] == [0, *(each.begin for each in made[1:]), length]
        assert all((each.tier is None) != (each.cause is None) for each in made)
        assert sum(each.end - each.begin for each in made if each.tier) == hit


def test_unstored_pages_are_found_in_their_own_namespace_up_to_where_prompts_part() -> None:
    unstored = Unstored(PAGE, most=6)
    tokens = np.arange(30, dtype=np.int32)
    assert unstored.find(tokens, b"a") == (0, 0)
    unstored.add(tokens[:22], b"a", 10)  # pages 2 to 4
    assert unstored.find(tokens, b"a") == (8, 20)
    assert unstored.find(tokens, b"b") == (0, 0)
    other = tokens.copy()
    other[13] = 99
    assert unstored.find(other, b"a") == (8, 12)
    unstored.add(tokens[:18] + 100, b"a", 0)  # four more pages: the oldest is forgotten
    assert unstored.find(tokens, b"a") == (12, 20)


def test_images_have_symbols_that_no_token_has() -> None:
    unstored = Unstored(PAGE)
    symbols = np.array([1, 2, -5, -7, 3, 4, 5, 6], np.int32)
    unstored.add(symbols, b"", 0)
    assert unstored.find(symbols, b"") == (0, 8)
