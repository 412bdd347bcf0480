"""Fixtures that several test files share, and the rules for a run as a whole: its deadlines and its skips."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

# For PyTorch, which is imported later, here and in processes that tests start. Workers share the cores: threads that
# spin while they wait for each other took three quarters of the CPU time of some files.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Without compiled files each worker rewrites all tests, and each process that they start compiles the package.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

import pytest
from machine import DEVICE, patience

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/ and simulator/ are not part of the package

from skips import Skips

from mainstem.errors import ModelNotFound

with suppress(ImportError):  # a machine with a GPU has no more than what its tests need
    from hypothesis import settings

    # No deadline: a busy machine takes long, and nothing is wrong.
    settings.register_profile("by_no_clock", deadline=None, max_examples=50)
    settings.load_profile("by_no_clock")

pytest.register_assert_rewrite("rigs")  # a check of a rig that fails shows its values, as in a test


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Scales the timeout of each test to this machine, watches skips, and has kernels of Triton interpreted."""
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported
    elif not _has_gpu():
        raise pytest.UsageError(f"MAINSTEM_GPU_DEVICE is {DEVICE}, and PyTorch finds no GPU")
    if config.option.timeout is None:  # a worker inherits it from the process that started it
        config.option.timeout = patience(float(config.getini("timeout")))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(config.rootpath / ".pytest_cache" / "left-out"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while tests are collected, and never looks at them again: there are millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Makes the tests of heavy lanes slow: where a lane's environment is there, a quick run leaves them to the lane."""
    for item in items:
        if any("make test-" in mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")):
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Records what passed on a GPU."""
    if DEVICE != "cpu":
        from bench.gpu import record_tests

        terminalreporter.line(f"written to {record_tests(DEVICE, terminalreporter.stats)}")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """Loads the real default model in float32; skips the test, with the reason, where it is not available."""
    from mainstem.runtime.models.loading import load_model

    try:
        return load_model(dtype="float32")
    except ModelNotFound as error:
        pytest.skip(str(error))


@pytest.fixture
def little_garbage() -> None:
    """Limits garbage collection to new objects, from now on: with PyTorch imported a full one takes a second."""
    gc.freeze()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limits PyTorch to one thread: tiny tensors gain nothing from more, and on busy cores they cost minutes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["plain", "avx2", "avx512", "avx512_bf16", "amx"])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each set of instructions that the machine has."""
    from mainstem import _core

    best = _core.instructions()
    _core.limit_instructions(request.param)
    try:
        if _core.instructions() != request.param:
            pytest.skip("the machine does not have these instructions")
        yield
    finally:
        _core.limit_instructions(best)


@pytest.fixture
def tiny_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the file store rewrite its index and grow its file every few calls."""
    from mainstem.storage.file import backend, index
    from mainstem.storage.file.space import GRAIN_BYTES

    monkeypatch.setattr(index, "SLACK_RECORDS", 6)
    monkeypatch.setattr(backend, "STEP_BYTES", 4 * GRAIN_BYTES)


@pytest.fixture(scope="module")
def s3_credentials() -> Iterator[None]:
    """Sets the credentials of S3 clients, which they find in the environment."""
    from rigs.servers import S3_CREDENTIALS

    with pytest.MonkeyPatch.context() as patch:
        for name, value in S3_CREDENTIALS.items():
            patch.setenv(name, value)
        yield
