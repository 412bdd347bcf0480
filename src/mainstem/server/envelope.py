"""Around every request: its id, and errors in the words of the API that it speaks."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from mainstem.errors import MainstemError
from mainstem.server import errors, message_reply
from mainstem.server.errors import ApiError

log = logging.getLogger(__name__)

_SAFE_ID = re.compile(r"[!-~]{1,128}")


class Envelope:
    """Adds X-Request-Id to every response, and turns uncaught exceptions into a logged 500."""

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
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            log.info("request %s: the client disconnected", request_id)
        except Exception:
            log.exception("request %s failed", request_id)
            if not started:
                await error_response(errors.internal_error(), scope["path"])(scope, receive, send_named)


def _request_id(scope: Scope) -> str:
    """Returns the client's own id if it is safe in a header and a log line, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError | MainstemError)
    reported = shown(error)
    if reported.status == 500 and reported is not error:
        raise error  # for the envelope to log
    return error_response(reported, http.url.path)


def shown(error: ApiError | MainstemError) -> ApiError:
    """Returns an error as clients get it."""
    return error if isinstance(error, ApiError) else errors.api_error(error)


async def _on_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = http.url.path
    texts = {404: f"There is no endpoint at {path}.", 405: f"{path} does not accept {http.method}."}
    message = texts.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, headers=error.headers), path)


def error_response(error: ApiError, path: str) -> Response:
    """Returns an error in the form of the API that a path belongs to."""
    body = message_reply.error_body(error) if message_reply.speaks(path) else error.body()
    return Response(body, error.status, error.headers, media_type="application/json")


HANDLERS: dict[type[Exception], ExceptionHandler] = {
    ApiError: _on_error,
    MainstemError: _on_error,
    HTTPException: _on_http_error,
}
"""How an application answers what its routes raise."""
