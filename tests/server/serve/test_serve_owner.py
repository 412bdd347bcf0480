"""Two real servers over one store that neither has open: `shared+file:`, whatever becomes of them or of its owner."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import eventually
from rigs.owners import end, folder, is_alive
from rigs.serving import Answer, Options, Serve, Server, server_of, tiny_folder, unlike

from mainstem.owner.client import status
from mainstem.owner.start import Place

PAGE = 16
STORED = 5 * PAGE
PROMPTS = [unlike(number, STORED + 3) for number in range(6)]
pytestmark = pytest.mark.deadline


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    model = tiny_folder("llama", tmp_path_factory.mktemp("models") / "tiny")
    return server_of(model, tmp_path_factory.mktemp("logs"), {"page-size": str(PAGE)})


@pytest.fixture(scope="module")
def uncached(serve: Serve) -> list[Answer]:
    with serve({"no-cache": []}) as server:
        return [server.ask(prompt) for prompt in PROMPTS]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this user's sockets, and of a store."""
    with folder() as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
        yield made


def spec(home: Path) -> str:
    return f"file:{home}/kv?capacity=64MiB"


def over(store: str) -> Options:
    """Options of a server over a store. Requests wait for it, so that their hits do not depend on time."""
    return {"storage": store, "host-bytes": "1MB", "prefetch": "wait_complete", "prefetch-min-tokens": "16"}


def sharing(home: Path) -> Options:
    return over(f"shared(host_bytes=16MiB&linger=0&timeout=2)+{spec(home)}")


def owner(home: Path) -> dict[str, Any]:
    """Returns what the owner of the store says of itself; empty if there is none."""
    return status(Place.of(spec(home)).path) or {}


def wait_until_written(server: Server, home: Path) -> None:
    """Waits until the store itself has what a server computed."""
    server.settle()
    eventually(lambda: owner(home).get("queued") == 0, 60.0)


def test_a_second_server_finds_what_the_first_one_stored_and_outlives_it(
    serve: Serve, uncached: list[Answer], home: Path
) -> None:
    with serve(sharing(home)) as first, serve(sharing(home)) as second:
        assert first.ask(PROMPTS[0]) == uncached[0]
        first.settle()
        found = second.ask(PROMPTS[0])
        assert found == uncached[0] and found.storage == STORED
        assert second.ask(PROMPTS[1]) == uncached[1]
        second.settle()
        assert first.ask(PROMPTS[1]).storage == STORED
        before = owner(home)
        assert before["puts"] and before["host_hits"], "both went through one owner"
        first.kill()
        eventually(lambda: 0 < owner(home)["clients"] < before["clients"])
        eventually(lambda: owner(home)["leases"] == 0)
        assert second.ask(PROMPTS[2]) == uncached[2]
        second.flush()
        again = second.ask(PROMPTS[0])
        assert again == uncached[0] and again.storage == STORED
        assert owner(home)["pid"] == before["pid"] and is_alive(before["pid"])
        assert second.settle()["faults"] == {}
        assert second.stop() == 0
        eventually(lambda: not is_alive(before["pid"]), 60.0)
    with serve(over(spec(home))) as alone:  # it has closed the store, which has everything
        assert all(alone.ask(PROMPTS[at]).storage == STORED for at in range(3))


def test_a_server_counts_what_it_would_with_the_store_itself(serve: Serve, home: Path) -> None:
    def counted(store: str) -> list[str]:
        with serve(over(store)) as server:
            for _ in range(2):
                for prompt in PROMPTS[:3]:
                    server.ask(prompt)
                server.settle()
                server.flush()
            text = server.http.get("/metrics").text
        found = re.findall(r"^mainstem_(?:storage|moved|dropped|late|prefetch|cached|host)_.*$", text, re.MULTILINE)
        return [line for line in found if not re.match(r"mainstem_storage_wait_seconds_(?:bucket|sum|created)", line)]

    direct = counted(f"file:{home}/direct")
    assert 'mainstem_cached_tokens_total{tier="storage"} 240.0' in "\n".join(direct)
    assert sum(line.startswith("mainstem_storage_") for line in direct) >= 2
    assert counted(f"shared(host_bytes=16MiB&linger=0)+file:{home}/shared") == direct


@pytest.mark.slow  # by waiting until the store is tried again
def test_an_owner_that_is_killed_is_a_counted_miss_and_then_another_one(
    serve: Serve, uncached: list[Answer], home: Path
) -> None:
    with serve(sharing(home)) as first, serve(sharing(home)) as second:
        first.ask(PROMPTS[0])
        wait_until_written(first, home)
        pid = owner(home)["pid"]
        end(pid, signal.SIGKILL)
        lock = Place.of(spec(home)).lock()
        assert lock is not None
        with open(lock, "wb"):  # so that nobody can start another
            for server in (first, second):
                missed = server.ask(PROMPTS[3])
                assert missed == uncached[3] and missed.storage == 0
                assert server.settle()["faults"]["unreachable"] > 0
                assert server.metrics("mainstem_storage_faults_total")["unreachable"] > 0

        def is_found() -> bool:
            second.flush()
            answer = second.ask(PROMPTS[0])
            assert answer == uncached[0]
            return answer.storage == STORED

        eventually(is_found, 60.0)  # once the breaker tries the store again
        assert owner(home)["pid"] != pid
