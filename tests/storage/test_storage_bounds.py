"""How long replies of a store may be, how long a case of the conformance tests may take, and how often a peer looks."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest

from mainstem.storage import conformance
from mainstem.storage.framed import Frames
from mainstem.storage.memory import MemoryBackend
from mainstem.storage.vendors import redis as module
from mainstem.storage.vendors.redis import _BadReply, _Session


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, _Session]]:
    server, client = socket.socketpair()
    with closing(server), closing(client):
        for each in (server, client):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 23)
        yield server, _Session(client, time.monotonic() + 60)


@pytest.mark.parametrize(("length", "taken"), [(4096, True), (4097, False), (100_000, False)])
def test_a_line_of_a_reply_has_4096_bytes(pair: Any, length: int, taken: bool) -> None:
    server, session = pair
    server.sendall(b"+" + b"x" * (length - 3) + b"\r\n+next\r\n")
    if taken:
        assert session.reply() == b"x" * (length - 3) and session.reply() == b"next"
    else:
        with pytest.raises(_BadReply, match="a line without an end"):
            session.reply()


@pytest.mark.parametrize(("length", "taken"), [(1 << 20, True), ((1 << 20) + 1, False), (1 << 40, False)])
def test_a_text_of_a_reply_has_a_mebibyte(pair: Any, length: int, taken: bool) -> None:
    server, session = pair
    if not taken:
        server.sendall(b"$%d\r\n" % length)
        with pytest.raises(_BadReply, match="unexpected"):
            session.reply()
        return
    server.sendall(b"$%d\r\n" % length + b"x" * length + b"\r\n")
    assert session.reply() == b"x" * length


@pytest.mark.parametrize(("count", "taken"), [(1 << 20, True), ((1 << 20) + 1, False), (1 << 30, False)])
def test_a_list_of_a_reply_has_a_million_names(pair: Any, count: int, taken: bool) -> None:
    server, session = pair
    server.sendall(b"*%d\r\n+x\r\n" % count)
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError if taken else _BadReply):
        session.reply()


def test_frames_begin_at_multiples_of_64_bytes_and_do_not_overlap() -> None:
    """Clients that copy by device want aligned memory."""
    frames = Frames(4096)
    keys, sizes = [bytes([at]) * 32 for at in range(40)], [1 + at * 7 for at in range(40)]
    rounds = list(frames.rounds(keys, [memoryview(bytearray(size)) for size in sizes]))
    assert [frame.at for round_ in rounds for frame in round_] == list(range(40))
    for round_ in rounds:
        ends = [0, *(frame.start + frame.size for frame in round_)]
        assert all(frame.start % 64 == 0 <= frame.start - end < 64 for frame, end in zip(round_, ends, strict=False))
        assert ends[-1] <= 4096


def test_a_case_has_two_minutes_and_what_takes_longer_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    ends = conformance._reason

    def reason(future: Future[None], timeout_s: float) -> str:
        waits.append(timeout_s)
        return ends(future, 60.0)

    monkeypatch.setattr(conformance, "_reason", reason)
    monkeypatch.setattr(conformance, "CASES", conformance.CASES[:2])
    assert all(not result.reason for result in conformance.check(lambda: MemoryBackend()))
    conformance.run(conformance.CASES[0], lambda: MemoryBackend())
    assert waits == [120.0] * 3
    assert ends(Future(), 0.01) == "still running after 0.01 s"


def test_a_peer_looks_once_a_second_whether_it_is_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    from mainstem.storage.peer import server

    waits: list[int] = []

    class Poller:
        def register(self, *_: Any) -> None:
            pass

        def poll(self, wait_ms: int) -> list[Any]:
            waits.append(wait_ms)
            peer._closing = len(waits) == 3
            return []

    (kind,) = (each for each in vars(server).values() if isinstance(each, type) and "_run" in vars(each))
    peer = object.__new__(kind)
    peer._closing, peer._reader, peer._router = False, None, None
    monkeypatch.setattr(zmq, "Poller", Poller)
    peer._run()
    assert waits == [1000] * 3
    assert module.BACKEND is module.RedisBackend
