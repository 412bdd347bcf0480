"""Charts: axes, ticks, lines with gaps; and the markup that they are made of."""

from __future__ import annotations

import math
import re

import pytest

from mainstem.replay.report.markup import Markup, join, tag
from mainstem.replay.report.series import Look
from mainstem.replay.report.svg import Axis, Bar, Line, Tick, bar_chart, line_chart, linear, percents


def test_markup_escapes_text_and_attributes_once() -> None:
    inner = tag("b", "1 < 2 & 3")
    assert inner == "<b>1 &lt; 2 &amp; 3</b>"
    assert tag("p", inner, "<", title='"x"', stroke_width=1.50, class_="a") == (
        '<p title="&quot;x&quot;" stroke-width="1.5" class="a"><b>1 &lt; 2 &amp; 3</b>&lt;</p>'
    )
    assert join("a&", Markup("<i>")) == "a&amp;<i>"
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'


@pytest.mark.parametrize(
    ("highest", "written"),
    [
        (0.3664, ["0 %", "10 %", "20 %", "30 %", "40 %"]),
        (1.0, ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]),
        (0.02, ["0.0 %", "0.5 %", "1.0 %", "1.5 %", "2.0 %"]),
        (0.0, ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]),
    ],
)
def test_shares_have_round_ticks_up_to_the_highest(highest: float, written: list[str]) -> None:
    assert [tick.lines[0] for tick in percents("", highest).ticks] == written


@pytest.mark.parametrize("high", [1e-9, 0.7, 3, 58.9, 12345.0, 1e15])
def test_a_linear_axis_has_a_few_ticks_within_it(high: float) -> None:
    for axis in (linear("", high, str), linear("", high, str, nice=False)):
        assert 2 <= len(axis.ticks) <= 8
        assert axis.high >= high * (1 - 1e-9)
        assert all(0 <= axis.place(tick.value) <= 1 + 1e-9 for tick in axis.ticks)


def test_a_log_axis_gives_each_decade_as_much_room() -> None:
    axis = Axis("", 1, 1000, (), math.log)
    assert [axis.place(value) for value in (1, 10, 100, 1000)] == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_ticks_that_would_overlap_are_not_written() -> None:
    ticks = tuple(Tick(value, (f"{value:,}",)) for value in (1000, 1001, 1002, 2000))
    x, y = Axis("", 0, 3000, ticks), percents("", 1)
    chart = line_chart("", x, y, [], width=400, height=200)
    assert [text for text in ("1,000", "1,001", "1,002", "2,000") if f">{text}<" in chart] == ["1,000", "2,000"]


def test_a_line_has_gaps_and_marks_on_its_points_only() -> None:
    line = Line("a<b", Look("#123456", (2, 3), "diamond"), [(0, 0.0), (1, 0.5), (2, None), (3, 1.0)], ["p", "q", "r"])
    chart = line_chart("t", linear("", 3, str), percents("", 1), [line], width=400, height=200)
    found = re.search(r'data-name="a&lt;b"><path d="([^"]*)"[^>]*stroke-dasharray="2 3"', chart)
    assert found
    assert re.sub("[^ML]", "", found[1]) == "MLM"
    assert re.findall("<title>(.*?)</title>", chart) == ["a&lt;b", "p", "q", "r"]


def test_bars_begin_at_the_axis_and_are_as_high_as_their_values() -> None:
    bars = [Bar(0, 1, 0.5, "half"), Bar(1, 2, 1.0, "all"), Bar(2, 3, 0.0, "none")]
    chart = bar_chart("t", linear("", 3, str), percents("", 1), bars, width=400, height=200, marks=[Tick(1.5, ("m",))])
    found = re.findall(r'class="bar" x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', chart)
    tops, heights = zip(*((float(top), float(height)) for top, height in found), strict=True)
    assert heights[0] == pytest.approx(heights[1] / 2, abs=0.1) and heights[2] == 0
    assert len({round(top + height, 1) for top, height in zip(tops, heights, strict=True)}) == 1
    assert ">m<" in chart
