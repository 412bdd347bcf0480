"""A fleet with real Ray, real engines and real events: `make test-fleet`.

Each test goes on with the fleet that the one before left. All that was started is ended at the end.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from machine import eventually, patience
from rigs.servers import free_port
from rigs.serving import tiny_folder, unlike

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-fleet" / "bin" / "python"
LONG = 480  # tokens

pytestmark = [
    pytest.mark.skipif(not PYTHON.with_name("ray").exists(), reason="no Ray in .venv-fleet: make test-fleet"),
    pytest.mark.timeout(400),
    pytest.mark.deadline,
]


class Fleet:
    """The command, and a client of the front."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.model = str(tiny_folder("llama", folder / "tiny"))
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        home = {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "TOKENIZERS_PARALLELISM": "false"}
        self.environment = {**os.environ, **home}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(PYTHON), "-m", "mainstem.cli", "fleet", *arguments]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=patience(300),
            check=False,
        )

    def do(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def up(self, *arguments: str, settings: str = "") -> Any:
        file = self.folder / "fleet.yaml"  # in bfloat16 an answer may depend on what was found in the cache
        file.write_text(f"load: {{dtype: float32}}\n{settings}")
        return self.do("up", str(file), *arguments, "--model", self.model, "--port", str(self.port))

    def replicas(self) -> dict[str, Any]:
        found: dict[str, Any] = self.do("status")["replicas"]
        return found

    def ask(self, tokens: list[int], **more: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 4, "temperature": 0, **more}
        return self.http.post("/v1/completions", json=body)

    def left(self) -> list[str]:
        """Returns the processes that know the folder of this fleet."""
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and int(process.name) != os.getpid():
                try:
                    if str(self.folder).encode() in (process / "environ").read_bytes():
                        found.append((process / "cmdline").read_text())
                except OSError:
                    continue
        return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        yield made
    finally:
        made.run("down", "--timeout-s", "1")
        made.http.close()


def cached(reply: httpx.Response) -> int:
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def who(reply: httpx.Response) -> str:
    return reply.headers["x-mainstem-replica"]


def listening(pids: set[int]) -> set[str]:
    """Returns the addresses of the sockets on which processes listen, beyond loopback."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].rpartition(":")[0])
    return {each for each in found if not each.endswith("0100007F")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replica: 2", "replica (not a setting): must be replicas"),
        ("cpus: 4096", "cpus 4096: must be at most"),
        ("model: /nowhere", "/nowhere: there is no such folder"),
        ("a: [", "cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(fleet: Fleet, text: str, said: str) -> None:
    file = fleet.folder / "fleet.yaml"
    file.write_text(text)
    done = fleet.run("up", str(file))
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not fleet.left()


def test_without_a_fleet_the_other_commands_say_so(fleet: Fleet) -> None:
    for command in (["status"], ["scale", "3"], ["drain"], ["down"]):
        done = fleet.run(*command)
        assert (done.returncode, done.stdout) == (1, "")
        assert "no fleet runs here" in done.stderr


def test_two_replicas_come_up_on_loopback_alone(fleet: Fleet) -> None:
    assert fleet.up("--replicas", "2")["url"] == f"http://127.0.0.1:{fleet.port}/v1"
    assert len(fleet.replicas()) == 2
    state = fleet.folder / "state" / "mainstem" / "fleet"
    assert (state / "ray_token").stat().st_mode & 0o777 == 0o600
    assert not (fleet.folder / ".ray").exists()
    mark = json.loads((state / "fleet.json").read_text())["mark"].encode()
    ours = {int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal() and _has(each, mark)}
    assert len(ours) > 5
    assert listening(ours) == set()


def _has(process: Path, mark: bytes) -> bool:
    try:
        return b"MAINSTEM_FLEET=" + mark in (process / "environ").read_bytes()
    except OSError:
        return False


def test_all_routes_answer_through_the_front(fleet: Fleet) -> None:
    http = fleet.http
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 3}
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert http.post("/v1/chat/completions", json=chat).json()["choices"][0]["finish_reason"] == "length"
    stream = http.post("/v1/chat/completions", json={**chat, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.text.rstrip().endswith("data: [DONE]")
    assert http.post("/v1/messages", json=chat).json()["type"] == "message"
    assert http.post("/v1/messages/count_tokens", json={**chat, "max_tokens": None}).status_code in (200, 400)
    response = http.post("/v1/responses", json={"model": "tiny", "input": "w5", "max_output_tokens": 16}).json()
    assert http.get(f"/v1/responses/{response['id']}").json()["id"] == response["id"]
    after = {"model": "tiny", "input": "w6", "max_output_tokens": 16, "previous_response_id": response["id"]}
    assert http.post("/v1/responses", json=after).status_code == 200
    assert http.post("/tokenize", json={"prompt": "w5 w6"}).json()["tokens"] == [5, 6]
    assert set(http.get("/v1/cache/stats").json()["replicas"]) == set(fleet.replicas())
    for name in fleet.replicas():
        assert f'replica="{name}"' in http.get("/metrics").text
        assert f"replica {name}:" in http.get("/v1/cache/tree").text
    assert http.post("/v1/cache/flush").json().keys() == {"freed_pages", "freed_tokens"}
    assert http.post("/v1/completions", json={"model": "other", "prompt": "w1"}).status_code == 404
    assert len(http.get("/health", headers={"x-request-id": "mine"}).headers.get_list("x-request-id")) == 1


def test_no_foreign_web_page_reaches_the_front(fleet: Fleet) -> None:
    page = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
    rebound = {"host": f"evil.example:{fleet.port}", "origin": f"http://evil.example:{fleet.port}"}
    for headers in (page, rebound):
        for method, path in (("POST", "/v1/cache/flush"), ("GET", "/v1/cache/tree"), ("GET", "/metrics")):
            assert fleet.http.request(method, path, headers=headers).status_code == 403
    assert fleet.http.post("/v1/cache/remove", content=b'{"all": true}').status_code == 415
    own = {"host": f"localhost:{fleet.port}", "origin": f"http://localhost:{fleet.port}"}
    assert fleet.http.post("/v1/cache/flush", headers=own).status_code == 200


def test_a_prompt_goes_where_its_prefix_is(fleet: Fleet) -> None:
    assert all(each["peer"].startswith("127.0.0.1:") for each in fleet.replicas().values())
    homes: dict[int, set[str]] = {}
    for turn in range(3):
        for number in range(4):
            reply = fleet.ask([*unlike(number, LONG), 7 + turn])
            homes.setdefault(number, set()).add(who(reply))
            assert cached(reply) >= (LONG // 16 * 16 if turn else 0)
    assert all(len(each) == 1 for each in homes.values())


def test_a_replica_that_is_killed_costs_no_request(fleet: Fleet) -> None:
    victim = who(fleet.ask([*unlike(1, LONG), 20]))
    pid = fleet.replicas()[victim]["pid"]
    answered: Counter[str] = Counter()
    failed, hits, over = [], [], threading.Event()

    def client(number: int) -> None:
        with httpx.Client(base_url=fleet.http.base_url, timeout=120) as http:
            turn = 0
            while not over.is_set():
                turn += 1
                body = {"model": "tiny", "prompt": [*unlike(number, LONG), 30 + turn % 90], "max_tokens": 8}
                reply = http.post("/v1/completions", json={**body, "temperature": 0})
                answered[reply.headers.get("x-mainstem-replica", "")] += 1
                (hits if reply.status_code == 200 else failed).append(reply.text)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(fleet.replicas().keys() - {victim}) == 2, 60.0)
    time.sleep(1)
    over.set()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(answered) >= 2
    assert cached(fleet.ask([*unlike(1, LONG), 21])) >= LONG // 16 * 16


@pytest.mark.parametrize("more", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}])
def test_a_stream_whose_replica_is_killed_goes_on_as_it_would_have_gone_on(fleet: Fleet, more: dict[str, Any]) -> None:
    eventually(lambda: len(fleet.replicas()) == 2, 60.0)
    length, prompt = 900, unlike(5, 64)  # long, so that the replica is not done when the client has read a little
    whole = stream(fleet, prompt, length, more)
    before = fleet.do("status")

    def kill(replica: str, pieces: int) -> None:
        if pieces == 3:
            os.kill(before["replicas"][replica]["pid"], signal.SIGKILL)

    assert stream(fleet, prompt, length, more, kill) == whole
    assert whole[1] == {"prompt_tokens": 64, "completion_tokens": length}
    after = fleet.do("status")
    assert after["continued"] == before["continued"] + 1
    assert after["broken"] == 0
    eventually(lambda: len(fleet.replicas()) == 2, 120.0)


def stream(
    fleet: Fleet,
    prompt: list[int],
    length: int,
    more: dict[str, Any],
    piece: Callable[[str, int], None] = lambda *_: None,
) -> tuple[str, dict[str, int]]:
    """Streams an answer; returns its text, and what it used. `piece` is called with who answers, for each one."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": length, "ignore_eos": True, "stream": True, **more}
    body["stream_options"] = {"include_usage": True}
    texts, usage, ids, count = [], {}, set(), 0
    with fleet.http.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                assert line in ("", "data: [DONE]", ": ping")
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            ids.add(chunk["id"])
            usage = chunk.get("usage") or usage
            texts += [choice["text"] for choice in chunk["choices"]]
            count += 1
            piece(who(reply), count)
    assert len(ids) == 1
    return "".join(texts), {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


def test_a_second_up_changes_it_replica_by_replica_and_no_request_is_lost(fleet: Fleet) -> None:
    assert "that of the fleet that runs" in fleet.run("up", "--port", "1").stderr
    before, over, statuses, texts = set(fleet.replicas()), threading.Event(), Counter[int](), set[str]()

    def client() -> None:
        while not over.is_set():
            statuses[fleet.ask(unlike(2, 64)).status_code] += 1

    def streams() -> None:
        while not over.is_set():
            texts.add(stream(fleet, unlike(3, 64), 120, {"temperature": 0})[0])
            statuses[200] += 1

    threads = [threading.Thread(target=each) for each in (client, streams, streams)]
    for thread in threads:
        thread.start()
    try:
        fleet.up("--replicas", "2")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert set(statuses) == {200} and len(texts) == 1
    assert fleet.do("status")["broken"] == 0
    assert not before & set(fleet.replicas())


def test_more_replicas_and_fewer(fleet: Fleet) -> None:
    assert len(fleet.do("scale", "3")["replicas"]) == 3
    assert fleet.ask(unlike(1, LONG)).status_code == 200
    fleet.do("scale", "2")
    eventually(lambda: len(fleet.replicas()) == 2, 30.0)
    assert fleet.run("scale", "0").returncode == 2


def test_one_that_drains_is_replaced(fleet: Fleet) -> None:
    before = fleet.replicas()
    leaving = next(iter(before))
    assert fleet.do("drain", leaving) == {"drained": leaving}

    def replaced() -> bool:
        assert fleet.ask(unlike(1, 64)).status_code == 200
        now = fleet.replicas()
        return leaving not in now and len(now) == 2

    eventually(replaced, 60.0)
    assert "no replica nobody" in fleet.run("drain", "nobody").stderr


def test_prompts_are_computed_by_some_and_answered_by_others(fleet: Fleet) -> None:
    assert "no replicas compute prompts alone" in fleet.run("scale", "2", "--prefill").stderr
    fleet.up(settings="replicas: 1\nstore: none\nprefill: {replicas: 1, min_bytes: 0, timeout_s: 3600}\n")

    def aside() -> list[str]:
        return [name for name, each in fleet.replicas().items() if each.get("role") == "prefill"]  # unknown at first

    eventually(lambda: len(fleet.replicas()) == 2 and len(aside()) == 1, 60.0)
    answers = [name for name in fleet.replicas() if name not in aside()]
    numbers = itertools.count(100)

    def read() -> bool:
        """Asks a prompt that nobody has seen: what is cached was computed for it, and read."""
        reply = fleet.ask(unlike(next(numbers), LONG))
        assert [who(reply)] == answers
        return cached(reply) >= LONG // 2

    eventually(read, 60.0)  # once the one that answers has heard of the other
    assert set(fleet.http.get("/v1/cache/stats").json()["replicas"]) == set(fleet.replicas())
    (leaving,) = aside()
    assert fleet.do("drain", leaving) == {"drained": leaving}
    eventually(
        lambda: fleet.ask(unlike(next(numbers), LONG)).status_code == 200 and aside() not in ([], [leaving]), 60.0
    )
    eventually(read, 60.0)
    (victim,) = aside()
    os.kill(fleet.replicas()[victim]["pid"], signal.SIGKILL)
    assert fleet.ask(unlike(next(numbers), LONG)).status_code == 200  # or the client would wait for a minute
    eventually(lambda: aside() not in ([], [victim]), 60.0)
    eventually(read, 60.0)
    assert len(fleet.do("scale", "2", "--prefill")["replicas"]) == 3
    assert fleet.ask(unlike(next(numbers), LONG)).status_code == 200
    fleet.up(settings="replicas: 1\nstore: none\n")
    eventually(lambda: len(fleet.replicas()) == 1 and not aside(), 60.0)
    assert fleet.ask(unlike(next(numbers), LONG)).status_code == 200


def test_it_goes_down_and_leaves_no_process(fleet: Fleet) -> None:
    assert fleet.do("drain") == {"drained": True}
    assert fleet.ask(unlike(1, 64)).json()["error"]["code"] == "draining"
    assert fleet.do("down")["drained"] is True
    assert not fleet.left()
