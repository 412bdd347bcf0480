"""/v1/messages and /v1/messages/count_tokens: over a scripted engine, and by the official client."""

from __future__ import annotations

import json
import time
from typing import Any

import anthropic
import pytest
from rigs.app_client import client
from rigs.clients import named_events, served
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.server.apis.messages.blocks import attribution
from mainstem.server.apis.messages.request import ContentBlock
from mainstem.server.apis.table import APIS

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
WEATHER = {
    "name": "weather",
    "description": "What the sky does",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SPEAKS: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
USER = {"role": "user", "content": "hi"}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}


def ask(server: TestClient, *messages: Any, key: str = "none", path: str = PATH, **fields: Any) -> Any:
    bounds = {} if path == COUNT else {"max_tokens": 300}
    body = {"model": "fake", "messages": messages or [USER], **bounds, **fields}
    return server.post(path, json=body, headers={"x-api-key": key, "anthropic-version": "2023-06-01"})


def asked(engine: FakeEngine) -> str:
    """The last prompt."""
    return engine.tokenizer.decode(engine.streams[-1].request.tokens)


def error_of(response: Any, status: int, type: str = "invalid_request_error") -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error"} and set(body["error"]) - {"details"} == {"type", "message"}
    assert (body["type"], body["error"]["type"]) == ("error", type)
    return str(body["error"]["message"])


