"""langchain-openai: a chat, a stream, bound tools, structured output."""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
model = ChatOpenAI(base_url=f"{URL}/v1", api_key="any", model=MODEL, max_tokens=100, temperature=0)  # type: ignore
ASKED = "What is the weather in Paris?"


class Verdict(BaseModel):
    """What the weather is."""

    city: Literal["Paris", "Rome"]
    sunny: bool


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tells the weather."""
    return city


def chats() -> None:
    whole = model.invoke(ASKED).content
    assert whole
    assert "".join(str(chunk.content) for chunk in model.stream(ASKED)) == whole


def bound_tools() -> None:
    made = model.bind_tools([weather], tool_choice="required").invoke(ASKED)
    assert made.tool_calls[0]["args"]["city"] in ("Paris", "Rome")


def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        made = model.with_structured_output(Verdict, method=method).invoke(ASKED)
        assert isinstance(made, Verdict)


for check in (chats, bound_tools, structured_output):
    check()
    print(check.__name__)
