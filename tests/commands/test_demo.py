"""The demo: what it asks, in which order, and that its figures are those of its runs."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console
from rigs.fake_engine import FakeEngine

from mainstem import demo
from mainstem.errors import BadArgument, MainstemError
from mainstem.settings.engine import SamplingParams


class TickingEngine(FakeEngine):
    """Takes a second per uncached prompt token, on its own clock."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, max_context=20_000)
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def submit(self, request: Any, **options: Any) -> Any:
        stream = super().submit(request, **options)
        self.now_s += len(request.tokens) - stream._cached
        return stream


def run(engine: TickingEngine, **options: Any) -> demo.Report:
    return demo.run(engine, threads=2, clock=engine.clock, **options)  # type: ignore[arg-type]


def test_warm_runs_compute_the_question_only() -> None:
    engine = TickingEngine()
    report = run(engine)
    assert len(report.questions) == len(demo.QUESTIONS) == 5
    assert report.prefix_tokens > 4000  # one token per byte
    for question in report.questions:
        assert question.cold_ttft_s == question.prompt_tokens
        assert question.warm_ttft_s == question.prompt_tokens - question.reused_tokens
        # Never the question itself: only what all prompts share, in whole pages, and chance beginnings of questions.
        assert report.prefix_tokens - 16 < question.reused_tokens < report.prefix_tokens + 32
    assert report.speedup == report.cold_ttft_s / report.warm_ttft_s > 50
    assert report.answers_agree


def test_the_order_of_runs() -> None:
    engine = TickingEngine()
    steps: list[tuple[str, int, int]] = []
    run(engine, progress=lambda *step: steps.append(step))
    asked = [bytes(stream.request.tokens.tolist()).decode() for stream in engine.streams]
    questions = [prompt.split("<user>")[1].split("\n")[0] for prompt in asked]
    assert questions == [*demo.QUESTIONS, "", *demo.QUESTIONS]
    assert asked[5].endswith("<user>") and engine.streams[5].request.params.max_tokens == 0
    assert steps == [("asking", done, 11) for done in range(1, 12)]


def test_answers_that_differ_are_admitted() -> None:
    calls = iter(range(100))
    engine = TickingEngine(answer=lambda prompt: f"answer {next(calls)}")
    report = run(engine)
    assert not report.answers_agree
    assert not any(question.agree for question in report.questions)
    assert "some answers differ (float32 rounding)" in shown(report)


def test_the_document_can_be_cut_and_repeated() -> None:
    short, long = run(TickingEngine(), prefix_tokens=100), run(TickingEngine(), prefix_tokens=9000)
    template = len("<system>" + demo._INSTRUCTION + "\n<user>")
    assert (short.prefix_tokens - template, long.prefix_tokens - template) == (100, 9000)
    for wrong in (0, 20_000):
        with pytest.raises(BadArgument, match="prefix_tokens"):
            run(TickingEngine(), prefix_tokens=wrong)


def test_the_report_for_programs() -> None:
    report = asdict(run(TickingEngine()))
    wanted = "cold_ttft_s warm_ttft_s speedup reused_tokens prefix_tokens dtype model threads answers_agree questions"
    assert set(wanted.split()) <= set(report)
    assert (report["dtype"], report["model"], report["threads"]) == ("float32", "fake", 2)


def test_the_report_for_people() -> None:
    report = run(TickingEngine())
    lines = [line for line in shown(report).splitlines() if line.strip()]
    assert lines[-1].startswith(f"The first token came {report.speedup:.1f} times sooner")
    assert lines[-1].endswith("all answers are the same, bit for bit.")
    assert "6 prompts" in lines[-2]  # the tree
    assert any(
        "How tall is the lighthouse?" in line and f"{report.questions[1].speedup:.1f}x" in line for line in lines
    )


def test_a_failing_engine_is_an_error() -> None:
    engine = TickingEngine()
    engine.tokenizer.apply_chat_template = lambda *a, **k: "fail!"  # type: ignore[method-assign]
    with pytest.raises(MainstemError, match="the generation failed"):
        run(engine)


# ---------------------------------------------------------------- the agent


