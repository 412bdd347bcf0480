"""How many bits a hit changes: answers of Mainstem, vLLM and transformers, cold, warm, and beside others.

One model in bfloat16, and in float32 by Mainstem; prompts that no server has seen, greedy answers with the
log-probabilities of each token. A prompt is asked twice, alone: cold, and warm, when its pages are there. Then it is
asked beside others. Changes are counted: of texts, and of sets of log-probabilities of an answer. The best tokens of
the first position are compared in numbers, also with those of transformers in float32, which say how exact the others
are. So do the log-probabilities of a longer text, the documentation of this repository: token by token, against
float32's. Servers of Mainstem that computed none of the prompts then answer them: from a store after a restart, from a
peer, from a prefill replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import httpx
import torch
from rich.table import Table
from rigs.servers import free_port

from bench.client import ServerFailed
from bench.codec import texts_of_documentation, tokens_of
from bench.hosted import SYSTEMS, THREADS, Hosted, System
from bench.report import Report
from bench.servers import Texts
from mainstem.runtime.models.loading import load_model

_MAINSTEM, _VLLM = SYSTEMS[:2]
_SUBJECTS = (
    _MAINSTEM,
    replace(_MAINSTEM, name="Mainstem, float32", command=_MAINSTEM.command.replace("bfloat16", "float32")),
    _VLLM,
)
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
        passages: of the longer text.
        length: tokens of each passage; its first one has no log-probability.
    """

    prompts: int = 48
    tokens: int = 260
    new_tokens: int = 48
    together: tuple[int, ...] = (4, 16)
    passages: int = 50
    length: int = 1025


QUICK = Settings(prompts=4, new_tokens=8, together=(4,), passages=2)


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

    def read(self, passage: Sequence[int]) -> list[float]:
        """Returns the log-probabilities of all tokens of a text but the first one."""


