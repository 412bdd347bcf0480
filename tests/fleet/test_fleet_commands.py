"""The `mainstem fleet` commands over a double of Ray: what they print, note, leave alone and end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.ray_interface import Ray, Status, app, ray_double
from rigs.servers import free_port

from mainstem import cli
from mainstem.fleet import place as places
from mainstem.fleet.place import MARK, Place, Record

pytest.importorskip("zmq", reason="pyzmq is not installed")

UP = app(Status.RUNNING, engine=(Status.HEALTHY, {"RUNNING": 2}, ""), prefill=(Status.HEALTHY, {"RUNNING": 1}, ""))


class Machine:
    """One user of one machine with a Ray; time passes only by sleeping."""

    def __init__(self, folder: Path) -> None:
        self.ray, self.folder, self.now_s = Ray(), folder, 0.0
        self.ray.status = lambda looks: UP
        self.started: list[tuple[Any, ...]] = []
        self.ended: list[str] = []
        self.alive: set[int] = {1, 2}  # processes with a fleet's mark

    @property
    def place(self) -> Place:
        return Place(self.folder / "state" / "mainstem" / "fleet")

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def start_ray(self, place: Place, config: Any, cores: int, gpus: int, mark: str) -> str:
        self.started.append((config.replicas, gpus, mark))
        return "127.0.0.1:77"

    def end_all(self, mark: str) -> int:
        self.ended.append(mark)
        return len(self.alive) if mark else 0

    def run(self, *arguments: str) -> int:
        return cli.main(["fleet", *arguments])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made, before = Machine(tmp_path), dict(os.environ)
    monkeypatch.delenv("MAINSTEM_DEBUG", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(Place, "start_ray", lambda place, *given: made.start_ray(place, *given))
    monkeypatch.setattr(places, "end_all", made.end_all)
    monkeypatch.setattr(places, "marked", lambda mark: made.alive if mark else set())
    monkeypatch.setattr("mainstem.runtime.models.loading.load_tokenizer", lambda model, most: made.ray.calls.append((
        "model", model,
    )))  # fmt: skip
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    try:
        with ray_double(made.ray) as serving:
            monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: made.now_s, sleep=made.sleep))
            monkeypatch.setattr(serving, "stay_on_loopback", lambda: None)
            yield made
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


@pytest.fixture
def running(machine: Machine) -> Machine:
    """A machine with a fleet of two."""
    machine.place.folder.mkdir(parents=True, mode=0o700)
    machine.place.write(Record("127.0.0.1:77", "http://127.0.0.1:9/v1", "m", 2))
    return machine


def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------- up


@pytest.mark.parametrize(("host", "in_url"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_fleet_comes_up_and_is_noted(
    machine: Machine, capsys: pytest.CaptureFixture[str], host: str, in_url: str
) -> None:
    port, model = free_port(), str(machine.folder)
    given = ("--replicas", "1", "--port", str(port), "--host", host, "--model", model, "--json")
    assert machine.run("up", *given) == 0
    url = f"http://{in_url}:{port}/v1"
    assert shown(capsys) == {"url": url, "address": "127.0.0.1:77", "replicas": 1}
    [(replicas, gpus, mark)] = machine.started
    assert (replicas, gpus, len(mark)) == (1, 0, 16)
    assert machine.place.read() == Record("127.0.0.1:77", url, mark, 1)
    assert os.environ[MARK] == mark
    own = machine.place.environment(mark)
    assert len(own) > 6 and {name: os.environ[name] for name in own} == own
    names = [call[0] for call in machine.ray.calls]
    assert names == ["model", "init", "serve.start", "serve.run_many", "shutdown"]
    assert machine.ray.calls[0] == ("model", os.path.realpath(model))
    assert machine.ended == []


def test_settings_of_the_command_come_before_those_of_the_file(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    port, store, folder = free_port(), "redis://127.0.0.1:1/0", machine.folder / "sub"
    (folder / "own").mkdir(parents=True)
    file = folder / "fleet.yaml"
    file.write_text("replicas: 7\nport: 9\nmodel: own\nstore: none\ncpus: 0.01\n")
    assert machine.run("up", str(file), "--replicas", "1", "--port", str(port), "--store", store, "--json") == 0
    assert shown(capsys)["replicas"] == 1
    config = next(call[1].target.arguments[2] for call in machine.ray.calls if call[0] == "serve.run_many")
    assert (config.port, config.cpus, config.engine.tiers.storage) == (port, 0.01, store)
    assert config.model == str(folder / "own")  # beside the file
    assert len(config.engine.tiers.storage_secret or b"") == 64


def test_a_folder_of_the_store_is_the_one_that_the_user_sees(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(machine.folder)
    given = ("--replicas", "1", "--port", str(free_port()), "--store", "file:kv?capacity=1GiB")
    assert machine.run("up", *given) == 0
    config = next(call[1].target.arguments[2] for call in machine.ray.calls if call[0] == "serve.run_many")
    assert config.engine.tiers.storage == f"shared+file:{machine.folder}/kv?capacity=1GiB"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("[1]", 2, "fleet file [1]: must be a mapping of names and values"),
        ("text", 2, "fleet file text: must be a mapping of names and values"),
        ("cpus: 4096", 2, "cpus 4096: must be at most"),
        ("gpus: 1", 2, "gpus 1: must be at most 0 for 2 replicas: this machine has 0"),
        ("a: [", 1, "cannot be read"),
    ],
)
def test_bad_input_starts_nothing(
    machine: Machine, text: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = machine.folder / "fleet.yaml"
    file.write_text(text)
    assert machine.run("up", str(file)) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert machine.started == machine.ray.calls == []


def test_a_port_that_is_taken_starts_nothing(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        assert machine.run("up", "--replicas", "1", "--port", str(other.getsockname()[1])) == 2
    assert "another program listens" in capsys.readouterr().err
    assert machine.started == machine.ray.calls == []


def test_of_a_fleet_that_does_not_come_up_nothing_stays(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.ray.status = lambda looks: app(Status.DEPLOY_FAILED, "no memory")
    assert machine.run("up", "--replicas", "1", "--port", str(free_port())) == 1
    assert capsys.readouterr().err.endswith("mainstem: the fleet did not start: no memory\n")
    assert [call[0] for call in machine.ray.calls][-2:] == ["serve.shutdown", "shutdown"]
    assert machine.ended == [machine.started[0][2]]
    assert machine.place.read() is None


def test_a_fleet_on_a_cluster_of_others_has_no_mark_and_may_be_larger(machine: Machine) -> None:
    file = machine.folder / "fleet.yaml"
    file.write_text("address: 'cluster:63'\nreplicas: 900\ngpus: 8\n")
    assert machine.run("up", str(file), "--port", str(port := free_port())) == 0
    assert machine.started == []
    assert machine.place.read() == Record("cluster:63", f"http://127.0.0.1:{port}/v1", "", 900)


def test_a_second_up_changes_the_fleet_that_runs(running: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert running.run("up", "--replicas", "1", "--port", "9", "--json") == 0
    assert shown(capsys)["address"] == "127.0.0.1:77"
    assert running.started == running.ended == []
    assert running.place.read() == Record("127.0.0.1:77", "http://127.0.0.1:9/v1", "m", 1)


def test_a_change_that_fails_leaves_the_fleet(running: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    running.ray.status = lambda looks: app(Status.DEPLOY_FAILED, "no memory")
    assert running.run("up", "--replicas", "1", "--port", "9") == 1
    assert running.ended == []
    assert running.place.read() is not None
    assert "serve.shutdown" not in [call[0] for call in running.ray.calls]


def test_another_address_is_another_fleet(running: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert running.run("up", "--replicas", "1", "--port", "10") == 2
    assert "that of the fleet that runs, http://127.0.0.1:9/v1: end it with `down` first" in capsys.readouterr().err
    assert running.ray.calls == []


@pytest.mark.parametrize(("alive", "new"), [(set[int](), True), ({1}, True), ({1, 2}, False)])
def test_a_fleet_that_has_ended_is_cleared_away(running: Machine, alive: set[int], new: bool) -> None:
    running.alive = alive
    assert running.run("up", "--replicas", "1", "--port", str(free_port())) == (0 if new else 2)
    assert running.ended == ["m"] * new
    assert len(running.started) == new


# ---------------------------------------------------------------- the others


@pytest.mark.parametrize("command", [["status"], ["scale", "3"], ["drain"], ["down"]], ids=lambda each: each[0])
def test_without_a_fleet_the_others_say_so(
    machine: Machine, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.run(*command) == 1
    said = "mainstem: no fleet runs here: start one with `mainstem fleet up`\n"
    assert capsys.readouterr() == ("", said)
    assert machine.ray.calls == []


def test_the_status_is_shown_in_lines_or_as_json(running: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    running.ray.answer = lambda name: {"replicas": {"r1": {"served": 3, "page_size": 16}}, "running": 4}
    assert running.run("status", "--json") == 0
    found = shown(capsys)
    assert (found["url"], found["status"], found["running"]) == ("http://127.0.0.1:9/v1", "RUNNING", 4)
    assert found["replicas"] == {"r1": {"served": 3, "page_size": 16}}
    assert running.run("status") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["url          http://127.0.0.1:9/v1", "status       RUNNING"]
    assert lines[-3:] == ["replicas:", "  r1           served=3 page_size=16", "running      4"]
    assert [call[0] for call in running.ray.calls] == ["init", "shutdown"] * 2
    assert not running.ray.up


def test_a_failed_command_disconnects(running: Machine) -> None:
    running.ray.status = lambda looks: None
    assert running.run("status") == 1
    assert not running.ray.up


@pytest.mark.parametrize(("given", "code"), [("0", 2), ("1", 1), ("1024", 1), ("1025", 2)])
def test_one_to_1024_replicas_are_waited_for_for_ten_minutes(
    running: Machine, given: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert running.run("scale", given) == code
    assert running.now_s == (600.0 if code == 1 else 0.0)
    said = f"there are not {given} replicas after 600 s" if code == 1 else "must be an integer from 1 to 1024"
    assert said in capsys.readouterr().err
    assert running.place.read() == Record("127.0.0.1:77", "http://127.0.0.1:9/v1", "m", 2)


def test_how_many_there_are_is_noted_of_those_that_answer_alone(running: Machine) -> None:
    asked: list[tuple[Any, ...]] = []
    running.ray.answer = lambda *arguments: asked.append(arguments) or {}
    running.ray.status = lambda looks: app(Status.RUNNING, engine=(Status.HEALTHY, {"RUNNING": 4}, ""),
                                           prefill=(Status.HEALTHY, {"RUNNING": 4}, ""))  # fmt: skip
    for flags, target, noted in (("--prefill",), "prefill", 2), ((), "engine", 4):
        assert running.run("scale", "4", *flags) == 0
        assert ("update_deployment_replicas", f"id of {target}", 4) in asked
        record = running.place.read()
        assert record is not None and record.replicas == noted


def test_all_requests_have_a_minute_to_end_or_as_long_as_is_said(
    running: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    running.ray.answer = lambda name, given: given > 10
    for flags, given, drained in ((), 60.0, True), (("--timeout-s", "5"), 5.0, False):
        assert running.run("drain", "--json", *flags) == 0
        assert shown(capsys) == {"drained": drained}
        assert running.ray.front.waits.pop() == given + 10
    assert running.ended == []


def test_one_replica_is_drained_by_its_name(running: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    running.ray.answer = lambda name, one: (name, one) == ("renew", "r1")
    assert running.run("drain", "r1", "--json") == 0
    assert shown(capsys) == {"drained": "r1"}
    assert running.run("drain", "r2") == 1
    assert "there is no replica r2" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [False, True])
def test_a_fleet_goes_down_though_it_does_not_answer(
    running: Machine, fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    running.ray.failure = OSError("no such host") if fails else None
    assert running.run("down", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"drained": not fails, "processes": 2}
    assert ("the fleet does not answer: Ray at 127.0.0.1:77 cannot be reached: no such host" in err) is fails
    assert running.ray.front.waits == ([] if fails else [70.0])
    assert ("serve.shutdown",) in running.ray.calls or fails
    assert running.ended == ["m"]
    assert running.place.read() is None


@pytest.mark.parametrize(
    "command", [["up", "--replicas", "1"], ["scale", "3"], ["drain"], ["down"]], ids=lambda each: each[0]
)
def test_one_command_at_a_time_changes_a_fleet(
    running: Machine, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with running.place.changing():
        assert running.run(*command) == 1
    assert "another command is changing the fleet" in capsys.readouterr().err
    assert running.ended == running.started == []
    assert running.place.read() is not None
