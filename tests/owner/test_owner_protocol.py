"""Messages that are none, and clients that break the rules: an owner cuts them off, and nobody else."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from machine import eventually, patience
from rigs.owners import MIB, Served, served
from rigs.stores import Values

from mainstem.errors import BackendUnavailable, StorageError
from mainstem.owner import memory
from mainstem.owner.client import status
from mainstem.owner.protocol import (
    MAX_BYTES,
    MAX_KEYS,
    VERSION,
    Channel,
    Hello,
    Kind,
    Malformed,
    Welcome,
    new_socket,
    pack_failure,
    pack_keys,
    pack_listed,
    pack_places,
    pack_sizes,
    unpack_failure,
    unpack_keys,
    unpack_listed,
    unpack_places,
    unpack_sizes,
)
from mainstem.storage.base import Capabilities, Limit, Listed
from mainstem.storage.memory import MemoryBackend

pytestmark = pytest.mark.deadline

VALUES = Values(10_000)
HELLO = bytes([Kind.HELLO]) + Hello(VERSION, 0, "memory:").pack()


@pytest.fixture
def own() -> Iterator[Served]:
    with served(MemoryBackend()) as running_one:
        yield running_one


@pytest.fixture
def raw(own: Served) -> Iterator[socket.socket]:
    """A connection that has said nothing yet."""
    with new_socket() as connected:
        connected.settimeout(patience(20))
        connected.connect(str(own.path))
        yield connected


def last_words(connected: socket.socket) -> list[bytes]:
    """Waits until the owner ends the connection. Returns what it said before."""
    words: list[bytes] = []
    with suppress(ConnectionError):
        while message := connected.recv(MAX_BYTES):
            words.append(message)
    return words


def welcomed(connected: socket.socket) -> None:
    connected.send(HELLO)
    assert connected.recv(MAX_BYTES)[0] == Kind.WELCOME


@pytest.mark.parametrize(
    "first",
    [b"\0", b"GET / HTTP/1.1\r\n\r\n", bytes([Kind.CLEAR]), bytes([Kind.HELLO]), HELLO[:12], b"\1" + b"x" * 30],
    ids=["zero", "http", "no greeting", "empty", "cut", "another's"],
)
def test_who_does_not_greet_is_cut_off(own: Served, raw: socket.socket, first: bytes) -> None:
    raw.send(first)
    assert last_words(raw) == []
    assert own.owner.clients == 0


@pytest.mark.parametrize(
    "message",
    [
        b"\0",
        b"\xff",
        HELLO,
        bytes([Kind.WELCOME]),
        bytes([Kind.EXISTS]) + b"k" * 31,
        bytes([Kind.EXISTS]) + b"k" * 32 * (MAX_KEYS + 1),
        bytes([Kind.DELETE]) + b"k" * 33,
        bytes([Kind.GET]) + b"k" * 41,
        bytes([Kind.GET]) + b"k" * 32 + b"\xff" * 8,
        bytes([Kind.PUT]) + b"k" * 32 + b"\0" * 8,
        bytes([Kind.CLEAR]) + b"x" * MAX_BYTES,
    ],
    ids=lambda message: f"{message[0]}-{len(message)}",
)
def test_a_malformed_message_ends_its_client_and_no_other(own: Served, raw: socket.socket, message: bytes) -> None:
    other = own.client()
    VALUES.put(other, *range(10))
    welcomed(raw)
    raw.send(message)
    assert last_words(raw) == []
    assert VALUES.read(other, *range(10)) == [VALUES.size] * 10
    eventually(lambda: own.owner.clients == 1)
    other.close()


def test_random_messages_end_nobody_else(own: Served) -> None:
    rng = random.Random(11)
    other = own.client()
    for _ in range(150):
        with new_socket() as connected:
            connected.settimeout(patience(20))
            connected.connect(str(own.path))
            connected.send(HELLO)
            try:
                for _ in range(5):
                    connected.send(bytes([rng.randrange(20)]) + rng.randbytes(rng.choice([0, 1, 32, 40, 80, 500])))
            except ConnectionError:
                pass
        VALUES.put(other, rng.randrange(40))
    VALUES.read(other, *range(40))
    eventually(lambda: own.owner.clients == 1)
    eventually(lambda: own.owner.status()["pinned"] == 0)
    own.owner.held.check()
    other.close()


def test_a_lease_ends_with_the_next_request_and_a_commit_without_a_put_stores_nothing(
    own: Served, raw: socket.socket
) -> None:
    other = own.client()
    VALUES.put(other, 0)
    own.written()
    welcomed(raw)
    raw.send(bytes([Kind.GET]) + pack_sizes(VALUES.keys[:1], [VALUES.size]))
    assert raw.recv(MAX_BYTES)[0] == Kind.PLACES
    assert own.owner.status()["pinned"] == 1
    raw.send(bytes([Kind.PUT]) + pack_sizes(VALUES.keys[1:2], [VALUES.size]))
    assert raw.recv(MAX_BYTES)[0] == Kind.PLACES
    assert own.owner.status()["pinned"] == 1, "the one that is reserved"
    raw.send(bytes([Kind.EXISTS]) + pack_keys(VALUES.keys[:2]))
    assert raw.recv(MAX_BYTES) == bytes([Kind.BOOLS, 1, 0])
    assert own.owner.status()["pinned"] == 0
    raw.send(bytes([Kind.COMMIT]))
    assert raw.recv(MAX_BYTES) == bytes([Kind.OK])
    assert other.exists(VALUES.keys[:2]) == [True, False]
    other.close()


def test_who_asks_for_the_status_is_no_client(own: Served) -> None:
    found = status(own.path)
    assert found is not None
    assert found["clients"] == 0
    assert found["host_bytes"] == 64 * MIB
    assert found["spec"] == "memory:"
    assert found["pid"] == os.getpid()


def test_nobody_at_a_socket_has_no_status(own: Served) -> None:
    assert status(own.path.with_name("none.sock")) is None
    left = own.path.with_name("left.sock")
    with new_socket() as bound:
        bound.bind(str(left))
    assert status(left) is None


# ---------------------------------------------------------------- messages


def test_bodies_are_read_as_they_were_packed() -> None:
    keys = VALUES.keys[:3]
    assert unpack_keys(memoryview(pack_keys(keys))) == keys
    assert unpack_sizes(memoryview(pack_sizes(keys, [0, 1, 1 << 61]))) == (keys, [0, 1, 1 << 61])
    assert unpack_places(memoryview(pack_places([(-1, -1), (1 << 40, 3)]))) == [(-1, -1), (1 << 40, 3)]
    hello = Hello(1, 8 << 30, "file:/\udcff?capacity=1GiB")
    assert Hello.unpack(memoryview(hello.pack())) == hello
    for bits in range(64):
        capabilities = Capabilities(*(bool(bits >> at & 1) for at in range(6)))
        longest = Limit(1 << 40, "its option slot räises that") if bits % 2 else None
        welcome = Welcome(7, bytes(range(16)), 1 << 40, capabilities, longest)
        assert Welcome.unpack(memoryview(welcome.pack())) == welcome
    listed = [Listed(keys[0], 1 << 40), Listed(keys[1], 0, 0.0), Listed(keys[2], 7, 12.5)]
    assert unpack_listed(memoryview(pack_listed(listed))) == listed
    error = unpack_failure(memoryview(pack_failure(StorageError("full", "no room"))))
    assert (error.cause, str(error)) == ("full", "full: no room")


@pytest.mark.parametrize("body", [b"", b"\x07text"])
def test_a_failure_without_a_cause_is_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        unpack_failure(memoryview(body))


def test_the_largest_batch_fits_a_message() -> None:
    keys = [bytes(32)] * MAX_KEYS
    assert len(pack_sizes(keys, [0] * MAX_KEYS)) < MAX_BYTES
    assert len(pack_places([(0, 0)] * MAX_KEYS)) < MAX_BYTES
    assert len(pack_listed([Listed(bytes(32), 0)] * MAX_KEYS)) < MAX_BYTES
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = Channel(one), Channel(other)
    sender.send(Kind.PUT, bytes(MAX_BYTES - 1))
    assert len(receiver.receive().body) == MAX_BYTES - 1
    sender.close()
    with pytest.raises(ConnectionError):
        receiver.receive()
    receiver.close()


# ---------------------------------------------------------------- shared memory


def test_shared_memory_keeps_its_size_and_is_shared() -> None:
    descriptor = memory.create(1 << 20)
    one, other = memory.attach(descriptor, 1 << 20), memory.attach(descriptor, 1 << 20)
    one[5] = 77
    assert other[5] == 77
    for size in (0, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)
    assert other[5] == 77


def test_memory_that_could_shrink_or_has_another_size_is_not_mapped() -> None:
    descriptor = memory.create(1 << 20)
    with pytest.raises(BackendUnavailable, match="not of 2097152 bytes"):
        memory.attach(descriptor, 1 << 21)
    os.close(descriptor)
    descriptor = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(BackendUnavailable, match="not sealed"):
        memory.attach(descriptor, 4096)
    os.close(descriptor)
    with open("/dev/null", "rb") as opened, pytest.raises(BackendUnavailable):
        memory.attach(opened.fileno(), 0)
