"""Servers with every tier, as processes over a real model: equal answers, hits by tier, kills, restarts, damage.

Most of them run a tiny random model, in processes forked from one that has already imported what a server needs:
imports take most of a start.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from machine import eventually, patience
from rigs.serving import (
    NEW_TOKENS,
    PATIENCE_S,
    VOCAB,
    Answer,
    Options,
    Prompt,
    Serve,
    Server,
    real_server,
    server_of,
    tiny_folder,
    unlike,
)

PAGE = 16
PROMPT_TOKENS = 20 * PAGE + 5
STORED = 20 * PAGE  # tokens of a prompt in whole pages
DOCUMENTS = 20
PAGE_BYTES = 12288
DEVICE_BYTES = 42 * PAGE_BYTES  # for a tenth of all documents
HOST_BYTES = 4 * DEVICE_BYTES
pytestmark = pytest.mark.deadline


def document(number: int) -> list[int]:
    """Returns a prompt that shares nothing with others; ids below 2 are special."""
    return unlike(number, PROMPT_TOKENS)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts servers over a tiny model: `with serve(options) as server`."""
    model = tiny_folder("llama", tmp_path_factory.mktemp("models") / "tiny")
    return server_of(model, tmp_path_factory.mktemp("logs"), {"page-size": str(PAGE)})


@pytest.fixture(scope="module")
def uncached(serve: Serve) -> list[Answer]:
    """The answers to all documents from a server that caches nothing."""
    with serve({"no-cache": []}) as server:
        answers = [server.ask(document(number)) for number in range(DOCUMENTS)]
    assert len({answer.tokens for answer in answers}) == DOCUMENTS, "otherwise a wrong page could go unnoticed"
    assert not server.used.total()
    return answers


def storing(folder: Path) -> Options:
    """Options for all tiers. Requests wait for storage, so that their hits do not depend on time."""
    return {
        "kv-bytes": str(DEVICE_BYTES),
        "host-bytes": str(HOST_BYTES),
        "storage": f"file:{folder}?capacity=64MiB",
        "storage-secret": "0123456789abcdef",
        "prefetch": "wait_complete",
        "prefetch-min-tokens": "16",
    }


# ---------------------------------------------------------------- traffic


def test_answers_are_the_uncached_ones_and_hits_add_up_by_tier(
    serve: Serve, uncached: list[Answer], tmp_path: Path
) -> None:
    with serve(storing(tmp_path / "store")) as server:
        for number in [*range(DOCUMENTS), *reversed(range(DOCUMENTS)), 0, 0]:
            assert server.ask(document(number)) == uncached[number]
        for tier in ("device", "host", "storage"):
            assert server.used[tier] > 0, tier
        assert server.metrics("mainstem_cached_tokens_total") == server.used
        assert not server.settle()["faults"]


@pytest.mark.parametrize(
    ("write", "prefetch"),
    [
        ("write_back", "wait_complete"),
        pytest.param("write_through", "timeout", marks=pytest.mark.slow),
        pytest.param("write_through", "best_effort", marks=pytest.mark.slow),
        pytest.param("write_through_selective", "wait_complete", marks=pytest.mark.slow),
        pytest.param("write_back", "timeout", marks=pytest.mark.slow),
    ],
)
def test_every_policy_gives_the_same_answers(
    serve: Serve, uncached: list[Answer], tmp_path: Path, write: str, prefetch: str
) -> None:
    several = [number for number in range(12) for _ in range(3)]  # the third time hits what the second one copied
    with serve({**storing(tmp_path / "store"), "write-policy": write, "prefetch": prefetch}) as server:
        for number in [*several, *reversed(range(12))]:
            assert server.ask(document(number)) == uncached[number]
        assert server.used["host"] > 0
        assert server.metrics("mainstem_cached_tokens_total") == server.used
        assert not server.settle()["faults"]


def test_requests_at_once_on_a_device_that_holds_one_of_them(
    serve: Serve, uncached: list[Answer], tmp_path: Path
) -> None:
    small = {"kv-bytes": str(24 * PAGE_BYTES), "host-bytes": str(DEVICE_BYTES)}
    with serve({**storing(tmp_path / "store"), **small}) as server:
        for number in range(4):
            server.ask(document(number))
        answers = _ask_at_once(server, [number % 8 for number in range(24)])
        assert all(answer == uncached[number] for number, answer in answers)
        assert server.metrics("mainstem_cached_tokens_total") == server.used


