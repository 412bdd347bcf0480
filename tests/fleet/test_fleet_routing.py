"""The router of a fleet: its index is what the replicas' events say, and a request goes where it costs least."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mainstem import Namespace, PrefixCache, _core
from mainstem.errors import BadArgument
from mainstem.events.replica import Replica
from mainstem.events.source import AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium, salt_id
from mainstem.fleet.front import routing
from mainstem.fleet.front.asking import Prompt
from mainstem.fleet.front.routing import CostRouter, Costs, Estimate

PAGE = 2
SECRET = b"a secret of the fleet"
NAMESPACES = (None, Namespace(salt="one"), Namespace(salt="two"), Namespace(adapter="one"), Namespace("a", "one"))
MEDIA: tuple[Medium, ...] = ("GPU", "CPU", "STORAGE")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def router(clock: Clock | None = None, **options: Any) -> CostRouter:
    return CostRouter(clock or Clock(), **{"page_size": PAGE, "key": bytes(16), "secret": SECRET, **options})


def stored(tokens: Sequence[int], name: int = 1, medium: Medium = "GPU", **rest: Any) -> BlockStored:
    """An event of a path of pages from the root, whose hashes are numbers from `name * 1000` on."""
    hashes = tuple(name * 1000 + page for page in range(len(tokens) // PAGE))
    return BlockStored(hashes, None, tuple(tokens), PAGE, medium, **rest)


def following(names: Iterable[str], clock: Clock | None = None, costs: Any = None, **options: Any) -> CostRouter:
    made = router(clock, **options)
    made.follow({name: {} if costs is None else {"costs": costs} for name in names})
    return made


# ---------------------------------------------------------------- the index beside the slow model


class Model:
    """What the router may know of one replica: `Replica`, without pages whose beginning is not known."""

    def __init__(self) -> None:
        self.replica = Replica()

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored) and event.parent_block_hash not in {None, *self.replica.blocks}:
                continue
            self.replica.apply([event])

    def depths(self, namespace: Namespace | None, tokens: Sequence[int]) -> tuple[int, int, int]:
        """Returns tokens from the beginning on the device, there or on the host, there or in storage."""
        salt, adapter = salt_id(namespace, SECRET), None if namespace is None else namespace.adapter
        there: dict[tuple[int, ...], set[Medium]] = {}
        for hash_, block in self.replica.blocks.items():
            if (block.stored.lora_name, block.stored.cache_salt) != (adapter, salt):
                continue
            with suppress(KeyError):  # a page before it is not there
                there[self.replica.path(hash_)] = block.media
        found = []
        for n in (1, 2, 3):
            depth = 0
            while depth + PAGE <= len(tokens) and set(MEDIA[:n]) & there.get(tuple(tokens[: depth + PAGE]), set()):
                depth += PAGE
            found.append(depth)
        return found[0], found[1], found[2]


class Server:
    """A cache and its events; some of its pages are on the host and in storage, too, as far as events say."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.model, self.truth = Model(), Replica()
        self.restart()

    def restart(self) -> list[Event]:
        self._events: list[Event] = []
        self.cache = PrefixCache(pages=14, page_size=PAGE, on_event=self._events.append, event_secret=SECRET)
        self.truth.apply([AllBlocksCleared()])
        return [AllBlocksCleared()]

    def take(self) -> list[Event]:
        self.cache.deliver_events()
        events, self._events[:] = list(self._events), []
        copied = [
            replace(event, medium=self._draw.choice(MEDIA[1:]))
            for event in events
            if not isinstance(event, AllBlocksCleared) and self._draw.random() < 0.3
        ]
        self.truth.apply([*events, *copied])
        return [*events, *copied]

    def serve(self, tokens: list[int], namespace: Namespace | None) -> list[Event]:
        with self.cache.lease(tokens, namespace) as lease:
            lease.reserve(len(tokens) - lease.hit)
            lease.finish(len(tokens))
        return self.take()


def whole(replica: Replica) -> list[Event]:
    """The state of a replica as `Source.state` tells it: parents come first, stored even if they are nowhere."""
    nowhere = tuple(hash_ for hash_, block in replica.blocks.items() if not block.media)
    blocks = replica.blocks.values()
    stored = [replace(each.stored, medium=medium) for each in blocks for medium in each.media or ("STORAGE",)]
    return [AllBlocksCleared(), *stored, BlockRemoved(nowhere, "STORAGE")]


