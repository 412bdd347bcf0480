"""What users of a server wait for while it answers a batch, beside what they wait for without one.

One server, on this machine: turns with a batch and without one alternate, so that whatever else the machine does hits
both. Users send prompts that share nothing, at random times. The server's batch shares beginnings, as batches do.

Percentiles are of all turns of a kind together.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
from rigs.servers import free_port
from rigs.serving import tiny_folder

from bench.client import Client
from bench.report import Report
from bench.tables import goals_table

GOAL = 1.1
"""The p99 of the first token with a batch is at most so many times that without one."""

_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}  # of a random Llama
_REQUESTS, _MEAN_S = 40, 0.4  # of a turn, and between two of them
_PROMPT, _ANSWER = 400, 16  # tokens of a user
_DOCUMENTS, _QUESTIONS, _LONG = 20, 200, 600  # of the batch: documents, requests to each, tokens of a document


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark. `turns`: with a batch, and as many without one."""

    turns: int = 10


QUICK = Settings(turns=1)


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
        if number % 2 == 0:
            times[False] += turn(client, dice)
            continue
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        path = f"/v1/batches/{http.post('/v1/batches', json=asked).raise_for_status().json()['id']}"
        while http.get(path).json()["request_counts"]["completed"] < 1:
            time.sleep(0.1)
        times[True] += turn(client, dice)
        answered += http.get(path).json()["request_counts"]["completed"]
        http.post(f"{path}/cancel")
        while http.get(path).json()["status"] != "cancelled":
            time.sleep(0.1)
    return row(times[False], times[True]) | {"answered": answered}


def row(alone: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    """Returns the percentiles of first tokens without a batch and beside one, and their ratios."""
    found: dict[str, Any] = {"requests": len(beside)}
    for name, without, with_it in zip(("p50", "p90", "p99"), percentiles(alone), percentiles(beside), strict=True):
        found |= {f"{name}_alone_s": without, f"{name}_beside_s": with_it, f"{name}_ratio": with_it / without}
    return found


def percentiles(times: Sequence[float]) -> list[float]:
    """Returns the 50th, 90th and 99th percentile."""
    found = quantiles(times, n=100, method="inclusive")
    return [round(found[at - 1], 4) for at in (50, 90, 99)]


def run(settings: Settings, report: Report) -> None:
    """Measures, and judges the goal."""
    report.settings.update(asdict(settings), model=_SIZES)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as url:
        report.rows.append(measure(url, settings.turns))
    ratio = report.rows[0]["p99_ratio"]
    what = "p99 of first tokens beside a batch, over that without one"
    report.more["goals"] = [{"what": what, "goal": GOAL, "unit": "ratio", "measured": ratio, "met": ratio <= GOAL}]
    report.tables.append(goals_table(report.more["goals"]))
