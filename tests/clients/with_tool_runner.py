"""The Anthropic SDK's tool_runner: it calls tools itself, whole and streamed, and compacts."""

from __future__ import annotations

import anthropic
from task import ASKED, MODEL, URL, check, run, weather

client = anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0)


def _runner(**given):
    asked = [{"role": "user", "content": ASKED}]
    tools = [anthropic.beta_tool(weather)]
    return client.beta.messages.tool_runner(model=MODEL, max_tokens=1000, tools=tools, messages=asked, **given)


def tool_runner() -> None:
    check(_runner().until_done().content[0].text)


def streamed() -> None:
    last = None
    for stream in _runner(stream=True):
        last = stream.get_final_message()
    check(last.content[0].text)


run(tool_runner, streamed)
