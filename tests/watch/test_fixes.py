"""`mainstem lint --fix`: rules that traffic calls for are written, a server takes them, and they mend the traffic."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.cli import main
from mainstem.prompt_rules.bodies import rewritten_body
from mainstem.prompt_rules.rule_file import read_rules, rules_of
from mainstem.prompt_rules.rules import Drop, Move, Round, Rule, Sort
from mainstem.watch.fixes import MOST_RULES, Fixed, Fixes, document, quoted
from mainstem.watch.lint import Linter, Report

NUMBERS = ("one", "two", "three", "four")
GUIDE = " ".join(f"Rule {number}: answer shortly and say where you know it from." for number in NUMBERS)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name} to the ticket it is given.",
            "parameters": {"type": "object", "properties": {"ticket": {"type": "string"}}},
        },
    }
    for name in ("open", "close", "merge")
]


def chat(system: str, question: str = "How?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages, **fields}


def message(system: str, question: str = "How?", **fields: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": text} for text in system.split("\n", 1)]
    return {"model": "m", "system": parts, "messages": [{"role": "user", "content": question}], **fields}


def response(system: str, question: str = "How?", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "instructions": system, "input": question, **fields}


def fixed(bodies: Sequence[Mapping[str, Any]], others: Sequence[Rule] = ()) -> tuple[Fixed, Report]:
    fixes = Fixes()
    linter = Linter(lost=fixes.add)
    for number, body in enumerate(bodies):
        linter.add(rewritten_body(others, body).body, 60.0 * number)
    return fixes.fixed(linter.report(), "rules.toml", others), linter.report()


def rules_from(bodies: Sequence[Mapping[str, Any]]) -> tuple[Rule, ...]:
    """Returns the rules that bodies call for, as a file has them."""
    made, report = fixed(bodies)
    return rules_of(document(made, report, "requests.jsonl"), "rules.toml") if made.fixes else ()


def lint(bodies: Sequence[Mapping[str, Any]], rules: Sequence[Rule] = ()) -> Report:
    linter = Linter()
    for body in bodies:
        linter.add(rewritten_body(rules, body).body)
    return linter.report()


def volatile(number: int, draw: random.Random) -> str:
    """Returns a system prompt with all that changes with every request."""
    return (
        f"x-acme-billing-header: v=2.1.{number}; cch={draw.getrandbits(20):05x};\nYou help with tickets.\n"
        f"It is Tuesday, 2026-03-10 12:{number % 60:02}:{draw.randrange(60):02}. {GUIDE}\n"
        f"Session: {draw.getrandbits(64):016x}\n{GUIDE}\nYou have {number} credits. {GUIDE}"
    )


SHAPES = {"chat": chat, "messages": message, "responses": response}


@pytest.mark.parametrize("shape", SHAPES)
def test_rules_mend_the_traffic_that_calls_for_them(shape: str, tmp_path: Path) -> None:
    draw, path, rules_path = random.Random(shape), tmp_path / "requests.jsonl", tmp_path / "rules.toml"
    bodies = []
    for number in range(30):
        tools = [one if shape == "chat" else {"type": "function", **one["function"]} for one in TOOLS]  # type: ignore[dict-item]
        if shape == "messages":
            tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in tools]
        draw.shuffle(tools)
        bodies.append(SHAPES[shape](volatile(number, draw), f"Question {number}?", tools=tools))
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    assert main(["lint", os.fspath(path), "--fix", os.fspath(rules_path)]) == 0
    rules = read_rules([rules_path])
    kinds = {type(rule.action) for rule in rules}
    assert kinds == {Drop, Move, Round, Sort}
    before, after = lint(bodies), lint(bodies, rules)
    assert {one.cause for one in before.findings} >= {"time", "id", "number", "tools reordered"}
    assert after.findings == []
    assert before.shared_tokens < 0.5 * before.tokens and after.shared_tokens > 0.85 * after.tokens


def one(bodies: Sequence[Mapping[str, Any]]) -> Rule:
    (rule,) = rules_from(bodies)
    assert not lint(bodies, [rule]).findings
    return rule


def test_a_time_of_one_hour_is_rounded_to_it() -> None:
    rule = one([chat(f"The time is 9:{minute:02}. {GUIDE}") for minute in range(10, 20)])
    assert isinstance(rule.action, Round) and rule.action.to == "hour"
    assert next(rule.edits("The time is 9:17.", "system")).text == "00"


def test_a_time_of_one_day_is_rounded_to_it() -> None:
    rule = one([chat(f"Now: 2026-03-10T{hour:02}:30:05.{hour:02}5Z. {GUIDE}") for hour in range(0, 24, 2)])
    assert isinstance(rule.action, Round) and rule.action.to == "day"
    (edit,) = rule.edits("Now: 2026-03-10T11:22:33.444Z", "system")
    assert edit.text == "Now: 2026-03-10T00:00:00.000Z"[edit.start : edit.end]


@pytest.mark.parametrize(
    "when",
    [
        [f"2026-03-{day:02}" for day in range(10, 20)],
        [f"2026-03-{day:02} 12:{day:02}" for day in range(10, 20)],
        [f"{1_760_000_000 + number * 977}" for number in range(10)],
        [f"{day}, 12:30" for day in ("Monday", "Tuesday", "Wednesday", "Friday")],
        [f"12:{number}{more}" for number in range(10, 20) for more in ("", ":30")],
    ],
    ids=["days", "days and times", "seconds", "names", "two forms"],
)
def test_a_time_that_rounding_does_not_make_the_same_is_moved(when: Sequence[str]) -> None:
    bodies = [chat(f"Made at {each}. {GUIDE}") for each in when]
    rule = one(bodies)
    assert isinstance(rule.action, Move) and rule.places == {"system"}
    last = rewritten_body([rule], bodies[-1]).body["messages"][-1]["content"]
    assert f"Made at {when[-1]}" in last


def test_an_id_beside_a_time_is_known_by_its_own_text() -> None:
    draw = random.Random(4)
    bodies = [chat(f"Run {draw.getrandbits(48):012x} began at 12:{n}:07. {GUIDE}") for n in range(10, 40)]
    rules = rules_from(bodies)
    assert {type(rule.action) for rule in rules} == {Move, Round} and not lint(bodies, rules).findings


def test_a_value_that_begins_a_prompt_or_a_line_is_found_by_what_is_around_it() -> None:
    for front in ("", "You help.\n", "A list of what we know:\n- "):
        assert isinstance(one([chat(f"{front}12:{n} is the time. {GUIDE}") for n in range(10, 20)]).action, Round)


def test_a_pattern_finds_no_other_value() -> None:
    same = "Of all the tickets in the queue, as many as"
    bodies = [chat(f"{same} 50 may be open, {GUIDE} {same} {n} were closed. {GUIDE}") for n in (51, 52, 53, 54)]
    rule = one(bodies)
    assert rule.pattern is not None and "were closed" in str(rule.example)
    assert [edit.start for edit in rule.edits(f"{same} 50 may be open", "system")] == []


def test_a_number_that_changed_once_is_an_edit() -> None:
    made, _ = fixed([chat(f"You have {n} tools. {GUIDE}") for n in (5, 5, 6, 6)])
    assert made.fixes == [] and "seen once" in made.left[0].reason


UNMENDED = {
    "user": [chat("Be short.", f"It is 12:{n}. {GUIDE}") for n in range(10, 20)],
    "prompt": [{"prompt": f"It is 12:{n}. {GUIDE}"} for n in range(10, 20)],
    "words": [chat(f"You are {who}. {GUIDE}") for who in ("a helper", "an able helper", "a guide")],
    "salt": [chat(GUIDE, cache_salt=f"{number}") for number in range(5)],
    "spaces": [chat(f"Be short.{space}{GUIDE}") for space in (" ", "\n", "\n\n")],
    "tools changed": [chat(GUIDE, tools=TOOLS), chat(GUIDE, tools=TOOLS[:2])],
    "properties": [
        chat(GUIDE, tools=[{"name": "open", "input_schema": {"properties": {name: {} for name in names}}}])
        for names in ("ab", "ba")
    ],
}


@pytest.mark.parametrize("cause", UNMENDED)
def test_what_no_rule_may_mend_is_said(cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, report = fixed(UNMENDED[cause])
    assert made.fixes == [] and len(made.left) == 1
    (finding,) = report.findings
    assert made.left[0].cost.tokens == finding.lost_tokens and made.left[0].cause == finding.cause
    assert f"# - {finding.cause} in {finding.where}: " in document(made, report, "t") and finding.advice in document(
        made, report, "t"
    )
    path, target = tmp_path / "requests.jsonl", tmp_path / "rules.toml"
    path.write_text("".join(json.dumps(body) + "\n" for body in UNMENDED[cause]))
    assert main(["lint", os.fspath(path), "--fix", os.fspath(target)]) == 0
    assert "No rule mends any of it" in capsys.readouterr().out and not target.exists()


def test_keys_of_tools_are_sorted() -> None:
    schemas = [{"type": "object", "description": "of a ticket"}, {"description": "of a ticket", "type": "object"}]
    rule = one([chat(GUIDE, tools=[{"name": "open", "input_schema": schema}]) for schema in schemas])
    assert rule.action == Sort(frozenset({"keys"}))


def test_costs_are_those_of_the_findings() -> None:
    bodies = [chat(f"Session {n * 7919:08}. {GUIDE}") for n in range(1, 11)]
    made, report = fixed(bodies)
    (fix,), (finding,) = made.fixes, report.findings
    assert (fix.cost.requests, fix.cost.tokens) == (finding.requests, finding.lost_tokens) == (9, finding.lost_tokens)
    behind = len(f". {GUIDE}") + len("\nuser\nHow?\n")
    assert fix.cost.characters == pytest.approx(9 * behind, abs=9)
    text = document(made, report, "requests.jsonl")
    assert f"{fix.cost.tokens * 86400 / 540:,.0f} tokens a day" in text
    report.seconds = 0.0
    assert f"{fix.cost.tokens * 100:,.0f} of 1,000 requests" in document(made, report, "requests.jsonl")
    assert '#   "00007919"' in text and "9 of 10 requests" in text


def many(places: int) -> list[dict[str, Any]]:
    """Requests with so many ids, of which each is known by other words."""
    letters = "abcdefghij"

    def name(at: int) -> str:
        return "".join(letters[int(digit)] for digit in f"{at:04}")

    return [chat("\n".join(f"The {name(at)} is {n}{at:04}47. {GUIDE[:70]}" for at in range(places))) for n in (1, 2)]


def test_prompts_of_several_salts_call_for_no_rule() -> None:
    bodies = [chat(f"Your id: {7**number:016x}. {GUIDE}", cache_salt=str(number)) for number in range(20, 30)]
    made, _ = fixed(bodies)
    assert not made.fixes and {one.cause for one in made.left} <= {"salt"}


def test_what_costs_most_comes_first() -> None:
    bodies = [chat(f"It is {n}. {GUIDE} You have {n} credits and {n} more. {GUIDE}", f"q{n} {GUIDE}") for n in range(9)]
    made, _ = fixed(bodies)
    for costs in ([each.cost.tokens for each in made.fixes], [each.cost.tokens for each in made.left]):
        assert costs == sorted(costs, reverse=True)


def test_50_rules_are_written_at_most() -> None:
    made, _ = fixed(many(50))
    assert len(made.fixes) == 50 == MOST_RULES and made.left == []
    made, _ = fixed(many(52))
    assert len(made.fixes) == 50
    (left,) = made.left
    assert left.reason == "50 rules save more" and left.cost.requests == 2


def test_1000_values_are_told_apart() -> None:
    for places, over in ((1000, 0), (1003, 3)):
        made, _ = fixed(many(places))
        reasons = {left.reason: left.cost.requests for left in made.left}
        assert reasons.get("more than 1000 places", 0) == over and reasons["50 rules save more"] == 950


def test_rules_that_are_in_use_are_kept_beside() -> None:
    bodies = [chat(f"Session {n * 7919:08}. {GUIDE}\nYou have {n} credits. {GUIDE}") for n in range(1, 11)]
    made, report = fixed(bodies)
    first = rules_of(made.fixes[0].text, "first.toml")
    more, after = fixed(bodies, first)
    assert len(more.fixes) == len(made.fixes) - 1 and not {fix.name for fix in more.fixes} & {first[0].name}
    again, _ = fixed(bodies * 2)
    taken = rules_of("".join(fix.text for fix in made.fixes), "taken.toml")
    fixes = Fixes()
    linter = Linter(lost=fixes.add)
    for body in bodies:
        linter.add(body)
    refused = fixes.fixed(linter.report(), "rules.toml", taken)  # as if they found nothing
    assert refused.fixes == [] and all("its rule is refused" in left.reason for left in refused.left)
    assert report.tokens and after.tokens and again.fixes


anchors = st.text(
    st.sampled_from("ab cZ09'\"\\#[](){}|*+?.^$-_=:,;/\n\t\r\x00\x01\x7f\u2028é\ud800😀<&"), min_size=0, max_size=40
)


@settings(deadline=None)
@given(anchors, anchors)
def test_any_text_around_a_value_makes_a_file_that_is_read(front: str, back: str) -> None:
    bodies = [chat(f"{front}{value:012x}a{back}{GUIDE}") for value in (0x3F0000000001, 0x5F0000000007, 0x7F0000000003)]
    made, report = fixed(bodies)
    text = document(made, report, front)
    assert all(ord(each) >= 32 or each == "\n" for each in text if text) and text.encode()
    rules = rules_of(text, "rules.toml") if made.fixes else ()
    left = lint(bodies, rules)
    assert not rules or left.shared_tokens >= lint(bodies).shared_tokens


@pytest.mark.parametrize("text", ["a", "it's", 'say "no"', "a\\b", "a\nb", "tab\t", "del\x7f", "'''", ""])
def test_texts_are_quoted_as_toml_reads_them(text: str) -> None:
    import tomllib

    assert tomllib.loads(f"a = {quoted(text)}") == {"a": text}


def write(path: Path, bodies: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return os.fspath(path)


CLOCK = [chat(f"The time is 9:{minute:02}. {GUIDE}") for minute in range(10, 20)]


def test_a_file_that_is_there_is_kept_unless_it_is_to_be_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = write(tmp_path / "requests.jsonl", CLOCK), tmp_path / "rules.toml"
    target.write_text("mine")
    assert main(["lint", path, "--fix", os.fspath(target)]) == 2
    assert "not there yet, or given with --replace" in capsys.readouterr().err and target.read_text() == "mine"
    assert main(["lint", path, "--fix", os.fspath(target), "--replace"]) == 0
    assert "round time-the-time-is: would save" in capsys.readouterr().out
    assert [rule.name for rule in read_rules([target])] == ["time-the-time-is"]
    for wrong in (path, os.fspath(tmp_path), os.fspath(tmp_path / "absent" / "rules.toml")):
        assert main(["lint", path, "--fix", wrong, "--replace"]) == 2
    assert main(["lint", path, "--fix", os.fspath(target), "--replace", "--prompt-rules", os.fspath(target)]) == 2
    assert "neither read nor another result" in capsys.readouterr().err


def test_traffic_is_compared_as_rules_leave_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = write(tmp_path / "requests.jsonl", CLOCK), tmp_path / "rules.toml"
    assert main(["lint", path, "--fix", os.fspath(target), "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    (fix,) = before["fixes"]
    assert (fix["action"], fix["cause"], fix["requests"]) == ("round", "time", 9)
    assert fix["saved_tokens"] == before["findings"][0]["lost_tokens"]
    assert main(["lint", path, "--prompt-rules", os.fspath(target), "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["findings"] == [] and "fixes" not in after
    assert after["shared_tokens"] > before["shared_tokens"]
    target.write_text("[[rule]]\nname = 'x'\naction = 'burn'\n")
    assert main(["lint", path, "--prompt-rules", os.fspath(target)]) != 0
    assert f"{target}:1" in capsys.readouterr().err


def test_a_body_that_rules_cannot_read_is_a_bad_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = write(tmp_path / "requests.jsonl", CLOCK), tmp_path / "rules.toml"
    assert main(["lint", path, "--fix", os.fspath(target)]) == 0
    write(Path(path), [*CLOCK, chat("The time is 9:10. \ud800")])
    capsys.readouterr()
    assert main(["lint", path, "--prompt-rules", os.fspath(target)]) == 1
    assert "line 11: a text is not valid Unicode" in capsys.readouterr().err
    assert main(["lint", path, "--prompt-rules", os.fspath(target), "--on-bad", "skip", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == 1
