"""Errors as clients read them."""

from __future__ import annotations

import json

import pytest

from mainstem.errors import BadArgument, BadTokens, EngineClosed, EngineFull, MainstemError, OutOfPages, RequestTooLong
from mainstem.server.errors import ApiError, api_error, client_names


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadArgument("top_p", 3, "0 .. 1"), 400, None),
        (BadTokens("token 5"), 400, None),
        (RequestTooLong("prompt", 5, 4), 400, "context_length_exceeded"),
        (EngineFull("full"), 429, "engine_full"),
        (EngineClosed("closed"), 503, "engine_closed"),
        (OutOfPages(1, 2, 3, 4), 500, None),
    ],
)
def test_errors_of_the_layers_below(error: MainstemError, status: int, code: str | None) -> None:
    shown = api_error(error)
    body = json.loads(shown.body())
    assert (shown.status, body["error"]["code"]) == (status, code)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    if status == 500:
        assert "pages" not in body["error"]["message"]


PATHS = {"messages": "input", "prompt": "input", "max": "most"}


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (BadArgument("max", "max = 1", "2: max"), "most = 'max = 1': must be 2: max", "most"),
        (BadArgument("maximum", 3, "2"), "maximum = 3: must be 2", "maximum"),
        (BadTokens("token 5"), "token 5", "input"),
        (
            RequestTooLong("messages", 9, 8),
            "This model's maximum context length is 8 tokens. However, your input resulted in 9 tokens. "
            "Please reduce the length of the input.",
            "input",
        ),
    ],
)
def test_errors_get_the_names_of_the_clients_fields(error: MainstemError, message: str, param: str) -> None:
    with pytest.raises((ApiError, MainstemError)) as caught, client_names(PATHS):
        raise error
    shown = caught.value if isinstance(caught.value, ApiError) else api_error(caught.value)
    assert (shown.status, shown.detail.message, shown.detail.param) == (400, message, param)
    assert shown.detail.code == api_error(error).detail.code


def test_faults_of_the_server_stay_what_they_are() -> None:
    for error in (OutOfPages(1, 2, 3, 4), EngineClosed("closed")):
        with pytest.raises(MainstemError) as caught, client_names(PATHS):
            raise error
        assert caught.value is error
