"""Everything that can change has a row: each field of a stateful class, with what compares it (`state.txt`).

    module Class | what compares | fields

    check            the class's own `check`, or what that calls; in the core a const function of the same folder
                     that is named `check`, `sound` or the like
    check of M C     the same of another class
    FILE::NAME       a test, a slow model, or a profile of the simulator: what follows from the field is compared there
    value            the core: what calls pass and return, and nobody keeps
    open             nothing yet; `_MOST_OPEN` bounds how many there are, and may only fall

The fields are read from the source: those of Python that something changes, or makes, after the constructor, and all
members of the core's classes that are no constants. A field without a row fails, and so does a row without its field.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, CORE = ROOT / "src" / "mainstem", ROOT / "src" / "mainstem" / "core" / "csrc"
_MOST_OPEN = 19

_ROOMS = (
    "cache", "tiers", "tiers/host", "tiers/prefetch", "tiers/storage", "storage", "storage/file", "storage/peer",
    "events", "fleet", "fleet/front", "owner", "server/batches", "server/kept", "runtime/schedule", "runtime/memory",
    "runtime/hints",
)  # fmt: skip
_FOLDERS = ("structure", "residency", "eviction", "tree", "lease", "routing", "replay")
_CONTAINERS = {"dict", "list", "set", "deque", "Counter", "OrderedDict", "defaultdict", "fromkeys"}
_CHANGES = {
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert", "move_to_end", "pop",
    "popitem", "popleft", "remove", "setdefault", "subtract", "update",
}  # fmt: skip
_VERIFIES = re.compile(r"check(_\w+)?|sound|holds|offers|offered|withdrawn|ranked")
_CONST = re.compile(r"\b(\w+)\([^;{}]*?\)\s*const(?:\s+(?:noexcept|override|final))*\s*\{")

Row = tuple[str, str, str]
"""A module and its class, what compares, and a field."""


def rows() -> list[Row]:
    lines = (ROOT / "tests" / "house" / "state.txt").read_text().splitlines()
    parts = [line.split(" | ") for line in lines]
    return [(where, by, field) for where, by, fields in parts for field in fields.split()]


# ---------------------------------------------------------------- Python


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse((SOURCE / module).read_text())


def modules() -> Iterator[str]:
    for room in _ROOMS:
        found = (str(path.relative_to(SOURCE)) for path in sorted((SOURCE / room).glob("*.py")))
        yield from (module for module in found if module != "storage/conformance.py")  # it is a test
    yield from (str(path.relative_to(SOURCE)) for path in sorted((SOURCE / "integrations").glob("block_*.py")))


def classes(module: str) -> Iterator[ast.ClassDef]:
    """Yields the classes of a module whose objects may change."""
    for each in parsed(module).body:
        if isinstance(each, ast.ClassDef):
            said = " ".join(map(ast.unparse, [*each.decorator_list, *each.bases]))
            if not any(word in said for word in ("frozen=True", "NamedTuple", "Protocol")):
                yield each


def is_own(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def constructors(cls: ast.ClassDef) -> list[ast.FunctionDef]:
    named = ("__init__", "__post_init__")
    return [each for each in cls.body if isinstance(each, ast.FunctionDef) and each.name in named]


def made(cls: ast.ClassDef) -> dict[str, ast.expr | None]:
    """Returns the fields of a class, and what each begins with."""
    fields: dict[str, ast.expr | None] = {}
    for each in cls.body:
        named = isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
        if named and isinstance(each.target, ast.Name):  # type: ignore[union-attr]
            fields[each.target.id] = each.value  # type: ignore[union-attr]
    for node in (node for function in constructors(cls) for node in ast.walk(function)):
        pairs: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(node, ast.AnnAssign):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs += zip(target.elts, node.value.elts, strict=True) if several else [(target, node.value)]  # type: ignore[attr-defined]
        fields.update({target.attr: value for target, value in pairs if is_own(target)})  # type: ignore[attr-defined]
    later = (part for node in ast.walk(cls) for part in written(node) if is_own(part))
    return {**{part.attr: None for part in later}, **fields}


def is_container(value: ast.expr | None) -> bool:
    if isinstance(value, (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)):
        return True
    if not isinstance(value, ast.Call):
        return False
    function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    name = ast.unparse(function).rpartition(".")[2]
    return name in _CONTAINERS or (name == "field" and any(each.arg == "default_factory" for each in value.keywords))


def written(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yields the attributes that a statement assigns, deletes, or assigns a part of."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        targets = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [node.optional_vars]
    for part in (part for target in targets for part in ast.walk(target)):
        if isinstance(part, (ast.Attribute, ast.Subscript)) and isinstance(part.ctx, (ast.Store, ast.Del)):
            yield from attribute(part)


def attribute(node: ast.expr) -> Iterator[ast.Attribute]:
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        yield node


@cache
def touched(module: str) -> list[tuple[ast.Attribute, bool]]:
    """Returns the attributes that a module writes, and (true) those that a call changes if they are containers."""
    nodes = list(ast.walk(parsed(module)))
    found = [(part, False) for node in nodes for part in written(node)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return found + [(part, True) for call in calls if call.attr in _CHANGES for part in attribute(call.value)]


def within(node: ast.expr, *blocks: ast.stmt) -> bool:
    return any(block.lineno <= node.lineno <= (block.end_lineno or 0) for block in blocks)


def changed(cls: ast.ClassDef, module: str) -> set[str]:
    """Returns the fields of a class that its methods change after the constructor, or others of the module."""
    fields, first = made(cls), constructors(cls)
    return {
        part.attr
        for part, by_call in touched(module)
        if part.attr in fields and (not by_call or is_container(fields[part.attr]))
        if not within(part, *first) and (within(part, cls) or not is_own(part))
    }


@cache
def checked(module: str, name: str) -> frozenset[str]:
    """Returns the attributes that occur in the `check` of a class, or in what that calls within the module."""
    functions: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
    cls = next(each for each in classes(module) if each.name == name)
    left = [each for each in cls.body if isinstance(each, ast.FunctionDef) and each.name == "check"]
    seen: set[int] = set()
    found: set[str] = set()
    while left:
        function = left.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for node in ast.walk(function):
            named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            found |= {named} if isinstance(node, ast.Attribute) else set()
            left += functions.get(named, [])
    return frozenset(found)


# ---------------------------------------------------------------- the core


def bare(text: str) -> str:
    """Returns C++ without comments, texts and directives."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    return re.sub(r"(?m)^\s*#(.*\\\n)*.*$", "", re.sub(r'"(\\.|[^"\\])*"', '""', text))


