"""`mainstem store`: serve and status, as processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import patience
from rigs.owners import MIB, folder
from rigs.stores import Values

from mainstem import cli
from mainstem.errors import BackendUnavailable, StorageError
from mainstem.owner.start import Place, running
from mainstem.storage import open_backend

pytestmark = pytest.mark.deadline

VALUES = Values(50_000)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this user's sockets, and the working directory."""
    with folder() as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
        monkeypatch.chdir(made)
        yield made


@pytest.fixture
def owner(home: Path) -> Iterator[subprocess.Popen[str]]:
    """An owner of `file:./kv` that has started."""
    command = [sys.executable, "-m", "mainstem", "store", "serve", "file:./kv", "--host-bytes", "32MiB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().endswith(f"serves file:{home}/kv\n")
        yield process
        process.kill()


def test_an_owner_started_by_hand_serves_until_it_is_stopped(
    home: Path, owner: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        store = open_backend("shared(host_bytes=32MiB)+file:./kv")
        VALUES.put(store, *range(20))
        VALUES.read(store, *range(20))
        store.close()
    assert cli.main(["store", "status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["spec"] == f"file:{home}/kv"
    assert found["pid"] == owner.pid
    assert (found["clients"], found["host_bytes"], found["values"]) == (0, 32 * MIB, 20)
    assert (found["host_hits"], found["store_hits"], found["misses"], found["puts"]) == (40, 0, 0, 40)
    assert found["faults"] == {}
    assert cli.main(["store", "status", "file:kv"]) == 0
    shown = capsys.readouterr().out
    assert "host_bytes      33.6 MB" in shown and "faults          none" in shown
    owner.send_signal(signal.SIGTERM)
    assert owner.wait(patience(60)) == 0
    assert list(running()) == []
    direct = open_backend("file:./kv")
    assert VALUES.read(direct, *range(20)) == [VALUES.size] * 20
    direct.close()


@pytest.mark.usefixtures("owner")
def test_a_store_is_listed_measured_verified_and_moved_through_its_owner(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = "shared+file:./kv"
    store = open_backend(spec)
    VALUES.put(store, *range(20))
    store.close()

    def run(*words: str) -> tuple[int, dict[str, object]]:
        code = cli.main(["storage", *words, "--json"])
        return code, json.loads(capsys.readouterr().out)

    assert run("stats", spec)[1]["entries"] == 20
    code, row = run("du", spec, "--no-headers")
    assert (code, row["values"], row["bytes"]) == (0, 20, 20 * VALUES.size)
    code, found = run("verify", spec)
    assert code == 1 and found["damaged"] == {"header": 20}, "they are no sealed pages"
    code, found = run("migrate", spec, "file:./new")
    assert (code, found["copied"], found["left"]) == (0, 20, {})
    assert cli.main(["storage", "clear", spec]) == 0
    assert run("migrate", "file:./new", spec)[1]["copied"] == 20
    direct = open_backend("file:./new")
    assert VALUES.read(direct, *range(20)) == [VALUES.size] * 20
    direct.close()


@pytest.mark.usefixtures("owner")
def test_a_second_owner_of_one_store_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store", "serve", "file:./kv"]) == 1
    assert "has an owner already" in capsys.readouterr().err
    with pytest.raises(BackendUnavailable, match="its host tier has 33554432 bytes, not 67108864"):
        open_backend("shared(host_bytes=64MiB)+file:./kv")


@pytest.mark.usefixtures("home")
def test_without_an_owner_status_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store", "status"]) == 0
    assert capsys.readouterr().err == "mainstem: no owner is running\n"
    assert cli.main(["store", "status", "memory:", "--json"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == "mainstem: there is no owner of memory:\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["memory:", "--host-bytes", "1KiB"], 2, "--host-bytes 1024: must be an integer from 1048576"),
        (["memory:", "--linger-s", "-1"], 2, "--linger-s -1"),
        (["memory:", "--socket", "x" * 200], 2, "--socket"),
        (["floppy:"], 2, "file:"),
        (["file:/dev/null/kv"], 1, "Not a directory"),
    ],
)
@pytest.mark.usefixtures("home")
def test_what_cannot_be_served_is_one_line(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["store", "serve", *arguments]) == code
    shown = capsys.readouterr().err
    assert says in shown and shown.count("\n") == 1
    assert list(running()) == []


def test_an_owner_never_shows_a_password(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "store_with_login.py").write_text(
        "from mainstem.storage.memory import MemoryBackend\n"
        "class Store(MemoryBackend):\n"
        "    @classmethod\n"
        "    def from_spec(cls, address, options):\n"
        "        return cls()\n"
    )
    spec = "store_with_login:Store?password=hunter2"
    said: list[str] = []
    command = [sys.executable, "-m", "mainstem", "store", "serve", spec, "--host-bytes", "32MiB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said.append(process.stderr.readline())
        (path,) = running()
        for wrong in (f"shared(host_bytes=1MiB)+{spec}", f"shared(socket={path})+redis://anna:hunter2@127.0.0.1"):
            with pytest.raises(BackendUnavailable) as refused:
                open_backend(wrong)
            said.append(str(refused.value))
        store = open_backend(f"shared(timeout={patience(1)})+{spec}")
        assert cli.main(["store", "status"]) == 0
        assert cli.main(["store", "status", "--json"]) == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(patience(60)) == 0
        said.append(process.stderr.read())
        lock = Place.of(spec).lock()
        assert lock is not None
        with open(lock, "wb"), pytest.raises(StorageError) as failed:
            store.exists(VALUES.keys[:1])
        said.append(str(failed.value))
        store.close()
    assert cli.main(["store", "status", spec]) == 1
    for failing in ("no_such_module:Store?password=hunter2", "memory:?password=hunter2"):
        assert cli.main(["store", "serve", failing]) in (1, 2)
        with pytest.raises(BackendUnavailable) as not_started:
            open_backend(f"shared+{failing}")
        said.append(str(not_started.value))
    with pytest.raises(BackendUnavailable) as absent:
        open_backend(f"shared+{spec}", existing=True)
    shown = "\n".join([*said, str(absent.value), *capsys.readouterr()])
    assert shown.count("store_with_login:Store?password=***") >= 7
    assert "hunter2" not in shown
    assert not [path for path in home.rglob("*.log") if "hunter2" in path.read_text()]
