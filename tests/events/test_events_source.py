"""The events of a tree: a replica made of them alone holds what the tree holds, whatever happens to its nodes."""

from __future__ import annotations

import contextlib
import logging
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mainstem import BadArgument, BigramKeys, Full, Namespace, PrefixCache, State, Tree, Window
from mainstem.cache.tree import DEVICE, HOST
from mainstem.events import AllBlocksCleared, BlockRemoved, BlockStored
from mainstem.events.replica import Replica
from mainstem.events.source import Event, Source, _Run, salt_id
from simulator.events import followed, listed

SECRET = b"the secret of a fleet"
NAMESPACES = [None, Namespace(salt="a"), Namespace(adapter="french"), Namespace(adapter="french", salt="a")]
MANY = 1000  # page ids


def listening(
    page_size: int = 2, tiers: int = 1, limit: int | None = None, step_pages: int = 1000
) -> tuple[Tree, Source]:
    tree = Tree(page_size, tiers=tiers)
    return tree, Source(tree, [MANY] * tiers, SECRET, limit, step_pages)


class Whatever(RuleBasedStateMachine):
    """All that the lower interface can do to nodes with full attention on two tiers."""

    def __init__(self) -> None:
        super().__init__()
        self.tree, self.source = listening(tiers=2, limit=40, step_pages=3)
        self.replica = Replica()
        self.ids = count()
        self.locked: list[int] = []
        self.flying: list[int] = []
        self.known: list[tuple[list[int], Namespace | None]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=12), name=st.sampled_from(NAMESPACES))
    def insert(self, tokens: list[int], name: Namespace | None) -> None:
        pages = [next(self.ids) % MANY for _ in range(len(tokens) // 2)]
        self.tree.insert(tokens, pages, name)
        self.known.append((tokens, name))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def match_which_splits(self, data: st.DataObject) -> None:
        tokens, name = data.draw(st.sampled_from(self.known))
        node = self.tree.match(tokens[: data.draw(st.integers(1, len(tokens)))], name).node
        if node and data.draw(st.booleans()):
            self.tree.lock(node)
            self.locked.append(node)

    @precondition(lambda self: self.locked)
    @rule()
    def unlock_which_joins(self) -> None:
        self.tree.unlock(self.locked.pop())

    @precondition(lambda self: self.known)
    @rule(data=st.data(), ready=st.booleans())
    def back_up(self, data: st.DataObject, ready: bool) -> None:
        tokens, name = data.draw(st.sampled_from(self.known))
        node = self.tree.match(tokens, name).node
        for at in self.tree.core.lacking(node, DEVICE, HOST, 0) if node else ():
            pages = self.tree.core.end(at) - self.tree.core.start(at)
            self.tree.attach(at, [next(self.ids) % MANY for _ in range(pages)], tier=HOST, ready=ready)
            if not ready:
                self.flying.append(at)

    @precondition(lambda self: self.flying)
    @rule()
    def commit(self) -> None:
        self.tree.commit(self.flying.pop(0), HOST)

    @precondition(lambda self: self.flying)
    @rule()
    def cancel(self) -> None:
        with contextlib.suppress(BadArgument):  # what follows it is on both tiers: that must be cancelled first
            self.tree.cancel(self.flying[-1], HOST)
            self.flying.pop()

    @rule(pages=st.integers(1, 4), tier=st.sampled_from((DEVICE, HOST)))
    def evict(self, pages: int, tier: int) -> None:
        self.tree.evict(pages, tier=tier)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=6), name=st.sampled_from(NAMESPACES))
    def remove(self, tokens: list[int], name: Namespace | None) -> None:
        self.tree.remove(tokens, name)

    @rule()
    def evict_removed(self) -> None:
        for tier in (DEVICE, HOST):
            self.tree.evict_removed(tier)

    @rule()
    def take_a_step(self) -> None:
        self.replica.apply(self.source.take())

    @rule()
    def take(self) -> None:
        self.take_a_step()
        while self.source.waiting:
            self.take_a_step()
        assert followed(self.replica) == listed(self.tree, NAMESPACES, SECRET)

    @invariant()
    def sound(self) -> None:
        self.tree.check()

    def teardown(self) -> None:
        self.take()


Whatever.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestWhatever = Whatever.TestCase