def test_clients_that_go_away_disturb_no_other(serve: Serve, uncached: list[Answer], tmp_path: Path) -> None:
    with serve(storing(tmp_path / "store")) as server:
        for number in range(8):
            server.ask(document(number))
        for number in range(24):
            leave_early(server, document(number % 8), after_s=0.002 * (number % 12))
        for number in reversed(range(8)):
            assert server.ask(document(number)) == uncached[number]
        eventually(lambda: not server.http.get("/v1/cache/stats").json()["running"], 60.0)
        stats = server.settle()
        assert stats["host_private"] == 0
        cache = server.http.get("/v1/cache/stats").json()["cache"]
        assert cache["tree"]["locked_pages"] == cache["retention"]["device"]["full"]


def test_a_removed_prefix_is_computed_again_and_the_server_goes_on(serve: Serve, uncached: list[Answer]) -> None:
    text = " ".join(f"w{token}" for token in document(0)[:STORED])
    begin = (
        {"prompt": document(0)[: 2 * PAGE]},
        {"messages": [{"role": "user", "content": text[: text.index(" ", 90)]}]},
    )
    with serve({}) as server:

        def remove(**body: Any) -> Any:
            return server.http.post("/v1/cache/remove", json=body)

        for body in (*begin, {"prompt": text}, {"all": True}):
            server.ask(document(0))
            assert server.ask(document(0)).device == STORED
            assert remove(**body).json()["freed_pages"] > 0
            again = server.ask(document(0))
            assert again == uncached[0]
            assert again.device < STORED
        assert again.device == 0
        for body in ({}, {"promt": "w2"}, {"prompt": [VOCAB]}):
            assert remove(**body).status_code == 400
        assert server.ask(document(0)).device == STORED


