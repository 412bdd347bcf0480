"""The layers of docs/design.md, section 1: a lower layer never imports a higher one, not even lazily or for typing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "mainstem"

# Lowest first; each module belongs to the first layer with a prefix of its name.
LAYERS = [
    ("core", ["errors", "imports", "_core", "core"]),
    ("rules", ["keys", "namespaces", "components", "policies", "pool", "identity"]),
    ("tree", ["tree"]),
    ("storage", ["storage"]),
    ("tiers", ["tiers"]),
    ("cache", ["cache"]),
    ("replay", ["replay"]),
    ("runtime", ["runtime"]),
    ("server", ["server"]),
    ("cli", ["cli", "demo", "__main__"]),
]
TOP = "__init__"  # `mainstem` itself re-exports the cache and everything below
MODULES = sorted(path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))


def layer(module: str) -> int:
    if module in ("", TOP):
        return [name for name, _ in LAYERS].index("cache")
    for level, (_, prefixes) in enumerate(LAYERS):
        if any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes):
            return level
    raise AssertionError(f"module {module} belongs to no layer")


def imports(path: Path) -> set[str]:
    """Returns the modules of this package that a file imports, as names below `mainstem`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if is_module(name)} or {node.module or ""}
    return {name.partition(".")[2] for name in found if name.split(".")[0] == "mainstem"}


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return name.split(".")[0] == "mainstem" and (path.with_suffix(".py").exists() or path.with_suffix(".pyi").exists())


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_lower_layer_never_imports_a_higher_one(module: Path) -> None:
    name = ".".join(module.parts).removesuffix(".__init__")
    for imported in imports(PACKAGE / module.with_suffix(".py")):
        assert layer(imported) <= layer(name), f"{name} imports {imported}"


def test_replay_needs_no_torch() -> None:
    modules = [".".join(path.parts).removesuffix(".__init__") for path in MODULES if path.parts[0] == "replay"]
    code = (
        f"import sys; from importlib import import_module; [import_module('mainstem.' + name) for name in {modules}]; "
        "heavy = {'torch', 'transformers', 'starlette'} & set(sys.modules); "
        "sys.exit(', '.join(heavy) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_no_module_has_a_meaningless_name() -> None:
    assert not {path.name for path in MODULES} & {"utils", "util", "common", "helpers", "misc"}


def test_importing_mainstem_needs_numpy_only() -> None:
    code = (
        "import sys, mainstem; "
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'cyclopts', 'rich', 'msgspec'} & set(sys.modules); "
        "sys.exit(', '.join(heavy) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
