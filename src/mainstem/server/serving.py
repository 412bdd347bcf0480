"""Serves the application over a socket until a signal stops it, and drains the engine then."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from mainstem.errors import EngineClosed
from mainstem.here import listen
from mainstem.server.access.origins import reach_of
from mainstem.server.access.public_prefixes import parse_public_prefixes
from mainstem.server.app import create_app
from mainstem.server.watch.recording import Recorder, check_recording
from mainstem.server.watch.tracing import Tracing, check_installed
from mainstem.settings.server import RecordConfig, ServerConfig
from mainstem.units import counted

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.datastructures import State

    from mainstem.runtime.engine import Engine

log = logging.getLogger(__name__)

_GRACE_S = 5  # for the ends of responses, after the engine is drained


def bind(config: ServerConfig) -> socket.socket:
    """Binds the port, and checks what the settings need of this machine, before a model is loaded, which takes long.

    Connections are refused until `serve` listens, so no client waits while the model loads.

    Raises:
        BackendUnavailable: the settings ask for what is not installed.
        BadArgument: the address cannot be bound, the recording not written, or a file not read; it names the setting.
    """
    if config.otlp is not None:
        check_installed()
    if config.record.record is not None:
        check_recording(config.record)
    if config.public_prefix is not None:
        parse_public_prefixes(config.public_prefix)
    return listen(config.host, config.port)


def serve(engine: Engine, config: ServerConfig, listener: socket.socket) -> None:
    """Serves until a signal stops it, then returns.

    SIGTERM or SIGINT drains: new requests get 503, running ones have `drain_timeout_s` to finish, and those that still
    run then are cancelled. A second signal stops at once.

    Args:
        engine: the engine that generates; the caller closes it.
        config: the settings.
        listener: the socket from `bind`; it is closed at the end.

    Raises:
        BadArgument: `config.record` names a file that is not a recording, or that another server writes to.
        EngineClosed: the engine failed; another process has to take over.
        OSError: another server started to listen on the port after `bind`, or the recording cannot be written.
    """
    with listener, _recorder(engine, config.record) as recorder, _tracing(engine, config) as tracing:
        reach = reach_of(config, config.host)
        app = create_app(engine, config, recorder=recorder, tracing=tracing, reach=reach)
        _serve(engine, config, listener, app)
    if engine.failure is not None:
        raise EngineClosed(f"the engine failed: {type(engine.failure).__name__}: {engine.failure}")


def _recorder(engine: Engine, config: RecordConfig) -> AbstractContextManager[Recorder | None]:
    if config.record is None:
        return nullcontext()
    return Recorder(config, engine.name, lambda tokens: str(engine.tokenizer.decode(list(tokens))))


def _tracing(engine: Engine, config: ServerConfig) -> AbstractContextManager[Tracing | None]:
    if config.otlp is None:
        return nullcontext()
    return closing(Tracing(config.otlp, _model_name(engine, config)))


def _serve(engine: Engine, config: ServerConfig, listener: socket.socket, app: Starlette) -> None:
    # Without a log configuration of its own, uvicorn logs where the program does.
    settings = uvicorn.Config(
        app, lifespan="on", log_config=None, server_header=False, timeout_graceful_shutdown=_GRACE_S
    )
    listener.listen()
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{listener.getsockname()[1]}/v1"
    log.info("%s is served at %s: %s", _model_name(engine, config), url, _described(engine))
    _DrainingServer(settings, engine, app.state, config.drain_timeout_s).run(sockets=[listener])


def _model_name(engine: Engine, config: ServerConfig) -> str:
    return next(iter(config.served_model_name), engine.name)


def _described(engine: Engine) -> str:
    import torch  # here, because `create_app` does not need it

    dtype, stats = str(engine.dtype).removeprefix("torch."), engine.stats()
    first, *others = _pools({name: pool.total for name, pool in stats.cache.pools.items()})
    device = ", ".join([f"{first} for {engine.pages * engine.config.page_size} tokens", *others])
    host = ""
    if stats.tiers is not None:
        totals = {name: pool.total for name, pool in stats.tiers.host_pools.items()}
        host = f", on the host {', '.join(_pools(totals))}"
    store = "" if engine.config.tiers.storage is None else ", with storage"
    return f"{dtype}, {counted(torch.get_num_threads(), 'thread')}, {device}{host}{store}"


def _pools(totals: Mapping[str, int]) -> list[str]:
    """Returns the size of each component's pool in words."""
    words = {"full": "KV pages", "state": "state slots"}
    return [f"{total} {words.get(name, f'{name} pages')}" for name, total in totals.items()]


class _DrainingServer(uvicorn.Server):
    """A uvicorn server that stops when the engine fails, and drains the engine on a signal.

    The socket stays open while the engine drains, so that clients receive 503.
    """

    def __init__(self, settings: uvicorn.Config, engine: Engine, state: State, timeout_s: float) -> None:
        super().__init__(settings)
        self._engine = engine
        self._state = state
        self._timeout_s = timeout_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The base class would raise the signal again at the end, but a drained server exits with 0.
        if self._state.draining:
            self.should_exit = self.force_exit = True
            return
        self._state.draining = True
        threading.Thread(target=self._drain, name="mainstem-drain", daemon=True).start()

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to stop; uvicorn calls this ten times a second."""
        return await super().on_tick(counter) or self._engine.failure is not None

    def _drain(self) -> None:
        log.info("draining: running requests have %g s to finish", self._timeout_s)
        try:
            self._state.generating.give_way()
            if not self._engine.drain(self._timeout_s):
                log.warning("cancelling the requests that still run after %g s", self._timeout_s)
                self._engine.close()
        finally:
            self.should_exit = True
