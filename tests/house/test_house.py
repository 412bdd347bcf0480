"""The counts of scripts/house.py, on small files."""

from __future__ import annotations

import re

import pytest

from scripts import house

PYTHON = '''"""A module."""

# A comment.
from mainstem.errors import Thing


class Hall(Thing):
    """A class."""

    def open(self) -> str:
        """Opens."""
        return (
            "door"  # a comment
        )
'''
CORE = """// A comment; int f(int x) {
#include <x>

class Hall {
 public:
  int open() const;
  int close();
 private:
  int lock(int key);  // "
};

int Hall::open() const {  /* a
  longer comment */
  return 1;  // "

}
"""


def test_code_is_counted_without_comments_blanks_and_docstrings() -> None:
    files = {
        "src/mainstem/hall/door.py": PYTHON,
        "src/mainstem/errors.py": "x = 1\n",
        "src/mainstem/core/csrc/tree/hall.h": CORE,
        "tests/test_hall.py": "x = 1\n\n",
    }
    found = house.survey(files)
    assert found.lines == {
        "src/mainstem/hall": 6,
        "src/mainstem": 1,
        "src/mainstem/core/csrc/tree (C++)": 11,
        "tests": 1,
    }
    assert found.functions["Python"] == [(4, "src/mainstem/hall/door.py: open")]
    assert found.functions["C++"] == [(2, "src/mainstem/core/csrc/tree/hall.h: Hall::open")]
    assert sorted(found.classes) == [
        (1, "src/mainstem/hall/door.py: Hall"),
        (3, "src/mainstem/core/csrc/tree/hall.h: Hall"),
    ]
    assert found.importers == {"mainstem.errors": {"mainstem.hall.door"}}


def test_a_class_of_the_core_has_public_and_private_functions() -> None:
    assert house.cpp_classes(CORE) == [("Hall", 2, 1)]


@pytest.mark.parametrize(
    "text",
    [
        "1.50s call     tests/test_a.py::x[1.0s call]\n0.25s setup    tests/test_a.py::test_y\n3 passed in 2.00s\n",
        '<testsuites><testsuite><testcase classname="tests.test_a" time="1.75"/></testsuite></testsuites>',
    ],
)
def test_times_are_added_up_by_file(text: str) -> None:
    assert house.times(text) == {"tests/test_a.py": 1.75}


def test_two_commits_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    one = house.survey({"src/mainstem/hall/door.py": PYTHON})
    (lines, *_) = house.shape([one, house.survey({"src/mainstem/hall/door.py": "x = 1\n"})])
    assert re.search(r"^\| Python in src +\| 6 +\| 1 +\| 1 +\| 1 +\|$", lines, re.MULTILINE)
    assert "src/mainstem/__init__.py" in house.sources("HEAD")
    assert house.main(["--changes", "HEAD"]) == 0
    assert "## Changes" in capsys.readouterr().out
