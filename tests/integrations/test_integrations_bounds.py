"""How long a store may take inside another engine, and how much memory its blocks have on their way."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from mainstem.errors import BackendUnavailable
from mainstem.integrations import files
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
