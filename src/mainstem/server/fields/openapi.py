"""The description of the server for programs: OpenAPI 3.1, made from the types of bodies.

Protocol: https://spec.openapis.org/oas/v3.1.1. Knows which route takes and returns what. `app` has the routes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from mainstem import __version__
from mainstem.server.access.tenants import Usage
from mainstem.server.apis.chat.reply import ChatBody
from mainstem.server.apis.embeddings import EmbeddingList, EmbeddingRequest
from mainstem.server.apis.replies import Model, ModelList
from mainstem.server.apis.responses.reply import ResponseBody
from mainstem.server.apis.table import APIS
from mainstem.server.apis.tokenization import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    TokenizerInfo,
    Version,
)
from mainstem.server.errors import ErrorBody
from mainstem.server.kept.listing import Deleted, Page
from mainstem.server.kept.stored import MetadataUpdate
from mainstem.server.management import (
    Flushed,
    Health,
    Hinted,
    HintRequest,
    LoadAdapter,
    RemoveRequest,
    UnloadAdapter,
    Unloaded,
)
from mainstem.server.watch.explained import Explanation, Misses
from mainstem.server.watch.live import LiveSample

_REFERENCE = "#/components/schemas/{name}"


class Operation(NamedTuple):
    """The description of a route.

    Args:
        summary: in a few words.
        request: the type of the body; None: there is none.
        response: the type of the response; None: any JSON object; `str`: text.
        event: the type of a stream's events, if it can be streamed; `dict`: any JSON object.
        open: whether it needs no key.
    """

    summary: str
    request: type | None = None
    response: type | None = None
    event: type | None = None
    open: bool = False


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    **{("POST", api.path): Operation(api.summary, api.request, api.response, api.event) for api in APIS.values()},
    **{
        ("POST", count.path): Operation("Count the tokens of a prompt", count.request, count.response)
        for api in APIS.values()
        if (count := api.count) is not None
    },
    ("POST", "/v1/embeddings"): Operation("Return the embeddings of texts", EmbeddingRequest, EmbeddingList),
    ("GET", "/v1/responses/{id}"): Operation("Return a response that was kept", None, ResponseBody),
    ("DELETE", "/v1/responses/{id}"): Operation("Forget a response", None, Deleted),
    ("POST", "/v1/responses/{id}/cancel"): Operation("Refuse: nothing is made in the background"),
    ("GET", "/v1/responses/{id}/input_items"): Operation("List what a response answers", None, Page),
    ("GET", "/v1/chat/completions"): Operation("List the chats that were stored", None, Page),
    ("GET", "/v1/chat/completions/{id}"): Operation("Return a chat that was stored", None, ChatBody),
    ("POST", "/v1/chat/completions/{id}"): Operation("Replace the notes on a chat", MetadataUpdate, ChatBody),
    ("DELETE", "/v1/chat/completions/{id}"): Operation("Forget a chat", None, Deleted),
    ("GET", "/v1/chat/completions/{id}/messages"): Operation("List what a chat answers", None, Page),
    ("GET", "/"): Operation("A page for people that says where what is", None, str, open=True),
    ("GET", "/v1/models"): Operation(
        "List the model and its adapters; with the header anthropic-version as Anthropic does", None, ModelList
    ),
    ("GET", "/v1/models/{name}"): Operation("Describe the model or an adapter", None, Model),
    ("POST", "/v1/load_lora_adapter"): Operation("Load an adapter", LoadAdapter, Model),
    ("POST", "/v1/unload_lora_adapter"): Operation("Unload an adapter", UnloadAdapter, Unloaded),
    ("POST", "/v1/cache/flush"): Operation("Forget every prefix that no request uses", None, Flushed),
    ("POST", "/v1/cache/remove"): Operation("Forget a prefix", RemoveRequest, Flushed),
    ("POST", "/v1/cache/hints"): Operation("Say what will become of a prefix", HintRequest, Hinted),
    ("POST", "/v1/cache/explain"): Operation("Why a body's prompts would be found in part only", dict, Explanation),
    ("GET", "/v1/cache/explain"): Operation("Misses by tenant and cause, and the latest requests", None, Misses),
    ("GET", "/v1/cache/explain/{id}"): Operation("Why an earlier request was found in part only", None, Explanation),
    ("GET", "/cache/explain/{id}"): Operation("The same for the live page", None, Explanation),
    ("GET", "/v1/cache/stats"): Operation("The cache in numbers"),
    ("GET", "/v1/cache/tenants"): Operation("What each tenant has, and may have", None, Usage),
    ("GET", "/v1/cache/tree"): Operation("The tree of prefixes as text", None, str),
    ("GET", "/cache"): Operation("The live page, for a browser", None, str),
    ("GET", "/cache/events"): Operation(
        "What the live page shows, as a stream of samples", None, LiveSample, LiveSample
    ),
    ("GET", "/cache/sample"): Operation("What the live page shows, once", None, LiveSample),
    ("POST", "/tokenize"): Operation("Tokenize a text or a chat", TokenizeRequest, Tokenized),
    ("POST", "/detokenize"): Operation("Return the text of tokens", DetokenizeRequest, Detokenized),
    ("GET", "/tokenizer_info"): Operation("Describe the tokenizer", None, TokenizerInfo),
    ("GET", "/version"): Operation("The version of Mainstem", None, Version, open=True),
    ("GET", "/openapi.json"): Operation("This description", open=True),
    ("GET", "/health"): Operation("Whether the server takes requests", None, Health, open=True),
    ("GET", "/ping"): Operation("The same", None, Health, open=True),
    ("POST", "/ping"): Operation("The same", None, Health, open=True),
    ("GET", "/metrics"): Operation("Metrics for Prometheus", None, str, open=True),
}
"""Every route, by its method and path."""


def document() -> dict[str, Any]:
    """Returns the description, as it is written in JSON."""
    bodies = [body for each in OPERATIONS.values() for body in (each.request, each.response, each.event)]
    types = dict.fromkeys([ErrorBody, *(body for body in bodies if body not in (None, str))])
    references, schemas = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    by_type = dict(zip(types, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _described(path, operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mainstem", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],  # without API keys none is needed
    }


def _described(path: str, operation: Operation, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    if operation.response is str:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": schemas.get(operation.response, {"type": "object"})}}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": schemas[operation.event]}
    errors = {"application/json": {"schema": schemas[ErrorBody]}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "Success", "content": content},
            "default": {"description": "An error", "content": errors},
        },
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.request is not None:
        body = {"application/json": {"schema": schemas[operation.request]}}
        described["requestBody"] = {"required": True, "content": body}
    if operation.open:
        described["security"] = []
    return described
