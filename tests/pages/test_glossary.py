"""Names against docs/glossary.md: one meaning for each word, and the words of the field in place of others."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "mainstem"
WORDS, NOT_USED = (ROOT / "docs" / "glossary.md").read_text().split("\n## Words that are not used\n")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def first_cells(page: str) -> list[str]:
    """Returns the words in the first column of the tables; `in code font` where they are names."""
    rows = re.findall(r"^\| (?!word |not |-)(.*?) \| ", page, re.MULTILINE)
    return [word.strip() for row in rows for word in row.split(",")]


@cache
def names() -> dict[str, str]:
    """Returns every name that the package defines, in Python and in C++, with a file that does."""
    found: dict[str, str] = {}
    for path in sorted(SOURCE.rglob("*")):
        if path.suffix in (".py", ".pyi"):
            own = {name for node in ast.walk(ast.parse(path.read_text())) for name in defined(node)}
        elif path.suffix in (".h", ".cpp"):
            own = {*re.findall(r"[A-Za-z_]\w*", re.sub(r"//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", " ", path.read_text()))}
        else:
            continue
        found |= dict.fromkeys({path.stem, *own}, str(path.relative_to(ROOT)))
    return found


def defined(node: ast.AST) -> list[str]:
    """Returns the name that a node of Python's syntax gives to something."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
    return []


def words(name: str) -> str:
    """Returns the words of a name in lower case, with a blank before and after each."""
    return f" {' '.join(WORD.findall(name)).lower()} "


def test_each_word_has_one_meaning() -> None:
    plain = [word.strip("`") for word in first_cells(WORDS)]
    assert len(plain) > 50
    assert sorted(word for word in set(plain) if plain.count(word) > 1) == []


def test_the_names_in_the_glossary_exist() -> None:
    claimed = {word.strip("`") for word in first_cells(WORDS) if word.startswith("`")}
    assert len(claimed) > 20
    assert sorted(claimed - names().keys()) == []


def test_no_name_has_a_word_that_is_not_used() -> None:
    out = first_cells(NOT_USED)
    assert len(out) > 5
    assert [f"{path}: {name}" for name, path in names().items() for word in out if f" {word} " in words(name)] == []


def test_a_name_is_split_into_words() -> None:
    assert words("release_border") == " release border "
    assert words("KVPoolBehind2") == " kv pool behind 2 "
    assert " border " not in words("borderaxespad")
