"""litellm: a chat, a stream, a call of a tool, over both APIs."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

URL, MODEL = sys.argv[1:]
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
OPENAI: Any = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "any"}
ANTHROPIC: Any = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "any"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]},
    },
}


def chats() -> None:
    for given in (OPENAI, ANTHROPIC):
        whole: Any = litellm.completion(**given, messages=ASKED, max_tokens=8, temperature=0)
        chunks: Any = litellm.completion(**given, messages=ASKED, max_tokens=8, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content


def tools() -> None:
    for given in (OPENAI, ANTHROPIC):
        made: Any = litellm.completion(
            **given, messages=ASKED, tools=[TOOL], tool_choice="required", max_tokens=100, temperature=0
        )
        assert json.loads(made.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}


for check in (chats, tools):
    check()
    print(check.__name__)
