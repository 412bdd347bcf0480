"""A server on a free port in this process, for official clients that are used unchanged, and events as such clients
read them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import uvicorn
from machine import eventually
from starlette.types import ASGIApp

from mainstem.server.access.origins import reach_of
from mainstem.server.app import create_app
from mainstem.server.serving import bind
from mainstem.settings.server import ServerConfig


@contextmanager
def running(app: ASGIApp, settings: ServerConfig) -> Iterator[str]:
    """Serves an application, and yields the URL of the server, without a path."""
    with bind(settings) as listener:
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            eventually(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def served(engine: Any, **config: Any) -> AbstractContextManager[str]:
    """Serves an engine; see `running`."""
    settings = ServerConfig(**{"port": 0, "precompute_turns": 0.0, **config})  # tests see what the engine is asked
    return running(create_app(engine, settings, reach=reach_of(settings, settings.host)), settings)


def named_events(response: Any) -> list[dict[str, Any]]:
    """Returns the JSON of every event of a stream; its name is its type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for text in response.text.split("\n\n")[:-1]:
        if text.startswith(":"):
            continue  # a ping of a server that is slow
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
