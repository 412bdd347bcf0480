"""What agents send to /v1/responses by themselves: tools of all types, items of all types, sealed reasoning."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import responses as response_types
from openai.types.responses import response_input_item_param
from rigs.clients import named_events
from rigs.fake_engine import FakeEngine

from mainstem.server.apis.responses.items import ITEMS, LEFT_OUT, REFUSED, sealed, unsealed
from mainstem.server.fields.rules import IGNORED_HEADER
from mainstem.server.parsing.custom import as_arguments
from mainstem.server.parsing.formats import FORMATS
from tests.server.apis.test_responses import SPEAKS, WEATHER, ask, asked, client, error_of
from tests.server.fields.test_fields import types_of
from tests.server.parsing.test_custom import ADDED, PATCH

PATCHES = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH.definition},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [
        {"type": "function", "name": "close", "description": "Closes one.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "say"},
    ],
}
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}


def ignored(response: Any) -> list[str]:
    assert response.status_code == 200, response.text
    return [name for name in response.headers.get(IGNORED_HEADER, "").split(", ") if name]


def calls(*given: tuple[str, str]) -> str:
    return FORMATS["hermes"].written(given)


def test_what_codex_sends_is_answered() -> None:
    """The fields of a turn of Codex 0.171, as its command line sends it to a provider of its own."""
    engine = FakeEngine()
    developer = {**USER, "id": "msg_1", "role": "developer"}
    body = {
        "input": [developer, developer, {**USER, "id": "msg_2"}, {**USER, "id": "msg_3"}],
        "tools": [
            {**WEATHER, "strict": False},
            AGENTS,
            PATCHES,
            {"type": "web_search", "external_web_access": True},
            {"type": "image_generation", "output_format": "png"},
            {"type": "local_shell"},
            {
                "type": "tool_search",
                "execution": "client",
                "description": "Finds tools.",
                "parameters": {"type": "object"},
            },
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "key",
        "client_metadata": {"thread_id": "t", "x-codex-window-id": "w"},
    }
    response = ask(client(engine), **body)
    assert named_events(response)[-1]["type"] == "response.completed"
    assert set(ignored(response)) >= {
        *("client_metadata", "truncation", "text.verbosity", "reasoning.summary"),
        *("tools[3]", "tools[4]", "tools[5]", "tools[6]"),
    }
    for name in ("weather", "agents__close", "agents__say", "patch"):
        assert f'"name": "{name}"' in asked(engine)
    assert "image_generation" not in asked(engine) and "web_search" not in asked(engine)


# --- tools --------------------------------------------------------------------------------------------------------


def test_a_custom_tool_is_called_with_a_text_that_is_held_by_its_grammar() -> None:
    engine = FakeEngine(lambda _: calls(("patch", as_arguments(ADDED))))
    body = ask(client(engine, **SPEAKS), tools=[PATCHES]).json()
    assert (body["output"][0]["input"], body["tools"]) == (ADDED, [PATCHES])
    grammar = engine.streams[-1].request.params.grammar
    assert grammar is not None and "%lark" in grammar.text


def test_tools_of_a_namespace_are_offered_under_both_names_and_called_by_each() -> None:
    engine = FakeEngine(lambda _: calls(("agents__close", "{}"), ("agents__say", as_arguments("hi"))))
    server = client(engine, **SPEAKS)
    body = ask(server, tools=[AGENTS]).json()
    assert '"name": "agents__close", "description": "Other agents.\\nCloses one."' in asked(engine)
    first, second = body["output"]
    assert (first["type"], first["namespace"], first["name"]) == ("function_call", "agents", "close")
    assert (second["type"], second["namespace"], second["name"], second["input"]) == (
        "custom_tool_call",
        "agents",
        "say",
        "hi",
    )
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "done"} for item in (first, second)
    ]
    again = FakeEngine()
    assert ask(client(again, **SPEAKS), [USER, first, second, *results], tools=[AGENTS]).status_code == 200
    assert calls(("agents__close", "{}"), ("agents__say", as_arguments("hi"))) in asked(again)


def test_tools_that_items_offer_are_offered_once() -> None:
    engine = FakeEngine()
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [WEATHER, {"type": "web_search"}]},
        USER,
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [WEATHER, AGENTS]},
    ]
    response = ask(client(engine), items, tools=[WEATHER])
    assert asked(engine).count('"name": "weather"') == 1
    assert '"name": "agents__say"' in asked(engine)
    assert ignored(response) == ["input[0].tools[1]"]
    error = error_of(ask(client(), [items[0], {**items[0], "tools": [{**WEATHER, "description": "other"}]}, USER]), 400)
    assert error["param"] == "input[1].tools[0].name"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "required"),
        ({"tools": [{**AGENTS, "tools": [AGENTS]}]}, "tools[0].tools[0].type", "'function', 'custom'"),
        ({"tools": [{**AGENTS, "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name", "required"),
        (
            {
                "tools": [PATCHES],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "web_search"}, {"type": "custom", "name": "g"}],
                },
            },
            "tool_choice.tools[1].name",
            "no tool named",
        ),
    ],
)
def test_bad_tools_are_named(fields: dict[str, Any], param: str, message: str) -> None:
    error = error_of(ask(client(), **fields), 400)
    assert error["param"] == param
    assert message in error["message"]


def test_a_choice_leaves_out_what_openai_runs() -> None:
    engine = FakeEngine()
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    assert ask(client(engine, **SPEAKS), tools=[PATCHES], tool_choice=allowed).status_code == 200
    assert engine.streams[-1].request.params.grammar is None, "none may be called"
    allowed["tools"].append({"type": "custom", "name": "patch"})  # type: ignore[attr-defined]
    assert ask(client(engine, **SPEAKS), tools=[PATCHES, WEATHER], tool_choice=allowed).status_code == 200
    assert engine.streams[-1].request.params.grammar is not None


# --- items --------------------------------------------------------------------------------------------------------

EXAMPLES: dict[str, dict[str, Any]] = {
    "file_search_call": {"id": "1", "queries": ["q"], "status": "completed", "results": [{"text": "r"}]},
    "computer_call": {"id": "1", "call_id": "c", "action": {"type": "click", "x": 1}, "pending_safety_checks": []},
    "computer_call_output": {"call_id": "c", "output": {"type": "computer_screenshot", "image_url": "data:x"}},
    "web_search_call": {"id": "1", "status": "completed", "action": {"type": "search", "query": "q"}},
    "code_interpreter_call": {"id": "1", "code": "1", "container_id": "k", "outputs": [{"type": "logs", "logs": "1"}]},
    "image_generation_call": {"id": "1", "result": "AAAA", "status": "completed"},
    "mcp_list_tools": {"id": "1", "server_label": "s", "tools": [{"name": "t", "input_schema": {"type": "object"}}]},
    "mcp_approval_request": {"id": "1", "arguments": "{}", "name": "t", "server_label": "s"},
    "mcp_approval_response": {"approval_request_id": "1", "approve": True},
    "mcp_call": {"id": "1", "arguments": "{}", "name": "t", "server_label": "s", "output": "r", "error": None},
    "tool_search_call": {"call_id": "c", "arguments": {"query": "q"}, "execution": "client"},
    "program": {"id": "1", "call_id": "c", "code": "1", "fingerprint": "f"},
    "program_output": {"id": "1", "call_id": "c", "result": "r", "status": "completed"},
    "compaction": {"id": "1", "encrypted_content": "gAAAA"},
    "context_compaction": {"id": "1", "encrypted_content": "gAAAA"},
}


def test_what_openai_ran_is_left_out_and_named() -> None:
    assert EXAMPLES.keys() == LEFT_OUT
    engine = FakeEngine()
    items = [{"type": kind, **fields} for kind, fields in EXAMPLES.items()]
    response = ask(client(engine), [USER, *items])
    assert ignored(response) == [f"input[{i + 1}]" for i in range(len(items))]
    alone = FakeEngine()
    assert ask(client(alone), [USER]).status_code == 200
    assert asked(engine) == asked(alone)
    assert "input: this field is required" in error_of(ask(client(), items), 400)["message"]


def test_what_the_client_ran_is_shown_as_calls_and_results() -> None:
    engine = FakeEngine()
    items = [
        {"type": "local_shell_call", "id": "1", "call_id": "a", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "a", "output": "file"},
        {"type": "shell_call", "call_id": "b", "action": {"commands": ["ls"]}, "environment": {"type": "local"}},
        {
            "type": "shell_call_output",
            "call_id": "b",
            "max_output_length": 9,
            "output": [{"stdout": "out", "stderr": "err", "outcome": {"type": "exit", "exit_code": 1}}],
        },
        {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "p"}},
        {"type": "apply_patch_call_output", "call_id": "c", "status": "completed", "output": "gone"},
    ]
    response = ask(client(engine, **SPEAKS), [USER, *items])
    assert {"input[3].environment", "input[4].max_output_length"} <= {*ignored(response)}
    prompt = asked(engine)
    for call, result in [
        (("local_shell", '{"command": ["ls"]}'), "Result of local_shell:\nfile"),
        (("shell", '{"commands": ["ls"]}'), 'Result of shell:\nouterr\n{"type": "exit", "exit_code": 1}'),
        (("apply_patch", '{"type": "delete_file", "path": "p"}'), "Result of apply_patch:\ngone"),
    ]:
        assert calls(call) in prompt
        assert result in prompt


def test_a_message_of_another_agent_is_shown() -> None:
    engine = FakeEngine()
    parts = [{"type": "input_text", "text": "Go."}, {"type": "encrypted_content", "encrypted_content": "gAAA"}]
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": parts}
    with_unknown = ask(client(engine, unknown_fields="warn"), [item])
    assert ignored(with_unknown) == ["input[0].content[1]"]
    assert "<user>From /root to /root/a:\nGo." in asked(engine)


@pytest.mark.parametrize(
    "kind", [kind for each in get_args(response_input_item_param.ResponseInputItemParam) for kind in types_of(each)]
)
def test_every_item_is_answered_or_refused_by_its_type(kind: str) -> None:
    given = {"type": kind, **EXAMPLES.get(kind, {})}
    response = ask(client(), [USER, given])
    if kind in LEFT_OUT or kind == "reasoning":
        assert response.status_code == 200
    elif kind in REFUSED:
        assert error_of(response, 400)["param"] == "input[1].type"
        assert REFUSED[kind] in error_of(response, 400)["message"]
    elif kind in ("additional_tools", "tool_search_output"):
        assert response.status_code == 200
    else:
        assert kind in ITEMS
        assert error_of(response, 400)["param"].startswith("input[1].")
        assert "required" in error_of(response, 400)["message"]


def test_what_the_server_says_it_takes_back() -> None:
    """As it came, with the answer's own reference, and as a chain: all make the same prompt."""
    said = "<think>Hm.</think>I look." + calls(("weather", '{"city": "Oslo"}'), ("patch", as_arguments(ADDED)))
    for store in (True, False):
        for limit in (None, 3, 25, 60, 90, 130):
            engine = FakeEngine(lambda _: said)
            server = client(engine, **SPEAKS)
            fields: dict[str, Any] = {"tools": [WEATHER, PATCHES], "include": ["reasoning.encrypted_content"]}
            first = ask(server, "x", store=store, max_output_tokens=limit, **fields).json()
            results = [
                {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "done"}
                for item in first["output"]
                if "call_id" in item
            ]
            assert ask(server, [USER, *first["output"], *results, USER], **fields).status_code == 200
            whole = asked(engine)
            bare = [{key: value for key, value in item.items() if key not in ("content", "id", "status")}
                    if item["type"] == "reasoning" else item for item in first["output"]]  # fmt: skip
            response = ask(server, [USER, *bare, *results, USER], **fields)
            assert response.status_code == 200, response.text
            assert ignored(response) == []
            assert asked(engine) == whole, "the sealed reasoning alone says the same"
            if store:
                assert ask(server, [*results, USER], previous_response_id=first["id"], **fields).status_code == 200
                assert asked(engine) == whole


