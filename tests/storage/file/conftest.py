"""Every small store is sound and closed when its test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rigs.file_store import MADE


@pytest.fixture(autouse=True)
def _sound_at_the_end() -> Iterator[None]:
    MADE.clear()
    yield
    for store in MADE:
        store.check()
        store.close()
