"""What users of four servers wait for, over HTTP: Mainstem, and on the CPU vLLM, transformers and llama.cpp.

One model in bfloat16, the same folder, prompts and number of threads for all. Servers take turns within a round, in
another order each round, and only one of them runs at a time. Ratios are of measurements of the same round.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from rich.table import Table

from bench.client import Answer, Clock, ServerFailed
from bench.report import Report
from bench.tables import number
from mainstem.units import show_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN, PEER = "Mainstem", "vLLM"
JOIN = f", {OWN} over {PEER}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark. Lengths are in tokens.

    Args:
        rounds: in which all servers take turns.
        new_tokens: of each answer whose decode is measured.
        prefix, long_prefix: what the prompts of a case share.
        loads: requests at once after one prefix.
        alone: requests at once that share nothing.
        long_load: requests at once after one long prefix.
        passage: is repeated in the prompt whose answer repeats it.
        limit_s: a case that takes a server longer than this is not repeated with it.
    """

    rounds: int = 3
    new_tokens: int = 128
    prefix: int = 800
    long_prefix: int = 4096
    loads: tuple[int, ...] = (1, 8)
    alone: int = 8
    long_load: int = 16
    passage: int = 200
    limit_s: float = 120.0


QUICK = Settings(rounds=1, new_tokens=8, loads=(1, 8))


class Server(Protocol):
    """A server under measurement; see `hosted.Hosted`."""

    name: str

    def turn(self) -> AbstractContextManager[None]:
        """Lets only this server run while the block does."""

    def ask(self, prompts: Sequence[str], tokens: int) -> list[Answer]:
        """Sends all prompts at once, and waits for all answers."""

    def peak_bytes(self) -> int:
        """Returns the most memory that it has held."""

    def preemptions(self) -> int | None:
        """Returns how many requests it has preempted; None: it does not say."""


_PLACES = ("bridge", "castle", "garden", "harbour", "library", "market", "mill", "museum", "river", "station", "tower")
_NAMES = ("Arden", "Bellow", "Carrow", "Dunmore", "Elstow", "Farley", "Garth", "Helm", "Inver", "Jarrow", "Kelso")


