"""A server in time: it drains, its engine fails, clients go, and nobody holds up others; one runs as a process."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from machine import patience
from rigs.app_client import PROMPT, called, client, complete, error_of, events
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.server.apis import bodies
from mainstem.server.app import create_app


def test_draining_refuses_and_fails_the_health_check() -> None:
    app = create_app(FakeEngine())
    server = TestClient(app)
    assert server.get("/health").json() == {"status": "ok"}
    app.state.draining = True
    assert server.get("/health").status_code == 503
    assert error_of(complete(server), 503)["code"] == "draining"
    assert server.get("/metrics").status_code == 200


def test_a_closed_engine_is_a_503() -> None:
    engine = FakeEngine()
    engine.close()
    assert error_of(complete(client(engine)), 503)["code"] == "engine_closed"


@pytest.mark.parametrize("draining", [False, True])
def test_a_failed_engine_fails_the_health_check_at_once(draining: bool) -> None:
    engine = FakeEngine()
    app = create_app(engine)
    app.state.draining = draining
    engine.failure = RuntimeError("a secret of the engine")
    response = TestClient(app).get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "failed"})


def test_an_engine_that_fails_under_way() -> None:
    server = client()
    chunks = events(complete(server, "crash!", stream=True))
    assert chunks[-1]["error"]["code"] == "engine_closed"
    assert "secret" not in json.dumps(chunks)
    assert error_of(complete(server, "crash!"), 503)["code"] == "engine_closed"


REMOVAL = "/v1/cache/remove"


WITH_A_BODY = [REMOVAL, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_cancels(stream: bool) -> None:
    engine = FakeEngine(step_s=0.02)
    app = create_app(engine)
    body = json.dumps({"model": "fake", "prompt": "x", "stream": stream, "n": 2}).encode()
    gone = asyncio.Event()
    inbox: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def scenario() -> None:
        task = asyncio.create_task(called(app, receive))
        while len(engine.streams) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        gone.set()
        await asyncio.wait_for(task, patience(5))

    asyncio.run(scenario())
    assert [stream.cancelled for stream in engine.streams] == [True, True]
    assert 'mainstem_requests_total{outcome="cancelled"} 2.0' in TestClient(app).get("/metrics").text


class Stuck:
    """Wraps a function whose calls wait until they are released."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, threading.Semaphore(0)
        self.released = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.release()
        assert self.released.wait(patience(10))
        return self.function(*args, **kwargs)

    def wait(self, calls: int = 1) -> None:
        assert all(self.calls.acquire(timeout=patience(10)) for _ in range(calls))


TEXT: dict[str, Any] = {"prompt": "some text"}


@pytest.mark.deadline
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"model": "fake", **TEXT}), (REMOVAL, TEXT)])
def test_a_slow_tokenizer_does_not_hold_up_the_others(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine()
    engine.tokenizer.encode = stuck = Stuck(engine.tokenizer.encode)  # type: ignore[method-assign]
    _serves_others(engine, stuck, path, body)


@pytest.mark.deadline
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", *WITH_A_BODY])
def test_a_slow_parser_does_not_hold_up_the_others(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(bodies.msgspec.json.decode)
    monkeypatch.setattr(bodies.msgspec.json, "decode", stuck)
    _serves_others(FakeEngine(), stuck, path, {})


def _serves_others(engine: FakeEngine, stuck: Stuck, path: str, body: dict[str, Any]) -> None:
    with TestClient(create_app(engine)) as server:
        worker = threading.Thread(target=server.post, args=(path,), kwargs={"json": body})
        worker.start()
        stuck.wait()
        started = time.monotonic()
        assert server.get("/health").status_code == 200
        assert time.monotonic() - started < patience(5)
        stuck.released.set()
        worker.join()


@pytest.mark.deadline
def test_removals_that_wait_for_the_engine_do_not_hold_up_the_others() -> None:
    engine = FakeEngine()
    engine.remove = stuck = Stuck(engine.remove)  # type: ignore[method-assign]
    answers: list[Any] = []
    with TestClient(create_app(engine)) as server:
        removals = [threading.Thread(target=server.post, args=(REMOVAL,), kwargs={"json": TEXT}) for _ in range(4)]
        other = threading.Thread(target=lambda: answers.append(complete(server)))
        for removal in removals:
            removal.start()
        stuck.wait(calls=4)
        other.start()
        other.join(patience(5))
        answered = len(answers)
        stuck.released.set()
        for thread in (*removals, other):
            thread.join()
    assert answered == 1


SERVER = """
import logging, sys
from pathlib import Path
from rigs.fake_engine import FakeEngine
from mainstem.errors import EngineClosed
from mainstem.server.serving import bind, serve
from mainstem.settings.server import RecordConfig, ServerConfig

class Mortal(FakeEngine):
    def submit(self, request, **options):
        if bytes(request.tokens.tolist()) == b"die!":
            self.failure = RuntimeError("out of memory")
        return super().submit(request, **options)

logging.basicConfig(level=logging.INFO)
record = RecordConfig(*map(Path, sys.argv[2:]))
config = ServerConfig(port=0, api_key=("key",), max_body_bytes=1 << 20, record=record)
try:
    serve(Mortal(step_s=float(sys.argv[1])), config, bind(config))
except EngineClosed as error:
    sys.exit(f"ended badly: {error}")
print("ended well", flush=True)
"""


class RealServer:
    """A server process on a free port, which may record."""

    def __init__(self, step_s: float, *record: Path) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(step_s), *record],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self.process.stderr is not None
        log = ""
        for line in self.process.stderr:
            log += line
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
                self.served_at = line
                break
        else:
            raise AssertionError(log)
        self.port = int(found[1])
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="key", max_retries=0)

    def __enter__(self) -> RealServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.deadline
