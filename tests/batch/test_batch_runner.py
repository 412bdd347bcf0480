"""Running a batch against servers that answer, fail, go and come back."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Awaitable, Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import anyio
import pytest
from test_batch_lines import line, written

from mainstem.batch import runner
from mainstem.batch.answers import Failure, Response
from mainstem.batch.lines import Requests
from mainstem.batch.runner import Reply, Runner, ServerGone, Totals, to_app, to_server
from mainstem.errors import MainstemError

OK = Reply(200, "r", b'{"usage": {"prompt_tokens": 10, "completion_tokens": 2}}')


class Rig:
    """A batch of numbered requests, a scripted server, and a clock that sleeps move."""

    def __init__(self, folder: Path, count: int = 4, **given: Any) -> None:
        self.requests = Requests(written(folder, *(line(f"r{i}", n=i) for i in range(count))))
        self.now, self.slept = 0.0, list[float]()
        self.sent: list[int] = []
        self.kept: dict[int, tuple[Response | None, Failure | None]] = {}
        self.stopped = False
        self.replies: Callable[[int], Reply] = lambda index: OK
        self.runner = Runner(
            self.requests, self.send, self.add, self.may_send,
            **{"retry_s": 60.0, "clock": lambda: self.now, "sleep": self.sleep, **given},
        )  # fmt: skip

    async def send(self, path: str, body: bytes) -> Reply:
        index = json.loads(body)["n"]
        self.sent.append(index)
        await anyio.lowlevel.checkpoint()
        return self.replies(index)

    def add(self, index: int, response: Response | None, failure: Failure | None) -> None:
        assert index not in self.kept
        self.kept[index] = response, failure

    async def may_send(self) -> bool:
        return not self.stopped

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await anyio.lowlevel.checkpoint()

    def run(self, at_once: int = 2, order: Any = None) -> Totals:
        anyio.run(self.runner.run, range(len(self.requests)) if order is None else order, at_once)
        return self.runner.totals


def failing(times: int, error: Callable[[], Reply]) -> Callable[[int], Reply]:
    """Returns what fails so many times, and answers then."""
    left = [times]

    def reply(index: int) -> Reply:
        left[0] -= 1
        return error() if left[0] >= 0 else OK

    return reply


def gone() -> Reply:
    raise ConnectionRefusedError("refused")


def test_requests_are_sent_in_order(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    totals = rig.run(1, [2, 0, 3, 1])
    assert rig.sent == [2, 0, 3, 1]
    assert (totals.answers, totals.failed, totals.prompt, totals.output, totals.computed) == (4, 0, 40, 8, 48)


def test_so_many_are_sent_at_once(tmp_path: Path) -> None:
    rig, most = Rig(tmp_path, 20), [0, 0]

    async def send(path: str, body: bytes) -> Reply:
        most[0] += 1
        most[1] = max(most)
        await anyio.sleep(0)
        most[0] -= 1
        return OK

    rig.runner = Runner(rig.requests, send, rig.add, rig.may_send, retry_s=0.0)
    rig.run(3)
    assert most == [0, 3]
    assert len(rig.kept) == 20


@pytest.mark.parametrize("status", [400, 404, 413, 422, 500])
def test_a_request_that_fails_has_its_error_and_the_rest_goes_on(tmp_path: Path, status: int) -> None:
    rig = Rig(tmp_path)
    rig.replies = lambda index: Reply(status, "r", b'{\n "error": 1}') if index == 1 else OK
    assert rig.run().failed == 1
    response, failure = rig.kept[1]
    assert response is not None and failure is None
    assert (response.status_code, bytes(response.body)) == (status, b'{"error":1}')
    assert sorted(rig.sent) == [0, 1, 2, 3]


def test_what_is_no_json_is_kept_as_an_error(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1)
    rig.replies = lambda index: Reply(200, "r", b"<html>")
    rig.run()
    response, failure = rig.kept[0]
    assert response is None and failure is not None
    assert failure.code == "invalid_response" and "<html>" in failure.message


@pytest.mark.parametrize("status", sorted(runner._AGAIN))
def test_what_a_server_cannot_answer_now_is_sent_again(tmp_path: Path, status: int) -> None:
    rig = Rig(tmp_path, 2)
    rig.replies = failing(3, lambda: Reply(status, "", b"{}"))
    assert rig.run(1).answers == 2
    assert rig.sent == [0, 0, 0, 0, 1]


def test_a_server_that_comes_back_is_waited_for_longer_and_longer(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 2, retry_s=1000.0)
    rig.replies = failing(9, gone)
    assert rig.run(1).answers == 2
    assert rig.slept == [0.25, 0.5, 1, 2, 4, 8, 15, 15, 15]


def test_a_server_that_does_not_come_back_ends_the_batch(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 3, retry_s=3.75)
    rig.replies = lambda index: OK if index == 0 else gone()
    with pytest.raises(ServerGone, match=r"not answered for 3.75 s: refused"):
        rig.run(1)
    assert rig.slept == [0.25, 0.5, 1, 2]
    assert rig.kept.keys() == {0}


def test_one_that_answers_others_is_waited_for(tmp_path: Path) -> None:
    """The time runs from the last answer."""
    rig = Rig(tmp_path, 4, retry_s=3.0)
    hold = failing(4, gone)
    rig.replies = lambda index: hold(index) if index == 1 else OK
    assert rig.run(1).answers == 4


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_ends_the_batch(tmp_path: Path, status: int) -> None:
    rig = Rig(tmp_path)
    rig.replies = lambda index: Reply(status, "", b'{"error": {"message": "no such key"}}')
    with pytest.raises(ServerGone, match="no such key"):
        rig.run()
    assert rig.kept == {}


def test_an_answer_that_cannot_be_kept_ends_the_batch(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    def full(*given: object) -> None:
        raise MainstemError("the disk is full")

    rig.runner = Runner(rig.requests, rig.send, full, rig.may_send, retry_s=0.0)
    with pytest.raises(MainstemError, match="the disk is full"):
        rig.run()


def test_a_batch_that_is_to_stop_answers_what_is_under_way(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 10)

    def reply(index: int) -> Reply:
        rig.stopped = index >= 4
        return OK

    rig.replies = reply
    rig.run(2)
    assert rig.kept.keys() == set(rig.sent)
    assert 5 <= len(rig.kept) <= 6


def test_a_batch_that_is_to_stop_does_not_wait_for_a_server(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    def reply(index: int) -> Reply:
        rig.stopped = True
        return gone()

    rig.replies = reply
    rig.run(1)
    assert rig.kept == {}
    assert len(rig.slept) == 1


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}, (9, 4, 2)),
        ({"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}, (9, 4, 2)),
        ({"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2},
         (9, 4, 2)),
        (None, (0, 0, 0)),
    ],
)  # fmt: skip
def test_the_usage_of_each_api_counts(usage: Any, tokens: tuple[int, int, int]) -> None:
    totals = Totals()
    totals.count(200, json.dumps({"usage": usage}).encode())
    assert (totals.prompt, totals.cached, totals.output) == tokens
    totals.count(500, b"?")
    assert (totals.answers, totals.failed) == (2, 1)


def test_an_application_is_asked_without_a_socket() -> None:
    async def app(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        message = await receive()
        assert (scope["method"], scope["state"], message["more_body"]) == ("POST", {"a": 1}, False)
        assert (b"x", b"y") in scope["headers"]
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-request-id", b"me")]})
        await send({"type": "http.response.body", "body": scope["path"].encode(), "more_body": True})
        await send({"type": "http.response.body", "body": message["body"]})

    assert anyio.run(to_app(app, {"x": "y"}, {"a": 1}), "/v1", b"!") == Reply(201, "me", b"/v1!")


def test_a_server_has_an_hour_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()

    def urlopen(request: Any, timeout: float) -> Any:
        waits.append(timeout)
        raise HTTPException("broken")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(OSError, match="HTTPException: broken"):
        anyio.run(to_server("http://127.0.0.1:1", {}), "/v1", b"{}")
    assert waits == [3600.0]


def test_an_application_that_fails_has_answered_with_500() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("no")

    async def ask() -> Reply:
        return await to_app(broken, {}, {})("/v1/score", b"{}")

    reply = anyio.run(ask)
    assert reply.status == 500 and b"server_error" in reply.body
