"""POST /v1/embeddings: the mean of the model's last hidden states over a text, of length 1.

Protocol: the OpenAI API reference, https://platform.openai.com/docs/api-reference/embeddings. A chat model was not
trained for it, so the route is there only if the settings say so.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeAlias

import anyio.to_thread
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mainstem.runtime.request import Delta, Request
from mainstem.server import errors
from mainstem.server.apis.bodies import TokenId, decode_known, prompts_of
from mainstem.server.errors import ApiError
from mainstem.server.fields.rules import Field, Rules, Unheeded
from mainstem.server.parts import Parts
from mainstem.server.transport import json_response
from mainstem.settings.engine import SamplingParams

PATH = "/v1/embeddings"
MAX_INPUTS = 2048
"""Maximum number of inputs of one HTTP request, as in the OpenAI reference."""

RULES = Rules({"user": Field("who asks")})

_PARAMS = SamplingParams(max_tokens=0, embedding=True)


class EmbeddingRequest(Struct, kw_only=True):
    """The body of POST /v1/embeddings."""

    model: str
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None


class Embedding(Struct):
    """The embedding of one input: numbers, or the base64 of float32 in little-endian order."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """The response of POST /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


Made: TypeAlias = tuple[EmbeddingRequest, list[Request]]
Compute: TypeAlias = Callable[[HttpRequest, Any, Sequence[Request], bytes | None], Awaitable[list[list[Delta]]]]
"""Runs the prompts of a client, a part of them at a time; returns the events of each."""


class Embeddings:
    """The route.

    Args:
        parts: of the server.
        compute: runs the prompts.
    """

    def __init__(self, parts: Parts, compute: Compute) -> None:
        self._parts, self._compute = parts, compute
        self._engine, self._access, self._preparation = parts.engine, parts.access, parts.preparation

    async def answer(self, http: HttpRequest, unheeded: Unheeded) -> Response:
        """Answers a request, and adds the fields that do nothing.

        Raises:
            ApiError, MainstemError, ClientDisconnect: it cannot be answered.
        """
        tenant = self._access.tenant(http.headers)
        if not self._parts.config.embeddings:
            raise ApiError(404, f"This server has no {PATH}: start it with --embeddings.", code="no_embeddings")
        if self._parts.draining():
            raise errors.draining()

        def made(body: bytes) -> Made:
            return self._made(decode_known(body, EmbeddingRequest, unheeded, RULES), tenant)

        ask, prompts = await self._parts.bodies.parsed(http, made)
        with errors.client_names({"prompt": "input"}):
            answers = await self._compute(http, ask, prompts, tenant)
        vectors = [delta.embedding for answer in answers for delta in answer if delta.embedding is not None]
        return await anyio.to_thread.run_sync(self._reply, ask, prompts, vectors)

    def _made(self, ask: EmbeddingRequest, tenant: bytes | None) -> Made:
        """Makes the prompts of a request, one for each input."""
        self._preparation.check_model(ask.model)
        size = self._engine.embedding_size
        if ask.dimensions not in (None, size):
            allowed = f"the model's embeddings have {size} dimensions, and cannot be cut to {ask.dimensions}; omit it"
            raise errors.wrong("dimensions", allowed)
        inputs = prompts_of(ask.input, "input")
        if len(inputs) > MAX_INPUTS:
            raise errors.wrong("input", f"at most {MAX_INPUTS} inputs in a request")
        namespace = self._preparation.namespace(ask.model, ask.cache_salt, tenant if self._access.separates else None)
        prompts, made = self._preparation.prompts, []
        for i, each in enumerate(inputs):
            name = "input" if len(inputs) == 1 and isinstance(ask.input, str) else f"input[{i}]"
            if not each:
                raise errors.wrong(name, "must not be empty")
            with errors.client_names({"prompt": name}):
                tokens = prompts.text(each, parse_special=False) if isinstance(each, str) else prompts.tokens(each)
                made.append(Request(tokens, _PARAMS, namespace))
        return ask, made

    def _reply(
        self, ask: EmbeddingRequest, prompts: Sequence[Request], vectors: Sequence[NDArray[np.float32]]
    ) -> Response:
        def shown(vector: NDArray[np.float32]) -> list[float] | str:
            if ask.encoding_format == "base64":
                return base64.b64encode(vector.astype("<f4").tobytes()).decode()
            found: list[float] = vector.tolist()
            return found

        data = [Embedding(i, shown(vector)) for i, vector in enumerate(vectors)]
        tokens = sum(len(prompt.tokens) for prompt in prompts)
        model = self._preparation.adapter(ask.model) or self._preparation.names[0]
        body = EmbeddingList(data, model, EmbeddingUsage(tokens, tokens))
        return json_response(body)
