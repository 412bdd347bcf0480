"""/v1/score and /v1/rerank: what clients may send, and what they get."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Request, TokenLogprob
from mainstem.runtime.stream import Stream
from mainstem.server.apis.scores import LABELS, MAX_TEXTS, TEMPLATE, ScoreRequest, first_of, pairs_of
from mainstem.server.app import create_app
from mainstem.server.errors import ApiError
from mainstem.settings.engine import EngineConfig
from mainstem.settings.server import ServerConfig

PAGE = 16


class Judge(FakeEngine):
    """Finds a label as likely as the letter before the prompt's `Answer:` says: `a` is the surest yes."""

    def submit(self, request: Any, **options: Any) -> Any:
        stream = super().submit(request, **options)
        text = bytes(request.tokens.tolist()).decode()
        sure, first = -float(ord(text.partition("\n\nAnswer:")[0][-1]) - 96), request.params.first_scored
        said = text[first:]

        def scores(best: int) -> tuple[TokenLogprob, ...]:
            whole = sure if said == LABELS[0] else -3.0
            return tuple(TokenLogprob(ord(each), whole / len(said), ()) for each in said)

        stream._prompt_logprobs = scores
        return stream


def client(engine: Any = None, **config: Any) -> TestClient:
    return TestClient(create_app(engine or Judge(), ServerConfig(**config)))


def post(server: TestClient, path: str, **fields: Any) -> httpx.Response:
    reply: httpx.Response = server.post(path, json={"model": "fake", **fields})
    return reply


def chance(letter: str) -> float:
    yes, no = math.exp(-float(ord(letter) - 96)), math.exp(-3.0)
    return yes / (yes + no)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("one", "other", "letters"),
    [
        ("q", "a", "a"),
        ("q", ["a", "c", "e"], "ace"),
        (["q", "r"], "b", "bb"),
        (["q", "r"], ["b", "d"], "bd"),
        (["q"], ["b", "d"], "bd"),
    ],
)
def test_each_pair_has_the_probability_of_the_first_label(path: str, one: Any, other: Any, letters: str) -> None:
    body = post(client(), path, text_1=one, text_2=other).json()
    assert [each["score"] for each in body["data"]] == pytest.approx([chance(letter) for letter in letters])
    assert [(each["index"], each["object"]) for each in body["data"]] == [(i, "score") for i in range(len(letters))]
    assert (body["object"], body["model"], body["id"][:6]) == ("list", "fake", "score-")


def test_each_label_is_scored_after_the_whole_prompt() -> None:
    engine = Judge()
    body = post(client(engine), "/v1/score", text_1="{text_2}", text_2="a {text_1} b").json()
    prompt = TEMPLATE.replace("{text_2}", "a {text_1} b").replace("{text_1}", "{text_2}", 1)
    asked = [stream.request for stream in engine.streams]
    assert [bytes(each.tokens.tolist()).decode() for each in asked] == [prompt + label for label in LABELS]
    assert all(each.params.logprob_start == len(prompt) and not each.params.max_tokens for each in asked)
    tokens = sum(len(each.tokens) for each in asked)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == tokens
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
@pytest.mark.parametrize("top", [None, 0, 2, 9])
def test_documents_come_in_the_order_of_their_scores(path: str, top: int | None) -> None:
    documents = ["d", "a", "c", "a"]
    body = post(client(), path, query="q", documents=documents, top_n=top).json()
    expected = [1, 3, 2, 0][: top or None]
    assert [each["index"] for each in body["results"]] == expected
    assert [each["document"]["text"] for each in body["results"]] == [documents[i] for i in expected]
    assert [each["relevance_score"] for each in body["results"]] == pytest.approx(
        [chance(documents[i]) for i in expected]
    )
    bare = post(client(), path, query="q", documents=documents, return_documents=False).json()
    assert not any("document" in each for each in bare["results"])


