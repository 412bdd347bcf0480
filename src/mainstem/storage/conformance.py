"""The promises of every back end, as cases for any store. It needs no pytest and no server of its own.

    from mainstem.storage.conformance import check
    for result in check(lambda: MyBackend("10.0.0.1")):
        print(result)

or `mainstem storage check redis://127.0.0.1:6379/0`. With pytest, one test per case:

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_conformance(case):
        result = run(case, lambda: MyBackend("10.0.0.1"))
        assert result.passed, result.reason

Each case opens the store and clears it first, so use a store whose content you do not need, with room for 32 MiB in
values of up to 2 MiB. Faults (a dead server, a full disk, a kill) are not covered, because only you can cause them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from mainstem.errors import StorageError
from mainstem.storage.base import ABSENT, KEY_BYTES, Backend

SIZES = (
    1, 2, 3, 7, 63, 64, 65, 255, 513, 1000, 4095, 4096, 4097, 65_535, 65_536, 100_003, 1 << 20, (1 << 20) + 1, 2 << 20,
)  # fmt: skip
"""Lengths of values that must be read back, in bytes."""

MIXED_SIZES = (100_000, 300_000, 128, 2 << 20, 100_000, 128, 128, 300_000, (2 << 20) - 1, 100_000)
"""Lengths in one batch: of a page of full attention, of a window, of a header alone, of a state."""

GUARD = 0xA5
"""The byte between the buffers of a case. A store that writes there would overwrite other pages."""


Run: TypeAlias = Callable[[Backend, random.Random], None]
"""Raises if a store, which is open and empty, breaks a promise."""


class Broken(AssertionError):
    """A promise was broken. The message says which one and how."""


@dataclass(frozen=True, slots=True)
class Case:
    """One promise.

    Args:
        name: the name in reports and test ids.
        promise: the promise in one line.
        run: checks it.
    """

    name: str
    promise: str
    run: Run


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a case. `reason` is empty if it passed."""

    name: str
    promise: str
    reason: str

    @property
    def passed(self) -> bool:
        """Whether the promise was kept."""
        return not self.reason

    def __str__(self) -> str:
        return f"pass  {self.name}" if self.passed else f"FAIL  {self.name}: {self.promise}\n      {self.reason}"


CASES: list[Case] = []
"""All cases in the order in which `check` runs them: simple ones first."""


def check(open: Callable[[], Backend], *, seed: int = 0, case_timeout_s: float = 120.0) -> list[Result]:
    """Runs every case.

    Args:
        open: opens the store. It is called once per case, after the previous store is closed.
        seed: seed of keys, values and orders; the same seed makes the same calls.
        case_timeout_s: a case that takes longer fails; a call that never returns keeps its thread.
    """
    return [run(case, open, seed=seed, case_timeout_s=case_timeout_s) for case in CASES]


def run(case: Case, open: Callable[[], Backend], *, seed: int = 0, case_timeout_s: float = 120.0) -> Result:
    """Runs one case; the arguments are those of `check`."""
    thread = ThreadPoolExecutor(1, thread_name_prefix=case.name)
    future = thread.submit(_run, case, open, random.Random(f"{case.name} {seed}"))
    thread.shutdown(wait=False)
    return Result(case.name, case.promise, _reason(future, case_timeout_s))


def _reason(future: Future[None], timeout_s: float) -> str:
    try:
        error = future.exception(timeout_s)
    except TimeoutError:
        return f"still running after {timeout_s:g} s"
    if error is None:
        return ""
    return str(error) if isinstance(error, Broken) else f"raised {type(error).__name__}: {error}"


def _run(case: Case, open: Callable[[], Backend], rng: random.Random) -> None:
    backend = open()
    try:
        backend.clear()
        case.run(backend, rng)
        with suppress(StorageError):  # the case may have closed it
            backend.clear()
    finally:
        backend.close()


def _case(promise: str) -> Callable[[Run], Run]:
    def add(function: Run) -> Run:
        CASES.append(Case(function.__name__.strip("_"), promise, function))
        return function

    return add


# ---------------------------------------------------------------- parts of the cases


