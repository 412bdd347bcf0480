"""The arena against a slow model of bytes: no byte has two owners, what is pinned stays, the oldest leaves first."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mainstem.owner.arena import Arena, Value

GRAIN = 4096
KEYS = [bytes([at]) * 32 for at in range(12)]


def put(arena: Arena, key: bytes, length: int = GRAIN) -> Value | None:
    value = arena.allocate(length)
    if value is not None:
        arena.publish(key, value)
        arena.unpin([value])
    return value


def held(arena: Arena) -> list[bytes]:
    return [key for key in KEYS if arena.find(key) is not None]


class ArenaMachine(RuleBasedStateMachine):
    """Every value has its own byte in a memory that values write and that is compared after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(20 * GRAIN + 17)
        self.memory = bytearray(20 * GRAIN)
        self.written: dict[Value, int] = {}  # its byte
        self.pins: dict[Value, int] = {}
        self.keys: dict[bytes, Value] = {}
        self.stamp = 0

    def _write(self, value: Value) -> None:
        self.stamp += 1
        self.written[value] = self.stamp % 251
        assert value.offset >= 0 and value.offset + value.length <= len(self.memory)
        self.memory[value.offset : value.offset + value.length] = bytes([self.written[value]]) * value.length

    def _settle(self) -> None:
        """Forgets what was evicted: only what nobody has pinned."""
        for key, value in list(self.keys.items()):
            if self.arena.find(key) is not value:
                assert not self.pins.get(value), "a pinned value was evicted"
                del self.keys[key]

    @rule(pages=st.integers(1, 9), short=st.integers(0, GRAIN - 1))
    def allocate(self, pages: int, short: int) -> None:
        value = self.arena.allocate(pages * GRAIN - short)
        self._settle()
        if value is None:
            taken = {page for each in self.pins for page in range(each.offset // GRAIN, each.end // GRAIN)}
            free = [page not in taken for page in range(20)]
            runs = "".join(".x"[not one] for one in free).split("x")
            assert max(map(len, runs)) < pages, "there was room beside what is pinned"
            return
        self.pins[value] = 1
        self._write(value)

    @rule(key=st.sampled_from(KEYS), pages=st.integers(1, 4))
    def put(self, key: bytes, pages: int) -> None:
        value = put(self.arena, key, pages * GRAIN)
        if value is not None:
            self.keys[key] = value
            self._write(value)
        self._settle()

    @precondition(lambda self: any(value.key is None for value in self.pins))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        value = data.draw(st.sampled_from([value for value in self.pins if value not in self.keys.values()] or [None]))
        key = data.draw(st.sampled_from(KEYS))
        if value is None or value.key is not None:
            return
        self.arena.publish(key, value)
        self.keys[key] = value

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if self.keys:
            value = self.keys[data.draw(st.sampled_from(sorted(self.keys)))]
            self.arena.pin(value)
            self.pins[value] = self.pins.get(value, 0) + 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            value = data.draw(st.sampled_from(sorted(self.pins, key=lambda each: each.offset)))
            self.arena.unpin([value])
            self.pins[value] -= 1
            if not self.pins[value]:
                del self.pins[value]

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: bytes) -> None:
        self.arena.drop(key)
        self.keys.pop(key, None)

    @rule(some=st.lists(st.sampled_from(KEYS)))
    def touch(self, some: list[bytes]) -> None:
        self.arena.touch(some)

    @rule()
    def clear(self) -> None:
        self.arena.clear()
        self.keys.clear()

    @invariant()
    def the_bytes_of_every_value_are_its_own(self) -> None:
        self.arena.check()
        assert {key: self.arena.find(key) for key in self.keys} == self.keys
        assert len(self.arena) == len(self.keys)
        live = {*self.keys.values(), *self.pins}
        assert self.arena.used == sum(value.end - value.offset for value in live)
        assert self.arena.pinned == len(self.pins)
        for value in live:
            wanted = bytes([self.written[value]]) * value.length
            assert self.memory[value.offset : value.offset + value.length] == wanted, "another value's bytes"


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=25, stateful_step_count=60, deadline=None)


def test_values_of_one_size_leave_in_the_order_of_their_last_use() -> None:
    rng = random.Random(7)
    arena, order = Arena(8 * GRAIN), list[bytes]()
    for _ in range(500):
        key = rng.choice(KEYS)
        if arena.find(key) is not None:
            arena.touch([key])
        else:
            assert put(arena, key) is not None
        order = [each for each in order if each != key] + [key]
        order = order[-8:] if len(order) > 8 else order
        assert sorted(held(arena)) == sorted(order)
    assert arena.evicted


def test_of_values_used_together_the_last_of_a_chain_leaves_first() -> None:
    arena = Arena(4 * GRAIN)
    values = [arena.allocate(GRAIN) for _ in range(4)]
    for key, value in zip(KEYS, values, strict=False):
        assert value is not None
        arena.publish(key, value)
    arena.unpin([value for value in values if value is not None])
    put(arena, KEYS[10])
    assert held(arena) == [*KEYS[:3], KEYS[10]]
    arena.touch(KEYS[:3])
    put(arena, KEYS[11])
    put(arena, KEYS[10])
    assert held(arena) == [*KEYS[:2], *KEYS[10:]], "first what was not touched, then the end of the chain"


def test_a_large_value_replaces_neighbours_and_leaves_the_rest() -> None:
    arena = Arena(10 * GRAIN)
    for key in KEYS[:10]:
        put(arena, key)
    arena.touch(KEYS[:2])
    assert put(arena, KEYS[11], 4 * GRAIN) is not None
    assert held(arena) == [*KEYS[:2], *KEYS[6:10], KEYS[11]]
    assert arena.evicted == 4


def test_what_is_pinned_is_not_evicted_for_its_neighbours() -> None:
    arena = Arena(4 * GRAIN)
    for key in KEYS[:4]:
        put(arena, key)
    pinned = arena.find(KEYS[1])
    assert pinned is not None
    arena.pin(pinned)
    assert put(arena, KEYS[5], 2 * GRAIN) is not None
    assert held(arena) == [KEYS[1], KEYS[5]]
    assert arena.allocate(3 * GRAIN) is None
    assert held(arena) == [KEYS[1]]
    arena.check()


def test_a_value_that_cannot_fit_beside_what_is_pinned_evicts_little() -> None:
    arena = Arena(64 * GRAIN)
    names = [at.to_bytes(32, "big") for at in range(64)]
    for name in names:
        put(arena, name)
    pinned = [value for name in names[3::4] if (value := arena.find(name)) is not None]
    for value in pinned:
        arena.pin(value)
    assert arena.allocate(4 * GRAIN) is None
    assert 0 < arena.evicted <= 12
    arena.unpin(pinned[-1:])
    assert arena.allocate(4 * GRAIN) is not None
    arena.check()


@pytest.mark.parametrize("length", [4 * GRAIN + 1, 1 << 62])
def test_a_value_larger_than_the_arena_evicts_nothing(length: int) -> None:
    arena = Arena(4 * GRAIN)
    put(arena, KEYS[0])
    assert arena.allocate(length) is None
    assert held(arena) == KEYS[:1]


def test_a_value_that_is_replaced_stays_where_it_is_for_those_who_read_it() -> None:
    arena = Arena(4 * GRAIN)
    old = put(arena, KEYS[0])
    assert old is not None
    arena.pin(old)
    new = put(arena, KEYS[0])
    assert new is not None and new.offset != old.offset
    assert arena.find(KEYS[0]) is new
    assert arena.used == 2 * GRAIN
    arena.unpin([old])
    assert arena.used == GRAIN
    arena.check()
