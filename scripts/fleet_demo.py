"""`make fleet-demo`: two replicas and a front on this machine, one of which is killed while it answers.

Asks the demo's questions about its document, through the front. Prints who answered what, and from which cache.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from mainstem.demo import QUESTIONS
from mainstem.fleet.place import free_port

ROUNDS = 3
KILLED_AT = 7  # while this question is being answered


class Answer(NamedTuple):
    """An answer: who gave it, how many tokens were cached of how many, and when its first byte came."""

    question: str
    replica: str
    cached: int
    prompt: int
    seconds: float


def command(environment: dict[str, str], *arguments: str) -> Any:
    """Runs `mainstem fleet`, and returns what it printed."""
    line = [sys.executable, "-m", "mainstem.cli", "fleet", *arguments, "--json"]
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def ask(url: str, model: str, document: str, question: str) -> Answer:
    """Asks one question about the document."""
    system = f"Answer each question about the following text in one short sentence.\n\n{document}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    begun_s = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as reply:
        usage = json.load(reply)["usage"]
        replica = reply.headers["X-Mainstem-Replica"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(question, replica, cached, usage["prompt_tokens"], time.monotonic() - begun_s)


def main() -> None:
    """Runs the demo, and ends all that it started."""
    document = files("mainstem").joinpath("demo.txt").read_text(encoding="utf-8").strip()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_STATE_HOME": folder}
        model = sys.argv[1:2] and ["--model", str(Path(sys.argv[1]).resolve())]
        try:
            url = command(environment, "up", "--port", str(free_port("127.0.0.1")), *model)["url"]
            show(run(environment, url, document))
        finally:
            command(environment, "down")


def run(environment: dict[str, str], url: str, document: str) -> list[Answer | str]:
    """Asks all questions, and kills the replica that has answered them meanwhile. Returns what happened, in order."""
    told: list[Answer | str] = []
    with urllib.request.urlopen(f"{url}/models") as reply:
        name = json.load(reply)["data"][0]["id"]
    for number, question in enumerate(QUESTIONS * ROUNDS):
        if number == KILLED_AT:
            last = told[-1]
            assert isinstance(last, Answer)
            pid = command(environment, "status")["replicas"][last.replica]["pid"]
            threading.Timer(0.05, os.kill, (pid, signal.SIGKILL)).start()
            told.append(f"{last.replica} is killed while it answers")
        told.append(ask(url, name, document, question))
    return told


def show(told: list[Answer | str]) -> None:
    """Prints what happened as a table, with one column for each replica."""
    answers = [each for each in told if isinstance(each, Answer)]
    names = list(dict.fromkeys(answer.replica for answer in answers))
    print(f"\n{'question':38}" + "".join(f"{name:>12}" for name in names) + f"{'cached':>14}{'seconds':>9}")
    for each in told:
        if isinstance(each, str):
            print(f"--- {each} ---")
            continue
        marks = "".join(f"{'*' if name == each.replica else '':>12}" for name in names)
        print(f"{each.question:38}{marks}{f'{each.cached}/{each.prompt}':>14}{each.seconds:>9.2f}")
    print(f"\n{len(answers)} of {len(QUESTIONS) * ROUNDS} requests answered, by {len(names)} replicas.")


if __name__ == "__main__":
    main()
