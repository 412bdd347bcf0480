"""Servers with every tier, as processes over a real model: equal answers, hits by tier, kills, restarts, damage.

Most of them run a tiny random model, in processes forked from one that has already imported what a server needs:
imports take most of a start.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import httpx
import pytest
from machine import eventually, patience
from rigs.servers import free_port

from bench.tiny_models import tiny

PAGE = 16
VOCAB = 200
PROMPT_TOKENS = 20 * PAGE + 5
STORED = 20 * PAGE  # tokens of a prompt in whole pages
NEW_TOKENS = 6
DOCUMENTS = 20
PAGE_BYTES = 12288
DEVICE_BYTES = 42 * PAGE_BYTES  # for a tenth of all documents
HOST_BYTES = 4 * DEVICE_BYTES
pytestmark = pytest.mark.deadline
PATIENCE_S = patience(60)
PRELOADED = [
    "mainstem.cli",
    "mainstem.runtime.engine",
    "mainstem.server.app",
    "mainstem.storage.file",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama",
]

Prompt = Sequence[int] | str
Options = dict[str, str | list[str]]  # an empty list is a switch


@dataclass(frozen=True)
class Answer:
    """What a client received, and the cached tokens by tier."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    device: int
    host: int
    storage: int

    def __eq__(self, other: object) -> bool:
        """The same tokens with the same probabilities: a wrong page would change them by more than rounding."""
        return (
            isinstance(other, Answer)
            and self.tokens == other.tokens
            and self.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        )


class Server:
    """A server and its only client."""

    def __init__(self, process: ForkServerProcess | subprocess.Popen[bytes], port: int, model: str, log: Path) -> None:
        self.process, self.model, self.log = process, model, log
        self.used: Counter[str] = Counter()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
        eventually(self._is_up, 60.0)

    def ask(self, prompt: Prompt, key: str = "", tokens: int = NEW_TOKENS) -> Answer:
        """Requests a greedy completion, whose usage must add up."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1}
        reply = self.http.post("/v1/completions", json=body, headers=_bearer(key))
        assert reply.status_code == 200, reply.text
        details = reply.json()["usage"]["prompt_tokens_details"]
        tiers = details["cached_tokens_by_tier"]
        assert sum(tiers.values()) == details["cached_tokens"]
        assert min(tiers.values()) >= 0
        self.used.update(tiers)
        logprobs = reply.json()["choices"][0]["logprobs"]
        return Answer(tuple(logprobs["tokens"]), tuple(logprobs["token_logprobs"]), **tiers)

    def stats(self, key: str = "") -> Any:
        """Returns the counts of the tiers."""
        return self.http.get("/v1/cache/stats", headers=_bearer(key)).json()["tiers"]

    def settle(self, key: str = "") -> Any:
        """Waits until nothing moves between tiers, and returns the counts of the tiers."""
        eventually(lambda: not self.stats(key)["under_way"], 60.0)
        return self.stats(key)

    def flush(self) -> None:
        """Empties device and host."""
        assert self.http.post("/v1/cache/flush").status_code == 200

    def metrics(self, name: str) -> dict[str, int]:
        """Returns a counter's values by its only label."""
        text = self.http.get("/metrics").text
        return {label: int(float(n)) for label, n in re.findall(rf'^{name}{{\w+="(\w+)"}} (\S+)$', text, re.MULTILINE)}

    def kill(self) -> None:
        """Sends SIGKILL and waits for the end."""
        self.process.kill()
        self._end()

    def stop(self) -> int | None:
        """Sends SIGTERM and returns the exit code."""
        self.process.terminate()
        return self._end()

    def _end(self) -> int | None:
        self.http.close()
        if isinstance(self.process, subprocess.Popen):
            return self.process.wait(PATIENCE_S)
        self.process.join(PATIENCE_S)
        return self.process.exitcode

    def _is_up(self) -> bool:
        code = self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode
        assert code is None, f"the server ended with {code}: {self.log.read_text()[-2000:]}"
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def document(number: int) -> list[int]:
    """Returns a prompt that shares nothing with others; ids below 2 are special."""
    return [2 + (number * 7919 + at * (at + 3 * number + 11)) % (VOCAB - 2) for at in range(PROMPT_TOKENS)]