@pytest.mark.parametrize("seed", range(12))
def test_the_index_is_what_events_say(seed: int) -> None:
    draw = random.Random(seed)
    servers = {name: Server(draw) for name in ("a", "b", "c", "d")}
    known = following(servers)
    for _ in range(80):
        name = draw.choice(list(servers))
        server, namespace = servers[name], draw.choice(NAMESPACES)
        events = server.serve([draw.randrange(2) for _ in range(draw.randrange(1, 12))], namespace)
        match draw.randrange(12):
            case 0:
                events = server.restart()
            case 1:
                server.cache.flush()
                events += server.take()
            case 2:  # these are lost: all that is there follows
                events = whole(server.truth)
            case 3:
                events += events  # they come twice
            case 4 if len(servers) > 2:
                del servers[name]
                known.follow({each: {} for each in servers})
        known.apply(name, events)
        server.model.apply(events)
        known.check()
        asked, where = [draw.randrange(2) for _ in range(draw.randrange(12))], draw.choice(NAMESPACES)
        expected = {each: server.model.depths(where, asked) for each, server in servers.items()}
        assert known.match(Prompt(ids(*asked), where)) == expected


@pytest.mark.parametrize("capacity", [1, 7, 30])
def test_a_full_index_forgets_and_finds_no_more_than_there_is(capacity: int) -> None:
    draw = random.Random(capacity)
    servers = {name: Server(draw) for name in ("a", "b", "c")}
    known = following(servers, capacity=capacity)
    for _ in range(80):
        name = draw.choice(list(servers))
        events = servers[name].serve([draw.randrange(2) for _ in range(12)], draw.choice(NAMESPACES))
        known.apply(name, events)
        servers[name].model.apply(events)
        known.check()
        asked, where = ids(*[draw.randrange(2) for _ in range(12)]), draw.choice(NAMESPACES)
        found = known.match(Prompt(asked, where))
        for each, server in servers.items():
            there = server.model.depths(where, asked.tolist())
            assert all(one <= most for one, most in zip(found[each], there, strict=True))
    counts = known.stats()
    assert counts["forgotten"] > 0 and counts["held"] + counts["expected"] <= capacity


def test_what_was_stored_longest_ago_is_forgotten_first() -> None:
    known = following("a", capacity=40)
    for name in range(1, 9):
        known.apply("a", [stored([name] * 20, name)])
    assert known.match(Prompt(ids(*[8] * 20)))["a"][0] == 20
    assert known.match(Prompt(ids(*[1] * 20)))["a"][0] == 0


# ---------------------------------------------------------------- what events may be


def test_hashes_name_pages_of_one_replica_only() -> None:
    known = following("ab")
    known.apply("a", [stored([1, 1, 2, 2], name=1)])
    known.apply("b", [stored([3, 3, 4, 4], name=1)])  # the same hashes
    known.apply("b", [BlockRemoved((1000, 1001), "GPU")])
    assert known.match(Prompt(ids(1, 1, 2, 2))) == {"a": (4, 4, 4), "b": (0, 0, 0)}
    assert known.match(Prompt(ids(3, 3, 4, 4))) == {"a": (0, 0, 0), "b": (0, 0, 0)}


def test_a_page_that_was_removed_does_not_count() -> None:
    known = following("ab")
    for name in "ab":
        known.apply(name, [stored([1, 1, 2, 2]), stored([1, 1, 2, 2], medium="CPU")])
    known.apply("a", [BlockRemoved((1001,), "GPU"), BlockRemoved((1000, 1001), "CPU")])
    assert known.match(Prompt(ids(1, 1, 2, 2))) == {"a": (2, 2, 2), "b": (4, 4, 4)}


def test_a_page_is_found_where_it_is_now_and_not_where_it_was() -> None:
    known, path = following("a"), list(range(200))
    known.apply("a", [stored(path), stored([500, 500], 2)])
    known.apply("a", [BlockRemoved((1099,), "GPU"), BlockRemoved((2000,), "GPU")])  # its block is the next to be used
    known.apply("a", [BlockStored((1099,), 1098, tuple(path[-PAGE:]), PAGE, "GPU")])
    known.check()
    assert known.match(Prompt(ids(*path)))["a"] == (200, 200, 200)


