"""Names and prose against docs/glossary.md: one meaning for each word, and the words of the field.

Names are those that src/mainstem defines, in Python and in C++. Prose is comments, docstrings and pages, and in the
package all strings. Each test reports all offences at once, as file:line.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mainstem"
GLOSSARY = ROOT / "docs" / "glossary.md"

# Words and sequences of words that no name contains, and what to say instead.
OUT = {
    "behind": "after",
    "border": "boundary",
    "borders": "boundaries",
    "give back": "release, free",
    "given back": "released, freed",
    "hang": "child, below",
    "hanging": "children, below",
    "hangs": "is below",
    "held back": "deferred, blocked",
    "land": "arrive",
    "landed": "arrived",
    "landing": "arriving, loading",
    "lands": "arrives",
    "let go": "release, unpin",
    "manieth": "every n-th",
    "obey": "run",
    "obeys": "runs",
    "plant": "checkpoint, keep",
    "planted": "kept",
    "planting": "keeping",
    "plants": "keeps",
    "rest s": "idle_s",
    "rubbish": "garbage",
    "set back": "preempt",
    "share running": "schedule_running",
    "share waiting": "schedule_waiting",
    "told": "reported, distinguished",
    "unheard": "undelivered",
    "worn": "inflation, aged",
}

# The same in prose, as expressions; a blank is any white space, also over the end of a line of comments. Only words
# that are never right here: a store may hang, so "hang" alone is none of them.
OUT_OF_PROSE = {
    r"behind": "after, or name the relation",
    r"borders?": "boundary",
    r"hang(s|ing)? (behind|below|on|under)": "is a child of, is below",
    r"land(s|ed|ing)?": "arrive, complete",
    r"obey(s|ed|ing)?": "run, follow",
    r"plant(s|ed|ing)?": "add or keep a checkpoint",
    r"rubbish": "garbage",
    r"(be|is|are|was|were|been|being) set back|sets? back|setting back": "preempt",
    r"share_(running|waiting)": "schedule_running, schedule_waiting",
    r"so[- ]manieth": "every n-th",
    r"told": "reported, said, distinguished",
    r"unheard": "undelivered",
    r"worn": "aged, inflation",
}

# Where a word of OUT_OF_PROSE is the right one, and why.
ALLOWED_IN_PROSE = {
    r"behind (a|an|the|its|one|this|that|your) ([\w-]+ )?"
    r"(proxy|proxies|firewall|gateway|interface|load balancer|router|wrapper)": "a place, in a network or in software",
    r"(keep|keeps|kept|put|run|runs|ran) (it|them|this) behind": "the same",
    r"write behind|writes? (it|them|pages) behind": "the field's name for writes that no request waits for",
    r"(leave|leaves|left|leaving) ([\w-]+ ){0,3}behind": "remains: files, processes",
    r"(fall|falls|fell|lag|lags|lagging) behind": "is late",
    r"(draws?|drawn|painted) ([\w-]+ )?behind": "the order of layers in a picture",
    r"border(-[a-z]+)*(?=:)": "a property of style sheets",
    r"told (not )?(to|about)|unless told otherwise": "instructed or informed: programs, clients",
}

# `pages` is a count. Where it is something else, and why.
NO_SINGLE_COUNT = {
    "core/reference.py:ReferenceTree.__init__": "page objects of the slow model, each with its id",
    "core/reference.py:ReferenceTree._child": "the same",
    "core/reference.py:ReferenceTree._remove": "the same",
    "runtime/memory/host.py:HostPool.__init__": "a count for each component",
    "runtime/memory/host.py:_check": "the same, checked",
    "tiers/host/tier.py:HostTier": "a count for each component",
}

RECORDED = re.compile(r"<!--= .*?<!--/-->|<!-- record -->.*?<!-- end of record -->", re.DOTALL)  # is as it was measured
NOT_CPP_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])+'", re.DOTALL)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
PROSE_TOKENS = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None))  # the last from 3.12 on
COUNT = ("int", "None")
MAPPINGS = ("dict", "Mapping")


def python_files(folder: Path = SOURCE) -> list[Path]:
    return sorted([*folder.rglob("*.py"), *folder.rglob("*.pyi")])


def cpp_files() -> list[Path]:
    return sorted(path for path in (SOURCE / "core" / "csrc").rglob("*") if path.suffix in (".h", ".cpp"))


def documents() -> list[Path]:
    """The pages of the documentation."""
    single = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md")]
    return [*single, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "simulator").rglob("*.md"))]


def blanked(pattern: re.Pattern[str], text: str) -> str:
    """The text without what matches; lines keep their numbers."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