def _serve(arguments: list[str], log: str) -> None:
    """A server's process."""
    import torch

    from mainstem.cli import main

    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    torch.set_num_threads(1)  # tiny tensors gain nothing from more
    sys.exit(main(["serve", *arguments]))


def _spelled(options: Options) -> list[str]:
    """Returns the options as on the command line."""
    given = {name: [value] if isinstance(value, str) else value for name, value in options.items()}
    return [word for name, values in given.items() for value in values or [""] for word in (f"--{name}", value) if word]


Serve = Callable[[Options], AbstractContextManager[Server]]


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Makes processes that have already imported the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model whose text has one word per token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny("llama", vocab_size=VOCAB, max_position_embeddings=1024, eos_token_id=None).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = (
        "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}w1{% endif %}"
    )
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def serve(processes: ForkServerContext, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts servers over the tiny model: `with serve(options) as server`."""
    logs = tmp_path_factory.mktemp("logs")

    @contextmanager
    def start(options: Options) -> Iterator[Server]:
        port = free_port()
        given: Options = {"port": str(port), "dtype": "float32", "page-size": str(PAGE), **options}
        log = logs / str(port)
        process = processes.Process(target=_serve, args=([str(model), *_spelled(given)], str(log)))
        process.start()
        try:
            server = Server(process, port, model.name, log)
            with closing(server.http):
                yield server
        finally:
            process.kill()
            process.join()

    return start


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
        ("write_through", "timeout"),
        ("write_back", "wait_complete"),
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
        assert server.http.get("/v1/cache/stats").json()["cache"]["tree"]["locked_pages"] == 0


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


def test_a_server_that_stops_loses_nothing_that_waited_to_be_written(
    serve: Serve, stored: Options, uncached: list[Answer]
) -> None:
    with serve(stored) as server:
        for number in range(4):
            answer = server.ask(document(number))
            assert answer == uncached[number]
            assert (answer.host, answer.storage) == (0, STORED)


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


def test_a_flush_leaves_what_is_stored(serve: Serve, stored: Options, uncached: list[Answer]) -> None:
    with serve(stored) as server:
        for _ in range(2):
            answer = server.ask(document(1))
            assert answer == uncached[1]
            assert (answer.device, answer.host, answer.storage) == (0, 0, STORED)
            server.settle()
            server.flush()


# ---------------------------------------------------------------- who finds what


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("secret", {"storage-secret": "fedcba9876543210"}),
        ("page size", {"page-size": "32"}),
        ("dtype", {"dtype": "bfloat16"}),
    ],
)
def test_nothing_is_found_by_a_server_of_another_identity(
    serve: Serve, stored: Options, uncached: list[Answer], what: str, changes: Options
) -> None:
    with serve({**stored, **changes}) as server:
        answer = server.ask(document(2))
        assert (answer.device, answer.host, answer.storage) == (0, 0, 0)
        assert answer == uncached[2] or what == "dtype"
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
    with serve(options) as server:
        for number in range(4):
            server.ask(document(number))
        assert server.stop() == 0
    values = tmp_path / "store" / "values"
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
    with _real({"no-cache": []}) as server:
        uncached = [server.ask(prompt) for prompt in prompts]
    with _real(options) as server:
        for number in [*range(16), *reversed(range(16)), 0]:
            assert server.ask(prompts[number]) == uncached[number]
        assert all(server.used[tier] > 0 for tier in ("device", "host", "storage"))
        assert server.metrics("mainstem_cached_tokens_total") == server.used
        server.settle()
        server.kill()
    with _real(options) as server:
        first = server.ask(prompts[0])
        assert first == uncached[0]
        assert (first.device, first.host, first.storage) == (0, 0, 864)


@contextmanager
def _real(options: Options) -> Iterator[Server]:
    """Starts the default model with the command that users type."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "mainstem.cli",
        "serve",
        "--port",
        str(port),
        "--dtype",
        "float32",
        *_spelled(options),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = Server(process, port, "SmolLM2-135M-Instruct", Path(os.devnull))
        with closing(server.http):
            yield server
    finally:
        process.kill()
        process.wait()
