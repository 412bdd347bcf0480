"""`mainstem serve` as a process, and its only client.

Tiny random models are served by processes that are forked from one that has already imported what a server needs:
imports take most of a start.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx
import pytest
from machine import eventually, patience
from rigs.servers import free_port

from bench.tiny_models import tiny

VOCAB = 200
NEW_TOKENS = 6
PATIENCE_S = patience(60)
PRELOADED = [
    "mainstem.cli",
    "mainstem.runtime.engine",
    "mainstem.server.serving",
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


def _serve(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    """A server's process. It is forked from one that may be older than the caller's environment."""
    os.environ.update(environment)
    import torch

    from mainstem.cli import main

    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    torch.set_num_threads(1)  # tiny tensors gain nothing from more
    sys.exit(main(["serve", *arguments]))


def spelled(options: Options) -> list[str]:
    """Returns the options as on the command line."""
    given = {name: [value] if isinstance(value, str) else value for name, value in options.items()}
    return [word for name, values in given.items() for value in values or [""] for word in (f"--{name}", value) if word]


Serve = Callable[[Options], AbstractContextManager[Server]]


def unlike(number: int, length: int) -> list[int]:
    """Returns a prompt for a tiny model that shares nothing with those of other numbers; ids below 2 are special."""
    return [2 + (number * 7919 + at * (at + 3 * number + 11)) % (VOCAB - 2) for at in range(length)]


def tiny_folder(family: str, folder: Path, **changes: Any) -> Path:
    """Saves a tiny random model of a family in a folder. Its text has one word per token, `w0` to `w199`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 1024, "eos_token_id": None, **changes}
    tiny(family, **sizes).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = (
        "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}w1{% endif %}"
    )
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template).save_pretrained(folder)
    return folder


def server_of(model: Path, logs: Path, defaults: Options) -> Serve:
    """Returns what starts servers over a model: `with serve(options) as server`.

    Args:
        model: its folder.
        logs: where the servers log.
        defaults: options, unless given otherwise at a start.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    @contextmanager
    def start(options: Options) -> Iterator[Server]:
        port = free_port()
        log = logs / str(port)
        given = {"port": str(port), "dtype": "float32", **defaults, **options}
        process = context.Process(target=_serve, args=([str(model), *spelled(given)], str(log), dict(os.environ)))
        process.start()
        try:
            server = Server(process, port, model.name, log)
            with closing(server.http):
                yield server
        finally:
            process.kill()
            process.join()

    return start


@contextmanager
def real_server(options: Options, model: str | None = None, name: str = "SmolLM2-135M-Instruct") -> Iterator[Server]:
    """Starts a server with the command that users type: of the default model, or of another one with its name."""
    port = free_port()
    command = [sys.executable, "-m", "mainstem.cli", "serve", *([] if model is None else [model])]
    command += spelled({"port": str(port), "dtype": "float32", **options})
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = Server(process, port, name, Path(os.devnull))
        with closing(server.http):
            yield server
    finally:
        process.kill()
        process.wait()
