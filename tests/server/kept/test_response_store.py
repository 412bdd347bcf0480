"""The store of responses: for their owner only, for a bounded time, within a bounded memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rigs.hand_driven import Clock

from mainstem.server.kept.response_store import ENTRY_BYTES, Kept, Owner, ResponseStore

TTL_S = 10.0
ROOM = 4 * ENTRY_BYTES
OWNERS: list[Owner] = [None, b"one", b"two"]


def kept(size: int = 2, mark: str = "x") -> Kept:
    return Kept(mark.encode() * (size // 2), b"y" * (size - size // 2))


class Store(RuleBasedStateMachine):
    """Compares with a list of entries in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = ResponseStore(ROOM, TTL_S, self.clock)
        self.entries: list[tuple[float, Owner, str, Kept]] = []
        self.owners: list[Owner] = []  # with entries, in the order in which they came to have some
        self.used = 0

    def _keep(self, entries: list[tuple[float, Owner, str, Kept]]) -> None:
        self.entries = entries
        present = {each[1] for each in entries}
        self.owners = [owner for owner in self.owners if owner in present]
        self.owners += [owner for owner in OWNERS if owner in present and owner not in self.owners]

    def _size(self, owner: Any = Ellipsis) -> int:
        return sum(each[3].size for each in self.entries if owner in (Ellipsis, each[1]))

    @rule(owner=st.sampled_from(OWNERS), size=st.integers(0, ROOM + 10))
    def put(self, owner: Owner, size: int) -> None:
        id = f"id-{self.used}"
        self.used += 1
        new = kept(size, str(self.used % 10))
        self.store.put(owner, id, new)
        if new.size > ROOM:
            return
        self._keep([*self.entries, (self.clock.now_s + TTL_S, owner, id, new)])
        self._shrink()

    def _shrink(self) -> None:
        while self._size() > ROOM:
            largest = max(self.owners, key=self._size)
            oldest = next(each for each in self.entries if each[1] == largest)
            self._keep([each for each in self.entries if each is not oldest])

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), owner=st.sampled_from(OWNERS), size=st.integers(0, ROOM + 10))
    def replace(self, data: st.DataObject, owner: Owner, size: int) -> None:
        """The new one has the place and the time of the old one."""
        entry = data.draw(st.sampled_from(self.entries))
        new = kept(size, "z")
        self.store.replace(owner, entry[2], new)
        if entry[1] == owner:
            self._keep([(*entry[:3], new) if each is entry else each for each in self.entries])
            self._shrink()

    @rule(seconds=st.floats(0, TTL_S))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self._keep([each for each in self.entries if each[0] > self.clock.now_s])

    @rule(owner=st.sampled_from(OWNERS), number=st.integers(0, 20))
    def get(self, owner: Owner, number: int) -> None:
        found = [each[3] for each in self.entries if each[1:3] == (owner, f"id-{number}")]
        assert self.store.get(owner, f"id-{number}") == (found[0] if found else None)

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def delete(self, data: st.DataObject, owner: Owner) -> None:
        entry = data.draw(st.sampled_from(self.entries))
        mine = entry[1] == owner
        assert self.store.delete(owner, entry[2]) == mine
        if mine:
            self._keep([each for each in self.entries if each is not entry])
            assert not self.store.delete(owner, entry[2])

    @invariant()
    def holds_what_it_should(self) -> None:
        self.store.check()
        assert self.store.size == self._size() <= ROOM
        for owner in OWNERS:
            assert self.store.entries(owner) == [each[2:] for each in self.entries if each[1] == owner]
        for _, owner, id, value in self.entries:
            assert self.store.find(id) == value
            for other in OWNERS:
                assert other == owner or self.store.get(other, id) is None


TestStore = Store.TestCase


def test_an_entry_counts_half_a_kilobyte_besides_its_content() -> None:
    store = ResponseStore(2 * (512 + 10), TTL_S, Clock())
    for number in range(3):
        store.put(None, f"{number}", kept(10))
    assert [id for id, _ in store.entries(None)] == ["1", "2"] and store.size == 2 * (512 + 10)
    store.replace(None, "1", kept(11))  # one byte too many
    assert [id for id, _ in store.entries(None)] == ["2"] and store.size == 512 + 10
    store.put(None, "3", kept(2 * (512 + 10) - 512))  # all that there is
    assert [id for id, _ in store.entries(None)] == ["3"]
    store.put(None, "4", kept(2 * (512 + 10) - 511))
    assert [id for id, _ in store.entries(None)] == ["3"]


@pytest.mark.parametrize(("after_s", "there"), [(9.999, True), (10.0, False), (10_000.0, False)])
def test_what_has_expired_leaves_no_bytes(after_s: float, there: bool) -> None:
    clock = Clock()
    store = ResponseStore(ROOM, TTL_S, clock)
    store.put(b"one", "id", kept(10))
    store.replace(b"one", "id", kept(20))  # which does not renew its time
    clock.now_s += after_s
    for _ in range(2):
        assert (store.get(b"one", "id") is not None) == there == (store.find("id") is not None)
        assert store.size == there * (ENTRY_BYTES + 20)
    clock.now_s += 1000 * TTL_S
    assert store.size == 0
    store.put(b"one", "id", kept(10))
    assert store.size == ENTRY_BYTES + 10


def test_threads_share_it() -> None:
    store = ResponseStore(20 * ENTRY_BYTES, TTL_S, Clock())

    def use(owner: bytes) -> None:
        for number in range(300):
            id = f"{owner.decode()}-{number}"
            store.put(owner, id, kept(number % 40))
            store.get(owner, id)
            if number % 3 == 0:
                store.delete(owner, id)

    threads = [threading.Thread(target=use, args=(name,)) for name in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < store.size <= 20 * ENTRY_BYTES
    left = [f"{name}-{number}" for name in "abc" for number in range(300)]
    for id in left:
        store.delete(id[0].encode(), id)
    assert store.size == 0
