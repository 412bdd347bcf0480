"""What several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mainstem.errors import ModelNotFound


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
