"""openai-agents: a tool over Responses and over chats, whole and streamed, a typed answer, and a hand-over."""

from __future__ import annotations

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from task import ASKED, MODEL, V1, check, run_async, weather

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=V1, api_key="any", max_retries=0)
tools = [function_tool(weather)]


class Verdict(BaseModel):
    sunny: bool


def agent(kind: type, **given) -> Agent:
    return Agent("Ann", instructions="Be brief.", model=kind(MODEL, client), **given)


async def responses() -> None:
    made = agent(OpenAIResponsesModel, tools=tools)
    check((await Runner.run(made, ASKED)).final_output)
    streamed = Runner.run_streamed(made, ASKED)
    async for _ in streamed.stream_events():
        pass
    check(streamed.final_output)


async def chats() -> None:
    made = agent(OpenAIChatCompletionsModel, tools=tools)
    check((await Runner.run(made, ASKED)).final_output)
    streamed = Runner.run_streamed(made, ASKED)
    async for _ in streamed.stream_events():
        pass
    check(streamed.final_output)


async def typed_answers() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        made = agent(kind, output_type=Verdict)
        assert (await Runner.run(made, '<say>{"sunny": true}</say>')).final_output == Verdict(sunny=True)


async def handing_over() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        bob = Agent("Bob", model=kind(MODEL, client))
        made = agent(kind, handoffs=[bob])
        result = await Runner.run(made, '<call name="transfer_to_bob">{}</call><say>It is sunny.</say>')
        assert (result.last_agent.name, result.final_output) == ("Bob", "It is sunny.")


async def remembering() -> None:
    made = agent(OpenAIResponsesModel, model_settings=ModelSettings(store=True))
    first = await Runner.run(made, "<say>Noted.</say>")
    again = await Runner.run(made, "<say>Still noted.</say>", previous_response_id=first.last_response_id)
    assert again.final_output == "Still noted."


run_async(responses, chats, typed_answers, handing_over, remembering)
