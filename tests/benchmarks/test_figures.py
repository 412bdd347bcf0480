"""Every recorded figure of the documentation equals its record: `python -m bench.figures --write`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import figures
from bench.figures import MARK, PAGES, ROOT, TABLES, load, number, rewritten

RECORDS = load()
ALL_PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "bench" / "README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_was_recorded(page: str) -> None:
    text = (ROOT / page).read_text()
    assert MARK.search(text)
    assert text == rewritten(text, RECORDS), f"{page} differs from the records: python -m bench.figures --write"


def test_no_page_is_left_out() -> None:
    marked = {path.relative_to(ROOT).as_posix() for path in ALL_PAGES if MARK.search(path.read_text())}
    assert marked == set(PAGES)


def test_every_table_is_shown_and_every_record_is_in_one() -> None:
    shown = {found["what"] for page in PAGES for found in MARK.finditer((ROOT / page).read_text())}
    assert set(TABLES) <= shown
    assert {row.split(" | ")[0][2:] for row in TABLES["records"](RECORDS).splitlines()[2:]} == set(RECORDS)


@pytest.mark.parametrize("page", PAGES)
def test_no_number_in_a_line_begins_it(page: str) -> None:
    """Markdown treats a whole line that begins with a comment as HTML."""
    assert not re.search(r"^<!--= [^\n]*-->[^\n]", (ROOT / page).read_text(), re.MULTILINE)


# ---------------------------------------------------------------- how figures are written


@pytest.fixture
def records() -> dict[str, Any]:
    rows = [{"name": "a miss", "median": 0.027}, {"name": "a hit, page 1", "median": 12.0}]
    plan = [{"tokens": 3072, "past": 0, "flops": 2e9, "predicted_s": 1.5, "measured_s": 1.25, "ratio": 1.2}]
    return {"core": {"rows": rows}, "plan": {"rows": plan}}


def test_numbers_and_tables_are_rewritten_and_the_rest_stays(records: dict[str, Any]) -> None:
    page = """A miss takes <!--= core: a miss / median | .2f -->{}<!--/--> µs,
a hit <!--= core: a hit, page 1 / median | .0f -->{}<!--/--> µs.

<!--= plan -->
{}
<!--/-->

The end.
"""
    table = """| tokens | cached before | GFLOPs | predicted | measured | ratio |
| --- | --- | --- | --- | --- | --- |
| 3,072 | 0 | 2.0 | 1,500 ms | 1,250 ms | 1.20 |"""
    assert rewritten(page.format("9", "", "| anything |"), records) == page.format("0.03", "12", table)


@pytest.mark.parametrize(
    "what", ["plans", "core: a mist / median | .2f", "core: a miss / mean | .2f", "score: a miss | .2f"]
)
def test_a_mark_that_names_nothing_is_quoted(records: dict[str, Any], what: str) -> None:
    with pytest.raises(KeyError, match=re.escape(what)):
        rewritten(f"<!--= {what} -->1<!--/-->", records)


def test_a_number_is_found_by_the_fields_that_name_its_row(records: dict[str, Any]) -> None:
    records["tiers"] = {"rows": [{"what": "file", "page_size": 16, "dtype": "float32", "of": {"memcpy": {"up": 0.5}}}]}
    assert number("tiers: file / 16 / float32 / of / memcpy / up", records) == 0.5
    assert rewritten("<!--= tiers: file / 16 / float32 / of / memcpy / up | % -->1<!--/-->", records).count(">50<") == 1


def test_a_router_that_was_not_measured_at_a_size_has_a_dash_there(records: dict[str, Any]) -> None:
    sizes = {"ours": (2, 64), "dynamo": (2,)}
    row = {"trace": "chat", "share": 97.0, "balance": 1.5, "first_s": 2.0}
    rows = [row | {"router": router, "replicas": size} for router, each in sizes.items() for size in each]
    records["fleet"] = {"rows": rows}
    assert TABLES["fleet"](records).splitlines()[2:] == [
        "| chat | ours | 97.0 / 1.50 / 2.0 | 97.0 / 1.50 / 2.0 |",
        "| chat | dynamo | 97.0 / 1.50 / 2.0 | – |",
    ]


def test_the_command_reports_differences_and_rewrites_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recorded-core.json").write_text(json.dumps({"rows": [{"name": "a", "median": 2}]}))
    (tmp_path / "page.md").write_text("x <!--= core: a / median | .1f -->1.0<!--/-->\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "PAGES", ("page.md",))
    monkeypatch.setattr(figures, "load", lambda: load(tmp_path))
    assert figures.main([]) == 1
    assert "page.md: differs from the records" in capsys.readouterr().out
    assert figures.main(["--write"]) == 0
    assert (tmp_path / "page.md").read_text() == "x <!--= core: a / median | .1f -->2.0<!--/-->\n"
    assert figures.main([]) == 0
