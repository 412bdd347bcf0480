"""Expected uses: what is used last goes first, and wrong advice costs little, under every policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rigs.scheduler import Bench
from rigs.slow import slow_but

from mainstem.cache.expected import Expected, check_next_use
from mainstem.cache.namespaces import Namespace
from mainstem.cache.policies import BUILT_IN
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.errors import BadArgument, BadTokens
from mainstem.runtime.request import Request
from mainstem.settings.engine import SamplingParams

PAGE = 1
RANKED = ["lru", "priority", "fifo", "gittins", "tail"]
EVERY = [*BUILT_IN, "slru:4"]
STEADY = ["lru", "fifo", "priority", "arc", "gittins", "tail"]


def session(number: int, length: int = 4) -> list[int]:
    return [1000 * number + at for at in range(1, length + 1)]


def use(cache: PrefixCache, tokens: list[int], namespace: str | None = None) -> int:
    """Asks for a prefix, computes the rest and leaves it in the cache; returns the hit."""
    with cache.lease([*tokens, 0], namespace) as lease:
        hit = lease.hit
        lease.reserve(len(tokens) - hit)
        lease.publish(len(tokens))
        lease.finish(len(tokens))
    return hit


class Client:
    """Asks and advises by a clock that goes on by a second with each request."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache, self.now_s = cache, 0.0
        self.asked = self.found = 0

    def ask(self, tokens: list[int], next_s: float | None = None, namespace: str | None = None) -> int:
        self.now_s += 1
        self.cache.expected.poll(self.now_s)
        hit = use(self.cache, tokens, namespace)
        if next_s is not None:
            self.cache.expected.expect(tokens, self.now_s + next_s, namespace)
        self.asked, self.found = self.asked + len(tokens), self.found + hit
        return hit


def believed(policy: Any, pages: int) -> Client:
    """Returns a client of a cache, who has been right for long."""
    client = Client(PrefixCache(pages, PAGE, policy=policy))
    for turn in range(200 * pages):
        client.ask(session(turn % pages), pages)
    client.cache.check()
    return client


# ---------------------------------------------------------------- what goes first


@pytest.mark.parametrize("policy", RANKED)
def test_what_is_used_last_goes_first_whatever_the_policy(policy: str) -> None:
    client = believed(policy, 24)
    client.cache.flush()
    order = [3, 5, 1, 4, 2, 0]
    for at in order:
        client.ask(session(100 + at), 1000 + 100 * at)
    for left in range(5, 0, -1):
        client.ask(session(200 + left), 10)
        there = [at for at in range(6) if client.cache.peek([*session(100 + at), 0])]
        assert there == list(range(left)), (policy, there)
    client.cache.check()


def test_the_next_use_ends_what_was_said() -> None:
    client = believed("lru", 24)
    client.cache.flush()
    client.ask(session(100), 5000)
    client.ask(session(101), 1000)
    client.ask(session(100))  # used, and nothing is said of it any more
    for other in range(5):
        client.ask(session(200 + other), 10)
    assert client.cache.peek([*session(100), 0]) and not client.cache.peek([*session(101), 0])


def test_what_is_said_during_a_use_ends_with_it() -> None:
    client = believed("lru", 24)
    client.cache.flush()
    client.ask(session(100))
    with client.cache.lease([*session(100), 0]):
        client.cache.expected.expect(session(100), client.now_s + 5000)
    client.ask(session(101), 1000)
    for other in range(5):
        client.ask(session(200 + other), 10)
    assert client.cache.peek([*session(100), 0]) and not client.cache.peek([*session(101), 0])


def test_what_was_said_last_counts() -> None:
    client = believed("lru", 16)
    client.cache.flush()
    for at in range(4):
        client.ask(session(100 + at), 100 + at)
    client.cache.expected.expect(session(100), client.now_s + 9000)
    client.ask(session(200), 10)
    assert not client.cache.peek([*session(100), 0]) and client.cache.peek([*session(103), 0])