class Texts:
    """Prompts that no server has seen before: sentences with random names and numbers.

    Each begins with a blank, so that it has as many tokens after another text.

    Args:
        tokenizer: of the model.
        seed: equal seeds give equal texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: str) -> None:
        self._tokenizer, self._random = tokenizer, random.Random(seed)

    def facts(self, n: int) -> str:
        """Returns a text of n tokens."""
        while True:
            tokens: list[int] = []
            while len(tokens) < n:
                tokens += self._tokenizer.encode(self._fact())
            text = str(self._tokenizer.decode(tokens[:n]))
            if self.count(text) == n:
                return text

    def question(self) -> str:
        """Returns what a prompt ends with: the beginning of a story, which repeats less than the facts."""
        return f" In {self._year()} a child came to the {self._place()} for the first time."

    def count(self, text: str) -> int:
        """Returns the number of tokens of a text."""
        return len(self._tokenizer.encode(text))

    def _fact(self) -> str:
        distance = self._random.randrange(10, 100)
        return f" The {self._place()} was built in {self._year()}, {distance} metres from the {self._place()}."

    def _place(self) -> str:
        return f"{self._random.choice(_PLACES)} of {self._random.choice(_NAMES)}"

    def _year(self) -> int:
        return self._random.randrange(1100, 2000)


# ---------------------------------------------------------------- cases

Take = Callable[[Server, Texts, Settings], dict[str, float]]
"""Measures one server in one round: values by what they are."""

COLD, WARM = "cold first token", "warm first token"
REPEATING = "decode of one request that repeats its prompt"


def sharing(load: int, length: int) -> str:
    """Returns the name of the decode of requests that share a cached prefix."""
    requests = "decode of one request" if load == 1 else f"{load} at once"
    return f"{requests} after one prefix of {length:,} tokens"


def unshared(load: int) -> str:
    """Returns the name of the rate of requests that share nothing."""
    return f"{load} at once, nothing shared, prefill counted"


def _first_tokens(server: Server, texts: Texts, settings: Settings) -> dict[str, float]:
    prefix = texts.facts(settings.prefix)
    asked = (prefix, prefix + texts.question())
    cold, warm = (_ask(server, texts, [prompt], 1)[0] for prompt in asked)
    return {COLD: cold.first_s - cold.sent_s, WARM: warm.first_s - warm.sent_s}


def _sharing(load: int, length: int) -> Take:
    def take(server: Server, texts: Texts, settings: Settings) -> dict[str, float]:
        prefix = texts.facts(length)
        _ask(server, texts, [prefix + texts.question()], 1)
        asked = [prefix + texts.question() for _ in range(load)]
        return {sharing(load, length): decode_rate(_ask(server, texts, asked, settings.new_tokens))}

    return take


def _unshared(server: Server, texts: Texts, settings: Settings) -> dict[str, float]:
    asked = [texts.facts(settings.prefix) + texts.question() for _ in range(settings.alone)]
    answers = _ask(server, texts, asked, settings.new_tokens)
    seconds = max(answer.last_s for answer in answers) - min(answer.sent_s for answer in answers)
    return {unshared(settings.alone): sum(answer.tokens for answer in answers) / seconds}


def _repeating(server: Server, texts: Texts, settings: Settings) -> dict[str, float]:
    prompt = texts.facts(settings.passage) * (settings.prefix // settings.passage)
    return {REPEATING: decode_rate(_ask(server, texts, [prompt], settings.new_tokens))}


def decode_rate(answers: Sequence[Answer]) -> float:
    """Returns tokens per second from the first token of any to the last of all, without the first token of each.

    So prefill is not part of it, unless a server leaves requests waiting while it answers others. If all tokens came in
    one piece, it is infinite.
    """
    seconds = max(answer.last_s for answer in answers) - min(answer.first_s for answer in answers)
    return sum(answer.tokens - 1 for answer in answers) / seconds if seconds else math.inf


def _ask(server: Server, texts: Texts, prompts: Sequence[str], tokens: int) -> list[Answer]:
    answers = server.ask(prompts, tokens)
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.prompt_tokens != texts.count(prompt):
            raise ServerFailed(f"counts {answer.prompt_tokens} tokens in a prompt of {texts.count(prompt)}")
    return answers


def cases(settings: Settings) -> Iterator[tuple[Take, tuple[str, ...]]]:
    """Yields what is measured one after the other, with the names of its values."""
    yield _first_tokens, (COLD, WARM)
    for load in settings.loads:
        yield _sharing(load, settings.prefix), (sharing(load, settings.prefix),)
    yield _sharing(settings.long_load, settings.long_prefix), (sharing(settings.long_load, settings.long_prefix),)
    yield _unshared, (unshared(settings.alone),)
    yield _repeating, (REPEATING,)


# ---------------------------------------------------------------- goals

TIMES = (COLD, WARM)
"""What is measured in seconds; all else is in tokens per second."""

_DEFAULT = Settings()
GOALS: Mapping[str, float] = {
    COLD: 0.8,
    WARM: 0.6,
    sharing(1, _DEFAULT.prefix): 5.0,
    REPEATING: 1.5,
    sharing(8, _DEFAULT.prefix): 1.5,
    sharing(_DEFAULT.long_load, _DEFAULT.long_prefix): 1.2,
    unshared(_DEFAULT.alone): 1.15,
}
"""Mainstem's value over vLLM's: at most this for times, at least this for tokens per second."""


def judge(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each goal, in the form of `goals.judge`."""
    ratios = {row["what"]: row.get("ratio") for row in rows if row["server"] == OWN}
    judged = []
    for what, goal in GOALS.items():
        ratio = ratios.get(what)
        met = None if ratio is None else ratio <= goal if what in TIMES else ratio >= goal
        name = what + JOIN
        judged.append({"what": name, "goal": goal, "unit": "ratio", "measured": ratio, "met": met})
    return judged