def end_of(text: str, brace: int) -> int:
    """Returns where a block ends that begins at a brace."""
    depth = 0
    for at in range(brace, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return at + 1
    raise AssertionError("a block has no end")


def structs(text: str) -> Iterator[tuple[str, str]]:
    for found in re.finditer(r"(?<!enum )\b(?:class|struct)\s+(\w+)\s*(?:final\s*)?(?::[^{;]*)?\{", text):
        yield found[1], text[found.end() : end_of(text, found.end() - 1) - 1]


def declarations(body: str) -> Iterator[str]:
    """Yields the statements of a class, without blocks: an initializer goes, and a function's body ends a statement."""
    flat, at = "", 0
    while at < len(body):
        if body[at] == "{":
            before = flat.rpartition(";")[2]
            is_body = re.search(r"\b(class|struct|enum|union)\b|\)[^)]*$", before)
            flat, at = flat + (";" if is_body else ""), end_of(body, at)
        else:
            flat, at = flat + body[at], at + 1
    yield from re.sub(r"\b(public|private|protected)\s*:", ";", re.sub(r"\[\[[^\]]*\]\]", "", flat)).split(";")


def members(body: str) -> set[str]:
    """Returns the members of a class that are no constants and no references."""
    found: set[str] = set()
    no_member = r"(using|friend|static|typedef|template|explicit|virtual|enum|class|struct|const |return|inline)\b|.*\("
    for each in declarations(body):
        text = " ".join(each.split())
        while "<" in text and (shorter := re.sub(r"<[^<>]*>", "", text)) != text:
            text = shorter
        declared = re.match(r"(?:mutable )?[\w:]+\s*([*&]*)\s(.+)$", text)
        if declared and declared[1] != "&" and not re.match(no_member, text):
            found.update(re.findall(r"(?:^|,)\s*[*&]*\s*(\w+)", declared[2]))
    return found


@cache
def verified(folder: str) -> frozenset[str]:
    """Returns the words of the functions of a folder that verify and change nothing, and of those that these call."""
    functions: dict[str, set[str]] = {}
    for path in (path for path in (CORE / folder).rglob("*") if path.suffix in (".h", ".cpp")):
        text = bare(path.read_text())
        for found in _CONST.finditer(text):
            words = re.findall(r"\w+", text[found.end() : end_of(text, found.end() - 1)])
            functions.setdefault(found[1], set()).update(words)
    seen: set[str] = set()
    left = [name for name in functions if _VERIFIES.fullmatch(name)]
    while left:
        if (name := left.pop()) not in seen:
            seen.add(name)
            left += functions[name] & functions.keys()
    return frozenset(word for name in seen for word in functions[name])


def core_fields() -> Iterator[tuple[str, str]]:
    for path in (path for folder in _FOLDERS for path in sorted((CORE / folder).rglob("*.h"))):
        for name, body in structs(bare(path.read_text())):
            yield from ((f"{path.relative_to(CORE)} {name}", field) for field in members(body))


# ---------------------------------------------------------------- the rules


def test_each_field_that_changes_has_one_row_and_each_row_a_field() -> None:
    state = {
        (f"{module} {cls.name}", field)
        for module in modules()
        for cls in classes(module)
        for field in changed(cls, module)
    }
    state |= set(core_fields())
    listed = [(where, field) for where, _, field in rows()]
    assert not (missing := sorted(state - set(listed))), f"say in tests/house/state.txt what compares these: {missing}"
    assert not (gone := sorted(set(listed) - state)), f"these rows of tests/house/state.txt have no field: {gone}"
    assert len(set(listed)) == len(listed), "a field has two rows"


def test_what_a_row_names_exists_and_a_check_has_the_field_in_it() -> None:
    wrong = []
    for where, by, field in rows():
        module, name = where.split()
        if by in ("value", "open"):
            continue
        if "::" in by:
            file, _, what = by.partition("::")
            holds = re.search(rf"^(?:async )?(?:def|class) {what}\b", (ROOT / file).read_text(), re.M) is not None
        elif module.endswith(".h"):
            holds = by == "check" and field in verified(module.partition("/")[0])
        else:
            holds = field in checked(*(by.removeprefix("check of ").split() if " " in by else (module, name)))
        if not holds:
            wrong.append((where, by, field))
    assert not wrong


def test_fields_that_nothing_compares_only_become_fewer() -> None:
    assert sum(by == "open" for _, by, _ in rows()) == _MOST_OPEN, "lower the bound if there are fewer"
