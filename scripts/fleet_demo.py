"""`make fleet-demo`: two replicas and a front on this machine, one of which is killed while it answers.

Asks the demo's questions about its document through the front, as streams, and some at once. Prints who answered what,
and from which cache, and draws it: build/fleet-demo.svg.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from mainstem.demo import QUESTIONS
from mainstem.fleet.place import free_port

ROUNDS = 3
KILLED_AT = 7  # while this question is being answered
KILLED_AFTER = 4  # pieces of its answer
PICTURE = Path(__file__).parents[1] / "build" / "fleet-demo.svg"
_LEFT, _WIDTH, _LANE, _BAR = 130, 720, 46, 26  # pixels


@dataclass(frozen=True)
class Answer:
    """An answer.

    Args:
        question: what was asked.
        replica: who began to answer.
        cached, prompt: tokens of the prompt that were found, and all of them.
        begin_s, first_s, end_s: when it was asked, when its first token came, and its last one.
    """

    question: str
    replica: str
    cached: int
    prompt: int
    begin_s: float
    first_s: float
    end_s: float


@dataclass(frozen=True)
class Killed:
    """A replica was killed.

    Args:
        replica: which.
        at_s: when.
    """

    replica: str
    at_s: float


def command(environment: dict[str, str], *arguments: str) -> Any:
    """Runs `mainstem fleet`, and returns what it printed."""
    line = [sys.executable, "-m", "mainstem.cli", "fleet", *arguments, "--json"]
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def ask(
    url: str, model: str, document: str, question: str, piece: Callable[[str, int], None] = lambda *_: None
) -> Answer:
    """Asks one question about the document; `piece` is called with who answers, and the number of each piece."""
    system = f"Answer each question about the following text in one short sentence.\n\n{document}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    asked = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0, "stream": True}
    body = json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    begin_s, first_s, count, usage = time.monotonic(), 0.0, 0, None
    with urllib.request.urlopen(request, timeout=300) as reply:
        replica = reply.headers["X-Mainstem-Replica"]
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise RuntimeError(f"{question}: {chunk['error']['message']}")
            usage = chunk.get("usage") or usage
            count, first_s = count + 1, first_s or time.monotonic()
            piece(replica, count)
    assert usage is not None, "the stream ended before its last chunk"
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(question, replica, cached, usage["prompt_tokens"], begin_s, first_s, time.monotonic())


def main() -> None:
    """Runs the demo, and ends all that it started."""
    document = files("mainstem").joinpath("demo.txt").read_text(encoding="utf-8").strip()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_STATE_HOME": folder}
        model = sys.argv[1:2] and ["--model", str(Path(sys.argv[1]).resolve())]
        try:
            url = command(environment, "up", "--port", str(free_port("127.0.0.1")), *model)["url"]
            answers, killed = run(environment, url, document)
            show(answers, killed, command(environment, "status"))
        finally:
            command(environment, "down")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(answers, killed))
    print(f"Who served what: {PICTURE}")


def run(environment: dict[str, str], url: str, document: str) -> tuple[list[Answer], Killed]:
    """Asks all questions, and kills the replica that answers one of them meanwhile."""
    answers: list[Answer] = []
    killed: list[Killed] = []
    pids = {name: each["pid"] for name, each in command(environment, "status")["replicas"].items()}
    with urllib.request.urlopen(f"{url}/models") as reply:
        name = json.load(reply)["data"][0]["id"]

    def kill(replica: str, number: int) -> None:
        if number == KILLED_AFTER:
            os.kill(pids[replica], signal.SIGKILL)
            killed.append(Killed(replica, time.monotonic()))

    for number, question in enumerate(QUESTIONS * ROUNDS):
        if number == KILLED_AT:
            answers.append(ask(url, name, document, question, kill))
        elif number > KILLED_AT and number % 3 == 0:
            answers += at_once(lambda question=question: ask(url, name, document, question), 2)
        else:
            answers.append(ask(url, name, document, question))
    return answers, killed[0]


def at_once(call: Callable[[], Answer], count: int) -> list[Answer]:
    """Calls from several threads, and returns all answers."""
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda: answers.append(call())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(answers) < count:
        raise RuntimeError("a request failed")
    return answers


def show(answers: Sequence[Answer], killed: Killed, status: dict[str, Any]) -> None:
    """Prints what happened as a table, with one column for each replica."""
    names = list(dict.fromkeys(answer.replica for answer in answers))
    print(f"\n{'question':38}" + "".join(f"{name:>12}" for name in names) + f"{'cached':>14}{'first':>8}{'all':>8}")
    for answer in answers:
        marks = "".join(f"{'*' if name == answer.replica else '':>12}" for name in names)
        times = f"{answer.first_s - answer.begin_s:>8.2f}{answer.end_s - answer.begin_s:>8.2f}"
        print(f"{answer.question:38}{marks}{f'{answer.cached}/{answer.prompt}':>14}{times}")
        if answer.begin_s < killed.at_s < answer.end_s:
            print(f"--- {killed.replica} was killed in the middle of this answer; another replica went on with it ---")
    found, asked = sum(answer.cached for answer in answers), sum(answer.prompt for answer in answers)
    print(f"\n{len(answers)} requests, none failed. {found / asked:.0%} of the prompts' tokens were cached.")
    print(f"Streams that another replica went on with: {status['continued']}.")


def picture(answers: Sequence[Answer], killed: Killed) -> str:
    """Returns an SVG: a lane for each replica, a bar for each answer, and the end of the one that was killed."""
    names = list(dict.fromkeys([*(answer.replica for answer in answers)]))
    begin_s, end_s = min(each.begin_s for each in answers), max(each.end_s for each in answers)
    height = 70 + _LANE * len(names)

    def x(at_s: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 20) * (at_s - begin_s) / (end_s - begin_s), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Who served'
        ' what"><style>text{font:12px system-ui,sans-serif;fill:#22252a}.hit{fill:#3f7cb8}.miss{fill:#c98a2b}'
        ".wait{fill:#d9d9d4}.end{stroke:#b3261e;stroke-width:2}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fbfbfa"/>',
        '<text x="20" y="24">Who served what: grey until the first token, blue where most of the prompt was cached,'
        " orange where it was computed</text>",
    ]
    for lane, name in enumerate(names):
        y = 44 + _LANE * lane
        parts.append(f'<text x="20" y="{y + _BAR / 2 + 4}">{name}</text>')
        for answer in (each for each in answers if each.replica == name):
            kind = "hit" if 2 * answer.cached > answer.prompt else "miss"
            for kind_, first, last in (("wait", answer.begin_s, answer.first_s), (kind, answer.first_s, answer.end_s)):
                width = max(x(last) - x(first), 1)
                parts.append(f'<rect class="{kind_}" x="{x(first)}" y="{y}" width="{width:.1f}" height="{_BAR}"/>')
        if name == killed.replica:
            at = x(killed.at_s)
            parts.append(f'<path class="end" d="M{at} {y - 6}V{y + _BAR + 6}"/>')
            parts.append(f'<text x="{at + 4}" y="{y + _BAR + 15}">killed; another one goes on with the answer</text>')
    seconds = f'<text x="{_WIDTH - 20}" y="{height - 8}" text-anchor="end">{end_s - begin_s:.1f} s</text>'
    return "\n".join([*parts, seconds, "</svg>\n"])


if __name__ == "__main__":
    main()
