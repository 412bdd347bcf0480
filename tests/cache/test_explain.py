"""Explaining a prompt, through the public interface; `simulator/explain.py` compares a tree with an unbounded log."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mainstem.cache.components import Full, State, Window
from mainstem.cache.explain import Cause, Explanation, Stretch, Timeline
from mainstem.cache.namespaces import NamespaceLike
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.quotas import Quota, Quotas, Share
from mainstem.cache.tree import Tree
from mainstem.errors import BadArgument, BadTokens

P = 4  # page size
PROMPT = list(range(100, 100 + 5 * P))


def make(pages: int = 8, **options: Any) -> PrefixCache:
    return PrefixCache(pages, P, **{"explain_pages": 64} | options)


def serve(cache: PrefixCache, tokens: list[int], namespace: NamespaceLike = None) -> None:
    with cache.lease(tokens, namespace) as lease:
        lease.reserve(len(tokens) - lease.hit)
        lease.finish()


def parts(explanation: Explanation) -> list[tuple[int, int, str | None]]:
    return [(part.begin, part.end, part.tier or part.cause) for part in explanation.stretches]


def only(explanation: Explanation, cause: Cause) -> Stretch:
    (part,) = [part for part in explanation.stretches if part.cause == cause]
    return part


def other(number: int, pages: int = 5) -> list[int]:
    return list(range(1000 * number, 1000 * number + pages * P))


# ---------------------------------------------------------------- causes


def test_a_new_prompt_was_never_seen() -> None:
    cache = make()
    assert parts(cache.explain(PROMPT)) == [(0, 20, "never_seen")]
    assert cache.explain([]).stretches == ()
    assert parts(cache.explain([1])) == [(0, 1, "partial_page")]


@pytest.mark.parametrize(("younger", "nearest"), [(4095, True), (4096, False), (5000, False)])
def test_the_nearest_of_the_youngest_4096_sequences_is_named(younger: int, nearest: bool) -> None:
    tree = Tree(P, explain_pages=8)
    tree.insert(PROMPT[:P], [0])
    tree.insert([*PROMPT[: P + 2], 7, 7], [0, 1])  # which agrees in two more tokens
    for number in range(younger):
        tree.insert([*PROMPT[:P], 1000 + number, 7, 7, 7], [0, 2 + number])
    found = only(tree.explain(PROMPT), "parted").parted
    assert found is not None and found.at == (P + 2 if nearest else P)


@pytest.mark.parametrize(("younger", "hit"), [(0, P + 2), (31, P + 2), (32, P), (5000, P)])
def test_a_part_of_a_page_is_found_among_the_youngest_32_sequences(younger: int, hit: int) -> None:
    cache = PrefixCache(6000, P, copy_page=lambda *_: None)
    serve(cache, [*PROMPT[: P + 2], 7, 7])
    serve(cache, [*PROMPT[:P], 6, 7, 7, 7])
    for number in range(1, younger):
        serve(cache, [*PROMPT[:P], 1000 + number, 7, 7, 7])
    with cache.lease(PROMPT) as lease:
        assert lease.hit == (hit if younger else P + 2)


def test_the_last_tokens_are_always_computed() -> None:
    cache = make()
    serve(cache, PROMPT)
    assert parts(cache.explain(PROMPT)) == [(0, 16, "device"), (16, 20, "partial_page")]
    assert parts(cache.explain([*PROMPT, 1, 2])) == [(0, 20, "device"), (20, 22, "partial_page")]
    copies = make(copy_page=lambda source, target, positions: None)
    serve(copies, PROMPT)
    assert parts(copies.explain(PROMPT)) == [(0, 19, "device"), (19, 20, "partial_page")]
    assert copies.explain(PROMPT).found == copies.peek(PROMPT) == 19


def test_a_prompt_parts_from_the_nearest_one_at_a_token() -> None:
    cache = make(12)
    serve(cache, PROMPT)
    serve(cache, [*PROMPT[:8], 7, 7, 7, 7])
    changed = [*PROMPT[:10], 5, *PROMPT[11:]]
    found = cache.explain(changed)
    assert parts(found) == [(0, 8, "device"), (8, 20, "parted")]
    parted = only(found, "parted").parted
    assert parted is not None and parted.at == 10
    assert np.frombuffer(parted.other, "<u4").tolist() == PROMPT[10:]
    assert cache.explain([9, *PROMPT[1:]]).stretches[0].cause == "never_seen"
    assert only(cache.explain([PROMPT[0], 9, *PROMPT[2:]]), "parted").begin == 0


def test_what_was_evicted_says_when_why_and_how_much_memory_would_have_kept_it() -> None:
    cache = make()
    cache.poll(10.0)
    serve(cache, PROMPT)
    cache.poll(25.0)
    serve(cache, other(1))
    cache.poll(30.0)
    found = cache.explain(PROMPT, distances=True)
    assert parts(found) == [(0, 12, "device"), (12, 20, "evicted")]
    gone = only(found, "evicted").eviction
    assert gone is not None
    assert (gone.why, gone.tier, gone.policy, gone.uses) == ("policy", "device", "lru", 0)
    assert (gone.ago_s, gone.idle_s) == (5.0, 15.0)
    assert gone.distance_pages == 10
    assert cache.explain(PROMPT).stretches[1].eviction.distance_pages is None  # type: ignore[union-attr]


def test_what_is_found_says_how_long_ago_it_was_used() -> None:
    cache = make(16)
    cache.poll(10.0)
    serve(cache, PROMPT)
    cache.poll(25.0)
    assert cache.explain([*PROMPT, 1]).stretches[0].idle_s == 15.0
    serve(cache, [*PROMPT, *other(1, 1)])
    cache.poll(30.0)
    assert cache.explain([*PROMPT, *other(1, 1), 1]).stretches[0].idle_s == 5.0
    serve(cache, [*PROMPT, *other(2, 1)])
    shared = cache.explain([*PROMPT, 1]).stretches[0]
    assert (shared.end, shared.idle_s) == (20, None)  # who went on from here used it, too
    assert cache.explain(other(3)).stretches[0].idle_s is None


def test_a_stack_distance_is_the_memory_that_lru_would_have_needed() -> None:
    for pages in (9, 10):
        cache = make(pages)
        serve(cache, PROMPT)
        serve(cache, other(1))
        whole = cache.explain([*PROMPT, 1], distances=True)
        kept = [part for part in whole.stretches if part.cause == "evicted"]
        assert (not kept) == (pages >= 10)
        assert all(part.eviction.distance_pages == 10 for part in kept if part.eviction)


def test_what_came_back_is_not_evicted_any_more() -> None:
    cache = make()
    for tokens in (PROMPT, other(1), PROMPT):
        serve(cache, tokens)
    assert parts(cache.explain([*PROMPT, 1])) == [(0, 20, "device"), (20, 21, "partial_page")]
    found = cache.explain(other(1), distances=True)
    assert only(found, "evicted").eviction.distance_pages == 10  # type: ignore[union-attr]


def test_what_is_pushed_out_of_the_memory_is_forgotten_not_never_seen() -> None:
    cache = make(5, explain_pages=5)
    for number in range(40):
        serve(cache, other(number))
    assert parts(cache.explain(other(38)))[0][2] == "evicted"
    assert [parts(cache.explain(other(number))) for number in range(30)] == [[(0, 20, "forgotten")]] * 30
    never = [parts(cache.explain(other(number))) for number in range(1000, 1300)]
    assert never.count([(0, 20, "never_seen")]) > 295


def test_long_prompts_are_forgotten_page_by_page() -> None:
    cache = make(40, explain_pages=40)
    prompt = other(1, 37)
    for tokens in (prompt, other(2, 40), other(3, 40)):
        serve(cache, tokens)
    for pages in range(1, 38):
        assert parts(cache.explain([*prompt[: pages * P], 1]))[0] == (0, pages * P, "forgotten")
    assert parts(cache.explain([*prompt[: 3 * P], *other(9, 37)]))[-1][2] == "never_seen"


@pytest.mark.parametrize("asked", [True, False])
def test_what_follows_a_forgotten_page_is_new_if_somebody_asked_in_time(asked: bool) -> None:
    cache = make(20, explain_pages=20)
    serve(cache, other(1, 12))
    serve(cache, other(2, 20))
    if asked:
        cache.explain(PROMPT)
    serve(cache, other(3, 20))
    new = [*other(1, 3), *other(9, 3)]
    known = [(0, 12, "forgotten"), (12, 24, "never_seen")] if asked else [(0, 24, "forgotten")]
    assert parts(cache.explain(new)) == known


def test_a_page_was_evicted_only_after_all_pages_above() -> None:
    cache = make(8)
    serve(cache, [*PROMPT[: 2 * P], *other(1, 3)])
    serve(cache, [*PROMPT[: 2 * P], *other(2, 3)])
    serve(cache, other(3, 3))
    assert parts(cache.explain([*PROMPT[: 2 * P], *other(1, 3), 1]))[1] == (8, 20, "evicted")
    found = cache.explain([*other(3, 2), *other(1, 3), 1])  # the same tokens at the same place
    assert parts(found) == [(0, 8, "device"), (8, 21, "parted")]


def test_of_many_evictions_of_a_page_the_last_one_counts() -> None:
    cache = make(5, explain_pages=5000)
    for number in range(700):
        cache.poll(float(number))
        serve(cache, PROMPT if number % 2 == 0 else other(1))
    found = only(cache.explain(PROMPT), "evicted").eviction
    assert found is not None and found.ago_s == 0.0 and found.idle_s == 1.0


def test_what_went_before_many_evictions_of_its_first_page_is_forgotten() -> None:
    cache = make(5, explain_pages=5000)
    serve(cache, PROMPT)
    for _ in range(300):
        serve(cache, other(1))
        serve(cache, PROMPT[:P])
    serve(cache, other(1))
    assert parts(cache.explain([*PROMPT, 1])) == [(0, 4, "evicted"), (4, 20, "forgotten"), (20, 21, "partial_page")]


def test_the_filter_says_since_when_it_knows() -> None:
    cache = make(5, explain_pages=1)
    assert cache.explain(PROMPT).since_tick == 0
    for number in range(1200):
        cache.poll(float(number))
        serve(cache, other(number))
    found = cache.explain(other(0))
    assert found.since_tick > 0 and found.since_s is not None and 0 < found.since_s < 1200
    assert parts(cache.explain(other(1190))) == [(0, 20, "forgotten")]


def test_without_a_memory_what_is_gone_is_forgotten() -> None:
    cache = make(explain_pages=None)
    serve(cache, PROMPT)
    assert parts(cache.explain([*PROMPT[:16], *other(1)])) == [(0, 16, "device"), (16, 36, "forgotten")]


@pytest.mark.parametrize("tokens", [PROMPT, PROMPT[:6], []])
def test_what_was_removed_is_removed(tokens: list[int]) -> None:
    cache = make()
    serve(cache, PROMPT)
    serve(cache, other(1))  # evicts the last two pages
    cache.remove(tokens)
    kept = len(tokens) // P * P - (P if tokens and len(tokens) % P == 0 else 0)
    found = cache.explain([*PROMPT, 1])
    assert {part.cause for part in found.stretches if kept <= part.begin < 12} == ({"removed"} if kept < 12 else set())
    expected = "removed" if not tokens or tokens == PROMPT else "evicted"
    assert [part.cause for part in found.stretches if part.begin <= 19 < part.end] == [expected]
    cache.check()


def test_removed_pages_that_come_back_are_found_and_evicted_again() -> None:
    cache = make()
    serve(cache, PROMPT)
    cache.remove([])
    assert parts(cache.explain(PROMPT)) == [(0, 20, "removed")]
    serve(cache, PROMPT)
    serve(cache, other(1))
    assert parts(cache.explain(PROMPT))[1] == (12, 20, "evicted")


def test_a_flush_a_drop_and_a_demotion_say_so() -> None:
    cache = make()
    serve(cache, PROMPT)
    cache.flush()
    assert only(cache.explain(PROMPT, distances=True), "removed").eviction is None  # no size would have kept it
    serve(cache, other(1))
    serve(cache, PROMPT[:8])
    cache.demote(PROMPT[:8])
    serve(cache, other(2, 3))
    assert only(cache.explain(PROMPT[:8]), "evicted").eviction.why == "demoted"  # type: ignore[union-attr]


def test_an_owner_beyond_its_quota_says_so() -> None:
    cache = make(20, quotas=Quotas(others=Quota(device=Share(maximum=0.25))))
    serve(cache, PROMPT, "one")
    serve(cache, other(1), "one")
    assert only(cache.explain(PROMPT, "one"), "evicted").eviction.why == "quota"  # type: ignore[union-attr]


def test_an_owner_without_a_maximum_is_never_beyond_it() -> None:
    """It fills the pool alone: more memory would help, and no other quota."""
    cache = make(20, quotas=Quotas())
    serve(cache, PROMPT, "one")
    for seed in range(1, 6):
        serve(cache, other(seed), "one")
    assert only(cache.explain(PROMPT, "one"), "evicted").eviction.why == "policy"  # type: ignore[union-attr]


def test_a_window_or_a_state_that_is_missing_is_the_cause() -> None:
    tree = Tree(1, components=(Full(), State()), explain_pages=16)
    tree.insert([1, 2, 3, 4], [[1, 2, 3, 4], [7]])
    assert parts(tree.explain([1, 2, 3, 4, 5]))[0] == (0, 4, "device")
    tree.evict(1, "state")
    assert parts(tree.explain([1, 2, 3, 4, 5])) == [(0, 4, "state_missing"), (4, 5, "never_seen")]
    tree = Tree(1, components=(Full(), Window(2)), explain_pages=16)
    tree.insert([1, 2, 3, 4], [[1, 2, 3, 4], [1, 2, 3, 4]])
    tree.evict(4, "window")
    assert parts(tree.explain([1, 2, 3, 4]))[-1][2] == "window_missing"


def test_pages_in_flight_and_on_the_host_are_named() -> None:
    tree = Tree(1, tiers=2, explain_pages=16)
    node = tree.insert([1, 2, 3], [1, 2, 3], ready=False).node
    assert parts(tree.explain([1, 2, 3])) == [(0, 3, "in_flight")]
    tree.commit(node)
    tree.attach(node, [5, 6, 7], ready=True)
    tree.evict(2)
    assert parts(tree.explain([1, 2, 3])) == [(0, 1, "device"), (1, 3, "host")]
    tree.evict(1, tier=1)
    gone = only(tree.explain([1, 2, 3]), "evicted").eviction
    assert gone is not None and gone.tier == "host"


def test_a_transfer_that_was_cancelled_is_not_called_evicted() -> None:
    tree = Tree(1, explain_pages=16)
    tree.cancel(tree.insert([1, 2, 3], [1, 2, 3], ready=False).node)
    assert parts(tree.explain([1, 2, 3])) == [(0, 3, "forgotten")]


def test_a_cache_that_is_off_says_so() -> None:
    assert parts(make(enabled=False).explain(PROMPT)) == [(0, 20, "disabled")]


# ---------------------------------------------------------------- who may know what


def test_another_namespace_looks_like_never_seen() -> None:
    cache = make(64)
    alone = make(64)
    serve(cache, PROMPT, "theirs")
    serve(cache, other(1), "theirs")
    serve(cache, [*PROMPT, *other(2)], "theirs")
    cache.remove(other(1), "theirs")
    for tokens in (PROMPT, other(1), [*PROMPT[:6], 1, 2, 3]):
        assert cache.explain(tokens, "mine") == alone.explain(tokens, "mine")
        assert parts(cache.explain(tokens, "mine"))[0][2] == "never_seen"


def test_what_others_evict_and_forget_leaves_no_trace_in_a_namespace() -> None:
    cache = make(5, explain_pages=5)
    for number in range(40):
        serve(cache, other(number), "theirs")
    asked = [parts(cache.explain(other(number), "mine")) for number in range(40)]
    assert asked.count([(0, 20, "never_seen")]) >= 38  # a filter may be wrong, no more often for these than for others


# ---------------------------------------------------------------- it changes nothing


def test_an_explanation_changes_neither_recency_nor_structure() -> None:
    cache = make(12)
    serve(cache, PROMPT)
    serve(cache, other(1))
    views = [(view.node, view.key, view.last_access, view.hits) for view in cache.tree.nodes()]
    stats = cache.stats()
    for tokens in (PROMPT, PROMPT[:6], other(1), other(2)):
        cache.explain(tokens, distances=True)
    assert [(view.node, view.key, view.last_access, view.hits) for view in cache.tree.nodes()] == views
    assert cache.stats() == stats


@pytest.mark.parametrize("policy", ["lru", "fifo", "arc", "gittins"])
def test_what_a_policy_does_not_track_is_not_made_up(policy: str) -> None:
    cache = make(policy=policy)
    for tokens in (PROMPT, other(1), other(2)):
        serve(cache, tokens)
    found = [part.eviction for tokens in (PROMPT, other(1)) for part in cache.explain(tokens, distances=True).stretches]
    gone = [eviction for eviction in found if eviction is not None]
    assert gone and all((eviction.idle_ticks is None) == (policy != "lru") for eviction in gone)
    assert all((eviction.distance_pages is None) == (policy != "lru") for eviction in gone)


# ---------------------------------------------------------------- arguments, and time


@pytest.mark.parametrize("pages", [-1, 2**40, "many", 1.5])
def test_a_memory_of_no_such_size_is_refused(pages: Any) -> None:
    with pytest.raises(BadArgument, match="explain_pages"):
        make(explain_pages=pages)


def test_tokens_out_of_range_are_refused() -> None:
    with pytest.raises(BadTokens):
        make().explain([-1, 2])


def test_a_timeline_is_exact_for_8192_notes_and_then_for_the_latest() -> None:
    timeline = Timeline()
    for tick in range(8192):
        timeline.note(tick, float(tick))
    assert [timeline.used_s(tick) for tick in range(1, 8193)] == [float(tick) for tick in range(8192)]
    timeline.note(8192, 8192.0)
    assert [timeline.left_s(tick) for tick in (0, 1, 2, 3)] == [0.0, 0.0, 2.0, 2.0]  # one in two of the oldest
    for tick in range(8193, 200_000):
        timeline.note(tick, float(tick))
    assert [timeline.left_s(tick) for tick in range(198_000, 200_000)] == [
        float(tick) for tick in range(198_000, 200_000)
    ]
    apart = [tick - (timeline.left_s(tick) or 0.0) for tick in range(0, 200_000, 7)]
    assert 32 < max(apart) < 64  # 200,000 / 4,096 to the next power of two
    assert 2048 <= len(timeline._old) <= 4096 and 2048 <= len(timeline._recent) <= 4096


def test_a_timeline_knows_when_a_tick_was() -> None:
    timeline = Timeline()
    assert timeline.now_s is None and timeline.used_s(3) is None and timeline.left_s(3) is None
    for tick in range(20000):
        timeline.note(tick, float(tick))
        timeline.note(tick, tick + 0.5)
    assert timeline.now_s == 19999.5
    for tick in (5, 1000, 19000):
        used, left = timeline.used_s(tick), timeline.left_s(tick)
        assert used is not None and left is not None
        assert used <= left <= tick + 0.5 and used > tick - 20000 / 2000
