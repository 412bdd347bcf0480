"""`Calls`: a store that is closed only when no call of it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mainstem.errors import StorageError


class Calls:
    """Counts calls of a store. Most clients crash if they are closed while one runs.

    Args:
        store: for error messages, such as "the mooncake store".
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._running = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Surrounds a call.

        Raises:
            StorageError: the store is closed (cause `closed`).
        """
        with self._changed:
            if self._closed:
                raise StorageError("closed", f"{self._store} is closed")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Rejects new calls and waits for the running ones. Returns True on the first call only."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.wait_for(lambda: not self._running)
        return first
