"""Rules change what they are for, say so, and leave everything else as it is."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.prompt_rules.notes import Notes
from mainstem.prompt_rules.rewriting import Declared, KeptTools, Rewritten, rewritten, sorted_keywords
from mainstem.prompt_rules.rule_file import read_rules
from mainstem.prompt_rules.rules import Caller, Rewrite, Rule, Scope, filled

DROP = """[[rule]]
name = "nonce"
action = "drop"
places = ["system", "prompt"]
match = '(?m)^nonce: [0-9a-f]+\\n'
example = "nonce: 0f\\n"
"""
MOVE = """[[rule]]
name = "clock"
action = "move"
places = ["system", "user", "tools"]
match = 'Time: (?P<value>\\d+)'
example = "Time: 12"
"""
ROUND = """[[rule]]
name = "stamp"
action = "round"
to = "hour"
match = '\\d{4}-\\d\\d-\\d\\dT(?P<hour>\\d\\d):(?P<minute>\\d\\d):(?P<second>\\d\\d)(\\.(?P<fraction>\\d+))?'
example = "2026-01-02T03:04:05.678"
"""
SORT = """[[rule]]
name = "order"
action = "sort"
lists = ["tools", "keys"]
"""


def rules(tmp_path: Path, *texts: str) -> tuple[Rule, ...]:
    path = tmp_path / "rules.toml"
    path.write_text("\n".join(texts))
    return read_rules([path])


def chat(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def ruled(found: Sequence[Rule], messages: Sequence[dict[str, Any]], *rest: Any) -> Rewritten:
    """Returns a prompt after rules, with the notes of its own turn."""
    made = rewritten(found, messages, *rest)
    made.place(Notes(), ())
    return made


def texts(made: Rewritten) -> list[Any]:
    return [message["content"] for message in made.messages]


def test_a_line_is_dropped(tmp_path: Path) -> None:
    made = rewritten(rules(tmp_path, DROP), chat(("system", "Be kind.\nnonce: ff0\nBe brief."), ("user", "nonce: 1\n")))
    assert texts(made) == ["Be kind.\nBe brief.", "nonce: 1\n"]
    assert made.changes == [Rewrite("nonce", "drop", "system", 11, 0)]


def test_a_text_is_moved_behind_the_last_message_and_says_where_it_stood(tmp_path: Path) -> None:
    messages = chat(("system", "Time: 12. Hi."), ("user", "a"), ("assistant", "b"), ("user", "c"))
    made = ruled(rules(tmp_path, MOVE), messages)
    note = "\n\n[Time: 12 (moved here from the system prompt)]"
    assert texts(made) == ["Time: . Hi.", "a", "b", "c" + note]
    assert made.changes == [
        Rewrite("clock", "move", "system", 2, 0),
        Rewrite("clock", "move", "messages[3]", 0, len(note)),
    ]


def test_a_note_goes_behind_what_an_answer_is_continued_from(tmp_path: Path) -> None:
    made = ruled(rules(tmp_path, MOVE), chat(("system", "Time: 1"), ("user", "a"), ("assistant", "It")))
    assert texts(made)[1].startswith("a\n\n[Time: 1") and texts(made)[2] == "It"


def test_what_is_in_the_last_message_goes_to_its_end(tmp_path: Path) -> None:
    """It is the same text there as in the next turn, when another message is the last one."""
    messages = chat(("user", "Time: 1."), ("assistant", "x"), ("user", "Time: 2!"))
    made = ruled(rules(tmp_path, MOVE), messages)
    note = "\n\n[Time: {} (moved here from the conversation)]".format
    assert texts(made) == ["Time: .", "x", "Time: !" + note(1) + note(2)]


def test_without_a_message_to_go_behind_nothing_is_moved(tmp_path: Path) -> None:
    made = ruled(rules(tmp_path, MOVE.replace('"user"', '"assistant"')), chat(("assistant", "Time: 1")))
    assert texts(made) == ["Time: 1"] and made.changes == []


def test_a_message_with_images_gets_a_part(tmp_path: Path) -> None:
    image = {"type": "image", "url": "data:", "at": "x"}
    messages = chat(
        ("user", [{"type": "text", "text": "Time: 5"}, image]), ("user", [image, {"type": "text", "text": "See?"}])
    )
    made = ruled(rules(tmp_path, MOVE), messages)
    note = {"type": "text", "text": "\n\n[Time: 5 (moved here from the conversation)]"}
    assert texts(made) == [
        [{"type": "text", "text": "Time: "}, image],
        [image, {"type": "text", "text": "See?"}, note],
    ]
    assert messages[0]["content"][0]["text"] == "Time: 5"


@pytest.mark.parametrize(
    ("to", "expected", "size"),
    [
        ("day", "2026-01-02T00:00:00.000", 12),
        ("hour", "2026-01-02T13:00:00.000", 9),
        ("minute", "2026-01-02T13:14:00.000", 6),
    ],
)
def test_a_time_is_rounded_down(tmp_path: Path, to: str, expected: str, size: int) -> None:
    made = rewritten(
        rules(tmp_path, ROUND.replace('"hour"', f'"{to}"')), chat(("system", "At 2026-01-02T13:14:15.678"))
    )
    assert texts(made) == [f"At {expected}"]
    assert made.changes == [Rewrite("stamp", "round", "system", size, size)]


def test_half_of_a_day_is_rounded_with_its_hours(tmp_path: Path) -> None:
    rule = """[[rule]]
