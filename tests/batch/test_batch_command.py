"""`mainstem batch` as users type it, against a server that answers slowly, dies and comes back."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from machine import eventually, patience

from mainstem.batch import command
from mainstem.cli import main
from mainstem.errors import BadArgument


class Asked:
    """A server that answers each request with its number, one after the other, while `open`.

    Attributes:
        sent: how often each request came.
        keys: that came.
        slow_s: of each answer.
        arrived: how many requests came.
        broken: how many requests still lose their connection.
    """

    def __init__(self) -> None:
        self.sent, self.keys = Counter[int](), set[str | None]()
        self.open, self.broken, self.arrived, self.slow_s = threading.Event(), 0, 0, 0.0
        self.open.set()
        self._lock = threading.Lock()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        asked = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                asked.arrived += 1
                asked.open.wait(patience(30))
                with asked._lock:
                    asked.keys.add(self.headers["authorization"])
                    breaks, asked.broken = asked.broken > 0, asked.broken - 1
                    asked.sent[body["seed"]] += not breaks
                if breaks:
                    self.connection.close()
                    return
                threading.Event().wait(asked.slow_s)
                usage = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}
                answer = json.dumps({"seed": body["seed"], "usage": usage}).encode()
                self.send_response(400 if body["seed"] == 13 else 200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                with suppress(BrokenPipeError):  # it was killed
                    self.wfile.write(answer)

            def log_message(self, *given: object) -> None:
                pass

        return Handler

    @contextmanager
    def listening(self, port: int = 0) -> Iterator[str]:
        with ThreadingHTTPServer(("127.0.0.1", port), self.handler()) as server:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield f"127.0.0.1:{server.server_address[1]}"
            server.shutdown()


@pytest.fixture
def asked() -> Asked:
    return Asked()


def requests(folder: Path, count: int = 20) -> str:
    path = folder / "requests.jsonl"
    with open(path, "w") as file:
        for i in range(count):
            messages = [{"role": "user", "content": "a document " * 20 + str(i % 3)}]
            body = {"messages": messages, "seed": i, "max_tokens": 1 + i}
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return str(path)


def answers(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines), "each request is answered once"
    for id, each in found.items():
        assert each["response"]["body"]["seed"] == int(id[1:])
    return found


def arguments(folder: Path, server: str, *more: str, count: int = 20) -> list[str]:
    output = str(folder / "answers.jsonl")
    return ["batch", requests(folder, count), "--output", output, "--to", server, *more]


def test_each_request_is_answered(tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    with asked.listening() as server:
        assert main(arguments(tmp_path, server, "--api-key", "secret", "--concurrency", "3")) == 0
        assert len(answers(tmp_path)) == 20
        assert asked.keys == {"Bearer secret"}
        said = capsys.readouterr().err
        assert "about 1,250 prompt tokens, of which 338 are computed (at least 338), and at most 210 of answers" in said
        assert (
            "all 20 requests are answered, 1 of them with an error; this run had 200 prompt tokens, of which 40" in said
        )
        assert main(arguments(tmp_path, server)) == 0
        assert "all 20 requests are answered in" in capsys.readouterr().err
    assert set(asked.sent.values()) == {1}


def test_requests_are_sent_in_the_order_of_the_tree(tmp_path: Path, asked: Asked) -> None:
    with asked.listening() as server:
        assert main(arguments(tmp_path, server, "--concurrency", "1")) == 0
    assert [seed % 3 for seed in asked.sent] == sorted((seed % 3 for seed in asked.sent), key=[1, 0, 2].index)
    assert next(iter(asked.sent)) == 19, "the longest answer comes first"


def test_a_dry_run_sends_nothing(tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    with asked.listening() as server:
        assert main(arguments(tmp_path, server, "--dry-run")) == 0
    assert not asked.sent
    assert capsys.readouterr().out.startswith("20 requests: about ")
    assert not (tmp_path / "answers.jsonl").exists()


def started(folder: Path, server: str, *more: str) -> subprocess.Popen[bytes]:
    command_ = [sys.executable, "-m", "mainstem", *arguments(folder, server, *more, count=60)]
    return subprocess.Popen(command_, stderr=subprocess.PIPE)


def size(folder: Path) -> int:
    path = folder / "answers.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.deadline
def test_a_killed_run_goes_on(tmp_path: Path, asked: Asked) -> None:
    asked.slow_s = 0.05
    with asked.listening() as server:
        for least in (5, 20):
            process = started(tmp_path, server, "--concurrency", "4")
            eventually(lambda least=least: size(tmp_path) >= least, 60)  # type: ignore[misc]
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert 20 <= size(tmp_path) < 60
        assert main(arguments(tmp_path, server, count=60)) == 0
    assert len(answers(tmp_path)) == 60
    assert sum(asked.sent.values()) <= 60 + 2 * 4, "no more is asked twice than was under way"


@pytest.mark.deadline
def test_an_interrupt_answers_what_is_under_way(tmp_path: Path, asked: Asked) -> None:
    asked.slow_s = 0.05
    with asked.listening() as server:
        process = started(tmp_path, server, "--concurrency", "4")
        eventually(lambda: size(tmp_path) >= 5, 60)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=patience(60))[1].decode()
        assert process.returncode == 1
        assert "interrupted: " in said and "the same command goes on" in said
    assert size(tmp_path) == sum(asked.sent.values()) < 60


@pytest.mark.deadline
def test_a_second_interrupt_stops_at_once(tmp_path: Path, asked: Asked) -> None:
    with asked.listening() as server:
        asked.open.clear()
        process = started(tmp_path, server)
        assert process.stderr is not None
        eventually(lambda: asked.arrived > 0, 60)
        assert b"60 requests" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert b"second Ctrl-C" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=patience(20))
        assert process.returncode == 130
        asked.open.set()


def test_a_server_that_comes_back_answers_the_rest(tmp_path: Path, asked: Asked) -> None:
    asked.broken = 3
    with asked.listening() as server:
        assert main(arguments(tmp_path, server, "--concurrency", "2")) == 0
    assert len(answers(tmp_path)) == 20


def test_a_server_that_is_gone_ends_it_and_it_goes_on_later(
    tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    with asked.listening() as server:
        pass
    assert main(arguments(tmp_path, server, "--retry-s", "0")) == 1
    said = capsys.readouterr().err
    assert "the server has not answered for 0 s" in said and "0 of 20 requests are answered" in said
    with asked.listening(int(server.partition(":")[2])) as server:
        assert main(arguments(tmp_path, server)) == 0
    assert len(answers(tmp_path)) == 20


def test_a_server_is_waited_for_for_five_minutes() -> None:
    assert signature(command.batch.default_command).parameters["retry_s"].default == 300.0


def test_it_stops_after_so_many_tokens(tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    """Each request computes 2 tokens of its prompt and 5 of its answer."""
    with asked.listening() as server:
        assert main(arguments(tmp_path, server, "--concurrency", "1", "--max-cost", "21")) == 1
        assert "21 tokens were computed: 3 of 20" in capsys.readouterr().err
        assert main(arguments(tmp_path, server, "--concurrency", "1", "--max-cost", "22")) == 1
        assert len(answers(tmp_path)) == 3 + 4


@pytest.mark.parametrize(
    ("text", "now", "at"),
    [
        ("07:00", "2026-01-01T06:59:59", "2026-01-01T07:00"),
        ("07:00", "2026-01-01T07:00:00", "2026-01-02T07:00"),
        ("00:00", "2026-12-31T12:00:00", "2027-01-01T00:00"),
    ],
)
def test_a_time_of_day_is_the_next_one(text: str, now: str, at: str) -> None:
    assert command._time_of_day(text, datetime.fromisoformat(now)) == datetime.fromisoformat(at)


@pytest.mark.parametrize("text", ["7", "25:00", "07:60", "noon"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="HH:MM"):
        command._time_of_day(text, datetime(2026, 1, 1))


def test_it_stops_at_a_time_of_day(
    tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_time_of_day", lambda text, now: now)
    with asked.listening() as server:
        assert main(arguments(tmp_path, server, "--until", "07:00")) == 1
    assert "it is " in capsys.readouterr().err
    assert not asked.sent


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--concurrency", "0"], "--concurrency 0: must be 1 to 4096"),
        (["--concurrency", "4097"], "--concurrency 4097: must be 1 to 4096"),
        (["--max-cost", "0"], "--max-cost 0: must be 1 or more"),
        (["--retry-s", "-1"], "--retry-s -1.0: must be a number of seconds"),
        (["--until", "late"], "--until late: must be a time of day"),
        (["--model", "x"], "--model x: must be left out with --to"),
        (["--served-model-name", "x"], "must be left out with --to"),
        (["--kv-bytes", "2GiB"], "--to 127.0.0.1:1: must be left out with flags"),
        (["--dtype", "float32"], "--to 127.0.0.1:1: must be left out with flags"),
    ],
)
def test_wrong_usage_is_named(tmp_path: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tmp_path, "127.0.0.1:1", *more)) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()


@pytest.mark.parametrize("torn", [None, b"", b'{"id": '])
def test_a_dry_run_changes_no_file(
    tmp_path: Path, asked: Asked, torn: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor waits for a process that writes the answers."""
    path = tmp_path / "answers.jsonl"
    with asked.listening() as server:
        if torn is not None:
            assert main(arguments(tmp_path, server, "--concurrency", "1", "--max-cost", "21")) == 1
            path.write_bytes(path.read_bytes() + torn)
        before = path.read_bytes() if path.exists() else None
        with open(path, "rb") if before is not None else nullcontext() as held:
            if held is not None:
                fcntl.flock(held, fcntl.LOCK_EX)
            assert main(arguments(tmp_path, server, "--dry-run")) == 0
    assert capsys.readouterr().out.startswith("20 requests: " if torn is None else "17 requests, after 3 that are")
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_broken_line_is_named_before_anything_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(tmp_path, "127.0.0.1:1")
    with open(given[1], "a") as file:
        file.write("{\n")
    assert main(given) == 1
    assert f"{given[1]}: line 21: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()


