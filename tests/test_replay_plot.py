"""The image of a replay."""

from __future__ import annotations

import struct
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from mainstem import cli
from mainstem.errors import BackendUnavailable, BadArgument
from mainstem.replay.info import info
from mainstem.replay.report.plot import check_plot, write_plot
from mainstem.replay.simulate.sweep import sweep
from mainstem.replay.trace import Batch, Trace
from mainstem.settings.replay import Setup

BLOCKS = [[turn % 3, 10 + turn % 6, 100 + turn % 30] for turn in range(200)]


def make_trace(name: str = "small") -> Trace:
    return Trace.of(Batch.of(BLOCKS, block_size=16), block_size=16, name=name)


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'mainstem[plot]'")


@pytest.mark.usefixtures("matplotlib")
def test_the_command_draws_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trace().save(tmp_path / "small.mstrace")
    target = tmp_path / "out.png"
    assert cli.main(["replay", str(tmp_path / "small.mstrace"), "--capacity", "5,20", "--plot", str(target)]) == 0
    header = target.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width >= 1200 and height >= 800


@pytest.mark.usefixtures("matplotlib")
def test_names_are_no_formulas(tmp_path: Path) -> None:
    trace = make_trace("$x_{$ <b>")
    rows = sweep(trace, ["lru", "opt"], [5, 6, 20])
    rows = [replace(row, policy="_$mine$") if row.policy == "lru" else row for row in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_plot(tmp_path / "out.svg", info(trace), rows)
    assert (tmp_path / "out.svg").stat().st_size > 10_000


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize("paths", [[], [[1]], BLOCKS], ids=["empty", "one", "many"])
def test_one_capacity_and_small_traces(tmp_path: Path, paths: list[list[int]]) -> None:
    trace = Trace.of(Batch.of(paths, block_size=16), block_size=16, name="tiny")
    rows = sweep(trace, ["lru"], [2], setup=Setup(host_blocks=4))
    write_plot(tmp_path / "out.png", info(trace), rows)
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_other_kinds_of_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadArgument, match=r"\.png, \.svg, \.pdf"):
        check_plot(tmp_path / "out.gif")
    assert cli.main(["replay", "no-trace.jsonl", "--plot", "out.gif"]) != 0
    assert "--plot out.gif" in capsys.readouterr().err, "before the trace is read"


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailable, match=r"mainstem\[plot\]"):
        check_plot("out.png")


@pytest.mark.usefixtures("matplotlib")
def test_an_image_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="rows"):
        write_plot(tmp_path / "out.png", info(make_trace()), [])
