"""pydantic-ai: text, and typed answers by a tool and by a schema."""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:]
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="any"))


class Verdict(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


def text() -> None:
    assert Agent(model, model_settings={"max_tokens": 8}).run_sync("Say a word.").output


def typed_answers() -> None:
    for kind in (ToolOutput(Verdict), NativeOutput(Verdict)):
        agent = Agent(model, output_type=kind, model_settings={"max_tokens": 100, "temperature": 0})
        assert isinstance(agent.run_sync("Is it sunny in Paris?").output, Verdict)


for check in (text, typed_answers):
    check()
    print(check.__name__)
