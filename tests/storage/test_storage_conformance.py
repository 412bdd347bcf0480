"""The conformance suite: the memory store passes it, and the case for a fault catches a store with that fault."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from mainstem.errors import StorageError
from mainstem.storage.base import ABSENT, Backend, Capabilities, Listed
from mainstem.storage.conformance import CASES, Case, check, run
from mainstem.storage.memory import MemoryBackend


class ShiftsAtMisses(MemoryBackend):
    """Reads the keys that are present into the first buffers of the batch."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        there = [key for key in keys if key in self._values]
        super().get(there, buffers[: len(there)])
        return [len(buffer) if key in there else ABSENT for key, buffer in zip(keys, buffers, strict=True)]


class StopsAtGap(MemoryBackend):
    """Asks for a prefix: whatever comes after the first missing key is missing to it."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        found = [*super().exists(keys), False].index(False)
        return [at < found for at in range(len(keys))]


class AnswersByCount(MemoryBackend):
    """Reports the right number of keys, but as if the present ones came first."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return sorted(super().exists(keys), reverse=True)


class KeepsBuffers(MemoryBackend):
    """Keeps the memory of the caller instead of its content."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        stored = super().put(keys, buffers)
        self._values.update(zip(keys, buffers, strict=True))  # type: ignore[arg-type]
        return stored


class SaysShortIsWhole(MemoryBackend):
    """Cuts or pads a value to the buffer, and reports that it fits."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        lengths = super().get(keys, buffers)
        return [length if length == ABSENT else len(buffer) for length, buffer in zip(lengths, buffers, strict=True)]


class HidesOtherLengths(MemoryBackend):
    """Reports a value that does not fit as absent, so that no one replaces it."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        lengths = super().get(keys, buffers)
        return [length if length == len(buffer) else ABSENT for length, buffer in zip(lengths, buffers, strict=True)]


class OneSizeABatch(MemoryBackend):
    """Takes the length of the first value of a batch for that of all."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        size = len(buffers[0]) if buffers else 0
        return super().put(keys, [memoryview(bytearray(buffer)[:size].ljust(size)) for buffer in buffers])


class OverwritesInPlace(MemoryBackend):
    """Writes over the old value, and keeps the end of a longer one."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        olds = [self._values.get(key, b"") for key in keys]
        values = [bytearray(buffer) + old[len(buffer) :] for buffer, old in zip(buffers, olds, strict=True)]
        return super().put(keys, list(map(memoryview, values)))


class Overflows(MemoryBackend):
    """Writes the whole value, even if the buffer is shorter."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        lengths = super().get(keys, buffers)
        for key, buffer, length in zip(keys, buffers, lengths, strict=True):
            if length > len(buffer) and isinstance(buffer.obj, bytearray):
                start = bytes(buffer.obj).find(bytes(buffer))
                buffer.obj[start : start + length] = self._values[key]
        return lengths


class KeepsFirst(MemoryBackend):
    """Keeps the first value, but claims to overwrite."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        for key, buffer in zip(keys, buffers, strict=True):
            if key not in self._values:
                super().put([key], [buffer])
        return [True] * len(keys)


class Overwrites(MemoryBackend):
    """Overwrites, but claims not to."""

    capabilities = Capabilities(persistent=False, shared=False, zero_copy=False, evicts=True, overwrites=False)


class NamesAreText(MemoryBackend):
    """Names end at the first zero byte."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return super().put([key.split(b"\0")[0] for key in keys], buffers)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        return super().get([key.split(b"\0")[0] for key in keys], buffers)


class ForgetsToDelete(MemoryBackend):
    """Deletes only the first key of a batch."""

    def delete(self, keys: Sequence[bytes]) -> None:
        super().delete(keys[:1])


class RaisesOnAbsentDelete(MemoryBackend):
    """Treats a missing key as an error."""

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self._values[key]


class ClearsHalf(MemoryBackend):
    """Clears only the first part of a listing."""

    def clear(self) -> None:
        super().delete(list(self._values)[:25])


