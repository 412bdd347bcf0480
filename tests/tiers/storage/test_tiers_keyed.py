"""`KeyedPages`: pages under an engine's keys. Every fault is a miss, and no back end touches the engine's memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from machine import patience
from rigs.hand_driven import IDENTITY, SECRET, FaultyBackend
from rigs.kept_store import KeptStore

from mainstem.errors import StorageError
from mainstem.settings.engine import StorageConfig
from mainstem.tiers.keyed import KeyedPages, Kind
from mainstem.tiers.storage.sealer import HEADER_BYTES, Sealer

PAYLOAD = 24
KEYS = [f"{number:064x}" for number in range(10)]


class Memory:
    """Pages of an engine."""

    def __init__(self, pages: int = len(KEYS)) -> None:
        self.pages = [bytes([page + 1]) * PAYLOAD for page in range(pages)]

    def fill(self, at: int, payload: memoryview) -> None:
        payload[:] = self.pages[at]

    def take(self, at: int, payload: memoryview) -> None:
        self.pages[at] = bytes(payload)


class Rig:
    """Keyed pages over a store with faults."""

    def __init__(self, backend: FaultyBackend, clock: Callable[[], float] | None = None, **config: Any) -> None:
        self.backend = backend
        self.pages = KeyedPages(
            backend, Sealer(IDENTITY, SECRET), StorageConfig(**config), **({} if clock is None else {"clock": clock})
        )
        self.kind = self.pages.add("kv", PAYLOAD)

    def store(self, keys: list[str] = KEYS) -> int:
        return self.pages.write(self.kind, keys, Memory().fill)

    def load(self, keys: list[str] = KEYS) -> list[bytes]:
        """Returns the pages that were taken."""
        memory = Memory()
        memory.pages = [b""] * len(keys)
        done = self.pages.read(self.kind, keys, memory.take)
        assert not any(memory.pages[done:]), "a page was taken that is not counted"
        return memory.pages[:done]

    def there(self, keys: list[str] = KEYS) -> list[bool]:
        return self.pages.exist([(self.kind, keys)])[0]


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def rig(backend: FaultyBackend | None = None, **options: Any) -> Rig:
        rigs.append(Rig(backend or KeptStore(), **options))
        return rigs[-1]

    yield rig
    for each in rigs:
        each.pages.close()


def test_pages_come_back_in_any_number_of_batches(make: Callable[..., Rig]) -> None:
    for batch_pages, batches in ((1, 1), (3, 2), (4, 1), (32, 4)):
        rig = make(batch_pages=batch_pages, batches=batches, writes=batches)
        assert rig.store() == len(KEYS)
        assert rig.there() == [True] * len(KEYS)
        assert rig.load() == Memory().pages
        assert rig.load(KEYS[3:5]) == Memory().pages[3:5]
        assert rig.pages.faults == {}


def test_nothing_is_asked_for_nothing(make: Callable[..., Rig]) -> None:
    rig = make()
    assert (rig.store([]), rig.load([]), rig.there([])) == (0, [], [])
    assert rig.backend.calls == []


def test_a_read_ends_at_the_first_page_that_is_missing(make: Callable[..., Rig]) -> None:
    rig = make(batch_pages=3)
    rig.store(KEYS[:4])
    assert rig.there() == [True] * 4 + [False] * 6
    assert rig.load() == Memory().pages[:4]


def test_a_page_that_was_altered_is_a_miss_and_counted_and_logged_once(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(batch_pages=2, writes=1)
    rig.store()
    for number in (5, 6, 7):
        key = rig.backend.stored_keys()[number]
        rig.backend.set_value(key, rig.backend.value(key)[:-1] + b"!")
    with caplog.at_level(logging.WARNING):
        assert rig.load() == Memory().pages[:5]
        assert rig.load(KEYS[6:]) == []
    rig.pages.close()  # what was read ahead has ended
    assert rig.pages.faults["altered"] >= 2
    assert len([text for text in caplog.messages if "altered" in text]) == 1


def test_kinds_and_identities_are_kept_apart(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.store()
    other = rig.pages.add("states", PAYLOAD)
    assert rig.pages.exist([(rig.kind, KEYS), (other, KEYS)]) == [[True] * 10, [False] * 10]
    stranger = Rig(rig.backend)
    assert stranger.there() == [True] * 10
    assert KeyedPages(rig.backend, Sealer(IDENTITY, SECRET[::-1])).exist([(rig.kind, KEYS)]) == [[False] * 10]


def test_a_dead_store_is_a_miss_of_everything(make: Callable[..., Rig]) -> None:
    rig = make(breaker_failures=2, breaker_cooldown_s=1e6)
    rig.store()
    rig.backend.always = StorageError("unreachable", "no")
    assert (rig.there(), rig.load(), rig.store(KEYS[:1])) == ([False] * 10, [], 0)
    assert rig.pages.faults["unreachable"] == 2
    calls = len(rig.backend.calls)
    assert rig.there() == [False] * 10
    assert len(rig.backend.calls) == calls, "an open breaker makes no calls"


def test_a_store_that_takes_a_part_of_a_batch(make: Callable[..., Rig]) -> None:
    rig = make(batch_pages=2, writes=1)
    real = super(FaultyBackend, rig.backend).put
    rig.backend.instead["put"] = lambda keys, buffers: (
        real(keys, buffers) if len(rig.backend.stored_keys()) < 4 else [real(keys[:1], buffers[:1])[0], False]
    )
    assert rig.store() == 4
    assert rig.pages.faults["full"] == 1


class Late:
    """A back end's method that does not return before it may, and a clock that is then past every deadline."""

    def __init__(self, backend: FaultyBackend, method: str) -> None:
        self.began, self.may = threading.Event(), threading.Event()
        self._real = getattr(super(FaultyBackend, backend), method)
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        self.began.set()
        assert self.may.wait(patience(60))
        return self._real(*arguments)

    def clock(self) -> float:
        self.seconds += 100.0 if self.began.is_set() and not self.may.is_set() else 0.0
        return self.seconds


