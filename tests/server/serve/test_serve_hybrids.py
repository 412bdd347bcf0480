"""Servers of models with windows and states over every tier: equal answers, kills, restarts, shared stores.

An answer is compared with that of a server that caches nothing: the same tokens, with the same probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rigs.servers import free_port, mooncake_master, rclone_s3, valkey
from rigs.serving import VOCAB, Answer, Options, Serve, server_of, tiny_folder, unlike
from rigs.slow import slow_but
from skips import needs_mooncake

from bench.tiny_models import ALONE, GATHERED, HYBRIDS, LATENT, RESUMED, WINDOWED

pytestmark = pytest.mark.deadline

PAGE = 8
SHARED = 6 * PAGE  # tokens that every prompt begins with
OWN = 6 * PAGE + 3  # tokens of each prompt alone, which end inside a page
DOCUMENTS = 12
CONTEXT = 256
STORES = [
    "valkey",
    pytest.param("s3", marks=pytest.mark.slow),
    pytest.param("mooncake", marks=(pytest.mark.slow, needs_mooncake)),
]

# The family, its changes, and memory for a tenth of all documents: some 20 pages, and some states.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma3": ("gemma3_text", WINDOWED["gemma3_text"], "180kB"),
    "mistral": ("mistral", WINDOWED["mistral"], "150kB"),
    "qwen3_next": ("qwen3_next", HYBRIDS["qwen3_next"], "150kB"),
    "falcon_h1": ("falcon_h1", HYBRIDS["falcon_h1"], "280kB"),
    "lfm2": ("lfm2", HYBRIDS["lfm2"], "160kB"),
    "mamba2": ("mamba2", HYBRIDS["mamba2"], "200kB"),
    "gemma2": ("gemma2", WINDOWED["gemma2"], "180kB"),
    "deepseek_v3": ("deepseek_v3", LATENT["deepseek_v3"], "100kB"),
    "bloom": ("bloom", GATHERED["bloom"], "300kB"),
    "kimi_linear": ("kimi_linear", HYBRIDS["kimi_linear"], "150kB"),
    "minimax": ("minimax", HYBRIDS["minimax"], "200kB"),
    "jamba": ("jamba", RESUMED["jamba"], "250kB"),
    "rwkv": ("rwkv", ALONE["rwkv"], "40kB"),
}


def document(number: int) -> list[int]:
    """Returns a prompt that shares its first tokens with all others; ids below 2 are special."""
    shared = [2 + (7 * at * at + 3 * at) % (VOCAB - 2) for at in range(SHARED)]
    return shared + unlike(number, OWN)


@pytest.fixture(scope="module", params=slow_but(FAMILIES, "gemma3", "lfm2"))
def serve(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts servers of one family: `with serve(options) as server`."""
    family, changes, memory = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("models") / request.param
    model = tiny_folder(family, folder, **{**changes, "max_position_embeddings": CONTEXT})
    defaults: Options = {"page-size": str(PAGE), "kv-bytes": memory, "token-budget": "64"}
    return server_of(model, tmp_path_factory.mktemp("logs"), defaults)


@pytest.fixture(scope="module")
def uncached(serve: Serve) -> list[Answer]:
    """The answers to all documents from a server that caches nothing."""
    with serve({"no-cache": []}) as server:
        answers = [server.ask(document(number)) for number in range(DOCUMENTS)]
    assert len({answer.logprobs for answer in answers}) == DOCUMENTS, "otherwise a wrong page could go unnoticed"
    return answers


def storing(storage: str) -> Options:
    """Options for all tiers, on a device for a tenth of all documents. Requests wait for storage."""
    return {
        "host-ratio": "1",
        "storage": storage,
        "storage-secret": "0123456789abcdef",
        "prefetch": "wait_complete",
        "prefetch-min-tokens": "8",
        "load-min-tokens": "8",
    }


def test_traffic_ten_times_the_device_then_a_kill_and_the_same_hits_from_storage(
    serve: Serve, uncached: list[Answer], tmp_path: Path
) -> None:
    options = storing(f"file:{tmp_path}/store?capacity=64MiB")
    with serve(options) as server:
        for number in [*range(DOCUMENTS), *reversed(range(DOCUMENTS))]:
            assert server.ask(document(number)) == uncached[number]
        server.settle()
        hits = [server.ask(document(number)) for number in range(DOCUMENTS)]
        assert hits == uncached
        assert all(server.used[tier] > 0 for tier in ("device", "storage"))
        assert server.metrics("mainstem_cached_tokens_total") == server.used
        assert not server.settle()["faults"]
        server.kill()
    with serve(options) as server:
        for number, before in enumerate(hits):
            again = server.ask(document(number))
            assert again == uncached[number]
            assert _cached(again) >= _cached(before) // PAGE * PAGE >= SHARED
        assert server.used["storage"] > 0


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("store", STORES)
def test_what_one_server_computed_another_one_finds(
    serve: Serve, uncached: list[Answer], store: str, tmp_path: Path
) -> None:
    with _store(store, tmp_path) as storage, serve(storing(storage)) as one, serve(storing(storage)) as other:
        for number in range(4):
            assert one.ask(document(number)) == uncached[number]
        one.settle()
        for number in range(4):
            found = other.ask(document(number))
            assert found == uncached[number]
            assert _cached(found) >= SHARED + OWN // PAGE * PAGE - PAGE
        assert other.used["storage"] > 0


def _cached(answer: Answer) -> int:
    return answer.device + answer.host + answer.storage


@contextmanager
def _store(kind: str, folder: Path) -> Iterator[str]:
    """Runs a store and returns its spec."""
    port = free_port()
    if kind == "valkey":
        with valkey(port):
            yield f"redis://127.0.0.1:{port}/0"
    elif kind == "s3":
        (folder / "bucket").mkdir()
        with rclone_s3(port, folder):
            yield f"s3://bucket/kv?endpoint=http://127.0.0.1:{port}&region=us-east-1"
    else:
        with mooncake_master(port):
            yield f"mooncake://127.0.0.1:{port}?segment=64MiB"