@pytest.mark.model
def test_control_tokens_of_a_template_count_and_those_in_texts_are_text(smollm2: LoadedModel) -> None:
    special = smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>")
    with Engine(smollm2, EngineConfig(pages=200, page_size=16)) as engine:
        server, prompts = client(engine), list[list[int]]()
        submit = engine.submit

        def noted(request: Request, **options: Any) -> Stream:
            prompts.append(request.tokens.tolist())
            return submit(request, **options)

        engine.submit = noted  # type: ignore[method-assign]
        given = {"model": engine.name, "text_1": "a<|im_end|>", "text_2": ["b", "<|im_end|>"]}
        scores = post(server, "/v1/score", template="{text_1}{text_2}<|im_end|>", **given).json()["data"]
        assert [prompt.count(special) for prompt in prompts] == [1, 1, 1, 1]
        assert all(0 < each["score"] < 1 for each in scores)
        alone = post(server, "/v1/score", template="{text_1}{text_2}<|im_end|>", **{**given, "text_2": "b"}).json()
        assert alone["data"][0]["score"] == pytest.approx(scores[0]["score"], abs=1e-4)
        assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_server_that_drains_refuses() -> None:
    app = create_app(Judge(), ServerConfig())  # type: ignore[arg-type]
    app.state.draining = True
    assert post(TestClient(app), "/v1/rerank", query="q", documents=["a"]).status_code == 503


def test_a_template_and_labels_of_ones_own() -> None:
    engine = Judge()
    given = {"template": "{text_2}|{text_1}|x\n\nAnswer:", "labels": [" yes", "maybe", "no"]}
    (found,) = post(client(engine), "/v1/score", text_1="q", text_2="d", **given).json()["data"]
    sure = math.exp(-float(ord("x") - 96))
    assert found["score"] == pytest.approx(sure / (sure + 2 * math.exp(-3.0)))
    assert [bytes(each.request.tokens.tolist()).decode() for each in engine.streams] == [
        f"d|q|x\n\nAnswer:{label}" for label in given["labels"]
    ]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c" * 9000]}, "text_2[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c", "d" * 9000]}, "documents[2]"),
        ("/v1/rerank", {"query": "a" * 20000, "documents": ["b"] * 420}, "documents"),
        ("/v1/score", {"text_1": "a", "text_2": ["a"] * (MAX_TEXTS + 1)}, "text_2"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "template": "{text_1}"}, "template"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "template": "{text_1}{text_2}{text_2}"}, "template"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "labels": ["yes"]}, "labels"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "labels": ["yes", ""]}, "labels[1]"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "model": "other"}, "model"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    engine = Judge()
    reply = post(client(engine), path, **fields)
    assert reply.status_code in (400, 404) and reply.json()["error"]["param"] == param, reply.text
    assert not engine.streams


def test_prompts_have_16_million_characters_at_most_with_each_label() -> None:
    template, most = "{text_1}{text_2}", 16 << 20
    given = {"text_1": "a" * (most // 128 - len(template) - 1), "text_2": ["b"] * 64, "template": template}
    for more, message in ((0, "context"), (1, "16,777,216 characters")):
        body = {**given, "text_1": given["text_1"] + "a" * more}  # type: ignore[operator]
        assert message in post(client(), "/v1/score", **body).json()["error"]["message"]


@pytest.mark.model
def test_control_tokens_in_labels_are_text(smollm2: LoadedModel) -> None:
    with Engine(smollm2, EngineConfig(pages=200, page_size=16)) as engine:
        label = create_app(engine, ServerConfig()).state.generating._scores._label(0, "<|im_end|>")
        assert len(label) > 1


def test_a_request_has_2048_pairs_at_most() -> None:
    body = ScoreRequest(model="fake", text_1="a", text_2=["b"] * 2048)
    assert len(pairs_of(body)) == 2048
    body.text_2 = ["b"] * 2049
    with pytest.raises(ApiError, match="at most 2048 pairs"):
        pairs_of(body)


def test_the_probability_of_the_first_label() -> None:
    assert first_of([-1.0, -1.0]) == 0.5 and first_of([-math.inf, -1.0]) == 0.0
    assert first_of([-math.inf, -math.inf]) == 0.5
    assert first_of([-1000.0, -1001.0]) == pytest.approx(1 / (1 + math.exp(-1)))
