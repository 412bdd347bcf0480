"""Answers scored over HTTP, as harnesses for evaluation ask for it: the sums are those of plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rigs.serving import Serve, Server, server_of, tiny_folder, unlike
from transformers import AutoModelForCausalLM

from bench.tiny_models import HYBRIDS, WINDOWED

pytestmark = pytest.mark.deadline

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", WINDOWED["gemma3_text"]),
    "qwen3_next": ("qwen3_next", HYBRIDS["qwen3_next"]),
}
CONTEXT = unlike(1, 41)
QUESTIONS = [[*CONTEXT, *unlike(number, length)] for number, length in ((2, 3), (3, 9), (4, 1), (5, 17))]


@pytest.fixture(scope="module", params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Serve, Any]:
    """What starts servers of a family, and the same model of transformers."""
    family, changes = MORE.get(request.param, (request.param, {}))
    folder = tiny_folder(family, tmp_path_factory.mktemp("models") / request.param, **changes)
    serve = server_of(folder, tmp_path_factory.mktemp("logs"), {"page-size": "8", "token-budget": "16"})
    return serve, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def scored(server: Server, prompts: Sequence[Any]) -> list[dict[str, Any]]:
    body = {"model": server.model, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    reply = server.http.post("/v1/completions", json={**body, "seed": 1234})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return [choice["logprobs"] for choice in reply.json()["choices"]]


def plain(model: Any, tokens: Sequence[int]) -> tuple[float, bool]:
    """Returns the log-likelihood of the tokens after the context, and whether each was the likeliest."""
    with torch.inference_mode():
        rows = torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0].float(), dim=-1)
    places = range(len(CONTEXT), len(tokens))
    return (
        sum(float(rows[at - 1, tokens[at]]) for at in places),
        all(int(rows[at - 1].argmax()) == tokens[at] for at in places),
    )


def test_likelihoods_are_those_of_plain_transformers_cold_and_cached(served: tuple[Serve, Any]) -> None:
    serve, model = served
    with serve({}) as server:
        greedy = [*CONTEXT, *(int(word[1:]) for word in server.ask(CONTEXT, tokens=3).tokens)]
        for _ in range(2):
            for tokens, logprobs in zip([*QUESTIONS, greedy], scored(server, [*QUESTIONS, greedy]), strict=True):
                own, top = (logprobs[name][len(CONTEXT) : -1] for name in ("token_logprobs", "top_logprobs"))
                likelihood, likeliest = plain(model, tokens)
                assert sum(own) == pytest.approx(likelihood, abs=1e-3 * len(own))
                assert all(value == max(best.values()) for value, best in zip(own, top, strict=True)) == likeliest
        assert plain(model, greedy)[1], "otherwise nothing was the likeliest"


def test_texts_and_tokens_are_scored_alike(served: tuple[Serve, Any]) -> None:
    text = " ".join(f"w{token}" for token in QUESTIONS[0])
    with served[0]({}) as server:
        by_id, by_text = (scored(server, [prompt])[0] for prompt in (QUESTIONS[0], text))
        assert by_id["token_logprobs"][1:] == pytest.approx(by_text["token_logprobs"][1:], abs=1e-3)
        assert by_id["tokens"] == by_text["tokens"]
        words = [text[at:].split()[0] for at in by_text["text_offset"][:-1]]
        assert words == text.split()
