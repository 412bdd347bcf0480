"""Errors as clients read them: HTTP statuses, and the four fields of OpenAI's error body."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
from msgspec import Struct

from mainstem.errors import (
    BadArgument,
    BadTokens,
    EngineClosed,
    EngineFull,
    MainstemError,
    RequestTooLong,
    UnsupportedModel,
)

TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a prompt, or a prompt and its answer, that the context does not hold."""


class ErrorDetail(Struct):
    """What went wrong, in the four fields that OpenAI clients read."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct):
    """The body of every response that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A refusal or failure that is reported to the client.

    Args:
        status: the HTTP status.
        message: one sentence for people.
        type: the OpenAI error type.
        param: the path of the wrong field (`messages[0].content`).
        code: a stable word for programs.
        headers: extra response headers.
        cause: the error of a layer below that this one reports; None: there is none.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        cause: MainstemError | None = None,
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.status = status
        self.detail = ErrorDetail(message, type, param, code)
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """Returns the JSON of the response."""
        return msgspec.json.encode(ErrorBody(self.detail))


def api_error(error: MainstemError) -> ApiError:
    """Translates a typed error of the layers below for the client; internal errors become a 500 without details."""
    message = str(error)
    match error:
        case BadArgument():
            return ApiError(400, message, param=error.name)
        case UnsupportedModel():
            return ApiError(400, message)
        case BadTokens():
            return ApiError(400, message, param="prompt")
        case RequestTooLong():
            return ApiError(400, message, param=error.name, code=TOO_LONG, cause=error)
        case EngineFull():
            headers = {"Retry-After": "1"}
            return ApiError(429, message, type="rate_limit_error", code="engine_full", headers=headers)
        case EngineClosed():
            return unavailable("The engine has stopped and accepts no more requests.", "engine_closed")
    return internal_error()


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Makes errors name the fields of a client's body, where another request was made of it.

    Args:
        names: paths in the body, by paths in the request. The longest that an error's path begins with counts.
    """
    try:
        yield
    except (ApiError, MainstemError) as error:
        shown = error if isinstance(error, ApiError) else api_error(error)
        if shown.status >= 500 or not names:
            raise
        if isinstance(shown.cause, RequestTooLong):
            raise api_error(shown.cause.renamed(_renamed(shown.cause.name, names))) from error
        param = None if shown.detail.param is None else _renamed(shown.detail.param, names)
        # A message begins with a path, or has a field's value as `name = 1`.
        message = re.sub(r"^[\w.\[\]]+(?=:| = )|\b\w+(?= = )", lambda found: _renamed(found[0], names), str(shown))
        detail = shown.detail
        raise ApiError(
            shown.status, message, type=detail.type, param=param, code=detail.code, headers=shown.headers
        ) from error


def _renamed(path: str, names: Mapping[str, str]) -> str:
    begins = [name for name in names if path.startswith(name) and path[len(name) :][:1] in ("", ".", "[")]
    known = max(begins, key=len, default="")
    return names[known] + path[len(known) :] if known else path


def text_only(at: str) -> ApiError:
    """Returns the error for an image sent to a text-only model; `at` is the path of the field."""
    return ApiError(400, f"{at}: this model accepts text only", param=at, code="unsupported_content")


def no_advice(action: str, cached: int, param: str) -> ApiError:
    """Returns the error for a hint that concerns nothing.

    Args:
        action: of the hint.
        cached: tokens of the prefix that are cached.
        param: the field that names the prefix.
    """
    if cached:
        problem = (
            "too much else is under way" if action == "prefetch" else "nothing more fits within the tenant's bound"
        )
        return ApiError(409, f"{action}: {problem}; {cached} tokens of the prefix are cached", code="hint_limit")
    what = "is pinned" if action == "unpin" else "is cached"
    return ApiError(404, f"{action}: nothing of this prefix {what}", param=param, code="prefix_not_found")


def draining() -> ApiError:
    """Returns the error for a request to a server that is shutting down."""
    return unavailable("The server is shutting down and accepts no new requests.", "draining")


def unavailable(message: str, code: str) -> ApiError:
    """Returns a 503 that asks the client to retry later, maybe at another server."""
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError(503, message, type="service_unavailable_error", code=code, headers=headers)


def internal_error() -> ApiError:
    """Returns the error for a fault of the server, which logs the cause under the request's id."""
    return ApiError(500, "The server had an error while handling the request.", type="server_error")
