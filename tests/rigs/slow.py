"""Cases of a test of which `make test` runs a few, and `make test-all` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[str], *quick: str) -> list[Any]:
    """Returns the cases of a test, as `parametrize` takes them: all but the quick ones are slow.

    Args:
        cases: all of them.
        quick: those that differ most, and show what is wrong with all.
    """
    names = list(cases)
    unknown = sorted(set(quick) - set(names))
    assert quick and not unknown, f"no such cases: {unknown}"
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
