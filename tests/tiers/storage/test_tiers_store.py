"""`Store` and its breaker: whatever a back end does, a call ends with a valid value, and faults are counted."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from rigs.hand_driven import Clock, FaultyBackend, HandWorkers, make_store
from rigs.stores import WriteOnce

from mainstem.errors import BadArgument, StorageError
from mainstem.settings.engine import StorageConfig
from mainstem.storage.base import ABSENT, Limit
from mainstem.storage.breaker import Breaker
from mainstem.storage.memory import MemoryBackend
from mainstem.storage.wrappers import ReadOnly, Tee
from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.codecs import CODECS, UNPLACED, Int8, Page
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.sealer import HEADER_BYTES
from mainstem.tiers.storage.store import Found, Part, Store, Written

PAGE = 4  # bytes of symbols
SYMBOLS = b"aaaabbbbccccdddd"
SLOT = HEADER_BYTES + 8
FULL, STATE = Row(0, "full", exact=False), Row(1, "state", exact=True)


@pytest.fixture
def backend() -> FaultyBackend:
    return FaultyBackend()


@pytest.fixture
def store(backend: FaultyBackend) -> Store:
    return make_store(backend)


def new_slots(n: int, byte: int = 0) -> list[memoryview]:
    return [memoryview(bytearray(HEADER_BYTES) + bytes([byte + page]) * 8) for page in range(n)]


def contents(slots: Sequence[memoryview]) -> list[bytes]:
    return [bytes(slot[HEADER_BYTES:]) for slot in slots]


def names_of(store: Store, symbols: bytes = SYMBOLS, namespace: bytes = b"") -> list[bytes]:
    return store.sealer.names(store.sealer.root(namespace), symbols, PAGE)


def keys_of(store: Store, symbols: bytes = SYMBOLS) -> list[bytes]:
    return store.sealer.keys(names_of(store, symbols), "full")


def look_up(store: Store, have: int = 0, symbols: bytes = SYMBOLS, namespace: bytes = b"") -> StoreCall[Found]:
    """Looks up the pages after the first `have`."""
    parent = [store.sealer.root(namespace), *names_of(store, symbols, namespace)][have]
    pages = range(len(symbols) // PAGE - have)
    return store.look_up(parent, symbols[have * PAGE :], PAGE, [(FULL, pages)])


def found(call: StoreCall[Found]) -> list[bytes]:
    """Returns the names of the pages that a lookup has found."""
    value = done(call)
    return [name for name, there in zip(value.names, *value.there, strict=True) if there]


def read(store: Store, slots: Sequence[memoryview]) -> StoreCall[int]:
    return store.read(FULL, names_of(store), slots)


def write(store: Store, slots: Sequence[memoryview], begin: int = 0, symbols: bytes = SYMBOLS) -> StoreCall[Written]:
    names = names_of(store, symbols)
    return store.write([Part(FULL, names[begin:], slots)], (FULL, names[begin - 1]) if begin else None)


def fill(store: Store, symbols: bytes = SYMBOLS, begin: int = 0) -> Written:
    call = write(store, new_slots(len(symbols) // PAGE - begin, begin), begin, symbols)
    assert call.done()
    return call.value


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefetch", "never"),
        ("max_prefetches", 0),
        ("batch_pages", 0),
        ("batches", -1),
        ("queue_pages", 1.5),
        ("writes", True),
        ("breaker_failures", 0),
        ("prefetch_min_tokens", -1),
        ("prefetch_timeout_s", -0.1),
        ("prefetch_timeout_per_page_s", float("nan")),
        ("call_timeout_s", float("inf")),
        ("breaker_cooldown_s", "5"),
        ("prefetch_host_share", 0),
        ("prefetch_host_share", 1.1),
        ("prefetch_host_share", float("nan")),
        ("prefetch_host_share", None),
    ],
)
def test_a_limit_outside_its_range_is_rejected_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadArgument) as caught:
        StorageConfig(**{name: value})
    assert caught.value.name == name


def test_limits_may_be_at_the_ends_of_their_ranges() -> None:
    StorageConfig(
        prefetch_min_tokens=0,
        prefetch_timeout_s=0,
        prefetch_timeout_per_page_s=0,
        call_timeout_s=1e-9,
        prefetch_host_share=1,
    )


# ---------------------------------------------------------------- the breaker


@pytest.mark.parametrize(
    ("failures", "script", "answers", "openings"),
    [
        pytest.param(3, "ffs ffs ff? f?", "yn", 1, id="consecutive failures open it"),
        pytest.param(1, "f wwww? w??", "nyn", 1, id="after the cool-down one call at a time is tried"),
        pytest.param(2, "ff wwwww? s??? f?", "yyyyy", 1, id="a try that succeeds closes it, and the count begins anew"),
        pytest.param(1, "f wwwww?f? wwww? w?f? wwww?", "ynnynn", 1, id="a try that fails is another cool-down"),
        pytest.param(1, "f wwwww?r? f?", "yyn", 1, id="a try that was given up says nothing"),
        pytest.param(1, "f wwwww?s f wwwww?s f?", "yyn", 3, id="each opening is counted"),
    ],
)
def test_a_breaker_stops_calls_to_what_fails(failures: int, script: str, answers: str, openings: int) -> None:
    """f: a call fails, s: succeeds, r: is given up; w: a second of the 5 s of cool-down passes; ?: is a call allowed"""
    clock = Clock()
    breaker = Breaker(failures, 5.0, clock)
    said = ""
    for event in script.replace(" ", ""):
        clock.now_s += event == "w"
        if event == "?":
            said += "y" if breaker.allow() else "n"
        elif event != "w":
            {"f": breaker.fail, "s": breaker.succeed, "r": breaker.release}[event]()
    assert (said, breaker.openings) == (answers, openings)
    assert breaker.open == (answers[-1] == "n")


# ---------------------------------------------------------------- look up, read and write


def test_pages_are_found_and_read_as_they_were_written(store: Store) -> None:
    assert fill(store) == Written(4, gap=False)
    assert found(look_up(store)) == names_of(store)
    assert found(look_up(store, 3)) == names_of(store)[3:]
    slots = new_slots(4, 100)
    call = read(store, slots)
    assert call.done() and call.value == 4
    assert contents(slots) == contents(new_slots(4))
    assert not store.faults


def test_pages_are_found_by_their_names_in_one_call(backend: FaultyBackend, store: Store) -> None:
    fill(store)
    names, strange = names_of(store), names_of(store, b"else")
    backend.calls.clear()
    there = done(store.find([(FULL, [names[3], *strange, names[0]]), (STATE, names[:1])]))
    assert there == [[True, False, True], [False]]
    assert backend.calls == ["exists"]
    backend.always = StorageError("unreachable", "no")
    assert done(store.find([(FULL, names), (STATE, names[:1])])) == [[False] * 4, [False]]


def test_a_lookup_begins_after_its_parent_and_says_which_pages_are_there(backend: FaultyBackend, store: Store) -> None:
    fill(store)
    names = names_of(store)
    assert found(look_up(store, 1)) == names[1:]
    assert found(look_up(store, 0, SYMBOLS + b"xxxx")) == names
    assert found(look_up(store, 0, SYMBOLS, b"other")) == []
    backend.delete([keys_of(store)[2]])
    assert found(look_up(store)) == [*names[:2], names[3]]
    assert found(look_up(store, 2)) == names[3:]
    assert found(look_up(store, 0, b"")) == []
    assert not store.faults, "finding nothing is not a fault"


def done(call: StoreCall[Any]) -> Any:
    assert call.done()
    return call.value


def test_nothing_is_stored_after_a_gap(backend: FaultyBackend, store: Store) -> None:
    assert fill(store, begin=2) == Written(0, gap=True, whole=False)
    assert backend.stored_keys() == []
    assert fill(store, SYMBOLS[:8]) == Written(2, gap=False)
    assert fill(store, begin=2) == Written(2, gap=False)
    assert len(backend.stored_keys()) == 4
    assert done(read(store, new_slots(4, 100))) == 4


def test_stored_pages_are_not_written_again(backend: FaultyBackend, store: Store) -> None:
    fill(store, SYMBOLS[:8])
    before = {key: backend.value(key) for key in backend.stored_keys()}
    assert fill(store) == Written(2, gap=False)
    assert {key: backend.value(key) for key in before} == before
    assert fill(store) == Written(0, gap=False)
    assert backend.calls.count("put") == 2


def test_a_row_whose_values_the_store_never_takes_is_named_once_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    class Short(MemoryBackend):
        longest = Limit(5 << 20, "its option slot raises that")

    limited = (Short(), ReadOnly(ReadOnly(Short())), Tee(Short(), Short()))
    for backend in (*limited, MemoryBackend(), Tee(Short(), MemoryBackend())):
        store = make_store(backend)
        store.check_length(FULL, (5 << 20) - HEADER_BYTES)
        assert not caplog.messages
        store.check_length(STATE, (5 << 20) - HEADER_BYTES + 1)
        said = "storage: state is never stored: a value has 5242881 bytes, and the store takes up to 5242880: "
        assert caplog.messages == [said + "its option slot raises that"] * (backend in limited)
        caplog.clear()


def test_pages_are_written_in_batches() -> None:
    sizes: list[int] = []
    backend = FaultyBackend()
    store = make_store(backend, batch_pages=3)
    backend.instead["put"] = lambda keys, slots: sizes.append(len(keys)) or [True] * len(keys)  # type: ignore[func-returns-value]
    assert fill(store) == Written(4, gap=False)
    assert sizes == [3, 1]


def test_a_full_store_ends_a_write() -> None:
    backend = FaultyBackend()
    store = make_store(backend, batch_pages=2)
    backend.instead["put"] = lambda keys, slots: [True, False]
    assert fill(store) == Written(1, gap=False, whole=False)
    assert store.faults == {"full": 1}
    assert backend.calls.count("put") == 1
    assert not store.breaker.open


# ---------------------------------------------------------------- damaged pages


DAMAGES = ["absent", "altered", "length", "misdirected"]


def damage(backend: FaultyBackend, key: bytes, how: str, other: bytes) -> None:
    value = bytearray(backend.value(key))
    if how == "absent":
        backend.delete([key])
        return
    if how == "altered":
        value[-1] ^= 1
    elif how == "length":
        value = value[:-1]
    elif how == "misdirected":
        value = bytearray(backend.value(other))
    backend.set_value(key, bytes(value))


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("at", range(4))
def test_pages_count_up_to_the_first_damaged_one(backend: FaultyBackend, store: Store, how: str, at: int) -> None:
    fill(store)
    keys = keys_of(store)
    damage(backend, keys[at], how, keys[at - 1])
    backend.calls.clear()
    assert done(read(store, new_slots(4, 100))) == at
    assert backend.calls.count("delete") == (how != "absent")
    assert store.faults == {how: 1}
    assert not store.breaker.open


@pytest.mark.parametrize("how", DAMAGES[1:])
def test_a_damaged_page_is_deleted_so_that_an_intact_one_can_be_stored(
    backend: FaultyBackend, store: Store, how: str
) -> None:
    fill(store)
    keys = keys_of(store)
    good = backend.value(keys[2])
    damage(backend, keys[2], how, keys[0])
    done(read(store, new_slots(4, 100)))
    assert backend.exists(keys) == [True, True, False, True]
    assert fill(store).pages > 0
    assert backend.value(keys[2]) == good
    assert done(read(store, new_slots(4, 100))) == 4


@pytest.mark.parametrize("error", [StorageError("refused", "read-only"), RuntimeError("a bug"), Exception()])
def test_pages_before_one_that_cannot_be_deleted_still_count(
    backend: FaultyBackend, store: Store, error: Exception
) -> None:
    fill(store)
    keys = keys_of(store)
    damage(backend, keys[2], "altered", keys[0])
    backend.instead["delete"] = error
    assert done(read(store, new_slots(4, 100))) == 2
    assert store.faults["altered"] == 1


@pytest.mark.parametrize("length", [0, 1, SLOT - 1, SLOT + 1, -2, 2**70, None, "8", 1.5])
def test_a_wrong_length_is_a_miss(backend: FaultyBackend, store: Store, length: Any) -> None:
    fill(store)
    backend.instead["get"] = lambda keys, slots: [length] * len(keys)
    assert done(read(store, new_slots(4))) == 0
    assert store.faults == {"length": 1}


def test_a_read_that_the_back_end_did_not_make_fails_verification(backend: FaultyBackend, store: Store) -> None:
    backend.instead["get"] = lambda keys, slots: [len(slot) for slot in slots]
    assert done(read(store, new_slots(4))) == 0
    assert store.faults == {"altered": 1}


# ---------------------------------------------------------------- codecs


def coded(backend: MemoryBackend, codec: str) -> Store:
    plain = make_store(backend, identity={"quantization": codec})
    workers = HandWorkers(instant=True)
    return Store(
        backend, plain.sealer, plain.config, readers=workers, writers=workers, clock=Clock(),
        codec=CODECS[codec], dtype="float16",
    )  # fmt: skip


def float_slots(*pages: Sequence[float]) -> list[memoryview]:
    return [memoryview(bytearray(HEADER_BYTES) + np.array(page, np.float16).tobytes()) for page in pages]


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_pages_go_through_a_codec_and_back(codec: str) -> None:
    backend = FaultyBackend()
    store = coded(backend, codec)
    pages = [[float(page + 1)] * 100 for page in range(4)]
    assert done(write(store, float_slots(*pages))) == Written(4, gap=False)
    keys = keys_of(store)
    size = HEADER_BYTES + CODECS[codec].encoded_bytes(200, "float16")
    assert [len(backend.value(key)) for key in keys] == [size] * 4
    slots = float_slots(*[[0.0] * 100] * 4)
    assert done(read(store, slots)) == 4
    for slot, page in zip(slots, pages, strict=True):
        np.testing.assert_allclose(np.frombuffer(slot[HEADER_BYTES:], np.float16), page, rtol=0.07)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_no_page_is_decoded_before_it_is_verified(codec: str) -> None:
    backend = FaultyBackend()
    store = coded(backend, codec)
    done(write(store, float_slots(*[[1.0] * 100] * 4)))
    keys = keys_of(store)
    for bit in range(0, 8 * len(backend.value(keys[1])), 7):
        whole = backend.value(keys[1])
        value = bytearray(whole)
        value[bit // 8] ^= 1 << bit % 8
        backend.set_value(keys[1], bytes(value))
        assert done(read(store, float_slots(*[[0.0] * 100] * 4))) == 1
        backend.set_value(keys[1], whole)


class _Noting(Int8):
    """Notes which pages it encodes, and decodes none that begins with a zero."""

    def __init__(self) -> None:
        self.pages: list[Page] = []

    def encode(self, payload: memoryview, out: memoryview, dtype: str, page: Page = UNPLACED) -> None:
        self.pages.append(page)
        super().encode(payload, out, dtype)

    def decode(self, data: memoryview, out: memoryview, dtype: str) -> None:
        if not any(data[:4]):
            raise BadArgument("data", "zeros", "others")
        super().decode(data, out, dtype)


def test_a_codec_learns_where_each_page_is_in_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = _Noting()
    monkeypatch.setitem(CODECS, "noting", codec)
    store = coded(FaultyBackend(), "noting")
    names, slots = names_of(store), float_slots(*[[1.0] * 8] * 4)
    done(store.write([Part(FULL, names[1:2], slots[1:2], numbers=[1])]))
    done(store.write([Part(FULL, names, slots, numbers=[0, 1, 2, 3])]))
    assert codec.pages == [Page("full", 1), Page("full", 0), Page("full", 2), Page("full", 3)], "one is stored already"


def test_a_sealed_page_that_does_not_decode_is_a_counted_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "noting", _Noting())
    store = coded(FaultyBackend(), "noting")
    done(write(store, float_slots([1.0] * 8, [0.0] * 8, [1.0] * 8, [1.0] * 8)))
    assert done(read(store, float_slots(*[[5.0] * 8] * 4))) == 1
    assert store.faults == {"codec": 1}


def test_an_exact_row_is_stored_as_it_is_whatever_the_codec() -> None:
    backend = FaultyBackend()
    store = coded(backend, "int8")
    names = names_of(store)[:2]
    states = float_slots(np.linspace(-1, 1, 100), [float("nan"), *[1e-6] * 99])
    before = contents(states)
    assert done(store.write([Part(STATE, names, states)])) == Written(2, gap=False)
    slots = float_slots(*[[0.0] * 100] * 2)
    assert done(store.read(STATE, names, slots)) == 2
    assert contents(slots) == before


def test_rows_of_one_page_are_values_of_their_own(backend: FaultyBackend, store: Store) -> None:
    names = names_of(store)
    larger = [memoryview(bytearray(HEADER_BYTES) + bytes([50 + page]) * 24) for page in range(2)]
    parts = [Part(FULL, names, new_slots(4)), Part(STATE, names[2:], larger)]
    assert done(store.write(parts)) == Written(6, gap=False)
    assert backend.calls.count("exists") == 1
    found = done(store.look_up(store.sealer.root(b""), SYMBOLS, PAGE, [(FULL, [0, 3]), (STATE, [0, 1, 2, 3])]))
    assert found == Found(names, [[True, True], [False, False, True, True]])
    assert backend.calls.count("exists") == 2
    slots = [memoryview(bytearray(HEADER_BYTES + 24)) for _ in range(2)]
    assert done(store.read(STATE, names[2:], slots)) == 2
    assert contents(slots) == contents(larger)
    assert done(store.read(STATE, names[:1], slots[:1])) == 0
    assert store.faults == {"absent": 1}
    done(store.delete([FULL, STATE], names[:3]))
    assert backend.stored_keys() == [keys_of(store)[3], *store.sealer.keys(names[3:], "state")]


def test_numbers_that_a_codec_cannot_encode_do_not_open_the_breaker() -> None:
    store = coded(FaultyBackend(), "int8")
    for _ in range(10):
        slots = float_slots([1.0] * 100, [float("nan")] * 100)
        assert done(write(store, slots, symbols=SYMBOLS[:8])).pages <= 1
    assert not store.breaker.open


# ---------------------------------------------------------------- calls that fail

MISSES: dict[str, tuple[Callable[[Store], StoreCall[Any]], Any]] = {
    "look_up": (lambda store: look_up(store), Found()),
    "read": (lambda store: read(store, new_slots(4, 100)), 0),
    "write": (lambda store: write(store, new_slots(4)), Written(0, gap=False, whole=False)),
    "write after a page": (lambda store: write(store, new_slots(2), 2), Written(0, gap=False, whole=False)),
    "keep_note": (lambda store: store.keep_note("n", b"content", 16), False),
    "find_note": (lambda store: store.find_note("n", 16), b""),
}


class Panic(BaseException):
    """Like the panic of a client in Rust: not an `Exception`."""


ERRORS: list[tuple[BaseException, str]] = [
    *((StorageError(cause, "on purpose"), cause) for cause in StorageError.CAUSES),
    (RuntimeError("a bug"), "crashed"),
    (MemoryError(), "crashed"),
    (RecursionError(), "crashed"),
    (StopIteration(), "crashed"),
    (AssertionError(), "crashed"),
    (SystemExit(1), "crashed"),
    (Panic("index out of range"), "crashed"),
]


@pytest.mark.parametrize(("error", "cause"), ERRORS, ids=lambda value: value if isinstance(value, str) else repr(value))
@pytest.mark.parametrize("call", MISSES)
def test_what_a_back_end_raises_is_a_miss(call: str, error: BaseException, cause: str) -> None:
    backend = FaultyBackend()
    store = make_store(backend, breaker_failures=2)
    begin, nothing = MISSES[call]
    backend.always = error
    assert done(begin(store)) == nothing
    assert store.faults == {cause: 1}
    assert not store.breaker.open
    assert done(begin(store)) == nothing
    assert store.faults == {cause: 2}
    assert store.breaker.open


def test_an_interrupt_does_not_count_as_a_fault(backend: FaultyBackend, store: Store) -> None:
    backend.always = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        look_up(store).done()


@pytest.mark.parametrize("lengths", [[], [SLOT] * 3, [SLOT] * 5, None, SLOT], ids=repr)
def test_a_wrong_number_of_lengths_makes_the_read_a_miss(backend: FaultyBackend, store: Store, lengths: Any) -> None:
    fill(store)

    def get(keys: Any, slots: Any) -> Any:
        for key, slot in zip(keys, slots, strict=True):
            slot[:] = backend.value(key)
        return lengths

    backend.instead["get"] = get
    assert done(read(store, new_slots(4, 100))) == 0
    assert store.faults == {"crashed": 1}


@pytest.mark.parametrize("results", [[], [True] * 3, [True] * 5, [False] * 5, None, True], ids=repr)
def test_a_wrong_number_of_results_makes_the_write_fail(backend: FaultyBackend, store: Store, results: Any) -> None:
    backend.instead["put"] = lambda keys, slots: results
    assert fill(store) == Written(0, gap=False, whole=False)
    assert store.faults == {"crashed": 1}


@pytest.mark.parametrize(
    "there", [[False] * 4, [False, True, True, True], [True, True, False, True], [True] * 4], ids=repr
)
def test_pages_that_are_there_are_found_and_the_others_are_written(
    backend: FaultyBackend, store: Store, there: list[bool]
) -> None:
    backend.instead["exists"] = lambda keys: there
    assert found(look_up(store)) == [name for name, held in zip(names_of(store), there, strict=True) if held]
    assert fill(store) == Written(4 - sum(there), gap=False)


@pytest.mark.parametrize("answer", [None, 4, 1.5, "4", "four", [], [True] * 3, [True] * 5], ids=repr)
def test_an_answer_that_is_not_one_for_each_page_is_a_miss(backend: FaultyBackend, store: Store, answer: Any) -> None:
    backend.instead["exists"] = lambda keys: answer
    assert done(look_up(store)) == Found()
    assert fill(store) == Written(0, gap=False, whole=False)
    assert store.faults == {"protocol": 2}


def test_each_cause_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = FaultyBackend()
    store = make_store(backend, breaker_failures=100)
    caplog.set_level(logging.WARNING, "mainstem.tiers.storage.calls")
    for cause in ("io", "io", "refused", "io", "refused"):
        backend.always = StorageError(cause, "on purpose")
        done(look_up(store))
    assert [record.message.split(";")[0] for record in caplog.records] == ["storage: io", "storage: refused"]
    assert store.faults == {"io": 3, "refused": 2}


# ---------------------------------------------------------------- calls that do not return


def test_a_call_is_not_done_before_it_has_run() -> None:
    workers = HandWorkers()
    store = make_store(MemoryBackend(), workers)
    call = look_up(store)
    assert not call.done() and call.value == Found()
    workers.run()
    assert found(call) == [] and call.value.names == names_of(store)


def test_a_call_over_its_deadline_has_failed_but_keeps_its_slots() -> None:
    workers, clock = HandWorkers(), Clock()
    store = make_store(MemoryBackend(), workers, clock, call_timeout_s=5.0, breaker_failures=2)
    call = read(store, new_slots(4))
    clock.now_s += 4.9
    assert not call.overdue() and not store.slow
    clock.now_s += 0.1
    assert call.overdue() and not call.done()
    assert store.slow and store.faults == {"timeout": 1}
    for _ in range(5):
        assert not call.done() and call.overdue()
    assert store.faults == {"timeout": 1}, "counted once"
    assert not store.breaker.open


@pytest.mark.parametrize("waits_s", [(1.0, 5.0), (5.0, 1.0)])
def test_a_store_is_slow_until_a_call_is_faster_than_every_wait_in_vain(
    store: Store, waits_s: tuple[float, float]
) -> None:
    for waited_s in waits_s:
        store.calls.gave_up(waited_s)
    store.calls.took(1.1)
    assert store.slow
    store.calls.took(1.0)
    assert not store.slow
    store.calls.gave_up(5.0)  # what was before no longer counts
    store.calls.took(4.0)
    assert not store.slow


def test_the_time_of_a_queued_write_runs_from_when_a_worker_begins_it() -> None:
    workers, clock = HandWorkers(), Clock()
    store = make_store(MemoryBackend(), workers, clock, call_timeout_s=5.0)
    parts = [Part(FULL, names_of(store), new_slots(4))]
    queued, waiting = store.write(parts, queued=True), store.write(parts)
    clock.now_s += 60.0
    assert not queued.overdue() and waiting.overdue()
    workers.run()
    assert queued.done() and queued.value.whole


def test_the_value_of_a_late_call_is_valid() -> None:
    backend, workers, clock = FaultyBackend(), HandWorkers(instant=True), Clock()
    store = make_store(backend, workers, clock, call_timeout_s=5.0, breaker_failures=1)
    fill(store)
    workers.instant = False
    slots = new_slots(4, 100)
    call = read(store, slots)
    clock.now_s += 60
    assert call.overdue()
    assert store.breaker.open
    workers.run()
    assert call.done() and call.value == 4
    assert contents(slots) == contents(new_slots(4))
    assert not store.slow, "it answers again"
    assert store.breaker.open, "only a call that is tried closes it"
    assert store.faults == {"timeout": 1}


def test_a_late_failure_is_counted_by_its_cause_but_fails_once() -> None:
    backend, workers, clock = FaultyBackend(), HandWorkers(), Clock()
    store = make_store(backend, workers, clock, breaker_failures=2)
    backend.always = StorageError("io", "on purpose")
    call = look_up(store)
    clock.now_s += 60
    assert not call.done()
    workers.run()
    assert call.done() and call.value == Found()
    assert store.faults == {"timeout": 1, "io": 1}
    assert not store.breaker.open


def test_a_call_that_ended_in_time_is_not_overdue_however_late_it_is_polled() -> None:
    workers, clock = HandWorkers(instant=True), Clock()
    store = make_store(MemoryBackend(), workers, clock)
    call = look_up(store)
    clock.now_s += 60
    assert not call.overdue()
    assert call.done() and not store.faults and not store.slow


# ---------------------------------------------------------------- the breaker of a store


def test_repeated_failures_stop_calls_and_one_success_resumes_them() -> None:
    backend, clock = FaultyBackend(), Clock()
    store = make_store(backend, clock=clock, breaker_failures=3, breaker_cooldown_s=5.0)
    backend.always = StorageError("unreachable", "on purpose")
    for _ in range(3):
        assert done(look_up(store)) == Found()
    reached = len(backend.calls)
    for begin, nothing in MISSES.values():
        assert done(begin(store)) == nothing
    assert len(backend.calls) == reached, "no call is made"
    assert store.faults == {"unreachable": 3, "breaker": len(MISSES)}

    backend.always = None
    assert done(look_up(store)) == Found()
    clock.now_s += 5.0
    assert fill(store) == Written(4, gap=False)
    assert not store.breaker.open and store.breaker.openings == 1
    assert found(look_up(store)) == names_of(store)


def test_stuck_calls_open_the_breaker() -> None:
    workers, clock = HandWorkers(), Clock()
    store = make_store(MemoryBackend(), workers, clock, breaker_failures=3, breaker_cooldown_s=100.0)
    calls = [look_up(store) for _ in range(3)]
    clock.now_s += 5
    assert not any(call.done() for call in calls)
    assert store.breaker.open and store.slow
    assert look_up(store).done()
    assert len(workers.waiting) == 3


def test_calls_that_nobody_asks_for_any_more_count_like_others() -> None:
    workers, clock = HandWorkers(), Clock()
    store = make_store(MemoryBackend(), workers, clock, breaker_failures=1, breaker_cooldown_s=5.0)
    look_up(store)
    clock.now_s += 60
    assert store.slow and store.breaker.open and store.faults == {"timeout": 1}
    workers.run()
    assert not store.slow, "it answers again"
    clock.now_s += 5
    assert not look_up(store).refused
    workers.run()
    assert not look_up(store).refused, "the call that was tried has succeeded"


def test_a_try_that_nobody_asks_for_stops_calls_until_it_has_returned() -> None:
    backend, workers, clock = FaultyBackend(), HandWorkers(), Clock()
    store = make_store(backend, workers, clock, breaker_failures=1, breaker_cooldown_s=5.0)
    backend.always = StorageError("io", "on purpose")
    look_up(store)
    workers.run()
    assert store.breaker.open
    clock.now_s += 5
    assert not look_up(store).refused and look_up(store).refused
    workers.run()
    assert look_up(store).refused, "it has failed, so the cool-down begins anew"
    clock.now_s += 5
    assert not look_up(store).refused


# ---------------------------------------------------------------- notes


def test_a_note_is_found_under_its_name(store: Store) -> None:
    assert done(store.keep_note("one", b"first", 16)) is True
    assert done(store.keep_note("two", b"", 16)) is True
    assert done(store.find_note("one", 16)) == b"first" + bytes(11)
    assert done(store.find_note("two", 16)) == bytes(16)
    assert done(store.keep_note("one", b"second, of 16 b.", 16)) is True
    assert done(store.find_note("one", 16)) == b"second, of 16 b."
    assert not store.faults


@pytest.mark.parametrize("how", DAMAGES)
def test_a_missing_or_damaged_note_is_empty(backend: FaultyBackend, store: Store, how: str) -> None:
    done(store.keep_note("one", b"first", 16))
    (one,) = backend.stored_keys()
    done(store.keep_note("two", b"other", 16))
    (two,) = [key for key in backend.stored_keys() if key != one]
    damage(backend, one, how, two)
    assert done(store.find_note("one", 16)) == b""
    assert store.faults == {how: 1}


def test_a_note_replaces_the_one_before_in_every_store() -> None:
    store = make_store(WriteOnce())
    for content in (b"first", b"second"):
        assert done(store.keep_note("one", content, 16)) is True
    assert done(store.find_note("one", 16)) == b"second" + bytes(10)


@pytest.mark.parametrize("results", [[], None])
def test_a_note_without_a_result_of_the_back_end_is_a_miss(backend: FaultyBackend, store: Store, results: Any) -> None:
    backend.instead |= {"put": lambda keys, slots: results, "get": lambda keys, slots: results}
    assert done(store.keep_note("one", b"", 16)) is False
    assert done(store.find_note("one", 16)) == b""
    assert store.faults == {"crashed": 2}


def test_a_note_is_unreadable_in_the_store(backend: FaultyBackend, store: Store) -> None:
    done(store.keep_note("one", b"a salt that is nobody's business", 64))
    (value,) = [bytes(backend.value(key)) for key in backend.stored_keys()]
    assert b"salt" not in value and b"nobody" not in value
    assert done(store.find_note("one", 64)).rstrip(b"\0") == b"a salt that is nobody's business"


# ---------------------------------------------------------------- close


def test_close_ends_workers_and_back_end() -> None:
    backend, readers, writers = FaultyBackend(), HandWorkers(), HandWorkers()
    store = make_store(backend, readers, writers=writers)
    store.close(1.0)
    assert readers.closed and writers.closed
    with pytest.raises(StorageError, match="closed"):
        backend.stats()


@pytest.mark.parametrize("stuck", ["readers", "writers"])
def test_a_back_end_with_a_running_call_is_not_closed(stuck: str) -> None:
    backend, readers, writers = FaultyBackend(), HandWorkers(), HandWorkers()
    {"readers": readers, "writers": writers}[stuck].stuck = True
    store = make_store(backend, readers, writers=writers)
    store.close(0.0)
    assert readers.closed and writers.closed
    assert backend.stats().entries == 0


def test_reads_do_not_wait_for_writes() -> None:
    readers, writers = HandWorkers(instant=True), HandWorkers()
    store = make_store(MemoryBackend(), readers, writers=writers)
    written = write(store, new_slots(4))
    assert look_up(store).done()
    assert not written.done()
    writers.run_all()
    assert done(written) == Written(4, gap=False)


@pytest.mark.usefixtures("little_garbage")
def test_a_call_keeps_its_slots_until_it_returns() -> None:
    workers = HandWorkers()
    store = make_store(MemoryBackend(), workers)
    slots = new_slots(4)
    arrays = [slot.obj for slot in slots]
    call = read(store, slots)
    del slots
    gc.collect()
    for array in arrays:
        with pytest.raises(BufferError):
            array.extend(b"no")  # type: ignore[attr-defined]  # the call still has a view of it
    workers.run()
    assert done(call) == 0 and store.faults == {"absent": 1}
    assert ABSENT == -1


@pytest.mark.parametrize("call", MISSES)
def test_a_call_after_close_is_a_miss(call: str) -> None:
    backend, workers = FaultyBackend(), HandWorkers()
    store = make_store(backend, workers)
    store.close(1.0)
    begin, nothing = MISSES[call]
    assert done(begin(store)) == nothing
    assert workers.submitted == 0
    assert store.faults == {"closed": 1}
