"""What several test files share, and what is asked of a run as a whole: its deadlines, and what it left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import patience

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/ and simulator/ are no part of the package

from skips import Skips

from mainstem.errors import ModelNotFound


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Gives each test as long as this machine needs, and looks at what is skipped."""
    if config.option.timeout is None:  # a worker has it from the process that started it
        config.option.timeout = patience(float(config.getini("timeout")))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips())


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real default model in float32; the test is skipped, with the reason, where it cannot be had."""
    from mainstem.runtime.models import load_model

    try:
        return load_model(dtype="float32")
    except ModelNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and threads that wait for a busy core cost minutes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
