"""Files and batches of a server over a scripted engine: their life, their owners, their bounds, and restarts."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from machine import eventually
from rigs.app_client import error_of
from rigs.fake_engine import FakeEngine
from starlette.responses import FileResponse
from starlette.testclient import TestClient

from mainstem.batch.answers import Answer, Answers, Failure, Response
from mainstem.errors import BadArgument
from mainstem.runtime.request import LOWEST_PRIORITY
from mainstem.server.app import create_app
from mainstem.server.batches import batches, routes, shelf
from mainstem.settings.server import BatchConfig, ServerConfig

CHAT = "/v1/chat/completions"
A, B = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}


def line(id: str, content: Any = "hi", url: str = CHAT, **fields: Any) -> bytes:
    body = {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


@contextmanager
def serving(
    folder: Path, engine: FakeEngine | None = None, now: Callable[[], float] = lambda: 1000.0, **config: Any
) -> Iterator[TestClient]:
    given = {name: config.pop(name) for name in [*config] if name.startswith("batch_")}
    made = ServerConfig(precompute_turns=0.0, batch=BatchConfig(batch_folder=folder, **given), **config)
    with TestClient(create_app(engine or FakeEngine(), made, now=now)) as server:
        yield server
    left = shelf.Shelf(folder, 1 << 40, 1e9, lambda: 0.0)
    left.check()
    left.close()


def upload(server: TestClient, content: bytes, headers: Any = None, **fields: Any) -> Any:
    data = {"purpose": "batch", **fields}
    return server.post("/v1/files", data=data, files={"file": ("requests.jsonl", content)}, headers=headers)


def begin(server: TestClient, file: str, headers: Any = None, **fields: Any) -> Any:
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", **fields}
    return server.post("/v1/batches", json=body, headers=headers)


def ended(server: TestClient, id: str, headers: Any = None) -> Any:
    def batch() -> Any:
        return server.get(f"/v1/batches/{id}", headers=headers).json()

    eventually(lambda: batch()["status"] in ("completed", "failed", "cancelled", "expired"), 30.0)
    return batch()


def content(server: TestClient, id: str | None, headers: Any = None) -> dict[str, Any]:
    if id is None:
        return {}
    answer = server.get(f"/v1/files/{id}/content", headers=headers)
    assert answer.status_code == 200, answer.text
    lines = [json.loads(each) for each in answer.text.splitlines()]
    answers = {each["custom_id"]: each for each in lines}
    assert len(answers) == len(lines), "each request is answered once"
    return answers


def ran(server: TestClient, *lines: bytes, headers: Any = None) -> Any:
    file = upload(server, b"".join(lines), headers)
    assert file.status_code == 200, file.text
    batch = begin(server, file.json()["id"], headers)
    assert batch.status_code == 200, batch.text
    return ended(server, batch.json()["id"], headers)


def test_a_batch_is_answered(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(tmp_path, engine) as server:
        batch = ran(server, line("a", "one"), line("b", "two"), line("c", 5))
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        good, bad = content(server, batch["output_file_id"]), content(server, batch["error_file_id"])
        assert good.keys() == {"a", "b"}
        assert good["a"]["response"]["status_code"] == 200
        assert good["a"]["response"]["body"]["object"] == "chat.completion"
        assert bad["c"]["response"]["status_code"] == 400
        assert bad["c"]["response"]["body"]["error"]["param"].startswith("messages[0]")
    assert {stream.request.priority for stream in engine.streams} == {LOWEST_PRIORITY}


def test_other_requests_keep_their_priority(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(tmp_path, engine) as server:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "priority": 3}
        assert server.post(CHAT, json=body).status_code == 200
    assert [stream.request.priority for stream in engine.streams] == [3]


def test_prompts_that_are_scored_have_the_lowest_priority(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(tmp_path, engine, embeddings=True) as server:
        body = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "fake", "input": "hi"}}
        file = upload(server, json.dumps(body).encode()).json()["id"]
        batch = ended(server, begin(server, file, endpoint="/v1/embeddings").json()["id"])
        assert batch["request_counts"]["completed"] == 1
    assert {stream.request.priority for stream in engine.streams} == {LOWEST_PRIORITY}


def test_files_are_listed_described_and_deleted(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        first, second = (upload(server, line(id)).json() for id in "ab")
        assert first["object"] == "file"
        assert (first["filename"], first["purpose"], first["bytes"]) == ("requests.jsonl", "batch", len(line("a")))
        assert first["expires_at"] - first["created_at"] == 7 * 86400
        listed = server.get("/v1/files", params={"limit": 1, "order": "asc"}).json()
        assert {each["id"] for each in server.get("/v1/files").json()["data"]} == {first["id"], second["id"]}
        assert listed["has_more"] is True
        assert server.get(f"/v1/files/{first['id']}").json() == first
        assert server.get(f"/v1/files/{first['id']}/content").content == line("a")
        assert server.delete(f"/v1/files/{first['id']}").json()["deleted"] is True
        assert error_of(server.get(f"/v1/files/{first['id']}"), 404)["code"] == "file_not_found"
        assert error_of(server.delete(f"/v1/files/{first['id']}"), 404)
        assert [each["id"] for each in server.get("/v1/files", params={"purpose": "batch"}).json()["data"]] == [
            second["id"]
        ]
        assert server.get("/v1/files", params={"purpose": "batch_output"}).json()["data"] == []


def test_a_file_that_was_deleted_meanwhile_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get = shelf.Shelf.get

    def deleting(self: shelf.Shelf, owner: str, id: str, kind: Any) -> Any:
        found = get(self, owner, id, kind)
        self.delete(id)
        return found

    with serving(tmp_path) as server:
        for ask in (lambda id: server.get(f"/v1/files/{id}/content"), lambda id: server.delete(f"/v1/files/{id}")):
            id = upload(server, line("a")).json()["id"]
            with monkeypatch.context() as patched:
                patched.setattr(shelf.Shelf, "get", deleting)
                answer = ask(id)
            assert answer.status_code == (404 if answer.request.method == "GET" else 200)
        assert server.get("/v1/files").json()["data"] == []


def test_a_file_that_goes_before_it_is_streamed_breaks_its_own_answer_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(FileResponse):
        """Deletes the file after it was looked at."""

        def __init__(self, path: Path, **given: Any) -> None:
            super().__init__(path, **given)
            path.unlink()

    with serving(tmp_path) as server:
        ids = [upload(server, line(each)).json()["id"] for each in "ab"]
        with monkeypatch.context() as patched:
            patched.setattr(routes, "FileResponse", Gone)
            assert server.get(f"/v1/files/{ids[0]}/content").content == b""  # and uvicorn closes the connection
        error_of(server.get(f"/v1/files/{ids[0]}/content"), 404)
        assert server.get(f"/v1/files/{ids[1]}/content").content == line("b")
    assert ["request" in record.message for record in caplog.records if record.exc_info] == [True]


def test_the_name_of_a_file_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        files = {"file": ("ü 你好.jsonl", line("a"))}
        made = server.post("/v1/files", data={"purpose": "batch"}, files=files).json()
        assert made["filename"] == "ü 你好.jsonl"
        assert server.get("/v1/files").json()["data"] == [made]


def test_batches_are_listed(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        made = [ran(server, line(id))["id"] for id in "abc"]
        everything = [each["id"] for each in server.get("/v1/batches").json()["data"]]
        assert sorted(everything) == sorted(made)
        rest = server.get("/v1/batches", params={"limit": 2, "after": everything[0]}).json()
        assert [each["id"] for each in rest["data"]] == everything[1:]


@pytest.mark.parametrize(
    ("content", "code", "at"),
    [
        (line("a") + b"{\n", "invalid_json_line", 2),
        (line("a") + line("b") + line("a"), "duplicate_custom_id", 3),
        (line("a", url="/v1/completions"), "invalid_url", 1),
        (line("a", stream=True), "invalid_request", 1),
        (b"\n\n", "empty_file", 1),
    ],
)
def test_a_file_that_cannot_run_fails_its_batch(tmp_path: Path, content: bytes, code: str, at: int) -> None:
    with serving(tmp_path) as server:
        batch = ran(server, content)
        assert batch["status"] == "failed"
        assert [(each["code"], each["line"]) for each in batch["errors"]["data"]] == [(code, at)]
        assert batch["output_file_id"] is None


def test_a_line_is_as_long_as_a_body_may_be(tmp_path: Path) -> None:
    most = len(line("a")) - 1
    with serving(tmp_path, max_body_bytes=most) as server:
        assert ran(server, line("a"))["status"] == "completed"
        assert ran(server, line("ab"))["errors"]["data"][0]["code"] == "line_too_long"


def test_the_loop_of_the_server_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for the shelf, which is locked while it brings something to the disk."""
    waited, fsync, made = list[str](), os.fsync, shelf.Shelf.__init__

    def note(what: str) -> None:
        with suppress(RuntimeError):  # this thread has no loop
            asyncio.get_running_loop()
            waited.append(what)

    class Lock:
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            note("the shelf")
            self._lock.acquire()

        def __exit__(self, *exc: object) -> None:
            self._lock.release()

    def make(self: Any, *given: Any) -> None:
        made(self, *given)
        self._lock = Lock()

    def sync(file: int) -> None:
        note("the disk")
        fsync(file)

    monkeypatch.setattr(shelf.Shelf, "__init__", make)
    monkeypatch.setattr(os, "fsync", sync)
    with serving(tmp_path, FakeEngine(step_s=0.02)) as server:
        ran(server, line("a"), line("b", 5))
        error_of(upload(server, line("a"), purpose="other"), 400)
        id = begin(server, upload(server, b"".join(line(f"r{i}") for i in range(60))).json()["id"]).json()["id"]
        eventually(lambda: server.get(f"/v1/batches/{id}").json()["request_counts"]["completed"] > 0, 30)
    assert waited == []


