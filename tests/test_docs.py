"""What the documentation shows must run: every Python block of the README and the guides, and every example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {"design.md"}  # its blocks list signatures
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#:]+)(?:#[^)]*)?\)")
BLOCKS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    if page.name not in NOT_RUN
    for number, code in enumerate(BLOCK.findall(page.read_text()), 1)
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("code", BLOCKS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_block_of_the_documentation_runs(code: str) -> None:
    exec(compile(code, "<documentation>", "exec"), {"__name__": "documentation"})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path) -> None:
    result = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout, "an example shows something"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
