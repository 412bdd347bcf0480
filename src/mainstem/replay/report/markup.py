"""HTML and SVG as strings; text is escaped unless it is already markup.

Knows no report and no chart.
"""

from __future__ import annotations

from html import escape

_VOID = ("br", "input", "meta")


class Markup(str):
    """Text that is already markup, and is not escaped."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float) -> Markup:
    """Returns an element.

    Args:
        children: contents; anything but `Markup` is escaped.
        attributes: `class_` becomes class, `stroke_width` becomes stroke-width.

    >>> tag("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"' for key, value in attributes.items()
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*parts: str) -> Markup:
    """Concatenates parts; anything but `Markup` is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def _number(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
