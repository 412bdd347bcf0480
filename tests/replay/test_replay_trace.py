"""Traces: batches, their file, and errors for damaged and foreign files."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import numpy as np
import pytest

from mainstem.errors import BadArgument
from mainstem.replay import trace as module
from mainstem.replay.trace import Batch, Seen, Trace, TraceError, mix

PATHS = [[1, 2, 3], [1, 2, 4], [], [5], [1, 2, 3, 6]]


def equal(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in Batch.__slots__)


def named() -> Trace:
    """Returns a trace with every field set; its last block is partial."""
    batch = Batch.of(
        PATHS,
        block_size=16,
        input_tokens=[48, 48, 7, 16, 63],
        output_tokens=[1, 2, 3, 4, 5],
        tenant=[0, 1, 1, 2, 0],
        kind=[1, 0, 0, 0, 1],
        chat=[7, 7, -1, 9, 2**62],
        turn=[1, 2, 0, 1, 3],
    )
    tenants, kinds = ("", "a", "Ω\n"), ("", "text")
    return Trace.of(batch, block_size=16, name="named", tenants=tenants, kinds=kinds, notes=("Said.",))


def test_a_batch_knows_where_its_blocks_belong() -> None:
    batch = Batch.of(PATHS, block_size=16, input_tokens=[48, 48, 7, 16, 63])
    assert batch.lengths.tolist() == [3, 3, 0, 1, 4]
    assert batch.depths.tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.owners.tolist() == [0, 0, 0, 1, 1, 1, 3, 4, 4, 4, 4]
    assert batch.tokens(16).tolist() == [16] * 10 + [15]
    assert equal(batch.slice(1, 4), Batch.of(PATHS[1:4], block_size=16, time_s=[1, 2, 3], input_tokens=[48, 7, 16]))
    assert batch.take(np.array([4, 0])).blocks.tolist() == [1, 2, 3, 6, 1, 2, 3]


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(BadArgument, match="time_s"):
        Batch.of(PATHS, colour=[1])


@pytest.mark.parametrize("column", ["time_s", "blocks", "turn"])
def test_a_column_of_another_length_is_refused(column: str) -> None:
    columns = {name: getattr(Batch.of(PATHS), name) for name in Batch.__slots__}
    columns[column] = columns[column][:-1]
    with pytest.raises(BadArgument, match=column):
        Trace.of(Batch(**columns))


@pytest.mark.parametrize(
    ("column", "value"),
    [("time_s", np.nan), ("time_s", np.inf), ("input_tokens", -1), ("output_tokens", 2**41), ("tenant", 1),
     ("kind", -1), ("chat", -2), ("turn", -1), ("input_tokens", 2)],
)  # fmt: skip
def test_invalid_values_in_a_column_are_refused(column: str, value: float) -> None:
    with pytest.raises(TraceError, match=r"blocks" if value == 2 else column):
        Trace.of(Batch.of([[1, 2, 3]], **{column: [value]}))


def test_requests_are_sorted_by_time_and_times_count_from_the_first() -> None:
    paths = [[1], [2, 3], [4, 5, 6], [7]]
    trace = Trace.of(Batch.of(paths, time_s=[107, 105, 109, 105]))
    assert trace.whole.time_s.tolist() == [0, 0, 2, 4]
    assert trace.whole.blocks.tolist() == [2, 3, 7, 1, 4, 5, 6]
    assert trace.whole.offsets.tolist() == [0, 2, 3, 4, 7]
    assert trace.notes == ("Requests that were out of order, and sorted by time: 2.",)
    late = Trace.of(Batch.of(paths, time_s=[5, 1, 2, 3])).notes
    assert late == ("Requests that were out of order, and sorted by time: 3.",)
    assert Trace.of(Batch.of(paths)).notes == ()


def test_sorting_many_is_as_sorting_few(monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(5)
    paths = [[random_.getrandbits(64) for _ in range(random_.randrange(9))] for _ in range(300)]
    batch = Batch.of(paths, time_s=[random_.randrange(90) for _ in paths], input_tokens=[9] * len(paths))
    expected = Trace.of(batch).whole
    monkeypatch.setattr(module, "_SORTED_REQUESTS", 7)
    assert equal(Trace.of(batch).whole, expected)
    assert equal(expected, Trace.of(batch.take(np.argsort(batch.time_s, kind="stable"))).whole)


def test_batches_are_the_whole_and_no_request_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_BLOCKS", 4)
    paths = [[1], [1, 2], [1, 2, 3, 4, 5, 6], [], [9], [9, 1, 2, 3]]
    trace = Trace.of(Batch.of(paths))
    for _ in range(2):  # repeatedly
        batches = list(trace.batches())
        assert [len(batch) for batch in batches] == [2, 1, 2, 1]
        assert [batch.blocks.tolist() for batch in batches] == [[1, 1, 2], paths[2], [9], paths[5]]
    monkeypatch.setattr(module, "_BATCH_REQUESTS", 1)
    assert [len(batch) for batch in trace.batches()] == [1] * 6


def test_batches_may_come_one_by_one_and_names_grow_meanwhile() -> None:
    tenants = {"": 0}

    def batches() -> object:
        for name in ("a", "b"):
            tenants[name] = len(tenants)
            yield Batch.of([[1]], time_s=[tenants[name]], tenant=[tenants[name]])

    trace = Trace.of(batches(), tenants=tenants)  # type: ignore[arg-type]
    assert trace.tenants == ("", "a", "b")
    assert trace.whole.tenant.tolist() == [1, 2]


@pytest.mark.parametrize("trace", [named(), Trace.of([])], ids=["all", "empty"])
def test_what_is_saved_is_opened_again(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "t.mstrace"
    trace.save(path)
    again = Trace.open(path)
    assert [name.name for name in tmp_path.iterdir()] == ["t.mstrace"]
    assert equal(again.whole, trace.whole)
    for name in ("name", "block_size", "tenants", "kinds", "notes", "distinct_blocks"):
        assert getattr(again, name) == getattr(trace, name)
    assert len(again) == len(trace) == sum(len(batch) for batch in again.batches())
    again.save(path)  # over its own file
    assert equal(Trace.open(path).whole, trace.whole)


def test_a_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        named().save(tmp_path / "t.mstrace")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "t.mstrace").stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.mstrace").mkdir()
    with pytest.raises(OSError, match="directory"):
        named().save(tmp_path / "t.mstrace")
    assert [path.name for path in tmp_path.iterdir()] == ["t.mstrace"]


def test_columns_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        named().whole.blocks[0] = 1


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.mstrace"
    named().save(path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(TraceError, match=r"cut short|damaged"):
            Trace.open(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(TraceError, match="too long"):
        Trace.open(path)


def test_a_file_with_one_changed_byte_is_refused_or_keeps_the_guarantees_of_traces(tmp_path: Path) -> None:
    path = tmp_path / "t.mstrace"
    named().save(path)
    data = path.read_bytes()
    refused = 0
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            trace = Trace.open(path)
        except TraceError:
            refused += 1
            continue
        assert at >= 64
        assert (np.diff(trace.whole.time_s) >= 0).all()
        assert sum(len(batch) for batch in trace.batches()) == len(PATHS)
    assert refused > 64


@pytest.mark.parametrize("data", [b"", b"{}", b"PK\3\4" * 40, b"MSTRACE\0" + b"\xff" * 80])
def test_a_foreign_file_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.mstrace"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"cut short|begins with|version"):
        Trace.open(path)


def test_seen_finds_first_uses_like_a_set_does() -> None:
    random_ = random.Random(3)
    seen, reference = Seen(), set()
    for size in (0, 1, 5, 100, 3, 3, 400, 2, 50, 0, 700):
        blocks = [random_.randrange(500) for _ in range(size)]
        expected = []
        for block in blocks:
            expected.append(block not in reference)
            reference.add(block)
        assert seen.add(np.array(blocks, dtype=np.uint64)).tolist() == expected
        assert len(seen) == len(reference)


def test_distinct_blocks_are_counted_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_BLOCKS", 3)
    trace = Trace.of(Batch.of(PATHS))
    assert trace.distinct_blocks == trace.distinct_blocks == 6


def test_mixing_is_as_published() -> None:
    """SplitMix64 with the seed 1234567, as its reference implementation prints it."""
    state, step = 1234567, 0x9E3779B97F4A7C15
    states = np.array([(state + n * step) % 2**64 for n in (1, 2, 3)], dtype=np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