def test_parents_come_first_where_a_transfer_has_many_nodes() -> None:
    tree, source = listening(page_size=1)
    node = tree.insert([1, 2, 3, 4], [0, 1, 2, 3], ready=False).node
    tree.core.locate(b"", np.array([1, 2], np.int32).tobytes(), 1)
    tree.core.locate(b"", np.array([1, 2, 3], np.int32).tobytes(), 2)
    tree.commit(node)
    assert [event.token_ids for event in source.take()] == [(1,), (2,), (3, 4)]  # type: ignore[union-attr]


def test_removed_pages_in_use_leave_at_once_and_only_once() -> None:
    tree, source = listening()
    node = tree.insert([1, 2, 3, 4], [0, 1]).node
    tree.lock(node)
    source.take()
    tree.remove([1, 2])
    assert [type(event) for event in source.take()] == [BlockRemoved]
    tree.unlock(node)
    tree.evict_removed()
    assert source.take() == []


def test_hashes_depend_on_namespace_and_prefix_and_secret_and_on_nothing_else() -> None:
    def hashes(tokens: list[int], namespace: Namespace | None = None, secret: bytes = SECRET) -> tuple[int, ...]:
        tree = Tree(2)
        source = Source(tree, [MANY], secret)
        tree.insert(tokens, np.arange(len(tokens) // 2) + len(tokens), namespace)
        return next(event.block_hashes for event in source.take() if isinstance(event, BlockStored))

    base = hashes([1, 2, 3, 4])
    assert base == hashes([1, 2, 3, 4, 5, 6])[:2]
    others = [
        hashes([1, 2, 3, 4], Namespace(salt="a")),
        hashes([1, 2, 3, 4], Namespace(adapter="a")),
        hashes([1, 2, 3, 4], secret=SECRET + b"!"),
    ]
    assert len({base, *others}) == 4 and all(each[1] != base[1] for each in others)
    assert hashes([9, 9, 3, 4])[1] != base[1]


def test_a_namespace_is_shown_as_its_adapter_and_an_opaque_id() -> None:
    tree, source = listening()
    for number, name in enumerate(NAMESPACES):
        tree.insert([1, 2], [number], name)
    shown = [(event.lora_name, event.cache_salt) for event in source.take() if isinstance(event, BlockStored)]
    assert [lora for lora, _ in shown] == [None, None, "french", "french"]
    assert [salt for _, salt in shown] == [salt_id(name, SECRET) for name in NAMESPACES]
    assert shown[0][1] is shown[2][1] is None and shown[1][1] == shown[3][1] != None  # noqa: E711
    assert "a" != shown[1][1] != salt_id(NAMESPACES[1], b"another secret")


def test_a_state_makes_a_replica_equal_parents_first() -> None:
    tree, source = listening(page_size=1, tiers=2)
    followed_all, joined_late = Replica(), Replica()
    for number, name in enumerate(NAMESPACES):
        node = tree.insert([1, 2, 3, number], range(10 * number, 10 * number + 4), name).node
        tree.attach(node, range(4 * number, 4 * number + 4), tier=HOST, ready=True)
        tree.insert([1, 2, 9], [10 * number, 10 * number + 1, 10 * number + 4], name)
    followed_all.apply(source.take())
    cleared, *stored = source.state()
    assert isinstance(cleared, AllBlocksCleared)
    seen: set[int | None] = {None}
    for event in stored:
        assert isinstance(event, BlockStored) and event.parent_block_hash in seen
        seen |= set(event.block_hashes)
    joined_late.apply([cleared, *stored])
    assert followed(joined_late) == followed(followed_all) == listed(tree, NAMESPACES, SECRET)


@pytest.mark.parametrize("kept", [0, 1])
def test_what_continues_pages_that_are_nowhere_keeps_its_place(kept: int) -> None:
    """A late router has to find it: of five pages the last three were written, and `kept` are left in the tree."""
    tree, source = listening(page_size=1, tiers=2)
    tokens = [1, 2, 3, 4, 5]
    node = tree.insert(tokens, range(5)).node
    tree.attach(node, range(5), tier=HOST, ready=True)
    tree.core.note_written(node, 2)
    first, late = Replica(), Replica()
    first.apply(source.take())
    tree.evict(5)
    tree.evict(5 - kept, tier=HOST)
    first.apply(source.take())
    events = list(source.state())
    known: set[int | None] = {None}
    for event in events:
        if isinstance(event, BlockStored):
            assert event.parent_block_hash in known, "nobody can say what it continues"
            known |= set(event.block_hashes)
    late.apply(events)
    media = {late.path(hash_): block.media for hash_, block in late.blocks.items() if block.media}
    assert media == {tuple(tokens[:end]): {"STORAGE"} for end in (3, 4, 5)} | ({(1,): {"CPU"}} if kept else {})
    assert {hash_: block.media for hash_, block in first.blocks.items()} == {
        hash_: block.media for hash_, block in late.blocks.items()
    }


def test_pages_in_storage_are_given_up_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.events.source._MAX_STORED", 3)
    tree, source = listening(page_size=1, tiers=2)
    replica, late = Replica(), Replica()
    for number in range(3):
        node = tree.insert([number, 8], [2 * number, 2 * number + 1]).node
        tree.attach(node, [2 * number, 2 * number + 1], tier=HOST, ready=True)
        tree.core.note_written(node, 0)
    replica.apply(source.take())
    late.apply(source.state())
    for each in (replica, late):
        assert sum("STORAGE" in block.media for block in each.blocks.values()) == 3
    assert {hash_: block.media for hash_, block in replica.blocks.items()} == {
        hash_: block.media for hash_, block in late.blocks.items()
    }


def test_what_continues_pages_in_storage_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each of many long prompts only the last page was written: what it continues must not add up."""
    monkeypatch.setattr("mainstem.events.source._MAX_KNOWN", 12)
    tree, source = listening(page_size=1, tiers=2)
    replica, late = Replica(), Replica()
    for number in range(4):
        ids = range(6 * number, 6 * number + 6)
        node = tree.insert([number, 1, 2, 3, 4, 5], ids).node
        tree.attach(node, ids, tier=HOST, ready=True)
        tree.core.note_written(node, 5)
    replica.apply(source.take())
    state = list(source.state())
    late.apply(state)
    for each in (replica, late):
        assert sum("STORAGE" in block.media for block in each.blocks.values()) == 2, "those written last"
    kept = [event for event in state if isinstance(event, BlockStored) and event.medium == "STORAGE"]
    assert sum(len(event.block_hashes) for event in kept) == 12


def bare(page_bytes: int = 64) -> tuple[Source, list[int]]:
    """A source of a tree in which nothing happens, and how many pages are noted."""
    noted: list[int] = []
    core = SimpleNamespace(listen=lambda key, places, limit: noted.append(limit))
    keys = SimpleNamespace(symbol_bytes=4)
    tree: Any = SimpleNamespace(keys=keys, components=[Full()], core=core, page_size=1, page_bytes=page_bytes)
    return Source(tree, [MANY]), noted


@pytest.mark.parametrize(("page_bytes", "pages"), [(64, 1 << 17), (8 << 20, 1), (16 << 20, 1)])
def test_8_mebibytes_of_moved_tokens_are_noted(page_bytes: int, pages: int) -> None:
    assert bare(page_bytes)[1] == [pages]


def test_131072_pages_in_storage_are_known() -> None:
    source, _ = bare()
    assert list(source._keep(range(1 << 17))) == []
    assert list(source._keep([0])) == []  # written again, it is the newest
    assert list(source._keep([-1])) == [BlockRemoved((1,), "STORAGE")]
    assert list(source._keep([-2, -3])) == [BlockRemoved((2, 3), "STORAGE")]


def test_262144_pages_in_storage_and_those_that_they_continue_are_known() -> None:
    source, _ = bare()
    run = _Run(None, b"", b"")
    source._known = dict.fromkeys(range(1 << 18), run)
    assert list(source._keep([0])) == []
    source._known[-1] = run
    assert list(source._keep([-1])) == [BlockRemoved((0,), "STORAGE")]
    assert len(source._known) == 1 << 18


def test_the_names_of_1024_namespaces_are_kept() -> None:
    source, _ = bare()
    for number in range(1030):
        source._space(Namespace(salt=f"{number}").encode())
    assert source._space.cache_info().currsize == 1024


def test_more_than_is_noted_is_dropped_and_stored_anew(caplog: pytest.LogCaptureFixture) -> None:
    tree, source = listening(page_size=1, limit=4)
    replica = Replica()
    tree.insert([1, 2, 3], [0, 1, 2])
    tree.insert([1, 2, 9, 9], [0, 1, 3, 4])
    assert source.dropped == 5
    with caplog.at_level(logging.WARNING):
        events = source.take()
    assert isinstance(events[0], AllBlocksCleared) and "dropped" in caplog.text
    replica.apply(events)
    assert followed(replica) == listed(tree, NAMESPACES, SECRET)
    tree.insert([5], [9])
    assert [type(event) for event in source.take()] == [BlockStored]


def test_what_is_stored_anew_comes_in_steps_and_what_happens_meanwhile_after_it() -> None:
    tree, source = listening(page_size=1, limit=10, step_pages=4)
    replica = Replica()
    for start in range(10):
        tree.insert([start, 50, 51], [3 * start, 3 * start + 1, 3 * start + 2])
    stored: list[int] = []
    while not stored or source.waiting:
        events = source.take()
        replica.apply(events)
        stored.append(sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored)))
        if len(stored) == 1:
            tree.remove([0, 50])
            tree.insert([7, 60], [21, 40])
        if len(stored) == 2:
            assert source.waiting and followed(replica) != listed(tree, NAMESPACES, SECRET)
    assert len(stored) > 4 and max(stored) < 4 + 3 + 3, "a step, what moved since, and less than a node more"
    assert followed(replica) == listed(tree, NAMESPACES, SECRET)
    assert source.take() == []


def test_who_does_not_follow_a_state_that_is_stored_anew_gets_it_again() -> None:
    tree, source = listening(page_size=1, limit=4, step_pages=1)
    replica = Replica()
    tree.insert([1, 2, 3], [0, 1, 2])
    tree.insert([4, 5, 6], [3, 4, 5])
    replica.apply(source.take())
    assert source.waiting
    for tokens in ([1], [4]):
        tree.remove(tokens)
    tree.insert([7, 8, 9], [6, 7, 8])
    tree.insert([10, 11, 12], [9, 10, 11])
    events = source.take()
    assert isinstance(events[0], AllBlocksCleared)
    replica.apply(events)
    while source.waiting:
        replica.apply(source.take())
    assert followed(replica) == listed(tree, NAMESPACES, SECRET)


def test_a_large_state_is_stored_anew_in_a_limited_number_of_steps() -> None:
    tree, source = listening(page_size=1, limit=10, step_pages=1)
    for start in range(500):
        tree.insert([start, 1000], [2 * start % MANY, (2 * start + 1) % MANY])
    steps = 0
    while not steps or source.waiting:
        source.take()
        steps += 1
    assert steps <= 130


def test_a_cache_delivers_each_event_once_and_again_if_its_listener_failed() -> None:
    heard: list[Event] = []

    def listen(event: Event) -> None:
        heard.append(event)
        if len(heard) == 1:
            raise RuntimeError("not now")

    cache = PrefixCache(pages=8, page_size=2, on_event=listen, event_secret=SECRET)
    with cache.lease([1, 2, 3, 4]) as lease:
        lease.reserve(4)
        lease.finish(4)
    with pytest.raises(RuntimeError, match="not now"):
        cache.deliver_events()
    cache.deliver_events()
    cache.deliver_events()
    assert len(heard) == 2 and heard[0] == heard[1]
    cache.flush()
    cache.deliver_events()
    assert isinstance(heard[-1], BlockRemoved) and cache.events_dropped == 0


def test_only_token_ids_and_full_attention_have_events() -> None:
    with pytest.raises(BadArgument, match="TokenKeys or TypedKeys"):
        PrefixCache(8, keys=BigramKeys(), on_event=print)
    with pytest.raises(BadArgument, match="full attention"):
        PrefixCache({Window(4): 8}, on_event=print)
    with pytest.raises(BadArgument, match="on_event"):
        PrefixCache(8, on_event="no function")  # type: ignore[arg-type]
    PrefixCache({Full(): 8, State(): 2}, copy_state=lambda source, target: None, on_event=print)


def test_a_tree_refuses_ids_that_have_no_place_and_to_be_listened_to_late() -> None:
    tree, source = listening()
    with pytest.raises(BadArgument, match=r"page id.*below 1000"):
        tree.insert([1, 2], [MANY])
    assert source.take() == []
    tree.insert([1, 2], [0])
    with pytest.raises(BadArgument, match="empty tree"):
        Source(tree, [MANY], SECRET)
