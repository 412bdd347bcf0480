"""How many bits a hit changes: answers of Mainstem, vLLM and transformers, cold, warm, and beside others.

One model in bfloat16, prompts that no server has seen, greedy answers with the log-probabilities of each token. A
prompt is asked twice, alone: cold, and warm, when its pages are there. Then it is asked beside others. What changes is
counted: texts, and sets of log-probabilities of a whole answer. The best tokens of the first position are compared in
numbers, also with those of transformers in float32, which say how exact the others are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import httpx
import torch
from rich.table import Table

from bench.client import ServerFailed
from bench.hosted import SYSTEMS, THREADS, Hosted
from bench.report import Report
from bench.servers import Texts
from mainstem.runtime.models.loading import load_model

_BEST = 5  # tokens of a position whose log-probabilities are asked for
_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        prompts: that each system answers.
        tokens: of a prompt.
        new_tokens: of an answer.
        together: how many prompts are asked at once.
    """

    prompts: int = 48
    tokens: int = 260
    new_tokens: int = 48
    together: tuple[int, ...] = (4, 16)


QUICK = Settings(prompts=4, new_tokens=8, together=(4,))


@dataclass(frozen=True, slots=True)
class Scored:
    """An answer: its text, the log-probability of each token, and those of the best tokens of the first position."""

    text: str
    scores: tuple[float, ...]
    best: Mapping[str, float]


class Subject(Protocol):
    """A system that answers prompts."""

    name: str

    def ask(self, prompts: Sequence[str], new_tokens: int) -> list[Scored]:
        """Answers prompts at once."""