class Served:
    """A server of /v1/completions.

    Args:
        name: of the system.
        url: of the server, without a path.
        body: fields of a request that it needs besides those that all have.

    Attributes:
        prompt_tokens, cached_tokens: of all answers so far.
    """

    def __init__(self, name: str, url: str, body: Mapping[str, Any]) -> None:
        self.name, self.url = name, url
        self._body = {name: value for name, value in body.items() if name != "stream_options"}
        self.prompt_tokens = self.cached_tokens = 0

    def ask(self, prompts: Sequence[str], new_tokens: int) -> list[Scored]:
        """See `Subject`."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self._ask(prompt, new_tokens), prompts))

    def read(self, passage: Sequence[int]) -> list[float]:
        """See `Subject`."""
        scores = self._choice(prompt=passage, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
        return [each[str(token)]["logprob"] for each, token in zip(scores[1:], passage[1:], strict=True)]

    def _choice(self, **fields: object) -> Any:
        reply = httpx.post(f"{self.url}/v1/completions", json={**fields, **self._body}, timeout=_LIMIT_S)
        if reply.status_code != 200:
            raise ServerFailed(f"status {reply.status_code}: {reply.text[:200]}")
        answer = reply.json()
        self.prompt_tokens += answer["usage"]["prompt_tokens"]
        self.cached_tokens += (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return answer["choices"][0]

    def _ask(self, prompt: str, new_tokens: int) -> Scored:
        choice = self._choice(prompt=prompt, max_tokens=new_tokens, temperature=0, logprobs=_BEST)
        scores = choice["logprobs"]
        return Scored(choice["text"], tuple(scores["token_logprobs"]), scores["top_logprobs"][0])


Start = Callable[[str], AbstractContextManager[tuple[Served, Callable[[], object]]]]
"""Starts a server of Mainstem with flags; gives it, and what waits until nothing moves between its tiers."""

_READS = "--host-bytes 1GiB --prefetch wait_complete --prefetch-min-tokens 16"
_READ_SHARE = 0.9  # of the prompts, that must come from elsewhere


@contextmanager
def _after_a_restart(start: Start, folder: Path, prompts: Sequence[str]) -> Iterator[Served]:
    flags = f"{_READS} --storage file:{folder}"
    with start(flags) as (first, settle):
        _fill(first, settle, prompts)
    with start(flags) as (second, _):
        yield second


@contextmanager
def _beside_a_peer(start: Start, folder: Path, prompts: Sequence[str]) -> Iterator[Served]:
    where = f"127.0.0.1:{free_port()}"
    with start(f"{_READS} --peer-listen {where} --peer-share 1") as (first, settle):
        _fill(first, settle, prompts)
        with start(f"{_READS} --peers {where} --peer-timeout-s 30") as (second, _):
            yield second


@contextmanager
def _after_a_prefill_replica(start: Start, folder: Path, prompts: Sequence[str]) -> Iterator[Served]:
    where = f"127.0.0.1:{free_port()}"
    apart = f"--peers {where} --peer-timeout-s 30 --prefill-min-bytes 0 --role decode"
    with (
        start(f"--host-bytes 1GiB --role prefill --peer-listen {where} --peer-share 1") as (first, _),
        start(f"{_READS} {apart} --prefill-url {first.url}") as (second, _),
    ):
        yield second


def _fill(server: Served, settle: Callable[[], object], prompts: Sequence[str]) -> None:
    for prompt in prompts:
        server.ask([prompt], 1)
    settle()


ELSEWHERE = {
    "a store after a restart": _after_a_restart,
    "a peer": _beside_a_peer,
    "a prefill replica": _after_a_prefill_replica,
}
"""By where the pages of prompts come from: gives a server that has none of them, and finds all of them there."""


class Plain:
    """transformers, whose cache holds all but the last tokens of a prompt when it is asked again. One at a time.

    Args:
        name: in tables.
        dtype: of the model.
    """

    def __init__(self, name: str, dtype: str) -> None:
        self.name = name
        self.loaded = load_model(dtype=dtype)
        self._model: Any = self.loaded.model
        self._tokenizer = self.loaded.tokenizer
        self._seen: set[str] = set()

    def ask(self, prompts: Sequence[str], new_tokens: int) -> list[Scored]:
        """See `Subject`."""
        return [self._ask(prompt, new_tokens) for prompt in prompts]

    def read(self, passage: Sequence[int]) -> list[float]:
        """See `Subject`."""
        tokens = torch.tensor([passage])
        with torch.inference_mode():
            rows = self._model(input_ids=tokens[:, :-1], use_cache=False).logits[0].float().log_softmax(-1)
        found: list[float] = rows.gather(1, tokens[0, 1:, None])[:, 0].tolist()
        return found

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
    text, size = tokens_of(exact.loaded, texts_of_documentation()).tolist(), settings.length
    passages = [text[at * size :][:size] for at in range(min(settings.passages, len(text) // size))]
    read = [exact.read(passage) for passage in passages]
    model = Path(str(exact._model.config.name_or_path))
    del exact
    with TemporaryDirectory() as logs:
        for system in _SUBJECTS:
            if (version := system.version()) is None:
                report.notes.append(f"{system.name} is left out: {system.python} lacks {' or '.join(system.packages)}")
                continue
            report.versions[f"{system.packages[0]}, serving"] = version
            report.progress(f"bits: {system.name} {version}")
            with ExitStack() as stack:
                try:
                    served, _ = stack.enter_context(_served(system, model, Path(logs, system.name)))
                    cold = _alone(served, prompts, settings.new_tokens)
                    report.rows += measure(settings, served, prompts, best, cold) + precision(served, passages, read)
                    stack.close()
                    if system.packages == _MAINSTEM.packages:
                        log = Path(logs, "elsewhere")
                        start = partial(_with_flags, system, model, log)
                        report.rows += elsewhere(served.name, prompts, cold, start, report)
                except ServerFailed as error:
                    report.failures.append(f"{system.name}: {error}")
    report.progress("bits: transformers in bfloat16")
    plain = Plain("transformers", "bfloat16")
    cold = _alone(plain, prompts, settings.new_tokens)
    report.rows += measure(settings, plain, prompts, best, cold) + precision(plain, passages, read)
    report.tables.append(table(report.rows))


@contextmanager
def _served(system: System, model: Path, log: Path) -> Iterator[tuple[Served, Callable[[], object]]]:
    with Hosted(system, model, log, stopped=False) as server:
        yield Served(system.name, server.url, {**system.body, "model": model.name}), server.settle


def _with_flags(
    system: System, model: Path, log: Path, flags: str
) -> AbstractContextManager[tuple[Served, Callable[[], object]]]:
    return _served(replace(system, command=f"{system.command} {flags}"), model, log)


def _alone(subject: Subject, prompts: Sequence[str], new_tokens: int) -> list[Scored]:
    return [subject.ask([prompt], new_tokens)[0] for prompt in prompts]


def elsewhere(
    name: str, prompts: Sequence[str], cold: Sequence[Scored], start: Start, report: Report
) -> list[dict[str, Any]]:
    """Returns rows of the answers of servers that computed none of the prompts.

    Args:
        name: of the system.
        prompts: to ask.
        cold: the answers of a server that computed all of them.
        start: starts servers.
        report: gets a failure where a server did not find the prompts.
    """
    values: dict[str, float] = {}
    for where, servers in ELSEWHERE.items():
        report.progress(f"bits: from {where}")
        with TemporaryDirectory() as folder, servers(start, Path(folder), prompts) as server:
            found = _alone(server, prompts, len(cold[0].scores))
        values[f"texts changed by pages from {where}"] = _texts(cold, found)
        values[f"sets of log-probabilities changed by pages from {where}"] = _sets(cold, found)
        if server.cached_tokens < _READ_SHARE * server.prompt_tokens:
            report.failures.append(
                f"{where}: {server.cached_tokens} of {server.prompt_tokens} prompt tokens were found"
            )
    return [{"system": name, "what": what, "value": value} for what, value in values.items()]


def measure(
    settings: Settings,
    subject: Subject,
    prompts: Sequence[str],
    exact: Sequence[Mapping[str, float]],
    cold: Sequence[Scored],
) -> list[dict[str, Any]]:
    """Returns a row for each number of a system: what it is, and its value.

    Args:
        settings: as above.
        subject: that has seen the prompts once.
        prompts: to ask.
        exact: the best tokens of each prompt's first position, in float32.
        cold: what it answered.
    """
    new = settings.new_tokens
    warm = _alone(subject, prompts, new)
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
    return _rows(subject, values)


def precision(
    subject: Subject, passages: Sequence[Sequence[int]], exact: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    """Returns rows of how far the log-probabilities of a text's tokens are from float32's.

    Args:
        subject: that reads.
        passages: tokens of the text.
        exact: the log-probabilities in float32 of all tokens but the first, for each passage.
    """
    pairs = zip((subject.read(passage) for passage in passages), exact, strict=True)
    changes = [a - b for own, best in pairs for a, b in zip(own, best, strict=True)]
    text = f"a text of {len(changes):,} tokens against float32"
    values = {
        f"{text}: log-probabilities, mean distance": mean(map(abs, changes)),
        f"{text}: perplexity, %": 100 * math.expm1(-mean(changes)),
        f"{text}: perplexity, standard error of the same": 100 * stdev(changes) / math.sqrt(len(changes)),
    }
    return _rows(subject, values)


def _rows(subject: Subject, values: Mapping[str, float]) -> list[dict[str, Any]]:
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
        cells = [values.get((system, what), "–") for system in systems]
        made.add_row(what, *(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    return made