# --- reasoning ----------------------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_reasoning_is_sealed_and_unsealed(text: str) -> None:
    assert unsealed(sealed(text)) == text


@pytest.mark.parametrize("other", ["", "gAAAAABo", "mainstem.1.", "mainstem.1.%%%", "mainstem.1._w=="])
def test_what_another_server_sealed_is_left_out_and_named(other: str) -> None:
    engine = FakeEngine()
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": other}
    response = ask(client(engine), [USER, item])
    readable = other in ("", "mainstem.1.")
    assert ignored(response) == ([] if readable else ["input[1].encrypted_content"])
    alone = FakeEngine()
    ask(client(alone), [USER])
    assert asked(engine) == asked(alone)


def test_reasoning_is_sealed_where_that_is_asked_for_and_when_it_is_complete() -> None:
    engine = FakeEngine(lambda _: "<think>Hm.</think>Yes")
    server = client(engine, **SPEAKS)
    assert "encrypted_content" not in ask(server).json()["output"][0]
    body = ask(server, include=["reasoning.encrypted_content"], store=False).json()
    assert body["output"][0]["encrypted_content"] == sealed("Hm.")
    events = named_events(ask(server, include=["reasoning.encrypted_content"], stream=True))
    items = [event["item"] for event in events if event["type"].startswith("response.output_item.")]
    assert "encrypted_content" not in items[0]
    assert items[1]["encrypted_content"] == sealed("Hm.")


