"""`mainstem storage migrate`, `verify` and `du`: what they print, what they return, over files and real servers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import pytest
from machine import patience
from rigs.hand_driven import SECRET, Rig
from rigs.servers import S3_CREDENTIALS, free_port, freeze, rclone_s3, valkey

from mainstem import cli
from mainstem.storage import ABSENT, Backend, open_backend
from mainstem.storage.conformance import make_keys
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.storage.sealer import HEADER_BYTES, PUBLIC_SECRET, Label, Sealer

KEYS = make_keys(random.Random(11), 4000)
PUBLIC = Sealer(None, PUBLIC_SECRET)
HERE = __name__


def sealed(key: bytes, sealer: Sealer = PUBLIC, size: int = 1000) -> memoryview:
    slot = memoryview(bytearray(HEADER_BYTES) + random.Random(key).randbytes(size))
    sealer.seal(slot, key, Label(component="full"), 1.8e9)
    return slot


class Remembering(MemoryBackend):
    """Keeps its values from one command to the next."""

    kept: ClassVar[Mapping[bytes, bytes]] = {}

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        store = cls()
        store._values.update(cls.kept)
        return store


class Interrupted(Remembering):
    """Ctrl-C arrives while a value is read."""

    kept: ClassVar[Mapping[bytes, bytes]] = {key: bytes(sealed(key)) for key in KEYS[:3]}

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        raise KeyboardInterrupt


class CannotList(Remembering):
    """Cannot list its values."""

    scan = Backend.scan


def run(*arguments: str) -> int:
    return cli.main(["storage", *arguments])


def fill(spec: str, count: int, sealer: Sealer = PUBLIC) -> None:
    with contextlib.closing(open_backend(spec)) as backend:
        for at in range(0, count, 200):
            keys = KEYS[at : min(at + 200, count)]
            assert all(backend.put(keys, [sealed(key, sealer) for key in keys]))


def held(spec: str, count: int, sealer: Sealer = PUBLIC) -> int:
    """Returns how many of the first values a store has; fails if one is not what was put."""
    found = 0
    with contextlib.closing(open_backend(spec)) as backend:
        for at in range(0, count, 200):
            keys = KEYS[at : min(at + 200, count)]
            buffers = [memoryview(bytearray(HEADER_BYTES + 1000)) for _ in keys]
            for key, length, buffer in zip(keys, backend.get(keys, buffers), buffers, strict=True):
                assert length == ABSENT or buffer == sealed(key, sealer)
                found += length != ABSENT
    return found


@pytest.fixture
def one(tmp_path: Path) -> str:
    return f"file:{tmp_path}/one?capacity=64MiB"


@pytest.fixture
def two(tmp_path: Path) -> str:
    return f"file:{tmp_path}/two?capacity=64MiB"


# ---------------------------------------------------------------- what is there, as it is

LOOKS = ("stats", "du", "verify", "migrate", "clear", "check")


@pytest.mark.parametrize("command", [command for command in LOOKS if command != "clear"])
def test_a_look_at_a_store_drops_nothing_to_fit_a_capacity(command: str, two: str, tmp_path: Path) -> None:
    fill(f"file:{tmp_path}/one", 300)
    arguments = [f"file:{tmp_path}/one?capacity=40KiB", *([two] if command == "migrate" else [])]
    assert run(command, *arguments) == (2 if command == "check" else 0)
    assert held(f"file:{tmp_path}/one", 300) == 300


@pytest.mark.parametrize("command", [command for command in LOOKS if command != "check"])
@pytest.mark.parametrize("spec", ["file:{}/none", "file:{}/none?capacity=64MiB", "readonly+file:{}/none"])
def test_a_store_that_is_not_there_is_not_made(
    command: str, spec: str, two: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, spec.format(tmp_path), *([two] if command == "migrate" else [])) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no store" in line
    assert not (tmp_path / "none").exists() and not (tmp_path / "two").exists()


@pytest.mark.parametrize("command", LOOKS)
def test_a_spec_for_every_rank_names_no_store(
    command: str, two: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, f"file:{tmp_path}/kv-{{rank}}", *([two] if command == "migrate" else [])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the number of a rank in place of {rank}" in line
    assert not list(tmp_path.iterdir())


def test_check_prints_every_case_and_counts_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "memory:?capacity=1MB") == 1
    shown = capsys.readouterr()
    assert "pass  empty" in shown.out and "FAIL  round_trip" in shown.out and "of 23 cases failed" in shown.err


# ---------------------------------------------------------------- migrate


def test_migrate_says_what_it_copied_and_again_that_it_is_there(
    one: str, two: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(one, 300)
    assert run("migrate", one, two) == 0
    assert capsys.readouterr().out == "copied 300 values (338 KB); 0 were there\n"
    assert held(two, 300) == 300
    assert run("migrate", one, two, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"copied": 0, "copied_bytes": 0, "there": 300, "left": {}}


def test_on_a_terminal_a_bar_shows_how_far_it_is_and_results_stay_apart(
    one: str, two: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(one, 300)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run("migrate", one, two) == 0
    shown = capsys.readouterr()
    assert shown.out == "copied 300 values (338 KB); 0 were there\n"
    assert "copying values: 300, 338 KB" in shown.err


def test_migrate_fails_and_counts_what_it_left(one: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fill(one, 40)
    assert run("migrate", one, f"file:{tmp_path}/small?capacity=40KiB") == 1
    shown = capsys.readouterr()
    assert "copied 40 values" in shown.out
    assert shown.err == "mainstem: 30 values were not copied: evicted 30\n"


def test_with_a_secret_only_its_own_values_are_copied(
    one: str, two: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(one, 10)
    monkeypatch.setenv("MAINSTEM_STORAGE_SECRET", "a secret of more than sixteen bytes")
    assert run("migrate", one, two, "--json") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["left"] == {"altered": 10} and "10 values were not copied: altered 10" in shown.err
    monkeypatch.delenv("MAINSTEM_STORAGE_SECRET")
    assert run("migrate", one, two) == 0 and held(two, 10) == 10


def test_ctrl_c_ends_migrate_with_a_line_that_says_how_to_go_on(two: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("migrate", f"{HERE}:Interrupted", two) == 130
    shown = capsys.readouterr()
    assert shown.out == "copied 0 values (0 B); 0 were there\n"
    assert shown.err == "mainstem: not all was copied: the same command goes on from there\n"


@pytest.mark.parametrize("command", ["verify", "du", "migrate"])
def test_a_store_that_cannot_list_is_refused_in_one_line(
    command: str, two: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, f"{HERE}:CannotList", *([two] if command == "migrate" else [])) == 1
    assert "CannotList cannot list its values" in capsys.readouterr().err.splitlines()[-1]


def test_a_store_that_is_not_there_is_said_before_anything_is_done(
    one: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("migrate", one, f"redis://127.0.0.1:{free_port()}") == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


# ---------------------------------------------------------------- verify


def test_verify_finds_damage_and_deletes_it(one: str, capsys: pytest.CaptureFixture[str]) -> None:
    fill(one, 20)
    with contextlib.closing(open_backend(one)) as backend:
        backend.put(KEYS[:1], [memoryview(bytearray(9))])
        backend.put(KEYS[1:2], [memoryview(bytearray(sealed(KEYS[1])[:-1]) + b"?")])
    assert run("verify", one, "--json") == 1
    shown = capsys.readouterr()
    assert shown.err == "mainstem: 2 values are damaged: length 1, altered 1\n"
    held_now = json.loads(shown.out)
    assert (held_now["intact"], held_now["damaged"]) == (18, {"length": 1, "altered": 1})
    assert run("verify", one, "--delete") == 0
    assert capsys.readouterr().out == "18 values are intact (20.3 KB), 2 were deleted\n"
    assert run("verify", one) == 0


def test_verify_with_another_secret_deletes_nothing_and_says_why(one: str, capsys: pytest.CaptureFixture[str]) -> None:
    secret = b"a secret of more than sixteen bytes"
    fill(one, 20, Sealer(None, secret))
    assert run("verify", one, "--delete") == 1
    assert "no value verifies with no secret (--storage-secret): altered 20" in capsys.readouterr().err
    assert run("verify", one, "--delete", "--storage-secret", "another secret of enough bytes") == 1
    assert "no value verifies with this secret" in capsys.readouterr().err
    assert run("verify", one, "--storage-secret", secret.decode()) == 0


# ---------------------------------------------------------------- du


def test_du_names_model_namespace_and_component(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryBackend()
    rig = Rig(backend=memory)
    assert rig.store is not None
    for tokens, space in (([1, 2, 3, 4, 5], None), ([1, 2, 3, 4, 5, 6, 7], "a")):
        rig.serve(tokens, space)
    rig.store.enter_identity()
    rig.settle()
    monkeypatch.setattr(Remembering, "kept", dict(memory._values))
    secret = SECRET.decode()
    assert run("du", f"{HERE}:Remembering", "--storage-secret", secret, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    pages = [row for row in rows if row["component"] == "full"]
    assert [row["values"] for row in pages] == [3, 2] and len({row["namespace"] for row in pages}) == 2
    assert ({row["model"] for row in pages} == {"model"} and set(pages[0]["ages"]) == {"unknown"}) or pages[0]["ages"]
    assert run("du", f"{HERE}:Remembering", "--storage-secret", secret) == 0
    shown = capsys.readouterr().out
    assert "full" in shown and pages[0]["namespace"][:8] in shown
    assert run("du", f"{HERE}:Remembering", "--no-headers", "--json") == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["values"], row["namespace"], row["component"]) == (len(memory._values), "", "")


# ---------------------------------------------------------------- real servers


@pytest.fixture
def redis() -> Iterator[str]:
    if not importlib.util.find_spec("redis"):
        pytest.skip("the package redis is not installed")
    port = free_port()
    with valkey(port):
        yield f"redis://127.0.0.1:{port}/0?timeout={patience(5)}"


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if not importlib.util.find_spec("obstore"):
        pytest.skip("the package obstore is not installed")
    for name, value in S3_CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "s3" / "bucket").mkdir(parents=True)
    port = free_port()
    with rclone_s3(port, tmp_path / "s3"):
        yield f"s3://bucket/kv?endpoint=http://127.0.0.1:{port}&timeout={4 * patience(5)}"


@pytest.mark.deadline
def test_values_go_from_a_disk_to_valkey_and_to_s3_and_back(
    one: str, two: str, redis: str, s3: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(one, 300)
    for source, target in ((one, redis), (redis, s3), (s3, two)):
        assert run("migrate", source, target) == 0
        assert "copied 300 values" in capsys.readouterr().out
        assert run("verify", target) == 0
        assert "300 values are intact" in capsys.readouterr().out
    assert held(two, 300) == 300
    for spec in (redis, s3):
        assert run("du", spec, "--no-headers", "--json") == 0
        (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert row["values"] == 300 and set(row["ages"]) == {"under 1 h"}


def _migrating(source: str, target: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mainstem", "storage", "migrate", source, target]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.deadline
@pytest.mark.parametrize("end", ["interrupted", "killed"])
def test_a_copy_to_a_server_that_hangs_is_ended_and_resumed(one: str, end: str) -> None:
    """The server stops after some values: Ctrl-C waits for what runs, and a server that dies is an error."""
    fill(one, 4000)
    port = free_port()
    target = f"redis://127.0.0.1:{port}/0?timeout={patience(1)}"
    with valkey(port) as server:
        running = _migrating(one, target)
        with contextlib.closing(open_backend(target)) as backend:
            while not any(backend.exists(KEYS[::100])) and running.poll() is None:
                pass
        freeze(server)
        if end == "killed":
            server.kill()
        else:
            running.send_signal(signal.SIGINT)
            server.send_signal(signal.SIGCONT)
        _, err = running.communicate(timeout=patience(60))
        assert running.returncode in (0, 130 if end == "interrupted" else 1), err
        assert running.returncode == 0 or "the same command goes on from there" in err
    with valkey(port):
        assert run("migrate", one, target) == 0
        assert held(target, 4000) == 4000