class LimitsBatches(MemoryBackend):
    """Drops values past the largest batch of its client."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        super().put(keys[:128], buffers[:128])
        return [True] * len(keys)


class LosesLastByte(MemoryBackend):
    """Stores whole words only."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        whole = [buffer[: len(buffer) // 4 * 4] for buffer in buffers]
        return super().put(keys, whole)


class IgnoresLengths(MemoryBackend):
    """Pairs keys and buffers up to the shorter list."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        count = min(len(keys), len(buffers))
        return super().put(keys[:count], buffers[:count])


class NeedsRegistered(MemoryBackend):
    """Refuses memory that is not registered."""

    def register(self, buffers: Sequence[memoryview]) -> None:
        self.known = [buffer.obj for buffer in buffers]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        if not all(any(buffer.obj is known for known in getattr(self, "known", [])) for buffer in buffers):
            raise StorageError("refused", "this memory is not registered")
        return super().get(keys, buffers)


class TornByThreads(MemoryBackend):
    """Stores two halves without a lock around both."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        for key, buffer in zip(keys, buffers, strict=True):
            half = len(buffer) // 2
            super().put([key], [memoryview(bytearray(buffer[:half]) + bytes(len(buffer) - half))])
            threading.Event().wait(0.001)
            super().put([key], [buffer])
        return [True] * len(keys)


class TornBySizes(MemoryBackend):
    """Cuts or pads the old value to the length of the new one, and only then writes the new one."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        for key, buffer in zip(keys, buffers, strict=True):
            old = self._values.get(key, b"")
            if old and len(old) != len(buffer):
                super().put([key], [memoryview(bytearray(old[: len(buffer)].ljust(len(buffer))))])
                threading.Event().wait(0.001)
            super().put([key], [buffer])
        return [True] * len(keys)


class WorksWhenClosed(MemoryBackend):
    """Still reads and writes after close."""

    def close(self) -> None:
        self._values.clear()


class RaisesItsOwn(MemoryBackend):
    """Raises an error of its client unchanged."""

    def close(self) -> None:
        super().close()
        self._values = None  # type: ignore[assignment]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._values for key in keys]


class CountsNothing(MemoryBackend):
    """Reports wrong counts."""

    def stats(self):  # type: ignore[no-untyped-def]
        return type(super().stats())(entries=0, used_bytes=0)


class ListsByPlace(MemoryBackend):
    """Goes on where a number of values has been listed, whichever have gone since."""

    def scan(self) -> Iterator[Sequence[Listed]]:
        at = 0
        while part := list(self._values.items())[at : at + 5]:
            yield [Listed(key, len(value)) for key, value in part]
            at += 5


class ListsRoom(MemoryBackend):
    """Lists the room that values take, in whole grains."""

    def scan(self) -> Iterator[Sequence[Listed]]:
        for batch in super().scan():
            yield [Listed(found.key, -(-found.length // 4096) * 4096) for found in batch]


class ListsWhatWas(MemoryBackend):
    """Lists values that have been deleted."""

    def __init__(self) -> None:
        super().__init__()
        self._ever: dict[bytes, int] = {}

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        self._ever |= {key: len(buffer) for key, buffer in zip(keys, buffers, strict=True)}
        return super().put(keys, buffers)

    def scan(self) -> Iterator[Sequence[Listed]]:
        yield [Listed(key, length) for key, length in self._ever.items()]


class CannotSay(MemoryBackend):
    """Does not say that it cannot list."""

    def scan(self) -> Iterator[Sequence[Listed]]:
        raise StorageError("io", "no")


class Full(MemoryBackend):
    """Reports every key as present."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys)


class ShiftsByOne(MemoryBackend):
    """Sorts the keys of a batch, but not its buffers."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        return super().get(sorted(keys), buffers)


class FillsWholePool(MemoryBackend):
    """Mistakes the first slice for the whole memory."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        lengths = super().get(keys, buffers)
        if buffers and isinstance(buffers[0].obj, bytearray):
            buffers[0].obj[0] = 0
        return lengths


