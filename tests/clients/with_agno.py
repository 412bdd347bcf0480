"""agno: a tool, whole and streamed, over chats, Responses and Messages."""

from __future__ import annotations

from agno.agent import Agent
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from task import ASKED, MODEL, URL, V1, check, run, weather


def _asked(model) -> None:
    for stream in (False, True):
        agent = Agent(model=model, tools=[weather], telemetry=False)
        made = agent.run(ASKED, stream=stream)
        check("".join(event.content or "" for event in made if event.event == "RunContent") if stream else made.content)


def chats() -> None:
    _asked(OpenAILike(id=MODEL, base_url=V1, api_key="any"))


def responses() -> None:
    _asked(OpenAIResponses(id=MODEL, base_url=V1, api_key="any"))


def messages() -> None:
    _asked(Claude(id=MODEL, api_key="any", client_params={"base_url": URL}))


run(chats, responses, messages)
