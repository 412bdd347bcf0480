"""The openai client: chats, tools, structured output, completions, Responses, caching, batches, errors."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0)
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Verdict(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


def chats() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=8, temperature=0)
    chunks = [*client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=8, temperature=0, stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    again = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=8, temperature=0)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens


def tools() -> None:
    given: Any = {"model": MODEL, "messages": ASKED, "tools": [TOOL], "tool_choice": "required", "max_tokens": 100}
    given["temperature"] = 0  # what is sampled may be longer
    message = client.chat.completions.create(**given).choices[0].message
    assert message.tool_calls
    call: Any = message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    with client.chat.completions.stream(**given) as stream:
        streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(streamed[0].function.arguments)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    after = client.chat.completions.create(
        model=MODEL, messages=[*ASKED, message, result], tools=[TOOL], tool_choice="none", max_tokens=8
    )
    assert after.choices[0].message.content


def structured_output() -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=ASKED, response_format=Verdict, max_tokens=60, temperature=0
    )
    assert parsed.choices[0].message.parsed is not None


def completions() -> None:
    done = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=0, echo=True, logprobs=1)
    logprobs = done.choices[0].logprobs
    assert done.choices[0].text == "Once upon"
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == done.usage.prompt_tokens  # type: ignore[union-attr]


def responses() -> None:
    first = client.responses.create(model=MODEL, input="Say a word.", max_output_tokens=16)
    assert first.output_text
    second = client.responses.create(model=MODEL, input="Another.", previous_response_id=first.id, max_output_tokens=16)
    assert second.usage is not None and second.usage.input_tokens_details.cached_tokens
    events = [
        event.type for event in client.responses.create(model=MODEL, input="Hi.", max_output_tokens=16, stream=True)
    ]
    assert events[0] == "response.created" and events[-1] in ("response.completed", "response.incomplete"), events
    parsed = client.responses.parse(
        model=MODEL, input="Is Paris sunny?", text_format=Verdict, max_output_tokens=60, temperature=0
    )
    assert parsed.output_parsed is not None
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def caching() -> None:
    rules = "You answer in one short sentence, and you never guess. " * 8
    marked = [{"type": "text", "text": rules, "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}]
    messages = [{"role": "system", "content": marked}, *ASKED]
    given: Any = {"model": MODEL, "messages": messages, "max_tokens": 4, "prompt_cache_key": "a talk"}
    first: Any = client.chat.completions.create(**given, prompt_cache_options={"mode": "explicit"}).usage
    written = first.prompt_tokens_details
    assert written.cache_write_tokens > 0
    assert written.cache_write_tokens_by_ttl == {"30m": written.cache_write_tokens}
    again: Any = client.chat.completions.create(**given).usage
    assert again.prompt_tokens_details.cached_tokens >= written.cache_write_tokens

    asked: Any = {"model": MODEL, "instructions": rules * 2, "input": "Hi.", "prompt_cache_key": "a talk"}
    ahead: Any = client.responses.create(**asked, prompt_cache_options={"prewarm": True, "ttl": "12h"})
    assert (ahead.status, ahead.output, ahead.prompt_cache_key) == ("completed", [], "a talk")
    assert ahead.usage.input_tokens_details.cache_write_tokens_details["ttl_12h_tokens"] > 0
    options = {"comparison_response_id": ahead.id}
    hit: Any = client.responses.create(**asked, prompt_cache_options=options, max_output_tokens=16)
    assert hit.prompt_cache_diagnostics["type"] == "cache_hit"


def files_and_batches() -> None:
    fields: Any = {"method": "POST", "url": "/v1/chat/completions"}
    bodies = [{"model": MODEL, "messages": ASKED, "max_tokens": 4}, {"model": "none", "messages": ASKED}]
    lines = [json.dumps({"custom_id": f"r{i}", "body": body, **fields}) for i, body in enumerate(bodies)]
    file = client.files.create(file=("requests.jsonl", "\n".join(lines).encode()), purpose="batch")
    assert (file.object, file.filename, file.purpose) == ("file", "requests.jsonl", "batch")
    assert client.files.retrieve(file.id).bytes == file.bytes
    assert client.files.content(file.id).text == "\n".join(lines)
    begun = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "a test"}
    )
    batch = begun
    while batch.status not in ("completed", "failed", "expired"):
        time.sleep(0.1)
        batch = client.batches.retrieve(begun.id)
    assert batch.status == "completed" and batch.metadata == {"of": "a test"}, batch
    assert batch.request_counts is not None and batch.output_file_id and batch.error_file_id
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (2, 1, 1)
    good, bad = (json.loads(client.files.content(id).text) for id in (batch.output_file_id, batch.error_file_id))
    assert (good["custom_id"], good["response"]["status_code"]) == ("r0", 200)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("r1", 404)
    assert begun.id in [each.id for each in client.batches.list(limit=1)]
    assert file.id in [each.id for each in client.files.list(purpose="batch")]
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(begun.id)
    again = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while again.status in ("validating", "in_progress", "finalizing", "cancelling"):
        if again.status != "cancelling":
            again = client.batches.cancel(again.id)
        again = client.batches.retrieve(again.id)
    assert again.status == "cancelled"
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def errors() -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model=MODEL, messages=ASKED, extra_body={"tempreature": 1})
    assert caught.value.param == "tempreature"


for check in (chats, tools, structured_output, completions, responses, caching, files_and_batches, errors):
    check()
    print(check.__name__)
