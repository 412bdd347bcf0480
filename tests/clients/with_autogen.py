"""autogen: an assistant with a tool, which reflects on its result, whole and streamed."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from task import ASKED, MODEL, V1, check, run_async, weather

INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}
client = OpenAIChatCompletionClient(model=MODEL, base_url=V1, api_key="any", model_info=INFO)


def _agent(**given) -> AssistantAgent:
    return AssistantAgent("ann", client, tools=[weather], reflect_on_tool_use=True, **given)


async def chats() -> None:
    check((await _agent().run(task=ASKED)).messages[-1].content)


async def streamed() -> None:
    events = [event async for event in _agent(model_client_stream=True).run_stream(task=ASKED)]
    check(events[-1].messages[-1].content)


run_async(chats, streamed)
