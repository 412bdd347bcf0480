"""Changes of a line of the core: operators over the tree that tree-sitter makes of C++.

They are of the kinds that `python_operators` has. Assertions, declarations of types and arguments of templates stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import tree_sitter_cpp
from tree_sitter import Language, Node, Parser

from mutation.sites import Site

_PARSER = Parser(Language(tree_sitter_cpp.language()))
_BINARY = {
    "==": ("!=",),
    "!=": ("==",),
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "/": ("*",),
    "%": ("/",),
    "&&": ("||",),
    "||": ("&&",),
    "&": ("|",),
    "|": ("&",),
    "^": ("|",),
    "<<": (">>",),
    ">>": ("<<",),
}
_ASSIGNED = {"+=": "-=", "-=": "+=", "|=": "&=", "&=": "|="}
_PAIRS = {"min": "max", "max": "min", "any_of": "all_of", "all_of": "any_of", "lower_bound": "upper_bound"}
_RESETTING = re.compile(rb"^(nullptr|0|0\.0|false|\{\}|std::nullopt|-1|k?None|kNo[A-Z]\w*)$")
_RESETS = re.compile(rb"[.>](clear|reset|erase|pop_back|pop_front|remove|release|shrink_to_fit)\(")
_ALONE = {"static_assert_declaration", "template_argument_list", "preproc_include", "preproc_def"}

Edit = tuple[int, int, str]


def sites(source: str) -> list[Site]:
    """Returns all places where an operator can change a source, in the order of the source."""
    return [site for site, _ in _all(source)]


def change(source: str, site: Site) -> str | None:
    """Returns a source with the change of a site in it; None if there is none."""
    data = source.encode()
    for each, (start, end, new) in _all(source):
        if each == site:
            changed = (data[:start] + new.encode() + data[end:]).decode()
            return changed if changed != source else None
    return None


def _all(source: str) -> list[tuple[Site, Edit]]:
    data, lines, counts = source.encode(), source.splitlines(), {"": 0}
    found: list[tuple[Site, Edit]] = []
    for node, name, edit in _edits(_PARSER.parse(data).root_node, data):
        place = counts[name] = counts.get(name, -1) + 1
        row, column = node.start_point
        found.append((Site(name, row + 1, column, lines[row].strip(), place), edit))
    return sorted(found, key=lambda each: (each[0].line, each[0].column, each[0].operator, each[0].place))


def _edits(node: Node, data: bytes) -> Iterator[tuple[Node, str, Edit]]:
    if node.type in _ALONE or _is_assertion(node):
        return
    yield from _at(node, data)
    for child in node.children:
        yield from _edits(child, data)


def _at(node: Node, data: bytes) -> Iterator[tuple[Node, str, Edit]]:
    match node.type:
        case "binary_expression":
            sign = node.child_by_field_name("operator")
            for new in _BINARY.get(sign.type, ()) if sign is not None else ():
                assert sign is not None
                yield sign, "ReplaceOperator", (sign.start_byte, sign.end_byte, new)
        case "assignment_expression" | "update_expression":
            yield from _assigned(node)
        case "unary_expression":
            sign = node.child_by_field_name("operator")
            if sign and sign.type in ("!", "-", "not"):
                yield sign, "DeleteSign", (sign.start_byte, sign.end_byte, " ")
        case "number_literal":
            yield from _number(node, _text(node, data))
        case "true" | "false":
            other = "false" if node.type == "true" else "true"
            yield node, "SwapBoolean", (node.start_byte, node.end_byte, other)
        case "break_statement":
            yield node, "SwapJump", (node.start_byte, node.end_byte, "continue;")
        case "continue_statement":
            yield node, "SwapJump", (node.start_byte, node.end_byte, "break;")
        case "if_statement" | "while_statement" | "conditional_expression":
            yield from _condition(node, data)
        case "expression_statement":
            yield from _statement(node, data)
        case "call_expression":
            yield from _call(node, data)
        case "for_statement" | "for_range_loop":
            body = node.child_by_field_name("body")
            if body is not None and body.type == "compound_statement":
                yield node, "ZeroIterationForLoop", (body.start_byte, body.start_byte + 1, "{ break;")


def _assigned(node: Node) -> Iterator[tuple[Node, str, Edit]]:
    for sign in node.children:
        if sign.type in _ASSIGNED:
            yield sign, "ReplaceOperator", (sign.start_byte, sign.end_byte, _ASSIGNED[sign.type])


def _number(node: Node, text: bytes) -> Iterator[tuple[Node, str, Edit]]:
    if re.fullmatch(rb"[0-9']+(\.[0-9]*)?[fFuUlLzZ]*", text):
        said = text.decode()
        for new in (f"({said} + 1)", f"({said} - 1)"):
            yield node, "NumberReplacer", (node.start_byte, node.end_byte, new)
        if text.strip(b"0.fFuUlLzZ"):
            yield node, "TimesTen", (node.start_byte, node.end_byte, f"({said} * 10)")


def _condition(node: Node, data: bytes) -> Iterator[tuple[Node, str, Edit]]:
    found = node.child_by_field_name("condition")
    if found is not None and found.type == "condition_clause":
        found = found.child_by_field_name("value") if found.child_by_field_name("initializer") is None else None
    if found is None or found.type == "declaration":
        return
    said = _text(found, data).decode()
    yield found, "AddNot", (found.start_byte, found.end_byte, f"!({said})")
    if node.type != "while_statement":
        yield found, "ForceBranch", (found.start_byte, found.end_byte, "true")
    yield found, "ForceBranch", (found.start_byte, found.end_byte, "false")


def _statement(node: Node, data: bytes) -> Iterator[tuple[Node, str, Edit]]:
    inner = node.children[0]
    resets = bool(_RESETS.search(_text(inner, data))) and inner.type == "call_expression"
    if inner.type == "assignment_expression":
        right = inner.child_by_field_name("right")
        resets = right is not None and bool(_RESETTING.match(_text(right, data)))
    yield node, "OmitReset" if resets else "DeleteStatement", (node.start_byte, node.end_byte, ";")


def _call(node: Node, data: bytes) -> Iterator[tuple[Node, str, Edit]]:
    called, arguments = node.child_by_field_name("function"), node.child_by_field_name("arguments")
    if called is None or arguments is None:
        return
    name = _text(called, data).decode().partition("<")[0]
    if name.startswith("std::") and name[5:] in _PAIRS:
        start = called.start_byte
        yield called, "SwapFunction", (start, start + len(name), "std::" + _PAIRS[name[5:]])
    each = arguments.named_children
    for one, two in pairwise(each):
        first, second = _text(one, data).decode(), _text(two, data).decode()
        if first != second and "comment" not in (one.type, two.type):
            yield one, "SwapArguments", (one.start_byte, two.end_byte, f"{second}, {first}")


def _is_assertion(node: Node) -> bool:
    called = node.child_by_field_name("function") if node.type == "call_expression" else None
    return called is not None and bool(re.fullmatch(rb"assert|\w*(ASSERT|CHECK)\w*", called.text or b""))


def _text(node: Node, data: bytes) -> bytes:
    return data[node.start_byte : node.end_byte]
