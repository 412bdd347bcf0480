"""llama-index: a completion, a chat, a stream."""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

URL, MODEL = sys.argv[1:]
LIMITS = {"max_tokens": 8, "context_window": 2048, "temperature": 0}
model = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="any", is_chat_model=True, **LIMITS)
ASKED = [ChatMessage(role="user", content="What is the weather in Paris?")]


def chats() -> None:
    whole = model.chat(ASKED).message.content
    assert whole
    assert [*model.stream_chat(ASKED)][-1].message.content == whole


def completions() -> None:
    assert model.complete("Once upon").text


for check in (chats, completions):
    check()
    print(check.__name__)
