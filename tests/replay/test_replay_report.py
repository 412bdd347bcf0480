"""The report of a replay: its contents, that it is self-contained, and that a browser draws it."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from machine import patience
from skips import BROWSER

from mainstem import cli
from mainstem.errors import BadArgument
from mainstem.replay.info import TraceInfo, info
from mainstem.replay.report.html import page, write_report
from mainstem.replay.report.series import looks, marked
from mainstem.replay.simulate.rows import Row, median_below
from mainstem.replay.simulate.sweep import sweep
from mainstem.replay.trace import Batch, Trace
from mainstem.settings.replay import Setup
from mainstem.units import show_seconds

POLICIES = ["lru", "lfu", "opt"]
CAPACITIES = [10, 40, 160]
VOID = {"meta", "input", "br"}
EVIL = "<script>alert(1)</script>\"'&<img src=http://example.com/x>"


def make_trace(name: str = "small") -> Trace:
    starts = [100 * (turn * turn % 29) for turn in range(400)]
    paths = [list(range(start, start + 1 + turn % 11)) for turn, start in enumerate(starts)]
    times = [3.0 * turn for turn in range(400)]
    batch = Batch.of(paths, block_size=16, time_s=times, tenant=[1 + turn % 2 for turn in range(400)])
    return Trace.of(batch, block_size=16, tenants=["", name, "b"], name=name)


@pytest.fixture(scope="module")
def found() -> tuple[TraceInfo, list[Row]]:
    trace = make_trace()
    return info(trace), sweep(trace, POLICIES, CAPACITIES)


class Page(HTMLParser):
    """The elements of a page; checks that each is closed by its own name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def curves(self) -> list[tuple[str, int]]:
        """Returns the names of curves, and the number of points of each."""
        found = []
        for (_, group), (_, line) in zip(self.elements, self.elements[1:], strict=False):
            if group.get("class") == "curve":
                found.append((group["data-name"] or "", len(re.findall("[ML]", line["d"] or ""))))
        return found


def test_a_curve_a_policy_with_a_point_a_capacity(found: tuple[TraceInfo, list[Row]]) -> None:
    curves = Counter(Page(page(*found)).curves())
    for policy in POLICIES:
        assert curves[policy, len(CAPACITIES)] == 4, "blocks and tokens, for wide and narrow screens"
    assert curves["unlimited cache", 2] == 4


def test_hits_over_time_at_each_capacity(found: tuple[TraceInfo, list[Row]]) -> None:
    spans = len(found[1][0].timeline.block_accesses)
    assert spans > 60
    curves = Page(page(*found)).curves()
    long = Counter(name for name, points in curves if 30 <= points <= 60)
    assert {policy: long[policy] for policy in POLICIES} == dict.fromkeys(POLICIES, 2 * len(CAPACITIES))


def test_of_one_capacity_there_are_bars_and_no_curves() -> None:
    trace = make_trace()
    rows = sweep(trace, POLICIES, [40])
    read = Page(page(info(trace), rows))
    assert not any(0 < points < 30 for _, points in read.curves())
    assert {f"Hit rate at 40 blocks ({marked(40, info(trace))})", "unlimited cache"} <= set(read.words)
    for row in rows:
        assert read.words.count(f"{100 * row.block_hit_rate:.2f} %") >= 2, "next to the bar, and in the table"


def test_a_name_in_the_legend_goes_with_its_curve(found: tuple[TraceInfo, list[Row]]) -> None:
    text = page(*found)
    legend = re.findall(r'<span data-at="(\d+)" tabindex="0"><svg.*?</svg>([^<]*)</span>', text)
    curves = re.findall(r'class="curve" data-at="(\d+)" data-name="([^"]*)"', text)
    assert set(legend) == set(curves)
    assert {name for _, name in curves} >= set(POLICIES)
    for at, _ in curves:
        assert f'.curve:not([data-at="{at}"])' in text


def test_repeated_policies_and_capacities_are_shown_once() -> None:
    trace = make_trace()
    once, twice = (page(info(trace), sweep(trace, ["lru"] * n, [10, 40] * n)) for n in (1, 2))
    assert Page(once).curves() == Page(twice).curves()


def test_age_and_idle_time_are_shown(found: tuple[TraceInfo, list[Row]]) -> None:
    words = Page(page(*found)).words
    assert {"median age", "median idle"} <= set(words)
    for row in found[1]:
        if idle := median_below(row.tiers[0].idle_s):
            assert f"< {show_seconds(idle)}" in words


def test_the_numbers_are_shown_below_the_charts(found: tuple[TraceInfo, list[Row]]) -> None:
    words = Page(page(*found)).words
    for row in found[1]:
        assert f"{100 * row.block_hit_rate:.2f} %" in words
        assert f"{row.evicted_blocks:,}" in words
    for reuse in found[0].reuses:
        assert f"{reuse.uses:,}" in words
    assert {"By tenant", "small", "b"} <= set(words)


def test_a_bar_a_distance(found: tuple[TraceInfo, list[Row]]) -> None:
    tips = [words for words in Page(page(*found)).words if re.fullmatch(r"[\d,]+( to [\d,]+)?: [\d,]+", words)]
    uses = [int(tip.split(": ")[1].replace(",", "")) for tip in tips]
    assert uses == 2 * [reuse.uses for reuse in found[0].reuses], "for wide and narrow screens"


