"""What users of a server wait for while it answers a batch, beside what they wait for without one.

One server, on this machine: turns with a batch and without one alternate, so that whatever else the machine does hits
both. Users send prompts that share nothing, at random times. The server's batch shares beginnings, as batches do.

    python -m bench.batch_serving [--turns N]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
from rigs.servers import free_port
from rigs.serving import tiny_folder

from bench.client import Client

GOAL = 1.1
"""The p99 of the first token with a batch is at most so many times that without one."""

_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}  # of a random Llama
_REQUESTS, _MEAN_S = 40, 0.4  # of a turn, and between two of them
_PROMPT, _ANSWER = 400, 16  # tokens of a user
_DOCUMENTS, _QUESTIONS, _LONG = 20, 200, 600  # of the batch: documents, requests to each, tokens of a document


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Starts a server, and yields its URL."""
    port, model = free_port(), tiny_folder("llama", folder / "model", **_SIZES)
    command = [sys.executable, "-m", "mainstem.cli", "serve", str(model)]
    command += ["--port", str(port), "--batch-folder", str(folder / "batches"), "--served-model-name", "m"]
    command += ["--dtype", "float32"]
    with open(folder / "log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            while True:
                try:
                    httpx.get(f"{url}/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    if process.poll() is not None:
                        raise RuntimeError((folder / "log").read_text()) from None
                    time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def batch(dice: random.Random) -> bytes:
    """Returns the requests of a batch."""
    lines = []
    for document in range(_DOCUMENTS):
        tokens = [dice.randrange(2, 200) for _ in range(_LONG)]
        for number in range(_QUESTIONS):
            body = {
                "model": "m",
                "prompt": [*tokens, number % 200, 5 + number // 200],
                "max_tokens": 32,
                "ignore_eos": True,
            }
            made = {"custom_id": f"{document}-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            lines.append(json.dumps(made))
    return "\n".join(lines).encode()


def turn(client: Client, dice: random.Random) -> list[float]:
    """Sends the requests of a turn, and returns the times to their first tokens."""
    prompts = [[dice.randrange(2, 200) for _ in range(_PROMPT)] for _ in range(_REQUESTS)]
    times, at_s = list[float](), 0.0
    for _ in prompts:
        times.append(at_s)
        at_s += dice.expovariate(1 / _MEAN_S)
    return [answer.first_s - answer.sent_s for answer in client.ask(prompts, _ANSWER, times)]


def measure(url: str, turns: int) -> dict[str, Any]:
    """Measures turns without a batch and with one."""
    dice, http = random.Random(7), httpx.Client(base_url=url, timeout=60)
    client = Client(url, {"model": "m", "ignore_eos": True, "stream_options": {"include_usage": True}})
    upload = {"file": ("batch.jsonl", batch(dice))}
    file = http.post("/v1/files", data={"purpose": "batch"}, files=upload).raise_for_status().json()["id"]
    times: dict[bool, list[float]] = {False: [], True: []}
    turn(client, dice)
    answered = 0
    for number in range(2 * turns):
        beside = number % 2 == 1
        if beside:
            asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
            id = http.post("/v1/batches", json=asked).raise_for_status().json()["id"]
            while http.get(f"/v1/batches/{id}").json()["request_counts"]["completed"] < 1:
                time.sleep(0.1)
        times[beside] += turn(client, dice)
        if beside:
            answered += http.get(f"/v1/batches/{id}").json()["request_counts"]["completed"]
            http.post(f"/v1/batches/{id}/cancel")
            while http.get(f"/v1/batches/{id}").json()["status"] != "cancelled":
                time.sleep(0.1)
        print(number, {key: percentiles(each) for key, each in times.items() if each}, flush=True)
    return {
        "requests": len(times[True]), "answered": answered,
        **{f"{name}_{what}": each for what, way in (("alone", False), ("beside", True))
           for name, each in zip(("p50_s", "p90_s", "p99_s"), percentiles(times[way]), strict=True)},
        "ratio": percentiles(times[True])[-1] / percentiles(times[False])[-1],
    }  # fmt: skip


def percentiles(times: Sequence[float]) -> list[float]:
    """Returns the 50th, 90th and 99th percentile."""
    found = quantiles(times, n=100, method="inclusive")
    return [round(found[at - 1], 4) for at in (50, 90, 99)]


def main() -> None:
    """Prints the figures as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as url:
        print(json.dumps(measure(url, options.turns)))


if __name__ == "__main__":
    main()
