"""Nothing is held by what tests of the tiers drive by hand, once everything has ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rigs.hand_driven import MADE


@pytest.fixture(autouse=True)
def _nothing_held_at_the_end() -> Iterator[None]:
    MADE.clear()
    yield
    for rig in MADE:
        rig.close()
