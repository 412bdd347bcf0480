"""The fields that completions and chats share, by the OpenAI API reference and as open servers extend it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from mainstem.server.apis.bodies import TokenId
from mainstem.server.apis.generation import CacheHints
from mainstem.server.errors import wrong
from mainstem.server.fields.breakpoints import CacheOptions
from mainstem.server.fields.sampling import StopTexts
from mainstem.server.fields.structured import Structured

MAX_CHOICES = 128
"""Maximum number of choices of one HTTP request: prompts times `n`."""


class StreamOptions(Struct):
    """`stream_options`: whether a last chunk carries the usage, and each earlier chunk the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenRequest(Structured, kw_only=True):
    """The fields of both kinds of request; None means the default, as in the OpenAI API."""

    max_tokens: int | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | StopTexts | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[TokenId] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: list[Annotated[str, Meta(min_length=1)]] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    prompt_logprobs: int | None = None
    logprob_start: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_hints: CacheHints | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None

    def parts(self) -> Mapping[str, Any]:
        """Returns the arguments of a `Generation` that these fields give.

        Raises:
            ApiError: 400; they contradict each other.
        """
        if self.stream and self.prompt_logprobs is not None:
            raise wrong("prompt_logprobs", "cannot be streamed")
        options = self.stream_options or StreamOptions()
        return {
            "kept": self.n or 1,
            "prompt_logprobs": self.prompt_logprobs,
            "shows_ids": bool(self.return_token_ids),
            "ids_for_names": bool(self.return_tokens_as_token_ids),
            "truncate": self.truncate_prompt_tokens,
            "bad_words": self.bad_words or (),
            "include_usage": bool(options.include_usage),
            "counts_chunks": bool(options.include_usage and options.continuous_usage_stats),
            "session": self.prompt_cache_key,
            "hints": self.cache_hints or CacheHints(),
            "options": self.prompt_cache_options,
        }
