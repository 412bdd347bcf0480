"""The bodies of the routes that change the cache and the adapters, and of their responses.

Like `requests`, knows JSON and the names of fields, but not HTTP or the engine. Unknown fields are refused: with a
misspelled one, a removal could remove more than was meant.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from mainstem.server.apis.bodies import TokenId, decode_known
from mainstem.server.apis.chat.request import Messages
from mainstem.server.apis.chat.tools import ToolSpec
from mainstem.server.errors import wrong


class LoadAdapter(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str


class UnloadAdapter(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: str


class UpdateWeights(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/update_weights: a folder on the server's machine; see `Engine.update_weights`."""

    path: str
    mode: Literal["strict", "group", "lag"] = "strict"
    lag: int = 0


class Named(Struct, kw_only=True, forbid_unknown_fields=True):
    """A body that names a prefix.

    `prompt`: its text or token ids. `messages`: a chat's first messages; `tools`: those of the chat. `model`: the
    adapter whose KV it is; default: the base model. `api_key`: the tenant whose KV it is, set by the admin if there are
    several API keys.
    """

    prompt: str | list[TokenId] | None = None
    messages: Messages | None = None
    tools: list[ToolSpec] | None = None
    model: str | None = None
    cache_salt: str | None = None
    api_key: str | None = None


class RemoveRequest(Named, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/cache/remove: exactly one of `prompt`, `messages` and `all`, the whole namespace."""

    all: bool = False


class HintRequest(Named, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/cache/hints: exactly one of `prompt` and `messages`.

    `action`: what will become of the prefix. `ttl_s`: for "retain": for how many seconds. `next_use_s` or
    `next_use_steps`: for "expect": when it is used next.
    """

    action: Literal["retain", "pin", "unpin", "demote", "end", "prefetch", "expect"]
    ttl_s: float | None = None
    next_use_s: float | None = None
    next_use_steps: float | None = None

    def times(self) -> dict[str, float]:
        """Returns the times that are given, by name."""
        times = {"ttl_s": self.ttl_s, "next_use_s": self.next_use_s, "next_use_steps": self.next_use_steps}
        return {name: time for name, time in times.items() if time is not None}


def parse_hint(body: bytes) -> HintRequest:
    """Parses the request in a body.

    Raises:
        ApiError: 400; malformed JSON, a wrong type, an unknown field, or not exactly one prefix.
    """
    request = decode_known(body, HintRequest)
    if (request.prompt is None) == (request.messages is None):
        given, name = ("none", "prompt") if request.prompt is None else ("both", "messages")
        raise wrong(name, f"the body must have exactly one of prompt and messages, got {given}")
    return request


def parse_remove(body: bytes) -> RemoveRequest:
    """Parses the request in a body.

    Raises:
        ApiError: 400; malformed JSON, a wrong type, an unknown field, or not exactly one thing to remove.
    """
    request = decode_known(body, RemoveRequest)
    ways = {"prompt": request.prompt is not None, "messages": request.messages is not None, "all": request.all}
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) != 1:
        name, got = given[-1] if given else "prompt", " and ".join(given) or "none"
        raise wrong(name, f"the body must have exactly one of prompt, messages and all = true, got {got}")
    return request


class Health(Struct):
    """The response body of GET /health and /ping: ok, draining or failed."""

    status: str


class Unloaded(Struct):
    """The response body of POST /v1/unload_lora_adapter."""

    id: str
    deleted: bool = True
    object: str = "model"


class Updated(Struct):
    """The response body of POST /v1/update_weights: the number of the version that computes from now on."""

    weight_version: int


class Flushed(Struct):
    """The response body of POST /v1/cache/flush and /v1/cache/remove: what was freed on the device."""

    freed_pages: int
    freed_tokens: int


class Hinted(Struct):
    """The response body of POST /v1/cache/hints.

    `cached_tokens`: how much of the prefix the cache had. `tokens`: how much of it the hint concerns: that is retained,
    was pinned, goes first from now on, or is on the device or on its way there.
    """

    action: str
    tokens: int
    cached_tokens: int