# ---------------------------------------------------------------- names


def words(name: str) -> str:
    """The words of a name in lower case, with a blank before and after each."""
    return f" {' '.join(WORD.findall(name)).lower()} "


def defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a Python file gives: functions, classes, arguments, attributes and locals."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.MatchMapping(rest=str(name)):
                yield node.lineno, name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((node.lineno, alias.asname) for alias in names if alias.asname)


def python_names(path: Path) -> Iterator[tuple[int, str]]:
    yield 1, path.stem
    yield from sorted(set(defined(ast.parse(path.read_text(), str(path)))))


def cpp_names(path: Path) -> Iterator[tuple[int, str]]:
    """The identifiers of a C++ file, each where it comes first."""
    yield 1, path.stem
    seen = set()
    for number, line in enumerate(blanked(NOT_CPP_CODE, path.read_text()).splitlines(), 1):
        for name in re.findall(r"[A-Za-z_]\w*", line):
            if name not in seen:
                seen.add(name)
                yield number, name


def out_of_names(files: list[Path], names: Callable[[Path], Iterator[tuple[int, str]]]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {name}: not {word!r} but {instead}"
        for path in files
        for number, name in names(path)
        for word, instead in OUT.items()
        if f" {word} " in words(name)
    ]


def report(offences: list[str]) -> None:
    assert not offences, "\n".join([f"{len(offences)} against docs/glossary.md:", *offences])


def test_names_use_the_words_of_the_glossary() -> None:
    report(out_of_names(python_files(), python_names) + out_of_names(cpp_files(), cpp_names))


# ---------------------------------------------------------------- pages


def is_count(annotation: ast.expr) -> bool:
    """An int, None, a mapping to such, or a union of these."""
    match annotation:
        case ast.Constant(value=None):
            return True
        case ast.Constant(value=str(text)):
            return is_count(ast.parse(text, mode="eval").body)
        case ast.Name(id=name):
            return name in COUNT
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return is_count(left) and is_count(right)
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Tuple(elts=[_, value])):
            return name in MAPPINGS and is_count(value)
    return False


def annotated_pages(tree: ast.AST, inside: str = "") -> Iterator[tuple[int, str, ast.expr]]:
    """Line, place and annotation of every argument, attribute, local and property that is called `pages`."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef(name=name, returns=returned) | ast.AsyncFunctionDef(name=name, returns=returned):
                if name == "pages" and returned is not None:
                    yield node.lineno, inside, returned
                yield from annotated_pages(node, f"{inside}.{name}".lstrip("."))
                continue
            case ast.ClassDef(name=name):
                yield from annotated_pages(node, f"{inside}.{name}".lstrip("."))
                continue
            case ast.arg(arg="pages", annotation=ast.expr() as annotation):
                yield node.lineno, inside, annotation
            case ast.AnnAssign(target=ast.Name(id="pages") | ast.Attribute(attr="pages"), annotation=annotation):
                yield node.lineno, inside, annotation
        yield from annotated_pages(node, inside)


def test_pages_are_a_count() -> None:
    report(
        [
            f"{path.relative_to(ROOT)}:{number}: pages: {ast.unparse(annotation)} in {inside}: a count, or page_ids"
            for path in python_files()
            for number, inside, annotation in annotated_pages(ast.parse(path.read_text(), str(path)))
            if not is_count(annotation) and f"{path.relative_to(SOURCE)}:{inside}" not in NO_SINGLE_COUNT
        ]
    )


# ---------------------------------------------------------------- prose


def python_prose(path: Path) -> str:
    """Comments and strings of a Python file, each in its place; all else is blank.

    Outside of the package strings quote records and messages, so only docstrings count there.
    """
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    strings = docstrings(text) if SOURCE not in path.parents else None
    kept = [re.sub(r"[^\n]", " ", line) for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        quoted = token.type != tokenize.COMMENT and strings is not None and token.start not in strings
        if token.type not in PROSE_TOKENS or quoted:
            continue
        (first, begin), (last, end) = token.start, token.end
        for number in range(first, last + 1):
            line = lines[number - 1].rstrip("\n")
            left, right = begin if number == first else 0, end if number == last else len(line)
            row = kept[number - 1]
            kept[number - 1] = row[:left] + line[left:right] + row[right:]
    return "".join(kept)


def docstrings(text: str) -> set[tuple[int, int]]:
    """Where strings begin that are statements of their own."""
    nodes = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    return {(node.lineno, node.col_offset) for node in nodes if isinstance(node, ast.Constant)}


def prose(path: Path) -> str:
    if path.suffix in (".py", ".pyi"):
        return python_prose(path)
    text = path.read_text()
    return blanked(RECORDED, text) if path.suffix == ".md" else text


def as_pattern(expression: str) -> re.Pattern[str]:
    """The expression as whole words, in any case; its blanks may be the end of a line, with marks of comments."""
    return re.compile(rf"(?<![\w-])(?:{expression})(?!\w)".replace(" ", r"[\s#/*\"]+"), re.IGNORECASE)


def out_of_prose(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, words and what to say instead, of all that no allowance covers."""
    allowed = [found.span() for expression in ALLOWED_IN_PROSE for found in as_pattern(expression).finditer(text)]
    for expression, instead in OUT_OF_PROSE.items():
        for found in as_pattern(expression).finditer(text):
            if not any(begin <= found.start() and found.end() <= end for begin, end in allowed):
                yield text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), instead


