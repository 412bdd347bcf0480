"""A run fails when it skips what it should not."""

from __future__ import annotations

from pathlib import Path

import pytest
from skips import Allowed, judge

pytest_plugins = ["pytester"]

ROWS = (Allowed("no drum", lambda: True, 2), Allowed("no horn", lambda: False, 2))


def test_skips_are_excused_up_to_the_limit() -> None:
    assert judge([], ROWS) == []
    assert judge(["no drum: none is sold here"] * 2, ROWS) == []
    assert judge(["no drum"] * 3, ROWS) == ["3 tests are skipped because of 'no drum', 2 are allowed"]


def test_a_lane_has_no_limit_since_its_record_says_that_it_ran() -> None:
    assert judge(["no lane here"] * 100, (Allowed("no lane", lambda: True, None),)) == []


def test_a_skip_that_nothing_here_excuses_is_named() -> None:
    assert judge(["no horn"], ROWS) == ["skipped, though nothing on this machine excuses it: no horn"]
    assert judge(["I feel tired"], ROWS) == ["skipped, though nothing on this machine excuses it: I feel tired"]


RUN = """
import pytest
from skips import Skips

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips())
"""


@pytest.mark.parametrize(
    ("code", "workers"),
    [
        ("import pytest\n\ndef test_a(): pytest.skip('not today')", ()),
        ("import pytest\npytest.skip('not today', allow_module_level=True)", ("-n", "1")),
        ("import pytest\n\n@pytest.mark.skipif(True, reason='not today')\ndef test_a(): pass", ("-n", "1")),
    ],
)
def test_a_run_that_skips_without_an_excuse_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, code: str, workers: tuple[str, ...]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makeconftest(RUN)
    pytester.makepyfile(test_one="def test_b(): pass", test_two=code)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["skipped, though nothing on this machine excuses it: not today"])