def test_the_official_client_and_the_end_of_the_server_with_its_engine() -> None:
    messages: Any = [{"role": "user", "content": PROMPT}]
    with RealServer(step_s=0) as server:
        wanted = r"float32, \d+ threads?, 100 KV pages for 1600 tokens, 9 state slots"
        assert re.search(f"{wanted}$", server.served_at.rstrip())
        api = server.client
        assert [model.id for model in api.models.list()] == ["fake"]

        def ask(**extra: Any) -> Any:
            return api.chat.completions.create(model="fake", messages=messages, max_tokens=5, **extra)

        answer = ask()
        assert answer.choices[0].message.content == "Hello"
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert ask().usage.prompt_tokens_details.cached_tokens >= 48
        chunks = list(ask(stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello"
        assert chunks[-1].usage.completion_tokens == 5
        many = api.completions.create(model="fake", prompt=["a", "b"], n=2)
        assert [choice.index for choice in many.choices] == [0, 1, 2, 3]

        with pytest.raises(openai.BadRequestError) as bad:
            ask(temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            api.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.APIStatusError) as large:
            api.completions.create(model="fake", prompt="a" * (3 << 19))
        assert large.value.status_code == 413
        with pytest.raises(openai.APIError, match="The server had an error"):
            list(api.completions.create(model="fake", prompt="fail!", stream=True))

        api.completions.create(model="fake", prompt="die!")
        assert server.process.wait(patience(10)) == 1
        assert server.process.stderr is not None
        assert server.process.stderr.read().count("ended badly: the engine failed: RuntimeError: out of memory") == 1


@pytest.mark.deadline
def test_sigterm_drains_and_loses_nothing_of_a_recording(tmp_path: Path) -> None:
    with RealServer(0.1, tmp_path / "record") as server:
        started = threading.Event()
        text: list[str] = []

        def follow() -> None:
            for chunk in server.client.completions.create(model="fake", prompt="a", stream=True):
                text.append(chunk.choices[0].text)
                started.set()

        follower = threading.Thread(target=follow)
        follower.start()
        assert started.wait(patience(10))
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + patience(5)
        while _health(server.port) != 503:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError) as refused:
            server.client.completions.create(model="fake", prompt="b")
        assert refused.value.status_code == 503
        follower.join(patience(10))
        assert "".join(text) == "Hello, world."
        assert server.process.wait(patience(10)) == 0
        assert server.process.stdout is not None
        assert "ended well" in server.process.stdout.read()
    _, *lines = map(json.loads, (tmp_path / "record").read_text().splitlines())
    assert [(line["finish"], line["output_tokens"]) for line in lines] == [("stop", 13)]


def _health(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience(5))
    connection.request("GET", "/health")
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mainstem")