def test_prose_uses_the_words_of_the_glossary() -> None:
    others = [ROOT / name for name in ("Makefile", ".ci/run", "pyproject.toml", "CMakeLists.txt")]
    folders = [ROOT / name for name in ("examples", "bench", "simulator", "tests")]
    python = [path for folder in (SOURCE, *folders) for path in python_files(folder) if path != Path(__file__)]
    files = [*python, *cpp_files(), *documents(), *others]
    report(
        [
            f"{path.relative_to(ROOT)}:{number}: {found}: {instead}"
            for path in files
            for number, found, instead in sorted(out_of_prose(prose(path)))
        ]
    )


# ---------------------------------------------------------------- the glossary itself


def entries() -> list[tuple[int, str]]:
    """Every word in the first column of the tables, with its line; `in code font` where it is a name."""
    rows = []
    for number, line in enumerate(GLOSSARY.read_text().splitlines(), 1):
        if line.startswith("| ") and not line.startswith("| word "):
            rows += [(number, word.strip()) for word in line.split(" | ")[0].strip("| ").split(",")]
    return rows


def test_the_glossary_has_one_meaning_for_each_word() -> None:
    plain = [word.strip("`") for _, word in entries()]
    assert len(plain) > 50
    assert sorted(word for word in set(plain) if plain.count(word) > 1) == []


def test_the_names_in_the_glossary_exist() -> None:
    names = {name for path in python_files() for _, name in python_names(path)}
    names |= {name for path in cpp_files() for _, name in cpp_names(path)}
    claimed = [(number, word.strip("`")) for number, word in entries() if word.startswith("`")]
    assert len(claimed) > 20
    report([f"docs/glossary.md:{number}: no name is {word}" for number, word in claimed if word not in names])


# ---------------------------------------------------------------- how it finds them


def test_a_name_is_split_into_words() -> None:
    assert words("release_border") == " release border "
    assert words("kMostOnPath2") == " k most on path 2 "
    assert words("KVPoolBehind") == " kv pool behind "
    assert " border " not in words("borderaxespad")


def test_names_are_found_wherever_they_are_given() -> None:
    code = "import a as b\nclass C:\n    d: int = 1\n    def e(self, f, *g):\n        self.h = i = [j for j in f]\n"
    assert {name for _, name in defined(ast.parse(code))} == set("bCdefghij") | {"self"}


def test_counts_are_distinguished_from_ids() -> None:
    def count(annotation: str) -> bool:
        return is_count(ast.parse(annotation, mode="eval").body)

    assert all(map(count, ["int", "int | None", "int | Mapping[Component, int]", "dict[str, int]", "'int'"]))
    assert not any(map(count, ["Ids", "list[int]", "Sequence[int]", "NDArray[np.int32]", "int | Ids", "ArrayLike"]))


def test_a_word_is_found_over_the_end_of_a_line_and_allowed_where_it_is_right() -> None:
    comment = "# it is set\n    # back; a server behind a proxy"
    assert [found for _, found, _ in out_of_prose(comment)] == ["is set # back"]
    assert list(out_of_prose("write-behind; keep them behind a firewall; told to stop; border-top:1px")) == []
    assert [number for number, _, _ in out_of_prose("one\npages behind the window\nwhat was told")] == [2, 3]


def test_strings_and_comments_are_prose_and_code_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.py"
    file.write_text('"""What is worn."""\nbehind = 1  # was told\nraise ValueError("it lands")\n')
    assert [found for _, found, _ in out_of_prose(prose(file))] == ["told", "worn"]
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    assert [found for _, found, _ in out_of_prose(prose(file))] == ["lands", "told", "worn"]
