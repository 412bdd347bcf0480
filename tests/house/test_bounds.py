"""Each number that limits, fades, ages or times out has a test that moves it: `bounds.toml` names it.

`python -m scripts.bounds` changes each bound and runs its test, which has to fail.
"""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatchcase
from functools import cache

import pytest

from scripts import bounds

TABLE = bounds.table()
ROWS = list(bounds.rows(TABLE))


@cache
def constants() -> Counter[tuple[str, str]]:
    """How many constants there are of each file and name."""
    return Counter((constant.file, constant.name) for constant in bounds.constants())


def test_each_constant_has_one_row() -> None:
    kinds: dict[tuple[str, str], list[str]] = {constant: [] for constant in constants()}
    for kind, files, names in ROWS:
        for constant in _named(files, names):
            kinds[constant].append(kind)
    wrong = [f"{file}: {name}: {has or 'no row'}" for (file, name), has in kinds.items() if len(has) != 1]
    assert not wrong, "\n".join(["name one kind, or the test that moves it:", *wrong])


def test_each_row_has_its_constant() -> None:
    gone = [f"{kind}: {files}: {names}" for kind, files, names in ROWS if not _named(files, names)]
    assert not gone, "\n".join(gone)


def _named(files: str, names: str) -> list[tuple[str, str]]:
    """The constants of a row."""
    if "*" not in files + names:
        return [(files, names)] if (files, names) in constants() else []
    return [(file, name) for file, name in constants() if fnmatchcase(file, files) and fnmatchcase(name, names)]


def test_each_kind_says_why_its_constants_bound_nothing() -> None:
    assert TABLE["still"].keys() == bounds.STILL.keys()


def test_each_named_test_exists() -> None:
    missing, known = [], dict[str, set[str]]()
    for (file, name), test in bounds.tests(TABLE).items():
        path, _, function = test.partition("::")
        if path not in known:
            known[path] = set(_TESTS.findall((bounds.ROOT / path).read_text()))
        if function not in known[path]:
            missing.append(f"{file}: {name}: {test}")
    assert not missing, "\n".join(missing)


_TESTS = re.compile(r"^(?:(?:async )?def|void) (\w+)\(", re.MULTILINE)  # in Python, and in C++


def test_what_no_test_moves_yet_becomes_less() -> None:
    """With each new test the number falls; a new constant comes with its test."""
    assert sum(kind == "open" for kind, _, _ in ROWS) == TABLE["open_at_most"]


# ---------------------------------------------------------------- how constants are found

PYTHON = """
MOST = 3  # é
_A_S, _B = 1 << 4, (2.5, 4)
name = 5
WORD = "x"
IS = True


class Store:
    LIMIT = MOST * 2
    count: int = 0
    wait_s: float = 1.0

    def __init__(self, timeout_s: float = 5.0, *, limit: int = 1, size: int = 9) -> None:
        self.kept = deque(maxlen=20)
        self.called = call(timeout=None, maxsize=7, size=3)
"""
CORE = """
constexpr std::size_t kRead = 8;  // of kMany = 9;
/* constexpr int kGone = 1; */
struct Ranking {
  static constexpr double kHalf_s = 60, kUse = 0.4;
  inline constexpr std::uint32_t kBig = std::size_t{2} << 20;
  static constexpr bool kIs = true;
  static constexpr double width(int bucket) { return 1; }
};
"""


def test_constants_of_python() -> None:
    found = bounds.of_python("a.py", PYTHON)
    assert [(each.name, each.value) for each in found] == [
        ("MOST", "3"),
        ("_A_S", "1 << 4"),
        ("_B", "(2.5, 4)"),
        ("Store.LIMIT", "MOST * 2"),
        ("Store.wait_s", "1.0"),
        ("Store.__init__.timeout_s", "5.0"),
        ("Store.__init__.maxlen", "20"),
        ("Store.__init__.maxsize", "7"),
    ]
    text = PYTHON.encode()
    assert all(text[each.begin : each.end].decode() == each.value for each in found)


def test_constants_of_the_core() -> None:
    found = bounds.of_cpp("a.h", CORE)
    assert [(each.name, each.value) for each in found] == [
        ("kRead", "8"),
        ("kHalf_s", "60"),
        ("kUse", "0.4"),
        ("kBig", "std::size_t{2} << 20"),
    ]
    assert all(CORE[each.begin : each.end].strip() == each.value for each in found)


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        ("3", ["(3) * 1000", "(3) + 1"]),
        ("1u << 4", ["(1u << 4) * 1000", "(1u << 4) + 1"]),
        ("0.5", ["(0.5) * 1000"]),
        ("1 << 20", ["(1 << 20) * 1000"]),
        ("MOST * 2", ["(MOST * 2) * 1000"]),
        ("(0.1, 2)", ["tuple(1000 * _one for _one in (0.1, 2))"]),
    ],
)
def test_a_bound_is_changed_to_a_thousand_times_as_much_and_a_count_to_one_more(value: str, changes: list[str]) -> None:
    assert bounds.Constant("a", "A", value, 0, 0).changes == changes


def test_no_constant_is_found_twice_under_one_name_in_a_bound() -> None:
    """One test is to move one number."""
    assert not [key for key in bounds.tests(TABLE) if constants()[key] != 1]
