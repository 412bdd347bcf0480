"""strands: an agent with a tool over chats, Responses and Messages, streamed as it always does; a typed answer."""

from __future__ import annotations

from pydantic import BaseModel
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel
from task import ASKED, MODEL, URL, V1, check, run, weather

GIVEN = {"client_args": {"base_url": V1, "api_key": "any"}, "model_id": MODEL}


class Verdict(BaseModel):
    """What was found."""

    sunny: bool


def _asked(model) -> None:
    check(Agent(model, tools=[tool(weather)], callback_handler=None)(ASKED))


def chats() -> None:
    _asked(OpenAIModel(**GIVEN))


def responses() -> None:
    _asked(OpenAIResponsesModel(**GIVEN))


def messages() -> None:
    _asked(AnthropicModel(client_args={"base_url": URL, "api_key": "any"}, model_id=MODEL, max_tokens=1000))


def typed_answers() -> None:
    agent = Agent(OpenAIModel(**GIVEN), callback_handler=None)
    made = agent('<call name="Verdict">{"sunny": true}</call><say>Done.</say>', structured_output_model=Verdict)
    assert made.structured_output == Verdict(sunny=True)


run(chats, responses, messages, typed_answers)
