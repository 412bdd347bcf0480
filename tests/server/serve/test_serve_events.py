"""A real server that publishes events: a router knows what it has, on which tier, for which namespace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from rigs.listening import Listener, listening
from rigs.servers import free_port
from rigs.serving import Options, Serve, Server, server_of, tiny_folder

from mainstem import Namespace
from mainstem.events.source import salt_id

PAGE = 16
SECRET = "a secret of the fleet"
PROMPT = [2 + at * 7 % 190 for at in range(5 * PAGE + 3)]
pytestmark = pytest.mark.deadline


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    model = tiny_folder("llama", tmp_path_factory.mktemp("models") / "tiny")
    options: Options = {"page-size": str(PAGE), "storage-secret": SECRET, "host-bytes": "1MB"}
    return server_of(model, tmp_path_factory.mktemp("logs"), options)


@pytest.fixture
def ends() -> Options:
    return {"kv-events": f"tcp://127.0.0.1:{free_port()}", "kv-events-replay": f"tcp://127.0.0.1:{free_port()}"}


def follow(ends: Options) -> AbstractContextManager[Listener]:
    return listening(str(ends["kv-events"]), str(ends["kv-events-replay"]))


def pages(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)}


def flush(server: Server, listener: Listener, is_empty: Callable[[], bool]) -> None:
    """Flushes a server until its router knows of it: a flush leaves what is being copied, to storage too."""

    def flushed() -> bool:
        server.flush()
        return is_empty()

    listener.until(flushed)


def test_a_router_knows_what_a_server_has_on_each_tier_and_salts_by_the_ids_that_it_can_make(
    serve: Serve, ends: Options
) -> None:
    with serve(ends) as server, follow(ends) as listener:
        server.ask(PROMPT, tokens=1)
        listener.replay()
        listener.until(lambda: listener.on("GPU") >= pages(PROMPT) and listener.on("CPU") >= pages(PROMPT))
        longer = PROMPT + [3] * PAGE
        server.ask(longer, tokens=1)
        listener.until(lambda: listener.on("GPU") >= pages(longer) and listener.on("CPU") >= pages(longer))
        flush(server, listener, lambda: not listener.follower.replica.blocks)
        counted = server.http.get("/v1/cache/stats").json()["events"]
        assert counted["published"] > 3 and counted["dropped"] == 0 and counted["replays"] >= 1

        body = {"model": server.model, "prompt": PROMPT, "max_tokens": 1, "cache_salt": "a tenant"}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        listener.until(lambda: listener.on("GPU") >= pages(PROMPT))
        salts = {block.stored.cache_salt for block in listener.follower.replica.blocks.values()}
        assert salts == {salt_id(Namespace(salt="a tenant"), SECRET.encode())}


def test_a_router_follows_a_server_through_its_restart(serve: Serve, ends: Options) -> None:
    with follow(ends) as listener:
        with serve(ends) as server:
            server.ask(PROMPT, tokens=1)
            listener.until(lambda: listener.batches > 0)
            listener.until(lambda: listener.on("GPU") >= pages(PROMPT))
            server.kill()
        other = [5] * (2 * PAGE + 1)
        with serve(ends) as server:
            server.ask(other, tokens=1)
            listener.until(lambda: listener.on("GPU") >= pages(other))
            assert not listener.on("GPU") & pages(PROMPT)
            assert server.stop() == 0
        listener.until(lambda: not listener.follower.replica.blocks)


def test_what_is_in_storage_is_known_until_it_is_removed(serve: Serve, ends: Options) -> None:
    stored: Options = {**ends, "storage": "memory:", "prefetch-min-tokens": "16"}
    with serve(stored) as server, follow(ends) as listener:
        server.ask(PROMPT, tokens=1)
        server.settle()
        listener.replay()
        listener.until(lambda: listener.on("STORAGE") == pages(PROMPT))
        body = {"prompt": PROMPT[: 2 * PAGE]}
        assert server.http.post("/v1/cache/remove", json=body).status_code == 200
        listener.until(lambda: listener.on("STORAGE") == pages(PROMPT[:PAGE]))
        flush(server, listener, lambda: not listener.on("GPU") | listener.on("CPU"))
        assert listener.on("STORAGE") == pages(PROMPT[:PAGE])


def test_what_a_server_finds_in_storage_is_in_storage_when_its_host_has_given_it_up(
    serve: Serve, ends: Options, tmp_path: Path
) -> None:
    over: Options = {"storage": f"file:{tmp_path}", "prefetch": "wait_complete", "prefetch-min-tokens": "16"}
    with serve(over) as server:
        server.ask(PROMPT, tokens=1)
        assert server.stop() == 0
    longer = PROMPT[: 3 * PAGE] + [3] * PAGE * 2
    with serve({**over, **ends}) as server, follow(ends) as listener:
        assert server.ask(longer, tokens=1).storage == 3 * PAGE
        server.settle()
        listener.replay()
        listener.until(lambda: listener.on("CPU") >= pages(longer))
        flush(server, listener, lambda: not listener.on("CPU"))
        assert listener.on("STORAGE") == pages(longer), "three pages that it found, and two that it wrote"
        assert server.ask(longer, tokens=1).storage


def test_a_server_refuses_to_publish_prompts_to_others(serve: Serve) -> None:
    with pytest.raises(AssertionError, match="without --kv-events-keys"), serve({"kv-events": "tcp://0.0.0.0:5557"}):
        pass
