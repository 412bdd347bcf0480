"""S3: a real server over a folder, and a fake one for replies that a real one rarely sends."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from machine import patience
from rigs.servers import RCLONE_CASES, free_port, freeze, patiently, rclone_s3
from rigs.stores import cause_of, read_elsewhere

from mainstem.errors import BackendUnavailable, StorageError
from mainstem.storage import ABSENT, open_backend
from mainstem.storage.conformance import Case, run
from mainstem.storage.vendors.s3 import S3Backend

if not importlib.util.find_spec("obstore"):
    pytest.skip("the package obstore is not installed", allow_module_level=True)

pytestmark = [pytest.mark.deadline, pytest.mark.usefixtures("s3_credentials")]
TIMEOUT_S = patience(5)
"""The timeout of calls that must succeed."""
KEYS = [bytes([number]) * 32 for number in range(100)]


def page(number: int, size: int = 100_000) -> memoryview:
    return memoryview(bytearray([number]) * size)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("s3"), free_port()
    (folder / "bucket").mkdir()
    try:
        with rclone_s3(port, folder):
            yield f"http://127.0.0.1:{port}"
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def backend(endpoint: str) -> Iterator[S3Backend]:
    backend = S3Backend("bucket", endpoint=endpoint, timeout_s=TIMEOUT_S)
    backend.clear()
    yield backend
    backend.close()


@pytest.mark.parametrize("case", RCLONE_CASES, ids=lambda case: case.name)
def test_conformance(case: Case, endpoint: str) -> None:
    result = run(
        case, lambda: open_backend(f"s3://bucket/cases?endpoint={endpoint}&region=us-east-1&timeout={4 * TIMEOUT_S}")
    )
    assert result.passed, result.reason


def test_another_process_reads_what_was_written(backend: S3Backend, endpoint: str) -> None:
    backend.put(KEYS[:3], [page(number) for number in range(3)])
    spec = f"s3://bucket?endpoint={endpoint}&timeout={TIMEOUT_S}"
    assert read_elsewhere(spec, KEYS[:3], 100_000) == [page(number) for number in range(3)]


def test_clear_leaves_foreign_objects(backend: S3Backend, endpoint: str) -> None:
    from obstore.store import S3Store

    bucket = S3Store("bucket", endpoint=endpoint, client_options={"allow_http": True})
    bucket.delete([found["path"] for found in bucket.list().collect()])
    others = ["mainstem/deeper/" + "0" * 64, "mainstem/notes", "mainstem2/" + "0" * 64]
    for name in others:
        bucket.put(name, b"kept")
    backend.put(KEYS, [page(1, 10) for _ in KEYS])

    def names() -> list[str]:
        """Without what an earlier test gave up waiting for, which a slow server may write only now."""
        return sorted(found["path"] for found in bucket.list().collect() if not found["path"].startswith("cases/"))

    assert len(names()) == len(KEYS) + 3
    assert S3Backend("bucket", "mainstem/deeper", endpoint=endpoint, timeout_s=TIMEOUT_S).exists([bytes(32)]) == [True]
    backend.clear()
    assert names() == others


def test_killed_and_started_again(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    port = free_port()
    with rclone_s3(port, tmp_path) as server:
        timeout_s = patience(5)
        backend = S3Backend("bucket", endpoint=f"http://127.0.0.1:{port}", timeout_s=timeout_s)
        backend.put(KEYS[:2], [page(1), page(2)])
        server.kill()
        server.wait()
        began = time.monotonic()
        assert cause_of(lambda: backend.exists(KEYS)) == "unreachable"
        assert cause_of(lambda: backend.put(KEYS, [page(1) for _ in KEYS])) == "unreachable"
        assert cause_of(lambda: backend.get(KEYS[:1], [page(1)])) == "unreachable"
        assert cause_of(lambda: backend.delete(KEYS)) == "unreachable"
        assert cause_of(backend.clear) == "unreachable"
        assert time.monotonic() - began < 2 * timeout_s
    with rclone_s3(port, tmp_path):
        into = page(0)
        assert backend.exists(KEYS[:3]) == [True, True, False]
        assert backend.get(KEYS[1:2], [into]) == [100_000]
        assert into == page(2)


def test_a_frozen_server_costs_no_more_than_the_timeout(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    port = free_port()
    with rclone_s3(port, tmp_path) as server:
        timeout_s = patience(0.7)
        backend = S3Backend("bucket", endpoint=f"http://127.0.0.1:{port}", timeout_s=timeout_s)
        backend.put(KEYS[:1], [page(1)])
        freeze(server)
        began = time.monotonic()
        assert cause_of(lambda: backend.get(KEYS, [page(0) for _ in KEYS])) == "timeout"
        assert cause_of(lambda: backend.put(KEYS, [page(1) for _ in KEYS])) == "timeout"
        assert cause_of(lambda: backend.exists(KEYS)) == "timeout"
        assert time.monotonic() - began < 6 * timeout_s
        server.send_signal(signal.SIGCONT)
        assert patiently(lambda: backend.exists(KEYS[:1])) == [True]


def test_a_wrong_key_and_a_missing_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable, match="no-such-bucket"):
        S3Backend("no-such-bucket", endpoint=endpoint)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(BackendUnavailable, match="refused") as error:
        S3Backend("bucket", endpoint=endpoint, timeout_s=TIMEOUT_S)
    assert "wrong" not in str(error.value)


def test_the_process_exits_normally_with_running_requests(endpoint: str) -> None:
    script = (
        "import sys, threading; from mainstem.storage import open_backend; store = open_backend(sys.argv[1]);"
        "keys = [bytes([number]) * 32 for number in range(200)];"
        "threading.Thread(target=store.put, args=(keys, [memoryview(bytearray(50_000))] * 200)).start();"
        "threading.Thread(target=store.exists, args=(keys,), daemon=True).start()"
    )
    spec = f"s3://bucket/ends?endpoint={endpoint}&timeout={TIMEOUT_S}"
    ended = subprocess.run([sys.executable, "-c", script, spec], capture_output=True, text=True, timeout=patience(60))
    assert (ended.returncode, "panicked" in ended.stderr) == (0, False), ended.stderr


# ---------------------------------------------------------------- a fake server


class FakeServer(ThreadingHTTPServer):
    """Has an object of a hundred bytes under every name, except names whose last digit is in `faults`."""

    daemon_threads = True
    faults: dict[str, str]
    seen: Counter[str]


class FakeObjects(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def do(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.seen[self.command] += 1
        name = self.path.partition("?")[0]
        listing = "list-type" in self.path
        fault = "list" if listing else self.server.faults.get(name[-1], "")
        getattr(self, f"say_{fault}", self.say_status)(fault)

    do_GET = do_PUT = do_HEAD = do_POST = do  # noqa: N815

    def say(self, status: int, body: bytes, **headers: str) -> None:
        headers = {"content_length": str(len(body)), **headers}
        self.send_response(status)
        for name, value in {"last_modified": "Thu, 01 Jan 2026 00:00:00 GMT", "etag": '"x"', **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def say_status(self, fault: str) -> None:
        if not fault:
            return self.say(200, b"x" * 100)
        status, _, code = fault.partition(" ")
        return self.say(int(status), f"<Error><Code>{code}</Code></Error>".encode())

    def say_list(self, _: str) -> None:
        self.say(200, b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>')

    def say_cut(self, _: str) -> None:
        self.say(200, b"x" * 50, content_length="100")
        self.close_connection = True

    def say_longer(self, _: str) -> None:
        self.say(200, b"x" * 101)

    def say_shorter(self, _: str) -> None:
        self.say(200, b"x" * 99)

    def say_endless(self, _: str) -> None:
        """Sends more than announced: HTTP allows a chunked body longer than its content-length."""
        self.say(200, b"", content_length="100", transfer_encoding="chunked")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        self.write_on(chunk for _ in range(100_000))

    def say_trickle(self, _: str) -> None:
        self.say(200, b"", content_length="100")
        self.write_on(b"x" for _ in range(100) if not time.sleep(patience(0.1)))  # type: ignore[func-returns-value]

    def say_nothing(self, _: str) -> None:
        self.connection.settimeout(patience(60))
        self.write_on([b""])
        self.rfile.read(1)

    def say_garbage(self, _: str) -> None:
        self.write_on([b"SSH-2.0-OpenSSH\r\n"])
        self.close_connection = True

    def write_on(self, pieces: Iterator[bytes] | list[bytes]) -> None:
        """Writes until the client closes the connection."""
        try:
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()
        except OSError:
            self.close_connection = True


@contextmanager
def fake_server(**faults: str) -> Iterator[tuple[str, FakeServer]]:
    """Runs a fake server with faults by the last hex digit of a name, as in `_7="500 InternalError"`."""
    with FakeServer(("127.0.0.1", 0), FakeObjects) as server:
        server.faults, server.seen = {digit[-1]: fault for digit, fault in faults.items()}, Counter()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", server
        server.shutdown()


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("500 InternalError", "refused"),
        ("503 SlowDown", "refused"),
        ("403 AccessDenied", "refused"),
        ("507 InsufficientStorage", "full"),
        ("cut", "protocol"),
        ("garbage", "protocol"),
        ("nothing", "timeout"),
        ("trickle", "timeout"),
    ],
)
def test_a_fault_in_every_request_is_the_error_of_the_call(fault: str, cause: str) -> None:
    timeout_s = patience(1 if cause == "timeout" else 4)  # other faults must not reach the timeout
    with fake_server(_1=fault) as (endpoint, _):
        backend = S3Backend("bucket", endpoint=endpoint, timeout_s=timeout_s)
        began = time.monotonic()
        assert cause_of(lambda: backend.get([KEYS[1]] * 30, [page(0, 100) for _ in range(30)])) == cause
        assert time.monotonic() - began < 4 * timeout_s
        assert backend.get(KEYS[2:3], [page(0, 100)]) == [100]


def test_a_fault_in_one_request_is_a_miss_of_its_key() -> None:
    with fake_server(_1="500 InternalError", _2="404 NoSuchKey", _3="cut", _4="longer", _5="shorter") as (endpoint, _):
        backend = S3Backend("bucket", endpoint=endpoint, timeout_s=TIMEOUT_S)
        into = [page(0, 100) for _ in range(7)]
        assert backend.get(KEYS[:7], into) == [100, ABSENT, ABSENT, ABSENT, 101, 99, 100]
        assert bytes(into[0]) == bytes(into[6]) == b"x" * 100


def test_a_body_longer_than_announced_stays_within_its_buffer() -> None:
    memory = bytearray(b"g" * 300)
    with fake_server(_1="endless") as (endpoint, _):
        backend = S3Backend("bucket", endpoint=endpoint, timeout_s=TIMEOUT_S)
        (length,) = backend.get(KEYS[1:2], [memoryview(memory)[100:200]])
        assert length > 100
        assert memory[:100] == memory[200:] == b"g" * 100


def test_no_room_is_no_error() -> None:
    faults = {"_1": "507 InsufficientStorage", "_2": "403 QuotaExceeded"}
    with fake_server(**faults) as (endpoint, _):
        backend = S3Backend("bucket", endpoint=endpoint, timeout_s=TIMEOUT_S)
        assert backend.put(KEYS[:4], [page(1)] * 4) == [True, False, False, True]
        assert backend.put(KEYS[1:3], [page(1)] * 2) == [False, False]


def test_exists_sends_one_request_a_key_and_what_it_cannot_determine_is_absent() -> None:
    with fake_server(_5="404 NoSuchKey", _3="500 InternalError") as (endpoint, server):
        backend = S3Backend("bucket", endpoint=endpoint, requests=4, timeout_s=TIMEOUT_S)
        good, gap, broken = KEYS[1], KEYS[5], KEYS[3]
        for at in (0, 1, 7):
            server.seen.clear()
            assert backend.exists([good] * at + [gap] + [good] * 90) == [True] * at + [False] + [True] * 90
            assert server.seen["HEAD"] == at + 91
        assert backend.exists([good, broken, gap, good]) == [True, False, False, True]
        assert cause_of(lambda: backend.exists([broken, broken])) == "refused"


def test_a_silent_server_gets_no_more_requests() -> None:
    with fake_server(_1="nothing") as (endpoint, server):
        backend = S3Backend("bucket", endpoint=endpoint, requests=4, timeout_s=patience(1))
        assert cause_of(lambda: backend.get([KEYS[1]] * 60, [page(0, 100)] * 60)) == "timeout"
        assert server.seen["GET"] < 8


def test_deletes_go_a_thousand_at_a_time() -> None:
    with fake_server() as (endpoint, server):
        backend = S3Backend("bucket", endpoint=endpoint, timeout_s=TIMEOUT_S)
        with pytest.raises(StorageError):  # the fake server has no reply to it
            backend.delete([number.to_bytes(32, "big") for number in range(1000)])
        assert 1 <= server.seen["POST"] <= 3


def test_closing_ends_a_call_under_way() -> None:
    with fake_server(_1="nothing") as (endpoint, _):
        backend = S3Backend("bucket", endpoint=endpoint, requests=2, timeout_s=patience(2))
        threading.Timer(0.3, backend.close).start()
        assert cause_of(lambda: backend.get([KEYS[1]] * 60, [page(0, 100)] * 60)) == "closed"


# ---------------------------------------------------------------- opening


def test_nobody_answers() -> None:
    with pytest.raises(BackendUnavailable, match="unreachable"):
        S3Backend("bucket", endpoint=f"http://127.0.0.1:{free_port()}")
