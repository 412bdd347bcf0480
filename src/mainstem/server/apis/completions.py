"""Requests for /v1/completions, by the OpenAI API reference.

`top_k`, `min_p`, `cache_salt`, `priority`, `ignore_eos` and others are extensions that open servers share.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from mainstem.server.apis.bodies import TokenId, decode_known, prompts_of
from mainstem.server.apis.generation import Generation, Texts
from mainstem.server.apis.shared import MAX_CHOICES, OpenRequest
from mainstem.server.errors import wrong
from mainstem.server.fields.rules import COMPLETIONS, Unheeded

MAX_TOKENS = 16
"""Default of `max_tokens`, as in the OpenAI reference."""


class CompletionRequest(OpenRequest, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: int | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None


def read(body: bytes, unheeded: Unheeded | None = None) -> Generation:
    """Reads a request.

    Args:
        body: the JSON.
        unheeded: fields that do nothing are added to it; see `fields.check_fields`.

    Raises:
        ApiError: 400; malformed JSON, a wrong type or value, or a field that is unknown or not supported.
    """
    request = decode_known(body, CompletionRequest, unheeded, COMPLETIONS)
    kept = request.n or 1
    choices = request.best_of or kept
    if choices < kept:
        raise wrong("best_of", f"must be at least n, {kept}; got {request.best_of}")
    if request.stream and choices > kept:
        raise wrong("best_of", "more than n cannot be streamed")
    prompts = prompts_of(request.prompt, "prompt")
    if len(prompts) * choices > MAX_CHOICES:
        raise wrong("n" if request.best_of is None else "best_of", f"at most {MAX_CHOICES} choices over all prompts")
    adds, parses = request.add_special_tokens is not False, request.parse_special is not False
    return Generation.of(
        request,
        Texts(prompts, adds, parses, bool(request.echo)),
        (),
        **request.parts(),
        choices=choices,
        max_tokens=MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        # Of several answers the most likely ones are kept.
        logprobs=0 if choices > kept and request.logprobs is None else request.logprobs,
        shows_logprobs=request.logprobs is not None,
        form=request.form(),
    )
