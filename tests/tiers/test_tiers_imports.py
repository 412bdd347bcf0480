"""The tiers can be imported, and used without storage, with NumPy alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mainstem.tiers

MODULES = sorted(path.stem for path in Path(mainstem.tiers.__file__).parent.glob("*.py") if path.stem != "__init__")

# Makes `blake3`, `torch` and others appear not to be installed.
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"blake3", "torch", "transformers", "redis", "obstore"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_the_tiers_needs_numpy_only(module: str) -> None:
    run(f"import mainstem.tiers.{module}")


def test_the_host_tier_works_without_storage() -> None:
    code = f"""
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from rigs.ghost_memory import GhostMemory
import mainstem
from mainstem.settings.engine import HostPolicy
from mainstem.tiers.host.tier import HostTier
cache = mainstem.PrefixCache(4, 2, host=HostTier(GhostMemory([4], [8]), HostPolicy(load_min_tokens=1)))
for tokens in ([1, 1, 1, 1, 1], [2, 2, 2, 2, 2], [3, 3, 3, 3, 3], [1, 1, 1, 1, 1]):
    with cache.lease(tokens) as lease:
        load = cache.tiers.load(lease)
        if load is not None:
            load.wait()
        hit = lease.hit
        lease.reserve(5 - lease.reserved)
        lease.publish(4)
    cache.tiers.poll()
    cache.tiers.poll()
cache.check()
print(hit)
"""
    assert run(code).split() == ["4"]