def blocks(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


# --- answers ------------------------------------------------------------------------------------------------------


def test_a_prompt_alone_is_an_answer_that_was_cut() -> None:
    nothing = ask(client(), max_tokens=0).json()
    assert (nothing["content"], nothing["stop_reason"], nothing["usage"]["output_tokens"]) == ([], "max_tokens", 0)


# --- conversations ------------------------------------------------------------------------------------------------


def test_adjacent_turns_of_a_role_are_one_message() -> None:
    engine = FakeEngine()
    system = [text("Be", cache_control=EPHEMERAL), text("kind.")]
    turns = [
        {"role": "system", "content": "And brief."},
        blocks(text("one"), text("two", citations=[])),
        {"role": "user", "content": "three"},
        blocks(text("four"), role="assistant"),
        {"role": "user", "content": "five"},
    ]
    assert ask(client(engine), *turns, system=system).status_code == 200
    assert (
        asked(engine)
        == "<system>Be\nkind.\nAnd brief.\n<user>one\ntwo\nthree\n<assistant>four\n<user>five\n<assistant>"
    )


def test_an_answer_can_be_begun_by_the_client() -> None:
    engine = FakeEngine()
    assert ask(client(engine), USER, {"role": "assistant", "content": "The answer is ("}).status_code == 200
    assert asked(engine) == "<user>hi\n<assistant>The answer is ("


def test_tools_and_their_results() -> None:
    engine = FakeEngine()
    seen: list[Any] = []
    template = engine.tokenizer.apply_chat_template

    def spying(messages: Any, **rest: Any) -> str:
        seen.append(messages)
        return template([{**each, "content": each["content"] or ""} for each in messages], **rest)

    engine.tokenizer.apply_chat_template = spying  # type: ignore[method-assign]
    use = {"type": "tool_use", "id": "u1", "name": "weather", "input": {"city": "Oslo"}, "cache_control": EPHEMERAL}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    turns = [
        USER,
        blocks(
            thought,
            {**thought, "thinking": " So."},
            text("I look."),
            use,
            {**use, "id": "u2", "input": {}},
            role="assistant",
        ),
        blocks(
            {"type": "tool_result", "tool_use_id": "u1", "content": [text("rain")]},
            {"type": "tool_result", "tool_use_id": "u2", "content": "no city", "is_error": True},
            text("And now?"),
        ),
    ]
    server = client(engine, tool_call_parser="hermes")
    assert ask(server, *turns, tools=[{**WEATHER, "cache_control": EPHEMERAL}]).status_code == 200
    whole = [each for each in seen if "\ue000" not in json.dumps(each, ensure_ascii=False)]  # no variants
    _, user, assistant, results = whole[-1]
    assert user == USER
    assert assistant["reasoning_content"] == "Hm. So."
    assert assistant["content"].startswith("I look.") and '{"city": "Oslo"}' in assistant["content"]
    assert results == {
        "role": "user",
        "content": "Result of weather:\nrain\n\nResult of weather:\nError:\nno city\n\nAnd now?",
    }, "this template knows no tools"


def test_a_template_gets_the_same_messages_as_of_a_chat() -> None:
    """To the order of their fields, and without thoughts that say nothing: some templates write a message as it is."""
    use = {"type": "tool_use", "id": "u", "name": "weather", "input": {}}
    call = {"id": "u", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    for thought in ("Hm.", ""):
        thinking = {"type": "thinking", "thinking": thought, "signature": "s"}
        said = {"role": "assistant", "content": "I look.", "reasoning_content": thought, "tool_calls": [call]}
        result = {"type": "tool_result", "tool_use_id": "u", "content": "rain"}
        turns = [USER, blocks(thinking, text("I look."), use, role="assistant"), blocks(result)]
        message = {"max_tokens": 1, "messages": turns}
        chat = {"messages": [USER, said, {"role": "tool", "tool_call_id": "u", "content": "rain"}]}
        read = (APIS[path].read(json.dumps({"model": "m", **body}).encode(), None)
                for path, body in ((PATH, message), ("/v1/chat/completions", chat)))  # fmt: skip
        ours, theirs = (json.dumps(asked.prompt.messages) for asked in read)  # type: ignore[union-attr]
        assert ours == theirs
        assert ("reasoning_content" in ours) == bool(thought)


def test_thinking_and_effort_reach_the_template() -> None:
    engine = FakeEngine()
    seen: list[Any] = []

    def template(messages: Any, **rest: Any) -> str:
        seen.append(rest.get("enable_thinking"))
        return f"x{seen[-1]}"

    engine.tokenizer.apply_chat_template = template  # type: ignore[method-assign]
    server = client(engine)
    enabled, disabled, adaptive = ({"type": kind} for kind in ("enabled", "disabled", "adaptive"))
    for fields, expected in (
        ({"thinking": {**enabled, "budget_tokens": 2000}}, True),
        ({"thinking": adaptive}, None),
        ({"thinking": disabled}, False),
        ({}, None),
        ({"output_config": {"effort": "low"}}, True),
        ({"thinking": adaptive, "output_config": {"effort": "max"}}, True),
        ({"thinking": disabled, "output_config": {"effort": "high"}}, False),
        ({"thinking": enabled, "chat_template_kwargs": {"enable_thinking": 3}}, 3),
    ):
        for path in (PATH, COUNT):
            response = ask(server, path=path, **fields)
            assert (response.status_code, seen[-1]) == (200, expected)
            budget = "thinking.budget_tokens" if "budget_tokens" in fields.get("thinking", {}) else None
            assert response.headers.get("X-Mainstem-Ignored") == budget


def test_thinking_and_effort_are_named_where_the_model_has_no_switch() -> None:
    server = client()
    for fields, ignored in (
        ({"thinking": {"type": "enabled"}, "output_config": {"effort": "high"}}, "thinking, output_config.effort"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "unheard"}}, "output_config.effort"),
        ({"thinking": {"type": "disabled"}}, None),
    ):
        for path in (PATH, COUNT):
            response = ask(server, path=path, **fields)
            assert (response.status_code, response.headers.get("X-Mainstem-Ignored")) == (200, ignored)


# --- what only Anthropic has ----------------------------------------------------------------------------------------


FOUND = {"type": "search_result", "title": "Sea", "source": "https://sea", "content": [text("It is wide.")]}


