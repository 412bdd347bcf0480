"""semantic-kernel: an agent that calls a function, whole and streamed, over chats and Responses."""

from __future__ import annotations

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent, OpenAIResponsesAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function
from task import ASKED, MODEL, V1, check, run_async, weather

client = AsyncOpenAI(base_url=V1, api_key="any", max_retries=0)


class Plugin:
    @kernel_function(name="weather", description="Tells the weather.")
    def weather(self, city: str) -> str:
        return weather(city)


ASKED = ASKED.replace('"weather"', '"Plugin-weather"')


async def _asked(agent) -> None:
    check((await agent.get_response(messages=ASKED)).message.content)
    said = ""
    async for chunk in agent.invoke_stream(messages=ASKED):
        said += str(chunk.message.content or "")
    check(said)


async def chats() -> None:
    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
    await _asked(ChatCompletionAgent(service=service, name="ann", instructions="Be brief.", plugins=[Plugin()]))


async def responses() -> None:
    made = OpenAIResponsesAgent(
        ai_model_id=MODEL, client=client, name="ann", instructions="Be brief.", plugins=[Plugin()]
    )
    await _asked(made)


run_async(chats, responses)
