"""Answers that are kept, and the routes that show them: stored chats, what a response answers, counts, cancelling."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest
from rigs.clients import served
from rigs.fake_engine import FakeEngine
from starlette.responses import Response
from starlette.testclient import TestClient

from mainstem.server.errors import ApiError
from mainstem.server.kept.listing import between, page
from mainstem.server.kept.response_store import ResponseStore
from mainstem.server.parsing.custom import as_arguments
from mainstem.server.parsing.formats import FORMATS
from tests.server.apis.test_responses import SPEAKS, WEATHER, ask, client, error_of
from tests.server.parsing.test_custom import ADDED, calls

CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]


def chat(server: TestClient, key: str | None = None, **fields: Any) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.post(CHATS, json={"model": "fake", "messages": HI, "store": True, **fields}, headers=headers)


# --- chats --------------------------------------------------------------------------------------------------------


def test_a_stored_chat_is_kept_until_it_is_deleted() -> None:
    server = client()
    body = chat(server, metadata={"a": "b"}).json()
    path = f"{CHATS}/{body['id']}"
    assert server.get(path).json() == {**body, "metadata": {"a": "b"}}
    changed = server.post(path, json={"metadata": {"c": "d"}}).json()
    assert changed == {**body, "metadata": {"c": "d"}} == server.get(path).json()
    assert server.delete(path).json() == {"id": body["id"], "deleted": True, "object": "chat.completion.deleted"}
    for gone in (
        server.get(path),
        server.delete(path),
        server.get(f"{path}/messages"),
        server.post(path, json={"metadata": {}}),
    ):
        assert error_of(gone, 404)["code"] == "completion_not_found"


def test_only_chats_that_say_so_are_stored() -> None:
    server = client()
    for fields in ({"store": False}, {"store": None}):
        assert error_of(server.get(f"{CHATS}/{chat(server, **fields).json()['id']}"), 404)
    assert server.get(CHATS).json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    without = client(response_bytes=0)
    assert error_of(without.get(f"{CHATS}/{chat(without).json()['id']}"), 404)


@pytest.mark.parametrize("n", [1, 2])
def test_what_was_streamed_is_stored_as_it_was_said(n: int) -> None:
    said = f"<think>Hm.</think>Look.{calls(ADDED)}"
    server = client(FakeEngine(lambda _: said), **SPEAKS)
    tools = [{"type": "custom", "custom": {"name": "patch"}}, {"type": "function", "function": {"name": "f"}}]
    response = chat(server, tools=tools, stream=True, n=n)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    kept = server.get(f"{CHATS}/{chunks[0]['id']}").json()
    whole = chat(server, tools=tools, n=n).json()
    ids = [
        [call["id"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index
         for call in choice["delta"].get("tool_calls", ()) if "id" in call]
        for index in range(n)
    ]  # fmt: skip
    for choice, other, given in zip(kept["choices"], whole["choices"], ids, strict=True):
        assert [call["id"] for call in choice["message"]["tool_calls"]] == given
        for call in (*choice["message"]["tool_calls"], *other["message"]["tool_calls"]):
            call["id"] = ""
    assert kept["choices"] == whole["choices"]
    assert kept["usage"] == {**whole["usage"], "prompt_tokens_details": kept["usage"]["prompt_tokens_details"]}
    assert kept["object"] == "chat.completion"


def test_a_stream_that_failed_or_was_left_is_not_stored() -> None:
    server = client()
    assert chat(server, stream=True, temperature=-1).status_code == 400
    assert server.get(CHATS).json()["data"] == []


def test_chats_are_listed_page_by_page() -> None:
    server = client()
    ids = [chat(server, metadata={"turn": str(i % 2)}).json()["id"] for i in range(5)]
    ask(server)  # a response is no chat

    def listed(query: str) -> tuple[list[str], bool]:
        page = server.get(f"{CHATS}?{query}").json()
        shown = [each["id"] for each in page["data"]]
        assert (page["first_id"], page["last_id"]) == ((shown[0], shown[-1]) if shown else (None, None))
        return shown, page["has_more"]

    assert listed("") == (ids, False)
    assert listed("order=desc") == (ids[::-1], False)
    assert listed("limit=2") == (ids[:2], True)
    assert listed(f"limit=3&after={ids[1]}") == (ids[2:], False)
    assert listed(f"limit=2&order=desc&after={ids[3]}") == ([ids[2], ids[1]], True)
    assert listed("metadata[turn]=1") == ([ids[1], ids[3]], False)
    assert listed("model=other") == ([], False)
    for query, param in [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
    ]:
        assert error_of(server.get(f"{CHATS}?{query}"), 400)["param"] == param


def test_the_messages_of_a_chat_are_listed() -> None:
    server = client()
    parts = [{"type": "text", "text": "there"}]
    id = chat(server, messages=[*HI, {"role": "user", "content": parts}]).json()["id"]
    data = server.get(f"{CHATS}/{id}/messages").json()["data"]
    assert data == [
        {"id": f"{id}-0", "role": "user", "content": "hi"},
        {"id": f"{id}-1", "role": "user", "content": None, "content_parts": parts},
    ]
    assert server.get(f"{CHATS}/{id}/messages?order=desc&limit=1").json()["data"] == data[1:]


def test_a_chat_belongs_to_its_key() -> None:
    server = client(api_key=("one", "two"))
    path = f"{CHATS}/{chat(server, 'one').json()['id']}"
    for method in ("get", "delete"):
        assert error_of(getattr(server, method)(path, headers={"Authorization": "Bearer two"}), 404)
        assert error_of(getattr(server, method)(path), 401)
    mine, none = (
        server.get(CHATS, headers={"Authorization": f"Bearer {key}"}).json()["data"] for key in ("one", "two")
    )
    assert ([each["id"] for each in mine], none) == ([path.removeprefix(f"{CHATS}/")], [])
    assert error_of(server.get(CHATS), 401)
    assert server.get(path, headers={"Authorization": "Bearer one"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"), [({}, "metadata"), ({"metadata": {"a": 1}}, "metadata"), ({"metadata": {}, "x": 1}, "x")]
)
def test_a_bad_update_is_named_and_changes_nothing(body: dict[str, Any], param: str) -> None:
    server = client()
    stored = chat(server).json()
    path = f"{CHATS}/{stored['id']}"
    assert error_of(server.post(path, json=body), 400)["param"].startswith(param)
    assert server.get(path).json() == {**stored, "metadata": {}}


def test_chats_and_responses_are_not_taken_for_each_other() -> None:
    server = client()
    one, other = chat(server).json()["id"], ask(server).json()["id"]
    assert error_of(server.get(f"{RESPONSES}/{one}"), 404)
    assert error_of(server.delete(f"{RESPONSES}/{one}"), 404)
    assert error_of(server.get(f"{CHATS}/{other}"), 404)
    assert error_of(ask(server, previous_response_id=one), 404)
    assert server.get(f"{CHATS}/{one}").status_code == 200


# --- responses ----------------------------------------------------------------------------------------------------


def test_the_items_that_a_response_answers_are_listed() -> None:
    server = client()
    items = [
        {"role": "user", "content": "one"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r", "id": "mine"},
    ]
    first = ask(server, items).json()
    page = server.get(f"{RESPONSES}/{first['id']}/input_items?order=asc").json()
    hexes = first["id"].removeprefix("resp_")
    assert page["data"] == [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "one"}],
            "id": f"msg_{hexes}_i0",
        },
        {**items[1], "id": f"item_{hexes}_i1"},
        items[2],
    ]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (f"msg_{hexes}_i0", "mine", False)
    backwards = server.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert backwards == page["data"][::-1]
    two = server.get(f"{RESPONSES}/{first['id']}/input_items?order=asc&limit=1&after=msg_{hexes}_i0").json()
    assert (two["data"], two["has_more"]) == ([page["data"][1]], True)

    second = ask(server, "more", previous_response_id=first["id"]).json()
    inherited = server.get(f"{RESPONSES}/{second['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in inherited] == [
        *("message", "function_call", "function_call_output", "message", "message")
    ]
    assert inherited[3] == first["output"][0]
    assert error_of(server.get(f"{RESPONSES}/resp_x/input_items"), 404)
    assert error_of(server.get(f"{RESPONSES}/{first['id']}/input_items?after=x"), 400)["param"] == "after"


def test_an_item_that_was_listed_can_be_referred_to() -> None:
    engine = FakeEngine()
    server = client(engine)
    id = ask(server, "one").json()["id"]
    (item,) = server.get(f"{RESPONSES}/{id}/input_items").json()["data"]
    assert ask(server, [{"type": "item_reference", "id": item["id"]}]).status_code == 200
    assert engine.tokenizer.decode(engine.streams[-1].request.tokens) == "<user>one\n<assistant>"


def test_nothing_is_cancelled() -> None:
    server = client()
    id = ask(server).json()["id"]
    error = error_of(server.post(f"{RESPONSES}/{id}/cancel"), 400)
    assert (error["param"], error["code"]) == ("id", "not_cancellable")
    assert "background" in error["message"]
    assert error_of(server.post(f"{RESPONSES}/resp_x/cancel"), 404)["code"] == "response_not_found"
    assert server.get(f"{RESPONSES}/{id}").status_code == 200


def test_the_tokens_of_an_input_are_counted() -> None:
    server = client()

    def counted(**fields: Any) -> Any:
        return server.post(f"{RESPONSES}/input_tokens", json=fields)

    fields: dict[str, Any] = {"input": "hi", "instructions": "Be kind.", "tools": [WEATHER]}
    answered = ask(server, **fields).json()
    assert counted(**fields).json() == {
        "object": "response.input_tokens",
        "input_tokens": answered["usage"]["input_tokens"],
    }
    more = counted(input="more", previous_response_id=answered["id"], model="fake").json()["input_tokens"]
    assert more == ask(server, "more", previous_response_id=answered["id"]).json()["usage"]["input_tokens"]
    response = counted(input="hi", personality="friendly", truncation="auto", tools=[{"type": "web_search"}])
    assert {*response.headers["X-Mainstem-Ignored"].split(", ")} == {"personality", "truncation", "tools[0]"}
    assert error_of(counted(), 400)["param"] == "input"
    assert error_of(counted(input="x", model="other"), 404)["param"] == "model"
    assert error_of(counted(input="x", max_output_tokens=3), 400)["code"] == "unknown_field"


# --- the official client ------------------------------------------------------------------------------------------


@pytest.mark.deadline
def test_the_official_client() -> None:
    said = FORMATS["hermes"].written([("patch", as_arguments(ADDED))])
    with served(FakeEngine(lambda prompt: said if "Patch!" in prompt else "Yes!"), **SPEAKS) as url:
        api = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
        stored = api.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}], store=True, metadata={"a": "b"}
        )
        assert api.chat.completions.retrieve(stored.id).choices == stored.choices
        assert [each.id for each in api.chat.completions.list(metadata={"a": "b"})] == [stored.id]
        assert [each.content for each in api.chat.completions.messages.list(stored.id)] == ["x"]
        assert api.chat.completions.update(stored.id, metadata={"c": "d"}).metadata == {"c": "d"}
        assert api.chat.completions.delete(stored.id).deleted
        with pytest.raises(openai.NotFoundError):
            api.chat.completions.retrieve(stored.id)

        response = api.responses.create(model="fake", input="x")
        assert [item.type for item in api.responses.input_items.list(response.id)] == ["message"]
        assert api.responses.input_tokens.count(input="x", model="fake").input_tokens == response.usage.input_tokens  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError):
            api.responses.cancel(response.id)

        tools: Any = [{"type": "custom", "name": "patch"}]
        call = api.responses.create(model="fake", input="Patch!", tools=tools).output[0]
        assert call.type == "custom_tool_call"
        assert call.input == ADDED
        with api.responses.stream(model="fake", input="Patch!", tools=tools) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.custom_tool_call_input.delta")
        assert text == ADDED
        result: Any = [{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}]
        given: Any = [{"role": "user", "content": "x"}, call, *result]
        assert api.responses.create(model="fake", input=given, tools=tools).output_text == "Yes!"
        chats: Any = [{"type": "custom", "custom": {"name": "patch"}}]
        asked: Any = [{"role": "user", "content": "Patch!"}]
        message = api.chat.completions.create(model="fake", messages=asked, tools=chats).choices[0].message
        assert message.tool_calls is not None and message.tool_calls[0].type == "custom"
        assert message.tool_calls[0].custom.input == ADDED


@pytest.mark.parametrize("path", [CHATS, f"{CHATS}/chatcmpl-1/messages", f"{RESPONSES}/resp_1/input_items"])
def test_a_long_list_keeps_no_other_client_waiting(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server, threads = client(), list[int]()
    monkeypatch.setattr(ResponseStore, "entries", lambda *_: threads.append(threading.get_ident()) or [])
    monkeypatch.setattr(ResponseStore, "get", lambda *_: threads.append(threading.get_ident()))

    async def loop(_: object) -> Response:
        return Response(str(threading.get_ident()))

    with server:
        server.app.router.add_route("/asked", loop)
        asked = int(server.get("/asked").text)
        assert server.get(path).status_code in (200, 404)
    assert threads and asked not in threads


@pytest.mark.parametrize("most", [100, 1000])
def test_a_page_has_so_many_entries_at_most(most: int) -> None:
    ids = [f"i{i}" for i in range(1200)]

    def shown(limit: int) -> tuple[int, bool]:
        if most == 1000:
            some, more = between(ids, {"limit": str(limit)})
            return len(some), more
        found = page([(id, {}) for id in ids], {"limit": str(limit)}, "asc")
        return len(found.data), found.has_more

    assert [shown(limit) for limit in (1, most)] == [(1, True), (most, True)]
    assert len(page([(id, {}) for id in ids], {}, "asc").data) == len(between(ids, {})[0]) == 20  # where none is given
    for limit in (0, most + 1):
        with pytest.raises(ApiError, match=f"limit: must be a number from 1 to {most}, got '{limit}'"):
            shown(limit)


@pytest.mark.parametrize(
    ("query", "shown", "more"),
    [
        ({}, "abcde", False),
        ({"limit": "2"}, "ab", True),
        ({"limit": "5"}, "abcde", False),
        ({"after_id": "b", "limit": "2"}, "cd", True),
        ({"after_id": "b", "limit": "3"}, "cde", False),
        ({"after_id": "e"}, "", False),
        ({"before_id": "e", "limit": "2"}, "cd", True),
        ({"before_id": "c", "limit": "1"}, "b", True),
        ({"before_id": "c", "limit": "2"}, "ab", False),
        ({"before_id": "c", "limit": "3"}, "ab", False),
        ({"before_id": "a"}, "", False),
    ],
)
def test_a_list_is_read_in_either_direction(query: dict[str, str], shown: str, more: bool) -> None:
    assert between([*"abcde"], query) == ([*shown], more)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "x"}, "limit"),
        ({"after_id": "z"}, "after_id"),
        ({"before_id": ""}, "before_id"),
        ({"before_id": "a", "after_id": "b"}, "before_id"),
    ],
)
def test_a_page_that_cannot_be_is_refused(query: dict[str, str], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        between([*"abcde"], query)
    assert (caught.value.status, caught.value.detail.param) == (400, param)
