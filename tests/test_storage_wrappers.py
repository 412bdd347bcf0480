"""Wrappers: conformance of each one around the memory store, and what each one adds."""

from __future__ import annotations

import logging
import random
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Sequence

import pytest

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.storage.base import ABSENT, Backend, BackendStats, Capabilities, Listed, open_backend
from mainstem.storage.conformance import CASES, Case, make_keys, make_value, run
from mainstem.storage.memory import MemoryBackend
from mainstem.storage.wrappers import Compress, Prefix, ReadOnly, Tee

KEYS = [bytes([number]) * 32 for number in range(12)]
SPECS = [
    "tee+memory:,memory:",
    "prefix(team-a)+memory:",
    "compress(zstd)+memory:",
    "compress(zstd:1)+prefix(b)+tee+memory:,memory:",
]


class Failing(MemoryBackend):
    """Raises while `fails` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.calls = 0

    def _open(self):  # type: ignore[no-untyped-def]
        self.calls += 1
        if self.fails:
            raise StorageError("unreachable", "gone")
        return super()._open()


class WriteOnce(MemoryBackend):
    """Keeps the first value."""

    capabilities = Capabilities(persistent=True, shared=False, zero_copy=True, evicts=False, overwrites=False)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        for key, buffer in zip(keys, buffers, strict=True):
            if key not in self._values:
                super().put([key], [buffer])
        return [True] * len(keys)


class Shown(ReadOnly):
    """Reads through ReadOnly but writes past it, so that the cases have values to read."""

    def __init__(self) -> None:
        self.writable = MemoryBackend()
        super().__init__(self.writable)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return self.writable.put(keys, buffers)

    def delete(self, keys: Sequence[bytes]) -> None:
        self.writable.delete(keys)

    def clear(self) -> None:
        self.writable.clear()


def value(number: int, size: int = 1000) -> memoryview:
    return make_value(KEYS[number], size)


def read(store: Backend, number: int, size: int = 1000) -> bytes | None:
    buffer = memoryview(bytearray(size))
    (length,) = store.get([KEYS[number]], [buffer])
    return None if length != size else bytes(buffer)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("spec", SPECS)
def test_conformance(spec: str, case: Case) -> None:
    result = run(case, lambda: open_backend(spec))
    assert result.passed, result.reason


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "open_one",
    [Shown, lambda: Tee(WriteOnce(), MemoryBackend()), lambda: Compress(WriteOnce()), lambda: Prefix(WriteOnce(), "a")],
    ids=["readonly", "tee-once", "compress-once", "prefix-once"],
)
def test_conformance_over_others(open_one: type[Backend], case: Case) -> None:
    result = run(case, open_one)
    assert result.passed, result.reason


# ---------------------------------------------------------------- readonly


def test_readonly_reads_and_changes_nothing() -> None:
    inner = MemoryBackend()
    inner.put(KEYS[:2], [value(0), value(1)])
    store = ReadOnly(inner)
    assert store.put(KEYS[:3], [value(5), value(5), value(5)]) == [False] * 3
    store.delete([])
    for change in (lambda: store.delete(KEYS[:1]), store.clear):
        with pytest.raises(StorageError, match="refused: the store is read-only") as caught:
            change()
        assert caught.value.cause == "refused"
    assert store.exists(KEYS[:3]) == [True, True, False] and read(store, 0) == value(0) and store.stats().entries == 2
    assert store.capabilities == inner.capabilities


def test_a_closed_readonly_raises_closed() -> None:
    store = open_backend("readonly+memory:")
    store.close()
    store.close()
    calls = [lambda: store.put(KEYS[:1], [value(0)]), lambda: store.delete([]), store.clear, lambda: store.exists(KEYS)]
    for call in calls:
        with pytest.raises(StorageError, match="closed"):
            call()


def test_readonly_takes_no_brackets() -> None:
    with pytest.raises(BadArgument, match="without brackets"):
        open_backend("readonly(really)+memory:")


# ---------------------------------------------------------------- prefix


def test_two_names_in_one_store_share_no_keys() -> None:
    inner = MemoryBackend()
    names = ["a", "b", "ab", "a ", "\0a", "ä"]
    stores = [Prefix(inner, name) for name in names]
    for number, store in enumerate(stores):
        store.put([KEYS[0]], [value(number)])
    assert inner.exists([KEYS[0]]) == [False]
    assert inner.stats().entries == len(names)
    assert [read(store, 0) for store in stores] == [value(number) for number in range(len(names))]
    assert all(len(key) == 32 for key in inner._values)


def test_one_name_has_the_same_keys_in_every_object() -> None:
    inner = MemoryBackend()
    Prefix(inner, "a").put(KEYS[:2], [value(0), value(1)])
    assert Prefix(inner, "a").exists(KEYS[:3]) == [True, True, False]


def test_keys_of_a_name_never_change() -> None:
    """A store on disk outlives a release, so this digest must not change."""
    inner = MemoryBackend()
    Prefix(inner, "team-a").put([KEYS[1]], [value(0)])
    assert [key.hex() for key in inner._values] == ["d729ae81a2457d4167efde474a5c9000407d5d98c55a154470009de396046439"]


def test_clear_of_a_name_leaves_other_names_and_unknown_keys() -> None:
    inner = MemoryBackend()
    before, store, other = Prefix(inner, "a"), Prefix(inner, "a"), Prefix(inner, "b")
    before.put([KEYS[0]], [value(0)])
    other.put([KEYS[1]], [value(1)])
    inner.put([KEYS[2]], [value(2)])
    store.put([KEYS[1]], [value(1)])
    store.clear()
    assert store.exists(KEYS[:2]) == [True, False]
    assert other.exists([KEYS[1]]) == inner.exists([KEYS[2]]) == [True]


def test_clear_deletes_what_a_failed_put_may_have_stored() -> None:
    class StoresAndFails(MemoryBackend):
        def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
            super().put(keys, buffers)
            raise StorageError("timeout", "no answer")

    inner = StoresAndFails()
    store = Prefix(inner, "a")
    with pytest.raises(StorageError):
        store.put([KEYS[0]], [value(0)])
    store.clear()
    assert inner.stats().entries == 0


def test_a_name_counts_no_entries_and_what_is_compressed_is_copied() -> None:
    inner = MemoryBackend(capacity_bytes=5000)
    inner.put(KEYS[:1], [value(0)])
    assert Prefix(inner, "a").stats() == BackendStats(None, 1000, 5000, 0)
    promised = Compress(WriteOnce()).capabilities
    assert promised == Capabilities(persistent=True, shared=False, zero_copy=False, evicts=False, overwrites=False)


def test_clear_deletes_no_key_twice() -> None:
    """Deleted keys make room for others that must be remembered."""
    deleted: list[int] = []

    class Counted(MemoryBackend):
        def delete(self, keys: Sequence[bytes]) -> None:
            deleted.append(len(keys))
            super().delete(keys)

    store = Prefix(Counted(), "a", remembered=2)
    store.put(KEYS[:2], [value(0), value(1)])
    store.delete(KEYS[:1])
    store.put(KEYS[2:3], [value(2)])
    store.clear()
    store.put(KEYS[3:5], [value(3), value(4)])
    store.clear()
    store.clear()
    assert deleted == [1, 2, 2, 0]


def test_clear_raises_when_more_was_put_than_it_remembers() -> None:
    inner = MemoryBackend()
    store = Prefix(inner, "a", remembered=3)
    store.put(KEYS[:5], [value(number) for number in range(5)])
    with pytest.raises(StorageError, match="refused: more than 3 keys"):
        store.clear()
    assert inner.stats().entries == 2
    store.delete(KEYS[:5])
    assert inner.stats().entries == 0


@pytest.mark.parametrize("spec", ["prefix+memory:", "prefix()+memory:"])
def test_prefix_needs_a_name(spec: str) -> None:
    with pytest.raises(BadArgument, match="a name in brackets"):
        open_backend(spec)


# ---------------------------------------------------------------- compress


def test_what_repeats_takes_little_room_and_what_does_not_hardly_more() -> None:
    inner = MemoryBackend()
    store = Compress(inner)
    store.put([KEYS[0]], [memoryview(bytearray(b"kv" * 50_000))])
    assert (inner.stats().used_bytes or 0) < 1000
    store.put([KEYS[1]], [value(1, 100_000)])
    assert (inner.stats().used_bytes or 0) < 101_500
    assert read(store, 0, 100_000) == b"kv" * 50_000 and read(store, 1, 100_000) == value(1, 100_000)
    assert not store.capabilities.zero_copy


def test_a_higher_level_takes_less_room() -> None:
    text = memoryview(bytearray(b"".join(b"%d squared is %d; " % (n, n * n) for n in range(5000))))
    sizes = []
    for level in (1, 19):
        inner = MemoryBackend()
        Compress(inner, f"zstd:{level}").put([KEYS[0]], [text])
        sizes.append(inner.stats().used_bytes or 0)
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("method", ["int8", "fp8", "", "zstd:0", "zstd:23", "zstd:-1", "zstd:fast", "zstd:²", "lz4"])
def test_only_a_lossless_method_is_accepted(method: str) -> None:
    with pytest.raises(BadArgument, match="codecs of the storage tier"):
        open_backend(f"compress({method})+memory:")


def test_a_value_that_was_not_compressed_or_was_altered_has_no_length_that_fits() -> None:
    """It is not absent either: whoever reads it deletes it, so that a good one can be stored."""
    inner = MemoryBackend()
    store = Compress(inner)
    store.put(KEYS[:4], [value(number) for number in range(4)])
    frame = bytearray(inner._values[KEYS[1]])
    inner.put([KEYS[0]], [value(0)])
    inner.put([KEYS[1]], [memoryview(frame[: len(frame) // 2])])
    inner.put([KEYS[2]], [memoryview(bytearray(b"x"))])
    buffers = [memoryview(bytearray(1000)) for _ in range(4)]
    lengths = store.get(KEYS[:4], buffers)
    assert lengths == [0, 0, 0, 1000]
    assert buffers[3] == value(3)


def test_a_frame_that_grows_is_not_expanded() -> None:
    """A small frame declares or hides 64 MiB of content: no memory of that size is allocated."""
    zstandard = pytest.importorskip("zstandard")
    inner = MemoryBackend()
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    chunked = zstandard.ZstdCompressor().compressobj()  # declares no size
    hidden = chunked.compress(bytes(64 << 20)) + chunked.flush()
    inner.put(KEYS[:2], [memoryview(bytearray(bomb)), memoryview(bytearray(hidden))])
    tracemalloc.start()
    lengths = Compress(inner).get(KEYS[:2], [memoryview(bytearray(100_000)) for _ in range(2)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lengths == [64 << 20, 0]
    assert peak < 1 << 20


def test_frames_longer_than_any_that_fits_are_read_one_by_one_and_huge_ones_not() -> None:
    read: list[list[int]] = []

    class Large(MemoryBackend):
        def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
            read.append([len(buffer) for buffer in buffers])
            return [
                (64 << 20) + 1 if key == KEYS[3] else length
                for key, length in zip(keys, super().get(keys, buffers), strict=True)
            ]

    store = Compress(Large())
    store.put(KEYS[:4], [value(number, 9000 + number) for number in range(4)])
    assert store.get(KEYS[:4], [memoryview(bytearray(1000)) for _ in range(4)]) == [9000, 9001, 9002, 0]
    assert [len(batch) for batch in read] == [4, 0, 1, 1, 1]


def test_compress_names_the_extra_when_zstandard_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'mainstem\[zstd\]'"):
        open_backend("compress(zstd)+memory:")


# ---------------------------------------------------------------- tee


def filled(first: Sequence[int], second: Sequence[int]) -> tuple[Failing, Failing, Tee]:
    one, two = Failing(), Failing()
    for store, numbers in ((one, first), (two, second)):
        store.put([KEYS[number] for number in numbers], [value(number) for number in numbers])
    return one, two, Tee(one, two)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([], []),
        ([0, 1, 2], []),
        ([], [0, 1, 2]),
        ([0, 2, 4], [1, 3]),
        ([1, 3], [0, 2, 4]),
        ([0, 1, 5], [2, 3]),
        ([0, 1], [0, 1]),
        ([0], [0, 1, 2, 3]),
        ([1, 2], [4, 11]),
        (range(12), []),
        ([], range(12)),
    ],
)
def test_tee_finds_keys_that_are_in_one_or_the_other(first: Sequence[int], second: Sequence[int]) -> None:
    assert filled(first, second)[2].exists(KEYS) == [at in first or at in second for at in range(12)]


def test_tee_makes_no_more_calls_than_necessary() -> None:
    one, two, tee = filled(range(12), [])
    one.calls = two.calls = 0
    assert all(tee.exists(KEYS))
    assert (one.calls, two.calls) == (1, 0)
    assert not any(tee.exists(make_keys(random.Random(1), 3)))
    assert (one.calls, two.calls) == (2, 1)


def test_tee_reads_from_the_second_what_the_first_lacks() -> None:
    one, _, tee = filled([0, 2, 5], [1, 2, 3])
    one.put([KEYS[3]], [value(3, 10)])
    buffers = [memoryview(bytearray(1000)) for _ in range(6)]
    assert tee.get(KEYS[:6], buffers) == [1000, 1000, 1000, 1000, ABSENT, 1000]
    assert [buffers[number] for number in (0, 1, 2, 3, 5)] == [value(number) for number in (0, 1, 2, 3, 5)]
    one.put([KEYS[6]], [value(6, 10)])
    assert tee.get([KEYS[6]], [memoryview(bytearray(1000))]) == [10]


def test_what_only_the_second_store_of_a_tee_has_moves_to_the_first_when_it_is_read() -> None:
    one, two, tee = filled([0], [0, 1, 2])
    one.put([KEYS[2]], [value(2, 10)])
    assert [read(tee, number) for number in (0, 1, 2, 3)] == [value(0), value(1), value(2), None]
    assert read(one, 1) == value(1) and tee.moved == 1
    assert one.exists(KEYS[:4]) == [True, True, True, False] and read(one, 2, 10) == value(2, 10)
    two.clear()
    assert read(tee, 1) == value(1)


def test_a_first_store_that_fails_or_is_full_takes_nothing_and_the_read_succeeds() -> None:
    for one in (Failing(), MemoryBackend(10), ReadOnly(MemoryBackend())):
        two = MemoryBackend()
        two.put(KEYS[:1], [value(0)])
        tee = Tee(one, two)
        if isinstance(one, Failing):
            one.fails = True
        assert read(tee, 0) == value(0) and tee.moved == 0


@pytest.mark.parametrize("change", ["put", "delete", "clear"])
def test_a_value_that_was_changed_while_it_was_read_does_not_come_back(change: str) -> None:
    class Interrupted(MemoryBackend):
        def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
            lengths = super().get(keys, buffers)
            {"put": lambda: tee.put(keys, [value(1)]), "delete": lambda: tee.delete(keys), "clear": tee.clear}[change]()
            return lengths

    one, two = MemoryBackend(), Interrupted()
    two.put(KEYS[:1], [value(0)])
    tee = Tee(one, two)
    assert read(tee, 0) == value(0)
    assert read(one, 0) == (value(1) if change == "put" else None)


def test_a_change_waits_for_a_value_that_is_being_moved() -> None:
    threads: list[threading.Thread] = []

    class Interrupted(MemoryBackend):
        def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
            if not threads:
                threads.append(threading.Thread(target=tee.put, args=(KEYS[:1], [value(1)])))
                threads[0].start()
                threads[0].join(0.2)  # long enough to overtake, if it could
            return super().put(keys, buffers)

    one, two = Interrupted(), MemoryBackend()
    two.put(KEYS[:1], [value(0)])
    tee = Tee(one, two)
    assert read(tee, 0) == value(0)
    threads[0].join()
    assert read(one, 0) == read(two, 0) == value(1)


def test_a_tee_lists_each_value_once_and_a_name_cannot_list() -> None:
    *_, tee = filled([0, 1, 2], [1, 2, 3, 4])
    assert sorted(found.key for batch in tee.scan() for found in batch) == sorted(KEYS[:5])
    with pytest.raises(StorageError, match="list, or move, the store that it wraps"):
        open_backend("prefix(a)+memory:").scan()


class OneByOne(MemoryBackend):
    """Lists a value in each batch."""

    def scan(self) -> Iterator[Sequence[Listed]]:
        for batch in list(super().scan()):
            yield from ([found] for found in batch)


def test_what_moves_while_a_tee_is_listed_is_listed() -> None:
    one, two = OneByOne(), OneByOne()
    one.put(KEYS[:2], [value(0), value(1)])
    two.put(KEYS[2:5], [value(2), value(3), value(4)])
    tee = Tee(one, two)
    found: set[bytes] = set()
    for number, batch in enumerate(tee.scan()):
        found |= {listed.key for listed in batch}
        if number == 1:
            assert all(read(Tee(one, two), at) for at in (2, 3, 4)), "by another process"
    assert found == {*KEYS[:5]}


@pytest.mark.parametrize("silent", [0, 1])
def test_a_tee_of_a_store_that_cannot_list_says_so_at_once(silent: int) -> None:
    class Silent(MemoryBackend):
        scan = Backend.scan

    stores: list[Backend] = [MemoryBackend(), MemoryBackend()]
    stores[silent] = Silent()
    for store in stores:
        store.put(KEYS[:1], [value(0)])
    with pytest.raises(StorageError, match="Silent cannot list"):
        next(Tee(*stores).scan())


def test_tee_writes_both_and_is_full_when_both_are() -> None:
    one, two = MemoryBackend(1000), MemoryBackend(500)
    tee = Tee(one, two)
    assert tee.put(KEYS[:3], [value(0, 400), value(1, 900), value(2, 2000)]) == [True, True, False]
    assert one.exists(KEYS[:3]) == [False, True, False] and two.exists(KEYS[:3]) == [True, False, False]
    assert tee.stats() == BackendStats(None, 1300, 1500, 1)


@pytest.mark.parametrize("broken", [0, 1])
def test_when_one_fails_the_other_goes_on(broken: int, caplog: pytest.LogCaptureFixture) -> None:
    stores = (Failing(), Failing())
    tee = Tee(*stores)
    tee.put(KEYS[:2], [value(0), value(1)])
    stores[broken].fails = True
    with caplog.at_level(logging.INFO, logger="mainstem.storage.wrappers"):
        assert tee.put([KEYS[2]], [value(2)]) == [True]
        assert tee.exists(KEYS) == [at < 3 for at in range(12)]
        assert [read(tee, number) for number in range(4)] == [value(0), value(1), value(2), None]
        assert tee.stats().used_bytes == 3000
        assert sum(tee.failures) == tee.failures[broken] >= 4
        stores[broken].fails = False
        assert tee.put([KEYS[3]], [value(3)]) == [True]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        f"store {broken + 1} of a tee fails, the other goes on: unreachable: gone",
        f"store {broken + 1} of a tee answers again",
    ]


@pytest.mark.parametrize("broken", [0, 1])
def test_delete_and_clear_raise_when_one_store_may_still_have_the_value(broken: int) -> None:
    stores = (Failing(), Failing())
    tee = Tee(*stores)
    tee.put(KEYS[:2], [value(0), value(1)])
    stores[broken].fails = True
    for change in (lambda: tee.delete(KEYS[:1]), tee.clear):
        with pytest.raises(StorageError, match="gone"):
            change()
    assert stores[1 - broken].stats().entries == 0


def test_when_both_fail_every_call_raises() -> None:
    one, two, tee = filled([0], [0])
    one.fails = two.fails = True
    calls = [
        lambda: tee.exists(KEYS),
        lambda: tee.get(KEYS[:1], [value(0)]),
        lambda: tee.put(KEYS[:1], [value(0)]),
        lambda: tee.delete(KEYS[:1]),
        tee.clear,
        tee.stats,
    ]
    for call in calls:
        with pytest.raises(StorageError, match="gone"):
            call()
    assert tee.failures == [6, 6]


def test_tee_combines_the_capabilities_of_its_parts() -> None:
    assert Tee(WriteOnce(), MemoryBackend()).capabilities == Capabilities(
        persistent=True, shared=False, zero_copy=False, evicts=True, overwrites=False
    )


@pytest.mark.parametrize("spec", ["tee+memory:", "tee+memory:,memory:,memory:", "tee(x)+memory:,memory:"])
def test_tee_takes_two(spec: str) -> None:
    with pytest.raises(BadArgument, match="two specs with a comma between"):
        open_backend(spec)


def test_closing_a_wrapper_closes_what_it_wraps_even_if_the_first_fails() -> None:
    class WontClose(MemoryBackend):
        def close(self) -> None:
            raise StorageError("io", "stuck")

    inner = MemoryBackend()
    with pytest.raises(StorageError, match="stuck"):
        Tee(WontClose(), inner).close()
    with pytest.raises(StorageError, match="closed"):
        inner.stats()


@pytest.mark.parametrize("wrapper", [ReadOnly, Prefix, Compress, Tee])
def test_a_wrapper_has_no_spec_of_its_own(wrapper: type[Backend]) -> None:
    with pytest.raises(BadArgument, match="storage"):
        wrapper.from_spec("x", {})


def test_what_is_compressed_comes_in_buffers_that_can_be_written() -> None:
    """The interface promises it: clients in native code can only take the address of a writable buffer."""
    seen: list[bool] = []

    class Strict(MemoryBackend):
        def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
            seen.extend(buffer.readonly for buffer in buffers)
            return super().put(keys, buffers)

    assert Compress(Strict(), "zstd").put([bytes(32)], [memoryview(bytearray(b"value"))]) == [True]
    assert seen == [False]