def test_the_same_pages_in_another_order_are_another_prefix() -> None:
    known = following("a")
    for at, path in enumerate(((1, 1, 2, 2, 3, 3), (2, 2, 3, 3), (3, 3))):
        known.apply("a", [stored(path, at + 1)])
    for path, depth in (((1, 2, 3), 6), ((2, 1, 3), 2), ((3, 2, 1), 2), ((2, 3, 1), 4), ((1, 1, 3), 2)):
        assert known.match(Prompt(np.repeat(np.array(path, np.int32), PAGE)))["a"][0] == depth


def test_namespaces_never_cross() -> None:
    known = following("a")
    known.apply("a", [stored([1, 1], lora_name="x"), stored([1, 1], 2, cache_salt="x")])
    assert known.match(Prompt(ids(1, 1)))["a"] == (0, 0, 0)
    assert known.match(Prompt(ids(1, 1), Namespace(adapter="x")))["a"] == (2, 2, 2)
    assert known.match(Prompt(ids(1, 1), Namespace(adapter="y")))["a"] == (0, 0, 0)
    onward = BlockStored((2001,), 1000, (2, 2), PAGE, "GPU", cache_salt="x")  # continues a page of the other one
    known.apply("a", [onward])
    assert known.stats()["malformed"] == 1 and known.stats()["held"] == 2


@pytest.mark.parametrize(
    "event",
    [
        BlockStored(("x",), None, (1, 1), PAGE, "GPU"),  # type: ignore[arg-type]
        BlockStored((1,), "x", (1, 1), PAGE, "GPU"),  # type: ignore[arg-type]
        BlockStored((1,), None, (1, 1, 1), PAGE, "GPU"),
        BlockStored((1,), None, (-1, 1), PAGE, "GPU"),
        BlockStored((1 << 64,), None, (1, 1), PAGE, "GPU"),
        BlockStored(None, None, None, PAGE, "GPU"),  # type: ignore[arg-type]
        BlockStored((1,), None, (1, 1), PAGE + 1, "GPU"),
        BlockStored((1,), None, (1, 1), PAGE, ["GPU"]),  # type: ignore[arg-type]
        BlockStored((1,), None, (1, 1), PAGE, "GPU", lora_name=5),  # type: ignore[arg-type]
        BlockRemoved((1,), "TAPE"),  # type: ignore[arg-type]
        BlockRemoved(7, "GPU"),  # type: ignore[arg-type]
    ],
)
def test_events_that_make_no_sense_are_counted_and_change_nothing(event: Event) -> None:
    known = following("a")
    known.apply("a", [stored([1, 1, 2, 2], 9), event])
    known.check()
    assert known.stats()["malformed"] == 1 and known.stats()["held"] == 2


def test_unknown_parents_and_unknown_replicas_are_ignored() -> None:
    known = following("a")
    known.apply("a", [BlockStored((1, 2), 77, (1, 1, 2, 2), PAGE, "GPU"), BlockRemoved((5,), "CPU")])
    known.apply("nobody", [stored([1, 1])])
    counts = known.stats()
    assert (counts["orphans"], counts["unknown"], counts["held"], counts["workers"]) == (2, 1, 0, 1)


def test_a_hash_of_two_pages_is_a_conflict() -> None:
    known = following("a")
    known.apply("a", [stored([1, 1]), stored([2, 2]), stored([1, 1], name=5)])
    assert known.stats()["conflicts"] == 2
    assert known.match(Prompt(ids(2, 2)))["a"] == (0, 0, 0)
    known.apply("a", [BlockRemoved((5000,), "GPU")])
    assert known.match(Prompt(ids(1, 1)))["a"] == (2, 2, 2)


# ---------------------------------------------------------------- where a request goes


def prompt(first: int, length: int = 200, **rest: Any) -> Prompt:
    return Prompt(np.arange(first, first + length, dtype=np.int32), **rest)


SLOW = {"prefill": (1e-3, 0.0), "load": (0.0, 1e-5), "read": (0.0, 1e-4), "pull": (0.0, 5e-5)}


def first(known: CostRouter, asked: Prompt | None, names: Sequence[str] = ("a", "b")) -> str:
    return known.order(asked, names)[0]


