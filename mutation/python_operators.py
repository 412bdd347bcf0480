"""Changes of a line of Python: operators of cosmic-ray, and those that it lacks, written as its plugins are.

cosmic-ray gives an operator the nodes of a parso tree: `mutation_positions(node)` says where it can change a node, and
`mutate(node, index)` changes it. Of its 213 operators those are used whose mutants differ in kind: another comparison
at the bound, or the opposite one, but not each of eight for each other. Annotations, assertions, docstrings and the
arguments of decorators stay.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from cosmic_ray.ast import Visitor, get_ast  # type: ignore[import-untyped]
from cosmic_ray.operators.operator import Example, Operator  # type: ignore[import-untyped]
from cosmic_ray.operators.provider import OperatorProvider  # type: ignore[import-untyped]

from mutation.sites import Site

_Node = Any  # of parso, whose nodes have the children that their grammar gives them
_Positions = Iterator[tuple[tuple[int, int], tuple[int, int]]]

_BINARY = (
    "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul RShift_LShift LShift_RShift BitOr_BitAnd "
    "BitAnd_BitOr BitXor_BitOr"
)
_COMPARISONS = (
    "Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Eq_LtE Eq_GtE"
)
_OTHERS = (
    "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue "
    "ReplaceContinueWithBreak ExceptionReplacer NumberReplacer RemoveDecorator ZeroIterationForLoop "
    "ReplaceUnaryOperator_Delete_Not ReplaceUnaryOperator_Delete_USub"
)
_EMPTY = {"None", "0", "0.0", "False", "[]", "{}", "()", '""', 'b""', "set()", "dict()", "deque()", "Counter()"}
_RESETS = {"clear", "discard", "pop", "popitem", "popleft", "remove", "reset", "cancel", "close", "end", "release"}
_PAIRS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LEAVES = {"name", "newline", "string", "endmarker", "fstring_string", "fstring_start", "fstring_end"}


class _Ours(Operator):  # type: ignore[misc]
    """An operator that replaces the code of a node, or of a child, by other code."""

    def replacements(self, node: _Node) -> Iterator[tuple[_Node, str]]:
        """Yields the nodes that can be replaced, and by what."""
        raise NotImplementedError

    def mutation_positions(self, node: _Node) -> _Positions:
        for old, _ in self.replacements(node):
            yield old.start_pos, old.end_pos

    def mutate(self, node: _Node, index: int) -> _Node:
        old, new = list(self.replacements(node))[index]
        fresh = get_ast(str(old.get_first_leaf().prefix) + new)
        if old is node:
            return fresh
        parent = old.parent
        assert parent is not None
        parent.children[[child is old for child in parent.children].index(True)] = fresh
        return node


class DeleteStatement(_Ours):
    """A call or an assignment is left out, or an exception is not raised."""

    def replacements(self, node: _Node) -> Iterator[tuple[_Node, str]]:
        if _is_statement(node) and not _is_reset(node) and node.type not in ("string", "strings"):
            yield node, "pass"

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return Example("x = f(1)\n", "pass\n"), Example("raise E\n", "pass\n")


class OmitReset(_Ours):
    """A value that is reset or taken out stays as it was."""

    def replacements(self, node: _Node) -> Iterator[tuple[_Node, str]]:
        if _is_statement(node) and _is_reset(node):
            yield node, "pass"

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return Example("self.x = None\n", "pass\n"), Example("del x[1]\n", "pass\n"), Example("x.clear()\n", "pass\n")


class TimesTen(_Ours):
    """A constant is ten times as large."""

    def replacements(self, node: _Node) -> Iterator[tuple[_Node, str]]:
        if node.type == "number" and node.value.strip("0.") and "j" not in node.value.lower():
            yield node, f"({node.value} * 10)"

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("x = 30.0", "x = (30.0 * 10)"),)


class SwapFunction(_Ours):
    """`min` for `max`, `any` for `all`."""

    def replacements(self, node: _Node) -> Iterator[tuple[_Node, str]]:
        if node.type in ("atom_expr", "power") and node.children[0].type == "name":
            name = node.children[0]
            if name.value in _PAIRS and _is_call(node.children[1]):
                yield name, _PAIRS[name.value]

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return Example("x = min(a, b)", "x = max(a, b)"), Example("any(a)", "all(a)")


class ForceBranch(_Ours):
    """A condition is always true, or never."""

    def replacements(self, node: _Node) -> Iterator[tuple[_Node, str]]:
        if node.type == "if_stmt":
            for keyword, condition in zip(node.children, node.children[1:], strict=False):
                if keyword.type == "keyword" and keyword.value in ("if", "elif"):
                    yield condition, "True"
                    yield condition, "False"
        elif node.type == "while_stmt":
            yield node.children[1], "False"
        elif node.type in ("ternary", "test"):
            yield node.children[2], "True"
            yield node.children[2], "False"
        elif node.type in ("comp_if", "old_comp_if"):
            yield node.children[1], "True"

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("if a:\n    b()\n", "if True:\n    b()\n"),
            Example("x = a if b else c", "x = a if False else c", occurrence=1),
        )


class SwapArguments(_Ours):
    """Two arguments that follow each other change places."""

    def replacements(self, node: _Node) -> Iterator[tuple[_Node, str]]:
        if node.type == "arglist" and node.parent.type == "trailer":
            if _code(node.parent.parent.children[0]) in ("min", "max"):
                return  # of which any order is the same
            places = node.children[::2]
            for place, (one, two) in enumerate(pairwise(places)):
                plain = all(each.type != "argument" for each in (one, two))
                if plain and _code(one) != _code(two):
                    texts = [_code(each) for each in places]
                    texts[place : place + 2] = texts[place + 1], texts[place]
                    yield node, ", ".join(texts)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(a, b, c)", "f(a, c, b)", occurrence=1),)


class OmitArgument(_Ours):
    """An argument that has a name is left out, so that its default holds."""

    def replacements(self, node: _Node) -> Iterator[tuple[_Node, str]]:
        if node.type == "arglist" and node.parent.type == "trailer":
            yield from _without_one(node, _has_default)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(a, b=1)", "f(a)"),)


class OmitElement(_Ours):
    """An element of a list, a tuple or a set is left out."""

    def replacements(self, node: _Node) -> Iterator[tuple[_Node, str]]:
        if node.type == "testlist_comp" and not any(child.type == "sync_comp_for" for child in node.children):
            yield from _without_one(node, lambda each: True)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return Example("x = [a, b, c]", "x = [a, c]", occurrence=1), Example("x = (a, b)", "x = (b,)")


class ShiftBound(_Ours):
    """The end of a range or of a slice is one less, or one more."""

    def replacements(self, node: _Node) -> Iterator[tuple[_Node, str]]:
        end = None
        if node.type == "subscript":
            colon = next((n for n, child in enumerate(node.children) if child == ":"), None)
            end = node.children[colon + 1] if colon is not None and colon + 1 < len(node.children) else None
        elif node.type == "atom_expr" and _code(node.children[0]) == "range" and _is_call(node.children[1]):
            inside = node.children[1].children[1]
            end = inside.children[2 if len(inside.children) > 2 else 0] if inside.type == "arglist" else inside
        if end is not None and end.type not in ("operator", "number", "sliceop"):
            yield end, f"({_code(end)}) - 1"
            yield end, f"({_code(end)}) + 1"

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return Example("x[:n]", "x[:(n) - 1]"), Example("range(1, n)", "range(1, (n) + 1)", occurrence=1)


OURS = (
    DeleteStatement,
    OmitReset,
    TimesTen,
    SwapFunction,
    ForceBranch,
    SwapArguments,
    OmitArgument,
    OmitElement,
    ShiftBound,
)


@cache
def operators() -> dict[str, Operator]:
    """Returns all operators by name."""
    theirs = OperatorProvider()
    names = [f"ReplaceBinaryOperator_{name}" for name in _BINARY.split()]
    names += [f"ReplaceComparisonOperator_{name}" for name in _COMPARISONS.split()]
    return {name: theirs[name]() for name in (*names, *_OTHERS.split())} | {each.__name__: each() for each in OURS}


def sites(source: str) -> list[Site]:
    """Returns all places where an operator can change a source, in the order of the source.

    Two places of an operator at the same position, with another outcome each, are two sites.
    """
    counts: dict[str, int] = {}
    found: list[Site] = []
    lines = source.splitlines()
    for node in _nodes(get_ast(source)):
        for name, operator in operators().items():
            for (line, column), _ in operator.mutation_positions(node):
                place = counts[name] = counts.get(name, -1) + 1
                if not _is_left_alone(node):
                    found.append(Site(name, line, column, lines[line - 1].strip(), place))
    return sorted(found, key=lambda site: (site.line, site.column, site.operator, site.place))


def change(source: str, site: Site) -> str | None:
    """Returns a source with the change of a site in it; None if that is no Python, or the same program."""
    changed = str(_Visitor(operators()[site.operator], site.place).walk(get_ast(source)).get_code())
    try:
        return changed if ast.dump(ast.parse(source)) != ast.dump(ast.parse(changed)) else None
    except SyntaxError:
        return None


class _Visitor(Visitor):  # type: ignore[misc]
    """Lets an operator change one node: that which it can change in the so manieth way."""

    def __init__(self, operator: Operator, place: int) -> None:
        self._operator, self._left = operator, place

    def visit(self, node: _Node) -> _Node | None:
        if node.type in _LEAVES:
            return node
        for index, _ in enumerate(self._operator.mutation_positions(node)):
            if self._left == 0:
                self._left = -1
                return self._operator.mutate(node, index)
            self._left -= 1
        return node


def _nodes(node: _Node) -> Iterator[_Node]:
    """Yields nodes as cosmic-ray's visitor sees them."""
    if node.type not in _LEAVES:
        yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def _is_left_alone(node: _Node) -> bool:
    """Whether a node is part of an annotation, an assertion, a decorator, an import, or for type checkers alone.

    The signs in a signature are, too: where only names may be given, places may be as well, or the other way round.
    """
    child, parent = node, node.parent
    if node.type == "assert_stmt" or (node.type == "operator" and parent.type in ("parameters", "param")):
        return True
    if node.type == "expr_stmt" and _code(node).partition("= ")[2].startswith("TypeVar("):
        return True
    while parent is not None:
        if parent.type in ("assert_stmt", "import_from", "import_name", "decorator"):
            return True
        if parent.type == "argument" and _code(parent.children[0]) == "strict":
            return True  # of zip, which asserts that two things are as long
        if parent.type in ("annassign", "tfpdef", "param") and _follows(parent, child, ":"):
            return True
        if parent.type == "funcdef" and _follows(parent, child, "->"):
            return True
        if parent.type == "if_stmt" and _code(parent.children[1]) == "TYPE_CHECKING":
            return True
        child, parent = parent, parent.parent
    return False


