"""Operators change small sources of Python and C++, and leave the rest alone."""

from __future__ import annotations

import ast

import pytest

from mutation import native_operators, python_operators
from mutation.python_operators import OURS
from mutation.sample import Mutant
from mutation.sites import Site


def changes(source: str, operator: str) -> list[str]:
    """Returns the sources that an operator makes of a source of Python, as it is written."""
    sites = [site for site in python_operators.sites(source) if site.operator == operator]
    return [changed for site in sites if (changed := python_operators.change(source, site)) is not None]


def native(source: str, operator: str) -> list[str]:
    """Returns the sources that an operator makes of a source of C++, as it is written."""
    sites = [site for site in native_operators.sites(source) if site.operator == operator]
    return [changed for site in sites if (changed := native_operators.change(source, site)) is not None]


@pytest.mark.parametrize("operator", OURS, ids=lambda operator: operator.__name__)
def test_an_operator_of_ours_makes_its_examples(operator: type[python_operators.Operator]) -> None:
    for example in operator.examples():
        sites = [s for s in python_operators.sites(example.pre_mutation_code) if s.operator == operator.__name__]
        (site,) = (site for site in sites if site.place == example.occurrence)
        assert python_operators.change(example.pre_mutation_code, site) == example.post_mutation_code


@pytest.mark.parametrize(
    ("operator", "source", "expected"),
    [
        ("ReplaceComparisonOperator_Lt_LtE", "x = a < b\n", ["x = a <= b\n"]),
        ("ReplaceBinaryOperator_Add_Sub", "x = a + b + c\n", ["x = a - b + c\n", "x = a + b - c\n"]),
        ("ReplaceAndWithOr", "x = a and b\n", ["x = a or b\n"]),
        ("NumberReplacer", "x = f(3)\n", ["x = f( 4)\n", "x = f( 2)\n"]),
        ("DeleteStatement", "a = 1\nf()\n", ["pass\nf()\n", "a = 1\npass\n"]),
        ("OmitReset", "s.a = []\ns.b = 2\ndel s.c[0]\n", ["pass\ns.b = 2\ndel s.c[0]\n", "s.a = []\ns.b = 2\npass\n"]),
        ("ForceBranch", "x = [y for y in z if y]\n", ["x = [y for y in z if True]\n"]),
        ("SwapArguments", "f(a, a, b=1)\n", []),
        ("SwapArguments", "x = max(a, b)\n", []),
        ("DeleteStatement", "A = TypeVar('A')\n", []),
        ("SwapArguments", "x = a.max(a, b)\n", ["x = a.max(b, a)\n"]),
        ("OmitArgument", "f(a=1)\n", []),
    ],
)
def test_a_place_is_changed_and_nothing_else(operator: str, source: str, expected: list[str]) -> None:
    assert changes(source, operator) == expected


@pytest.mark.parametrize(
    "source",
    [
        "x: int | None",
        "def f(a: int | None) -> int | None: ...",
        "assert a < b, c + 1",
        "from a import (b, c)",
        "if TYPE_CHECKING:\n    x = 1\n",
        "__slots__ = ('a', 'b')",
        "def f(a, *, b): ...",
        "def f(a, /, b): ...",
    ],
)
def test_what_runs_nothing_stays(source: str) -> None:
    left = {"ForceBranch", "AddNot"} if "TYPE_CHECKING" in source else {"OmitElement"} if "slots" in source else set()
    assert {site.operator for site in python_operators.sites(source)} <= left


def test_lengths_that_zip_asserts_and_arguments_of_decorators_stay() -> None:
    source = "@dataclass(frozen=True)\nclass A:\n    b = zip(c, d, strict=True)\n"
    found = {site.operator for site in python_operators.sites(source)}
    assert found == {"RemoveDecorator", "DeleteStatement", "SwapArguments"}


def test_every_change_of_python_is_python() -> None:
    loop = "    for c in range(1, a):\n        if c > b and not a:\n            return g(max(c, -b), a)\n"
    source = f"def f(a, b=2):\n{loop}    raise E\n"
    sites = python_operators.sites(source)
    sources = [python_operators.change(source, site) for site in sites]
    assert len(sites) > 20
    assert all(each is not None and ast.parse(each) and each != source for each in sources)


@pytest.mark.parametrize(
    ("operator", "line", "expected"),
    [
        ("ReplaceOperator", "x = a < b;", ["x = a <= b;", "x = a >= b;"]),
        ("ReplaceOperator", "x += 1;", ["x -= 1;"]),
        ("DeleteSign", "x = !a;", ["x =  a;"]),
        ("NumberReplacer", "x = 3u;", ["x = (3u + 1);", "x = (3u - 1);"]),
        ("TimesTen", "x = 0;", []),
        ("TimesTen", "x = 64;", ["x = (64 * 10);"]),
        ("SwapBoolean", "x = true;", ["x = false;"]),
        ("SwapJump", "break;", ["continue;"]),
        ("AddNot", "if (a == b) c();", ["if (!(a == b)) c();"]),
        ("ForceBranch", "while (a) c();", ["while (false) c();"]),
        ("ForceBranch", "x = a ? b : c;", ["x = true ? b : c;", "x = false ? b : c;"]),
        ("DeleteStatement", "node.count = 4;", [";"]),
        ("OmitReset", "node.count = 0;", [";"]),
        ("OmitReset", "free_.clear();", [";"]),
        ("SwapFunction", "x = std::min(a, b);", ["x = std::max(a, b);"]),
        ("SwapArguments", "f(a, b, b);", ["f(b, a, b);"]),
        ("ZeroIterationForLoop", "for (int a : b) { c(); }", ["for (int a : b) { break; c(); }"]),
        ("ReplaceOperator", "assert(a < b);", []),
        ("NumberReplacer", "std::array<int, 3> a;", []),
    ],
)
def test_a_place_of_the_core_is_changed_and_nothing_else(operator: str, line: str, expected: list[str]) -> None:
    made = native(f"void g() {{\n  {line}\n}}\n", operator)
    assert made == [f"void g() {{\n  {each}\n}}\n" for each in expected]


def test_a_mutant_keeps_its_name_where_its_line_moves() -> None:
    site = Site("NumberReplacer", 3, 4, "x = 1", 7)
    moved = Site("NumberReplacer", 9, 4, "x = 1", 9)
    assert Mutant("a.py", site, 0).key == Mutant("a.py", moved, 0).key != Mutant("a.py", moved, 1).key