# ---------------------------------------------------------------- the run


def run(settings: Settings, report: Report) -> None:
    """Starts the servers that are installed, and measures them. The others are named in a note."""
    from bench.hosted import SYSTEMS, THREADS, Hosted
    from mainstem.runtime.kernels.linear import instructions
    from mainstem.runtime.models.loading import load_model

    report.kind = instructions()
    loaded = load_model(dtype="bfloat16")
    model, tokenizer = Path(str(loaded.model.config.name_or_path)), loaded.tokenizer
    report.settings.update(
        model=loaded.name, dtype="bfloat16", threads=THREADS, load_at_start=round(os.getloadavg()[0], 2)
    )
    del loaded  # its memory is for the servers
    with TemporaryDirectory() as logs, ExitStack() as stack:
        servers: list[Server] = []
        for system in SYSTEMS:
            version = system.version()
            if version is None:
                report.notes.append(f"{system.name} is left out: {system.python} lacks {' or '.join(system.packages)}")
                continue
            report.versions[f"{system.packages[0]}, serving"] = version
            report.progress(f"servers: {system.name} {version} starts")
            try:
                servers.append(stack.enter_context(Hosted(system, model, Path(logs, system.name))))
            except ServerFailed as error:
                report.failures.append(f"{system.name}: {error}")
        measure(settings, report, servers, tokenizer)


Values = dict[tuple[str, str], dict[int, float]]
"""By server and what was measured: values by their rounds."""
AGAIN = 3
"""Further rounds, in which only what was discarded is measured."""
TOGETHER = 10.0
"""A server's rate that is so many times its least one of the same case was taken from chunks that came together."""


@dataclass(slots=True)
class _Found:
    """What has been measured. Cases are named by the server, and the first of the case's names."""

    values: Values = field(default_factory=dict)
    errors: dict[tuple[str, str], str] = field(default_factory=dict)
    slow: set[tuple[str, str]] = field(default_factory=set)
    discarded: Counter[tuple[str, str]] = field(default_factory=Counter)

    def lacks(self, case: tuple[str, str], rounds: int) -> bool:
        return case not in self.errors and case not in self.slow and len(self.values.get(case, ())) < rounds

    def discard(self) -> None:
        """Drops rates from chunks that came together, as all do of a server that runs when its client may not."""
        for key, by_round in self.values.items():
            if key[1] in TIMES:
                continue
            most = TOGETHER * min(by_round.values(), default=0.0)
            for at in [at for at, rate in by_round.items() if math.isinf(rate) or rate > most]:
                del by_round[at]
                self.discarded[key] += 1


def measure(
    settings: Settings,
    report: Report,
    servers: Sequence[Server],
    tokenizer: PreTrainedTokenizerBase,
    clock: Clock = time.perf_counter,
) -> None:
    """Measures servers in turns; adds rows, goals and tables to the report.

    If a server fails in a case, its row says why in place of values, and so does the run. A rate from chunks that came
    together is discarded and measured again; the row counts them.
    """
    report.settings.update(asdict(settings))
    found = _Found()
    for done in range(settings.rounds + AGAIN):
        order = [servers[(done + at) % len(servers)] for at in range(len(servers))]
        for at, (take, names) in enumerate(cases(settings)):
            for server in order:
                case = server.name, names[0]
                if not found.lacks(case, settings.rounds):
                    continue
                report.progress(f"servers: round {done + 1} of {settings.rounds}, {names[0]}: {server.name}")
                began_s = clock()
                try:
                    with server.turn():
                        first, texts = (Texts(tokenizer, f"{done} {at} {what}") for what in ("first", "measured"))
                        _ask(server, first, [first.question()], 2)  # after a stop; it is not counted
                        for name, value in take(server, texts, settings).items():
                            found.values.setdefault((server.name, name), {})[done] = value
                except ServerFailed as error:
                    found.errors |= {(server.name, name): str(error) for name in names}
                    report.failures.append(f"{server.name}, {names[0]}: {error}")
                if clock() - began_s > settings.limit_s:
                    found.slow.add(case)
        found.discard()
    _report(settings, report, servers, found)