def test_documents_and_results_of_searches_are_texts() -> None:
    engine = FakeEngine()
    plain = {"type": "text", "media_type": "text/plain", "data": "It is long."}
    parted = {"type": "content", "content": [text("one"), text("two", cache_control=EPHEMERAL)]}
    documents = [
        {
            "type": "document",
            "source": plain,
            "title": "The river",
            "context": "Of 1999.",
            "citations": {"enabled": True},
        },
        {"type": "document", "source": parted, "cache_control": EPHEMERAL},
        {"type": "document", "source": {"type": "content", "content": "three"}},
        FOUND,
    ]
    shown = "The river\nOf 1999.\nIt is long.\none\ntwo\nthree\nSea\nhttps://sea\nIt is wide."
    response = ask(client(engine), blocks(*documents, text("How long?")))
    assert response.status_code == 200, response.text
    assert response.headers["X-Mainstem-Ignored"] == "messages[0].content[0].citations"
    assert f"{shown}\nHow long?" in asked(engine)
    result = {
        "type": "tool_result",
        "tool_use_id": "u",
        "content": [*documents, {"type": "tool_reference", "tool_name": "f"}],
    }
    use = {"type": "tool_use", "id": "u", "name": "look", "input": {}}
    assert ask(client(engine), USER, blocks(use, role="assistant"), blocks(result)).status_code == 200
    assert f"{shown}\nf" in asked(engine)
    summary = {"type": "compaction", "content": "They spoke of rivers.", "encrypted_content": "x", "signature": "y"}
    assert ask(client(engine), blocks(summary), USER).status_code == 200
    assert "They spoke of rivers." in asked(engine)


SEARCHED = [
    {"type": "thinking", "thinking": "I search.", "signature": "EqQB"},
    {"type": "redacted_thinking", "data": "AbC="},
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "rivers"}},
    {
        "type": "web_search_tool_result", "tool_use_id": "s",
        "content": [{"type": "web_search_result", "url": "https://x", "title": "X", "encrypted_content": "E"}],
    },
    {
        "type": "web_search_tool_result", "tool_use_id": "s",
        "content": {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"},
    },
    {
        "type": "bash_code_execution_tool_result", "tool_use_id": "s",
        "content": {"type": "bash_code_execution_result", "stdout": "1", "stderr": "", "return_code": 0, "content": []},
    },
    {"type": "text", "text": "It is long.", "citations": [{"type": "web_search_result_location", "url": "https://x"}]},
]  # fmt: skip


def test_an_answer_of_the_real_api_comes_back_as_it_went() -> None:
    """What Anthropic encrypted, or ran, is left out and named; nothing of it may be lost in silence, nor refused."""
    engine = FakeEngine()
    response = ask(client(engine), USER, blocks(*SEARCHED, role="assistant"), USER)
    assert response.status_code == 200, response.text
    at = "messages[1].content"
    named = [f"{at}[0].signature", *(f"{at}[{i}]" for i in range(1, 6)), f"{at}[6].citations"]
    assert response.headers["X-Mainstem-Ignored"].split(", ") == named
    prompt = asked(engine)
    assert "It is long." in prompt and "rivers" not in prompt and "AbC=" not in prompt
    alone = ask(client(engine), USER, blocks(SEARCHED[1], role="assistant"), USER)
    assert alone.status_code == 200
    assert asked(engine).count("assistant") == prompt.count("assistant"), "the turn stays one"


def test_a_block_that_accounts_for_the_request_is_left_out_and_named() -> None:
    engine = FakeEngine()
    rules = {"type": "text", "text": "Be brief."}
    prompts = set()
    for number in ("36ee5", "0aaa9"):
        header = f"x-anthropic-billing-header: cc_version=2.1.177; cc_entrypoint=sdk-cli; cch={number};"
        asking = ask(client(engine), system=[{"type": "text", "text": header, "cache_control": EPHEMERAL}, rules])
        assert (asking.status_code, asking.headers["x-mainstem-ignored"]) == (200, "system[0]")
        prompts.add(asked(engine))
    ask(client(engine), system="Be brief.")
    assert prompts == {asked(engine)}
    counted = [ask(client(), path=COUNT, system=system).json() for system in ([{"type": "text", "text": header}], "")]
    assert counted[0] == counted[1]


@pytest.mark.parametrize(
    "text", ["About x-anthropic-billing-header: it is a header.", "x-anthropic-billing-header: a;\nBe brief."]
)
def test_a_text_that_says_more_than_who_pays_stays(text: str) -> None:
    engine = FakeEngine()
    asking = ask(client(engine), system=[{"type": "text", "text": text}])
    assert "x-mainstem-ignored" not in asking.headers
    assert text in asked(engine)


