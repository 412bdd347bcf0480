"""Registered memory, the staging buffer and the counted calls, with a client that keeps values in a dict."""

from __future__ import annotations

import ctypes
import threading

import pytest
from machine import patience

from mainstem.errors import StorageError
from mainstem.storage.calls import Calls
from mainstem.storage.native import Memory, address_of


class Client:
    """Reads and writes raw memory, but only registered memory."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.values: dict[int, bytes] = {}
        self.calls: list[list[int]] = []

    def memory(self, staging_bytes: int = 256) -> Memory:
        return Memory(self.registered.__setitem__, lambda address, size: self.registered.pop(address), staging_bytes)

    def write(self, part: slice, addresses: list[int], sizes: list[int]) -> list[int]:
        self.check(part, addresses, sizes)
        self.values |= {
            at: ctypes.string_at(address, size) for at, address, size in self.places(part, addresses, sizes)
        }
        return sizes

    def read(self, part: slice, addresses: list[int], sizes: list[int]) -> list[int]:
        self.check(part, addresses, sizes)
        for at, address, size in self.places(part, addresses, sizes):
            ctypes.memmove(address, self.values[at][:size], min(size, len(self.values[at])))
        return [len(self.values[at]) for at, _, _ in self.places(part, addresses, sizes)]

    def places(self, part: slice, addresses: list[int], sizes: list[int]) -> list[tuple[int, int, int]]:
        return list(zip(range(part.start, part.stop), addresses, sizes, strict=True))

    def check(self, part: slice, addresses: list[int], sizes: list[int]) -> None:
        self.calls.append(sizes)
        for _, address, size in self.places(part, addresses, sizes):
            assert any(start <= address and address + size <= start + n for start, n in self.registered.items())


def buffer(size: int, fill: int = 0) -> memoryview:
    return memoryview(bytearray([fill]) * size)


def test_the_address_is_where_the_bytes_are() -> None:
    pool = buffer(10)
    pool[3] = 77
    assert ctypes.string_at(address_of(pool[3:]), 1) == b"\x4d"
    assert address_of(pool[3:]) == address_of(pool) + 3
    assert address_of(pool[:0]) == 0


def test_registered_and_other_buffers_in_one_batch() -> None:
    client = Client()
    memory = client.memory()
    pool = buffer(300, 1)
    memory.register([pool])
    memory.register([pool[10:20]])
    assert len(client.registered) == 1
    batch = [pool[:100], buffer(50, 2), pool[200:300], buffer(60, 3)]
    assert memory.send(batch, client.write) == [100, 50, 100, 60]
    assert memory.staged == 2
    assert len(client.calls) == 1
    back = [buffer(100), pool[100:150], buffer(100), buffer(60)]
    memory.receive(back, client.read)
    assert back == batch


def test_a_batch_is_split_where_the_staging_buffer_is_full() -> None:
    client = Client()
    memory = client.memory(staging_bytes=256)
    batch = [buffer(size, at) for at, size in enumerate((100, 100, 256, 1, 60, 64, 64, 200))]
    memory.send(batch, client.write)
    assert client.calls == [[100, 100], [256], [1, 60, 64, 64], [200]]
    assert [client.values[at] for at in range(8)] == [bytes(each) for each in batch]
    back = [buffer(len(each)) for each in batch]
    memory.receive(back, client.read)
    assert back == batch


def test_an_unregistered_buffer_of_another_length_is_not_changed() -> None:
    client = Client()
    memory = client.memory()
    memory.send([buffer(50, 5), buffer(50, 6)], client.write)
    back = [buffer(40, 9), buffer(50, 9)]
    assert memory.receive(back, client.read) == [50, 50]
    assert back == [buffer(40, 9), buffer(50, 6)]


def test_a_value_longer_than_the_staging_buffer_is_refused() -> None:
    client = Client()
    memory = client.memory(staging_bytes=64)
    with pytest.raises(StorageError, match="65 bytes"):
        memory.send([buffer(65)], client.write)
    large = buffer(65)
    memory.register([large])
    assert memory.send([large], client.write) == [65]


def test_close_deregisters_everything() -> None:
    client = Client()
    memory = client.memory()
    memory.register([buffer(10), buffer(10)])
    memory.send([buffer(20)], client.write)
    assert len(client.registered) == 3
    memory.close()
    assert client.registered == {}


def test_calls_end_before_close_and_none_begins_after_it() -> None:
    calls = Calls("the test store")
    inside, leave, events = threading.Event(), threading.Event(), []

    def work() -> None:
        with calls.call():
            inside.set()
            leave.wait(patience(10))
            events.append("call ended")

    worker = threading.Thread(target=work)
    worker.start()
    inside.wait(patience(10))
    closer = threading.Thread(target=lambda: events.append(calls.close()))
    closer.start()
    while True:  # until close rejects new calls
        try:
            with calls.call():
                pass
        except StorageError:
            break
    leave.set()
    closer.join()
    worker.join()
    assert events == ["call ended", True]
    assert not calls.close()