def test_the_longest_prefix_sent_goes_first_without_any_events() -> None:
    known = following("ab")
    for name, begin in (("b", 0), ("a", 1000)):
        known.sent(prompt(begin), name)
        known.ended(name)
    assert first(known, prompt(0, 100)) == "b"
    assert first(known, prompt(1000, 300)) == "a"
    assert known.order(prompt(5000), ["a", "b"]) == ["a", "b"]


def test_one_with_much_more_to_do_is_passed_over() -> None:
    known = following("ab", costs=SLOW)
    known.apply("b", [stored(range(200))])
    assert first(known, prompt(0)) == "b"
    for turn in range(20):
        known.sent(prompt(7000 + 1000 * turn), "b")
    assert first(known, prompt(0)) == "a"


def test_a_hot_prefix_is_computed_elsewhere_once_waiting_costs_more() -> None:
    clock = Clock()
    known = following("abcd", clock, costs=SLOW)
    known.apply("a", [stored(range(200))])
    served = []
    for _ in range(300):  # each takes 101 ms, and comes 30 ms after the one before
        asked = Prompt(
            np.concatenate([np.arange(200), np.random.default_rng(len(served)).integers(999, 9999, 100)]).astype(
                np.int32
            )
        )
        served.append(first(known, asked, "abcd"))
        known.sent(asked, served[-1])
        clock.now_s += 0.03
    assert served[0] == "a" and set(served) == set("abcd")
    found = known.match(prompt(0))
    assert all(depths[0] == 200 for depths in found.values())
    assert max(served.count(name) for name in "abcd") < 110


def test_tiers_cost_what_replicas_say() -> None:
    known = following("abc", costs=SLOW)
    for name, medium in (("a", "STORAGE"), ("b", "CPU")):
        known.apply(name, [stored(range(100), medium=medium)])  # type: ignore[arg-type]
    known.apply("c", [stored(range(80))])
    seconds = {each.replica: each.seconds for each in known.estimates(prompt(0), "abc")}
    assert seconds == {"a": pytest.approx(0.1 + 0.011), "b": pytest.approx(0.1 + 0.001), "c": pytest.approx(0.12)}
    assert known.order(prompt(0), "abc") == ["b", "a", "c"]


def test_each_tier_is_read_for_what_those_above_it_lack() -> None:
    known = following("a", costs=SLOW)
    media: dict[Medium, int] = {"GPU": 40, "CPU": 80, "STORAGE": 120}
    for medium, tokens in media.items():
        known.apply("a", [stored(range(tokens), medium=medium)])
    (estimate,) = known.estimates(prompt(0), "a")
    assert (estimate.cached, estimate.seconds) == (120, pytest.approx(40 * 1e-4 + 80 * 1e-5 + 80 * 1e-3))


def test_what_is_slower_to_load_than_to_compute_is_computed() -> None:
    known = following("a", costs={**SLOW, "read": (1.0, 0.0)})
    known.apply("a", [stored(range(100), medium="STORAGE")])
    (estimate,) = known.estimates(prompt(0), "a")
    assert (estimate.cached, estimate.seconds) == (0, pytest.approx(0.2))


def test_a_peers_pages_count_for_who_reads_from_peers() -> None:
    known = router()
    known.follow({name: {"costs": SLOW, "peers": name == "b"} for name in "abc"})
    known.apply("a", [stored(range(100))])
    seconds = {each.replica: each.seconds for each in known.estimates(prompt(0), "abc")}
    assert seconds["c"] == pytest.approx(0.2)
    assert seconds["b"] == pytest.approx(0.1 + 100 * 6e-5)


def test_a_shared_store_is_everybodys() -> None:
    known = router()
    known.follow({"a": {"store": "s"}, "b": {"store": "s"}, "c": {"store": "t"}, "d": {}})
    known.apply("a", [stored(range(20), medium="STORAGE")])
    assert {name: depths[2] for name, depths in known.match(prompt(0, 20)).items()} == {
        "a": 20,
        "b": 20,
        "c": 0,
        "d": 0,
    }
    known.follow({"b": {"store": "s"}, "c": {"store": "t"}})
    assert known.match(prompt(0, 20)) == {"b": (0, 0, 0), "c": (0, 0, 0)}


