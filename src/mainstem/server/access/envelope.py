"""Middleware around every request: its id, and errors in the form of its API."""

from __future__ import annotations

import difflib
import logging
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from mainstem.errors import MainstemError
from mainstem.server import errors
from mainstem.server.apis.table import error_body
from mainstem.server.errors import ApiError

log = logging.getLogger(__name__)

REQUEST_ID = ("X-Request-Id", "request-id")
"""The headers with the id of a request: OpenAI's clients read the first, Anthropic's the second."""

_PREFIXES = re.compile(r"^(/(v1|api|openai|anthropic))+(?=/)")  # with which clients begin a path
_ALIKE = 0.85
_SAFE_ID = re.compile(r"[!-~]{1,128}")


class Envelope:
    """Adds the id of the request to every response, and turns uncaught exceptions into a logged 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update(dict.fromkeys(REQUEST_ID, request_id))
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            log.info("request %s: the client disconnected", request_id)
        except Exception:
            log.exception("request %s failed", request_id)
            if not started:
                await error_response(errors.internal_error(), scope)(scope, receive, send_named)


def _request_id(scope: Scope) -> str:
    """Returns the client's own id if it is safe in a header and a log line, else a new one."""
    id = Headers(scope=scope).get("x-request-id", "")
    return id if _SAFE_ID.fullmatch(id) else uuid.uuid4().hex


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError | MainstemError)
    reported = shown(error)
    if reported.status == 500 and reported is not error:
        raise error  # for the envelope to log
    return error_response(reported, http.scope)


def shown(error: ApiError | MainstemError) -> ApiError:
    """Returns an error as clients get it."""
    return error if isinstance(error, ApiError) else errors.api_error(error)


async def _on_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, message, headers = http.url.path, str(error.detail), dict(error.headers or {})
    if error.status_code == 404:
        meant = _meant(path, http.app.routes)
        message = f"There is no endpoint at {path}{'.' if meant is None else f': did you mean {meant}?'}"
    elif error.status_code == 405:
        allowed = _allowed(path, http.app.routes)
        spoken = " or ".join(method for method in allowed if method != "HEAD")
        message = f"{path} does not accept {http.method}: use {spoken}."
        headers["Allow"] = ", ".join(allowed)
    return error_response(ApiError(error.status_code, message, headers=headers), http.scope)


def _allowed(path: str, routes: Sequence[BaseRoute]) -> list[str]:
    """Returns the methods that a path takes, of all of its routes (RFC 9110, 10.2.1)."""
    taken = [route.methods or set() for route in routes if isinstance(route, Route) and route.path_regex.match(path)]
    return sorted(set().union(*taken))


def _meant(path: str, routes: Sequence[BaseRoute]) -> str | None:
    """Returns the path that a client may have meant, often under another base URL; None: no path is similar."""
    bare = _PREFIXES.sub("", path.rstrip("/"))
    for candidate in (f"/v1{bare}", bare):
        if any(isinstance(route, Route) and route.path_regex.match(candidate) for route in routes):
            return candidate
    known = [route.path for route in routes if isinstance(route, Route) and "{" not in route.path]
    return next(iter(difflib.get_close_matches(path, known, 1, _ALIKE)), None)


def error_response(error: ApiError, scope: Scope) -> Response:
    """Returns an error in the form of the API that a request belongs to."""
    body = error_body(error, scope["path"], Headers(scope=scope))
    return Response(body, error.status, error.headers, media_type="application/json")


HANDLERS: dict[type[Exception], ExceptionHandler] = {
    ApiError: _on_error,
    MainstemError: _on_error,
    HTTPException: _on_http_error,
}
"""The answers of an application to the exceptions of its routes."""
