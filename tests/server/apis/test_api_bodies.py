"""What every API answers, byte for byte: a table of requests and the bodies, streams and errors that came back.

MAINSTEM_RECORD=1 writes down what comes back now. Ids are numbered in the order in which they are seen, and time stands
still.
"""

from __future__ import annotations

import json
import lzma
import os
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rigs.scripted_model import ScriptedEngine
from starlette.testclient import TestClient

from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig

RECORDED = Path(__file__).parents[2] / "recorded" / "api_bodies.json.xz"
HEADERS = ("content-type", "retry-after", "x-mainstem-ignored", "x-mainstem-unknown-fields")
_ID = re.compile(r"(?<=[a-z]_|l-)[0-9a-f]{24,32}")
ID = "$id"
"""Stands for the id of the latest answer that has one."""

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OPEN = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
SAY, ACT = "<say>It is.</say>", '<call name="weather">{"city": "Oslo"}</call><say>Sun.</say>'
THINK = "<say><think>Hm.</think>So.</say>"
WRITE = '<call name="patch">+ a\n- b</call><say>Done.</say>'
PICTURE = "data:image/png;base64,AAAA"
ODD = "set stop = 3"  # a tool of this name keeps it in errors
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
EXPLICIT = {"mode": "explicit", "ttl": "30m"}
BOUNDS: list[dict[str, Any]] = [
    {"temperature": -1},
    {"top_p": 0},
    {"top_k": -2},
    {"min_p": 2},
    {"presence_penalty": 9},
    {"frequency_penalty": -9},
    {"repetition_penalty": 0},
    {"min_tokens": 999},
    {"seed": 1 << 70},
    {"priority": 1 << 40},
    {"cache_salt": ""},
    {"temperature": "warm"},
    {"explain": True},
    {"modle": "x"},
    {"model": "other"},
    {"chat_template_kwargs": {"tools": []}},
    {"chat_template_kwargs": {"unheard_of": 1}, "seed": 3, "top_k": -1, "min_p": 0.1, "ignore_eos": True},
]
"""Fields that all APIs have, or that are wrong in all."""


def chats(*messages: Any, **fields: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    return {"messages": said or [{"role": "user", "content": SAY}], "max_tokens": 200, **fields}


def function(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **fields}}


PATCH = {"type": "custom", "custom": {"name": "patch", "description": "of a file"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
]}  # fmt: skip
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY}}

COMPLETIONS: list[Any] = [
    {"prompt": SAY},
    {"prompt": [SAY, "<say>No.</say>"], "n": 2, "best_of": 3},
    {"prompt": [60, 115], "return_token_ids": True, "max_tokens": 4},
    {"prompt": SAY, "logprobs": 2, "echo": True},
    {"prompt": SAY, "logprobs": 1, "return_tokens_as_token_ids": True, "n": 2, "seed": 5},
    {"prompt": SAY, "prompt_logprobs": 1},
    {"prompt": SAY, "stop": "is", "include_stop_str_in_output": True},
    {"prompt": SAY, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"prompt": SAY, "guided_regex": "[0-9]{3}"},
    {"prompt": SAY, "guided_json": CITY, "user": "me", "store": True},
    {"prompt": SAY, "guided_regex": "(", "max_tokens": 5},
    {"prompt": SAY, "truncate_prompt_tokens": 8, "echo": True},
    {"prompt": ["a", 1]},
    {"prompt": []},
    {"prompt": ""},
    {"prompt": [300]},
    {"prompt": SAY, "best_of": 1, "n": 2},
    {"prompt": SAY, "n": 129},
    {"prompt": [SAY] * 100, "n": 2},
    {"prompt": SAY, "stop": [""]},
    {"prompt": SAY, "stop": ["a"] * 17},
    {"prompt": SAY, "logprobs": 21},
    {"prompt": SAY, "logit_bias": {"a": 1}},
    {"prompt": SAY, "logit_bias": {"65": 1000}},
    {"prompt": SAY, "bad_words": ["x"], "allowed_token_ids": [65], "max_tokens": 3},
    {"prompt": SAY, "max_tokens": 1 << 21},
    {"prompt": "x" * (1 << 21)},
    {"prompt": SAY, "suffix": "a"},
    {"prompt": SAY, "cache_hints": {"retain_s": 1e9}},
    {"prompt": SAY, "cache_hints": {"retain_s": 5, "no_store": True}},
    {"prompt": SAY, "cache_hints": {"next_use_s": 1, "next_use_steps": 1}},
    {"prompt": SAY, "prompt_cache_options": {"ttl": "30m"}, "prompt_cache_key": "k"},
    *({"prompt": SAY, **each} for each in BOUNDS),
    {},
    "{",
    "[]",
]

