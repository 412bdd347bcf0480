"""Stored or received data is never executed: no module has the means to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "bench", "examples", "simulator", "mutation")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
SUSPECT = re.compile(rf"\b(?:{'|'.join((*FORBIDDEN_MODULES, *FORBIDDEN_CALLS))})\b|allow_pickle|weights_only")
"""Texts that such a module has; few need be parsed."""


def findings(source: str) -> Iterator[str]:
    """Yields what a module could use to execute foreign bytes."""
    if not SUSPECT.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=module):
                modules = [module or ""]
            case _:
                modules = []
        yield from (name for name in modules if name.partition(".")[0] in FORBIDDEN_MODULES)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield node.func.id
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            owner = node.func.value
            allows = any(word.arg in ("allow_pickle", "weights_only") for word in node.keywords)
            if isinstance(owner, ast.Name) and owner.id in ("np", "numpy", "torch") and allows:
                yield f"{owner.id}.load"


def test_no_module_can_run_what_it_reads() -> None:
    assert {path: each for path in MODULES if (each := list(findings(path.read_text())))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "import marshal as m",
        "eval('1')",
        "exec(data)",
        "from pickle import loads as read",
        "np.load(path, allow_pickle=True)",
        "torch.load(path, weights_only=False)",
    ],
)
def test_the_lint_finds(source: str) -> None:
    assert list(findings(source))
