"""Dynamo's router, fed by two real servers, picks the one that has the longest prefix.

It needs an environment of its own: `make test-routers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
from machine import eventually
from rigs.dynamo_router import Service, interpreter
from rigs.servers import free_port
from rigs.serving import Serve, Server, server_of, tiny_folder

from mainstem import Namespace
from mainstem.events.source import salt_id

PAGE = 16
SECRET = "a secret of the fleet"
PAGE_BYTES = 12288
pytestmark = pytest.mark.deadline


class Router:
    """Dynamo's `SelectionService` in its process."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def call(self, method: str, **request: Any) -> Any:
        return self._service.call(method, request)

    def overlap(self, tokens: list[int], salt: str | None = None) -> dict[int, tuple[int, int]]:
        """Returns how many blocks of a prompt each server has on its device, and how many more on its host."""
        asked = {} if salt is None else {"cache_salt": salt_id(Namespace(salt=salt), SECRET.encode())}
        found = self.call("overlap_scores", model_name="tiny", token_ids=tokens, **asked)
        names = ("device_blocks", "host_pinned_extension_blocks")
        return {each["worker_id"]: (each[names[0]], each[names[1]]) for each in found["workers"]}

    def pick(self, tokens: list[int]) -> int:
        """Returns the server that a prompt should go to."""
        found = self.call("select", model_name="tiny", token_ids=tokens)
        return int(found["worker_id"])


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    if not interpreter().exists():
        pytest.skip(f"no Dynamo at {interpreter()}; slow lane: make test-routers")
    with closing(Service()) as service:
        yield Router(service)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    model = tiny_folder("llama", tmp_path_factory.mktemp("models") / "tiny")
    device = str(40 * PAGE_BYTES)
    options = {"page-size": str(PAGE), "storage-secret": SECRET, "kv-bytes": device, "host-bytes": "10MB"}
    return server_of(model, tmp_path_factory.mktemp("logs"), options)


@pytest.fixture(scope="module")
def servers(serve: Serve, router: Router) -> Iterator[dict[int, Server]]:
    with ExitStack() as stack:
        started = {}
        for number in (1, 2):
            ends = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("kv-events", "kv-events-replay")}
            started[number] = stack.enter_context(serve({**ends}))
            router.call(
                "upsert_worker", worker_id=number, model_name="tiny", endpoint=str(started[number].http.base_url),
                block_size=PAGE, kv_events_endpoint=ends["kv-events"], replay_endpoint=ends["kv-events-replay"],
                data_parallel_size=1, total_kv_blocks=1000,
            )  # fmt: skip
        yield started


def prompt(number: int, blocks: int) -> list[int]:
    return [2 + (number * 31 + at * (at + 7 * number + 3)) % 190 for at in range(blocks * PAGE)]


def ask(server: Server, tokens: list[int], salt: str | None = None) -> None:
    body = {"model": server.model, "prompt": [*tokens, 7], "max_tokens": 1}
    reply = server.http.post("/v1/completions", json=body if salt is None else {**body, "cache_salt": salt})
    assert reply.status_code == 200, reply.text


def knows(router: Router, tokens: list[int], wanted: dict[int, tuple[int, int]]) -> bool:
    return router.overlap(tokens) == wanted


def test_it_picks_the_server_with_the_longest_prefix(router: Router, servers: dict[int, Server]) -> None:
    for number, other, wanted in ((1, 2, prompt(1, 8)), (2, 1, prompt(2, 8))):
        ask(servers[number], wanted)
        ask(servers[other], wanted[: 3 * PAGE])
        eventually(partial(knows, router, wanted, {number: (8, 0), other: (3, 0)}), 30.0)
        assert router.pick([*wanted, 5, 6]) == number


def test_more_on_a_host_goes_before_less_on_a_device(router: Router, servers: dict[int, Server]) -> None:
    wanted = prompt(3, 20)
    ask(servers[1], wanted)
    ask(servers[2], wanted[: 4 * PAGE])
    eventually(lambda: router.overlap(wanted) == {1: (20, 0), 2: (4, 0)}, 30.0)
    servers[1].settle()
    for other in (4, 5, 6):  # which the device has no room for besides
        ask(servers[1], prompt(other, 20))
    eventually(lambda: router.overlap(wanted)[1] == (0, 20), 30.0)
    assert router.overlap(wanted)[2] == (4, 0)
    assert router.pick([*wanted, 5, 6]) == 1


def test_equal_tokens_under_two_salts_never_cross(router: Router, servers: dict[int, Server]) -> None:
    wanted = prompt(7, 6)
    ask(servers[1], wanted, "one")
    ask(servers[2], wanted[: 5 * PAGE], "two")
    eventually(lambda: router.overlap(wanted, "one")[1][0] == 6, 30.0)
    eventually(lambda: router.overlap(wanted, "two")[2][0] == 5, 30.0)
    assert router.overlap(wanted, "one")[2] == router.overlap(wanted, "two")[1] == (0, 0)
    assert set(router.overlap(wanted).values()) == set(router.overlap(wanted, "three").values()) == {(0, 0)}


def test_what_is_flushed_is_forgotten(router: Router, servers: dict[int, Server]) -> None:
    ask(servers[2], prompt(8, 6))
    eventually(lambda: router.overlap(prompt(8, 6))[2][0] == 6, 30.0)
    servers[2].settle()  # a flush spares what is being copied to the host
    servers[2].flush()
    eventually(lambda: router.overlap(prompt(8, 6))[2] == (0, 0), 30.0)
