"""Prefill and decode apart, as processes: equal answers, prompts that are read, and a server that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from machine import eventually
from rigs.servers import free_port
from rigs.serving import Answer, Options, Serve, Server, server_of, tiny_folder, unlike

pytest.importorskip("zmq", reason="pyzmq is not installed")
pytestmark = pytest.mark.deadline

PAGE = 16
TOKENS = 20 * PAGE + 5
SECRET = {"storage-secret": "0123456789abcdef", "kv-bytes": "4MiB"}


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts servers over a tiny model."""
    model = tiny_folder("llama", tmp_path_factory.mktemp("models") / "tiny")
    return server_of(model, tmp_path_factory.mktemp("logs"), {"page-size": str(PAGE)})


@pytest.fixture
def uncached(serve: Serve) -> list[Answer]:
    with serve({"no-cache": []}) as server:
        return [server.ask(unlike(number, TOKENS)) for number in range(6)]


@contextmanager
def apart(serve: Serve) -> Iterator[tuple[Server, Server]]:
    """A server that computes prompts, and one that answers."""
    where = f"127.0.0.1:{free_port()}"
    prefill: Options = {**SECRET, "role": "prefill", "peer-listen": where, "peer-share": "1.0"}
    decode: Options = {
        **SECRET,
        "role": "decode",
        "peers": where,
        "peer-timeout-s": "30",
        "prefetch": "wait_complete",
        "prefetch-min-tokens": "16",
        "prefill-min-bytes": "0",
    }
    with serve(prefill) as first, serve({**decode, "prefill-url": str(first.http.base_url)}) as second:
        yield first, second


def test_prompts_are_computed_by_one_and_answered_by_the_other_which_computes_once_that_is_killed(
    serve: Serve, uncached: list[Answer]
) -> None:
    with apart(serve) as (first, second):
        for number in range(4):
            answer = second.ask(unlike(number, TOKENS))
            assert answer == uncached[number]
            assert answer.device + answer.host + answer.storage == TOKENS // PAGE * PAGE  # read ahead, or when asked
        again = second.ask(unlike(0, TOKENS))
        assert again == uncached[0]
        assert again.storage == 0  # it has a tree of its own
        assert not second.settle()["faults"]
        assert first.settle()["host_cached"] > 0
        used = second.used.total()
        first.kill()
        for number in (4, 5):  # which nobody has computed
            assert second.ask(unlike(number, TOKENS)) == uncached[number]
        assert second.used.total() == used
        for number in range(4):
            assert second.ask(unlike(number, TOKENS)) == uncached[number]
        eventually(lambda: second.http.get("/health").status_code == 200)