name = "clock"
action = "round"
to = "day"
match = '(?P<hour>\\d+):(?P<minute>\\d\\d) (?P<half>[AP]M|[ap]\\.m\\.)'
example = "11:59 PM"
"""
    found = rules(tmp_path, rule)
    system = chat(("system", "11:59 PM, 1:02 AM, 12:30 p.m."))
    assert texts(rewritten(found, system)) == ["00:00 AM, 0:00 AM, 00:00 a.m."]
    hours = rules(tmp_path, rule.replace('"day"', '"hour"'))
    assert texts(rewritten(hours, system)) == ["11:00 PM, 1:00 AM, 12:00 p.m."]


def test_a_time_that_is_round_is_no_change(tmp_path: Path) -> None:
    messages = chat(("system", "2026-01-02T13:00:00"))
    made = rewritten(rules(tmp_path, ROUND), messages)
    assert made.changes == [] and made.messages == messages


def test_tools_are_sorted_with_the_keywords_of_their_schemas(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"z": {"type": "string", "enum": ["b", "a"]}, "a": {}},
        "required": ["z", "a"],
    }
    tools = [Declared("write", "w", schema, 0), Declared("read", None, {"type": "object"}, 1)]
    made = rewritten(rules(tmp_path, SORT), chat(("user", "q")), tools)
    assert [(tool.name, tool.index) for tool in made.tools] == [("read", 1), ("write", 0)]
    assert json.dumps(made.tools[1].parameters) == json.dumps(
        {"properties": {"z": {"enum": ["b", "a"], "type": "string"}, "a": {}}, "required": ["z", "a"], "type": "object"}
    )
    [change] = made.changes
    assert (change.rule, change.at) == ("order", "tools") and change.removed == change.added > 0
    again = rewritten(rules(tmp_path, SORT), chat(("user", "q")), made.tools)
    assert again.changes == [] and list(again.tools) == list(made.tools)


def test_keywords_have_one_order_however_they_came() -> None:
    rng = random.Random(1)
    schema = {
        "type": "object",
        "properties": {
            "b": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null", "title": "x"}]},
            "a": {"const": {"q": 1, "p": 2}, "enum": [{"q": 1, "p": 2}]},
        },
        "$defs": {"y": {"type": "array", "items": {"type": "string", "format": "date"}}},
        "additionalProperties": False,
    }

    def shuffled(value: Any, fixed: bool = False) -> Any:
        if isinstance(value, list):
            return [shuffled(each) for each in value]
        if not isinstance(value, dict):
            return value
        names = list(value)
        if not fixed:
            rng.shuffle(names)
        return {
            name: value[name] if name in ("const", "enum") else shuffled(value[name], name in ("properties", "$defs"))
            for name in names
        }

    one = json.dumps(sorted_keywords(schema))
    assert {json.dumps(sorted_keywords(shuffled(schema))) for _ in range(50)} == {one}
    assert json.loads(one) == schema
    assert one.index('"b"') < one.index('"a"') and one.count('{"q": 1, "p": 2}') == 2


def test_a_description_of_a_tool_is_changed(tmp_path: Path) -> None:
    made = ruled(rules(tmp_path, MOVE), chat(("user", "q")), [Declared("f", "Time: 9!", {}, 0)])
    assert made.tools[0].description == "Time: !"
    assert texts(made) == ["q\n\n[Time: 9 (moved here from the description of a tool)]"]
    assert made.changes[0].at == "tools[0]"


def test_prompts_that_are_completed_are_changed_where_a_rule_says_so(tmp_path: Path) -> None:
    made = rewritten(rules(tmp_path, DROP, MOVE), texts=["nonce: 1\nTime: 4", "x"])
    assert made.texts == ["Time: 4", "x"]
    assert made.changes == [Rewrite("nonce", "drop", "prompt[0]", 9, 0)]


def test_of_two_rules_that_find_one_text_the_first_counts(tmp_path: Path) -> None:
    first = MOVE.replace('"system", "user", "tools"', '"system"')
    second = (
        DROP.replace("nonce: [0-9a-f]+\\n", "Time: \\d+ h\\n")
        .replace("nonce: 0f\\n", "Time: 1 h\\n")
        .replace("(?m)^", "")
    )
    with pytest.raises(ValueError, match="finds the same text"):
        rules(tmp_path, first, second)
    apart = [rules(tmp_path, each)[0] for each in (first, second)]
    made = rewritten(apart, chat(("system", "Time: 1 h\nx"), ("user", "q")))
    assert [change.rule for change in made.changes] == ["clock"]
    assert texts(made)[0] == "Time:  h\nx"


def test_positions_follow_the_text(tmp_path: Path) -> None:
    text = "nonce: ab\nBe kind. 2026-01-02T13:14:15 nonce: cd\n"
    made = rewritten(rules(tmp_path, DROP, ROUND), chat(("system", text), ("user", "q")))
    new = texts(made)[0]
    kind = text.index("kind")
    assert new[made.offset(0, kind) :].startswith("kind")
    assert made.offset(0, len(text)) == len(new)
    second = text.index("15 nonce")
    assert new[made.offset(0, second + 1) :].startswith(" nonce")  # within what was replaced: behind it
    assert made.offset(0, 0) == 0 and made.offset(0, 3) == 0  # within what was dropped
    assert made.offset(1, 1) == 1 and made.offset(7, 5) == 5


def test_a_long_text_with_many_matches_takes_linear_time(tmp_path: Path) -> None:
    found = rules(tmp_path, MOVE, ROUND)
    text = "".join(f"Time: {i} 2026-01-02T03:04:05\n" for i in range(30_000))
    began = time.process_time()
    made = rewritten(found, chat(("system", text), ("user", "q")))
    made.place(Notes(), ())
    assert time.process_time() - began < 20.0  # pairs of them take minutes
    assert len(made.changes) == 90_000


def test_values_that_look_like_names_stay(tmp_path: Path) -> None:
    assert (
        filled("[{match}|{place}]", {"{match}": "{place}{value}", "{place}": "P", "{value}": "V"})
        == "[{place}{value}|P]"
    )


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text(max_size=60)), min_size=1))
def test_what_no_rule_finds_is_what_came(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, str]]
) -> None:
    found = rules(tmp_path_factory.getbasetemp(), DROP, MOVE, ROUND, SORT)
    messages = chat(*turns)
    made = rewritten(found, messages)
    for before, after in zip(messages, made.messages, strict=True):
        if not made.changes:
            assert after is before
    spoken = [edit for rule in found for turn in turns for edit in rule.edits(turn[1], turn[0])]
    assert bool(made.changes) <= bool(spoken)


def test_a_scope_covers_routes_clients_and_tenants() -> None:
    scope = Scope(("/v1/messages",), ("claude-cli/*", "claude-code/?"), ("research",))
    assert scope.covers(Caller("/v1/messages", "claude-cli/2.0 (x)", "research"))
    assert scope.covers(Caller("/v1/messages", "claude-code/2", "research"))
    assert not scope.covers(Caller("/v1/messages", "claude-code/22", "research"))
    assert not scope.covers(Caller("/v1/messages", "Claude-cli/2.0", "research"))
    assert not scope.covers(Caller("/v1/responses", "claude-cli/2.0", "research"))
    assert not scope.covers(Caller("/v1/messages", "claude-cli/2.0", None))
    assert Scope().covers(Caller("/anything"))
    assert scope.meets(Scope()) and scope.meets(Scope(clients=("codex",)))
    assert not scope.meets(Scope(tenants=("sales",))) and not scope.meets(Scope(routes=("/v1/responses",)))


# ---- tools that a session had


def tool(name: str, description: str = "", index: int | None = 0) -> Declared:
    return Declared(name, description, {}, index)


def names(tools: list[Declared]) -> list[tuple[str, int | None]]:
    return [(each.name, each.index) for each in tools]


def test_a_tool_that_a_session_had_stays_where_it_was() -> None:
    kept = KeptTools()
    assert names(kept.with_kept(b"a", "s", [tool("x", index=0), tool("y", index=1)])) == [("x", 0), ("y", 1)]
    assert names(kept.with_kept(b"a", "s", [tool("z", index=0), tool("y", index=1)])) == [
        ("x", None),
        ("y", 1),
        ("z", 0),
    ]
    assert names(kept.with_kept(b"a", "s", [])) == [("x", None), ("y", None), ("z", None)]
    assert names(kept.with_kept(b"b", "s", [tool("q")])) == [("q", 0)]  # another client's session of that name
    assert names(kept.with_kept(b"a", "t", [tool("q")])) == [("q", 0)]


def test_a_tool_that_changed_is_the_new_one() -> None:
    kept = KeptTools()
    kept.with_kept(None, "s", [tool("x", "old")])
    assert kept.with_kept(None, "s", [tool("x", "new")]) == [tool("x", "new")]


def test_sessions_that_were_used_last_are_remembered() -> None:
    kept = KeptTools(most_sessions=2)
    for session in ("a", "b", "a", "c"):
        kept.with_kept(None, session, [tool(session)])
    assert names(kept.with_kept(None, "a", [])) == [("a", None)]
    assert names(kept.with_kept(None, "b", [])) == []


def test_the_tools_of_all_sessions_have_a_bound() -> None:
    size = tool("x").size
    kept = KeptTools(most_characters=2 * size)
    for session in ("a", "b", "a"):
        kept.with_kept(None, session, [tool("x")])
        kept.check()
    kept.with_kept(None, "c", [tool("y")])
    kept.check()
    assert names(kept.with_kept(None, "a", [], remember=False)) == [("x", None)]
    assert names(kept.with_kept(None, "b", [], remember=False)) == []
    assert names(kept.with_kept(None, "d", [tool("x"), tool("y"), tool("z")])) == [("x", 0), ("y", 0), ("z", 0)]
    kept.check()
    assert names(kept.with_kept(None, "d", [])) == []


def test_a_session_that_is_only_counted_is_not_remembered() -> None:
    kept = KeptTools()
    assert names(kept.with_kept(None, "s", [tool("x")], remember=False)) == [("x", 0)]
    assert names(kept.with_kept(None, "s", [])) == []


def test_a_session_with_too_many_tools_begins_anew() -> None:
    kept = KeptTools(most_tools=2)
    kept.with_kept(None, "s", [tool("a"), tool("b")])
    assert names(kept.with_kept(None, "s", [tool("c")])) == [("c", 0)]
    assert names(kept.with_kept(None, "s", [tool("d")])) == [("c", None), ("d", 0)]
