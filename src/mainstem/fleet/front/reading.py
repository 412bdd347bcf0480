"""What a request is routed by: the tokens of its prompt, its namespace, its session.

The front reads a body as the server does, with the same code, but has the tokenizer alone. What it cannot read (images,
a conversation that only a replica remembers) is routed by the bytes of the body, and what is wrong with a request the
replica says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
from starlette.datastructures import Headers

from mainstem.cache.namespaces import Namespace
from mainstem.errors import MainstemError
from mainstem.fleet.front.asking import Prompt
from mainstem.server.access.api_keys import Access, tenant_secret
from mainstem.server.apis import message_reply, messages, requests
from mainstem.server.apis.replies import ChatReply, CompletionReply
from mainstem.server.apis.responses import Responses
from mainstem.server.errors import ApiError
from mainstem.server.fields.rules import Unheeded
from mainstem.server.generation import Task
from mainstem.server.kept.response_store import Kept, Owner, ResponseStore
from mainstem.server.preparation import Preparation
from mainstem.server.watch.diagnosis import Earlier, Fingerprint
from mainstem.settings.tenants import read_tenants

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mainstem.runtime.engine import Engine
    from mainstem.settings.fleet import FleetConfig

log = logging.getLogger(__name__)

COMPLETIONS, CHAT, RESPONSES, MESSAGES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    message_reply.PATH,
)
GENERATING = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
"""The paths that generate."""


class _Routed(msgspec.Struct):
    """The fields of any body that say where it should go."""

    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    model: str | None = None
    previous_response_id: str | None = None


@dataclass(frozen=True)
class _Speaker:
    """An engine's interface, as far as prompts need it."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    max_context: int
    adapters: tuple[str, ...]
    has_states: bool = False
    vision: None = None


class Reading:
    """Reads what requests are routed by. Any thread may call it.

    Args:
        config: of the fleet.
        tokenizer: of the model; None: requests are routed by the bytes of their bodies.
        name: of the model.
        max_context: positions of one request at most.
        home: returns the replica that has a response, by its id.
    """

    def __init__(
        self,
        config: FleetConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        max_context: int,
        home: Callable[[str], str | None] = lambda id: None,
    ) -> None:
        self._home = home
        tenants = None if config.server.tenants is None else read_tenants(config.server.tenants)
        keys = {} if tenants is None else tenants.keys
        secret = tenant_secret(config.engine.tiers.storage_secret)(32)
        given = [*config.server.api_key, *keys.values()]
        self._access = Access(given, config.server.admin_key, secret, separates=bool(keys))
        self._preparation: Preparation | None = None
        if tokenizer is not None:
            adapters = tuple(adapter for adapter, _ in config.adapters)
            speaker = _Speaker(name, tokenizer, max_context, adapters)
            self._preparation = Preparation(cast("Engine", speaker), config.server)
        nothing = ResponseStore[Fingerprint](0, 0.0, time.monotonic)
        responses = Responses(ResponseStore[Kept](0, 0.0, time.monotonic), time.time, nothing)
        self._parsers: Mapping[str, Callable[[bytes, Owner], Task]] = {
            COMPLETIONS: lambda body, owner: Task(
                requests.parse_completion(body, Unheeded(tolerant=True)), CompletionReply
            ),
            CHAT: lambda body, owner: Task(requests.parse_chat(body, Unheeded(tolerant=True)), ChatReply),
            RESPONSES: lambda body, owner: responses.parse(body, Unheeded(tolerant=True), owner),
            MESSAGES: lambda body, owner: messages.parse(body, Unheeded(tolerant=True), Earlier(nothing, owner)),
        }

    def read(self, path: str, headers: Headers, body: bytes) -> Prompt | None:
        """Returns what a request is routed by; None: any replica can say what is wrong with it.

        Args:
            path: one of `GENERATING`.
            headers: of the request.
            body: of the request.
        """
        try:
            tenant = self._access.tenant(headers)
            routed = msgspec.json.decode(body, type=_Routed)
        except (ApiError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        home = None if routed.previous_response_id is None else self._home(routed.previous_response_id)
        sharing = tenant if self._access.separates else None
        rest: dict[str, Any] = {"session": routed.prompt_cache_key, "replica": home}
        if self._preparation is not None:
            try:
                tokens, namespace = self._preparation.addressed(self._parsers[path](body, tenant), sharing)
                return Prompt(tokens, namespace, **rest)
            except (ApiError, MainstemError) as error:
                log.debug("%s: routed by its bytes: %s", path, error)
        salted = Namespace(routed.model, routed.cache_salt, tenant=None if sharing is None else sharing.hex())
        return Prompt(np.frombuffer(body, np.uint8).astype(np.int32), salted, **rest)
