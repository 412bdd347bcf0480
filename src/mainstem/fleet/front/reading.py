"""Reads of a request what the router needs: the tokens of its prompt, its namespace, its session.

The front reads a body with the server's code, but has only the tokenizer. It routes a request that it cannot read, such
as one with images or one that continues a conversation kept by a replica, by the bytes of the body. The replica reports
what is wrong with a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from starlette.datastructures import Headers

from mainstem.cache.namespaces import Namespace
from mainstem.errors import MainstemError
from mainstem.fleet.front.asking import Prompt
from mainstem.server.access.api_keys import Access, tenant_secret
from mainstem.server.apis.generation import Generation
from mainstem.server.apis.rewriting import Rewriting
from mainstem.server.apis.table import APIS
from mainstem.server.errors import ApiError
from mainstem.server.fields.rules import Unheeded
from mainstem.server.prompting import Prompting, Reader
from mainstem.settings.tenants import read_tenants

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mainstem.settings.fleet import FleetConfig

log = logging.getLogger(__name__)


class _Routed(msgspec.Struct):
    """The fields of any body that the router uses."""

    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    model: str | None = None
    previous_response_id: str | None = None


class Reading:
    """Reads prompts for the router. Any thread may call it.

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
        self._rewriting = Rewriting(config.server, self._access, remembers=False)
        self._prompting: Prompting | None = None
        if tokenizer is not None:
            adapters = tuple(adapter for adapter, _ in config.adapters)
            self._prompting = Prompting(Reader(name, tokenizer, max_context, adapters), config.server)

    def read(self, path: str, headers: Headers, body: bytes) -> Prompt | None:
        """Returns the prompt of a request; None: the request is wrong, which any replica can report.

        Args:
            path: of an API that generates.
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
        if self._prompting is not None:
            try:
                request = APIS[path].read(body, Unheeded(tolerant=True))
                if isinstance(request, Generation):
                    request = self._rewriting.applied(request, path, headers.get("user-agent", ""), tenant)
                    return Prompt(*self._prompting.addressed(request, sharing), **rest)
                log.debug("%s: routed by its bytes: it goes on from what a replica keeps", path)
            except (ApiError, MainstemError) as error:
                log.debug("%s: routed by its bytes: %s", path, error)
        salted = Namespace(routed.model, routed.cache_salt, tenant=None if sharing is None else sharing.hex())
        return Prompt(np.frombuffer(body, np.uint8).astype(np.int32), salted, **rest)
