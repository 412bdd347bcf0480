"""The parts of one server, which its routes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainstem.server.access.api_keys import Access
from mainstem.server.apis.rewriting import Rewriting
from mainstem.server.kept.precompute import Precompute
from mainstem.server.preparation import Preparation
from mainstem.server.run import Pings
from mainstem.server.transport import BodyReader
from mainstem.server.watch.metrics import Metrics
from mainstem.server.watch.recording import Recorder
from mainstem.server.watch.tracing import Tracing
from mainstem.settings.server import ServerConfig

if TYPE_CHECKING:
    from mainstem.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a server.

    Args:
        engine: generates.
        config: the settings of the server.
        access: knows the keys.
        preparation: makes the engine's requests.
        bodies: reads bodies.
        metrics, recorder, tracing: watch.
        precompute: computes next turns; None: off.
        rewriting: applies the rules of prompts.
        pings: of streams.
        clock: returns seconds, monotonic.
        now: returns seconds since the epoch.
        draining: returns whether new requests are refused.
        name_of: returns the name of an owner of prefixes.
    """

    engine: Engine
    config: ServerConfig
    access: Access
    preparation: Preparation
    bodies: BodyReader
    metrics: Metrics
    recorder: Recorder | None
    tracing: Tracing | None
    precompute: Precompute | None
    rewriting: Rewriting
    pings: Pings
    clock: Callable[[], float]
    now: Callable[[], float]
    draining: Callable[[], bool]
    name_of: Callable[[bytes], str]
