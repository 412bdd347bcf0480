"""The files and processes of a user's fleet: how Ray is started, how long each is waited for, and how all end."""

from __future__ import annotations

import signal
import stat
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mainstem.fleet import place as module
from mainstem.fleet.place import FleetError, Place, Record, end_all
from mainstem.settings.fleet import FleetConfig


class Processes:
    """Processes with one mark, of which some end when they are asked to, after some time, and others when killed."""

    def __init__(self, ends_s: dict[int, float]) -> None:
        self.ends_s, self.now_s = ends_s, 0.0
        self.sent: list[tuple[int, int, float]] = []
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)

    def marked(self, mark: str) -> set[int]:
        assert mark == "m"
        killed = {pid for pid, number, _ in self.sent if number == signal.SIGKILL}
        return {pid for pid, end_s in self.ends_s.items() if self.now_s < end_s and pid not in killed}

    def send(self, pid: int, number: int) -> None:
        self.sent.append((pid, number, self.now_s))


def ended(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "time", processes)
    monkeypatch.setattr(module, "marked", processes.marked)
    monkeypatch.setattr(module, "_send", processes.send)
    return end_all("m")


@pytest.mark.parametrize(("end_s", "killed"), [(0.05, False), (19.95, False), (20.15, True), (1e6, True)])
def test_processes_have_twenty_seconds_to_end_and_are_asked_once(
    end_s: float, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes({1: end_s, 2: 0.05})
    assert ended(processes, monkeypatch) == 2
    asked = [(pid, number) for pid, number, _ in processes.sent if number == signal.SIGTERM]
    assert sorted(asked) == [(1, signal.SIGTERM), (2, signal.SIGTERM)]
    assert [pid for pid, number, _ in processes.sent if number == signal.SIGKILL] == [1] * killed
    assert set(processes.slept) == {0.1}
    assert processes.now_s == pytest.approx(min(-(-end_s // 0.1) * 0.1, 20.1), abs=0.11)


def test_nobody_has_ended_where_nobody_was(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes({})
    assert ended(processes, monkeypatch) == 0
    assert processes.sent == processes.slept == []


class Started:
    """Ray's first process, as it is started; it says that it is up after so many looks, or ends."""

    returncode = 3

    def __init__(self, log: Path, up_after: int, ends_after: int) -> None:
        self.log, self.up_after, self.ends_after = log, up_after, ends_after
        self.looks, self.now_s = 0, 0.0
        self.command: list[str] = []
        self.environment: dict[str, str] = {}

    def __call__(self, command: list[str], *, env: dict[str, str], **_: Any) -> Started:
        self.command, self.environment = command, env
        return self

    def poll(self) -> int | None:
        self.looks += 1
        if self.looks == self.up_after:
            self.log.write_text("Ray runtime started.\n")
        return self.returncode if self.looks == self.ends_after else None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds == 0.1
        self.now_s += seconds


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, up_after: int, ends_after: int = -1) -> tuple[str, Started]:
    started = Started(folder / "ray.log", up_after, ends_after)
    monkeypatch.setattr(module.subprocess, "Popen", started)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(folder))
    monkeypatch.setattr(module, "time", started)
    monkeypatch.setattr(module.socket, "create_connection", lambda address, timeout: nullcontext())
    return Place(folder).start_ray(FleetConfig(start_timeout_s=60.0), 8, 1, "m"), started


def test_ray_has_what_the_machine_has_and_128_mebibytes_for_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, started = start(tmp_path, monkeypatch, up_after=1)
    host, _, port = address.partition(":")
    given = dict(part.removeprefix("--").split("=") for part in started.command if "=" in part)
    assert host == given["node-ip-address"] == "127.0.0.1" and port == given["port"]
    assert (given["num-cpus"], given["num-gpus"]) == ("8", "1")
    assert given["object-store-memory"] == str(128 << 20)
    assert (started.environment["MAINSTEM_FLEET"], started.environment["RAY_AUTH_MODE"]) == ("m", "token")
    assert len({given["port"], given["ray-client-server-port"], given["dashboard-agent-listen-port"]}) == 3


def test_ray_is_waited_for_until_it_says_that_it_is_up_or_ends_or_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, started = start(tmp_path, monkeypatch, up_after=500)
    assert started.now_s == pytest.approx(49.9)
    with pytest.raises(FleetError, match=r"Ray ended with 3 while starting, see .*ray\.log"):
        start(tmp_path, monkeypatch, up_after=500, ends_after=499)
    with pytest.raises(FleetError, match="Ray has not started in 60 s"):
        start(tmp_path, monkeypatch, up_after=10**9)


def test_secrets_are_made_once_and_for_this_user_alone(tmp_path: Path) -> None:
    place = Place(tmp_path)
    first = place.secret()
    assert len(first) == 64 and place.secret() == first
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert module.MARK not in place.environment("") and place.environment("m")[module.MARK] == "m"


def test_a_record_is_read_as_it_was_written_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.read() is None
    for record in (Record("a:1", "http://b", "", 1), Record("a:2", "http://b", "m", 1024)):
        place.write(record)
        assert place.read() == record
    for text in ("{", "{}", '{"address": "a", "url": "b", "mark": "m", "replicas": 1, "more": 2}'):
        (tmp_path / "fleet.json").write_text(text)
        with pytest.raises(FleetError, match=r"fleet\.json is damaged"):
            place.read()
    place.write(None)
    place.write(None)
    assert place.read() is None and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_can_open_is_refused(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Place.default().folder == tmp_path / "mainstem" / "fleet"
    (tmp_path / "mainstem" / "fleet").chmod(mode)
    with pytest.raises(FleetError, match="must be this user's alone"):
        Place.default()
