"""The bodies of the routes that tokenize, and of their responses, with the names that vLLM's server has.

Like `requests`, knows JSON and the names of fields, but not HTTP or tokenizers.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from mainstem.runtime.text.prompts import Template
from mainstem.server.apis.requests import Messages, TokenId, decode, decode_known, template_of
from mainstem.server.apis.tool_fields import ToolSpec
from mainstem.server.errors import ApiError


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize: exactly one of `prompt` and `messages`, and the tools of a conversation.

    `add_special_tokens`: those that the tokenizer adds, by default to a prompt. `parse_special`: whether the texts of
    control tokens in a prompt become these, by default. `return_token_strs`: also the text of each token.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[ToolSpec] | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template(self) -> Template:
        """Returns how the chat template is applied; see `template_of`."""
        given = self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs
        return template_of(*given, self.add_special_tokens)


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


class Tokenized(Struct):
    """The response of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct):
    """The response of POST /detokenize."""

    prompt: str


class TokenizerInfo(Struct):
    """The response of GET /tokenizer_info: what programs need that count and cut texts themselves."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | dict[str, str] | None


class Version(Struct):
    """The response of GET /version."""

    version: str


def describe(tokenizer: Any) -> TokenizerInfo:
    """Describes a tokenizer of transformers."""
    names = ("bos_token", "eos_token", "pad_token", "chat_template")
    return TokenizerInfo(type(tokenizer).__name__, *(getattr(tokenizer, name, None) for name in names))


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Parses the request in a body.

    Raises:
        ApiError: 400; malformed JSON, a wrong type or name, or not exactly one of `prompt` and `messages`.
    """
    ask = decode_known(body, TokenizeRequest)
    if (ask.prompt is None) == (ask.messages is None):
        raise ApiError(400, "prompt: exactly one of prompt and messages is needed", param="prompt")
    return ask


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Parses the request in a body.

    Raises:
        ApiError: 400; malformed JSON, or a wrong type or name.
    """
    return decode(body, DetokenizeRequest)
