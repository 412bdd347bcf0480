"""A server with rules answers a prompt as if the client had sent it rewritten, and says what it changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.scripted_model import ScriptedEngine
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from mainstem.errors import BadArgument
from mainstem.prompt_rules.rule_file import BadRule
from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig

RULES = """[[rule]]
name = "clock"
action = "move"
places = ["system"]
match = 'It is (?P<value>[\\d:]+)\\.'
example = "It is 12:30:59."

[[rule]]
name = "nonce"
action = "drop"
places = ["system", "prompt"]
match = 'nonce=\\d+;'
example = "nonce=1;"

[[rule]]
name = "order"
action = "sort"
lists = ["tools"]
"""
KEEP = """
[[rule]]
name = "keep"
action = "keep"
"""
NOTE = "\n\n[It is 12:30:59. (moved here from the system prompt)]"
SYSTEM = "nonce=77;Be kind. It is 12:30:59. Be brief."
CLEAN = "Be kind. It is . Be brief."
ASK = "<say>Hello.</say>"
SAID = [
    {"rule": "nonce", "action": "drop", "at": "system", "removed": 9, "added": 0},
    {"rule": "clock", "action": "move", "at": "system", "removed": 8, "added": 0},
    {"rule": "clock", "action": "move", "at": "messages[1]", "removed": 0, "added": len(NOTE)},
]


def chat(system: str, user: str, **more: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [_turn("system", system), _turn("user", user)], **more}


def responses(system: str, user: str, **more: Any) -> dict[str, Any]:
    return {"model": "scripted", "instructions": system, "input": user, **more}


def messages(system: str, user: str, **more: Any) -> dict[str, Any]:
    return {"model": "scripted", "system": system, "messages": [_turn("user", user)], "max_tokens": 99, **more}


def _turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


ROUTES = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}


class Served:
    """A server of the scripted model, and the prompts that its engine gets."""

    def __init__(self, tmp_path: Path, rules: str = RULES, **config: Any) -> None:
        path = tmp_path / "rules.toml"
        path.write_text(rules)
        self.engine = ScriptedEngine()
        settings = ServerConfig(prompt_rules=(str(path),), precompute_turns=0.0, **config)
        self.client = TestClient(create_app(self.engine, settings))  # type: ignore[arg-type]

    def send(self, route: str, body: Mapping[str, Any], **headers: str) -> Any:
        self.headers: Mapping[str, str]
        answer = self.client.post(route, json=body, headers=headers)
        self.headers = answer.headers
        assert answer.status_code == 200, answer.text
        return answer.json() if "event-stream" not in answer.headers["content-type"] else answer.text

    @property
    def prompt(self) -> str:
        return self.engine.tokenizer.decode(self.engine.streams[-1].request.tokens)

    def counted(self) -> dict[str, float]:
        lines = self.client.get("/metrics").text.splitlines()
        rows = (line.rpartition(" ") for line in lines if line.startswith("mainstem_prompt_rewrites_total{"))
        return {name.partition('rule="')[2].partition('"')[0]: float(value) for name, _, value in rows}


@pytest.mark.parametrize(("route", "body"), ROUTES.items(), ids=ROUTES)
def test_the_prompt_is_that_of_a_client_which_sent_it_so(tmp_path: Path, route: str, body: Any) -> None:
    served = Served(tmp_path)
    changed = served.send(route, body(SYSTEM, ASK))
    prompt = served.prompt
    assert served.headers["x-mainstem-prompt-rules"] == "nonce=1, clock=1"
    assert changed["usage"]["prompt_rewrites"] == SAID
    sent_so = served.send(route, body(CLEAN, ASK + NOTE))
    assert served.prompt == prompt and CLEAN in prompt and "77" not in prompt
    assert "x-mainstem-prompt-rules" not in served.headers
    assert "prompt_rewrites" not in sent_so["usage"]
    for answer in (changed, sent_so):
        answer["usage"].pop("prompt_rewrites", None)
    written = [
        json.dumps(each.get("choices") or each.get("content") or each["output"][-1]["content"])
        for each in (changed, sent_so)
    ]
    assert written[0] == written[1] and "Hello." in written[0]
    assert served.counted() == {"clock": 1, "nonce": 1, "order": 0}


@pytest.mark.parametrize(("route", "body"), ROUTES.items(), ids=ROUTES)
def test_a_stream_says_it_too(tmp_path: Path, route: str, body: Any) -> None:
    served = Served(tmp_path)
    more = {"stream_options": {"include_usage": True}} if "chat" in route else {}
    text = served.send(route, body(SYSTEM, ASK, stream=True, **more))
    assert served.headers["x-mainstem-prompt-rules"] == "nonce=1, clock=1"
    assert json.dumps(SAID, separators=(",", ":")) in text


@pytest.mark.parametrize(("route", "body"), ROUTES.items(), ids=ROUTES)
def test_a_request_can_be_left_out(tmp_path: Path, route: str, body: Any) -> None:
    served = Served(tmp_path)
    answer = served.send(route, body(SYSTEM, ASK, prompt_rules=False))
    assert SYSTEM in served.prompt and "prompt_rewrites" not in answer["usage"]
    assert served.counted() == {"clock": 0, "nonce": 0, "order": 0}


def test_a_prompt_that_is_completed_is_changed(tmp_path: Path) -> None:
    served = Served(tmp_path)
    ids = [ord(letter) for letter in "nonce=1;"]
    answer = served.send("/v1/completions", {"model": "scripted", "prompt": ["a nonce=5;b", "c"], "max_tokens": 1})
    assert [served.engine.tokenizer.decode(stream.request.tokens) for stream in served.engine.streams] == ["a b", "c"]
    [change] = answer["usage"]["prompt_rewrites"]
    assert change == {"rule": "nonce", "action": "drop", "at": "prompt[0]", "removed": 8, "added": 0}
    served.send("/v1/completions", {"model": "scripted", "prompt": ids, "max_tokens": 1})
    assert served.prompt == "nonce=1;"  # token ids are what the client means


def test_tokens_are_counted_as_they_are_computed(tmp_path: Path) -> None:
    served = Served(tmp_path)
    for route, count in (
        ("/v1/messages", "/v1/messages/count_tokens"),
        ("/v1/responses", "/v1/responses/input_tokens"),
    ):
        body = ROUTES[route](SYSTEM, ASK)
        served.send(route, body)
        length = len(served.prompt.encode())
        body.pop("max_tokens", None)
        assert served.send(count, body)["input_tokens"] == length
        whole = served.send(count, {**body, "prompt_rules": False})["input_tokens"]
        assert whole == length + len(SYSTEM) - len(CLEAN) - len(NOTE)
    body = chat(SYSTEM, ASK)
    served.send("/v1/chat/completions", body)
    tokens = served.send("/tokenize", body)["tokens"]
    assert np.array_equal(tokens, served.engine.streams[-1].request.tokens)
    assert served.send("/tokenize", {**body, "prompt_rules": False})["count"] != len(tokens)
    assert served.counted() == {"clock": 3, "nonce": 3, "order": 0}  # of what was answered


def test_rules_are_for_some_clients_routes_and_tenants(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[tenants.research]\napi_key = "one"\n[tenants.sales]\napi_key = "two"\n')
    scope = 'clients = ["agent/*"]\nroutes = ["/v1/messages"]\ntenants = ["research"]\n'
    served = Served(tmp_path, RULES.partition("\n\n")[0].replace("action", scope + "action") + "\n", tenants=tenants)
    fits = {"authorization": "Bearer one", "user-agent": "agent/1.0"}
    cases: list[tuple[str, dict[str, str], bool]] = [
        ("/v1/messages", fits, True),
        ("/v1/messages", {**fits, "user-agent": "agents/1.0"}, False),
        ("/v1/messages", {**fits, "authorization": "Bearer two"}, False),
        ("/v1/chat/completions", fits, False),
    ]
    for route, headers, expected in cases:
        served.send(route, ROUTES[route](SYSTEM, ASK), **headers)
        assert (NOTE in served.prompt) == expected, (route, headers)


def test_a_tenant_may_be_known_by_its_salt(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[tenants.research]\ncache_salt = "s"\n')
    rules = RULES.partition("\n\n")[0].replace("action", 'tenants = ["research"]\naction') + "\n"
    served = Served(tmp_path, rules, tenants=tenants)
    for salt, expected in (("s", True), ("t", False), (None, False)):
        served.send("/v1/chat/completions", chat(SYSTEM, ASK, **({} if salt is None else {"cache_salt": salt})))
        assert (NOTE in served.prompt) == expected


def test_tools_come_in_one_order_and_breakpoints_stay(tmp_path: Path) -> None:
    served = Served(tmp_path)
    tools = [{"type": "function", "function": {"name": name}} for name in ("write", "read")]
    prompts = []
    for order in (tools, tools[::-1]):
        body = chat("x", ASK, tools=order, prompt_cache_options={"mode": "explicit"})
        body["messages"][0] = {
            "role": "system",
            "content": [
                {"type": "text", "text": SYSTEM, "prompt_cache_breakpoint": {"mode": "explicit"}},
                {"type": "text", "text": "More."},
            ],
        }
        served.send("/v1/chat/completions", body)
        prompts.append(served.prompt)
        [prefix] = served.engine.streams[-1].request.hints.prefixes
        assert served.prompt[: prefix.end].endswith(CLEAN)
    assert prompts[0] == prompts[1] and prompts[0].index('"read"') < prompts[0].index('"write"')


def test_a_tool_is_kept_where_the_client_agrees(tmp_path: Path) -> None:
    served = Served(tmp_path, RULES + KEEP)
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]

    def ask(some: list[dict[str, Any]], **more: Any) -> Any:
        return served.send("/v1/chat/completions", chat("x", ASK, tools=some, prompt_cache_key="s", **more))

    ask(tools)
    ask(tools[1:])
    assert '"a"' not in served.prompt  # it did not agree
    ask(tools, prompt_rules=True)
    both = served.prompt
    answer = ask(tools[1:], prompt_rules=True)
    assert served.prompt == both
    [change] = answer["usage"]["prompt_rewrites"]
    assert (change["rule"], change["at"], change["removed"]) == ("keep", "tools", 0) and change["added"] > 0
    call = '<call name="b">{}</call>'
    more = {"tools": tools[1:], "tool_choice": "required", "prompt_cache_key": "s", "prompt_rules": True}
    served.send("/v1/chat/completions", chat("x", call, **more))
    grammar = served.engine.streams[-1].request.params.grammar  # what is kept is declared, and cannot be called
    assert grammar is not None and '"b"' in served.prompt and '"a"' in served.prompt
    matcher = served.engine.grammars.compile(grammar).matcher()
    begin = '<tool_call>\n{"name": "'
    assert all(matcher.accept(ord(letter)) for letter in begin)
    allowed = matcher.following().tokens
    assert allowed[ord("b")] and not allowed[ord("a")]


# ---- what is remembered, and for whom

OTHERS: dict[str, tuple[dict[str, str], dict[str, str]]] = {  # fields and headers of somebody else's request
    "key": ({}, {"authorization": "Bearer two"}),
    "salt": ({"cache_salt": "theirs"}, {}),
    "session": ({"prompt_cache_key": "theirs"}, {}),
    "model": ({"model": "other"}, {}),
}
MINE = {"authorization": "Bearer one"}


def _tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def _turns(body: Mapping[str, Any], answer: str = "Hello.") -> dict[str, Any]:
    """Returns the next turn of a chat, ten seconds later."""
    said = [_turn(each["role"], each["content"].replace("12:30:59", "12:31:09")) for each in body["messages"]]
    return {**body, "messages": [*said, _turn("assistant", answer), _turn("user", "<say>Bye.</say>")]}


@pytest.mark.parametrize("other", [None, *OTHERS])
def test_notes_stand_where_they_stood_in_the_same_conversation(tmp_path: Path, other: str | None) -> None:
    served = Served(tmp_path, api_key=("one", "two"), served_model_name=("scripted", "other"))
    first = chat(SYSTEM, ASK, prompt_cache_key="mine")
    fields, headers = OTHERS.get(other or "", ({}, {}))
    served.send("/v1/chat/completions", {**first, **fields}, **{**MINE, **headers})
    answer = served.send("/v1/chat/completions", _turns(first), **MINE)
    assert (ASK + NOTE in served.prompt) == (other is None)
    assert "<say>Bye.</say>" + NOTE.replace("12:30:59", "12:31:09") in served.prompt
    assert served.headers["x-mainstem-prompt-rules"] == "nonce=1, clock=1"
    notes = [each["at"] for each in answer["usage"]["prompt_rewrites"] if each["added"]]
    assert notes == (["messages[1]", "messages[3]"] if other is None else ["messages[3]"])


@pytest.mark.parametrize("other", [None, *OTHERS])
def test_tools_are_kept_for_the_same_session(tmp_path: Path, other: str | None) -> None:
    served = Served(tmp_path, RULES + KEEP, api_key=("one", "two"), served_model_name=("scripted", "other"))
    fields, headers = OTHERS.get(other or "", ({}, {}))
    ours = chat("x", ASK, tools=_tools("b"), prompt_cache_key="mine", prompt_rules=True)
    served.send("/v1/chat/completions", {**ours, "tools": _tools("secret"), **fields}, **{**MINE, **headers})
    served.send("/v1/chat/completions", ours, **MINE)
    assert ("secret" in served.prompt) == (other is None) and '"b"' in served.prompt


@pytest.mark.parametrize("way", ["/v1/cache/explain?route=/v1/chat/completions", "/tokenize", "count", "ahead"])
def test_what_is_not_answered_is_not_remembered(tmp_path: Path, way: str) -> None:
    served = Served(tmp_path, RULES + KEEP)
    served.engine.config.__dict__["explain"] = True
    app = create_app(served.engine, ServerConfig(prompt_rules=(str(tmp_path / "rules.toml"),)))  # type: ignore[arg-type]
    served.client = TestClient(app)
    body = chat(SYSTEM, ASK, tools=_tools("secret"))
    mine = {"prompt_cache_key": "s", "prompt_rules": True}
    if way == "ahead":
        app.state.generating.ahead("/v1/chat/completions", Headers(), json.dumps({**body, **mine}).encode())()
        [(action, tokens, *_)] = served.engine.advised
        assert action == "prefetch" and NOTE in served.engine.tokenizer.decode(tokens)
    elif way == "count":
        served.send(
            "/v1/messages/count_tokens", {"model": "scripted", "system": SYSTEM, "messages": [_turn("user", ASK)]}
        )
        mine = {}
    else:
        served.send(way, body if way == "/tokenize" else {**body, **mine})
    served.send("/v1/chat/completions", _turns(chat(SYSTEM, ASK, **mine)))
    assert ASK + NOTE not in served.prompt and "secret" not in served.prompt


def test_a_choice_of_tools_stays_that_of_the_client(tmp_path: Path) -> None:
    served = Served(tmp_path, RULES + KEEP)
    body = chat("x", ASK, tools=_tools("a", "b", "c"), prompt_cache_key="s", prompt_rules=True)
    served.send("/v1/chat/completions", body)
    named = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": _tools("b")}}
    served.send("/v1/chat/completions", {**body, "tools": _tools("b", "c"), "tool_choice": named})
    grammar = served.engine.streams[-1].request.params.grammar
    assert grammar is not None and '"a"' in served.prompt
    matcher = served.engine.grammars.compile(grammar).matcher()
    assert all(matcher.accept(ord(letter)) for letter in '<tool_call>\n{"name": "')
    allowed = matcher.following().tokens
    assert [bool(allowed[ord(name)]) for name in "abc"] == [False, True, False]


def test_rules_for_a_client_count_its_tokens(tmp_path: Path) -> None:
    served = Served(tmp_path, RULES.partition("\n\n")[0].replace("action", 'clients = ["agent/*"]\naction') + "\n")
    body = messages(SYSTEM, ASK)
    del body["max_tokens"]
    counts = [
        served.send("/v1/messages/count_tokens", body, **{"user-agent": agent})["input_tokens"]
        for agent in ("agent/1", "other")
    ]
    assert counts[0] - counts[1] == len(NOTE) - len("12:30:59")


def test_rules_for_a_tenant_count_its_tokens(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[tenants.research]\napi_key = "one"\n[tenants.sales]\napi_key = "two"\n')
    rules = RULES.partition("\n\n")[0].replace("action", 'tenants = ["research"]\naction') + "\n"
    served = Served(tmp_path, rules, tenants=tenants)
    counts = [
        served.send("/tokenize", chat(SYSTEM, ASK), authorization=f"Bearer {key}")["count"] for key in ("one", "two")
    ]
    assert counts[0] - counts[1] == len(NOTE) - len("12:30:59")


def test_pages_are_read_ahead_for_the_client_that_asks(tmp_path: Path) -> None:
    served = Served(tmp_path, RULES.partition("\n\n")[0].replace("action", 'clients = ["agent/*"]\naction') + "\n")
    app: Any = served.client.app
    for agent, moved in (("agent/1", True), ("other", False)):
        body = json.dumps(chat(SYSTEM, ASK)).encode()
        app.state.generating.ahead("/v1/chat/completions", Headers({"user-agent": agent}), body)()
        assert (NOTE in served.engine.tokenizer.decode(served.engine.advised[-1][1])) == moved


def test_a_chat_is_removed_and_advised_on_as_it_is_computed_and_as_it_came(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[tenants.research]\ncache_salt = "s"\n')
    rules = RULES.partition("\n\n")[0].replace("action", 'tenants = ["research"]\naction') + "\n"
    served = Served(tmp_path, rules, tenants=tenants)
    head, moved = [_turn("system", SYSTEM), _turn("user", ASK)], SYSTEM.replace("12:30:59", "")
    for salt in ("s", "t"):
        named = {"model": "scripted", "messages": head, "cache_salt": salt}
        served.send("/v1/cache/remove", named)
        served.send("/v1/cache/hints", {**named, "action": "prefetch"})
    decode = served.engine.tokenizer.decode
    texts = [decode(tokens) for tokens, _ in served.engine.removed]
    assert texts == [decode(tokens) for _, tokens, *_ in served.engine.advised]
    assert [(moved in text, SYSTEM in text) for text in texts] == [(True, False), (False, True), (False, True)]
    assert not any("moved here" in text for text in texts)  # later turns may go on from there


def test_a_schema_that_is_nested_too_deeply_is_a_bad_request(tmp_path: Path) -> None:
    served = Served(tmp_path, RULES.replace('["tools"]', '["tools", "keys"]'))
    nested: Any = {}
    for _ in range(400):
        nested = {"anyOf": [nested]}
    body = chat("x", ASK, tools=[{"type": "function", "function": {"name": "a", "parameters": nested}}])
    for route in ("/v1/chat/completions", "/tokenize"):
        answer = served.client.post(route, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_a_text_is_counted_and_removed_as_it_is_computed(tmp_path: Path) -> None:
    served = Served(tmp_path)
    body = {"model": "scripted", "prompt": "a nonce=5;b"}
    served.send("/v1/completions", {**body, "max_tokens": 1})
    tokens = served.engine.streams[-1].request.tokens.tolist()
    assert served.send("/tokenize", body)["tokens"] == tokens
    assert served.send("/tokenize", {**body, "prompt_rules": False})["count"] == len("a nonce=5;b")
    for prompt in ("a nonce=5;b", tokens):
        served.engine.removed.clear()
        served.send("/v1/cache/remove", {"prompt": prompt})
        removed = [served.engine.tokenizer.decode(each) for each, _ in served.engine.removed]
        assert removed == (["a b", "a nonce=5;b"] if isinstance(prompt, str) else ["a b"])


def test_a_breakpoint_stays_behind_all_tools_before_it(tmp_path: Path) -> None:
    served = Served(tmp_path, RULES + KEEP)
    marked = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    body = chat("x", ASK, prompt_cache_key="s", prompt_rules=True, prompt_cache_options={"mode": "explicit"})
    for tools in (_tools("d", "a", "b"), [{**tool, **marked} for tool in _tools("d", "b")] + _tools("e")):
        served.send("/v1/chat/completions", {**body, "tools": tools})
    order = [served.prompt.index(f'"{name}"') for name in "abde"]
    assert order == sorted(order)
    prefixes = served.engine.streams[-1].request.hints.prefixes
    assert [served.prompt[each.end] for each in prefixes] == ["e", "e"]  # b, which comes behind d, is before it now


# ---- where it is said


def test_a_response_that_goes_on_is_changed_as_a_whole(tmp_path: Path) -> None:
    served = Served(tmp_path)
    first = served.send("/v1/responses", responses("nonce=1;Hi.", ASK))
    served.send("/v1/responses", {**responses("nonce=2;Hi.", ASK), "previous_response_id": first["id"]})
    assert "nonce" not in served.prompt and served.prompt.count("Hello.") == 3


def test_explanations_say_it(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.engine.config.__dict__["explain"] = True
    served.client = TestClient(create_app(served.engine, ServerConfig(prompt_rules=(str(tmp_path / "rules.toml"),))))  # type: ignore[arg-type]
    said = served.send("/v1/cache/explain?route=/v1/chat/completions", chat(SYSTEM, ASK))
    assert said["prompt_rewrites"] == SAID
    id = served.send("/v1/chat/completions", chat(SYSTEM, ASK))["id"]
    assert served.client.get(f"/v1/cache/explain/{id}").json()["prompt_rewrites"] == SAID
    assert "prompt_rewrites" not in served.send("/v1/cache/explain?route=/v1/chat/completions", chat(CLEAN, ASK))


def test_a_bad_file_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text("[[rule]]\nname = 'x'\naction = 'drp'\n")
    with pytest.raises(BadRule, match=r"rules.toml:1: rule 'x': action = 'drp'"):
        ServerConfig(prompt_rules=(str(path),))
    with pytest.raises(BadArgument, match="prompt_rules"):
        ServerConfig(prompt_rules="rules.toml")  # type: ignore[arg-type]