@pytest.mark.deadline
@pytest.mark.parametrize("method", ["exists", "get", "put"])
def test_a_call_that_is_late_is_a_miss_and_never_writes_to_memory_that_is_in_use(
    make: Callable[..., Rig], method: str
) -> None:
    backend = KeptStore()
    late = Late(backend, method)
    rig = make(backend, clock=late.clock, batches=1, writes=1, batch_pages=32)
    if method != "put":
        rig.store()
    backend.instead[method] = late
    assert (rig.load() if method == "get" else rig.store() if method == "put" else sum(rig.there())) in ([], 0)
    assert rig.pages.faults["timeout"] == 1
    if method != "exists":  # its slots are still in use
        assert (rig.load() if method == "get" else rig.store()) in ([], 0)
        assert rig.pages.faults["busy"] == 1
    late.may.set()
    del backend.instead[method]
    rig.pages.close(patience(60))
    again = make(backend)
    assert again.store() == len(KEYS)
    assert again.load() == Memory().pages


def test_an_error_of_the_engine_releases_the_slots(make: Callable[..., Rig]) -> None:
    rig = make(batches=1, writes=1, batch_pages=4)

    def fail(at: int, payload: memoryview) -> None:
        raise RuntimeError("of the engine")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="of the engine"):
            rig.pages.write(rig.kind, KEYS, fail)
    assert rig.store() == len(KEYS)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="of the engine"):
            rig.pages.read(rig.kind, KEYS, fail)
    assert rig.load() == Memory().pages


def test_slots_are_registered_and_no_batch_is_larger_than_its_limit(make: Callable[..., Rig]) -> None:
    class Registering(KeptStore):
        regions: list[memoryview] = []  # noqa: RUF012

        def register(self, buffers: Any) -> None:
            self.regions.extend(buffers)

        def put(self, keys: Any, buffers: Any) -> list[bool]:
            for buffer in buffers:
                assert any(_inside(buffer, region) for region in self.regions)
            return super().put(keys, buffers)

    backend = Registering()
    rig = make(backend, batch_pages=32)
    large: Kind = rig.pages.add("large", 40 << 20)
    assert len(backend.regions) == 4
    assert (large.batch_pages, large.reading.count) == (1, 4)
    assert rig.store() == len(KEYS)


def _inside(buffer: memoryview, region: memoryview) -> bool:
    import numpy as np

    at, start = (np.frombuffer(view, np.uint8).ctypes.data for view in (buffer, region))
    return start <= at and at + len(buffer) <= start + len(region) and at % 64 == 0 and len(buffer) > HEADER_BYTES


def test_clear_deletes_everything(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.store()
    assert rig.pages.clear()
    assert rig.there() == [False] * len(KEYS)
    rig.backend.clear = lambda: (_ for _ in ()).throw(StorageError("refused", "no"))  # type: ignore[method-assign]
    assert not rig.pages.clear()
    assert rig.pages.faults == {"refused": 1}


def test_pages_of_another_layout_are_explained_at_the_start(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    from dataclasses import replace

    rig = make()
    rig.pages.enter_identity()
    changed = Sealer(replace(IDENTITY, page_size=IDENTITY.page_size * 2), SECRET)
    KeyedPages(rig.backend, changed).enter_identity()
    (text,) = [text for text in caplog.messages if "are not found, because they differ" in text]
    assert f"page_size {IDENTITY.page_size}" in text or f"page size {IDENTITY.page_size}" in text