class Served:
    """A server of /v1/completions.

    Args:
        name: of the system.
        url: of the server, without a path.
        body: fields of a request that it needs besides those that all have.
    """

    def __init__(self, name: str, url: str, body: Mapping[str, Any]) -> None:
        self.name, self._url = name, url
        self._body = {name: value for name, value in body.items() if name != "stream_options"}

    def ask(self, prompts: Sequence[str], new_tokens: int) -> list[Scored]:
        """See `Subject`."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self._ask(prompt, new_tokens), prompts))

    def _ask(self, prompt: str, new_tokens: int) -> Scored:
        body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "logprobs": _BEST, **self._body}
        reply = httpx.post(f"{self._url}/v1/completions", json=body, timeout=_LIMIT_S)
        if reply.status_code != 200:
            raise ServerFailed(f"status {reply.status_code}: {reply.text[:200]}")
        choice = reply.json()["choices"][0]
        scores = choice["logprobs"]
        return Scored(choice["text"], tuple(scores["token_logprobs"]), scores["top_logprobs"][0])


class Plain:
    """transformers, whose cache holds all but the last tokens of a prompt when it is asked again. One at a time.

    Args:
        name: in tables.
        dtype: of the model.
    """

    def __init__(self, name: str, dtype: str) -> None:
        self.name = name
        loaded = load_model(dtype=dtype)
        self._model: Any = loaded.model
        self._tokenizer = loaded.tokenizer
        self._seen: set[str] = set()

    def ask(self, prompts: Sequence[str], new_tokens: int) -> list[Scored]:
        """See `Subject`."""
        return [self._ask(prompt, new_tokens) for prompt in prompts]

    def _ask(self, prompt: str, new_tokens: int) -> Scored:
        tokens = torch.tensor([self._tokenizer.encode(prompt)])
        cut = (tokens.shape[1] - 1) // 16 * 16 if prompt in self._seen else 0
        self._seen.add(prompt)
        cache, made, scores, best = None, [], [], {}
        with torch.inference_mode():
            if cut:
                cache = self._model(input_ids=tokens[:, :cut], use_cache=True).past_key_values
            ahead = tokens[:, cut:]
            for _ in range(new_tokens):
                output = self._model(input_ids=ahead, past_key_values=cache, use_cache=True)
                cache, row = output.past_key_values, output.logits[0, -1].float().log_softmax(-1)
                if not made:
                    top = row.topk(_BEST)
                    best = {self._tokenizer.decode([int(i)]): float(x) for x, i in zip(*top, strict=True)}
                made.append(int(row.argmax()))
                scores.append(float(row[made[-1]]))
                ahead = torch.tensor([made[-1:]])
        return Scored(str(self._tokenizer.decode(made)), tuple(scores), best)


def run(settings: Settings, report: Report) -> None:
    """Starts the servers that are installed, one after another, and measures them and transformers."""
    exact = Plain("transformers, float32", "float32")
    texts = Texts(exact._tokenizer, "bits")
    prompts = [texts.facts(settings.tokens) + texts.question() for _ in range(settings.prompts)]
    report.settings.update(asdict(settings), dtype="bfloat16", threads=THREADS)
    torch.set_num_threads(THREADS)
    report.progress("bits: transformers in float32")
    best = [scored.best for scored in exact.ask(prompts, 1)]
    model = Path(str(exact._model.config.name_or_path))
    del exact
    with TemporaryDirectory() as logs:
        for system in SYSTEMS[:2]:
            if (version := system.version()) is None:
                report.notes.append(f"{system.name} is left out: {system.python} lacks {' or '.join(system.packages)}")
                continue
            report.versions[f"{system.packages[0]}, serving"] = version
            report.progress(f"bits: {system.name} {version}")
            with ExitStack() as stack:
                try:
                    server = stack.enter_context(Hosted(system, model, Path(logs, system.name), stopped=False))
                    body = {**system.body, "model": model.name}
                    report.rows += measure(settings, Served(system.name, server.url, body), prompts, best)
                except ServerFailed as error:
                    report.failures.append(f"{system.name}: {error}")
    report.progress("bits: transformers in bfloat16")
    report.rows += measure(settings, Plain("transformers", "bfloat16"), prompts, best)
    report.tables.append(table(report.rows))


def measure(
    settings: Settings, subject: Subject, prompts: Sequence[str], exact: Sequence[Mapping[str, float]]
) -> list[dict[str, Any]]:
    """Returns a row for each number of a system: what it is, and its value.

    Args:
        settings: as above.
        subject: that has seen none of the prompts.
        prompts: to ask.
        exact: the best tokens of each prompt's first position, in float32.
    """
    new = settings.new_tokens
    cold, warm = ([subject.ask([prompt], new)[0] for prompt in prompts] for _ in range(2))
    values = {
        f"texts of {len(prompts)} changed by a hit": _texts(cold, warm),
        f"sets of log-probabilities of {len(prompts)} changed by a hit": _sets(cold, warm),
    }
    changes = [change for a, b in zip(cold, warm, strict=True) for change in differences(a.best, b.best)]
    values["best of the first token, cold against warm: mean"] = mean(changes)
    values["best of the first token, cold against warm: largest"] = max(changes)
    for name, answers in (("cold", cold), ("warm", warm)):
        errors = [error for a, best in zip(answers, exact, strict=True) for error in differences(a.best, best)]
        values[f"the same against float32: {name}, mean"] = mean(errors)
    for count in settings.together:
        groups = [prompts[at : at + count] for at in range(0, len(prompts), count)]
        beside = [scored for group in groups for scored in subject.ask(group, new)]
        values[f"texts changed by being one of {count} at once"] = _texts(warm, beside)
        values[f"sets of log-probabilities changed by being one of {count} at once"] = _sets(warm, beside)
    return [{"system": subject.name, "what": what, "value": value} for what, value in values.items()]


def differences(one: Mapping[str, float], other: Mapping[str, float]) -> list[float]:
    """Returns how far the log-probabilities are apart of tokens that are among the best of both."""
    return [abs(one[token] - other[token]) for token in one.keys() & other.keys()]


def _texts(one: Sequence[Scored], other: Sequence[Scored]) -> int:
    return sum(a.text != b.text for a, b in zip(one, other, strict=True))


def _sets(one: Sequence[Scored], other: Sequence[Scored]) -> int:
    return sum(a.scores != b.scores for a, b in zip(one, other, strict=True))


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a column for each system."""
    systems = list(dict.fromkeys(row["system"] for row in rows))
    values = {(row["system"], row["what"]): row["value"] for row in rows}
    made = Table("what changes", *systems, title="Bits that a hit and a batch change")
    for what in dict.fromkeys(row["what"] for row in rows):
        cells = [values[system, what] for system in systems]
        made.add_row(what, *(str(cell) if isinstance(cell, int) else f"{cell:.3g}" for cell in cells))
    return made
