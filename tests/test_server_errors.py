"""Errors as clients read them."""

from __future__ import annotations

import json
import time

import pytest

from mainstem.errors import BadArgument, BadTokens, EngineClosed, EngineFull, MainstemError, OutOfPages, RequestTooLong
from mainstem.server.errors import ApiError, api_error, renamed


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


NAMES = {"messages": "input", "messages[1]": "input[4]", "messages[1].content[0].url": "input[4].source", "max": "most"}


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (ApiError(404, "messages[1].role: no", param="messages[1].role"), "input[4].role: no", "input[4].role"),
        (ApiError(400, "messages[1]: no", param="messages[1]"), "input[4]: no", "input[4]"),
        (ApiError(400, "messages[12]: no", param="messages[12]"), "input[12]: no", "input[12]"),
        (ApiError(400, "bad", param="messages[1].content[0].url"), "bad", "input[4].source"),
        (ApiError(400, "maximum: no", param="maximum"), "maximum: no", "maximum"),
        (BadArgument("max", 3, "2: max"), "most = 3: must be 2: max", "most"),
        (
            RequestTooLong("messages", 9, 8),
            "This model's maximum context length is 8 tokens. However, your input resulted in 9 tokens. "
            "Please reduce the length of the input.",
            "input",
        ),
    ],
)
def test_errors_get_the_names_of_the_clients_fields(
    error: ApiError | MainstemError, message: str, param: str | None
) -> None:
    before = error if isinstance(error, ApiError) else api_error(error)
    with pytest.raises(ApiError) as caught, renamed(NAMES):
        raise error
    assert (str(caught.value), caught.value.detail.message, caught.value.detail.param) == (message, message, param)
    assert (caught.value.status, caught.value.detail.type) == (before.status, before.detail.type)
    assert (caught.value.detail.code, caught.value.headers) == (before.detail.code, before.headers)


def test_faults_of_the_server_stay_what_they_are() -> None:
    for error in (OutOfPages(1, 2, 3, 4), EngineClosed("closed")):
        with pytest.raises(MainstemError) as caught, renamed(NAMES):
            raise error
        assert caught.value is error


def test_a_long_word_in_an_error_takes_no_time_to_speak_of() -> None:
    error = ApiError(404, f"The model '{'a' * 1_000_000}' does not exist.", param="model")
    began = time.process_time()
    with pytest.raises(ApiError) as caught, renamed(NAMES):
        raise error
    assert str(caught.value) == str(error)
    assert time.process_time() - began < 2, "it would take hours if each letter were looked at from all before it"