def test_another_key_finds_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, api_key=("a", "b")) as server:
        batch = ran(server, line("x"), headers=A)
        assert batch["status"] == "completed"
        for path in (
            f"/v1/batches/{batch['id']}", f"/v1/files/{batch['input_file_id']}",
            f"/v1/files/{batch['output_file_id']}/content",
        ):  # fmt: skip
            assert server.get(path, headers=A).status_code == 200
            error_of(server.get(path, headers=B), 404)
        error_of(server.post(f"/v1/batches/{batch['id']}/cancel", headers=B), 404)
        error_of(server.delete(f"/v1/files/{batch['input_file_id']}", headers=B), 404)
        error_of(begin(server, batch["input_file_id"], B), 404)
        assert server.get("/v1/files", headers=B).json()["data"] == []
        assert server.get("/v1/batches", headers=B).json()["data"] == []
        error_of(server.get("/v1/files"), 401)


def test_a_batch_runs_in_the_name_of_its_key(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(tmp_path, engine, api_key=("a", "b")) as server:
        for headers in (A, B):
            ran(server, line("x"), headers=headers)
    first, second = (stream.request.namespace for stream in engine.streams)
    assert first != second


def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    engine = FakeEngine(step_s=0.02)
    with serving(tmp_path, engine, api_key=("a", "b")) as server:
        file = upload(server, b"".join(line(f"r{i}") for i in range(60)), A).json()["id"]
        id = begin(server, file, A).json()["id"]
        eventually(lambda: server.get(f"/v1/batches/{id}", headers=A).json()["request_counts"]["completed"] >= 8, 30)
        assert server.get(f"/v1/batches/{id}", headers=A).json()["status"] == "in_progress"
    first = len((tmp_path / f"file-{id.removeprefix('batch_')}-output.jsonl").read_bytes().splitlines())
    assert 8 <= first < 60
    after = FakeEngine()
    with serving(tmp_path, after, api_key=("b", "a")) as server:
        batch = ended(server, id, A)
        assert batch["status"] == "completed"
        assert len(content(server, batch["output_file_id"], A)) == 60
        error_of(server.get(f"/v1/batches/{id}", headers=B), 404)
    assert len(after.streams) == 60 - first, "what was answered is not sent again"


def test_a_part_of_an_answer_is_answered_again(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(step_s=0.02)) as server:
        file = upload(server, b"".join(line(f"r{i}") for i in range(30))).json()["id"]
        id = begin(server, file).json()["id"]
        eventually(lambda: server.get(f"/v1/batches/{id}").json()["request_counts"]["completed"] >= 2, 30)
    with open(tmp_path / f"file-{id.removeprefix('batch_')}-output.jsonl", "ab") as output:
        output.write(b'{"id":"batch_req_')
    with serving(tmp_path) as server:
        assert len(content(server, ended(server, id)["output_file_id"])) == 30


def test_a_batch_whose_key_is_gone_fails(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(step_s=0.05), api_key=("a", "b")) as server:
        id = begin(server, upload(server, line("x") + line("y"), A).json()["id"], A).json()["id"]
    with serving(tmp_path, api_key=("b",)) as server:
        kept = [path for path in tmp_path.glob("batch_*.json") if id in path.name]
        eventually(lambda: b'"status":"failed"' in kept[0].read_bytes(), 30)


def test_a_batch_is_cancelled(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(step_s=0.02)) as server:
        file = upload(server, b"".join(line(f"r{i}") for i in range(200))).json()["id"]
        id = begin(server, file, metadata={"of": "a test"}).json()["id"]
        eventually(lambda: server.get(f"/v1/batches/{id}").json()["request_counts"]["completed"] > 0, 30)
        error_of(server.delete(f"/v1/files/{file}"), 409)
        assert server.post(f"/v1/batches/{id}/cancel").json()["status"] == "cancelling"
        batch = ended(server, id)
        assert batch["status"] == "cancelled"
        assert batch["metadata"] == {"of": "a test"}
        good, bad = content(server, batch["output_file_id"]), content(server, batch["error_file_id"])
        assert not good.keys() & bad.keys()
        assert len(good) + len(bad) == 200
        assert {each["error"]["code"] for each in bad.values()} == {"batch_cancelled"}
        assert error_of(server.post(f"/v1/batches/{id}/cancel"), 409)["code"] == "batch_ended"
        assert server.delete(f"/v1/files/{file}").status_code == 200


def test_a_batch_that_waits_for_another_is_cancelled_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(step_s=0.2)) as server:
        file = upload(server, b"".join(line(f"r{i}") for i in range(200))).json()["id"]
        first, second = (begin(server, file).json()["id"] for _ in range(2))
        eventually(lambda: server.get(f"/v1/batches/{first}").json()["status"] == "in_progress", 30)
        assert server.get(f"/v1/batches/{second}").json()["status"] == "validating"
        server.post(f"/v1/batches/{second}/cancel")
        assert len(content(server, ended(server, second)["error_file_id"])) == 200
        assert server.get(f"/v1/batches/{first}").json()["status"] == "in_progress"


