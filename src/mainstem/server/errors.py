"""Errors as clients read them: HTTP statuses, and the four fields of OpenAI's error body."""

from __future__ import annotations

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
    UpdateUnderWay,
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
        case UpdateUnderWay():
            return ApiError(409, message, code="update_under_way")
        case EngineClosed():
            return unavailable("The engine has stopped and accepts no more requests.", "engine_closed")
    return internal_error()


@contextmanager
def client_names(paths: Mapping[str, str]) -> Iterator[None]:
    """Makes errors of the layers below name the fields of a client's body; `paths`: these, by the layers' names."""
    try:
        yield
    except BadArgument as error:
        if error.name not in paths:
            raise
        raise BadArgument(paths[error.name], error.value, error.allowed) from error
    except RequestTooLong as error:
        raise error.renamed(paths.get(error.name, error.name)) from error
    except BadTokens as error:
        raise ApiError(400, str(error), param=paths.get("prompt", "prompt")) from error


def wrong(at: str, problem: str, code: str | None = None) -> ApiError:
    """Returns the error for the field, or the parameter of a query, at a path."""
    return ApiError(400, f"{at}: {problem}", param=at, code=code)


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
