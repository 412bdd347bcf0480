"""The anthropic client: messages, streams, tools, counts, caching, errors."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
import pytest

URL, MODEL = sys.argv[1:]
client = anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0)
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL: Any = {
    "name": "weather",
    "description": "Tells the weather",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}


def messages() -> None:
    given: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 8, "system": "Be brief."}
    given["extra_body"] = {"temperature": 0}  # this client has no such argument
    whole: Any = client.messages.create(**given)
    assert whole.stop_reason == "max_tokens"
    with client.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == 8
    cached = client.messages.create(**given).usage
    assert cached.cache_read_input_tokens
    count = client.messages.count_tokens(model=MODEL, messages=ASKED, system="Be brief.").input_tokens
    assert count == cached.input_tokens + cached.cache_read_input_tokens + (cached.cache_creation_input_tokens or 0)


def tools() -> None:
    given: Any = {"model": MODEL, "max_tokens": 100, "tools": [TOOL], "extra_body": {"temperature": 0}}
    made: Any = client.messages.create(**given, messages=ASKED, tool_choice={"type": "any"})
    assert made.stop_reason == "tool_use"
    used = next(block for block in made.content if block.type == "tool_use")
    assert used.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
    after: list[Any] = [*ASKED, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**given, messages=after, tool_choice={"type": "none"}).content


def caching() -> None:
    rules = "You speak of the weather alone, in two words at most. " * 8
    kept = {"type": "ephemeral", "ttl": "1h"}
    given: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 4}
    marked: Any = [{"type": "text", "text": rules, "cache_control": kept}]
    first: Any = client.messages.create(**given, system=marked, diagnostics={"previous_message_id": None})
    created = first.usage.cache_creation_input_tokens
    assert first.usage.cache_creation.ephemeral_1h_input_tokens == created > 0
    with client.messages.stream(**given, system=marked) as stream:
        again: Any = stream.get_final_message().usage
    assert again.cache_read_input_tokens >= created
    options = {"diagnostics": {"previous_message_id": first.id}}
    changed: Any = client.messages.create(**given, system="Guess, at length. " * 8, **options)
    assert changed.diagnostics.cache_miss_reason.type == "system_changed"


def errors() -> None:
    with pytest.raises(anthropic.NotFoundError, match="another"):
        client.messages.create(model="another", messages=ASKED, max_tokens=8)


for check in (messages, tools, caching, errors):
    check()
    print(check.__name__)
