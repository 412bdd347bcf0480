"""The pictures of the documentation are those that `make pictures` draws, and each is shown."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
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
    kept = {path.name for path in (ROOT / "docs" / "screens").iterdir()}
    assert kept == {"live-light.png", "live-dark.png", "top.svg"}
    assert "](screens/live-light.png)" in page and "](screens/top.svg)" in page
    assert ElementTree.parse(ROOT / "docs" / "screens" / "top.svg").getroot().get("aria-label")
