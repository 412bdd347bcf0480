"""The folder of files and batches: what is on the disk when, what counts, and what is kept for how long."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_batches import begin, line, serving, upload

from mainstem.server.batches.batches import Batches
from mainstem.server.batches.shelf import BatchObject, FileObject, Shelf


def file_object(id: str = "file-1", **given: Any) -> FileObject:
    fields = {"bytes": 0, "created_at": 0, "expires_at": 100, "filename": "f", "purpose": "batch", **given}
    return FileObject(id=id, **fields)


def batch_object(**given: Any) -> BatchObject:
    fields = {"endpoint": "/v1/score", "input_file_id": "file-1", "completion_window": "24h", "created_at": 0}
    return BatchObject(id="batch_1", expires_at=86400, **fields, **given)


def test_what_has_its_name_is_on_the_disk_and_then_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, named = list[int](), list[str]()
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def sync(file: int) -> None:
        fsync(file)
        synced.append(os.fstat(file).st_ino)
        if os.path.isdir(f"/proc/self/fd/{file}"):
            named.clear()

    def named_only_if_synced(move: Any) -> Any:
        def moved(source: Any, target: Any) -> None:
            assert os.stat(source).st_ino in synced, f"{source} is not on the disk"
            move(source, target)
            named.append(str(target))

        return moved

    with serving(tmp_path) as server:
        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "rename", named_only_if_synced(rename))
        monkeypatch.setattr(os, "replace", named_only_if_synced(replace))
        file = upload(server, line("a"))
        assert file.status_code == 200 and not named, "their names are on the disk before the client knows the file"
        assert begin(server, file.json()["id"]).status_code == 200
        assert synced


def test_a_file_is_kept_while_a_batch_needs_it(tmp_path: Path) -> None:
    now = [0.0]
    kept = Shelf(tmp_path, 1 << 20, 100.0, lambda: now[0])
    kept.put("me", file_object())
    kept.put("me", batch_object())
    now[0] = 1000.0
    assert kept.get("me", "file-1", FileObject) is not None
    kept.put("me", batch_object(completed_at=1000))
    now[0] += 1
    assert kept.get("me", "file-1", FileObject) is None
    assert kept.get("me", "batch_1", BatchObject) is not None
    kept.check()


def test_answers_without_a_record_count_after_a_restart(tmp_path: Path) -> None:
    first = Shelf(tmp_path, 1 << 20, 100.0, lambda: 0.0)
    first.put("me", batch_object())
    first.path("file-1-output").write_bytes(bytes(1000))
    first.path("file-of-nobody").write_bytes(b"x")
    (tmp_path / "batch_1.part").write_bytes(b"half of a record")
    first.close()
    again = Shelf(tmp_path, 1 << 20, 100.0, lambda: 0.0)
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "lock", "batch_1.json", "file-1-output.jsonl"}
    most = next(size for size in range(1 << 20, 0, -1) if again.reserve("me", "file-2", size))
    again.forget("me", "file-1-output")
    assert again.reserve("me", "file-2", most + 1000)
    again.check()


def test_a_batch_that_has_ended_meanwhile_is_not_cancelled(tmp_path: Path) -> None:
    kept = Shelf(tmp_path, 1 << 20, 100.0, lambda: 0.0)
    ended = batch_object(status="completed", completed_at=5)
    kept.put("me", ended)
    Batches(kept, lambda owner: None, lambda: 9.0, lambda: False, 1).cancel("me", ended)
    assert (ended.status, ended.cancelling_at) == ("completed", None)
