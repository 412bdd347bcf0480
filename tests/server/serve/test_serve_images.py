"""Chats with images over HTTP: what is refused, and what a second chat with the same images costs."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from bench.tiny_vision import FAMILIES, picture, save
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import load_model
from mainstem.server.app import create_app
from mainstem.settings.engine import EngineConfig
from mainstem.settings.server import ImagePolicy, ServerConfig

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp("served") / request.param)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    config = EngineConfig(pages=256, page_size=4, token_budget=64)
    with Engine(load_model(str(folder), dtype="float32"), config) as made:
        yield made


@pytest.fixture
def server(engine: Engine) -> TestClient:
    engine.flush()
    return TestClient(create_app(engine, ServerConfig(images=ImagePolicy(max_images=3))))


def shown(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def said(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ask(server: TestClient, model: str, *parts: dict[str, Any], **fields: Any) -> Any:
    message = {"role": "user", "content": list(parts)}
    fields = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    return server.post("/v1/chat/completions", json={"model": model, "messages": [message], **fields})


def answer(response: Any) -> tuple[str, int, int]:
    """The text of a response, its prompt tokens, and how many of them were cached."""
    assert response.status_code == 200, response.text
    body = response.json()
    usage = body["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return body["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def test_the_second_time_two_images_cost_no_encoder_and_no_prefill(server: TestClient, engine: Engine) -> None:
    assert engine.vision is not None
    runs = engine.vision.stats().encoder_runs
    one, two = picture(11), picture(12, 60, 50)

    def both() -> list[tuple[str, int, int]]:
        questions = ("What do you see?", "Which is larger?")
        return [answer(ask(server, engine.name, said("See: "), shown(one), shown(two), said(q))) for q in questions]

    first, second = both(), both()
    assert [text for text, _, _ in first] == [text for text, _, _ in second]
    assert engine.vision.stats().encoder_runs == runs + 2
    assert first[0][2] == 0
    for _, tokens, cached in (first[1], *second):
        assert cached >= tokens - len("Which is larger?<turn>assistant:") - 4  # both images, whole
    engine.flush()
    cold = both()
    assert [text for text, _, _ in cold] == [text for text, _, _ in first]


def test_answers_are_those_of_transformers(server: TestClient, engine: Engine, folder: Path) -> None:
    plain = load_model(str(folder), dtype="float32")
    processor: Any = plain.processor
    parts = [said("a"), {"type": "image"}, said("b"), {"type": "image"}, said("c")]
    words = plain.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}],
        chat_template=processor.chat_template, tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    one, two = picture(21), picture(22, 60, 50)
    inputs = processor(text=[words], images=[[one, two]], return_tensors="pt")
    made = plain.model.generate(**inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None)
    expected = plain.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for _ in range(2):
        parts = [said("a"), shown(one), said("b"), shown(two), said("c")]
        text, tokens, _ = answer(ask(server, engine.name, *parts, max_tokens=12))
        assert (text, tokens) == (expected, inputs["input_ids"].shape[1])


def test_another_image_is_not_taken_for_the_first(server: TestClient, engine: Engine) -> None:
    changed = picture(11)
    changed.putpixel((3, 3), (1, 2, 3))
    parts = (said("See: "), shown(picture(11)), said("What do you see?"))
    _, tokens, _ = answer(ask(server, engine.name, *parts))
    assert answer(ask(server, engine.name, *parts))[2] > tokens - 8
    other = answer(ask(server, engine.name, said("See: "), shown(changed), said("What do you see?")))
    assert other[2] <= len("<bos><turn>user:See: \n\n<begin>")


def test_a_conversation_goes_on_after_its_images(server: TestClient, engine: Engine) -> None:
    question = {"role": "user", "content": [shown(picture(11)), said("What do you see?")]}
    body = {"model": engine.name, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    first = server.post("/v1/chat/completions", json={**body, "messages": [question]})
    _, tokens, _ = answer(first)
    more = [question, {"role": "assistant", "content": "a cat"}, {"role": "user", "content": "and now?"}]
    assert answer(server.post("/v1/chat/completions", json={**body, "messages": more}))[2] >= tokens - 4


def test_choices_of_one_chat_share_its_images(server: TestClient, engine: Engine) -> None:
    assert engine.vision is not None
    runs = engine.vision.stats().encoder_runs
    body = ask(server, engine.name, shown(picture(13)), said("Hm?"), n=3, temperature=1, seed=1).json()
    assert len(body["choices"]) == 3
    assert engine.vision.stats().encoder_runs == runs + 1


def runs_of(engine: Engine) -> int:
    assert engine.vision is not None
    return engine.vision.stats().encoder_runs


def test_no_salt_learns_which_images_another_has_sent(server: TestClient, engine: Engine) -> None:
    """In another place of the prompt, where KV is of no use, only the embeddings could tell."""

    def runs(words: str, **fields: Any) -> int:
        before = runs_of(engine)
        answer(ask(server, engine.name, said(words), shown(picture(31)), said("Hm?"), **fields))
        return runs_of(engine) - before

    assert [runs("a", cache_salt="mine"), runs("bb", cache_salt="mine")] == [1, 0]
    assert [runs("ccc", cache_salt="theirs"), runs("dddd")] == [1, 1]
    assert [runs("e" * 5, cache_salt="mine"), runs("f" * 6, cache_salt="theirs"), runs("g" * 7)] == [0, 0, 0]


def test_no_api_key_learns_which_images_another_has_sent(engine: Engine) -> None:
    engine.flush()
    keys = TestClient(create_app(engine, ServerConfig(api_key=("first", "second"))))

    def runs(words: str, key: str) -> int:
        before = runs_of(engine)
        keys.headers["Authorization"] = f"Bearer {key}"
        answer(ask(keys, engine.name, said(words), shown(picture(32)), said("Hm?")))
        return runs_of(engine) - before

    assert [runs("a", "first"), runs("bb", "first"), runs("ccc", "second"), runs("dddd", "second")] == [1, 0, 1, 0]


def error(response: Any) -> tuple[str, str]:
    assert response.status_code == 400, response.text
    body = response.json()["error"]
    return body["param"], body["code"]


def test_pixels_are_counted_over_all_images_of_a_request(engine: Engine) -> None:
    one, two = picture(1), picture(2)
    policy = ImagePolicy(image_max_pixels=one.width * one.height + two.width * two.height - 1)
    small = TestClient(create_app(engine, ServerConfig(images=policy)))
    answer(ask(small, engine.name, shown(one), shown(one)))  # the same URL is read once
    response = ask(small, engine.name, shown(one), shown(two))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "image_too_large")


def test_what_is_refused_is_named(server: TestClient, engine: Engine) -> None:
    url = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/cat.png"}}
    at = "messages[0].content[1].image_url.url"
    assert error(ask(server, engine.name, said("x"), url)) == (at, "image_url_not_allowed")
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert error(ask(server, engine.name, said("x"), broken)) == (at, "invalid_image")
    assert error(ask(server, engine.name, *[shown(picture(1))] * 4)) == ("messages", "too_many_images")
    assert error(ask(server, engine.name, said("x" * 600))) == ("messages", "context_length_exceeded")
    assert error(ask(server, engine.name, *[said("x" * 200), shown(picture(1, 90, 90))] * 3))[1] in (
        "context_length_exceeded",
    )


def test_a_model_that_sees_nothing_says_so() -> None:
    server = TestClient(create_app(FakeEngine()))
    at = "messages[0].content[0].image_url.url"
    assert error(ask(server, "fake", shown(picture(1)))) == (at, "unsupported_content")
    assert ask(server, "fake", said("one"), said("two")).status_code == 200


def test_files_are_read_where_they_are_allowed(engine: Engine, tmp_path: Path) -> None:
    server = TestClient(create_app(engine, ServerConfig(images=ImagePolicy(image_folder=tmp_path))))
    picture(11).save(tmp_path / "a.png")
    url = {"type": "image_url", "image_url": {"url": (tmp_path / "a.png").as_uri()}}
    again = answer(ask(server, engine.name, url, said("Hm?")))
    assert answer(ask(server, engine.name, shown(picture(11)), said("Hm?")))[2] > again[1] - 8