CHATS: list[Any] = [
    chats(),
    chats(ACT, tools=[function()]),
    chats(ACT, CALLED, {"role": "tool", "tool_call_id": "c1", "content": "sun"}, tools=[function()]),
    chats(WRITE, tools=[PATCH, function()], tool_choice="required"),
    chats(ACT, tools=[function()], tool_choice=NAMED, max_tokens=30),
    chats(ACT, tools=[function(), PATCH], tool_choice=ALLOWED, parallel_tool_calls=False),
    chats(ACT, tools=[function()], tool_choice="none"),
    chats(THINK, n=2, logprobs=True, top_logprobs=2),
    chats(THINK, thinking={"type": "disabled", "budget_tokens": 5}, reasoning_effort="low"),
    chats(SAY, response_format=SCHEMA, store=True, metadata={"a": "b"}),
    chats(SAY, response_format={"type": "json_object"}, stop=["}"]),
    chats(SAY, stream_options={"include_usage": True, "continuous_usage_stats": True}, return_token_ids=True),
    chats(SAY, prompt_logprobs=1, prompt_cache_key="k"),
    chats(
        {"role": "developer", "content": "Be."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": SAY, "prompt_cache_breakpoint": EXPLICIT},
                {"type": "text", "text": "b"},
            ],
        },
        prompt_cache_options={"mode": "explicit"},
        tools=[{**function(), "cache_control": EPHEMERAL}],
    ),
    chats(SAY, {"role": "assistant", "content": "It"}, continue_final_message=True, add_special_tokens=True),
    chats(SAY, tools=[{"type": "web_search"}, function()], user="me", service_tier="flex"),
    chats(SAY, max_tokens=None, max_completion_tokens=3),
    chats(SAY, tools=[function(ODD)]),
    chats(SAY, tools=[function(), function()]),
    chats(SAY, tools=[function(strict=True, parameters=OPEN)]),
    chats(SAY, tools=[function(parameters={"type": "string"})]),
    chats(
        SAY,
        tools=[
            {
                "type": "custom",
                "custom": {
                    "name": "p",
                    "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "("}},
                },
            }
        ],
    ),
    chats(SAY, tools=[function()], tool_choice={"type": "function", "function": {"name": ODD}}),
    chats(SAY, tools=[], tool_choice="required"),
    chats(SAY, tools=[function()], tool_choice="required", guided_regex="a"),
    chats(SAY, tools=[function()], tool_choice={"type": "function"}),
    chats(SAY, response_format={"type": "xml"}),
    chats(SAY, response_format={"type": "json_schema"}),
    chats(SAY, response_format={"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}),
    chats(SAY, response_format={"type": "json_object"}, guided_regex="a"),
    chats(SAY, top_logprobs=2),
    chats(SAY, logprobs=True, top_logprobs=99),
    chats(SAY, stop=[""]),
    chats(SAY, add_generation_prompt=True, continue_final_message=True),
    chats({"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}),
    chats({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}),
    chats({"role": "user", "content": [{"type": "text"}]}),
    chats({"role": "user"}),
    chats({"role": "tool", "content": "a"}),
    chats({"role": "tool", "content": "a", "tool_call_id": ""}),
    chats({"role": "function", "content": "a"}),
    chats({"role": "user", "content": "a", "tool_calls": CALLED["tool_calls"]}),
    chats({"role": "king", "content": "a"}),
    chats("x" * (1 << 21)),
    chats("x", max_tokens=1 << 21),
    {"messages": []},
    chats(SAY, functions=[{}]),
    *(chats(SAY, **each) for each in BOUNDS),
    ("GET", f"/v1/chat/completions/{ID}"),
    ("GET", "/v1/chat/completions"),
    ("GET", f"/v1/chat/completions/{ID}/messages"),
    ("DELETE", f"/v1/chat/completions/{ID}"),
]


def items(*given: Any, **fields: Any) -> dict[str, Any]:
    return {"input": list(given) or SAY, "max_output_tokens": 200, **fields}


def said(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


TOOL = {"type": "function", "name": "weather", "parameters": CITY}
CUSTOM = {"type": "custom", "name": "patch", "description": "of a file"}
SPACE = {"type": "namespace", "name": "sky", "description": "All above", "tools": [TOOL, {**TOOL, "name": "sun"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
REASONED = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []}

RESPONSES: list[Any] = [
    items(),
    items(previous_response_id=ID, instructions="Be."),
    ("GET", f"/v1/responses/{ID}"),
    ("GET", f"/v1/responses/{ID}/input_items"),
    items(said("user", {"type": "input_text", "text": ACT}), tools=[TOOL]),
    items(said("user", {"type": "input_text", "text": ACT}), REASONED, CALL, RESULT, tools=[TOOL]),
    items({"role": "user", "content": WRITE}, tools=[CUSTOM, TOOL], tool_choice="required"),
    items({"role": "user", "content": ACT.replace("weather", "sky__weather")}, tools=[SPACE]),
    items({"role": "user", "content": ACT}, tools=[TOOL], max_output_tokens=30),
    items({"role": "user", "content": ACT}, tools=[TOOL], tool_choice={"type": "function", "name": "weather"}),
    items(
        {"role": "user", "content": ACT},
        tools=[TOOL],
        parallel_tool_calls=False,
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "web_search"}, {"name": "weather"}],
        },
    ),
    items({"role": "user", "content": THINK}, top_logprobs=2, include=["reasoning.encrypted_content"]),
    items({"role": "user", "content": THINK}, reasoning={"effort": "low", "summary": "auto"}, user="me"),
    items(text={"format": {"type": "json_schema", "name": "n", "schema": CITY}}, store=False),
    items(text={"format": {"type": "json_object"}, "verbosity": "low"}, stop=["}"]),
    items(
        said("user", {"type": "input_text", "text": SAY, "prompt_cache_breakpoint": EXPLICIT}),
        prompt_cache_key="k",
        prompt_cache_options={"mode": "explicit", "ttl": "30m", "comparison_response_id": ID},
    ),
    items(prompt_cache_options={"prewarm": True}),
    items({"type": "item_reference", "id": "msg_1_2"}),
    items(
        {"type": "local_shell_call", "call_id": "c", "action": {"a": 1}},
        {"type": "local_shell_call_output", "id": "c", "output": {"b": 2}},
        {"role": "user", "content": SAY},
    ),
    items(
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    ),
    items({"type": "agent_message", "author": "a", "recipient": "b", "content": SAY}),
    items({"type": "additional_tools", "tools": [TOOL]}, {"role": "user", "content": ACT}),
    items({"type": "web_search_call", "id": "w"}, {"role": "user", "content": SAY}, tools=[{"type": "web_search"}]),
    items({"type": "compaction_trigger"}),
    items({"type": "odd"}),
    items({"type": "message", "role": "user"}),
    items({"role": "user", "content": []}),
    items({"role": "user", "content": [{"type": "input_text"}]}),
    items({"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}),
    items({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}),
    items({**CALL, "name": ""}),
    items({**CALL, "call_id": ""}),
    items({**CALL, "arguments": None}),
    items({**RESULT, "output": []}),
    items({**RESULT, "call_id": None}),
    items({**CALL, "call_id": "c", "action": 1}),
    items(input=None),
    items(input=""),
    items(input="x" * (1 << 21)),
    items(max_output_tokens=1 << 21),
    items(max_output_tokens=0),
    items(tools=[{**TOOL, "name": ODD}]),
    items(tools=[{**TOOL, "name": None}]),
    items(tools=[TOOL, TOOL]),
    items(tools=[{**SPACE, "tools": [{**TOOL, "name": ODD}]}]),
    items(tools=[{**TOOL, "strict": True, "parameters": OPEN}]),
    items(tools=[{**TOOL, "parameters": {"type": "string"}}]),
    items(tools=[{**TOOL, "parameters": 3}]),
    items(tools=[{**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": "("}}]),
    items(tools=[{**CUSTOM, "format": {"type": "grammar"}}]),
    items(tools=[{**TOOL, "format": {"type": "text"}}]),
    items(tools=[TOOL], tool_choice={"type": "function", "name": ODD}),
    items(tools=[TOOL], tool_choice={"type": "function"}),
    items(tools=[TOOL], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"name": ODD}]}),
    items(tools=[TOOL], tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}]}),
    items(tools=[TOOL], tool_choice={"type": "allowed_tools", "tools": []}),
    items(tool_choice="required"),
    items(text={"format": {"type": "json_schema", "name": "n"}}),
    items(text={"format": {"type": "json_schema", "schema": {"type": "odd"}}}),
    items(text={"format": {"type": "text", "schema": {}}}),
    items(top_logprobs=21),
    items(stop=["a"] * 17),
    items(stop=[""]),
    items(background=True),
    items(previous_response_id="resp_none"),
    *(items(**each) for each in BOUNDS),
    ("/v1/responses/input_tokens", {"input": SAY, "tools": [TOOL]}),
    ("/v1/responses/input_tokens", {"instructions": "Be.", "tools": [{**TOOL, "name": ODD}]}),
    ("/v1/responses/input_tokens", {}),
    ("DELETE", f"/v1/responses/{ID}"),
    ("POST", f"/v1/responses/{ID}/cancel"),
]


def blocks(*content: Any, **fields: Any) -> dict[str, Any]:
    turns = [each if isinstance(each, dict) else {"role": "user", "content": each} for each in content]
    return {"messages": turns or [{"role": "user", "content": SAY}], "max_tokens": 200, **fields}


WEATHER = {"name": "weather", "input_schema": CITY}
USED = {"role": "assistant", "content": [
    {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Let me."},
    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ås"}},
]}  # fmt: skip
CAME = {"type": "tool_result", "tool_use_id": "t1", "content": "sun"}
TEXT = {"type": "text", "text": SAY}

MESSAGES: list[Any] = [
    blocks(),
    blocks(ACT, tools=[WEATHER]),
    blocks(ACT, USED, [CAME], tools=[WEATHER], system=[{"type": "text", "text": "Be.", "cache_control": EPHEMERAL}]),
    blocks(ACT, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}, max_tokens=30),
    blocks(ACT, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True}),
    blocks(THINK, thinking={"type": "enabled", "budget_tokens": 1024}, output_config={"effort": "low"}),
    blocks(SAY, output_config={"format": {"type": "json_schema", "schema": CITY}}, metadata={"user_id": "me"}),
    blocks(SAY, stop_sequences=["is"]),
    blocks([{**TEXT, "cache_control": EPHEMERAL}], diagnostics={"previous_message_id": None}, cache_control=EPHEMERAL),
    blocks([{**TEXT, "cache_control": EPHEMERAL}], diagnostics={"previous_message_id": ID}, system="Be."),
    blocks(SAY, {"role": "assistant", "content": "It"}),
    blocks(SAY, tools=[{"type": "web_search_20250305", "name": "web_search"}, WEATHER]),
    blocks(SAY, tools=[{"type": "bash_20250124", "name": ODD}, WEATHER]),
    blocks([{"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": SAY}}]),
    blocks([{**CAME, "is_error": True, "content": [TEXT]}, TEXT]),
    blocks([{"type": "redacted_thinking", "data": "x"}, TEXT], {"role": "assistant", "content": []}, SAY),
    blocks(SAY, system=[{"type": "text", "text": "x-anthropic-billing-header: a=1;"}]),
    blocks([]),
    blocks([{"type": "text"}]),
    blocks([{"type": "odd"}]),
    blocks([{"type": "text", "text": "a", "name": "b"}]),
    blocks([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]),
    blocks([{"type": "image", "source": {"type": "file"}}]),
    blocks([{"type": "document", "source": {"type": "base64", "data": "AAAA"}}]),
    blocks([{**CAME, "tool_use_id": ""}]),
    blocks({"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "a", "input": {}}]}),
    blocks({"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "", "input": {}}]}),
    blocks({"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}),
    blocks({"role": "king", "content": "a"}),
    blocks(SAY, {"role": "assistant", "content": [CAME]}),
    blocks(SAY, tools=[{**WEATHER, "name": ODD}]),
    blocks(SAY, tools=[{**WEATHER, "name": None}]),
    blocks(SAY, tools=[WEATHER, WEATHER]),
    blocks(SAY, tools=[{**WEATHER, "type": "odd"}]),
    blocks(SAY, tools=[{**WEATHER, "input_schema": {"type": "string"}}]),
    blocks(SAY, tools=[{**WEATHER, "strict": True, "input_schema": OPEN}]),
    blocks(SAY, tools=[WEATHER], tool_choice={"type": "tool", "name": ODD}),
    blocks(SAY, tools=[WEATHER], tool_choice={"type": "tool"}),
    blocks(SAY, tools=[WEATHER], tool_choice={"type": "auto", "name": "weather"}),
    blocks(SAY, tool_choice={"type": "any"}),
    blocks(SAY, output_config={"format": {"type": "json_schema", "schema": {"type": "odd"}}}),
    blocks(SAY, stop_sequences=[""]),
    blocks(SAY, stop_sequences=["a"] * 17),
    blocks([{**TEXT, "cache_control": EPHEMERAL}] * 5),
    blocks(SAY, container="x"),
    blocks(SAY, max_tokens=-1),
    blocks(SAY, max_tokens=1 << 21),
    blocks("x" * (1 << 21)),
    {"messages": []},
    {"messages": [{"role": "user", "content": SAY}]},
    *(blocks(SAY, **each) for each in BOUNDS),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": SAY}], "tools": [WEATHER]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": SAY}], "max_tokens": 3}),
    ("/v1/messages/count_tokens", {"messages": []}),
]

OTHERS: list[Any] = [
    ("GET", "/v1/nothing"),
    ("GET", "/v1/completions"),
    ("/v1/embeddings", {"input": [SAY, "b"]}),
    ("/v1/embeddings", {"input": [SAY, ""]}),
    ("/v1/embeddings", {"input": SAY, "dimensions": 3}),
    ("/v1/embeddings", {"input": "x" * (1 << 21)}),
    ("/tokenize", chats(tools=[function()], max_tokens=None)),
    ("/tokenize", {"messages": [{"role": "user", "content": SAY}], "tools": [function()], "return_token_strs": True}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [65, 999]}),
    ("/v1/cache/hints", {"action": "pin", "messages": [{"role": "user", "content": SAY}], "tools": [function()]}),
    ("/v1/cache/remove", {"prompt": SAY, "all": True}),
    ("/v1/cache/remove", {"messages": [CALLED]}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
    ("/v1/cache/explain?route=/v1/messages", blocks()),
]
TABLE = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHATS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "": OTHERS,
}


def answers(path: str) -> list[tuple[int, dict[str, str], str]]:
    """Returns the status, the headers that count and the body of the answer to each request of a table."""
    engine: Any = ScriptedEngine()
    # Without what may or may not be computed between two requests.
    config = ServerConfig(embeddings=True, tool_call_parser="hermes", reasoning_parser="qwen3", precompute_turns=0.0)
    server = TestClient(create_app(engine, config, now=lambda: 1e9), raise_server_exceptions=False)
    numbers, numbered, latest, made = count(1), dict[str, str](), "", []

    def send(method: str, url: str, body: Any = None) -> None:
        nonlocal latest
        text = body if isinstance(body, str) else json.dumps(body)
        content = text.replace(ID, latest) if method == "POST" else None
        reply = server.request(method, url.replace(ID, latest), content=content)
        if found := re.search(r'"id":"((?:chatcmpl-|resp_|msg_)[0-9a-f]{32})"', reply.text):
            latest = found[1]
        plain = _ID.sub(lambda found: numbered.setdefault(found[0], f"#{next(numbers)}"), reply.text)
        made.append(
            (reply.status_code, {name: reply.headers[name] for name in HEADERS if name in reply.headers}, plain)
        )

    for each in TABLE[path]:
        if isinstance(each, tuple):
            method, url, body = (each[0], each[1], {}) if each[0].isupper() else ("POST", each[0], each[1])
            send(method, url, {"model": "scripted", **body} if body else body)
        elif isinstance(each, str):
            send("POST", path, each)
        else:
            send("POST", path, {"model": "scripted", **each})
            if made[-1][0] == 200:
                send("POST", path, {"model": "scripted", "stream": True, **each})
    return made


@pytest.mark.parametrize("path", TABLE)
def test_every_api_answers_as_it_was_recorded(path: str) -> None:
    recorded = json.loads(lzma.decompress(RECORDED.read_bytes())) if RECORDED.exists() else {}
    made = json.loads(json.dumps(answers(path)))
    if os.environ.get("MAINSTEM_RECORD"):
        text = json.dumps({**recorded, path: made}, indent=0, sort_keys=True)
        RECORDED.write_bytes(lzma.compress(text.encode()))
        return
    assert len(made) == len(recorded[path])
    for now, before in zip(made, recorded[path], strict=True):
        assert now == before
