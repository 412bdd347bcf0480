"""`mainstem lint`: each habit that defeats caching is named, at its place, at no more than it costs; others are not."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.cli import main
from mainstem.watch.lint import ADVICE, Linter, Report, _Model, about
from mainstem.watch.prompts import BadRequestBody

FACTS = ("refunds take ten days", "calls are free of charge", "no shop opens on Sundays", "orders can be changed")
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


def message(system: Any, question: str = "How?", **fields: Any) -> dict[str, Any]:
    """The same for /v1/messages."""
    return {"model": "m", "system": system, "messages": [{"role": "user", "content": question}], **fields}


def response(system: str, question: Any = "How?", **fields: Any) -> dict[str, Any]:
    """The same for /v1/responses."""
    return {"model": "m", "instructions": system, "input": question, **fields}


def lint(bodies: Sequence[Any]) -> Report:
    linter = Linter()
    for body in bodies:
        linter.add(body)
    return linter.report()


def documents(order: Sequence[int]) -> str:
    return "\n\n".join(f"Document {name}: what it says about {name} fills a line of text." for name in map(str, order))


def facts(order: Sequence[int], separator: str) -> str:
    return f"Facts: {separator.join(FACTS[i] for i in order)}. {RULES}"


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
    "salt": ("cache_salt", [chat(RULES, cache_salt=f"{number}") for number in range(5)]),
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


def test_values_that_follow_each_other_closely_hide_nothing() -> None:
    bodies = [chat(f"x-header: v=2.{n}.7; cch={n * 7919:05x}; at 12:{n}.\n{RULES}") for n in range(10, 20)]
    report = lint(bodies)
    assert {one.cause for one in report.findings} == {"number", "id", "time"}
    assert {one.requests for one in report.findings} == {9}
    assert sum(one.lost_tokens for one in report.findings) >= 9 * about(RULES)


def test_values_after_which_nothing_is_the_same_cost_nothing() -> None:
    words = ("red fox", "grey hen", "wide sea", "old oak")
    assert lint([chat(f"At 12:1{n}, by {n}: {text * 40}") for n, text in enumerate(words)]).findings == []
    many = [chat("; ".join(f"{n}{at}" for at in range(10, 30)) + RULES) for n in (1, 2)]
    assert lint(many).findings == []  # too many values in a row


words = st.lists(
    st.sampled_from(["a", "2026-01-02", "12:30", "é", "x9y8z7w6v5", "77", "\n", "go on", "b,"]), max_size=60
)
salts = st.sampled_from([None, None, "s", "t", "u"])


@given(st.lists(st.tuples(words, words, salts), max_size=12))
def test_never_more_is_lost_than_is_computed(drawn: list[tuple[list[str], list[str], str | None]]) -> None:
    report = lint([chat(" ".join(system), " ".join(question), cache_salt=salt) for system, question, salt in drawn])
    rounded_up = 20 * len(drawn)  # each loss to a whole token
    assert sum(one.lost_tokens for one in report.findings) <= report.tokens - report.shared_tokens + rounded_up
    assert report.requests == len(drawn) and report.shared_tokens <= report.tokens


@pytest.mark.parametrize("salt", [None, "s"])
def test_old_prompts_are_forgotten(salt: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.watch.lint.KEPT", 5)
    draw = random.Random(1)
    bodies = [chat("".join(draw.choices("abcdefgh", k=200)), cache_salt=salt) for _ in range(50)]
    shared, whole = lint(bodies).shared_tokens, about(bodies[0]["messages"][0]["content"])
    assert lint([*bodies, bodies[0]]).shared_tokens < shared + whole // 2
    assert lint([*bodies, bodies[-1]]).shared_tokens > shared + whole


DATES = [f"Now: 2026-03-{day:02}. {RULES}" for day in range(10, 20)]
ROUTES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "system": ("system", [message(text) for text in DATES]),
    "blocks": ("system", [message([{"type": "text", "text": text}]) for text in DATES]),
    "instructions": ("instructions", [response(text) for text in DATES]),
    "input": ("input", [{"model": "m", "input": text} for text in DATES]),
    "items": ("input[0] (user)", [
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": text}]}]} for text in DATES]),
    "prompts": ("prompt", [{"prompt": DATES[:5]}, {"prompt": DATES[5:]}]),
}  # fmt: skip


@pytest.mark.parametrize("shape", ROUTES)
def test_bodies_of_all_routes_are_compared(shape: str) -> None:
    where, bodies = ROUTES[shape]
    report = lint(bodies)
    assert [(one.cause, one.where, one.requests) for one in report.findings] == [("time", where, 9)]
    assert report.requests == 10 and report.tokens > 10 * about(RULES)


@pytest.mark.parametrize(
    "body",
    [
        message(RULES),
        message([{"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}]),
        response(RULES),
        response(RULES, [{"type": "message", "role": "user", "content": "How?", "id": "msg_1", "status": "completed"}]),
        {"input": [{"role": "developer", "content": RULES}, {"role": "user", "content": "How?"}], "model": "m"},
    ],
    ids=["string", "blocks", "instructions", "items", "developer"],
)
def test_a_conversation_is_one_prompt_on_all_routes(body: dict[str, Any]) -> None:
    report = lint([chat(RULES), body])
    assert report.shared_tokens == report.tokens // 2 and not report.findings


@pytest.mark.parametrize("empty", [None, ""])
def test_an_empty_system_prompt_is_none(empty: str | None) -> None:
    question = {"messages": [{"role": "user", "content": RULES}]}
    empties = [{**question, "system": empty, "tools": None}, {"input": RULES, "instructions": empty}]
    report = lint([question, *empties])
    assert report.shared_tokens == report.tokens * 2 // 3


def test_tools_come_before_the_system_prompt_of_a_message() -> None:
    tools = [{"name": name, "input_schema": {"type": "object"}, "description": RULES} for name in ("open", "close")]
    (finding,) = lint([message(RULES, tools=tools), message(RULES, tools=tools[::-1])]).findings
    assert finding.cause == "tools reordered" and finding.lost_tokens > 3 * about(RULES)


def test_a_breakpoint_that_moves_is_no_difference() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "tool_result", "tool_use_id": "call", "content": RULES} for _ in range(2)]
    bodies = [
        {"messages": [{"role": "user", "content": content}], "tools": [{"name": "open", **tool}]}
        for content, tool in (([blocks[0] | mark, blocks[1]], {}), ([blocks[0], blocks[1] | mark], mark))
    ]
    report = lint(bodies)
    assert report.shared_tokens == report.tokens // 2


def test_what_a_response_goes_on_from_is_unknown_so_only_its_instructions_count() -> None:
    bodies = [response(RULES, f"It is {number}: {RULES}", previous_response_id=f"resp_{number}") for number in (1, 2)]
    report = lint(bodies)
    assert report.tokens == 2 * about(f"system\n{RULES}\n") == 2 * report.shared_tokens and not report.findings


def test_prompts_of_token_ids_are_counted_by_id_and_shared_but_not_read() -> None:
    front, rest = list(range(5, 105)), list(range(200, 400))
    report = lint([{"prompt": [*front, 1, *rest]}, {"prompt": [[*front, 2, *rest], [*front, 3, *rest]]}])
    assert (report.requests, report.tokens, report.shared_tokens) == (3, 903, 200)
    assert not report.findings
    (finding,) = lint([{"prompt": front, "cache_salt": salt} for salt in "abc"]).findings
    assert (finding.cause, finding.lost_tokens) == ("salt", 200)


@pytest.mark.parametrize("text", ["\U0001000d", "\U0001000d" * 100], ids=len)
def test_token_ids_are_no_text(text: str) -> None:
    assert lint([{"prompt": text}, {"prompt": [13] * len(text)}]).shared_tokens == 0


def test_prompts_of_different_salts_share_nothing() -> None:
    bodies = [chat(RULES, cache_salt=f"{number}") for number in range(5)]
    report = lint(bodies)
    assert report.shared_tokens == 0
    (finding,) = report.findings
    assert finding.lost_tokens == report.tokens * 4 // 5  # all but the first
    assert all(text.startswith("salt ") for text in finding.examples)
    assert lint([*bodies, *bodies]).shared_tokens == report.tokens  # each finds its own


def test_salts_of_tenants_are_left_alone() -> None:
    bodies = [chat(RULES, f"Why {number}?", cache_salt=f"{number % 3}") for number in range(30)]
    bodies += [chat(RULES, f"Why {number}?") for number in range(30)]
    assert lint(bodies).findings == []


def test_what_parts_prompts_of_different_salts_is_found_too() -> None:
    salted = [chat(text, cache_salt=f"{number}") for number, text in enumerate(DATES)]
    report = lint(salted)
    assert {(one.cause, one.requests) for one in report.findings} == {("salt", 9), ("time", 9)}
    assert sum(one.lost_tokens for one in report.findings) <= report.tokens
    both = {one.cause: one.requests for one in lint([*map(chat, DATES), *salted]).findings}
    assert both == {"salt": 10, "time": 9}


def test_a_salt_is_not_shown() -> None:
    report = lint([chat(RULES, cache_salt=f"hunter{number}") for number in range(5)])
    assert "hunter" not in repr(report)


@pytest.mark.parametrize("separator", [", ", "; ", ". ", " | ", "\n- "])
def test_order_within_a_line_is_found(separator: str) -> None:
    draw = random.Random(3)
    orders = {tuple(draw.sample(range(4), 4)) for _ in range(20)}
    report = lint([chat(facts(order, separator), f"Q{order}?") for order in sorted(orders)])
    (finding,) = report.findings
    assert (finding.cause, finding.where) == ("parts reordered", "messages[0] (system)")
    assert finding.requests == len(orders) - 1 and "Sort" in finding.advice
    assert finding.lost_tokens + report.shared_tokens > (len(orders) - 1) * about(facts(range(4), separator)) - 5


def test_order_in_lists_of_json_and_before_another_question_is_found() -> None:
    for dumped in (json.dumps(FACTS), json.dumps(FACTS, separators=(",", ":"))):
        swapped = json.dumps([FACTS[i] for i in (2, 3, 0, 1)], separators=(",", ":") if ", " not in dumped else None)
        report = lint([chat("", f"{dumped} Why?"), chat("", f"{swapped} Since when?")])
        assert [one.cause for one in report.findings] == ["parts reordered"]


def test_ids_and_numbers_of_documents_in_another_order_are_not_the_cause() -> None:
    papers = [f"Paper {number * 104729} with {number} pages of which each has the same long text as all others, "
              f"by author {number}" for number in range(1, 5)]  # fmt: skip
    report = lint([chat("Be short.", "; ".join(papers)), chat("Be short.", "; ".join(papers[::-1]))])
    assert [one.cause for one in report.findings] == ["parts reordered"]


def test_parts_that_differ_are_no_other_order() -> None:
    bodies = [chat(f"Facts: {FACTS[0]}, {FACTS[1]}. {RULES}"), chat(f"Facts: {FACTS[2]}, {FACTS[0]}. {RULES}")]
    assert "parts reordered" not in {one.cause for one in lint(bodies).findings}
    brackets = [chat(f"Be (brief), go [on]. {RULES}"), chat(f"Be [brief], go (on). {RULES}")]
    assert "parts reordered" not in {one.cause for one in lint(brackets).findings}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "neither messages"),
        ({"format": "mainstem", "blocks": "00"}, "neither messages"),
        ([chat(RULES)], "not an object"),
        (5, "not an object"),
        ({"messages": "hello"}, "messages: "),
        ({"messages": [1]}, r"messages\[0\]: "),
        ({"messages": {"role": "user"}}, "messages: "),
        (chat(RULES, tools=5), "tools: "),
        (chat(RULES, tools={"name": "open"}), "tools: "),
        (chat(RULES, tools=0), "tools: "),
        (chat(RULES, tools=["open"]), r"tools\[0\]: "),
        (chat(RULES, model=[]), "model: "),
        (chat(RULES, cache_salt=7), "cache_salt: "),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\]\.role: "),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\]\.content: "),
        ({"messages": [{"role": "user", "content": {"type": "text"}}]}, r"messages\[0\]\.content: "),
        ({"messages": [{"role": "user", "content": ["x"]}]}, r"messages\[0\]\.content\[0\]: "),
        ({"messages": [{"content": [{"type": []}]}]}, r"messages\[0\]\.content\[0\]\.type: "),
        ({"messages": [{"content": [{"type": "text", "text": 5}]}]}, r"messages\[0\]\.content\[0\]\.text: "),
        (message(5), "system: "),
        (message(False), "system: "),
        (message([5]), r"system\[0\]: "),
        ({"instructions": ["x"], "input": "y"}, "instructions: "),
        ({"instructions": {}, "input": "y"}, "instructions: "),
        ({"input": 5}, "input: "),
        ({"input": [5]}, r"input\[0\]: "),
        ({"input": [{"role": "user", "content": 5}]}, r"input\[0\]\.content: "),
        ({"prompt": 5}, "prompt: "),
        ({"prompt": {}}, "prompt: "),
        ({"prompt": []}, "prompt: "),
        ({"prompt": ["a", 1]}, "prompt: "),
        ({"prompt": [True, False]}, "prompt: "),
        ({"prompt": [[1], ["a"]]}, "prompt: "),
        ({"prompt": [-1]}, "prompt: "),
        ({"prompt": [2**31]}, "prompt: "),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value)[-60:],
)
def test_a_body_without_text_is_refused_and_changes_nothing(body: Any, named: str) -> None:
    linter = Linter()
    linter.add(chat(RULES))
    with pytest.raises(BadRequestBody, match=named):
        linter.add(body)
    assert linter.report().requests == 1


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadRequestBody, match="nested"):
        Linter().add(chat(RULES, tools=[{"parameters": deep}]))


def test_lines_of_batch_files_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "batch.jsonl"
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/responses", "body": response(text)}
        for number, text in enumerate(DATES)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["lint", os.fspath(path), "--json"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["cause"], finding["where"]) == ("time", "instructions")


def test_a_malformed_field_is_named_with_its_line_or_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(body) + "\n" for body in (chat(RULES), chat(RULES, tools=5), chat(RULES))))
    assert main(["lint", os.fspath(path)]) == 1
    assert f"{path}, line 2: tools: must be" in capsys.readouterr().err
    assert main(["lint", os.fspath(path), "--on-bad", "skip", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["skipped"]) == (2, 1)


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
    assert "2 requests" in shown and "Left out: 1 bad line." in shown and "Nothing was found" in shown
    path.write_text("")
    assert main(["lint", os.fspath(path)]) == 1
    assert "has no request" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("when", "later"),
    [
        ("Saturday, November 28, 2026 at 10:15:03", "Saturday, November 28, 2026 at 10:17:44"),
        ("2026-11-28T10:15:03.123456+01:00", "2026-11-28T10:15:09.654321+01:00"),
        ("28 November 2026", "29 November 2026"),
    ],
)
def test_an_example_cuts_neither_a_value_nor_a_word(when: str, later: str) -> None:
    texts = [f"You are the concierge of a hotel by the harbour. It is {now}. {RULES}" for now in (when, later)]
    (finding,) = lint([chat(text) for text in texts]).findings
    assert finding.cause == "time"
    for example, whole in zip(finding.examples, reversed(texts), strict=True):
        assert (later if whole is texts[1] else when) in example
        assert set(example.split()) <= {*whole.split(), *(word.rstrip(".:,") for word in whole.split())}


@pytest.mark.parametrize(("prompts", "first"), [(10_000, 0), (10_001, 1), (10_005, 5)])
def test_a_prompt_is_compared_with_the_last_10000(prompts: int, first: int) -> None:
    model = _Model()
    for number in range(prompts):
        key = f"{number:06}"
        model.add(SimpleNamespace(text=key), (("", key),) * 4)  # type: ignore[arg-type]
    kept = sorted(int(prompt.text) for prompt in model._prompts.values())
    assert kept == [*range(first, prompts)] and {len(order) for order in model._orders} == {len(kept)}
