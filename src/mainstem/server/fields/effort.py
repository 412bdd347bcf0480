"""The variables of a chat template that say whether, and how much, the model thinks.

Clients of all APIs say it in the same words, and each template has variables of its own. These are found by trial,
once, when the server starts: the template is rendered with them, and the text is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

RenderWith: TypeAlias = Callable[[Mapping[str, Any]], str | None]
"""Renders a conversation with variables, as text; None where the template does not take them."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The words of the APIs, from the least to the most."""

_OFF = ("none", "minimal")  # where a template knows only on and off
_COMMON = ("low", "medium", "high")  # the words that models were trained on, if their template accepts any word
_SWITCHES = ("enable_thinking", "thinking")
_LEVELS = "reasoning_effort"
_NO_LEVEL = "probe_of_effort"


@dataclass(frozen=True, slots=True)
class Switches:
    """The variables of one chat template.

    Args:
        thinks: the name of the one that is true or false; None: there is none.
        levels: the words that `reasoning_effort` takes, in the order of `EFFORTS`; none: there is no such variable.
    """

    thinks: str | None = None
    levels: tuple[str, ...] = ()

    @property
    def exist(self) -> bool:
        """Whether the template has any."""
        return self.thinks is not None or bool(self.levels)

    def variables(self, thinks: bool | None, effort: str | None) -> dict[str, Any]:
        """Returns the values of the variables; a variable that the request does not set keeps the template's default.

        Args:
            thinks: whether the model is to think.
            effort: how much. Of `EFFORTS`, the nearest word that the template takes counts; other words do nothing.
        """
        if effort not in EFFORTS:
            effort = "none" if thinks is False else None
        if thinks is None and effort is not None:
            thinks = effort not in _OFF
        made: dict[str, Any] = {} if self.thinks is None or thinks is None else {self.thinks: thinks}
        return made | ({_LEVELS: self._nearest(effort)} if self.levels and effort is not None else {})

    def _nearest(self, effort: str) -> str:
        at = EFFORTS.index(effort)
        return min(self.levels, key=lambda level: (abs(EFFORTS.index(level) - at), -EFFORTS.index(level)))


def switches_of(render: RenderWith) -> Switches:
    """Finds the variables that a chat template has."""
    thinks = next((name for name in _SWITCHES if _differs(render({name: True}), render({name: False}))), None)
    return Switches(thinks, _levels(render))


def _differs(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _levels(render: RenderWith) -> tuple[str, ...]:
    """Returns the words that a template takes; a word that is not common counts only if the text differs by it."""
    texts = {level: text for level in EFFORTS if (text := render({_LEVELS: level})) is not None}
    any_word = render({_LEVELS: _NO_LEVEL})
    if len({*texts.values(), any_word}) < 2:
        return ()
    distinct = () if any_word is not None and _NO_LEVEL in any_word else tuple(texts)
    return tuple(level for level in texts if level in _COMMON or (level in distinct and texts[level] != any_word))