@pytest.mark.parametrize(("passed_s", "status"), [(86399, "completed"), (86400, "expired")])
def test_a_batch_expires(tmp_path: Path, passed_s: int, status: str) -> None:
    now = [1000.0]
    with serving(tmp_path, FakeEngine(step_s=0.02), now=lambda: now[0], batch_age_s=1e6) as server:
        id = begin(server, upload(server, b"".join(line(f"r{i}") for i in range(60))).json()["id"]).json()["id"]
        eventually(lambda: server.get(f"/v1/batches/{id}").json()["request_counts"]["completed"] > 0, 30)
        now[0] += passed_s
        batch = ended(server, id)
        assert batch["status"] == status
        bad = content(server, batch["error_file_id"])
        assert {each["error"]["code"] for each in bad.values()} <= {"batch_expired"}
        assert len(content(server, batch["output_file_id"])) + len(bad) == 60


def test_a_batch_that_expired_as_the_server_was_killed_stays_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, finish = [1000.0], batches._Run._finish

    with serving(tmp_path, FakeEngine(step_s=0.02), now=lambda: now[0], batch_age_s=1e6) as server:
        id = begin(server, upload(server, b"".join(line(f"r{i}") for i in range(60))).json()["id"]).json()["id"]
        eventually(lambda: server.get(f"/v1/batches/{id}").json()["request_counts"]["completed"] > 0, 30)
        ends = list[str]()  # what it would have ended with, had it not been killed
        monkeypatch.setattr(batches._Run, "_finish", lambda self, status: ends.append(status))
        now[0] += 86400
        eventually(lambda: bool(ends), 30)
    assert ends[0] == "expired"
    monkeypatch.setattr(batches._Run, "_finish", finish)
    with serving(tmp_path, now=lambda: now[0], batch_age_s=1e6) as server:
        batch = ended(server, id)
        assert batch["status"] == "expired" and batch["expired_at"] == now[0]
        bad = content(server, batch["error_file_id"])
        assert {each["error"]["code"] for each in bad.values()} == {"batch_expired"}
        assert len(content(server, batch["output_file_id"])) + len(bad) == 60