def test_a_prefix_that_is_split_or_grows_keeps_what_was_said_of_its_end() -> None:
    client = believed("lru", 24)
    client.cache.flush()
    long = session(100, 8)
    client.ask(long, 9000)
    for at in range(3):
        client.ask(session(101 + at), 20)
    client.ask([*long[:4], 7, 8, 9, 10], 20)  # parts inside; the beginning is used, the end is not
    client.ask(session(200), 20)
    assert client.cache.peek([*long, 0]) == 4
    client.cache.check()


def test_what_goes_tells_the_page_before_it() -> None:
    """A context of several turns goes as a whole before others lose their ends."""
    client = believed("lru", 24)
    client.cache.flush()
    talk = session(100, 2)
    for _ in range(3):
        client.ask(talk, 5)
        talk = [*talk, *session(300 + len(talk), 2)]
    client.cache.expected.expect(talk[:-2], client.now_s + 9000)
    for at in range(4):
        client.ask(session(101 + at), 50)
    client.ask(session(200), 10)
    client.ask(session(201), 10)
    assert not client.cache.peek([*talk[:6], 0])
    assert all(client.cache.peek([*session(101 + at), 0]) == 4 for at in range(4))


def test_shared_beginnings_do_not_go_with_one_of_their_users() -> None:
    client = believed("lru", 24)
    client.cache.flush()
    shared = session(99, 8)
    for at in range(3):
        client.ask([*shared, *session(100 + at, 4)], 3000 + 1000 * at)
    for at in range(5):
        client.ask(session(200 + at), 1000)
    assert client.cache.peek([*shared, 1]) == 8  # of its users nothing is left
    assert not any(client.cache.peek([*shared, *session(100 + at, 4), 0]) > 8 for at in range(3))


def test_what_is_late_is_the_policys_again_after_as_long() -> None:
    """Late by 35 seconds it would be taken to be 70 seconds away, and idle for 65 seconds, 130."""
    client = believed("lru", 24)
    client.cache.flush()
    client.ask(session(100), 30)
    there = {}
    for second in range(1, 66):
        client.ask(session(200 + second), 90)
        there[second] = client.cache.peek([*session(100), 0])
    assert there[58] == 4 and there[65] == 0


def test_removed_and_demoted_prefixes_still_go_before_others() -> None:
    client = believed("lru", 24)
    client.cache.flush()
    client.ask(session(100), 1)
    client.ask(session(101), 9000)
    client.cache.demote(session(100))
    for at in range(5):
        client.ask(session(200 + at), 10)
    assert not client.cache.peek([*session(100), 0]) and client.cache.peek([*session(101), 0])
    client.cache.check()


# ---------------------------------------------------------------- wrong advice


def hits(policy: str, wrong: Callable[[random.Random, int], float | None], seed: int, namespace: bool = False) -> float:
    """Returns the hit rate, in percent, of a mix that every policy serves in part."""
    draw, says = random.Random(seed), random.Random(-seed - 1)
    client = Client(PrefixCache(120, PAGE, policy=policy))
    for turn in range(6000):
        kind = draw.random()
        number = int(40 * draw.random() ** 2) if kind < 0.6 else 50 + turn % 35 if kind < 0.8 else 1000 + turn
        owner = "bad" if namespace and number % 2 else None
        client.ask(session(number), wrong(says, number) if owner or not namespace else None, owner)
    client.cache.check()
    return 100 * client.found / client.asked


@cache
def hits_without(policy: str, seed: int) -> float:
    return hits(policy, lambda draw, number: None, seed)


WRONG: dict[str, Callable[[random.Random, int], float | None]] = {
    "inverted": lambda draw, number: 5000.0 if number < 50 else 40.0,
    "any": lambda draw, number: draw.lognormvariate(3, 2),
    "all soon": lambda draw, number: 1.0,
    "all late": lambda draw, number: 50_000.0,
    "some": lambda draw, number: 1e4 * draw.random() if draw.random() < 0.3 else None,
}
MOST_UNLIKE = ("inverted", "some")


@pytest.mark.parametrize("policy", STEADY)
@pytest.mark.parametrize("kind", slow_but(WRONG, *MOST_UNLIKE))
def test_wrong_advice_costs_at_most_a_little(policy: str, kind: str) -> None:
    cost = [hits_without(policy, seed) - hits(policy, WRONG[kind], seed) for seed in range(2)]
    assert sum(cost) / len(cost) <= 0.3, cost


