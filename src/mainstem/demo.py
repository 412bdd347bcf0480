"""The demo: the time that the cache saves on a real model, in one of two stories.

`run` asks five questions about a document. Each question is answered twice: cold, with an empty cache, so that the
whole prompt is computed; and warm, after the document alone was computed, so that its pages are cached.
Uses the engine as any client could.

    prompt = [ template | instruction | document | template | question | template ]
              '---------- shared, computed once -----------' '----- computed ----'

`run_agents` lets an agent work: in each step it gets the result of a tool and says what it learned. Its history grows,
and each step sends all of it, after a system prompt that begins with the time. A rule moves the time behind the last
message, as `mainstem serve --prompt-rules` does. The steps run warm, one after another: first with the rule, then as
the agent sent them. The prompts with the rule run once more, cold.

    as sent          [ 09:30:14 | instructions | result | answer | result ]    nothing after the time is found
    with the rule    [ instructions | result, 09:30:07 | answer | result, 09:30:14 ]
                       '-------- found: of the step before --------'
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument, MainstemError
from mainstem.imports import load_package
from mainstem.prompt_rules.notes import Notes
from mainstem.prompt_rules.rewriting import rewritten
from mainstem.prompt_rules.rule_file import rules_of
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

_INSTRUCTION = "Answer each question about the following text in one short sentence.\n\n"
_PARAMS = SamplingParams(max_tokens=32, temperature=0.0, logprobs=0)
_NO_ANSWER = SamplingParams(max_tokens=0)
_FIRST = SamplingParams(max_tokens=1, temperature=0.0)
_BEGIN, _STEP = datetime(2026, 1, 2, 9, 30, tzinfo=UTC), timedelta(seconds=7)  # of the agent's clock
_RULE = r"""
[[rule]]
name = "clock"
action = "move"
match = 'It is \d\d:\d\d:\d\d\.\n\n'
example = "It is 12:30:59.\n\n"
note = "\n\n[{match}]"
"""
_ROOM = 128  # positions for the template, the instruction, a question and its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One prompt that is answered twice: cold, with nothing cached, and warm, with what came before it cached.

    Args:
        cold_ttft_s, warm_ttft_s: time from submit to the first event of each run.
        prompt_tokens: tokens of the whole prompt.
        reused_tokens: prompt tokens that the warm run did not compute.
        answer: the answer of the warm run.
        agree: whether both answers have the same tokens.
        same_bits: whether the log-probabilities of these are the same numbers, too.
    """

    cold_ttft_s: float
    warm_ttft_s: float
    prompt_tokens: int
    reused_tokens: int
    answer: str
    agree: bool
    same_bits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Turn):
    """One question about the document.

    Args:
        question: the text of the question.
        speedup: `cold_ttft_s` / `warm_ttft_s`.
        cold_answer: the answer of the cold run.
    """

    question: str
    speedup: float
    cold_answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Turn):
    """One step of the agent, with the rule; the history of the next step has its answer.

    Args:
        call: the tool whose result came back.
        sent_ttft_s: time to the first event as the agent sent it, with what came before in the cache.
        sent_reused_tokens: prompt tokens that were not computed then.
    """

    call: str
    sent_ttft_s: float
    sent_reused_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of a story.

    Args:
        model: the name of the model.
        dtype: number format of weights and KV.
        threads: number of threads that compute.
        speedup: the time to a first token when cold, or of an agent as sent, divided by that when warm.
        reused_tokens: prompt tokens that were not computed: the median of the questions, or the sum of the steps.
        answers_agree: whether every turn got the same tokens cold and warm.
        bits_agree: whether all log-probabilities were the same numbers, too.
        tree: the cache's tree after the warm runs, as text.
    """

    model: str
    dtype: str
    threads: int
    speedup: float
    reused_tokens: int
    answers_agree: bool
    bits_agree: bool
    tree: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Measured):
    """The measurements of the questions.

    Args:
        prefix_tokens: tokens that all prompts share.
        cold_ttft_s, warm_ttft_s: medians over the questions.
        questions: the results of each question.
    """

    prefix_tokens: int
    cold_ttft_s: float
    warm_ttft_s: float
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport(Measured):
    """The measurements of the agent's steps.

    Args:
        cold_s, warm_s: the sums of the times to a first token, with the rule.
        sent_s, sent_reused_tokens: the same of the warm run without the rule, and what it did not compute.
        prompt_tokens: the sum over all steps.
        steps: the results of each step.
    """

    cold_s: float
    warm_s: float
    sent_s: float
    sent_reused_tokens: int
    prompt_tokens: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """One answer, and the time to its first event."""

    ttft_s: float
    tokens: tuple[int, ...]
    scores: tuple[float, ...]
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
    questions = tuple(
        Question(
            question=question,
            speedup=before.ttft_s / after.ttft_s,
            cold_answer=before.text,
            **_turn(prompt, before, after),
        )
        for question, prompt, before, after in zip(QUESTIONS, prompts, cold, warm, strict=True)
    )
    cold_s, warm_s = median(q.cold_ttft_s for q in questions), median(q.warm_ttft_s for q in questions)
    return Report(
        prefix_tokens=len(shared),
        cold_ttft_s=cold_s,
        warm_ttft_s=warm_s,
        speedup=cold_s / warm_s,
        reused_tokens=int(median(q.reused_tokens for q in questions)),
        questions=questions,
        **_setting(engine, threads, questions, engine.tree()),
    )


def run_agents(
    engine: Engine,
    *,
    threads: int,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> AgentReport:
    """Runs the agent's steps, with the rule, as sent, and cold with the rule, and returns the measurements.

    Args:
        engine: an idle engine; its cache is flushed.
        threads: number of threads that compute, for the report.
        clock: returns seconds, monotonic.
        progress: called as `progress(stage, done, total)`.

    Raises:
        BadTokens: the history does not fit the model.
        MissingDependency: rules of prompts cannot be read.
    """
    load_package("re2", "rules of prompts need google-re2: pip install 'mainstem[rules]'")
    rules, notes, results = rules_of(_RULE, "the demo"), Notes(), _sections()
    prompts_of = Prompts(engine.tokenizer, engine.max_context)
    instructions = _text("demo_agent.txt")
    messages = [{"role": "system", "content": ""}]
    sent: list[NDArray[np.int32]] = []
    prompts: list[NDArray[np.int32]] = []
    asked = 0

    def ask(prompt: NDArray[np.int32], params: SamplingParams = _PARAMS) -> _Run:
        nonlocal asked
        result, asked = _ask(engine, prompt, clock, params), asked + 1
        progress("asking", asked, 3 * len(results))
        return result

    engine.flush()
    warm: list[_Run] = []
    for number, result in enumerate(results, 1):
        messages[0]["content"] = f"It is {_BEGIN + number * _STEP:%H:%M:%S}.\n\n{instructions}"
        messages.append({"role": "user", "content": f"Result of {_call(number)}:\n\n{result}"})
        sent.append(prompts_of.conversation(messages))
        made = rewritten(rules, messages)
        made.place(notes, ())
        prompts.append(prompts_of.conversation(made.messages))
        warm.append(ask(prompts[-1]))
        messages.append({"role": "assistant", "content": warm[-1].text})
    tree = engine.tree()
    engine.flush()
    before = [ask(prompt, _FIRST) for prompt in sent]
    cold = []
    for prompt in prompts:
        engine.flush()
        cold.append(ask(prompt))
    steps = tuple(
        Step(call=_call(n), sent_ttft_s=old.ttft_s, sent_reused_tokens=old.cached_tokens, **_turn(prompt, alone, after))
        for n, (old, prompt, alone, after) in enumerate(zip(before, prompts, cold, warm, strict=True), 1)
    )
    sent_s, warm_s = sum(step.sent_ttft_s for step in steps), sum(step.warm_ttft_s for step in steps)
    return AgentReport(
        cold_s=sum(step.cold_ttft_s for step in steps),
        warm_s=warm_s,
        sent_s=sent_s,
        speedup=sent_s / warm_s,
        prompt_tokens=sum(step.prompt_tokens for step in steps),
        reused_tokens=sum(step.reused_tokens for step in steps),
        sent_reused_tokens=sum(step.sent_reused_tokens for step in steps),
        steps=steps,
        **_setting(engine, threads, steps, tree),
    )


def show(report: Report | AgentReport, console: Console) -> None:
    """Prints a report for people: a table, the answers, the tree, and last the figure that matters most."""
    if isinstance(report, Report):
        rows = [(q.question, q, q.cold_ttft_s) for q in report.questions]
        _show(report, "the first token", ("question", "cold", "warm"), rows, "now", console)
        figure = (
            f"The first token came [bold]{report.speedup:.1f} times sooner[/bold]: {_ms(report.warm_ttft_s)} instead of"
            f" {_ms(report.cold_ttft_s)}, {report.reused_tokens} tokens reused"
        )
    else:
        steps = [(step.call, step, step.sent_ttft_s) for step in report.steps]
        heads = ("result of", "clock in front", "moved by a rule")
        _show(report, "each step's first token", heads, steps, "after the last step with the rule", console)
        figure = (
            f"With a rule that moves its clock, the agent waited [bold]{report.speedup:.1f} times less[/bold] for its"
            f" first tokens: {_ms(report.warm_s)} instead of {_ms(report.sent_s)} in {len(report.steps)} steps,"
            f" {report.reused_tokens} of {report.prompt_tokens} tokens reused instead of {report.sent_reused_tokens}"
        )
    same = "the same answers" if report.answers_agree else f"some answers differ ({report.dtype} rounding)"
    same = "all answers are the same, bit for bit" if report.bits_agree else same
    console.print(f"{figure}, {same}.", soft_wrap=True)


def _show(
    report: Measured,
    timed: str,
    heads: tuple[str, str, str],
    turns: Sequence[tuple[str, Turn, float]],
    when: str,
    console: Console,
) -> None:
    """Prints a report without its figure; `turns`: each with its name and the time before, under `heads`."""
    from rich.table import Table

    threads = counted(report.threads, "thread")
    table = Table(title=f"{report.model}, {report.dtype}, {threads}: time to {timed}")
    table.add_column(heads[0])
    for title in (*heads[1:], "sooner", "reused"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, turn, before_s in turns:
        sooner = f"{before_s / turn.warm_ttft_s:.1f}x"
        reused = f"{turn.reused_tokens} of {turn.prompt_tokens}"
        table.add_row(name, _ms(before_s), _ms(turn.warm_ttft_s), sooner, reused)
    console.print(table)
    for name, turn, _ in turns:
        console.print(f"[bold]{name}[/bold]")
        console.print(f"  {turn.answer.strip()}", markup=False)
        if isinstance(turn, Question) and not turn.agree:
            console.print(f"  (the cold answer, in {report.dtype}, was: {turn.cold_answer.strip()})", markup=False)
    console.print(f"\nWhat the cache holds {when}:\n", markup=False)
    console.print(report.tree, markup=False, soft_wrap=True)


def _turn(prompt: NDArray[np.int32], cold: _Run, warm: _Run) -> dict[str, Any]:
    """Returns the fields of `Turn`."""
    return {
        "cold_ttft_s": cold.ttft_s,
        "warm_ttft_s": warm.ttft_s,
        "prompt_tokens": len(prompt),
        "reused_tokens": warm.cached_tokens,
        "answer": warm.text,
        "agree": cold.tokens == warm.tokens,
        "same_bits": (cold.tokens, cold.scores) == (warm.tokens, warm.scores),
    }


def _setting(engine: Engine, threads: int, turns: Sequence[Turn], tree: str) -> dict[str, Any]:
    """Returns the fields of `Measured` that both stories compute alike."""
    return {
        "model": engine.name,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "threads": threads,
        "answers_agree": all(turn.agree for turn in turns),
        "bits_agree": all(turn.same_bits for turn in turns),
        "tree": tree,
    }


def _text(name: str) -> str:
    return files("mainstem").joinpath(name).read_text(encoding="utf-8")


def _guide() -> str:
    return _text("demo.txt").strip()


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
    scores = tuple(score.logprob for delta in deltas for score in delta.logprobs)
    return _Run(ttft_s, tokens, scores, "".join(delta.text for delta in deltas), usage.cached_tokens)


def _shared(prompts: Sequence[NDArray[np.int32]]) -> int:
    """Returns the number of tokens that all prompts begin with."""
    return sum(1 for _ in takewhile(lambda tokens: len({*tokens}) == 1, zip(*prompts, strict=False)))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
