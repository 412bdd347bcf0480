"""Imports by name: a missing package is distinguished from a broken one, and `module:name` is found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from mainstem.cache.identity import Identity
from mainstem.errors import BackendUnavailable, BadArgument, UnsupportedModel
from mainstem.events.publisher import Publisher
from mainstem.events.wire import Batch, encode
from mainstem.imports import is_missing, load_object, needs
from mainstem.replay.readers.open import open_trace
from mainstem.settings.replay import TraceOptions
from mainstem.storage import open_backend
from mainstem.tiers.storage.sealer import Sealer

MISSING = ModuleNotFoundError("No module named 'package.part'", name="package.part")


class Failing:
    """A finder that makes the import of a package fail, for a chosen reason."""

    def __init__(self, package: str, error: ImportError) -> None:
        self.package, self.error = package, error

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] == self.package:
            raise self.error
        return None


def fail(patch: pytest.MonkeyPatch, package: str, error: ImportError) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            patch.delitem(sys.modules, name)
    patch.setattr(sys, "meta_path", [Failing(package, error), *sys.meta_path])


def seal() -> None:
    Sealer(Identity("m", "w", "d", "q", "l", "s", "a", "r", "t", "k", 1))


def read_zstd(folder: Path) -> None:
    path = folder / "trace.zst"
    path.write_bytes(bytes.fromhex("28b52ffd"))
    open_trace(path)


def tokenize(folder: Path) -> None:
    path = folder / "trace"
    path.write_text('{"prompt": "a"}')
    open_trace(path, TraceOptions(tokenizer="any"))


USERS: list[tuple[str, Callable[[Path], object]]] = [
    ("redis", lambda _: open_backend("redis://127.0.0.1:1")),
    ("obstore", lambda _: open_backend("s3://bucket")),
    ("xxhash", lambda folder: open_backend(f"file:{folder}/kv?capacity=64MiB")),
    ("aibrix_kvcache", lambda folder: open_backend(f"aibrix:shfs?path={folder}")),
    ("nixl_cu12", lambda folder: open_backend(f"nixl:posix?path={folder}")),
    ("blake3", lambda _: seal()),
    ("zmq", lambda _: Publisher("tcp://127.0.0.1:0")),
    ("zmq", lambda _: open_backend("peer://127.0.0.1:1")),
    ("msgspec", lambda _: encode(Batch(0.0, [], 0))),
    ("zstandard", read_zstd),
    ("transformers", tokenize),
]


@pytest.mark.parametrize(("package", "use"), USERS, ids=[package for package, _ in USERS])
def test_a_package_that_is_broken_is_not_called_missing(
    package: str, use: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for broken in (
        ImportError("cannot import name 'x' from 'y'", name=package),
        ModuleNotFoundError("No module named 'else'", name="else"),
    ):
        with monkeypatch.context() as patch:
            fail(patch, package, broken)
            with pytest.raises(BackendUnavailable, match=f"{package} cannot be imported: {broken}") as caught:
                use(tmp_path)
        assert caught.value.__cause__ is broken


@pytest.mark.parametrize(("package", "use"), USERS, ids=[package for package, _ in USERS])
def test_a_package_that_is_missing_is_named(
    package: str, use: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, package, ModuleNotFoundError(f"No module named {package!r}", name=package))
    with pytest.raises(BackendUnavailable, match=r"(needs?\b|missing).*(pip install|https://)"):
        use(tmp_path)


def test_only_the_package_itself_or_what_is_in_it_counts_as_missing() -> None:
    assert is_missing(MISSING, "package") and is_missing(MISSING, "package.part")
    assert not is_missing(MISSING, "pack") and not is_missing(MISSING, "package.part.below")
    assert not is_missing(ImportError("cannot import name", name="package"), "package")
    assert not is_missing(ModuleNotFoundError("no name is given"), "package")


def test_the_error_is_of_the_kind_that_is_asked_for() -> None:
    with pytest.raises(UnsupportedModel, match=r"^install it$"), needs("package", "install it", UnsupportedModel):
        raise MISSING


# ---------------------------------------------------------------- module:name


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a working directory that is not on the import path, as for a console script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


def test_a_module_in_the_working_directory_is_found(here: Path) -> None:
    (here / "beside_the_caller.py").write_text("import beside_that\nanswer = beside_that.answer")
    (here / "beside_that.py").write_text("answer = 42")
    assert load_object("policy", "beside_the_caller:answer") == 42


def test_what_is_installed_comes_before_the_working_directory(here: Path) -> None:
    (here / "wave.py").write_text("")  # in the standard library, and not imported by the tests
    assert load_object("policy", "wave:Wave_read") is not None


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_module:Rule", "there is no module no_such_module"),
        ("no_such_module.below:Rule", "there is no module no_such_module"),
        ("json.no_such_part:Rule", "there is no module json.no_such_part"),
        ("json:Rule", "json has no Rule"),
        ("needs_another:Rule", "a module that can be imported: ModuleNotFoundError: No module named 'absent_one'"),
        ("fails:Rule", "a module that can be imported: KeyError: 'bucket'"),
        ("no_python:Rule", "a module that can be imported: SyntaxError"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(here: Path, path: str, says: str) -> None:
    (here / "needs_another.py").write_text("import absent_one")
    (here / "fails.py").write_text("{}['bucket']")
    (here / "no_python.py").write_text("def")
    with pytest.raises(BadArgument, match=says) as caught:
        load_object("policy", path)
    assert (caught.value.name, caught.value.value) == ("policy", path)
    assert caught.value.__cause__ is not None