@pytest.mark.parametrize("policy", sorted({*EVERY} - {*STEADY, "filo"}))
@pytest.mark.parametrize("kind", slow_but(WRONG, *MOST_UNLIKE))
def test_a_policy_that_counts_uses_may_lose_a_little_more(policy: str, kind: str) -> None:
    """A page that goes loses its counts, and some policies would evict others for ever if one page were another."""
    cost = [hits_without(policy, seed) - hits(policy, WRONG[kind], seed) for seed in range(3)]
    assert sum(cost) / len(cost) <= 2.0, cost


@pytest.mark.parametrize("policy", RANKED)
def test_advice_evicts_no_more_pages_than_its_owner_may_lose(policy: str) -> None:
    """After 4,080 pages that were asked for, six may be lost: the policy chooses the others."""
    client = Client(PrefixCache(200, PAGE, policy=policy))
    for _ in range(40):
        client.ask(session(1, 100), 5)
    client.ask(session(2, 40))
    client.ask(session(3, 40), 5000)
    client.ask(session(4, 50), 5)
    assert [client.cache.peek([*session(number, 100), 0]) for number in (1, 2, 3, 4)] == [76, 40, 34, 50]
    client.ask(session(3, 40), 5000)  # too early: all six are lost
    client.ask(session(5, 20), 5)
    assert [client.cache.peek([*session(number, 100), 0]) for number in (1, 2, 3, 4)] == [50, 40, 40, 50]


def test_who_was_right_for_long_is_not_believed_for_ever() -> None:
    found = {}
    for says in (True, False):
        client = believed("lru", 120)
        draw, rate = random.Random(5), []
        for _ in range(4):
            client.asked = client.found = 0
            for _ in range(4000):
                number = int(60 * draw.random() ** 2)
                client.ask(session(number), WRONG["inverted"](draw, number % 60 + 20) if says else None)
            rate.append(100 * client.found / client.asked)
        found[says] = rate
    assert found[True][-1] >= found[False][-1] - 0.5, found


def test_one_owners_wrong_advice_costs_another_nothing() -> None:
    client = Client(PrefixCache(48, PAGE))
    for turn in range(6000):
        client.ask(session(turn % 40), 80, "good")
        client.ask(session(500 + turn % 3), 5000, "bad")
    good = Client(PrefixCache(48, PAGE))
    for turn in range(6000):
        good.ask(session(turn % 40), None, "good")
        good.ask(session(500 + turn % 3), None, "bad")
    assert client.found > good.found * 0.995, (client.found, good.found)


# ---------------------------------------------------------------- what is said


def test_positions_are_those_of_the_prefix_in_the_tree() -> None:
    cache = PrefixCache(32, 4)
    assert cache.expected.expect(session(1, 8), 5.0) == 0
    use(cache, session(1, 8))
    assert cache.expected.expect(session(1, 8), 5.0) == 8
    assert cache.expected.expect(session(1, 7), 5.0) == 4
    assert cache.expected.expect([*session(1, 4), 9, 9, 9, 9], 5.0) == 4
    assert cache.expected.expect(session(1, 8), 5.0, "other") == 0
    for due in (float("nan"), float("inf")):
        with pytest.raises(BadArgument, match="due"):
            cache.expected.expect(session(1, 8), due)
    with pytest.raises(BadTokens):
        cache.expected.expect([-1], 5.0)
    cache.check()


def test_a_step_takes_as_long_as_the_latest_requests_took() -> None:
    expected = Expected(PrefixCache(8, 1).tree)
    assert expected.wait(None, None) is None and expected.wait(7.0, None) == 7.0
    expected.observe(4.0)
    assert expected.wait(None, 3.0) == 12.0
    for _ in range(200):
        expected.observe(1.0)
    assert expected.wait(None, 3.0) == pytest.approx(3.0, rel=0.01)