def test_files_are_deleted_at_their_age(tmp_path: Path) -> None:
    now = [1000.0]
    with serving(tmp_path, now=lambda: now[0], batch_age_s=100.0) as server:
        batch = ran(server, line("a"))
        now[0] += 99
        assert len(server.get("/v1/files").json()["data"]) == 2
        assert server.get(f"/v1/batches/{batch['id']}").status_code == 200
        now[0] += 1
        assert server.get("/v1/files").json()["data"] == []
        error_of(server.get(f"/v1/batches/{batch['id']}"), 404)
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "lock"}


def test_a_key_has_so_many_bytes(tmp_path: Path) -> None:
    body = line("a", "x" * 10000)
    with serving(tmp_path / "large", batch_bytes=1 << 20) as server:
        most = int(upload(server, body).request.headers["content-length"])
    with serving(tmp_path / "one", batch_bytes=most, api_key=("a", "b")) as server:
        assert upload(server, body, A).status_code == 200
        assert error_of(upload(server, body, A), 413)["code"] == "file_too_large"
        assert upload(server, body, B).status_code == 200, "the other key has its own bytes"
    with serving(tmp_path / "less", batch_bytes=most - 1) as server:
        assert error_of(upload(server, body), 413)["code"] == "file_too_large"
        assert server.get("/v1/files").json()["data"] == []
    assert {path.name for path in (tmp_path / "less").iterdir()} == {"secret", "lock"}


