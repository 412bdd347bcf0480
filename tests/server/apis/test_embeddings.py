"""/v1/embeddings: what clients may send, what they get, and that the official client gets it."""

from __future__ import annotations

import base64
import random
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from rigs.clients import served
from rigs.fake_engine import FakeEngine, embedding
from starlette.testclient import TestClient

from bench.tiny_models import VOCAB
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import load_model
from mainstem.server.apis import embeddings
from mainstem.server.app import create_app
from mainstem.server.errors import ApiError
from mainstem.settings.engine import EngineConfig
from mainstem.settings.server import ServerConfig
from tests.fleet.test_fleet_front import Rig, calls, front


def client(engine: Any = None, **config: Any) -> TestClient:
    return TestClient(create_app(engine or FakeEngine(), ServerConfig(**{"embeddings": True, **config})))


def embed(server: TestClient, given: Any, headers: Any = None, **fields: Any) -> httpx.Response:
    reply: httpx.Response = server.post(
        "/v1/embeddings", json={"model": "fake", "input": given, **fields}, headers=headers
    )
    return reply


def expected(text: str) -> list[float]:
    found: list[float] = embedding(list(text.encode())).tolist()
    return found


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("Hello", ["Hello"]),
        (["Hello", "you there"], ["Hello", "you there"]),
        ([72, 105], ["Hi"]),
        ([[72, 105], [72]], ["Hi", "H"]),
        (["Hello"], ["Hello"]),
    ],
)
def test_each_input_has_an_embedding_in_order(given: Any, texts: list[str]) -> None:
    engine = FakeEngine()
    body = embed(client(engine), given).json()
    assert [each["embedding"] for each in body["data"]] == [expected(text) for text in texts]
    assert [(each["index"], each["object"]) for each in body["data"]] == [(i, "embedding") for i in range(len(texts))]
    tokens = sum(map(len, texts))
    assert (body["object"], body["model"]) == ("list", "fake")
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert all(stream.request.params.max_tokens == 0 for stream in engine.streams)


def test_base64_is_float32_in_little_endian_order() -> None:
    (found,) = embed(client(), "Hello", encoding_format="base64").json()["data"]
    numbers = np.frombuffer(base64.b64decode(found["embedding"]), "<f4")
    assert numbers.tolist() == expected("Hello")


def test_without_the_option_there_is_no_such_route() -> None:
    engine = FakeEngine()
    reply = embed(client(engine, embeddings=False), "Hello")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_embeddings")
    assert "--embeddings" in reply.json()["error"]["message"]
    assert not engine.streams


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[1], []]}, "input[1]", "empty"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a", 1]}, "input", "list of strings"),
        ({"input": "x" * 4097}, "input", "maximum context length is 4096 tokens"),
        ({"input": ["a", "x" * 4097]}, "input[1]", "maximum context length is 4096 tokens"),
        ({"input": [*["a"] * 2047, ""]}, "input[2047]", "empty"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"dimensions": 3}, "dimensions", "have 4 dimensions"),
        ({"model": "other"}, "model", "does not exist"),
        ({"dimension": 4}, "dimension", "did you mean dimensions?"),
    ],
)
def test_what_cannot_be_embedded_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    engine = FakeEngine()
    reply = client(engine).post("/v1/embeddings", json={"model": "fake", "input": "Hello", **fields})
    error = reply.json()["error"]
    assert reply.status_code == (404 if param == "model" else 400)
    assert error["param"] == param and says in error["message"], error
    assert not engine.streams


def test_fields_that_are_taken() -> None:
    reply = embed(client(), "Hello", dimensions=4, encoding_format="float", user="me", cache_salt="s")
    assert reply.status_code == 200 and reply.headers["X-Mainstem-Ignored"] == "user"
    warned = embed(client(unknown_fields="warn"), "Hello", other=1)
    assert warned.status_code == 200 and warned.headers["X-Mainstem-Unknown-Fields"] == "other"


def test_keys_and_salts_are_namespaces() -> None:
    engine = FakeEngine()
    server = client(engine, api_key=("k", "l"))
    assert embed(server, "Hello").status_code == 401
    for key, salt in (("k", None), ("l", None), ("k", "s")):
        reply = embed(server, "Hello", {"Authorization": f"Bearer {key}"}, cache_salt=salt)
        assert reply.status_code == 200
    assert len({stream.request.namespace for stream in engine.streams}) == 3


