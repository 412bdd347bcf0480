"""The routes that tokenize: their bodies, with the names that vLLM's server has, and how they are answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mainstem.server.apis.bodies import TokenId, decode, decode_known
from mainstem.server.apis.chat.request import Messages, conversation
from mainstem.server.apis.chat.tools import ToolSpec
from mainstem.server.apis.generation import Conversation
from mainstem.server.errors import client_names, wrong
from mainstem.server.fields.openapi import Operation
from mainstem.server.parts import Parts
from mainstem.server.transport import json_response


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
    prompt_rules: bool | None = None

    def conversation(self) -> Conversation:
        """Returns the messages as those of a chat."""
        return conversation(
            self.messages or (),
            self.tools,
            begins=self.add_generation_prompt,
            continues=self.continue_final_message,
            variables=self.chat_template_kwargs,
            special_tokens=self.add_special_tokens,
        )


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
    """The response of GET /tokenizer_info, for programs that count and cut texts themselves."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | dict[str, str] | None


class Version(Struct):
    """The response of GET /version."""

    version: str


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Parses the request in a body.

    Raises:
        ApiError: 400; malformed JSON, a wrong type or name, or not exactly one of `prompt` and `messages`.
    """
    ask = decode_known(body, TokenizeRequest)
    if (ask.prompt is None) == (ask.messages is None):
        raise wrong("prompt", "exactly one of prompt and messages is needed")
    return ask


class TokenRoutes:
    """The routes.

    Args:
        parts: of the server.
    """

    def __init__(self, parts: Parts) -> None:
        self._engine, self._access = parts.engine, parts.access
        self._preparation, self._bodies, self._rewriting = parts.preparation, parts.bodies, parts.rewriting

    def routes(self) -> list[Operation]:
        """Returns them."""
        text = "Return the text of tokens"
        return [
            Operation("POST", "/tokenize", self._tokenize, "Tokenize a text or a chat", TokenizeRequest, Tokenized),
            Operation("POST", "/detokenize", self._detokenize, text, DetokenizeRequest, Detokenized),
            Operation("GET", "/tokenizer_info", self._tokenizer_info, "Describe the tokenizer", None, TokenizerInfo),
        ]

    async def _tokenize(self, http: HttpRequest) -> Response:
        return await self._answer(http, lambda body: self._tokenized(parse_tokenize(body), http.headers))

    def _tokenized(self, ask: TokenizeRequest, headers: Headers) -> Tokenized:
        self._preparation.check_model(ask.model)
        ruled, tenant = ask.prompt_rules is not False, self._access.tenant(headers)
        if ask.messages is not None:
            chat = ask.conversation()
            made = self._preparation.chat(self._rewriting.chat(chat, headers, tenant) if ruled else chat)
        else:
            adds, parses, text = ask.add_special_tokens is not False, ask.parse_special is not False, ask.prompt or ""
            text = self._rewriting.text(text, headers, tenant) if ruled else text
            made = self._preparation.text(text, special_tokens=adds, parse_special=parses)
        spelled = (
            [self._preparation.prompts.spell(int(token)).text for token in made]
            if ask.return_token_strs
            else msgspec.UNSET
        )
        return Tokenized(len(made), self._engine.max_context, made.tolist(), spelled)

    async def _detokenize(self, http: HttpRequest) -> Response:
        return await self._answer(http, lambda body: self._detokenized(decode(body, DetokenizeRequest)))

    def _detokenized(self, ask: DetokenizeRequest) -> Detokenized:
        self._preparation.check_model(ask.model)
        self._preparation.prompts.check_length(len(ask.tokens), "tokens")
        with client_names({"prompt": "tokens"}):
            return Detokenized(self._preparation.prompts.read(ask.tokens))

    async def _answer(self, http: HttpRequest, answer: Callable[[bytes], msgspec.Struct]) -> Response:
        """Answers a client's body on a thread."""
        self._access.tenant(http.headers)
        return json_response(await self._bodies.parsed(http, answer))

    async def _tokenizer_info(self, http: HttpRequest) -> Response:
        self._access.tenant(http.headers)
        tokenizer, names = self._engine.tokenizer, ("bos_token", "eos_token", "pad_token", "chat_template")
        values = (getattr(tokenizer, name, None) for name in names)
        return json_response(TokenizerInfo(type(tokenizer).__name__, *values))