def test_a_replica_shares_the_store_that_it_names_now() -> None:
    known = router()
    known.follow({"a": {"store": "s"}, "b": {"store": "s"}})
    known.apply("a", [stored(range(20), medium="STORAGE")])
    assert known.match(prompt(0, 20))["b"][2] == 20
    for said in ({}, {"store": None}, {"store": "t"}, {"store": ["s"]}):  # it began anew, under its former name
        known.follow({"a": {"store": "s"}, "b": said})
        known.check()
        assert {name: each[2] for name, each in known.match(prompt(0, 20)).items()} == {"a": 20, "b": 0}
        known.follow({"a": {"store": "s"}, "b": {"store": "s"}})
        assert known.match(prompt(0, 20))["b"][2] == 20


def test_what_a_replica_lacks_the_others_know() -> None:
    known = router()
    known.follow({"a": {"costs": {"prefill": (1e-3, 0.0)}}, "b": {"costs": {"prefill": (-1, "x")}}})
    assert [each.seconds for each in known.estimates(prompt(0), "ab")] == [pytest.approx(0.2)] * 2


def test_the_last_token_is_always_computed() -> None:
    known = following("a", costs=SLOW)
    known.apply("a", [stored(range(200))])
    assert known.estimates(prompt(0), "a")[0] == Estimate("a", pytest.approx(0.001), pytest.approx(0.001), 199)


def test_queues_that_replicas_report_count() -> None:
    known = router()
    known.follow({"a": {"costs": SLOW, "queued": 5000}, "b": {"costs": SLOW}})
    assert known.order(None, ["a", "b"]) == ["b", "a"]
    assert known.estimates(None, ["a"])[0].seconds == pytest.approx(5)


def test_a_queue_that_was_reported_counts_once_until_something_else_is_said() -> None:
    clock = Clock()
    known = router(clock)
    busy = {"costs": SLOW, "queued": 5000}
    for now_s, said, left_s in ((0, busy, 5), (3, busy, 2), (4, {**busy, "queued": 2000}, 2), (5, busy, 5)):
        clock.now_s = now_s
        known.follow({"a": dict(said), "b": {"costs": SLOW}})
        assert known.estimates(None, ["a"])[0].seconds == pytest.approx(left_s)


def test_a_queue_ends_with_time_and_with_the_last_request() -> None:
    clock = Clock()
    known = following("ab", clock, costs=SLOW)
    known.sent(prompt(0), "a")
    known.sent(prompt(900), "a")
    assert known.estimates(None, "a")[0].seconds == pytest.approx(0.4)
    clock.now_s = 0.3
    assert known.estimates(None, "a")[0].seconds == pytest.approx(0.1)
    known.ended("a")
    known.ended("a")
    assert known.estimates(None, "a")[0].seconds == 0


def test_equal_replicas_get_equal_work() -> None:
    clock = Clock()
    known = following("abcd", clock, costs=SLOW)
    served = []
    for turn in range(40):
        served.append(first(known, prompt(1000 * turn), "abcd"))
        known.sent(prompt(1000 * turn), served[-1])
        known.ended(served[-1])
        clock.now_s += 100
    assert {served.count(name) for name in "abcd"} == {10}


def test_what_was_expected_too_long_ago_does_not_count() -> None:
    clock = Clock()
    known = following("a", clock, expect_s=10)
    known.sent(prompt(0, 20), "a")
    assert known.match(prompt(0, 20))["a"] == (20, 20, 20)
    clock.now_s = 9
    known.sent(prompt(0, 10), "a")
    clock.now_s = 10
    assert known.match(prompt(0, 20))["a"][0] == 10
    known.apply("a", [stored(range(20)), BlockRemoved((1000,), "GPU")])  # events say otherwise
    assert known.match(prompt(0, 20))["a"][0] == 0
    assert known.stats()["expired"] == 5


def test_a_session_and_a_kept_response_have_their_place() -> None:
    known = following("ab")
    known.sent(prompt(0, 3, session="s"), "b")
    assert first(known, prompt(9, 3, session="s")) == "b"
    assert first(known, prompt(9, 3, session="s", namespace=Namespace(salt="other"))) == "a"
    assert first(known, prompt(9, 3, replica="b")) == "b"
    assert first(known, prompt(9, 3, session="s"), ["a", "c"]) == "a"


