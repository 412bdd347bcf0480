"""Whether, and how much, a model thinks: the variables of chat templates, found by trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
import pytest

from mainstem.server.fields.effort import EFFORTS, Switches, switches_of

TURN = "{{ messages[0].content }}<assistant>"
QWEN3 = TURN + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}"
V31 = (
    TURN
    + "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ '<think>' if thinking else '</think>' }}"
)
GPT_OSS = "Reasoning: {{ reasoning_effort if reasoning_effort is defined else 'medium' }}\n" + TURN
ON_OR_OFF = (
    "{% set effort = reasoning_effort or 'high' %}{% if effort not in ['none', 'high'] %}"
    "{{ raise_exception('effort') }}{% endif %}[{{ effort }}]" + TURN
)
TOLD = TURN + "{% if reasoning_effort == 'high' %}[long]{% elif reasoning_effort == 'max' %}[longest]{% endif %}"
BOTH = QWEN3 + "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"


def switches(template: str) -> Switches:
    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    made = jinja2.Environment().from_string(template, globals={"raise_exception": fail})

    def render(variables: Mapping[str, Any]) -> str | None:
        try:
            return made.render(messages=[{"content": "?"}], **variables)
        except jinja2.TemplateError:
            return None

    return switches_of(render)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (TURN, Switches()),
        (QWEN3, Switches("enable_thinking")),
        (V31, Switches("thinking")),
        (GPT_OSS, Switches(levels=("low", "medium", "high"))),
        (ON_OR_OFF, Switches(levels=("none", "high"))),
        (TOLD, Switches(levels=("low", "medium", "high", "max"))),
        (BOTH, Switches("enable_thinking", ("low", "medium", "high"))),
        ("{{ raise_exception('never') }}", Switches()),
    ],
    ids=["none", "qwen3", "deepseek v3.1", "gpt-oss", "on or off", "told", "both", "broken"],
)
def test_the_variables_of_a_template_are_found_by_trial(template: str, found: Switches) -> None:
    assert switches(template) == found
    assert found.exist == (found != Switches())


def test_effort_and_thinking_become_what_a_template_takes() -> None:
    qwen = Switches("enable_thinking")
    assert qwen.variables(None, None) == {}
    assert {effort: qwen.variables(None, effort)["enable_thinking"] for effort in EFFORTS} == {
        **dict.fromkeys(EFFORTS, True),
        **dict.fromkeys(("none", "minimal"), False),
    }
    assert qwen.variables(True, None) == {"enable_thinking": True}
    assert qwen.variables(False, "high") == {"enable_thinking": False}, "what is said of thinking itself counts"
    assert qwen.variables(None, "default") == {}
    oss = Switches(levels=("low", "medium", "high"))
    assert [oss.variables(None, effort)["reasoning_effort"] for effort in EFFORTS] == [
        *("low", "low", "low", "medium", "high", "high", "high"),
    ]
    assert oss.variables(True, None) == {}, "the template's default"
    assert oss.variables(False, None) == {"reasoning_effort": "low"}, "the least there is"
    two = Switches(levels=("none", "high"))
    assert two.variables(None, "low") == {"reasoning_effort": "high"}, "more rather than less, where both are as near"
    assert Switches("thinking", ("high",)).variables(None, "none") == {"thinking": False, "reasoning_effort": "high"}
    assert Switches().variables(True, "high") == {}
