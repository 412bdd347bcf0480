"""How long a store may take inside another engine, and how much memory its blocks have on their way."""

from __future__ import annotations

import subprocess
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.vllm_interface import vllm_double

from mainstem.errors import BackendUnavailable
from mainstem.integrations import files
from mainstem.integrations.block_transfer import Transfers
from mainstem.integrations.options import Options


def test_a_store_has_a_gibibyte_for_blocks_and_five_seconds_for_a_call() -> None:
    for options in (Options("file:./kv"), Options.read({"storage": "file:./kv"})):
        assert (options.buffer_bytes, options.timeout_s) == (1 << 30, 5.0)


def test_a_store_has_a_minute_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(command: list[str], *, timeout: float, **_: Any) -> None:
        assert timeout == 60.0
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", runs)
    with pytest.raises(BackendUnavailable, match="does not open in 60 s"):
        Options("file:./kv").try_store()


def test_the_digests_of_256_models_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    files._digest_unchanged.cache_clear()
    monkeypatch.setattr(files, "digest_files", lambda given: "digest")
    for number in range(260):
        files._digest_unchanged(((Path("weights"), number, 0),))
    assert files._digest_unchanged.cache_info().currsize == 256
    files._digest_unchanged.cache_clear()


def test_queued_writes_have_half_a_minute_when_an_engine_ends() -> None:
    for transfers in (True, False):
        waits: list[float] = []
        with vllm_double() as module:
            (kind,) = (each for each in vars(module).values() if isinstance(each, type) and "shutdown" in vars(each))
            made = object.__new__(kind)
            one: Any = SimpleNamespace(close=waits.append, counts={}, faults={})
            made._transfers, made._stores = (one, [one]) if transfers else (None, [one, one])
            made.shutdown()
            assert waits == [30.0] * (1 if transfers else 2)
            made.shutdown()
            assert len(waits) == (1 if transfers else 2)


def test_an_engine_gives_way_for_a_millisecond_while_it_waits_for_storage() -> None:
    slept: list[float] = []
    made = object.__new__(Transfers)
    made._sleep = slept.append
    made.pause()
    made._store = SimpleNamespace(clock=lambda: len(slept))
    made._writes, made._reap = deque([1]), lambda: None  # type: ignore[method-assign,list-item,assignment]
    assert not made.drain(5.0)
    assert slept == [0.001] * 6


def test_transformers_looks_every_millisecond_whether_storage_has_answered() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from mainstem.integrations import transformers as module

    (kind,) = (each for each in vars(module).values() if isinstance(each, type) and "_prefetch" in vars(each))
    made, slept = object.__new__(kind), list[float]()
    under_way: Any = SimpleNamespace()
    made._sleep, made._lock, made._clock = slept.append, nullcontext(), lambda: 0.0
    made._cache = SimpleNamespace(poll=lambda now_s: setattr(under_way, "waiting", len(slept) < 3))
    made._tiers = SimpleNamespace(prefetch=lambda tokens, name: under_way)
    made._prefetch([SimpleNamespace(tokens=[1])], None)
    assert slept == [0.001] * 3
