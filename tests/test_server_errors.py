"""Errors as clients read them."""

from __future__ import annotations

import json

import pytest

from mainstem.errors import BadArgument, BadTokens, EngineClosed, EngineFull, MainstemError, OutOfPages, RequestTooLong
from mainstem.server.errors import api_error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadArgument("top_p", 3, "0 .. 1"), 400, None),
        (BadTokens("token 5"), 400, None),
        (RequestTooLong("too long"), 400, "context_length_exceeded"),
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
