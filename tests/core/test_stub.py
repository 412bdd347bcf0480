"""The type stub of the core is the one that nanobind generates from the bindings (`make stub`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_stub_of_the_core_is_up_to_date(tmp_path: Path) -> None:
    fresh = tmp_path / "_core.pyi"
    subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "mainstem._core", "-o", str(fresh)], check=True
    )
    kept = Path(__file__).parents[2] / "src" / "mainstem" / "_core.pyi"
    assert kept.read_text() == fresh.read_text()
