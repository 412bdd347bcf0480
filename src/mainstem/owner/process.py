"""The process of an owner: `mainstem store serve`, or started by a client."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from mainstem.errors import BackendUnavailable
from mainstem.owner.server import Owner
from mainstem.owner.start import Place
from mainstem.settings.owner import OwnerConfig
from mainstem.storage.base import open_backend


def serve(spec: str, config: OwnerConfig, announce: Callable[[Place], None], lock: int | None = None) -> None:
    """Serves a store until SIGTERM or SIGINT, or until it has lingered. The main thread calls it.

    The first signal lets it write what is queued; a second one ends it at once.

    Args:
        spec: the store.
        config: what the owner has.
        announce: called once clients can connect.
        lock: the lock of its place, if it has it already.

    Raises:
        BadArgument: the spec or the path of the socket is invalid.
        BackendUnavailable: there is an owner already, or the store cannot be opened.
        OSError: the socket or the memory cannot be made.
    """
    place = Place.of(spec, config.socket)
    if lock is None and (lock := place.lock()) is None:
        raise BackendUnavailable(f"{place.path} has an owner already, or one that is ending")
    try:
        backend = open_backend(place.spec)
        try:
            owner = Owner(
                place.spec, backend, place.path, config.host_bytes, linger_s=config.linger_s, clock=time.monotonic
            )
        except BaseException:
            backend.close()
            raise
        _stop_on_signals(owner)
        announce(place)
        owner.run()
    finally:
        os.close(lock)


def _stop_on_signals(owner: Owner) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        owner.stop()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
