"""haystack: an agent with a tool, over chats and over Responses."""

from __future__ import annotations

from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from task import ASKED, MODEL, V1, check, run, weather

weather.__annotations__["city"] = Annotated[str, "where"]


def _asked(kind, **given) -> None:
    generator = kind(api_key=Secret.from_token("any"), model=MODEL, api_base_url=V1, **given)
    agent = Agent(chat_generator=generator, tools=[create_tool_from_function(weather)])
    check(agent.run([ChatMessage.from_user(ASKED)])["last_message"].text)


def chats() -> None:
    _asked(OpenAIChatGenerator)
    _asked(OpenAIChatGenerator, streaming_callback=lambda chunk: None)


def responses() -> None:
    _asked(OpenAIResponsesChatGenerator)
    _asked(OpenAIResponsesChatGenerator, streaming_callback=lambda chunk: None)


run(chats, responses)
