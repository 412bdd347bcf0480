"""The picture at the end of `make fleet-demo`: a lane for each replica, a bar for each answer, and the kill."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "fleet_demo.py"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def demo() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(PATH)))


def test_each_answer_is_a_bar_in_the_lane_of_who_gave_it(
    demo: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        demo.Answer("What is it?", "one", 0, 100, 10.0, 12.0, 13.0),
        demo.Answer("Why?", "one", 90, 100, 13.0, 13.5, 15.0),
        demo.Answer("When?", "two", 90, 100, 15.0, 15.5, 16.0),
    ]
    killed = demo.Killed("one", 14.0)
    root = ElementTree.fromstring(demo.picture(answers, killed))
    bars = [bar.attrib for bar in root.iter(f"{SVG}rect") if "class" in bar.attrib]
    assert [bar["class"] for bar in bars] == ["wait", "miss", "wait", "hit", "wait", "hit"]
    assert len({bar["y"] for bar in bars}) == 2
    ends = [float(bar["x"]) + float(bar["width"]) for bar in bars]
    assert all(end <= float(after["x"]) + 0.2 for end, after in zip(ends, bars[1:], strict=False))
    assert max(ends) <= 720
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert {"one", "two", "6.0 s"} <= set(texts)
    assert any(text.startswith("killed") for text in texts)
    demo.show(answers, killed, {"continued": 1})
    printed = capsys.readouterr().out
    assert "one was killed in the middle" in printed and "3 requests, none failed. 60% of" in printed
