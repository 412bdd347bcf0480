"""Bodies after rules: the server reads from them what it would make of the bodies that came."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.prompt_rules.bodies import rewritten_body, route_of
from mainstem.prompt_rules.notes import Notes
from mainstem.prompt_rules.rewriting import Declared, rewritten
from mainstem.prompt_rules.rule_file import read_rules
from mainstem.prompt_rules.rules import Rule
from mainstem.server.apis.generation import Conversation, Generation, Texts
from mainstem.server.apis.table import APIS
from mainstem.server.errors import ApiError
from mainstem.server.fields.rules import Unheeded

RULES = r"""
[[rule]]
name = "clock"
action = "move"
match = 'Now: (?P<value>[0-9:]+)'
example = "Now: 12:30"
places = ["system", "user", "tool", "assistant", "tools"]

[[rule]]
name = "line"
action = "drop"
match = 'x-note: [^\n]*\n'
example = "x-note: 5\n"
places = ["system", "user", "tool", "assistant"]

[[rule]]
name = "over two parts"
action = "drop"
match = 'begins\nends'
example = "begins\nends"
places = ["system", "user", "tool"]

[[rule]]
name = "hour"
action = "round"
to = "hour"
match = 'At [0-9]+:(?P<minute>[0-9]+)'
example = "At 12:30"
places = ["system", "user", "prompt", "tools"]

