"""HTML and SVG as strings, where text is escaped unless it is markup already.

Knows no page and no picture.
"""

from __future__ import annotations

from html import escape

_VOID = ("br", "input", "meta")


class Markup(str):
    """Text that is markup, and goes into a page as it is."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float) -> Markup:
    """An element.

    Args:
        children: what is no `Markup` is escaped.
        attributes: `class_` stands for class, `stroke_width` for stroke-width.

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
    """Parts one after another; what is no `Markup` is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def _number(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
