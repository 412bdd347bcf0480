"""Line charts and bar charts as SVG. Sizes are in pixels.

Knows numbers, labels and looks; no traces, no policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mainstem.replay.report.markup import Markup, join, tag
from mainstem.replay.report.series import Look

_CHARACTER = 7.0  # approximate width at the report's 13 px
_GREY, _DARK = "#e3e3e3", "#444"
_LEFT, _RIGHT, _TOP = 54, 18, 30


@dataclass(frozen=True, slots=True)
class Tick:
    """A value on an axis, and one or more lines of text for it."""

    value: float
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from low to high; the scale is monotonically increasing."""

    label: str
    low: float
    high: float
    ticks: tuple[Tick, ...]
    scale: Callable[[float], float] = float

    def place(self, value: float) -> float:
        """Returns the relative place of a value: 0 at the low end, 1 at the high end."""
        low, high = self.scale(self.low), self.scale(self.high)
        return (self.scale(value) - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Line:
    """A line.

    Args:
        points: x and y, sorted by x; a y of None leaves a gap.
        tips: tooltip of each point; points without tooltips have no markers.
        width: width of the line.
    """

    name: str
    look: Look
    points: Sequence[tuple[float, float | None]]
    tips: Sequence[str] = ()
    width: float = 2.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from low to high on the x axis."""

    low: float
    high: float
    value: float
    tip: str


def linear(label: str, high: float, show: Callable[[float], str], *, max_ticks: int = 6, nice: bool = True) -> Axis:
    """Returns an axis from 0, with ticks at multiples of 1, 2 or 5 times a power of ten; nice: it ends at a tick."""
    high = high if high > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(high / max_ticks))
    step = next(step * power for step in (1, 2, 5, 10, 20) if high / (step * power) <= max_ticks)
    end = math.ceil(high / step - 1e-9) * step if nice else high
    count = math.floor(end / step + 1e-9)
    return Axis(label, 0.0, end, tuple(Tick(at * step, (show(at * step),)) for at in range(count + 1)))


def percents(label: str, high: float, *, max_ticks: int = 6) -> Axis:
    """Returns the same axis for shares, with as many digits as they need."""
    high = high if high > 0 else 1.0
    digits = 0 if high > 0.05 else 1 if high > 0.005 else 2
    return linear(label, high, lambda share: f"{100 * share:.{digits}f} %", max_ticks=max_ticks)


def line_chart(title: str, x: Axis, y: Axis, lines: Sequence[Line], *, width: int, height: int) -> Markup:
    """Draws lines, later ones on top."""
    frame = _Frame(x, y, width, height)
    return frame.svg(title, *(_line(frame, line, at) for at, line in enumerate(lines)))


def bar_chart(
    title: str,
    x: Axis,
    y: Axis,
    bars: Sequence[Bar],
    *,
    width: int,
    height: int,
    colour: str = "#56B4E9",
    marks: Sequence[Tick] = (),
) -> Markup:
    """Draws bars from 0 up, and a labelled vertical line at each mark."""
    frame = _Frame(x, y, width, height)
    return frame.svg(title, *(_bar(frame, bar, colour) for bar in bars), *_marks(frame, marks))


def sample(look: Look, *, marks: bool, width: float = 2.0) -> Markup:
    """Draws a piece of a line for a legend."""
    parts = [tag("path", d="M0 7H34", fill="none", stroke=look.colour, stroke_width=width, **_dashes(look))]
    if marks:
        parts.append(_marker(look, 17, 7, ""))
    return tag("svg", *parts, width=34, height=14, viewBox="0 0 34 14", aria_hidden="true")


class _Frame:
    """Axes, and the places of their values in the chart."""

    def __init__(self, x: Axis, y: Axis, width: int, height: int) -> None:
        self._x, self._y = x, y
        self._width, self._height = width, height
        below = 16 * max((len(tick.lines) for tick in x.ticks), default=1)
        self._bottom = height - below - (32 if x.label else 8)

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + self._x.place(x) * (self._width - _LEFT - _RIGHT),
            self._bottom - self._y.place(y) * (self._bottom - _TOP),
        )

    def svg(self, title: str, *inside: Markup) -> Markup:
        return tag(
            "svg",
            *self._across(),
            *self._along(),
            *inside,
            viewBox=f"0 0 {self._width} {self._height}",
            role="img",
            aria_label=title,
        )

    def _across(self) -> Iterator[Markup]:
        yield _text(2, 14, self._y.label, "start")
        for tick in self._y.ticks:
            left, y = self.at(self._x.low, tick.value)
            right = self._width - _RIGHT
            yield tag("path", d=_path([(left, y), (right, y)]), stroke=_GREY if tick.value else _DARK)
            yield _text(left - 8, y + 4, tick.lines[0], "end")

    def _along(self) -> Iterator[Markup]:
        for tick in self.spaced(self._x.ticks):
            x, y = self.at(tick.value, self._y.low)
            yield tag("path", d=_path([(x, y), (x, y + 5)]), stroke=_DARK)
            for at, line in enumerate(tick.lines):
                yield _text(x, y + 19 + 16 * at, line, "middle")
        yield _text((_LEFT + self._width - _RIGHT) / 2, self._height - 6, self._x.label, "middle")

    def spaced(self, ticks: Iterable[Tick]) -> Iterator[Tick]:
        """Yields the ticks whose text fits, from the left."""
        free = -math.inf
        for tick in ticks:
            x, half = self.at(tick.value, self._y.low)[0], _CHARACTER * max(map(len, tick.lines)) / 2
            if x - half >= free and x + half <= self._width:
                free = x + half + _CHARACTER
                yield tick


def _line(frame: _Frame, line: Line, number: int) -> Markup:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in line.points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append(frame.at(x, y))
    path = tag(
        "path",
        tag("title", line.name),
        d="".join(map(_path, filter(None, pieces))),
        fill="none",
        stroke=line.look.colour,
        stroke_width=line.width,
        stroke_linejoin="round",
        stroke_linecap="round",
        **_dashes(line.look),
    )
    shown = [point for piece in pieces for point in piece]
    marks = (_marker(line.look, *point, tip) for point, tip in zip(shown, line.tips, strict=False))
    return tag("g", path, *marks, class_="curve", data_at=str(number), data_name=line.name)


def _bar(frame: _Frame, bar: Bar, colour: str) -> Markup:
    (left, top), (right, bottom) = frame.at(bar.low, bar.value), frame.at(bar.high, 0)
    width = max(1.0, right - left - 2)
    tip = tag("title", bar.tip)
    return tag("rect", tip, class_="bar", x=left + 1, y=top, width=width, height=max(0.0, bottom - top), fill=colour)


def _marks(frame: _Frame, marks: Sequence[Tick]) -> Iterator[Markup]:
    labelled = set(frame.spaced(marks))
    for mark in marks:
        x, bottom = frame.at(mark.value, 0)
        top = _TOP + 6
        yield tag("path", d=_path([(x, bottom), (x, top)]), stroke="#D55E00", stroke_dasharray="3 3")
        if mark in labelled:
            yield _text(x, top - 5, mark.lines[0], "middle")


def _marker(look: Look, x: float, y: float, tip: str) -> Markup:
    drawn = {"fill": look.colour, "stroke": "#fff", "stroke_width": "1", "class_": "point"}
    inside = tag("title", tip) if tip else ""
    if look.marker == "circle":
        return tag("circle", inside, cx=x, cy=y, r=4.5, **drawn)
    corners = {
        "square": [(-4, -4), (4, -4), (4, 4), (-4, 4)],
        "triangle": [(0, -5), (5, 4), (-5, 4)],
        "diamond": [(0, -6), (5, 0), (0, 6), (-5, 0)],
    }[look.marker]
    return tag("path", inside, d=_path([(x + dx, y + dy) for dx, dy in corners]) + "Z", **drawn)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _dashes(look: Look) -> dict[str, str]:
    return {"stroke_dasharray": " ".join(map(str, look.dash))} if look.dash else {}


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return tag("text", text, x=x, y=y, text_anchor=anchor) if text else join()