def test_white_space_around_such_a_block_takes_no_time_to_speak_of() -> None:
    line = "x-anthropic-billing-header: a;"
    blanks = " \t" * 500_000
    began = time.process_time()
    for given, named in (
        (f"{blanks}{line}{blanks}\n{blanks}", ["system[0]"]),
        (f"\n{line}\n\n", ["system[0]"]),
        (f"{line}{blanks}\n.", []),
        (f"{line}\n{blanks}.", []),
    ):
        assert attribution([ContentBlock("text", given)]) == named
    assert time.process_time() - began < 2


def test_tools_that_anthropic_knows_are_left_out_and_named() -> None:
    engine = FakeEngine()
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3, "user_location": {"type": "approximate"}},
        {"type": "bash_20250124", "name": "bash", "cache_control": EPHEMERAL},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]
    for path in (PATH, COUNT):
        response = ask(client(engine), tools=[hosted[0], WEATHER, *hosted[1:]], tool_choice={"type": "any"}, path=path)
        assert response.status_code == 200, response.text
        assert response.headers["X-Mainstem-Ignored"] == "tools[0], tools[2], tools[3]"
    assert "web_search" not in asked(engine) and "weather" in asked(engine)


@pytest.mark.parametrize("unknown_fields", ["refuse", "warn"])
def test_a_thread_is_refused_with_the_code_by_which_clients_recover(unknown_fields: str) -> None:
    engine = FakeEngine()
    server = client(engine, unknown_fields=unknown_fields)
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        response = ask(server, thread=thread)
        assert error_of(response, 400).startswith("thread: not supported; omit it")
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert response.json()["error"]["details"] == details
    assert not engine.streams and ask(server, thread=None).status_code == 200


# --- counting -----------------------------------------------------------------------------------------------------