def test_files_that_cannot_be_used_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = requests(tmp_path)
    assert main(["batch", str(tmp_path / "none"), "--output", str(tmp_path / "a"), "--to", ":1"]) == 2
    assert "requests" in capsys.readouterr().err
    assert main(["batch", given, "--output", given, "--to", ":1"]) == 2
    assert "--output" in capsys.readouterr().err
    (tmp_path / "other").write_text("mine\n")
    assert main(["batch", given, "--output", str(tmp_path / "other"), "--to", ":1"]) == 2
    assert "a file of answers: line 1 is none" in capsys.readouterr().err
    assert (tmp_path / "other").read_text() == "mine\n"


def test_an_engine_of_its_own_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rigs.serving import tiny_folder

    model = tiny_folder("llama", tmp_path / "tiny")
    path = tmp_path / "requests.jsonl"
    with open(path, "w") as file:
        for i in range(6):
            prompt = " ".join(f"w{(i % 2) * 50 + k}" for k in range(2, 40))
            body = {"model": "mine", "prompt": f"{prompt} w{i + 100}", "max_tokens": 4}
            file.write(
                json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
            )
        body = {"model": "mine", "input": "w3 w4"}
        file.write(json.dumps({"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": body}) + "\n")
    own = ["--model", str(model), "--dtype", "float32", "--served-model-name", "mine"]
    given = ["batch", str(path), "--output", str(tmp_path / "answers.jsonl"), *own]
    assert main([*given, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("7 requests: ")
    assert main(given) == 0
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {each["response"]["status_code"] for each in lines} == {200}
    assert {each["custom_id"] for each in lines} == {"e", *(f"r{i}" for i in range(6))}
    assert "all 7 requests are answered; this run had" in capsys.readouterr().err
    assert os.path.getsize(tmp_path / "answers.jsonl") > 0
