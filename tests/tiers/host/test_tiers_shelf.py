"""The shelf: what a peer is given is the value of its key, whatever becomes of the page meanwhile."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from rigs.hand_driven import FaultyBackend, HandWorkers, make_store

from mainstem.errors import StorageError
from mainstem.storage.base import ABSENT
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.host.shelf import AndStore, HostOnly, Shelf
from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.sealer import HEADER_BYTES
from mainstem.tiers.storage.store import Part, Store

T = TypeVar("T")
KEYS = [bytes([number]) * 32 for number in range(6)]
ROW = Row(0, "full", exact=False)
SIZE = HEADER_BYTES + 8
SYMBOLS = b"aaaabbbbcccc"


def new_slots(n: int, byte: int = 1) -> list[memoryview]:
    memory = memoryview(bytearray(n * 256))
    slots = [memory[at * 256 : at * 256 + HEADER_BYTES + 8] for at in range(n)]
    for number, slot in enumerate(slots):
        slot[:] = bytes([byte + number]) * len(slot)
    return slots


def test_a_slot_is_given_until_it_is_forgotten() -> None:
    shelf, slots = Shelf(), new_slots(3)
    shelf.place(zip(KEYS, slots, strict=False))
    assert shelf.lengths(KEYS) == [len(slots[0])] * 3 + [ABSENT] * 3
    assert shelf.copy(KEYS[1], SIZE) == slots[1]
    shelf.forget(slots[1:2])
    assert (shelf.copy(KEYS[1], SIZE), shelf.lengths(KEYS[1:2]), len(shelf)) == (None, [ABSENT], 2)
    shelf.forget(slots)
    assert not len(shelf)


def test_a_slot_has_one_value_and_a_value_one_slot() -> None:
    shelf, slots = Shelf(), new_slots(2)
    shelf.place([(KEYS[0], slots[0]), (KEYS[1], slots[0])])  # another page took its place
    assert (shelf.copy(KEYS[0], SIZE), shelf.copy(KEYS[1], SIZE)) == (None, slots[0])
    shelf.place([(KEYS[1], slots[1])])
    shelf.forget(slots[:1])  # which does not hold it any more
    assert shelf.copy(KEYS[1], SIZE) == slots[1]
    shelf.forget(slots[1:])
    assert not len(shelf)


def test_what_is_freed_while_it_is_copied_is_not_given() -> None:
    shelf, slots = Shelf(), new_slots(1)

    class Freed(dict[bytes, memoryview]):
        """Frees the page once its slot has been looked up."""

        def get(self, key: bytes, default: object = None) -> object:  # type: ignore[override]
            found = super().get(key)
            self.get = super().get  # type: ignore[method-assign, assignment]
            shelf.forget(slots)
            return found

    shelf.place([(KEYS[0], slots[0])])
    shelf._slots = Freed(shelf._slots)
    assert shelf.copy(KEYS[0], SIZE) is None


def test_a_removed_value_is_given_no_more() -> None:
    shelf, slots = Shelf(), new_slots(2)
    shelf.place(zip(KEYS, slots, strict=False))
    shelf.remove([KEYS[0], KEYS[5]])
    assert [key in shelf for key in KEYS[:2]] == [False, True]


def test_closing_ends_what_gives() -> None:
    class Server:
        closed = False
        counts: ClassVar[dict[str, int]] = {"answered": 1}

        def close(self) -> None:
            self.closed = True

    shelf = Shelf()
    shelf.close()
    assert not shelf.counts
    shelf.server = server = Server()
    assert shelf.counts == {"answered": 1}
    shelf.close()
    assert server.closed


# ---------------------------------------------------------------- without a store


def test_without_a_store_pages_are_where_they_are_and_notes_are_kept() -> None:
    shelf, slots = Shelf(), new_slots(1)
    backend = HostOnly(shelf)
    shelf.place([(KEYS[0], slots[0])])
    note = memoryview(bytearray(b"a note"))
    assert backend.put(KEYS[:2], [slots[0], note]) == [True, True]
    assert backend.stats().entries == 1  # the page is not copied
    assert backend.exists(KEYS[:3]) == [True, True, False]
    buffers = [memoryview(bytearray(size)) for size in (len(slots[0]), 6, 6)]
    assert backend.get(KEYS[:3], buffers) == [len(slots[0]), 6, ABSENT]
    assert (buffers[0], buffers[1]) == (slots[0], note)
    backend.delete(KEYS[:2])
    assert backend.exists(KEYS[:2]) == [False, False]


def test_another_length_is_said_and_not_read() -> None:
    shelf, slots = Shelf(), new_slots(1)
    shelf.place([(KEYS[0], slots[0])])
    short = memoryview(bytearray(9))
    assert HostOnly(shelf).get(KEYS[:1], [short]) == [SIZE]
    assert not any(short)
    assert shelf.copy(KEYS[0], 9) is None


def test_what_only_the_store_has_is_given_from_there() -> None:
    shelf, slots, store = Shelf(), new_slots(2), FaultyBackend()
    source = AndStore(shelf, store)
    shelf.place([(KEYS[0], slots[0])])
    store.put([KEYS[1]], [slots[1]])
    assert source.lengths(KEYS[:3]) == [SIZE, SIZE, ABSENT]
    assert [source.copy(key, SIZE) for key in KEYS[:3]] == [slots[0], slots[1], None]
    for fault in (StorageError("io", "gone"), ValueError("a bug")):
        store.always = fault
        assert source.lengths(KEYS[:3]) == [SIZE, ABSENT, ABSENT]
        assert [source.copy(key, SIZE) for key in KEYS[:2]] == [slots[0], None]


# ---------------------------------------------------------------- a store with a shelf, and with peers


def done(call: StoreCall[T]) -> T:
    assert call.done()
    return call.value


def stores() -> tuple[Store, Store, Shelf, FaultyBackend]:
    """Two stores: what one has on its shelf the other one's peers have."""
    shelf, backend = Shelf(), FaultyBackend()
    first = make_store(backend)
    workers = HandWorkers(instant=True)
    made = [
        Store(each, first.sealer, first.config, readers=workers, writers=workers, clock=first.clock, **options)
        for each, options in ((backend, {"shelf": shelf}), (FaultyBackend(), {"peers": FromShelf(shelf)}))
    ]
    return made[0], made[1], shelf, backend


