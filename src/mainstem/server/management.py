"""The bodies of the routes that change the cache and the adapters, and of their responses.

Like `requests`, knows JSON and the names of fields, but not HTTP or the engine. Unknown fields are refused: with a
misspelled one, a removal could remove more than was meant.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from mainstem.server.errors import ApiError
from mainstem.server.requests import Messages, TokenId, ToolSpec, decode, decode_known, parts, template_input


class LoadAdapter(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str


class UnloadAdapter(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: str


def parse_load_adapter(body: bytes) -> LoadAdapter:
    """Parses the request in a body.

    Raises:
        ApiError: 400; malformed JSON or a wrong type.
    """
    return decode(body, LoadAdapter)


def parse_unload_adapter(body: bytes) -> UnloadAdapter:
    """Parses the request in a body.

    Raises:
        ApiError: 400; malformed JSON or a wrong type.
    """
    return decode(body, UnloadAdapter)


class RemoveRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/cache/remove: exactly one of `prompt`, `messages` and `all`.

    `prompt`: text or token ids of a prefix. `messages`: a chat's first messages; `tools`: those of the chat. `all`: the
    whole namespace. `model`: the adapter whose KV to remove; default: the base model. `api_key`: the tenant whose KV to
    remove, set by the admin if there are several API keys.
    """

    prompt: str | list[TokenId] | None = None
    messages: Messages | None = None
    tools: list[ToolSpec] | None = None
    all: bool = False
    model: str | None = None
    cache_salt: str | None = None
    api_key: str | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Converts the messages for a chat template; see `Message.template_input`.

        Raises:
            ApiError: 400; a part is no text: the prefix of a conversation with images has no name here.
        """
        messages = template_input(self.messages or [])
        if images := parts(messages, "image"):
            at = images[0]["at"]
            message = f"{at}: only prefixes of text can be removed; give the messages before it"
            raise ApiError(400, message, param=at, code="unsupported_content")
        return messages


def parse_remove(body: bytes) -> RemoveRequest:
    """Parses the request in a body.

    Raises:
        ApiError: 400; malformed JSON, a wrong type, an unknown field, or not exactly one thing to remove.
    """
    request = decode_known(body, RemoveRequest)
    ways = {"prompt": request.prompt is not None, "messages": request.messages is not None, "all": request.all}
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) != 1:
        message = (
            f"the body must have exactly one of prompt, messages and all = true, got {' and '.join(given) or 'none'}"
        )
        raise ApiError(400, message, param=given[-1] if given else "prompt")
    return request


class Unloaded(Struct):
    """The response body of POST /v1/unload_lora_adapter."""

    id: str
    deleted: bool = True
    object: str = "model"


class Flushed(Struct):
    """The response body of POST /v1/cache/flush and /v1/cache/remove: what was freed on the device."""

    freed_pages: int
    freed_tokens: int
