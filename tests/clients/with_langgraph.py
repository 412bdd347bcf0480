"""LangGraph's agent over chats, Responses and Messages, whole and streamed, and a typed answer."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from task import ASKED, MODEL, URL, V1, check, run, weather


class Verdict(BaseModel):
    """What was found."""

    sunny: bool


def _asked(model) -> None:
    agent = create_agent(model, [weather], system_prompt="Be brief.")
    given = {"messages": [("user", ASKED)]}
    check(agent.invoke(given)["messages"][-1].text)
    said = ""
    for chunk, _ in agent.stream(given, stream_mode="messages"):
        said += chunk.text if chunk.type == "AIMessageChunk" else ""
    check(said)


def chats() -> None:
    _asked(ChatOpenAI(model=MODEL, base_url=V1, api_key="any", max_retries=0))


def responses() -> None:
    _asked(ChatOpenAI(model=MODEL, base_url=V1, api_key="any", max_retries=0, use_responses_api=True))


def messages() -> None:
    _asked(ChatAnthropic(model=MODEL, base_url=URL, api_key="any", max_retries=0, max_tokens=1000))


def typed_answers() -> None:
    model = ChatOpenAI(model=MODEL, base_url=V1, api_key="any", max_retries=0)
    for strategy, text in (
        (ProviderStrategy(Verdict), '<say>{"sunny": true}</say>'),
        (ToolStrategy(Verdict), '<call name="Verdict">{"sunny": true}</call>'),
    ):
        made = create_agent(model, [], response_format=strategy).invoke({"messages": [("user", text)]})
        assert made["structured_response"] == Verdict(sunny=True)


run(chats, responses, messages, typed_answers)