# --- the end of a stream that was cut -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "limit", "kinds"),
    [
        ("Hello", 3, ["output_text", "content_part"]),
        ("<think>Hmm", 9, ["reasoning_text", "content_part"]),
        (calls(("weather", '{"city": "Oslo"}')), 62, ["function_call_arguments"]),
        (calls(("patch", as_arguments("abcdefghijkl"))), 62, ["custom_tool_call_input"]),
    ],
)
def test_a_stream_that_was_cut_ends_as_at_openai(said: str, limit: int, kinds: list[str]) -> None:
    server = client(FakeEngine(lambda _: said), **SPEAKS)
    events = named_events(ask(server, tools=[WEATHER, PATCHES], max_output_tokens=limit, stream=True))
    ends = [f"response.{kind}.done" for kind in (*kinds, "output_item")]
    assert [event["type"] for event in events[-len(ends) - 1 :]] == [*ends, "response.incomplete"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-2]["item"]["status"] == "incomplete"
    body = events[-1]["response"]
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["completed_at"], body["error"]) == (None, None)
    assert body["output"] == [events[-2]["item"]]
    assert body["usage"]["output_tokens"] == limit


def test_every_event_of_a_custom_tool_is_one_of_the_client() -> None:
    types = get_args(get_args(response_types.ResponseStreamEvent)[0])
    known = {each for kind in types for each in get_args(kind.model_fields["type"].annotation)}
    said = f"<think>Hm.</think>Look.{calls(('weather', '{}'), ('patch', as_arguments('x')))}"
    server = client(FakeEngine(lambda _: said), **SPEAKS)
    events = named_events(ask(server, tools=[WEATHER, PATCHES], stream=True))
    kinds = {event["type"] for event in events}
    assert "response.custom_tool_call_input.done" in kinds and kinds <= known
    assert json.dumps(events)
