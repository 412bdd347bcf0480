"""The APIs of chats as their clients use them: a conversation is asked, and the answer is taken in one form.

Each answer also has what a client keeps of it and sends back: from a stream, what official clients make of its events.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.testclient import TestClient

USER = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class Tool:
    """A function: its name, the schema of its arguments, and whether calls are always held to it."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = False

    def listed(self, schema: str) -> dict[str, Any]:
        """Returns it as an API lists tools, by the API's name of the schema."""
        return {"name": self.name, schema: dict(self.schema), **({"strict": True} if self.strict else {})}


@dataclass(frozen=True)
class ApiReply:
    """An answer.

    Args:
        text, thought: all of it.
        calls: names and arguments, as text; those of a stream that turned out to be none are left out.
        ended: "stop", "length", "calls", or the stop text, where the API says which. A response says no more than
            that it has calls.
        kept: what a client keeps: messages, or items.
    """

    text: str
    thought: str
    calls: list[tuple[str, str]]
    ended: str
    kept: list[dict[str, Any]]


class Api(ABC):
    """One API over a server."""

    path: str

    def ask(
        self, server: TestClient, tools: Sequence[Tool] = (), *, stream: bool = False, most: int = 400,
        stop: Sequence[str] = (), history: Sequence[dict[str, Any]] = (USER,), **fields: Any,
    ) -> ApiReply:  # fmt: skip
        """Asks, and reads the answer, which must be one."""
        body = {"model": "fake", "stream": stream, **self.body(tools, most, list(stop), list(history)), **fields}
        reply = server.post(self.path, json=body)
        assert reply.status_code == 200, (reply.text, body)
        return self.streamed(_events(reply.text)) if stream else self.whole(reply.json())

    @abstractmethod
    def body(
        self, tools: Sequence[Tool], most: int, stop: list[str], history: list[dict[str, Any]]
    ) -> dict[str, Any]: ...

    @abstractmethod
    def whole(self, body: Any) -> ApiReply: ...

    @abstractmethod
    def streamed(self, events: list[dict[str, Any]]) -> ApiReply: ...

    @abstractmethod
    def results(self, kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the results of all calls in what a client kept."""


class Chats(Api):
    """/v1/chat/completions."""

    path = "/v1/chat/completions"

    def body(self, tools: Sequence[Tool], most: int, stop: list[str], history: list[dict[str, Any]]) -> dict[str, Any]:
        listed = [{"type": "function", "function": tool.listed("parameters")} for tool in tools]
        return {"messages": history, "max_tokens": most, "stop": stop, **({"tools": listed} if listed else {})}

    def whole(self, body: Any) -> ApiReply:
        (choice,) = body["choices"]
        return self._said(choice["message"], choice["finish_reason"])

    def streamed(self, events: list[dict[str, Any]]) -> ApiReply:
        message: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        reason = ""
        for (choice,) in (event["choices"] for event in events if event["choices"]):
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    _add_calls(calls, value)
                elif name in ("content", "reasoning_content") and value is not None:
                    message[name] = (message.get(name) or "") + value
                else:
                    message.setdefault(name, value)
            reason = choice["finish_reason"] or reason
        return self._said({**message, **({"tool_calls": calls} if calls else {})}, reason)

    def _said(self, message: dict[str, Any], reason: str) -> ApiReply:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        ended = {"tool_calls": "calls"}.get(reason, reason)
        return ApiReply(message["content"] or "", message.get("reasoning_content", ""), calls, ended, [message])

    def results(self, kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
        calls = [call for message in kept for call in message.get("tool_calls") or ()]
        return [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in calls]


def _add_calls(calls: list[dict[str, Any]], added: list[dict[str, Any]]) -> None:
    for each in added:
        if each["index"] == len(calls):
            calls.append({"id": each["id"], "type": each["type"], "function": dict(each["function"])})
        else:
            calls[each["index"]]["function"]["arguments"] += each["function"]["arguments"]


class Responses(Api):
    """/v1/responses."""

    path = "/v1/responses"

    def body(self, tools: Sequence[Tool], most: int, stop: list[str], history: list[dict[str, Any]]) -> dict[str, Any]:
        listed = [{"type": "function", **tool.listed("parameters")} for tool in tools]
        return {"input": history, "max_output_tokens": most, "stop": stop, "tools": listed}

    def whole(self, body: Any) -> ApiReply:
        items = body["output"]
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        thoughts = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
        calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
        ended = "length" if body["status"] == "incomplete" else "calls" if calls else "stop"
        return ApiReply("".join(texts), "".join(thoughts), calls, ended, items)

    def streamed(self, events: list[dict[str, Any]]) -> ApiReply:
        said = self.whole(events[-1]["response"])
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == said.text
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        none = [item for item in done if item not in said.kept]
        assert [item for item in done if item in said.kept] == said.kept
        assert all((item["type"], item["status"]) == ("function_call", "incomplete") for item in none)
        return replace(said, kept=done)  # some clients keep those, too

    def results(self, kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
        calls = [item for item in kept if item["type"] == "function_call"]
        return [{"type": "function_call_output", "call_id": item["call_id"], "output": "1"} for item in calls]


class Messages(Api):
    """/v1/messages."""

    path = "/v1/messages"

    def body(self, tools: Sequence[Tool], most: int, stop: list[str], history: list[dict[str, Any]]) -> dict[str, Any]:
        listed = [tool.listed("input_schema") for tool in tools]
        return {"messages": history, "max_tokens": most, "stop_sequences": stop, "tools": listed}

    def whole(self, body: Any) -> ApiReply:
        return self._said(body["content"], body)

    def streamed(self, events: list[dict[str, Any]]) -> ApiReply:
        blocks: list[dict[str, Any]] = []
        last: dict[str, Any] = {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"]})
                given = ""
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    given += delta["partial_json"]
                    blocks[-1]["input"] = _object(given)
                else:
                    name = {"text_delta": "text", "thinking_delta": "thinking"}[delta["type"]]
                    blocks[-1][name] += delta[name]
            elif event["type"] == "message_delta":
                last = event["delta"]
        return self._said(blocks, last)

    def _said(self, blocks: list[dict[str, Any]], ending: Mapping[str, Any]) -> ApiReply:
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
        words = {"end_turn": "stop", "max_tokens": "length", "tool_use": "calls"}
        ended = words.get(ending["stop_reason"]) or ending["stop_sequence"]
        return ApiReply("".join(texts), "".join(thoughts), calls, ended, [{"role": "assistant", "content": blocks}])

    def results(self, kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
        used = [block["id"] for message in kept for block in message["content"] if block["type"] == "tool_use"]
        content = [{"type": "tool_result", "tool_use_id": id, "content": "1"} for id in used]
        return [{"role": "user", "content": content}] if content else []


APIS: dict[str, Api] = {"chats": Chats(), "responses": Responses(), "messages": Messages()}


def _events(text: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}
