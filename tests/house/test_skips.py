"""A run fails when it skips what it should not, and says what it left out for want of a tool."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from machine import patience
from skips import BROWSER, COMPILER, OPENSSL, PROMETHEUS, SPIN, TOOLS, VALGRIND, Excuse, Tool, excuse_of

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
RUN = """
import pytest
from pathlib import Path
from skips import Excuse, Skips

EXCUSES = (Excuse("no drum", lambda: True, "drums"), Excuse("no horn", lambda: True), Excuse("no harp", lambda: False))

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(Path("kept") / "left-out", EXCUSES))
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder whose runs have the plugin, with three excuses."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "tests", ROOT))))
    pytester.makeconftest(RUN)
    return pytester


def test_only_an_excuse_that_holds_here_excuses() -> None:
    excuses = (Excuse("no drum", lambda: True), Excuse("no harp", lambda: False))
    assert excuse_of("no drum: none is sold here", excuses) is excuses[0]
    assert excuse_of("no harp", excuses) is None
    assert excuse_of("I feel tired, and no drum", excuses) is None


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_a_run_that_skips_without_an_excuse_fails(run: pytest.Pytester, workers: tuple[str, ...]) -> None:
    run.makepyfile(
        test_one="import pytest\n\ndef test_a(): pytest.skip('no harp')",
        test_two="import pytest\npytest.skip('no lute', allow_module_level=True)",
        test_three="import pytest\n\n@pytest.mark.skipif(True, reason='no lyre')\ndef test_a(): pass",
        test_four="def test_a(): pass",
    )
    result = run.runpytest_subprocess("-p", "no:cacheprovider", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    for thing in ("harp", "lute", "lyre"):
        result.stdout.fnmatch_lines([f"skipped, though nothing on this machine excuses it: no {thing}"])


def test_what_a_machine_lacks_fails_no_run_however_much_it_is_and_can_be_run_later(run: pytest.Pytester) -> None:
    many = "import pytest\n\n@pytest.mark.parametrize('x', range(200))\ndef test_a(x): pytest.skip('no drum')"
    run.makepyfile(test_one=many, test_two="import pytest\n\ndef test_b(): pytest.skip('no horn')")
    result = run.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines([" 200 no drum", "To run them, too: apt-get install drums && *pytest * @kept/left-out"])
    result.stdout.no_fnmatch_line("*no horn")  # nothing that could be installed
    again = run.runpytest_subprocess("-p", "no:cacheprovider", "@kept/left-out")
    again.assert_outcomes(skipped=200)


def test_a_complete_run_says_nothing_of_it_and_forgets_what_an_earlier_one_left_out(run: pytest.Pytester) -> None:
    run.makepyfile("def test_a(): pass")
    kept = run.path / "kept" / "left-out"
    kept.parent.mkdir()
    kept.write_text("test_old.py::test_a\n")
    result = run.runpytest_subprocess("-p", "no:cacheprovider")
    result.stdout.no_fnmatch_line("*left out*")
    assert not kept.exists()


# --- optional tools -----------------------------------------------------------------------------------------------


def path_without(programs: Iterable[str], folder: Path) -> str:
    """Returns a PATH with all programs of this machine's but some."""
    unwanted = set(programs)
    for place in os.get_exec_path():
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if program.name not in unwanted and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return str(folder)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_tool_is_missing_without_any_of_its_programs_and_there_with_one_of_each_group(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for group in tool.programs:
        assert tool.missing
        assert excuse_of(tool.reason) is not None
        (tmp_path / group[-1]).touch(0o755)
    assert not tool.missing
    assert excuse_of(tool.reason) is None
    assert tool.need() == str(tmp_path / tool.programs[0][-1])


NEEDING = {
    BROWSER: "tests/replay/test_replay_report.py::test_a_browser_draws_the_curves",
    COMPILER: "tests/core/test_native.py::test_a_compiler_and_nanobind_alone_build_the_core",
    OPENSSL: "tests/storage/test_storage_redis.py::test_tls",
    PROMETHEUS: "tests/fleet/test_deploy.py::test_every_rule_is_evaluated",
    SPIN: "tests/core/test_spin.py::test_a_model_that_does_not_compile_is_told",
    VALGRIND: "tests/core/test_native.py::test_instructions_have_not_grown",
}
"""A test that needs each tool."""


@pytest.mark.deadline
@pytest.mark.parametrize("lacks", [NEEDING.keys() - {VALGRIND}, {VALGRIND}], ids=["most", "valgrind"])
def test_a_machine_without_tools_runs_green_and_says_how_to_get_each(lacks: set[Tool], tmp_path: Path) -> None:
    """The test that needs valgrind needs a compiler first."""
    assert {*NEEDING} == {*TOOLS}
    path = path_without([program for tool in lacks for group in tool.programs for program in group], tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c"]
    command += [str(ROOT / "pyproject.toml"), *(NEEDING[tool] for tool in lacks)]
    env = {**os.environ, "PATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stdout
    for tool in lacks:
        assert re.search(rf"^ +\d+ {re.escape(tool.reason)}$", done.stdout, re.MULTILINE), done.stdout
    left_out = (tmp_path / ".pytest_cache" / "left-out").read_text().split()
    needing = {NEEDING[tool].rpartition("::")[2] for tool in lacks}
    assert {test.partition("[")[0].rpartition("::")[2] for test in left_out} == needing


def test_each_tool_is_looked_for_in_the_table_alone() -> None:
    programs = {program for tool in TOOLS for group in tool.programs for program in group}
    for path in (ROOT / "tests").rglob("*.py"):
        found = re.findall(r"shutil\.which\(\"([^\"]+)\"\)", path.read_text())
        assert not programs & {*found}, path
