"""Opening an engine in one process: on how many threads it computes. `test_tp` opens it in several."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mainstem.runtime.parallel import launch as parallel
from mainstem.settings.engine import ModelConfig


@pytest.fixture
def before() -> Iterator[int]:
    """The number of threads, which is the same afterwards."""
    count = torch.get_num_threads()
    yield count
    torch.set_num_threads(count)


def on_another_thread() -> int:
    """The number of threads that another thread, such as the engine's, computes on."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


@pytest.mark.parametrize("count", [None, 1, 3])
def test_it_loads_and_computes_on_as_many_threads_as_asked_for(
    before: int, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    @contextmanager
    def engine(*arguments: Any, **options: Any) -> Iterator[None]:
        seen.append(on_another_thread())
        yield

    def load(*arguments: Any, **options: Any) -> None:
        seen.append(torch.get_num_threads())

    monkeypatch.setattr(parallel, "load_model", load)
    monkeypatch.setattr(parallel, "Engine", engine)
    with parallel.open_engine("a-model", ModelConfig(threads=count)):
        assert seen == [count or before] * 2
    assert torch.get_num_threads() == on_another_thread() == before


def test_threads_are_as_before_after_a_failure(before: int) -> None:
    def fail() -> None:
        with parallel.computing_on(before + 1):
            assert torch.get_num_threads() == before + 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.get_num_threads() == before
