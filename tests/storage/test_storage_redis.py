"""Redis and Valkey: a real server, over TCP and its unix socket, and a fake one for replies that no real one sends."""

from __future__ import annotations

import importlib.util
import signal
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from machine import patience
from rigs.servers import free_port, freeze, patiently, valkey
from rigs.stores import cause_of, read_elsewhere
from skips import OPENSSL

from mainstem.errors import BackendUnavailable
from mainstem.storage import ABSENT, open_backend
from mainstem.storage.conformance import CASES, Case, run
from mainstem.storage.vendors.redis import RedisBackend

if not importlib.util.find_spec("redis"):
    pytest.skip("the package redis is not installed", allow_module_level=True)

pytestmark = pytest.mark.deadline
TIMEOUT_S = patience(5)
"""The timeout of calls that must succeed."""
KEYS = [bytes([number]) * 32 for number in range(200)]


def page(number: int, size: int = 100_000) -> memoryview:
    return memoryview(bytearray([number]) * size)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    port = free_port()
    try:
        with valkey(port):
            yield port
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def backend(port: int) -> Iterator[RedisBackend]:
    backend = RedisBackend(port=port, timeout_s=TIMEOUT_S)
    backend.clear()
    yield backend
    backend.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case: Case, port: int) -> None:
    result = run(case, lambda: open_backend(f"redis://127.0.0.1:{port}/0?prefix=conformance&timeout={TIMEOUT_S}"))
    assert result.passed, result.reason


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "valkey.sock"
    with valkey(free_port(), "--unixsocket", str(path)):
        backend = open_backend(f"redis:{path}?db=3&timeout={TIMEOUT_S}")
        for case in CASES:
            if case.name in ("round_trip_batch", "get_with_gaps", "threads"):
                result = run(case, lambda: open_backend(f"redis:{path}?db=3&timeout={TIMEOUT_S}"))
                assert result.passed, result.reason
        assert backend.put(KEYS[:2], [page(1), page(2)]) == [True, True]
        assert open_backend(f"redis:{path}?db=3&timeout={TIMEOUT_S}").exists(KEYS[:3]) == [True, True, False]
        assert open_backend(f"redis:{path}?db=2&timeout={TIMEOUT_S}").exists(KEYS[:3]) == [False] * 3


