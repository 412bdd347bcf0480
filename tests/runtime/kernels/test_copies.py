"""`copy_rows` compared with NumPy, and a transfer whose copies fail, wait and are polled."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from machine import patience
from numpy.typing import NDArray

from mainstem._core import copy_rows
from mainstem.errors import BadArgument
from mainstem.runtime.memory.copies import Copier, Copy, LayerCopies, Transfer

Ids = NDArray[np.int32]


def table(rows: int, size: int, stride: int, offset: int, seed: int) -> NDArray[np.uint8]:
    """Returns random rows `stride` bytes apart, the first one `offset` bytes after the start of a cache line."""
    memory = np.random.default_rng(seed).integers(0, 256, rows * stride + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    return np.lib.stride_tricks.as_strided(memory[begin:], (rows, size), (stride, 1))


def ids(*page_ids: int) -> Ids:
    return np.array(page_ids, dtype=np.int32)


@pytest.mark.parametrize("size", [1, 63, 2047, 2048, 2064, 2100, 12288])
@pytest.mark.parametrize(("gap", "offset"), [(0, 0), (64, 0), (6, 16), (7, 3)])
@pytest.mark.parametrize("order", ["scattered", "runs", "reversed"])
def test_rows_are_copied_and_nothing_else(size: int, gap: int, offset: int, order: str) -> None:
    """Sizes and counts on both sides of the threshold for streaming stores."""
    rng = np.random.default_rng(size)
    for count in (0, 1, 5, 1 + (3 << 19) // size if size > 1000 else 100):
        rows = count + 3
        source, target = table(rows, size, size + gap, offset, 1), table(rows, size, size + 2 * gap, offset, 2)
        if order == "scattered":
            sources, targets = rng.permutation(rows)[:count], rng.permutation(rows)[:count]
        elif order == "runs":
            sources, targets = np.arange(count) + 3, np.arange(count) + 1
        else:
            sources, targets = np.arange(count)[::-1], np.arange(count)
        expected = np.lib.stride_tricks.as_strided(target, (rows, size + 2 * gap), target.strides)[:-1].copy()
        expected[targets[targets < rows - 1], :size] = source[sources[targets < rows - 1]]
        copy_rows(target, targets.astype(np.int32), source, sources.astype(np.int32))
        assert np.array_equal(target[targets], source[sources])
        after = np.lib.stride_tricks.as_strided(target, (rows, size + 2 * gap), target.strides)[:-1]
        assert np.array_equal(after, expected)


@pytest.mark.parametrize(
    ("target", "targets", "source", "sources", "name"),
    [
        (table(4, 8, 8, 0, 0), ids(4), table(4, 8, 8, 0, 0), ids(0), "targets"),
        (table(4, 8, 8, 0, 0), ids(0), table(4, 8, 8, 0, 0), ids(-1), "sources"),
        (table(4, 8, 8, 0, 0), ids(0, 1), table(4, 8, 8, 0, 0), ids(0), "sources"),
        (table(4, 8, 8, 0, 0), ids(0), table(4, 7, 8, 0, 0), ids(0), "bytes per row"),
        (table(4, 8, 8, 0, 0)[:, ::2], ids(0), table(4, 4, 8, 0, 0), ids(0), "target"),
    ],
)
def test_rows_that_do_not_exist_are_rejected(target: Any, targets: Ids, source: Any, sources: Ids, name: str) -> None:
    before = target.copy()
    with pytest.raises(BadArgument) as caught:
        copy_rows(target, targets, source, sources)
    assert caught.value.name == name
    assert np.array_equal(target, before)


class Marks(Copier):
    """A device whose copies have marks 1, 2, 3, ...; those up to `reached` have ended."""

    def __init__(self) -> None:
        self.begun = self.reached = 0
        self.held: list[int] = []
        self.fails_at = 0
        self.dead = False

    def copy(self, copies: Sequence[Copy], fence: Any) -> Any:
        if self.begun + 1 == self.fails_at:
            raise RuntimeError("the device is out of memory")
        self.begun += 1
        return self.begun

    def passed(self, mark: Any) -> bool:
        if self.dead:
            raise RuntimeError("the device is gone")
        return bool(mark <= self.reached)

    def hold(self, mark: Any) -> None:
        self.held.append(mark)

    def finish(self, mark: Any) -> None:
        self.reached = max(self.reached, mark)


def transfer(copier: Marks, layers: Sequence[int] = (0, 1, 2)) -> Transfer:
    return Transfer([LayerCopies(layer, []) for layer in layers], copier)


def test_a_transfer_is_done_when_the_device_is_done() -> None:
    copier = Marks()
    ticket = transfer(copier)
    for _ in range(3):
        assert not ticket.ended
        ticket.advance()
    assert ticket.ended
    assert not ticket.done()
    ticket.wait()
    assert copier.reached == 3
    assert ticket.done()
    assert ticket.error is None


def test_a_reader_waits_for_the_last_step_up_to_its_layer() -> None:
    copier = Marks()
    ticket = transfer(copier, layers=(1, 3))
    ticket.wait_layer(0)
    assert copier.held == []
    ticket.advance()
    ticket.wait_layer(1)
    ticket.wait_layer(2)
    assert copier.held == [1, 1]
    ticket.advance()
    ticket.wait_layer(3)
    ticket.wait_layer(9)
    assert copier.held == [1, 1, 2, 2]


def test_a_failed_copy_ends_the_transfer_and_releases_readers() -> None:
    copier = Marks()
    copier.fails_at = 2
    ticket = transfer(copier)
    reader = threading.Thread(target=ticket.wait_layer, args=(2,))
    waiter = threading.Thread(target=ticket.wait)
    reader.start()
    waiter.start()
    ticket.advance()
    assert reader.is_alive()
    ticket.advance()
    for thread in (reader, waiter):
        thread.join(patience(60))
        assert not thread.is_alive()
    assert isinstance(ticket.error, RuntimeError)
    assert copier.reached == 1  # copies begun before still have to end
    assert ticket.done()


def test_a_device_that_dies_after_the_last_copy_fails_the_transfer() -> None:
    copier = Marks()
    ticket = transfer(copier, layers=(0,))
    ticket.advance()
    copier.dead = True
    assert ticket.done()
    assert "gone" in str(ticket.error)


def test_a_bug_ends_the_transfer_and_is_raised() -> None:
    class Buggy(Marks):
        def copy(self, copies: Sequence[Copy], fence: Any) -> Any:
            raise TypeError

    ticket = transfer(Buggy())
    with pytest.raises(TypeError):
        ticket.advance()
    assert ticket.done()
    assert ticket.error is not None
