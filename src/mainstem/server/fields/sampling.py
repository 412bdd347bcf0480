"""The fields that requests of several APIs have: each is declared once, and named as the sampling parameter it sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mainstem.server.errors import wrong
from mainstem.settings.engine import SamplingParams

MAX_STOPS = 16
"""Maximum number of stop strings of one request."""

StopTexts = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_STOPS)]


class Thinking(Struct):
    """`thinking`, as in the Anthropic API reference: whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think; None: as its chat template has it."""
        return {"enabled": True, "disabled": False}.get(self.type)


class Common(Struct, kw_only=True):
    """The fields that all APIs have; None means the default.

    Each sets the sampling parameter of the same name. A subclass adds the fields of one API.
    """

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    explain: bool | None = None
    prompt_rules: bool | None = None


_APART = {"max_tokens", "logprobs", "prompt_logprobs", "bad_words", "seed"}  # depend on more than the field


def sampling_of(request: Struct) -> dict[str, Any]:
    """Returns the sampling parameters that the fields of a request set.

    Raises:
        ApiError: 400; the key of a bias is no token id.
    """
    names = SamplingParams.__dataclass_fields__.keys() & {*request.__struct_fields__} - _APART
    params = {name: value for name in names if (value := getattr(request, name)) is not None}
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    if params.get("top_k") == -1:
        del params["top_k"]
    if "stop" in params:
        params["stop"] = stops_of(params["stop"])
    if "logit_bias" in params:
        params["logit_bias"] = _biases(params["logit_bias"])
    return {"temperature": 1.0, **params}


def stops_of(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns the stop texts in a field."""
    return tuple(text for text in ((given,) if isinstance(given, str) else given) if text)


def _biases(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Returns token ids and biases; JSON has only texts as keys."""
    other = next((token for token in given if not (token.isascii() and token.isdecimal())), None)
    if other is not None:
        raise wrong("logit_bias", f"the key {other!r} is no token id")
    return tuple((int(token), bias) for token, bias in given.items())