def test_a_batch_whose_answers_do_not_fit_fails_and_keeps_what_does(tmp_path: Path) -> None:
    with serving(tmp_path, batch_bytes=22000) as server:
        batch = ran(server, *(line(f"r{i}") for i in range(60)))
        assert batch["status"] == "failed"
        assert "--batch-bytes" in batch["errors"]["data"][0]["message"]
        good = content(server, batch["output_file_id"])
        assert 0 < len(good) == batch["request_counts"]["completed"] < 60
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 22000


def test_many_batches_of_one_file_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(step_s=1.0), batch_bytes=20000) as server:
        file = upload(server, line("a")).json()["id"]
        made = [begin(server, file) for _ in range(60)]
        error_of(made[-1], 413)
        assert sum(each.status_code == 200 for each in made) < 40


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/other"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {f"n{i}": "" for i in range(17)}}, "metadata"),
        ({"metadata": {"n" * 65: ""}}, "metadata"),
        ({"metadata": {"n": "v" * 513}}, "metadata"),
        ({"other": 1}, "other"),
    ],
)
def test_wrong_fields_of_a_batch_are_named(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    with serving(tmp_path) as server:
        file = upload(server, line("a")).json()["id"]
        assert error_of(begin(server, file, **change), 400)["param"] == param
        most = {"metadata": {"n" * 64: "v" * 512, **{f"n{i}": "" for i in range(15)}}}
        assert begin(server, file, **most).status_code == 200


@pytest.mark.parametrize("broken", ["input", "plan", "answers", "other answers"])
def test_clients_read_what_failed_and_no_path(tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as server:
        file = upload(server, line("a")).json()["id"]
        if broken == "input":
            (tmp_path / f"{file}.jsonl").rename(tmp_path / "gone")
        elif broken == "plan":
            why = f"No usable temporary directory found in ['{tmp_path}']"
            monkeypatch.setattr(batches, "planned", raising(FileNotFoundError(errno.ENOENT, why)))
        elif broken == "answers":
            monkeypatch.setattr(Answers, "_append", raising(OSError(errno.EIO, os.strerror(errno.EIO))))
        else:
            monkeypatch.setattr(Answers, "_read", lambda self, file: raising(self._wrong("mine"))())
        batch = ended(server, begin(server, file).json()["id"])
        if broken == "input":
            (tmp_path / "gone").rename(tmp_path / f"{file}.jsonl")
        assert batch["status"] == "failed"
        (error,) = batch["errors"]["data"]
        assert str(tmp_path) not in str(batch)
        says = {
            "input": "No such file",
            "plan": "No such file",
            "answers": "Input/output error",
            "other answers": "mine",
        }
        assert says[broken] in error["message"]


def raising(error: Exception) -> Any:
    def fail(*given: object, **more: object) -> Any:
        raise error

    return fail


def test_an_upload_that_cannot_be_kept_names_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as server:
        monkeypatch.setattr("mainstem.server.batches.routes.sync", raising(OSError(errno.EIO, f"bad {tmp_path}")))
        error = error_of(upload(server, line("a")), 507)
        assert "Input/output error" in error["message"] and str(tmp_path) not in error["message"]
        assert server.get("/v1/files").json()["data"] == []


def test_answers_are_no_input(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        output = ran(server, line("a"))["output_file_id"]
        assert error_of(begin(server, output), 400)["param"] == "input_file_id"


def test_wrong_uploads_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert error_of(upload(server, line("a"), purpose="other"), 400)["param"] == "purpose"
        assert error_of(upload(server, line("a"), more="x"), 400)["param"] == "more"
        assert error_of(server.post("/v1/files", json={}), 400)["param"] == "Content-Type"
        assert error_of(server.post("/v1/files", files={"purpose": (None, "batch")}), 400)["param"] == "file"
        assert server.get("/v1/files").json()["data"] == []
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "lock"}


def test_without_a_folder_there_are_no_batches() -> None:
    with TestClient(create_app(FakeEngine(), ServerConfig())) as server:
        for path in ("/v1/files", "/v1/batches"):
            assert "--batch-folder" in error_of(server.get(path), 404)["message"]


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    with serving(tmp_path), pytest.raises(BadArgument, match="batch_folder"), serving(tmp_path):
        pass


def test_a_draining_server_begins_no_request(tmp_path: Path) -> None:
    engine = FakeEngine(step_s=0.02)
    with serving(tmp_path, engine) as server:
        id = begin(server, upload(server, b"".join(line(f"r{i}") for i in range(60))).json()["id"]).json()["id"]
        eventually(lambda: len(engine.streams) > 8, 30)
        app: Any = server.app
        app.state.draining = True
        eventually(lambda: all(stream.ended for stream in engine.streams), 30)
        sent = len(engine.streams)
        assert sent < 60
        assert server.get(f"/v1/batches/{id}").json()["status"] == "in_progress"


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    kept = shelf.Shelf(tmp_path, 1 << 20, 100.0, lambda: 0.0)
    assert kept.reserve("me", "file-1", 1 << 20)
    assert not kept.reserve("me", "file-2", 1)
    assert kept.reserve("you", "file-2", 1)
    kept.forget("me", "file-1")
    assert kept.reserve("me", "file-3", 1 << 20)
    kept.check()


def test_eight_requests_of_all_batches_run_at_once(tmp_path: Path) -> None:
    most = [0]

    class Engine(FakeEngine):
        def submit(self, *given: Any, **options: Any) -> Any:
            most[0] = max(most[0], 1 + sum(not stream.ended for stream in self.streams))
            return super().submit(*given, **options)

    with serving(tmp_path, Engine(step_s=0.05), api_key=("a", "b")) as server:
        content = b"".join(line(f"r{i}") for i in range(20))
        ids = {headers["Authorization"]: begin(server, upload(server, content, headers).json()["id"], headers)
               for headers in (A, B)}  # fmt: skip
        for key, batch in ids.items():
            assert ended(server, batch.json()["id"], {"Authorization": key})["status"] == "completed"
    assert most[0] == 8


def test_a_line_has_room_for_the_longest_id_and_error() -> None:
    id, message = "\1" * 128, "\1" * 250
    answer = Answer("batch_req_" + "0" * 32, id, Response(200, "0" * 128, msgspec.Raw(b"")), Failure("x" * 32, message))
    assert 2000 < len(msgspec.json.encode(answer)) < batches._LINE_BYTES == 4096


def test_a_new_batch_is_looked_for_ten_times_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept, kept = list[float](), shelf.Shelf(tmp_path, 1 << 20, 100.0, lambda: 0.0)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise StopAsyncIteration

    monkeypatch.setattr(anyio, "sleep", sleep)
    with pytest.raises(ExceptionGroup):
        anyio.run(batches.Batches(kept, lambda owner: None, lambda: 0.0, lambda: False, 1).run)
    assert slept == [0.1]


ODD = {
    "tokens": b'{"messages": [{"role": "user", "content": "hi"}], "model": "fake", "max_tokens": 9223372036854775807}',
    "more tokens": b'{"messages": [{"role": "user", "content": "a"}], "model": "fake", "max_tokens": 1%s}'
    % (b"0" * 30),
    "infinite": b'{"messages": [{"role": "user", "content": "hi"}], "model": "fake", "unknown": 1e999}',
}


@pytest.mark.parametrize("body", ODD.values(), ids=ODD)
def test_an_odd_request_has_its_own_error_and_the_rest_goes_on(tmp_path: Path, body: bytes) -> None:
    odd = b'{"custom_id": "odd", "method": "POST", "url": "/v1/chat/completions", "body": %s}\n' % body
    with serving(tmp_path) as server:
        batch = ran(server, line("a"), odd, line("b"))
        assert batch["status"] == "completed" and batch["request_counts"]["completed"] >= 2
        answers = {**content(server, batch["output_file_id"]), **content(server, batch["error_file_id"])}
        assert answers.keys() == {"a", "odd", "b"}


def test_a_batch_whose_end_cannot_be_written_is_tried_again_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, full = shelf.Shelf.put, set[str]()

    def refused(self: shelf.Shelf, owner: str, object: Any) -> None:
        if object.id in full and object.status != "validating":
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, owner, object)

    monkeypatch.setattr(shelf.Shelf, "put", refused)
    assert batches._AGAIN_S == 30
    monkeypatch.setattr(batches, "_AGAIN_S", 0.05)
    with serving(tmp_path) as server:
        file = upload(server, line("a")).json()["id"]
        monkeypatch.setattr(batches, "_LOOK_S", 0.01)
        stuck = begin(server, file).json()["id"]
        ended(server, stuck)
        full.add(second := begin(server, upload(server, line("b")).json()["id"]).json()["id"])
        time.sleep(0.2)  # it fails some times
        full.clear()
        assert ended(server, second)["status"] in ("completed", "failed")
        assert ran(server, line("c"))["status"] == "completed"


def test_a_file_that_is_not_what_was_uploaded_fails_its_batch(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        file = upload(server, line("a") + line("b")).json()["id"]
        (tmp_path / f"{file}.jsonl").write_bytes(line("a"))
        batch = ended(server, begin(server, file).json()["id"])
        assert batch["status"] == "failed"
        assert "bytes that were uploaded" in batch["errors"]["data"][0]["message"]
        (tmp_path / f"{file}.jsonl").write_bytes(line("a") + line("b"))
