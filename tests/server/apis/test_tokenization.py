"""The routes that tokenize: what is generated from, without generating."""

from __future__ import annotations

from typing import Any

import pytest
from rigs.fake_engine import FakeEngine
from rigs.templates import begin_texts, byte_tokenizer
from starlette.testclient import TestClient

import mainstem
from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig

CHAT = [{"role": "user", "content": "hi"}]


def post(route: str, key: str = "", **body: Any) -> Any:
    server = TestClient(create_app(FakeEngine(), ServerConfig(api_key=("secret",) if key else ())))
    return server.post(route, json=body, headers={"Authorization": f"Bearer {key}"} if key else {})


def test_a_text_and_its_tokens() -> None:
    tokens = [104, 195, 169]
    body = post("/tokenize", prompt="hé").json()
    assert body == {"count": 3, "max_model_len": FakeEngine().max_context, "tokens": tokens}
    assert post("/tokenize", prompt="hi", model="fake", return_token_strs=True).json()["token_strs"] == ["h", "i"]
    assert post("/detokenize", tokens=tokens, model="fake").json() == {"prompt": "hé"}
    assert post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_a_chat_is_rendered_as_for_an_answer() -> None:
    def text(**fields: Any) -> str:
        return bytes(post("/tokenize", messages=CHAT, **fields).json()["tokens"]).decode()

    assert text() == "<user>hi\n<assistant>"
    assert text(add_generation_prompt=False) == "<user>hi\n"
    assert text(continue_final_message=True) == "<user>hi"
    assert text(chat_template_kwargs={"hint": "think: "}) == "think: <user>hi\n<assistant>"


def special() -> TestClient:
    """A server whose tokenizer begins texts with <s>, and whose chat template ends messages with </s>."""
    engine = FakeEngine()
    engine.tokenizer = begin_texts(byte_tokenizer("chatml"))  # type: ignore[assignment]
    engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    return TestClient(create_app(engine))


def test_special_tokens_of_a_prompt_and_of_a_completion() -> None:
    server, bos, end = special(), 0, 1

    def made(**fields: Any) -> list[int]:
        tokenized = server.post("/tokenize", json=fields)
        completed = server.post("/v1/completions", json={"model": "fake", "return_token_ids": True, **fields})
        assert (tokenized.status_code, completed.status_code) == (200, 200), completed.text
        tokens: list[int] = tokenized.json()["tokens"]
        assert completed.json()["choices"][0]["prompt_token_ids"] == tokens
        return tokens

    plain = made(prompt="hi", add_special_tokens=False)
    assert plain and not {*plain} & {bos, end}
    assert made(prompt="hi") == made(prompt="<s>hi") == made(prompt="hi", add_special_tokens=True) == [bos, *plain]
    assert made(prompt="<s>hi</s>", add_special_tokens=False, parse_special=True) == [bos, *plain, end]
    text = made(prompt="<s>hi</s>", parse_special=False)
    assert text[0] == bos and not {*text[1:]} & {bos, end}
    assert made(prompt="<s>hi</s>", parse_special=False, add_special_tokens=False) == text[1:]


def test_special_tokens_of_a_chat() -> None:
    server, bos, end = special(), 0, 1

    def made(text: str, **fields: Any) -> list[int]:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        tokens: list[int] = server.post("/tokenize", json=body).json()["tokens"]
        answered = server.post("/v1/chat/completions", json={"model": "fake", "return_token_ids": True, **body})
        assert answered.status_code == 200, answered.text
        shown = answered.json()
        assert (shown.get("prompt_token_ids") or shown["choices"][0]["prompt_token_ids"]) == tokens
        return tokens

    plain = made("hi")
    assert plain.count(end) == 1 and bos not in plain
    assert made("hi", add_special_tokens=False) == plain
    assert made("hi", add_special_tokens=True) == [bos, *plain]
    assert made("<s></s>").count(end) == made("</s>", add_special_tokens=True).count(end) == 1
    assert made("<s>", add_special_tokens=True)[0] == bos


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": "a", "promt": 1}, "promt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a", "nmae": "b"}]}, "messages[0].nmae"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_a_bad_field_is_named(route: str, body: dict[str, Any], param: str) -> None:
    response = post(route, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("route", ["/tokenize", "/detokenize"])
def test_another_model_and_a_missing_key_are_refused(route: str) -> None:
    body: dict[str, Any] = {"prompt": "a"} if route == "/tokenize" else {"tokens": [97]}
    assert post(route, model="other", **body).status_code == 404
    assert post(route, key="secret", **body).status_code == 200
    assert post(route, key="wrong", **body).status_code == 401


def test_what_cannot_fit_is_counted_but_not_read() -> None:
    length = FakeEngine().max_context + 1
    for body in ({"prompt": "a" * length}, {"messages": [{"role": "user", "content": "a" * length}]}):
        counted = post("/tokenize", **body).json()
        assert counted["count"] == len(counted["tokens"]) >= length > counted["max_model_len"]
    response = post("/detokenize", tokens=[97] * length)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert response.json()["error"]["param"] == "tokens"


def test_the_version() -> None:
    server = TestClient(create_app(FakeEngine()))
    assert server.get("/version").json() == {"version": mainstem.__version__}


def test_the_tokenizer_is_described() -> None:
    server = TestClient(create_app(FakeEngine(), ServerConfig(api_key=("secret",))))
    assert server.get("/tokenizer_info").status_code == 401
    body = server.get("/tokenizer_info", headers={"Authorization": "Bearer secret"}).json()
    described = {"tokenizer_class": "FakeTokenizer", "chat_template": "a template"}
    assert body == {**described, "bos_token": None, "eos_token": None, "pad_token": None}
