"""`mainstem lint`: each habit that defeats caching is named, at its place, at no more than it costs; others are not."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.cli import main
from mainstem.watch.lint import ADVICE, BadRequestBody, Linter, Report, about

NUMBERS = ("one", "two", "three", "four")
RULES = " ".join(f"Rule {number}: answer shortly and say where you know it from." for number in NUMBERS)
IDS = ("a81f33c09b", "77b0c1d2ee", "c4d5e6f701")
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Does {name} to the ticket it is given."}}
    for name in ("open", "close", "merge")
]


def chat(system: str, question: str = "How?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages, **fields}


def lint(bodies: Sequence[dict[str, Any]]) -> Report:
    linter = Linter()
    for body in bodies:
        linter.add(body)
    return linter.report()


def documents(order: Sequence[int]) -> str:
    return "\n\n".join(f"Document {name}: what it says about {name} fills a line of text." for name in map(str, order))


HABITS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "time": ("messages[0] (system)", [chat(f"Now: 2026-03-{day:02} 12:{day:02}. {RULES}") for day in range(10, 20)]),
    "id": ("messages[0] (system)", [chat(f"Session {id}. {RULES}") for id in IDS]),
    "number": ("messages[0] (system)", [chat(f"You have {n} credits. {RULES}") for n in (5, 17, 23)]),
    "tools reordered": ("tools", [chat(RULES, tools=order) for order in (TOOLS, TOOLS[::-1], TOOLS[1:] + TOOLS[:1])]),
    "tool keys reordered": ("tools", [
        chat(RULES, tools=tools) for tools in (TOOLS, [dict(reversed(one.items())) for one in TOOLS])]),
    "tools changed": ("tools", [chat(RULES, tools=TOOLS), chat(RULES, tools=TOOLS[:2])]),
    "parts reordered": ("messages[1] (user)", [
        chat("Be short.", f"{documents(order)}\n\nWhat do they say?") for order in ((1, 2, 3, 4), (2, 1, 4, 3))]),
    "spaces": ("messages[0] (system)", [chat(f"Be short.{space}{RULES}") for space in (" ", "\n", "\n\n")]),
    "words": ("messages[0] (system)", [
        chat(f"You are {who}. {RULES}") for who in ("a helper", "an able helper", "a guide")]),
}  # fmt: skip


@pytest.mark.parametrize("cause", HABITS)
def test_every_habit_is_named_at_its_place(cause: str) -> None:
    where, bodies = HABITS[cause]
    report = lint(bodies)
    assert [(one.cause, one.where) for one in report.findings] == [(cause, where)]
    (finding,) = report.findings
    assert finding.requests == len(bodies) - 1
    assert 0 < finding.lost_tokens <= report.tokens - report.shared_tokens
    assert finding.advice and finding.examples[0] != finding.examples[1]


def test_every_cause_has_a_habit() -> None:
    assert HABITS.keys() == ADVICE.keys()


def test_the_cost_is_what_is_the_same_behind_the_difference() -> None:
    report = lint([chat(f"Now: 2026-03-{day}. {RULES}", "How?") for day in (10, 11, 12)])
    behind = about(f". {RULES}\nuser: How?\n")
    assert report.findings[0].lost_tokens == pytest.approx(2 * behind, abs=2)


def test_what_another_prompt_shares_is_not_lost() -> None:
    bodies = [chat(f"Now: 2026-03-{day}. {RULES}") for day in (10, 11, 10, 11, 10)]
    (finding,) = lint(bodies).findings
    assert finding.requests == 1  # the first on the 11th; the others find all they can


@pytest.mark.parametrize(
    "bodies",
    [
        [chat(RULES, question) for question in ("How?", "Why not?", "Who was it then?")],
        [chat(RULES), {"model": "other", "messages": chat(f"Now: 2026-03-10. {RULES}")["messages"]}],
        [{"prompt": text} for text in ("Once there was a hen.", "A day in the life of a fox.")],
        [chat(RULES, tools=TOOLS, temperature=heat) for heat in (0, 0.5)],
        [chat(RULES, f"It is 2026-03-{day}: how?") for day in (10, 11)],
    ],
    ids=["questions", "models", "texts", "parameters", "time at the end"],
)
def test_good_prompts_are_left_alone(bodies: list[dict[str, Any]]) -> None:
    assert lint(bodies).findings == []


def test_two_causes_in_one_prompt_are_both_found() -> None:
    bodies = [chat(f"Now: 2026-03-{day}. {RULES} Ticket {day * 104729}. {RULES}") for day in range(10, 15)]
    report = lint(bodies)
    assert {one.cause for one in report.findings} == {"time", "id"}
    assert sum(one.lost_tokens for one in report.findings) <= report.tokens - report.shared_tokens


words = st.lists(st.sampled_from(["a", "2026-01-02", "12:30", "é", "x9y8z7w6v5", "77", "\n", "go on"]), max_size=60)


@given(st.lists(st.tuples(words, words), max_size=12))
def test_never_more_is_lost_than_is_computed(drawn: list[tuple[list[str], list[str]]]) -> None:
    report = lint([chat(" ".join(system), " ".join(question)) for system, question in drawn])
    rounded_up = 20 * len(drawn)  # each loss to a whole token
    assert sum(one.lost_tokens for one in report.findings) <= report.tokens - report.shared_tokens + rounded_up
    assert report.requests == len(drawn) and report.shared_tokens <= report.tokens


def test_old_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.watch.lint.KEPT", 5)
    draw = random.Random(1)
    bodies = [chat("".join(draw.choices("abcdefgh", k=200))) for _ in range(50)]
    shared, whole = lint(bodies).shared_tokens, about(bodies[0]["messages"][0]["content"])
    assert lint([*bodies, bodies[0]]).shared_tokens < shared + whole // 2
    assert lint([*bodies, bodies[-1]]).shared_tokens > shared + whole


@pytest.mark.parametrize(
    "body", [{}, {"messages": "hello"}, {"messages": [1]}, {"prompt": [1, 2]}, {"format": "mainstem", "blocks": "00"}]
)
def test_a_body_without_text_is_refused_and_changes_nothing(body: dict[str, Any]) -> None:
    linter = Linter()
    linter.add(chat(RULES))
    with pytest.raises(BadRequestBody, match="neither messages"):
        linter.add(body)
    assert linter.report().requests == 1


def test_the_command_shows_causes_costs_and_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    bodies = HABITS["time"][1]
    path.write_text(
        "".join(json.dumps({"timestamp": 60 * number, "body": body}) + "\n" for number, body in enumerate(bodies))
    )
    assert main(["lint", os.fspath(path), "--prefill-tokens-per-s", "100"]) == 0
    shown = capsys.readouterr().out
    assert "10 requests" in shown and "tokens a day" in shown and "computing a day" in shown
    assert f"time in messages[0] (system): {ADVICE['time']}" in shown and "2026-03-10" in shown
    assert main(["lint", os.fspath(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 10 and found["seconds"] == 540 and found["findings"][0]["advice"] == ADVICE["time"]
    lost = found["findings"][0]["lost_tokens"]
    assert f"{lost:,}" in shown and f"{lost * 160:,}" in shown


def test_a_bad_line_is_named_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(chat(RULES)) + "\n{]\n" + json.dumps(chat(RULES)) + "\n")
    assert main(["lint", os.fspath(path)]) == 1
    assert f"{path}, line 2: not JSON" in capsys.readouterr().err
    assert main(["lint", os.fspath(path), "--on-bad", "skip"]) == 0
    shown = capsys.readouterr().out
    assert "2 requests" in shown and "1 bad lines were left out" in shown and "Nothing was found" in shown
    path.write_text("")
    assert main(["lint", os.fspath(path)]) == 1
    assert "has no request" in capsys.readouterr().err
