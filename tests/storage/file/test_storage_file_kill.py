"""The file store and SIGKILL: a writing process is killed at random moments, and its store is then read.

Each block of a value contains its key and version. The writer notes in a shared map which version of each key it is
about to put and which put has returned, so that the reader can distinguish the last value from older ones. One store
survives all kills. MAINSTEM_KILLS sets their number, also for `python tests/storage/file/test_storage_file_kill.py`.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import signal
import struct
import time
from collections import Counter
from pathlib import Path

from mainstem.storage.base import ABSENT
from mainstem.storage.file import FileBackend, index

KILLS = int(os.environ.get("MAINSTEM_KILLS", "10"))
KEYS = [at.to_bytes(32, "big") for at in range(150)]
CAPACITY_BYTES = 3 << 20
BLOCK = struct.Struct("<QQ48x")
NOTE = struct.Struct("<QQ")  # per key: the version being put, the version whose put returned (0: deleted)


def page(at: int, version: int) -> memoryview:
    """Makes a value of some KiB. The version determines its length; every 64 bytes contain its name."""
    return memoryview(BLOCK.pack(at, version) * (64 + 37 * (version % 13)))


def write_for_ever(root: str, notes_path: str, seed: int) -> None:
    """Puts, deletes and reads at random until killed."""
    index.SLACK_RECORDS = 40  # so that the index is often rewritten
    rng = random.Random(seed)
    with open(notes_path, "r+b") as opened:
        notes = mmap.mmap(opened.fileno(), 0)
    store = FileBackend(root, CAPACITY_BYTES)
    version = seed << 32
    while True:
        some = rng.sample(range(len(KEYS)), rng.randint(1, 12))
        gone = rng.random() < 0.15
        version += 1
        for at in some:
            struct.pack_into("<Q", notes, at * NOTE.size, 0 if gone else version)
        if gone:
            store.delete([KEYS[at] for at in some])
        else:
            store.put([KEYS[at] for at in some], [page(at, version) for at in some])
        for at in some:
            struct.pack_into("<Q", notes, at * NOTE.size + 8, 0 if gone else version)


def verify(root: Path, notes: bytes) -> list[int]:
    """Opens the store. Every value must be the last one put, or the one that was being put.

    Returns:
        For each key the version found; 0: none.
    """
    found = []
    store = FileBackend(root, CAPACITY_BYTES)
    store.check()
    for at, key in enumerate(KEYS):
        (length,) = store.get([key], [memoryview(bytearray())])
        buffer = memoryview(bytearray(max(length, 0)))
        if length == ABSENT or store.get([key], [buffer]) == [ABSENT]:
            found.append(0)
            continue
        allowed = {version for version in NOTE.unpack_from(notes, at * NOTE.size) if version}
        found += [version for version in allowed if buffer == page(at, version)]
        assert len(found) == at + 1, f"key {at} holds none of the versions {allowed}"
    store.check()
    store.close()
    return found


def kill_many(root: Path, kills: int, seed: int = 0) -> Counter[str]:
    """Starts, kills and verifies. Returns counts of the results."""
    rng = random.Random(seed)
    notes = root.with_name("notes")
    notes.write_bytes(bytes(NOTE.size * len(KEYS)))
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["mainstem.storage.file"])
    seen: Counter[str] = Counter()
    for number in range(1, kills + 1):
        before = notes.read_bytes()
        child = processes.Process(target=write_for_ever, args=(str(root), str(notes), number), daemon=True)
        child.start()
        while notes.read_bytes() == before and child.is_alive():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.12))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL, "the writer failed on its own"
        after = notes.read_bytes()
        found = verify(root, after)
        seen["interrupted"] += any(begun != done for begun, done in NOTE.iter_unpack(after))
        seen["absent"] += found.count(0)
        seen["whole"] += len(found) - found.count(0)
        notes.write_bytes(b"".join(NOTE.pack(version, version) for version in found))  # no older ones from now on
    return seen


def test_a_writer_killed_at_any_moment_leaves_whole_values_or_none(tmp_path: Path) -> None:
    seen = kill_many(tmp_path / "store", KILLS)
    assert seen["whole"] > 20 * KILLS and seen["absent"] > 20 * KILLS, seen
    assert seen["interrupted"] > KILLS // 4, seen


if __name__ == "__main__":
    import tempfile

    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        print(f"{KILLS} kills:", dict(kill_many(Path(folder) / "store", KILLS)), f"{time.monotonic() - start:.0f} s")
