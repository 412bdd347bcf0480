"""The LMCache client: with a double of the server, and with the real one if it is installed.

The real server needs an environment of its own: `make test-lmcache`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doubles.lmcache_server import PUT, REPLY, REQUEST, LMCacheServer
from machine import patience
from rigs.stores import cause_of, read_elsewhere

from mainstem.errors import BackendUnavailable
from mainstem.storage.base import ABSENT, open_backend
from mainstem.storage.conformance import CASES, Case, Pool, make_value, run
from mainstem.storage.vendors.lmcache import LMCacheBackend

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.deadline
TIMEOUT_S = patience(5)
"""The timeout of calls that must succeed."""
KEYS = [bytes([number]) * 32 for number in range(8)]


def values(size: int, version: int = 0) -> list[memoryview]:
    return [make_value(key, size, version) for key in KEYS]


def every_call(backend: LMCacheBackend) -> list[Callable[[], object]]:
    value = values(1000)
    return [
        lambda: backend.exists(KEYS),
        lambda: backend.get(KEYS, Pool([1000] * 8).buffers),
        lambda: backend.put(KEYS, value),
        lambda: backend.delete(KEYS),
        backend.clear,
    ]


@pytest.fixture
def server() -> Iterator[LMCacheServer]:
    with LMCacheServer() as server:
        yield server


@pytest.fixture
def backend(server: LMCacheServer) -> Iterator[LMCacheBackend]:
    backend = LMCacheBackend("127.0.0.1", server.port, timeout_s=TIMEOUT_S)
    yield backend
    backend.close()


# ---------------------------------------------------------------- the double


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case: Case, server: LMCacheServer) -> None:
    result = run(case, lambda: LMCacheBackend("127.0.0.1", server.port, timeout_s=TIMEOUT_S))
    assert result.passed, result.reason


@pytest.mark.parametrize("piece_bytes", [1, 35, 37, 1000])
def test_replies_in_pieces_are_put_together(piece_bytes: int) -> None:
    with LMCacheServer(piece_bytes) as server:
        backend = LMCacheBackend("127.0.0.1", server.port, timeout_s=TIMEOUT_S)
        backend.put(KEYS, values(700))
        pool = Pool([700] * 7 + [699])
        assert backend.get(KEYS, pool.buffers) == [700] * 8
        assert pool.buffers[:7] == values(700)[:7]
        pool.check_guards()
        assert backend.exists(KEYS) == [True] * 8
        backend.close()


def test_a_batch_longer_than_the_pipeline(backend: LMCacheBackend) -> None:
    keys = [number.to_bytes(32, "big") for number in range(300)]
    backend.put(keys, [memoryview(bytearray(key)) for key in keys])
    assert backend.exists(keys) == [True] * 300
    backend.delete([keys[64], keys[190]])
    assert backend.exists(keys) == [at not in (64, 190) for at in range(300)]
    pool = Pool([32] * 300)
    assert [at for at, length in enumerate(backend.get(keys, pool.buffers)) if length == ABSENT] == [64, 190]
    assert pool.buffers[299] == keys[299]


@pytest.mark.parametrize("words", [b"\0" * 36, b"\xff" * 36, REPLY.pack(200, -5, *[0] * 7)])
def test_an_invalid_reply(server: LMCacheServer, backend: LMCacheBackend, words: bytes) -> None:
    for call in every_call(backend):
        server.last_words = words
        assert cause_of(call) == "protocol"
    assert backend.put(KEYS, values(1000)) == [True] * 8  # on a new connection


@pytest.mark.parametrize("words", [b"", b"\0" * 35])
def test_a_reply_that_ends_early(server: LMCacheServer, backend: LMCacheBackend, words: bytes) -> None:
    _, get, *others = every_call(backend)
    for call in others:
        server.last_words = words
        assert cause_of(call) == "unreachable"
    backend.put(KEYS, values(1000))
    server.last_words = words
    assert get() == [1000] * 8  # it retries, because one bad value may be the reason


@pytest.mark.parametrize("cut", [0, 400])
def test_a_server_that_closes_the_connection_within_a_value_once(
    server: LMCacheServer, backend: LMCacheBackend, cut: int
) -> None:
    backend.put(KEYS, values(1000))
    pool = Pool([1000] * 8)
    server.cut_value_after = cut
    assert backend.get(KEYS, pool.buffers) == [1000] * 8
    assert pool.buffers == values(1000)
    pool.check_guards()


def test_a_writer_that_ended_within_a_value_costs_only_that_value(server: LMCacheServer) -> None:
    backend = LMCacheBackend("127.0.0.1", server.port, timeout_s=TIMEOUT_S)
    backend.put(KEYS, values(1000))
    for key in (KEYS[2], KEYS[3], KEYS[7]):
        name = next(name for name in server.values if f"@1@0@{key.hex()}" in name)
        die_within_put(server.port, name)
    pool = Pool([1000] * 8)
    assert backend.get(KEYS, pool.buffers) == [ABSENT if at in (2, 3, 7) else 1000 for at in range(8)]
    assert all(pool.buffers[at] == values(1000)[at] for at in (0, 1, 4, 5, 6))
    # the broken values are deleted, so that they are written again
    assert backend.exists(KEYS) == [at not in (2, 3, 7) for at in range(8)]
    backend.put(KEYS, values(1000, 2))
    assert backend.get(KEYS, pool.buffers) == [1000] * 8
    backend.close()


def die_within_put(port: int, name: str) -> None:
    with socket.create_connection(("127.0.0.1", port)) as writer:
        writer.sendall(REQUEST.pack(PUT, 1000, 4, 6, 0, 1000, 0, 0, 0, name.encode().ljust(150)) + bytes(500))
        writer.shutdown(socket.SHUT_WR)
        assert writer.recv(1) == b""  # the server has seen the end


def test_a_frozen_server_costs_the_timeout_and_no_more(server: LMCacheServer) -> None:
    backend = LMCacheBackend("127.0.0.1", server.port, timeout_s=patience(0.2))
    backend.put(KEYS, values(1000))
    server.answering.clear()
    for call in every_call(backend):
        assert cause_of(call) == "timeout"
    server.answering.set()
    assert backend.put(KEYS, values(1000)) == [True] * 8
    backend.close()


def test_a_slow_reply_does_not_block_a_call_beyond_the_timeout() -> None:
    timeout_s = patience(0.2)
    server = LMCacheServer(piece_bytes=1, pause_s=timeout_s / 10)
    with server, pytest.raises(BackendUnavailable, match="timeout"):
        LMCacheBackend("127.0.0.1", server.port, timeout_s=timeout_s)


def test_a_dead_server_is_unreachable_and_a_new_one_is_found() -> None:
    with LMCacheServer() as server:
        backend = LMCacheBackend("127.0.0.1", server.port, timeout_s=TIMEOUT_S)
        backend.put(KEYS, values(1000))
    for call in every_call(backend):
        assert cause_of(call) == "unreachable"
    with LMCacheServer(port=server.port):
        assert not any(backend.exists(KEYS))
        assert backend.put(KEYS, values(1000)) == [True] * 8
    backend.close()


def test_a_server_that_started_again_between_two_calls_is_not_noticed() -> None:
    with LMCacheServer() as server:
        backend = LMCacheBackend("127.0.0.1", server.port, timeout_s=TIMEOUT_S)
        backend.put(KEYS, values(1000))
    with LMCacheServer(port=server.port):
        assert not any(backend.exists(KEYS))
    backend.close()


def test_calls_one_after_the_other_share_a_connection(server: LMCacheServer, backend: LMCacheBackend) -> None:
    for call in every_call(backend):
        call()
    assert server.connections == 1


def test_clients_see_each_other_and_prefixes_keep_them_apart(server: LMCacheServer, backend: LMCacheBackend) -> None:
    same = LMCacheBackend("127.0.0.1", server.port, timeout_s=TIMEOUT_S)
    other = LMCacheBackend("127.0.0.1", server.port, prefix="other")
    backend.put(KEYS, values(1000))
    assert (same.exists(KEYS), other.exists(KEYS)) == ([True] * 8, [False] * 8)
    other.put(KEYS, values(500))
    same.delete(KEYS[5:])
    assert backend.exists(KEYS) == [at < 5 for at in range(8)]
    same.clear()
    assert not any(backend.exists(KEYS)) and not any(same.exists(KEYS)) and all(other.exists(KEYS))
    assert backend.get(KEYS, values(1000)) == [ABSENT] * 8
    backend.put(KEYS[:1], values(1000)[:1])
    assert same.exists(KEYS) == [at == 0 for at in range(8)]
    same.close()
    other.close()


def test_delete_frees_the_value_and_leaves_no_names_of_what_was_never_there(server: LMCacheServer) -> None:
    backend = LMCacheBackend("127.0.0.1", server.port, timeout_s=TIMEOUT_S)
    backend.delete(KEYS)
    assert not server.values
    backend.put(KEYS, values(1000))
    backend.delete(KEYS)
    assert sum(len(value or b"") for _, value in server.values.values()) == 0
    backend.close()


def test_what_the_protocol_cannot_hold_is_refused(backend: LMCacheBackend) -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return 1 << 31

    assert cause_of(lambda: backend.put(KEYS[:1], [Long()])) == "refused"  # type: ignore[list-item]
    assert backend.put(KEYS[:2], [memoryview(bytearray()), values(9)[1]]) == [False, True]
    assert backend.exists(KEYS) == [at == 1 for at in range(8)]


def test_specs(server: LMCacheServer) -> None:
    backend = open_backend(f"lmcache://127.0.0.1:{server.port}?timeout={TIMEOUT_S}&prefix=a.b")
    backend.put(KEYS[:1], values(10)[:1])
    assert any(name.startswith("a.b.") for name in server.values)
    backend.close()


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(BackendUnavailable, match="timeout"):
            LMCacheBackend("127.0.0.1", port, timeout_s=patience(0.1))
    with pytest.raises(BackendUnavailable, match="unreachable"):
        LMCacheBackend("127.0.0.1", port, timeout_s=patience(1))


# ---------------------------------------------------------------- the real server


START = """
import socket