def test_a_session_moves_when_staying_costs_much() -> None:
    known = following("ab", costs=SLOW)
    for turn in range(5):
        known.sent(prompt(1000 * turn, session="s"), "b")
    assert first(known, prompt(9000, session="s")) == "a"


def test_the_page_size_is_what_replicas_say(caplog: pytest.LogCaptureFixture) -> None:
    known = CostRouter(Clock())
    known.follow({"a": {}, "b": {}})
    known.sent(prompt(0, 64), "a")
    for _ in range(2):
        known.follow({"a": {"page_size": 4}, "b": {"page_size": 4}, "c": {"page_size": 8}})
    known.apply("a", [BlockStored((1,), None, (0, 1, 2, 3), 4, "GPU")])
    known.apply("c", [BlockStored((1,), None, tuple(range(8)), 8, "GPU")])
    assert {name: depths[0] for name, depths in known.match(prompt(0, 8)).items()} == {"a": 4, "b": 0, "c": 0}
    assert caplog.text.count("another size") == 1


def test_the_same_calls_give_the_same_choices() -> None:
    def run() -> list[list[str]]:
        known, draw, clock = following("abc", costs=SLOW), random.Random(3), Clock()
        chosen = []
        for _ in range(50):
            asked = prompt(100 * draw.randrange(5), draw.randrange(1, 200))
            chosen.append(known.order(asked, "abc"))
            known.sent(asked, chosen[-1][0])
            clock.now_s += 0.01
        return chosen

    assert run() == run()


def test_more_replicas_than_a_word_has_bits() -> None:
    names = [f"{number:03}" for number in range(130)]
    known = following(names[:60])
    known.apply("007", [stored(range(20))])
    known.follow({name: {} for name in names})
    known.apply("129", [stored(range(10))])
    found = known.match(prompt(0, 20))
    assert {name: depths[0] for name, depths in found.items() if depths[0]} == {"007": 20, "129": 10}
    assert first(known, prompt(0, 20), names) == "007"


# ---------------------------------------------------------------- bounds, and what fades


NEW = itertools.count(10**6, 10**4)


def worked(known: CostRouter, seconds: float) -> None:
    """Lets a replica do work that is new each time; a token takes a millisecond."""
    known.sent(prompt(next(NEW), int(seconds * 1000)), "a")
    known.ended("a")


def busy(known: CostRouter) -> float:
    """Returns the share of the recent time in which the only replica was busy, as costs show it."""
    [one] = known.estimates(prompt(2 * 10**9, 100), "a")
    return (one.cost_s / one.seconds - 1) / (8 / 0.4 + 1)


@pytest.mark.parametrize("half_lives", [0, 0.5, 1, 2, 10, 63.9, 64.1, 100, 1000])
def test_work_counts_half_after_a_minute_and_nothing_after_a_thousand(half_lives: float) -> None:
    clock = Clock()
    known = following("a", clock, costs=SLOW)
    worked(known, 1.0)
    expected = np.log(2) / 60 / 2**half_lives
    clock.now_s += 60 * half_lives
    for _ in range(2):  # to look changes nothing
        assert busy(known) == pytest.approx(expected, rel=1e-6, abs=1e-15)
    worked(known, 1.0)
    assert busy(known) == pytest.approx(expected + np.log(2) / 60, rel=1e-6)


def test_a_replica_that_is_busy_for_hours_looks_as_after_ten_minutes() -> None:
    clock = Clock()
    known = following("a", clock, costs=SLOW)
    seen = []
    for turn in range(4 * 360):  # a fifth of four hours
        worked(known, 2.0)
        seen += [busy(known)] if turn % 60 == 59 else []
        clock.now_s += 10
    assert seen[0] == pytest.approx(0.2, rel=0.1) and seen == pytest.approx([seen[0]] * 24, rel=0.002)


@pytest.mark.parametrize(("tokens", "queued", "stays"), [(100, 29, True), (100, 31, False), (200, 39, True),
                                                        (200, 41, False), (2000, 219, True), (2000, 221, False),
                                                        (200, 41_000, False)])  # fmt: skip
def test_a_session_stays_where_that_costs_20_ms_and_a_tenth_more(tokens: int, queued: int, stays: bool) -> None:
    known = following("ab", costs=SLOW)
    known.sent(prompt(0, 1, session="s"), "b")
    known.ended("b")
    known.follow({"a": {"costs": SLOW}, "b": {"costs": SLOW, "queued": queued}})
    assert first(known, prompt(5000, tokens, session="s")) == ("b" if stays else "a")


