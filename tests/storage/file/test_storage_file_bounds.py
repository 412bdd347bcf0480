"""How often the file store asks the disk, when it rewrites its index, and how large it is by default; what a copy of a
store tries again."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from rigs.hand_driven import Clock

from mainstem.errors import StorageError
from mainstem.storage.file.backend import FileBackend
from mainstem.storage.file.disk import Reserve
from mainstem.storage.file.index import Index
from mainstem.storage.moving import _try


def test_the_disk_is_asked_once_a_second_for_its_room() -> None:
    clock, asked = Clock(), list[float]()

    def free() -> int:
        asked.append(clock.now_s)
        return 100

    folder: Any = SimpleNamespace(free_bytes=free, allocate=lambda *_: None)
    reserve = Reserve(folder, 10, clock)
    for after_s in (0.0, 0.5, 0.999, 1.0, 1.5, 2.0, 2000.0, 2000.0):
        clock.now_s = 1000.0 + after_s
        assert reserve.extend(0, 1)
    assert [at_s - 1000.0 for at_s in asked] == [0.0, 1.0, 2.0, 2000.0]
    assert not reserve.extend(0, 89) and reserve.extend(0, 88)


@pytest.mark.parametrize(("places", "live", "long"), [(1024, 0, False), (1025, 0, True), (1224, 100, False),
                                                     (1225, 100, True), (1_024_000, 0, True)])  # fmt: skip
def test_an_index_is_rewritten_at_twice_its_records_and_1024_more(places: int, live: int, long: bool) -> None:
    index: Any = SimpleNamespace(_places=places - 1)
    assert Index.is_long(index, live, 1) == long


def test_a_store_has_eight_gibibytes_where_no_capacity_is_given(tmp_path: Path) -> None:
    class Seen(FileBackend):
        given: dict[str, Any]

        def __new__(cls, *_: Any, **given: Any) -> Self:
            cls.given = given
            return object.__new__(cls)

        def __init__(self, *_: Any, **given: Any) -> None:
            pass

    Seen.from_spec(str(tmp_path), {})
    assert Seen.given == {"capacity_bytes": 8 << 30}
    Seen.from_spec(str(tmp_path), {"capacity": "1MiB"})
    assert Seen.given == {"capacity_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("fails", "slept"), [(0, []), (1, [0.1]), (4, [0.1, 0.5, 2.0, 5.0]), (5, [0.1, 0.5, 2.0, 5.0])]
)
def test_a_batch_that_fails_is_moved_again_four_times(fails: int, slept: list[float]) -> None:
    naps, calls = list[float](), iter(range(100))

    def work(batch: Any) -> None:
        if next(calls) < fails:
            raise StorageError("unreachable", "for a moment")

    if fails < 5:
        _try(work, [], threading.Event(), naps.append)
    else:
        with pytest.raises(StorageError):
            _try(work, [], threading.Event(), naps.append)
    assert naps == slept and next(calls) == min(fails + 1, 5)