def test_shares_of_tiers_are_all_blocks() -> None:
    trace = make_trace()
    rows = sweep(trace, ["lru"], [20], setup=Setup(host_blocks=60, storage_blocks=100, replicas=2, ttl=600))
    read = Page(page(info(trace), rows))
    widths = [
        float(found[1])
        for _, attributes in read.elements
        if attributes.get("title") and (found := re.match(r"width:([\d.]+)%", attributes.get("style") or ""))
    ]
    hits = [tier.block_hits for tier in rows[0].tiers]
    expected = [100 * blocks / rows[0].block_accesses for blocks in [*hits, rows[0].block_accesses - sum(hits)]]
    assert widths == pytest.approx(expected, abs=0.01)
    assert sum(share > 0 for share in widths) > 2
    assert {"host", "storage", "Replicas", "Time to live"} <= set(read.words)
    assert "lru by reuse distances" not in read.words, "it is the curve of one cache"


def test_flops_have_a_chart_if_they_were_counted() -> None:
    trace = make_trace()
    rows = sweep(trace, ["lru"], CAPACITIES, flops=lambda tokens, past: tokens * 2.0)
    assert "Prefill FLOPs" in Page(page(info(trace), rows)).words


def test_the_page_is_self_contained(found: tuple[TraceInfo, list[Row]]) -> None:
    text = page(*found)
    assert not re.search(r"//|\bsrc=|\bhref=|url\(|@import|<script|<link|<iframe|\bon\w+=", text)
    assert "default-src &#x27;none&#x27;" in text


def test_names_are_text() -> None:
    trace = make_trace(EVIL)
    rows = [replace(row, policy=EVIL) for row in sweep(trace, ["lru"], CAPACITIES)]
    text = page(info(trace), rows)
    read = Page(text)
    assert not {"script", "img"} & {name for name, _ in read.elements}
    assert "<script" not in text and "<img" not in text
    assert read.words.count(EVIL) > 3
    assert {attributes.get("data-name") for _, attributes in read.elements} >= {EVIL}


def test_many_policies_look_different() -> None:
    trace = make_trace()
    rows = [replace(row, policy=str(number)) for row in sweep(trace, ["lru"], [10]) for number in range(18)]
    assert len(set(looks(rows).values())) == 18


@pytest.mark.parametrize("paths", [[], [[1]], [[1], [1, 2]]], ids=["empty", "one", "two"])
def test_a_trace_with_next_to_nothing(paths: Sequence[Sequence[int]]) -> None:
    trace = Trace.of(Batch.of(paths, block_size=1), block_size=1, name="tiny")
    text = page(info(trace), sweep(trace, ["lru", "opt"], [1]))
    Page(text)
    assert not re.search(r"\b(nan|inf)\b", text)


def test_a_page_of_nothing_is_refused(found: tuple[TraceInfo, list[Row]], tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="rows"):
        write_report(tmp_path / "page.html", found[0], [])


def test_a_name_that_is_not_valid_unicode_is_written(found: tuple[TraceInfo, list[Row]], tmp_path: Path) -> None:
    write_report(tmp_path / "page.html", replace(found[0], trace="a\udcff"), found[1])
    assert "a\\udcff" in (tmp_path / "page.html").read_text(encoding="utf-8")


# --- in a browser -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> str:
    return BROWSER.need()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    make_trace().save(folder / "small.mstrace")
    chosen = ["--capacity", ",".join(map(str, CAPACITIES)), "--policy", ",".join(POLICIES)]
    assert cli.main(["replay", str(folder / "small.mstrace"), *chosen, "--report", str(folder / "out.html")]) == 0
    return folder / "out.html"


def browse(chromium: str, report: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    profile = f"--user-data-dir={report.parent / 'profile'}"
    command = [chromium, *common, profile, *arguments, report.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done


def test_a_browser_reads_the_page_as_it_was_written(chromium: str, report: Path) -> None:
    seen = Page(re.sub("^<!DOCTYPE html>", "", browse(chromium, report, "--dump-dom").stdout))
    assert seen.curves() == Page(report.read_text(encoding="utf-8")).curves()
    assert {name for name, points in seen.curves() if points >= len(CAPACITIES)} >= set(POLICIES)


@pytest.mark.parametrize("width", [1000, 500])  # the narrowest window that it opens
def test_a_browser_draws_the_curves(
    chromium: str, report: Path, found: tuple[TraceInfo, list[Row]], tmp_path: Path, width: int
) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow, which reads the screenshot, is not installed")
    picture = tmp_path / "page.png"
    browse(chromium, report, f"--screenshot={picture}", f"--window-size={width},1600", "--hide-scrollbars")
    with image.open(picture) as shot:
        colours = Counter({colour: count for count, colour in shot.convert("RGB").getcolors(1 << 24)})
    for policy, look in looks(found[1]).items():
        red, green, blue = (int(look.colour[at : at + 2], 16) for at in (1, 3, 5))
        assert colours[red, green, blue] > 300, f"{policy} is not visible"
