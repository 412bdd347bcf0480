"""The demo: what the cache saves, shown on a real model, in one of two stories.

`run` asks five questions about a document. Each question is answered twice: cold, with an empty cache, so that the
whole prompt is computed; and warm, after the document alone was computed, so that its pages are cached.
Uses the engine as any client could.

    prompt = [ template | instruction | document | template | question | template ]
              '---------- shared, computed once -----------' '----- computed ----'

`run_agents` lets an agent work: in each step it gets the result of a tool and says what it learned. Its history grows,
and each step sends all of it. The steps run warm, one after another; then each prompt once more, cold.
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
from mainstem.runtime.request import Delta, Request
from mainstem.runtime.text.prompts import Prompts
from mainstem.settings.engine import SamplingParams
from mainstem.units import counted

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

TOOLS = (
    ("read_page(number)", "returns a page of the guide to the town, as plain text"),
    ("search(words)", "returns the numbers of the pages that have all of these words, at most ten, the best one first"),
    ("timetable(line, day)", "returns the departures of a ferry or a bus on that day, with the time that each takes"),
    ("weather(day)", "returns the forecast for that day: hours of sun, rain in millimetres, wind and its direction"),
    ("opening_hours(place, day)", "returns when a museum, a shop or an office is open on that day, or that it is not"),
    ("price(place, people)", "returns what the visit costs for these people, with reductions for children"),
    ("reserve(place, day, people)", "reserves a table or tickets, and returns a number that confirms it"),
    ("note(text)", "keeps a line for the plan; notes are shown to the family at the end, in their order"),
)
"""The tools in the agent's system prompt."""

_AGENT = (
    "You are an agent that plans a day in a town for a family of two adults and two children. You work in steps. After"
    " each step you get the result of the tool that you called. Say in one sentence what you learned from it. Never"
    " guess what a tool can say, never call one twice for the same thing, and spend no more than 80 in all.\n\nTools:\n"
)
_INSTRUCTION = "Answer each question about the following text in one short sentence.\n\n"
_PARAMS = SamplingParams(max_tokens=32, temperature=0.0)
_NO_ANSWER = SamplingParams(max_tokens=0)
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
    """The measurements of the demo; the times are medians over the questions.

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
class Step:
    """One step of the agent.

    Args:
        call: the tool whose result came back.
        cold_ttft_s: time from submit to the first event, with nothing cached.
        warm_ttft_s: the same after the steps before.
        prompt_tokens: tokens of the history.
        reused_tokens: those that the warm run did not compute.
        answer: what the agent said in the warm run; the next step's history has it.
        agree: whether the cold run gave the same tokens.
    """

    call: str
    cold_ttft_s: float
    warm_ttft_s: float
    prompt_tokens: int
    reused_tokens: int
    answer: str
    agree: bool


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The measurements of the agent's steps.

    Args:
        model: the name of the model.
        dtype: number format of weights and KV.
        threads: number of threads that compute.
        cold_s: the sum of all times to a first token, each with nothing cached.
        warm_s: the same after the steps before.
        speedup: `cold_s` / `warm_s`.
        prompt_tokens: the sum over all steps.
        reused_tokens: the sum over the warm steps.
        answers_agree: whether every step got the same tokens cold and warm.
        steps: the results of each step.
        tree: the cache's tree after the warm steps, as text.
    """

    model: str
    dtype: str
    threads: int
    cold_s: float
    warm_s: float
    speedup: float
    prompt_tokens: int
    reused_tokens: int
    answers_agree: bool
    steps: tuple[Step, ...]
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
    shared = prompts[0][: _shared(prompts)]
    total = 2 * len(QUESTIONS) + 1

    def step(done: int, prompt: NDArray[np.int32], params: SamplingParams = _PARAMS) -> _Run:
        result = _ask(engine, prompt, clock, params)
        progress("asking", done, total)
        return result

    cold = []
    for done, prompt in enumerate(prompts, 1):
        engine.flush()
        cold.append(step(done, prompt))
    engine.flush()
    step(len(QUESTIONS) + 1, shared, _NO_ANSWER)  # so that the cache has the document and none of the questions
    warm = [step(done, prompt) for done, prompt in enumerate(prompts, len(QUESTIONS) + 2)]
    return _report(engine, threads, len(shared), prompts, cold, warm)