def leave_early(server: Server, prompt: Prompt, after_s: float) -> None:
    """Sends a request and disconnects before the answer."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": 200, "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=body, timeout=httpx.Timeout(PATIENCE_S, read=max(after_s, 1e-4)))


def _ask_at_once(server: Server, numbers: Sequence[int]) -> list[tuple[int, Answer]]:
    answers: list[tuple[int, Answer]] = []

    def ask(number: int) -> None:
        answers.append((number, server.ask(document(number))))

    threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(answers) == len(numbers)
    return answers


# ---------------------------------------------------------------- ends and restarts


def test_killed_in_the_middle_of_traffic_the_first_request_after_it_hits_storage(
    serve: Serve, uncached: list[Answer], tmp_path: Path
) -> None:
    options = storing(tmp_path / "store")
    with serve(options) as server:
        server.ask(document(0))
        server.settle()
        asking = threading.Thread(target=_ask_until_it_fails, args=(server,))
        asking.start()
        eventually(lambda: server.stats()["stored"] > 60, 60.0)
        server.kill()
        asking.join()
    with serve(options) as server:
        first = server.ask(document(0))
        assert first == uncached[0]
        assert (first.device, first.host, first.storage) == (0, 0, STORED)
        for number in range(DOCUMENTS):
            assert server.ask(document(number)) == uncached[number]
        assert not server.settle()["faults"].keys() - {"absent"}


def _ask_until_it_fails(server: Server) -> None:
    try:
        for number in range(1, 10_000):
            server.ask(document(number % DOCUMENTS))
    except httpx.TransportError:
        return


@pytest.fixture(scope="module")
def stored(serve: Serve, uncached: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Options:
    """The options of a server that answered four documents and was stopped at once."""
    options = storing(tmp_path_factory.mktemp("stored") / "store")
    with serve(options) as server:
        for number in range(4):
            server.ask(document(number))
        assert server.stop() == 0
    return options


def test_a_server_that_stops_loses_nothing_that_waited_to_be_written_and_a_flush_leaves_what_is_stored(
    serve: Serve, stored: Options, uncached: list[Answer]
) -> None:
    with serve(stored) as server:
        for _ in range(2):
            for number in range(4):
                answer = server.ask(document(number))
                assert answer == uncached[number]
                assert (answer.host, answer.storage) == (0, STORED)
            server.settle()
            server.flush()


def test_what_runs_when_a_server_stops_ends_and_is_stored(serve: Serve, uncached: list[Answer], tmp_path: Path) -> None:
    options = storing(tmp_path / "store")
    with serve(options) as server:
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.append(server.ask(document(0), tokens=120)))
        asking.start()
        eventually(lambda: server.http.get("/v1/cache/stats").json()["running"] == 1, 60.0)
        server.process.terminate()
        asking.join(PATIENCE_S)
        assert server.stop() == 0
    (answer,) = answers
    assert len(answer.tokens) == 120
    assert answer.tokens[:NEW_TOKENS] == uncached[0].tokens
    with serve(options) as server:
        again = document(0) + [int(token.removeprefix("w")) for token in answer.tokens]
        assert server.ask(again, tokens=1).storage == (PROMPT_TOKENS + 119) // PAGE * PAGE


def test_a_warm_start_has_the_hottest_on_the_host_before_the_first_request(
    serve: Serve, stored: Options, uncached: list[Answer]
) -> None:
    with serve({**stored, "warm": []}) as server:
        eventually(lambda: server.stats()["host_cached"] >= 4 * STORED // PAGE, 60.0)
        for number in range(4):
            answer = server.ask(document(number))
            assert answer == uncached[number]
            assert (answer.host, answer.storage) == (STORED, 0)


# ---------------------------------------------------------------- who finds what


def test_nothing_is_found_by_a_server_of_another_identity(
    serve: Serve, stored: Options, uncached: list[Answer]
) -> None:
    others: list[Options] = [{"storage-secret": "fedcba9876543210"}, {"page-size": "32"}, {"dtype": "bfloat16"}]
    for changes in others:
        with serve({**stored, **changes}) as server:
            answer = server.ask(document(2))
            assert (answer.device, answer.host, answer.storage) == (0, 0, 0), changes
            assert answer == uncached[2] or "dtype" in changes
    with serve(stored) as server:
        assert server.ask(document(2)).storage == STORED


def test_tenants_find_their_own_after_a_restart_and_nobody_elses(
    serve: Serve, uncached: list[Answer], tmp_path: Path
) -> None:
    keys: Options = {"admin-key": "root", "api-key": ["anna", "bert", "carl"]}
    options = storing(tmp_path / "store") | keys
    with serve(options) as server:
        assert server.ask(document(0), "anna").storage == 0
        server.settle("root")
        assert server.ask(document(0), "bert").storage == 0
        assert server.used.total() == 0
        assert server.stop() == 0
    with serve(options) as server:
        found = {name: server.ask(document(0), name) for name in ("carl", "anna", "bert")}
        assert all(answer == uncached[0] for answer in found.values())
        assert {name: answer.storage for name, answer in found.items()} == {"carl": 0, "anna": STORED, "bert": STORED}
        assert not server.used["device"] and not server.used["host"]


def test_a_damaged_store_is_recomputed_and_counted(
    serve: Serve, stored: Options, uncached: list[Answer], tmp_path: Path
) -> None:
    options = storing(tmp_path / "store")
    original = str(stored["storage"]).removeprefix("file:").partition("?")[0]
    values = Path(shutil.copytree(original, tmp_path / "store")) / "values"
    damaged = bytearray(values.read_bytes())
    for at in range(2000, len(damaged), 3 * 16384):
        damaged[at] ^= 0x10
    values.write_bytes(damaged)
    with serve(options) as server:
        for number in range(4):
            answer = server.ask(document(number))
            assert answer == uncached[number]
            assert answer.storage < STORED
        assert sum(server.settle()["faults"].values()) >= 4
        assert sum(server.metrics("mainstem_storage_faults_total").values()) >= 4
        late = server.metrics("mainstem_late_pages_total")
        assert late == server.stats()["late"] and late["fault"] >= 4
    with serve(options) as server:  # what was recomputed was stored again
        assert all(server.ask(document(number)).storage == STORED for number in range(4))


# ---------------------------------------------------------------- a real model


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(patience(900))
def test_a_real_model_whose_traffic_is_ten_times_the_device(smollm2: Any, tmp_path: Path) -> None:
    # 64 MB are 1,392 positions of float32 KV; 16 prompts of 870 tokens are ten times that.
    prompts = [document(number)[:10] * 87 for number in range(16)]
    options = {**storing(tmp_path / "store"), "kv-bytes": "64MB", "host-bytes": "256MB", "prefetch-min-tokens": "256"}
    options["storage"] = f"file:{tmp_path}/store?capacity=2GiB"
    with real_server({"no-cache": []}) as server:
        uncached = [server.ask(prompt) for prompt in prompts]
    with real_server(options) as server:
        for number in [*range(16), *reversed(range(16)), 0]:
            assert server.ask(prompts[number]) == uncached[number]
        assert all(server.used[tier] > 0 for tier in ("device", "host", "storage"))
        assert server.metrics("mainstem_cached_tokens_total") == server.used
        server.settle()
        server.kill()
    with real_server(options) as server:
        first = server.ask(prompts[0])
        assert first == uncached[0]
        assert (first.device, first.host, first.storage) == (0, 0, 864)