def test_a_listing_has_ages_where_the_server_counts_uses_and_leaves_out_other_data() -> None:
    port = free_port()
    with valkey(port), closing(RedisBackend(port=port, timeout_s=TIMEOUT_S)) as backend:
        backend.put(KEYS[:3], [page(number, 50 + number) for number in range(3)])
        backend._ask([(b"SET", b"mainstem:other", b"x"), (b"LPUSH", backend._key(KEYS[3]), b"x")])
        found = sorted((found.key, found.length, found.age_s) for batch in backend.scan() for found in batch)
        assert [(key, length) for key, length, _ in found] == [(KEYS[number], 50 + number) for number in range(3)]
        assert all(age_s is not None and 0 <= age_s < 3600 for *_, age_s in found)
        backend._ask([(b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lfu")])
        assert [found.age_s for batch in backend.scan() for found in batch] == [None] * 3


def test_another_process_reads_what_was_written(backend: RedisBackend, port: int) -> None:
    backend.put(KEYS[:3], [page(number) for number in range(3)])
    assert read_elsewhere(f"redis://127.0.0.1:{port}", KEYS[:3], 100_000) == [page(number) for number in range(3)]


def test_clear_scans_to_the_end(backend: RedisBackend) -> None:
    keys = [number.to_bytes(32, "big") for number in range(3000)]
    backend.put(keys, [memoryview(bytearray(b"x"))] * len(keys))
    assert all(backend.exists(keys))
    backend.clear()
    assert not any(backend.exists(keys))


def test_clear_leaves_foreign_keys(backend: RedisBackend, port: int) -> None:
    import redis

    client = redis.Redis(port=port)
    client.flushall()
    others = ["mainstem", "mainstem:notes", "mainstem:deeper:" + "0" * 64, "other:" + "0" * 64, "mainstem:" + "0" * 65]
    client.mset(dict.fromkeys(others, "kept"))
    backend.put(KEYS, [page(1, 10) for _ in KEYS])
    neighbour = RedisBackend(port=port, prefix="mainstem:deeper", timeout_s=TIMEOUT_S)
    assert neighbour.exists([bytes(32)]) == [True]
    backend.clear()
    assert sorted(name.decode() for name in client.keys("*")) == sorted(others)
    client.flushall()


def test_a_key_of_another_type_is_absent(backend: RedisBackend, port: int) -> None:
    import redis

    redis.Redis(port=port).lpush("mainstem:" + KEYS[0].hex(), "x")
    backend.put(KEYS[1:2], [page(1)])
    into = page(0)
    assert backend.get(KEYS[:2], [page(0), into]) == [ABSENT, 100_000]
    assert into == page(1)
    assert backend.put(KEYS[:1], [page(3)]) == [True]


def test_values_expire_where_the_spec_says_so(backend: RedisBackend, port: int) -> None:
    import redis

    store = open_backend(f"redis://127.0.0.1:{port}/0?ttl=90&timeout={TIMEOUT_S}")
    store.put(KEYS[:1], [page(1)])
    assert 80_000 < redis.Redis(port=port).pttl("mainstem:" + KEYS[0].hex()) <= 90_000
    backend.put(KEYS[1:2], [page(1)])
    assert redis.Redis(port=port).pttl("mainstem:" + KEYS[1].hex()) == -1


def test_a_full_server_refuses_what_it_has_no_room_for() -> None:
    port = free_port()
    with valkey(port, "--maxmemory", "12mb", "--maxmemory-policy", "noeviction"):
        backend = RedisBackend(port=port, timeout_s=TIMEOUT_S)
        values = [page(number, 256 << 10) for number in range(64)]
        stored = backend.put(KEYS[:64], values)
        assert 10 < sum(stored) < 64
        assert backend.exists(KEYS[:64]) == stored
        into = [page(255, 256 << 10) for _ in range(64)]
        lengths = backend.get(KEYS[:64], into)
        assert [length == 256 << 10 for length in lengths] == stored
        assert all(buffer == value for buffer, value, kept in zip(into, values, stored, strict=True) if kept)
        stats = backend.stats()
        assert stats.capacity_bytes == 12 << 20 and stats.used_bytes and not stats.evicted
        backend.clear()
        assert backend.put(KEYS[:1], values[:1]) == [True]


def test_a_server_that_makes_room_reports_how_much_it_evicted() -> None:
    port = free_port()
    with valkey(port, "--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru"):
        backend = RedisBackend(port=port, timeout_s=TIMEOUT_S)
        assert all(backend.put(KEYS[:64], [page(1, 256 << 10) for _ in range(64)]))
        assert backend.stats().evicted > 10
        assert RedisBackend(port=port, timeout_s=TIMEOUT_S).stats().evicted == 0


def test_killed_and_started_again() -> None:
    port = free_port()
    with valkey(port) as server:
        backend = RedisBackend(port=port, timeout_s=TIMEOUT_S)
        backend.put(KEYS[:1], [page(1)])
        server.kill()
        server.wait()
        for call in (lambda: backend.exists(KEYS[:1]), lambda: backend.put(KEYS[:1], [page(1)]), backend.stats):
            began = time.monotonic()
            assert cause_of(call) == "unreachable"
            assert time.monotonic() - began < TIMEOUT_S
    with valkey(port):
        assert backend.exists(KEYS[:1]) == [False]
        assert backend.put(KEYS[:1], [page(1)]) == [True]
        assert backend.get(KEYS[:1], [page(0)]) == [100_000]


def test_a_connection_that_was_cut_while_idle_is_made_anew(backend: RedisBackend, port: int) -> None:
    import redis

    backend.put(KEYS[:1], [page(1)])
    redis.Redis(port=port).client_kill_filter(_type="normal", skipme=True)
    assert backend.exists(KEYS[:1]) == [True]


def test_a_frozen_server_costs_no_more_than_the_timeout() -> None:
    port = free_port()
    timeout_s = patience(0.2)
    with valkey(port) as server:
        backend = RedisBackend(port=port, timeout_s=timeout_s)
        backend.put(KEYS[:1], [page(1)])
        freeze(server)
        began = time.monotonic()
        assert cause_of(lambda: backend.get(KEYS[:1], [page(0)])) == "timeout"
        assert cause_of(lambda: backend.put(KEYS, [page(1) for _ in KEYS])) == "timeout"
        assert cause_of(lambda: backend.exists(KEYS)) == "timeout"
        assert time.monotonic() - began < 12 * timeout_s
        with pytest.raises(BackendUnavailable, match="timeout"):
            RedisBackend(port=port, timeout_s=timeout_s)
        server.send_signal(signal.SIGCONT)
        assert patiently(lambda: backend.exists(KEYS[:1])) == [True]


def test_closing_ends_a_call_under_way() -> None:
    port = free_port()
    with valkey(port) as server:
        backend = RedisBackend(port=port, timeout_s=30)
        freeze(server)
        threading.Timer(0.2, backend.close).start()
        assert cause_of(lambda: backend.exists(KEYS)) == "closed"


def test_a_password_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    port, odd = free_port(), "op:en ses@me%20/?#&=é"
    with valkey(port, "--requirepass", odd):
        spec = f"redis://127.0.0.1:{port}"
        with pytest.raises(BackendUnavailable, match="refused"):
            open_backend(spec)
        monkeypatch.setenv("KV_PASSWORD", f"{odd} ")
        with pytest.raises(BackendUnavailable, match="refused") as wrong:
            open_backend(f"{spec}?password_env=KV_PASSWORD")
        assert "ses@me" not in str(wrong.value)
        monkeypatch.setenv("KV_PASSWORD", odd)
        assert open_backend(f"{spec}?password_env=KV_PASSWORD&user=default&timeout={TIMEOUT_S}").exists(KEYS[:1]) == [
            False
        ]


def test_tls(port: int, tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with tls_in_front_of(port, context) as tls_port:
        backend = open_backend(f"redis://localhost:{tls_port}?tls=yes&ca_file={certificate}&timeout={TIMEOUT_S}")
        into = [page(0, 1 << 20) for _ in range(3)]
        assert backend.put(KEYS[:3], [page(number, 1 << 20) for number in (1, 2, 3)]) == [True] * 3
        assert backend.get(KEYS[:3], into) == [1 << 20] * 3
        assert into == [page(number, 1 << 20) for number in (1, 2, 3)]
        for spec in ("redis://localhost:{}?tls=yes", "redis://127.0.0.1:{}?tls=yes&ca_file=" + certificate):
            with pytest.raises(BackendUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                open_backend(spec.format(tls_port))


def make_certificate(folder: Path) -> tuple[str, str]:
    key, certificate = str(folder / "key"), str(folder / "certificate")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    name = ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([OPENSSL.need(), *command[1:], *name], check=True, capture_output=True)
    return key, certificate


@contextmanager
def tls_in_front_of(port: int, context: ssl.SSLContext) -> Iterator[int]:
    """Opens a TLS port for a server without TLS."""

    def forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
            target.shutdown(socket.SHUT_RDWR)

    class Forward(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as plain:
                secret = context.wrap_socket(self.request, server_side=True)
                threading.Thread(target=forward, args=(plain, secret), daemon=True).start()
                forward(secret, plain)

    with FakeServer(("127.0.0.1", 0), Forward) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


# ---------------------------------------------------------------- a fake server


class FakeServer(socketserver.ThreadingTCPServer):
    """Replies OK to every command, but to GET with `answer`. None: no reply until the client closes."""

    daemon_threads = True
    allow_reuse_address = True
    answer: bytes | None = b""
    pause_s = 0.0
    late: list[tuple[float, bytes]]


class FakeConnection(socketserver.StreamRequestHandler):
    server: FakeServer

    def handle(self) -> None:
        while header := self.rfile.readline():
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(header[1:]))]
            if words[0] != b"GET":
                self.wfile.write(b"$0\r\n\r\n" if words[0] == b"INFO" else b"+OK\r\n")
            elif self.server.late:
                delay_s, answer = self.server.late.pop()
                time.sleep(delay_s)
                self.say(answer)
            else:
                self.say(self.server.answer)

    def say(self, answer: bytes | None) -> None:
        if answer is None:
            return
        step = 1 if self.server.pause_s else len(answer)
        try:
            for at in range(0, len(answer), step):
                self.wfile.write(answer[at : at + step])
                time.sleep(self.server.pause_s)
        except OSError:
            return
        if not answer.endswith(b"\r\n"):
            self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def fake_server(
    answer: bytes | None, *, pause_s: float = 0.0, late: tuple[float, bytes] | None = None
) -> Iterator[int]:
    """Runs a fake server that pauses between the bytes of a reply. `late` is another first reply, after a delay."""
    with FakeServer(("127.0.0.1", 0), FakeConnection) as server:
        server.answer, server.pause_s, server.late = answer, pause_s, [] if late is None else [late]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"$100000\r\n" + b"x" * 99_999, "unreachable"),
        (b"$100000\r\n" + b"x" * 100_002 + b"\r\n", "protocol"),
        (b"$1e5\r\n\r\n", "protocol"),
        (b"+PONG\r\n", "protocol"),
        (b":1\r\n", "protocol"),
        (b"*1\r\n$1\r\nx\r\n", "protocol"),
        (b"HTTP/1.1 400 Bad Request\r\n", "protocol"),
        (b"x" * 10_000 + b"\r\n", "protocol"),
        (b"$" + b"9" * 30 + b"\r\n", "timeout"),
        (b"-LOADING Valkey is loading the dataset in memory\r\n", "refused"),
        (None, "timeout"),
    ],
)
def test_nonsense_is_an_error_and_no_value(answer: bytes | None, cause: str) -> None:
    with fake_server(answer) as port:
        backend = RedisBackend(port=port, timeout_s=patience(0.5))
        assert cause_of(lambda: backend.get(KEYS[:1], [page(0)])) == cause
        assert backend.put(KEYS[:1], [page(0)]) == [True]  # over a new connection


def test_a_value_larger_than_its_buffer_is_not_kept() -> None:
    guard = bytearray(b"g" * 300)
    with fake_server(b"$70000\r\n" + b"x" * 70_000 + b"\r\n") as port:
        backend = RedisBackend(port=port, timeout_s=TIMEOUT_S)
        assert backend.get(KEYS[:1], [memoryview(guard)[100:200]]) == [70_000]
        assert guard[:100] == guard[200:] == b"g" * 100


def test_a_trickle_ends_at_the_deadline() -> None:
    timeout_s = patience(0.4)
    with fake_server(b"$1000\r\n" + b"x" * 1000 + b"\r\n", pause_s=timeout_s / 20) as port:
        backend = RedisBackend(port=port, timeout_s=timeout_s)
        began = time.monotonic()
        assert cause_of(lambda: backend.get(KEYS[:1], [page(0, 1000)])) == "timeout"
        assert time.monotonic() - began < 10 * timeout_s


def test_a_late_reply_is_not_taken_for_the_next() -> None:
    timeout_s = patience(0.4)
    with fake_server(b"$5\r\nright\r\n", late=(1.5 * timeout_s, b"$5\r\nwrong\r\n")) as port:
        backend, into = RedisBackend(port=port, timeout_s=timeout_s), page(0, 5)
        assert cause_of(lambda: backend.get(KEYS[:1], [into])) == "timeout"
        assert backend.get(KEYS[1:2], [into]) == [5]
        assert bytes(into) == b"right"


# ---------------------------------------------------------------- opening


def test_nobody_answers() -> None:
    with pytest.raises(BackendUnavailable, match="unreachable"):
        RedisBackend(port=free_port())