def _has_default(argument: _Node) -> bool:
    """Whether an argument has a name, and is no assertion of zip."""
    named = argument.type == "argument" and argument.children[1] == "="
    return bool(named and _code(argument.children[0]) != "strict")


def _follows(parent: _Node, child: _Node, sign: str) -> bool:
    place = next(n for n, each in enumerate(parent.children) if each is child)
    return place > 0 and parent.children[place - 1] == sign


def _is_statement(node: _Node) -> bool:
    """Whether a node is a call, an assignment, a `raise` or a `del`, as a statement by itself."""
    parent = node.parent
    if parent is None or parent.type != "simple_stmt" or node is not parent.children[0]:
        return False
    if node.type == "expr_stmt" and _code(node.children[0]) in ("__slots__", "__all__"):
        return False
    if node.type == "expr_stmt" and node.children[-1].type == "annassign":
        return len(node.children[-1].children) > 2  # else it declares a name, and assigns nothing
    return node.type in ("expr_stmt", "atom_expr", "power", "await", "raise_stmt", "del_stmt")


def _is_reset(node: _Node) -> bool:
    """Whether a statement empties something that was there before."""
    if node.type == "del_stmt":
        return True
    if node.type == "expr_stmt" and len(node.children) == 3 and node.children[1] == "=":
        return "." in _code(node.children[0]) and _code(node.children[2]) in _EMPTY
    if node.type in ("atom_expr", "power") and len(node.children) > 2 and _is_call(node.children[-1]):
        name = node.children[-2]
        return name.type == "trailer" and name.children[0] == "." and name.children[1].value in _RESETS
    return False


def _is_call(node: _Node) -> bool:
    return bool(node.type == "trailer" and node.children[0] == "(")


def _without_one(node: _Node, wanted: Callable[[_Node], bool]) -> Iterator[tuple[_Node, str]]:
    places = node.children[::2]
    for place, each in enumerate(places):
        if wanted(each) and len(places) > 1:
            rest = [_code(other) for n, other in enumerate(places) if n != place]
            single = len(rest) == 1 and node.type == "testlist_comp" and node.parent.children[0] == "("
            yield node, ", ".join(rest) + ("," if single else "")


def _code(node: _Node) -> str:
    return str(node.get_code(include_prefix=False))