def test_many_inputs_are_computed_a_part_at_a_time() -> None:
    engine = FakeEngine()  # takes 64 at a time
    texts = ["a" * (1 + i % 50) for i in range(300)]
    body = embed(client(engine), texts).json()
    assert [each["embedding"] for each in body["data"]] == [expected(text) for text in texts]
    assert body["usage"]["prompt_tokens"] == sum(map(len, texts))


@pytest.mark.parametrize(("text", "status"), [("fail!", 500), ("crash!", 503)])
def test_a_failure_is_an_error_and_cancels_the_others(text: str, status: int) -> None:
    engine = FakeEngine()
    reply = embed(client(engine), ["Hello", text])
    assert reply.status_code == status and "secret" not in reply.text
    assert not engine.running()


def test_a_server_that_drains_refuses() -> None:
    app = create_app(FakeEngine(), ServerConfig(embeddings=True))  # type: ignore[arg-type]
    app.state.draining = True
    assert embed(TestClient(app), "Hello").status_code == 503


def test_metrics_count_it() -> None:
    server = client()
    embed(server, ["Hello", "you"])
    assert 'mainstem_requests_total{outcome="length"} 2.0' in server.get("/metrics").text


def test_a_fleets_front_lets_a_replica_answer() -> None:
    rig = Rig()
    rig.apps = {name: create_app(engine, ServerConfig(embeddings=True)) for name, engine in rig.engines.items()}
    body = {"model": "fake", "input": ["Hello", "you"]}
    reply = calls(front(rig), lambda http: http.post("/v1/embeddings", json=body))
    assert reply.status_code == 200 and [each["embedding"] for each in reply.json()["data"]] == [
        expected("Hello"),
        expected("you"),
    ]
    assert reply.headers["x-mainstem-replica"] in ("a", "b") and len(rig.asked) == 1
    rig.dies = {reply.headers["x-mainstem-replica"]: 0}
    again = calls(front(rig), lambda http: http.post("/v1/embeddings", json=body))
    assert again.status_code == 200 and again.json() == reply.json()


def test_the_official_client(tiny_llama: str) -> None:
    loaded, config = load_model(tiny_llama, dtype="float32"), EngineConfig(pages=200, page_size=4)
    with Engine(loaded, config) as engine, served(engine, embeddings=True) as url:
        api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        ids = random.Random(0).choices(range(VOCAB), k=30)
        packed = api.embeddings.create(model=engine.name, input=[ids, ids[:7]])  # it asks for base64
        plain = api.embeddings.create(model=engine.name, input=[ids, ids[:7]], encoding_format="float")
        assert [each.index for each in packed.data] == [0, 1]
        assert packed.usage.prompt_tokens == packed.usage.total_tokens == 37
        for one, other in zip(packed.data, plain.data, strict=True):
            assert len(one.embedding) == engine.embedding_size
            assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-6)
            np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-6)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            api.embeddings.create(model=engine.name, input="x", dimensions=2)
        later = api.completions.create(model=engine.name, prompt=ids, max_tokens=1)
        assert later.usage is not None and later.usage.prompt_tokens_details is not None
        assert later.usage.prompt_tokens_details.cached_tokens == 28, "what was embedded is cached"


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    from rigs.serving import tiny_folder

    return str(tiny_folder("llama", tmp_path_factory.mktemp("embeddings") / "tiny"))


class Read(Exception):
    """The first input is read: there are not too many."""


@pytest.mark.parametrize(("count", "taken"), [(2047, True), (2048, True), (2049, False), (100_000, False)])
def test_a_request_has_2048_inputs_at_most_as_at_openai(count: int, taken: bool) -> None:
    def read(text: str, *, parse_special: bool) -> Any:
        raise Read

    preparation = SimpleNamespace(
        check_model=lambda model: None, namespace=lambda *_: None, prompts=SimpleNamespace(text=read)
    )
    access = SimpleNamespace(separates=False)
    parts: Any = SimpleNamespace(engine=SimpleNamespace(embedding_size=4), access=access, preparation=preparation)
    ask: Any = SimpleNamespace(model="m", dimensions=None, input=["x"] * count, cache_salt=None)
    with pytest.raises(Read if taken else ApiError, match=None if taken else "at most 2048 inputs"):
        embeddings.Embeddings(parts, lambda *_: None)._made(ask, None)  # type: ignore[arg-type,return-value]
