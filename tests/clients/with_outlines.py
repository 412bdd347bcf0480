"""outlines over a server: a choice, a schema, an expression and a grammar, by the fields of vLLM and of OpenAI."""

from __future__ import annotations

from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel
from task import MODEL, V1, run

client = openai.OpenAI(base_url=V1, api_key="any", max_retries=0)


class Verdict(BaseModel):
    sunny: bool


def schemas() -> None:
    for model in (
        outlines.from_openai(client, MODEL),
        outlines.from_vllm(client, MODEL),
        outlines.from_sglang(client, MODEL),
    ):
        made = model('<say>{"sunny": true}</say>', Verdict)
        assert Verdict.model_validate_json(made) == Verdict(sunny=True), made


def choices() -> None:
    for model in (outlines.from_vllm(client, MODEL), outlines.from_sglang(client, MODEL)):
        assert model("<say>Rome</say>", Literal["Paris", "Rome"]) == "Rome"


def expressions() -> None:
    for model in (outlines.from_vllm(client, MODEL), outlines.from_sglang(client, MODEL)):
        assert model("<say>42 it is</say>", Regex(r"\d{2}")) == "42"


def grammars() -> None:
    assert outlines.from_vllm(client, MODEL)("<say>yes or no</say>", CFG('start: "yes" | "no"')) == "yes"


def streamed() -> None:
    model = outlines.from_vllm(client, MODEL)
    assert "".join(model.stream("<say>Rome</say>", Literal["Paris", "Rome"])) == "Rome"


run(schemas, choices, expressions, grammars, streamed)
