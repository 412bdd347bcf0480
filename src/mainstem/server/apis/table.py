"""The APIs that generate: a row for each, which the app, OpenAPI, prefill and the front of a fleet read.

A new API is a module that reads its bodies, one that writes its answers, and a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from starlette.datastructures import Headers

from mainstem.server.apis import completion_reply, completions, replies
from mainstem.server.apis.chat import reply as chat_reply
from mainstem.server.apis.chat import request as chat
from mainstem.server.apis.generation import Generation, Linked
from mainstem.server.apis.messages import reply as message_reply
from mainstem.server.apis.messages import request as messages
from mainstem.server.apis.responses import reply as response_reply
from mainstem.server.apis.responses import request as responses
from mainstem.server.errors import ApiError
from mainstem.server.fields.rules import Unheeded

Read: TypeAlias = Callable[[bytes, Unheeded | None], Generation | Linked]
"""Reads a body, and adds its fields that do nothing. Raises ApiError."""


@dataclass(frozen=True, slots=True)
class Count:
    """The route that counts the tokens of an API's prompts.

    Args:
        path: its path.
        read: as `Read`, with the name of the model where the body has none.
        request, response: the types of the bodies; the response is made of the number of tokens.
        api: the path of the API.
    """

    path: str
    read: Callable[[bytes, Unheeded | None, str], Generation | Linked]
    request: type[Struct]
    response: type[Any]
    api: str


@dataclass(frozen=True, slots=True)
class Api:
    """One API.

    Args:
        path: of its route.
        summary: in a few words.
        read: reads the body of a request.
        reply: writes its answer.
        request, response, event: the types of the bodies, and of a stream's events; `dict`: any JSON object.
        id_prefix: of an answer's id.
        alone: fields that turn a body into a request that computes the prompt and generates nothing; None: the API
            has no such request.
        kind: in recordings and traces.
        count: its route that counts tokens.
        late: whether a stream itself refuses a prompt that is too long, since its clients look there.
        held: events of a stream before the first one with a token.
        broken: the events that end a stream whose beginning is not known.
    """

    path: str
    summary: str
    read: Read
    reply: replies.MakeReply
    request: type[Struct]
    response: type[Struct]
    event: type
    id_prefix: str
    alone: Mapping[str, Any]
    kind: Literal["chat", "completion"] = "chat"
    count: Count | None = None
    late: bool = False
    held: int = 0
    broken: Callable[[ApiError], bytes] = replies.broken


_ROWS = (
    Api(
        "/v1/completions", "Complete prompts", completions.read, completion_reply.CompletionReply,
        completions.CompletionRequest, completion_reply.CompletionBody, completion_reply.CompletionBody,
        "cmpl-", alone={"max_tokens": 0}, kind="completion",
    ),
    Api(
        "/v1/chat/completions", "Answer a chat", chat.read, chat_reply.ChatReply,
        chat.ChatRequest, chat_reply.ChatBody, chat_reply.ChatChunk,
        chat_reply.ID_PREFIX, alone={"max_tokens": 0, "max_completion_tokens": None},
    ),
    Api(
        "/v1/responses", "Answer, and keep the answer", responses.read, response_reply.ResponseReply,
        responses.ResponseRequest, response_reply.ResponseBody, dict,
        response_reply.ID_PREFIX, alone={"prompt_cache_options": {"prewarm": True}, "store": False},
        count=Count("/v1/responses/input_tokens", responses.read_count, responses.InputCountRequest,
                    response_reply.InputTokenCount, "/v1/responses"),
        late=True, held=1, broken=response_reply.broken,
    ),
    Api(
        message_reply.PATH, "Answer a message", messages.read, message_reply.MessageReply,
        messages.MessageRequest, message_reply.MessageBody, dict,
        message_reply.ID_PREFIX, alone={"max_tokens": 0},
        count=Count(f"{message_reply.PATH}/count_tokens", messages.read_count, messages.CountRequest,
                    message_reply.TokenCount, message_reply.PATH),
        held=1, broken=message_reply.broken,
    ),
)  # fmt: skip
APIS: Mapping[str, Api] = {api.path: api for api in _ROWS}
"""The APIs by their paths."""


def broken(error: ApiError, path: str) -> bytes:
    """Returns the events that end a stream whose beginning is not known, in the form of the API at a path."""
    return (APIS[path].broken if path in APIS else replies.broken)(error)


def error_body(error: ApiError, path: str, headers: Headers) -> bytes:
    """Returns the JSON of an error in the form of the API that a request belongs to."""
    return message_reply.error_body(error) if message_reply.speaks(path, headers) else error.body()
