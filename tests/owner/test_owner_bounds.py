"""How long an owner and its clients wait for each other, and how much they take: sockets and clocks are the tests'."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rigs.hand_driven import Clock

from mainstem.errors import BackendUnavailable, BadArgument
from mainstem.owner import server
from mainstem.owner.client import SharedBackend
from mainstem.owner.held import HeldValues
from mainstem.owner.protocol import Malformed, pack_keys, unpack_keys
from mainstem.owner.server import Owner
from mainstem.owner.start import Place
from mainstem.storage.memory import MemoryBackend


@pytest.mark.parametrize(("there", "taken"), [(0, True), (511, True), (512, False), (513, False)])
def test_an_owner_has_512_connections(there: int, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Callable[[], None]] = []
    thread = lambda target, **_: SimpleNamespace(start=lambda: begun.append(target))  # noqa: E731
    monkeypatch.setattr(server.threading, "Thread", thread)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner: Any = SimpleNamespace(
        _listener=SimpleNamespace(accept=lambda: (one, None)),
        _uid_of=lambda accepted: 0,
        _lock=threading.Lock(),
        _connections=dict.fromkeys(range(there), False),
        held=None,
    )
    Owner._accept(owner)
    assert (len(begun), len(owner._connections)) == (int(taken), there + taken)
    assert (one.fileno() >= 0) == taken
    one.close()
    other.close()


def test_an_owner_without_descriptors_waits_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def fails() -> Any:
        raise OSError("too many open files")

    monkeypatch.setattr(server.time, "sleep", slept.append)
    for _ in range(2):
        Owner._accept(SimpleNamespace(_listener=SimpleNamespace(accept=fails)))  # type: ignore[arg-type]
    assert slept == [0.1, 0.1]


def test_a_client_has_five_seconds_to_greet_and_then_any_time() -> None:
    limits: list[float | None] = []

    def receives() -> Any:
        assert limits == [5.0]
        return server.Kind.EXISTS, b""

    connection: Any = SimpleNamespace(channel=SimpleNamespace(limit=limits.append, receive=receives))
    with pytest.raises(Malformed):
        server._Connection._greeted(connection)


@pytest.mark.parametrize("took_s", [0.0, 3.0, 11.0, 10_000.0])
def test_an_owner_that_ends_waits_ten_seconds_for_all_clients_together(took_s: float) -> None:
    clock, waited = Clock(), list[float]()

    def wait(timeout_s: float) -> None:
        waited.append(timeout_s)
        clock.now_s += took_s

    channel = SimpleNamespace(cut=lambda: None)
    connections = [SimpleNamespace(channel=channel, ended=SimpleNamespace(wait=wait)) for _ in range(3)]
    there = {Hashed(each): False for each in connections}
    owner: Any = SimpleNamespace(_lock=threading.Lock(), _connections=there, _clock=clock)
    Owner._end_connections(owner)
    assert waited == pytest.approx([10.0, max(0.0, 10.0 - took_s), max(0.0, 10.0 - 2 * took_s)])


class Hashed:
    """What stands in for a connection, as the key of a table."""

    def __init__(self, what: SimpleNamespace) -> None:
        self.channel, self.ended = what.channel, what.ended


def test_a_client_gives_an_owner_a_minute_to_start_and_five_seconds_for_a_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[SharedBackend, float]] = []

    def connects(self: SharedBackend, within_s: float) -> Any:
        seen.append((self, within_s))
        raise OSError("not here")

    monkeypatch.setattr(SharedBackend, "_connect", connects)
    tmp_path.chmod(0o700)
    with pytest.raises(BackendUnavailable):
        SharedBackend(f"file:{tmp_path}", socket=str(tmp_path / "s"))
    with pytest.raises(BackendUnavailable):
        SharedBackend.from_spec(f"file:{tmp_path}", {"socket": str(tmp_path / "s")})
    for made, within_s in seen:
        assert (within_s, made._timeout_s, made._config.linger_s) == (60.0, 5.0, 60.0)
    assert len(seen) == 2


@pytest.mark.parametrize("within_s", [0.1, 5.0])
def test_a_client_looks_every_20_ms_for_an_owner_that_another_one_starts(within_s: float) -> None:
    clock, asked = Clock(), list[float]()

    def opens(left_s: float) -> Any:
        asked.append(left_s)
        raise FileNotFoundError("no socket")

    def sleeps(seconds: float) -> None:
        assert seconds == 0.02
        clock.now_s += seconds

    client: Any = SimpleNamespace(
        _clock=clock, _open=opens, _sleep=sleeps, _place=SimpleNamespace(lock=lambda: None, log="log"), _where="here"
    )
    with pytest.raises(BackendUnavailable, match="has been starting or ending"):
        SharedBackend._connect(client, within_s)
    assert clock.now_s == pytest.approx(1000.0 + within_s, abs=0.03)
    assert asked[0] == pytest.approx(within_s) and asked[-1] == pytest.approx(0.02) and min(asked) >= 0.02


def test_a_call_waits_a_second_for_room() -> None:
    waited: list[float | None] = []

    class Changed(threading.Condition):
        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            waited.append(timeout)
            return predicate()

    held = HeldValues(MemoryBackend(), memoryview(bytearray(4096)), clock=Clock())
    held._changed = Changed()
    held._filling = {b"k" * 32: None}  # type: ignore[dict-item]
    held.get([b"k" * 32], [1])
    assert waited[0] == 1.0


@pytest.mark.parametrize(("length", "fits"), [(106, True), (107, True), (108, False), (5000, False)])
def test_the_path_of_a_socket_has_107_bytes_at_most(length: int, fits: bool) -> None:
    path = "/" + "x" * (length - 3) + "/s"  # of a folder that is not there
    with pytest.raises(BackendUnavailable if fits else BadArgument, match=None if fits else "at most 107 bytes"):
        Place.of("memory:", path)


@pytest.mark.parametrize(("length", "fits"), [(4096, True), (4097, False), (20_000, False)])
def test_the_spec_of_a_store_has_4096_bytes_at_most(length: int, fits: bool, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    spec = "file:/" + "x" * (length - 6)
    if fits:
        assert Place.of(spec, str(tmp_path / "s")).spec == spec
    else:
        with pytest.raises(BadArgument, match="at most 4096 bytes"):
            Place.of(spec, str(tmp_path / "s"))


@pytest.mark.parametrize(("count", "taken"), [(2047, True), (2048, True), (2049, False), (100_000, False)])
def test_a_message_names_2048_keys_at_most(count: int, taken: bool) -> None:
    body = memoryview(pack_keys([bytes(32)] * count))
    if taken:
        assert len(unpack_keys(body)) == count
    else:
        with pytest.raises(Malformed):
            unpack_keys(body)


@pytest.mark.parametrize(("size", "taken"), [(1 << 17, True), ((1 << 17) + 1, False)])
def test_a_message_has_128_kibibytes_at_most(size: int, taken: bool) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    one.send(bytes([server.Kind.PUT]) + bytes(size - 1))
    channel = server.Channel(other)
    if taken:
        assert len(channel.receive().body) == size - 1
    else:
        with pytest.raises(Malformed, match="more than 131072 bytes"):
            channel.receive()
    channel.close()
    one.close()