class Socket(socket.socket):
    def bind(self, address):
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        super().bind(address)

socket.socket = Socket
from lmcache.v1.server.__main__ import main
main()
"""
"""`lmcache_server` with SO_REUSEADDR: without it the port would be unusable for a minute after a kill."""


class RealServer:
    """`lmcache_server` in its own process."""

    def __init__(self, python: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
        self._command = [str(python), "-c", START, "127.0.0.1", str(self.port), "cpu"]

    def start(self) -> None:
        quiet = {**os.environ, "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"}
        self.process = subprocess.Popen(self._command, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end_s = time.monotonic() + patience(60)
        while time.monotonic() < end_s:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, "lmcache_server exited"
                time.sleep(0.1)
        raise AssertionError("lmcache_server does not listen")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()  # its threads prevent a normal exit
        self.process.wait()

    def open(self, timeout_s: float = TIMEOUT_S) -> LMCacheBackend:
        return LMCacheBackend("127.0.0.1", self.port, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    python = Path(os.environ.get("MAINSTEM_LMCACHE_PYTHON", ROOT / ".venv-lmcache" / "bin" / "python"))
    if not python.exists():
        pytest.skip(f"no LMCache at {python}; slow lane: make test-lmcache")
    server = RealServer(python)
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_real_conformance(case: Case, real: RealServer) -> None:
    result = run(case, real.open)
    assert result.passed, result.reason


def test_real_server_and_a_writer_that_ended_within_a_value(real: RealServer) -> None:
    backend = real.open()
    backend.clear()
    backend.put(KEYS, values(1000))
    with backend._session() as connection:
        epoch = backend._epoch(connection)
    die_within_put(real.port, f"{epoch}@1@0@{KEYS[2].hex()}@uint8")
    pool = Pool([1000] * 8)
    assert backend.get(KEYS, pool.buffers) == [ABSENT if at == 2 else 1000 for at in range(8)]
    assert pool.buffers[7] == values(1000)[7]
    assert backend.exists(KEYS) == [at != 2 for at in range(8)]
    backend.close()


def test_real_server_read_by_another_process(real: RealServer) -> None:
    backend = real.open()
    backend.clear()
    backend.put(KEYS, values(1000))
    spec = f"lmcache://127.0.0.1:{real.port}?timeout={TIMEOUT_S}"
    assert read_elsewhere(spec, KEYS, 1000) == values(1000)
    backend.close()


def test_real_server_frozen_killed_and_started_again(real: RealServer) -> None:
    backend = real.open(timeout_s=patience(0.5))
    backend.put(KEYS, values(1000))
    real.process.send_signal(signal.SIGSTOP)
    for call in every_call(backend)[1:3]:
        assert cause_of(call) == "timeout"
    real.process.send_signal(signal.SIGCONT)
    assert backend.put(KEYS, values(1000)) == [True] * 8
    real.stop()
    for call in every_call(backend):
        assert cause_of(call) == "unreachable"
    real.start()
    assert not any(backend.exists(KEYS))
    assert backend.put(KEYS, values(1000)) == [True] * 8
    backend.close()


def test_real_server_without_memory_drops_the_connection_and_goes_on(real: RealServer) -> None:
    import resource

    backend = real.open()
    used = int(Path(f"/proc/{real.process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    limit = resource.prlimit(real.process.pid, resource.RLIMIT_AS)
    resource.prlimit(real.process.pid, resource.RLIMIT_AS, (used + (64 << 20), limit[1]))
    large = memoryview(bytearray(256 << 20))
    assert cause_of(lambda: backend.put(KEYS[:1], [large])) == "unreachable"
    resource.prlimit(real.process.pid, resource.RLIMIT_AS, limit)
    assert backend.put(KEYS, values(1000)) == [True] * 8
    assert all(backend.exists(KEYS))
    backend.close()
