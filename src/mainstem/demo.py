"""The demo: what the cache saves, shown on a real model.

Asks five questions about a document. Each question is answered twice: cold, with an empty cache, so that the whole
prompt is computed; and warm, after the prompt of another question was computed, so that the document's pages are
cached. Uses the engine as any client could.

    prompt = [ template | instruction | document | template | question | template ]
              '---------- shared, computed once -----------' '----- computed ----'
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument, MainstemError
from mainstem.runtime.prompts import Prompts
from mainstem.runtime.request import Delta, Request
from mainstem.settings.engine import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from mainstem.runtime.engine import Engine

QUESTIONS = (
    "In which year was the town founded?",
    "How tall is the lighthouse?",
    "What is the name of the ferry?",
    "Who is the harbour master?",
    "How many books does the library own?",
)
OTHER_QUESTION = "What is the largest festival called?"
"""Asked before the warm runs, so that the cache has the document but none of the five questions."""

_INSTRUCTION = "Answer each question about the following text in one short sentence.\n\n"
_PARAMS = SamplingParams(max_tokens=32, temperature=0.0)
_ROOM = 128  # positions for the template, the instruction, a question and its answer


@dataclass(frozen=True, slots=True)
class Question:
    """One question, asked twice.

    Args:
        question: the text of the question.
        cold_ttft_s: time from submit to the first event, with nothing cached.
        warm_ttft_s: the same, with the document cached.
        speedup: `cold_ttft_s` / `warm_ttft_s`.
        prompt_tokens: tokens of the whole prompt.
        reused_tokens: prompt tokens that the warm run did not compute.
        answer: the answer of the warm run.
        cold_answer: the answer of the cold run.
        agree: whether the two answers have the same tokens.
    """

    question: str
    cold_ttft_s: float
    warm_ttft_s: float
    speedup: float
    prompt_tokens: int
    reused_tokens: int
    answer: str
    cold_answer: str
    agree: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What the demo measured; the times are medians over the questions.

    Args:
        model: the name of the model.
        dtype: number format of weights and KV.
        threads: number of threads that compute.
        prefix_tokens: tokens that all prompts share.
        cold_ttft_s: time to the first token with nothing cached.
        warm_ttft_s: time to the first token with the document cached.
        speedup: `cold_ttft_s` / `warm_ttft_s`.
        reused_tokens: median over the warm runs.
        answers_agree: whether every question got the same tokens cold and warm.
        questions: the results of each question.
        tree: the cache's tree at the end, as text.
    """

    model: str
    dtype: str
    threads: int
    prefix_tokens: int
    cold_ttft_s: float
    warm_ttft_s: float
    speedup: float
    reused_tokens: int
    answers_agree: bool
    questions: tuple[Question, ...]
    tree: str


@dataclass(frozen=True, slots=True)
class _Run:
    """One answer, and the time to its first event."""

    ttft_s: float
    tokens: tuple[int, ...]
    text: str
    cached_tokens: int