@pytest.mark.parametrize(("after_s", "there"), [(299.9, 20), (300.0, 0), (300_000.0, 0)])
def test_what_was_sent_is_expected_for_five_minutes(after_s: float, there: int) -> None:
    clock = Clock()
    known = following("a", clock)
    known.sent(prompt(0, 20), "a")
    clock.now_s += after_s
    for _ in range(2):
        assert known.match(prompt(0, 20))["a"][0] == there
    known.check()


def test_the_places_of_65536_sessions_are_known_and_the_oldest_is_forgotten() -> None:
    known = following("ab")
    known.sent(prompt(0, 1, session="first"), "b")
    known.sent(prompt(0, 1, session="second"), "b")
    known._sessions.update(((b"", str(number)), "a") for number in range((1 << 16) - 3))  # as if they were sent
    known.sent(prompt(0, 1, session="first"), "b")
    known.sent(prompt(0, 1, session="one more"), "a")
    assert len(known._sessions) == 1 << 16
    assert [first(known, prompt(9, 3, session=name)) for name in ("first", "second")] == ["b", "b"]
    known.sent(prompt(0, 1, session="too many"), "a")
    assert [first(known, prompt(9, 3, session=name)) for name in ("first", "second")] == ["b", "a"]
    assert len(known._sessions) == 1 << 16


def test_the_names_of_1024_namespaces_are_kept() -> None:
    known = following("a")
    for number in range(1030):
        known.match(Prompt(ids(1, 1), namespace=Namespace(salt=f"{number}")))
    assert known._space.cache_info().currsize == 1024


def test_pages_have_sixteen_tokens_until_a_replica_says_otherwise() -> None:
    known = CostRouter(Clock())
    known.follow({"a": {}})
    known.sent(prompt(0, 47), "a")
    assert known.match(prompt(0, 47))["a"][0] == 32


def test_the_4096th_store_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert routing._MOST_STORES == 4095  # which is all that the index takes
    monkeypatch.setattr(routing, "_MOST_STORES", 1)
    known = router()
    known.follow(
        {name: {"store": store} for name, store in zip("abcd", ["s", "s", "too many", "too many"], strict=True)}
    )
    for name, there in [("a", "ab"), ("c", "c")]:
        known.apply(name, [stored(range(20), medium="STORAGE")])
        assert [each for each in "abcd" if known.match(prompt(0, 20))[each][2]] == list(there)
        known.apply(name, [AllBlocksCleared()])
    known.check()


def test_stores_come_and_go_for_ever_and_4095_are_there_at_a_time() -> None:
    known = following("ab")
    for number in range(5000):
        known.follow({"a": {"store": f"of a, {number}"}, "b": {"store": f"of b, {number // 3}"}})
    known.follow({"a": {"store": "last"}, "b": {"store": "last"}})
    known.apply("a", [stored(range(20), medium="STORAGE")])
    assert known.match(prompt(0, 20))["b"] == (0, 0, 20)
    known.follow({"a": {"store": "last"}, "b": {"store": "another"}})
    assert known.match(prompt(0, 20))["b"] == (0, 0, 0)
    known.check()
    core = _core.Routing(bytes(16), PAGE, 10)
    core.share_store(core.add(), 4095)
    with pytest.raises(BadArgument, match="below 4096"):
        core.share_store(0, 4096)


@pytest.mark.parametrize(
    ("options", "allowed"), [({"capacity": 2**32 - 2}, True), ({"capacity": 2**32 - 1}, False),
                             ({"page_size": 1 << 20}, True), ({"page_size": (1 << 20) + 1}, False)],
)  # fmt: skip
def test_the_greatest_sizes(options: dict[str, int], allowed: bool) -> None:
    if allowed:
        assert router(**options).stats()["held"] == 0
    else:
        with pytest.raises(BadArgument, match=r"capacity.* 1 to 4294967294|page_size.* 1 to 1048576"):
            router(**options)


def test_settings_out_of_range_are_refused() -> None:
    for options in ({"page_size": -1}, {"capacity": 0}, {"expect_s": -1.0}, {"key": b"short"}):
        with pytest.raises(BadArgument):
            router(**options)
    assert Costs().prefill is None