class FillsOneOfTwins(MemoryBackend):
    """Keeps only one buffer per key."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        wanted = dict(zip(keys, buffers, strict=True))
        found = dict(zip(wanted, super().get(list(wanted), list(wanted.values())), strict=True))
        return [found[key] for key in keys]


BROKEN: list[tuple[type[MemoryBackend], str]] = [
    (Full, "empty"),
    (ShiftsByOne, "round_trip_batch"),
    (FillsWholePool, "pool_slices"),
    (FillsOneOfTwins, "duplicates"),
    (ShiftsAtMisses, "get_with_gaps"),
    (StopsAtGap, "exists_each"),
    (AnswersByCount, "exists_each"),
    (KeepsBuffers, "put_copies"),
    (SaysShortIsWhole, "wrong_length"),
    (Overflows, "wrong_length"),
    (HidesOtherLengths, "wrong_length"),
    (HidesOtherLengths, "mixed_sizes"),
    (OneSizeABatch, "mixed_sizes"),
    (KeepsFirst, "put_again"),
    (OverwritesInPlace, "put_again"),
    (Overwrites, "put_again"),
    (NamesAreText, "key_bytes"),
    (ForgetsToDelete, "delete"),
    (RaisesOnAbsentDelete, "delete"),
    (ClearsHalf, "clear"),
    (LimitsBatches, "large_batch"),
    (LosesLastByte, "round_trip"),
    (IgnoresLengths, "lengths_differ"),
    (NeedsRegistered, "registered"),
    (TornByThreads, "threads"),
    (TornBySizes, "threads_mixed_sizes"),
    (WorksWhenClosed, "close"),
    (RaisesItsOwn, "close"),
    (CountsNothing, "stats"),
    (ListsRoom, "scan"),
    (ListsWhatWas, "scan"),
    (CannotSay, "scan"),
    (ListsByPlace, "scan_while_writing"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_memory_store_keeps_every_promise(case: Case) -> None:
    result = run(case, MemoryBackend)
    assert result.passed, result.reason
    assert str(result) == f"pass  {case.name}"


@pytest.mark.parametrize(("broken", "name"), BROKEN, ids=lambda of: of if isinstance(of, str) else of.__name__)
def test_a_broken_store_is_caught_by_the_case_that_names_its_fault(broken: type[MemoryBackend], name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    result = run(case, broken)
    assert not result.passed
    assert result.reason in str(result) and case.promise in str(result)


def test_every_case_catches_some_broken_store() -> None:
    assert {name for _, name in BROKEN} == {case.name for case in CASES}


def test_all_cases_run_and_their_names_and_promises_are_one_line() -> None:
    results = check(MemoryBackend)
    assert [result.name for result in results] == [case.name for case in CASES]
    assert len({case.name for case in CASES}) == len(CASES) >= 17
    assert all("\n" not in case.promise and case.promise for case in CASES)


def test_a_call_that_never_returns_fails_its_case_and_ends_no_other() -> None:
    release = threading.Event()

    class Stuck(MemoryBackend):
        def exists(self, keys: Sequence[bytes]) -> list[bool]:
            release.wait()
            return super().exists(keys)

    result = run(CASES[0], Stuck, case_timeout_s=0.05)
    release.set()
    assert result.reason == "still running after 0.05 s"


def test_a_store_that_does_not_open_fails_with_its_error() -> None:
    def refuse() -> Backend:
        raise StorageError("unreachable", "nobody answers")

    assert run(CASES[0], refuse).reason == "raised StorageError: unreachable: nobody answers"


def test_each_case_opens_its_own_store_and_leaves_it_closed_and_empty() -> None:
    class Counts(MemoryBackend):
        def close(self) -> None:
            left.append(0 if self._closed else len(self._values))
            super().close()

    left: list[int] = []
    opened: list[Backend] = []

    def open_one() -> Backend:
        opened.append(Counts())
        return opened[-1]

    assert all(result.passed for result in check(open_one))
    assert len(opened) == len(CASES)
    assert left.count(0) == len(left) - 1, "one case closes its store while it has values; the others clear it"