def test_each_step_of_the_agent_computes_only_what_came_since() -> None:
    engine = TickingEngine()
    report = demo.run_agents(engine, threads=2, clock=engine.clock)  # type: ignore[arg-type]
    assert len(report.steps) > 3
    before = 0
    for step in report.steps:
        assert step.cold_ttft_s == step.prompt_tokens > before  # one token per byte, a second each
        assert step.warm_ttft_s == step.prompt_tokens - step.reused_tokens
        if before:
            assert before - 32 < step.reused_tokens  # all of the prompt before, in whole pages
        before = step.prompt_tokens
    assert report.cold_s == report.prompt_tokens
    assert report.warm_s == report.prompt_tokens - report.reused_tokens
    assert report.answers_agree


def test_as_sent_the_agent_computes_all_that_follows_its_clock() -> None:
    engine = TickingEngine()
    report = demo.run_agents(engine, threads=2, clock=engine.clock)  # type: ignore[arg-type]
    for step in report.steps:
        assert step.sent_reused_tokens <= len("<system>It is 09:30:")
        assert step.sent_ttft_s + step.sent_reused_tokens > step.prompt_tokens - 20 * len(report.steps)  # the notes
    assert report.sent_s == sum(step.sent_ttft_s for step in report.steps)
    assert report.sent_reused_tokens == sum(step.sent_reused_tokens for step in report.steps)
    assert report.speedup == report.sent_s / report.warm_s > 2


def test_the_history_has_the_tools_their_results_and_what_the_agent_said() -> None:
    answers = iter(f"I learned thing {n}." for n in range(100))
    engine = TickingEngine(answer=lambda prompt: next(answers))
    steps: list[tuple[str, int, int]] = []
    report = demo.run_agents(engine, threads=2, clock=engine.clock, progress=lambda *step: steps.append(step))  # type: ignore[arg-type]
    count = len(report.steps)
    last = bytes(engine.streams[count - 1].request.tokens.tolist()).decode()
    assert "\n- read_page(number): returns a page" in last and "\n- note(text): keeps a line" in last
    assert [last.count(f"Result of read_page({n}):") for n in range(1, count + 1)] == [1] * count
    assert [last.count(f"<assistant>I learned thing {n}.") for n in range(count)] == [1] * (count - 1) + [0]
    assert not report.answers_agree
    assert [done for _, done, _ in steps] == list(range(1, 3 * count + 1))


def test_the_rule_moves_each_time_behind_its_result() -> None:
    engine = TickingEngine()
    count = len(demo.run_agents(engine, threads=2, clock=engine.clock).steps)  # type: ignore[arg-type]
    asked = [bytes(stream.request.tokens.tolist()).decode() for stream in engine.streams]
    for n, (ruled, sent, cold) in enumerate(zip(asked[:count], asked[count:], asked[2 * count :], strict=False), 1):
        times = [f"{7 * step // 60 + 30}:{7 * step % 60:02}" for step in range(1, n + 1)]
        assert ruled == cold and ruled.startswith("<system>You are an agent")
        assert ruled.count("It is 09") == n and all(f"\n\n[It is 09:{time}.]\n<assistant>" in ruled for time in times)
        assert sent.startswith(f"<system>It is 09:{times[-1]}.\n\nYou are an agent") and sent.count("It is 09") == 1


def test_the_report_of_the_agent_ends_in_its_figure() -> None:
    engine = TickingEngine()
    report = demo.run_agents(engine, threads=2, clock=engine.clock)  # type: ignore[arg-type]
    lines = [line for line in shown(report).splitlines() if line.strip()]
    assert lines[-1].startswith(f"With a rule that moves its clock, the agent waited {report.speedup:.1f} times less")
    assert any("read_page(2)" in line and f"of {report.steps[1].prompt_tokens}" in line for line in lines)
    assert {"cold_s", "warm_s", "speedup", "steps", "model", "dtype", "threads"} <= set(asdict(report))


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_on_real_weights(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from mainstem.runtime.engine import Engine, EngineConfig

    monkeypatch.setattr(demo, "_PARAMS", SamplingParams(max_tokens=3))
    with Engine(smollm2, EngineConfig(pages=128)) as engine:
        report = demo.run(engine, threads=torch.get_num_threads(), prefix_tokens=400)
    assert report.prefix_tokens > 400
    for question in report.questions:
        assert report.prefix_tokens - 16 < question.reused_tokens < question.prompt_tokens  # whole pages
        assert question.warm_ttft_s < question.cold_ttft_s
        assert question.answer.strip()
    assert report.dtype != "float32" or report.answers_agree


def shown(report: demo.Report | demo.AgentReport) -> str:
    out = io.StringIO()
    demo.show(report, Console(file=out, width=100))
    return out.getvalue()