class Pool:
    """Buffers in one piece of memory, as in a host pool, with guard bytes between them and at both ends.

    Args:
        sizes: sizes of the buffers, in bytes.
    """

    GAP = 64

    def __init__(self, sizes: Iterable[int]) -> None:
        starts, end = [], self.GAP
        sizes = list(sizes)
        for size in sizes:
            starts.append(end)
            end += size + self.GAP
        self.memory = memoryview(bytearray([GUARD]) * end)
        self.buffers = [self.memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def check_guards(self) -> None:
        """Raises `Broken` if anything was written outside the buffers."""
        at = 0
        for number, buffer in enumerate(self.buffers):
            expect(self.memory[at : at + self.GAP] == bytes([GUARD]) * self.GAP, f"wrote before buffer {number}")
            at += self.GAP + len(buffer)
        expect(self.memory[at:] == bytes([GUARD]) * self.GAP, "wrote past the last buffer")


def expect(kept: bool, reason: str) -> None:
    """Raises `Broken` with the reason if the promise was not kept."""
    if not kept:
        raise Broken(reason)


def make_keys(rng: random.Random, count: int) -> list[bytes]:
    """Makes unused keys."""
    return [rng.randbytes(KEY_BYTES) for _ in range(count)]


def make_value(key: bytes, size: int, version: int = 0) -> memoryview:
    """Makes a value that identifies itself: it ends with the version (4 bytes); the arguments determine the rest."""
    tail = version.to_bytes(4, "big") if size > 4 else b""
    head = random.Random(b"%b %d %d" % (key, version, size)).randbytes(size - len(tail))
    return memoryview(bytearray(head + tail))


def _put(backend: Backend, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
    stored = backend.put(keys, values)
    expect(stored == [True] * len(keys), f"put of {len(keys)} values into an empty store returned {stored!r}")


def _expect_values(backend: Backend, keys: Sequence[bytes], values: Sequence[memoryview | None]) -> None:
    """Reads all values in one batch. None: the key is absent, and its buffer has the size of another value."""
    size = next((len(value) for value in values if value is not None), 100)
    pool = Pool(size if value is None else len(value) for value in values)
    lengths = backend.get(keys, pool.buffers)
    wanted = [ABSENT if value is None else len(value) for value in values]
    expect(list(lengths) == wanted, f"get returned {lengths!r}, not {wanted!r}")
    for at, (buffer, value) in enumerate(zip(pool.buffers, values, strict=True)):
        expect(value is None or buffer == value, f"buffer {at} of {len(keys)} does not hold the value of its key")
    pool.check_guards()


def _expect_there(backend: Backend, keys: Sequence[bytes], wanted: Sequence[bool]) -> None:
    found = backend.exists(keys)
    expect(isinstance(found, list) and found == list(wanted), f"exists returned {found!r}, not {list(wanted)!r}")


def _expect_raises(error: type[Exception], what: str, call: Callable[[], object]) -> Exception:
    try:
        call()
    except error as raised:
        return raised
    raise Broken(f"{what} did not raise {error.__name__}")


# ---------------------------------------------------------------- the cases


@_case("an empty store has no values, and empty batches are not an error")
def _empty(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, 3)
    _expect_there(backend, keys, [False] * 3)
    _expect_values(backend, keys, [None] * 3)
    _expect_there(backend, [], [])
    expect(list(backend.get([], [])) == [] and list(backend.put([], [])) == [], "get or put of nothing is not []")
    backend.delete([])
    backend.clear()


@_case("values of every length are read back unchanged, one by one")
def _round_trip(backend: Backend, rng: random.Random) -> None:
    for key, size in zip(make_keys(rng, len(SIZES)), SIZES, strict=True):
        value = make_value(key, size)
        _put(backend, [key], [value])
        _expect_there(backend, [key], [True])
        _expect_values(backend, [key], [value])


@_case("values of many lengths are read back in one batch, in any order")
def _round_trip_batch(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, len(SIZES))
    values = {key: make_value(key, size) for key, size in zip(keys, SIZES, strict=True)}
    _put(backend, keys, [values[key] for key in keys])
    rng.shuffle(keys)
    _expect_there(backend, keys, [True] * len(keys))
    _expect_values(backend, keys, [values[key] for key in keys])


@_case("values of very different lengths share a batch with absent ones, and none is given the length of another")
def _mixed_sizes(backend: Backend, rng: random.Random) -> None:
    sizes = dict(zip(make_keys(rng, len(MIXED_SIZES)), MIXED_SIZES, strict=True))
    keys = list(sizes)
    _put(backend, keys, [make_value(key, sizes[key]) for key in keys])
    for gone in ([], [keys[3], keys[6]], [keys[0], keys[2], keys[7]]):
        backend.delete(gone)
        for key in gone:
            del sizes[key]
        absent = make_keys(rng, 3)
        asked = [*sizes, *gone, *absent]
        rng.shuffle(asked)
        _expect_there(backend, asked, [key in sizes for key in asked])
        _expect_values(backend, asked, [make_value(key, sizes[key]) if key in sizes else None for key in asked])
    for shift in range(1, len(sizes)):
        asked = list(sizes)
        wrong = [sizes[key] for key in asked[shift:] + asked[:shift]]
        pool = Pool(wrong)
        lengths = backend.get(asked, pool.buffers)
        expect(list(lengths) == [sizes[key] for key in asked], f"get returned {lengths!r}, of {list(sizes.values())}")
        pool.check_guards()
        for key, buffer in zip(asked, pool.buffers, strict=True):
            expect(len(buffer) != sizes[key] or buffer == make_value(key, sizes[key]), "a buffer holds another value")


@_case("put copies values: the caller may write to its buffers after put has returned")
def _put_copies(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, 8)
    values = [make_value(key, 5000) for key in keys]
    pool = Pool(map(len, values))
    for buffer, value in zip(pool.buffers, values, strict=True):
        buffer[:] = value
    _put(backend, keys, pool.buffers)
    expect(pool.buffers == values, "put changed the buffers")
    pool.check_guards()
    pool.memory[:] = bytes(len(pool.memory))
    _expect_values(backend, keys, values)


@_case("exists answers for each key by itself, whatever is absent before it")
def _exists_each(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, 12)
    _put(backend, keys, [make_value(key, 200) for key in keys])
    for present in range(len(keys) + 1):
        asked = rng.sample(keys, present) + make_keys(rng, rng.randrange(1, 8))
        rng.shuffle(asked)
        _expect_there(backend, asked, [key in keys for key in asked])
    _expect_there(backend, keys, [True] * len(keys))


@_case("a miss anywhere in a batch shifts no value into another key's buffer")
def _get_with_gaps(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, 12)
    values: dict[bytes, memoryview | None] = {key: make_value(key, 4096) for key in keys}
    _put(backend, keys, [make_value(key, 4096) for key in keys])
    for missing in (1, 2, 5, 11):
        for _ in range(6):
            asked = rng.sample(keys, len(keys) - missing) + make_keys(rng, missing)
            rng.shuffle(asked)
            _expect_values(backend, asked, [values.get(key) for key in asked])


@_case("a buffer whose length differs from the value gets the length of the value, and nothing is written past its end")
def _wrong_length(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, 6)
    values = [make_value(key, 1000) for key in keys]
    _put(backend, keys, values)
    for wrong in (1, 500, 999, 1001, 1064, 5000):
        pool = Pool([1000, wrong, 1000, wrong, wrong, 1000])
        lengths = list(backend.get(keys, pool.buffers))
        pool.check_guards()
        for at, (length, buffer) in enumerate(zip(lengths, pool.buffers, strict=True)):
            expect(length == 1000, f"get returned {length} for a value of 1000 bytes and a buffer of {len(buffer)}")
            expect(len(buffer) == wrong or buffer == values[at], "a buffer of the right length was not filled")


@_case("buffers may be slices of one large pool, in any order, and only they are written")
def _pool_slices(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, 32)
    values = [make_value(key, 8192) for key in keys]
    pool = Pool([8192] * 64)
    places = rng.sample(range(64), 32)
    for place, value in zip(places, values, strict=True):
        pool.buffers[place][:] = value
    _put(backend, keys, [pool.buffers[place] for place in places])
    others = rng.sample(range(64), 32)
    pool.memory[:] = bytes([GUARD]) * len(pool.memory)
    lengths = backend.get(keys, [pool.buffers[place] for place in others])
    expect(list(lengths) == [8192] * 32, f"get returned {lengths!r}")
    expect([pool.buffers[place] for place in others] == values, "a slice does not hold the value of its key")
    for place in set(range(64)) - set(others):
        expect(pool.buffers[place] == bytes([GUARD]) * 8192, "wrote into a slice that was not asked for")
    pool.check_guards()


@_case("put and get work with registered memory, and with other memory in the same batch")
def _registered(backend: Backend, rng: random.Random) -> None:
    pool = Pool([65_536] * 12)
    backend.register([pool.memory])
    keys = make_keys(rng, 6)
    values = [make_value(key, 65_536) for key in keys]
    for buffer, value in zip(pool.buffers[::2], values, strict=True):
        buffer[:] = value
    _put(backend, keys, pool.buffers[::2])
    lengths = backend.get(keys, pool.buffers[1::2])
    expect(list(lengths) == [65_536] * 6, f"get returned {lengths!r}")
    expect(pool.buffers[1::2] == values, "a registered slice does not hold the value of its key")
    pool.check_guards()
    other = Pool([65_536] * 3)
    mixed = [buffer for pair in zip(other.buffers, pool.buffers[:3], strict=True) for buffer in pair]
    backend.get(keys, mixed)
    expect(mixed == values, "with some buffers registered and others not, one does not hold the value of its key")
    other.check_guards()
    pool.check_guards()


@_case("a key may occur several times in a batch, and every buffer of it is filled")
def _duplicates(backend: Backend, rng: random.Random) -> None:
    one, other = make_keys(rng, 2)
    values = [make_value(one, 3000, version) for version in (1, 2)]
    stored = backend.put([one, other, one], [values[0], make_value(other, 3000), values[1]])
    expect(list(stored) == [True] * 3, f"put returned {stored!r}")
    pool = Pool([3000] * 4)
    lengths = backend.get([one, other, one, one], pool.buffers)
    expect(list(lengths) == [3000] * 4, f"get returned {lengths!r}")
    expect(pool.buffers[0] in values, "the value is neither of the two that were put")
    expect(pool.buffers[0] == pool.buffers[2] == pool.buffers[3], "buffers of one key differ")
    expect(pool.buffers[1] == make_value(other, 3000), "the key between the two has a wrong value")
    _expect_there(backend, [one, one, other], [True] * 3)
    backend.delete([one, one])
    _expect_there(backend, [one, other, one], [False, True, False])


@_case("put of an existing key replaces or keeps its value, as `capabilities.overwrites` says")
def _put_again(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, 4)
    for sizes in ([2000] * 4, [1999] * 4, [5000] * 4, [128, 300_000, 2000, 2001], [2 << 20, 1, 4096, 4097]):
        values = [[make_value(key, 2000, 1) for key in keys]]
        values.append([make_value(key, size, 2) for key, size in zip(keys, sizes, strict=True)])
        for first, second in (values, reversed(values)):
            backend.delete(keys)
            _put(backend, keys, first)
            stored = backend.put(keys, second)
            expect(list(stored) == [True] * 4, f"put of existing keys returned {stored!r}")
            left, other = (second, first) if backend.capabilities.overwrites else (first, second)
            _expect_values(backend, keys, left)
            pool = Pool(map(len, other))
            for length, buffer, kept, gone in zip(
                backend.get(keys, pool.buffers), pool.buffers, left, other, strict=True
            ):
                # Two stores at once may have one value each.
                expect(length == len(kept) or buffer == gone, f"get returned {length} for a value of {len(kept)} bytes")
            pool.check_guards()


@_case("delete removes the given keys and no others, and a missing key is not an error")
def _delete(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, 10)
    values: list[memoryview | None] = [make_value(key, 700) for key in keys]
    _put(backend, keys, [make_value(key, 700) for key in keys])
    backend.delete([keys[3], *make_keys(rng, 2), keys[7]])
    values[3] = values[7] = None
    _expect_values(backend, keys, values)
    _expect_there(backend, keys, [value is not None for value in values])
    backend.delete([keys[3]])
    _put(backend, [keys[3]], [make_value(keys[3], 700, 9)])
    values[3] = make_value(keys[3], 700, 9)
    _expect_values(backend, keys, values)


@_case("clear removes everything, may be repeated, and the store works afterwards")
def _clear(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, 40)
    values = [make_value(key, 1200) for key in keys]
    _put(backend, keys, values)
    backend.clear()
    _expect_there(backend, keys, [False] * len(keys))
    _expect_values(backend, keys, [None] * len(keys))
    backend.clear()
    _put(backend, keys, values)
    _expect_values(backend, keys, values)


@_case("one call accepts batches of 256")
def _large_batch(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, 256)
    values = [make_value(key, 300 + at) for at, key in enumerate(keys)]
    _put(backend, keys, values)
    _expect_there(backend, keys, [True] * 256)
    _expect_values(backend, keys, values)
    backend.delete([keys[200]])
    _expect_there(backend, keys, [at != 200 for at in range(256)])
    backend.delete(keys)
    _expect_there(backend, keys, [False] * 256)


@_case("a key may contain any byte at any place, also zeros and line ends")
def _key_bytes(backend: Backend, rng: random.Random) -> None:
    rest = rng.randbytes(KEY_BYTES - 1)
    keys = [bytes([byte]) * KEY_BYTES for byte in range(256)]
    keys += [bytes([byte]) + rest for byte in range(256)] + [rest + bytes([byte]) for byte in range(256)]
    keys = list(dict.fromkeys(keys))
    for at in range(0, len(keys), 256):
        _put(backend, keys[at : at + 256], [make_value(key, 40) for key in keys[at : at + 256]])
    for at in range(0, len(keys), 256):
        _expect_values(backend, keys[at : at + 256], [make_value(key, 40) for key in keys[at : at + 256]])
    _expect_there(backend, keys, [True] * len(keys))


@_case("`scan` lists every value once or twice with its length, or the store says that it cannot list")
def _scan(backend: Backend, rng: random.Random) -> None:
    if not _lists(backend):
        return
    sizes = dict(zip(make_keys(rng, 40), [*MIXED_SIZES, *range(1, 31)], strict=True))
    keys = list(sizes)
    _put(backend, keys, [make_value(key, sizes[key]) for key in keys])
    for gone in ([], keys[3:9], keys):
        backend.delete(gone)
        left = {key: size for key, size in sizes.items() if key not in gone}
        found = [value for batch in backend.scan() for value in batch]
        listed = {value.key: value.length for value in found}
        expect(listed == left, f"{len(listed)} of {len(left)} values were listed, or others, or with other lengths")
        expect(all(value.age_s is None or 0 <= value.age_s < 3600 for value in found), "a new value is not new")


@_case("a value that is there all the time is listed by `scan`, whatever comes and goes meanwhile")
def _scan_while_writing(backend: Backend, rng: random.Random) -> None:
    if not _lists(backend):
        return
    stays, goes, comes = (make_keys(rng, count) for count in (20, 20, 20))
    _put(backend, goes + stays, [make_value(key, 50) for key in goes + stays])
    batches = backend.scan()
    listed = {value.key for value in next(batches, ())}
    backend.delete(goes)
    _put(backend, comes, [make_value(key, 60) for key in comes])
    listed |= {value.key for batch in batches for value in batch}
    expect(listed >= {*stays}, f"{len({*stays} - listed)} of {len(stays)} values were not listed")
    expect(listed <= {*stays, *goes, *comes}, "a key was listed that never was there")


def _lists(backend: Backend) -> bool:
    """Returns whether a store can list its values."""
    try:
        next(iter(backend.scan()), None)
    except StorageError as error:
        expect(error.cause == "refused", f"a store that cannot list raised {error.cause!r}, not 'refused'")
        return False
    return True


@_case("counts in `stats` are None, or agree with the stored values")
def _stats(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, 20)
    _put(backend, keys, [make_value(key, 4000) for key in keys])
    stats = backend.stats()
    expect(stats.entries is None or stats.entries >= 20, f"{stats.entries} entries, 20 were stored")
    expect(stats.used_bytes is None or stats.used_bytes >= 20, f"{stats.used_bytes} bytes used by 20 values")
    expect(stats.capacity_bytes is None or stats.capacity_bytes >= (stats.used_bytes or 1), f"inconsistent: {stats}")
    expect(stats.evicted >= 0, f"inconsistent: {stats}")


@_case("lists of different lengths raise ValueError, and a key without a value gets none")
def _lengths_differ(backend: Backend, rng: random.Random) -> None:
    one, other = make_keys(rng, 2)
    value = make_value(one, 600)
    for keys, values in (([one], []), ([], [value]), ([], [value, value])):
        for name, call in (("put", backend.put), ("get", backend.get)):
            what = f"{name} of {len(keys)} keys and {len(values)} buffers"
            _expect_raises(ValueError, what, lambda call=call, keys=keys, values=values: call(keys, values))  # type: ignore[misc]
        _expect_there(backend, [one], [False])
    _expect_raises(ValueError, "put of 2 keys and 1 buffer", lambda: backend.put([one, other], [value]))
    _expect_raises(ValueError, "get of 2 keys and 1 buffer", lambda: backend.get([one, other], [value]))
    there, other_there = backend.exists([one, other])
    expect(not other_there, "put stored a value under a key that was given none")
    _expect_values(backend, [one], [make_value(one, 600) if there else None])


@_case("threads read and write the same keys concurrently, and every value read is whole")
def _threads(backend: Backend, rng: random.Random) -> None:
    _concurrently(backend, rng, [20_000])


@_case("threads replace values by others of another length, and every value read is whole")
def _threads_mixed_sizes(backend: Backend, rng: random.Random) -> None:
    _concurrently(backend, rng, [9_000, 20_000])


def _concurrently(backend: Backend, rng: random.Random, sizes: Sequence[int]) -> None:
    keys = make_keys(rng, 16)
    with ThreadPoolExecutor(4) as threads:
        rounds = [threads.submit(_rounds, backend, keys, sizes, random.Random(rng.random()), n) for n in range(4)]
    for done in rounds:
        done.result()


def _rounds(backend: Backend, keys: Sequence[bytes], sizes: Sequence[int], rng: random.Random, number: int) -> None:
    for round_number in range(12):
        some = rng.sample(keys, 5)
        version = number << 16 | round_number
        if rng.random() < 0.5:
            backend.put(some, [make_value(key, rng.choice(sizes), version) for key in some])
        if rng.random() < 0.2:
            backend.delete(some[:1])
        pool = Pool(rng.choice(sizes) for _ in some)
        for key, buffer, length in zip(some, pool.buffers, backend.get(some, pool.buffers), strict=True):
            size, found = len(buffer), int.from_bytes(buffer[-4:], "big")
            expect(length in (ABSENT, *sizes), f"get returned {length}, every value has one of {sizes} bytes")
            expect(length != size or buffer == make_value(key, size, found), "a value is torn, or another key's")
        there = backend.exists(some)
        expect(len(there) == 5 and set(there) <= {True, False}, f"exists returned {there!r}")
        pool.check_guards()


@_case("after close every call raises StorageError with the cause `closed`, and a second close does nothing")
def _close(backend: Backend, rng: random.Random) -> None:
    keys = make_keys(rng, 1)
    value = make_value(keys[0], 100)
    _put(backend, keys, [value])
    lists = _lists(backend)
    backend.close()
    backend.close()
    calls: dict[str, Callable[[], object]] = {
        "exists": lambda: backend.exists(keys),
        "get": lambda: backend.get(keys, [value]),
        "put": lambda: backend.put(keys, [value]),
        "delete": lambda: backend.delete(keys),
        "clear": backend.clear,
        "stats": backend.stats,
        **({"scan": lambda: list(backend.scan())} if lists else {}),
    }
    for name, call in calls.items():
        error = _expect_raises(StorageError, f"{name} after close", call)
        cause = getattr(error, "cause", None)
        expect(cause == "closed", f"{name} after close raised StorageError with the cause {cause!r}, not 'closed'")