def test_the_newest_step_counts_a_twentieth_and_old_ones_nothing_in_the_end() -> None:
    expected = Expected(PrefixCache(8, 1).tree)
    model = 0.0
    for number in range(1, 60):  # the first 20 count alike
        takes_s = float(number % 7)
        expected.observe(takes_s)
        model = model + (takes_s - model) / min(number, 20)
        assert expected.step_s == pytest.approx(model)
    for _ in range(14_000):  # a thousand half-lives
        expected.observe(3.0)
    fresh = Expected(PrefixCache(8, 1).tree)
    fresh.observe(3.0)
    assert expected.step_s == pytest.approx(fresh.step_s, rel=1e-12)


def test_253_owners_answer_for_themselves_and_all_later_ones_together() -> None:
    given: list[int] = []
    tree: Any = SimpleNamespace(
        keys=SimpleNamespace(encode=lambda tokens: b""),
        core=SimpleNamespace(expect=lambda name, key, account, now, due: given.append(account) or 0),
        page_size=1,
    )
    expected = Expected(tree)
    for number in (*range(400), 0, 252, 253, 399):
        expected.expect([], 1.0, Namespace(salt=f"{number}"))
    assert given == [*range(1, 254), *[254] * 147, 1, 253, 254, 254]
    assert len(expected._accounts) == 253  # further owners take no memory


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ((1e9, None), ""),
        ((1e9 + 1, None), "next_use_s"),
        ((1e12, None), "next_use_s"),
        ((None, 1e6), ""),
        ((None, 1e6 + 1), "next_use_steps"),
        ((None, 1e9), "next_use_steps"),
    ],
)
def test_the_greatest_times_that_may_be_said(given: tuple[float | None, float | None], name: str) -> None:
    if name:
        with pytest.raises(BadArgument, match=name):
            check_next_use(*given)
    else:
        assert check_next_use(*given) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ((-1.0, None), "next_use_s"),
        ((101.0, None), "next_use_s"),
        ((float("nan"), None), "next_use_s"),
        ((None, -1.0), "next_use_steps"),
        ((None, float("inf")), "next_use_steps"),
        ((1.0, 1.0), "next_use_steps"),
    ],
)
def test_when_something_is_used_next_is_checked(given: tuple[float | None, float | None], name: str) -> None:
    check_next_use(0.0, None, 100.0)
    check_next_use(None, 5.0, 100.0)
    with pytest.raises(BadArgument, match=f"cache_hints.{name}"):
        check_next_use(*given, 100.0, "cache_hints.")


@pytest.mark.parametrize("policy", EVERY)
def test_random_advice_leaves_the_cache_sound(policy: str) -> None:
    draw = random.Random(3)
    client = Client(PrefixCache(40, 2, policy=policy))
    for turn in range(600):
        stem = session(draw.randrange(6), 2 * draw.randrange(1, 6))
        tokens = [*stem, *session(50 + draw.randrange(12), 2 * draw.randrange(1, 5))]
        client.ask(tokens, draw.choice((None, 0.0, 5.0, 50.0, 1e5)))
        if draw.random() < 0.2:
            client.cache.expected.expect(stem, client.now_s + draw.uniform(-5, 500))
        if draw.random() < 0.05:
            client.cache.demote(stem)
        if draw.random() < 0.05:
            client.cache.remove(stem)
        if turn % 10 == 0:
            client.cache.check()
    client.cache.flush()
    client.cache.check()
    assert client.cache.pool.free == client.cache.pool.total


def test_advice_begins_in_a_cache_that_is_in_use() -> None:
    cache = PrefixCache(64, 2, policy="lru")
    for number in range(6):
        use(cache, session(number, 8))
    use(cache, [*session(2, 4), 7, 7, 7, 7])
    with cache.lease([*session(3, 8), 0]):
        cache.remove(session(3, 8))
        cache.expected.expect(session(4, 8), 5.0)
        cache.check()
    assert np.all([cache.peek([*session(number, 8), 0]) == 8 for number in (0, 1, 2, 4, 5)])


def test_the_length_of_a_step_goes_by_the_time_that_all_ranks_share() -> None:
    bench = Bench()
    request = Request(np.arange(1, 9, dtype=np.int32), SamplingParams(max_tokens=1, ignore_eos=True))
    bench.now_s = 1000.0  # the clock of this rank
    bench.scheduler.add("r", request, 1.0)
    for _ in range(5):
        bench.scheduler.step(4.0)
    assert not bench.scheduler.busy and bench.cache.expected.step_s == 3.0
