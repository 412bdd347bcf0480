"""The layers of docs/design.md, section 1: a lower layer never imports a higher one, not even lazily or for typing.

The folders of the core are layers, too. Functions and files stay small, in Python and in the core, and its classes.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from scripts.house import cpp_classes, cpp_functions, python_functions

PACKAGE = Path(__file__).parents[2] / "src" / "mainstem"

# Lowest first; each module belongs to the first layer with a prefix of its name.
LAYERS = [
    ("core", ["errors", "here", "imports", "metric", "share", "terminal", "units", "_core"]),
    (
        "rules",
        [f"cache.{name}" for name in ("keys", "namespaces", "quotas", "components", "policies", "pool", "identity")],
    ),
    ("prompt_rules", ["prompt_rules"]),
    ("settings", ["settings"]),
    ("tree", ["cache.explain", "cache.tree"]),
    ("events", ["events"]),
    ("storage", ["storage"]),
    ("tiers", ["tiers"]),
    ("owner", ["owner"]),
    ("cache", ["cache", "batch.order", "batch.plan"]),
    ("replay", ["replay"]),
    ("watch", ["watch"]),
    ("batch", [f"batch.{name}" for name in ("answers", "lines", "ordering", "runner")]),
    ("runtime", ["runtime"]),
    ("integrations", ["integrations", "hf"]),
    ("server", ["server"]),
    ("fleet", ["fleet"]),
    ("cli", ["batch", "cli", "demo", "__main__"]),
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


def test_a_lower_layer_never_imports_a_higher_one() -> None:
    names = {path: ".".join(path.parts).removesuffix(".__init__") for path in MODULES}
    assert [
        f"{name} imports {imported}"
        for path, name in names.items()
        for imported in imports(PACKAGE / path.with_suffix(".py"))
        if layer(imported) > layer(name)
    ] == []


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


PUBLIC = {"_asdict", "_make", "_replace"}
"""Methods of named tuples; the underscore keeps them apart from the fields."""
FOREIGN = {
    "integrations/transformers.py": {"_prepare_generation_config"},  # generate() merges its settings nowhere else
    # transformers has no other way
    "runtime/attention/paged.py": {"_attn_implementation", "_can_set_attn_implementation"},
    "runtime/kernels/exchanges.py": {"_parameters"},  # the attributes of a module are found ten times as slowly
    "runtime/kernels/bare_weights.py": {"_grouped_mm"},  # PyTorch 2.9 has no other name for it
    "runtime/parallel/launch.py": {"_exit"},  # the only end of a process that waits for nothing
    "runtime/models/refusals.py": {"_can_set_attn_implementation"},  # the same
    # what a recording that failed leaves open, PyTorch 2.11 closes nowhere else
    "runtime/kernels/step_graphs.py": {"_C", "_cuda_endAllocateToPool", "_cuda_releasePool"},
    "runtime/text/vision.py": {"_merge_kwargs", "_process_images"},  # the processor, for one image at a time
    "runtime/models/weights.py": {"_forward_pre_hooks", "_version"},  # PyTorch has no other names for them
    "storage/vendors/redis.py": {"_sock"},  # redis-py reads no reply into a buffer of its caller
}
"""What modules read of objects of other packages."""


OF_ANOTHER = re.compile(r"(?<!\bself)(?<!\bcls)\._")
"""Texts that such an expression has; few modules need be parsed."""


def reads_of_underscores(source: str) -> list[str]:
    """Returns the expressions `x._name` in which x is neither `self` nor `cls` nor `super()`."""
    found: list[str] = []
    if not OF_ANOTHER.search(source):
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and ast.unparse(node.value) != "super()" and node.attr not in PUBLIC:
                found.append(ast.unparse(node))
    return found


def test_reads_of_underscores_are_found() -> None:
    source = "self._a; cls._b; super()._c; pair._replace(x=1); x.__class__; self._tiers._x; other._y = 1; f()._z"
    assert reads_of_underscores(source) == ["self._tiers._x", "other._y", "f()._z"]


def test_no_object_reads_the_underscore_of_another() -> None:
    paths = [path.with_suffix(".py") for path in MODULES]
    read = {path.as_posix(): reads_of_underscores((PACKAGE / path).read_text()) for path in paths}
    assert {
        path: names for path, each in read.items() if (names := {name.rpartition(".")[2] for name in each})
    } == FOREIGN


def test_importing_mainstem_needs_numpy_only() -> None:
    code = (
        "import sys, mainstem; "
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'cyclopts', 'rich', 'msgspec'} & set(sys.modules); "
        "sys.exit(', '.join(heavy) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- sizes

FILE_LINES, FUNCTION_LINES = 800, 60


def test_files_and_functions_of_the_package_fit_a_screen() -> None:
    too_long: list[str] = []
    for path in MODULES:
        text = (PACKAGE / path.with_suffix(".py")).read_text()
        too_long += [f"{path}: {lines} lines"] if (lines := len(text.splitlines())) > FILE_LINES else []
        if is_long(text):
            too_long += [f"{path}: {name}: {lines}" for name, lines in python_functions(text) if lines > FUNCTION_LINES]
    assert too_long == []


def is_long(text: str) -> bool:
    """Whether a function is too long with its comments, without which lines are counted slowly."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return any((node.end_lineno or 0) + 1 - node.lineno > FUNCTION_LINES for node in functions)


# ---------------------------------------------------------------- the folders of the core

CSRC = PACKAGE / "core" / "csrc"
FOLDERS = ["structure", "residency", "eviction", "tree", "lease", "routing", "replay", "kernels", "python"]
"""Lowest first, as in docs/design.md."""
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp"))


def test_a_folder_of_the_core_includes_only_those_below_it() -> None:
    wrong: list[str] = []
    for path in SOURCES:
        folder = path.relative_to(CSRC).parts[0]
        included = set(re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE))
        wrong += [f"{path}: {each}" for each in included - {*FOLDERS[: FOLDERS.index(folder) + 1]}]
    assert wrong == []


def test_files_and_functions_of_the_core_fit_a_screen() -> None:
    too_long: list[str] = []
    for path in SOURCES:
        text = path.read_text()
        too_long += [f"{path}: {lines} lines"] if (lines := len(text.splitlines())) > FILE_LINES else []
        too_long += [f"{path}: {name}: {lines}" for name, lines in cpp_functions(text) if lines > FUNCTION_LINES]
    assert too_long == []


def test_no_class_of_the_core_has_more_than_25_private_functions() -> None:
    private = {name: count for path in SOURCES for name, _, count in cpp_classes(path.read_text())}
    assert {name: count for name, count in private.items() if count > 25} == {}