class FromShelf(MemoryBackend):
    """What is on a shelf, as peers would have it."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self.inner = HostOnly(shelf)
        self.fault: Exception | None = None

    def exists(self, keys):  # type: ignore[no-untyped-def]
        if self.fault is not None:
            raise self.fault
        return self.inner.exists(keys)

    def get(self, keys, buffers):  # type: ignore[no-untyped-def]
        if self.fault is not None:
            raise self.fault
        return self.inner.get(keys, buffers)


def names_of(store: Store) -> list[bytes]:
    return store.sealer.names(store.sealer.root(b""), SYMBOLS, 4)


def test_what_is_written_is_on_the_shelf_and_what_was_stored_before_too() -> None:
    first, second, shelf, _ = stores()
    slots = new_slots(3)
    assert done(first.write([Part(ROW, names_of(first), slots)])).pages == 3
    assert len(shelf) == 3
    shelf.forget(slots)
    again = new_slots(3)
    assert done(first.write([Part(ROW, names_of(first), again)])).pages == 0  # the store has them
    assert len(shelf) == 3
    room = new_slots(3, byte=100)
    assert done(second.read(ROW, names_of(second), room)) == 3
    assert [slot[HEADER_BYTES:] for slot in room] == [slot[HEADER_BYTES:] for slot in again]


def test_what_is_read_is_on_the_shelf_once_it_is_verified() -> None:
    first, _, shelf, backend = stores()
    done(first.write([Part(ROW, names_of(first), new_slots(3))]))
    shelf.remove(list(first.sealer.keys(names_of(first), "full")))
    keys = first.sealer.keys(names_of(first), "full")
    backend.set_value(keys[2], bytes(len(backend.value(keys[2]))))
    assert done(first.read(ROW, names_of(first), new_slots(3, byte=50))) == 2
    assert [key in shelf for key in keys] == [True, True, False]


def test_lookups_and_reads_ask_peers_for_what_the_store_lacks_and_writes_do_not() -> None:
    first, second, *_ = stores()
    slots = new_slots(3)
    done(first.write([Part(ROW, names_of(first), slots)]))
    asked = [(ROW, range(3))]
    assert done(second.look_up(second.sealer.root(b""), SYMBOLS, 4, asked)).there == [[True] * 3]
    written = done(second.write([Part(ROW, names_of(second)[:1], new_slots(1))]))
    assert written.pages == 1  # its own store gets it nevertheless
    assert done(second.read(ROW, names_of(second), new_slots(3, byte=9))) == 3


def test_what_is_read_alone_is_not_of_peers_and_not_given_to_them() -> None:
    first, second, shelf, _ = stores()
    slots = new_slots(3)
    done(first.write([Part(ROW, names_of(first), slots)]))
    done(second.write([Part(ROW, names_of(second)[:1], new_slots(1))]))
    assert done(second.find([(ROW, names_of(second))], alone=True)) == [[True, False, False]]
    assert done(second.read(ROW, names_of(second), new_slots(3, byte=9), alone=True)) == 1
    apart = new_slots(3, byte=50)
    assert done(first.read(ROW, names_of(first), apart, alone=True)) == 3
    apart[0][-1] ^= 1
    key = first.sealer.keys(names_of(first), "full")[0]
    assert shelf.copy(key, SIZE) == slots[0]


def test_a_store_that_fails_does_not_keep_peers_from_answering() -> None:
    first, second, *_ = stores()
    done(first.write([Part(ROW, names_of(first), new_slots(3))]))
    assert isinstance(second.backend, FaultyBackend)
    second.backend.always = StorageError("unreachable", "gone")
    assert done(second.read(ROW, names_of(second), new_slots(3, byte=9))) == 3
    assert not second.faults
    other = second.sealer.names(second.sealer.root(b"other"), SYMBOLS, 4)
    assert done(second.read(ROW, other, new_slots(3))) == 0
    assert second.faults == {"unreachable": 1}


def test_peers_that_fail_are_a_miss() -> None:
    first, second, *_ = stores()
    done(first.write([Part(ROW, names_of(first), new_slots(3))]))
    done(second.write([Part(ROW, names_of(second)[:1], new_slots(1))]))
    peers = FromShelf(Shelf())
    peers.fault = StorageError("timeout", "late")
    workers = HandWorkers(instant=True)
    alone = Store(
        second.backend, second.sealer, second.config, readers=workers, writers=workers, clock=second.clock, peers=peers
    )
    assert done(alone.find([(ROW, names_of(second))])) == [[True, False, False]]
    assert done(alone.read(ROW, names_of(second), new_slots(3))) == 1