def test_tokens_are_counted_as_they_would_be_sent() -> None:
    engine = FakeEngine()
    server = client(engine)
    fields = {"system": "Be kind.", "tools": [WEATHER], "tool_choice": {"type": "auto"}}
    counted = ask(server, path=COUNT, **fields).json()
    assert counted == {"input_tokens": ask(server, **fields).json()["usage"]["input_tokens"]}
    assert len(engine.streams) == 1
    assert error_of(ask(server, path=COUNT, max_tokens=5), 400).startswith("max_tokens: unknown field")
    assert error_of(ask(server, path=COUNT, model="other"), 404, "not_found_error")
    long = ask(server, {"role": "user", "content": "x" * 5000}, path=COUNT).json()["input_tokens"]
    assert long > 5000 > FakeEngine().max_context, "a client counts to learn whether a prompt is too long"
    for empty in (blocks(), blocks(role="system")):
        assert error_of(ask(server, USER, empty, path=COUNT), 400).startswith("messages[1].content: ")
    warned = ask(client(unknown_fields="warn"), path=COUNT, novelty=1)
    assert (warned.json(), warned.headers["X-Mainstem-Unknown-Fields"]) == ({"input_tokens": 20}, "novelty")


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_advice_is_taken_named_in_a_header_and_counted(stream: bool) -> None:
    """What an agent sends by itself: it gets its answer."""
    server = client(cors_origin=("https://example.org",))
    server.headers["Origin"] = "https://example.org"
    cached = {"type": "ephemeral", "scope": "global"}
    response = ask(
        server,
        system=[text("S", cache_control=cached)],
        tools=[{**WEATHER, "defer_loading": True, "eager_input_streaming": False}],
        thinking={"type": "adaptive", "display": "omitted"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "u"},
        stream=stream,
    )
    assert response.status_code == 200, response.text
    inside = {"thinking.display", "system[0].cache_control.scope", "tools[0].defer_loading"}
    named = inside | {"context_management", "metadata"}
    assert {*response.headers["X-Mainstem-Ignored"].split(", ")} == named
    assert "X-Mainstem-Ignored" in response.headers["Access-Control-Expose-Headers"]
    counted = server.get("/metrics").text
    for field in ("metadata", "system[].cache_control.scope", "tools[].defer_loading"):
        assert f'mainstem_ignored_fields_total{{field="{field}"}} 1.0' in counted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [blocks({"type": "document", "title": "x"})]}, "messages[0].content[0].source: this field is"),
        ({"messages": [blocks({"type": "document", "source": "x"})]}, "messages[0].content[0].source: must be an obj"),
        ({"messages": [blocks({"type": "image", "source": "x"})]}, "messages[0].content[0].source: must be an object"),
        (
            {"messages": [blocks({"type": "document", "source": {"type": "text"}})]},
            "messages[0].content[0].source.data: this field is required where the type is 'text'",
        ),
        (
            {"messages": [blocks({"type": "document", "source": {"type": "content", "content": [{"type": "video"}]}})]},
            "messages[0].content[0].source.content[0].type: must be one of 'text', 'image' here, got 'video'",
        ),
        (
            {"messages": [blocks({"type": "search_result", "source": {"type": "text"}, "title": "t", "content": []})]},
            "messages[0].content[0].source: must be a text where the type is 'search_result'",
        ),
        (
            {"messages": [blocks({"type": "tool_result", "tool_use_id": "u", "content": {"type": "text"}})]},
            "messages[0].content[0].content: must be a text or a list of blocks",
        ),
        (
            {"tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
             "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice.name: there is no tool named 'web_search'",
        ),
        ({"messages": [blocks({"type": "image", "source": {"type": "url"}})]}, "messages[0].content[0].source.url:"),
        ({"messages": [blocks({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id: this field is required"),
        (
            {"messages": [blocks({"type": "image", "source": {"type": "url", "url": "x", "data": "y"}})]},
            "messages[0].content[0].source.data: not a field of the type 'url'",
        ),
        ({"messages": [blocks(text("x", txet=1))]}, "messages[0].content[0].txet: unknown field; did you mean text?"),
        ({"system": [{"type": "image"}]}, "system[0].type: must be one of 'text' here, got 'image'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: this field is required"),
        (
            {"messages": [USER, blocks({"type": "thinking", "cache_control": EPHEMERAL}, role="assistant")]},
            "messages[1].content[0].cache_control: not a field of the type 'thinking'",
        ),
        (
            {"system": [text("x", cache_control=EPHEMERAL)] * 3, "tools": [{**WEATHER, "cache_control": EPHEMERAL}],
             "messages": [blocks({"type": "tool_result", "tool_use_id": "u",
                                  "content": [text("r", cache_control={"type": "ephemeral"})]})]},
            "cache_control: at most 4 breakpoints in a request, got 5",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_named(fields: dict[str, Any], message: str) -> None:
    engine = FakeEngine()
    assert error_of(ask(client(engine), **fields), 400).startswith(message)
    assert not engine.streams


def test_errors_of_an_image_have_its_path() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x/"}}
    turns = [{"role": "user", "content": "x"}, blocks(text("y"), image)]
    assert error_of(ask(client(), *turns), 400).startswith("messages[1].content[1].source.url: ")


def test_every_error_has_anthropics_form() -> None:
    server = client(FakeEngine(max_waiting=0), api_key=("key",), max_body_bytes=2000)
    assert error_of(ask(server), 401, "authentication_error")
    assert error_of(ask(server, path=COUNT), 401, "authentication_error")
    assert error_of(ask(server, key="key"), 429, "rate_limit_error")
    assert error_of(ask(server, key="key", model="other"), 404, "not_found_error")
    assert error_of(ask(server, {"role": "user", "content": "x" * 3000}, key="key"), 413, "request_too_large")
    assert error_of(server.get(PATH), 405)
    assert error_of(server.get(f"{PATH}/batches"), 404, "not_found_error")
    assert error_of(server.post(PATH, content=b"{", headers={"x-api-key": "key"}), 400)
    assert server.get("/v1/messagesx").json().keys() == {"error"}, "another path"
    server.app.state.draining = True  # type: ignore[attr-defined]
    assert error_of(ask(server, key="key"), 503, "overloaded_error")


def test_a_failure_under_way_is_an_event() -> None:
    engine = FakeEngine()
    engine.tokenizer.apply_chat_template = lambda *_, **__: "fail!"  # type: ignore[method-assign]
    server = client(engine)
    events = named_events(ask(server, stream=True))
    assert [event["type"] for event in events] == ["message_start", "ping", "error"]
    assert events[-1]["error"]["type"] == "api_error" and "secret" not in events[-1]["error"]["message"]
    assert error_of(ask(server), 500, "api_error")


def test_both_headers_carry_the_key() -> None:
    server = client(api_key=("one", "two"))
    body = {"model": "fake", "max_tokens": 1, "messages": [USER]}
    for headers, status in (
        ({"x-api-key": "one"}, 200),
        ({"Authorization": "Bearer two"}, 200),
        ({"Authorization": "Bearer two", "x-api-key": "placeholder"}, 200),
        ({"Authorization": "Bearer placeholder", "x-api-key": "one"}, 200),
        ({"x-api-key": "Bearer one"}, 401),
        ({"Authorization": "one"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ):
        assert server.post(PATH, json=body, headers=headers).status_code == status, headers
        assert server.get("/v1/models", headers=headers).status_code == status, headers


def ends(engine: FakeEngine) -> list[tuple[str, str | None]]:
    """What is before each breakpoint of the last request, and the name of its time."""
    request = engine.streams[-1].request
    return [(engine.tokenizer.decode(request.tokens[: prefix.end]), prefix.ttl) for prefix in request.hints.prefixes]


def test_breakpoints_are_after_their_blocks() -> None:
    engine = FakeEngine()
    use = {"type": "tool_use", "id": "u1", "name": "weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "u1", "content": [text("rain"), text("wind")]}
    turns = [
        blocks(text("one", cache_control={"type": "ephemeral", "ttl": "1h"}), text("two")),
        blocks(text("I look."), {**use, "cache_control": {"type": "ephemeral", "ttl": "5m"}}, role="assistant"),
        blocks({**result, "cache_control": {"type": "ephemeral"}}, text("So?")),
    ]
    assert ask(client(engine), *turns, system=[text("Be kind.", cache_control=EPHEMERAL)]).status_code == 200
    whole = asked(engine)
    found = ends(engine)
    assert [ttl for _, ttl in found] == ["1h", "1h", "5m", None] and all(whole.startswith(at) for at, _ in found)
    system, one, call, rain = (before for before, _ in found)
    assert system.endswith("Be kind.") and one.endswith("one") and rain.endswith("rain\nwind")
    assert "Oslo" in call and "rain" not in call


def test_the_breakpoint_of_a_request_is_after_its_last_block() -> None:
    engine = FakeEngine()
    server = client(engine)
    for last in (USER, blocks(text("well"), text("hi"))):
        assert ask(server, last, cache_control=EPHEMERAL).status_code == 200
        ((before, ttl),) = ends(engine)
        assert before.endswith("hi") and ttl == "1h"
    own = {"type": "ephemeral", "ttl": "5m"}
    ask(
        server,
        blocks(*[text("x", cache_control=EPHEMERAL)] * 3, text("hi", cache_control=own)),
        cache_control=EPHEMERAL,
    )
    assert [ttl for _, ttl in ends(engine)] == ["1h", "1h", "1h", "5m"]
    ask(server, USER)
    assert ends(engine) == []
    assert ask(server, path=COUNT, cache_control=EPHEMERAL).json() == ask(server, path=COUNT).json()


def test_what_is_read_written_and_neither_is_the_whole_prompt() -> None:
    engine = FakeEngine()
    server = client(engine)
    long, kept = "x" * 50, {"type": "ephemeral", "ttl": "5m"}
    system = [text(long, cache_control=EPHEMERAL), text(long, cache_control=kept)]
    for read in (0, 112):
        response = ask(server, {"role": "user", "content": "hi"}, system=system, stream=read > 0)
        used = named_events(response)[-2]["usage"] if read else response.json()["usage"]
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert sum(used[name] for name in parts) == len(asked(engine))
        assert (used["cache_read_input_tokens"] >= read, used["cache_creation_input_tokens"]) == (
            True,
            0 if read else 96,
        )
        hour, minutes = (48, 48) if not read else (0, 0)
        assert used["cache_creation"] == {"ephemeral_1h_input_tokens": hour, "ephemeral_5m_input_tokens": minutes}


# --- the official client ------------------------------------------------------------------------------------------


@pytest.mark.deadline
def test_the_official_client() -> None:
    engine = FakeEngine(lambda prompt: f"<think>Hm.</think>{CALL if 'Weather' in prompt else 'Yes, of course.'}")
    with served(engine, api_key=("key",), **SPEAKS) as url:
        api = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0)
        assert [model.id for model in api.models.list()] == ["fake"]
        user: Any = {"role": "user", "content": "one"}
        first = api.messages.create(model="fake", max_tokens=200, messages=[user], system="Be kind.")
        assert [block.type for block in first.content] == ["thinking", "text"]
        assert (first.stop_reason, first.usage.cache_read_input_tokens) == ("end_turn", 0)
        stopped = api.messages.create(model="fake", max_tokens=200, messages=[user], stop_sequences=[" of"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " of")

        tools: Any = [WEATHER]
        weather: Any = {"role": "user", "content": "Weather?"}
        with api.messages.stream(model="fake", max_tokens=200, messages=[weather], tools=tools) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_message()
        assert {"thinking", "input_json", "message_stop"} <= kinds
        use = final.content[-1]
        assert use.type == "tool_use" and use.input == {"city": "Oslo"} and final.stop_reason == "tool_use"
        result: Any = {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"}],
        }
        turns: Any = [weather, {"role": "assistant", "content": final.content}, result]
        with api.messages.stream(model="fake", max_tokens=200, messages=turns, tools=tools) as stream:
            stream.until_done()
        counted = api.messages.count_tokens(model="fake", messages=turns, tools=tools)
        answered = api.messages.create(model="fake", max_tokens=1, messages=turns, tools=tools).usage
        assert answered.cache_read_input_tokens
        assert counted.input_tokens == answered.input_tokens + answered.cache_read_input_tokens

        def create(**fields: Any) -> Any:
            return api.messages.create(**{"model": "fake", "max_tokens": 5, "messages": [user], **fields})

        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            create(extra_body={"temperature": -1.0})
        with pytest.raises(anthropic.NotFoundError, match="other"):
            create(model="other")
        with pytest.raises(anthropic.AuthenticationError):
            api.with_options(api_key="wrong").messages.create(model="fake", max_tokens=5, messages=[user])
        engine.tokenizer.apply_chat_template = lambda *_, **__: "fail!"  # type: ignore[method-assign]
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            list(create(stream=True))


@pytest.mark.deadline
@pytest.mark.parametrize("unknown_fields", ["refuse", "warn"])
def test_the_tool_runner_of_the_official_client_goes_on_without_a_thread(unknown_fields: str) -> None:
    """It asks for a thread first; refused by its code, it sends the whole conversation, in each turn."""
    engine = FakeEngine(lambda prompt: "It rains." if "rain in Oslo" in prompt else CALL)
    asked_for = list[str]()

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Returns the weather.

        Args:
            city: where.
        """
        asked_for.append(city)
        return f"rain in {city}"

    with served(engine, api_key=("key",), unknown_fields=unknown_fields, **SPEAKS) as url:
        api = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0)
        question: Any = {"role": "user", "content": "Weather?"}
        runner = api.beta.messages.tool_runner(
            model="fake", max_tokens=200, messages=[question], tools=[weather], max_iterations=3
        )
        final = runner.until_done()
    assert asked_for == ["Oslo"]
    assert final.content[-1].type == "text" and final.content[-1].text == "It rains."
    assert len(engine.streams) == 2
    last = engine.tokenizer.decode(engine.streams[-1].request.tokens)
    assert "Weather?" in last and "rain in Oslo" in last, "the second turn has its history"
