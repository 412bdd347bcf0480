"""The documentation runs: every Python block of the README and the guides, and every example."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from machine import patience

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = {"design.md"}  # its blocks list signatures
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#:]+)(?:#[^)]*)?\)")
BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    if page.name not in NOT_RUN
    for number, code in enumerate(BLOCK.findall(page.read_text()), 1)
]
WITH_A_REAL_MODEL = {"grpo.py", "shared_store.py"}
EXAMPLES = [
    pytest.param(path, id=path.name, marks=[pytest.mark.slow, pytest.mark.deadline] * (path.name in WITH_A_REAL_MODEL))
    for path in sorted((ROOT / "examples").glob("*.py"))
]


@pytest.mark.usefixtures("little_garbage")
@pytest.mark.parametrize("code", BLOCKS)
def test_a_block_of_the_documentation_runs_and_leaves_nothing_open(code: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        exec(compile(code, "<documentation>", "exec"), {"__name__": "documentation"})
        gc.collect()  # a function of the block refers to its globals: a reference cycle
    assert not [str(one.message) for one in caught if issubclass(one.category, ResourceWarning)]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: Path) -> None:
    command = [sys.executable, "-W", "always::ResourceWarning", str(example)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(120))
    assert result.returncode == 0, result.stderr
    assert "ResourceWarning" not in result.stderr, result.stderr
    assert result.stdout, "an example prints something"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_files_with_slow_tests_are_named_where_contributors_look() -> None:
    files = Path(__file__).parents[1].rglob("test_*.py")
    marked = {path.name for path in files if re.search(r"pytest\.mark\.slow|slow_but\(", path.read_text())}
    named = re.findall(r"^\| (`test_.*`) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`(test_\w+\.py)`", " ".join(named))) == marked


def test_tests_that_pages_name_exist() -> None:
    files = {path.stem: path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py")}
    there = {*files, *re.findall(r"def (test_\w+)", "".join(files.values()))}
    history = ROOT / "docs" / "decisions.md"
    pages = [page.read_text() for page in (*PAGES, ROOT / "CONTRIBUTING.md") if page != history]
    named = {name for page in pages for name in re.findall(r"\btest_\w+\b(?!\*)", page)}
    assert len(named) > 50 and not named - there
