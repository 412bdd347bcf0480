"""The pictures of the documentation are those that `make pictures` draws, and each is shown."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import terminal

ROOT = Path(__file__).parents[2]
SCREENS = ROOT / "docs" / "screens"
DRAWN = {draw.__name__: draw().svg() for draw in runpy.run_path(str(ROOT / "scripts" / "pictures.py"))["PICTURES"]}


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_a_picture_is_as_it_is_drawn(name: str) -> None:
    kept = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
    assert kept == DRAWN[name], "make pictures"
    root = ElementTree.fromstring(kept)
    assert root.get("aria-label") and "prefers-color-scheme:dark" in kept


def test_each_picture_is_shown_and_no_other_is_kept() -> None:
    page = "".join((ROOT / "docs" / name).read_text() for name in ("concepts.md", "fleet.md"))
    assert [name for name in DRAWN if f"](pictures/{name}.svg)" not in page] == []
    assert {path.stem for path in (ROOT / "docs" / "pictures").iterdir()} == set(DRAWN)


def test_the_pictures_of_what_moves_are_there_and_shown() -> None:
    """They differ each time; so they are looked at, not compared."""
    page = (ROOT / "docs" / "serving.md").read_text()
    kept = {path.name for path in SCREENS.iterdir()}
    assert kept == {"live-light.png", "live-dark.png", "top.svg", "demo.json", "demo.svg", "replay.svg"}
    assert "](screens/live-light.png)" in page and "](screens/top.svg)" in page
    assert ElementTree.parse(SCREENS / "top.svg").getroot().get("aria-label")


def test_the_picture_of_the_demo_is_what_it_prints_of_its_kept_report() -> None:
    kept = (SCREENS / "demo.svg").read_text()
    assert kept == terminal.demo_picture(json.loads((SCREENS / "demo.json").read_text())), "make pictures"
    assert "](../screens/demo.svg)" in (ROOT / "docs" / "start" / "install.md").read_text()
    assert "times sooner" in kept and ElementTree.fromstring(kept).get("aria-label")


def test_the_picture_of_a_replay_is_what_it_prints() -> None:
    kept = (SCREENS / "replay.svg").read_text()
    assert kept == terminal.replay_picture(), "make pictures"
    page = (ROOT / "docs" / "replay.md").read_text()
    assert f"mainstem {terminal.TRACE}\nmainstem {terminal.REPLAY}\n" in page and "](screens/replay.svg)" in page
