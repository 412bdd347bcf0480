"""Digests of the files that a model or an adapter is loaded from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mainstem.errors import BadArgument
from mainstem.integrations.files import digest_adapter, digest_files, digest_weights


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


def test_weights_are_named_by_the_content_of_their_files(tmp_path: Path) -> None:
    first = digest_weights(str(write(tmp_path / "first", model_safetensors=b"weights", config_json=b"{}")))
    same = digest_weights(str(write(tmp_path / "same", model_safetensors=b"weights", config_json=b"other")))
    other = digest_weights(str(write(tmp_path / "other", model_safetensors=b"weighty")))
    assert first == same != other
    assert digest_weights(str(tmp_path / "first" / "model.safetensors")) == first


def test_content_that_moves_from_one_file_to_the_next_is_other_content(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", a_bin=b"12", b_bin=b"3")
    before = digest_files(sorted(folder.iterdir()))
    write(folder, a_bin=b"1", b_bin=b"23")
    assert digest_files(sorted(folder.iterdir())) != before


def test_a_model_without_files_of_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model in (str(write(tmp_path / "empty", config_json=b"{}")), "nobody/has-this-model"):
        with pytest.raises(BadArgument, match="no files of weights"):
            digest_weights(model)


def test_an_adapter_that_is_replaced_in_place_has_another_digest(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", adapter_safetensors=b"first")
    before = digest_adapter(str(folder))
    assert digest_adapter(str(folder)) == before
    write(folder, adapter_safetensors=b"newer")
    os.utime(folder / "adapter.safetensors", ns=(1, 1))
    assert digest_adapter(str(folder)) != before
    with pytest.raises(OSError, match="nowhere"):
        digest_adapter(str(tmp_path / "nowhere"))
