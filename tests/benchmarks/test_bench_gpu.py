"""The benchmark of a GPU, rehearsed on the CPU: every part has rows, and one that fails is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import REHEARSAL, Bench, hardware, record_tests, run
from bench.report import Report
from tests.rigs.interpreted import triton_attention

pytestmark = pytest.mark.usefixtures("one_thread")


def rehearse(**parts: Any) -> tuple[Report, list[int]]:
    report = Report("gpu", "2026-01-01", quick=True, progress=lambda line: None)
    saved: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        if parts:
            patch.setattr(Bench, "parts", property(lambda self: parts))
        run(REHEARSAL, report, lambda: saved.append(len(report.more)), triton_attention())
    return report, saved


@pytest.mark.slow
def test_each_part_has_rows_and_is_saved_when_it_ends() -> None:
    report, saved = rehearse()
    assert report.failures == []
    parts = list(Bench(REHEARSAL, triton_attention()).parts)
    assert list(report.more) == ["hardware", *parts] and all(report.more.values())
    assert saved == list(range(2, 2 + len(parts)))
    assert {row["share"] / row["goal"] >= 1 for row in report.more["copies"] if row["met"]} <= {True}
    assert [row["sharers"] for row in report.more["folding"]] == [1, 2]
    assert all("TritonAttention_s" in row for row in report.more["attention"])
    assert report.more["hardware"] == [hardware("cpu")]


def test_what_tests_did_is_recorded_with_the_name_of_the_hardware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.gpu.hardware", lambda device: {"name": "NVIDIA H100 80GB"})
    outcomes = {"passed": [1, 2], "failed": [SimpleNamespace(nodeid="tests/test_a.py::test_b")]}
    path = record_tests("cuda", outcomes, tmp_path)
    assert path.name == "gpu-tests-nvidia-h100-80gb.json"
    record = json.loads(path.read_text())
    assert record["rows"] == [{"passed": 2, "failed": 1, "error": 0, "skipped": 0}]
    assert record["notes"] == ["tests/test_a.py::test_b"]


@pytest.mark.slow
def test_it_needs_none_of_the_packages_that_a_machine_with_a_gpu_may_lack(tmp_path: Path) -> None:
    """Not even Triton: attention is then computed by PyTorch."""
    absent = ["blake3", "msgspec", "cyclopts", "platformdirs", "gguf", "starlette", "zmq", "xxhash", "triton", "peft"]
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({absent}))
sys.argv[1:] = ["--dry-run", "--out", {str(tmp_path)!r}]
runpy.run_module("bench.gpu", run_name="__main__")
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "rehearsal-gpu.json").read_text())["throughput"]


def test_a_part_that_fails_is_named_and_the_others_run() -> None:
    def fails() -> Iterator[dict[str, Any]]:
        yield {"first": 1.0}
        raise RuntimeError("an illegal memory access")

    report, _ = rehearse(broken=fails, whole=lambda: [{"second": 2.0}])
    assert report.failures == ["broken: RuntimeError: an illegal memory access"]
    assert report.more["broken"] == [{"first": 1.0}] and report.more["whole"] == [{"second": 2.0}]
    assert report.notes == ["failed: broken: RuntimeError: an illegal memory access"]
