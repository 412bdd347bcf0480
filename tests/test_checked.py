"""Calls whose schema no grammar holds in full: what does not fit is logged, and all is shown as it is."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
from test_output import scanned
from test_tools import TOOLS, T, W

from mainstem.server import checked
from mainstem.server.checked import Checked, can_check
from mainstem.server.formats import FORMATS


class Validator:
    """Stands for jsonschema's: an object has the city that the schema names."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._city = schema["city"]

    def iter_errors(self, given: Any) -> Any:
        if given["city"] != self._city:
            yield SimpleNamespace(absolute_path=["city", 0], message=f"{given['city']!r} is not {self._city!r}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    real = importlib.import_module
    monkeypatch.setattr(
        checked.importlib,
        "import_module",
        lambda name: SimpleNamespace(validator_for=lambda schema: Validator) if "jsonschema" in name else real(name),
    )

    def logged(text: str, city: str | None) -> str:
        caplog.clear()
        made = Checked(FORMATS["hermes"].parser(TOOLS), {"weather": {} if city is None else {"city": city}})
        shown = scanned(made, *text)
        plain = scanned(FORMATS["hermes"].parser(TOOLS), text)
        assert [type(piece) for piece in shown] == [type(piece) for piece in plain]
        return caplog.text

    return logged


def test_a_call_that_does_not_fit_is_logged(said: Any) -> None:
    text = f"<tool_call>{T}</tool_call><tool_call>{W}</tool_call>"
    assert said(text, "Rome") == ""
    assert "a call of the tool weather does not fit its schema: arguments['city'][0]: 'Rome' is not 'Oslo'" in said(
        text, "Oslo"
    )
    assert "cannot be checked: 'city'" in said(text, None), "a schema that is none ends no answer"


def test_what_is_no_call_is_not_checked(said: Any) -> None:
    assert said('<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>', "Oslo") == ""


@pytest.mark.parametrize("there", [False, True])
def test_without_the_package_nothing_is_checked(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(checked.importlib.util, "find_spec", lambda name: json if there else None)
    assert can_check() == there
