"""Lanes: a lane that passed counts as passed until something that it depends on changes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests import lanes
from tests.lanes import LANES, Lane, changed, check, digests, run
from tests.uses import imports

LANE = Lane("drum", ("test_drum.py",), ("drum.py", "parts/*.txt", "test_drum.py"), ("skin",))
PASSES = "def test_a(): pass\n\ndef test_b(): pass\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "parts").mkdir()
    (tmp_path / "tests" / "recorded").mkdir(parents=True)
    (tmp_path / "drum.py").write_text("loud = True\n")
    (tmp_path / "parts" / "a.txt").write_text("a")
    (tmp_path / "test_drum.py").write_text(PASSES)
    (tmp_path / "constraints.txt").write_text("skin==1.0\nskinny==3.0\n")
    return tmp_path


def pass_two(_lane: Lane, _root: Path) -> tuple[int, str]:
    return 0, "..  [100%]\n2 passed in 0.01s\n"


def _never(target: str) -> int:
    raise AssertionError(target)


def test_an_unchanged_lane_counts_as_passed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(LANE, root) == 0
    record = json.loads((root / LANE.record).read_text())
    assert record["passed"] == 2
    assert record["digests"].keys() == {"drum.py", "parts/a.txt", "test_drum.py", "constraints.txt: skin"}
    assert changed(LANE, root) == []
    capsys.readouterr()
    assert check([LANE], root, _never) == 0
    assert capsys.readouterr().out.startswith("lane drum: 2 passed on ")


def test_a_lane_may_have_an_interpreter_of_its_own(root: Path) -> None:
    own = root / "own"
    own.write_text("#!/bin/sh\necho \"$@\"\necho '3 passed in 0.01s'\n")
    own.chmod(0o755)
    assert run(replace(LANE, python="own"), root) == 0
    assert json.loads((root / LANE.record).read_text())["passed"] == 3


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("drum.py", "loud = False\n", "drum.py"),
        ("parts/b.txt", "b", "parts/b.txt"),
        ("parts/a.txt", "c", "parts/a.txt"),
        ("constraints.txt", "skin==1.1\nskinny==3.0\n", "constraints.txt: skin"),
    ],
)
def test_a_lane_runs_again_when_what_it_depends_on_has_changed(
    root: Path, capsys: pytest.CaptureFixture[str], path: str, text: str, named: str
) -> None:
    run(LANE, root, pass_two)
    (root / path).write_text(text)
    assert changed(LANE, root) == [named]
    made: list[str] = []
    assert check([LANE], root, lambda target: made.append(target) or 0) == 0  # type: ignore[func-returns-value]
    assert check([LANE], root, lambda target: made.append(target) or 2) == 1  # type: ignore[func-returns-value]
    assert made == ["test-drum"] * 2
    assert named in capsys.readouterr().out


def test_what_it_does_not_depend_on_may_change(root: Path) -> None:
    run(LANE, root, pass_two)
    (root / "horn.py").write_text("")
    (root / "constraints.txt").write_text("skin==1.0\nskinny==4.0\n")
    assert check([LANE], root, _never) == 0


def test_what_python_compiles_is_no_file_of_a_lane(root: Path) -> None:
    lane = replace(LANE, files=("parts/**/*.*", "test_drum.py"))
    assert run(lane, root, pass_two) == 0
    (root / "parts" / "__pycache__").mkdir()
    (root / "parts" / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"0")
    assert changed(lane, root) == []


def test_without_a_record_it_fails_and_says_what_makes_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check([LANE], root, _never) == 1
    assert "run `make test-drum` and commit tests/recorded/drum.json" in capsys.readouterr().out


def test_without_a_record_it_runs_if_it_needs_no_environment_of_its_own(root: Path) -> None:
    made: list[str] = []
    lane = replace(LANE, own=False)
    assert check([lane], root, lambda target: made.append(target) or 0) == 0  # type: ignore[func-returns-value]
    assert made == ["test-drum"]
    assert run(lane, root, lambda _lane, _root: (0, "1 passed, 1 skipped in 0.01s\n")) == 0
    assert check([lane], root, _never) == 0


def test_lanes_that_would_take_longer_than_there_is_time_are_named_and_not_run(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now, made = [0.0], list[str]()
    lanes = [replace(LANE, name=name, own=own) for name, own in (("long", False), ("short", False), ("apart", True))]
    for lane, seconds in zip(lanes, (50, 10, 70), strict=True):
        assert run(lane, root, pass_two) == 0
        record = json.loads((root / lane.record).read_text())
        (root / lane.record).write_text(json.dumps({**record, "seconds": seconds}))

    def make(target: str) -> int:
        made.append(target)
        now[0] += 25.0  # slower than before
        return 0

    assert check(lanes, root, make, seconds=5.0, clock=lambda: now[0]) == 0  # nothing has changed
    assert "nightly" not in capsys.readouterr().out
    (root / "drum.py").write_text("loud = False\n")
    assert check(lanes, root, make, seconds=74.0, clock=lambda: now[0]) == 0
    assert made == ["test-short", "test-apart"]  # which has no other time to run
    assert "lane long: is left to `make nightly`" in capsys.readouterr().out
    assert check(lanes, root, make, seconds=75.0, clock=lambda: now[0]) == 0
    assert made[2:] == ["test-short", "test-long", "test-apart"]


def test_what_a_machine_leaves_out_is_not_recorded(root: Path) -> None:
    def lacking(_lane: Lane, root: Path) -> tuple[int, str]:
        (root / lanes.LEFT_OUT).parent.mkdir()
        (root / lanes.LEFT_OUT).write_text("tests/test_drum.py::test_a\n")
        return 0, "1 passed, 1 skipped in 0.01s\n"

    assert run(replace(LANE, own=False), root, lacking) == 0
    assert not (root / LANE.record).exists()


def test_a_lane_may_be_a_command_with_variables(root: Path) -> None:
    (root / "horn.py").write_text("import os\nassert os.environ['LOUD'] == '1'\n")
    lane = Lane("horn", ("-m", "horn"), ("horn.py",), environment=(("LOUD", "1"),), own=False)
    assert run(lane, root) == 0
    assert run(replace(lane, environment=(("LOUD", "0"),)), root) == 1


def test_a_lane_depends_on_all_that_its_files_import(root: Path) -> None:
    package = root / "src" / "mainstem"
    (package / "core").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "near.py": "from mainstem import far",
        "far.py": "",
        "apart.py": "",
        "core/tree.h": "",
        "errors.py": "",
    }.items():
        (package / name).write_text(text)
    (root / "test_drum.py").write_text("def test_a():\n    import mainstem.near\n")
    lane = Lane("drum", (), imports=("test_*.py",))

    def changes(path: Path) -> bool:
        imports.cache_clear()
        before = digests(lane, root)
        path.write_text(path.read_text() + "# more\n")
        imports.cache_clear()
        return digests(lane, root) != before

    names = ("near.py", "far.py", "core/tree.h", "__init__.py", "apart.py", "errors.py")
    assert [changes(package / name) for name in names] == [True] * 4 + [False] * 2
    (root / "test_drum.py").write_text("import subprocess\n")
    assert changes(package / "apart.py")


@pytest.mark.parametrize(
    ("status", "output"), [(1, "1 failed, 1 passed in 0.01s\n"), (0, "1 passed, 1 skipped in 0.01s\n"), (5, "")]
)
def test_a_failure_or_a_skip_leaves_the_record_as_it_was(root: Path, status: int, output: str) -> None:
    run(LANE, root, pass_two)
    before = (root / LANE.record).read_text()
    (root / "drum.py").write_text("loud = False\n")
    assert run(LANE, root, lambda _lane, _root: (status, output)) == 1
    assert (root / LANE.record).read_text() == before
    assert changed(LANE, root) == ["drum.py"]


def test_a_file_that_is_nowhere_is_an_error(root: Path) -> None:
    (root / "parts" / "a.txt").unlink()
    with pytest.raises(FileNotFoundError, match="no parts/"):
        digests(LANE, root)
    with pytest.raises(FileNotFoundError, match="does not pin horn"):
        digests(Lane("horn", (), ("drum.py",), ("horn",)), root)


def test_the_command_takes_all_lanes_or_those_that_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked: list[list[str]] = []
    given: list[float] = []

    def check(chosen: list[Lane], seconds: float) -> int:
        given.append(seconds)
        checked.append([lane.name for lane in chosen])
        return 0

    monkeypatch.setattr(lanes, "check", check)
    assert lanes.main(["check"]) == lanes.main(["check", LANES[0].name]) == 0
    assert lanes.main(["check", "slow"]) == lanes.main(["check", "simulation", "--seconds", "9"]) == 0
    slow = [lane.name for lane in LANES if lane.name.startswith("slow-")]
    assert checked == [[lane.name for lane in LANES], [LANES[0].name], slow, ["simulation"]]
    assert given == [math.inf] * 3 + [9.0]
    with pytest.raises(SystemExit):
        lanes.main(["check", "drum"])
    assert "no such lane: drum" in capsys.readouterr().err


def test_every_lane_has_its_files_its_target_and_its_record() -> None:
    """The imports of its files are not read: that takes seconds, and another test does it."""
    top = Path(__file__).parents[2]
    rules = re.findall(r"^(test-.*?):", (top / "Makefile").read_text(), re.MULTILINE)
    for lane in LANES:
        assert lane.files or lane.imports
        digests(replace(lane, imports=()))
        assert all(any(top.glob(pattern)) for pattern in lane.imports), lane.name
        targets = {target.replace("%", lane.name.removeprefix("slow-")) for rule in rules for target in rule.split()}
        assert f"test-{lane.name}" in targets
        assert (top / lane.record).exists() or not lane.own, lane.name


def test_every_slow_test_is_in_a_lane() -> None:
    """But for those of Gemma, which CI runs by themselves."""
    tests = Path(__file__).parents[1].rglob("test_*.py")
    marked = {path.name for path in tests if re.search(r"pytest\.mark\.slow|slow_but\(", path.read_text())}
    assert marked - {Path(each).name for lane in LANES for each in lane.tests} == {"test_gemma.py"}