[[rule]]
name = "order"
action = "sort"
lists = ["tools", "keys"]
"""


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Rule]:
    path = tmp_path_factory.mktemp("rules") / "rules.toml"
    path.write_text(RULES)
    return read_rules([path])


def prompt_of(route: str, body: Any) -> Conversation | Texts:
    read = APIS[route].read(json.dumps(body).encode(), Unheeded(tolerant=True))
    assert isinstance(read, Generation)
    return read.prompt


def shown(asked: Conversation | Texts, rules: Sequence[Rule]) -> tuple[Any, Any]:
    """Returns the messages or texts, and the tools, of a prompt after rules."""
    if isinstance(asked, Texts):
        made = rewritten(rules, texts=[each for each in asked.prompts if isinstance(each, str)])
        return list(made.texts), []
    given = asked.tooling.tools
    declared = [Declared(tool.name, tool.description, tool.parameters, i) for i, tool in enumerate(given)]
    made = rewritten(rules, asked.messages, declared)
    made.place(Notes(), ())
    # an assistant that said nothing has no text or an empty one, which templates render the same
    said = [
        {**each, "content": each["content"] or None} if each["role"] == "assistant" else each for each in made.messages
    ]
    return said, [(tool.name, tool.description, json.dumps(tool.parameters)) for tool in made.tools]


def check_as_the_server(route: str, body: dict[str, Any], rules: Sequence[Rule]) -> int:
    """Checks that a rewritten body is read as the server rewrites it; returns the number of changes."""
    before = deepcopy(body)
    made = rewritten_body(rules, body, route)
    assert body == before
    assert shown(prompt_of(route, made.body), ()) == shown(prompt_of(route, body), rules)
    return len(made.changes)


SYSTEM = "x-note: 7\nNow: 12:30. You help. At 10:45 begins"
TOOL = {"name": "open", "description": "Opens. At 10:45", "parameters": {"type": "object", "properties": {"b": {}}}}
OTHER = {"name": "close", "description": "Closes.", "parameters": {"type": "object", "description": "x"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": SYSTEM}, {"type": "text", "text": "ends. Now: 1"}]},
            {"role": "user", "content": "Now: 12:31, how?"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "open", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "x-note: 7\nopen"},
            {"role": "developer", "content": "Now: 5."},
            {"role": "user", "content": [{"type": "text", "text": "Why? At 10:45"},
                                         {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]},
        ],
        "tools": [{"type": "function", "function": TOOL}, {"function": OTHER, "type": "function"}],
    }),
    "messages": ("/v1/messages", {
        "model": "m", "max_tokens": 5,
        "system": [{"type": "text", "text": SYSTEM}, {"type": "text", "text": "ends. Now: 1"}],
        "messages": [
            {"role": "user", "content": "Now: 12:31, how? begins"},
            {"role": "user", "content": [{"type": "text", "text": "ends here"}, {"type": "text", "text": "At 9:09"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Now: 5", "signature": "s"}, {"type": "text", "text": "Now: 6"},
                {"type": "tool_use", "id": "c", "name": "open", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x-note: 3\nyes"}]},
                {"type": "tool_result", "tool_use_id": "d", "is_error": True, "content": "Now: 8 no"},
                {"type": "text", "text": "At 10:45"}, IMAGE]},
        ],
        "tools": [{"input_schema" if name == "parameters" else name: each for name, each in tool.items()}
                  for tool in (TOOL, OTHER)],
    }),
    "text": ("/v1/messages", {
        "model": "m", "max_tokens": 5, "system": SYSTEM, "messages": [{"role": "user", "content": "How?"}]}),
    "responses": ("/v1/responses", {
        "model": "m", "instructions": SYSTEM,
        "input": [
            {"role": "developer", "content": "ends. Now: 4"},
            {"role": "user", "content": [{"type": "input_text", "text": "Now: 12:31"},
                                         {"type": "input_text", "text": "begins"},
                                         {"type": "input_text", "text": "ends"}]},
            {"type": "function_call", "call_id": "c", "name": "open", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x-note: 7\nopen"},
            {"role": "user", "content": "At 10:45?"},
        ],
        "tools": [{"type": "function", **TOOL}, {"type": "function", **OTHER}],
    }),
    "input": ("/v1/responses", {"model": "m", "instructions": "Now: 12:31. Help.", "input": "At 10:45?"}),
    "prompts": ("/v1/completions", {"model": "m", "prompt": ["At 10:45 it", "rains"]}),
    "prompt": ("/v1/completions", {"model": "m", "prompt": "At 10:45 it"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_rewritten_body_is_read_as_the_server_rewrites_it(name: str, rules: Sequence[Rule]) -> None:
    route, body = BODIES[name]
    assert route_of(body) == route
    assert check_as_the_server(route, body, rules) > 0


def test_a_change_over_two_parts_makes_one_of_them(rules: Sequence[Rule]) -> None:
    made = rewritten_body(rules, BODIES["messages"][1]).body
    assert [block["text"] for block in made["system"]] == ["Now: . You help. At 10:00 . Now: "]
    assert [message["role"] for message in made["messages"]] == ["user", "user", "assistant", "user"]


words = st.lists(
    st.sampled_from(["begins", "ends", "Now: 12:30", "x-note: 5", "At 10:45", "\n", "go on", " "]),
    min_size=1,
    max_size=6,
).map("".join)
texts = words | st.lists(words, min_size=1, max_size=4)


@given(texts, st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), texts), max_size=5), words)
def test_any_texts_are_rewritten_as_the_server_does(
    rules: Sequence[Rule], system: Any, turns: list[tuple[str, Any]], last: str
) -> None:
    def blocks(content: Any, kind: str) -> Any:
        return content if isinstance(content, str) else [{"type": kind, "text": each} for each in content]

    said = [{"role": role, "content": blocks(each, "text")} for role, each in [*turns, ("user", last)]]
    check_as_the_server("/v1/messages", {"model": "m", "max_tokens": 1, "system": blocks(system, "text"),
                                         "messages": said}, rules)  # fmt: skip
    check_as_the_server("/v1/chat/completions", {"model": "m", "messages": said}, rules)
    items = [{"role": role, "content": blocks(each, "input_text")} for role, each in [*turns, ("user", last)]]
    instructions = system if isinstance(system, str) else system[0]
    check_as_the_server("/v1/responses", {"model": "m", "instructions": instructions, "input": items}, rules)


RECORDED = Path(__file__).parents[1] / "recorded" / "clients"


def test_requests_of_clients_are_rewritten_as_the_server_does(rules: Sequence[Rule]) -> None:
    checked = 0
    for path in sorted(RECORDED.glob("*.json")):
        for request in json.loads(path.read_text()):
            route, body = request["path"].partition("?")[0], request.get("body") or {}
            if route not in APIS or request["method"] != "POST":
                continue
            if any(tool.get("type") in ("namespace", "custom") for tool in body.get("tools") or ()):
                continue  # a namespace is sorted as one tool, and the server writes the schema of a custom tool
            try:
                prompt_of(route, body)
            except (ApiError, AssertionError):
                continue  # the server refuses it, or it goes on from an answer that is not here
            checked += check_as_the_server(route, body, rules) >= 0
    assert checked > 20


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "system", "content": "You help."}, {"role": "user", "content": "Now: 12:30"}]},
        {"messages": [{"role": "system", "content": "Now: 12:30"}], "prompt_rules": False},
        {"input": [{"type": "web_search_call"}, 5], "instructions": 7},
        {"messages": "hello", "tools": 5},
        {"messages": [{"role": ["user"], "content": 5}], "tools": [5, {"function": {}}, {"name": "x"}]},
        {"prompt": [1, 2, 3]},
        {"prompt": {}},
        {},
    ],
)
def test_what_no_rule_finds_is_the_same_object(body: dict[str, Any]) -> None:
    assert rewritten_body(read_rules(["claude-code"]), body).body is body


@pytest.mark.parametrize("body", [{"messages": "hello", "tools": 5}, {"tools": [5, {}]}, {"messages": [1]}])
def test_malformed_bodies_are_left_alone(body: dict[str, Any], rules: Sequence[Rule]) -> None:
    assert rewritten_body(rules, body).body == body


def test_instructions_of_which_nothing_is_left_are_an_empty_text(rules: Sequence[Rule]) -> None:
    question = [{"role": "user", "content": "q"}]
    for more in ([], [{"role": "system", "content": "begins"}]):
        told = {"model": "m", "max_tokens": 1, "system": "x-note: 5\n", "messages": more + question}
        assert check_as_the_server("/v1/messages", told, rules) == 1
        assert check_as_the_server("/v1/messages", {**told, "system": ""}, rules) == 0
        asked = {"model": "m", "instructions": "x-note: 5\n", "input": more + question}
        assert check_as_the_server("/v1/responses", asked, rules) == 1
    assert check_as_the_server("/v1/responses", {**asked, "input": "q"}, rules) == 1
    assert check_as_the_server("/v1/responses", {**asked, "instructions": "", "input": "Now: 1"}, rules) == 2


def test_notes_are_those_of_one_conversation(rules: Sequence[Rule]) -> None:
    first = {"model": "m", "messages": [{"role": "system", "content": "Now: 1"}, {"role": "user", "content": "q"}]}
    more = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    later = {**first, "messages": [*first["messages"], *more]}
    for fields, known in (({}, True), *(({name: "x"}, False) for name in ("model", "cache_salt", "prompt_cache_key"))):
        notes = Notes()
        rewritten_body(rules, {**first, **fields}, notes=notes)
        at = [change.at for change in rewritten_body(rules, later, notes=notes).changes if change.is_note]
        assert at == (["messages[1]"] if known else ["messages[3]"]), fields


def test_a_request_without_rules_is_the_same_object(rules: Sequence[Rule]) -> None:
    body = BODIES["text"][1]
    assert rewritten_body(rules, body).body is not body
    assert rewritten_body(rules, left_out := {**body, "prompt_rules": False}).body is left_out


def test_a_rule_of_another_route_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(RULES.partition('[[rule]]\nname = "line"')[0] + 'routes = ["/v1/messages"]\n')
    own, body = read_rules([path]), BODIES["text"][1]
    assert rewritten_body(own, body).changes and not rewritten_body(own, body, "/v1/chat/completions").changes