def _report(settings: Settings, report: Report, servers: Sequence[Server], found: _Found) -> None:
    named = [(server.name, name) for _, names in cases(settings) for name in names for server in servers]
    report.rows = [_row(*name, found) for name in named]
    report.more["goals"] = judge(report.rows)
    report.more["servers"] = [_counts(server) for server in servers]
    for title, heads, lines in shown(report.as_json()):
        table = Table(*heads, title=title)
        for line in lines:
            table.add_row(*line)
        report.tables.append(table)


def _row(server: str, what: str, found: _Found) -> dict[str, Any]:
    row: dict[str, Any] = {"server": server, "what": what, "unit": "s" if what in TIMES else "tokens/s"}
    if (server, what) in found.errors:
        return {**row, "error": found.errors[server, what]}
    row["discarded"] = found.discarded[server, what]
    own = found.values[server, what]
    if not own:
        return {**row, "error": "the chunks of its answers came together"}
    row |= {"rounds": len(own), "median": median(own.values()), "least": min(own.values()), "most": max(own.values())}
    if (PEER, what) not in found.errors:
        peer = found.values.get((PEER, what), {})
        if ratios := [value / peer[at] for at, value in own.items() if at in peer]:
            row["ratio"] = median(ratios)
    return row


def _counts(server: Server) -> dict[str, Any]:
    with server.turn():
        return {"server": server.name, "peak_bytes": server.peak_bytes(), "preemptions": server.preemptions()}


# ---------------------------------------------------------------- tables


def shown(record: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yields the tables of a record, for the terminal and the documentation: title, heads, lines."""
    rows = {(row["server"], row["what"]): row for row in record["rows"]}
    names = [each["server"] for each in record["servers"]]
    goals = {goal["what"].partition(JOIN)[0]: goal for goal in record["goals"]}
    lines = []
    for what in dict.fromkeys(what for _, what in rows):
        goal = goals.get(what, {"goal": None, "measured": rows.get((OWN, what), {}).get("ratio"), "met": None})
        ratio, limit = ("–" if goal[key] is None else number(goal[key]) for key in ("measured", "goal"))
        met = {True: "yes", False: "no", None: ""}[goal["met"]]
        unit = next(row["unit"] for (_, own), row in rows.items() if own == what)
        lines.append([f"{what}, {unit}", *(_cell(rows[name, what]) for name in names), ratio, limit, met])
    yield "median (least to most)", ["", *names, f"{OWN} / {PEER}", "goal", "met"], lines

    settings = record["settings"]
    loads, length = settings["loads"], settings["prefix"]
    lines = [[name, *(_step(rows[name, sharing(load, length)], load) for load in loads)] for name in names]
    yield "milliseconds per output token of a request, by load", ["at once", *map(str, loads)], lines

    lines = [
        [
            each["server"],
            show_bytes(each["peak_bytes"]),
            "–" if each["preemptions"] is None else str(each["preemptions"]),
        ]
        for each in record["servers"]
    ]
    yield "over the whole run", ["", "peak memory", "preemptions"], lines


def _cell(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return "failed"
    spread = f"{number(row['least'])} to {number(row['most'])}" if row["rounds"] > 1 else "once"
    discarded = f", {row['discarded']} discarded" if row.get("discarded") else ""
    return f"{number(row['median'])} ({spread}{discarded})"


def _step(row: Mapping[str, Any], load: int) -> str:
    return "failed" if "error" in row else number(1000 * load / row["median"])