def run(
    engine: Engine,
    *,
    threads: int,
    prefix_tokens: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:
    """Asks all questions, cold and warm, and returns the measurements.

    Args:
        engine: an idle engine; its cache is flushed.
        threads: number of threads that compute, for the report.
        prefix_tokens: length of the document, which is cut or repeated to fit; None: the document as it is.
        clock: returns seconds, monotonic.
        progress: called as `progress(stage, done, total)`.

    Raises:
        BadArgument: `prefix_tokens` is less than 1, or does not fit the model.
    """
    document = _document(engine, prefix_tokens)
    prompts = [_prompt(engine, document, question) for question in QUESTIONS]
    other = _prompt(engine, document, OTHER_QUESTION)
    total = 2 * len(QUESTIONS) + 1

    def step(done: int, prompt: NDArray[np.int32]) -> _Run:
        result = _ask(engine, prompt, clock)
        progress("asking", done, total)
        return result

    cold = []
    for done, prompt in enumerate(prompts, 1):
        engine.flush()
        cold.append(step(done, prompt))
    engine.flush()
    step(len(QUESTIONS) + 1, other)
    warm = [step(done, prompt) for done, prompt in enumerate(prompts, len(QUESTIONS) + 2)]
    return _report(engine, threads, [other, *prompts], cold, warm)


def show(report: Report, console: Console) -> None:
    """Prints a report for people: a table, the answers, the tree, and last the figure that matters most."""
    from rich.table import Table

    table = Table(title=f"{report.model}, {report.dtype}, {report.threads} threads: time to the first token")
    table.add_column("question")
    for heading in ("cold", "warm", "sooner", "reused"):
        table.add_column(heading, justify="right", no_wrap=True)
    for q in report.questions:
        reused = f"{q.reused_tokens} of {q.prompt_tokens}"
        table.add_row(q.question, _ms(q.cold_ttft_s), _ms(q.warm_ttft_s), f"{q.speedup:.1f}x", reused)
    console.print(table)
    for q in report.questions:
        console.print(f"[bold]{q.question}[/bold]")
        console.print(f"  {q.answer.strip()}", markup=False)
        if not q.agree:
            console.print(f"  (the cold answer, in {report.dtype}, was: {q.cold_answer.strip()})", markup=False)
    console.print("\nWhat the cache holds now:\n", markup=False)
    console.print(report.tree, markup=False, soft_wrap=True)
    same = "the same answers" if report.answers_agree else f"some answers differ ({report.dtype} rounding)"
    console.print(
        f"The first token came [bold]{report.speedup:.1f} times sooner[/bold]: {_ms(report.warm_ttft_s)} instead of"
        f" {_ms(report.cold_ttft_s)}, {report.reused_tokens} tokens reused, {same}.",
        soft_wrap=True,
    )


def _document(engine: Engine, tokens: int | None) -> str:
    text = files("mainstem").joinpath("demo.txt").read_text(encoding="utf-8").strip()
    limit = engine.max_context - _ROOM
    if tokens is None:
        tokens = min(len(_encode(engine, text)), limit)
    if not 1 <= tokens <= limit:
        raise BadArgument("prefix_tokens", tokens, f"from 1 to {limit} for this model")
    ids = _encode(engine, text)
    while len(ids) < tokens:
        ids += _encode(engine, "\n\n" + text)
    return str(engine.tokenizer.decode(ids[:tokens]))


def _encode(engine: Engine, text: str) -> list[int]:
    return list(engine.tokenizer.encode(text, add_special_tokens=False))


def _prompt(engine: Engine, document: str, question: str) -> NDArray[np.int32]:
    messages = [{"role": "system", "content": _INSTRUCTION + document}, {"role": "user", "content": question}]
    return Prompts(engine.tokenizer, engine.max_context).conversation(messages)


def _ask(engine: Engine, prompt: NDArray[np.int32], clock: Callable[[], float]) -> _Run:
    submitted_s = clock()
    events: Iterator[Delta] = iter(engine.submit(Request(prompt, _PARAMS)))
    first = next(events)
    ttft_s = clock() - submitted_s
    deltas = [first, *events]
    usage = deltas[-1].usage
    if usage is None or deltas[-1].error:
        raise MainstemError(f"the generation failed: {deltas[-1].error or 'the engine gave up'}")
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return _Run(ttft_s, tokens, "".join(delta.text for delta in deltas), usage.cached_tokens)


def _report(
    engine: Engine, threads: int, prompts: Sequence[NDArray[np.int32]], cold: Sequence[_Run], warm: Sequence[_Run]
) -> Report:
    questions = tuple(
        Question(
            question=question,
            cold_ttft_s=before.ttft_s,
            warm_ttft_s=after.ttft_s,
            speedup=before.ttft_s / after.ttft_s,
            prompt_tokens=len(prompt),
            reused_tokens=after.cached_tokens,
            answer=after.text,
            cold_answer=before.text,
            agree=before.tokens == after.tokens,
        )
        for question, prompt, before, after in zip(QUESTIONS, prompts[1:], cold, warm, strict=True)
    )
    cold_s, warm_s = median(q.cold_ttft_s for q in questions), median(q.warm_ttft_s for q in questions)
    return Report(
        model=engine.name,
        dtype=str(engine.dtype).removeprefix("torch."),
        threads=threads,
        prefix_tokens=_shared(prompts),
        cold_ttft_s=cold_s,
        warm_ttft_s=warm_s,
        speedup=cold_s / warm_s,
        reused_tokens=int(median(q.reused_tokens for q in questions)),
        answers_agree=all(q.agree for q in questions),
        questions=questions,
        tree=engine.tree(),
    )


def _shared(prompts: Sequence[NDArray[np.int32]]) -> int:
    """Returns the number of tokens that all prompts begin with."""
    shortest = min(len(prompt) for prompt in prompts)
    heads = np.stack([prompt[:shortest] for prompt in prompts])
    differ = np.flatnonzero((heads != heads[0]).any(axis=0))
    return int(differ[0]) if len(differ) else shortest


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