def run_agents(
    engine: Engine,
    *,
    threads: int,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> AgentReport:
    """Runs the agent's steps, warm and then cold, and returns the measurements.

    Args:
        engine: an idle engine; its cache is flushed.
        threads: number of threads that compute, for the report.
        clock: returns seconds, monotonic.
        progress: called as `progress(stage, done, total)`.

    Raises:
        BadTokens: the history does not fit the model.
    """
    results = _sections()
    prompts_of = Prompts(engine.tokenizer, engine.max_context)
    messages = [{"role": "system", "content": _AGENT + "".join(f"- {name}: {what}\n" for name, what in TOOLS)}]
    prompts: list[NDArray[np.int32]] = []
    warm: list[_Run] = []
    engine.flush()
    for number, result in enumerate(results, 1):
        messages.append({"role": "user", "content": f"Result of {_call(number)}:\n\n{result}"})
        prompts.append(prompts_of.conversation(messages))
        warm.append(_ask(engine, prompts[-1], clock))
        messages.append({"role": "assistant", "content": warm[-1].text})
        progress("asking", number, 2 * len(results))
    tree, cold = engine.tree(), []
    for number, prompt in enumerate(prompts, len(results) + 1):
        engine.flush()
        cold.append(_ask(engine, prompt, clock))
        progress("asking", number, 2 * len(results))
    steps = tuple(
        Step(
            call=_call(number),
            cold_ttft_s=before.ttft_s,
            warm_ttft_s=after.ttft_s,
            prompt_tokens=len(prompt),
            reused_tokens=after.cached_tokens,
            answer=after.text,
            agree=before.tokens == after.tokens,
        )
        for number, (prompt, before, after) in enumerate(zip(prompts, cold, warm, strict=True), 1)
    )
    return _agent_report(engine, threads, steps, tree)


def show_agents(report: AgentReport, console: Console) -> None:
    """Prints a report for people: a table, what the agent said, the tree, and last the figure that matters most."""
    from rich.table import Table

    table = Table(title=f"{_setting(report)}: time to each step's first token")
    table.add_column("result of")
    for heading in ("cold", "warm", "sooner", "reused"):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in report.steps:
        sooner = f"{step.cold_ttft_s / step.warm_ttft_s:.1f}x"
        reused = f"{step.reused_tokens} of {step.prompt_tokens}"
        table.add_row(step.call, _ms(step.cold_ttft_s), _ms(step.warm_ttft_s), sooner, reused)
    console.print(table)
    for step in report.steps:
        console.print(f"[bold]{step.call}[/bold]")
        console.print(f"  {step.answer.strip()}", markup=False)
    console.print("\nWhat the cache holds after the last step:\n", markup=False)
    console.print(report.tree, markup=False, soft_wrap=True)
    same = "the same answers" if report.answers_agree else f"some answers differ ({report.dtype} rounding)"
    console.print(
        f"The agent waited [bold]{report.speedup:.1f} times less[/bold] for its first tokens:"
        f" {_ms(report.warm_s)} instead of {_ms(report.cold_s)} in {len(report.steps)} steps,"
        f" {report.reused_tokens} of {report.prompt_tokens} tokens reused, {same}.",
        soft_wrap=True,
    )


def show(report: Report, console: Console) -> None:
    """Prints a report for people: a table, the answers, the tree, and last the figure that matters most."""
    from rich.table import Table

    table = Table(title=f"{_setting(report)}: time to the first token")
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


def _setting(report: Report | AgentReport) -> str:
    return f"{report.model}, {report.dtype}, {counted(report.threads, 'thread')}"


def _guide() -> str:
    return files("mainstem").joinpath("demo.txt").read_text(encoding="utf-8").strip()


def _sections() -> list[str]:
    """Returns the guide's sections: a heading, and the paragraphs up to the next one."""
    sections: list[str] = []
    for paragraph in _guide().split("\n\n"):
        if sections and "." not in sections[-1]:
            sections[-1] += f"\n\n{paragraph}"
        else:
            sections.append(paragraph)
    return sections


def _call(number: int) -> str:
    return f"read_page({number})"


def _agent_report(engine: Engine, threads: int, steps: tuple[Step, ...], tree: str) -> AgentReport:
    cold_s, warm_s = sum(step.cold_ttft_s for step in steps), sum(step.warm_ttft_s for step in steps)
    return AgentReport(
        model=engine.name,
        dtype=str(engine.dtype).removeprefix("torch."),
        threads=threads,
        cold_s=cold_s,
        warm_s=warm_s,
        speedup=cold_s / warm_s,
        prompt_tokens=sum(step.prompt_tokens for step in steps),
        reused_tokens=sum(step.reused_tokens for step in steps),
        answers_agree=all(step.agree for step in steps),
        steps=steps,
        tree=tree,
    )


def _document(engine: Engine, tokens: int | None) -> str:
    text = _guide()
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


def _ask(
    engine: Engine, prompt: NDArray[np.int32], clock: Callable[[], float], params: SamplingParams = _PARAMS
) -> _Run:
    submitted_s = clock()
    events: Iterator[Delta] = iter(engine.submit(Request(prompt, params)))
    first = next(events)
    ttft_s = clock() - submitted_s
    deltas = [first, *events]
    usage = deltas[-1].usage
    if usage is None or deltas[-1].error:
        raise MainstemError(f"the generation failed: {deltas[-1].error or 'the engine gave up'}")
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return _Run(ttft_s, tokens, "".join(delta.text for delta in deltas), usage.cached_tokens)


def _report(
    engine: Engine,
    threads: int,
    prefix_tokens: int,
    prompts: Sequence[NDArray[np.int32]],
    cold: Sequence[_Run],
    warm: Sequence[_Run],
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
        for question, prompt, before, after in zip(QUESTIONS, prompts, cold, warm, strict=True)
    )
    cold_s, warm_s = median(q.cold_ttft_s for q in questions), median(q.warm_ttft_s for q in questions)
    return Report(
        model=engine.name,
        dtype=str(engine.dtype).removeprefix("torch."),
        threads=threads,
        prefix_tokens=prefix_tokens,
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
